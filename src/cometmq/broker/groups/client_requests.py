"""Handlers of clients' heartbeats, unregistrations, subscription checks and queue locks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from cometmq import logs
from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.times import awake_ms, mono_ms
from cometmq.broker.base.turns import encoded, slices
from cometmq.broker.filters.sql_filters import NotCompiled, SqlFilters
from cometmq.broker.groups import clients
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.groups.subscriptions import is_tag_type
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError, SqlError
from cometmq.message import MessageQueue
from cometmq.protocol import bodies, codes
from cometmq.protocol.bodies.subscriptions import describe_differences, differences, setting_differences
from cometmq.protocol.codes import RequestCode, ResponseCode, handles, has_retry_topic, is_legal_name
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ConsumerGroupRequestHeader, UnregisterClientRequestHeader
from cometmq.remoting import Connection
from cometmq.store import Clock, MessageStore

# The maximum number of groups and subscriptions in one heartbeat. Decoding each takes 2 µs, and the limit
# bounds that time, so groups and subscriptions are counted before they are decoded.
MAX_OBJECTS = 50_000
MAX_LANGUAGE_LENGTH = 32  # Maximum length of the text that names a client's language
GRPC_TYPE = "grpcType"
"""The ext field of heartbeats in which the endpoint for 5.x clients names the type of its client."""
_CONSUMER_TYPES = ("PUSH_CONSUMER", "SIMPLE_CONSUMER", "PULL_CONSUMER")
GRPC_TYPES = frozenset({"PRODUCER", *_CONSUMER_TYPES, *(f"LITE_{each}" for each in _CONSUMER_TYPES)})
MAX_BROKER_NAME_LENGTH = 255  # Maximum number of characters of a locked queue's broker name


log = logs.logger(__name__)

MAX_KEPT = 1_000  # Maximum number of digests of logged differences, and of groups that wait for a log line
MAX_REPEATED_CHECKS = 10  # Maximum number of waiting groups that one call of `log_pending` processes


class Disagreements(msgspec.Struct, eq=False):
    """Logs each difference between the subscriptions or settings of a group's members once.

    The object stores the digests of up to `MAX_KEPT` logged differences, and up to `MAX_KEPT` groups whose
    differences could not be logged because of the log's rate limit.
    """

    _logged: dict[bytes, None] = msgspec.field(default_factory=dict)
    _pending: dict[str, None] = msgspec.field(default_factory=dict)
    _log_limit: logs.LogLimiter = msgspec.field(default_factory=logs.LogLimiter)

    def log_differences(self, group: str, members: clients.ConsumerGroup) -> None:
        """Log those differences between a group's members that have not been logged before."""
        found = {
            f"subscriptions of topic {topic}, so messages can be missed": said
            for topic, said in differences(members.wants()).items()
        }
        found |= {f"values of {name}": said for name, said in setting_differences(members.settings()).items()}
        for in_what, said in found.items():
            key = _digest(group, in_what, said)
            if key in self._logged:
                continue
            if not self._log_limit.allows():
                if len(self._pending) < MAX_KEPT:
                    self._pending[group] = None
                return
            self._logged[key] = None
            if len(self._logged) > MAX_KEPT:
                del self._logged[next(iter(self._logged))]
            log.warning(
                "members of group %s have different %s: %s", group, in_what, describe_differences(said)
            )

    def log_pending(self, groups: Mapping[str, clients.ConsumerGroup]) -> None:
        """Log the differences that the log's rate limit has suppressed, if they still exist."""
        for group in list(islice(self._pending, MAX_REPEATED_CHECKS)):
            del self._pending[group]
            if group in groups:
                self.log_differences(group, groups[group])


def _digest(group: str, in_what: str, values: Iterable[str]) -> bytes:
    """Return a digest of a difference: the values may be long expressions. Their order does not matter."""
    said = repr((group, in_what, sorted(values)))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


class ClientProcessor(msgspec.Struct, eq=False):
    """Handles requests of clients about themselves, and notifies groups whose membership changes."""

    clock: Clock
    store: MessageStore
    tables: DurableTables
    producers: clients.ProducerTable
    consumers: clients.ConsumerTable
    locks: QueueLocks
    notices: clients.GroupNotices
    filters: SqlFilters
    disagreements: Disagreements = msgspec.field(default_factory=Disagreements)

    @handles(RequestCode.HEART_BEAT)
    def heart_beat(self, connection: Connection, frame: Frame) -> Frame:
        """Register the groups and subscriptions that a client's heartbeat contains."""
        objects = bytes(frame.body).count(b"{")
        if objects > MAX_OBJECTS:
            raise CommandError.failed(
                f"the heartbeat has more than {MAX_OBJECTS} groups and subscriptions: {objects}"
            )
        data = bodies.HeartbeatData.decode(frame.body)
        _check_names(data, frame.version)
        weights = self._check(connection, data)
        now_ms = awake_ms(self.clock)
        grpc_type = (frame.ext or {}).get(GRPC_TYPE, "")
        client = (
            *(data.client_id, str(frame.language)[:MAX_LANGUAGE_LENGTH], frame.version),
            grpc_type if grpc_type in GRPC_TYPES else "",
        )
        for consumer in data.consumer_data_set:
            self._consumer(connection, client, consumer, now_ms, weights[consumer.group_name])
        for producer in data.producer_data_set:
            self.producers.join(producer.group_name, connection, client, now_ms)
        return frame.response()

    def _check(self, connection: Connection, data: bodies.HeartbeatData) -> dict[str, int]:
        """Return the weight of each consumer group. Raises CommandError if the connection exceeds a limit."""
        _check_client_id(data.client_id)
        for consumer in data.consumer_data_set:
            if len(consumer.subscription_data_set) > clients.MAX_TOPICS_PER_GROUP:
                count, limit = len(consumer.subscription_data_set), clients.MAX_TOPICS_PER_GROUP
                raise CommandError.failed(
                    f"group {consumer.group_name} has more than {limit} subscriptions: {count}"
                )
        weights = {each.group_name: _weight_of(each) for each in data.consumer_data_set}
        producers = {each.group_name: 1 for each in data.producer_data_set}
        in_all = max(
            len(data.consumer_data_set),
            len(data.producer_data_set),
            self.consumers.weight_with(connection, weights),
            self.producers.weight_with(connection, producers),
        )
        if in_all > clients.MAX_GROUPS_PER_CONNECTION:
            raise CommandError.failed(
                f"the connection has {in_all} consumer and producer groups (groups with long "
                f"subscriptions count several times), at most {clients.MAX_GROUPS_PER_CONNECTION}"
            )
        return weights

    def _consumer(
        self,
        connection: Connection,
        client: clients.Client,
        data: bodies.ConsumerData,
        now_ms: int,
        weight: int,
    ) -> None:
        group = data.group_name
        settings = self.tables.groups.find(group)
        if settings is not None and has_retry_topic(group):
            with contextlib.suppress(CommandError):  # A group can consume without its retry topic
                self.tables.topics.ensure_retry(group, settings.retry_queue_nums, data.unit_mode)
        described = (str(data.consume_type), str(data.message_model), str(data.consume_from_where))
        changed = self.consumers.register(
            group, connection, client, described, data.subscription_data_set, now_ms, weight
        )
        if changed:
            self.notices.changed(group)
        # Pull consumers are not compared: each may subscribe only to the topics that it reads itself, so
        # different subscriptions are no error. A gRPC client that pops has no subscriptions at the broker
        # until it has sent its settings.
        compared = data.consume_type == "CONSUME_PASSIVELY" or (
            data.consume_type == clients.POP_TYPE and data.subscription_data_set
        )
        if compared and self.consumers.subscribes(group, connection, data.subscription_data_set):
            self.disagreements.log_differences(group, self.consumers.groups[group])

    @handles(RequestCode.UNREGISTER_CLIENT)
    def unregister_client(self, connection: Connection, frame: Frame) -> Frame:
        """Remove a client from the groups that its request names."""
        header = frame.header(UnregisterClientRequestHeader)
        if header.producer_group:
            self.producers.unregister(header.producer_group, connection)
        if header.consumer_group and self.consumers.unregister(header.consumer_group, connection):
            self.notices.changed(header.consumer_group)
        return frame.response(ext={})

    def closed(self, connection: Connection) -> None:
        """Remove the clients of a closed connection, and notify their groups."""
        self.producers.channel_closed(connection)
        for group in self.consumers.channel_closed(connection):
            self.notices.changed(group)

    def expire(self) -> None:
        """Close the connections of clients that have been silent for 120 s, and remove expired locks."""
        self.locks.expire(mono_ms(self.clock))
        self.disagreements.log_pending(self.consumers.groups)
        now_ms = awake_ms(self.clock)
        consumers, groups = self.consumers.expire(now_ms)
        producers, _ = self.producers.expire(now_ms)
        for channel in [*consumers, *producers]:
            channel.close()
        for group in groups:
            self.notices.changed(group)

    @handles(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def get_consumer_list_by_group(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the ids of the online members of a consumer group."""
        group = frame.header(ConsumerGroupRequestHeader).consumer_group
        known = self.consumers.groups.get(group)
        if known is None:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}", ext={})
        return frame.response(body=bodies.ConsumerList(consumer_id_list=known.client_ids()).encode())

    @handles(RequestCode.CHECK_CLIENT_CONFIG)
    async def check_client_config(self, connection: Connection, frame: Frame) -> Frame:
        """Return success if the broker supports the expression of a subscription, and its type."""
        subscription = bodies.CheckClientRequestBody.decode(frame.body).subscription_data
        if subscription is None or is_tag_type(subscription.expression_type):
            return frame.response()
        asked = subscription.sub_string, subscription.expression_type, frame.version
        try:
            try:
                self.filters.find(*asked)
            except NotCompiled as missing:
                await self.filters.compile(missing.key, connection)
                self.filters.find(*asked)
        except SqlError as error:
            raise CommandError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from None
        return frame.response()

    @handles(RequestCode.LOCK_BATCH_MQ)
    async def lock_batch_mq(self, _connection: Connection, frame: Frame) -> Frame:
        """Acquire or renew queue locks. Return those of the requested queues that the client now holds.

        Only the master grants locks. If slaves granted them too, two clients could lock the same queue.
        """
        if self.store.slave:
            return frame.response(ResponseCode.SLAVE_NOT_AVAILABLE, "queues are locked at the master")
        body = _queues(frame)
        _check_client_id(body.client_id)
        held: list[MessageQueue] = []
        async for queues in slices(body.mq_set):
            held += self.locks.lock(
                body.consumer_group, body.client_id, filter(_may_be_locked, queues), mono_ms(self.clock)
            )
        return frame.response(body=await encoded(bodies.LockBatchResult(lock_ok_mq_set=held), len(held)))

    @handles(RequestCode.UNLOCK_BATCH_MQ)
    async def unlock_batch_mq(self, _connection: Connection, frame: Frame) -> Frame:
        """Release the client's locks of the requested queues."""
        body = _queues(frame)
        async for queues in slices(body.mq_set):
            self.locks.unlock(body.consumer_group, body.client_id, queues)
        return frame.response()


def _check_client_id(client_id: str) -> None:
    """Raise CommandError if a client id is too long to be stored."""
    if len(client_id) > clients.MAX_CLIENT_ID_LENGTH:
        raise CommandError.failed(
            f"the client id has more than {clients.MAX_CLIENT_ID_LENGTH} characters: {len(client_id)}"
        )


def _weight_of(data: bodies.ConsumerData) -> int:
    """Return the number of groups that a group counts as, which grows with the memory that it takes."""
    texts = [data.group_name, data.consume_type, data.message_model, data.consume_from_where]
    numbers = 0
    for each in data.subscription_data_set:
        texts += (each.topic, each.sub_string, each.expression_type, each.filter_class_source or "")
        texts += each.tags_set
        numbers += len(each.code_set) + len(each.tags_set)
    return 1 + (sum(map(len, texts)) + 16 * numbers) // clients.WEIGHT_CHARACTERS


def _check_names(data: bodies.HeartbeatData, version: int) -> None:
    """Raise CommandError for a heartbeat with an invalid name, before any part of it takes effect."""
    for producer in data.producer_data_set:
        check_group(producer.group_name, version)
    for consumer in data.consumer_data_set:
        group = check_group(consumer.group_name, version)
        for subscription in consumer.subscription_data_set:
            # Do not check the name of the group's retry topic: a client always subscribes to this topic, and
            # its name may be longer than a topic's name may be.
            if subscription.topic != codes.RETRY_PREFIX + group:
                check_topic(subscription.topic, version)


def _queues(frame: Frame) -> bodies.LockBatchBody:
    """Decode and check the body of a lock or unlock request."""
    body = bodies.LockBatchBody.decode(frame.body)
    check_group(body.consumer_group, frame.version)
    return body


def _may_be_locked(queue: MessageQueue) -> bool:
    """Return whether a queue has valid names, so that it can exist and its lock is of use."""
    return (
        is_legal_name(queue.topic, codes.MAX_TOPIC_LENGTH)
        and len(queue.broker_name) <= MAX_BROKER_NAME_LENGTH
    )

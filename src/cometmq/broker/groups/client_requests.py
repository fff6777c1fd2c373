"""Heartbeats (34), unregistering (35), consumer lists (38), client checks (46) and queue locks (41, 42)."""

from __future__ import annotations

import contextlib

from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.notices import GroupNotices
from cometmq.broker.base.turns import encoded, slices
from cometmq.broker.context import BrokerContext
from cometmq.broker.groups.clients import LONGEST_CLIENT_ID, MOST_GROUPS, MOST_TOPICS, WEIGHT_CHARACTERS
from cometmq.broker.groups.subscriptions import is_tag_type
from cometmq.broker.tables.topics import UNIT_SUB_FLAG
from cometmq.errors import CommandError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    ConsumerList,
    HeartbeatData,
    LockBatchBody,
    LockBatchResult,
)
from cometmq.protocol.codes import (
    RETRY_PREFIX,
    TOPIC_LENGTH_MAX,
    RequestCode,
    ResponseCode,
    has_retry_topic,
    is_legal_name,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import GetConsumerListByGroupRequestHeader, UnregisterClientRequestHeader
from cometmq.remoting import Connection, Handler

# Groups and subscriptions of a heartbeat, counted before it is read: that takes up to 2 µs for each.
MOST_OBJECTS = 50_000
LONGEST_LANGUAGE = 32  # characters
LONGEST_BROKER = 255  # characters of a broker's name; a queue of a longer one is nobody's to lock


class ClientProcessor:
    """Handles what clients say about themselves, and tells groups when their membership changes."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._notices = GroupNotices(context.notify_group)

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_client,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
        }

    def heartbeat(self, connection: Connection, frame: Frame) -> Frame:
        """34: the client's groups and subscriptions."""
        objects = bytes(frame.body).count(b"{")
        if objects > MOST_OBJECTS:
            raise refused(f"a heartbeat with {objects} groups and subscriptions, at most {MOST_OBJECTS}")
        data = HeartbeatData.decode(frame.body)
        context = self._context
        _check_names(data, frame.version)
        weights = self._check(connection, data)
        now_ms = context.mono_ms()
        client = (data.client_id, str(frame.language)[:LONGEST_LANGUAGE], frame.version)
        for consumer in data.consumer_data_set:
            self._consumer(connection, client, consumer, now_ms, weights[consumer.group_name])
        for producer in data.producer_data_set:
            context.producers.register(producer.group_name, connection, *client, now_ms)
        return frame.response(ResponseCode.SUCCESS)

    def _check(self, connection: Connection, data: HeartbeatData) -> dict[str, int]:
        """Refuse a heartbeat that would make its connection cost more than the broker has for one; returns
        what each consumer group of it weighs."""
        context = self._context
        if len(data.client_id) > LONGEST_CLIENT_ID:
            raise refused(f"the client id has {len(data.client_id)} characters, at most {LONGEST_CLIENT_ID}")
        for consumer in data.consumer_data_set:
            if len(consumer.subscription_data_set) > MOST_TOPICS:
                count = len(consumer.subscription_data_set)
                raise refused(f"group {consumer.group_name} subscribes {count} topics, at most {MOST_TOPICS}")
        weights = {each.group_name: weight_of(each) for each in data.consumer_data_set}
        producers = {each.group_name: 1 for each in data.producer_data_set}
        in_all = max(
            len(data.consumer_data_set),
            len(data.producer_data_set),
            context.consumers.groups_of.weight_with(connection, weights),
            context.producers.groups_of.weight_with(connection, producers),
        )
        if in_all > MOST_GROUPS:
            raise refused(
                f"the connection would be in {in_all} consumer or producer groups (those with long "
                f"subscriptions count for several), at most {MOST_GROUPS}"
            )
        return weights

    def _consumer(
        self,
        connection: Connection,
        client: tuple[str, str, int],
        data: ConsumerData,
        now_ms: int,
        weight: int,
    ) -> None:
        context = self._context
        group = data.group_name
        settings = context.groups.find(group)
        if settings is not None and has_retry_topic(group):
            flag = UNIT_SUB_FLAG if data.unit_mode else 0
            with contextlib.suppress(CommandError):  # without room for it the group consumes all the same
                context.topics.ensure(RETRY_PREFIX + group, settings.retry_queue_nums, sys_flag=flag)
        described = (str(data.consume_type), str(data.message_model), str(data.consume_from_where))
        changed = context.consumers.register(
            group, connection, client, described, data.subscription_data_set, now_ms, weight
        )
        if changed:
            self._notices.changed(group)

    def unregister(self, connection: Connection, frame: Frame) -> Frame:
        """35: the client leaves the groups that are named."""
        header = frame.header(UnregisterClientRequestHeader)
        context = self._context
        if header.producer_group:
            context.producers.unregister(header.producer_group, connection)
        if header.consumer_group and context.consumers.unregister(header.consumer_group, connection):
            self._notices.changed(header.consumer_group)
        return frame.response(ResponseCode.SUCCESS, ext={})

    def closed(self, connection: Connection) -> None:
        """A connection is gone: its clients leave, and their groups hear of it."""
        context = self._context
        context.producers.channel_closed(connection)
        for group in context.consumers.channel_closed(connection):
            self._notices.changed(group)

    def expire(self) -> None:
        """Every 10 s: close the connections of clients that were silent for 120 s, and forget locks that have
        run out."""
        context = self._context
        now_ms = context.mono_ms()
        context.locks.expire(now_ms)
        silent, groups = context.consumers.expire(now_ms)
        for channel in [*silent, *context.producers.expire(now_ms)]:
            channel.close()
        for group in groups:
            self._notices.changed(group)

    def consumer_list(self, _connection: Connection, frame: Frame) -> Frame:
        """38: the client ids of a group."""
        group = frame.header(GetConsumerListByGroupRequestHeader).consumer_group
        known = self._context.consumers.groups.get(group)
        ids = known.members.client_ids() if known is not None else []
        if not ids:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}", ext={})
        return frame.response(ResponseCode.SUCCESS, body=ConsumerList(consumer_id_list=ids).encode())

    def check_client(self, _connection: Connection, frame: Frame) -> Frame:
        """46: whether a subscription other than by tags would be served."""
        subscription = CheckClientRequestBody.decode(frame.body).subscription_data
        if subscription is not None and not is_tag_type(subscription.expression_type):
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {subscription.expression_type}",
            )
        return frame.response(ResponseCode.SUCCESS)

    async def lock(self, _connection: Connection, frame: Frame) -> Frame:
        """41: take or renew queue locks; answers those held now."""
        body = _queues(frame)
        context = self._context
        if len(body.client_id) > LONGEST_CLIENT_ID:
            raise refused(f"the client id has {len(body.client_id)} characters, at most {LONGEST_CLIENT_ID}")
        held: list[MessageQueue] = []
        async for queues in slices(body.mq_set):
            held += context.locks.lock(
                body.consumer_group, body.client_id, filter(_may_be_locked, queues), context.mono_ms()
            )
        answer = await encoded(LockBatchResult(lock_ok_mq_set=held), len(held))
        return frame.response(ResponseCode.SUCCESS, body=answer)

    async def unlock(self, _connection: Connection, frame: Frame) -> Frame:
        """42: give queue locks up."""
        body = _queues(frame)
        async for queues in slices(body.mq_set):
            self._context.locks.unlock(body.consumer_group, body.client_id, queues)
        return frame.response(ResponseCode.SUCCESS)


def refused(why: str) -> CommandError:
    """The answer to what is too much."""
    return CommandError(ResponseCode.SYSTEM_ERROR, why)


def weight_of(data: ConsumerData) -> int:
    """As how many groups one counts among those of its connection: by the length of what is kept of it."""
    texts = [data.group_name, data.consume_type, data.message_model, data.consume_from_where]
    numbers = 0
    for each in data.subscription_data_set:
        texts += (each.topic, each.sub_string, each.expression_type, each.filter_class_source or "")
        texts += each.tags_set
        numbers += len(each.code_set) + len(each.tags_set)
    return 1 + (sum(map(len, texts)) + 16 * numbers) // WEIGHT_CHARACTERS


def _check_names(data: HeartbeatData, version: int) -> None:
    """Refuse a heartbeat, before anything of it counts, for a name that nobody may give."""
    for producer in data.producer_data_set:
        check_group(producer.group_name, version)
    for consumer in data.consumer_data_set:
        group = check_group(consumer.group_name, version)
        for subscription in consumer.subscription_data_set:
            # The retry topic of a group with a long name is none, and subscribed all the same.
            if subscription.topic != RETRY_PREFIX + group:
                check_topic(subscription.topic, version)


def _queues(frame: Frame) -> LockBatchBody:
    """The queues that a client locks or unlocks."""
    body = LockBatchBody.decode(frame.body)
    check_group(body.consumer_group, frame.version)
    return body


def _may_be_locked(queue: MessageQueue) -> bool:
    """Whether there may be such a queue: no others are kept."""
    return is_legal_name(queue.topic, TOPIC_LENGTH_MAX) and len(queue.broker_name) <= LONGEST_BROKER

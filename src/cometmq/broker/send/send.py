"""Sends: codes 10, 310 (one message) and 320 (a batch), oneway or not.

The way of a plain message is short and runs inline in the connection's read: typed header, one dictionary
look-up for the topic, one for what becomes of the properties, one tuple for the store, which has all messages
of a tick encoded at its end.
Everything that is not plain (a new topic, a retry topic, a delay, a transaction) leaves that way at a named
exit. Most sends of a busy producer do not even come here: see known_sends.py.

Budget: 12 µs of CPU for a 1 KiB send with up to 64 in flight on a connection, of which the frame, header and
store take the larger part; about 3 µs belong to this module.
"""

from __future__ import annotations

import random

from cometmq.broker.base import compat
from cometmq.broker.base.names import check_topic
from cometmq.broker.base.replies import Sender
from cometmq.broker.context import BrokerContext
from cometmq.broker.send.retry import DLQ_QUEUES, is_dead_by_send, maximum_times
from cometmq.broker.send.send_templates import KnownSends
from cometmq.broker.tables.topics import sys_flag_of_send
from cometmq.errors import CommandError
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    Perm,
    RequestCode,
    ResponseCode,
    SysFlag,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import SendMessageRequestHeader, SendMessageRequestHeaderV2
from cometmq.protocol.properties.edits import (
    StoredForms,
    check_length,
    drop,
    put,
    stored_form,
    value_of,
)
from cometmq.remoting import Connection, Handler, Shortcut
from cometmq.store import COPIED, StoreRefused
from cometmq.text import printable

BORN_V6 = int(SysFlag.BORN_HOST_V6)
MULTI_TAGS = int(SysFlag.MULTI_TAGS)

# Where a message is stored: topic, queue id, properties, and its delay in ms if it waits for one.
Place = tuple[str, int, str, "int | None"]


class TopicRoute:
    """What a plain send must know of its topic."""

    __slots__ = ("queue_limit", "sys_flag", "write_queues")

    def __init__(self, queue_limit: int, write_queues: int, sys_flag: int) -> None:
        self.queue_limit = queue_limit
        self.write_queues = write_queues
        self.sys_flag = sys_flag


class SendProcessor:
    """Handles sends of a broker."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._store = context.store
        self._appender = context.store.appender
        self._writer = context.writer
        self._cluster_pair = f"CLUSTER\x01{context.config.broker_cluster_name}"
        self._routes: dict[str, TopicRoute] = {}
        self._forms = StoredForms(self._cluster_pair)
        self.known = KnownSends(context.store.appender, context.store.queues, self._forms)

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send,
        }

    def shortcuts(self) -> dict[bytes, Shortcut]:
        """How a JSON header begins -> what may take the request undecoded."""
        return {b'{"code":310,': self.known.take}

    def forget_routes(self) -> None:
        """The topic table or a setting changed."""
        self._routes.clear()
        self.known.forget()

    def send(self, connection: Connection, frame: Frame) -> Frame | None:
        """One message; a batch says so itself, whatever its code."""
        header = frame.typed
        if type(header) is not SendMessageRequestHeaderV2:
            header = frame.header(SendMessageRequestHeader)
        topic = header.topic
        route = self._routes.get(topic)
        if header.batch:
            return self.send_batch(connection, frame, header)
        if route is None:
            route = self._admit(connection, frame, header)
        queue_id = header.queue_id
        delay_ms = None
        if queue_id >= route.queue_limit:
            raise self._bad_queue(connection, frame, header)
        if queue_id < 0:
            queue_id = random.randrange(max(route.write_queues, 1))
        properties, code, wait, plain, key = self._forms.of(header.properties)
        if not plain or topic[0] == "%":
            text = properties.decode()
            topic, queue_id, text, delay_ms = self._redirect(frame, header, topic, queue_id, text)
            properties = text.encode()
        elif frame.raw_header:
            self.known.look(frame, header, header.sys_flag | route.sys_flag)
        sys_flag = header.sys_flag | route.sys_flag
        appender = self._appender
        try:
            queue = appender.queue_of(topic, queue_id)
        except StoreRefused as refusal:
            raise self._refused(refusal) from None
        sender: Sender | None = None
        if not frame.flag & 2:
            sender = connection, b"%d" % frame.opaque, queue_id, wait
        traits = (header.flag, sys_flag, header.reconsume_times or 0, 0, code, None, delay_ms)
        body = frame.body if len(frame.body) > COPIED else bytes(frame.body)
        appender.gather(
            (sender, queue, body, properties, header.born_timestamp, connection.peer_host, key, traits)
        )
        return None

    def send_batch(
        self, connection: Connection, frame: Frame, header: SendMessageRequestHeader
    ) -> Frame | None:
        """Several messages of one topic and queue in one body: consecutive offsets, all of them or none."""
        route = self._routes.get(header.topic) or self._admit(connection, frame, header)
        queue_id = header.queue_id
        if queue_id >= route.queue_limit:
            raise self._bad_queue(connection, frame, header)
        if header.topic.startswith(RETRY_PREFIX):
            raise CommandError(
                ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {header.topic}"
            )
        if queue_id < 0:
            queue_id = random.randrange(max(route.write_queues, 1))
        check_length(header.properties)
        shared, wait = stored_form(header.properties, self._cluster_pair)
        if compat.spreads_batch_properties(frame.version):
            # 4.9 adds the batch's properties as they came, WAIT included.
            shared = put(header.properties or "", "CLUSTER", self._context.config.broker_cluster_name)
        else:
            shared = self._cluster_pair
        born_host = connection.peer_host
        sys_flag = header.sys_flag | route.sys_flag | (BORN_V6 if len(born_host) != 8 else 0)
        try:
            batch = self._store.batches.append(
                header.topic,
                queue_id,
                frame.body,
                shared.encode(),
                sys_flag=sys_flag,
                born_timestamp_ms=header.born_timestamp,
                born_host=born_host,
                reconsume_times=header.reconsume_times or 0,
            )
        except StoreRefused as refusal:
            raise self._refused(refusal) from None
        if frame.flag & 2:
            self._writer.appended()
            return None
        replies = self._context.replies
        ids = replies.message_ids(batch.physical_offsets)
        opaque, queue_offset = frame.opaque, batch.queue_offset

        def answer(code: int, remark: str | None) -> None:
            if remark is not None:
                connection.respond(frame, code, remark=remark)
            else:
                connection.write(replies.reply(code, opaque, ids, queue_id, queue_offset))

        self._writer.appended(answer, wait)
        return None

    def _refused(self, refusal: StoreRefused) -> CommandError:
        self._context.stats.put_failed += 1
        return CommandError(refusal.response_code, refusal.remark)

    def _admit(self, _connection: Connection, frame: Frame, header: SendMessageRequestHeader) -> TopicRoute:
        """The checks that need not be made for each message; the topic is created if that is allowed."""
        context = self._context
        config = context.config
        now_ms = context.clock.time_ms()
        if now_ms < config.start_accept_send_request_time_stamp:
            until = config.start_accept_send_request_time_stamp
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"broker unable to service, until {until}")
        topics = context.topics
        writeable = bool(config.broker_permission & Perm.WRITE)
        if not writeable and topics.is_order(header.topic):
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the broker[{config.broker_ip1}] sending message is forbidden"
            )
        topic = header.topic
        wanted = 4 if header.default_topic_queue_nums is None else header.default_topic_queue_nums
        known = topic_of_send(context, topic, frame.version, header.default_topic, wanted, header.unit_mode)
        route = TopicRoute(
            max(known.read_queue_nums, known.write_queue_nums),
            known.write_queue_nums,
            MULTI_TAGS if known.topic_filter_type == "MULTI_TAG" else 0,
        )
        self._routes[topic] = route
        return route

    def _bad_queue(
        self, connection: Connection, frame: Frame, header: SendMessageRequestHeader
    ) -> CommandError:
        known = self._context.topics.get(header.topic)
        return CommandError(
            compat.invalid_parameter(frame.version),
            f"request queueId[{header.queue_id}] is illegal, {known} Producer: {connection.peer}",
        )

    def _redirect(
        self, frame: Frame, header: SendMessageRequestHeader, topic: str, queue_id: int, properties: str
    ) -> Place:
        """Where a message that is not plain is stored."""
        context = self._context
        if topic.startswith(RETRY_PREFIX):
            group = topic[len(RETRY_PREFIX) :]
            settings = context.groups.find(group)
            if settings is None:
                raise CommandError(
                    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group}"
                )
            maximum = maximum_times(settings.retry_max_times, header.max_reconsume_times, frame.version)
            if is_dead_by_send(header.reconsume_times or 0, maximum):
                context.topics.ensure(DLQ_PREFIX + group, DLQ_QUEUES)
                return DLQ_PREFIX + group, 0, put(properties, "DELAY", "0"), None
        if (value_of(properties, "TRAN_MSG") or "").lower() == "true":
            raise CommandError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{context.config.broker_ip1}] sending transaction message is forbidden",
            )
        return delayed(context, topic, queue_id, properties)


def topic_of_send(
    context: BrokerContext,
    topic: str,
    version: int,
    default_topic: str | None,
    queue_nums: int,
    unit_mode: bool | None,
) -> TopicConfig:
    """The topic that a message is for, created if that is allowed. Raises CommandError for one that no client
    may send to."""
    check_topic(topic, version)
    topics = context.topics
    if not topics.is_sendable(topic):
        raise CommandError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")
    known = topics.get(topic)
    if known is None:
        flag = sys_flag_of_send(topic, unit_mode)
        known = topics.create_by_send(topic, default_topic, queue_nums, flag)
        if known is None and topic.startswith(RETRY_PREFIX):
            known = topics.ensure(topic, 1, sys_flag=flag)
    if known is None:
        raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
    return known


def delayed(context: BrokerContext, topic: str, queue_id: int, properties: str) -> Place:
    """The place of a message with a DELAY above 0; anything else comes back as it is."""
    text = value_of(properties, "DELAY")
    try:
        level = context.delays.effective(int(text)) if text is not None else 0
    except ValueError:
        raise CommandError(
            ResponseCode.MESSAGE_ILLEGAL, f"property DELAY is not a number: {printable(text or '', 40)}"
        ) from None
    if level == 0:
        return topic, queue_id, properties, None
    if text != str(level):
        properties = put(properties, "DELAY", str(level))
    properties = put(drop(properties, "REAL_QID"), "REAL_TOPIC", topic)
    properties = put(properties, "REAL_QID", str(queue_id))
    return SCHEDULE_TOPIC, level - 1, properties, context.delays.delay_ms(level)

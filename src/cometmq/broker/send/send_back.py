"""The request CONSUMER_SEND_MSG_BACK (36), with which a consumer returns a message that it failed to consume.

See docs/reference/storage.md, Send back.
"""

from __future__ import annotations

import random
from functools import partial

import msgspec

from cometmq.broker.access.security import CheckTopic
from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.send.retry import DLQ_QUEUES, RetryRules, plan_send_back
from cometmq.broker.send.send import delayed, fitting, move
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.message import MessageExt
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import (
    MAX_TOPIC_LENGTH,
    RETRY_PREFIX,
    Perm,
    RequestCode,
    ResponseCode,
    handles,
    has_retry_topic,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ConsumerSendMsgBackRequestHeader
from cometmq.protocol.pop import subscribed_topic
from cometmq.protocol.properties.values import put
from cometmq.protocol.record.one import decode_record, properties_of
from cometmq.remoting import Connection
from cometmq.settings import INT_MAX
from cometmq.store import MessageStore, StoreRefused


class SendBackProcessor(msgspec.Struct, eq=False):
    """Handles messages that consumers send back: stores copies in the retry or the dead-letter topic."""

    config: BrokerConfig
    store: MessageStore
    tables: DurableTables
    rules: RetryRules
    delays: DelayLevels
    stats: Stats
    writer: Writer
    check_read: CheckTopic | None

    @handles(RequestCode.CONSUMER_SEND_MSG_BACK)
    async def consumer_send_msg_back(self, connection: Connection, frame: Frame) -> Frame | None:
        """Store a copy of a sent-back message. The response is sent once the copy is stored."""
        header = frame.header(ConsumerSendMsgBackRequestHeader)
        group = header.group
        settings = self.rules.group(group)
        if not self.config.broker_permission & Perm.WRITE:
            why = f"the broker[{self.config.broker_ip1}] sending message is forbidden"
            raise CommandError(ResponseCode.NO_PERMISSION, why)
        if settings.retry_queue_nums <= 0:
            return frame.response(ResponseCode.SUCCESS)
        if not has_retry_topic(group):
            raise CommandError(
                compat.invalid_parameter(frame.version),
                f"the group's name has {len(group)} characters, which is too long for a retry topic: "
                f"the topic's name would have {len(RETRY_PREFIX) + len(group)}, more than {MAX_TOPIC_LENGTH}",
            )
        known = self._retry_topic(group, settings.retry_queue_nums, bool(header.unit_mode))
        found = await self.store.executor.query(partial(self.store.lookups.named_record, header.offset))
        if found is None:
            raise CommandError.failed(f"look message by offset failed, {header.offset}")
        record, is_certain = found
        message = decode_record(record, 0)
        if self.check_read is not None:
            source = message.topic
            if message.properties.get("ORIGIN_GROUP", group) == group:  # Two groups may share a retry topic
                source = subscribed_topic(source, group)
            self.check_read(connection, frame, source if is_certain else None)
        properties = properties_of_retry(message, record, group)
        maximum = self.rules.maximum(settings, header.max_reconsume_times, frame.version, connection)
        topic, delay_level = plan_send_back(group, message.reconsume_times, maximum, header.delay_level)
        queue_id = 0
        if topic == known.topic_name:
            queue_id = random.randrange(max(1, min(settings.retry_queue_nums, known.write_queue_nums)))
        else:
            self.tables.topics.ensure(topic, DLQ_QUEUES)
        properties = put(properties, b"DELAY", b"%d" % delay_level)
        place = fitting(delayed(self.delays, topic, queue_id, properties), record)
        try:
            move(self.store.appender, message, place, min(message.reconsume_times + 1, INT_MAX))
        except StoreRefused as refusal:
            self.stats.put_failed += 1
            raise CommandError.failed(refusal.remark) from None

        def answer(code: int, remark: str | None) -> None:
            if code == ResponseCode.FLUSH_DISK_TIMEOUT:
                code, remark = int(ResponseCode.SYSTEM_ERROR), "FLUSH_DISK_TIMEOUT"
            connection.respond(frame, code, remark=remark)

        self.writer.appended(answer)
        return None

    def _retry_topic(self, group: str, queues: int, unit_mode: bool) -> TopicConfig:
        """Return the group's retry topic, created if missing. Raises CommandError if it is not writable."""
        known = self.tables.topics.ensure_retry(group, queues, unit_mode)
        if not known.perm & Perm.WRITE:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the topic[{known.topic_name}] sending message is forbidden"
            )
        return known


def properties_of_retry(message: MessageExt, record: bytes, group: str) -> bytes:
    """Return the properties of a sent-back message, with those that a retry adds.

    The stored bytes are edited, because not all stored properties can be decoded and encoded again.
    """
    properties = properties_of(record)
    if not message.properties.get("RETRY_TOPIC"):
        topic = subscribed_topic(message.topic, group)  # A retry topic of POP is no original topic
        properties = put(properties, b"RETRY_TOPIC", topic.encode())
    if not message.properties.get("ORIGIN_MESSAGE_ID", "").strip():
        properties = put(properties, b"ORIGIN_MESSAGE_ID", message.offset_msg_id.encode())
    return put(properties, b"WAIT", b"false")

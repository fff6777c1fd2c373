"""The checks of pops and of similar requests, in the order and with the remarks of Apache's broker."""

from __future__ import annotations

import msgspec

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.filters.sql_filters import SqlFilters
from cometmq.broker.groups.subscriptions import ExpressionError, is_tag_type, tag_codes
from cometmq.broker.pull.checks import READ, Wanted, illegal_queue, refused_group, refused_topic
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError, SqlError
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import MAX_TOPIC_LENGTH, RETRY_PREFIX, VERSION_5_0_0, ResponseCode
from cometmq.protocol.pop import TopicKind
from cometmq.store import MessageStore

MAX_MESSAGES = 32
"""The maximum number of messages in the response to one pop."""
MAX_INVISIBLE_MS = 12 * 3_600_000
"""The maximum duration of a lease, as at Apache's proxy."""

MAX_ATTEMPT_ID_LENGTH = 256
"""The maximum length of an attempt id, which leases keep. Real ones have 36 characters."""


def checked_attempt_id(text: str | None) -> str:
    """Return the attempt id of a request, "" if it has none. Raises CommandError if it is too long."""
    if text and len(text) > MAX_ATTEMPT_ID_LENGTH:
        raise CommandError(
            ResponseCode.INVALID_PARAMETER,
            f"attemptId has {len(text)} characters, at most {MAX_ATTEMPT_ID_LENGTH} are allowed",
        )
    return text or ""


class PopChecks(msgspec.Struct, eq=False):
    """Checks pops against the broker's settings, topics and groups."""

    config: BrokerConfig
    store: MessageStore
    tables: DurableTables
    filters: SqlFilters

    def check_numbers(self, count: int, invisible_ms: int) -> None:
        """Check the requested number of messages and the duration of their leases. Raises CommandError."""
        if not 0 < count <= MAX_MESSAGES:
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"the broker[{self.config.broker_ip1}] pop message's num is greater than {MAX_MESSAGES}"
                if count > 0
                else f"maxMsgNums is {count}, at least 1 is needed",
            )
        if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"invisibleTime is {invisible_ms} ms, allowed are 0 to {MAX_INVISIBLE_MS} ms",
            )

    def check_master(self) -> None:
        """Raise CommandError if this broker is a slave, which cannot lease messages."""
        if self.store.slave:
            raise CommandError.failed("messages are popped and acked at the master: this broker is a slave")

    def check(self, group_name: str, topic_name: str, queue_id: int) -> SubscriptionGroupConfig:
        """Check the broker, the topic, the queue and the group. Return the group. Raises CommandError."""
        config = self.config
        self.check_master()
        if not config.broker_permission & READ:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the broker[{config.broker_ip1}] pop message is forbidden"
            )
        if topic_name.startswith(RETRY_PREFIX):
            # Several groups may share a retry topic. The pop of a topic reads the group's retries, too.
            raise CommandError(ResponseCode.NO_PERMISSION, "retry topics cannot be popped: pop their topic")
        topic = self.tables.topics.table.get(topic_name)
        if topic is None or not topic.perm & READ:
            raise refused_topic(topic_name, topic, "peeking")
        if queue_id >= topic.read_queue_nums:
            raise CommandError(ResponseCode.INVALID_PARAMETER, illegal_queue(queue_id, topic))
        group = self.tables.groups.find(group_name)
        if group is None or not group.consume_enable:
            raise refused_group(group_name, group)
        retry_topic = TopicKind.RETRY_V1.topic(topic_name, group_name)
        if len(retry_topic) > MAX_TOPIC_LENGTH:
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"the retry topic {retry_topic} of the group would have {len(retry_topic)} characters, more "
                f"than {MAX_TOPIC_LENGTH}: use a shorter topic or group",
            )
        return group

    def wanted(self, expression: str | None, expression_type: str | None) -> Wanted:
        """Return the filter of a request. Raises CommandError, or NotCompiled for a new SQL92 filter."""
        try:
            if is_tag_type(expression_type):
                return tag_codes(expression)
            return self.filters.find(expression, str(expression_type), VERSION_5_0_0)
        except (ExpressionError, SqlError) as error:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from None

    def check_message(self, topic_name: str, queue_id: int, offset: int) -> None:
        """Check the place of a message that is acked, or whose lease is renewed. Raises CommandError."""
        self.check_master()
        topic = self.tables.topics.table.get(topic_name)
        if topic is None:
            raise refused_topic(topic_name, topic, "peeking")
        if not 0 <= queue_id < topic.read_queue_nums:
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, illegal_queue(queue_id, topic))
        low, high = self.store.min_offset(topic_name, queue_id), self.store.max_offset(topic_name, queue_id)
        if not low <= offset < high:
            raise CommandError(
                ResponseCode.NO_MESSAGE,
                f"offset is illegal, key:{topic_name}@{queue_id}, commit:{offset}, store:{low}~{high}",
            )

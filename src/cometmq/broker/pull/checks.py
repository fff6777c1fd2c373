"""The checks of pulls, in the order and with the remarks of Apache's broker."""

from __future__ import annotations

import msgspec

from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.filters.sql_filters import SqlFilters
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.groups.subscriptions import ExpressionError, is_tag_type, tag_codes
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError, SqlError
from cometmq.protocol.bodies import SubscriptionData, SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.codes import Perm, ResponseCode
from cometmq.protocol.headers import PullMessageRequestHeader
from cometmq.protocol.sql import SqlFilter
from cometmq.remoting import Connection

SUBSCRIPTION = 4  # Flag in `sysFlag`: the pull contains its subscription
READ = int(Perm.READ)  # An int, because a bit test such as `perm & READ` is 1 µs slower with an enum member

Wanted = frozenset[int] | SqlFilter | None
"""The messages that a pull requests: a set of tag hashes, an SQL92 filter, or None for all messages."""


class PullChecks(msgspec.Struct, eq=False):
    """Checks pulls against the broker's settings, topics, groups and subscriptions."""

    config: BrokerConfig
    tables: DurableTables
    consumers: ConsumerTable
    filters: SqlFilters

    def check(self, connection: Connection, version: int, header: PullMessageRequestHeader) -> Wanted:
        """Check a pull as Apache's broker does (docs/reference/storage.md, Pull answers). Return its filter.

        Raises:
            CommandError: The pull is refused.
            NotCompiled: The pull's SQL92 filter must be compiled first.
        """
        config = self.config
        if not config.broker_permission & READ:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the broker[{config.broker_ip1}] pulling message is forbidden"
            )
        group = self.tables.groups.find(header.consumer_group)
        if group is None or not group.consume_enable:
            raise refused_group(header.consumer_group, group)
        topic = self.tables.topics.table.get(header.topic)
        if topic is None or not topic.perm & READ:
            raise refused_topic(header.topic, topic, "pulling")
        if not 0 <= header.queue_id < topic.read_queue_nums:
            problem = f"{illegal_queue(header.queue_id, topic)} consumer:[{connection.peer}]"
            raise CommandError(compat.invalid_parameter(version), problem)
        if header.sys_flag & SUBSCRIPTION:
            expression, expression_type = header.subscription, header.expression_type
        else:
            subscription = self._subscription(header, group.consume_broadcast_enable)
            expression, expression_type = subscription.sub_string, subscription.expression_type
        try:
            if expression_type is None or is_tag_type(expression_type):
                return tag_codes(expression)
            return self.filters.find(expression, expression_type, version)
        except (ExpressionError, SqlError) as error:
            if isinstance(error, SqlError) and not header.sys_flag & SUBSCRIPTION:
                problem = "The broker's consumer filter data is not exist!Your expression may be wrong!"
                raise CommandError(ResponseCode.FILTER_DATA_NOT_EXIST, f"{problem} {error}", ext={}) from None
            raise CommandError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from None

    def _subscription(self, header: PullMessageRequestHeader, broadcast_allowed: bool) -> SubscriptionData:
        """Return the subscription in a group's heartbeats, for a pull with none. Raises CommandError."""
        known = self.consumers.groups.get(header.consumer_group)
        if known is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist", ext={}
            )
        if not broadcast_allowed and known.message_model == "BROADCASTING":
            raise CommandError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] can not consume by broadcast way",
            )
        subscription = known.subscriptions.get(header.topic)
        if subscription is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist", ext={}
            )
        if subscription.sub_version < (header.sub_version or 0):
            raise CommandError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest", ext={}
            )
        return subscription


def refused_group(name: str, group: SubscriptionGroupConfig | None) -> CommandError:
    """Return the error for a group that is unknown or disabled."""
    if group is None:
        return CommandError(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] does not exist"
        )
    return CommandError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}")


def refused_topic(name: str, topic: TopicConfig | None, verb: str) -> CommandError:
    """Return the error for a topic that is unknown or not readable."""
    if topic is None:
        return CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!")
    return CommandError(ResponseCode.NO_PERMISSION, f"the topic[{name}] {verb} message is forbidden")


def illegal_queue(queue_id: int, topic: TopicConfig) -> str:
    """Return the remark for a queue that its topic does not have."""
    return (
        f"queueId[{queue_id}] is illegal, topic:[{topic.topic_name}] "
        f"topicConfig.readQueueNums:[{topic.read_queue_nums}]"
    )

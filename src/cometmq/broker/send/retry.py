"""The rules for a message whose consumption has failed: a retry with a delay, or the dead-letter queue."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from cometmq.broker.base import compat
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.errors import CommandError
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, ResponseCode

# The delay level of the first retry (10 s). Each further retry has the next level.
FIRST_RETRY_LEVEL = 3
DLQ_QUEUES = 1
# The code of RocketMQ 3.4.9 in the version field of requests. Requests of older clients contain no maximum
# number of retries (docs/reference/remoting.md, Languages and versions).
MAX_RECONSUME_TIMES_SINCE = 121


class RetryRules(msgspec.Struct, eq=False):
    """Decides, by the settings and members of a group, whether a failed message becomes a dead letter."""

    groups: SubscriptionGroups
    consumers: ConsumerTable
    locks: QueueLocks

    def group(self, name: str) -> SubscriptionGroupConfig:
        """Return the settings of a group. Raises CommandError for an unknown group."""
        settings = self.groups.find(name)
        if settings is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        return settings

    def maximum(
        self, settings: SubscriptionGroupConfig, requested: int | None, version: int, member: Hashable = None
    ) -> int:
        """Return the maximum number of retries that applies to a request: its own or else the group's.

        If these two differ, the difference is logged (see `note_retry_limit`). `member` is the request's
        connection. It is None if a client itself has sent the message to its retry topic; such a request may
        contain one more than the member's maximum, so it is not compared.
        """
        if requested is None or version < MAX_RECONSUME_TIMES_SINCE:
            return settings.retry_max_times
        if member is not None:
            self.consumers.note_retry_limit(settings.group_name, member, requested, settings.retry_max_times)
        return requested

    def is_dead_by_send(
        self, group: str, reconsume_times: int, maximum: int, version: int, now_ms: int
    ) -> bool:
        """Return whether a message that a client itself has sent to a retry topic becomes a dead letter.

        A client of 5.x includes the failed attempt in `reconsume_times`. In 5.x, a group in which any member
        holds a queue lock counts as consuming in order, so its failed messages become dead letters at once.
        """
        if not compat.is_5x(version):
            return reconsume_times >= maximum
        return reconsume_times > maximum or self.locks.any_held(group, now_ms)


def plan_send_back(group: str, reconsume_times: int, maximum: int, delay_level: int) -> tuple[str, int]:
    """Return the topic and the delay level of a message that a consumer sends back.

    The level is 0 for a dead letter (docs/reference/storage.md, Send back).
    """
    if reconsume_times >= maximum or delay_level < 0:
        return DLQ_PREFIX + group, 0
    return RETRY_PREFIX + group, delay_level if delay_level > 0 else FIRST_RETRY_LEVEL + reconsume_times

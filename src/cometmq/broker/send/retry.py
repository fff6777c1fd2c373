"""The fate of a message that a consumer failed on: another delay level, or the dead-letter queue."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from cometmq.broker.base import compat
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.errors import CommandError
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, ResponseCode

# The first retry waits for level 3 (10 s), the n-th for level 2 + n.
FIRST_RETRY_LEVEL = 3
DLQ_QUEUES = 1
# Version 3.4.9. Requests of older versions contain no maximum number of retries (docs/reference/remoting.md,
# Languages and versions).
MAX_RECONSUME_TIMES_SINCE = 121


class RetryPlan(msgspec.Struct, frozen=True):
    """The topic and delay level (0 for none) of the retry, and whether it is the dead-letter topic."""

    topic: str
    delay_level: int
    dead: bool


@dataclass(eq=False)
class RetryRules:
    """The retry settings of groups and of the members that send messages back."""

    groups: SubscriptionGroups
    consumers: ConsumerTable
    locks: QueueLocks

    def group(self, name: str) -> SubscriptionGroupConfig:
        """Return a group's settings. Raises CommandError for an unknown group."""
        settings = self.groups.find(name)
        if settings is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        return settings

    def maximum(
        self, settings: SubscriptionGroupConfig, requested: int | None, version: int, member: Hashable = None
    ) -> int:
        """Return the effective maximum of retries.

        The maximum in the request applies if its version supports it, else the group's. If the two differ,
        the log reports it, see `note_retry_limit`.

        Args:
            settings: The group's settings.
            requested: The maximum in the request.
            version: The request's version.
            member: The request's connection. None for a client's own send to its retry topic, which may
            contain one more than the member's maximum.
        """
        if requested is None or version < MAX_RECONSUME_TIMES_SINCE:
            return settings.retry_max_times
        if member is not None:
            self.consumers.note_retry_limit(settings.group_name, member, requested, settings.retry_max_times)
        return requested

    def is_dead_by_send(
        self, group: str, reconsume_times: int, maximum: int, version: int, now_ms: int
    ) -> bool:
        """Return whether a client's own send to a retry topic becomes a dead letter.

        Clients of 5.x count the failed try, too. In 5.x, a group with queue locks consumes in order, and its
        failed messages become dead letters.
        """
        if not compat.is_5x(version):
            return reconsume_times >= maximum
        return reconsume_times > maximum or self.locks.any_held(group, now_ms)


def plan_send_back(group: str, reconsume_times: int, maximum: int, delay_level: int) -> RetryPlan:
    """Return the plan for CONSUMER_SEND_MSG_BACK (docs/reference/storage.md, Send back)."""
    if reconsume_times >= maximum or delay_level < 0:
        return RetryPlan(DLQ_PREFIX + group, 0, True)
    level = delay_level if delay_level > 0 else FIRST_RETRY_LEVEL + reconsume_times
    return RetryPlan(RETRY_PREFIX + group, level, False)

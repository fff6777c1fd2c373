"""What becomes of a message that a consumer failed on: another delay level, or the dead-letter queue. No I/O
in here.
"""

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

# The first retry waits level 3 (10 s), the n-th level 2 + n.
FIRST_RETRY_LEVEL = 3
DLQ_QUEUES = 1
# 3.4.9. Requests of older versions carry no maximum of their own
# (docs/reference/remoting.md, Languages and versions).
MAX_RECONSUME_TIMES_SINCE = 121


class RetryPlan(msgspec.Struct, frozen=True):
    """Where the message goes, after which delay level (0: at once), and whether that is the dead-letter
    queue.
    """

    topic: str
    delay_level: int
    dead: bool


@dataclass(eq=False)
class RetryRules:
    """What a group, and the members that hand messages back, say about retries."""

    groups: SubscriptionGroups
    consumers: ConsumerTable
    locks: QueueLocks

    def group(self, name: str) -> SubscriptionGroupConfig:
        """A group's settings. Raises CommandError if there is no such group."""
        settings = self.groups.find(name)
        if settings is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        return settings

    def maximum(
        self, settings: SubscriptionGroupConfig, requested: int | None, version: int, member: Hashable = None
    ) -> int:
        """The limit that counts: the request's, if it has one and its version may, else the group's. A
        request's that is not the group's is not silent: see `note_retry_limit`. `member`: the connection of
        the request; None for a client's own send to its retry topic, which may name one more than the member
        has."""
        if requested is None or version < MAX_RECONSUME_TIMES_SINCE:
            return settings.retry_max_times
        if member is not None:
            self.consumers.note_retry_limit(settings.group_name, member, requested, settings.retry_max_times)
        return requested

    def is_dead_by_send(
        self, group: str, reconsume_times: int, maximum: int, version: int, now_ms: int
    ) -> bool:
        """Whether a client's own send to a retry topic ends in the dead-letter queue. 5.x's clients count the
        try that failed; there the locks tell that a group consumes in order, and such a group gives up."""
        if not compat.is_5x(version):
            return reconsume_times >= maximum
        return reconsume_times > maximum or self.locks.any_held(group, now_ms)


def plan_send_back(group: str, reconsume_times: int, maximum: int, delay_level: int) -> RetryPlan:
    """CONSUMER_SEND_MSG_BACK of a message consumed `reconsume_times` times before
    (docs/reference/storage.md, Send back)."""
    if reconsume_times >= maximum or delay_level < 0:
        return RetryPlan(DLQ_PREFIX + group, 0, True)
    level = delay_level if delay_level > 0 else FIRST_RETRY_LEVEL + reconsume_times
    return RetryPlan(RETRY_PREFIX + group, level, False)

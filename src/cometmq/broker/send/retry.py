"""What becomes of a message that a consumer failed on: another delay level, or the dead-letter queue. No I/O
in here.
"""

from __future__ import annotations

import msgspec

from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX

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


def maximum_times(group_maximum: int, requested: int | None, version: int) -> int:
    """The limit that counts: the request's, if it has one and its version may, else the group's."""
    return requested if requested is not None and version >= MAX_RECONSUME_TIMES_SINCE else group_maximum


def plan_send_back(group: str, reconsume_times: int, maximum: int, delay_level: int) -> RetryPlan:
    """CONSUMER_SEND_MSG_BACK of a message consumed `reconsume_times` times before
    (docs/reference/storage.md, Send back)."""
    if reconsume_times >= maximum or delay_level < 0:
        return RetryPlan(DLQ_PREFIX + group, 0, True)
    level = delay_level if delay_level > 0 else FIRST_RETRY_LEVEL + reconsume_times
    return RetryPlan(RETRY_PREFIX + group, level, False)


def is_dead_by_send(reconsume_times: int, maximum: int) -> bool:
    """Whether a client's own send to a retry topic ends in the dead-letter queue."""
    return reconsume_times >= maximum

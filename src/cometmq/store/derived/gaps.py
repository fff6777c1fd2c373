"""How far a queue may go on behind its end, when the records in between are lost: fillers take their place.

A message that is lost has taken room in the log. Records that claim more of them than there was room for
between them are damaged, or made up to fill the disk with fillers, unless the queue is known to have been
longer.
"""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.store.derived.consume_queue import ConsumeQueue

_WIDEST = 1_000_000  # units; a jump wider than this is a damaged header, not a loss
_SPARE = 100_000
"""Units, of all queues together, without room: the newest segment may have been lost, and the log has gone on
where it began, but the queues behind their former ends, and the table of those (see CleanEnds) with it."""


class Gaps:
    """What one walk over the log may bridge. ends: topic -> queue id -> where the queue ended once."""

    __slots__ = ("_ends", "_spare")

    def __init__(self, ends: Mapping[str, Mapping[int, int]]) -> None:
        self._ends = ends
        self._spare = _SPARE

    def bridge(self, queue: ConsumeQueue, offset: int, position: int) -> bool:
        """Whether the record at a log position may follow on the queue's last one with this offset. What this
        takes from the spare units counts as taken."""
        gap = offset - queue.max_offset
        if gap < 0 or not queue.max_offset:
            return gap >= 0
        room = max(0, position - queue.max_physical) // MIN_SIZE
        former = self._ends.get(queue.topic, {}).get(queue.queue_id, 0)
        unexplained = max(0, offset - max(queue.max_offset + room, former))
        if gap > _WIDEST or unexplained > self._spare:
            return False
        self._spare -= unexplained
        return True

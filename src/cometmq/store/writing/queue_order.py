"""Which records, in the order of the log, follow on the ends of their queues: for recovery and rebuild.

No CRC covers a record's queue offset. So a record ahead of its queue's end waits for the queue's next one,
which tells what is wrong: the records between are lost, or this offset is damaged.

Fillers take the place of lost records. A lost record took room in the log. So an offset that claims more of
them than there was room for is damaged, or made up to fill the disk with fillers, unless the queue is known
to have been longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.one import Facts
from cometmq.store.derived.consume_queue import ConsumeQueue

WIDEST_GAP = 1_000_000  # units; a jump wider than this is a damaged header, not a loss
SPARE = 100_000
"""Units, of all queues together, without room: the newest segment may have been lost, and the log has gone on
where it began, but the queues behind their former ends, and the table of those (see CleanEnds) with it."""


class QueueOrder:
    """The order of one walk over the log.

    ends: topic -> queue id -> where the queue ended once. push(queue, record): makes the record's unit.
    leave_out(record, end, next): the record does not fit its queue, which ends at offset `end`, or the next
    record of the queue says so.
    """

    __slots__ = ("_ends", "_leave_out", "_push", "_spare", "waiting")

    def __init__(
        self,
        ends: Mapping[str, Mapping[int, int]],
        push: Callable[[ConsumeQueue, Facts], None],
        leave_out: Callable[[Facts, int, Facts | None], None],
    ) -> None:
        self._ends = ends
        self._push = push
        self._leave_out = leave_out
        self._spare = SPARE
        self.waiting: dict[ConsumeQueue, Facts] = {}

    def add(self, queue: ConsumeQueue, facts: Facts, *, may_wait: bool = True) -> bool:
        """Take the next record of a queue. False, with nothing done, if it would have to wait and may not."""
        before = self.waiting.pop(queue, None)
        if before is not None:
            if facts.queue_offset > before.queue_offset:
                self._push(queue, before)  # what was between is lost
            else:
                self._leave_out(before, queue.max_offset, facts)
        if facts.queue_offset == queue.max_offset:
            self._push(queue, facts)
        elif not self._bridges(queue, facts):
            self._leave_out(facts, queue.max_offset, None)
        elif may_wait:
            self.waiting[queue] = facts
        else:
            return False
        return True

    @property
    def spare_used(self) -> int:
        """How many of the units without room, which all queues share, these have used."""
        return SPARE - self._spare

    def _bridges(self, queue: ConsumeQueue, facts: Facts) -> bool:
        """Whether a record may follow on its queue's end, with a gap between. Uses up spare units."""
        gap = facts.queue_offset - queue.max_offset
        if gap < 0 or not queue.max_offset:
            return gap >= 0
        room = max(0, facts.position - queue.max_physical) // MIN_SIZE
        former = self._ends.get(queue.topic, {}).get(queue.queue_id, 0)
        unexplained = max(0, facts.queue_offset - max(queue.max_offset + room, former))
        if gap > WIDEST_GAP or unexplained > self._spare:
            return False
        self._spare -= unexplained
        return True

    def finish(self) -> None:
        """After the last record: those that wait are served."""
        for queue, facts in self.waiting.items():
            self._push(queue, facts)
        self.waiting.clear()

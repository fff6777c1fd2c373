"""The order of records in their queues, for recovery and rebuild.

No CRC covers a record's queue offset. So a record ahead of its queue's end waits for the queue's next record,
which shows what is wrong: either the records between them are lost, or this offset is damaged.

Fillers replace lost records. A lost record occupied space in the log. So an offset that implies more lost
records than there was space for is damaged, or forged to fill the disk with fillers, unless the queue is
known to have been longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.one import Facts
from cometmq.store.derived.consume_queue import ConsumeQueue

MAX_GAP_UNITS = 1_000_000  # units; a larger gap is a damaged header, not a loss
SPARE = 100_000
"""The number of units, of all queues together, that may exceed the space of lost records in the log.

The newest segment may have been lost. Then the log continues where that segment began, but the queues
continue after their former ends, and the table of these ends (see CleanEnds) is lost, too.
"""


class QueueOrder:
    """The order of one walk over the log.

    Args:
        ends: The former end of each queue, by topic and queue id.
        push: Creates the unit of a record in a queue.
        leave_out: Called with a record that does not fit into its queue, the queue's end, and the queue's
            next record if that one has shown the damage.
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
        """Process a queue's next record. Return False, without a change, if `may_wait` forbids a wait."""
        before = self.waiting.pop(queue, None)
        if before is not None:
            if facts.queue_offset > before.queue_offset:
                self._push(queue, before)  # the records between them are lost
            else:
                self._leave_out(before, queue.max_offset, facts)
        if facts.queue_offset == queue.max_offset:
            self._push(queue, facts)
        elif not self._may_follow_gap(queue, facts):
            self._leave_out(facts, queue.max_offset, None)
        elif may_wait:
            self.waiting[queue] = facts
        else:
            return False
        return True

    @property
    def spare_used(self) -> int:
        """The number of units that were accepted although the log had no space for them."""
        return SPARE - self._spare

    def _may_follow_gap(self, queue: ConsumeQueue, facts: Facts) -> bool:
        """Return whether a record may follow its queue's end after a gap.

        The method uses spare units if necessary.
        """
        gap = facts.queue_offset - queue.max_offset
        if gap < 0 or not queue.max_offset:
            return gap >= 0
        room = max(0, facts.position - queue.max_physical) // MIN_SIZE
        former = self._ends.get(queue.topic, {}).get(queue.queue_id, 0)
        unexplained = max(0, facts.queue_offset - max(queue.max_offset + room, former))
        if gap > MAX_GAP_UNITS or unexplained > self._spare:
            return False
        self._spare -= unexplained
        return True

    def finish(self) -> None:
        """Process the records that still wait, after the last record of the walk."""
        for queue, facts in self.waiting.items():
            self._push(queue, facts)
        self.waiting.clear()

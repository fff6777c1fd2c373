"""The order of records in their queues, for recovery and rebuild.

No CRC covers the queue offset of a record. If a record's offset is greater than the end of its queue, either
the records in between are lost, or the offset is damaged. To find out, the record waits for the next record
of the queue. If that one has a greater offset, the records in between are lost. Otherwise the offset of the
waiting record is damaged.

Each lost record gets a filler unit in the queue. A forged offset could fill the disk with such units. But a
lost record occupied space in the log. So an offset that implies more lost records than the log had space for
is normally rejected. There are two exceptions: the queue had this length at the last clean stop, or the
number of filler units without space in the log does not exceed SPARE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.one import Facts
from cometmq.store.derived.consume_queue import ConsumeQueue

# Maximum number of lost records directly before a record of the same queue. If the record's queue offset
# implies more, the offset is considered damaged.
MAX_GAP_UNITS = 1_000_000
SPARE = 100_000
"""The maximum number of filler units, in all queues together, that the space in the log cannot explain.

Normally each filler unit stands for a lost record, which occupied space in the log. But if the newest segment
and the table of the queues' ends (see CleanEnds) are lost, the log continues where that segment began, while
the queues continue after their former ends. Then the log has no space for the lost records.
"""


@dataclass(eq=False)
class QueueOrder:
    """Puts the records of one scan of the log into the order of their queues.

    Attributes:
        ends: The end that each queue had at the last clean stop, by topic and queue id.
        push: Adds the unit of a record to a queue.
        leave_out: Called with a record that does not fit into its queue, the end of the queue, and the next
            record of the queue if that one has shown the damage, otherwise None.
    """

    ends: Mapping[str, Mapping[int, int]]
    push: Callable[[ConsumeQueue, Facts], None]
    leave_out: Callable[[Facts, int, Facts | None], None]

    def __post_init__(self) -> None:
        self._spare = SPARE
        self.waiting: dict[ConsumeQueue, Facts] = {}

    def add(self, queue: ConsumeQueue, facts: Facts, *, may_wait: bool = True) -> bool:
        """Add the next record of a queue, leave it out, or let it wait. Return False if it may not wait."""
        before = self.waiting.pop(queue, None)
        if before is not None:
            if facts.queue_offset > before.queue_offset:
                # The offset of this record confirms the offset of the waiting record. So the records that are
                # missing before the waiting record are lost.
                self.push(queue, before)
            else:
                self.leave_out(before, queue.max_offset, facts)
        if facts.queue_offset == queue.max_offset:
            self.push(queue, facts)
        elif not self._may_follow_gap(queue, facts):
            self.leave_out(facts, queue.max_offset, None)
        elif may_wait:
            self.waiting[queue] = facts
        else:
            return False
        return True

    @property
    def spare_used(self) -> int:
        """The number of filler units that the space in the log could not explain; at most SPARE."""
        return SPARE - self._spare

    def _may_follow_gap(self, queue: ConsumeQueue, facts: Facts) -> bool:
        """Return whether a record may follow a gap in its queue. Gaps without space in the log use SPARE."""
        gap = facts.queue_offset - queue.max_offset
        if gap < 0 or not queue.max_offset:
            return gap >= 0
        room = max(0, facts.position - queue.max_physical) // MIN_SIZE
        former = self.ends.get(queue.topic, {}).get(queue.queue_id, 0)
        unexplained = max(0, facts.queue_offset - max(queue.max_offset + room, former))
        if gap > MAX_GAP_UNITS or unexplained > self._spare:
            return False
        self._spare -= unexplained
        return True

    def finish(self) -> None:
        """Add the records that still wait: the scan has ended, so no later record can contradict them."""
        for queue, facts in self.waiting.items():
            self.push(queue, facts)
        self.waiting.clear()

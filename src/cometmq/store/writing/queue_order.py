"""The order of records in their queues, for recovery and rebuild.

No CRC covers the queue offset of a record. So a record whose offset is greater than its queue's end waits for
the next record of the queue. That record shows whether the records before the waiting one are lost, or its
offset is damaged.

Fillers replace lost records. A lost record occupied space in the log. So an offset that implies more lost
records than there was space for is damaged, or forged to fill the disk with fillers. It is accepted only if
the queue is known to have been that long, or within the limit SPARE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.one import Facts
from cometmq.store.derived.consume_queue import ConsumeQueue

MAX_GAP_UNITS = 1_000_000  # Maximum number of missing units; a larger gap means a damaged offset
SPARE = 100_000
"""The number of fillers, in all queues together, that are accepted without space for lost records in the log.

Such fillers are needed if the newest segment is lost, and with it the table of the queues' ends (see
CleanEnds). Then the log continues where that segment began, but the queues continue after their former ends.
"""


class QueueOrder:
    """Puts the records of one scan of the log into the order of their queues.

    Args:
        ends: The former end of each queue, by topic and queue id.
        push: Adds the unit of a record to a queue.
        leave_out: Called with a record that does not fit into its queue and the end of the queue. The third
            argument is the queue's next record if that record has shown the damage, otherwise None.
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
        """Process the next record of a queue. Return whether it was processed or waits.

        Without `may_wait`, a record that would have to wait changes nothing, and the result is False.
        """
        before = self.waiting.pop(queue, None)
        if before is not None:
            if facts.queue_offset > before.queue_offset:
                # The next record confirms the offset, so the records before the waiting record are lost.
                self._push(queue, before)
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
        """The number of fillers that were accepted although the log had no space for the lost records."""
        return SPARE - self._spare

    def _may_follow_gap(self, queue: ConsumeQueue, facts: Facts) -> bool:
        """Return whether a record may follow the end of its queue after a gap.

        Fillers for which the log has no space are subtracted from the limit SPARE.
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
        """Process the records that still wait at the end of the scan."""
        for queue, facts in self.waiting.items():
            self._push(queue, facts)
        self.waiting.clear()

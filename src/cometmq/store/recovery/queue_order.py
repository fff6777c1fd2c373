"""Which records, in the order of the log, follow on the ends of their queues: as recovery and rebuild see it.

No CRC covers a record's queue offset. So one that lies ahead of its queue's end waits for the next record of
its queue, which tells what is wrong: records between are lost, or this offset is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cometmq.protocol.record.one import Facts
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.gaps import Gaps


class QueueOrder:
    """The order of one walk over the log.

    ends: as Gaps takes them. push(queue, record): makes the record's unit. leave_out(record, end, next): the
    record does not fit its queue, which ends at offset `end`, or the next record of it says so.
    """

    __slots__ = ("_gaps", "_leave_out", "_push", "waiting")

    def __init__(
        self,
        ends: Mapping[str, Mapping[int, int]],
        push: Callable[[ConsumeQueue, Facts], None],
        leave_out: Callable[[Facts, int, Facts | None], None],
    ) -> None:
        self._gaps = Gaps(ends)
        self._push = push
        self._leave_out = leave_out
        self.waiting: dict[ConsumeQueue, Facts] = {}

    def add(self, queue: ConsumeQueue, facts: Facts, *, may_wait: bool = True) -> bool:
        """The next record of a queue. False, and nothing is done with it, if it would have to wait and may
        not."""
        before = self.waiting.pop(queue, None)
        if before is not None:
            if facts.queue_offset > before.queue_offset:
                self._push(queue, before)  # what was between is lost
            else:
                self._leave_out(before, queue.max_offset, facts)
        if facts.queue_offset == queue.max_offset:
            self._push(queue, facts)
        elif not self._gaps.bridge(queue, facts.queue_offset, facts.position):
            self._leave_out(facts, queue.max_offset, None)
        elif may_wait:
            self.waiting[queue] = facts
        else:
            return False
        return True

    def finish(self) -> None:
        """After the last record: those that wait are served."""
        for queue, facts in self.waiting.items():
            self._push(queue, facts)
        self.waiting.clear()

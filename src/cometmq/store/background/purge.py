"""Hiding messages on request, up to an offset or a time; their records go with their segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cometmq.store.base.off_loop import OffLoop
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.reading.lookup import Lookup
from cometmq.store.tables.min_offsets import MinOffsets


class PurgePlan(NamedTuple):
    """What a purge would do to one queue: its minimum offset, what that becomes, and its maximum offset."""

    queue_id: int
    min_offset: int
    target: int
    max_offset: int


@dataclass(eq=False, kw_only=True)
class Purge:
    """Moves minimum offsets of one store's queues. Loop thread only."""

    off_loop: OffLoop
    queues: QueueTable
    lookups: Lookup
    min_offsets: MinOffsets

    async def plan(
        self, topic: str, queue_id: int | None = None, before_ms: int | None = None
    ) -> list[PurgePlan]:
        """What a purge would do: to one queue, or all; up to `before_ms` by store time, or the end."""
        plan = []
        for queue in self.queues.of_topic(topic):
            if queue_id in (None, queue.queue_id):
                end = target = queue.max_offset
                if before_ms is not None:
                    target = await self.lookups.first_since(queue, before_ms)
                plan.append(PurgePlan(queue.queue_id, queue.min_offset, max(target, queue.min_offset), end))
                await self.off_loop.pause(0)
        return plan

    async def raise_min_offsets(self, topic: str, floors: Mapping[int, int]) -> None:
        """Hide the messages below these offsets for good. Raises OSError; then nothing has changed."""
        found = {self.queues.find(topic, queue_id): floor for queue_id, floor in floors.items()}
        before = self.min_offsets.by_topic.get(topic, {})
        self.min_offsets.note(topic, floors)
        try:
            await self.off_loop.run(self.min_offsets.save)
        except OSError:
            self.min_offsets.undo(topic, floors, before)
            raise
        for queue, floor in found.items():
            if queue is not None:
                queue.raise_min(floor)

"""Retention of single topics by age or by bytes, and purges on request.

Retention and purges hide messages: they raise the minimum offsets of queues. The disk space is freed later,
when the retention of the whole store (retention.py) deletes the log segments of these messages. A run of
topic retention processes only some of the queues and a limited number of queue units, so its work is bounded.
A thread reads units that are not in memory.

Hidden messages never become visible again. So ages are measured by `SteadyTime`, which a wrong clock does not
change immediately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cometmq import logs
from cometmq.errors import CommandError
from cometmq.store.background.tasks import BackgroundTasks
from cometmq.store.base.clock import SteadyTime
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.files import Reads
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE, ConsumeQueue
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.reading.lookup import Lookup
from cometmq.store.tables.min_offsets import MinOffsets

log = logs.logger(__name__)

Sizes = npt.NDArray[np.int64]

_QUEUES_PER_CYCLE = 256
_UNITS_PER_CYCLE = 200_000
_UNITS_PER_READ = 32_768  # Number of queue units read at a time
_QUEUES_PER_STEP = 16  # Number of queues processed per loop iteration


class TopicLimit(msgspec.Struct, frozen=True):
    """The limits of a topic: age since the store time (ms), and record bytes per queue. None: no limit."""

    age_ms: int | None = None
    bytes_per_queue: int | None = None


class PurgePlan(NamedTuple):
    """The effect of a purge on one queue. `target` is the new minimum offset."""

    queue_id: int
    min_offset: int
    target: int
    max_offset: int


class _Counted(msgspec.Struct):
    """The total size, in bytes, of the records of one queue that have offsets in [begin, end)."""

    begin: int
    end: int
    total: int = 0


@dataclass(eq=False, kw_only=True)
class TopicRetention:
    """Raises the minimum offsets of queues: by limits on the age or bytes of messages, and on request.

    For the loop thread only.
    """

    steady: SteadyTime
    executor: StoreExecutor
    tasks: BackgroundTasks
    queues: QueueTable
    lookups: Lookup
    min_offsets: MinOffsets

    def __post_init__(self) -> None:
        self._limits: dict[str, TopicLimit] = {}
        self._counted: dict[ConsumeQueue, _Counted] = {}
        self._turn = 0
        self._units_left = 0

    def set_limits(self, limits: Mapping[str, TopicLimit]) -> None:
        """Replace the limits of all topics, from the next cycle on. Topics not in `limits` have none."""
        self._limits = dict(limits)
        self._counted = {
            queue: kept
            for queue, kept in self._counted.items()
            if queue.topic in limits and not queue.deleted
        }

    def begin(self) -> None:
        """Start a cycle in the background. The store calls this every cleanResourceInterval ms."""
        self.tasks.begin("retention (topics)", self.topic_cycle)

    async def topic_cycle(self) -> int:
        """Raise the minimum offsets of the next few queues to the retention limits of their topics.

        The new minimum offsets are synced to disk before they take effect. If the sync fails, they still take
        effect, but only until the next start. Return the number of messages that are now hidden.
        """
        limits = self._limits
        now_ms = self.steady.now_ms()
        queues = [queue for queue in self.queues if queue.topic in limits]
        if not queues:
            return 0
        self._units_left = _UNITS_PER_CYCLE
        moved: dict[ConsumeQueue, int] = {}
        first = self._turn % len(queues)
        due = (queues[first:] + queues[:first])[:_QUEUES_PER_CYCLE]
        self._turn = first + len(due)
        for number, queue in enumerate(due):
            if number % _QUEUES_PER_STEP == _QUEUES_PER_STEP - 1:
                await self.executor.pause(0)
            try:
                floor = await self._floor(queue, limits[queue.topic], now_ms)
            except CommandError:
                continue  # The object store does not answer; a later cycle tries again
            if floor > queue.min_offset:
                moved[queue] = floor
            if self.executor.ending:
                break
        return await self._move(moved) if moved else 0

    async def _move(self, moved: Mapping[ConsumeQueue, int]) -> int:
        topics: dict[str, dict[int, int]] = {}
        for queue, floor in moved.items():
            if not queue.deleted:
                topics.setdefault(queue.topic, {})[queue.queue_id] = floor
        for topic, floors in topics.items():
            self.min_offsets.set_offsets(topic, floors)
        try:
            await self.executor.run(self.min_offsets.save)
        except OSError as failure:
            log.error("minimum offsets could not be written; the next cycle retries: %s", failure)
        for topic, floors in topics.items():
            log.info("topic %s: retention raised the minimum offsets of %d queues", topic, len(floors))
        return sum(queue.raise_min(floor) for queue, floor in moved.items())

    async def _floor(self, queue: ConsumeQueue, limit: TopicLimit, now_ms: int) -> int:
        """Return the offset of the first message that is within the topic's limits of age and bytes."""
        floor = queue.min_offset
        if limit.age_ms is not None and queue.max_offset > floor:
            young = await self.lookups.first_since(queue, now_ms - limit.age_ms)
            floor = max(floor, young)
        if limit.bytes_per_queue is not None:
            count = partial(self._by_bytes, queue, floor, limit.bytes_per_queue)
            floor = max(floor, await self.executor.query(count))
        return floor

    def _by_bytes(self, queue: ConsumeQueue, begin: int, limit: int, reads: Reads) -> int:
        """Return the first offset such that the records from there to the end have at most `limit` bytes.

        A call counts only so many records, so the result may be too low until later calls count the others.
        """
        counted = self._counted.get(queue)
        if counted is None or not counted.begin <= begin <= counted.end <= queue.max_offset:
            counted = self._counted[queue] = _Counted(begin, begin)
        while counted.begin < begin:  # Subtract the bytes of messages that the age limit has hidden meanwhile
            sizes = self._slice(queue, counted.begin, begin, reads)
            counted.total -= int(sizes.sum())
            counted.begin += len(sizes)
        while counted.end < queue.max_offset and self._units_left > 0:
            sizes = self._slice(queue, counted.end, queue.max_offset, reads)
            counted.total += int(sizes.sum())
            counted.end += len(sizes)
            self._units_left -= len(sizes)
        while counted.total > limit:
            sizes = self._slice(queue, counted.begin, counted.end, reads)
            sums = np.cumsum(sizes)
            drop = min(int(np.searchsorted(sums, counted.total - limit)) + 1, len(sizes))
            counted.total -= int(sums[drop - 1])
            counted.begin += drop
        return counted.begin

    @staticmethod
    def _slice(queue: ConsumeQueue, begin: int, end: int, reads: Reads) -> Sizes:
        """Return the sizes, at least one, of records in [begin, end): 0 for a filler or a missing file."""
        want = min(end - begin, _UNITS_PER_READ)
        data = queue.read(begin, want, reads)
        if data is None or len(data) < UNIT_DTYPE.itemsize:
            return np.zeros(min(want, queue.next_file_offset(begin) - begin), np.int64)
        sizes = np.frombuffer(bytes(data), UNIT_DTYPE)["size"].astype(np.int64)
        sizes[sizes == FILLER_SIZE] = 0
        return sizes

    # -- purges -----------------------------------------------------------------------------------

    async def plan_purge(
        self, topic: str, queue_id: int | None = None, before_ms: int | None = None
    ) -> list[PurgePlan]:
        """Return the effect of a purge of the messages before a time, or of all, in one queue or in all."""
        plan = []
        for queue in self.queues.of_topic(topic):
            if queue_id in (None, queue.queue_id):
                end = target = queue.max_offset
                if before_ms is not None:
                    target = await self.lookups.first_since(queue, before_ms)
                plan.append(PurgePlan(queue.queue_id, queue.min_offset, max(target, queue.min_offset), end))
                await self.executor.pause(0)
        return plan

    async def raise_min_offsets(self, topic: str, floors: Mapping[int, int]) -> None:
        """Hide the messages below offsets (by queue id) permanently. After an OSError nothing has changed."""
        found = {self.queues.find_queue(topic, queue_id): floor for queue_id, floor in floors.items()}
        before = self.min_offsets.by_topic.get(topic, {})
        self.min_offsets.set_offsets(topic, floors)
        try:
            await self.executor.run(self.min_offsets.save)
        except OSError:
            self.min_offsets.undo(topic, floors, before)
            raise
        for queue, floor in found.items():
            if queue is not None:
                queue.raise_min(floor)

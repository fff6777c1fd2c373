"""Retention of single topics: by age or by bytes, shorter than the store's.

The minimum offsets of the topic's queues move; the space comes back when the segment goes, by the store's
own rules. Work per pass is bounded: queues take turns, and units are counted in slices; what is not in
memory is read by a thread.

Hidden is hidden for good, so ages are told by `SteadyTime`, not by one look at the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from cometmq import logs
from cometmq.store.background.passes import Passes
from cometmq.store.base.clock import SteadyTime
from cometmq.store.base.files import Reads
from cometmq.store.base.off_loop import OffLoop, in_place
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE, ConsumeQueue
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.reading.lookup import Lookup
from cometmq.store.tables.min_offsets import MinOffsets

log = logs.logger(__name__)

Sizes = npt.NDArray[np.int64]

_QUEUES_PER_PASS = 256
_UNITS_PER_PASS = 200_000
_UNITS_PER_READ = 32_768  # units read at once
_QUEUES_PER_STEP = 16  # looked at in one turn of the loop


class TopicLimit(msgspec.Struct, frozen=True):
    """What a topic keeps: age since the store time, record bytes in each queue; None is no limit."""

    age_ms: int | None = None
    bytes_per_queue: int | None = None


class _Counted(msgspec.Struct):
    """Bytes of the records of units [begin, end) of one queue."""

    begin: int
    end: int
    total: int = 0


@dataclass(eq=False, kw_only=True)
class TopicRetention:
    """Moves the minimum offsets of topics with a limit of their own. Loop thread only."""

    steady: SteadyTime
    off_loop: OffLoop
    passes: Passes
    queues: QueueTable
    lookups: Lookup
    min_offsets: MinOffsets

    def __post_init__(self) -> None:
        self._limits: dict[str, TopicLimit] = {}
        self._counted: dict[ConsumeQueue, _Counted] = {}
        self._turn = 0
        self._units_left = 0

    def set_limits(self, limits: Mapping[str, TopicLimit]) -> None:
        """The topics that have limits, all of them; in force from the next pass on."""
        self._limits = dict(limits)
        self._counted = {
            queue: kept
            for queue, kept in self._counted.items()
            if queue.topic in limits and not queue.deleted
        }

    def begin(self) -> None:
        """Every cleanResourceInterval: begin a pass in the background."""
        self.passes.begin("retention (topics)", self.topic_pass)

    def round(self) -> int:
        """One pass, in place: for a store without a loop."""
        return in_place(self.topic_pass())

    async def topic_pass(self) -> int:
        """One pass. Returns the number of messages that readers no longer see.

        New minimum offsets are written first; when that fails they count until the next start."""
        limits = self._limits
        now_ms = self.steady.now_ms()
        queues = [queue for queue in self.queues if queue.topic in limits]
        if not queues:
            return 0
        self._units_left = _UNITS_PER_PASS
        moved: dict[ConsumeQueue, int] = {}
        first = self._turn % len(queues)
        due = (queues[first:] + queues[:first])[:_QUEUES_PER_PASS]
        self._turn = first + len(due)
        for number, queue in enumerate(due):
            if number % _QUEUES_PER_STEP == _QUEUES_PER_STEP - 1:
                await self.off_loop.pause(0)
            floor = await self._floor(queue, limits[queue.topic], now_ms)
            if floor > queue.min_offset:
                moved[queue] = floor
            if self.off_loop.ending:
                break
        return await self._move(moved) if moved else 0

    async def _move(self, moved: Mapping[ConsumeQueue, int]) -> int:
        topics: dict[str, dict[int, int]] = {}
        for queue, floor in moved.items():
            if not queue.deleted:
                topics.setdefault(queue.topic, {})[queue.queue_id] = floor
        for topic, floors in topics.items():
            self.min_offsets.note(topic, floors)
        try:
            await self.off_loop.run(self.min_offsets.save)
        except OSError as failure:
            log.error("minimum offsets could not be written, trying again with the next: %s", failure)
        for topic, floors in topics.items():
            log.info("topic %s: its own retention moved the minimum offsets of %d queues", topic, len(floors))
        return sum(queue.raise_min(floor) for queue, floor in moved.items())

    async def _floor(self, queue: ConsumeQueue, limit: TopicLimit, now_ms: int) -> int:
        """The first offset within the limits."""
        floor = queue.min_offset
        if limit.age_ms is not None and queue.max_offset > floor:
            young = await self.lookups.first_since(queue, now_ms - limit.age_ms)
            floor = max(floor, young)
        if limit.bytes_per_queue is not None:
            count = partial(self._by_bytes, queue, floor, limit.bytes_per_queue)
            floor = max(floor, await self.off_loop.ask(count))
        return floor

    def _by_bytes(self, queue: ConsumeQueue, begin: int, limit: int, reads: Reads) -> int:
        """The first offset from which on at most `limit` bytes follow, as far as they are counted yet."""
        counted = self._counted.get(queue)
        if counted is None or not counted.begin <= begin <= counted.end <= queue.max_offset:
            counted = self._counted[queue] = _Counted(begin, begin)
        while counted.begin < begin:  # what the age limit has taken
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
        """Record sizes of some units from `begin` on, at least one; fillers and lost units have none."""
        want = min(end - begin, _UNITS_PER_READ)
        data = queue.read(begin, want, reads)
        if data is None or len(data) < UNIT_DTYPE.itemsize:
            return np.zeros(min(want, queue.next_file_offset(begin) - begin), np.int64)
        sizes = np.frombuffer(bytes(data), UNIT_DTYPE)["size"].astype(np.int64)
        sizes[sizes == FILLER_SIZE] = 0
        return sizes

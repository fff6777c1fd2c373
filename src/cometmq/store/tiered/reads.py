"""Reads of log segments that exist only in the object store.

The consume queues stay on the local disk, so a query knows the positions of its records. A read returns bytes
from memory or raises NotInMemory, like a read of a local file that is not in the page cache. Threads of this
module then get whole blocks, check their CRCs, and keep the newest blocks in memory. One request gets several
adjacent blocks, and serves all queries that wait for them.

If the object store does not return a block, or if the CRC does not match, clients receive SYSTEM_BUSY. They
must not receive "no message": consumers would skip messages that still exist.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import msgspec

from cometmq import logs
from cometmq.store.base.disk import Buffer
from cometmq.store.base.files import NotInMemory, Reads
from cometmq.store.tables.tiered_segments import TieredSegments
from cometmq.store.tiered.layout import (
    BLOCK,
    Damaged,
    ObjectStore,
    ObjectStoreFailed,
    blocks_length,
    checked_blocks,
    checked_crcs,
    unavailable,
)

log = logs.logger(__name__)

_MAX_BLOCKS_KEPT = 64  # 32 MiB. Pulls that wait for blocks may hold as much again
_MAX_CRCS_KEPT = 256  # segments. The CRCs of a segment of 1 GiB have 8 KiB
_MAX_TIMES_KEPT = 20_000
_BLOCKS_PER_REQUEST = 8  # 4 MiB
_MAX_BLOCKS_PER_READ = 16
_BLOCKS_AHEAD = 3
_PARALLEL_REQUESTS = 4
_MAX_WAITING = 256
"""The maximum number of queries that wait for the object store. Further queries get SYSTEM_BUSY at once."""
_TIMEOUT_S = 2.0  # After a failure that took longer, requests are refused for the same time

Block = tuple[int, int]
"""The position of a segment in the log, and the number of a block in the segment."""


class TieredCounts(msgspec.Struct, eq=False):
    """Counters for the metrics, since the start of the broker."""

    segments: int = 0
    uploaded_bytes: int = 0
    failures: int = 0
    reads: int = 0
    read_bytes: int = 0
    damaged: int = 0
    lost: int = 0


class TieredRange(NamedTuple):
    """The blocks that a query needs and that are not in memory."""

    reader: TieredReads
    blocks: tuple[Block, ...]

    async def fetch(self) -> None:
        await self.reader.fetch(self.blocks)

    def not_kept(self) -> Exception:
        return unavailable("too many consumers read old messages")


class TieredReads:
    """Reads the segments of a store from its object store. Its methods run on the event loop."""

    def __init__(self, objects: ObjectStore, table: TieredSegments, segment_size: int) -> None:
        self.objects = objects
        self.table = table
        self.counts = TieredCounts()
        self.complete = False
        """Whether the table was compared with the object store. Before, the table may lack a segment."""
        self._segment_size = segment_size
        self._blocks: OrderedDict[Block, bytes] = OrderedDict()
        self._crcs: OrderedDict[int, bytes] = OrderedDict()
        self._under_way: dict[Block, asyncio.Future[None]] = {}
        self._waiting = 0
        self._places = asyncio.Semaphore(_PARALLEL_REQUESTS)
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._log_limit = logs.LogLimiter(1, 60)
        self.store_times: dict[int, int] = _Times()
        self._refused_until = 0.0

    @property
    def begin(self) -> int:
        return self.table.begin

    def read(self, position: int, length: int, reads: Reads) -> Buffer | None:
        """See `OlderSegments`."""
        at = position % self._segment_size
        base = position - at
        if base not in self.table.by_base:
            if base > self.begin and not self.complete:
                raise unavailable("the table of segments has not been checked yet")
            return None
        numbers = range(at // BLOCK, (at + length - 1) // BLOCK + 1)
        parts = [self._blocks.get((base, number)) for number in numbers]
        if None in parts:
            missing = tuple(
                (base, number) for number, part in zip(numbers, parts, strict=True) if part is None
            )
            if not reads.wait:
                raise NotInMemory(TieredRange(self, missing))
            try:
                for each in missing:
                    self._keep([each], self._get(base, each[1], 1))
                parts = [self._blocks[base, number] for number in numbers]
            except OSError as failure:
                raise self._failed(failure) from None
        begin = at - numbers[0] * BLOCK
        found = [part for part in parts if part is not None]
        whole = found[0] if len(found) == 1 else b"".join(found)
        return whole[begin : begin + length]

    def require(self, positions: Sequence[int], sizes: Sequence[int], reads: Reads) -> None:
        """See `OlderSegments`. Requests the blocks of the first record and of the next few records."""
        if reads.wait:
            return
        wanted: dict[Block, None] = {}
        first = 0
        for position, size in zip(positions, sizes, strict=True):
            at = position % self._segment_size
            base = position - at
            if base not in self.table.by_base or at + size > self._segment_size:
                break  # A record that ends in another segment has a damaged size, and is not read
            wanted.update(dict.fromkeys((base, n) for n in range(at // BLOCK, (at + size - 1) // BLOCK + 1)))
            first = first or len(wanted)
            if len(wanted) >= _MAX_BLOCKS_PER_READ:
                break
        blocks = list(wanted)
        if any(block not in self._blocks for block in blocks[:first]):
            missing = (block for block in blocks if block not in self._blocks)
            raise NotInMemory(TieredRange(self, tuple(missing)))

    async def fetch(self, blocks: Sequence[Block]) -> None:
        """Load blocks into memory. Raises CommandError (SYSTEM_BUSY) if the first block is unavailable.

        If another block is unavailable, the query returns the records before it.
        """
        if self._waiting >= _MAX_WAITING:
            raise unavailable("too many queries wait")
        self._waiting += 1
        try:
            for run in _runs(self._with_next(block for block in blocks if not self._there(block))):
                task = asyncio.ensure_future(self._fetch_run(run))
                self._under_way.update(dict.fromkeys(run, task))
                task.add_done_callback(partial(self._done, run))
            tasks: set[asyncio.Future[None]] = {
                self._under_way[block] for block in blocks if block in self._under_way
            }
            first = self._under_way.get(blocks[0])
            if tasks:
                await asyncio.wait(tasks)
            for done in tasks:
                if not done.cancelled() and (failure := done.exception()) is not None:
                    error = self._failed(failure)
                    if done is first:
                        raise error from None
        finally:
            self._waiting -= 1

    def _with_next(self, lacking: Iterable[Block]) -> list[Block]:
        """Return the blocks to request. If a single block follows one in memory, read ahead."""
        wanted = list(lacking)
        if len(wanted) == 1:
            base, number = wanted[0]
            segment = self.table.by_base.get(base)
            if segment is not None and (base, number - 1) in self._blocks:
                stop = min(number + 1 + _BLOCKS_AHEAD, -(-segment.size // BLOCK))
                wanted += [(base, n) for n in range(number + 1, stop) if not self._there((base, n))]
        return wanted

    def _there(self, block: Block) -> bool:
        if block in self._blocks:
            self._blocks.move_to_end(block)
        return block in self._blocks or block in self._under_way

    def _done(self, run: Sequence[Block], task: asyncio.Future[None]) -> None:
        for block in run:
            del self._under_way[block]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the waiting queries report it

    async def _fetch_run(self, run: Sequence[Block]) -> None:
        async with self._places:
            base, first = run[0]
            if self._closed:
                raise ObjectStoreFailed("the broker is stopping")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_PARALLEL_REQUESTS, "cometmq-tiered-reads")
            loop = asyncio.get_running_loop()
            begun = loop.time()
            if begun < self._refused_until:
                raise ObjectStoreFailed("requests are refused after an earlier timeout")
            try:
                data = await loop.run_in_executor(self._pool, self._get, base, first, len(run))
            except OSError:
                # After a timeout, queued requests fail at once, instead of one timeout after the other.
                if loop.time() - begun > _TIMEOUT_S:
                    self._refused_until = loop.time() + _TIMEOUT_S
                raise
            self._keep(run, data)

    def _keep(self, run: Sequence[Block], data: bytes) -> None:
        for block, at in zip(run, range(0, len(data), BLOCK), strict=False):
            self._blocks[block] = data[at : at + BLOCK]
        while len(self._blocks) > _MAX_BLOCKS_KEPT:
            self._blocks.popitem(last=False)

    def _get(self, base: int, first: int, count: int) -> bytes:
        """Return consecutive blocks of a segment, up to the first damaged block. Raises OSError."""
        segment = self.table.by_base.get(base)
        if segment is None:
            raise ObjectStoreFailed("the segment has just been deleted")
        place = self.objects, self.table.store_id, base, segment
        try:
            crcs = self._crcs.get(base)
            if crcs is None:
                crcs = self._crcs[base] = checked_crcs(*place)
                while len(self._crcs) > _MAX_CRCS_KEPT:
                    self._crcs.popitem(last=False)
            data = checked_blocks(*place, crcs, first, count)
        except Damaged:
            self.counts.damaged += 1
            raise
        self.counts.reads += 1
        self.counts.read_bytes += len(data)
        self.counts.damaged += len(data) < blocks_length(segment, first, count)
        return data

    def _failed(self, failure: BaseException) -> BaseException:
        """Count and log a failed read. Return the exception for the client."""
        if not isinstance(failure, OSError):
            return failure
        self.counts.failures += 1
        if self._log_limit.allows():
            log.error("messages in the object store cannot be read: %s", failure)
        return unavailable("the read failed (see the log of the broker)")

    def forget(self, base: int) -> None:
        """Remove the cached blocks and CRCs of a segment that was deleted or uploaded again."""
        self._crcs.pop(base, None)
        for block in [block for block in self._blocks if block[0] == base]:
            del self._blocks[block]

    def end(self) -> None:
        """Make all queries fail, because a stop of the broker must not wait for them."""
        self._closed = True
        for task in set(self._under_way.values()):
            task.cancel()

    def close(self) -> None:
        """Release the threads without waiting for requests in progress."""
        self.end()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class _Times(dict[int, int]):
    """A cache of store times by log position. A full cache is cleared."""

    def __setitem__(self, position: int, stored_ms: int) -> None:
        if len(self) >= _MAX_TIMES_KEPT:
            self.clear()
        super().__setitem__(position, stored_ms)


def _runs(blocks: Iterable[Block]) -> list[list[Block]]:
    """Group adjacent blocks of a segment into requests of at most `_BLOCKS_PER_REQUEST`."""
    runs: list[list[Block]] = []
    for block in sorted(blocks):
        last = runs[-1] if runs else []
        if last and last[-1] == (block[0], block[1] - 1) and len(last) < _BLOCKS_PER_REQUEST:
            last.append(block)
        else:
            runs.append([block])
    return runs

"""Runs work that must not block the event loop: uncached reads, deletions, syncs.

Such work is a coroutine that lets a `StoreExecutor` do each step that may wait. In a store without an event
loop, the executor does these steps directly on the calling thread, so the same code serves both cases.

File ranges that are not in memory are read in threads: each range once, and a few at a time. Consumers that
drain queues of one topic in parallel need the same range at the same time and share one read. The number of
concurrent reads is small, because each read causes work for the event loop, and live sends must not wait for
the work of many reads. Normally, a thread only brings a range into the page cache, and the query reads it
from there. If the page cache does not keep the range, or if the file system does not support reads without
waiting, the thread passes the bytes to the query directly. The loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar, TypeVarTuple

from cometmq.store.base.disk import Disk
from cometmq.store.base.files import CACHED, WAITING, FileRange, NotInMemory, Reads, RemoteRange

T = TypeVar("T")
Given = TypeVarTuple("Given")

READ_AHEAD = 128 << 10
_MAX_PARALLEL_READS = 2
_LARGE_ANSWERS = 2


class StoreExecutor:
    """The executor and the event loop with which one store does work that may wait for the disk.

    For the loop thread only.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._places = asyncio.Semaphore(_MAX_PARALLEL_READS)
        self._under_way: dict[FileRange, asyncio.Task[None]] = {}
        self._passing = asyncio.Lock()  # Lets only one query at a time get its bytes directly from a thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Executor | None = None
        self._ending = asyncio.Event()
        self._turns = asyncio.Lock()  # Ensures that at most one `pause(0)` ends per loop iteration
        self.large_answers = asyncio.Semaphore(_LARGE_ANSWERS)
        """Limits the responses of many megabytes that are assembled at the same time."""

    def attach(self, loop: asyncio.AbstractEventLoop, pool: Executor) -> None:
        """From now on, run blocking work in `pool`, and uncached reads in the loop's default executor."""
        self._loop, self._pool = loop, pool
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Request that tasks with many steps end. Their pauses end immediately."""
        self._ending.set()

    def detach(self) -> None:
        """From now on, run all work on the calling thread."""
        self._loop = self._pool = None

    @property
    def ending(self) -> bool:
        return self._ending.is_set()

    async def run(self, work: Callable[[*Given], T], *given: *Given) -> T:
        """Run `work(*given)` in the executor and return its result."""
        if self._loop is None:
            return work(*given)
        return await self._loop.run_in_executor(self._pool, partial(work, *given))

    async def tick_end(self) -> None:
        """Wait until the broker has committed and answered the requests received in this loop iteration."""
        if self._loop is not None:
            # The timer of this sleep fires after the reads of a loop iteration. These reads have scheduled
            # the commit before the timer schedules the rest of this coroutine, so the commit runs first.
            await asyncio.sleep(0.001)

    async def pause(self, ms: int) -> None:
        """Wait for `ms` milliseconds; 0 lets the loop do other work once. Without a loop, do nothing."""
        if self._loop is None:
            return
        if ms <= 0:
            async with self._turns:
                await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(self._ending.wait(), ms / 1000)
        except TimeoutError:
            pass

    async def query(self, question: Callable[[Reads], T], miss: NotInMemory | None = None) -> T:
        """Return the result of a query. The loop does not wait for ranges that are not in memory.

        A thread reads such a range, then the query is repeated from its beginning. So before its last read, a
        query may only make changes that can be made again. If the caller has already executed the query once,
        `miss` is the exception of that. Raises OSError.
        """
        if self._loop is None:
            return question(WAITING)
        if miss is None:
            try:
                return question(CACHED)
            except NotInMemory as first:
                miss = first
        return await self._answer(question, miss.missing)

    async def _answer(self, question: Callable[[Reads], T], missing: FileRange | RemoteRange) -> T:
        """Repeat a query after reading the range that it lacked, and each range that it then lacks."""
        tried: set[FileRange | RemoteRange] = set()
        while missing not in tried:
            tried.add(missing)
            try:
                await (self.fetch(missing) if isinstance(missing, FileRange) else missing.fetch())
                return question(CACHED)
            except NotInMemory as miss:
                missing = miss.missing
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                # The bad sector may be in a part of the block that the query does not need. So below, only
                # the needed ranges are read.
                break
        if not isinstance(missing, FileRange):
            raise missing.not_kept()
        async with self._passing:
            return await self._pass_ranges(question, missing)

    async def fetch(self, missing: FileRange) -> None:
        """Bring the blocks of READ_AHEAD bytes that a range touches into the page cache. Raises OSError."""
        start = missing.offset - missing.offset % READ_AHEAD
        stop = missing.offset + missing.length
        whole = FileRange(missing.path, start, stop + -stop % READ_AHEAD - start)
        task = self._under_way.get(whole)
        if task is None:
            task = self._under_way[whole] = asyncio.create_task(self._fetch(whole))
            task.add_done_callback(lambda _: self._under_way.pop(whole, None))
        await asyncio.shield(task)

    async def _fetch(self, whole: FileRange) -> None:
        async with self._places:
            await self._read(whole)

    async def _pass_ranges(self, question: Callable[[Reads], T], missing: FileRange | RemoteRange) -> T:
        """Repeat a query with the bytes of each range that was not in memory, until the query completes.

        If the disk cannot read a range, the query gets the error: it may be able to do without the range.
        """
        fetched: dict[FileRange, bytes | OSError] = {}
        tried: set[RemoteRange] = set()
        while True:
            try:
                if isinstance(missing, FileRange):
                    fetched[missing] = await self._read(missing)
                elif missing in tried:
                    raise missing.not_kept()
                else:
                    tried.add(missing)
                    await missing.fetch()
            except OSError as failure:
                if failure.errno != errno.EIO or not isinstance(missing, FileRange):
                    raise
                fetched[missing] = failure
            try:
                return question(Reads(fetched=fetched))
            except NotInMemory as miss:
                missing = miss.missing

    async def _read(self, wanted: FileRange) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(None, wanted.read, self._disk)

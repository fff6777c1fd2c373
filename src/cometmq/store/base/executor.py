"""Runs work that must not block the event loop: uncached reads, deletions, syncs.

Such work is a coroutine that lets a `StoreExecutor` do each step that may wait. In a store without an event
loop, the executor does these steps directly on the calling thread, so the same code serves both cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar, TypeVarTuple

from cometmq.store.base.disk import Disk
from cometmq.store.base.files import CACHED, WAITING, NotInMemory, Reads
from cometmq.store.base.uncached_reads import UncachedReads

T = TypeVar("T")
Given = TypeVarTuple("Given")

_LARGE_ANSWERS = 2


class StoreExecutor:
    """The executor and the event loop with which one store does work that may wait for the disk.

    For the loop thread only.

    Attributes:
        large_answers: A semaphore for responses of many megabytes: at most two are assembled at the same
            time.
    """

    def __init__(self, disk: Disk) -> None:
        self._uncached_reads = UncachedReads(disk)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Executor | None = None
        self._ending = asyncio.Event()
        self._turns = asyncio.Lock()  # Ensures that at most one `pause(0)` ends per loop iteration
        self.large_answers = asyncio.Semaphore(_LARGE_ANSWERS)

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
        """Wait until the broker has committed and answered the requests received in this loop iteration.

        Without a loop, return immediately.
        """
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
        query may only make changes that can be made again.

        Args:
            question: The query.
            miss: The NotInMemory exception, if the caller has already executed the query once.

        Raises:
            OSError: A read failed.
        """
        if self._loop is None:
            return question(WAITING)
        if miss is None:
            try:
                return question(CACHED)
            except NotInMemory as first:
                miss = first
        return await self._uncached_reads.answer(question, miss.missing)

"""Work that must not block the event loop: uncached reads, deletions, syncs.

A store without a loop does all of it in place, so the same code serves both: work that may wait is a
coroutine that passes its waits to a `StoreExecutor`.
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
    """The executor and the loop in which one store does work that may wait. For the loop thread only.

    Attributes:
        large_answers: A lock that is held while an answer of many megabytes is assembled; at most two at the
            same time.
    """

    def __init__(self, disk: Disk) -> None:
        self._uncached_reads = UncachedReads(disk)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Executor | None = None
        self._ending = asyncio.Event()
        self._turns = asyncio.Lock()  # one long task per loop iteration
        self.large_answers = asyncio.Semaphore(_LARGE_ANSWERS)

    def attach(self, loop: asyncio.AbstractEventLoop, pool: Executor) -> None:
        """Use `pool` for work from now on, and the loop's default executor for uncached reads."""
        self._loop, self._pool = loop, pool
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Request that tasks of many steps end, and end their pauses immediately."""
        self._ending.set()

    def detach(self) -> None:
        """Run all work on the calling thread from now on."""
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
        """Wait until a tick of the broker has just ended. Returns immediately without a loop."""
        if self._loop is not None:
            # This timer runs after the reads of its loop iteration. Its waiters run after the tick that those
            # reads requested.
            await asyncio.sleep(0.001)

    async def pause(self, ms: int) -> None:
        """Wait for `ms` milliseconds; 0 yields to the loop's other work. Does nothing without a loop."""
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
        """Return the result of a query, without waiting on the loop for ranges that are not in memory.

        A thread reads a missing range, then the query is repeated from its beginning. So until its last read,
        a query may only make changes that it can repeat.

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

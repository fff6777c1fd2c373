"""Work that must not keep the event loop waiting: cold reads, deletions, syncs.

A store without a loop does all of it in place, so the same code serves both: what may wait is a coroutine
that hands its waits to an `OffLoop`; `in_place` runs such a coroutine to its end where there is no loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from cometmq.store.base.cold_reads import ColdReads
from cometmq.store.base.disk import Disk
from cometmq.store.base.files import CACHED, WAITING, NotInMemory, Reads

T = TypeVar("T")
Given = TypeVarTuple("Given")

_LARGE_ANSWERS = 2


def in_place(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of a coroutine none of whose waits is one: that of a store without a loop."""
    try:
        work.send(None)
    except StopIteration as end:
        outcome: T = end.value
        return outcome
    work.close()
    raise RuntimeError("the store has a loop: await this")


class OffLoop:
    """Where one store does what waits. Loop thread only.

    large_answers: held by whoever puts an answer of many megabytes together; two may at once."""

    def __init__(self, disk: Disk) -> None:
        self._cold_reads = ColdReads(disk)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Executor | None = None
        self._ending = asyncio.Event()
        self._turns = asyncio.Lock()  # long work takes turns, else each would lengthen every turn of the loop
        self.large_answers = asyncio.Semaphore(_LARGE_ANSWERS)

    def attach(self, loop: asyncio.AbstractEventLoop, pool: Executor) -> None:
        """From now on, work runs in `pool`, and reads of what is not in memory in the loop's own threads."""
        self._loop, self._pool = loop, pool
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Ask whoever works in many steps to come to an end; pauses are over at once."""
        self._ending.set()

    def detach(self) -> None:
        """From now on everything runs in place."""
        self._loop = self._pool = None

    @property
    def ending(self) -> bool:
        return self._ending.is_set()

    async def run(self, work: Callable[[*Given], T], *given: *Given) -> T:
        """`work(*given)`, in the thread."""
        if self._loop is None:
            return work(*given)
        return await self._loop.run_in_executor(self._pool, partial(work, *given))

    async def tick_end(self) -> None:
        """Go on when a tick of the broker's has just ended; at once without a loop."""
        if self._loop is not None:
            # A timer runs after the reads of its turn, and who waits for it after the tick they asked for.
            await asyncio.sleep(0.001)

    async def pause(self, ms: int) -> None:
        """Let so much time pass; 0 gives the loop's other work a turn. Nothing without a loop."""
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

    async def ask(self, question: Callable[[Reads], T], miss: NotInMemory | None = None) -> T:
        """The answer to a question whose reads would wait for the device where something is not in memory.

        Then a thread reads that, and the question is asked again, from its beginning: it changes nothing
        before its last read that it could not change twice. `miss`: what it has met already. Raises OSError.
        """
        if self._loop is None:
            return question(WAITING)
        if miss is None:
            try:
                return question(CACHED)
            except NotInMemory as first:
                miss = first
        return await self._cold_reads.answer(question, miss.missing)

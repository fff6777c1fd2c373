"""Work that must not keep the event loop waiting: cold reads, deletions, syncs.

A store without a loop does all of it in place, so the same code serves both: what may wait is a coroutine
that hands its waits to an `OffLoop`; `in_place` runs such a coroutine to its end where there is no loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from cometmq.store.base.cold_reads import carry
from cometmq.store.base.files import NotCached, NotInMemory, StoreFiles

T = TypeVar("T")
Given = TypeVarTuple("Given")


class Need(enum.Enum):
    """What a walk may want to go on with."""

    ROOM = enum.auto()  # in memory, for an answer of many megabytes; at most once, and held to the end


Walk = Generator[NotCached | Need | None, None, T]
"""A question in steps, each of which keeps its place. It stops at a range that is not in memory, to go on
once that has been read, with None where other work of the loop should get a turn, and with what it needs. Its
value is the answer."""

_LARGE_ANSWERS = 2  # put together at once
_SAME_MISS = 3  # times that a range which was just read is not in memory again, before it is carried


class _Answer(NamedTuple):
    """What a walk has come to."""

    value: Any


def walked(walk: Walk[T]) -> T:
    """The answer of a walk, in one go. Raises NotInMemory where that is asked for (see StoreFiles)."""
    while True:
        try:
            missing = next(walk)
        except StopIteration as end:
            answer: T = end.value
            return answer
        if isinstance(missing, NotCached):
            walk.close()
            raise NotInMemory(missing)


def patiently(read: Callable[[], T]) -> Walk[T]:
    """What `read` gives, as a part of a walk: asked again once what it misses is in memory."""
    while True:
        try:
            return read()
        except NotInMemory as miss:
            yield miss.missing


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
    """Where one store does what waits. Loop thread only."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Executor | None = None
        self._ending = asyncio.Event()
        self._room = asyncio.Semaphore(_LARGE_ANSWERS)
        self._turns = asyncio.Lock()  # long walks take turns, else each would lengthen every turn of the loop

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

    async def pause(self, ms: int) -> None:
        """Let so much time pass; 0 gives the loop's other work a turn. Nothing without a loop."""
        if self._loop is None:
            return
        if ms <= 0:
            await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(self._ending.wait(), ms / 1000)
        except TimeoutError:
            pass

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question whose reads would wait for the device where something is not in memory.

        Then a thread reads that, and the question is asked again, from its beginning: it changes nothing
        before its last read that it could not change twice.
        """
        if self._loop is None:
            return question()
        last: NotCached | None = None
        same = 0
        while True:
            outcome = self._try(question)
            if not isinstance(outcome, NotCached):
                return outcome
            same = same + 1 if outcome == last else 0
            if same == _SAME_MISS:
                return await carry(self._files, outcome, partial(self._try, question))
            last = outcome
            await self._loop.run_in_executor(None, outcome.fetch, self._files.disk)

    async def walk(self, walk: Walk[T]) -> T:
        """The answer of a walk, without keeping the loop waiting: threads read what is not in memory, and
        other work gets a turn between steps."""
        if self._loop is None:
            return walked(walk)
        async with AsyncExitStack() as held:
            return await self._walk(walk, held)

    async def _walk(self, walk: Walk[T], held: AsyncExitStack) -> T:
        assert self._loop is not None
        last: NotCached | None = None
        same = 0
        while True:
            outcome = self._try(partial(_step, walk))
            if isinstance(outcome, NotCached):
                same = same + 1 if outcome == last else 0
                last = outcome
                if same < _SAME_MISS:
                    await self._loop.run_in_executor(None, outcome.fetch, self._files.disk)
                    continue
                outcome = await carry(self._files, outcome, partial(self._try, partial(_step, walk)))
            if isinstance(outcome, _Answer):
                answer: T = outcome.value
                return answer
            if outcome is Need.ROOM:
                await held.enter_async_context(self._room)
                continue
            async with self._turns:
                await asyncio.sleep(0)

    def _try(self, question: Callable[[], T]) -> T | NotCached:
        self._files.impatient = True
        try:
            return question()
        except NotInMemory as miss:
            return miss.missing
        finally:
            self._files.impatient = False


def _step(walk: Walk[Any]) -> NotCached | Need | _Answer | None:
    try:
        return next(walk)
    except StopIteration as end:
        return _Answer(end.value)

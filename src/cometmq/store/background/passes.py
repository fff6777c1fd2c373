"""Background work of one store that is begun on demand, each kind at most once at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from cometmq.periodic import FailureLog

Pass = Callable[[], Coroutine[Any, Any, object]]


class Passes:
    """Runs passes by name on a loop; none begins without one. Loop thread only."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, asyncio.Task[object]] = {}
        self._failures = FailureLog()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def attached(self) -> bool:
        return self._loop is not None

    def begin(self, name: str, work: Pass) -> None:
        """Start a pass, unless one of this name is at work. A failure is logged (`FailureLog`)."""
        if self._loop is not None and name not in self._running:
            task = self._running[name] = self._loop.create_task(work())
            task.add_done_callback(partial(self._done, name))

    def _done(self, name: str, task: asyncio.Task[object]) -> None:
        self._running.pop(name, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._failures.succeeded(name)
        else:
            self._failures.failed(name, error)

    async def begin_anew(self, name: str, work: Pass) -> None:
        """Wait for the pass of this name that is at work, then begin one and wait for it."""
        await self.idle(name)
        self.begin(name, work)
        await self.idle(name)

    async def idle(self, *names: str) -> None:
        """Wait for the passes of these names that are at work; without a name for all."""
        tasks = [task for name, task in self._running.items() if not names or name in names]
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Begin no more passes, and wait for those at work."""
        self._loop = None
        await self.idle()

    def cancel(self) -> None:
        """Begin no more passes, and cancel those at work."""
        self._loop = None
        for task in self._running.values():
            task.cancel()

"""Background tasks of one store, identified by name. At most one task of each name runs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from cometmq.periodic import FailureLog

Work = Callable[[], Coroutine[Any, Any, object]]


class BackgroundTasks:
    """Runs tasks by name on a loop. Without a loop, no task is started. For the loop thread only."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, asyncio.Task[object]] = {}
        self._failures = FailureLog()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def attached(self) -> bool:
        return self._loop is not None

    def begin(self, name: str, work: Work) -> None:
        """Start a task, unless a task of this name is running. A failure is logged (`FailureLog`)."""
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

    async def run_again(self, name: str, work: Work) -> None:
        """Wait for the running task of this name, if any. Then start a new one and wait for it."""
        await self.idle(name)
        self.begin(name, work)
        await self.idle(name)

    async def idle(self, *names: str) -> None:
        """Wait for the running tasks with the given names, by default for all."""
        tasks = [task for name, task in self._running.items() if not names or name in names]
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        self._loop = None
        await self.idle()

    def cancel(self) -> None:
        self._loop = None
        for task in self._running.values():
            task.cancel()

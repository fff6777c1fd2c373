"""Periodic jobs, background tasks, and delays between attempts, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from cometmq import logs

log = logs.logger(__name__)

T = TypeVar("T")

FAILURE_INTERVAL_S = 60.0
"""Minimum seconds between two log lines about OSErrors of the same job."""


class FailureLog:
    """Logs the failures of jobs that are repeated.

    An OSError, such as that of a full disk, is logged in one line, at most once per FAILURE_INTERVAL_S until
    the job succeeds. Any other exception is logged each time, with its traceback.
    """

    def __init__(self) -> None:
        self._limits: dict[str, logs.LogLimiter] = {}

    def succeeded(self, name: str) -> None:
        """Record a success, so that the next failure of this job is logged in any case."""
        self._limits.pop(name, None)

    def failed(self, name: str, error: BaseException, when: str = "") -> None:
        """Log that a job failed. `when` is appended to the log line and tells when the job runs again."""
        if not isinstance(error, OSError):
            log.error("%s failed, trying again%s", name, when, exc_info=error)
            return
        if self._limits.setdefault(name, logs.LogLimiter(1, FAILURE_INTERVAL_S)).allows():
            log.error("%s failed, trying again%s: %s", name, when, error)


class Running:
    """The base class of objects with `start()` and `stop()`, for use with `async with`."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.stop()

    async def start(self) -> Any:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError


class Backoff:
    """Growing delays between attempts: `first_s` seconds, doubled after each failure, up to `max_s`."""

    __slots__ = ("_first_s", "_max_s", "failures")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.failures = 0

    def next_s(self) -> float:
        """Count a failure and return the delay before the next attempt in seconds."""
        self.failures += 1
        return min(self._first_s * 2.0 ** min(self.failures - 1, 32), self._max_s)

    def reset(self) -> None:
        """Record a success, so that the delay after the next failure is `first_s` again."""
        self.failures = 0


class Tasks(set[asyncio.Task[Any]]):
    """The running background tasks of an owner. Each is removed when it ends."""

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of the running loop."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def finish(self, *, cancel: bool = False) -> None:
        """Wait until all tasks have ended. Their exceptions are ignored. `cancel` cancels the tasks first."""
        if cancel:
            for task in self:
                task.cancel()
        await asyncio.gather(*self, return_exceptions=True)


class Periodic:
    """Runs a job every `interval_s` seconds in an event loop, for the first time after one interval.

    If `interval_s` is a function, it is called before each interval and returns the interval's length. If
    `job` returns an awaitable, the next interval begins only when the awaitable has completed, so that runs
    never overlap. A failure of the job is logged (`FailureLog`) and does not end the repetition. Methods must
    be called in the event loop's thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval_s: float | Callable[[], float],
        job: Callable[[], object],
        *,
        name: str,
    ) -> None:
        self._loop = loop
        self._interval = interval_s
        self._job = job
        self._name = name
        self._failures = FailureLog()
        self._timer: asyncio.TimerHandle | None = None
        self._run: asyncio.Task[None] | None = None
        self._active = False
        self._wanted = False

    def start(self) -> None:
        """Begin the first interval. Has no effect if already started."""
        if not self._active:
            self._active = True
            if self._run is None:
                self._wait()

    @property
    def _interval_s(self) -> float:
        return self._interval() if callable(self._interval) else self._interval

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._begin)

    def soon(self) -> None:
        """Run the job now, or once more directly after its present run. Has no effect if not started."""
        self._wanted = self._active
        if self._active and self._timer is not None:
            self._timer.cancel()
            self._begin()

    def _begin(self) -> None:
        self._timer = None
        self._run = self._loop.create_task(self._run_once())
        self._run.add_done_callback(self._ended)  # called even if the run is cancelled before it begins

    async def _run_once(self) -> None:
        self._wanted = False
        try:
            outcome = self._job()
            if isinstance(outcome, Awaitable):
                await outcome
            self._failures.succeeded(self._name)
        except Exception as error:
            self._failures.failed(self._name, error, f" in {self._interval_s:g} s")

    def _ended(self, _run: asyncio.Task[None]) -> None:
        self._run = None
        if self._active and self._wanted:
            self._begin()
        elif self._active:
            self._wait()

    def cancel(self) -> None:
        """Stop the repetition of the job, and cancel its current run, if there is one."""
        self._end()
        if self._run is not None:
            self._run.cancel()

    async def stop(self, *, cancel: bool = False) -> None:
        """Stop the repetition of the job, and wait for its current run. `cancel` cancels that run first."""
        if cancel:
            self.cancel()
        else:
            self._end()
        if self._run is not None and self._run is not asyncio.current_task():
            await asyncio.wait([self._run])

    def _end(self) -> None:
        self._active = False
        if self._timer is not None:
            self._timer.cancel()

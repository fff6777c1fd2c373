"""Repeated background work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from cometmq import logs

log = logs.logger(__name__)

FAILURE_INTERVAL_S = 60.0
"""Minimum interval, in seconds, between two log lines about the OSErrors of one job."""


class FailureLog:
    """Logs failures of jobs that are tried again.

    An OSError, such as that of a full disk, is one line, at most once per FAILURE_INTERVAL_S until the job
    succeeds. Any other exception has its traceback, each time.
    """

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def succeeded(self, name: str) -> None:
        """Log the next failure of this job in any case."""
        self._logged_at.pop(name, None)

    def failed(self, name: str, error: BaseException, when: str = "") -> None:
        """Log a failure. `when`: when the job is tried again."""
        if not isinstance(error, OSError):
            log.error("%s failed, trying again%s", name, when, exc_info=error)
            return
        now = time.monotonic()
        if now - self._logged_at.get(name, -FAILURE_INTERVAL_S) >= FAILURE_INTERVAL_S:
            self._logged_at[name] = now
            log.error("%s failed, trying again%s: %s", name, when, error)


class Periodic:
    """Runs a job every `interval_s` seconds in an event loop, for the first time after one interval.

    If `interval_s` is a function, it is called before each interval. If `job` returns an awaitable, it is
    awaited before the next interval begins, so that runs never overlap. A failure is logged (`FailureLog`)
    and does not end the repetition. Methods must be called in the event loop's thread.
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
        """Run the job immediately, or once more directly after a run in progress.

        Has no effect if not started.
        """
        self._wanted = self._active
        if self._active and self._timer is not None:
            self._timer.cancel()
            self._begin()

    def _begin(self) -> None:
        self._timer = None
        self._run = self._loop.create_task(self._run_once())
        self._run.add_done_callback(self._ended)  # is also called if the run is cancelled before it begins

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
        """Begin no further run, and cancel a run in progress."""
        self._end()
        if self._run is not None:
            self._run.cancel()

    async def stop(self) -> None:
        """Begin no further run, and wait for a run in progress."""
        self._end()
        if self._run is not None and self._run is not asyncio.current_task():
            await asyncio.wait([self._run])

    def _end(self) -> None:
        self._active = False
        if self._timer is not None:
            self._timer.cancel()

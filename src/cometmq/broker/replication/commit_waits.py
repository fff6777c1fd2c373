"""Writes that wait until a raft group has committed the log up to a position, in log order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cometmq import logs
from cometmq.protocol.codes import ResponseCode
from cometmq.store import Clock

log = logs.logger(__name__)

SUCCESS = int(ResponseCode.SUCCESS)
SYSTEM_ERROR = int(ResponseCode.SYSTEM_ERROR)


class _Wait(NamedTuple):
    position: int
    deadline: float
    waiter: Callable[[int], None]


class CommitWaits:
    """The writes of a raft leader that wait for a commit. Must be used only in the event loop's thread."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        """Start with no waiting writes. `timeout_s` is the maximum wait of a write, in seconds."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waits: deque[_Wait] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._committed = -1

    def wait_for(self, position: int, waiter: Callable[[int], None]) -> None:
        """Call `waiter` with SUCCESS once the log is committed up to `position`.

        After a timeout or a failure, call `waiter` with SYSTEM_ERROR. Even then, the log may be committed up
        to `position` later.
        """
        if position <= self._committed:
            waiter(SUCCESS)
            return
        self._waits.append(_Wait(position, self._clock.monotonic() + self._timeout_s, waiter))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._expire)

    def committed(self, position: int) -> None:
        """Record that the log is committed up to `position`, and end the waits for positions up to there."""
        self._committed = position
        waits = self._waits
        while waits and waits[0].position <= position:
            waits.popleft().waiter(SUCCESS)

    def give_up(self, why: str) -> None:
        """End all waits with SYSTEM_ERROR. `why` is logged."""
        if self._waits:
            log.warning("the commit of %d write batches is uncertain: %s", len(self._waits), why)
        while self._waits:
            self._waits.popleft().waiter(SYSTEM_ERROR)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        late = 0
        while self._waits and self._waits[0].deadline <= now:
            self._waits.popleft().waiter(SYSTEM_ERROR)
            late += 1
        if late:
            log.warning("%d write batches were not committed within %g s", late, self._timeout_s)
        if self._waits:
            left = max(0.001, self._waits[0].deadline - now)
            self._timer = self._loop.call_later(left, self._expire)

"""Writes that wait until other brokers have stored the log up to a position, in log order."""

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

Waiter = Callable[[int], None]
"""A callback that is called once, with a response code."""


class _Wait(NamedTuple):
    position: int
    deadline: float
    waiter: Waiter


class Waits:
    """Waiting writes, in one list per number of brokers that a write waits for.

    One entry of a list represents all writes of one event-loop tick. Its position is the end of the log after
    that tick, and each list is in the order of these positions. While the timeout setting does not change, it
    is also in the order of the entries' deadlines. Must be used only in the event loop's thread.
    """

    def __init__(self, clock: Clock, late: int) -> None:
        """Start with no waiting writes. `late` is the response code for writes that wait for too long."""
        self._clock = clock
        self._late = late
        self._lists: dict[int, deque[_Wait]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def add(self, brokers: int, position: int, timeout_s: float, waiter: Waiter) -> None:
        """Let a write wait until `brokers` brokers have the log up to `position`, for at most `timeout_s`."""
        wait = _Wait(position, self._clock.monotonic() + timeout_s, waiter)
        self._lists.setdefault(brokers, deque()).append(wait)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def reached(self, copies: Callable[[int], int]) -> None:
        """End the waits of writes that enough brokers have; `copies` returns how many have a position."""
        for brokers, waits in list(self._lists.items()):  # a waiter may add another write
            while waits and copies(waits[0].position) >= brokers:
                waits.popleft().waiter(SUCCESS)

    def end_all(self, code: int) -> None:
        for waits in list(self._lists.values()):
            while waits:
                waits.popleft().waiter(code)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> int:
        self._timer, now, late = None, self._clock.monotonic(), 0
        for waits in list(self._lists.values()):
            while waits and waits[0].deadline <= now:
                waits.popleft().waiter(self._late)
                late += 1
        first = min((waits[0].deadline for waits in self._lists.values() if waits), default=None)
        if first is not None and self._timer is None:
            left = max(0.001, first - now)
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)
        return late


class CommitWaits(Waits):
    """The writes of a raft leader that wait until the group has committed them."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        """Start with no waiting writes. `timeout_s` is the maximum wait of a write, in seconds."""
        super().__init__(clock, SYSTEM_ERROR)
        self._timeout_s = timeout_s
        self._committed = -1

    def wait_for(self, position: int, waiter: Waiter) -> None:
        """Call `waiter` with SUCCESS once the log is committed up to `position`.

        After a timeout or a failure, call `waiter` with SYSTEM_ERROR. Even then, the log may be committed up
        to `position` later.
        """
        if position <= self._committed:
            waiter(SUCCESS)
        else:
            self.add(1, position, self._timeout_s, waiter)

    def committed(self, position: int) -> None:
        """Record that the log is committed up to `position`, and end the waits for positions up to there."""
        self._committed = position
        self.reached(lambda end: end <= position)

    def give_up(self, why: str) -> None:
        """End all waits with SYSTEM_ERROR. `why` is logged."""
        if len(self):
            log.warning("the commit of %d write batches is uncertain: %s", len(self), why)
        self.end_all(SYSTEM_ERROR)

    def _expire(self) -> int:
        late = super()._expire()
        if late:
            log.warning("%d write batches were not committed within %g s", late, self._timeout_s)
        return late

"""The calls of one connection: requests that this side has sent and that wait for a response.

A call is identified by its opaque number. The peer numbers the requests that it sends over the same
connection independently, so its numbers may be equal to those of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from cometmq.errors import RemotingError, RequestTimeout
from cometmq.protocol.frame import Frame

OPAQUE_MASK = 0x7FFF_FFFF
# Deadlines that differ by less than this time, in seconds, share one timer.
TIMER_GRAIN_S = 0.02


class Waiter(Protocol):
    """Receives the response to a call, or an error: a future, or an object whose methods act at once."""

    def done(self) -> bool: ...

    def set_result(self, result: Frame, /) -> None: ...

    def set_exception(self, exception: RemotingError, /) -> None: ...


class PendingCall(msgspec.Struct, eq=False):
    """One outstanding call: what waits for it, its request code, and its deadline on the loop's clock."""

    waiter: Waiter
    code: int
    deadline: float
    timeout_s: float


class CallTable:
    """The outstanding calls of one connection, by opaque number, with one timer for all of them."""

    __slots__ = ("_loop", "_next_opaque", "_pending", "_timer", "_timer_at", "addr")

    def __init__(self, loop: asyncio.AbstractEventLoop, addr: str) -> None:
        self._loop = loop
        self.addr = addr
        self._pending: dict[int, PendingCall] = {}
        self._next_opaque = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._pending)

    def next_opaque(self) -> int:
        """Return a number that no outstanding call in this table uses."""
        pending = self._pending
        opaque = self._next_opaque
        while opaque in pending:
            opaque = (opaque + 1) & OPAQUE_MASK
        self._next_opaque = (opaque + 1) & OPAQUE_MASK
        return opaque

    def add(self, opaque: int, code: int, timeout_s: float, waiter: Waiter) -> None:
        """Register a call, which fails with RequestTimeout after `timeout_s` seconds."""
        deadline = self._loop.time() + timeout_s
        self._pending[opaque] = PendingCall(waiter, code, deadline, timeout_s)
        if self._timer is None:
            self._arm(deadline)
        elif deadline < self._timer_at - TIMER_GRAIN_S:
            self._timer.cancel()
            self._arm(deadline)

    def resolve(self, frame: Frame) -> bool:
        """Pass a response to the call that waits for it. Return False if no call waits for it."""
        call = self._pending.pop(frame.opaque, None)
        if call is None:
            return False
        if not call.waiter.done():
            # Copy the body: the task that awaits the response runs after the receive buffer is overwritten.
            if type(frame.body) is not bytes:
                frame.body = bytes(frame.body)
            call.waiter.set_result(frame)
        return True

    def fail_all(self, error: Callable[[int], RemotingError]) -> None:
        """Fail every outstanding call with the exception that `error` returns for the call's request code."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, {}
        for call in pending.values():
            if not call.waiter.done():
                call.waiter.set_exception(error(call.code))

    def _arm(self, at: float) -> None:
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        earliest: float | None = None
        expired: list[int] = []
        for opaque, call in self._pending.items():
            if call.deadline <= now or call.waiter.done():
                expired.append(opaque)
            elif earliest is None or call.deadline < earliest:
                earliest = call.deadline
        for opaque in expired:
            call = self._pending.pop(opaque)
            if not call.waiter.done():
                call.waiter.set_exception(RequestTimeout(self.addr, call.code, call.timeout_s))
        if earliest is not None:
            self._arm(max(earliest, now + TIMER_GRAIN_S))

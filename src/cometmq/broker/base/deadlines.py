"""A timer for many deadlines, of which only the earliest one needs a timer of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls a function when a deadline has passed. Times are in ms of the event loop's monotonic clock."""

    __slots__ = ("_at_ms", "_expire", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[int], int | None]) -> None:
        """Create a timer. `expire(now)` handles the deadlines that have passed, and returns the next."""
        self._loop = loop
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._at_ms = 0

    def now_ms(self) -> int:
        """Return the present time."""
        return int(self._loop.time() * 1000)

    def arm(self, at_ms: int) -> None:
        """Call the function at `at_ms`, unless an earlier call is due already."""
        if self._timer is not None:
            if self._at_ms <= at_ms:
                return
            self._timer.cancel()
        self._at_ms = at_ms
        self._timer = self._loop.call_later(max(at_ms - self.now_ms(), 0) / 1000, self._run)

    def cancel(self) -> None:
        """Forget the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        following = self._expire(self.now_ms())
        if following is not None:
            self.arm(following)

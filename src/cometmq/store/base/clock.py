"""The one way the store learns what time it is, so that tests can own time.

Wall time stamps records and files (Unix epoch milliseconds, as RocketMQ writes them); monotonic time measures
intervals (seconds). A wall clock may step backwards; nothing in the store relies on it for order.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of wall and monotonic time."""

    def time_ms(self) -> int:
        """Wall clock, Unix epoch milliseconds."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


_PROOF_S = 3600.0
"""As long as a clock must have been ahead before that counts. Steps that somebody notices and takes back last
seconds or minutes; and whoever keeps messages for hours can do with an hour more."""


class SteadyTime:
    """Wall time for those who delete by age: a clock that jumps forward and comes back takes nothing along.

    It begins at the newest store time, or at the clock's time if that is earlier, and goes on with monotonic
    time. A clock that is behind it counts at once; one that is ahead, as after a stop of some days, once it
    has been ahead at every look for an hour, by the least of these.
    """

    __slots__ = ("_ahead_ms", "_at", "_clock", "_now_ms", "_since")

    def __init__(self, clock: Clock, newest_ms: int) -> None:
        """newest_ms: store time of the newest record; 0 without one."""
        self._clock = clock
        wall_ms = clock.time_ms()
        self._now_ms = float(min(newest_ms or wall_ms, wall_ms))
        self._at = self._since = clock.monotonic()
        self._ahead_ms = wall_ms - self._now_ms  # the least since `_since`

    def now_ms(self) -> int:
        """The time, in epoch milliseconds; each call is a look at the clock."""
        at = self._clock.monotonic()
        self._now_ms += (at - self._at) * 1000
        self._at = at
        ahead_ms = self._clock.time_ms() - self._now_ms
        self._now_ms += min(ahead_ms, 0)
        self._ahead_ms = min(self._ahead_ms, max(ahead_ms, 0))
        if at - self._since >= _PROOF_S:
            self._now_ms += self._ahead_ms
            self._since, self._ahead_ms = at, max(ahead_ms, 0) - self._ahead_ms
        return int(self._now_ms)


class ManualClock:
    """A clock that stands still until it is told to move: for tests and simulations."""

    __slots__ = ("now_ms", "now_s")

    def __init__(self, now_ms: int = 1_700_000_000_000, now_s: float = 1000.0) -> None:
        self.now_ms = now_ms
        self.now_s = now_s

    def time_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        self.now_ms += round(seconds * 1000)
        self.now_s += seconds

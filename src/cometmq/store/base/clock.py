"""The one way the store learns what time it is, so that tests can own time.

Wall time stamps records and files (Unix epoch milliseconds, as RocketMQ writes them). A wall clock may step
backwards; nothing in the store relies on it for order. The two others measure intervals (seconds), one with
and one without the time for which the machine sleeps.
"""

from __future__ import annotations

import time
from typing import Protocol

from cometmq.clock import boottime


class Clock(Protocol):
    """Source of time."""

    def time_ms(self) -> int:
        """Wall clock, Unix epoch milliseconds."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back; stands still while the machine sleeps. For how
        long a peer or a device may take."""
        ...

    def boottime(self) -> float:
        """The same, but it counts sleep. For what is due, or runs out."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        return boottime()


_PROOF_S = 3600.0
"""As long as a clock must have been ahead before messages are deleted by it. Steps that somebody notices and
takes back last seconds or minutes; and whoever keeps messages for hours can do with an hour more."""
_AT_ONCE_MS = 2_000
"""As much as time daemons and leap seconds set a clock on; they are right."""


class SteadyTime:
    """Wall time for those who delete or deliver: a clock that jumps forward and comes back takes nothing
    along.

    It begins at the newest store time, or at the clock's time if that is earlier, and goes on with time that
    nobody sets and that counts sleep. A clock that is behind it counts at once, and so does one that is up to
    2 s ahead. One that is further ahead counts once it has been ahead at every look for `proof_s`, by the
    least of these. So it is never ahead of the clock.
    """

    __slots__ = ("_ahead_ms", "_at", "_clock", "_now_ms", "_proof_s", "_since")

    def __init__(self, clock: Clock, newest_ms: int, proof_s: float = _PROOF_S) -> None:
        """newest_ms: store time of the newest record; 0 without one."""
        self._clock = clock
        self._proof_s = proof_s
        wall_ms = clock.time_ms()
        self._now_ms = float(min(newest_ms or wall_ms, wall_ms))
        self._at = self._since = clock.boottime()
        self._ahead_ms = wall_ms - self._now_ms  # the least since `_since`

    def now_ms(self) -> int:
        """The time, in epoch milliseconds; each call is a look at the clock."""
        at = self._clock.boottime()
        self._now_ms += (at - self._at) * 1000
        self._at = at
        ahead_ms = self._clock.time_ms() - self._now_ms
        if ahead_ms <= _AT_ONCE_MS:
            self._now_ms += ahead_ms
            self._ahead_ms = 0.0
        elif not self._ahead_ms:
            self._since, self._ahead_ms = at, ahead_ms
        else:
            self._ahead_ms = min(self._ahead_ms, ahead_ms)
            if at - self._since >= self._proof_s:
                self._now_ms += self._ahead_ms
                self._since, self._ahead_ms = at, ahead_ms - self._ahead_ms
        return int(self._now_ms)


class ManualClock:
    """A clock that stands still until it is told to move: for tests and simulations."""

    __slots__ = ("now_ms", "now_s", "slept_s")

    def __init__(self, now_ms: int = 1_700_000_000_000, now_s: float = 1000.0) -> None:
        self.now_ms = now_ms
        self.now_s = now_s
        self.slept_s = 0.0

    def time_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_s

    def boottime(self) -> float:
        return self.now_s + self.slept_s

    def advance(self, seconds: float) -> None:
        """Move all clocks forward by `seconds`."""
        self.now_ms += round(seconds * 1000)
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        """The machine sleeps for `seconds`."""
        self.now_ms += round(seconds * 1000)
        self.slept_s += seconds

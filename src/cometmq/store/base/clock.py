"""The store's only source of time. Tests can replace it.

The wall clock gives the times in records and files (Unix epoch milliseconds, as RocketMQ writes them). A wall
clock may step backwards; nothing in the store relies on it for order. Two other clocks measure intervals in
seconds: one counts the time during which the machine is suspended, the other does not.
"""

from __future__ import annotations

import time

from cometmq.clock import boottime


class Clock:
    """The clocks of the machine."""

    def time_ms(self) -> int:
        """Return the wall clock in Unix epoch milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start, for timeouts. Suspension of the machine does not count."""
        return time.monotonic()

    def boottime(self) -> float:
        """Return seconds since an arbitrary start, for due times and expiry. Suspension counts."""
        return boottime()


_STEP_PROOF_S = 3600.0
"""The time, in seconds, for which a clock must be ahead before it can cause the deletion of messages.

Wrong clock steps are usually corrected within minutes, and a delay of an hour does not matter to a retention
time of hours.
"""
_MAX_TRUSTED_STEP_MS = 2_000
"""The largest forward step of the wall clock, in ms, that is adopted immediately.

Time daemons and leap seconds cause such steps.
"""


class SteadyTime:
    """The wall time for deletion and delivery. It ignores a clock that jumps forward and back again.

    If every call of `now_ms` within `proof_s` seconds has found the wall clock ahead, the steady time moves
    forward by the smallest of these differences (docs/store.md, Ages and wrong clocks). It is never ahead of
    the wall clock.
    """

    def __init__(self, clock: Clock, newest_ms: int, proof_s: float = _STEP_PROOF_S) -> None:
        """Start at `newest_ms`, the store time of the newest record; 0 if there is none."""
        self._clock = clock
        self._proof_s = proof_s
        wall_ms = clock.time_ms()
        self._now_ms = float(min(newest_ms or wall_ms, wall_ms))
        self._at = self._since = clock.boottime()
        # The smallest lead, in ms, that the wall clock has had over the steady time since `_since`.
        self._ahead_ms = wall_ms - self._now_ms

    def now_ms(self) -> int:
        """Read the clock and return the steady time in epoch milliseconds."""
        at = self._clock.boottime()
        self._now_ms += (at - self._at) * 1000
        self._at = at
        ahead_ms = self._clock.time_ms() - self._now_ms
        if ahead_ms <= _MAX_TRUSTED_STEP_MS:
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


class ManualClock(Clock):
    """A clock for tests and simulations that moves only when `advance` or `sleep` is called."""

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
        """Simulate a suspension of the machine for `seconds`."""
        self.now_ms += round(seconds * 1000)
        self.slept_s += seconds

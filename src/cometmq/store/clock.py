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

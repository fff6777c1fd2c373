"""The clock by which delays and locks are measured, at servers and clients."""

from __future__ import annotations

import sys
import time


def boottime() -> float:
    """Seconds from an arbitrary start, never going back: nobody sets this clock, and it counts sleep.

    `time.monotonic` and the loop's clock stand still while a machine sleeps on Linux and macOS.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)  # not what time.monotonic reads there
    return time.monotonic()

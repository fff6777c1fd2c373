"""The clock for delays and locks of servers and clients."""

from __future__ import annotations

import sys
import time


def boottime() -> float:
    """Return seconds since an arbitrary start, including the time in which the machine was suspended.

    The clock never goes back and cannot be set. `time.monotonic` and the event loop's clock stop while a
    machine is suspended on Linux and macOS.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)  # time.monotonic uses another clock on macOS
    return time.monotonic()

"""The clock that servers and clients use for delays and locks."""

from __future__ import annotations

import sys
import time


def boottime() -> float:
    """Return seconds since an arbitrary start, including the time during which the machine was suspended.

    The clock never goes back and cannot be set. `time.monotonic` and the event loop's clock do not count the
    time of a suspension on Linux and macOS.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # On macOS, unlike on Linux, CLOCK_MONOTONIC includes the time during which the machine was suspended.
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()

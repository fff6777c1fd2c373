"""Times as a broker counts and shows them."""

from __future__ import annotations

import time

from cometmq.store import Clock


def mono_ms(clock: Clock) -> int:
    """Time in ms that goes on steadily, whatever is done to the wall clock, and while the machine sleeps."""
    return int(clock.boottime() * 1000)


def awake_ms(clock: Clock) -> int:
    """The same without sleep, by which clients are silent: after it they get their time to report."""
    return int(clock.monotonic() * 1000)


def time_text(when_ms: int) -> str | None:
    """A time as Apache prints it: 2026-11-20#10:31:57:286, in local time; None for no time."""
    if when_ms < 0:
        return None
    return time.strftime("%Y-%m-%d#%H:%M:%S", time.localtime(when_ms / 1000)) + f":{when_ms % 1000:03d}"


def span_text(elapsed_ms: int) -> str:
    """How long the broker has run, in Apache's words."""
    minutes, seconds = divmod(elapsed_ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"

"""The monotonic clocks of a broker, and the formatting of times as text."""

from __future__ import annotations

import time

from cometmq.store import Clock


def mono_ms(clock: Clock) -> int:
    """Return a monotonic time in ms, which also counts the time that the machine was suspended."""
    return int(clock.boottime() * 1000)


def awake_ms(clock: Clock) -> int:
    """Return a monotonic time in ms without the time that the machine was suspended, for client timeouts."""
    return int(clock.monotonic() * 1000)


def time_text(when_ms: int) -> str | None:
    """Return a local time in Apache's form, 2026-11-20#10:31:57:286, or None for a negative time."""
    if when_ms < 0:
        return None
    return time.strftime("%Y-%m-%d#%H:%M:%S", time.localtime(when_ms / 1000)) + f":{when_ms % 1000:03d}"


def span_text(elapsed_ms: int) -> str:
    """Return a duration in Apache's form: [ 0 days, 1 hours, 2 minutes, 3 seconds ]."""
    minutes, seconds = divmod(elapsed_ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"

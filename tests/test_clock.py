"""The clock by which delays and locks are measured (cometmq/clock.py)."""

from __future__ import annotations

import sys
import time

import pytest

from cometmq.clock import boottime

MONOTONIC, MACHINES, BOOTTIME = 1.0, 2.0, 3.0


@pytest.mark.parametrize(
    ("platform", "reads"), [("linux", BOOTTIME), ("darwin", MACHINES), ("win32", MONOTONIC)]
)
def test_it_counts_sleep_on_each_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, reads: float
) -> None:
    clocks = {getattr(time, "CLOCK_BOOTTIME", 7): BOOTTIME, time.CLOCK_MONOTONIC: MACHINES}
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: MONOTONIC)
    assert boottime() == reads

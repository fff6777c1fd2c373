"""The time used for deletion by age, with clocks that are set back or forth."""

from __future__ import annotations

import pytest

from cometmq.store.base.clock import ManualClock, SteadyTime

NOW_MS = 1_700_000_000_000
HOUR_S = 3600
DAY_MS = 86_400_000


def looks(clock: ManualClock, steady: SteadyTime, seconds: float, every: float = 10) -> int:
    """Read `steady` at intervals for some seconds; return its last value."""
    for _ in range(int(seconds / every)):
        clock.advance(every)
        steady.now_ms()
    return steady.now_ms()


def test_it_goes_on_as_the_clock_does() -> None:
    clock = ManualClock(NOW_MS)
    assert looks(clock, SteadyTime(clock, NOW_MS), 5 * HOUR_S) == NOW_MS + 5 * HOUR_S * 1000


@pytest.mark.parametrize("lasts_s", [0, 10, 59 * 60])
@pytest.mark.parametrize("after_s", [0, 30 * 60, HOUR_S - 10])
def test_a_jump_forward_that_is_taken_back_never_was(lasts_s: int, after_s: int) -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, NOW_MS)
    before = looks(clock, steady, after_s)
    clock.now_ms += 365 * DAY_MS
    assert looks(clock, steady, lasts_s) == before + lasts_s * 1000
    clock.now_ms -= 365 * DAY_MS
    assert looks(clock, steady, 5 * HOUR_S) == clock.now_ms


@pytest.mark.parametrize("proof_s", [60, HOUR_S])
def test_a_clock_that_stays_ahead_counts_after_a_while(proof_s: int) -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, NOW_MS, proof_s)
    looks(clock, steady, 30 * 60)
    clock.now_ms += DAY_MS
    assert looks(clock, steady, proof_s) == clock.now_ms - DAY_MS
    assert looks(clock, steady, 10) == clock.now_ms


def test_what_a_time_daemon_corrects_counts_at_once() -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, NOW_MS)
    for step_ms in (1_500, -1_500, 2_000, -60_000, 300):
        clock.now_ms += step_ms
        assert steady.now_ms() == clock.now_ms


def test_a_machine_that_has_slept_is_believed() -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, NOW_MS)
    clock.sleep(5 * 86_400)
    assert steady.now_ms() == clock.now_ms == NOW_MS + 5 * DAY_MS


def test_a_second_jump_needs_a_proof_of_its_own() -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, NOW_MS, 60)
    clock.now_ms += DAY_MS
    looks(clock, steady, 30)
    clock.now_ms += DAY_MS
    assert looks(clock, steady, 40) == clock.now_ms - DAY_MS
    assert looks(clock, steady, 60) == clock.now_ms


def test_it_is_never_ahead_of_the_clock() -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, NOW_MS + DAY_MS)  # as after a record stored while the clock was ahead
    assert steady.now_ms() == NOW_MS
    clock.now_ms -= DAY_MS
    assert steady.now_ms() == clock.now_ms
    clock.now_ms += DAY_MS
    assert steady.now_ms() == clock.now_ms - DAY_MS
    assert looks(clock, steady, 2 * HOUR_S) == clock.now_ms


@pytest.mark.parametrize("newest_ms", [0, NOW_MS - 3 * DAY_MS])
def test_after_a_start_it_is_the_newest_records_time_for_an_hour(newest_ms: int) -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyTime(clock, newest_ms)
    assert steady.now_ms() == (newest_ms or NOW_MS)
    assert looks(clock, steady, HOUR_S - 10) == (newest_ms or NOW_MS) + (HOUR_S - 10) * 1000
    assert looks(clock, steady, 10) == clock.now_ms

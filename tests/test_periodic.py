"""Repeated background work (cometmq/periodic.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable

import pytest
from tests.kit.waiting import until

from cometmq.clock import boottime
from cometmq.periodic import Backoff, Periodic, Running, Tasks

SHORT_S = 0.005


@pytest.fixture
def runs() -> list[float]:
    """The times of the runs of a test's job."""
    return []


def started(job: Callable[[], object]) -> Periodic:
    periodic = Periodic(asyncio.get_running_loop(), SHORT_S, job, name="test")
    periodic.start()
    return periodic


async def test_a_job_runs_after_each_interval(runs: list[float]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    periodic = Periodic(loop, 0.02, lambda: runs.append(loop.time()), name="test")

    periodic.cancel()
    await periodic.stop()  # has no effect before a start
    periodic.start()
    periodic.start()
    await until(lambda: len(runs) >= 3)
    periodic.cancel()
    times = [began, *runs]

    assert all(later - earlier >= 0.019 for earlier, later in itertools.pairwise(times))


async def test_a_changed_interval_counts_from_the_next_wait_on(runs: list[float]) -> None:
    intervals = iter([SHORT_S, SHORT_S, 3600.0])
    periodic = Periodic(
        asyncio.get_running_loop(), lambda: next(intervals), lambda: runs.append(0), name="test"
    )

    periodic.start()
    await until(lambda: len(runs) >= 2)
    await asyncio.sleep(10 * SHORT_S)
    periodic.cancel()

    assert len(runs) == 2


@pytest.mark.parametrize("waits", [False, True])
async def test_failures_are_logged_and_the_next_run_comes(
    runs: list[float], waits: bool, caplog: pytest.LogCaptureFixture
) -> None:

    async def later() -> None:
        raise ValueError("bad luck")

    def job() -> object:
        runs.append(0)
        if waits:
            return later()
        raise ValueError("bad luck")

    periodic = Periodic(asyncio.get_running_loop(), SHORT_S, job, name="sweeping")
    with caplog.at_level(logging.ERROR, "cometmq"):
        periodic.start()
        await until(lambda: len(runs) >= 3)
        await periodic.stop()

    assert "sweeping failed, trying again in 0.005 s" in caplog.text
    assert "bad luck" in caplog.text


@pytest.mark.parametrize("restarts", [0, 1])
async def test_runs_do_not_overlap(runs: list[float], restarts: int) -> None:
    under_way = most = 0

    async def job() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        runs.append(0)
        if len(runs) <= restarts:
            periodic.cancel()
            periodic.start()
        try:
            await asyncio.sleep(5 * SHORT_S)
        finally:
            under_way -= 1

    periodic = started(job)
    await until(lambda: len(runs) >= 3)
    await periodic.stop()

    assert most == 1


@pytest.mark.parametrize(("cancel", "finished"), [(False, True), (True, False)])
async def test_stop_waits_for_a_run_under_way_and_cancel_interrupts_it(
    runs: list[float], cancel: bool, finished: bool
) -> None:
    done: list[bool] = []

    async def job() -> None:
        runs.append(0)
        await asyncio.sleep(10 * SHORT_S)
        done.append(True)

    periodic = started(job)
    await until(lambda: len(runs) >= 1)
    if cancel:
        periodic.cancel()
    await periodic.stop()
    await asyncio.sleep(20 * SHORT_S)

    assert (len(runs), bool(done)) == (1, finished)


async def test_a_job_may_stop_itself(runs: list[float]) -> None:

    async def job() -> None:
        runs.append(0)
        await periodic.stop()

    periodic = started(job)
    await until(lambda: len(runs) >= 1)
    await asyncio.sleep(10 * SHORT_S)

    assert len(runs) == 1


async def test_a_job_that_was_cancelled_from_within_runs_again(runs: list[float]) -> None:

    async def job() -> None:
        runs.append(0)
        raise asyncio.CancelledError

    periodic = started(job)
    await until(lambda: len(runs) >= 2)
    periodic.cancel()


async def test_a_run_that_is_wanted_soon_does_not_wait_for_the_interval(runs: list[float]) -> None:
    gate = asyncio.Event()

    async def job() -> None:
        runs.append(0)
        await gate.wait()

    periodic = Periodic(asyncio.get_running_loop(), 3600.0, job, name="test")
    periodic.soon()
    periodic.start()
    await asyncio.sleep(SHORT_S)
    assert runs == []

    periodic.soon()
    periodic.soon()  # several requests are one run
    await until(lambda: len(runs) >= 1)
    periodic.soon()
    await asyncio.sleep(SHORT_S)
    assert len(runs) == 1
    gate.set()
    await until(lambda: len(runs) >= 2)
    await asyncio.sleep(SHORT_S)
    periodic.cancel()

    assert len(runs) == 2


# -- The clock that measures delays and locks (cometmq/clock.py)


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


def test_delays_double_up_to_the_maximum_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)

    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_a_delay_has_its_maximum_after_any_number_of_failures() -> None:
    backoff = Backoff(0.1, 10.0)
    backoff.failures = 1_000_000

    assert backoff.next_s() == 10.0


async def test_tasks_are_kept_until_they_end() -> None:
    tasks, gate = Tasks(), asyncio.Event()
    tasks.start(gate.wait(), name="waits")
    tasks.start(asyncio.sleep(3600))
    (failing,) = Tasks([tasks.start(asyncio.wait_for(asyncio.Event().wait(), 0))])
    await asyncio.wait([failing])

    assert sorted(task.get_name() == "waits" for task in tasks) == [False, True]
    await tasks.finish(cancel=True)
    assert not tasks


async def test_an_object_runs_while_its_block_does() -> None:
    calls: list[str] = []

    class Service(Running):
        async def start(self) -> None:
            calls.append("start")

        async def stop(self) -> None:
            calls.append("stop")

    with contextlib.suppress(KeyError):
        async with Service() as service:
            assert isinstance(service, Service)
            calls.append("runs")
            raise KeyError
    assert calls == ["start", "runs", "stop"]

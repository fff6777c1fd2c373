"""Background tasks of the store: at most one task of a kind at a time (store/background/tasks.py)."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cometmq.store.background.tasks import BackgroundTasks


class Work:
    """Background tasks that run until `gate` opens."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.gate = asyncio.Event()

    async def __call__(self) -> None:
        self.begun += 1
        await self.gate.wait()
        self.ended += 1


@pytest.fixture
async def tasks() -> BackgroundTasks:
    made = BackgroundTasks()
    made.attach(asyncio.get_running_loop())
    return made


async def test_a_pass_does_not_begin_while_one_of_its_name_is_at_work(tasks: BackgroundTasks) -> None:
    work, other = Work(), Work()
    for _ in range(3):
        tasks.begin("work", work)
        tasks.begin("other", other)
        await asyncio.sleep(0)

    assert (work.begun, other.begun) == (1, 1)

    work.gate.set()
    await tasks.idle("work")
    tasks.begin("work", work)
    await tasks.idle("work")

    assert (work.begun, other.ended) == (2, 0)
    tasks.cancel()


async def test_a_pass_begun_anew_follows_the_one_at_work(tasks: BackgroundTasks) -> None:
    work = Work()
    tasks.begin("work", work)
    await asyncio.sleep(0)
    anew = asyncio.create_task(tasks.run_again("work", work))
    await asyncio.sleep(0)

    assert work.begun == 1

    work.gate.set()
    await anew

    assert work.ended == 2


async def test_a_failure_is_logged_and_the_next_pass_begins(
    tasks: BackgroundTasks, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ValueError("bad luck")

    with caplog.at_level(logging.ERROR, "cometmq"):
        await tasks.run_again("sweeping", fail)
        await tasks.run_again("sweeping", fail)

    assert caplog.text.count("sweeping failed, trying again") == 2


async def test_a_full_disk_is_one_line_until_a_pass_succeeds(
    tasks: BackgroundTasks, caplog: pytest.LogCaptureFixture
) -> None:
    problems: list[OSError | None] = [OSError(28, "no space")] * 5

    async def save() -> None:
        if problem := problems.pop():
            raise problem

    async def save_all() -> None:
        while problems:
            await tasks.run_again("saving", save)

    await save_all()
    assert caplog.text.count("saving failed, trying again: [Errno 28] no space") == 1
    problems += [OSError(28, "no space"), None]
    await save_all()
    assert caplog.text.count("saving failed") == 2
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("cancel", "ended"), [(False, 1), (True, 0)])
async def test_stop_waits_for_passes_at_work_and_cancel_does_not(
    tasks: BackgroundTasks, cancel: bool, ended: int
) -> None:
    work = Work()
    tasks.begin("work", work)
    await asyncio.sleep(0)
    if cancel:
        tasks.cancel()
    asyncio.get_running_loop().call_soon(work.gate.set)
    await tasks.stop()
    tasks.begin("work", work)
    await asyncio.sleep(0)

    assert (work.begun, work.ended) == (1, ended)
    assert not tasks.attached


async def test_without_a_loop_no_pass_begins() -> None:
    tasks, work = BackgroundTasks(), Work()
    tasks.begin("work", work)
    await tasks.run_again("work", work)

    assert work.begun == 0

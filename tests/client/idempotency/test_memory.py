"""Idempotency keys in memory: limited in number and age, and one call per key at a time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cometmq import BeingHandled, MemoryMarks


def test_the_oldest_mark_makes_room_for_a_new_one() -> None:
    marks = MemoryMarks(max_keys=2)
    done = [marks.once("g", key, lambda _: None) for key in "abcab"]
    assert done == [True, True, True, True, True]
    assert marks.once("g", "b", lambda _: None) is False


def test_a_mark_is_forgotten_after_its_time() -> None:
    marks = MemoryMarks(expiry_s=0.01)
    assert marks.once("g", "a", lambda _: None)
    deadline = time.monotonic() + 20
    while not marks.once("g", "a", lambda _: None):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_key_that_is_being_handled_is_refused_until_that_has_failed() -> None:
    marks = MemoryMarks()
    begun, end = threading.Event(), threading.Event()

    def fail(_: object) -> None:
        begun.set()
        end.wait(20)
        raise ValueError("no")

    def work() -> None:
        with pytest.raises(ValueError, match="no"):
            marks.once("g", "a", fail)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(20)
    with pytest.raises(BeingHandled, match="'a' is being handled elsewhere"):
        marks.once("g", "a", lambda _: None)
    assert marks.once("other", "a", lambda _: None)
    end.set()
    thread.join(20)
    assert marks.once("g", "a", lambda _: None)


async def test_a_cancelled_call_leaves_no_mark() -> None:
    marks = MemoryMarks()
    begun = asyncio.Event()

    async def hang(_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(marks.once_async("g", "a", hang))
    await begun.wait()
    with pytest.raises(BeingHandled):
        await marks.once_async("g", "a", hang)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert marks.once("g", "a", lambda _: None)

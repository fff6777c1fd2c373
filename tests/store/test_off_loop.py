"""Reads that would wait for the device leave the loop free; so do the deletions and syncs of retention."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.cold_disk import ColdDisk
from tests.store.kit import START_MS, committed, everything, open_store, put, send

from cometmq.protocol.record import decode_record
from cometmq.store import ManualClock, MessageStore


@pytest.fixture
async def cold(tmp_path: Path) -> tuple[MessageStore, ColdDisk]:
    """A started store of 500 messages, none of which is in memory."""
    clock = ManualClock(START_MS)
    store = open_store(tmp_path, clock=clock, max_index_num=200)
    for number in range(500):
        put(store, bytes(800), properties=b"KEYS\x01k%d" % number)
        clock.now_ms += 1000
        if number % 50 == 49:
            committed(store.commit())
    store.close()
    disk = ColdDisk()
    store = open_store(tmp_path, disk, clock, max_index_num=200)
    store.start()
    disk.cold = True
    return store, disk


QUESTIONS: dict[str, tuple[Callable[[MessageStore], object], object]] = {
    "by time": (lambda store: store.offset_by_time("T", 0, START_MS + 123_400, "LOWER"), 124),
    "store time": (lambda store: store.store_time_of("T", 0, 77), START_MS + 77_000),
    "by key": (
        lambda store: [
            decode_record(data).queue_offset for data in store.query_by_key("T", "k7", 9, 0, 1 << 60)
        ],
        [7],
    ),
    "by position": (lambda store: decode_record(store.lookup(0) or b"").queue_offset, 0),
    "purge plan": (lambda store: store.purge_plan("T", before_ms=START_MS + 250_000), [(0, 0, 250, 500)]),
}


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_cold_question_leaves_the_loop_free(cold: tuple[MessageStore, ColdDisk], name: str) -> None:
    store, disk = cold
    question, answer = QUESTIONS[name]
    disk.go_on.clear()
    asked = asyncio.create_task(store.ask(lambda: question(store)))
    await asyncio.to_thread(disk.waiting.wait, 20)
    assert send(store, b"meanwhile", "Other").queue_offset == 0  # the loop works while the device does not
    assert not asked.done()
    disk.go_on.set()
    assert await asked == answer
    assert disk.in_the_loop == 0
    disk.cold = False
    await store.stop()


async def test_what_is_in_memory_is_answered_without_a_thread(cold: tuple[MessageStore, ColdDisk]) -> None:
    store, disk = cold
    disk.cold = False
    before = disk.calls["pread"]
    coroutine = store.ask(lambda: store.store_time_of("T", 0, 77))
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == START_MS + 77_000
    assert disk.calls["pread"] == before
    await store.stop()


@pytest.mark.parametrize("name", QUESTIONS)
async def test_memory_that_never_holds_anything_does_not_keep_a_question_going_forever(
    cold: tuple[MessageStore, ColdDisk], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, disk = cold
    monkeypatch.setattr(disk, "pread_cached", lambda *_: None)
    question, answer = QUESTIONS[name]
    assert await asyncio.gather(*(store.ask(lambda: question(store)) for _ in range(3))) == [answer] * 3
    assert disk.in_the_loop == 0
    disk.cold = False
    await store.stop()


async def test_a_read_that_fails_fails_its_question_only(cold: tuple[MessageStore, ColdDisk]) -> None:
    store, disk = cold
    disk.fail("pread", times=1)
    with pytest.raises(OSError, match="Input/output error"):
        await store.ask(lambda: store.lookup(0))
    assert await store.ask(lambda: store.lookup(0))
    disk.cold = False
    assert len(everything(store)) == 500
    await store.stop()

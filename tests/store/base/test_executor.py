"""Blocking reads, deletions and syncs run in threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.store.cold_disk import ColdDisk
from tests.store.kit import START_MS, committed, everything, open_store, put, restarted, send, started

from cometmq.protocol.record.one import decode_record
from cometmq.store import ManualClock, MessageStore
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_file import MAX_ENTRIES_PER_STEP, IndexFile
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.reading import lookup as lookup_module
from cometmq.store.reading.lookup import Lookup

T = TypeVar("T")
Cold = tuple[MessageStore, ColdDisk]


@pytest.fixture
async def cold(tmp_path: Path) -> Cold:
    """Start a store of 500 messages, none of which is in memory."""
    clock = ManualClock(START_MS)
    store = open_store(tmp_path, clock=clock, max_index_num=200)
    for number in range(500):
        put(store, bytes(800), properties=b"KEYS\x01k%d" % number)
        clock.now_ms += 1000
        if number % 50 == 49:
            committed(store.commit())
    store.close()
    disk = ColdDisk()
    store = started(tmp_path, disk, clock, max_index_num=200)
    disk.cold = True
    return store, disk


def queue_of(store: MessageStore) -> ConsumeQueue:
    queue = store.queues.find_queue("T", 0)
    assert queue is not None
    return queue


def by_key(
    store: MessageStore, key: str = "k7", begin: int = 0, end: int = 1 << 60
) -> Awaitable[list[bytes]]:
    return store.lookups.by_key("T", key, 9, begin, end, 1 << 20)


async def offsets(found: Awaitable[list[bytes]]) -> list[int]:
    return [decode_record(data).queue_offset for data in await found]


QUESTIONS: dict[str, tuple[Callable[[MessageStore], Awaitable[object]], object]] = {
    "by time": (
        lambda store: store.lookups.offset_by_time(queue_of(store), START_MS + 123_400, "LOWER"),
        124,
    ),
    "store time": (
        lambda store: store.executor.query(
            partial(store.lookups.store_time_of, store.queues.find_queue("T", 0), 77)
        ),
        START_MS + 77_000,
    ),
    "by key": (lambda store: offsets(by_key(store)), [7]),
    "by position": (
        lambda store: store.executor.query(lambda reads: len(store.lookups.record_at(0, reads) or b"")),
        91 + 800 + 1 + 7,
    ),
    "purge plan": (
        lambda store: store.topic_retention.plan_purge("T", before_ms=START_MS + 250_000),
        [(0, 0, 250, 500)],
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_cold_question_leaves_the_loop_free(cold: Cold, name: str) -> None:
    store, disk = cold
    question, answer = QUESTIONS[name]
    disk.go_on.clear()
    asked = asyncio.ensure_future(question(store))
    await asyncio.to_thread(disk.waiting.wait, 20)
    assert send(store, b"meanwhile", "Other").queue_offset == 0  # the loop works while the device is blocked
    assert not asked.done()
    disk.go_on.set()
    assert await asked == answer
    assert disk.in_the_loop == 0
    disk.cold = False


async def test_what_is_in_memory_is_answered_without_a_thread(cold: Cold) -> None:
    store, disk = cold
    disk.cold = False
    before = disk.calls["pread"]
    coroutine = store.executor.query(
        partial(store.lookups.store_time_of, store.queues.find_queue("T", 0), 77)
    )
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == START_MS + 77_000
    assert disk.calls["pread"] == before


@pytest.mark.parametrize("name", QUESTIONS)
async def test_memory_that_never_holds_anything_does_not_keep_a_question_going_forever(
    cold: Cold, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, disk = cold
    monkeypatch.setattr(disk, "pread_cached", lambda *_: None)
    question, answer = QUESTIONS[name]
    assert await asyncio.gather(*(question(store) for _ in range(3))) == [answer] * 3
    assert disk.in_the_loop == 0
    disk.cold = False


async def test_a_read_that_fails_fails_its_question_only(cold: Cold) -> None:
    store, disk = cold
    disk.fail("pread", times=2)
    with pytest.raises(OSError, match="Input/output error"):
        await store.executor.query(partial(store.lookups.record_at, 0))
    assert await store.executor.query(partial(store.lookups.record_at, 0))
    disk.cold = False
    assert len(everything(store)) == 500


KEYED = 2000


class Turns:
    """The number of a method's calls in each loop iteration while `watched` runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> None:
        self.each: list[int] = []
        self.calls = 0
        real = getattr(kind, method)

        def counting(*given: object) -> object:
            self.calls += 1
            return real(*given)

        monkeypatch.setattr(kind, method, counting)

    async def watched(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        before = self.calls
        while not task.done():
            await asyncio.sleep(0)
            self.each.append(self.calls - before)
            before = self.calls
        return await task


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Cold]:
    """Start a store of KEYED messages with one key, stored one second apart."""
    clock, disk = ManualClock(START_MS), ColdDisk()
    store = open_store(tmp_path, disk, clock, max_index_num=KEYED + 2)
    for number in range(KEYED):
        put(store, b"%d" % number, properties=b"KEYS\x01k")
        clock.now_ms += 1000
        if number % 50 == 49:
            committed(store.commit())
    store = restarted(store, disk, clock, max_index_num=KEYED + 2)
    store.start()
    yield store, disk
    disk.cold = False
    await store.stop()


async def test_the_newer_entries_of_a_key_are_passed_over_a_few_in_a_turn(
    keyed: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, IndexFile, "_entry")
    early = by_key(keyed[0], "k", START_MS, START_MS + 4000)
    assert await turns.watched(offsets(early)) == [0, 1, 2, 3, 4]
    assert turns.calls == KEYED
    assert max(turns.each) <= MAX_ENTRIES_PER_STEP


async def test_many_such_queries_take_turns(keyed: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, IndexFile, "_entry")
    many = [by_key(keyed[0], "k", START_MS, START_MS + 4000) for _ in range(10)]
    await turns.watched(asyncio.gather(*many))
    assert turns.calls == 10 * KEYED
    first, *others = (calls for calls in turns.each if calls)
    assert first <= 10 * MAX_ENTRIES_PER_STEP
    assert max(others) <= MAX_ENTRIES_PER_STEP


async def test_few_of_their_answers_are_put_together_at_once(
    keyed: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 100 bytes may have a response of 16 MiB."""
    store, _ = keyed
    under_way: list[int] = []
    seen: list[int] = []
    real = Lookup._take  # noqa: SLF001 - the step that puts an answer together

    async def watched(lookup: Lookup, found: Any, positions: list[int]) -> None:
        under_way.append(0)
        seen.append(len(under_way))
        await real(lookup, found, positions)
        under_way.pop()

    monkeypatch.setattr(Lookup, "_take", watched)
    monkeypatch.setattr(lookup_module, "_BYTES_A_TURN", 1)
    answers = await asyncio.gather(*(by_key(store, "k") for _ in range(20)))
    assert [len(answer) for answer in answers] == [9] * 20
    assert max(seen) == 2


async def test_a_query_that_is_given_up_leaves_its_place_to_others(
    keyed: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = keyed
    monkeypatch.setattr(lookup_module, "_BYTES_A_TURN", 1)
    asked = [asyncio.ensure_future(by_key(store, "k")) for _ in range(6)]
    while not store.executor.large_answers.locked():
        await asyncio.sleep(0)
    for query in asked[:4]:
        assert query.cancel()
    async with asyncio.timeout(60):
        assert [len(answer) for answer in await asyncio.gather(*asked[4:])] == [9, 9]


async def test_a_key_query_goes_on_where_something_was_not_in_memory(
    keyed: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, disk = keyed
    turns = Turns(monkeypatch, IndexFile, "_entry")
    disk.cold = True
    early = by_key(store, "k", START_MS, START_MS + 4000)
    assert await offsets(early) == [0, 1, 2, 3, 4]
    assert turns.calls <= 2 * KEYED  # one miss and one call after the read
    assert disk.in_the_loop == 0


async def test_lost_messages_are_passed_over_a_few_in_a_turn(
    keyed: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = keyed
    for base in store.log.segments[1:]:
        store.files.drop(store.log.path_of(base))
        store.disk.unlink(store.log.path_of(base))
    turns = Turns(monkeypatch, Lookup, "store_time_at")
    lost = store.lookups.offset_by_time(queue_of(store), START_MS + 10**9, None)
    assert 0 < await turns.watched(lost) < KEYED // 2
    assert turns.calls > KEYED // 2
    assert max(turns.each) <= 512


async def test_bytes_that_look_like_a_record_longer_than_any_frame_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, mapped_file_size_commit_log=64 << 20)
    sent = send(store, (48 << 20).to_bytes(4, "big") + bytes(40))
    lengths: list[int] = []
    monkeypatch.setattr(
        CommitLog, "read", lambda _log, _at, length, _reads: lengths.append(length) or b"\3\0\0\0"
    )
    assert store.lookups.record_at(sent.physical_offset + 88) is None
    assert lengths == [4]

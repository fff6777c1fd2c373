"""Tiered storage: reads of segments that are in the object store only."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.kit.object_store import MemoryObjects
from tests.kit.waiting import until
from tests.store.kit import (
    bodies,
    by_key,
    by_record,
    delete_topic,
    everything,
    in_place,
    offset_by_time,
    pulled,
    run_topic_retention,
)
from tests.store.tiered.offload import NOON, fill, offload, tiered

from cometmq.errors import CommandError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import java_hash
from cometmq.protocol.record.one import iter_records
from cometmq.store import (
    WAITING,
    GetStatus,
    MessageStore,
    NotInMemory,
    ObjectStoreFailed,
    ReadResult,
    TopicLimit,
)

MANY = {"mapped_file_size_commit_log": 2 << 20, "mapped_file_size_consume_queue": 20_000}


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


def answers(store: MessageStore, **how: Any) -> list[tuple[Any, ...]]:
    """Return all that the reads of the queues 0 and 1 return, beginning at each of their offsets."""
    found = []
    for queue_id in (0, 1):
        for offset in range(store.max_offset("T", queue_id) + 2):
            got = store.get_messages("T", queue_id, offset, 32, reads=WAITING, **how)
            found.append(
                (got.status, b"".join(got.buffers), got.next_begin_offset, got.min_offset, got.max_offset)
            )
    return found


def every_third(data: bytes | bytearray, at: int) -> bool:
    return next(iter_records(data[at:])).queue_offset % 3 == 0


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("how", ["all", "tags", "filter", "bulk"])
def test_a_read_returns_the_same_whether_its_segment_is_here_or_not(
    tmp_path: Path, objects: MemoryObjects, how: str, crc: bool
) -> None:
    options: dict[str, dict[str, Any]] = {
        "all": {},
        "tags": {"filter": {java_hash(f"t{offset}") for offset in range(0, 99, 2)}},
        "filter": {"record_filter": by_record(every_third)},
        "bulk": {"bulk": True},
    }
    store = tiered(tmp_path, objects, check_crc_on_read=crc)
    fill(store, 5)
    before = answers(store, **options[how])

    offload(store)

    assert len(store.log.segments) == 1
    assert answers(store, **options[how]) == before


def test_queries_find_the_same_whether_a_segment_is_here_or_not(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    def found() -> list[object]:
        queue = store.queues.find_queue("T", 1)
        times = range(NOON - 5, store.newest_ms + 5, 35)
        return [
            [by_key(store, "T", f"k{number}") for number in range(0, 60, 7)],
            [
                offset_by_time(store, "T", 1, time, mode)
                for time in times
                for mode in (None, "LOWER", "UPPER")
            ],
            [store.lookups.store_time_of(queue, offset) for offset in range(0, 30, 5)],
            [store.lookups.named_record(position) for position in (0, 5, 1 << 40)],
            (store.min_offset("T", 0), store.max_offset("T", 0)),
        ]

    store = tiered(tmp_path, objects)
    fill(store, 4)
    before = found()

    offload(store)

    assert found() == before
    asked = len(objects.calls)
    assert found() == before
    assert len(objects.calls) == asked


def test_all_of_it_is_there_after_a_restart(tmp_path: Path, objects: MemoryObjects) -> None:
    store = tiered(tmp_path, objects)
    fill(store, 5)
    before = answers(store)
    offload(store)
    for stop in (MessageStore.close, MessageStore.crash):
        stop(store)
        store = tiered(tmp_path, objects)
        assert answers(store) == before


def test_the_messages_of_a_deleted_topic_stay_away(tmp_path: Path, objects: MemoryObjects) -> None:
    store = tiered(tmp_path, objects)
    fill(store, 3)
    offload(store)
    delete_topic(store, "T")
    fill(store, 2, topic="T")
    store.crash()
    store = tiered(tmp_path, objects)

    assert everything(store) == [b"0 " + bytes(2000), *everything(store)[1:]]
    assert len(everything(store)) == store.max_offset("T", 0)


def test_a_purge_and_the_retention_of_a_topic_count_as_ever(tmp_path: Path, objects: MemoryObjects) -> None:
    store = tiered(tmp_path, objects)
    fill(store, 4)
    offload(store)
    in_place(store.topic_retention.raise_min_offsets("T", {0: 5}))
    store.topic_retention.set_limits({"T": TopicLimit(bytes_per_queue=40 << 10)})
    assert run_topic_retention(store) > 0

    low = store.min_offset("T", 1)
    assert low > 0
    assert store.get_messages("T", 1, low - 1, 1, reads=WAITING).status is GetStatus.OFFSET_TOO_SMALL
    objects.fail()
    store.tiered.reads.store_times.clear()  # type: ignore[union-attr]
    store.tiered.reads.forget(0)  # type: ignore[union-attr]
    store.topic_retention.set_limits({"T": TopicLimit(age_ms=1)})
    run_topic_retention(store)  # the object store does not respond: no message is hidden, and nothing fails


async def test_a_damaged_unit_costs_its_message_and_not_the_rest_of_its_segment(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    store = tiered(tmp_path, objects)
    fill(store, 4)
    offload(store)
    store.close()
    path = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    units = bytearray(path.read_bytes())
    units[28:32] = ((1 << 20) + 1).to_bytes(4, "big")  # The size of the second message
    path.write_bytes(units)

    store = tiered(tmp_path, objects)
    store.start()
    got = await pulled(store, "T", 0, 1)
    assert got.status is GetStatus.FOUND
    assert next(iter_records(b"".join(got.buffers))).queue_offset == 2
    await store.stop()


class TestWithALoop:
    """Reads by threads, as in a broker."""

    @pytest.fixture
    def store(self, tmp_path: Path, objects: MemoryObjects) -> MessageStore:
        store = tiered(tmp_path, objects, **MANY)
        fill(store, 4, size=4000)
        offload(store)
        assert len(store.log.segments) == 1
        objects.calls.clear()
        return store

    def gets(self, objects: MemoryObjects) -> list[str]:
        return [name[-14:] for call, name in objects.calls if call == "get"]

    async def test_a_pull_is_one_request_and_the_next_pulls_are_none(
        self, store: MessageStore, objects: MemoryObjects
    ) -> None:
        store.start()
        got = await pulled(store, "T", 0, 0)
        following = await pulled(store, "T", 0, got.next_begin_offset)

        assert (got.count, following.count) == (32, 32)
        assert [name.partition(".")[2] for name in self.gets(objects)] == ["crc", "log"]

    async def test_consumers_that_need_the_same_block_share_a_request(
        self, store: MessageStore, objects: MemoryObjects
    ) -> None:
        store.start()
        got: list[ReadResult] = await asyncio.gather(*(pulled(store, "T", n % 2, 0) for n in range(20)))

        assert [each.count for each in got] == 20 * [32]
        assert [name.partition(".")[2] for name in self.gets(objects)] == ["crc", "log"]

    @pytest.mark.parametrize(("step", "requests"), [(150, 5), (30, 3)])
    async def test_records_far_apart_are_requested_together_and_neighbouring_blocks_in_one_request(
        self, store: MessageStore, objects: MemoryObjects, step: int, requests: int
    ) -> None:
        store.start()
        wanted = set(range(0, 700, step))
        codes = {java_hash(f"t{offset}") for offset in wanted}

        with pytest.raises(NotInMemory) as lacking:
            store.get_messages("T", 0, 0, 32, filter=codes)
        await lacking.value.missing.fetch()  # type: ignore[union-attr]
        got = store.get_messages("T", 0, 0, 32, filter=codes)

        assert {record.queue_offset for record in iter_records(b"".join(got.buffers))} == wanted
        assert sum(name.endswith(".log") for name in self.gets(objects)) == requests

    @pytest.mark.parametrize("what", ["outage", "damage", "damaged crc", "truncated", "gone"])
    async def test_without_the_bytes_a_pull_is_told_to_try_again_and_never_passes_over_messages(
        self, store: MessageStore, objects: MemoryObjects, what: str
    ) -> None:
        store.start()
        before = dict(objects.objects)
        if what == "outage":
            objects.fail("get")
        else:
            for name, content in before.items():
                ending = ".crc" if what == "damaged crc" else ".log"
                if name.endswith(ending):
                    middle = len(content) // 2
                    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
                    objects.objects[name] = content[:100] if what == "truncated" else changed
                    if what == "gone":
                        del objects.objects[name]

        queue = store.queues.find_queue("T", 0)
        assert queue is not None
        damaged = queue.search(0, queue.max_offset, 1 << 20, WAITING)
        for _ in range(2):
            with pytest.raises(CommandError) as caught:
                await pulled(store, "T", 0, damaged)
            assert caught.value.code == ResponseCode.SYSTEM_BUSY
        if what == "damage":  # earlier messages are served
            offset = damaged - 100
            while offset < damaged - 1:
                offset = (await pulled(store, "T", 0, offset)).next_begin_offset
        objects.heal()
        objects.objects = before
        assert (await pulled(store, "T", 0, 0)).status is GetStatus.FOUND
        assert store.tiered is not None
        assert store.tiered.counts.failures > 0

    async def test_few_requests_run_at_a_time_and_too_many_readers_are_refused(
        self, store: MessageStore, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cometmq.store.tiered.reads._MAX_WAITING", 8)
        monkeypatch.setattr("cometmq.store.tiered.reads._BLOCKS_PER_REQUEST", 1)
        store.start()
        go, lock, running = threading.Event(), threading.Lock(), [0, 0]

        def block(operation: str, name: str) -> None:
            if operation == "get" and name.endswith(".log"):
                with lock:
                    running[0] += 1
                    running[1] = max(running)
                go.wait(20)
                with lock:
                    running[0] -= 1

        objects.before = block
        end = store.max_offset("T", 0)
        reads = [asyncio.ensure_future(pulled(store, "T", 0, end * n // 12)) for n in range(12)]
        await until(lambda: sum(task.done() for task in reads) >= 4)
        go.set()
        done = await asyncio.gather(*reads, return_exceptions=True)

        busy = [each for each in done if isinstance(each, CommandError)]
        assert [each.code for each in busy] == 4 * [ResponseCode.SYSTEM_BUSY]
        assert running[1] <= 4

    async def test_reading_on_takes_few_requests_and_bounded_memory(
        self, store: MessageStore, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cometmq.store.tiered.reads._MAX_BLOCKS_KEPT", 8)
        store.start()
        queue = store.queues.find_queue("T", 0)
        assert queue is not None
        end = queue.search(0, queue.max_offset, 6 << 20, WAITING)
        offset = found = 0
        while offset < end:
            got = await pulled(store, "T", 0, offset)
            assert got.next_begin_offset > offset
            offset, found = got.next_begin_offset, found + len(bodies(got))
        assert found == offset
        # The first block of a segment is requested alone, the others in one request
        assert sum(name.endswith(".log") for name in self.gets(objects)) == 6
        objects.calls.clear()
        await pulled(store, "T", 0, 0)
        assert len(self.gets(objects)) == 1

    async def test_a_stop_does_not_wait_for_an_object_store_that_hangs(
        self, store: MessageStore, objects: MemoryObjects
    ) -> None:
        go = threading.Event()
        objects.before = lambda _operation, _name: go.wait(60) and None
        store.start()
        assert store.tiered is not None
        store.tasks.begin("tiered storage", store.tiered.cycle)
        store.retention.begin()
        try:
            await asyncio.wait_for(store.stop(), 30)
        finally:
            go.set()

    async def test_after_a_timeout_the_reads_that_waited_for_their_turn_fail_at_once(
        self, store: MessageStore, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cometmq.store.tiered.reads._TIMEOUT_S", 0.5)
        monkeypatch.setattr("cometmq.store.tiered.reads._BLOCKS_PER_REQUEST", 1)
        store.start()

        def time_out(_operation: str, _name: str) -> None:
            time.sleep(0.6)
            raise ObjectStoreFailed("timed out")

        objects.before = time_out
        end = store.max_offset("T", 0)
        done = await asyncio.gather(
            *(pulled(store, "T", 0, end * n // 13) for n in range(12)), return_exceptions=True
        )

        assert all(isinstance(each, CommandError) for each in done)
        assert len(self.gets(objects)) == 4

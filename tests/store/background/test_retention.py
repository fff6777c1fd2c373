"""Retention: its times, the files it deletes, its limits, and the effect on readers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until
from tests.store.kit import (
    after_crash,
    by_key,
    committed,
    everything,
    in_place,
    open_store,
    put,
    run_retention,
    send,
    send_all,
)

from cometmq.store import GetStatus, ManualClock, MessageStore, StoreRefused
from cometmq.store.base.disk import DiskUsage

HOUR = 3_600_000
NOON = 1_700_000_000_000  # no dependence on the time zone: deleteWhen is derived from the clock's local hour


class Partition(FaultyDisk):
    """A disk whose usage the test sets."""

    def __init__(self) -> None:
        super().__init__(really_sync=False)
        self.percent = 10

    def usage(self, path: str) -> DiskUsage:
        if self.percent < 0:
            raise OSError(5, "Input/output error")
        return DiskUsage(100, self.percent, 100 - self.percent)


def hour_of(clock: ManualClock) -> int:
    return time.localtime(clock.now_ms / 1000).tm_hour


def filled(root: Path, segments: int = 14, **changes: Any) -> tuple[MessageStore, Partition, ManualClock]:
    disk, clock = Partition(), ManualClock(NOON)
    changes.setdefault("delete_when", str((hour_of(clock) + 5) % 24))
    store = open_store(root, disk, clock, **changes)
    number = 0
    while len(store.log.segments) < segments:
        clock.now_ms += 10
        put(store, bytes(2000), queue_id=number % 2, properties=b"KEYS\x01k%d" % number)
        number += 1
        if number % 10 == 0:
            committed(store.commit())
    committed(store.commit())
    store.queues.write_dirty()
    store.index.write()
    age(root, range(segments), NOON - 73 * HOUR)
    return store, disk, clock


def of_log(deleted: list[str]) -> int:
    return sum("commitlog" in path for path in deleted)


def with_old_topic(root: Path, disk: Partition, **changes: Any) -> MessageStore:
    """Create a queue `old` whose messages are all in the oldest segment, which retention may delete."""
    store = open_store(root, disk, ManualClock(NOON), **changes)
    send_all(store, [b"hello"] * 5, topic="old")
    send_all(store, [bytes(5000)] * 40, topic="new")
    age(root, range(4), NOON - 100 * HOUR)
    store.retention.delete_now()
    return store


def age(root: Path, numbers: range, modified_ms: int) -> None:
    paths = sorted((root / "commitlog").iterdir())
    for number in numbers:
        os.utime(paths[number], (modified_ms / 1000, modified_ms / 1000))


def test_outside_the_hour_and_with_room_nothing_is_deleted(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path)
    assert run_retention(store) == []


def test_in_the_hour_expired_segments_go_ten_at_a_time_and_never_the_last(tmp_path: Path) -> None:
    store, _, clock = filled(tmp_path, delete_when="99")
    store.configure(store.config.replace(delete_when=f"30;{hour_of(clock)}"))
    assert of_log(run_retention(store)) == 10
    assert of_log(run_retention(store)) == 3
    assert run_retention(store) == []
    assert len(store.log.segments) == 1


def test_a_clock_that_jumps_forward_for_a_while_deletes_nothing(tmp_path: Path) -> None:
    store, _, clock = filled(tmp_path, delete_when=";".join(map(str, range(24))))
    age(tmp_path, range(14), NOON - 71 * HOUR)
    clock.now_ms += 365 * 24 * HOUR
    assert run_retention(store) == []
    clock.now_ms -= 365 * 24 * HOUR
    clock.advance(2 * 3600)
    assert of_log(run_retention(store)) == 10


def test_deletion_stops_at_the_first_segment_that_is_young(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path)
    age(tmp_path, range(3, 4), NOON - 71 * HOUR)
    store.retention.delete_now()
    assert of_log(run_retention(store)) == 3


@pytest.mark.parametrize(("percent", "deleted"), [(75, 0), (76, 10), (-1, 10)])
def test_a_full_disk_makes_deletion_due_at_any_hour(tmp_path: Path, percent: int, deleted: int) -> None:
    store, disk, _ = filled(tmp_path)
    disk.percent = percent
    assert of_log(run_retention(store)) == deleted


@pytest.mark.parametrize(("percent", "forcibly", "deleted"), [(85, True, 0), (86, True, 10), (86, False, 0)])
def test_a_dangerously_full_disk_ignores_the_age(
    tmp_path: Path, percent: int, forcibly: bool, deleted: int
) -> None:
    store, disk, _ = filled(tmp_path, clean_file_forcibly_enable=forcibly)
    age(tmp_path, range(14), NOON)
    disk.percent = percent
    assert of_log(run_retention(store)) == deleted


def test_what_a_slave_wants_stays_as_long_as_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, disk, _ = filled(tmp_path)
    wanted = store.log.segments[4]
    store.retention.first_needed_position = lambda: wanted + 1
    store.retention.delete_now()
    assert of_log(run_retention(store)) == 4
    for percent in (10, 80, 80):
        disk.percent = percent
        assert of_log(run_retention(store)) == 0
    assert caplog.text.count(f"a slave has the log only up to {wanted + 1}") == 1
    disk.percent = 86
    assert of_log(run_retention(store)) == 9
    assert f"a slave with the log up to {wanted + 1} must copy it again" in caplog.text


def test_writing_stops_above_the_watermark_and_goes_on_below(tmp_path: Path) -> None:
    store, disk, _ = filled(tmp_path, segments=2, clean_file_forcibly_enable=False)
    age(tmp_path, range(2), NOON)
    disk.percent = 90
    run_retention(store)
    send(store)
    disk.percent = 91
    run_retention(store)
    with pytest.raises(StoreRefused, match=r"CL:  0\.91 CQ:  0\.91 INDEX:  0\.91, limit 0\.90 ") as refused:
        put(store)
    assert refused.value.response_code == 14
    assert store.get_messages("T", 0, 0, 32).count > 0
    disk.percent = 90
    run_retention(store)
    send(store)


def test_each_watermark_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, disk, _ = filled(tmp_path, segments=2)
    said = []
    for percent in (75, 76, 80, 86, 86, 91, 92, 86, 70, 76):
        disk.percent = percent
        caplog.clear()
        run_retention(store)
        said.append([record.message for record in caplog.records if record.levelname != "INFO"])
    due, forced = "expired segments are deleted at any hour", "segments are deleted whatever their age"
    refused, accepted = "the store accepts no messages", "the store accepts messages again"
    told = [[], [due], [], [forced], [], [refused], [], [accepted], [], [due]]
    assert [len(lines) for lines in said] == [len(lines) for lines in told]
    assert all(words in line for lines, words_of in zip(said, told, strict=True)
               for line, words in zip(lines, words_of, strict=True))  # fmt: skip


def test_a_stop_while_the_disk_is_full_counts_as_unclean(tmp_path: Path) -> None:
    store, disk, _ = filled(tmp_path, segments=2)
    disk.percent = 95
    run_retention(store)
    store.close()
    assert (tmp_path / "abort").exists()


def test_queues_and_index_follow_the_log(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path, segments=30, max_index_num=100)
    count = store.max_offset("T", 0)
    index_files = len(store.index.files)
    store.retention.delete_now()
    deleted = run_retention(store)
    first = store.queues.get_or_make("T", 0).unit(store.min_offset("T", 0))
    assert first is not None
    assert first[0] - store.log.min_position in (0, 2_110, 2_111)
    assert 0 < store.min_offset("T", 0) < count
    assert any("consumequeue" in path for path in deleted)
    assert len(store.index.files) < index_files
    answer = store.get_messages("T", 0, 0, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.OFFSET_TOO_SMALL, store.min_offset("T", 0))
    assert len(everything(store)) == count - store.min_offset("T", 0)
    assert by_key(store, "T", "k0") == []
    low, high = store.min_offset("T", 0), store.max_offset("T", 0)
    for stop in ("close", "crash"):
        getattr(store, stop)()
        store = open_store(tmp_path, Partition(), max_index_num=100)
        assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (low, high)
        assert len(everything(store)) == high - low


def test_a_queue_all_of_whose_messages_are_gone_keeps_its_offsets(tmp_path: Path) -> None:
    store = with_old_topic(tmp_path, Partition())
    store.queues.write_dirty()
    run_retention(store)
    assert (store.min_offset("old", 0), store.max_offset("old", 0)) == (5, 5)
    answer = store.get_messages("old", 0, 5, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.OFFSET_OVERFLOW_ONE, 5)
    for stop in ("close", "crash"):
        getattr(store, stop)()
        store = open_store(tmp_path, Partition())
        assert (store.min_offset("old", 0), store.max_offset("old", 0)) == (5, 5)
    assert send(store, b"and on", topic="old").queue_offset == 5
    assert everything(store, "old") == [b"and on"]


@pytest.mark.parametrize("background", [False, True])
async def test_a_segment_goes_only_when_its_queues_are_on_the_device(
    tmp_path: Path, background: bool
) -> None:
    """If a segment were deleted earlier, a crash would lose the offsets of its messages."""
    disk = Partition()
    store = with_old_topic(tmp_path, disk, delete_when="99")
    done: list[tuple[str, str]] = []
    disk.before = lambda operation, path: done.append((operation, path))
    if background:
        store.start()
        await store.retention.run_now(log_too=True)
    else:
        run_retention(store)
    disk.before = lambda *_: None
    deleted = done.index(("unlink", f"{tmp_path}/commitlog/{0:020d}"))
    assert ("fdatasync", f"{tmp_path}/consumequeue/old/0/{0:020d}") in done[:deleted]
    store = after_crash(store, Partition())
    assert (store.min_offset("old", 0), store.max_offset("old", 0)) == (5, 5)
    assert send(store, topic="old").queue_offset == 5


def test_segments_stay_while_queues_cannot_be_brought_onto_the_device(tmp_path: Path) -> None:
    disk = Partition()
    store = with_old_topic(tmp_path, disk, delete_when="99")
    disk.fail("pwrite", match="/consumequeue/", times=1 << 30)
    assert run_retention(store) == []
    assert len(everything(store, "new")) == 40
    disk.heal()
    assert run_retention(store) != []


# -- in the background -----------------------------------------------------------------------------


async def test_the_loop_goes_on_while_a_segment_is_deleted(tmp_path: Path) -> None:
    store, disk, _ = filled(tmp_path, delete_commit_log_files_interval=0)
    under_way, go_on = threading.Event(), threading.Event()
    threads: set[int] = set()

    def watch(operation: str, path: str) -> None:
        if operation in ("unlink", "fsync_dir") and "commitlog" in path:
            threads.add(threading.get_ident())
        if operation == "unlink" and "commitlog" in path:
            under_way.set()
            assert go_on.wait(20)

    disk.before = watch
    store.start()
    store.retention.delete_now()
    retired = asyncio.create_task(store.retention.run_now(log_too=True))
    await asyncio.to_thread(under_way.wait, 20)

    send(store, b"meanwhile")
    assert len(everything(store)) == store.max_offset("T", 0)  # nothing is missing before the deletion
    assert not retired.done()
    threads.clear()
    go_on.set()
    await retired
    assert len(store.log.segments) == 4
    assert threads
    assert threading.get_ident() not in threads
    assert store.min_offset("T", 0) > 0


async def test_every_deletion_lasts_before_the_next_and_queues_wait_for_the_log(tmp_path: Path) -> None:
    at_once = {"delete_commit_log_files_interval": 0, "delete_consume_queue_files_interval": 0}
    store, disk, _ = filled(tmp_path, segments=30, max_index_num=100, **at_once)
    store.start()
    seen: list[tuple[str, str]] = []
    disk.before = lambda operation, path: (
        seen.append((operation, str(Path(path).relative_to(tmp_path))))
        if operation in ("unlink", "fsync_dir")
        else None
    )
    store.retention.delete_now()
    await store.retention.run_now(log_too=True)
    await store.tasks.idle()
    disk.before = lambda *_: None
    await store.stop()

    deleted = [path for operation, path in seen if operation == "unlink"]
    assert [path.split("/")[0] for path in deleted] == sorted(
        (path.split("/")[0] for path in deleted), key=["commitlog", "index", "consumequeue"].index
    )
    assert sum(path.startswith("commitlog") for path in deleted) == 10
    for directory in {os.path.dirname(path) for path in deleted}:
        mine = [each for each in seen if directory in (each[1], os.path.dirname(each[1]))]
        operations = [operation for operation, _ in mine]
        for at, operation in enumerate(operations):
            if operation == "unlink":
                assert operations[at + 1 : at + 2] == ["fsync_dir"], (directory, operations)
        names = [path for operation, path in mine if operation == "unlink"]
        assert names == sorted(names)


async def test_deletions_are_paced_by_the_settings_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _, _ = filled(tmp_path, segments=30, max_index_num=100)
    store.start()
    pauses: list[int] = []

    async def pause(ms: int) -> None:
        pauses.append(ms)
        if len(pauses) == 4:
            store.configure(store.config.replace(delete_commit_log_files_interval=7))

    monkeypatch.setattr(store.executor, "pause", pause)
    store.configure(store.config.replace(delete_commit_log_files_interval=33, delete_file_batch_max=8))
    store.retention.delete_now()
    await store.retention.run_now(log_too=True)
    assert pauses == [33, 33, 33, 33, 7, 7, 7]
    assert len(store.log.segments) == 22
    pauses.clear()
    await store.tasks.idle()
    assert set(pauses) == {100}


async def test_a_stop_does_not_wait_for_the_pace(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path, delete_commit_log_files_interval=3_600_000)
    store.start()
    store.retention.delete_now()
    retired = asyncio.create_task(store.retention.run_now(log_too=True))
    await until(lambda: len(store.log.segments) == 13)
    async with asyncio.timeout(60):
        await store.stop()
        await retired
    assert len(list((tmp_path / "commitlog").iterdir())) == 13
    store = open_store(tmp_path, Partition())
    assert store.recovered.clean
    assert store.recovered.damage == []


@pytest.mark.parametrize("operation", ["unlink", "fsync_dir"])
def test_a_deletion_that_fails_is_tried_again_by_the_next_pass(tmp_path: Path, operation: str) -> None:
    store, disk, _ = filled(tmp_path)
    store.retention.delete_now()
    disk.fail(operation, match="commitlog", first=3)
    assert of_log(run_retention(store)) == 2
    assert len(everything(store)) == store.max_offset("T", 0) - store.min_offset("T", 0)
    while run_retention(store):
        pass
    assert len(store.log.segments) == len(list((tmp_path / "commitlog").iterdir())) == 1


def test_queue_files_that_a_stopped_pass_left_are_deleted_after_the_next_start(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path, segments=30)
    store.retention.delete_now()
    in_place(store.retention.log_cycle())
    files = len(list((tmp_path / "consumequeue/T/0").iterdir()))
    store.close()
    store = open_store(tmp_path, Partition(), delete_when="99")
    assert any("consumequeue" in path for path in run_retention(store))
    assert len(list((tmp_path / "consumequeue/T/0").iterdir())) < files
    assert len(everything(store)) == store.max_offset("T", 0) - store.min_offset("T", 0)

"""Topics deleted while the event loop runs: work of threads, concurrent messages, and crashes."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.verifying import check
from tests.store.kit import (
    START_MS,
    after_crash,
    bodies,
    delete_topic,
    everything,
    open_store,
    put,
    restarted,
    send,
    send_all,
)

from cometmq.store import ManualClock, MessageStore
from cometmq.store.background import topic_deletion
from cometmq.store.background.derived_writer import sync_paths

SYNCS = ("fdatasync", "fsync_dir", "unlink", "pwrite")


class Watched(FaultyDisk):
    """A disk that records blocking operations in the loop's thread and can delay an operation of a thread."""

    def __init__(self) -> None:
        super().__init__(really_sync=False)
        self.loop_thread = threading.get_ident()
        self.in_the_loop: list[tuple[str, str]] = []
        self.hold = ("", "")
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.before = self._look

    def _look(self, operation: str, path: str) -> None:
        if threading.get_ident() == self.loop_thread:
            if operation in SYNCS:
                self.in_the_loop.append((operation, path))
        elif operation == self.hold[0] and self.hold[1] in path:
            self.hold = ("", "")
            self.held.set()
            assert self.go_on.wait(20)


def running(root: Path, queues: int = 3, **changes: int) -> tuple[MessageStore, Watched]:
    """Open a store with an event loop and the topics T and Other, with everything written."""
    disk = Watched()
    store = open_store(root, disk, ManualClock(START_MS), mapped_file_size_commit_log=1 << 22, **changes)
    for queue_id in range(queues):
        send(store, b"%d" % queue_id, queue_id=queue_id)
        send(store, b"%d" % queue_id, topic="Other", queue_id=queue_id)
    store.writer.make_durable()
    store.start()
    disk.in_the_loop.clear()
    return store, disk


def directories(root: Path) -> list[str]:
    return sorted(os.listdir(root / "consumequeue"))


async def test_the_loop_waits_for_no_device(tmp_path: Path) -> None:
    store, disk = running(tmp_path, 300)
    assert await store.deletion.delete(["T"]) == 300
    assert disk.in_the_loop == []
    assert (directories(tmp_path), store.queues.topics()) == (["Other"], ["Other"])


async def test_many_topics_cost_as_many_syncs_as_one(tmp_path: Path) -> None:
    store, disk = running(tmp_path, 1)
    for number in range(50):
        send(store, topic=f"T{number}")
    store.writer.make_durable()
    disk.in_the_loop.clear()
    calls = disk.calls["fdatasync"] + disk.calls["fsync_dir"]
    gone = await store.deletion.delete_unknown({"Other"}.__contains__)
    assert gone == sorted(["T", *(f"T{number}" for number in range(50))])
    assert disk.in_the_loop == []
    assert disk.calls["fdatasync"] + disk.calls["fsync_dir"] - calls < 15
    assert directories(tmp_path) == ["Other"]
    assert await store.deletion.delete_unknown({"Other"}.__contains__) == []


async def held_up(store: MessageStore, disk: Watched, operation: str, path: str) -> asyncio.Task[int]:
    """Start a deletion of T that waits before the given operation of its thread."""
    disk.hold = (operation, path)
    deleting = asyncio.create_task(store.deletion.delete(["T"]))
    assert await asyncio.to_thread(disk.held.wait, 20)
    return deleting


@pytest.mark.parametrize("end", ["stopped", "killed"])
async def test_messages_that_come_while_it_is_noted_go_too(tmp_path: Path, end: str) -> None:
    store, disk = running(tmp_path)
    deleting = await held_up(store, disk, "rename", "deletedTopics.json")
    late = send(store, b"late")
    assert late.queue_offset == 1
    disk.go_on.set()
    await deleting
    assert send(store, b"new").queue_offset == 0
    assert everything(store) == [b"new"]
    if end == "stopped":
        await store.stop()
    else:
        store.crash()
    store = open_store(tmp_path, mapped_file_size_commit_log=1 << 22)
    assert everything(store) == [b"new"]
    assert store.recovered.damage == []


async def test_deletions_at_the_same_time_do_not_get_in_each_others_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, disk = running(tmp_path, 1)
    for number in range(20):
        send(store, topic=f"T{number}")
    store.writer.make_durable()
    deleting = await held_up(store, disk, "unlink", ".deleted")
    others = [asyncio.ensure_future(store.deletion.delete([f"T{number}"])) for number in range(20)]
    await asyncio.sleep(0)
    disk.go_on.set()

    assert (await deleting, await asyncio.gather(*others)) == (1, [1] * 20)
    assert sorted(store.deleted.ends) == sorted(["T", *(f"T{number}" for number in range(20))])
    assert directories(tmp_path) == ["Other"]
    assert caplog.records == []
    store = after_crash(store, mapped_file_size_commit_log=1 << 22)
    assert store.queues.topics() == ["Other"]


async def test_a_topic_that_never_rests_is_deleted_all_the_same(tmp_path: Path) -> None:
    store, disk = running(tmp_path)
    loop = asyncio.get_running_loop()

    def interfere(operation: str, path: str) -> None:
        if operation == "rename" and "deletedTopics" in path and threading.get_ident() != disk.loop_thread:
            done = asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: None), loop)
            loop.call_soon_threadsafe(send, store, b"again")
            done.result(20)

    disk.before = interfere
    assert await store.deletion.delete(["T"]) == 3
    assert send(store, b"new").queue_offset == 0
    store = after_crash(store, mapped_file_size_commit_log=1 << 22)
    assert everything(store) == [b"new"]


async def test_a_new_topic_of_the_name_is_not_mixed_up_with_the_files_of_the_old(tmp_path: Path) -> None:
    store, disk = running(tmp_path)
    deleting = await held_up(store, disk, "unlink", ".deleted")
    for number in range(200):  # fills two files of queue units
        assert send(store, b"new %d" % number).queue_offset == number
    assert store.queues.write_dirty()
    disk.go_on.set()
    assert await deleting == 3
    assert len(os.listdir(tmp_path / "consumequeue" / "T" / "0")) == 2
    assert directories(tmp_path) == ["Other", "T"]
    assert everything(store) == [b"new %d" % number for number in range(200)]
    await store.stop()
    store = open_store(tmp_path, mapped_file_size_commit_log=1 << 22)
    assert (store.recovered.clean, len(everything(store))) == (True, 200)


async def test_two_deletions_of_one_topic_at_once(tmp_path: Path) -> None:
    store, disk = running(tmp_path)
    first = await held_up(store, disk, "unlink", ".deleted")
    send(store, b"between")
    store.queues.write_dirty()
    second = asyncio.create_task(store.deletion.delete(["T"]))
    disk.go_on.set()
    assert (await first, await second) == (3, 1)
    assert directories(tmp_path) == ["Other"]


async def test_whoever_still_holds_a_queue_reads_nothing_of_its_successor(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    send_all(store, (b"old %d" % number for number in range(300)))
    old = store.queues.get_or_make("T", 0)
    store.queues.write_dirty()
    await store.deletion.delete(["T"])
    send_all(store, (b"new %d" % number for number in range(300)))
    store.queues.write_dirty()
    assert old.read(0, 1) is None
    assert old.unit(0) is None
    assert bodies(store.get_messages("T", 0, 0, 1)) == [b"new 0"]


def test_what_a_crash_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path, FaultyDisk(really_sync=False))
    send(store)
    send(store, topic="Other")
    store.queues.write_dirty()
    store.disk.fail("unlink", match=".deleted")  # type: ignore[attr-defined]
    assert delete_topic(store, "T") == 1
    assert directories(tmp_path) == [".deleted", "Other"]
    store.crash()
    assert "stray" not in {each.kind for each in check(tmp_path).findings}
    store = open_store(tmp_path)
    assert (directories(tmp_path), store.queues.topics()) == (["Other"], ["Other"])


def test_somebody_elses_files_stay(
    tmp_path: Path, store: MessageStore, caplog: pytest.LogCaptureFixture
) -> None:
    send(store)
    store.queues.write_dirty()
    (tmp_path / "consumequeue" / "T" / "notes.txt").write_text("mine")
    (tmp_path / "consumequeue" / "T" / "0" / "more.txt").write_text("mine too")
    delete_topic(store, "T")
    kept = tmp_path / "consumequeue" / ".deleted" / "gone-0"
    assert (kept / "notes.txt").read_text() == "mine"
    assert os.listdir(kept / "0") == ["more.txt"]
    assert "is not empty and is not removed" in caplog.text
    send(store)
    store.queues.write_dirty()
    delete_topic(store, "T")
    store = restarted(store)
    assert store.queues.topics() == []
    assert (kept / "notes.txt").exists()


def test_directories_that_go_while_they_are_synced_are_no_failure(tmp_path: Path) -> None:
    disk = FaultyDisk()
    paths = []
    for number in range(300):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        paths.append(str(directory / "file"))
        if number:
            Path(paths[-1]).touch()
        else:
            directory.rmdir()  # its file is the first to be deleted
    sync_paths(disk, paths, [])
    disk.fail("fsync_dir", error=2)  # deleted between two checks
    sync_paths(disk, paths[1:3], [str(tmp_path / "1"), str(tmp_path / "2")])
    assert disk.calls["fsync_dir"] == 2


async def test_a_refusal_after_a_message_came_between_takes_everything_back(tmp_path: Path) -> None:
    store, disk = running(tmp_path)
    await store.topic_retention.raise_min_offsets("T", {0: 1})
    deleting = await held_up(store, disk, "rename", "deletedTopics.json")
    send(store, b"late")
    disk.fail("rename", first=2, times=1000, match="deletedTopics.json")  # the second write of the table
    disk.go_on.set()
    with pytest.raises(OSError, match="Input/output error"):
        await deleting
    disk.heal()
    assert (everything(store), everything(store, queue_id=1)) == ([b"late"], [b"1"])
    assert send(store, b"more").queue_offset == 2
    assert store.min_offsets.by_topic == {"T": {0: 1}}


@pytest.mark.parametrize("tries", [3, 0])
async def test_a_new_topic_is_not_hidden_by_a_deletion_beside_a_failed_write(
    tmp_path: Path, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion was recorded with a log end that a failed write then took back.

    Messages of the new topic below that end must not count as deleted at the next start.
    """
    monkeypatch.setattr(topic_deletion, "TRIES", tries)  # attempts before the loop's thread writes the table
    disk = FaultyDisk(really_sync=False)
    store = open_store(tmp_path, disk, ManualClock(START_MS))
    send(store, b"old")
    send(store, b"other", topic="Other")
    store.start()
    put(store, b"x" * 5000, topic="Other")
    deletion = asyncio.create_task(store.deletion.delete(["T"]))
    await asyncio.sleep(0)
    disk.fail("pwrite", match="commitlog")
    assert store.commit().error is not None
    disk.heal()
    assert await deletion == 1
    send(store, b"new")
    store.writer.make_durable()
    store = after_crash(store, FaultyDisk(really_sync=False), ManualClock(START_MS))
    assert bodies(store.get_messages("T", 0, 0, 10)) == [b"new"]
    store.close()


def test_what_a_topic_gets_after_a_power_failure_is_not_of_the_deleted_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    send(store, b"other", topic="Other")
    store.writer.make_durable()
    (path,) = (tmp_path / "commitlog").iterdir()
    on_the_device = path.read_bytes()
    send_all(store, [b"old" * 100, b"old"])
    delete_topic(store, "T")
    store.crash()
    path.write_bytes(on_the_device)
    store = open_store(tmp_path)
    send(store, b"new")
    store = after_crash(store)
    assert everything(store) == [b"new"]

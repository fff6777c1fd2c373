"""Tiered storage: uploads, deletions on the disk and in the object store, and interruptions of each step."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.object_store import MemoryObjects
from tests.store.kit import after_crash, check_sound, everything, opened, put, run_retention
from tests.store.raft_log.members import add, agree, elect, seen
from tests.store.tiered.offload import HOUR, NOON, age, fill, offload, tiered, upload

from cometmq.errors import CommandError, StoreCorrupt, StoreError
from cometmq.protocol.checksum import crc32
from cometmq.store import WAITING, ManualClock, MessageStore, ObjectStoreFailed
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.rebuild_parts import plan_rebuild

SEGMENT = 64 << 10
ALL = "crc json log"


def test_full_segments_are_uploaded_as_they_are_and_the_last_one_is_not(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 3)
    age(store)

    upload(store)

    assert store.tiered is not None
    assert objects.endings() == {0: ALL, SEGMENT: ALL}
    for base in (0, SEGMENT):
        name = f"{store.tiered.table.store_id}/{base:020d}"
        content = Path(store.log.path_of(base)).read_bytes()
        assert objects.objects[f"{name}.log"] == content
        assert objects.objects[f"{name}.crc"] == crc32(content).to_bytes(4, "big")
    assert (store.tiered.counts.segments, store.tiered.waiting_bytes) == (2, 0)


def test_the_directory_without_its_old_segments_is_sound(tmp_path: Path) -> None:
    store = tiered(tmp_path, MemoryObjects())
    fill(store, 5)
    offload(store)
    assert len(store.log.segments) == 1

    check_sound(store)


def test_a_stop_ends_an_upload_within_a_block(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects, mapped_file_size_commit_log=2 << 20)
    fill(store, 2, size=60_000)
    age(store)
    assert store.tiered is not None
    blocks = store.disk.pread
    reads = []

    def stop_after_two(fd: int, length: int, offset: int) -> bytes:
        reads.append(offset)
        if len(reads) == 2:
            assert store.tiered is not None
            store.tiered.end()
        return blocks(fd, length, offset)

    store.disk.pread = stop_after_two  # type: ignore[method-assign]
    with pytest.raises(ObjectStoreFailed, match="stops"):
        upload(store)
    assert len(reads) == 2
    assert objects.objects == {}


def test_the_manifest_is_the_last_object_and_the_next_cycle_uploads_nothing_twice(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 2)
    age(store)

    upload(store)
    done = len(objects.calls)
    upload(store)

    assert [name.rpartition(".")[2] for call, name in objects.calls if call == "put"] == [
        "log",
        "crc",
        "json",
    ]
    assert len(objects.calls) == done


def test_what_is_not_yet_synced_or_visible_is_not_uploaded(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 2)
    age(store)
    store.flusher.flushed = SEGMENT - 1

    upload(store)

    assert objects.objects == {}


def test_a_raft_member_uploads_only_what_its_group_has_committed(tmp_path: Path) -> None:
    objects = MemoryObjects()
    raft = {"enable_d_leger_commit_log": True, "d_leger_group": "g", "d_leger_self_id": "n0"}
    store = tiered(tmp_path, objects, **raft)
    elect(store, 1)
    while len(store.log.segments) < 3:
        add(store, bytes(5000))
    assert store.writer.make_durable()
    age(store)
    upload(store)
    assert objects.objects == {}

    agree(store)
    before = seen(store)
    offload(store)
    assert objects.endings() == {0: ALL, SEGMENT: ALL}
    assert store.log.segments == [2 * SEGMENT]
    assert everything(store) == before
    store.crash()
    store = tiered(tmp_path, objects, **raft)
    elect(store, 2)
    assert everything(store) == before


def test_a_segment_that_a_slave_still_needs_stays(tmp_path: Path) -> None:
    store = tiered(tmp_path, MemoryObjects())
    fill(store, 3)
    store.retention.first_needed_position = lambda: SEGMENT
    offload(store)

    assert store.log.segments == [SEGMENT, 2 * SEGMENT]


def test_uploaded_segments_are_deleted_early_and_others_after_the_normal_time(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 4)
    age(store, hours=0.5)
    upload(store)
    assert run_retention(store) == []

    age(store, segments=1)
    assert [path[-20:] for path in run_retention(store) if "commitlog" in path] == [f"{0:020d}"]
    assert store.log.min_position == SEGMENT
    assert store.min_offset("T", 0) == 0


def test_messages_that_are_still_needed_are_moved_once_and_not_forever(tmp_path: Path) -> None:
    """As with delayed messages: they leave each segment that is deleted, and fill new ones."""
    store = tiered(tmp_path, MemoryObjects(), tiered_local_reserved_time=0)

    async def move_all(_behind: int) -> bool:
        fill(store, len(store.log.segments) + 1)
        return True

    store.retention.before_delete = move_all
    fill(store, 4)
    for _ in range(4):
        offload(store)
    moved = store.log.end
    for _ in range(4):
        assert offload(store) == []
    assert store.log.end == moved

    count = len(store.log.segments)
    fill(store, count + 2)  # After new messages, the work is worthwhile again
    assert len(offload(store)) >= count


def test_without_an_upload_segments_stay_for_the_normal_time_and_their_loss_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects = MemoryObjects()
    objects.fail("put")
    store = tiered(tmp_path, objects, delete_when="99")
    fill(store, 3)
    age(store, hours=50)
    with pytest.raises(ObjectStoreFailed):
        upload(store)
    assert run_retention(store) == []

    age(store, hours=100)
    store.retention.delete_now()
    run_retention(store)

    assert store.tiered is not None
    assert len(store.log.segments) == 1
    assert store.tiered.counts.lost == 2
    assert store.min_offset("T", 0) > 0
    assert "although it was never uploaded" in caplog.text


def lose(ending: str) -> Callable[[MessageStore, MemoryObjects], None]:
    def lose(_: MessageStore, objects: MemoryObjects) -> None:
        del objects.objects[next(name for name in objects.objects if name.endswith(ending))]

    return lose


def change_log(store: MessageStore, _: MemoryObjects) -> None:
    """As after a cut of the log while tiered storage was off: the log has grown with other records."""
    path = Path(store.log.path_of(0))
    path.write_bytes(path.read_bytes().replace(b"7 \0", b"8 \0"))
    age(store)


def answer_nothing(_: MessageStore, objects: MemoryObjects) -> None:
    objects.fail()


@pytest.mark.parametrize(
    "disturb",
    [lose("log"), lose("crc"), change_log, answer_nothing],
    ids=["no log", "no checksum", "another log", "no answer"],
)
def test_a_segment_is_kept_until_its_upload_is_whole_and_equal(
    tmp_path: Path, disturb: Callable[[MessageStore, MemoryObjects], None]
) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 2)
    age(store)
    upload(store)
    disturb(store, objects)
    assert run_retention(store) == []

    objects.heal()
    upload(store)
    assert objects.endings() == {0: ALL}
    assert Path(store.log.path_of(0)).read_bytes() == next(
        content for name, content in objects.objects.items() if name.endswith("log")
    )
    assert len(run_retention(store)) > 0


def test_expired_segments_are_deleted_manifest_first_and_their_messages_are_no_longer_offered(
    tmp_path: Path,
) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects, tiered_reserved_time=24)
    fill(store, 4)
    age(store, hours=12)
    age(store, hours=20, segments=1)
    upload(store)
    run_retention(store)
    assert store.min_offset("T", 0) == 0
    store = restarted_later(store, objects, 5 * HOUR, tiered_reserved_time=24)
    objects.calls.clear()

    upload(store)
    run_retention(store)

    deleted = [name.rpartition(".")[2] for call, name in objects.calls if call == "delete"]
    assert deleted == ["json", "log", "crc"]
    assert objects.endings() == {SEGMENT: ALL, 2 * SEGMENT: ALL}
    assert 0 < store.min_offset("T", 0) < store.max_offset("T", 0)


def restarted_later(store: MessageStore, objects: MemoryObjects, ms: int, **changes: object) -> MessageStore:
    store.close()
    again = tiered(Path(store.config.root), objects, **changes)
    assert again.tiered is not None
    again.tiered.steady.now_ms = lambda: NOON + ms  # type: ignore[method-assign]
    return again


STEPS = [
    *[("put", ending) for ending in (".log", ".crc", ".json")],
    ("size", ".log"),
    *[("delete", ending) for ending in (".json", ".log", ".crc")],
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: " ".join(step))
def test_a_kill_before_or_after_any_request_loses_nothing_and_leaves_no_remains(
    tmp_path: Path, step: tuple[str, str], after: bool
) -> None:
    objects = Killed(step, after)
    store = tiered(tmp_path, objects, tiered_reserved_time=24)
    fill(store, 4)
    every = everything(store)
    try:
        offload(store)
        expired = len(store.log.segments)
        assert store.tiered is not None
        store.tiered.steady.now_ms = lambda: NOON + 100 * HOUR  # type: ignore[method-assign]
        upload(store)
        raise AssertionError(f"{expired}: the step was not reached")
    except ConnectionAbortedError:
        objects.step = None
    store = after_crash(store, store.disk, store.flusher.clock, objects, **CHANGES)

    found = everything(store)
    assert found == every[-len(found) :]
    if step[0] != "delete":
        assert found == every
    upload(store)
    run_retention(store)
    found = everything(store)
    assert found == every[-len(found) :]
    assert store.tiered is not None
    assert objects.endings() == dict.fromkeys(store.tiered.table.by_base, ALL)


CHANGES = {"tiered_local_reserved_time": 1, "tiered_reserved_time": 24, "delete_when": "99"}


class Killed(MemoryObjects):
    """An object store whose client is killed before or after a request, as the next exception shows."""

    def __init__(self, step: tuple[str, str] | None, after: bool) -> None:
        super().__init__()
        self.step = step
        self.after = after

    def _killed(self, operation: str, name: str) -> bool:
        return self.step is not None and operation == self.step[0] and name.endswith(self.step[1])

    def _begin(self, operation: str, name: str) -> None:
        super()._begin(operation, name)
        if not self.after and self._killed(operation, name):
            raise ConnectionAbortedError

    def put(self, name: str, content: object) -> None:
        super().put(name, content)  # type: ignore[arg-type]
        if self._killed("put", name):
            raise ConnectionAbortedError

    def delete(self, name: str) -> None:
        super().delete(name)
        if self._killed("delete", name):
            raise ConnectionAbortedError

    def size(self, name: str) -> int | None:
        found = super().size(name)
        if self._killed("size", name):
            raise ConnectionAbortedError
        return found


def test_remains_of_a_segment_that_never_arrived_whole_are_removed(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 3)
    offload(store)
    assert store.tiered is not None
    mine = store.tiered.table.store_id
    objects.objects |= {f"{mine}/{5:020d}.log": b"half", f"{mine}/notes.txt": b"somebody's"}
    objects.objects[f"other/{5:020d}.log"] = b"of another store"

    store = after_crash(store, store.disk, store.flusher.clock, objects)
    upload(store)

    assert f"{mine}/{5:020d}.log" not in objects.objects
    assert {f"{mine}/notes.txt", f"other/{5:020d}.log"} < objects.objects.keys()


def test_a_segment_that_an_older_table_lacks_is_taken_up_again(tmp_path: Path) -> None:
    """If the newest table is damaged, the previous table is used."""
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 5)
    every = everything(store)
    offload(store)
    assert store.tiered is not None
    known = dict(store.tiered.table.by_base)
    store.close()
    (tmp_path / "config" / "tieredSegments.json").write_text("{")

    store = tiered(tmp_path, objects)
    assert store.tiered is not None
    assert len(store.tiered.table.by_base) == len(known) - 1
    queue = store.queues.find_queue("T", 0)
    assert queue is not None
    lacking = queue.search(0, queue.max_offset, 3 * SEGMENT, WAITING)
    with pytest.raises(CommandError, match="try again"):  # not "the message was removed"
        store.get_messages("T", 0, lacking, 1, reads=WAITING)
    upload(store)

    assert store.tiered.table.by_base == known
    assert everything(store) == every


def test_readers_pass_over_a_segment_that_is_nowhere(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 4)
    every = everything(store)
    offload(store)
    assert store.tiered is not None
    store.tiered.table.remove(SEGMENT)
    objects.objects = {name: each for name, each in objects.objects.items() if f"/{SEGMENT:020d}" not in name}
    store = after_crash(store, store.disk, store.flusher.clock, objects)
    upload(store)

    found = everything(store)
    assert 0 < len(found) < len(every)
    assert [body for body in every if body in found] == found
    assert (found[0], found[-1]) == (every[0], every[-1])


@pytest.mark.parametrize(
    ("position", "content"),
    [
        (7, {}),
        (SEGMENT, {"size": 10**18}),
        (SEGMENT, {"size": -1}),
        (SEGMENT, {"crc": -1}),
        (SEGMENT, {"crc": 1 << 32}),
        (SEGMENT, {"modifiedMs": -1}),
        (SEGMENT, {"modifiedMs": 10**40}),
        (7, b"\xff"),
        (7, b"[]"),
        (7, b'{"position": 8, "size": 1, "crc": 1, "modifiedMs": 1}'),
        (7, b"{" * 9000),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else str(value)[:20],
)
def test_an_object_that_is_no_possible_manifest_is_left_alone(
    tmp_path: Path, position: int, content: dict[str, int] | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """`content` is the whole object, or the fields that differ from those of a manifest of SEGMENT."""
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 4)
    offload(store)
    assert store.tiered is not None
    store.tiered.table.remove(SEGMENT)
    known = dict(store.tiered.table.by_base)
    right = f"{store.tiered.table.store_id}/{SEGMENT:020d}.json"
    name = f"{store.tiered.table.store_id}/{position:020d}.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(objects.objects[right]), "position": position, **content}).encode()
    objects.objects[right] = b""
    objects.objects[name] = content
    store = after_crash(store, store.disk, store.flusher.clock, objects)
    upload(store)

    assert store.tiered is not None
    assert store.tiered.table.by_base == known
    assert objects.objects[name] == content
    assert f"{name} is not a manifest" in caplog.text


def test_a_damaged_table_refuses_the_start_instead_of_dropping_messages(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 2)
    offload(store)
    store.close()
    for path in (tmp_path / "config").glob("tieredSegments.json*"):
        path.write_text('{"storeId": 5}')

    with pytest.raises(StoreCorrupt, match=r"tieredSegments\.json"):
        tiered(tmp_path, objects)


def test_a_rebuild_that_would_lose_the_messages_in_the_object_store_is_refused(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 3)
    age(store)
    upload(store)
    store.close()
    rebuild(str(tmp_path), config=store.config)  # all messages are still stored locally
    offload(tiered(tmp_path, objects))
    opened.pop().close()

    with pytest.raises(StoreError, match="in the object store only"):
        rebuild(str(tmp_path), config=store.config)
    with pytest.raises(StoreError, match="in the object store only"):
        plan_rebuild(str(tmp_path), f"{tmp_path}-rebuilt", 2, config=store.config)
    assert everything(tiered(tmp_path, objects))[0].startswith(b"0 ")


def test_without_tiered_storage_nothing_of_it_is_on_the_disk(store: MessageStore, tmp_path: Path) -> None:
    put(store)

    assert store.tiered is None
    assert not (tmp_path / "config" / "tieredSegments.json").exists()


def test_an_account_that_may_not_delete_objects_still_uploads(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects, tiered_reserved_time=100)
    fill(store, 3)
    offload(store)
    fill(store, 3)
    objects.fail("delete")
    clock = store.flusher.clock
    assert isinstance(clock, ManualClock)
    clock.advance(99 * 3600)
    for _ in range(3):
        with pytest.raises(ObjectStoreFailed, match="planned failure of delete"):
            upload(store)
    assert {2 * SEGMENT, 3 * SEGMENT} <= objects.endings().keys()
    assert store.tiered is not None
    assert store.tiered.waiting_bytes == 0
    assert store.tiered.counts.failures == 3


def test_two_brokers_with_copies_of_one_directory_do_not_replace_each_others_segments(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path / "one", objects)
    fill(store, 2)
    store.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    stores = [tiered(tmp_path / name, objects) for name in ("one", "two")]
    for number, each in enumerate(stores):
        fill(each, 4, size=2000 + number)
        age(each)
    upload(stores[0])
    before = dict(objects.objects)
    with pytest.raises(ObjectStoreFailed, match=r"json belongs to another broker with a copy of this store"):
        upload(stores[1])

    assert objects.objects == before
    for each in stores:
        every = everything(each)
        run_retention(each)
        assert everything(each) == every


async def test_retention_does_not_wait_for_an_object_store_that_never_answers(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 2)
    age(store)
    upload(store)
    answer = threading.Event()

    def wait(_operation: str, _name: str) -> None:
        answer.wait(60)

    objects.before = wait
    tier = store.tiered
    assert tier is not None
    tier.attach(asyncio.get_running_loop())
    tier.timeout_s = 0.05
    assert await tier.confirm(0, early=True) is False
    answer.set()
    tier.timeout_s = 60
    assert await tier.confirm(0, early=True)
    tier.close()

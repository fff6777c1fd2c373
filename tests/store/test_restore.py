"""The restore of a store directory from its object store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.kit.faulty_disk import WRITES, FaultyDisk
from tests.kit.object_store import MemoryObjects
from tests.store.kit import check_sound, delete_topic, everything, in_place, send, small
from tests.store.tiered.offload import NOON, age, fill, tiered, upload

from cometmq.errors import ConfigError, StoreError
from cometmq.store import (
    ManualClock,
    MessageStore,
    ObjectStoreFailed,
    RestoreReport,
    restore_store,
)
from cometmq.store.tables.tiered_segments import TieredSegments

SEGMENT = 64 << 10
SETTINGS: dict[str, Any] = {"tiered_local_reserved_time": 1, "delete_when": "99"}


class Killed(BaseException):
    """The process is killed at this operation."""


class Lost:
    """The objects of a broker whose disk is lost, and what its queues had."""

    def __init__(self, root: Path, segments: int = 4) -> None:
        self.root, self.objects = root, MemoryObjects()
        store = tiered(root, self.objects)
        fill(store, segments)
        age(store)
        upload(store)
        assert store.tiered is not None
        self.id, self.end = store.tiered.table.store_id, (segments - 1) * SEGMENT
        self.bodies = {}
        for queue in store.queues:
            units = queue.units(0, queue.max_offset)
            self.bodies[queue.queue_id] = everything(store, "T", queue.queue_id)[
                : sum(position < self.end for _, position, _, _ in units)
            ]
        store.crash()
        shutil.rmtree(root)

    def restore(self, disk: FaultyDisk | None = None, **more: Any) -> RestoreReport:
        disk = disk or FaultyDisk(really_sync=False)
        config = small(self.root, **SETTINGS)
        return restore_store(config, self.objects, disk=disk, clock=ManualClock(NOON), **more)

    def opened(self) -> MessageStore:
        return tiered(self.root, self.objects)

    def check(self) -> None:
        """Check that a broker serves everything that was uploaded, and goes on."""
        store = self.opened()
        assert [each.name for each in Path(store.config.commit_log_dirs[0]).iterdir()] == [
            f"{self.end - SEGMENT:020d}"
        ]
        for queue_id, bodies in self.bodies.items():
            assert everything(store, "T", queue_id) == bodies
        for number in (0, len(self.bodies[0])):
            found = store.lookups.by_key("T", f"k{number}", 9, 0, 1 << 60, 1 << 20)
            (record,) = in_place(found)
            assert b"%d " % number in record
        assert store.log.end == self.end
        new = send(store, b"new")
        assert (new.physical_offset, new.queue_offset) == (self.end, len(self.bodies[0]))
        upload(store)
        check_sound(store)

    def object(self, base: int, ending: str) -> str:
        return f"{self.id}/{base:020d}.{ending}"


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    return Lost(tmp_path / "store")


def test_a_restored_store_serves_what_was_uploaded_and_goes_on_after_it(lost: Lost) -> None:
    done: list[tuple[int, int]] = []
    report = lost.restore(progress=lambda *each: done.append(each))

    assert (report.start, report.end, report.gaps, report.done) == (0, lost.end, [], True)
    assert (report.segments, report.bytes, report.queues) == (3, 3 * SEGMENT, 2)
    assert (report.messages, report.not_served) == (sum(map(len, lost.bodies.values())), 0)
    assert report.newest_ms == NOON - 2 * 3_600_000
    assert done == [(number * SEGMENT, 3 * SEGMENT) for number in (1, 2, 3)]
    lost.check()


def test_a_dry_run_reports_the_same_and_changes_nothing(lost: Lost) -> None:
    report = lost.restore(dry_run=True)

    assert (report.start, report.end, report.segments, report.done) == (0, lost.end, 3, False)
    assert not lost.root.exists()


def test_at_most_two_segments_are_on_the_disk(lost: Lost) -> None:
    most = 0
    disk = FaultyDisk(really_sync=False)

    def count(_operation: str, _path: str) -> None:
        nonlocal most
        most = max(most, len(list((lost.root / "commitlog").glob("*"))))

    disk.before = count
    lost.restore(disk)
    assert most == 2


@pytest.mark.slow("a restore for each of its steps")
def test_a_kill_at_any_step_loses_nothing(tmp_path: Path) -> None:
    lost, step = Lost(tmp_path / "lost", 3), 0
    objects = dict(lost.objects.objects)
    while step >= 0:
        step += 1
        root = lost.root = tmp_path / str(step)
        lost.objects.objects = dict(objects)
        disk = FaultyDisk(really_sync=False)
        left = step

        def kill(operation: str, _name: str) -> None:
            nonlocal left
            if operation in WRITES or operation in ("get", "names", "size"):
                left -= 1
                if not left:
                    raise Killed

        disk.before = lost.objects.before = kill
        try:
            lost.restore(disk)
            step = -1
        except Killed:
            disk.held_locks.clear()
        lost.objects.heal()
        if step > 0 and (root / "config" / "tieredSegments.json").exists():
            table = json.loads((root / "config" / "tieredSegments.json").read_bytes())
            if table.get("restoring"):
                with pytest.raises(StoreError, match="repeat `cometmq store restore`"):
                    lost.opened()
            else:
                lost.check()
                continue
        if step > 0:
            lost.restore()
        lost.check()


def test_a_full_disk_ends_the_restore_which_can_be_repeated(lost: Lost) -> None:
    disk = FaultyDisk(really_sync=False)
    disk.fail("reserve", error=28, first=2)
    with pytest.raises(OSError, match="No space left"):
        lost.restore(disk)
    gets = len(lost.objects.calls)
    lost.restore()
    copied = [name for call, name in lost.objects.calls[gets:] if call == "get" and name.endswith(".log")]
    assert copied == [lost.object(base, "log") for base in (SEGMENT, 2 * SEGMENT)]
    lost.check()


def test_queues_that_cannot_be_written_end_the_restore(lost: Lost) -> None:
    disk = FaultyDisk(really_sync=False)
    disk.fail("fdatasync", match="consumequeue", times=99)
    with pytest.raises((StoreError, OSError)):
        lost.restore(disk)
    lost.restore()
    lost.check()


@pytest.mark.parametrize(
    "place", ["other", "commitlog/x", "config/topics.json", "config/tieredSegments.json"]
)
def test_a_directory_that_is_not_empty_is_refused(lost: Lost, place: str) -> None:
    (lost.root / place).parent.mkdir(parents=True)
    (lost.root / place).write_text("")
    (lost.root / "broker.conf").write_text("")
    with pytest.raises(StoreError, match="not empty"):
        lost.restore()
    shutil.rmtree(lost.root)
    (lost.root / "lost+found").mkdir(parents=True)
    (lost.root / "broker.conf").write_text("")
    lost.restore()
    with pytest.raises(StoreError, match="not empty"):
        lost.restore()


def test_another_restore_in_the_same_directory_is_refused(lost: Lost) -> None:
    disk = FaultyDisk(really_sync=False)
    lost.root.mkdir()
    fd = disk.lock_directory(str(lost.root))
    assert fd is not None
    with pytest.raises(StoreError, match="another restore"):
        lost.restore()
    disk.close(fd)
    lost.restore()


def test_a_topic_that_was_deleted_stays_away_and_one_that_was_created_again_is_served(tmp_path: Path) -> None:
    objects = MemoryObjects()
    store = tiered(tmp_path, objects)
    fill(store, 3, topic="Gone")
    fill(store, 5)
    delete_topic(store, "T")
    delete_topic(store, "Gone")
    every = [b"new %d" % number for number in range(10)]
    for body in every:
        send(store, body)
    fill(store, 8, topic="Other")
    age(store)
    upload(store)
    store.crash()
    shutil.rmtree(tmp_path)
    disk, clock = FaultyDisk(really_sync=False), ManualClock(NOON)
    report = restore_store(small(tmp_path, **SETTINGS), objects, disk=disk, clock=clock)

    assert report.not_served == 0
    store = tiered(tmp_path, objects)
    assert everything(store) == every
    assert {queue.topic for queue in store.queues} == {"T", "Other"}


@pytest.mark.parametrize("ending", ["log", "crc"])
@pytest.mark.parametrize("change", ["flipped", "shorter", "old"])
def test_a_changed_object_is_an_error_and_the_restore_can_be_repeated(
    lost: Lost, ending: str, change: str
) -> None:
    name = lost.object(SEGMENT, ending)
    whole, other = lost.objects.objects[name], lost.objects.objects[lost.object(0, ending)]
    changed = {"flipped": bytes([whole[0] ^ 1]) + whole[1:], "shorter": whole[:-1], "old": other}
    lost.objects.objects[name] = changed[change]
    with pytest.raises(ObjectStoreFailed, match=f"{name} does not match its CRC"):
        lost.restore()
    lost.objects.objects[name] = whole
    lost.restore()
    lost.check()


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{" * 9000, b'{"position": 65536, "size": 1, "crc": 1, "modifiedMs": 1}'],
)
def test_an_invalid_manifest_is_named_and_its_segment_is_left_out_without_it(
    lost: Lost, content: bytes
) -> None:
    name = lost.object(SEGMENT, "json")
    lost.objects.objects[name] = content
    with pytest.raises(StoreError, match=f"{name}: it describes no segment"):
        lost.restore()
    assert not lost.root.exists()
    del lost.objects.objects[name]
    report = lost.restore()
    assert [(gap.start, gap.stop) for gap in report.gaps] == [(SEGMENT, 2 * SEGMENT)]
    store = lost.opened()
    found = everything(store)
    assert 0 < len(found) < len(lost.bodies[0])
    assert (found[0], found[-1]) == (lost.bodies[0][0], lost.bodies[0][-1])


def test_a_manifest_far_beyond_every_log_is_refused(lost: Lost) -> None:
    base = (1 << 63) - SEGMENT
    manifest = json.loads(lost.objects.objects[lost.object(0, "json")])
    for ending in ("log", "crc"):
        lost.objects.objects[lost.object(base, ending)] = b""
    lost.objects.objects[lost.object(base, "json")] = json.dumps({**manifest, "position": base}).encode()
    with pytest.raises(StoreError, match="describes no segment"):
        lost.restore()


def test_objects_without_a_manifest_or_of_others_do_not_count(lost: Lost) -> None:
    for name in ("x", "a/b", f"{lost.id}/7.json", f"{lost.id}/{0:020d}.txt", lost.object(3 * SEGMENT, "log")):
        lost.objects.objects[name] = b""
    assert lost.restore().segments == 3
    lost.check()


def test_one_of_several_stores_must_be_selected(lost: Lost) -> None:
    for name, content in list(lost.objects.objects.items()):
        lost.objects.objects[name.replace(lost.id, "0" * 16)] = content
    with pytest.raises(StoreError, match=rf"{'0' * 16} \(3 segments, from 0\), .*--id"):
        lost.restore()
    with pytest.raises(StoreError, match="nobody: the stores"):
        lost.restore(store_id="nobody")
    assert lost.restore(store_id=lost.id).store_id == lost.id
    lost.check()


def test_an_interrupted_restore_of_another_store_is_refused(lost: Lost) -> None:
    TieredSegments(FaultyDisk(really_sync=False), str(lost.root), restoring="f" * 16)
    with pytest.raises(StoreError, match="the restore of store ffffffffffffffff is not complete"):
        lost.restore()


def test_nothing_to_restore_and_a_raft_member_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the stores in the object store are: none"):
        restore_store(small(tmp_path / "a"), MemoryObjects())
    raft = {"enable_d_leger_commit_log": True, "d_leger_group": "g", "d_leger_self_id": "n0"}
    with pytest.raises(StoreError, match="from its group"):
        restore_store(small(tmp_path / "a", **raft), MemoryObjects())
    with pytest.raises(ConfigError):
        restore_store(small(tmp_path / "a", store_path_index=str(tmp_path)), MemoryObjects())

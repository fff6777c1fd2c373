"""`rebuild` writes queues and an index equal to the originals.

It needs exclusive use of the store and can be killed at any operation.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import by_key, delete_topic, everything, open_configured, open_store, put, send, small
from tests.store.planted import (
    UNCOVERED_PLACES,
    alter,
    build,
    damage_field,
    extract_golden,
    flip,
    index_files,
    places,
    snapshot,
    unit_place,
)

from cometmq.errors import StoreError
from cometmq.store import ManualClock
from cometmq.store.inspect.rebuild import SCRATCH, rebuild
from cometmq.store.inspect.verify import verify

AT_MS = 1_700_000_900_000


def queue_bytes(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(root).items() if name.startswith("consumequeue/")}


def index_bytes(root: Path) -> list[bytes]:
    """Return the contents of the index files in order; their names are creation times."""
    return [path.read_bytes() for path in index_files(root)]


def run(root: Path, disk: FaultyDisk | None = None) -> None:
    disk = disk or FaultyDisk(really_sync=False)
    rebuild(str(root), disk=disk, clock=ManualClock(AT_MS), config=small(root))


@pytest.mark.parametrize("damage", ["none", "units and entries", "all gone"])
def test_the_result_equals_the_originals_byte_for_byte(root: Path, damage: str) -> None:
    before, queues, index = snapshot(root), queue_bytes(root), index_bytes(root)
    if damage == "units and entries":
        path, at = unit_place(root, places(root)[100])
        alter(path, at, bytes(20))
        flip(index_files(root)[0], 1234)
    elif damage == "all gone":
        shutil.rmtree(root / "consumequeue")
        shutil.rmtree(root / "index")
    report = rebuild(str(root), disk=FaultyDisk(), clock=ManualClock(AT_MS), config=small(root))
    assert queue_bytes(root) == queues
    assert index_bytes(root) == index
    untouched = {name for name in before if not name.startswith(("consumequeue/", "index/"))}
    assert {name: data for name, data in snapshot(root).items() if name in untouched} == {
        name: before[name] for name in untouched
    }
    assert not (root / SCRATCH).exists()
    assert (report.records, report.queues, report.units, report.index_entries) == (400, 3, 400, 1200)
    assert (report.not_served, report.hidden, report.findings) == (0, 0, [])


def test_apaches_store_equals_what_apache_wrote(tmp_path: Path) -> None:
    extract_golden(tmp_path)
    queues, index = queue_bytes(tmp_path), index_bytes(tmp_path)
    rebuild(str(tmp_path))
    assert queue_bytes(tmp_path) == queues
    assert index_bytes(tmp_path) == index


def test_a_rebuilt_store_opens_as_cleanly_stopped_and_serves_everything(root: Path) -> None:
    run(root)
    store = open_store(root)
    assert store.recovered.clean
    assert store.recovered.notes == []
    assert [store.max_offset("T", queue_id) for queue_id in range(3)] == [134, 133, 133]
    assert len(by_key(store, "T", "k399")) == 1


def test_damaged_records_become_gaps_and_are_named(root: Path) -> None:
    hit = places(root)[150]
    flip(hit.path, hit.at + 100)
    report = rebuild(str(root), disk=FaultyDisk(), clock=ManualClock(AT_MS), config=small(root))
    assert report.records == 399
    assert [finding.offset for finding in report.findings] == [hit.at]
    remaining = verify(str(root), config=small(root))
    assert {finding.kind for finding in remaining.findings} == {"log-damage"}
    assert remaining.fillers == 1


@pytest.mark.parametrize("field", list(UNCOVERED_PLACES))
def test_a_record_that_is_damaged_where_no_checksum_is_stays_where_its_queue_has_it(
    root: Path, field: str
) -> None:
    queues, index = queue_bytes(root), index_bytes(root)
    damage_field(places(root)[222], field)
    path, at = unit_place(root, places(root)[100])  # the damage to be repaired
    alter(path, at, bytes(20))
    run(root)
    assert queue_bytes(root) == queues
    assert index_bytes(root) == index


def test_a_queue_that_contradicts_the_log_throughout_is_made_from_the_log(root: Path) -> None:
    queues = queue_bytes(root)
    queue = root / "consumequeue" / "T"
    for old, new in (("0", "x"), ("1", "0"), ("x", "1")):
        (queue / old).rename(queue / new)
    run(root)
    assert queue_bytes(root) == queues


def test_records_of_a_topic_that_apache_deleted_and_made_again_do_not_come_back(root: Path) -> None:
    store = open_store(root)
    delete_topic(store, "T")
    for number in range(5):
        send(store, b"new %d" % number, queue_id=1)
    store.close()
    (root / "config" / "deletedTopics.json").unlink()  # Apache's broker has no such table
    queues = queue_bytes(root)
    run(root)
    mine = {name: data for name, data in queue_bytes(root).items() if "/T/1/" in name}
    assert mine == queues
    store = open_store(root)
    assert everything(store, "T", 1) == [b"new %d" % number for number in range(5)]


def add_light_queue(root: Path) -> None:
    """Add messages to the light message queue `%LMQ%$P$s`, with files as Apache's broker creates them."""
    store = open_store(root)
    for number in range(150):
        names, offsets = "%LMQ%$P$s,%LMQ%$P$other", f"{number},7"
        given = {"INNER_MULTI_DISPATCH": names, "INNER_MULTI_QUEUE_OFFSET": offsets}
        properties = "".join(f"{name}\x01{value}\x02" for name, value in given.items()).encode()
        send(store, b"%d" % number, "P", 1, properties=properties)
    store.close()
    shutil.copytree(root / "consumequeue" / "P" / "1", root / "consumequeue" / "%LMQ%$P$s" / "0")


def test_light_message_queues_of_apache_are_made_from_the_log(root: Path) -> None:
    add_light_queue(root)
    queues = queue_bytes(root)
    assert sum("LMQ" in name for name in queues) == 2
    next((root / "consumequeue" / "%LMQ%$P$s" / "0").iterdir()).write_bytes(bytes(2000))
    run(root)
    assert queue_bytes(root) == queues
    assert verify(str(root), config=small(root)).findings == []


@pytest.mark.parametrize("offset", ["9" * 20, "9" * 5000])
def test_impossible_offsets_in_light_message_queues_are_left_out(root: Path, offset: str) -> None:
    add_light_queue(root)
    queues = queue_bytes(root)
    store = open_store(root)
    properties = f"INNER_MULTI_DISPATCH\x01%LMQ%$P$s\x02INNER_MULTI_QUEUE_OFFSET\x01{offset}\x02"
    send(store, b"forged", "Other", properties=properties.encode())
    store.close()
    run(root)
    made = queue_bytes(root)
    assert {name: made[name] for name in queues} == queues


def test_deleted_topics_stay_deleted(root: Path) -> None:
    store = open_store(root)
    delete_topic(store, "T")
    put(store, topic="Other")
    store.close()
    report = rebuild(str(root), config=small(root))
    assert (report.hidden, report.queues) == (400, 1)
    assert not (root / "consumequeue" / "T").exists()
    assert verify(str(root), config=small(root)).findings == []


def test_a_store_in_use_is_refused_and_untouched(root: Path) -> None:
    open_store(root)
    before = snapshot(root)
    with pytest.raises(StoreError, match="a broker is using this store"):
        run(root)
    assert snapshot(root) == before


def test_a_full_disk_leaves_the_old_directories(root: Path) -> None:
    before = snapshot(root)
    disk = FaultyDisk(really_sync=False)
    disk.fail("pwrite", error=errno.ENOSPC, first=4, times=1000, match=SCRATCH)
    with pytest.raises(OSError, match="No space"):
        run(root, disk)
    assert {name: data for name, data in snapshot(root).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }
    run(root)  # the lock has been released


class Killed(BaseException):
    """The end of a simulated process; no handler catches it."""


def operations(root: Path, copy: Path) -> int:
    disk = FaultyDisk(really_sync=False)
    run(Path(shutil.copytree(root, copy)), disk)
    return disk.calls["*"]


def test_killed_at_any_operation_the_next_start_has_everything(sound: Path, tmp_path: Path) -> None:
    small_root = tmp_path / "source"
    build(small_root, 60)
    total = operations(small_root, tmp_path / "counted")
    taking_the_lock = 3
    assert total > 30
    for number in range(taking_the_lock + 1, total + 1):
        root = Path(shutil.copytree(small_root, tmp_path / f"killed{number}"))
        disk = FaultyDisk(really_sync=False)

        def kill(operation: str, _path: str, disk: FaultyDisk = disk, number: int = number) -> None:
            if disk.calls["*"] >= number - 1:  # the next operation would be number `number`
                raise Killed

        disk.before = kill
        with pytest.raises(Killed):
            run(root, disk)
        store = open_configured(small(root), FaultyDisk(really_sync=False), ManualClock(AT_MS))
        done = sum(store.max_offset("T", queue_id) for queue_id in range(3))
        found = len(by_key(store, "T", "k59"))
        store.close()
        assert (number, done, found) == (number, 60, 1)
        run(root)
        assert verify(str(root), config=small(root)).findings == []
        shutil.rmtree(root)

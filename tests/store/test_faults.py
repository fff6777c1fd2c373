"""Full and failing disks: errors give the reason, no message is stored in part, and work resumes later."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import (
    after_crash,
    bodies,
    by_key,
    everything,
    numbered,
    open_store,
    put,
    run_retention,
    send,
    send_all,
)

from cometmq.store import Disk, JsonTable, MessageStore, StoreRefused
from cometmq.store.background import derived_writer


def test_the_recording_disk_replaces_every_operation() -> None:
    assert {name for name in vars(Disk) if not name.startswith("_")} <= vars(RecordingDisk).keys()


def test_a_full_disk_refuses_the_send_and_leaves_no_file(
    tmp_path: Path, disk: FaultyDisk, store: MessageStore
) -> None:
    send(store, bytes(40_000))
    disk.fail("reserve", error=errno.ENOSPC, times=1000)
    with pytest.raises(StoreRefused, match="No space left") as refused:
        put(store, bytes(40_000))
    assert refused.value.response_code == 1
    assert [path.name for path in (tmp_path / "commitlog").iterdir()] == [f"{0:020d}"]
    assert send(store, b"small ones still fit").queue_offset == 1
    disk.heal()
    assert send(store, bytes(40_000)).queue_offset == 2
    assert [len(body) for body in everything(store)] == [40_000, 20, 40_000]


def test_the_remains_of_a_failed_reservation_are_no_obstacle(
    tmp_path: Path, disk: FaultyDisk, store: MessageStore
) -> None:
    send(store, bytes(40_000))
    disk.fail("reserve", error=errno.ENOSPC)
    disk.fail("unlink", match="commitlog")
    with pytest.raises(StoreRefused):
        put(store, bytes(40_000))
    assert (tmp_path / "commitlog" / f"{65536:020d}").exists()
    assert send(store, bytes(40_000)).physical_offset == 65536


@pytest.mark.parametrize("partial", [0.0, 0.4, 0.99])
def test_a_failed_write_takes_the_whole_tick_back(
    tmp_path: Path, disk: FaultyDisk, store: MessageStore, partial: float
) -> None:
    send(store, b"first")
    end = store.log.end
    for number in range(5):
        put(store, b"refused %d" % number, queue_id=number % 2)
    disk.fail("pwrite", match="commitlog", partial=partial)
    commit = store.commit()
    assert commit.error is not None
    assert commit.error.response_code == 1
    assert "Input/output error" in commit.error.remark
    assert (commit.arrivals, store.log.end) == ([], end)
    again = send(store, b"again")
    assert (again.physical_offset, again.queue_offset) == (end, 1)
    store.crash()
    store = open_store(tmp_path)  # the restart restores no message of the refused tick
    assert (everything(store), everything(store, "T", 1)) == ([b"first", b"again"], [])
    assert store.recovered.damage == []


def test_a_failed_write_over_a_roll_takes_both_segments_back(disk: FaultyDisk, store: MessageStore) -> None:
    send(store, bytes(40_000))
    end = store.log.end
    put(store, b"in the old segment")
    put(store, bytes(40_000))
    put(store, b"in the new segment")
    disk.fail("pwrite", match=f"{65536:020d}", partial=0.5)
    assert store.commit().error is not None
    assert store.log.end == end
    assert send(store, b"kept").physical_offset == end
    assert send(store, bytes(40_000)).physical_offset == 65536
    store = after_crash(store)
    assert [len(body) for body in everything(store)] == [40_000, 4, 40_000]


def test_nothing_is_written_over_remains_that_could_not_be_cleared(
    disk: FaultyDisk, store: MessageStore
) -> None:
    put(store, bytes(1000))
    put(store, bytes(1000))
    disk.fail("pwrite", match="commitlog", partial=0.9)
    disk.fail("pwrite", match="commitlog", times=3)
    assert store.commit().error is not None
    for _ in range(2):
        with pytest.raises(StoreRefused):
            put(store, b"too early")
    assert send(store, b"now").physical_offset == 0
    store = after_crash(store)
    assert everything(store) == [b"now"]


@pytest.mark.parametrize("where", ["/consumequeue/", "/index/"])
@pytest.mark.parametrize("operation", ["pwrite", "truncate", "open"])
async def test_queues_and_index_wait_in_memory_while_they_cannot_be_written(
    tmp_path: Path, disk: FaultyDisk, store: MessageStore, where: str, operation: str
) -> None:
    disk.fail(operation, error=errno.ENOSPC, match=where, times=1000)
    for number in range(10):
        put(store, b"%d" % number, properties=b"KEYS\x01k%d" % number)
    assert store.commit().error is None
    await store.writer.write_cycle()
    assert len(bodies(store.get_messages("T", 0, 0, 32))) == 10
    with pytest.raises(StoreRefused, match="No space left") as refused:
        put(store)
    assert refused.value.response_code == 14
    disk.heal()
    await store.writer.write_cycle()
    send(store, b"works again")
    assert len(by_key(store, "T", "k3")) == 1
    store.close()
    assert not (tmp_path / "abort").exists()
    store = open_store(tmp_path)
    assert len(everything(store)) == 11
    assert len(by_key(store, "T", "k3")) == 1


async def test_a_store_whose_checkpoint_stays_behind_does_not_write_everything_in_each_round(
    disk: FaultyDisk, store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived_writer, "_MAX_RECORDS_BEHIND", 10)
    for topic in ("Failed", "T"):
        disk.fail("fdatasync", match="/consumequeue/Failed", times=1000)
        send_all(store, [b"hello"] * 10, topic=topic)
        assert store.writer.far_behind
        await store.writer.write_cycle()
        assert not store.writer.far_behind, topic
    store.crash()


def workload(root: Path, disk: FaultyDisk) -> tuple[list[bytes], list[bytes]]:
    """Open a store, send, delete a topic and stop, with faults at any point.

    Returns:
        The bodies that were acknowledged, and those refused or without a result.
    """
    acknowledged: list[bytes] = []
    open_ended: list[bytes] = []
    try:
        store = open_store(root, disk)
    except OSError:
        return acknowledged, open_ended
    try:
        for number in range(60):
            body = b"%d:" % number + bytes(2500)
            try:
                put(store, body, queue_id=number % 3, properties=b"KEYS\x01k%d" % number)
                (open_ended if store.commit().error else acknowledged).append(body)
            except StoreRefused:
                open_ended.append(body)
            if number % 20 == 19:
                store.writer.make_durable(slots=False)
    finally:
        try:
            store.close()
        except OSError:
            pass  # a clean stop that fails counts as a kill
    return acknowledged, open_ended


@pytest.mark.representative("1-5")
@pytest.mark.thorough("each operation, for each kind of error")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("times", [1, 10_000])
def test_an_error_at_every_single_operation_loses_nothing_acknowledged(
    tmp_path: Path, error: int, times: int
) -> None:
    counting = FaultyDisk(really_sync=False)
    acknowledged, _ = workload(tmp_path / "count", counting)
    assert len(acknowledged) == 60
    total = counting.calls["*"]
    assert total > 90
    for number in range(1, total + 1):
        disk = FaultyDisk(really_sync=False)
        disk.fail("*", error=error, first=number, times=times)
        root = tmp_path / f"{number}"
        acknowledged, open_ended = workload(root, disk)
        store = open_store(root, FaultyDisk(really_sync=False))
        found = [body for queue_id in range(3) for body in everything(store, "T", queue_id)]
        missing = set(acknowledged) - set(found)
        invented = set(found) - set(acknowledged) - set(open_ended)
        assert not missing, (number, len(missing))
        assert not invented, (number, len(invented))
        assert len(found) == len(set(found))
        for body in acknowledged:
            key = "k" + body.split(b":")[0].decode()
            assert len(by_key(store, "T", key)) == 1, (number, key)
        store.close()


def test_json_tables_survive_an_error_at_every_operation(tmp_path: Path) -> None:
    for number in range(1, 30):
        path = tmp_path / f"{number}" / "table.json"
        JsonTable(str(path)).save({"n": 1})
        JsonTable(str(path)).save({"n": 2})
        disk = FaultyDisk()
        disk.fail("*", error=errno.ENOSPC, first=number)
        outcomes = {3}
        try:
            JsonTable(str(path), disk).save({"n": 3})
        except OSError:
            outcomes.add(2)
        assert JsonTable(str(path)).load()["n"] in outcomes, number
        if disk.faults[0].times:
            break
    else:
        raise AssertionError("the save never got by without an error")


async def test_a_disk_that_turns_read_only_is_still_read(
    tmp_path: Path, disk: FaultyDisk, store: MessageStore
) -> None:
    send_all(store, numbered(3))
    for operation in ("pwrite", "reserve", "truncate", "rename", "unlink", "makedirs", "open"):
        disk.fail(operation, error=errno.EROFS, times=1 << 30)
    put(store, b"small")
    refusal = store.commit().error
    assert refusal is not None
    assert "Read-only file system" in refusal.remark
    with pytest.raises(StoreRefused, match="Read-only file system"):
        put(store, bytes(65_000))
    assert everything(store) == [b"0", b"1", b"2"]
    assert len(by_key(store, "T", "k")) == 0
    store.retention.delete_now()
    run_retention(store)
    disk.heal()
    send_all(store, numbered(3, 6))
    assert everything(store) == numbered(6)
    store.close()
    assert not (tmp_path / "abort").exists()

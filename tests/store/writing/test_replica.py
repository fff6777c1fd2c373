"""A slave's log: the store becomes equal to the master's, however the master's bytes are split."""

from __future__ import annotations

import errno
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import (
    check_sound,
    delete_topic,
    drop_first_segment,
    everything,
    flushed,
    numbered,
    open_store,
    put_all,
    quick,
    send,
    send_all,
    started,
)
from tests.store.pair import feed, fill, log_bytes, same
from tests.store.planted import extract_golden

from cometmq.protocol.record.one import encode_record
from cometmq.store import MessageStore
from cometmq.store.recovery.store_layout import read_layout
from cometmq.store.writing.replica import ReplicaDamaged, ReplicaMismatch

SLAVE = {"broker_role": "SLAVE"}


@pytest.fixture
def master(tmp_path: Path) -> MessageStore:
    return quick(tmp_path / "master")


@pytest.fixture
def slave(tmp_path: Path, disk: FaultyDisk) -> MessageStore:
    return open_store(tmp_path / "slave", disk, **SLAVE)


def first_bytes(store: MessageStore) -> bytes:
    return next(log_bytes(store))[1]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20_000) | st.integers(0, 300), min_size=1, max_size=120),
    cuts=st.lists(st.integers(1, 40_000) | st.integers(1, 100), min_size=1, max_size=8),
    ticks=st.integers(1, 4),
)
def test_however_the_bytes_are_cut_the_slave_becomes_the_master(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int], ticks: int
) -> None:
    root = tmp_path_factory.mktemp("pair")
    master, slave = quick(root / "master"), quick(root / "slave", **SLAVE)
    fill(master, sizes)
    feed(slave, master, cuts, ticks)
    assert slave.replica.end == slave.replica.next == master.log.end
    same(slave, master)


def test_the_log_of_an_apache_master_gives_apaches_queues(tmp_path: Path) -> None:
    golden = extract_golden(tmp_path / "apache")
    config = read_layout(FaultyDisk(), str(golden)).config
    shutil.copytree(golden, tmp_path / "master")
    master = MessageStore.open(config.replace(store_path_root_dir=str(tmp_path / "master")))
    slave = MessageStore.open(config.replace(store_path_root_dir=str(tmp_path / "slave"), **SLAVE))
    feed(slave, master)
    same(slave, master)
    for path in (golden / "consumequeue").glob("*/*/*"):
        assert (tmp_path / "slave" / path.relative_to(golden)).read_bytes() == path.read_bytes()


def test_a_slave_may_begin_with_any_segment(
    master: MessageStore, slave: MessageStore, tmp_path: Path
) -> None:
    """The queues begin at the offsets of the master's records, with Apache's fillers before them."""
    fill(master, [3000] * 100)
    assert (slave.replica.empty, slave.replica.end) == (True, 0)
    parts = list(log_bytes(master))[2:]
    for position, data in parts:
        slave.replica.append(position, data)
    assert slave.replica.commit().error is None
    assert (slave.log.min_position, slave.replica.end) == (2 * 65536, master.log.end)
    queue, whole = slave.queues.find_queue("T", 0), master.queues.find_queue("T", 0)
    assert queue is not None
    assert whole is not None
    assert 0 < queue.min_offset == queue.begin + queue.min_offset % 100
    assert queue.max_offset == whole.max_offset
    slave.queues.write_dirty()
    slave.crash()
    again = quick(tmp_path / "slave", **SLAVE)
    assert again.replica.end == master.log.end
    assert everything(again) == everything(master)[queue.min_offset :]
    check_sound(again)


def test_an_empty_log_begins_anew_elsewhere(
    master: MessageStore, slave: MessageStore, tmp_path: Path
) -> None:
    """The master has continued and has deleted the segment in which the slave had begun."""
    fill(master, [3000] * 60)
    slave.replica.append(65536, bytes(5))  # the start of a record that was never completed
    assert slave.replica.commit().end == 65536
    slave.crash()
    slave = quick(tmp_path / "slave", **SLAVE)
    *_, (position, data) = log_bytes(master)
    slave.replica.append(position, data)
    assert slave.replica.commit().error is None
    assert (slave.log.segments, slave.replica.end) == ([position], master.log.end)


@pytest.mark.parametrize("position", [0, 1, 50, 65536, -1])
def test_bytes_for_another_place_are_refused(
    master: MessageStore, slave: MessageStore, position: int
) -> None:
    send(master)
    data = first_bytes(master)
    slave.replica.append(0, data[:60])
    slave.replica.commit()
    with pytest.raises(ReplicaMismatch) as caught:
        slave.replica.append(position, data[60:])
    assert (caught.value.own_end, caught.value.position) == (60, position)
    slave.replica.append(60, data[60:])
    assert slave.replica.commit().visible == 1


def test_a_record_that_came_in_half_is_fetched_again(master: MessageStore, slave: MessageStore) -> None:
    send_all(master, numbered(3))
    data = first_bytes(master)
    slave.replica.append(0, data[:-1])
    done = slave.replica.commit()
    assert (done.visible, slave.replica.next) == (2, len(data) - 1)
    slave.replica.forget()
    assert slave.replica.end == slave.replica.next == done.end < len(data) - 1
    feed(slave, master)
    assert everything(slave) == numbered(3)


@pytest.mark.parametrize(
    ("at", "value", "problem"),
    [
        (4, 0x12345678, "no record begins there"),
        (0, 5, "a record of 5 bytes"),
        (0, 1 << 20, "a record of 1048576 bytes"),
        (100, 0xFFFFFFFF, "parts, position or CRC"),
        (28, 1, "parts, position or CRC"),
    ],
)
def test_of_a_damaged_record_nothing_is_written(
    master: MessageStore, slave: MessageStore, at: int, value: int, problem: str
) -> None:
    send_all(master, [b"x" * 200] * 3)
    data = bytearray(first_bytes(master))
    second = len(data) // 3
    struct.pack_into(">I", data, second + at, value)
    slave.replica.append(0, data)
    done = slave.replica.commit()
    assert (done.end, done.visible, slave.replica.next) == (second, 1, second)
    assert isinstance(done.error, ReplicaDamaged)
    assert done.error.position == second
    assert problem in str(done.error)
    assert not Path(slave.log.path_of(0)).read_bytes()[second:].strip(b"\0")
    feed(slave, master)  # the next connection sends the whole record
    same(slave, master)


def test_a_master_with_segments_of_another_size_is_named(tmp_path: Path, slave: MessageStore) -> None:
    master = quick(tmp_path / "master", mapped_file_size_commit_log=32 << 10)
    fill(master, [3000] * 12)
    slave.replica.append(0, first_bytes(master))
    assert "are they of one size?" in str(slave.replica.commit().error)


@pytest.mark.parametrize(
    ("operation", "partial"), [("pwrite", 0.0), ("pwrite", 0.5), ("reserve", 0.0), ("open", 0.0)]
)
def test_what_cannot_be_written_is_dispatched_nowhere_and_fetched_again(
    master: MessageStore, slave: MessageStore, disk: FaultyDisk, operation: str, partial: float
) -> None:
    fill(master, [3000] * 18)
    feed(slave, master)
    end, visible = slave.replica.end, slave.max_offset("T", 0)
    put_all(master, [bytes(3000)] * 10)
    disk.fail(operation, match="commitlog", error=errno.ENOSPC, partial=partial)
    for position, data in log_bytes(master, end):
        slave.replica.append(position, data)
    done = slave.replica.commit()
    assert "No space left" in str(done.error)
    assert slave.replica.next == slave.replica.end == done.end < master.log.end
    assert slave.max_offset("T", 0) == visible + done.visible < master.max_offset("T", 0)
    disk.heal()
    feed(slave, master)
    same(slave, master)


def test_a_kill_between_log_and_dispatch_costs_nothing(
    master: MessageStore, slave: MessageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(master, [300] * 30)
    monkeypatch.setattr(slave.dispatcher, "dispatch", lambda _runs: (0, []))
    feed(slave, master)
    slave.crash()
    same(quick(tmp_path / "slave", **SLAVE), master)


async def test_with_sync_flush_a_record_is_visible_with_its_flush(
    master: MessageStore, tmp_path: Path
) -> None:
    slave = started(tmp_path / "slave", flush_disk_type="SYNC_FLUSH", **SLAVE)
    seen: list[object] = []
    slave.dispatcher.on_visible = lambda count, arrivals: seen.append((count, arrivals[-1][:3]))
    send_all(master, numbered(3))
    slave.replica.append(0, first_bytes(master))
    done = slave.replica.commit()
    assert (done.end, done.visible, slave.replica.safe) == (master.log.end, 0, 0)
    assert slave.max_offset("T", 0) == 0
    assert await flushed(slave)
    assert (seen, slave.replica.safe) == ([(3, ("T", 0, 3))], master.log.end)


async def test_after_a_failed_flush_nothing_more_is_taken(master: MessageStore, tmp_path: Path) -> None:
    disk = FaultyDisk()
    slave = started(tmp_path / "slave", disk, flush_disk_type="SYNC_FLUSH", **SLAVE)
    send(master)
    disk.fail("fdatasync", match="commitlog")
    feed(slave, master)
    assert not await flushed(slave)
    send(master)
    slave.replica.append(slave.replica.next, first_bytes(master)[slave.replica.next :])
    assert "could not be flushed" in str(slave.replica.commit().error)
    assert (slave.replica.safe, slave.max_offset("T", 0)) == (0, 0)


def test_arrivals_in_watched_queues_are_told(master: MessageStore, slave: MessageStore) -> None:
    slave.dispatcher.watched = {("T", 1)}
    for number in range(4):
        send(master, queue_id=number % 2)
    slave.replica.append(0, first_bytes(master))
    done = slave.replica.commit()
    assert [arrival[:3] for arrival in done.arrivals] == [("T", 1, 1), ("T", 1, 2)]
    assert (done.visible, slave.queues.next_offsets("T")) == (4, {0: 2, 1: 2})


def test_a_large_record_is_not_joined_anew_with_each_piece(master: MessageStore, slave: MessageStore) -> None:
    send(master, bytes(60_000))
    data = first_bytes(master)
    for at in range(0, len(data), 100):
        slave.replica.append(at, data[at : at + 100])
        done = slave.replica.commit()
    assert (done.end, done.visible) == (len(data), 1)


def test_a_gap_in_the_masters_queue_is_filled(
    tmp_path: Path, master: MessageStore, slave: MessageStore
) -> None:
    """The master has lost messages of the queue and has continued after the gap."""
    send_all(master, numbered(3))
    queue = master.queues.find_queue("T", 0)
    assert queue is not None
    queue.next_offset = 5
    send(master)
    feed(slave, master)
    assert (slave.max_offset("T", 0), len(everything(slave))) == (6, 4)


def test_records_that_fit_no_queue_are_named_and_not_served(
    slave: MessageStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One record has an offset that leaves a gap, and another has a topic that cannot be a directory name."""
    data = b""
    for topic, offset in (("T", 0), ("T", 1), ("T", 1), ("..", 0), ("T", 2)):
        data += encode_record(topic, b"x", queue_offset=offset, physical_offset=len(data))
    slave.replica.append(0, data)
    assert slave.replica.commit().visible == 5
    assert len(everything(slave)) == 3
    assert [text.split(":")[0] for text in caplog.messages] == ["record at 186", "record at 279"]


def test_retention_and_deletion_go_on_beside_it(
    master: MessageStore, slave: MessageStore, tmp_path: Path
) -> None:
    fill(master, [3000] * 100)
    feed(slave, master)
    drop_first_segment(slave)
    delete_topic(slave, "U")
    send(master)
    feed(slave, master)
    slave.crash()
    slave = quick(tmp_path / "slave", **SLAVE)
    assert slave.replica.end == master.log.end
    assert everything(slave)[-1] == b"hello"
    assert slave.queues.topics() == ["T"]


@pytest.mark.parametrize("end", ["fed at once", "stopped between", "killed between", "killed afterwards"])
def test_a_topic_deleted_at_the_master_and_made_anew_begins_anew(
    master: MessageStore, slave: MessageStore, tmp_path: Path, end: str
) -> None:
    """The new topic's queues begin at 0. Queue 3 had no message before, and queue 2 has none since."""
    for number in range(9):
        send(master, b"old %d" % number, queue_id=number % 3)
    send(master, topic="Other")
    if end != "fed at once":
        feed(slave, master)
    if end.endswith("between"):
        _ = slave.close() if end.startswith("stopped") else slave.crash()
        slave = quick(tmp_path / "slave", **SLAVE)
    delete_topic(master, "T")
    for queue_id in (3, 1, 0, 1):
        send(master, b"new %d" % queue_id, queue_id=queue_id)
    feed(slave, master)
    if end == "killed afterwards":
        slave.crash()
        slave = quick(tmp_path / "slave", **SLAVE)
        assert slave.recovered.not_served == 0
    for queue_id, bodies in enumerate(([b"new 0"], [b"new 1"] * 2, [], [b"new 3"])):
        assert everything(slave, queue_id=queue_id) == bodies
    assert everything(slave, "Other") == [b"hello"]
    shutil.rmtree(tmp_path / "slave" / "consumequeue" / ".deleted", ignore_errors=True)
    same(slave, master)
    check_sound(slave)


def test_a_queue_of_the_new_topic_that_was_there_already_stays(
    master: MessageStore, slave: MessageStore, tmp_path: Path
) -> None:
    """Queue 1 began after all messages that queue 0 had then, so it may belong to the new topic, and it does.

    Queue 0 does not, but nothing shows that before its next message.
    """
    for number in range(2):
        send_all(master, [b"%d" % number] * 3)
        delete_topic(master, "T")
        send_all(master, [b"one"] * 2, "T", 1)
    feed(slave, master)
    assert (everything(slave), everything(slave, queue_id=1)) == ([b"1"] * 3, [b"one"] * 2)
    slave.crash()
    slave = quick(tmp_path / "slave", **SLAVE)
    send(master)
    feed(slave, master)
    assert (everything(slave), everything(slave, queue_id=1)) == ([b"hello"], [b"one"] * 2)
    check_sound(slave)

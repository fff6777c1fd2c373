"""Appends: the bytes on the disk, and refused messages."""

from __future__ import annotations

import resource
import struct
import threading
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import (
    START_MS,
    after_crash,
    bodies,
    by_key,
    committed,
    delete_topic,
    everything,
    in_place,
    open_configured,
    open_store,
    put,
    put_batch,
    restarted,
    send,
    send_all,
    small,
)
from tests.store.planted import snapshot

from cometmq.errors import ConfigError, StoreError
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.record.one import decode_record, encode_blank, record_starts
from cometmq.store import GetStatus, ManualClock, MessageStore, StoreConfig, StoreRefused
from cometmq.store.base.checkpoint import Checkpoint, checkpoint_position_of
from cometmq.store.derived.consume_queue import FILLER, UNIT_STRUCT
from cometmq.store.inspect.verify import verify

EXAMPLE = bytes.fromhex(
    "0000007adaa320a777d189820000000300000000000000000000000700000000"
    "400000b0000000000000018bcfe56800c0a8000a0000c3500000018bcfe56805"
    "c0a8000a00002a9f0000000000000000000000000000000548656c6c6f09546f"
    "7069635465737400114b455953016b3102544147530154616741"
)  # (docs/reference/storage.md, Record)


def log_bytes(root: Path, name: str = f"{0:020d}") -> bytes:
    return (root / "commitlog" / name).read_bytes()


def test_the_worked_example_is_written_byte_for_byte(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_005)
    store = open_store(tmp_path, clock=clock, mapped_file_size_commit_log=1 << 30)
    store.appender.store_host = bytes.fromhex("c0a8000a00002a9f")
    store.log.resume([], 0x400000B0 - 0)
    store.queues.get_or_make("TopicTest", 3).push(0, 1, 0, 6)
    store.queues.get_or_make("TopicTest", 3).next_offset = 7
    appended = store.appender.append(
        "TopicTest", 3, memoryview(b"Hello"), b"KEYS\x01k1\x02TAGS\x01TagA", flag=0,
        born_timestamp_ms=1_700_000_000_000, born_host=bytes.fromhex("c0a8000a0000c350"), tags_code=2598919,
    )  # fmt: skip
    assert (appended.physical_offset, appended.queue_offset, appended.size) == (0x400000B0, 7, 122)
    committed(store.commit())
    assert bytes(store.log.read(0x400000B0, 122) or b"") == EXAMPLE
    unit = store.queues.get_or_make("TopicTest", 3).read(7, 1)
    assert bytes(unit or b"").hex() == "00000000400000b00000007a000000000027a807"


def test_files_have_apaches_names_and_exact_lengths(tmp_path: Path, store: MessageStore) -> None:
    for number in range(250):
        send(store, bytes(500), topic="%RETRY%group", queue_id=3, properties=b"KEYS\x01k%d" % number)
    assert (tmp_path / "abort").read_bytes() == b""
    store.close()
    files = {name: len(data) for name, data in snapshot(tmp_path).items()}
    index = next(name for name in files if name.startswith("index/"))
    assert len(index) == len("index/") + 17
    assert files.pop("config/consumeQueueEnds.json")  # only CometMQ's broker writes this file
    assert files == {
        "checkpoint": 4096,
        "lock": 4,
        "commitlog/" + f"{0:020d}": 65536,
        "commitlog/" + f"{65536:020d}": 65536,
        "commitlog/" + f"{131072:020d}": 65536,
        "consumequeue/%RETRY%group/3/" + f"{0:020d}": 2000,
        "consumequeue/%RETRY%group/3/" + f"{2000:020d}": 2000,
        "consumequeue/%RETRY%group/3/" + f"{4000:020d}": 2000,
        index: 40 + 4 * 100 + 20 * 400,
    }
    assert (tmp_path / "lock").read_bytes() == b"lock"


def test_the_checkpoint_of_a_clean_stop_names_the_last_record(
    tmp_path: Path, store: MessageStore, clock: ManualClock
) -> None:
    send(store)
    clock.now_ms += 77
    send(store)
    store.close()
    data = (tmp_path / "checkpoint").read_bytes()
    assert data[:64] == struct.pack(">qq", START_MS + 77, START_MS + 77).ljust(64, b"\0")
    assert len(data) == 4096
    assert checkpoint_position_of(data) == store.checkpoint.saved
    assert store.checkpoint.saved is not None
    assert store.checkpoint.saved.position == store.log.end


def test_a_checkpoint_that_is_lowered_while_it_is_being_written_ends_low(tmp_path: Path) -> None:
    disk = FaultyDisk(really_sync=False)
    checkpoint = Checkpoint(disk, str(tmp_path / "checkpoint"))
    checkpoint.physic_ms = 2
    lowering = threading.Thread(target=checkpoint.flush)

    def lower(operation: str, _path: str) -> None:
        if operation == "pwrite" and not lowering.ident:
            checkpoint.physic_ms = 1
            lowering.start()
            lowering.join(0.2)  # still waits for its turn

    disk.before = lower
    checkpoint.flush()
    lowering.join()
    assert Checkpoint(disk, str(tmp_path / "checkpoint")).physic_ms == 1


def test_a_record_that_does_not_fit_rolls_over_behind_a_blank_record(
    tmp_path: Path, store: MessageStore
) -> None:
    size = send(store, bytes(30_000)).size
    second = send(store, bytes(30_000))
    third = put(store, bytes(30_000))  # starts a new segment in the middle of a tick
    put(store, b"after")
    committed(store.commit())
    assert (second.physical_offset, third.physical_offset) == (size, 65536)
    store.close()
    data = log_bytes(tmp_path)
    assert data[2 * size : 2 * size + 8] == encode_blank(65536 - 2 * size)
    assert not data[2 * size + 8 :].strip(b"\0")
    assert record_starts(data) == ([0, size], 2 * size)


@pytest.mark.parametrize(("room", "rolls"), [(8, False), (7, True)])
def test_the_last_eight_bytes_of_a_segment_stay_free_for_the_blank_record(
    tmp_path: Path, store: MessageStore, room: int, rolls: bool
) -> None:
    overhead = send(store, b"").size
    appended = send(store, bytes(65536 - 2 * overhead - room))
    assert (appended.physical_offset == 65536) is rolls
    store = restarted(store)
    assert [len(body) for body in everything(store)] == [0, 65536 - 2 * overhead - room]


@pytest.mark.parametrize("segment", [2000, 4096, 10_007, 65_537])
@pytest.mark.parametrize("queue_file", [1, 20, 333])
def test_files_of_any_length(tmp_path: Path, segment: int, queue_file: int) -> None:
    sizes = {"mapped_file_size_commit_log": segment, "mapped_file_size_consume_queue": queue_file}
    sent = [b"%d:" % number + bytes(number * 37 % 1500) for number in range(100)]
    for stop in ("close", "crash", "close"):
        store = open_store(tmp_path, FaultyDisk(really_sync=False), **sizes)
        for body in sent[store.max_offset("T", 0) : store.max_offset("T", 0) + 34]:
            put(store, body)
            committed(store.commit())
        assert everything(store) == sent[: store.max_offset("T", 0)]
        getattr(store, stop)()
    units = -(-queue_file // 20)
    names = sorted(path.name for path in (tmp_path / "consumequeue" / "T" / "0").iterdir())
    assert names == [f"{at:020d}" for at in range(0, 2000, 20 * units)]
    lengths = {path.stat().st_size for path in (tmp_path / "commitlog").iterdir()}
    assert lengths == {segment}
    report = verify(str(tmp_path), config=small(tmp_path, **sizes))
    assert (report.findings, report.records, report.units) == ([], 100, 100)


def test_hosts_of_ipv6_set_their_flags(store: MessageStore) -> None:
    v6 = bytes(range(16)) + b"\0\0\xc3\x50"
    places = [
        send(store, b"a", born_host=v6, sys_flag=0x1),
        send(store, b"b", store_host=v6, sys_flag=0x10),
        send(store, b"c", born_host=v6, store_host=v6),
    ]
    flags = []
    for place in places:
        record = store.lookups.record_at(place.physical_offset)
        assert record is not None
        flags.append(decode_record(record).sys_flag)
    assert flags == [0x11, 0x20, 0x30]
    assert bodies(store.get_messages("T", 0, 0, 32)) == [b"a", b"b", b"c"]


def test_prepared_and_rolled_back_messages_get_no_queue_unit(tmp_path: Path, store: MessageStore) -> None:
    send(store, b"half", sys_flag=0x4, properties=b"KEYS\x01half")
    send(store, b"gone", sys_flag=0xC, properties=b"KEYS\x01gone")
    place = send(store, b"done", sys_flag=0x8, prepared_transaction_offset=0)
    assert place.queue_offset == 0
    for stop in ("close", "crash"):
        assert everything(store) == [b"done"]
        assert len(by_key(store, "T", "half")) == 1
        assert by_key(store, "T", "gone") == []
        getattr(store, stop)()
        store = open_store(tmp_path)


def test_a_batch_becomes_neighbours_with_the_request_s_properties(store: MessageStore) -> None:
    send(store, b"before")
    body = encode_batch([(1, b"one", b"TAGS\x01TagA\x02"), (2, b"two", b"TAGS\x01TagB"), (3, b"three", b"")])
    appended = put_batch(store, memoryview(body), properties=b"CLUSTER\x01c")
    commit = committed(store.commit())
    assert (appended.queue_offset, len(appended.sizes)) == (1, 3)
    assert [arrival[2:4] for arrival in commit.arrivals] == [(2, 2598919), (3, 2598920), (4, 0)]
    records = []
    for position in appended.physical_offsets:
        data = store.lookups.record_at(position)
        assert data is not None
        records.append(decode_record(data))
    assert [(r.flag, r.body, r.properties) for r in records] == [
        (1, b"one", {"TAGS": "TagA", "CLUSTER": "c"}),
        (2, b"two", {"TAGS": "TagB", "CLUSTER": "c"}),
        (3, b"three", {"CLUSTER": "c"}),
    ]


def test_only_arrivals_of_watched_queues_are_told_if_it_is_said_which(store: MessageStore) -> None:
    store.dispatcher.watched = {("T", 1)}
    for queue_id in (0, 1):
        put(store, queue_id=queue_id)
        put_batch(store, encode_batch([(0, b"x", b"")] * 2), queue_id=queue_id)
    commit = committed(store.commit())
    assert commit.visible == 6
    assert [arrival[:3] for arrival in commit.arrivals] == [("T", 1, 1), ("T", 1, 2), ("T", 1, 3)]


def test_a_batch_stays_in_one_segment(store: MessageStore) -> None:
    send(store, bytes(60_000))
    body = encode_batch([(0, bytes(1000), b"")] * 5)
    appended = put_batch(store, body)
    committed(store.commit())
    assert appended.physical_offsets[0] == 65536


@pytest.mark.parametrize(
    "body", [b"", b"\0" * 21, encode_batch([(0, b"x", b"")])[:-1], encode_batch([(0, b"x", b"")]) + b"\0"]
)
def test_a_malformed_batch_is_refused_whole(store: MessageStore, body: bytes) -> None:
    with pytest.raises(StoreRefused) as refused:
        put_batch(store, body)
    assert refused.value.response_code == 13
    assert committed(store.commit()).arrivals == []
    assert send(store).queue_offset == 0


@pytest.mark.parametrize(
    "message",
    [
        {"body": bytes(2001)},
        {"properties": bytes(32_768)},
        {"topic": "t" * 256},
        {"queue_id": 1 << 31},
        {"born_timestamp_ms": 1 << 63},
    ],
)
def test_what_a_record_cannot_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, message: dict[str, object]
) -> None:
    store = open_store(tmp_path, max_message_size=2000)
    with pytest.raises(StoreRefused) as refused:
        put(store, **message)  # type: ignore[arg-type]
    assert refused.value.response_code == 13
    assert refused.value.remark
    assert send(store, b"next").queue_offset == 0
    assert store.log.end == store.log.next
    assert bodies(store.get_messages("T", 0, 0, 32)) == [b"next"]


def test_topics_beyond_127_bytes_make_records_of_version_2(tmp_path: Path) -> None:
    topic = "%RETRY%" + "g" * 200
    store = open_store(tmp_path)
    send(store, b"long", topic=topic)
    store = after_crash(store)
    assert everything(store, topic) == [b"long"]


def test_units_of_delayed_messages_carry_the_time_of_delivery(tmp_path: Path, store: MessageStore) -> None:
    put(store, topic="SCHEDULE_TOPIC_XXXX", queue_id=2, properties=b"DELAY\x013", delay_ms=10_000)
    arrival = committed(store.commit()).arrivals
    assert arrival[0][3] == START_MS + 10_000
    store.crash()
    store = open_store(tmp_path)  # recovery derives it from DELAY
    unit = store.queues.get_or_make("SCHEDULE_TOPIC_XXXX", 2).unit(0)
    assert unit is not None
    assert unit[2] == START_MS + 10_000


def test_a_queue_that_continues_elsewhere_is_filled_up_as_apache_does(
    tmp_path: Path, store: MessageStore
) -> None:
    queue = store.queues.get_or_make("T", 0)
    queue.next_offset = 130
    send(store, b"later")
    assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (130, 131)
    store.close()
    (path,) = (tmp_path / "consumequeue" / "T" / "0").iterdir()
    assert path.name == f"{2000:020d}"
    data = path.read_bytes()
    assert data[: 30 * 20] == FILLER * 30
    assert UNIT_STRUCT.unpack_from(data, 600)[0] == 0
    store = open_store(tmp_path)
    assert (store.min_offset("T", 0), everything(store)) == (130, [b"later"])
    assert store.get_messages("T", 0, 0, 32).status is GetStatus.OFFSET_TOO_SMALL


def test_deleted_topics_leave_nothing_and_can_be_used_again(tmp_path: Path, store: MessageStore) -> None:
    for queue_id in range(3):
        send(store, topic="gone", queue_id=queue_id)
        send(store, topic="stays", queue_id=queue_id)
    store.queues.write_dirty()
    put(store, b"in flight", topic="gone")
    assert delete_topic(store, "gone") == 3
    committed(store.commit())
    assert store.queues.topics() == ["stays"]
    assert not (tmp_path / "consumequeue" / "gone").exists()
    assert send(store, b"new", topic="gone").queue_offset == 0
    assert everything(store, "gone") == [b"new"]
    assert in_place(store.deletion.delete_unknown({"gone"}.__contains__)) == ["stays"]
    store = restarted(store)
    assert store.queues.topics() == ["gone"]


def test_memory_and_open_files_do_not_grow_with_the_number_of_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    store = open_store(tmp_path, mapped_file_size_commit_log=4 << 20)
    for number in range(3000):
        put(store, b"x", topic=f"topic{number // 10}", queue_id=number % 10)
        if number % 100 == 99:
            committed(store.commit())
    store.queues.write_dirty()
    assert len(store.files) <= 512
    assert len(store.queues) == 3000


def test_two_stores_cannot_share_a_directory(tmp_path: Path, store: MessageStore) -> None:
    with pytest.raises(StoreError, match="already started"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_closed_store_refuses(store: MessageStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreRefused) as refused:
        put(store)
    assert refused.value.response_code == 14


@pytest.mark.parametrize(
    "change", [{"mapped_file_size_commit_log": 32 << 10}, {"mapped_file_size_consume_queue": 1000}]
)
def test_files_of_another_size_stop_the_opening_and_stay_whole(
    tmp_path: Path, store: MessageStore, change: dict[str, int]
) -> None:
    send_all(store, [bytes(600)] * 150)
    store.close()
    with pytest.raises(StoreError, match="contradicts mappedFileSize"):
        open_store(tmp_path, **change)
    store = open_store(tmp_path)
    assert len(everything(store)) == 150


def test_configuration_is_read_by_rocketmq_s_names() -> None:
    given = {"flushDiskType": "SYNC_FLUSH", "checkCRCOnRecover": "False", "x": "y"}
    config = StoreConfig.from_properties({"mappedFileSizeCommitLog": " 1048576 ", **given})
    assert config.mapped_file_size_commit_log == 1 << 20
    assert (config.sync_flush, config.check_crc_on_recover) == (True, False)
    assert StoreConfig.from_properties(config.to_properties()) == config
    for key, value in {"flushDiskType": "SOMETIMES", "maxIndexNum": "many", "checkCRCOnRead": "1"}.items():
        with pytest.raises(ConfigError) as wrong:
            StoreConfig.from_properties({key: value})
        assert (wrong.value.key, wrong.value.value) == (key, value)


def test_a_queue_file_size_is_rounded_up_to_units() -> None:
    assert small("/nowhere", mapped_file_size_consume_queue=2001).consume_queue_file_size == 2020


def test_store_timestamps_are_those_of_the_append(tmp_path: Path) -> None:
    clock = ManualClock(5_000)
    store = open_configured(small(tmp_path), None, clock)
    first = put(store)
    clock.now_ms = 4_000  # the clock may be set back
    second = put(store)
    committed(store.commit())
    assert (first.store_timestamp_ms, second.store_timestamp_ms) == (5_000, 4_000)

"""Results of a pull: statuses, offsets, limits and filters (docs/reference/storage.md, Reading)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.cold_disk import ColdDisk
from tests.store.kit import (
    START_MS,
    bodies,
    by_key,
    by_record,
    committed,
    drop_first_segment,
    everything,
    numbered,
    offset_by_time,
    open_configured,
    open_store,
    pulled,
    put,
    put_all,
    restarted,
    send,
    send_all,
)
from tests.store.planted import alter, flip

from cometmq.protocol.properties.values import java_hash
from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.one import decode_record
from cometmq.store import Buffer, GetStatus, ManualClock, MessageStore, NotInMemory, ReadResult, Reads
from cometmq.store.base.files import WAITING, FileRange
from cometmq.store.derived.consume_queue import ConsumeQueue


def reopened(store: MessageStore) -> MessageStore:
    """Reopen the store, so that reads use the files and no data in memory."""
    store.close()
    return open_configured(store.config, store.disk, ManualClock(START_MS))


def read(store: MessageStore, *place: Any, **more: Any) -> ReadResult:
    """Read from a queue; if a page that was just written is busy, wait for the device."""
    try:
        return store.get_messages("T", *place, **more)
    except NotInMemory:
        return store.get_messages("T", *place, reads=WAITING, **more)


@pytest.mark.parametrize(
    ("offset", "status", "following"),
    [
        (0, GetStatus.FOUND, 3),
        (2, GetStatus.FOUND, 3),
        (3, GetStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
        (1 << 40, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
        (-1, GetStatus.OFFSET_TOO_SMALL, 0),
    ],
)
def test_status_and_next_offset_by_requested_offset(
    store: MessageStore, offset: int, status: GetStatus, following: int
) -> None:
    send_all(store, numbered(3))
    answer = store.get_messages("T", 0, offset, 32)
    assert (answer.status, answer.next_begin_offset) == (status, following)
    assert (answer.min_offset, answer.max_offset) == (0, 3)


@pytest.mark.parametrize("queue_id", [0, 7])
def test_a_queue_without_messages_says_so(store: MessageStore, queue_id: int) -> None:
    answer = store.get_messages("T", queue_id, 5, 32)
    assert answer.status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert (answer.next_begin_offset, answer.max_offset) == (0, 0)


def test_a_slave_does_not_correct_offsets(tmp_path: Path) -> None:
    store = open_store(tmp_path, broker_role="SLAVE")
    assert store.get_messages("T", 0, 5, 32).next_begin_offset == 5


def test_uncommitted_messages_are_invisible(store: MessageStore) -> None:
    put(store, b"a")
    assert store.get_messages("T", 0, 0, 32).status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert store.max_offset("T", 0) == 0
    committed(store.commit())
    assert bodies(store.get_messages("T", 0, 0, 32)) == [b"a"]


@pytest.mark.parametrize("source", ["memory", "files"])
@pytest.mark.parametrize(
    ("size", "settings", "expected"),
    [
        (10, {}, 32),
        (10, {"max_transfer_count_on_message_in_memory": 5}, 5),
        (1000, {"max_transfer_bytes_on_message_in_memory": 5000}, 4),
        (1000, {"max_transfer_bytes_on_message_in_memory": 10}, 1),  # the first message is always returned
        # Every record but the newest counts as "on disk".
        (10, {"access_message_in_memory_max_ratio": 0}, 9),
        (1000, {"access_message_in_memory_max_ratio": 0, "max_transfer_bytes_on_message_in_disk": 3500}, 3),
    ],
)
def test_batches_end_at_the_limits_for_memory_and_disk(
    tmp_path: Path, source: str, size: int, settings: dict[str, Any], expected: int
) -> None:
    if settings.get("access_message_in_memory_max_ratio") == 0 and size == 10:
        settings["max_transfer_count_on_message_in_disk"] = 9
    store = open_store(tmp_path, mapped_file_size_commit_log=1 << 20, **settings)
    put_all(store, [bytes(size)] * 40)
    if source == "files":
        store = reopened(store)
    answer = read(store, 0, 0, 64)
    assert (answer.count, answer.next_begin_offset) == (expected, expected)
    assert read(store, 0, 0, 2).count == min(2, expected)


def test_a_request_can_lower_the_byte_limit(store: MessageStore) -> None:
    put_all(store, [bytes(1000)] * 10)
    assert store.get_messages("T", 0, 0, 32, max_bytes=3300).count == 3


def test_the_slave_is_suggested_when_the_reader_is_far_behind(store: MessageStore) -> None:
    store.reader.memory_bytes = 10_000  # 40 % of it are 4,000 bytes
    put_all(store, [bytes(1000)] * 10)
    assert store.get_messages("T", 0, 0, 1).suggest_slave
    assert not store.get_messages("T", 0, 8, 1).suggest_slave


def test_tags_filter_by_hash_and_the_offset_passes_what_was_filtered(store: MessageStore) -> None:
    codes = {tag: java_hash(tag) for tag in ("red", "blue", "polygenelubricants")}
    for number in range(30):
        tag = ("red", "blue", "polygenelubricants")[number % 3]
        put(store, tag.encode(), tags_code=codes[tag])
    committed(store.commit())
    answer = store.get_messages("T", 0, 0, 32, filter={codes["red"]})
    assert (bodies(answer), answer.next_begin_offset) == ([b"red"] * 10, 30)
    answer = store.get_messages("T", 0, 0, 32, filter={codes["polygenelubricants"]})
    assert bodies(answer) == [b"polygenelubricants"] * 10
    answer = store.get_messages("T", 0, 0, 32, filter=lambda code: code == codes["blue"])
    assert bodies(answer) == [b"blue"] * 10
    answer = store.get_messages("T", 0, 0, 32, filter={1})
    assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 30)


def test_the_filter_compares_the_low_32_bits_signed(store: MessageStore) -> None:
    put(store, tags_code=(7 << 32) | 0xFFFFFFFF)
    committed(store.commit())
    assert store.get_messages("T", 0, 0, 32, filter={-1}).count == 1


LARGE = {"mapped_file_size_consume_queue": 20 * 5000, "mapped_file_size_commit_log": 1 << 20}


def test_a_scan_reads_at_most_16000_bytes_of_units(tmp_path: Path) -> None:
    store = open_store(tmp_path, **LARGE)
    put_all(store, [b""] * 2000, tags_code=1)
    answer = store.get_messages("T", 0, 0, 32, filter={2})
    assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 800)


@pytest.mark.parametrize("wanted", [-(2**31), -1, 0, 1, 31, 32, 33, 2**31 - 1, 2**62])
@pytest.mark.parametrize("filtered", [False, True])
def test_however_many_messages_are_asked_for_no_more_units_are_read_than_may_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, filtered: bool
) -> None:
    store = open_store(tmp_path, **LARGE)
    put_all(store, [b""] * 2000, tags_code=1)
    read, units = [], ConsumeQueue.read

    def note(queue: ConsumeQueue, offset: int, count: int, reads: Reads) -> Any:
        read.append(count)
        return units(queue, offset, count, reads)

    monkeypatch.setattr(ConsumeQueue, "read", note)
    given = store.get_messages("T", 0, 0, wanted, filter={1} if filtered else None)
    assert given.count == min(max(wanted, 1), 32)
    assert read == [800 if filtered else given.count]
    if filtered:
        assert store.get_messages("T", 0, 0, wanted, filter={2}).next_begin_offset == 800


def test_a_filter_by_content_sees_the_whole_record(store: MessageStore) -> None:
    put_all(store, numbered(6))
    wanted = (b"2", b"4")
    answer = store.get_messages(
        "T", 0, 0, 32, record_filter=by_record(lambda data, at: decode_record(data, at).body in wanted)
    )
    assert (bodies(answer), answer.next_begin_offset) == ([b"2", b"4"], 6)


@pytest.mark.parametrize(("passing", "status"), [(0, GetStatus.FOUND), (9, GetStatus.NO_MATCHED_MESSAGE)])
def test_a_read_ends_before_a_record_that_its_filter_does_not_look_at(
    store: MessageStore, passing: int, status: GetStatus
) -> None:
    put_all(store, numbered(6))
    verdicts = [number == passing for number in range(3)] + [None]
    answer = store.get_messages("T", 0, 0, 32, record_filter=by_record(lambda *_: verdicts.pop(0)))
    assert (answer.status, answer.next_begin_offset) == (status, 3)


def test_a_filtered_read_ends_before_what_is_not_in_memory(tmp_path: Path) -> None:
    """Messages that the filter has examined are not examined again by the next read."""
    store = open_store(tmp_path, ColdDisk(), mapped_file_size_commit_log=1 << 16)
    send_all(store, (bytes(9000) for _ in range(20)))
    store = reopened(store)
    disk = store.disk
    assert isinstance(disk, ColdDisk)
    disk.cold = True
    looked_at: list[int] = []
    fetched: dict[FileRange, bytes | OSError] = {}

    def look(data: Buffer, at: int) -> bool:
        looked_at.append(decode_record(data, at).queue_offset)
        return False

    offset = 0
    while offset < 20:
        try:
            reads = Reads(fetched=fetched)
            answer = store.get_messages("T", 0, offset, 32, record_filter=by_record(look), reads=reads)
            offset = answer.next_begin_offset
        except NotInMemory as miss:
            fetched[miss.missing] = miss.missing.read(disk)
    assert looked_at == list(range(20))


@pytest.mark.parametrize("source", ["memory", "files"])
def test_queues_do_not_mix_wherever_their_records_lie(store: MessageStore, source: str) -> None:
    expected: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(5)}
    for number in range(600):
        body = b"%d-" % number + bytes(number * 37 % 900)
        put(store, body, queue_id=number * 7 % 5)
        expected[number * 7 % 5].append(body)
        if number % 11 == 0:
            committed(store.commit())
    committed(store.commit())
    if source == "files":
        store = reopened(store)
    assert {queue_id: everything(store, "T", queue_id) for queue_id in range(5)} == expected


@pytest.mark.parametrize("run", [1, 32], ids=["one by one", "in runs"])
@pytest.mark.parametrize("sizes", ["one size", "many sizes"])
def test_queues_drained_side_by_side_share_what_was_read(tmp_path: Path, sizes: str, run: int) -> None:
    disk = FaultyDisk()
    large = {"mapped_file_size_commit_log": 1 << 20, "mapped_file_size_consume_queue": 20 * 1000}
    store = open_store(tmp_path, disk, **large)
    expected: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(8)}
    for number in range(3000):
        body = b"%d-" % number + bytes(number * 37 % 900)
        if sizes == "one size":  # at 1 KiB per record some blocks begin with a record
            body = body[:10].ljust(1024 - MIN_SIZE - len("T"))
        queue_id = number // run % 8
        put(store, body, queue_id=queue_id)
        expected[queue_id].append(body)
    committed(store.commit())
    store = reopened(store)
    disk.calls.clear()
    found: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(8)}
    pulls = 0
    while found != expected:
        for queue_id in range(8):
            answer = read(store, queue_id, len(found[queue_id]), 32)
            assert answer.count > 0 or found[queue_id] == expected[queue_id]
            found[queue_id] += bodies(answer)
            pulls += answer.count > 0
    # Each pull reads queue units. Only groups of records that cross a block border, and the records after the
    # last whole block, need reads of their own.
    blocks, behind = divmod(store.log.end, 1 << 17)
    crossing = 0 if run == 1 else blocks
    behind //= store.log.end // 3000
    assert disk.calls["pread_cached"] - pulls - crossing < blocks * 4 + behind
    drop_first_segment(store, derived=False)
    assert store.get_messages("T", 0, 0, 32).status is GetStatus.MESSAGE_WAS_REMOVING


def test_hundreds_of_queues_drained_side_by_side_share_what_was_read(tmp_path: Path) -> None:
    disk = FaultyDisk()
    large = {"mapped_file_size_commit_log": 4 << 20, "mapped_file_size_consume_queue": 20 * 100}
    store = open_store(tmp_path, disk, **large)
    expected: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(400)}
    places = [
        [
            put(store, b"%d-" % number + bytes(number * 37 % 900), queue_id=number % 400)
            for number in range(at, at + 400)
        ]
        for at in range(0, 6400, 400)
    ]
    for number in range(6400):
        expected[number % 400].append(b"%d-" % number + bytes(number * 37 % 900))
    committed(store.commit())
    store = reopened(store)
    disk.calls.clear()
    for queue_id, wanted in expected.items():
        answer = read(store, queue_id, 0, 32)
        assert (bodies(answer), answer.next_begin_offset) == (wanted, 16)
    # The limit covers the units of each queue, the blocks, three single records per block before it is
    # loaded, and the records on borders and after the last whole block.
    assert disk.calls["pread_cached"] < 400 + 6400 / 16
    alter(tmp_path / "commitlog" / f"{0:020d}", places[3][7].physical_offset, bytes(8))
    store.log.blocks.clear()
    answer = read(store, 7, 0, 32)
    assert bodies(answer) == expected[7][:3] + expected[7][4:]


def test_a_segment_that_is_gone_is_stepped_over(store: MessageStore) -> None:
    send_all(store, (b"%d" % number + bytes(1000) for number in range(200)))
    assert len(store.log.segments) == 4
    store = reopened(store)
    drop_first_segment(store, derived=False)
    answer = read(store, 0, 0, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.MESSAGE_WAS_REMOVING, 32)
    found = everything(store)
    assert found[-1].startswith(b"199")
    assert 130 < len(found) < 200


async def test_what_is_not_in_memory_is_fetched_by_a_thread(tmp_path: Path) -> None:
    disk = ColdDisk()
    store = open_store(tmp_path, disk)
    for number in range(150):
        put(store, b"%d" % number + bytes(1000), queue_id=number % 2)
    committed(store.commit())
    store = reopened(store)
    disk.cold = True
    store.start()
    with pytest.raises(NotInMemory):
        store.get_messages("T", 1, 0, 32)
    answer = await pulled(store, "T", 1, 0)
    assert [body[:2].rstrip(b"\0") for body in bodies(answer)][:3] == [b"1", b"3", b"5"]
    assert answer.count == 32
    assert store.get_messages("T", 1, 0, 32).count == 32


def test_a_device_error_is_not_taken_for_absence(disk: FaultyDisk, store: MessageStore) -> None:
    send(store)
    store = reopened(store)
    disk.fail("pread_cached", error=errno.EIO, match="commitlog", times=3)
    with pytest.raises(OSError, match="Input/output error"):
        store.get_messages("T", 0, 0, 32)
    assert bodies(store.get_messages("T", 0, 0, 32)) == [b"hello"]


def test_damaged_bodies_are_not_served_when_reads_check_the_crc(tmp_path: Path) -> None:
    store = open_store(tmp_path, check_crc_on_read=True)
    places = [send(store, b"message %d" % number) for number in range(3)]
    store = reopened(store)
    path = tmp_path / "commitlog" / f"{0:020d}"
    flip(path, places[1].physical_offset + 88)
    refused: list[int] = []
    store.reader.refused = lambda position, _where: refused.append(position)
    answer = read(store, 0, 0, 32)
    assert (bodies(answer), answer.next_begin_offset) == ([b"message 0", b"message 2"], 3)
    assert refused == [places[1].physical_offset]
    assert store.get_messages("T", 0, 1, 1).status is GetStatus.MESSAGE_WAS_REMOVING


def test_offsets_by_time_are_exact_at_the_edges(tmp_path: Path) -> None:
    clock = ManualClock(10_000)
    store = open_store(tmp_path, clock=clock)
    for at in (10_000, 10_100, 10_100, 10_100, 10_200, 10_500):
        clock.now_ms = at
        send(store)
    cases = {  # requested time: (nearest, first at or after, last at or before)
        0: (0, 0, 0), 9_999: (0, 0, 0), 10_000: (0, 0, 0), 10_040: (0, 1, 0), 10_060: (1, 1, 0),
        10_100: (1, 1, 3), 10_101: (3, 4, 3), 10_150: (3, 4, 3), 10_151: (4, 4, 3), 10_200: (4, 4, 4),
        10_350: (4, 5, 4), 10_351: (5, 5, 4), 10_500: (5, 5, 5), 10_501: (5, 6, 5), 1 << 60: (5, 6, 5),
    }  # fmt: skip
    for asked, expected in cases.items():
        answers = tuple(offset_by_time(store, "T", 0, asked, mode) for mode in (None, "LOWER", "UPPER"))
        assert answers == expected, asked
    queue = store.queues.find_queue("T", 0)
    times = [store.lookups.store_time_of(queue, offset) for offset in (-1, 0, 5, 6)]
    assert times == [-1, 10_000, 10_500, -1]
    assert offset_by_time(store, "other", 0, 0) == 0


def test_records_are_found_by_position_only_where_one_begins(store: MessageStore) -> None:
    places = [send(store, b"%d" % number) for number in range(3)]
    record = store.lookups.record_at(places[1].physical_offset)
    assert record is not None
    assert decode_record(record).body == b"1"
    assert len(record) == places[1].size
    for wrong in (-1, places[1].physical_offset + 1, store.log.end, 1 << 40):
        assert store.lookups.record_at(wrong) is None


def test_messages_are_found_by_every_key_and_within_times(tmp_path: Path) -> None:
    clock = ManualClock(1_000_000)
    store = open_store(tmp_path, clock=clock)
    for number in range(1000):
        clock.now_ms += 1000
        keys = b"UNIQ_KEY\x01U%d\x02KEYS\x01k%d even%d" % (number, number % 50, number % 2)
        put(store, b"%d" % number, properties=keys)
        if number % 7 == 0:
            committed(store.commit())
    committed(store.commit())

    def ask(key: str, limit: int = 64, begin: int = 0, end: int = 1 << 60, topic: str = "T") -> list[bytes]:
        return [decode_record(data).body for data in by_key(store, topic, key, limit, begin, end)]

    assert ask("U777") == [b"777"]
    assert len(store.index.files) == 8  # 3000 keys, 399 per file
    assert ask("k7") == numbered(7, 1000, 50)
    assert ask("k7", limit=3) == [b"857", b"907", b"957"]
    assert ask("even1", limit=100) == numbered(1000 - 127, 1000, 2)  # the limit maxMsgsNumBatch
    assert ask("U777", topic="other") == []
    assert ask("nothing") == []
    assert ask("k7", begin=1_000_000 + 508_000, end=1_000_000 + 708_000) == numbered(507, 708, 50)


def test_one_read_crosses_from_the_file_to_memory(tmp_path: Path, store: MessageStore) -> None:
    send_all(store, numbered(5))
    store = restarted(store)
    send_all(store, numbered(5, 9))

    answer = store.reader.get(store.queues.find_queue("T", 0), 2, 32)
    assert bodies(answer) == numbered(2, 9)
    assert answer.next_begin_offset == 9
    assert bodies(store.reader.get(store.queues.find_queue("T", 0), 2, 4)) == [b"2", b"3", b"4", b"5"]


BULKY = {"mapped_file_size_commit_log": 16 << 20, "mapped_file_size_consume_queue": 40_000}


@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.parametrize(
    ("size", "sent", "asked", "given"),
    [
        pytest.param(10, 1500, 5000, 1024, id="count"),
        pytest.param(10, 1500, 700, 700, id="asked for"),
        pytest.param(10, 40, 5000, 40, id="all there is"),
        pytest.param(4000, 400, 1024, 256, id="bytes"),
    ],
)
def test_a_bulk_read_gives_a_thousand_messages_or_a_mebibyte(
    tmp_path: Path, size: int, sent: int, asked: int, given: int, queues: int
) -> None:
    store = open_store(tmp_path, **BULKY)
    for number in range(sent * queues):
        put(store, b"%-*d" % (size, number // queues), queue_id=number % queues)
    committed(store.commit())
    for source in (store, reopened(store)):
        answer = read(source, 0, 0, asked, bulk=True)
        assert (answer.status, answer.next_begin_offset) == (GetStatus.FOUND, given)
        assert [int(body) for body in bodies(answer)] == list(range(given))
        assert read(source, 0, 0, asked).count == 32


@pytest.mark.parametrize("tagged", [False, True])
def test_a_bulk_read_of_what_lies_far_apart_brings_a_bounded_part_of_the_log(
    tmp_path: Path, tagged: bool
) -> None:
    """The queue's messages are 15 KiB apart, so 1024 of them are spread over 120 blocks of 128 KiB."""
    store = open_store(tmp_path, **BULKY)
    for number in range(1100):
        put(store, b"%d" % number, tags_code=number % 2)
        put(store, bytes(15_000), queue_id=1)
    committed(store.commit())
    store = reopened(store)  # clears the newest bytes from memory
    wanted = {0} if tagged else None
    found: list[int] = []
    offset = 0
    while offset < 1100:
        answer = store.get_messages("T", 0, offset, 1024, bulk=True, filter=wanted, reads=WAITING)
        assert answer.status is GetStatus.FOUND
        assert answer.next_begin_offset - offset < 1000
        offset = answer.next_begin_offset
        found += [int(body) for body in bodies(answer)]
    assert found == list(range(0, 1100, 2 if tagged else 1))


def test_a_bulk_read_gives_one_message_that_is_larger_than_its_limit(tmp_path: Path) -> None:
    store = open_store(tmp_path, **BULKY)
    send_all(store, [bytes(2 << 20), b"next"])
    answer = read(store, 0, 0, 1024, bulk=True)
    assert (answer.count, answer.next_begin_offset) == (1, 1)


def test_a_bulk_read_ends_before_what_is_not_in_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, ColdDisk(), **BULKY)
    for number in range(600):
        put(store, b"%-1000d" % number, queue_id=number % 2)
    committed(store.commit())
    store = reopened(store)
    disk = store.disk
    assert isinstance(disk, ColdDisk)
    disk.cold = True
    fetched: dict[FileRange, bytes | OSError] = {}
    found: list[int] = []
    questions = 0
    while len(found) < 240:  # only whole blocks: later records are read one by one
        questions += 1
        try:
            answer = store.get_messages("T", 0, len(found), 1024, bulk=True, reads=Reads(fetched=fetched))
        except NotInMemory as miss:
            fetched = {miss.missing: miss.missing.read(disk)}
        else:
            found += [int(body) for body in bodies(answer)]
            assert answer.next_begin_offset == len(found)
    assert found == list(range(0, 2 * len(found), 2))
    assert questions == 15  # misses and reads: units, four blocks, and three records between them

"""Effects of settings with values other than the default (docs/reference/storage.md, Store settings)."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import ClassVar

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.background.test_retention import age, filled
from tests.store.kit import (
    START_MS,
    after_crash,
    by_key,
    by_record,
    drop_first_segment,
    everything,
    in_place,
    open_store,
    put,
    put_all,
    restarted,
    send,
    send_all,
)
from tests.store.planted import alter, flip

from cometmq.protocol.record.one import decode_record
from cometmq.store import GetStatus, ManualClock, MessageStore, StoreRefused
from cometmq.store.base.disk import DiskUsage
from cometmq.store.base.refusal import Flag
from cometmq.store.derived.index_file import ENTRY, HEADER, SLOT_SIZE, file_length

LATE = 1 << 62


def found(store: MessageStore, key: str, topic: str = "T") -> list[bytes]:
    return [decode_record(record).body for record in by_key(store, topic, key, 64, 0, LATE)]


def keyed(store: MessageStore, number: int, size: int = 0) -> None:
    send(store, b"%d:" % number + bytes(size), properties=b"KEYS\x01k%d" % number)


class TestIndexSwitchedOff:
    """messageIndexEnable=false stops only the indexing of new messages."""

    def test_what_was_indexed_is_still_found(self, tmp_path: Path, store: MessageStore) -> None:
        keyed(store, 1)
        store = restarted(store, message_index_enable=False)
        keyed(store, 2)
        assert (found(store, "k1"), found(store, "k2")) == ([b"1:"], [])

    def test_no_file_is_made_where_there_is_none(self, tmp_path: Path) -> None:
        for _ in range(2):
            store = open_store(tmp_path, message_index_enable=False)
            keyed(store, 1)
            store.close()
        assert not (tmp_path / "index").exists()
        store = open_store(tmp_path)  # enabled again: the missing index is built from the log
        assert found(store, "k1") == [b"1:"] * 2

    def test_it_can_be_switched_while_the_store_runs(self, tmp_path: Path, store: MessageStore) -> None:
        for number, enabled in enumerate([True, False, True]):
            store.configure(store.config.replace(message_index_enable=enabled))
            keyed(store, number)
        assert [found(store, f"k{number}") for number in range(3)] == [[b"0:"], [], [b"2:"]]
        store = restarted(store)
        assert [found(store, f"k{number}") for number in range(3)] == [[b"0:"], [], [b"2:"]]

    def test_switched_on_in_a_store_that_began_without(self, tmp_path: Path) -> None:
        store = open_store(tmp_path, message_index_enable=False)
        keyed(store, 0)
        store.configure(store.config.replace(message_index_enable=True))
        keyed(store, 1)
        assert (found(store, "k0"), found(store, "k1")) == ([], [b"1:"])

    def test_a_crash_takes_nothing_from_it_and_adds_nothing(
        self, tmp_path: Path, store: MessageStore
    ) -> None:
        for number in range(50):
            keyed(store, number)
        store.configure(store.config.replace(message_index_enable=False))
        keyed(store, 50)
        store.index.write()
        store = after_crash(store, message_index_enable=False)
        assert not store.recovered.clean
        assert [found(store, f"k{number}") for number in range(50)] == [[b"%d:" % n] for n in range(50)]
        assert found(store, "k50") == []

    def test_its_files_expire_with_the_log(self, tmp_path: Path, store: MessageStore) -> None:
        for number in range(900):  # an index file has 400 entries
            keyed(store, number, 300)
        store.close()
        files = sorted(os.listdir(tmp_path / "index"))
        assert len(files) == 3
        store = open_store(tmp_path, message_index_enable=False)
        while store.log.min_position <= store.index.files[0].end_position:
            drop_first_segment(store, derived=False)
        drop_first_segment(store)
        assert sorted(os.listdir(tmp_path / "index")) == files[1:]
        assert found(store, "k899") == [b"899:" + bytes(300)]

    def test_a_damaged_file_is_not_made_anew(self, tmp_path: Path, store: MessageStore) -> None:
        keyed(store, 1)
        store.close()
        (path,) = (tmp_path / "index").iterdir()
        os.truncate(path, 10)
        store = open_store(tmp_path, message_index_enable=False)
        assert found(store, "k1") == []
        assert everything(store) == [b"1:"]


def test_a_safe_index_moves_the_start_of_a_recovery_back_to_its_last_full_file(tmp_path: Path) -> None:
    walked = []
    for safe in (False, True):
        root = tmp_path / str(safe)
        clock = ManualClock(START_MS)
        store = open_store(root, clock=clock)
        for number in range(300):
            clock.now_ms += 1000
            keyed(store, number, 1000)
        store.writer.make_durable()
        store.checkpoint.saved = None
        store.checkpoint.index_ms = START_MS + 20_000
        store.checkpoint.flush()
        store = after_crash(store, clock=clock, message_index_safe=safe)
        walked.append(store.recovered.records)
        for number in (0, 299):
            assert found(store, f"k{number}") == [b"%d:" % number + bytes(1000)]
        store.close()
    assert walked[0] < 100 < 250 < walked[1]


@pytest.mark.parametrize("checked", [True, False])
def test_a_recovery_that_checks_no_crc_takes_damaged_bodies_for_messages(
    tmp_path: Path, store: MessageStore, checked: bool
) -> None:
    places = [send(store, b"body %d" % number).physical_offset for number in range(3)]
    store.crash()
    flip(tmp_path / "commitlog" / f"{0:020d}", places[1] + 90)
    store = open_store(tmp_path, check_crc_on_recover=checked)
    assert len(everything(store)) == (2 if checked else 3)
    assert bool(store.recovered.damage) is checked


class TestRecordsByPosition:
    """The requests with codes 33 and 36 need these functions."""

    def test_a_record_whose_body_is_damaged_is_none(self, tmp_path: Path, store: MessageStore) -> None:
        first, second = (send(store, body).physical_offset for body in (b"first", b"second"))
        store.close()
        flip(tmp_path / "commitlog" / f"{0:020d}", second + 90)
        store = open_store(tmp_path)
        assert decode_record(store.lookups.record_at(first) or b"").body == b"first"
        assert store.lookups.record_at(second) is None

    @pytest.mark.parametrize("away", [-1, 1, 4, 91])
    def test_no_record_begins_beside_one(self, store: MessageStore, away: int) -> None:
        send(store, bytes(100))
        place = send(store, bytes(100)).physical_offset
        assert store.lookups.record_at(place) is not None
        assert store.lookups.record_at(place + away) is None


class TestBatchLimits:
    """Both ways of reading, by queue units alone and record by record, respect the limits."""

    MUCH_FROM_DISK: ClassVar = {
        "max_transfer_count_on_message_in_disk": 100,
        "max_transfer_bytes_on_message_in_disk": 1 << 20,
    }
    CASES = (
        ({"max_transfer_count_on_message_in_memory": 5}, 1 << 40, 5),
        ({"max_transfer_bytes_on_message_in_memory": 3 * 1095}, 1 << 40, 3),
        ({"max_transfer_bytes_on_message_in_memory": 3 * 1095 - 1}, 1 << 40, 2),
        ({"max_transfer_count_on_message_in_disk": 4}, 0, 4),
        ({"max_transfer_bytes_on_message_in_disk": 6 * 1095}, 0, 6),
        ({"max_transfer_bytes_on_message_in_disk": 6 * 1095 - 1}, 0, 5),
        ({"max_transfer_bytes_on_message_in_disk": 1}, 0, 1),
        # The first 30 of 40 are on disk; the limit of eight for these ends the batch, whatever the memory
        # limits.
        ({"max_transfer_bytes_on_message_in_disk": 1 << 20}, 10 * 1095, 8),
        (MUCH_FROM_DISK, 0, 40),
        # The limit of the unit's own location applies: 30 units on disk are returned, those in memory are
        # not.
        ({**MUCH_FROM_DISK, "max_transfer_count_on_message_in_memory": 20}, 10 * 1095, 30),
    )

    @pytest.mark.parametrize("way", ["units", "records", "crc"])
    @pytest.mark.parametrize(("changes", "memory", "count"), CASES)
    def test_a_batch_ends_where_they_say(
        self, tmp_path: Path, changes: dict[str, int], memory: int, count: int, way: str
    ) -> None:
        changes = {"max_transfer_count_on_message_in_memory": 100, **changes}
        store = open_store(
            tmp_path, access_message_in_memory_max_ratio=100, check_crc_on_read=way == "crc", **changes
        )
        store.reader.memory_bytes = memory
        put_all(store, [bytes(1000 + 3)] * 40)
        assert store.log.end == 40 * 1095
        keeps = (by_record(lambda *_record: True)) if way == "records" else None
        answer = store.get_messages("T", 0, 0, 64, record_filter=keeps)
        assert (answer.count, answer.next_begin_offset) == (count, count)

    @pytest.mark.parametrize(("size", "scanned"), [(16_000, 800), (800, 40), (20, 32)])
    def test_a_filter_looks_at_so_many_bytes_of_units(self, tmp_path: Path, size: int, scanned: int) -> None:
        store = open_store(
            tmp_path,
            max_filter_message_size=size,
            mapped_file_size_consume_queue=20_000,
            mapped_file_size_commit_log=1 << 20,
        )
        put_all(store, [b""] * 900, tags_code=1)
        answer = store.get_messages("T", 0, 0, 32, filter={2})
        assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, scanned)


class TestIndexFiles:
    def test_the_first_entry_of_a_file_counts_from_the_end_of_the_one_before(self, tmp_path: Path) -> None:
        """The entry's time is relative to the header's time, which is initialized from the previous file."""
        clock = ManualClock(START_MS)
        store = open_store(tmp_path, clock=clock, max_index_num=4)
        for seconds in (0, 10, 20, 27, 40, 41, 50):
            clock.now_ms = START_MS + seconds * 1000 + 700
            keyed(store, seconds)
        store.close()
        read = []
        for path in sorted((tmp_path / "index").iterdir()):
            data = path.read_bytes()
            assert len(data) == file_length(100, 4)
            begin_ms, end_ms, *_, count = HEADER.unpack_from(data)
            at = HEADER.size + 100 * SLOT_SIZE
            entries = [ENTRY.unpack_from(data, at + number * ENTRY.size)[2] for number in range(1, count)]
            read.append((begin_ms - START_MS, end_ms - START_MS, entries))
        assert read == [(700, 20_700, [0, 10, 20]), (27_700, 41_700, [7, 13, 14]), (50_700, 50_700, [9])]

    @pytest.mark.parametrize(
        ("damaged", "most", "bodies_found"),
        [(0, 2, [6, 7]), (1, 2, [5, 6]), (4, 2, [2, 3]), (4, 5, [0, 1, 2, 3]), (7, 5, [0]), (8, 5, [])],
    )
    def test_a_query_looks_behind_what_it_cannot_read(
        self, tmp_path: Path, store: MessageStore, clock: ManualClock, damaged: int, most: int,
        bodies_found: list[int],
    ) -> None:  # fmt: skip
        places = []
        for number in range(8):
            clock.now_ms += 10_000
            places.append(send(store, b"body %d" % number, properties=b"KEYS\x01k").physical_offset)
        send(store, b"the next start looks at the last one")
        store.close()
        for place in places[8 - damaged :]:
            flip(tmp_path / "commitlog" / f"{0:020d}", place + 90)
        store = open_store(tmp_path, clock=clock)
        records = by_key(store, "T", "k", most, 0, LATE)
        assert [decode_record(record).body for record in records] == [b"body %d" % n for n in bodies_found]

    @pytest.mark.parametrize("most", [1, 3, 64])
    def test_a_query_gives_no_more_than_max_msgs_num_batch(self, tmp_path: Path, most: int) -> None:
        store = open_store(tmp_path, max_msgs_num_batch=most)
        send_all(store, [b"hello"] * 5, properties=b"KEYS\x01k")
        assert len(by_key(store, "T", "k", 32, 0, LATE)) == min(most, 5)
        store.configure(store.config.replace(max_msgs_num_batch=2))
        assert len(by_key(store, "T", "k", 32, 0, LATE)) == 2


class TestRetentionSettings:
    @pytest.mark.parametrize(
        ("given", "percent", "deleted"),  # values are clamped to the range from 10 to 95
        [(5, 10, 0), (5, 11, 10), (60, 60, 0), (60, 61, 10), (99, 95, 0), (99, 96, 10)],
    )
    def test_above_which_fullness_expired_segments_go_at_any_hour(
        self, tmp_path: Path, given: int, percent: int, deleted: int
    ) -> None:
        settings = {"disk_max_used_space_ratio": given, "clean_file_forcibly_enable": False}
        store, disk, _ = filled(tmp_path, **settings)
        disk.percent = percent
        assert len(in_place(store.retention.log_cycle())) == deleted

    @pytest.mark.parametrize(
        ("given", "percent", "deleted"),
        [(10, 30, 0), (10, 31, 10), (50, 50, 0), (50, 51, 10), (99, 85, 0), (99, 86, 10)],
    )
    def test_above_which_fullness_young_segments_go(
        self, tmp_path: Path, given: int, percent: int, deleted: int
    ) -> None:
        settings = {"disk_space_clean_forcibly_ratio": given, "disk_max_used_space_ratio": 10}
        store, disk, clock = filled(tmp_path, **settings)
        age(tmp_path, range(14), clock.now_ms)
        disk.percent = percent
        assert len(in_place(store.retention.log_cycle())) == deleted

    @pytest.mark.parametrize(
        ("given", "percent", "writeable"),
        [(10, 35, True), (10, 36, False), (50, 50, True), (50, 51, False), (99, 90, True), (99, 91, False)],
    )
    def test_above_which_fullness_messages_are_refused(
        self, tmp_path: Path, given: int, percent: int, writeable: bool
    ) -> None:
        store, disk, _ = filled(tmp_path, 2, disk_space_warning_level_ratio=given)
        disk.percent = percent
        in_place(store.fullness.measure())
        assert store.flags.writeable is writeable

    @pytest.mark.parametrize("batch", [1, 3, 100])
    def test_so_many_segments_go_in_one_pass(self, tmp_path: Path, batch: int) -> None:
        store, disk, _ = filled(tmp_path, delete_file_batch_max=batch)
        disk.percent = 80
        assert len(in_place(store.retention.log_cycle())) == min(batch, 13)
        store.configure(store.config.replace(delete_file_batch_max=2))
        assert len(in_place(store.retention.log_cycle())) == (2 if batch < 13 else 0)

    def test_a_deletion_by_hand_lasts_twenty_passes(self, tmp_path: Path) -> None:
        store, _, _ = filled(tmp_path, 26, delete_file_batch_max=1)
        store.retention.delete_now()
        gone = [len(in_place(store.retention.log_cycle())) for _ in range(23)]
        assert gone == [1] * 20 + [0] * 3
        store.retention.delete_now()
        assert len(in_place(store.retention.log_cycle())) == 1


@pytest.mark.parametrize(
    ("changes", "size", "seconds", "flushed"),
    [
        ({}, 4 * 4096 - 92, 9.9, True),
        ({}, 4 * 4096 - 93, 9.9, False),
        ({}, 1, 10, True),
        ({"flush_commit_log_least_pages": 2}, 2 * 4096 - 92, 0, True),
        ({"flush_commit_log_least_pages": 2}, 2 * 4096 - 93, 0, False),
        ({"flush_commit_log_least_pages": 0}, 1, 0, True),
        ({"flush_commit_log_thorough_interval": 2000}, 1, 1.9, False),
        ({"flush_commit_log_thorough_interval": 2000}, 1, 2, True),
        ({"flush_commit_log_thorough_interval": 0}, 1, 0, True),
    ],
)
def test_when_the_timer_flushes(
    tmp_path: Path, changes: dict[str, int], size: int, seconds: float, flushed: bool
) -> None:
    clock = ManualClock(START_MS)
    store = open_store(tmp_path, FaultyDisk(), clock, **changes)
    send(store, bytes(size))
    assert store.log.end == size + 92
    clock.advance(seconds)
    store.flusher.timed()
    assert (store.flusher.flushed == store.log.end) is flushed


def test_fields_of_another_version_in_the_checkpoint_are_carried_through(
    tmp_path: Path, store: MessageStore
) -> None:
    """5.x stores the master's flushed offset at byte 24 and the confirmed offset at byte 32."""
    send(store)
    store.close()
    checkpoint = tmp_path / "checkpoint"
    alter(checkpoint, 24, struct.pack(">qq", 123_456_789, 987_654_321))
    alter(checkpoint, 4088, b"the  end")
    for crash in (False, True):
        store = open_store(tmp_path, clock=ManualClock(START_MS + 5000))
        send(store)
        store.writer.make_durable()
        store.crash() if crash else store.close()
        kept = checkpoint.read_bytes()
        assert struct.unpack_from(">qq", kept, 24) == (123_456_789, 987_654_321)
        assert (kept[4088:], len(kept)) == (b"the  end", 4096)
        assert struct.unpack_from(">q", kept)[0] == START_MS + 5000


async def test_how_full_the_disks_are_is_known_before_the_first_pass(tmp_path: Path) -> None:
    """Log, queues and index may be on separate disks."""

    class Disks(FaultyDisk):
        def usage(self, path: str) -> DiskUsage:
            used = {"commitlog": 60, "consumequeue": 30, "index": 20}.get(os.path.basename(path), 10)
            return DiskUsage(100, used, 100 - used)

    store = open_store(tmp_path, Disks(), clean_resource_interval=(1 << 31) - 1)
    keyed(store, 1)
    store.index.write()
    store.start()
    await store.tasks.idle()
    ratios = store.fullness.log_ratio, store.fullness.queue_ratio, store.fullness.index_ratio
    assert ratios == (0.6, 0.3, 0.2)
    store.configure(store.config.replace(disk_space_warning_level_ratio=50))
    await store.fullness.measure()
    with pytest.raises(StoreRefused, match=r"CL:  0.60 CQ:  0.30 INDEX:  0.20, limit 0.50 "):
        put(store)


def test_a_full_disk_of_the_queues_alone_stops_writing(tmp_path: Path) -> None:
    class Disks(FaultyDisk):
        def usage(self, path: str) -> DiskUsage:
            used = 95 if path.endswith("consumequeue") else 10
            return DiskUsage(100, used, 100 - used)

    store = open_store(tmp_path, Disks())
    send(store)
    in_place(store.fullness.measure())
    assert not store.flags.writeable


@pytest.mark.parametrize(
    ("part", "flag", "why"),
    [
        ("consumequeue", Flag.WRITE_LOGICS_ERROR, "consume queues"),
        ("index", Flag.WRITE_INDEX_ERROR, "the index"),
    ],
)
def test_flags_tell_queues_and_index_apart(
    disk: FaultyDisk, store: MessageStore, part: str, flag: Flag, why: str
) -> None:
    keyed(store, 1)
    disk.fail("pwrite", match=f"/{part}/", times=1000)
    assert not store.writer.make_durable()
    assert set(store.flags.reasons) == {flag}
    with pytest.raises(StoreRefused, match=f"{why} could not be written"):
        put(store)
    disk.heal()
    assert store.writer.make_durable()
    assert store.flags.writeable
    keyed(store, 2)
    assert (found(store, "k1"), found(store, "k2")) == ([b"1:"], [b"2:"])

"""`verify` finds nothing in a sound store, and every planted damage by file and place; it never writes."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.store.kit import committed, drop_first_segment, open_store, put, send, small
from tests.store.planted import (
    ENTRIES_AT,
    UNCOVERED_PLACES,
    alter,
    build,
    damage_field,
    extract_golden,
    filler,
    flip,
    index_files,
    places,
    snapshot,
    unit_place,
)

from cometmq.errors import StoreError
from cometmq.protocol.properties import index_hash, tags_code
from cometmq.store import ManualClock, MessageStore
from cometmq.store.findings import Finding
from cometmq.store.shape import read_shape
from cometmq.store.verify import VerifyReport, verify
from cometmq.testing.faulty_disk import FaultyDisk

WRITING = {"pwrite", "fdatasync", "fsync_dir", "reserve", "truncate", "rename", "unlink", "makedirs", "open"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    build(root)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


def check(root: Path) -> VerifyReport:
    return verify(str(root), config=small(root))


def kinds(report: VerifyReport, severity: str = "error") -> set[str]:
    return {finding.kind for finding in report.findings if finding.severity == severity}


def only(report: VerifyReport, kind: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    return finding


class TestSoundStores:
    def test_ours(self, sound: Path) -> None:
        report = check(sound)
        assert report.findings == []
        assert report.sound
        assert report.clean
        assert not report.live
        assert (report.records, report.units, report.index_entries) == (400, 400, 1200)
        assert report.segments > 2
        assert report.index_files > 2
        assert report.tables >= 1

    def test_apaches_with_its_lengths_found_without_configuration(self, tmp_path: Path) -> None:
        extract_golden(tmp_path)
        report = verify(str(tmp_path))
        assert report.findings == []
        assert (report.records, report.units) == (204, 204)
        assert report.index_entries == 379

    def test_lengths_are_read_off_the_files(self, sound: Path) -> None:
        found = read_shape(FaultyDisk(), str(sound)).config
        wanted = small(sound)
        assert found.mapped_file_size_commit_log == wanted.mapped_file_size_commit_log
        assert found.mapped_file_size_consume_queue == wanted.mapped_file_size_consume_queue
        assert (found.max_hash_slot_num, found.max_index_num) == (100, 400)

    def test_an_empty_store(self, tmp_path: Path) -> None:
        open_store(tmp_path).close()
        report = check(tmp_path)
        assert (report.findings, report.records) == ([], 0)

    def test_a_store_whose_log_does_not_begin_at_zero(self, root: Path) -> None:
        store = open_store(root)
        expired = store.log.segments[:2]
        for _ in expired:
            drop_first_segment(store)
        store.close()
        report = check(root)
        assert report.findings == []
        assert report.first_position == expired[-1] + (64 << 10)
        assert 100 < report.records < 400

    def test_a_directory_that_is_no_store(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="no commitlog"):
            verify(str(tmp_path))

    def test_nothing_is_written_nor_locked(self, root: Path) -> None:
        before = snapshot(root)
        disk = FaultyDisk()
        verify(str(root), disk=disk)
        assert {name for name in disk.calls if name in WRITING} == set()
        assert snapshot(root) == before

    def test_other_peoples_files_are_noted_and_no_damage(self, root: Path) -> None:
        (root / "commitlog" / "notes.txt").write_text("mine")
        report = check(root)
        assert report.sound
        assert only(report, "stray").path.endswith("commitlog/notes.txt")


class TestLog:
    @pytest.mark.parametrize(
        ("byte", "word"),
        [
            (0, "size"),
            (4, "magic"),
            (8, "body CRC"),
            (30, "physical offset"),
            (84, "body length"),
            (100, "CRC"),
        ],
    )
    def test_a_flip_in_the_middle(self, root: Path, byte: int, word: str) -> None:
        hit = places(root)[200]
        flip(hit.path, hit.at + byte)
        report = check(root)
        found = only(report, "log-damage")
        assert (found.severity, found.path, found.offset) == ("error", str(hit.path), hit.at)
        assert f"({hit.size} bytes)" in found.problem
        assert word in found.problem
        assert report.records == 399
        unit, at = unit_place(root, hit)
        lonely = only(report, "queue-unit")
        assert (lonely.path, lonely.offset) == (str(unit), at)
        assert f"log position {hit.position}, where no valid record is" in lonely.problem
        entries = [finding for finding in report.findings if finding.kind == "index-entry"]
        assert len(entries) == 3
        assert all(f"log position {hit.position}, where no valid" in entry.problem for entry in entries)

    def test_a_zeroed_stretch(self, root: Path) -> None:
        first, last = places(root)[100], places(root)[104]
        assert first.path == last.path
        alter(first.path, first.at, bytes(last.at + last.size - first.at))
        report = check(root)
        found = only(report, "log-damage")
        assert (found.path, found.offset) == (str(first.path), first.at)
        assert "begins with zeros" in found.problem
        assert report.records == 395

    def test_a_segment_that_ends_without_its_blank_record(self, root: Path) -> None:
        every = places(root)
        last = [place for place in every if place.path == every[0].path][-1]
        flip(last.path, last.at + last.size + 4)
        found = only(check(root), "log-damage")
        assert (found.path, found.offset) == (str(last.path), last.at + last.size)

    def test_something_behind_a_blank_record(self, root: Path) -> None:
        every = places(root)
        last = [place for place in every if place.path == every[0].path][-1]
        at = last.at + last.size + 8
        alter(last.path, at + 3, b"x")
        report = check(root)
        found = only(report, "unused-bytes")
        assert (found.severity, found.path, found.offset) == ("note", str(last.path), at + 3)
        assert len(report.findings) == 1

    def test_a_torn_tail_is_told_from_damage(self, root: Path) -> None:
        last = places(root)[-1]
        flip(last.path, last.at + 100)
        after_clean_stop = check(root)
        assert only(after_clean_stop, "torn-tail").severity == "error"
        (root / "abort").touch()
        report = check(root)
        found = only(report, "torn-tail")
        assert (found.severity, found.path, found.offset) == ("warning", str(last.path), last.at)
        assert "next start" in found.repair
        assert "log-damage" not in kinds(report)
        assert report.sound
        assert kinds(report, "warning") >= {"torn-tail", "queue-ahead", "index-ahead"}

    def test_a_missing_segment(self, root: Path) -> None:
        gone = sorted((root / "commitlog").iterdir())[1]
        gone.unlink()
        report = check(root)
        found = only(report, "segment-missing")
        assert f"{int(gone.name)} to {int(gone.name) + (64 << 10)}" in found.problem
        assert "queue-unit" in kinds(report)

    def test_a_truncated_segment(self, root: Path) -> None:
        hit = places(root)[50]
        os.truncate(hit.path, hit.at + 10)
        report = check(root)
        found = only(report, "segment-length")
        assert (found.path, found.offset) == (str(hit.path), hit.at + 10)
        assert "log-damage" in kinds(report)

    def test_records_larger_than_the_configured_limit_are_no_damage(self, tmp_path: Path) -> None:
        store = open_store(tmp_path, mapped_file_size_commit_log=256 << 10)
        for size in (9, 90_000, 10, 80_000):
            send(store, bytes(size))
        store.close()
        report = verify(str(tmp_path), config=small(tmp_path, max_message_size=10))
        assert (report.findings, report.records) == ([], 4)


FIELDS = [
    (0, "size"), (4, "magic"), (8, "body CRC"), (12, "queue id"), (16, "flag"), (20, "queue offset"),
    (28, "physical offset"), (36, "sysFlag"), (40, "born time"), (48, "born host"), (56, "store time"),
    (64, "store host"), (72, "reconsume times"), (76, "prepared transaction offset"), (84, "body length"),
    (88, "rest"),
]  # fmt: skip
UNSEEN_FIELDS = {
    "flag", "sysFlag", "born time", "born host", "store time", "store host", "reconsume times",
    "prepared transaction offset",
}  # fmt: skip


def field_of(byte: int) -> str:
    return [name for start, name in FIELDS if start <= byte][-1]


class TestWhatTheFormatCannotShow:
    """A flip of any bit of a record outside these is found; docs/store.md lists them."""

    @pytest.fixture
    def victim(self, tmp_path: Path) -> Path:
        root = tmp_path
        clock = ManualClock()
        store = open_store(root, FaultyDisk(really_sync=False), clock)
        for number in range(9):
            clock.now_ms += 61_234
            properties = f"UNIQ_KEY\x01U{number}\x02KEYS\x01k{number}\x02TAGS\x01TagA\x02other\x01value\x02"
            put(store, b"body%d" % number, properties=properties.encode(), tags_code=tags_code("TagA"))
            committed(store.commit())
        store.close()
        return root

    def test_flips_of_every_bit(self, victim: Path) -> None:
        hit = places(victim)[4]
        original = hit.path.read_bytes()[hit.at : hit.at + hit.size]
        other = original.index(b"other")
        unseen: dict[str, set[int]] = {}
        for byte in range(hit.size):
            for bit in range(8):
                alter(hit.path, hit.at + byte, bytes([original[byte] ^ 1 << bit]))
                if check(victim).sound:
                    name = "other property" if byte >= other else field_of(byte)
                    unseen.setdefault(name, set()).add((byte << 3) + bit)
            alter(hit.path, hit.at + byte, original[byte : byte + 1])
        assert check(victim).findings == []
        assert set(unseen) == UNSEEN_FIELDS | {"other property"}
        for name in ("flag", "born time", "born host", "store host", "reconsume times"):
            start = next(at for at, field in FIELDS if field == name)
            stop = next(at for at, _ in FIELDS if at > start)
            assert unseen[name] == set(range(start << 3, stop << 3))
        # Of sysFlag those bits show that move a field or make a plain message a prepared one.
        shown = set(range(36 << 3, 40 << 3)) - unseen["sysFlag"]
        assert {(((39 - (place >> 3)) << 3) + (place & 7)) for place in shown} == {2, 4, 5}
        # Of the store time, what changes the second that the index holds.
        assert max(unseen["store time"]) >> 3 == 63
        assert min(unseen["store time"]) >> 3 >= 62


class TestRecordAgainstUnit:
    """Topic, queue and tags of a record are outside its CRC: its unit tells who of the two is damaged."""

    @pytest.mark.parametrize("field", list(UNCOVERED_PLACES))
    def test_a_flip_in_the_record_is_named_there_and_not_in_its_queue(self, root: Path, field: str) -> None:
        hit = places(root)[222]
        damage_field(hit, field)
        report = check(root)
        found = only(report, "record-field")
        assert (found.severity, found.path, found.offset) == ("error", str(hit.path), hit.at)
        assert UNCOVERED_PLACES[field][0] in found.problem
        assert "leaves queue and index as they are" in found.repair
        assert report.errors == 1
        assert kinds(report, "warning") == set()

    @pytest.mark.parametrize("number", [0, 1, 2, 397, 398, 399])
    def test_the_first_and_the_last_of_a_queue(self, root: Path, number: int) -> None:
        hit = places(root)[number]
        damage_field(hit, "queue id")
        assert only(check(root), "record-field").offset == hit.at

    def test_a_flip_in_the_topic_to_one_that_there_is(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        placed = [send(store, topic=("TA", "TB")[n % 2], queue_id=n % 3).physical_offset for n in range(60)]
        store.close()
        path = tmp_path / "commitlog" / f"{0:020d}"
        at = path.read_bytes().index(b"TA", placed[30]) + 1
        alter(path, at, b"B")
        report = check(tmp_path)
        found = only(report, "record-field")
        assert (found.offset, report.errors, report.notes) == (placed[30], 1, 0)
        assert "topic: its unit is 5 of TA/0, it says 5 of TB/0" in found.problem

    def test_a_unit_that_points_at_another_record_is_itself_damaged(self, root: Path) -> None:
        every = places(root)
        other = every[120]
        assert other.queue_id == every[0].queue_id
        path, at = unit_place(root, every[0])
        there, other_at = unit_place(root, other)
        alter(path, at, there.read_bytes()[other_at : other_at + 20])
        report = check(root)
        assert kinds(report) == {"queue-unit"}
        assert (only(report, "queue-unit").path, only(report, "queue-unit").offset) == (str(path), at)

    def test_a_tags_code_that_no_flip_of_the_record_explains_is_damaged(self, root: Path) -> None:
        path, at = unit_place(root, places(root)[222])
        alter(path, at + 12, struct.pack(">q", tags_code("tag2") ^ 0x30000))
        found = only(check(root), "queue-unit")
        assert "tags code" in found.problem
        assert "rebuild" in found.repair

    def test_light_message_queues_point_at_records_of_others(self, root: Path) -> None:
        shutil.copytree(root / "consumequeue" / "T" / "1", root / "consumequeue" / "%LMQ%a" / "0")
        assert check(root).findings == []


class TestQueues:
    @pytest.mark.parametrize(("byte", "word"), [(7, "log position"), (11, "size"), (19, "tags code")])
    def test_a_flip_in_a_unit(self, root: Path, byte: int, word: str) -> None:
        hit = places(root)[222]
        path, at = unit_place(root, hit)
        flip(path, at + byte)
        report = check(root)
        found = only(report, "queue-unit")
        assert (found.severity, found.path, found.offset) == ("error", str(path), at)
        assert f"{word} " in found.problem
        assert "rebuild" in found.repair
        assert report.errors == 1

    def test_a_zeroed_unit(self, root: Path) -> None:
        path, at = unit_place(root, places(root)[7])
        alter(path, at, bytes(20))
        found = only(check(root), "queue-unit")
        assert (found.path, found.offset) == (str(path), at)
        assert "is empty" in found.problem

    def test_something_behind_the_last_unit(self, root: Path) -> None:
        *_, path = sorted((root / "consumequeue" / "T" / "0").iterdir())
        alter(path, 50 * 20 + 3, b"x")
        found = [finding for finding in check(root).findings if finding.kind == "queue-unit"]
        assert [(finding.path, finding.offset) for finding in found] == [
            (str(path), 34 * 20),
            (str(path), 1000),
        ]
        assert "units 134 to 149 of T/0: empty" in found[0].problem

    def test_a_unit_of_another_queues_record(self, root: Path) -> None:
        every = places(root)
        path, at = unit_place(root, every[0])
        other, place = unit_place(root, every[1])
        alter(path, at, other.read_bytes()[place : place + 20])
        assert (only(check(root), "queue-unit").path, only(check(root), "queue-unit").offset) == (
            str(path),
            at,
        )

    def test_a_missing_file_of_a_queue(self, root: Path) -> None:
        directory = root / "consumequeue" / "T" / "1"
        first, *_ = sorted(directory.iterdir())
        first.unlink()
        report = check(root)
        assert {finding.path for finding in report.findings} == {str(first)}
        assert report.errors == 100

    def test_a_short_queue(self, root: Path) -> None:
        *_, last = sorted((root / "consumequeue" / "T" / "2").iterdir())
        last.unlink()
        report = check(root)
        found = only(report, "queue-short")
        assert (found.severity, found.path, found.offset) == ("error", str(last), 0)
        assert "T/2 ends at 100" in found.problem
        assert report.errors == 1

    def test_a_deleted_queue_of_a_known_topic(self, root: Path) -> None:
        shutil.rmtree(root / "consumequeue" / "T" / "0")
        found = only(check(root), "queue-short")
        assert "T/0 ends at 0; 134 records" in found.problem

    def test_a_deleted_topic_is_no_damage(self, root: Path) -> None:
        shutil.rmtree(root / "consumequeue" / "T")
        (root / "config" / "topics.json").write_text('{"topicConfigTable":{"Other":{}}}')
        report = check(root)
        assert report.sound
        assert "400 records of topic T" in only(report, "topic-deleted").problem

    def test_a_topic_deleted_by_our_broker_and_made_again(self, root: Path) -> None:
        store = open_store(root)
        store.delete_topic("T")
        for _ in range(5):
            send(store, queue_id=1)
        store.close()
        report = check(root)
        assert report.findings == []
        assert report.units == 5

    def test_a_topic_deleted_by_our_broker_whose_entries_are_the_last(self, root: Path) -> None:
        store = open_store(root)
        store.delete_topic("T")
        send(store, topic="Other")  # without a key
        store.close()
        assert check(root).findings == []

    def test_a_topic_that_apache_deleted_and_made_again(self, root: Path) -> None:
        store = open_store(root)
        store.delete_topic("T")
        for _ in range(5):
            send(store, queue_id=1)
        store.close()
        (root / "config" / "deletedTopics.json").unlink()  # Apache's broker keeps no such table
        shutil.rmtree(root / "consumequeue" / "T" / "0", ignore_errors=True)
        found = [finding for finding in check(root).findings if "T/1" in finding.problem]
        assert found == []

    def test_a_file_of_another_length(self, root: Path) -> None:
        path = min((root / "consumequeue" / "T" / "0").iterdir())
        os.truncate(path, 1990)
        found = only(check(root), "queue-length")
        assert (found.path, found.offset) == (str(path), 1990)


class TestIndex:
    @pytest.mark.parametrize("byte", [3, 11])
    def test_a_flip_in_an_entry(self, root: Path, byte: int) -> None:
        path = index_files(root)[1]
        flip(path, ENTRIES_AT + 20 * 77 + byte)
        report = check(root)
        found = only(report, "index-entry")
        assert (found.path, found.offset) == (str(path), ENTRIES_AT + 20 * 77)
        assert "1 keys" in only(report, "index-gap").problem

    def test_a_zeroed_sector_of_entries(self, root: Path) -> None:
        path = index_files(root)[1]
        alter(path, 2048, bytes(512))
        report = check(root)
        inside = [finding.offset for finding in report.findings if finding.kind == "index-entry"]
        assert len(inside) >= 25
        assert all(2028 <= offset < 2560 for offset in inside)
        assert {finding.path for finding in report.findings if finding.kind == "index-entry"} == {str(path)}

    def test_a_wrong_time(self, root: Path) -> None:
        path = index_files(root)[0]
        flip(path, ENTRIES_AT + 20 * 9 + 15)
        found = only(check(root), "index-time")
        assert (found.path, found.offset) == (str(path), ENTRIES_AT + 20 * 9)

    def test_a_broken_chain(self, root: Path) -> None:
        path = index_files(root)[0]
        flip(path, ENTRIES_AT + 20 * 300 + 19)
        found = only(check(root), "index-chain")
        assert (found.path, found.offset) == (str(path), ENTRIES_AT + 20 * 300)

    def test_a_wrong_slot(self, root: Path) -> None:
        path = index_files(root)[0]
        flip(path, 40 + 4 * 33 + 3)
        found = only(check(root), "index-slot")
        assert (found.path, found.offset) == (str(path), 40 + 4 * 33)

    @pytest.mark.parametrize("number", [0, 1, -1])
    def test_a_zeroed_header(self, root: Path, number: int) -> None:
        path = index_files(root)[number]
        alter(path, 0, bytes(40))
        found = only(check(root), "index-header")
        assert (found.path, found.offset) == (str(path), 0)
        assert "counts no entries" in found.problem

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize(
        ("at", "word"),
        [(7, "begins at"), (14, "ends at"), (23, "begins at log position"), (31, "ends at log position"),
         (35, "header c"), (39, "index-slot")],
    )  # fmt: skip
    def test_a_flip_in_a_header(self, root: Path, number: int, at: int, word: str) -> None:
        path = index_files(root)[number]
        flip(path, at)
        found = [finding for finding in check(root).findings if finding.path == str(path)]
        assert {finding.severity for finding in found} >= {"error"}
        assert any(word in finding.problem or word == finding.kind for finding in found), found

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_wrong_time_of_a_first_entry(self, root: Path, number: int) -> None:
        path = index_files(root)[number]
        flip(path, ENTRIES_AT + 20 + 15)
        found = [finding for finding in check(root).findings if finding.kind == "index-time"]
        # Nothing says from when the first entry of the oldest file counts.
        assert [(each.path, each.offset) for each in found] == [(str(path), ENTRIES_AT + 20)] * number

    @pytest.mark.parametrize("entry", [0, 399])
    def test_something_where_no_entry_is(self, root: Path, entry: int) -> None:
        path = index_files(root)[-1]
        alter(path, ENTRIES_AT + 20 * entry + 3, b"x")
        found = only(check(root), "unused-bytes")
        assert (found.severity, found.path, found.offset) == ("note", str(path), ENTRIES_AT + 20 * entry + 3)

    @pytest.mark.parametrize(("at", "value"), [(24, -1), (32, 1 << 60)])
    def test_a_header_that_cannot_be_true(self, root: Path, at: int, value: int) -> None:
        path = index_files(root)[0]
        alter(path, at, struct.pack(">q", value))
        found = only(check(root), "index-header")
        assert (found.path, found.offset) == (str(path), 0)

    def test_a_record_that_apache_indexed_twice(self, tmp_path: Path) -> None:
        """Its recovery begins with the record at which the index ends, and does not pass it over."""
        store = build(tmp_path, 60, close=False)
        store.index.write()
        last = places(tmp_path)[-1]
        keys = [index_hash(f"T#{key}") for key in ("U00059", "k59", "all")]
        count = len(keys)
        store.index.files[-1].add(
            np.array(keys), np.full(count, last.position), np.full(count, 1_700_000_006_000)
        )
        store.close()
        report = check(tmp_path)
        found = only(report, "index-twice")
        assert (found.severity, report.errors, report.warnings) == ("note", 0, 0)
        assert "3 entries" in found.problem

    def test_a_missing_file(self, root: Path) -> None:
        index_files(root)[1].unlink()
        assert "399 keys of records" in only(check(root), "index-gap").problem

    def test_no_index_at_all(self, root: Path) -> None:
        shutil.rmtree(root / "index")
        found = only(check(root), "index-short")
        assert found.problem.startswith("1200 keys of records from log position 0 on")

    def test_a_file_of_another_length(self, root: Path) -> None:
        path = index_files(root)[0]
        os.truncate(path, 5000)
        found = only(check(root), "index-length")
        assert (found.path, found.offset) == (str(path), 5000)


class TestCheckpointAndTables:
    @pytest.mark.parametrize(
        ("damage", "severity", "offset"),
        [
            (lambda path: alter(path, 8, b"\xff" * 8), "error", 8),
            (lambda path: os.truncate(path, 100), "error", 100),
            (lambda path: alter(path, 0, struct.pack(">q", 1_900_000_000_000)), "warning", 0),
            (lambda path: path.unlink(), "warning", -1),
        ],
        ids=["no time", "short", "ahead of the log", "missing"],
    )
    def test_checkpoint(
        self, root: Path, damage: Callable[[Path], object], severity: str, offset: int
    ) -> None:
        damage(root / "checkpoint")
        found = only(check(root), "checkpoint")
        assert (found.severity, found.path, found.offset) == (severity, str(root / "checkpoint"), offset)

    def test_something_behind_the_times(self, root: Path) -> None:
        alter(root / "checkpoint", 1000, b"x")
        found = only(check(root), "unused-bytes")
        assert (found.severity, found.path, found.offset) == ("note", str(root / "checkpoint"), 1000)

    @pytest.mark.parametrize("text", ["", '{"topicConfigTable":{"T"', "[1]"])
    def test_a_damaged_table_with_a_good_backup(self, root: Path, text: str) -> None:
        path = root / "config" / "topics.json"
        path.write_text(text)
        found = only(check(root), "table")
        assert (found.severity, found.path) == ("error", str(path))
        assert ".bak" in found.repair

    def test_a_damaged_backup(self, root: Path) -> None:
        path = root / "config" / "topics.json.bak"
        path.write_text("{")
        report = check(root)
        assert (only(report, "table").severity, only(report, "table").path) == ("warning", str(path))
        assert report.sound

    def test_both_damaged(self, root: Path) -> None:
        for name in ("topics.json", "topics.json.bak"):
            (root / "config" / name).write_text("{")
        found = [finding for finding in check(root).findings if finding.kind == "table"]
        assert [finding.severity for finding in found] == ["error", "warning"]
        assert "by hand" in found[0].repair


class TestUnclean:
    def test_a_killed_store_has_warnings_only(self, tmp_path: Path) -> None:
        store = build(tmp_path, close=False)
        store.queues.write_dirty()
        filler(store, ManualClock(1_700_000_100_000), 400, 50)
        store.crash()
        report = check(tmp_path)
        assert report.sound
        assert not report.clean
        assert report.records == 450
        assert kinds(report, "warning") == {"queue-short", "index-short", "checkpoint"} - (
            {"checkpoint"} if (tmp_path / "checkpoint").exists() else set()
        )

    def test_it_is_sound_again_after_the_next_start(self, tmp_path: Path) -> None:
        build(tmp_path, close=False).crash()
        MessageStore.open(
            small(tmp_path), FaultyDisk(really_sync=False), ManualClock(1_700_000_900_000)
        ).close()
        assert check(tmp_path).findings == []


class TestLive:
    def test_what_is_still_in_memory_is_not_missed(self, tmp_path: Path) -> None:
        store = build(tmp_path, close=False)
        try:
            report = check(tmp_path)
        finally:
            store.close()
        assert report.live
        assert report.findings == []
        assert report.records == 400

    def test_a_store_that_moves_while_it_is_read(self, tmp_path: Path) -> None:
        """Messages arrive, queues and index are written, segments expire before every read of a file."""
        store = build(tmp_path, 1200, close=False)
        store.queues.write_dirty()
        store.index.write()
        clock = ManualClock(1_700_001_000_000)
        moves = deletions = 0

        class Moving(FaultyDisk):
            def pread(self, fd: int, length: int, offset: int) -> bytes:
                nonlocal moves, deletions
                moves += 1
                filler(store, clock, 1200 + moves * 3, 3)
                store.queues.write_dirty()
                store.index.write()
                if moves % 20 == 0 and len(store.log.segments) > 5:
                    drop_first_segment(store)
                    deletions += 1
                return super().pread(fd, length, offset)

        try:
            report = verify(str(tmp_path), config=small(tmp_path), disk=Moving(), pause=lambda _seconds: None)
        finally:
            store.close()
        assert moves > 40
        assert deletions > 3
        assert report.live
        assert report.findings == []
        assert report.records > 400
        assert check(tmp_path).findings == []

    def test_a_broker_that_is_about_to_make_its_first_segment(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)

        class Late(FaultyDisk):
            looked = False

            def listdir(self, path: str) -> list[str]:
                names = super().listdir(path)
                if path == str(tmp_path / "commitlog") and not self.looked:
                    self.looked = True
                    send(store)
                    return []
                return names

        try:
            report = verify(str(tmp_path), disk=Late())  # no configuration says how long segments are
        finally:
            store.close()
        assert report.findings == []

    @pytest.mark.parametrize("directory", ["index", "consumequeue/T/1"])
    def test_a_list_of_files_that_grew_while_it_was_read(self, tmp_path: Path, directory: str) -> None:
        """Directories are read in no order: a list may have the newest file and lack the two before."""
        store = build(tmp_path, 900, close=False)
        store.queues.write_dirty()
        store.index.write()

        class Growing(FaultyDisk):
            torn = False

            def listdir(self, path: str) -> list[str]:
                names = super().listdir(path)
                if path == str(tmp_path / directory) and not self.torn:
                    self.torn = True
                    assert len(names) > 2
                    del names[-3:-1]
                return names

        disk = Growing()
        try:
            report = verify(str(tmp_path), config=small(tmp_path), disk=disk, pause=lambda _seconds: None)
        finally:
            store.close()
        assert disk.torn
        assert report.findings == []

    def test_the_lock_of_another_process_is_seen_and_left_alone(self, root: Path) -> None:
        code = (
            "import sys, fcntl; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 0, 0); "
            "print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(root / "lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert check(root).live
            holder.communicate(b"")
        assert not check(root).live

    def test_damage_in_the_middle_is_named_all_the_same(self, tmp_path: Path) -> None:
        store = build(tmp_path, close=False)
        try:
            hit = places(tmp_path)[20]
            flip(hit.path, hit.at + 100)
            found = only(check(tmp_path), "log-damage")
        finally:
            store.crash()
        assert (found.path, found.offset) == (str(hit.path), hit.at)

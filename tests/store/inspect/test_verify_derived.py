"""`verify` reports damage in queues, index, checkpoint and tables with file and position.

It distinguishes a damaged record from a damaged unit.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.verifying import check, kinds, only
from tests.store.kit import delete_topic, open_store, send, send_all, small
from tests.store.planted import (
    ENTRIES_AT,
    UNCOVERED_PLACES,
    alter,
    build,
    damage_field,
    flip,
    index_files,
    places,
    unit_place,
)

from cometmq.protocol.properties.values import index_hash, tags_code
from cometmq.store import ManualClock, MessageStore
from cometmq.store.inspect import queue_check
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.verify import verify


class TestRecordAgainstUnit:
    """A record's topic, queue and tags are outside its CRC; its unit shows which of the two is damaged."""

    @pytest.mark.parametrize("field", list(UNCOVERED_PLACES))
    def test_a_flip_in_the_record_is_named_there_and_not_in_its_queue(self, root: Path, field: str) -> None:
        hit = places(root)[222]
        damage_field(hit, field)
        report = check(root)
        found = only(report, "record-field", hit.path, hit.at, "error")
        assert UNCOVERED_PLACES[field][0] in found.problem
        assert "leaves queue and index as they are" in found.repair
        assert report.errors == 1
        assert kinds(report, "warning") == set()

    @pytest.mark.parametrize("number", [0, 1, 2, 397, 398, 399])
    def test_the_first_and_the_last_of_a_queue(self, root: Path, number: int) -> None:
        hit = places(root)[number]
        damage_field(hit, "queue id")
        assert only(check(root), "record-field").offset == hit.at

    def test_a_flip_in_the_topic_to_one_that_there_is(self, tmp_path: Path, store: MessageStore) -> None:
        placed = [send(store, topic=("TA", "TB")[n % 2], queue_id=n % 3).physical_offset for n in range(60)]
        store.close()
        path = tmp_path / "commitlog" / f"{0:020d}"
        at = path.read_bytes().index(b"TA", placed[30]) + 1
        alter(path, at, b"B")
        report = check(tmp_path)
        found = only(report, "record-field")
        assert (found.offset, report.errors, report.notes) == (placed[30], 1, 0)
        assert "topic: its unit is 5 of TA/0, the record has 5 of TB/0" in found.problem

    def test_a_unit_that_points_at_another_record_is_itself_damaged(self, root: Path) -> None:
        every = places(root)
        other = every[120]
        assert other.queue_id == every[0].queue_id
        path, at = unit_place(root, every[0])
        there, other_at = unit_place(root, other)
        alter(path, at, there.read_bytes()[other_at : other_at + 20])
        report = check(root)
        assert kinds(report) == {"queue-unit"}
        only(report, "queue-unit", path, at)

    def test_a_tags_code_that_no_flip_of_the_record_explains_is_damaged(self, root: Path) -> None:
        path, at = unit_place(root, places(root)[222])
        alter(path, at + 12, struct.pack(">q", tags_code("tag2") ^ 0x30000))
        found = only(check(root), "queue-unit")
        assert "tags code" in found.problem
        assert "rebuild" in found.repair

    def test_many_wrong_tags_codes_are_searched_for_flipped_bits_a_few_times_only(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        every = places(root)
        for place in every:
            path, at = unit_place(root, place)
            unit = bytearray(path.read_bytes()[at + 12 : at + 20])
            unit[5] ^= 0x30
            alter(path, at + 12, bytes(unit))
        searched: list[bytes] = []
        real = queue_check._tags_flipped  # noqa: SLF001  what takes the time

        def counting(properties: bytes, code: int) -> bool:
            searched.append(properties)
            return real(properties, code)

        monkeypatch.setattr(queue_check, "_tags_flipped", counting)
        monkeypatch.setattr(queue_check, "_MAX_FAILED_SEARCHES", 5)
        report = check(root)
        assert (report.errors, len(searched)) == (len(every), 5)
        rebuild(root)
        assert check(root).errors == 0

    def test_light_message_queues_point_at_records_of_others(self, root: Path) -> None:
        shutil.copytree(root / "consumequeue" / "T" / "1", root / "consumequeue" / "%LMQ%a" / "0")
        assert check(root).findings == []


class TestQueues:
    @staticmethod
    def make_again(root: Path) -> None:
        store = open_store(root)
        delete_topic(store, "T")
        send_all(store, [b"hello"] * 5, queue_id=1)
        store.close()

    @pytest.mark.parametrize(("byte", "word"), [(7, "log position"), (11, "size"), (19, "tags code")])
    def test_a_flip_in_a_unit(self, root: Path, byte: int, word: str) -> None:
        hit = places(root)[222]
        path, at = unit_place(root, hit)
        flip(path, at + byte)
        report = check(root)
        found = only(report, "queue-unit", path, at, "error")
        assert f"{word} " in found.problem
        assert "rebuild" in found.repair
        assert report.errors == 1

    def test_a_zeroed_unit(self, root: Path) -> None:
        path, at = unit_place(root, places(root)[7])
        alter(path, at, bytes(20))
        found = only(check(root), "queue-unit", path, at)
        assert "is empty" in found.problem

    def test_something_behind_the_last_unit(self, root: Path) -> None:
        *_, path = sorted((root / "consumequeue" / "T" / "0").iterdir())
        alter(path, 50 * 20 + 3, b"x")
        found = [finding for finding in check(root).findings if finding.kind == "queue-unit"]
        assert [(each.path, each.offset) for each in found] == [(str(path), at) for at in (34 * 20, 1000)]
        assert "units 134 to 149 of T/0: empty" in found[0].problem

    def test_a_unit_of_another_queues_record(self, root: Path) -> None:
        every = places(root)
        path, at = unit_place(root, every[0])
        other, place = unit_place(root, every[1])
        alter(path, at, other.read_bytes()[place : place + 20])
        only(check(root), "queue-unit", path, at)

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
        found = only(report, "queue-short", last, 0, "error")
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
        self.make_again(root)
        report = check(root)
        assert report.findings == []
        assert report.units == 5

    def test_a_topic_deleted_by_our_broker_whose_entries_are_the_last(self, root: Path) -> None:
        store = open_store(root)
        delete_topic(store, "T")
        send(store, topic="Other")  # a message without a key
        store.close()
        assert check(root).findings == []

    def test_a_topic_that_apache_deleted_and_made_again(self, root: Path) -> None:
        self.make_again(root)
        (root / "config" / "deletedTopics.json").unlink()  # Apache's broker has no such table
        shutil.rmtree(root / "consumequeue" / "T" / "0", ignore_errors=True)
        found = [finding for finding in check(root).findings if "T/1" in finding.problem]
        assert found == []

    def test_a_file_of_another_length(self, root: Path) -> None:
        path = min((root / "consumequeue" / "T" / "0").iterdir())
        os.truncate(path, 1990)
        only(check(root), "queue-length", path, 1990)


def delayed(root: Path, levels: str) -> list[int]:
    """Build a store with 60 delayed messages on three levels; return their delivery times."""
    clock = ManualClock()
    store = open_store(root, FaultyDisk(really_sync=False), clock, message_delay_level=levels)
    delays = store.config.delay_levels_ms
    for number in range(60):
        clock.now_ms += 777
        level = number % 3 + 1
        text = b"DELAY\x01%d\x02TAGS\x01t" % level
        delay = delays[level]
        send(store, topic="SCHEDULE_TOPIC_XXXX", queue_id=level - 1, properties=text, delay_ms=delay)
    store.close()
    return times(root)


def times(root: Path) -> list[int]:
    store = open_store(root, FaultyDisk(really_sync=False))
    queues = [store.queues.get_or_make("SCHEDULE_TOPIC_XXXX", level) for level in range(3)]
    found = [unit[3] for queue in queues for unit in queue.units(0, queue.max_offset)]
    store.close()
    return found


def test_delays_of_other_levels_are_no_damage(tmp_path: Path) -> None:
    before = delayed(tmp_path, "1s 7s 3m")
    assert len(before) == 60
    report = check(tmp_path)
    assert [finding.severity for finding in report.findings] == ["note"]
    assert "40 delayed messages have delays" in only(report, "delays").problem
    rebuild(str(tmp_path), config=small(tmp_path))
    assert times(tmp_path) == before
    assert verify(str(tmp_path), config=small(tmp_path, message_delay_level="1s 7s 3m")).findings == []


@pytest.mark.parametrize("levels", ["1s 5s 10s", "1s 7s 3m"])
@pytest.mark.parametrize("bit", [0, 9, 17, 40, 63])
def test_a_flip_in_a_time_of_delivery_is_damage(tmp_path: Path, levels: str, bit: int) -> None:
    delayed(tmp_path, levels)
    path = tmp_path / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "1" / f"{0:020d}"
    byte = 5 * 20 + 19 - bit // 8
    alter(path, byte, bytes([path.read_bytes()[byte] ^ 1 << bit % 8]))
    only(check(tmp_path), "queue-unit", path, 5 * 20, "error")


def entry(number: int) -> int:
    """Return the first byte of an entry in an index file."""
    return ENTRIES_AT + 20 * number


# Damages: the number of the index file, the kind and position of the finding, and the damaging function.
INDEX_DAMAGE: dict[str, tuple[int, str, int, Callable[[Path], object]]] = {
    "a wrong time": (0, "index-time", entry(9), lambda path: flip(path, entry(9) + 15)),
    "a broken chain": (0, "index-chain", entry(300), lambda path: flip(path, entry(300) + 19)),
    "a wrong slot": (0, "index-slot", 40 + 4 * 33, lambda path: flip(path, 40 + 4 * 33 + 3)),
    "a negative end": (0, "index-header", 0, lambda path: alter(path, 24, b"\xff" * 8)),
    "a huge slot count": (0, "index-header", 0, lambda path: alter(path, 32, b"\x10" + bytes(7))),
    "before the first": (-1, "unused-bytes", entry(0) + 3, lambda path: alter(path, entry(0) + 3, b"x")),
    "behind the last": (-1, "unused-bytes", entry(399) + 3, lambda path: alter(path, entry(399) + 3, b"x")),
    "another length": (0, "index-length", 5000, lambda path: os.truncate(path, 5000)),
}


class TestIndex:
    @pytest.mark.parametrize("byte", [3, 11])
    def test_a_flip_in_an_entry(self, root: Path, byte: int) -> None:
        path = index_files(root)[1]
        flip(path, entry(77) + byte)
        report = check(root)
        only(report, "index-entry", path, entry(77))
        assert "1 keys" in only(report, "index-gap").problem

    def test_a_zeroed_sector_of_entries(self, root: Path) -> None:
        path = index_files(root)[1]
        alter(path, 2048, bytes(512))
        report = check(root)
        inside = [finding.offset for finding in report.findings if finding.kind == "index-entry"]
        assert len(inside) >= 25
        assert all(2028 <= offset < 2560 for offset in inside)
        assert {finding.path for finding in report.findings if finding.kind == "index-entry"} == {str(path)}

    @pytest.mark.parametrize("name", INDEX_DAMAGE)
    def test_damage_that_is_named_once(self, root: Path, name: str) -> None:
        number, kind, offset, damage = INDEX_DAMAGE[name]
        path = index_files(root)[number]
        damage(path)
        only(check(root), kind, path, offset, "note" if kind == "unused-bytes" else "")

    @pytest.mark.parametrize("number", [0, 1, -1])
    def test_a_zeroed_header(self, root: Path, number: int) -> None:
        path = index_files(root)[number]
        alter(path, 0, bytes(40))
        found = only(check(root), "index-header", path, 0)
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
        flip(path, entry(1) + 15)
        found = [finding for finding in check(root).findings if finding.kind == "index-time"]
        # The first valid entry of the oldest file is not recorded anywhere.
        assert [(each.path, each.offset) for each in found] == [(str(path), entry(1))] * number

    def test_a_record_that_apache_indexed_twice(self, tmp_path: Path) -> None:
        """The recovery of Apache's broker begins with the last indexed record and indexes it again."""
        store = build(tmp_path, 60, close=False)
        store.index.write()
        last = places(tmp_path)[-1]
        keys = [index_hash(f"T#{key}") for key in ("U00059", "k59", "all")]
        store.index.files[-1].add(np.array(keys), np.full(3, last.position), np.full(3, 1_700_000_006_000))
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
        only(check(root), "unused-bytes", root / "checkpoint", 1000, "note")

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

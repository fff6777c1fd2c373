"""`verify` reports nothing for a sound store and every damage of a log with its position; it never writes."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.verifying import check, kinds, only
from tests.store.kit import by_key, drop_first_segment, everything, open_store, quick, send, small
from tests.store.planted import alter, extract_golden, flip, places, snapshot, unit_place

from cometmq.errors import StoreError
from cometmq.protocol.properties.values import tags_code
from cometmq.protocol.record.one import decode_record
from cometmq.store import ManualClock
from cometmq.store.inspect.verify import verify
from cometmq.store.recovery.store_layout import read_layout

WRITING = {"pwrite", "fdatasync", "fsync_dir", "reserve", "truncate", "rename", "unlink", "makedirs", "open"}


class TestSoundStores:
    def test_ours(self, sound: Path) -> None:
        report = check(sound)
        assert report.findings == []
        assert (report.sound, report.clean, report.live) == (True, True, False)
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
        found = read_layout(FaultyDisk(), str(sound)).config
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

    @pytest.mark.parametrize("stop", ["clean", "unclean"])
    def test_records_with_the_crc_property_of_5x(self, tmp_path: Path, stop: str) -> None:
        """enabledAppendPropCRC adds a last property with a CRC of the record before it, digits reversed."""
        store = quick(tmp_path)
        texts = [b"TAGS\x01t%d\x02KEYS\x01k%d\x02__CRC32#\x010000000000\x02" % (n % 2, n) for n in range(200)]
        sent = [
            send(store, b"%d:" % n + bytes(n), properties=text, tags_code=tags_code(f"t{n % 2}"))
            for n, text in enumerate(texts)
        ]
        store.close()
        for message in sent:
            path = tmp_path / "commitlog" / f"{message.physical_offset // 65536 * 65536:020d}"
            at = message.physical_offset % 65536
            record = path.read_bytes()[at : at + message.size]
            assert record[-20:] == b"__CRC32#\x010000000000\x02"
            digits = f"{zlib.crc32(record[:-20]) & 0x7FFFFFFF:010d}"[::-1].encode()
            alter(path, at + message.size - 11, digits)
        if stop == "unclean":
            shutil.rmtree(tmp_path / "consumequeue")
            shutil.rmtree(tmp_path / "index")
            (tmp_path / "abort").touch()
            quick(tmp_path).close()
        report = check(tmp_path)
        assert (report.findings, report.records, report.units, report.index_entries) == ([], 200, 200, 200)
        store = quick(tmp_path, check_crc_on_read=True)
        assert everything(store) == [b"%d:" % n + bytes(n) for n in range(200)]
        assert store.get_messages("T", 0, 0, 32, filter={tags_code("t1")}).next_begin_offset > 60
        (found,) = by_key(store, "T", "k77")
        message = decode_record(found)
        assert (message.tags, message.keys, len(message.properties["__CRC32#"])) == ("t1", ("k77",), 10)

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


def end_of_first(root: Path) -> tuple[Path, int]:
    """Return the first segment and the end of its records."""
    every = places(root)
    last = [place for place in every if place.path == every[0].path][-1]
    return last.path, last.at + last.size


class TestLog:
    @pytest.mark.parametrize(
        ("byte", "word"),
        [(0, "size"), (4, "magic"), (8, "body CRC"), (30, "physical offset"), (84, "body length"),
         (100, "CRC")],
    )  # fmt: skip
    def test_a_flip_in_the_middle(self, root: Path, byte: int, word: str) -> None:
        hit = places(root)[200]
        flip(hit.path, hit.at + byte)
        report = check(root)
        found = only(report, "log-damage", hit.path, hit.at, "error")
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
        found = only(report, "log-damage", first.path, first.at)
        assert "begins with zeros" in found.problem
        assert report.records == 395

    def test_a_segment_that_ends_without_its_blank_record(self, root: Path) -> None:
        path, at = end_of_first(root)
        flip(path, at + 4)
        only(check(root), "log-damage", path, at)

    def test_something_behind_a_blank_record(self, root: Path) -> None:
        path, at = end_of_first(root)
        alter(path, at + 11, b"x")
        report = check(root)
        only(report, "unused-bytes", path, at + 11, "note")
        assert len(report.findings) == 1

    def test_a_torn_tail_is_told_from_damage(self, root: Path) -> None:
        last = places(root)[-1]
        flip(last.path, last.at + 100)
        only(check(root), "torn-tail", last.path, last.at, "error")
        (root / "abort").touch()
        report = check(root)
        found = only(report, "torn-tail", last.path, last.at, "warning")
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
        only(report, "segment-length", hit.path, hit.at + 10)
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
    """A flip of any other bit of a record is reported; docs/store.md lists these exceptions."""

    @pytest.fixture
    def victim(self, tmp_path: Path) -> Path:
        clock = ManualClock()
        store = quick(tmp_path, clock)
        for number in range(9):
            clock.now_ms += 61_234
            properties = f"UNIQ_KEY\x01U{number}\x02KEYS\x01k{number}\x02TAGS\x01TagA\x02other\x01value\x02"
            send(store, b"body%d" % number, properties=properties.encode(), tags_code=tags_code("TagA"))
        store.close()
        return tmp_path

    @pytest.mark.slow("verifies a store for each bit of a record")
    @pytest.mark.representative
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
        # Visible bits of sysFlag are those that move a field or turn a plain message into a prepared one.
        shown = set(range(36 << 3, 40 << 3)) - unseen["sysFlag"]
        assert {(((39 - (place >> 3)) << 3) + (place & 7)) for place in shown} == {2, 4, 5}
        # A change of the store time is visible if it changes the second that the index contains.
        assert max(unseen["store time"]) >> 3 == 63
        assert min(unseen["store time"]) >> 3 >= 62

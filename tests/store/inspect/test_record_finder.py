"""Look-ups of records by position, id, key and range, and counts of a store's content."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import START_MS, drop_first_segment, open_store, send, small
from tests.store.planted import alter, build, extract_golden, filler, flip, index_files, places

from cometmq.errors import StoreError
from cometmq.protocol.record.one import decode_record
from cometmq.store import Disk, ManualClock
from cometmq.store.inspect.record_finder import RecordFinder
from cometmq.store.inspect.stats import store_stats
from cometmq.store.tables.min_offsets import MinOffsets

HOUR_MS = 3_600_000


def finder(root: Path) -> RecordFinder:
    return RecordFinder(str(root), config=small(root))


class TestFinding:
    def test_by_position(self, sound: Path) -> None:
        place = places(sound)[123]
        with finder(sound) as find:
            found = find.at(place.position)
            assert found is not None
            assert (found.queue_id, found.queue_offset) == (place.queue_id, place.queue_offset)
            assert found.keys == ("k123", "all")
            assert find.at(place.position + 1) is None
            assert find.at(1 << 50) is None
            assert find.at(-1) is None

    def test_by_offset_id_and_by_unique_key(self, tmp_path: Path) -> None:
        extract_golden(tmp_path)
        with RecordFinder(str(tmp_path)) as find:
            every = list(find.of_log())
            assert len(every) == 204
            for message in every[::20]:
                assert find.by_id(message.offset_msg_id) == [message]
                assert message in find.by_id(message.msg_id)

    @pytest.mark.parametrize("scan", [False, True])
    def test_by_key(self, sound: Path, scan: bool) -> None:
        with finder(sound) as find:
            for number in (0, 132, 133, 134, 399):
                (found,) = find.by_key(f"k{number}", "T", scan=scan)
                assert bytes(found.body).startswith(b"%d:" % number)
            assert [m.physical_offset for m in find.by_key("all", None, scan=scan)] == [
                place.position for place in places(sound)
            ]
            with pytest.raises(StoreError, match="topic Other does not exist"):
                find.by_key("k1", "Other", scan=scan)
            assert find.by_key("k4000", None, scan=scan) == []

    def test_by_key_on_a_running_store_whose_index_lags(self, tmp_path: Path) -> None:
        store = build(tmp_path, close=False)
        store.index.write()
        filler(store, ManualClock(START_MS + 100_000), 400, 20)
        with finder(tmp_path) as find:
            assert [len(find.by_key(f"k{number}", "T")) for number in (3, 399, 400, 419)] == [1, 1, 1, 1]
            assert len(find.by_key("all", None)) == 420

    @pytest.mark.parametrize("lost", ["all", "first"])
    def test_by_key_without_its_index_file(self, root: Path, lost: str) -> None:
        for path in index_files(root)[: None if lost == "all" else 1]:
            path.unlink()
        with finder(root) as find:
            assert len(find.by_key("k5", "T")) == 1

    def test_a_damaged_entry_hides_a_key_from_the_index_but_not_from_a_scan(self, root: Path) -> None:
        for entry in (1, 2, 3):
            flip(index_files(root)[0], 440 + 20 * entry + 2)
        with finder(root) as find:
            assert find.by_key("k0", "T") == []
            assert len(find.by_key("k0", "T", scan=True)) == 1

    def test_a_queue_from_an_offset_on(self, root: Path) -> None:
        with finder(root) as find:
            found = list(islice(find.of_queue("T", 1, 95), 10))
            assert [message.queue_offset for message in found] == list(range(95, 105))
            assert {message.queue_id for message in found} == {1}
            with pytest.raises(StoreError, match="queue T/9 does not exist"):
                next(find.of_queue("T", 9))

    def test_the_log_from_a_position_on_leaves_damage_out(self, root: Path) -> None:
        every = places(root)
        alter(every[51].path, every[51].at + 4, b"????")
        with finder(root) as find:
            found = [message.physical_offset for message in islice(find.of_log(every[50].position), 3)]
        assert found == [every[50].position, every[52].position, every[53].position]

    def test_why_there_is_no_message(self, root: Path) -> None:
        store = open_store(root)
        expired = store.log.segments[0]
        drop_first_segment(store)
        store.close()
        every = places(root)
        alter(every[51].path, every[51].at + 8, b"????")
        end = int(every[-1].path.name) + (64 << 10)
        with finder(root) as find:
            for position, word in (
                (expired, "the log begins at 65536"),
                (end + 7, f"the last segment ends at {end}"),
                (every[50].position + 1, f"inside the record that begins at {every[50].position}"),
                (every[51].position, "body CRC"),
                (every[-1].position + every[-1].size, "begins with zeros"),
            ):
                assert find.at(position) is None
                assert word in find.why_not_at(position)
            assert "is no offset id" in find.why_not_id("nobody")
            gone = every[51].position.to_bytes(8, "big").hex()
            assert f"log position {every[51].position}: body CRC" in find.why_not_id(
                "7F00000100002A9F" + gone
            )
            there = every[53].position.to_bytes(8, "big").hex()
            assert "has the offset id 7F000001" in find.why_not_id("0A00000100002A9F" + there)

    def test_nothing_is_written(self, sound: Path) -> None:
        disk = FaultyDisk()
        with RecordFinder(str(sound), config=small(sound), disk=disk) as find:
            find.by_key("k1", None)
        store_stats(str(sound), config=small(sound), disk=disk)
        assert disk.calls["*"] == 0


class TestStats:
    def test_counts_equal_the_log(self, sound: Path) -> None:
        stats = store_stats(str(sound), config=small(sound))
        every = places(sound)
        assert (stats.messages, stats.bytes) == (400, sum(place.size for place in every))
        for queue in stats.queues:
            mine = [place for place in every if place.queue_id == queue.queue_id]
            assert (queue.min_offset, queue.max_offset, queue.messages) == (0, len(mine), len(mine))
            assert queue.bytes == sum(place.size for place in mine)
            times = [decode_record(place.path.read_bytes(), place.at).store_timestamp_ms for place in mine]
            assert (queue.oldest_ms, queue.newest_ms) == (min(times), max(times))
        (topic,) = stats.topics
        assert (topic.topic, topic.queues, topic.messages, topic.bytes) == ("T", 3, 400, stats.bytes)
        assert (stats.index_entries, stats.segments) == (1200, len(list((sound / "commitlog").iterdir())))
        assert stats.clean

    def test_expired_messages_do_not_count(self, root: Path) -> None:
        store = open_store(root)
        drop_first_segment(store)
        store.close()
        stats = store_stats(str(root), config=small(root))
        left = places(root)
        assert (stats.messages, stats.bytes) == (len(left), sum(place.size for place in left))
        assert all(queue.min_offset > 0 for queue in stats.queues)
        assert stats.first_position == 64 << 10

    def test_purged_messages_do_not_count(self, root: Path) -> None:
        floors = MinOffsets(Disk(), str(root))
        floors.set_offsets("T", {1: 100})
        floors.save()
        stats = store_stats(str(root), config=small(root))
        assert [(queue.min_offset, queue.messages) for queue in stats.queues] == [
            (0, 134),
            (100, 33),
            (0, 133),
        ]
        assert stats.messages == 300

    def test_the_outlook_of_retention(self, tmp_path: Path) -> None:
        clock = ManualClock(START_MS)
        store = open_store(tmp_path, FaultyDisk(really_sync=False), clock)
        for _ in range(49):
            send(store, bytes(4000))
            clock.advance(1800)
        store.close()
        segments = sorted((tmp_path / "commitlog").iterdir())
        now = min(path.stat().st_mtime_ns // 1_000_000 for path in segments)
        config = small(tmp_path, file_reserved_time=2)
        later = store_stats(str(tmp_path), config=config, clock=ManualClock(now + 3 * HOUR_MS)).outlook
        sooner = store_stats(str(tmp_path), config=config, clock=ManualClock(now + HOUR_MS)).outlook
        assert (sooner.expired_segments, later.expired_segments) == (0, len(segments) - 1)
        assert sooner.next_expiry_ms == sooner.oldest_segment_ms + 2 * HOUR_MS
        assert later.bytes_per_day == sum(place.size for place in places(tmp_path))
        assert 0 < later.disk_used_ratio <= 1
        assert later.full_in_days >= 0

    def test_an_empty_store(self, tmp_path: Path) -> None:
        open_store(tmp_path).close()
        stats = store_stats(str(tmp_path), config=small(tmp_path))
        assert (stats.messages, stats.topics, stats.outlook.next_expiry_ms) == (0, [], -1)

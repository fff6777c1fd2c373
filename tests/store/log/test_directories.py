"""A commit log in several directories: placement of segments, and access by every part of the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import everything, in_place, open_store, send, small

from cometmq.errors import ConfigError, StoreError
from cometmq.store import ManualClock, MessageStore
from cometmq.store.base.disk import DiskUsage
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.record_finder import RecordFinder
from cometmq.store.inspect.stats import store_stats
from cometmq.store.inspect.verify import verify

SEGMENT = 64 << 10
NOW = 1_700_000_000_000


class Partitions(FaultyDisk):
    """A disk on which every directory is a partition with its own usage."""

    def __init__(self) -> None:
        super().__init__(really_sync=False)
        self.percent: dict[str, int] = {}

    def usage(self, path: str) -> DiskUsage:
        used = self.percent.get(path, 10)
        return DiskUsage(100, used, 100 - used)


def fill(store: MessageStore, segments: int, start: int = 0) -> int:
    """Append numbered messages until the log has `segments` segments; return the next number."""
    number = start
    while len(store.log.segments) < segments:
        send(store, b"%06d" % number + bytes(2000), properties=b"KEYS\x01k%d" % number)
        number += 1
    return number


def numbers(store: MessageStore) -> list[int]:
    return [int(body[:6]) for body in everything(store)]


def segments_in(directory: Path) -> list[int]:
    return sorted(int(path.name) // SEGMENT for path in directory.iterdir())


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return {"store_path_commit_log": f"{tmp_path / 'a'}, {tmp_path / 'b'}"}


def test_segments_take_turns_and_are_found_by_every_start(tmp_path, paths):
    store = open_store(tmp_path / "store", **paths)
    count = fill(store, 6)
    store.close()
    # The next segment may already be reserved.
    assert segments_in(tmp_path / "a")[:3] == [0, 2, 4]
    assert segments_in(tmp_path / "b")[:3] == [1, 3, 5]
    for clean in (True, False):
        if not clean:
            (tmp_path / "store" / "abort").touch()
        again = open_store(tmp_path / "store", **paths)
        assert again.recovered.clean is clean
        assert numbers(again) == list(range(count))
        count = fill(again, len(again.log.segments) + 1, count)
        again.close()


def test_the_tools_read_all_directories(tmp_path, paths):
    store = open_store(tmp_path / "store", **paths)
    count = fill(store, 5)
    store.close()
    config = small(tmp_path / "store", **paths)
    assert verify(str(tmp_path / "store"), config=config).findings == []
    assert store_stats(str(tmp_path / "store"), config=config).topics[0].messages == count
    shutil.rmtree(tmp_path / "store" / "consumequeue")
    assert rebuild(str(tmp_path / "store"), config=config).records == count
    given = verify(str(tmp_path / "store"), commit_log_dir=paths["store_path_commit_log"])
    assert given.findings == []
    with RecordFinder(str(tmp_path / "store"), config=config) as finder:
        assert [each.body[:6] for each in finder.by_key(f"k{count - 1}", "T")] == [b"%06d" % (count - 1)]


def test_a_full_directory_gets_no_new_segment_until_all_are_full(tmp_path, paths):
    disk = Partitions()
    store = open_store(tmp_path / "store", disk, **paths)
    disk.percent[str(tmp_path / "b")] = 86
    in_place(store.fullness.measure())
    fill(store, 4)
    assert segments_in(tmp_path / "b") == []
    assert store.fullness.log_ratio == pytest.approx(0.10)  # the ratio of the emptiest partition
    disk.percent[str(tmp_path / "a")] = 87
    in_place(store.fullness.measure())
    fill(store, 8)
    assert segments_in(tmp_path / "b") != []


def test_read_only_directories_are_served_and_emptied_but_get_nothing_new(tmp_path, paths):
    store = open_store(tmp_path / "store", **paths)
    count = fill(store, 6)
    store.close()
    before = segments_in(tmp_path / "a")
    changed = {**paths, "read_only_commit_log_store_paths": str(tmp_path / "a")}
    clock = ManualClock(NOW)
    store = open_store(tmp_path / "store", clock=clock, **changed)
    count = fill(store, 10, count)
    assert segments_in(tmp_path / "a") == before
    assert numbers(store) == list(range(count))
    clock.advance(1 << 35)  # every segment has expired
    store.retention.delete_now()
    in_place(store.retention.log_cycle())
    assert segments_in(tmp_path / "a") == []
    assert len(store.log.segments) == 1


def test_a_segment_in_two_directories_stops_the_start(tmp_path, paths):
    store = open_store(tmp_path / "store", **paths)
    fill(store, 3)
    store.close()
    shutil.copy(tmp_path / "a" / f"{0:020d}", tmp_path / "b")
    with pytest.raises(StoreError, match="more than one directory"):
        open_store(tmp_path / "store", **paths)


def test_nowhere_to_write_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one directory"):
        small(tmp_path, store_path_commit_log="/a", read_only_commit_log_store_paths="/a,/b")

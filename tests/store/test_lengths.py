"""A store that is opened with other file lengths than its own refuses, and not a byte of it changes; a file
that damage has cut short gets its length back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.store.kit import HOST, START_MS, everything, open_store, send

from cometmq.errors import StoreError
from cometmq.store import ManualClock, MessageStore, StoreConfig
from cometmq.store.config import SMALL_FILES
from cometmq.testing.faulty_disk import FaultyDisk

OTHER = {
    "log": {"mapped_file_size_commit_log": 128 << 10},
    "queues": {"mapped_file_size_consume_queue": 4000},
    "both": {"mapped_file_size_commit_log": 128 << 10, "mapped_file_size_consume_queue": 4000},
    "far larger": {"mapped_file_size_commit_log": 64 << 20, "mapped_file_size_consume_queue": 60_000},
    "no multiple": {"mapped_file_size_commit_log": 100_000, "mapped_file_size_consume_queue": 3000},
}


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def fill(root: Path, count: int, size: int = 600, **changes: Any) -> list[bytes]:
    store = open_store(root, FaultyDisk(really_sync=False), **changes)
    sent = [b"%d:" % n + bytes(size) for n in range(count)]
    for n, body in enumerate(sent):
        send(store, body, queue_id=n % 2)
    store.close()
    return sent


def refuses(root: Path, **changes: Any) -> str:
    before = snapshot(root)
    with pytest.raises(StoreError, match="do not fit mappedFileSize") as refused:
        open_store(root, FaultyDisk(really_sync=False), **changes)
    assert snapshot(root) == before
    return str(refused.value)


def serves(root: Path, sent: list[bytes], **changes: Any) -> None:
    store = open_store(root, FaultyDisk(really_sync=False), **changes)
    assert everything(store, queue_id=0) + everything(store, queue_id=1) == sent[::2] + sent[1::2]
    store.close()


@pytest.mark.parametrize("count", [5, 120, 400])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("stop", ["clean", "clean, then unclean"])
def test_larger_lengths_are_refused_and_nothing_changes(
    tmp_path: Path, other: str, count: int, stop: str
) -> None:
    """Of one file each, of two segments, and of several files of each kind."""
    sent = fill(tmp_path, count)
    if stop != "clean":
        (tmp_path / "abort").touch()
    assert "=" in refuses(tmp_path, **OTHER[other])
    serves(tmp_path, sent)


@pytest.mark.parametrize("other", OTHER)
def test_several_files_speak_for_their_length_without_any_other_witness(tmp_path: Path, other: str) -> None:
    """A store of Apache's, or of a version that kept no lengths."""
    sent = fill(tmp_path, 400)
    (tmp_path / "config" / "consumeQueueEnds.json").unlink()
    said = refuses(tmp_path, **OTHER[other])
    assert "65536 bytes" in said or "2000 bytes" in said
    serves(tmp_path, sent)


def test_a_lone_segment_that_a_blank_record_closes_is_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    while len(store.log.segments) < 2:
        send(store, bytes(700))
    store.crash()
    newest = tmp_path / "commitlog" / f"{64 << 10:020d}"
    newest.unlink()
    assert "files of 65536 bytes" in refuses(tmp_path, mapped_file_size_commit_log=128 << 10)


def test_a_lone_queue_file_that_is_full_is_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(100):
        send(store, b"x")
    store.queues.write_dirty()
    store.crash()
    assert "files of 2000 bytes" in refuses(tmp_path, mapped_file_size_consume_queue=4000)


def test_a_lone_file_of_a_usual_length_is_whole(tmp_path: Path) -> None:
    config = StoreConfig(store_path_root_dir=str(tmp_path)).replace(**SMALL_FILES)
    store = MessageStore.open(config, FaultyDisk(really_sync=False), ManualClock(START_MS))
    store.append("T", 0, b"x", b"", born_timestamp_ms=START_MS, born_host=HOST)
    store.commit()
    store.queues.write_dirty()
    store.crash()
    for name, size in (
        ("mapped_file_size_commit_log", 1 << 30),
        ("mapped_file_size_consume_queue", 6_000_000),
    ):
        with pytest.raises(StoreError, match=str(size)):
            MessageStore.open(config.replace(**{name: size}), FaultyDisk(really_sync=False))
    reopened = MessageStore.open(config, FaultyDisk(really_sync=False), ManualClock(START_MS))
    assert everything(reopened) == [b"x"]
    reopened.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_lone_segment_cut_short_gets_its_length_back(tmp_path: Path, known: bool) -> None:
    store = open_store(tmp_path)
    ends = []
    for n in range(60):
        send(store, b"%d:" % n + bytes(600))
        ends.append(store.log.end)
    store.close()
    if not known:
        (tmp_path / "config" / "consumeQueueEnds.json").unlink()
    path = tmp_path / "commitlog" / f"{0:020d}"
    os.truncate(path, 20_000)
    (tmp_path / "abort").touch()
    store = open_store(tmp_path)
    assert path.stat().st_size == 64 << 10
    whole = sum(end <= 20_000 for end in ends)
    assert everything(store) == [b"%d:" % n + bytes(600) for n in range(whole)]
    assert 0 < whole < 60
    store.close()


def test_lone_queue_files_cut_short_are_made_anew(tmp_path: Path) -> None:
    sent = fill(tmp_path, 40)
    for queue_id, length in enumerate((500, 7)):
        os.truncate(tmp_path / "consumequeue" / "T" / str(queue_id) / f"{0:020d}", length)
    serves(tmp_path, sent)


@pytest.mark.parametrize("size", [{"max_index_num": 300}, {"max_hash_slot_num": 50}, {"max_index_num": 800}])
@pytest.mark.parametrize("stop", ["clean", "unclean"])
def test_index_files_of_another_size_are_built_anew(tmp_path: Path, size: dict[str, int], stop: str) -> None:
    store = open_store(tmp_path, FaultyDisk(really_sync=False))
    for n in range(500):
        send(store, b"%d" % n, properties=b"KEYS\x01k%d" % n)
    store.close()
    for sizes in (size, {}):
        if stop == "unclean":
            (tmp_path / "abort").touch()
        store = open_store(tmp_path, FaultyDisk(really_sync=False), **sizes)
        for n in (0, 250, 499):
            assert len(store.query_by_key("T", f"k{n}", 9, 0, 1 << 60)) == 1
        store.close()

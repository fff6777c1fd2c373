"""A store opened with file lengths other than its own refuses to start and is not changed.

A file that damage has shortened gets its length back.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.store.kit import everything, finds, open_store, quick, send, send_all

from cometmq.errors import StoreError
from cometmq.store import MessageStore

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
    store = quick(root, **changes)
    sent = [b"%d:" % n + bytes(size) for n in range(count)]
    for n, body in enumerate(sent):
        send(store, body, queue_id=n % 2)
    store.close()
    return sent


def refuses(root: Path, **changes: Any) -> str:
    before = snapshot(root)
    with pytest.raises(StoreError, match="contradicts mappedFileSize") as refused:
        quick(root, **changes)
    assert snapshot(root) == before
    return str(refused.value)


def serves(root: Path, sent: list[bytes], **changes: Any) -> None:
    store = quick(root, **changes)
    assert everything(store, queue_id=0) + everything(store, queue_id=1) == sent[::2] + sent[1::2]
    store.close()


@pytest.mark.parametrize("count", [5, 120, 400])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("stop", ["clean", "clean, then unclean"])
def test_larger_lengths_are_refused_and_nothing_changes(
    tmp_path: Path, other: str, count: int, stop: str
) -> None:
    """Cases: one file of each kind, two segments, and several files of each kind."""
    sent = fill(tmp_path, count)
    if stop != "clean":
        (tmp_path / "abort").touch()
    assert "=" in refuses(tmp_path, **OTHER[other])
    serves(tmp_path, sent)


@pytest.mark.parametrize("other", OTHER)
def test_several_files_speak_for_their_length_without_any_other_witness(tmp_path: Path, other: str) -> None:
    """The store is Apache's, or was written by a version that did not record lengths."""
    sent = fill(tmp_path, 400)
    (tmp_path / "config" / "consumeQueueEnds.json").unlink()
    said = refuses(tmp_path, **OTHER[other])
    assert "65536 bytes" in said or "2000 bytes" in said
    serves(tmp_path, sent)


def fill_segment(store: MessageStore) -> None:
    while len(store.log.segments) < 2:
        send(store, bytes(700))
    store.disk.unlink(store.log.path_of(store.log.segments[1]))


def fill_queue_file(store: MessageStore, count: int) -> None:
    send_all(store, [b"x"] * count)
    store.queues.write_dirty()


LONE = {
    "a segment that a blank record closes": fill_segment,
    "a segment with room left": lambda store: send(store, b"x"),
    "a queue file that is full": lambda store: fill_queue_file(store, 100),
    "a queue file with room left": lambda store: fill_queue_file(store, 99),
}


@pytest.mark.parametrize("made", LONE)
def test_a_lone_file_that_holds_something_is_left_alone(tmp_path: Path, made: str) -> None:
    """The store was never stopped cleanly, so its lengths are not recorded anywhere else."""
    store = quick(tmp_path)
    LONE[made](store)
    found = everything(store)
    store.crash()
    queues = "queue" in made
    said = refuses(tmp_path, **(OTHER["queues"] if queues else OTHER["log"]))
    assert f"{2000 if queues else 65536} bytes, contradicts" in said
    assert ("remove this directory" if queues else "truncate -s 131072") in said
    store = quick(tmp_path)
    lost = 1 if "blank" in made else 0  # the message in the following segment
    assert everything(store) == found[: len(found) - lost]


@pytest.mark.parametrize("length", [0, 5000, 65_536])
def test_a_lone_file_that_holds_nothing_was_just_being_made(
    tmp_path: Path, store: MessageStore, length: int
) -> None:
    store.crash()
    (tmp_path / "consumequeue" / "T" / "0").mkdir(parents=True)
    paths = [tmp_path / "commitlog" / f"{0:020d}", tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"]
    paths[0].write_bytes(bytes(length))
    paths[1].write_bytes(bytes(length * 2000 // 65_536))
    store = open_store(tmp_path)
    send(store, b"x")
    store.close()
    assert [path.stat().st_size for path in paths] == [65_536, 2000]
    store = open_store(tmp_path)
    assert everything(store) == [b"x"]


def lone_segment_cut_short(root: Path) -> tuple[Path, list[bytes]]:
    """Create a store with one segment cut to 20,000 bytes; return its path and the complete messages."""
    store = open_store(root)
    ends = []
    for n in range(60):
        send(store, b"%d:" % n + bytes(600))
        ends.append(store.log.end)
    store.close()
    path = root / "commitlog" / f"{0:020d}"
    os.truncate(path, 20_000)
    (root / "abort").touch()
    whole = sum(end <= 20_000 for end in ends)
    assert 0 < whole < 60
    return path, [b"%d:" % n + bytes(600) for n in range(whole)]


def test_a_lone_segment_cut_short_gets_its_length_back(tmp_path: Path) -> None:
    path, whole = lone_segment_cut_short(tmp_path)
    store = open_store(tmp_path)
    assert path.stat().st_size == 64 << 10
    assert everything(store) == whole


def test_where_its_length_is_not_known_an_operator_gives_it_back(tmp_path: Path) -> None:
    path, whole = lone_segment_cut_short(tmp_path)
    (tmp_path / "config" / "consumeQueueEnds.json").unlink()
    assert f"of {path}, 20000 bytes, contradicts mappedFileSizeCommitLog=65536" in refuses(tmp_path)
    os.truncate(path, 64 << 10)
    store = open_store(tmp_path)
    assert everything(store) == whole


def test_lone_queue_files_cut_short_are_made_anew(tmp_path: Path) -> None:
    sent = fill(tmp_path, 40)
    for queue_id, length in enumerate((500, 7)):
        os.truncate(tmp_path / "consumequeue" / "T" / str(queue_id) / f"{0:020d}", length)
    serves(tmp_path, sent)


def indexed(root: Path, count: int) -> None:
    store = quick(root)
    for n in range(count):
        send(store, b"%d" % n, properties=b"KEYS\x01k%d" % n)
    store.close()


def finds_all(root: Path, count: int) -> None:
    store = quick(root)
    finds(store, (0, count // 2, count - 1))
    store.close()


@pytest.mark.parametrize("count", [20, 500])
@pytest.mark.parametrize("stop", ["clean", "unclean", "of Apache's"])
@pytest.mark.parametrize("size", [{"max_index_num": 300}, {"max_hash_slot_num": 50}, {"max_index_num": 800}])
def test_index_files_of_another_size_are_refused_and_nothing_changes(
    tmp_path: Path, size: dict[str, int], stop: str, count: int
) -> None:
    """Cases: a single index file, and several."""
    indexed(tmp_path, count)
    if stop != "clean":
        (tmp_path / "abort").touch()
    if stop == "of Apache's":
        (tmp_path / "config" / "consumeQueueEnds.json").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(StoreError, match=r"8440 bytes.* maxHashSlotNum=\d+, maxIndexNum=\d+ \(\d+ bytes\)"):
        quick(tmp_path, **size)
    assert snapshot(tmp_path) == before
    finds_all(tmp_path, count)


@pytest.mark.parametrize("count", [20, 500])
def test_index_files_that_were_cut_short_are_built_anew(tmp_path: Path, count: int) -> None:
    indexed(tmp_path, count)
    path = min((tmp_path / "index").iterdir())
    os.truncate(path, 3000)
    finds_all(tmp_path, count)
    assert {path.stat().st_size for path in (tmp_path / "index").iterdir()} == {8440}


def test_without_its_index_a_store_takes_another_size(tmp_path: Path) -> None:
    indexed(tmp_path, 500)
    shutil.rmtree(tmp_path / "index")
    for stop in ("crash", "close"):
        store = quick(tmp_path, max_index_num=300)
        finds(store, [7])
        store.index.write()
        getattr(store, stop)()
    assert {path.stat().st_size for path in (tmp_path / "index").iterdir()} == {6440}

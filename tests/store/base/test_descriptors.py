"""The number of open files is limited, however many queues, segments and readers there are."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import committed, delete_topic, drop_first_segment, everything, open_store, put, send

from cometmq.store import MessageStore
from cometmq.store.base.files import fair_share
from cometmq.store.log.commit_log import _READ_FDS

ALLOWED = 1024  # usual limit of open files of a process
SIZES = {"mapped_file_size_consume_queue": 40, "mapped_file_size_commit_log": 8 << 10}
SPARE = 8  # the lock, the current segment and the next one, and directories


def opened(root: Path) -> int:
    """Return the number of this process's descriptors for files below a directory."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{root}/")
        except FileNotFoundError:
            pass  # the descriptor of the listing
    return count


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/proc/self/fd"))  # opened by earlier tests in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (ALLOWED + 2 * others, hard))
    assert fair_share() == ALLOWED // 2 + others
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def large(tmp_path: Path) -> MessageStore:
    """Create a store of 700 queues with two files each and about 190 segments."""
    store = open_store(tmp_path, FaultyDisk(really_sync=False), **SIZES)
    for number in range(3):
        for queue in range(700):
            put(store, bytes(600), topic=f"T{queue // 100}", queue_id=queue % 100)
            if queue % 20 == 19:
                committed(store.commit())
        store.queues.write_dirty()
        assert number < 1 or len(store.queues.get_or_make("T0", 0).positions) == 1 + number // 2
    return store


def test_queues_and_segments_however_many(large: MessageStore, tmp_path: Path) -> None:
    assert len(large.log.segments) > 2 * _READ_FDS
    unsynced = len(large.log.unsynced)
    assert unsynced > 180  # nothing has been synced yet
    assert opened(tmp_path) <= fair_share() + unsynced + SPARE
    large.flusher.flush_now()
    assert len(large.log.unsynced) <= 1
    assert opened(tmp_path) <= fair_share() + SPARE
    large.close()
    assert opened(tmp_path) == 0


def test_readers_of_every_queue_and_segment(large: MessageStore, tmp_path: Path) -> None:
    large.close()
    store = open_store(tmp_path, FaultyDisk(really_sync=False), **SIZES)
    most = 0
    for number, queue in enumerate(list(store.queues)):
        assert len(everything(store, queue.topic, queue.queue_id)) == 3
        if number % 50 == 0:
            most = max(most, opened(tmp_path))
    for base in store.log.segments:
        assert store.log.read(base, 100)
        most = max(most, opened(tmp_path))
    assert _READ_FDS < most <= fair_share() + _READ_FDS + SPARE
    store.close()
    assert opened(tmp_path) == 0


def test_what_is_deleted_is_let_go(large: MessageStore, tmp_path: Path) -> None:
    large.flusher.flush_now()
    for base in large.log.segments[:40]:
        large.log.read(base, 100)
    for _ in range(40):
        drop_first_segment(large, derived=False)
    for number in range(7):
        delete_topic(large, f"T{number}")
    assert len(large.files) <= 1  # the index file
    assert opened(tmp_path) <= SPARE
    send(large)
    large.crash()
    assert opened(tmp_path) == 0


def test_a_failed_opening_leaves_nothing_open(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(bytes(10))
    (tmp_path / "commitlog" / f"{100:020d}").write_bytes(bytes(10))
    with pytest.raises(Exception, match=r"contradict"):
        open_store(tmp_path)
    assert opened(tmp_path) == 0

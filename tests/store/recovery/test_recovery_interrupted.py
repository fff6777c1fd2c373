"""After a recovery that fails or is killed, the next recovery repairs the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import delete_topic, everything, finds, numbered, open_store, quick, send, send_all
from tests.store.planted import alter

from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.disk import Disk


def torn_log(root: Path) -> Path:
    alter(path := root / "commitlog" / f"{0:020d}", 4001, b"\xda" * 9000)
    return path


def stray_units(root: Path) -> Path:
    path = root / "consumequeue" / "T" / "0" / f"{0:020d}"
    alter(path, 20 * 20, (1 << 40).to_bytes(8, "big") + bytes(3) + b"\x63" + bytes(8))
    return path


@pytest.mark.parametrize(("damage", "writes"), [(torn_log, 0), (stray_units, 1)])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_is_zeroed_behind_an_end_never_changes_the_length_of_a_file(
    tmp_path: Path, disk: FaultyDisk, damage: Callable[[Path], Path], writes: int, share: float
) -> None:
    """The next start refuses a single file of another length, because no other file confirms it.

    writes: the number of writes to the file before the one that zeroes its end.
    """
    store = quick(tmp_path)
    send_all(store, numbered(10))
    store.queues.write_dirty()
    store.crash()
    path = damage(tmp_path)
    length = path.stat().st_size
    lengths: list[int] = []
    disk.before = lambda _operation, _path: lengths.append(path.stat().st_size)
    disk.fail("pwrite", match=str(path), first=writes + 1, partial=share)
    with pytest.raises(OSError, match="Input/output error"):
        open_store(tmp_path, disk)
    store = quick(tmp_path)
    assert set(lengths) == {length}
    assert everything(store) == numbered(10)


def test_before_index_entries_are_written_over_the_checkpoint_vouches_for_none(tmp_path: Path) -> None:
    """Without the keys of a deleted topic the entries differ.

    A file with some old and some new entries must not count as complete.
    """
    store = quick(tmp_path)
    for number in range(700):  # fills two index files
        for topic in ("T", "Other"):
            send(store, topic=topic, properties=b"KEYS\x01k%d" % number)
    assert store.writer.make_durable(slots=False)
    assert store.checkpoint.index_ms > 0
    delete_topic(store, "T")
    store.crash()
    disk = FaultyDisk(really_sync=False)
    seen: list[Checkpoint] = []

    def look(operation: str, path: str) -> None:
        if operation == "pwrite" and "/index/" in path and not seen:
            seen.append(Checkpoint(Disk(), str(tmp_path / "checkpoint")))

    disk.before = look
    store = open_store(tmp_path, disk)
    assert [(at.saved, at.index_ms, at.physic_ms) for at in seen] == [(None, 0, store.checkpoint.physic_ms)]
    assert (store.checkpoint.saved is not None, store.checkpoint.index_ms > 0) == (True, True)
    finds(store, (0, 350, 699), "Other")


def test_a_damaged_index_file_goes_after_the_checkpoint_has_ceased_to_vouch_for_it(tmp_path: Path) -> None:
    """Without the checkpoint nothing would show to the next recovery that the file had existed."""
    store = quick(tmp_path)
    for number in range(700):  # fills two index files
        send(store, properties=b"KEYS\x01k%d" % number)
    assert store.writer.make_durable(slots=False)
    store.crash()
    store.checkpoint.saved = None  # as another broker leaves it
    store.checkpoint.flush()
    damaged = max((tmp_path / "index").iterdir())
    os.truncate(damaged, 100)
    disk = FaultyDisk(really_sync=False)
    seen: list[int] = []

    def look(operation: str, path: str) -> None:
        if operation == "unlink" and path == str(damaged):
            seen.append(Checkpoint(Disk(), str(tmp_path / "checkpoint")).min_timestamp)

    disk.before = look
    store = open_store(tmp_path, disk)
    assert seen == [0]
    finds(store, (0, 350, 699))


def test_a_queue_file_behind_the_end_is_gone_for_good_before_the_checkpoint_moves(tmp_path: Path) -> None:
    """A file that reappeared after a crash would count, since the checkpoint covers its units' positions."""
    large = {"mapped_file_size_commit_log": 16 << 20}  # smallest segments that are not scanned completely
    store = quick(tmp_path, **large)
    send_all(store, numbered(100))  # fills a queue file
    assert store.writer.make_durable(slots=False)
    end = store.log.end
    send_all(store, numbered(10))  # only their units reach the device
    store.queues.write_dirty()
    store.crash()
    for length in (end, 16 << 20):
        os.truncate(tmp_path / "commitlog" / f"{0:020d}", length)
    disk = FaultyDisk(really_sync=False)
    steps: list[tuple[str, str]] = []
    disk.before = lambda operation, path: steps.append((operation, path))
    store = open_store(tmp_path, disk, **large)
    queue = str(tmp_path / "consumequeue" / "T" / "0")
    gone = steps.index(("unlink", f"{queue}/{2000:020d}"))
    checkpoint = max(place for place, step in enumerate(steps) if step[1].endswith("/checkpoint"))
    assert gone < steps.index(("fsync_dir", queue), gone) < checkpoint
    assert everything(store) == numbered(100)

"""Queues that lose units at a kill although no record after the checkpoint refers to them.

The checkpoint contains a summary of all queue ends, which shows the loss.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.verifying import check
from tests.store.kit import delete_topic, everything, numbered, open_store, send, send_all, small
from tests.store.planted import alter

from cometmq.store import MessageStore
from cometmq.store.inspect.findings import Finding
from cometmq.store.inspect.rebuild import rebuild

UNITS = 250  # units per queue: three files of 100
LARGE = {"mapped_file_size_commit_log": 16 << 20}  # smallest segments that are not scanned completely


def start(root: Path, disk: FaultyDisk | None = None) -> MessageStore:
    return open_store(root, disk or FaultyDisk(really_sync=False), **LARGE)


def shortened(root: Path) -> list[Finding]:
    return [each for each in check(root, **LARGE).findings if each.kind == "queue-short"]


def killed(root: Path) -> None:
    """Kill a new store with T/0, T/1 and Other/0 before the checkpoint and only Other/0 after it."""
    store = start(root)
    for number in range(UNITS):
        for queue_id in range(2):
            send(store, b"%d" % number, queue_id=queue_id)
    send(store, b"0", topic="Other")
    assert store.writer.make_durable(slots=False)
    send(store, b"1", topic="Other")
    store.queues.write_dirty()
    store.crash()


def zero_the_end(queue: Path) -> None:
    alter(max(queue.iterdir()), 10 * 20, bytes(40 * 20))


LOSSES: dict[str, Callable[[Path], object]] = {
    "the directory": shutil.rmtree,
    "the newest file": lambda queue: max(queue.iterdir()).unlink(),
    "the newest sector": zero_the_end,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_queue_that_nothing_behind_the_mark_tells_of_comes_back(tmp_path: Path, loss: str) -> None:
    killed(tmp_path)
    LOSSES[loss](tmp_path / "consumequeue" / "T" / "1")
    (named,) = shortened(tmp_path)
    assert named.problem.startswith("T/1 ends at ")
    store = start(tmp_path)
    assert "consume queues have lost" in store.recovered.notes[0]
    for queue_id in range(2):
        assert everything(store, queue_id=queue_id) == numbered(UNITS)
    assert everything(store, "Other") == [b"0", b"1"]
    assert send(store, queue_id=1).queue_offset == UNITS
    store.close()
    assert check(tmp_path, **LARGE).sound
    store = start(tmp_path)
    assert store.recovered.notes == []


def test_rebuild_brings_it_back_too(tmp_path: Path) -> None:
    killed(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue" / "T" / "1")
    rebuild(str(tmp_path), config=small(tmp_path, **LARGE))
    assert shortened(tmp_path) == []


def test_without_a_loss_only_what_follows_the_mark_is_walked(tmp_path: Path) -> None:
    killed(tmp_path)
    store = start(tmp_path)
    assert (store.recovered.records, store.recovered.notes) == (1, [])


def test_a_topic_deleted_since_is_no_loss(tmp_path: Path) -> None:
    killed(tmp_path)
    store = start(tmp_path)
    delete_topic(store, "T")
    store.crash()
    store = start(tmp_path)
    assert (store.recovered.records, store.recovered.notes) == (0, [])
    send(store, b"2", topic="Other")
    assert store.writer.make_durable(slots=False)  # the new checkpoint is without the topic
    store.crash()
    shutil.rmtree(tmp_path / "consumequeue" / "Other")
    store = start(tmp_path)
    assert everything(store, "Other") == [b"0", b"1", b"2"]
    assert store.queues.topics() == ["Other"]


def test_a_file_that_has_expired_since_is_no_loss(tmp_path: Path) -> None:
    """At the checkpoint the queue ended at a file border, so no unit of that time is left."""
    store = start(tmp_path)
    send_all(store, numbered(100))  # fills a queue file
    send(store, topic="Other")
    assert store.writer.make_durable(slots=False)
    send(store, b"100")
    store.queues.write_dirty()
    store.crash()
    (tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}").unlink()
    store = start(tmp_path)
    assert not any("have lost" in note for note in store.recovered.notes)
    assert everything(store)[-1] == b"100"


async def test_a_topic_whose_deletion_was_under_way_at_the_mark_is_no_loss(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    killed(tmp_path)
    store = start(tmp_path, disk)
    store.start()
    noting, go_on = threading.Event(), threading.Event()

    def hold(operation: str, path: str) -> None:
        if operation == "fsync_dir" and path.endswith("commitlog") and not noting.is_set():
            noting.set()
            assert go_on.wait(20)

    disk.before = hold
    deleting = asyncio.create_task(store.deletion.delete(["T"]))
    assert await asyncio.to_thread(noting.wait, 20)
    send(store, b"2", topic="Other")  # moves the checkpoint past the log end recorded with the deletion
    assert store.writer.make_durable(slots=False)
    go_on.set()
    assert await deleting == 2
    store.crash()
    store = start(tmp_path)
    assert (store.recovered.records, store.recovered.notes) == (0, [])
    assert store.queues.topics() == ["Other"]

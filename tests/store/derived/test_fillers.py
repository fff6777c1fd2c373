"""Gaps in a queue are filled with filler units, which readers skip in a few steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.store.cold_disk import ColdDisk
from tests.store.kit import (
    bodies,
    by_record,
    drop_first_segment,
    everything,
    numbered,
    open_store,
    pulled,
    put_all,
    send,
    send_all,
    small,
    started,
)

from cometmq.store import GetStatus, MessageStore
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.writing import queue_order

GAP = 200_000


def with_gap(root: Path, gap: int, disk: Any = None, **changes: Any) -> MessageStore:
    """Store three messages, `gap` fillers and four messages, with all units in files."""
    store = open_store(root, disk, mapped_file_size_consume_queue=20 * 70_000, **changes)
    put_all(store, numbered(3))
    queue = store.queues.get_or_make("T", 0)
    queue.skip_to(3 + gap)
    queue.next_offset = 3 + gap
    put_all(store, numbered(3, 7))
    queue.write()
    return store


def drained(store: MessageStore, **how: Any) -> tuple[list[bytes], int]:
    """Return the bodies of the whole queue and the number of pulls needed."""
    found: list[bytes] = []
    offset = pulls = 0
    while offset < store.max_offset("T", 0):
        answer = store.get_messages("T", 0, offset, 32, **how)
        found += bodies(answer)
        assert answer.next_begin_offset > offset
        assert answer.status is (GetStatus.FOUND if answer.count else GetStatus.NO_MATCHED_MESSAGE)
        offset = answer.next_begin_offset
        pulls += 1
    return found, pulls


@pytest.mark.parametrize("how", [{}, {"filter": {0}}, {"record_filter": by_record(lambda *_record: True)}])
@pytest.mark.parametrize("careful", [False, True])
def test_a_gap_takes_a_few_pulls(tmp_path: Path, how: dict[str, Any], careful: bool) -> None:
    store = with_gap(tmp_path, GAP, check_crc_on_read=careful)
    found, pulls = drained(store, **how)
    assert found == numbered(7)
    assert pulls <= 6


@pytest.mark.parametrize(
    "gap", [1, 28, 29, 30, 31, 32, 33, 799, 800, 4096, 4100, 69_996, 69_997, 69_998, 131_200]
)
def test_no_message_before_or_behind_a_gap_is_passed(tmp_path: Path, gap: int) -> None:
    store = with_gap(tmp_path, gap)
    assert drained(store)[0] == numbered(7)
    for offset in range(3, 3 + min(gap, 40)):
        answer = store.get_messages("T", 0, offset, 2)
        if not answer.count:
            assert answer.next_begin_offset in (gap + 3, offset + 2 + 131_072)


def test_one_pull_over_fillers_is_bounded(tmp_path: Path) -> None:
    store = with_gap(tmp_path, 400_000)
    begin = time.process_time()
    answer = store.get_messages("T", 0, 3, 32)
    assert time.process_time() - begin < 0.1  # about 0.5 ms on an idle machine
    assert answer.next_begin_offset == 3 + 32 + 131_072


async def test_what_is_not_in_memory_is_left_to_the_next_pull(tmp_path: Path) -> None:
    with_gap(tmp_path, GAP).close()
    disk = ColdDisk()
    store = started(tmp_path, disk, mapped_file_size_consume_queue=20 * 70_000)
    disk.cold = True
    offset = pulls = 0
    found: list[bytes] = []
    while offset < store.max_offset("T", 0):
        answer = await pulled(store, "T", 0, offset)
        found += bodies(answer)
        offset = answer.next_begin_offset
        pulls += 1
    assert found == numbered(7)
    assert (disk.in_the_loop, bool(disk.warm)) == (0, True)
    assert pulls < 100
    disk.cold = False


@pytest.mark.parametrize("gap", [1, 70_000])
def test_a_walk_of_the_whole_log_does_not_take_a_gap_for_what_lies_before_the_log(
    tmp_path: Path, gap: int
) -> None:
    """Fillers point at position 0, but the units before them belong to records that are scanned again."""
    store = open_store(tmp_path, mapped_file_size_consume_queue=20 * 70_000)
    send(store, bytes(60_000), topic="Other")
    send(store, bytes(60_000), topic="Other")
    drop_first_segment(store)
    store.close()
    with_gap(tmp_path, gap).crash()
    (tmp_path / "checkpoint").unlink()
    store = open_store(tmp_path, mapped_file_size_consume_queue=20 * 70_000)
    assert (store.recovered.start, store.recovered.notes) == (64 << 10, [])
    assert drained(store)[0] == numbered(7)
    assert store.max_offset("T", 0) == 7 + gap


def rebuilt(root: Path) -> None:
    assert rebuild(str(root), config=small(root)).not_served == 0


def without_queues(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")


@pytest.mark.parametrize("again", [rebuilt, without_queues])
def test_what_comes_behind_a_lost_end_of_the_log_is_served_after_the_next_walk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[[Path], None]
) -> None:
    """The queue continues after its former end, and the log at its current end, with no room in between."""
    monkeypatch.setattr(queue_order, "SPARE", 10)
    store = open_store(tmp_path)
    send(store, b"first")
    while len(store.log.segments) < 2:
        send(store, bytes(30_000), "Other")
    send_all(store, [b"lost"] * 1000)
    store.close()
    for segment in sorted((tmp_path / "commitlog").iterdir())[1:]:
        segment.unlink()
    store = open_store(tmp_path)
    assert store.max_offset("T", 0) == 1001
    send(store, b"new")
    store.close()
    again(tmp_path)
    store = open_store(tmp_path)
    assert everything(store) == [b"first", b"new"]
    assert store.max_offset("T", 0) == 1002


def test_files_of_which_no_unit_holds_are_not_filled_up(tmp_path: Path) -> None:
    """A slave's queue begins far after offset 0.

    If a power failure loses its records but not its units, the master sends the same records again.
    """
    store = open_store(tmp_path)
    queue = store.queues.get_or_make("T", 0)
    for _ in range(2):
        queue.push(0, 100, 7, 1_000_000_000)
        queue.write()
        assert len(list(Path(queue.path).iterdir())) == 1
        store.queues.clear()
        queue = store.queues.get_or_make("T", 0)
        queue.load(0)
        assert (queue.max_offset, queue.begin) == (0, 1_000_000_000 - 1_000_000_000 % 100)

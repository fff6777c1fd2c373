"""Zeros written ahead of the log under SYNC_FLUSH: well before the records and never over them."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from pathlib import Path

import pytest
from tests.store.kit import everything, flushed, open_store, put_all, started

from cometmq.store import Clock, MessageStore
from cometmq.store.background import space_ahead
from cometmq.store.base.disk import Buffer, Disk, is_zero

PART = 16 << 10
SEGMENT = 256 << 10


class WatchedDisk(Disk):
    """A disk that records writes to the log in order: ("zeros" or "records", first position, end)."""

    __slots__ = ("failing", "go_on", "writes")

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[str, int, int]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.failing = False

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/commitlog/" not in path:
            return super().pwrite(fd, data, offset)
        kind = "zeros" if is_zero(data) else "records"
        if kind == "zeros":
            assert self.go_on.wait(20)
            if self.failing:
                raise OSError(errno.EIO, "Input/output error")
        start = int(os.path.basename(path)) + offset
        written = super().pwrite(fd, data, offset)
        self.writes.append((kind, start, start + len(data)))
        return written

    def zeros(self) -> list[tuple[int, int]]:
        return [(start, stop) for kind, start, stop in self.writes if kind == "zeros"]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_ahead, "PART", PART)
    monkeypatch.setattr(space_ahead, "MARGIN", 2 * PART)
    monkeypatch.setattr(space_ahead, "AHEAD", 4 * PART)


def start(root: Path, disk: Disk, flush: str = "SYNC_FLUSH") -> MessageStore:
    sizes = {"mapped_file_size_commit_log": SEGMENT}
    return started(root, disk, Clock(), flush_disk_type=flush, **sizes)


async def flushed_send(store: MessageStore, *sizes: int) -> list[bytes]:
    """Append records with these body sizes in one tick and wait for their sync."""
    sent = [os.urandom(size) for size in sizes]
    put_all(store, sent)
    assert await flushed(store)
    return sent


async def test_zeros_go_ahead_and_every_record_stays(tmp_path: Path) -> None:
    disk = WatchedDisk()
    store = start(tmp_path, disk)
    rng = random.Random(5)
    sent: list[bytes] = []
    ends: list[int] = []
    for _ in range(300):
        sent += await flushed_send(store, *(rng.randrange(1500) for _ in range(rng.randrange(1, 8))))
        ends.append(store.log.end)
    assert everything(store) == sent
    await store.stop()
    zeros = disk.zeros()
    assert len(zeros) > 20
    assert all(stop % SEGMENT == 0 or start // SEGMENT == stop // SEGMENT for start, stop in zeros)
    reached = 0
    for kind, begin, stop in disk.writes:
        assert kind == "records" or begin >= reached
        reached = max(reached, stop) if kind == "records" else reached
    assert {end // SEGMENT for _, end in zeros} >= set(range(1, ends[-1] // SEGMENT))  # in each segment
    store = open_store(tmp_path, mapped_file_size_commit_log=SEGMENT)
    assert everything(store) == sent


async def test_records_wait_for_zeros_that_are_still_being_written(tmp_path: Path) -> None:
    disk = WatchedDisk()
    disk.go_on.clear()  # simulates a slow device
    store = start(tmp_path, disk)
    sent = await flushed_send(store, 10)
    sent += await flushed_send(store, *[1500] * 15)  # ends before the zeros that it requests
    assert disk.zeros() == []
    timer = threading.Timer(0.2, disk.go_on.set)
    timer.start()
    sent += await flushed_send(store, *[1500] * 15)  # reaches the requested zeros
    timer.join()
    (begin, end), *_ = disk.zeros()
    over = next(
        at for at, (kind, start, stop) in enumerate(disk.writes)
        if kind == "records" and stop > begin and start < end
    )  # fmt: skip
    assert disk.writes.index(("zeros", begin, end)) < over
    assert everything(store) == sent


async def test_zeros_that_fail_are_said_once_and_cost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = WatchedDisk()
    disk.failing = True
    store = start(tmp_path, disk)
    with caplog.at_level(logging.WARNING):
        sent = [body for _ in range(40) for body in await flushed_send(store, 1000)]
    assert everything(store) == sent
    assert caplog.text.count("could not be allocated") == 1


async def test_without_sync_flush_there_are_none(tmp_path: Path) -> None:
    disk = WatchedDisk()
    store = start(tmp_path, disk, "ASYNC_FLUSH")
    for _ in range(20):
        await flushed_send(store, 1500, 1500)
    await store.stop()
    assert disk.zeros() == []
    assert disk.writes

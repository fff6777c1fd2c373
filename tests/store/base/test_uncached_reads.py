"""Concurrent cache misses of many readers share few reads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from cometmq.store.base.disk import Disk
from cometmq.store.base.executor import READ_AHEAD, StoreExecutor
from cometmq.store.base.files import FileRange


class SlowDisk(Disk):
    """A disk whose reads wait for a signal; it counts all reads and the largest number of concurrent ones."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.ranges: list[tuple[int, int]] = []
        self.most = self._now = 0
        self._lock = threading.Lock()

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        with self._lock:
            self.ranges.append((offset, length))
            self._now += 1
            self.most = max(self.most, self._now)
        assert self.go.wait(20)
        with self._lock:
            self._now -= 1
        return super().pread(fd, length, offset)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * READ_AHEAD))
    return str(path)


async def test_readers_that_miss_the_same_range_share_one_read(file: str) -> None:
    disk = SlowDisk()
    reads = StoreExecutor(disk)
    waiting = [asyncio.ensure_future(reads.fetch(FileRange(file, 1000 * n, 500))) for n in range(20)]
    await asyncio.sleep(0)
    disk.go.set()
    await asyncio.gather(*waiting)
    assert disk.ranges == [(0, READ_AHEAD)]
    await reads.fetch(FileRange(file, 3 * READ_AHEAD - 10, 500))
    assert disk.ranges[1:] == [(2 * READ_AHEAD, 2 * READ_AHEAD)]


async def test_few_reads_are_under_way_and_a_reader_that_gives_up_takes_nothing_from_the_others(
    file: str,
) -> None:
    disk = SlowDisk()
    reads = StoreExecutor(disk)
    waiting = [asyncio.ensure_future(reads.fetch(FileRange(file, n * READ_AHEAD, 1))) for n in range(8)]
    other = asyncio.ensure_future(reads.fetch(FileRange(file, 7, 1)))
    await asyncio.sleep(0)
    waiting[0].cancel()
    disk.go.set()
    await asyncio.gather(*waiting[1:], other)
    assert len(disk.ranges) == 8
    assert disk.most <= 2


async def test_a_failure_reaches_every_reader_and_the_next_one_tries_again(file: str) -> None:
    class Broken(Disk):
        def pread(self, fd: int, length: int, offset: int) -> bytes:
            raise OSError(5, "broken")

    reads = StoreExecutor(Broken())
    for _ in range(2):
        outcomes = await asyncio.gather(
            *(reads.fetch(FileRange(file, n, 1)) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(outcome, OSError) for outcome in outcomes)

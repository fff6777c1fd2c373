"""A disk without room for the next segment: few attempts, one log line, and recovery once there is room."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import START_MS, open_store, put, send, started

from cometmq.store import ManualClock, MessageStore, StoreRefused
from cometmq.store.base.disk import DiskUsage

SEGMENT = 64 << 10


class SmallDisk(FaultyDisk):
    """A disk on which `room` bytes can be reserved."""

    def __init__(self) -> None:
        super().__init__(really_sync=False)
        self.room = 1 << 40

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(1 << 40, 10, self.room)  # usage is far below the limit that stops writes

    def reserve(self, fd: int, length: int) -> None:
        self.calls["tried"] += 1
        if length > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().reserve(fd, length)


async def sent(store: MessageStore, count: int, size: int = 100) -> None:
    """Commit messages one by one, with time for the background thread in between."""
    for _ in range(count):
        send(store, bytes(size))
        reserving = store.log._reserving  # noqa: SLF001 - nobody else waits for the thread
        if reserving is not None:
            await asyncio.gather(asyncio.wrap_future(reserving[1]), return_exceptions=True)


def complaints(caplog: pytest.LogCaptureFixture) -> int:
    return sum("could not be allocated" in record.message for record in caplog.records)


async def test_the_next_segment_is_tried_every_ten_seconds_and_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = SmallDisk(), ManualClock(START_MS)
    store = started(tmp_path, disk, clock)
    await sent(store, 1)
    disk.room = 5000
    disk.calls["tried"] = 0
    await sent(store, 1, 40_000)  # more than half a segment, so the next one is requested
    with caplog.at_level(logging.WARNING):
        await sent(store, 60)
        assert (disk.calls["tried"], complaints(caplog)) == (1, 1)
        clock.advance(9.9)
        await sent(store, 5)
        assert disk.calls["tried"] == 1
        clock.advance(0.2)
        await sent(store, 5)
        assert (disk.calls["tried"], complaints(caplog)) == (1, 1)  # no attempt without more room
        disk.room = 6000
        clock.advance(10.1)
        await sent(store, 5)
        assert (disk.calls["tried"], complaints(caplog)) == (2, 1)
        disk.room = SEGMENT
        clock.advance(10.1)
        await sent(store, 5)
        assert disk.calls["tried"] == 3
    assert sorted(os.listdir(tmp_path / "commitlog")) == [f"{base:020d}" for base in (0, SEGMENT)]


async def test_room_that_retention_makes_is_used_at_once(tmp_path: Path) -> None:
    disk, clock = SmallDisk(), ManualClock(START_MS)
    store = started(tmp_path, disk, clock, clean_resource_interval=(1 << 31) - 1)
    await sent(store, 2, 30_000)
    await sent(store, 1, 10_000)  # is stored in the second segment
    base = store.log.segment_base
    disk.room = 5000
    await sent(store, 1, 40_000)
    await sent(store, 3)
    tried = disk.calls["tried"]
    disk.room = 1 << 20
    store.retention.delete_now()
    for segment in (tmp_path / "commitlog").iterdir():
        os.utime(segment, (0, 0))
    await store.retention.run_now(log_too=True)
    await sent(store, 2)
    assert store.log.segments == [base]
    assert disk.calls["tried"] == tried + 1


def test_refused_sends_do_not_fill_the_disk_again_and_again(tmp_path: Path) -> None:
    disk = SmallDisk()
    store = open_store(tmp_path, disk)
    send(store, bytes(40_000))
    disk.room = 5000
    disk.calls["tried"] = 0
    for _ in range(50):
        with pytest.raises(StoreRefused, match="No space left"):
            put(store, bytes(40_000))
    assert disk.calls["tried"] == 1
    disk.room = 4000  # as if small messages had used some
    with pytest.raises(StoreRefused, match="No space left"):
        put(store, bytes(40_000))
    assert disk.calls["tried"] == 1
    disk.room = 2 * SEGMENT
    assert send(store, bytes(40_000)).queue_offset == 1


def test_a_disk_that_cannot_tell_its_room_is_tried_each_time(tmp_path: Path) -> None:
    disk = SmallDisk()
    store = open_store(tmp_path, disk)
    send(store, bytes(40_000))
    disk.room = 1000
    disk.usage = lambda _path: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(StoreRefused):
            put(store, bytes(40_000))
    assert disk.calls["tried"] == 4

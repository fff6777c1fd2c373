"""The sync process of SYNC_FLUSH: its open files, and the effects of its failures."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import after_crash, everything, flushed, numbered, put, send, started

from cometmq.store import Clock, MessageStore, StoreRefused
from cometmq.store.base.disk import Disk
from cometmq.store.log import sync_child, syncer
from cometmq.store.log.syncer import ChildSyncer, ThreadSyncer, Unsynced
from cometmq.testing.process import ServerProcess

FAILING = """
import errno, os, runpy
def fail(fd):
    raise OSError(errno.EIO, "no")
os.fdatasync = fail
runpy.run_path({real!r}, run_name="__main__")
"""


class CountingDisk(Disk):
    """A disk that counts the syncs made in this process."""

    __slots__ = ("syncs",)

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        super().fdatasync(fd)


def child_of(store: MessageStore) -> int:
    child = store.upkeep.sync_process
    assert child is not None
    assert child.pid is not None
    return child.pid


def ends(pidfd: int) -> bool:
    """Return whether the process ends within 20 s."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    try:
        return bool(ended.poll(20_000))
    finally:
        os.close(pidfd)


def held_by(pid: int) -> list[str]:
    """Return the paths that a process has open, without /dev/null and sockets."""
    names = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return sorted(name for name in names if name != "/dev/null" and not name.startswith("socket:"))


def start(root: Path, disk: Disk | None = None) -> MessageStore:
    return started(root, disk, Clock(), flush_disk_type="SYNC_FLUSH")


async def send_durably(store: MessageStore, body: bytes = b"hello") -> None:
    send(store, body)
    assert await flushed(store)


@pytest.fixture
async def store(tmp_path: Path) -> MessageStore:
    return start(tmp_path)


class DeviceDisk(Disk):
    """A disk that opens devices, too."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        return os.open(path, os.O_RDWR)


class TestLife:
    async def test_it_syncs_and_ends_with_the_store(self, tmp_path: Path) -> None:
        store = start(tmp_path)
        pidfd = os.pidfd_open(child_of(store))
        await send_durably(store, b"a")
        assert held_by(child_of(store)) == [store.log.path_of(0)]  # synced by the process
        await store.stop()
        assert ends(pidfd)
        assert not (tmp_path / "abort").exists()

    async def test_it_ends_with_a_store_that_crashes(self, store: MessageStore) -> None:
        pidfd = os.pidfd_open(child_of(store))
        send(store)
        store.crash()
        assert ends(pidfd)

    def test_it_ends_when_the_broker_is_killed(self, tmp_path: Path) -> None:
        settings = tmp_path / "broker.conf"
        settings.write_text(
            "listenPort=0\nbindAddress=127.0.0.1\nbrokerIP1=127.0.0.1\nvipChannelEnable=false\n"
            f"storePathRootDir={tmp_path}/store\nflushDiskType=SYNC_FLUSH\nmappedFileSizeCommitLog=65536\n"
        )
        command = [sys.executable, "-m", "cometmq.broker_process", "-c", str(settings)]
        with ServerProcess(command, ready='"port"') as broker:
            (child,) = psutil.Process(broker.pid).children(recursive=True)
            pidfd = os.pidfd_open(child.pid)
            assert not [each for each in child.net_connections() if each.laddr]
            broker.kill()
            assert ends(pidfd)

    async def test_signals_for_the_broker_do_not_end_it(self, store: MessageStore) -> None:
        await send_durably(store)  # by then the process ignores these signals
        pid = child_of(store)
        assert os.getpgid(pid) == pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        await send_durably(store)
        assert child_of(store) == pid

    async def test_it_holds_the_segments_to_sync_and_nothing_else(self, tmp_path: Path) -> None:
        store = start(tmp_path)
        for _ in range(6):
            await send_durably(store, bytes(30_000))
        await send_durably(store)
        assert len(store.log.segments) > 2
        assert held_by(child_of(store)) == [store.log.path_of(store.log.segments[-1])]

    async def test_only_sync_flush_has_one_and_it_comes_with_the_setting(self, tmp_path: Path) -> None:
        store = started(tmp_path, clock=Clock())
        assert store.upkeep.sync_process is None
        store.configure(store.config.replace(flush_disk_type="SYNC_FLUSH"))
        pidfd = os.pidfd_open(child_of(store))
        await send_durably(store)
        await store.stop()
        assert ends(pidfd)


class TestFailure:
    async def test_a_sync_that_fails_there_makes_the_store_read_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = tmp_path / "failing.py"
        script.write_text(FAILING.format(real=sync_child.__file__))
        monkeypatch.setattr(syncer, "SCRIPT", str(script))
        store = start(tmp_path / "store")
        send(store, b"lost")
        assert await flushed(store) is False
        assert store.flusher.failure is not None
        assert store.flusher.failure.errno == errno.EIO
        with pytest.raises(StoreRefused, match="could not be flushed"):
            put(store)
        assert everything(store) == []

    async def test_the_error_is_the_one_that_the_system_gave(self) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[OSError | None] = loop.create_future()
        with ThreadPoolExecutor(1) as pool:
            child = ChildSyncer(DeviceDisk(), loop, ThreadSyncer(Disk(), loop, pool))
            child.sync([Unsynced(0, -1, "/dev/full")], done.set_result)  # a device that cannot be synced
            failure = await asyncio.wait_for(done, 90)
            child.close()
        assert isinstance(failure, OSError)
        assert failure.errno == errno.EINVAL

    async def test_killed_amid_a_sync_everything_goes_on(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = start(tmp_path)
        await send_durably(store, b"0")
        pid = child_of(store)
        os.kill(pid, signal.SIGSTOP)
        send(store, b"1")
        waiting = asyncio.ensure_future(flushed(store))
        await asyncio.sleep(0)
        assert not waiting.done()
        os.kill(pid, signal.SIGKILL)
        assert await waiting
        assert "a thread syncs for the next 1 s" in caplog.text
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        for number in range(2, 9):
            await send_durably(store, b"%d" % number)
        store = after_crash(store)
        assert everything(store) == numbered(9)

    async def test_killed_under_load_nothing_acknowledged_is_missing(self, tmp_path: Path) -> None:
        store = start(tmp_path)
        acknowledged: list[bytes] = []
        failed: list[bytes] = []
        everybody = asyncio.get_running_loop().create_future()
        count = 300

        def answered(body: bytes, ok: bool) -> None:
            (acknowledged if ok else failed).append(body)
            if len(acknowledged) == count // 3:
                os.kill(child_of(store), signal.SIGKILL)
            if len(acknowledged) + len(failed) == count:
                everybody.set_result(None)

        for number in range(count):
            body = b"%d:" % number + bytes(number * 7919 % 3000)
            send(store, body)
            store.flusher.wait_for(store.log.end, lambda ok, body=body: answered(body, ok))
            await asyncio.sleep(0.001 if number % 5 else 0)
        await asyncio.wait_for(everybody, 90)
        assert not failed
        store = after_crash(store)
        assert everything(store) == acknowledged

    async def test_killed_between_syncs_the_next_goes_to_the_thread(self, store: MessageStore) -> None:
        await send_durably(store)
        pidfd = os.pidfd_open(child_of(store))
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert ends(pidfd)
        await send_durably(store)
        assert store.upkeep.sync_process is not None
        assert store.upkeep.sync_process.pid is None

    async def test_killed_under_load_another_one_serves_and_no_sync_is_skipped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(syncer, "_RESTART_DELAY_S", 0.05)
        caplog.set_level(logging.INFO)
        disk = CountingDisk()
        store = start(tmp_path, disk)
        pids = [child_of(store)]
        sent: list[bytes] = []

        async def send_one() -> None:
            sent.append(b"%d" % len(sent))
            await send_durably(store, sent[-1])

        async def send_until(holds: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 20
            while not holds():
                assert time.monotonic() < deadline
                await send_one()

        child = store.upkeep.sync_process
        assert child is not None
        for _ in range(2):
            disk.syncs = 0
            for _ in range(20):
                await send_one()
            assert disk.syncs == 0
            os.kill(pids[-1], signal.SIGKILL)
            await send_until(lambda: disk.syncs > 0)  # the thread continues to sync
            await send_until(lambda: child.pid not in (None, pids[-1]))
            pids.append(child_of(store))
            disk.syncs = 0
            for _ in range(20):
                await send_one()
            assert disk.syncs == 0
            assert held_by(pids[-1]) == [store.log.path_of(store.log.segments[-1])]
        assert caplog.text.count("ended; a thread syncs") == 2
        assert caplog.text.count("the sync process started") == 2
        store = after_crash(store)
        assert everything(store) == sent

    async def test_one_that_is_lost_again_and_again_is_started_ever_more_rarely(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(sys, "executable", "/bin/true")
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(loop, "call_later", lambda seconds, work: timers.append((seconds, work)))
        with ThreadPoolExecutor(1) as pool:
            child = ChildSyncer(Disk(), loop, ThreadSyncer(Disk(), loop, pool))
            for number in range(9):
                assert child.pid is not None
                assert ends(os.pidfd_open(child.pid))
                if number == 8:  # the process has worked for a minute
                    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 60)
                while child.pid is not None:  # wait until the loop detects the closed socket
                    await asyncio.sleep(0)
                timers[-1][1]()
            child.close()
        assert [seconds for seconds, _ in timers] == [1, 2, 4, 8, 16, 32, 60, 60, 1]

    async def test_a_store_that_stops_starts_no_other_one(self, tmp_path: Path) -> None:
        store = start(tmp_path)
        pidfd = os.pidfd_open(child_of(store))
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert ends(pidfd)
        await send_durably(store)
        child = store.upkeep.sync_process
        assert child is not None
        again = child._restart_timer  # noqa: SLF001 - the timer has no other name
        assert again is not None
        await store.stop()
        assert again.cancelled()
        assert child.pid is None

    async def test_lost_amid_a_sync_that_failed_nothing_is_acknowledged(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        disk.lends_descriptors = True
        store = start(tmp_path, disk)
        pid = child_of(store)
        os.kill(pid, signal.SIGSTOP)
        send(store, b"lost")
        waiting = asyncio.ensure_future(flushed(store))
        await asyncio.sleep(0)
        disk.fail("fdatasync", error=errno.EIO, match="commitlog")
        os.kill(pid, signal.SIGKILL)
        assert await waiting is False
        assert store.flusher.failure is not None

    async def test_without_a_process_a_thread_syncs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
        store = start(tmp_path)
        await send_durably(store)
        assert "the sync process could not be started" in caplog.text

    async def test_more_segments_than_a_request_holds_are_synced_by_the_thread(self, tmp_path: Path) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[OSError | None] = loop.create_future()
        path = tmp_path / "segment"
        path.touch()
        disk = FaultyDisk()
        fd = disk.open(str(path))
        with ThreadPoolExecutor(1) as pool:
            child = ChildSyncer(disk, loop, ThreadSyncer(disk, loop, pool))
            child.sync([Unsynced(base, fd, str(path)) for base in range(65)], done.set_result)
            assert await asyncio.wait_for(done, 90) is None
            child.close()
        disk.close(fd)
        assert disk.calls["fdatasync"] == 65

"""A broker process on file systems that are full, read-only or gone.

It refuses messages with the reason, is never ended by a signal, loses no acknowledged message, and works
again once the cause is removed. Small file systems are mounted where the tests may do that (as root on
Linux); elsewhere a limit on file sizes replaces a full disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.test_kill import SETTINGS, BrokerProcess, header, pull

from cometmq.message import MessageExt
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.java_properties import format_properties
from cometmq.protocol.record.one import iter_records
from cometmq.remoting import RemotingClient

MIB = 1 << 20
MQBROKER = "from cometmq.cli import mqbroker; mqbroker()"
EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
LOSE_WHAT_IS_NOT_SYNCED = 2


class SmallDisk:
    """An ext4 file system in a file, mounted at `path`."""

    def __init__(self, directory: Path, size: int = 24 * MIB) -> None:
        self._image = directory / "disk.img"
        self.path = directory / "disk"
        self.path.mkdir()
        with self._image.open("wb") as image:
            image.truncate(size)
        self._run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        self.mount()

    @staticmethod
    def _run(*command: str) -> None:
        run(*command).check_returncode()

    def mount(self) -> None:
        self._run("mount", "-o", "loop", str(self._image), str(self.path))

    def unmount(self) -> None:
        self._run("umount", str(self.path))

    def pull_the_plug(self) -> None:
        """Remove the device immediately, which loses all data that was not synced."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", LOSE_WHAT_IS_NOT_SYNCED))
        finally:
            os.close(fd)

    def fill(self) -> None:
        """Leave no block free."""
        with (self.path / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(b"x" * 4096):
                pass

    def free(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a file system takes root and mkfs.ext4")
    try:
        small = SmallDisk(tmp_path)
    except subprocess.CalledProcessError as failure:
        pytest.skip(f"no file system can be mounted here: {failure.stderr.strip()}")
    yield small
    small.unmount()


class Load:
    """A sender of numbered messages to one queue that records the acknowledged ones."""

    def __init__(self, addr: str) -> None:
        self.addr = addr
        self.client = RemotingClient()
        self.acknowledged: list[bytes] = []
        self.refused: list[bytes] = []

    async def send(self, size: int = 20_000) -> Frame:
        body = b"%06d" % (len(self.acknowledged) + len(self.refused)) + bytes(size)
        frame = Frame.request(RequestCode.SEND_MESSAGE_V2, header(0, "KEYS\x01k"), body)
        answer = await self.client.call(self.addr, frame, 20)
        (self.acknowledged if answer.code == 0 else self.refused).append(body)
        return answer

    async def until_refused(self, size: int = 20_000, every_s: float = 0) -> Frame:
        for _ in range(2000):
            answer = await self.send(size)
            if answer.code != 0:
                return answer
            await asyncio.sleep(every_s)
        raise AssertionError("the disk never got full")

    async def until_accepted(self) -> None:
        async with asyncio.timeout(60):
            while (await self.send(100)).code != 0:
                await asyncio.sleep(0.05)

    async def stored(self) -> list[bytes]:
        found: list[MessageExt] = []
        while True:
            answer = await self.client.call(self.addr, pull(0, len(found)), 20)
            if answer.code == ResponseCode.TOPIC_NOT_EXIST:
                return []
            if answer.code != 0:
                assert (answer.ext or {})["maxOffset"] == str(len(found)), answer.remark
                return [message.body for message in found]
            found += iter_records(bytes(answer.body))


async def started(broker: BrokerProcess) -> Load:
    broker.spawn()
    await broker.ready()
    return Load(broker.addr)


async def again(broker: BrokerProcess, load: Load) -> None:
    """Check that the messages are the same after a clean stop and a start."""
    await load.client.close()
    assert broker.terminate() == 0
    after = await started(broker)
    assert await after.stored() == load.acknowledged
    await after.client.close()
    assert broker.terminate() == 0


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_full_disk_refuses_until_there_is_room(tmp_path: Path, disk: SmallDisk, flush: str) -> None:
    root = str(disk.path / "store")
    broker = BrokerProcess(
        tmp_path, storePathRootDir=root, flushDiskType=flush, cleanResourceInterval="3600000"
    )
    try:
        load = await started(broker)
        await load.send()
        await asyncio.to_thread(disk.fill)
        answer = await load.until_refused()
        assert "No space left on device" in (answer.remark or "")
        assert await load.stored() == load.acknowledged
        disk.free()
        await load.until_accepted()
        for _ in range(60):
            assert (await load.send()).code == 0
        assert await load.stored() == load.acknowledged
        await again(broker, load)
    finally:
        broker.kill()


async def test_the_watermark_refuses_before_the_disk_is_full(tmp_path: Path, disk: SmallDisk) -> None:
    broker = BrokerProcess(
        tmp_path,
        storePathRootDir=str(disk.path / "store"),
        cleanResourceInterval="50",
        cleanFileForciblyEnable="false",
    )
    try:
        load = await started(broker)
        await load.send()
        with (disk.path / "filler").open("wb") as filler:
            free = os.statvfs(disk.path)
            os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_frsize - MIB)
        answer = await load.until_refused(10, every_s=0.02)  # there is room, so the watermark refuses
        assert (answer.code, "the disk is full, CL: " in (answer.remark or "")) == (14, True), answer.remark
        disk.free()
        await load.until_accepted()
        assert await load.stored() == load.acknowledged
        await again(broker, load)
    finally:
        broker.kill()


async def test_old_segments_make_room_on_a_disk_that_fills_up(tmp_path: Path, disk: SmallDisk) -> None:
    """Above 85 % segments are deleted whatever their age, so a small disk never fills up."""
    broker = BrokerProcess(
        tmp_path,
        storePathRootDir=str(disk.path / "store"),
        cleanResourceInterval="50",
        deleteCommitLogFilesInterval="0",
    )
    try:
        load = await started(broker)
        sent, bodies = 0, []
        async with asyncio.timeout(120):
            while sent < 60 * MIB:
                answer = await load.send(100_000)
                if answer.code == 0:
                    sent += 100_000
                    bodies.append(load.acknowledged[-1])
                else:
                    assert answer.code in (1, 14), answer.remark
                    await asyncio.sleep(0.02)
        answer = await load.client.call(load.addr, pull(0, 0), 20)
        assert answer.remark == "OFFSET_TOO_SMALL"
        first = int((answer.ext or {})["minOffset"])
        assert 0 < first < len(bodies) == int((answer.ext or {})["maxOffset"])
        await load.client.close()
        assert broker.terminate() == 0
    finally:
        broker.kill()


async def test_a_file_size_limit_refuses_until_it_is_lifted(tmp_path: Path) -> None:
    """A write beyond the limit sends SIGXFSZ, which ends a program that does not handle it."""
    broker = BrokerProcess(tmp_path)
    try:
        load = await started(broker)
        await load.send()
        assert broker.pid
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        answer = await load.until_refused()
        assert "File too large" in (answer.remark or "")
        assert await load.stored() == load.acknowledged
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, unlimited)
        await load.until_accepted()
        for _ in range(40):
            assert (await load.send()).code == 0
        assert await load.stored() == load.acknowledged
        await again(broker, load)
    finally:
        broker.kill()


@pytest.mark.slow("kills a broker on a real device")
@pytest.mark.representative
async def test_what_sync_flush_acknowledged_is_on_a_device_that_loses_the_rest(
    tmp_path: Path, disk: SmallDisk
) -> None:
    broker = BrokerProcess(
        tmp_path, storePathRootDir=str(disk.path / "store"), flushDiskType="SYNC_FLUSH",
        osPageCacheBusyTimeOutMills="60000",  # a sync may be slow beside other processes
    )  # fmt: skip
    try:
        for number in range(3):
            load = await started(broker)
            before = await load.stored()
            for _ in range(30 + number):
                assert (await load.send(3000)).code == 0
            before += load.acknowledged
            await asyncio.to_thread(disk.pull_the_plug)
            answer = await load.send()
            assert answer.code != 0
            assert "Input/output error" in (answer.remark or ""), answer.remark
            await load.client.close()
            assert broker.terminate() == 0  # a clean stop works without the disk
            await asyncio.to_thread(disk.unmount)
            await asyncio.to_thread(disk.mount)
            load = await started(broker)
            assert await load.stored() == before
            await load.client.close()
            assert broker.terminate() == 0
    finally:
        broker.kill()


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Mount the directory read-only."""
    if os.geteuid() != 0 or run("mount", "--bind", str(directory), str(directory)).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        assert run("mount", "-o", "remount,ro,bind", str(directory)).returncode == 0
        yield
    finally:
        assert run("umount", str(directory)).returncode == 0


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_a_read_only_store_is_not_opened_and_not_touched(tmp_path: Path) -> None:
    store = tmp_path / "store"
    broker = BrokerProcess(tmp_path)
    load = await started(broker)
    await load.send()
    await load.client.close()
    broker.kill()
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    conf = tmp_path / "mqbroker.conf"
    conf.write_text(format_properties({**SETTINGS, "storePathRootDir": str(store)}))
    with read_only(store):
        ended = await asyncio.to_thread(run, sys.executable, "-c", MQBROKER, "-c", str(conf))
    assert ended.returncode == 253
    assert "Read-only file system" in ended.stderr
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before

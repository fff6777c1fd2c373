"""Reading store files from the loop without waiting for a device, shared by every reader of the store."""

from __future__ import annotations

import asyncio

import msgspec

from cometmq.store.base.descriptors import DescriptorCache
from cometmq.store.base.disk import Buffer, Disk

READ_AHEAD = 128 << 10


class NotCached(msgspec.Struct, frozen=True):
    """A range of a file that is not in memory: a thread should read it, then the request is tried again."""

    path: str
    offset: int
    length: int

    def fetch(self, disk: Disk) -> int:
        """Bring the range, and some of what follows, into the page cache. Waits for the device; belongs in a
        thread.

        Returns the bytes read; 0 when the file is gone.
        """
        return len(self.read(disk, READ_AHEAD))

    def read(self, disk: Disk, least: int = 0) -> bytes:
        """The range, lengthened to `least` bytes; less at the end of the file, nothing when it is gone. Waits
        like `fetch`."""
        try:
            fd = disk.open(self.path, write=False)
        except FileNotFoundError:
            return b""
        try:
            return disk.pread(fd, max(self.length, least), self.offset)
        finally:
            disk.close(fd)


class NotInMemory(Exception):
    """A waiting read that would really have to wait; see `StoreFiles.impatient`."""

    def __init__(self, missing: NotCached) -> None:
        super().__init__(missing)
        self.missing = missing


class StoreFiles:
    """Disk and descriptors of one store. As long as `impatient` is set, waiting reads raise NotInMemory
    instead of waiting.

    carried: what threads have read for the question that is being asked now (see cold_reads.carry), or why
    the device does not give it. It serves where the page cache does not. `carrying` is held by who carries.
    """

    __slots__ = ("carried", "carrying", "descriptors", "disk", "impatient")

    def __init__(self, disk: Disk, open_limit: int | None = None) -> None:
        self.disk = disk
        self.descriptors = DescriptorCache(disk, open_limit)
        self.impatient = False
        self.carried: dict[NotCached, bytes | OSError] = {}
        self.carrying = asyncio.Lock()

    def read(self, path: str, length: int, offset: int, *, wait: bool) -> Buffer | NotCached | None:
        """Exactly `length` bytes at `offset`; None when the file is gone or ends earlier.

        With `wait` false the device is never waited for: the answer may be NotCached. Other OSErrors (EIO)
        pass.
        """
        try:
            fd = self.descriptors.get(path)
        except FileNotFoundError:
            return None
        if not wait:
            found = self.disk.pread_cached(fd, length, offset)
            if found is None:
                found = self.from_carried(path, length, offset)
            if found is None:
                return NotCached(path, offset, length)
            return found if len(found) == length else None
        data = self.waiting_read(fd, path, length, offset)
        return data if len(data) == length else None

    def from_carried(self, path: str, length: int, offset: int) -> bytes | None:
        """`length` bytes, fewer at the end of the file; None if they were not carried. Raises OSError."""
        data = self.carried.get(NotCached(path, offset, length)) if self.carried else None
        if isinstance(data, OSError):
            raise data
        return data

    def waiting_read(self, fd: int, path: str, length: int, offset: int) -> Buffer:
        """`length` bytes of an open file, fewer at its end. Raises NotInMemory where that is asked for."""
        if not self.impatient:
            return self.disk.pread(fd, length, offset)
        found = self.disk.pread_cached(fd, length, offset)
        if found is None:
            found = self.from_carried(path, length, offset)
        if found is None:
            raise NotInMemory(NotCached(path, offset, length))
        return found

    def delete(self, path: str) -> None:
        """Unlink a file and forget its descriptor; an absent file is fine."""
        self.descriptors.drop(path)
        try:
            self.disk.unlink(path)
        except FileNotFoundError:
            pass

"""Reading store files from the loop without waiting for a device, shared by every reader of the store."""

from __future__ import annotations

import msgspec

from cometmq.store.descriptors import DescriptorCache
from cometmq.store.disk import Buffer, Disk

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
        try:
            fd = disk.open(self.path, write=False)
        except FileNotFoundError:
            return 0
        try:
            return len(disk.pread(fd, max(self.length, READ_AHEAD), self.offset))
        finally:
            disk.close(fd)


class NotInMemory(Exception):
    """A waiting read that would really have to wait; see `StoreFiles.impatient`."""

    def __init__(self, missing: NotCached) -> None:
        super().__init__(missing)
        self.missing = missing


class StoreFiles:
    """Disk and descriptors of one store. As long as `impatient` is set, waiting reads raise NotInMemory
    instead of waiting."""

    __slots__ = ("descriptors", "disk", "impatient")

    def __init__(self, disk: Disk, open_limit: int | None = None) -> None:
        self.disk = disk
        self.descriptors = DescriptorCache(disk, open_limit)
        self.impatient = False

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
                return NotCached(path, offset, length)
            return found if len(found) == length else None
        data = self.waiting_read(fd, path, length, offset)
        return data if len(data) == length else None

    def waiting_read(self, fd: int, path: str, length: int, offset: int) -> Buffer:
        """`length` bytes of an open file, fewer at its end. Raises NotInMemory where that is asked for."""
        if not self.impatient:
            return self.disk.pread(fd, length, offset)
        found = self.disk.pread_cached(fd, length, offset)
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

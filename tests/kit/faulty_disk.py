"""A disk with planned failures, for tests of code that accesses files through the store's `Disk`."""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from cometmq.store import Buffer, Disk

WRITES = ("open", "pwrite", "fdatasync", "fsync_dir", "reserve", "truncate", "rename", "unlink", "makedirs")
"""Operations that change the disk. The reading operations are `pread` and `pread_cached`."""


@dataclass
class Fault:
    """A planned failure of disk operations.

    Attributes:
        operation: Name of the operation that fails; "*" stands for every operation in WRITES.
        error: Error number of the raised OSError.
        first: Number of matching calls until the first failure; 1 fails the next call.
        times: Number of failures.
        match: Only paths that contain this text are affected.
        place: Only reads and writes of this byte offset are affected, as with a bad sector.
        partial: Fraction of its data that a failing `pwrite` writes before it fails.
    """

    operation: str
    error: int = errno.EIO
    first: int = 1
    times: int = 1
    match: str = ""
    place: int | None = None
    partial: float = 0.0


class FaultyDisk(Disk):
    """An `Disk` with planned failures and a count of calls by operation.

    Args:
        really_sync: Whether syncs reach the device. False makes long test series faster.
    """

    __slots__ = ("_paths", "before", "calls", "faults", "really_sync")

    def __init__(self, *, really_sync: bool = True) -> None:
        super().__init__()
        self.lends_descriptors = False  # every sync must be counted and may fail
        self.really_sync = really_sync
        self._paths: dict[int, str] = {}
        self.calls: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.before: Callable[[str, str], None] = lambda _operation, _path: None

    def fail(self, operation: str, **how: object) -> Fault:
        """Plan a failure and return it. `how` holds attributes of `Fault`."""
        fault = Fault(operation, **how)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def cannot_read(self, match: str, place: int) -> None:
        """Make all reads of a byte fail in files whose paths contain a text."""
        for operation in ("pread", "pread_cached"):
            self.fail(operation, match=match, place=place, times=sys.maxsize)

    def heal(self) -> None:
        self.faults.clear()

    def _check(self, operation: str, path: str, offset: int = 0, length: int = 0) -> Fault | None:
        self.before(operation, path)
        self.calls[operation] += 1
        if operation in WRITES:
            self.calls["*"] += 1
        for fault in self.faults:
            if fault.operation not in (operation, "*") or fault.match not in path or fault.times <= 0:
                continue
            if fault.operation == "*" and operation not in WRITES:
                continue
            if fault.place is not None and not offset <= fault.place < offset + length:
                continue
            fault.first -= 1
            if fault.first > 0:
                continue
            fault.times -= 1
            if fault.partial == 0.0:
                raise OSError(fault.error, os.strerror(fault.error), path)
            return fault
        return None

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        if create:
            self._check("open", path)
        fd = super().open(path, create=create, exclusive=exclusive, write=write)
        self._paths[fd] = path
        return fd

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._check("pread", self._paths[fd], offset, length)
        return super().pread(fd, length, offset)

    def pread_cached(self, fd: int, length: int, offset: int) -> Buffer | None:
        self._check("pread_cached", self._paths[fd], offset, length)
        return super().pread_cached(fd, length, offset)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        fault = self._check("pwrite", self._paths[fd], offset, len(data))
        if fault is not None:
            super().pwrite(fd, memoryview(data)[: int(len(data) * fault.partial)], offset)
            raise OSError(fault.error, os.strerror(fault.error))
        return super().pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        self._check("fdatasync", self._paths[fd])
        if self.really_sync:
            super().fdatasync(fd)

    def fsync_dir(self, path: str) -> None:
        self._check("fsync_dir", path)
        if self.really_sync:
            super().fsync_dir(path)

    def sync_filesystem(self, path: str) -> bool:
        return False

    def reserve(self, fd: int, length: int) -> None:
        self._check("reserve", self._paths[fd])
        super().reserve(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        self._check("truncate", self._paths[fd])
        super().truncate(fd, length)

    def rename(self, source: str, target: str) -> None:
        self._check("rename", source)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._check("unlink", path)
        super().unlink(path)

    def makedirs(self, path: str) -> None:
        self._check("makedirs", path)
        super().makedirs(path)

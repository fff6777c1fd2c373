"""Reads files of the store without letting the event loop wait for a disk, and caches their descriptors.

Each function of the store that reads has a parameter `reads` and passes it on, down to the read of the file.
If data is not in memory and `reads` does not allow waiting for the disk, the read raises `NotInMemory`. A
thread then reads the missing range, and the query is repeated (see executor.py).
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

from cometmq.errors import StoreError
from cometmq.store.base.disk import NO_FILE, NOT_A_FILE, Buffer, Disk, FileFacts, is_zero, opened, unlink_any

_MAX_DESCRIPTORS = 16_384
_RESERVED_DESCRIPTORS = 8_192  # descriptors left for connections if the limit of the process is high
_TOOL_DESCRIPTORS = 128
_BLOCK = 1 << 16


class FileRange(NamedTuple):
    """The bytes [offset, offset + length) of a file."""

    path: str
    offset: int
    length: int

    def read(self, disk: Disk) -> bytes:
        """Read the range in a thread, less at the end of the file or without a file. Raises OSError."""
        try:
            with opened(disk, self.path, write=False) as fd:
                return disk.pread(fd, self.length, self.offset)
        except FileNotFoundError:
            return b""


Fetched = Mapping[FileRange, "bytes | OSError"]
"""For each range that a thread has read for a query: its bytes, or the error of the read."""


class RemoteRange(Protocol):
    """A part of the log that is in the object store only (tiered storage). Equal objects are equal parts."""

    async def fetch(self) -> None:
        """Bring the part into memory. Raises an exception that is the answer to the query."""

    def not_kept(self) -> Exception:
        """Return the exception for a part that was fetched, but is no longer in memory."""


class NotInMemory(Exception):
    """Raised if the range `missing` of a file is not in memory and the read must not wait for the disk."""

    def __init__(self, missing: FileRange | RemoteRange) -> None:
        super().__init__(missing)
        self.missing = missing


class Reads:
    """The way in which a query reads files.

    With `wait`, reads wait for the disk. Otherwise they use only the page cache and the ranges in `fetched`,
    and raise NotInMemory for other ranges.
    """

    def __init__(self, *, wait: bool = False, fetched: Fetched | None = None) -> None:
        self.wait = wait
        self._fetched = fetched or {}

    def read(self, disk: Disk, fd: int, path: str, length: int, offset: int) -> Buffer:
        """Read `length` bytes of an open file, or fewer at its end. Raises NotInMemory, OSError."""
        if self.wait:
            return disk.pread(fd, length, offset)
        cached = disk.pread_cached(fd, length, offset)
        if cached is not None:
            return cached
        missing = FileRange(path, offset, length)
        data = self._fetched.get(missing)
        if data is None:
            raise NotInMemory(missing)
        if isinstance(data, OSError):
            raise data
        return data


WAITING = Reads(wait=True)
CACHED = Reads()
"""Reads that use only data in memory."""


def part_facts(disk: Disk, path: str, size: int, setting: str) -> FileFacts | None:
    """Return the facts about a store file that must have `size` bytes; None if it does not exist.

    Raises:
        StoreError: The path is not a regular file, or the file's length or name does not fit `size`: the
            file was written with another value of `setting`.
    """
    facts, base = disk.facts(path), int(os.path.basename(path))
    if facts is not None and not facts.regular:
        raise StoreError(NO_FILE, path)
    if facts is not None and (base % size or facts.size > size):
        raise StoreError(
            f"a file of {facts.size} bytes at position {base} contradicts {setting}={size}", path
        )
    return facts


def fair_share() -> int:
    """Return how many files the store may keep open: a part of the process's limit on open files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    return min(_MAX_DESCRIPTORS, max(allowed // 2, allowed - _RESERVED_DESCRIPTORS))


class DescriptorCache:
    """The open files of a store, by path. Above a limit, the least recently used file is closed.

    Only the loop's thread may use the cache; other threads open paths themselves. When a path is deleted, its
    descriptor must be dropped: otherwise a new file of that name would be read through the old descriptor.
    """

    def __init__(self, disk: Disk, limit: int, *, write: bool) -> None:
        self.disk = disk
        self._write = write
        self._limit = max(8, limit)
        self._open: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def descriptor(self, path: str) -> int:
        """Return the descriptor of an existing file. Raises OSError.

        The cache may close the descriptor in the next call of `descriptor` or `keep`.
        """
        table = self._open
        fd = table.get(path)
        if fd is not None:
            table.move_to_end(path)
            return fd
        fd = self.disk.open(path, write=self._write)
        self.keep(path, fd)
        return fd

    def keep(self, path: str, fd: int) -> None:
        """Add a descriptor that the caller opened. The cache owns it from then on."""
        self.drop(path)
        self._open[path] = fd
        if len(self._open) > self._limit:
            _, oldest = self._open.popitem(last=False)
            self.disk.close(oldest)

    def drop(self, path: str) -> None:
        fd = self._open.pop(path, None)
        if fd is not None:
            self.disk.close(fd)

    def close(self) -> None:
        while self._open:
            _, fd = self._open.popitem()
            self.disk.close(fd)


class StoreFiles(DescriptorCache):
    """The disk of one store, and the cache of its open files."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk, fair_share(), write=True)

    def read(self, path: str, length: int, offset: int, reads: Reads) -> Buffer | None:
        """Read exactly `length` bytes, or None without such a file or length. Raises NotInMemory, OSError."""
        try:
            fd = self.descriptor(path)
        except FileNotFoundError:
            return None
        data = reads.read(self.disk, fd, path, length, offset)
        return data if len(data) == length else None

    def delete(self, path: str) -> None:
        """Delete a file if it exists, and drop its descriptor."""
        self.drop(path)
        unlink_any(self.disk, path)


class ReadOnlyFiles(DescriptorCache):
    """The files of a store, for tools that do not open the store. A context manager, which closes the files.

    A broker may be using the store meanwhile, so a file can disappear between two reads. A file that has
    disappeared counts as empty, and so does anything that is not a regular file: a link, a pipe, a device.
    """

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk, _TOOL_DESCRIPTORS, write=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, path: str, length: int, offset: int) -> bytes:
        """Read up to `length` bytes: fewer at the end of the file, none without a file. Raises OSError."""
        fd = self._existing(path)
        return b"" if fd is None else self.disk.pread(fd, length, offset)

    def next_data(self, path: str, offset: int) -> int | None:
        """Return the start of the first data at or after `offset`, or None if only a hole follows."""
        fd = self._existing(path)
        return None if fd is None else self.disk.next_data(fd, offset)

    def _existing(self, path: str) -> int | None:
        try:
            return self.descriptor(path)
        except FileNotFoundError:
            return None
        except OSError as failure:
            if failure.errno in NOT_A_FILE:
                return None
            raise


def first_byte(files: ReadOnlyFiles, path: str, start: int, stop: int) -> int | None:
    """Return the position of the first nonzero byte in [start, stop) of a file, or None.

    Holes are skipped without reading them.
    """
    at: int | None = start
    while at is not None and at < stop:
        data = files.read(path, min(_BLOCK, stop - at), at)
        if not data:
            return None
        if not is_zero(data):
            return at + len(data) - len(data.lstrip(b"\0"))
        at = files.next_data(path, at + len(data))
    return None

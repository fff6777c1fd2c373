"""Reads files of the store without letting the event loop wait for a disk.

Each function of the store that reads has a parameter `reads` and passes it on, down to the read of the file.
If data is not in memory and `reads` does not allow waiting for the disk, the read raises `NotInMemory`. A
thread then reads the missing range, and the query is repeated (see uncached_reads.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cometmq.errors import StoreError
from cometmq.store.base.descriptors import DescriptorCache
from cometmq.store.base.disk import NO_FILE, Buffer, Disk, FileFacts, opened, unlink_any


class FileRange(NamedTuple):
    """The bytes [offset, offset + length) of a file."""

    path: str
    offset: int
    length: int

    def read(self, disk: Disk) -> bytes:
        """Read the range in a thread.

        Return fewer bytes at the end of the file, none if the file does not exist.

        Raises OSError.
        """
        try:
            with opened(disk, self.path, write=False) as fd:
                return disk.pread(fd, self.length, self.offset)
        except FileNotFoundError:
            return b""


Fetched = Mapping[FileRange, "bytes | OSError"]
"""For each range that a thread has read for a query: its bytes, or the error of the read."""


class NotInMemory(Exception):
    """Raised if the range `missing` of a file is not in memory and the read must not wait for the disk.

    A thread then reads the range, and the query is repeated.
    """

    def __init__(self, missing: FileRange) -> None:
        super().__init__(missing)
        self.missing = missing


class Reads:
    """The way in which a query reads files.

    With `wait`, reads wait for the disk. Otherwise they use only the page cache and the ranges in `fetched`,
    and raise NotInMemory for other ranges.
    """

    __slots__ = ("_fetched", "_wait")

    def __init__(self, *, wait: bool = False, fetched: Fetched | None = None) -> None:
        self._wait = wait
        self._fetched = fetched or {}

    def read(self, disk: Disk, fd: int, path: str, length: int, offset: int) -> Buffer:
        """Read `length` bytes of an open file, or fewer at the end of the file.

        Raises:
            NotInMemory: The bytes are not in memory, and the read must not wait for the disk.
            OSError: The bytes cannot be read.
        """
        if self._wait:
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


class StoreFiles:
    """The disk of one store, and the cache of its open files."""

    __slots__ = ("descriptors", "disk")

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.descriptors = DescriptorCache(disk)

    def read(self, path: str, length: int, offset: int, reads: Reads) -> Buffer | None:
        """Read exactly `length` bytes of a file. Return None if the file does not exist or is too short.

        Raises:
            NotInMemory: The bytes are not in memory, and the read must not wait for the disk.
            OSError: The bytes cannot be read.
        """
        try:
            fd = self.descriptors.get(path)
        except FileNotFoundError:
            return None
        data = reads.read(self.disk, fd, path, length, offset)
        return data if len(data) == length else None

    def delete(self, path: str) -> None:
        """Delete a file if it exists, and drop its descriptor."""
        self.descriptors.drop(path)
        unlink_any(self.disk, path)

"""Reading store files from the loop without waiting for a device, shared by every reader of the store.

Whoever reads is given `Reads` and hands it on, down to the file. Those that may not wait raise `NotInMemory`;
the question is then asked again once a thread has read what was missing (see cold_reads.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cometmq.errors import StoreError
from cometmq.store.base.descriptors import DescriptorCache
from cometmq.store.base.disk import NO_FILE, Buffer, Disk, FileFacts, opened, unlink_any


class FileRange(NamedTuple):
    """Bytes [offset, offset + length) of a file."""

    path: str
    offset: int
    length: int

    def read(self, disk: Disk) -> bytes:
        """The range; less at the end of the file, nothing when it is gone. For a thread. Raises OSError."""
        try:
            with opened(disk, self.path, write=False) as fd:
                return disk.pread(fd, self.length, self.offset)
        except FileNotFoundError:
            return b""


Fetched = Mapping[FileRange, "bytes | OSError"]
"""What threads have read for one question, or why the device does not give it."""


class NotInMemory(Exception):
    """A read would wait for the device: a thread reads `missing`, then the question is asked again."""

    def __init__(self, missing: FileRange) -> None:
        super().__init__(missing)
        self.missing = missing


class Reads:
    """How one question reads: with `wait` it waits for the device, else from the page cache or `fetched`."""

    __slots__ = ("_fetched", "_wait")

    def __init__(self, *, wait: bool = False, fetched: Fetched | None = None) -> None:
        self._wait = wait
        self._fetched = fetched or {}

    def read(self, disk: Disk, fd: int, path: str, length: int, offset: int) -> Buffer:
        """`length` bytes of an open file, fewer at its end. Raises NotInMemory, OSError."""
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
"""Only what is in memory."""


def part_facts(disk: Disk, path: str, size: int, setting: str) -> FileFacts | None:
    """Facts of one of many files of `size` bytes, named by its first position; None if it is gone. Raises
    StoreError where something else stands, or a file that was written with another size."""
    facts, base = disk.facts(path), int(os.path.basename(path))
    if facts is not None and not facts.regular:
        raise StoreError(NO_FILE, path)
    if facts is not None and (base % size or facts.size > size):
        raise StoreError(f"{facts.size} bytes from {base} on do not fit {setting}={size}", path)
    return facts


class StoreFiles:
    """Disk and descriptors of one store."""

    __slots__ = ("descriptors", "disk")

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.descriptors = DescriptorCache(disk)

    def read(self, path: str, length: int, offset: int, reads: Reads) -> Buffer | None:
        """Exactly `length` bytes; None when the file is gone or too short. Raises NotInMemory, OSError."""
        try:
            fd = self.descriptors.get(path)
        except FileNotFoundError:
            return None
        data = reads.read(self.disk, fd, path, length, offset)
        return data if len(data) == length else None

    def delete(self, path: str) -> None:
        """Unlink a file and forget its descriptor; an absent file is fine."""
        self.descriptors.drop(path)
        unlink_any(self.disk, path)

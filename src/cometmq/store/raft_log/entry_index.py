"""The index of a raft log, which locates each entry: units of 32 bytes in files of equal length.

The unit of the entry with index i is at byte 32 i; files are named by the position of their first byte, as in
DLedger 0.3.1. CometMQ writes the unit of an entry only after the entry has been synced
(docs/reference/storage.md, DLedger files).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from cometmq.protocol.record.framing import ENTRY_MAGIC
from cometmq.store.base.disk import Buffer, Disk, is_numbered, opened, write_all, zero_out
from cometmq.store.base.files import WAITING, ReadOnlyFiles, Reads, StoreFiles, part_facts

FILE_SIZE = 32 * 5 * 1024 * 1024
"""The length of a file in bytes. The file is sparse: most of it is never written."""
_KIND = np.dtype([("magic", ">i4"), ("position", ">i8"), ("size", ">i4"), ("index", ">i8"), ("term", ">i8")])
UNIT = _KIND.itemsize


class EntryLocation(NamedTuple):
    """The log position, size in bytes and term of an entry."""

    position: int
    size: int
    term: int

    @property
    def end(self) -> int:
        return self.position + self.size


class EntryIndex:
    """The files that hold the location of each entry in a member's raft log. For the loop thread only."""

    def __init__(self, files: StoreFiles, directory: str) -> None:
        """Open the index of a raft log. Raises OSError, or StoreError if a file has a wrong length."""
        self._files = files
        self._disk = files.disk
        self._directory = directory
        self._bases: list[int] = []
        self._unsynced: set[str] = set()  # Paths to sync: changed files, and directories with new files
        for name in self._disk.listdir(directory):
            if is_numbered(name, 20):
                facts = part_facts(
                    self._disk, os.path.join(directory, name), FILE_SIZE, "the index of entries"
                )
                if facts is None:
                    continue
                if facts.size < FILE_SIZE:
                    with opened(self._disk, os.path.join(directory, name)) as fd:
                        self._disk.truncate(fd, FILE_SIZE)
                self._bases.append(int(name))

    def _path(self, base: int) -> str:
        return os.path.join(self._directory, f"{base:020d}")

    def has_files(self, first: int, last: int) -> bool:
        """Return whether all index files exist that hold the positions of the entries `first` to `last`."""
        begin, end = first * UNIT // FILE_SIZE, last * UNIT // FILE_SIZE
        return first <= last and all(number * FILE_SIZE in self._bases for number in range(begin, end + 1))

    def location(self, index: int, reads: Reads = WAITING) -> EntryLocation | None:
        """Return the location of an entry, or None if it is not in the index. Raises NotInMemory, OSError."""
        found = self.locations(index, 1, reads)
        return found[0] if found else None

    def locations(self, index: int, count: int, reads: Reads = WAITING) -> list[EntryLocation]:
        """Return the locations of at most `count` entries from `index` on, up to the end of an index file."""
        at = index * UNIT
        base = at - at % FILE_SIZE
        if index < 0 or base not in self._bases:
            return []
        length = min(count * UNIT, base + FILE_SIZE - at)
        data = self._files.read(self._path(base), length, at - base, reads)
        if data is None:
            return []
        return _locations_of(data, index)

    def write(self, first: int, positions: Sequence[int], sizes: Sequence[int], terms: Sequence[int]) -> None:
        """Write the locations of consecutive entries from index `first` on. Raises OSError."""
        units = np.empty(len(positions), _KIND)
        units["magic"], units["index"] = ENTRY_MAGIC, first + np.arange(len(positions))
        units["position"], units["size"], units["term"] = positions, sizes, terms
        data = units.tobytes()
        at, written = first * UNIT, 0
        while written < len(data):
            base = at - at % FILE_SIZE
            part = data[written : written + base + FILE_SIZE - at]
            path = self._made(base)
            write_all(self._disk, self._files.descriptor(path), part, at - base)
            self._unsynced.add(path)
            written += len(part)
            at += len(part)

    def _made(self, base: int) -> str:
        path = self._path(base)
        if base not in self._bases:
            with opened(self._disk, path, create=True) as fd:
                self._disk.truncate(fd, FILE_SIZE)
            self._bases = sorted({*self._bases, base})
            self._unsynced.add(self._directory)
        return path

    def cut(self, index: int) -> None:
        """Remove the entry `index` and all later ones, durably. Raises OSError."""
        at = index * UNIT
        for base in sorted(self._bases, reverse=True):
            path = self._path(base)
            if base >= at and base:
                self._files.delete(path)
                self._bases.remove(base)
                self._unsynced.discard(path)
                self._unsynced.add(self._directory)
            elif base + FILE_SIZE > at:
                with opened(self._disk, path) as fd:
                    if zero_out(self._disk, fd, at - base, FILE_SIZE):
                        self._unsynced.add(path)
        self.sync()

    def forget_before(self, index: int) -> None:
        """Delete each index file that contains only entries before the entry `index`."""
        for base in [base for base in self._bases if base + FILE_SIZE <= index * UNIT]:
            self._files.delete(self._path(base))
            self._bases.remove(base)
            self._unsynced.discard(self._path(base))

    def sync(self) -> None:
        """Sync all changed files of the index, and its directory. Raises OSError."""
        sync_all(self._disk, self.take_unsynced())

    def take_unsynced(self) -> list[str]:
        """Return the unsynced paths. The caller syncs them with `sync_all`, or calls `restore_unsynced`."""
        paths, self._unsynced = sorted(self._unsynced, reverse=True), set()
        return paths

    def restore_unsynced(self, paths: Iterable[str]) -> None:
        """Register paths as unsynced again, because their sync has failed."""
        self._unsynced.update(paths)


def location_on_disk(files: ReadOnlyFiles, directory: str, index: int) -> EntryLocation | None:
    """Return the location of an entry in the index files in `directory`, or None. Raises OSError."""
    at = index * UNIT
    if at < 0:
        return None
    base = at - at % FILE_SIZE
    data = files.read(os.path.join(directory, f"{base:020d}"), UNIT, at - base)
    return next(iter(_locations_of(data, index)), None) if len(data) == UNIT else None


def _locations_of(data: Buffer, index: int) -> list[EntryLocation]:
    """Return the locations in `data`, the units from entry `index` on, up to the first invalid unit."""
    units = np.frombuffer(data, _KIND)
    good = (units["magic"] == ENTRY_MAGIC) & (units["index"] == index + np.arange(len(units)))
    wrong = np.flatnonzero(~good)
    units = units[: int(wrong[0]) if len(wrong) else len(units)]
    columns = [units[name].tolist() for name in ("position", "size", "term")]
    return [EntryLocation(*each) for each in zip(*columns, strict=True)]


def sync_all(disk: Disk, paths: Iterable[str]) -> None:
    """Sync files and directories. Raises OSError. Any thread may call it."""
    for path in paths:
        if disk.is_dir(path):
            disk.fsync_dir(path)
        else:
            with suppress(FileNotFoundError), opened(disk, path) as fd:  # Retention may have deleted the file
                disk.fdatasync(fd)

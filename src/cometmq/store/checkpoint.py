"""`checkpoint`: three time stamps that tell recovery how far the store is known to be durable.

4096 bytes; big-endian i8 at 0 (commit log), 8 (consume queues), 16 (full index files), then zeros; 5.x
keeps replication fields at 24 and 32, which are carried through unchanged. Milliseconds. The store raises
a value only after the data up to it has been flushed, so recovery may trust everything below the smaller
of the first two.
"""

from __future__ import annotations

import os
import struct

from cometmq.store.disk import Disk, write_all

FILE_SIZE = 4096
_FIELDS = struct.Struct(">qqq")
_MARGIN_MS = 3000


class Checkpoint:
    """The file and its values in memory."""

    __slots__ = ("_disk", "_path", "index_ms", "logics_ms", "physic_ms", "rest")

    def __init__(self, disk: Disk, path: str) -> None:
        """Read the file; a missing, short or nonsensical one counts as all zeros (recovery then starts at the
        beginning)."""
        self._disk = disk
        self._path = path
        self.physic_ms = 0
        self.logics_ms = 0
        self.index_ms = 0
        self.rest = bytes(FILE_SIZE - _FIELDS.size)
        facts = disk.facts(path)
        if facts is not None and facts.size >= _FIELDS.size:
            fd = disk.open(path, write=False)
            try:
                data = disk.pread(fd, FILE_SIZE, 0)
            finally:
                disk.close(fd)
            values = _FIELDS.unpack_from(data)
            if all(0 <= value < 1 << 53 for value in values):
                self.physic_ms, self.logics_ms, self.index_ms = values
            self.rest = data[_FIELDS.size :].ljust(FILE_SIZE - _FIELDS.size, b"\0")

    @property
    def min_timestamp(self) -> int:
        """Records stored at or before this are in the log and in their queues, durably."""
        return max(0, min(self.physic_ms, self.logics_ms) - _MARGIN_MS)

    def encode(self) -> bytes:
        return _FIELDS.pack(self.physic_ms, self.logics_ms, self.index_ms) + self.rest

    def flush(self) -> None:
        """Write and sync. Raises OSError."""
        made = self._disk.facts(self._path) is None
        fd = self._disk.open(self._path, create=True)
        try:
            write_all(self._disk, fd, self.encode(), 0)
            self._disk.fdatasync(fd)
        finally:
            self._disk.close(fd)
        if made:
            self._disk.fsync_dir(os.path.dirname(self._path))

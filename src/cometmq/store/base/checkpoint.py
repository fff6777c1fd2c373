"""`checkpoint`: three time stamps that tell recovery how far the store is known to be durable.

4096 bytes; big-endian i8 at 0 (commit log), 8 (consume queues), 16 (full index files), then zeros; 5.x
keeps replication fields at 24 and 32, which are carried through unchanged. Milliseconds. The store raises
a value only after the data up to it has been flushed, so recovery may trust everything below the smaller
of the first two.

Times are a coarse measure (a second may hold a hundred megabytes), so ours adds where exactly the durable
part ends: a `Mark`, in the zeros from byte 64 on. It repeats the three times and has a CRC: when Apache's
broker has moved them since, or a byte is damaged, there is no mark. It lies in the sector of the times, so
a power failure cannot tear the two apart.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import NamedTuple
from zlib import crc32

from cometmq.store.base.disk import Disk, opened, read_file, write_all

FILE_SIZE = 4096
_FIELDS = struct.Struct(">qqq")
_MARGIN_MS = 3000
_MARK = struct.Struct(">8sqqqqqqqiiq")  # magic, the three times, the fields of Mark
_MAGIC = b"CometMQ2"
_CRC = struct.Struct(">I")
_MARK_AT = 64 - _FIELDS.size  # in `rest`
MARK_PLACE = slice(64, 64 + _MARK.size + _CRC.size)
"""Where the mark lies in the file."""


class Mark(NamedTuple):
    """Every record before log position `position` is durable, with its queue unit and its index entries.

    `last` is where one of the last of these records begins (-1: unknown), `queue_ends` the sum of the maximum
    offsets of all queues (0: unknown). `index_name` is the newest index file (a number; 0: none);
    its first `index_count` entry numbers are durable and lead up to the record at `index_end`, and its slots
    lack no entry below `index_slots`.
    """

    position: int
    last: int = -1
    queue_ends: int = 0
    index_name: int = 0
    index_count: int = 0
    index_slots: int = 0
    index_end: int = 0


class Checkpoint:
    """The file and its values in memory, which are the loop's; `flush` may run in any thread."""

    __slots__ = ("_disk", "_lock", "_path", "_rest", "index_ms", "logics_ms", "mark", "physic_ms")

    def __init__(self, disk: Disk, path: str) -> None:
        """Read the file; a missing, short or nonsensical one counts as all zeros (recovery then starts at the
        beginning)."""
        self._disk = disk
        self._path = path
        self._lock = threading.Lock()  # of two flushes the one that comes last writes the newest values
        self.physic_ms = 0
        self.logics_ms = 0
        self.index_ms = 0
        self.mark: Mark | None = None
        self._rest = bytes(FILE_SIZE - _FIELDS.size)
        facts = disk.facts(path)
        if facts is not None and facts.size >= _FIELDS.size:
            data = read_file(disk, path, FILE_SIZE)
            values = _FIELDS.unpack_from(data)
            if all(0 <= value < 1 << 53 for value in values):
                self.physic_ms, self.logics_ms, self.index_ms = values
            self._rest = data[_FIELDS.size :].ljust(FILE_SIZE - _FIELDS.size, b"\0")
            self.mark = mark_of(data)

    @property
    def min_timestamp(self) -> int:
        """Records stored at or before this are in the log and in their queues, durably."""
        return max(0, min(self.physic_ms, self.logics_ms) - _MARGIN_MS)

    def encode(self) -> bytes:
        """The file's bytes."""
        times = (self.physic_ms, self.logics_ms, self.index_ms)
        mark = b""
        if self.mark is not None:
            mark = _MARK.pack(_MAGIC, *times, *self.mark)
            mark += _CRC.pack(crc32(mark))
        elif self._rest.startswith(_MAGIC, _MARK_AT):
            mark = bytes(_MARK.size + _CRC.size)
        return _FIELDS.pack(*times) + self._rest[:_MARK_AT] + mark + self._rest[_MARK_AT + len(mark) :]

    def distrust(self) -> None:
        """Vouch for nothing any more, on the device when this returns. Raises OSError.

        For rebuilds from further back than the checkpoint: should one be interrupted, the next must begin
        there too.
        """
        if self.physic_ms or self.logics_ms or self.index_ms or self.mark is not None:
            self.physic_ms = self.logics_ms = self.index_ms = 0
            self.mark = None
            self.flush()

    def distrust_index(self) -> None:
        """Vouch for no entry of the index any more, on the device when this returns. Raises OSError.

        For recoveries that write entries over some that the checkpoint covers. They may be others: the keys
        of topics that have been deleted since are left out.
        """
        if self.index_ms or self.mark is not None:
            self.index_ms = 0
            self.mark = None
            self.flush()

    def lower(self, stored_ms: int) -> None:
        """Vouch for no record that was stored after `stored_ms`, on the device when this returns. Raises
        OSError. For a log that is cut."""
        self.physic_ms, self.logics_ms, self.index_ms = (
            min(value, stored_ms) for value in (self.physic_ms, self.logics_ms, self.index_ms)
        )
        self.mark = None
        self.flush()

    def flush(self) -> None:
        """Write and sync. Raises OSError."""
        with self._lock:
            made = self._disk.facts(self._path) is None
            with opened(self._disk, self._path, create=True) as fd:
                write_all(self._disk, fd, self.encode(), 0)
                self._disk.fdatasync(fd)
            if made:
                self._disk.fsync_dir(os.path.dirname(self._path) or ".")


def mark_of(data: bytes) -> Mark | None:
    """The mark in a checkpoint file's bytes; None if there is none, or none that still holds."""
    at = MARK_PLACE.start
    if len(data) < MARK_PLACE.stop or not mark_is_whole(data):
        return None
    values = _MARK.unpack_from(data, at)
    return Mark(*values[4:]) if values[1:4] == _FIELDS.unpack_from(data) else None


def mark_is_whole(data: bytes) -> bool:
    """Whether an undamaged mark lies in its place; it may be older than the times."""
    mark = data[MARK_PLACE]
    return mark.startswith(_MAGIC) and _CRC.unpack(mark[-_CRC.size :])[0] == crc32(mark[: -_CRC.size])

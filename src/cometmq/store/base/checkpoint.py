"""The file `checkpoint`: three times that tell recovery which part of the store is known to be durable.

The file has 4096 bytes and begins with three big-endian 8-byte integers: the times of the commit log, of the
consume queues and of the full index files. The rest is zeros. 5.x keeps replication fields at 24 and 32,
which are preserved. Times are in milliseconds. The store raises a time only after everything stored up to
that time has been flushed. So recovery may trust everything stored up to the earlier one of the first two
times.

A time is coarse (a hundred megabytes may be stored in a second), so CometMQ also stores the exact position
where the durable part ends: a `CheckpointPosition`, in the zeros from byte 64 on. It repeats the three times
and has a CRC. If Apache's broker has changed the times since, or if a byte is damaged, the checkpoint
position is ignored. It lies in the same sector as the times, so a power failure cannot separate the two.
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
_POSITION = struct.Struct(">8sqqqqqqqiiq")  # Magic, file times, fields of `CheckpointPosition`
_MAGIC = b"CometMQ2"
_CRC = struct.Struct(">I")
# The file begins with three times. The checkpoint position follows at byte 64. This is its distance, in
# bytes, from the end of the times.
_POSITION_AT = 64 - _FIELDS.size
POSITION_LOCATION = slice(64, 64 + _POSITION.size + _CRC.size)
"""The part of the file that holds the checkpoint position."""


class CheckpointPosition(NamedTuple):
    """The exact positions up to which log, queues and index of a store are durable.

    Attributes:
        position: Every record before this log position is durable, as are its queue unit and index entries.
        last: The log position of one of the newest durable records; -1 if unknown.
        queue_ends: The sum of the maximum offsets of all queues; 0 if unknown.
        index_name: The name of the newest index file, as a number; 0 if there is none.
        index_count: In that index file, all entries with a number less than this one are durable.
        index_end: The log position of the record to which the last of these entries belongs.
        index_slots: The hash slots stored in that index file include all entries with a number less than this
            one.
    """

    position: int
    last: int = -1
    queue_ends: int = 0
    index_name: int = 0
    index_count: int = 0
    index_slots: int = 0
    index_end: int = 0


class Checkpoint:
    """The checkpoint file and its values in memory.

    Only the loop may change the values; `flush` may run in any thread.
    """

    __slots__ = ("_disk", "_lock", "_path", "_rest", "index_ms", "logics_ms", "physic_ms", "saved")

    def __init__(self, disk: Disk, path: str) -> None:
        """Read the file. If it is missing, short or invalid, recovery starts at the beginning of the log."""
        self._disk = disk
        self._path = path
        self._lock = threading.Lock()  # Allows one `flush` at a time, so the newest values are written last
        self.physic_ms = 0
        self.logics_ms = 0
        self.index_ms = 0
        self.saved: CheckpointPosition | None = None
        self._rest = bytes(FILE_SIZE - _FIELDS.size)
        facts = disk.facts(path)
        if facts is not None and facts.size >= _FIELDS.size:
            data = read_file(disk, path, FILE_SIZE)
            values = _FIELDS.unpack_from(data)
            if all(0 <= value < 1 << 53 for value in values):
                self.physic_ms, self.logics_ms, self.index_ms = values
            self._rest = data[_FIELDS.size :].ljust(FILE_SIZE - _FIELDS.size, b"\0")
            self.saved = checkpoint_position_of(data)

    @property
    def min_timestamp(self) -> int:
        """The store time (epoch ms) up to which records and their queue units are durable."""
        return max(0, min(self.physic_ms, self.logics_ms) - _MARGIN_MS)

    def encode(self) -> bytes:
        times = (self.physic_ms, self.logics_ms, self.index_ms)
        saved = b""
        if self.saved is not None:
            saved = _POSITION.pack(_MAGIC, *times, *self.saved)
            saved += _CRC.pack(crc32(saved))
        elif self._rest.startswith(_MAGIC, _POSITION_AT):
            saved = bytes(_POSITION.size + _CRC.size)
        return (
            _FIELDS.pack(*times) + self._rest[:_POSITION_AT] + saved + self._rest[_POSITION_AT + len(saved) :]
        )

    def reset(self) -> None:
        """Reset the checkpoint to zeros and sync it. Raises OSError.

        A rebuild that starts before the checkpoint does this first, so that after an interruption the next
        recovery also starts there.
        """
        if self.physic_ms or self.logics_ms or self.index_ms or self.saved is not None:
            self.physic_ms = self.logics_ms = self.index_ms = 0
            self.saved = None
            self.flush()

    def reset_index(self) -> None:
        """Reset the time of the full index files and the checkpoint position, and sync. Raises OSError.

        Recovery calls this method before it overwrites index entries that the checkpoint declares durable.
        The new entries may differ, because they leave out the keys of topics that have been deleted since.
        """
        if self.index_ms or self.saved is not None:
            self.index_ms = 0
            self.saved = None
            self.flush()

    def lower(self, stored_ms: int) -> None:
        """Lower the checkpoint to `stored_ms` and sync it, before the log is truncated. Raises OSError."""
        self.physic_ms, self.logics_ms, self.index_ms = (
            min(value, stored_ms) for value in (self.physic_ms, self.logics_ms, self.index_ms)
        )
        self.saved = None
        self.flush()

    def flush(self) -> None:
        """Write and sync the checkpoint file. Raises OSError."""
        with self._lock:
            made = self._disk.facts(self._path) is None
            with opened(self._disk, self._path, create=True) as fd:
                write_all(self._disk, fd, self.encode(), 0)
                self._disk.fdatasync(fd)
            if made:
                self._disk.fsync_dir(os.path.dirname(self._path) or ".")


def checkpoint_position_of(data: bytes) -> CheckpointPosition | None:
    """Return the checkpoint position in a file's bytes; None if it is damaged or the times have changed."""
    at = POSITION_LOCATION.start
    if len(data) < POSITION_LOCATION.stop or not is_position_whole(data):
        return None
    values = _POSITION.unpack_from(data, at)
    return CheckpointPosition(*values[4:]) if values[1:4] == _FIELDS.unpack_from(data) else None


def is_position_whole(data: bytes) -> bool:
    """Return whether a checkpoint file holds an undamaged checkpoint position. It may be outdated."""
    saved = data[POSITION_LOCATION]
    return saved.startswith(_MAGIC) and _CRC.unpack(saved[-_CRC.size :])[0] == crc32(saved[: -_CRC.size])

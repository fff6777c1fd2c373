"""The log of all messages: segments of equal length, to which each loop iteration appends records.

The records of one loop iteration are encoded into one buffer and written by one `pwrite` (two if the records
continue in the next segment). A record never uses the last 8 bytes of a segment; if the next record does not
fit, a blank record closes the segment. framing.py defines the blank record, and the bytes before each record.
The space of a segment is reserved on the disk before its first write, so a full disk refuses a send and never
breaks a write. A thread reserves the next segment in advance.

Positions are byte offsets in the whole log. `end` is the position after the written bytes, `next` the
position after the bytes in the buffer. All methods belong to the loop, except `reserve_file`.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from cometmq import logs
from cometmq.protocol.record.layout import BLANK_SIZE
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Buffer, write_all
from cometmq.store.base.files import WAITING, Reads, StoreFiles
from cometmq.store.log.directories import LogDirectories
from cometmq.store.log.recent import BLOCK, BlockCache, RecentBytes
from cometmq.store.log.syncer import Unsynced

log = logs.logger(__name__)

_READ_FDS = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROLL_WAIT_S = 5.0  # Maximum wait for the reservation of a segment, in seconds; the same as Apache's


class Extent(msgspec.Struct, gc=False):
    """The bytes buffer[start:stop] of the log at `position`. `stop` is -1 while bytes are being added."""

    fd: int
    base: int
    buffer: bytearray
    start: int
    position: int
    stop: int = -1


class OlderSegments(Protocol):
    """The segments that are in the object store (tiered storage), of which most are no longer local."""

    store_times: dict[int, int]
    """Store times of records that were read, by log position. Such a record never changes."""

    @property
    def begin(self) -> int:
        """The first position of the oldest of these segments; beyond every log if there is none."""

    def read(self, position: int, length: int, reads: Reads) -> Buffer | None:
        """Return bytes of one segment, or None if they are not there. Raises NotInMemory, CommandError."""

    def require(self, positions: Sequence[int], sizes: Sequence[int], reads: Reads) -> None:
        """Raise NotInMemory with the parts that these records need, unless the first one is in memory."""


class CommitLog:
    """The commit log of one store. It writes and reads the segments."""

    def __init__(self, files: StoreFiles, directories: LogDirectories, config: StoreConfig) -> None:
        self.framing = config.framing
        self._files = files
        self._disk = files.disk
        self.directories = directories
        self.segment_size = config.mapped_file_size_commit_log
        self.segments: list[int] = []  # positions of the first bytes of the segments, ascending
        self.end = 0
        self.next = 0
        self.segment_base = -1  # First position of the segment that contains `next`; -1 without segments
        self.limit = 0  # Position at which the segment `segment_base` ends
        self._fd = -1
        self._recent = RecentBytes()
        self.buffer = self._recent.new_chunk(0, ())
        # The bytes to write are slices of this view, because a slice of the bytearray itself would be a copy.
        self._view = memoryview(self.buffer)
        self.used = 0
        # Parts of the unwritten data. Each part lies within one segment and one memory chunk.
        self._extents: list[Extent] = []
        self._read_fds: dict[int, int] = {}
        self.blocks = BlockCache()
        self._spares: dict[int, int] = {}
        self._reserving: tuple[int, Future[int]] | None = None
        # Free bytes on the disk when it last lacked space for a segment; -1 after a segment was created
        self._room_at_failure = -1
        # The areas (descriptor, segment, first position, end) in which failed writes may have left bytes.
        # `claim` overwrites them with zeros.
        self.areas_to_zero: list[tuple[int, int, int, int]] = []
        self.before_write: Callable[[int], None] | None = None  # Called with the end position of each write
        self.unsynced: dict[int, int] = {}  # descriptors of the segments that have unsynced data
        self.older: OlderSegments | None = None

    # -- segments ---------------------------------------------------------------------------------

    def path_of(self, base: int) -> str:
        return self.directories.path_of(base)

    @property
    def min_position(self) -> int:
        return self.segments[0] if self.segments else self.end

    @property
    def readable_min(self) -> int:
        """The first position that readers can read, in a local segment or in the object store."""
        return self.min_position if self.older is None else min(self.older.begin, self.min_position)

    def reserve_file(self, base: int) -> int:
        """Create the segment that starts at `base` at full length, and return its descriptor.

        Any thread may call it. An attempt on a full disk uses up all remaining space for a moment. So after a
        failure for lack of space, the next attempt is made only once the disk has more space than at that
        failure. After an OSError, no file is left.
        """
        path = self.directories.path_of(base)
        if 0 <= self._room(path) <= self._room_at_failure:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        try:
            fd = self._disk.open(path, create=True, exclusive=True)
        except FileExistsError:
            # An earlier call created the file but could neither reserve its space nor remove it.
            self._disk.unlink(path)
            fd = self._disk.open(path, create=True, exclusive=True)
        try:
            self._disk.reserve(fd, self.segment_size)
            self._disk.fsync_dir(os.path.dirname(path))
        except OSError as failure:
            self._disk.close(fd)
            self._disk.unlink(path)
            if failure.errno in _FULL:
                room = self._room(path)
                if not self.lacks_space:
                    log.error(
                        "no space for a log segment of %d bytes, only %d are free: %s",
                        self.segment_size,
                        room,
                        path,
                    )
                self._room_at_failure = room if room < self.segment_size else -1
            raise
        self._room_at_failure = -1
        return fd

    @property
    def lacks_space(self) -> bool:
        """Whether the disk lacked space for a segment at the last attempt to reserve one."""
        return self._room_at_failure >= 0

    def _room(self, path: str) -> int:
        """Return the free bytes on the disk for a segment at `path`, or -1 if the number is unknown."""
        try:
            return self._disk.usage(os.path.dirname(path)).usable
        except OSError:
            return -1

    def segment_to_reserve(self) -> int | None:
        """Return the base of the next segment if it is time to reserve it: the current one is half full."""
        if self.segment_base < 0 or self._reserving is not None:
            return None
        base = self.segment_base + self.segment_size
        if base in self._spares or self.limit - self.next > self.segment_size // 2:
            return None
        return base

    def reservation_started(self, base: int, future: Future[int]) -> None:
        self._reserving = (base, future)

    def reservation_done(self) -> OSError | None:
        """Keep the next segment if it is reserved, or return the error, after which `roll` tries again."""
        if self._reserving is None or not self._reserving[1].done():
            return None
        base, future = self._reserving
        self._reserving = None
        failure = future.exception()
        if failure is None:
            self._spares[base] = future.result()
            return None
        if not isinstance(failure, OSError):
            raise failure
        return failure

    def _next_segment(self, base: int) -> int:
        if self._reserving is not None and self._reserving[0] == base:
            self._reserving[1].exception(timeout=_ROLL_WAIT_S)
            self.reservation_done()
        fd = self._spares.pop(base, None)
        return self.reserve_file(base) if fd is None else fd

    def roll(self) -> None:
        """Close the segment with a blank record, and begin the next one. An OSError changes nothing."""
        if self.segment_base < 0:
            base = self.next - self.next % self.segment_size
            self._enter(base, self._next_segment(base))
            return
        fd = self._next_segment(self.limit)
        if self.next < self.limit:
            if self.used + BLANK_SIZE > len(self.buffer):
                self._new_chunk(BLANK_SIZE)
            self._view[self.used : self.used + BLANK_SIZE] = self.framing.blank(self.limit - self.next)
            self.used += BLANK_SIZE
        self.next = self.limit
        self._enter(self.limit, fd)

    def _enter(self, base: int, fd: int) -> None:
        self.segment_base = base
        self.limit = base + self.segment_size
        self._fd = fd
        self._begin_extent()

    def _begin_extent(self) -> None:
        self._end_extent()
        self._extents.append(Extent(self._fd, self.segment_base, self.buffer, self.used, self.next))

    def _end_extent(self) -> None:
        if self._extents and self._extents[-1].stop < 0:
            self._extents[-1].stop = self.used

    def _new_chunk(self, size: int) -> None:
        """Use another memory chunk for the next bytes. The unwritten bytes of the current chunk are kept."""
        self._end_extent()
        self.buffer = self._recent.new_chunk(size, [extent.buffer for extent in self._extents])
        self._view = memoryview(self.buffer)
        self.used = 0
        if self.segment_base >= 0:
            self._extents.append(Extent(self._fd, self.segment_base, self.buffer, 0, self.next))

    # -- appending --------------------------------------------------------------------------------

    def claim(self, size: int, behind: int = BLANK_SIZE) -> None:
        """Make room for `size` bytes, in a new segment or memory chunk if necessary, for `put`.

        `behind` bytes must remain free in the segment, so that a blank record can follow; 0 if the bytes may
        themselves include it. An OSError changes nothing.
        """
        if self.areas_to_zero:
            self._zero_areas()
        if self.next + size + behind > self.limit:
            self.roll()
        if self.used + size > len(self.buffer):
            self._new_chunk(size)

    def room(self) -> int:
        """Return the log position up to which records can be added with `put` before the next `claim`."""
        if self.areas_to_zero:
            return 0
        return min(self.limit - BLANK_SIZE, self.next + len(self.buffer) - self.used)

    def put(self, data: Buffer) -> None:
        """Add bytes to the unwritten data. `claim` must have made room for them."""
        end = self.used + len(data)
        self._view[self.used : end] = data
        self.used = end
        self.next += len(data)

    def write_tick(self) -> None:
        """Write the bytes that were added since the last call. Raises OSError.

        After a failure, all these bytes are dropped. The place that they had in the log is overwritten with
        zeros before the next write, so that no refused record can appear later.
        """
        self._end_extent()
        extents = self._extents
        if self.before_write is not None:
            self.before_write(self.next)
        try:
            for extent in extents:
                if extent.stop > extent.start:
                    at = extent.position - extent.base
                    with memoryview(extent.buffer) as view:
                        write_all(self._disk, extent.fd, view[extent.start : extent.stop], at)
        except OSError:
            self._undo_tick()
            try:
                self._zero_areas()
            except OSError as failure:
                log.error("the partial records of a failed write could not be cleared yet: %s", failure)
            raise
        for extent in extents:
            self.unsynced[extent.base] = extent.fd
            if not self.segments or extent.base > self.segments[-1]:
                self.segments.append(extent.base)
            if extent.stop > extent.start:
                self._recent.add(extent.buffer, extent.start, extent.position, extent.stop - extent.start)
        self.end = self.next
        self._new_tick()

    def discard_tick(self) -> None:
        """Drop all bytes that were added since the last write. `write_tick` was not called for them."""
        self._end_extent()
        self._undo_tick()
        self.areas_to_zero.clear()

    def _new_tick(self) -> None:
        self._extents = []
        if self.segment_base >= 0:
            self._begin_extent()

    def _undo_tick(self) -> None:
        extents = self._extents
        for extent in extents:
            if extent.stop > extent.start:
                length = extent.stop - extent.start
                self.areas_to_zero.append((extent.fd, extent.base, extent.position, extent.position + length))
            if extent.base not in self.segments:
                self._spares[extent.base] = extent.fd
        self.next = self.end
        base = self.segments[-1] if self.segments else -1
        if base >= 0 and self.end < base + self.segment_size:
            self.segment_base, self.limit = base, base + self.segment_size
            self._fd = next(extent.fd for extent in extents if extent.base == base)
        else:
            self.segment_base, self.limit, self._fd = -1, 0, -1
        self._new_tick()

    def _zero_areas(self) -> None:
        """Overwrite `areas_to_zero`, before the log may be written again. Raises OSError."""
        while self.areas_to_zero:
            fd, base, start, stop = self.areas_to_zero[-1]
            write_all(self._disk, fd, bytes(stop - start), start - base)
            self.areas_to_zero.pop()

    # -- reading ----------------------------------------------------------------------------------

    def recent(self, position: int, length: int) -> bytearray | None:
        if position >= self._recent.start and position + length <= self.end:
            return self._recent.get(position, length)
        return None

    def read(self, position: int, length: int, reads: Reads = WAITING) -> Buffer | None:
        """Return bytes of one segment, or None if the log does not hold them. Raises NotInMemory, OSError."""
        found = self.recent(position, length)
        if found is not None:
            return found
        base = position - position % self.segment_size
        if position < 0 or position + length > self.end or position + length > base + self.segment_size:
            return None
        fd = self._read_fds.get(base)
        if fd is None:
            fd = self._open_for_reading(base)
            if fd < 0:
                return None if self.older is None else self.older.read(position, length, reads)
        data = reads.read(self._disk, fd, self.directories.path_of(base), length, position - base)
        return data if len(data) == length else None

    def block(self, number: int, wanted: Sequence[int], reads: Reads) -> memoryview | None:
        """Return the block `number` (see BlockCache), or None. Raises NotInMemory, OSError.

        There is no block beyond the end of the log or in its newest bytes, which are in memory anyway, or if
        segments do not consist of whole blocks. It is None, too, if it was deleted or cannot be read, or if
        it is not worthwhile for the records at the ascending positions `wanted`.
        """
        found = self.blocks.get(number)
        if found is not None:
            return found
        start = number * BLOCK
        if (
            start + BLOCK > min(self.end, self._recent.start)
            or self.segment_size % BLOCK
            or not self.blocks.should_load(
                number, bisect_left(wanted, start + BLOCK) - bisect_left(wanted, start)
            )
        ):
            return None
        try:
            data = self.read(start, BLOCK, reads)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            return None
        if data is None:
            return None
        view = memoryview(data)
        self.blocks.put(number, view)
        return view

    def _open_for_reading(self, base: int) -> int:
        """Return a new descriptor of a segment, which stays open, or -1 if there is no such segment."""
        if base not in self.segments:
            return -1
        if len(self._read_fds) >= _READ_FDS:
            self._close_read_fds()
        try:
            fd = self._disk.open(self.path_of(base), write=False)
        except FileNotFoundError:
            return -1
        self._read_fds[base] = fd
        return fd

    def _close_read_fds(self) -> None:
        for fd in self._read_fds.values():
            self._disk.close(fd)
        self._read_fds.clear()

    # -- flushing, closing ------------------------------------------------------------------------

    def segments_to_sync(self) -> list[Unsynced]:
        """Return the segments to sync. After the sync, the caller passes them to `synced`."""
        return [Unsynced(base, fd, self.path_of(base)) for base, fd in sorted(self.unsynced.items())]

    def synced(self, segments: Sequence[Unsynced], end: int) -> None:
        """Record that segments are synced up to `end`. Full ones are closed, the last is synced next, too."""
        for base, _, _ in segments:
            if base + self.segment_size <= end and base != self.segment_base:
                fd = self.unsynced.pop(base, -1)
                if fd >= 0:
                    self._disk.close(fd)

    def forget_first(self) -> int:
        """Remove the oldest segment, which must not be the only one; the caller deletes its file.

        Returns its descriptor, or -1. The caller closes it in another thread, because that frees the space of
        the deleted file, which takes time.
        """
        base = self.segments.pop(0)
        self.blocks.clear()
        self.directories.forget(base)
        return self._read_fds.pop(base, -1)

    def close(self, *, keep_spares: bool = False) -> None:
        """Close the log. Delete the segments that are reserved but unused, unless `keep_spares` is set."""
        if self._reserving is not None:
            self._reserving[1].exception()
            self.reservation_done()
        for base, fd in self._spares.items():
            self._disk.close(fd)
            if not keep_spares:
                self._files.delete(self.path_of(base))
        self._spares.clear()
        for fd in {*self.unsynced.values(), self._fd} - {-1}:
            self._disk.close(fd)
        self.unsynced.clear()
        self._close_read_fds()
        self._fd = -1
        self.segment_base = -1
        self._extents = []

    # -- opening ----------------------------------------------------------------------------------

    def begin_at(self, base: int) -> None:
        """Move the beginning of an empty log to the segment `base`. Raises OSError."""
        self.close()
        while self.segments:
            self._files.delete(self.path_of(self.segments[-1]))
            self.directories.forget(self.segments.pop())
        self.limit = 0
        self.resume([], base)

    def close_segments(self) -> list[int]:
        """Close all files, and return the segments. The caller truncates these and calls `resume`."""
        self.close()
        self.limit = 0
        self.blocks.clear()
        return self.segments

    def resume(self, segments: list[int], end: int) -> None:
        """Continue the log at `end`, as recovery has determined it, in the given existing segments."""
        self.segments = segments
        for base in segments:
            self.path_of(base)
        self.end = self.next = end
        self._recent.cut(end)
        base = segments[-1] if segments else -1
        if base >= 0 and end < base + self.segment_size:
            self._fd = self._disk.open(self.path_of(base))
            self.segment_base, self.limit = base, base + self.segment_size
            # Data before `end` may be only in the page cache, so the next sync must include this segment.
            self.unsynced[base] = self._fd
        self._new_tick()

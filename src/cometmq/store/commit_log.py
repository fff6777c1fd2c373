"""The log of all messages: segments of equal length, records appended tick by tick.

Records of one loop tick are encoded into one buffer and leave in one `pwrite` (two when the tick rolls over
to the next segment). A record never uses the last 8 bytes of a segment; when the next one does not fit, a
blank record (i4 remaining bytes, i4 blank magic) closes the segment. Segments are reserved on the disk before
they are used, so a full disk refuses a send and never breaks a write; the next one is reserved ahead in a
thread.

Positions are bytes in the whole log. `end` is the end of what was written, `next` the end of what was
claimed in this tick. Loop thread only, except `reserve_file`.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future

from cometmq.protocol.record import BLANK_MAGIC, BLANK_SIZE, BLANK_STRUCT
from cometmq.store.disk import Buffer, write_all
from cometmq.store.files import NotCached, StoreFiles

log = logging.getLogger(__name__)

_ROLL_WAIT_S = 5.0  # Apache's wait for the allocator thread


class CommitLog:
    """Writer and reader of the segments in one directory."""

    __slots__ = (
        "_disk",
        "_extents",
        "_fd",
        "_files",
        "_paths",
        "_reserving",
        "_scars",
        "_spares",
        "buffer",
        "directory",
        "end",
        "limit",
        "next",
        "segment_base",
        "segment_size",
        "segments",
        "unsynced",
        "used",
    )

    def __init__(self, files: StoreFiles, directory: str, segment_size: int) -> None:
        self._files = files
        self._disk = files.disk
        self.directory = directory
        self.segment_size = segment_size
        self.segments: list[int] = []  # first positions, ascending
        self._paths: dict[int, str] = {}
        self.end = 0
        self.next = 0
        self.segment_base = -1  # segment that `next` lies in; -1 before the first
        self.limit = 0  # end of that segment
        self._fd = -1
        self.buffer = bytearray(1 << 20)
        self.used = 0
        self._extents: list[
            tuple[int, int, int, int]
        ] = []  # parts of the tick: fd, base, start in buffer, position
        self._spares: dict[int, int] = {}
        self._reserving: tuple[int, Future[int]] | None = None
        self._scars: list[tuple[int, int, int, int]] = []
        self.unsynced: dict[int, int] = {}  # descriptors of segments that hold data not yet on the device

    # -- segments ---------------------------------------------------------------------------------

    def path_of(self, base: int) -> str:
        path = self._paths.get(base)
        if path is None:
            path = self._paths[base] = os.path.join(self.directory, f"{base:020d}")
        return path

    @property
    def min_position(self) -> int:
        return self.segments[0] if self.segments else self.end

    def reserve_file(self, base: int) -> int:
        """Make the segment that starts at `base` at full length and return its descriptor. Safe in a thread.

        Raises OSError (ENOSPC …); then no trace of the file is left.
        """
        path = os.path.join(self.directory, f"{base:020d}")
        fd = self._disk.open(path, create=True, exclusive=True)
        try:
            self._disk.reserve(fd, self.segment_size)
            self._disk.fsync_dir(self.directory)
        except OSError:
            self._disk.close(fd)
            self._disk.unlink(path)
            raise
        return fd

    def wants_reservation(self) -> int | None:
        """First position of the segment that should be reserved now, in a thread; None if there is no need
        yet."""
        if self.segment_base < 0 or self._reserving is not None:
            return None
        base = self.segment_base + self.segment_size
        if base in self._spares or self.limit - self.next > self.segment_size // 2:
            return None
        return base

    def reservation_started(self, base: int, future: Future[int]) -> None:
        self._reserving = (base, future)

    def reservation_done(self) -> OSError | None:
        """Take over a finished reservation. Returns its failure, if it failed; a later roll tries again."""
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

    def _take_segment(self, base: int) -> int:
        if self._reserving is not None and self._reserving[0] == base:
            self._reserving[1].exception(timeout=_ROLL_WAIT_S)
            self.reservation_done()
        fd = self._spares.pop(base, None)
        return self.reserve_file(base) if fd is None else fd

    def _roll(self) -> None:
        """Enter the next segment, closing the present one with a blank record. Raises OSError and changes
        nothing."""
        if self.segment_base < 0:
            base = self.next - self.next % self.segment_size
            self._enter(base, self._take_segment(base))
            return
        fd = self._take_segment(self.limit)
        if self.next < self.limit:
            self.make_room(BLANK_SIZE)
            BLANK_STRUCT.pack_into(self.buffer, self.used, self.limit - self.next, BLANK_MAGIC)
            self.used += BLANK_SIZE
        self.next = self.limit
        self._enter(self.limit, fd)

    def _enter(self, base: int, fd: int) -> None:
        self.segment_base = base
        self.limit = base + self.segment_size
        self._fd = fd
        self._extents.append((fd, base, self.used, self.next))

    # -- appending --------------------------------------------------------------------------------

    def claim(self, size: int) -> int:
        """Room for `size` bytes in one segment: returns the place in `buffer`; the position is `next` before
        the call of `claimed`. The caller writes buffer[place:place + size], then calls `claimed(size)`.

        Raises OSError when a segment is needed and cannot be made; nothing has changed then.
        """
        if self._scars:
            self._heal()
        if self.next + size + BLANK_SIZE > self.limit:
            self._roll()
        place = self.used
        if place + size > len(self.buffer):
            self.make_room(size)
        return place

    def claimed(self, size: int) -> None:
        self.used += size
        self.next += size

    def make_room(self, size: int) -> None:
        shortage = self.used + size - len(self.buffer)
        if shortage > 0:
            self.buffer += bytes(max(shortage, len(self.buffer)))

    def write_tick(self) -> None:
        """Write what was claimed since the last call. Raises OSError; then everything claimed is taken
        back and the space is zeroed before anything else is written there, so that no refused record can
        come to life."""
        extents = self._extents
        if not self.used:
            return
        try:
            with memoryview(self.buffer) as view:
                for number, (fd, base, start, position) in enumerate(extents):
                    stop = extents[number + 1][2] if number + 1 < len(extents) else self.used
                    if stop > start:
                        write_all(self._disk, fd, view[start:stop], position - base)
        except OSError:
            self._take_back()
            raise
        for fd, base, _, _ in extents:
            self.unsynced[base] = fd
            if not self.segments or base > self.segments[-1]:
                self.segments.append(base)
        self.end = self.next
        self._new_tick()

    def _new_tick(self) -> None:
        self.used = 0
        if len(self.buffer) > 8 << 20:
            self.buffer = bytearray(1 << 20)
        self._extents = [(self._fd, self.segment_base, 0, self.next)] if self.segment_base >= 0 else []

    def _take_back(self) -> None:
        extents = self._extents
        for number, (fd, base, start, position) in enumerate(extents):
            stop = extents[number + 1][2] if number + 1 < len(extents) else self.used
            self._scars.append((fd, base, position, position + stop - start))
            if base not in self.segments:
                self._spares[base] = fd
        self.next = self.end
        base = self.segments[-1] if self.segments else -1
        if base >= 0 and self.end < base + self.segment_size:
            self.segment_base, self.limit = base, base + self.segment_size
            self._fd = next(fd for fd, at, _, _ in extents if at == base)
        else:
            self.segment_base, self.limit, self._fd = -1, 0, -1
        self._new_tick()

    def _heal(self) -> None:
        """Zero what failed writes may have left. Raises OSError: the log must not be written to until this
        works."""
        while self._scars:
            fd, base, start, stop = self._scars[-1]
            write_all(self._disk, fd, bytes(stop - start), start - base)
            self._scars.pop()

    # -- reading ----------------------------------------------------------------------------------

    def read(self, position: int, length: int, *, wait: bool) -> Buffer | NotCached | None:
        """Bytes of one segment; None if they are not (or no longer, or not yet) there."""
        base = position - position % self.segment_size
        if position < 0 or position + length > self.end or position + length > base + self.segment_size:
            return None
        path = self._paths.get(base)
        if path is None:
            if base not in self.segments:
                return None
            path = self.path_of(base)
        return self._files.read(path, length, position - base, wait=wait)

    # -- flushing, closing ------------------------------------------------------------------------

    def take_unsynced(self) -> list[tuple[int, int]]:
        """(first position, descriptor) of the segments to sync; `synced` gives them back after success."""
        return sorted(self.unsynced.items())

    def synced(self, bases: list[int]) -> None:
        """The segments are on the device up to what was written before the sync began; full ones are let
        go."""
        for base in bases:
            if base + self.segment_size <= self.end and base != self.segment_base:
                fd = self.unsynced.pop(base, -1)
                if fd >= 0:
                    self._disk.close(fd)

    def delete_first(self) -> str:
        """Unlink the oldest segment, which must not be the last. Returns its path."""
        base = self.segments[0]
        path = self.path_of(base)
        fd = self.unsynced.pop(base, -1)
        if fd >= 0:
            self._disk.close(fd)
        self._files.delete(path)
        self._paths.pop(base, None)
        self.segments.pop(0)
        return path

    def close(self, *, keep_spares: bool = False) -> None:
        """Close descriptors and, unless told otherwise, delete segments that were reserved and never used
        (as Apache does)."""
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
        self._fd = -1
        self.segment_base = -1
        self._extents = []

    # -- opening ----------------------------------------------------------------------------------

    def resume(self, segments: list[int], end: int) -> None:
        """Go on behind `end`, the end that recovery found, in the given existing segments."""
        self.segments = segments
        for base in segments:
            self.path_of(base)
        self.end = self.next = end
        base = segments[-1] if segments else -1
        if base >= 0 and end < base + self.segment_size:
            self._fd = self._disk.open(self.path_of(base))
            self.segment_base, self.limit = base, base + self.segment_size
            self.unsynced[base] = self._fd  # what is before `end` may still be only in the page cache
        self._new_tick()

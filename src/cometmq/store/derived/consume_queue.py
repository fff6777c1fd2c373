"""One consume queue: 20-byte units in files of equal size.

A unit consists of the record's log position (8 bytes), the record's size (4 bytes) and the tags code (8
bytes).

New units go to a buffer in memory, the window, and are written in batches, so that ten thousand queues do not
need a system call per message. The newest few dozen units stay in memory after the write, for consumers that
keep up. Offsets are unit numbers, positions are bytes. Files are named by the position of their first byte.

Invariant: window_start <= written <= max_offset. Units from window_start on are in memory, units below
`written` are in the files.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from cometmq.store.base.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.base.disk import NO_FILE, Buffer, is_numbered, is_zero, write_all, zero_out
from cometmq.store.base.files import WAITING, Reads, StoreFiles, part_facts

UNIT_STRUCT = struct.Struct(">qiq")
UNIT_DTYPE = np.dtype([("position", ">i8"), ("size", ">i4"), ("tags", ">i8")])
FILLER_SIZE = 0x7FFFFFFF
FILLER = UNIT_STRUCT.pack(0, FILLER_SIZE, 0)
_UNITS_KEPT = 64  # Number of newest queue units that stay in memory after they were written
_UNITS_PER_READ = 64  # Number of units per read if the caller may need only a few of them
_UNITS_PER_SEARCH_READ = 1024  # Number of units per read in the search for the end of a queue
_PAGE_BYTES = 205 * UNIT  # Bytes per read: 4096, rounded up to a multiple of the unit size


def file_name(position: int) -> str:
    return f"{position:020d}"


class ConsumeQueue:
    """The consume queue of one topic and queue id. For the loop thread only."""

    __slots__ = (
        "_dir_made", "_files", "_last_base", "_last_path", "damaged", "deleted", "dirty", "file_size",
        "key_prefix", "magic", "max_offset", "max_physical", "min_offset", "new_names", "next_offset", "path",
        "positions", "queue_id", "record_topic", "topic", "unsynced_files", "window", "window_start",
        "written", "zeros_after_end",
    )  # fmt: skip

    def __init__(self, files: StoreFiles, path: str, topic: str, queue_id: int, file_size: int) -> None:
        self._files = files
        self._dir_made = False
        self._last_base = -1
        self._last_path = ""
        self.path = path
        self.topic = topic
        self.queue_id = queue_id
        self.file_size = file_size
        # Three values for encoding the records of the queue, computed before the first record: the length and
        # name of the topic, the magic number of the record format, and the hash of `topic#` for the index.
        self.record_topic = b""  # One object, shared by all queues of the topic
        self.magic = 0
        self.key_prefix = 0
        self.positions: list[int] = []  # Position of the first byte of each existing file, ascending
        self.next_offset = 0  # Queue offset of the next message
        self.max_offset = 0  # End of the queue: the offset after its last queue unit
        self.min_offset = 0
        self.max_physical = 0  # Log position at which the record of the last queue unit ends
        self.window = bytearray()
        self.window_start = 0
        self.written = 0
        self.dirty = False
        self.deleted = False
        self.damaged = False  # Whether the files are known to lack some of the queue's units
        self.zeros_after_end = False  # Whether only zeros followed the end of the queue in the loaded files
        self.unsynced_files: set[int] = set()
        self.new_names = False  # whether files were created or deleted after the last directory sync

    def path_of(self, base: int) -> str:
        """Return the path of the file that starts at the position `base`. The last path is cached."""
        if base != self._last_base:
            self._last_base, self._last_path = base, os.path.join(self.path, file_name(base))
        return self._last_path

    @property
    def begin(self) -> int:
        """The first offset in the queue's files. Earlier units have expired."""
        return self.positions[0] // UNIT if self.positions else 0

    # -- writing ----------------------------------------------------------------------------------

    def push(self, physical: int, size: int, tags_code: int, offset: int) -> None:
        """Add the unit of queue offset `offset`, which must be at or after the end of the queue.

        Units between the end and `offset` are filled with Apache's fillers, because their records are lost.
        Readers skip fillers.
        """
        if offset != self.max_offset:
            self.skip_to(offset)
        self.window += UNIT_STRUCT.pack(physical, size, tags_code)
        self.max_offset = offset + 1
        self.max_physical = physical + size

    def skip_to(self, offset: int) -> None:
        """Move the end of the queue forward to `offset`, with fillers in between (see `push`)."""
        if offset < self.max_offset:
            raise ValueError(f"queue {self.topic}/{self.queue_id} already has a unit at offset {offset}")
        if self.max_offset == 0:
            # The queue has no files, or its files hold no valid unit. So it begins at `offset`, and `write`
            # puts fillers before `offset` into the first file that it creates.
            self._begin_at(offset)
        else:
            self.window += FILLER * (offset - self.max_offset)
            self.max_offset = offset

    def forget_all(self) -> None:
        """Delete all units and files, as no record is left. The next record may have any queue offset."""
        self._begin_at(0)

    def _begin_at(self, offset: int) -> None:
        for base in self.positions:
            self._files.delete(self.path_of(base))
            self.new_names = True
        self.positions.clear()
        self.unsynced_files.clear()
        self.window.clear()
        self.window_start = self.written = self.min_offset = self.max_offset = offset

    def write(self) -> None:
        """Write the units that are not in the files yet. After an OSError, the next call tries again."""
        if self.deleted:
            return
        while self.written < self.max_offset:
            position = self.written * UNIT
            base = position - position % self.file_size
            count = min(self.max_offset - self.written, (base + self.file_size - position) // UNIT)
            fd = self._open(base, position)
            begin = (self.written - self.window_start) * UNIT
            # The slice of the bytearray is a copy. A memoryview would prevent the bytearray from growing, and
            # after an error the traceback could keep the view alive.
            write_all(self._files.disk, fd, self.window[begin : begin + count * UNIT], position - base)
            self.written += count
            self.unsynced_files.add(base)
        surplus = self.written - self.window_start - _UNITS_KEPT
        if surplus > _UNITS_KEPT // 2:
            del self.window[: surplus * UNIT]
            self.window_start += surplus

    def make_last_file(self) -> None:
        """Create the last file, with fillers, of a queue that has no files although its end is above 0.

        Without the file, the next start would assume that units are lost. Raises OSError.
        """
        last = (self.max_offset - 1) * UNIT
        base = last - last % self.file_size
        self._open(base, last + UNIT)
        self.unsynced_files.add(base)

    def _open(self, base: int, position: int) -> int:
        """Return the descriptor of the file that starts at `base`, created as a sparse file if missing."""
        path = self.path_of(base)
        if base in self.positions:
            return self._files.descriptor(path)
        disk = self._files.disk
        if not self._dir_made:
            disk.makedirs(self.path)
            for directory in (os.path.dirname(self.path), self.path):
                if disk.is_link(directory):
                    raise OSError(errno.ELOOP, NO_FILE, directory)
            self._dir_made = True
        fd = disk.open(path, create=True)
        try:
            disk.truncate(fd, self.file_size)
            if position > base and not self.positions:
                write_all(disk, fd, FILLER * ((position - base) // UNIT), 0)
        except OSError:
            disk.close(fd)
            self._files.delete(path)
            raise
        self._files.keep(path, fd)
        self.new_names = True
        self.positions.append(base)
        self.positions.sort()
        return fd

    # -- reading ----------------------------------------------------------------------------------

    def read(self, offset: int, count: int, reads: Reads = WAITING) -> Buffer | None:
        """Read at least one and at most `count` queue units from `offset` (in [min_offset, max_offset)) on.

        The result ends at the end of the queue, or at the end of a queue file whose following units are not
        in memory. It is None if the file is missing. Raises NotInMemory, OSError.
        """
        if offset >= self.window_start:
            begin = (offset - self.window_start) * UNIT
            return self.window[begin : begin + count * UNIT]
        if self.deleted:
            # A new topic of the same name may have created files at the paths of this deleted queue.
            return None
        position = offset * UNIT
        base = position - position % self.file_size
        stop = min(offset + count, (base + self.file_size) // UNIT, self.window_start)
        path = self.path_of(base)
        data = self._files.read(path, (stop - offset) * UNIT, position - base, reads)
        if stop < self.window_start or offset + count == stop or data is None:
            return data
        return bytes(data) + self.window[: (offset + count - stop) * UNIT]

    def unit(self, offset: int, reads: Reads = WAITING) -> tuple[int, int, int] | None:
        """Return (record position, record size, tags code) of a unit, or None if its file is missing."""
        data = self.read(offset, 1, reads)
        return None if data is None else UNIT_STRUCT.unpack_from(data)

    def units(self, offset: int, stop: int, reads: Reads = WAITING) -> Iterator[tuple[int, int, int, int]]:
        """Yield (offset, position, size, tags code) of the units in [offset, stop). Reads them in batches."""
        while offset < stop:
            data = self.read(offset, min(stop - offset, _UNITS_PER_READ), reads)
            if not data:
                offset = self.next_file_offset(offset)
                continue
            for unit in UNIT_STRUCT.iter_unpack(data):
                yield offset, *unit
                offset += 1

    def first_position(self) -> int:
        """Return the log position of the first record that still exists; -1 if there is none."""
        units = self.units(self.min_offset, self.max_offset)
        return next((position for _, position, size, _ in units if size != FILLER_SIZE), -1)

    def next_file_offset(self, offset: int) -> int:
        """Return the offset at which the queue file after the file of `offset` begins."""
        per_file = self.file_size // UNIT
        return (offset // per_file + 1) * per_file

    def search(self, low: int, high: int, physical: int, reads: Reads) -> int:
        """Return the first offset in [low, high) whose record begins at or after `physical`, else `high`.

        Fillers are skipped, because the log positions in them are not in order.
        """
        best = high
        while low < high:
            middle = (low + high) // 2
            real = self._first_real(middle, high, reads)
            if real is None:
                high = middle
            elif real[1] >= physical:
                best, high = real[0], middle
            else:
                low = real[0] + 1
        return best

    def _first_real(self, low: int, high: int, reads: Reads) -> tuple[int, int] | None:
        """Return (offset, record position) of the first unit in [low, high) that is not a filler."""
        count = 64
        while low < high:
            data = self.read(low, min(high - low, count), reads)
            if not data:
                low = self.next_file_offset(low)
                continue
            units = np.frombuffer(bytes(data), UNIT_DTYPE)
            others = np.flatnonzero(units["size"] != FILLER_SIZE)
            if len(others):
                return low + int(others[0]), int(units["position"][others[0]])
            low += len(units)
            count = _UNITS_PER_SEARCH_READ
        return None

    # -- retention --------------------------------------------------------------------------------

    def raise_min(self, floor: int) -> int:
        """Raise the minimum offset to `floor`, at most to the end. Return the number of hidden messages."""
        hidden = max(0, min(floor, self.max_offset) - self.min_offset)
        self.min_offset += hidden
        return hidden

    def correct_min(self, log_min: int, reads: Reads = WAITING) -> None:
        """Raise min_offset to the first unit whose record still exists, or to max_offset if there is none."""
        if self.max_offset > self.min_offset:
            first = self.unit(self.min_offset, reads)
            if first is not None and first[0] >= log_min and first[1] != FILLER_SIZE:
                return
        self.min_offset = self.search(self.min_offset, self.max_offset, log_min, reads)

    def expired_files(self, log_min: int, reads: Reads = WAITING) -> list[str]:
        """Return the files, oldest first, without the last, that refer only to records before `log_min`."""
        expired: list[str] = []
        for base in self.positions[:-1]:
            last_unit = (base + self.file_size) // UNIT - 1
            found = self.unit(last_unit, reads)
            if found is not None and found[0] >= log_min:
                break
            expired.append(self.path_of(base))
        return expired

    def delete_file(self, path: str) -> None:
        self._files.delete(path)
        base = int(os.path.basename(path))
        self.positions.remove(base)
        self.unsynced_files.discard(base)
        self.min_offset = max(self.min_offset, (base + self.file_size) // UNIT)

    def mark_deleted(self) -> None:
        """Detach the queue from its files, because its topic was deleted. Later units are dropped."""
        self.deleted = True
        for base in self.positions:
            self._files.drop(self.path_of(base))
        self.positions.clear()
        self.unsynced_files.clear()

    # -- loading ----------------------------------------------------------------------------------

    def load(self, log_end: int) -> list[str]:
        """Load the files of the queue: all units with records before `log_end`, up to the first invalid unit.

        Later units stay in the files until `cut` is called. Returns notes about damage.
        """
        notes: list[str] = []
        disk = self._files.disk
        self._dir_made = True
        allocated: dict[int, int] = {}
        for name in disk.listdir(self.path):
            if not is_numbered(name, 20):
                notes.append(f"{os.path.join(self.path, name)}: not a queue file, left alone")
                continue
            path = os.path.join(self.path, name)
            facts = part_facts(disk, path, self.file_size, "mappedFileSizeConsumeQueue")
            if facts is None:
                continue
            if facts.size != self.file_size:
                notes.append(f"{path}: {facts.size} bytes instead of {self.file_size}, set right")
                disk.truncate(self._files.descriptor(path), self.file_size)
                self.damaged = True
            self.positions.append(int(name))
            allocated[int(name)] = facts.allocated
        for before, after in zip(self.positions, self.positions[1:], strict=False):
            if after != before + self.file_size:
                notes.append(f"{self.path}: file {file_name(before + self.file_size)} is missing")
                self.damaged = True
        end = 0
        for base in reversed(self.positions):
            count = self._units_in(base, allocated[base], log_end)
            if count:
                end = base // UNIT + count
                break
        self._check_after_end(end, log_end)
        self.next_offset = self.max_offset = self.written = self.window_start = end
        self.window = bytearray()
        self.min_offset = min(end, self.begin)
        last = self.unit(end - 1) if end > self.min_offset else None
        self.max_physical = last[0] + last[1] if last is not None and last[1] != FILLER_SIZE else 0
        return notes

    def _units_in(self, base: int, allocated: int, log_end: int) -> int:
        """Return the number of valid units, with records before `log_end`, in a file of `allocated` bytes."""
        fd = self._files.descriptor(self.path_of(base))
        pages: dict[int, bytes] = {}

        def beyond(number: int) -> bool:
            page, at = divmod(number * UNIT, _PAGE_BYTES)
            if page not in pages:
                pages[page] = self._files.disk.pread(fd, _PAGE_BYTES, page * _PAGE_BYTES)
            physical, size, _ = UNIT_STRUCT.unpack_from(pages[page], at)
            if size == FILLER_SIZE:
                physical = self._position_before(base // UNIT + number)
            return size <= 0 or not 0 <= physical < log_end

        count = self.file_size // UNIT
        guess = min(count - 1, allocated // UNIT)
        low, high = (0, guess) if beyond(guess) else (guess + 1, count)
        return bisect_left(range(count), True, low, high, key=beyond)

    def _position_before(self, offset: int) -> int:
        """Return the log position in the last unit before `offset` that is no filler; -1 if unwritten."""
        disk = self._files.disk
        for base in reversed(self.positions):
            stop = min(offset * UNIT - base, self.file_size)
            while stop > 0:
                begin = max(0, stop - _UNITS_PER_SEARCH_READ * UNIT)
                data = disk.pread(self._files.descriptor(self.path_of(base)), stop - begin, begin)
                units = np.frombuffer(data, UNIT_DTYPE)
                others = np.flatnonzero(units["size"] != FILLER_SIZE)
                if len(others):
                    last = units[others[-1]]
                    return int(last["position"]) if last["size"] > 0 else -1
                stop = begin
        return 0

    def _check_after_end(self, end: int, log_end: int) -> None:
        """Set `zeros_after_end`, and `damaged` if a unit after `end` refers to a record before `log_end`.

        Some units before such a unit are missing or invalid.
        """
        disk = self._files.disk
        self.zeros_after_end = True
        for base in self.positions:
            at: int | None = max(0, end * UNIT - base)
            fd = self._files.descriptor(self.path_of(base))
            length = _PAGE_BYTES
            while at is not None and at < self.file_size:
                stop = min(self.file_size, at + length - at % length)
                data = disk.pread(fd, stop - at, at)
                if not is_zero(data):
                    self.zeros_after_end = False
                    units = np.frombuffer(data[: len(data) - len(data) % UNIT], UNIT_DTYPE)
                    position = units["position"]
                    older = (units["size"] > 0) & (units["size"] != FILLER_SIZE)
                    if np.any(older & (position >= 0) & (position < log_end)):
                        self.damaged = True
                        return
                    length = 16 * _PAGE_BYTES
                following = disk.next_data(fd, stop) if stop < self.file_size else None
                at = None if following is None else following - following % UNIT

    def cut(self) -> bool:
        """Remove everything after the end of the queue from its files, so that no old unit reappears.

        Return whether a file was deleted or anything but zeros was overwritten.
        """
        changed = False
        end = self.max_offset * UNIT
        if self.zeros_after_end and (len(self.positions) < 2 or end > self.positions[-1]):
            return False
        for base in list(self.positions):
            path = self.path_of(base)
            if base >= end and base > self.positions[0]:
                self._files.delete(path)
                self.positions.remove(base)
                # `new_names` causes a sync of the directory. Otherwise the file could reappear after a power
                # failure.
                self.new_names = changed = True
                continue
            begin = max(0, end - base)
            if begin >= self.file_size:
                continue
            fd = self._files.descriptor(path)
            if zero_out(self._files.disk, fd, begin, self.file_size):
                self.unsynced_files.add(base)
                changed = True
        return changed

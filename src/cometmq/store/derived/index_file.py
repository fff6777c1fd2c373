"""One index file: hash slots and chains of entries, which map key hashes to commit-log positions.

Layout (big-endian; i4 and i8 are signed integers of 4 and 8 bytes): 40-byte header (i8 begin time, i8 end
time, i8 begin position, i8 end position, i4 slots in use, i4 next entry number, which starts at 1), `slots` x
i4 newest entry of the chain, `capacity` x 20-byte entries (i4 key hash, i8 position, i4 seconds since begin
time, i4 previous entry of the chain). Entry 0 is never used.

The slots and the unwritten entries of the newest file are in memory. Entries and header are written in
batches. The slots are written only when the file is full, when the store stops, and occasionally in between.
That is enough, because after an unclean stop the missing slots are computed from the entries (one vector
operation). Other processes that read the files therefore find the newest keys only after a stop.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cometmq.store.base.disk import Buffer, write_all
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.files import Reads, StoreFiles

HEADER = struct.Struct(">qqqqii")
ENTRY = struct.Struct(">iqii")
SLOT_SIZE = 4
ENTRY_DTYPE = np.dtype([("hash", ">i4"), ("position", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_SLOTS_A_STEP = 1 << 19
# At a start, up to this number of the newest entries of a file are checked even if the checkpoint declares
# them durable.
_MAX_CHECKED_ENTRIES = 1_000_000
_MAX_SECONDS = 0x7FFFFFFF
MAX_ENTRIES_PER_STEP = 256
"""The maximum number of entries that a search visits per loop iteration: 1 to 2 ms, at 5 us per entry."""

MAX_STEP_BACK_MS = 600_000
"""How far, in ms, the clock may be set back while a file is filled, so that searches still find all messages.

Apache's broker tolerates no such step: it assumes that all times in a file lie between those of the first and
the last entry, and a search ends at the first entry that is too old.
"""

IntArray = NDArray[np.int64]


def file_length(slots: int, capacity: int) -> int:
    return HEADER.size + slots * SLOT_SIZE + capacity * ENTRY.size


def chain(slots: NDArray[Any], hashes: IntArray, numbers: IntArray) -> NDArray[Any]:
    """Return, for each new entry, the previous entry of its chain (0 for none). Update `slots` in place.

    The slot of a hash, even of a negative one in a damaged entry, is the hash modulo the number of slots.
    """
    slot = hashes % len(slots)
    previous: NDArray[Any] = slots[slot]
    slots[slot] = numbers  # The last entry wins if several have the same slot
    if not np.array_equal(slots[slot], numbers):  # True if several of the new entries have the same slot
        order = np.argsort(slot, kind="stable")
        later = np.flatnonzero(slot[order][1:] == slot[order][:-1]) + 1
        previous[order[later]] = numbers[order[later - 1]]
    return previous


class IndexFile:
    """An index file with its header in memory.

    For the loop thread, except `search`, which changes nothing.
    """

    __slots__ = (
        "_files", "_pending", "_slots", "begin_ms", "begin_position", "capacity", "count", "end_ms",
        "end_position", "path", "slot_count", "slots_in_use", "slots_lack", "slots_written", "written",
    )  # fmt: skip

    def __init__(self, files: StoreFiles, path: str, slots: int, capacity: int) -> None:
        self._files = files
        self.path = path
        self.slot_count = slots
        self.capacity = capacity  # entry numbers run from 1 to capacity - 1
        self.begin_ms = self.end_ms = 0
        self.begin_position = self.end_position = 0
        self.slots_in_use = 0
        self.count = 1  # Number that the next entry will get
        self.written = 1  # Number of the first entry that has not been written to the file
        self.slots_written = True
        self.slots_lack = 1  # Entries from this number on may be missing from the hash slots in the file
        self._slots: NDArray[np.int32] | None = None
        self._pending: list[NDArray[np.void]] = []

    @property
    def full(self) -> bool:
        return self.count >= self.capacity

    @property
    def _entries_at(self) -> int:
        return HEADER.size + self.slot_count * SLOT_SIZE

    # -- making, loading --------------------------------------------------------------------------

    def create(self, seed_ms: int, seed_position: int) -> None:
        """Create the index file as a sparse file. Raises OSError.

        Until the first entry is added, the header has the end time and end position of the previous file (0
        if there is none) as its begin time and begin position, as in Apache's broker.
        """
        disk = self._files.disk
        fd = disk.open(self.path, create=True, exclusive=True)
        try:
            disk.truncate(fd, file_length(self.slot_count, self.capacity))
        except OSError:
            disk.close(fd)
            self._files.delete(self.path)
            raise
        self._files.keep(self.path, fd)
        self.begin_ms = self.end_ms = seed_ms
        self.begin_position = self.end_position = seed_position
        self._slots = np.zeros(self.slot_count, np.int32)

    def load(self) -> bool:
        """Read the header. Return False if the length or the header cannot be those of an index file.

        If the clock was set back, the end time may be before the begin time, but only if the field `seconds`
        of the newest entry is 0.
        """
        facts = self._files.disk.facts(self.path)
        if facts is None or facts.size != file_length(self.slot_count, self.capacity):
            return False
        data = self._files.disk.pread(self._files.descriptor(self.path), HEADER.size, 0)
        values = HEADER.unpack(data)
        self.begin_ms, self.end_ms, self.begin_position, self.end_position, self.slots_in_use, count = values
        if any(value < 0 for value in values) or count > self.capacity or self.slots_in_use > self.slot_count:
            return False
        self.count = self.written = max(1, count)
        return self.begin_ms <= self.end_ms or self.count == 1 or not self.entries(count - 1)[0]["seconds"]

    def load_counted(self, count: int, slots_lack: int, end_position: int) -> bool:
        """Read the header of a file that a checkpoint position covers, and drop entries that are not durable.

        The arguments are fields of `CheckpointPosition`. Return False if the header or the durable entries
        contradict them.
        """
        if not self.load() or not 1 <= slots_lack <= count <= self.count:
            return False
        self.count = self.written = count
        self.slots_lack = slots_lack if count > _MAX_CHECKED_ENTRIES else 1
        if count == 1:
            return True
        last = self.entries(count - 1)[0]
        if last["position"] != end_position:
            return False
        self._ends_with(last)
        return self.check_entries(max(1, count - _MAX_CHECKED_ENTRIES)) == count - 1

    def _ends_with(self, last: np.void) -> None:
        self.end_position = int(last["position"])
        self.end_ms = min(self.end_ms, self.begin_ms + int(last["seconds"]) * 1000 + 999)

    def entries(self, first: int = 1) -> NDArray[np.void]:
        """Return the entries in the file from number `first` on. Unwritten entries are left out."""
        fd, size = self._files.descriptor(self.path), ENTRY.size
        data = self._files.disk.pread(fd, (self.written - first) * size, self._entries_at + first * size)
        return np.frombuffer(data, ENTRY_DTYPE)

    def check_entries(self, first: int = 1) -> int:
        """Return the number of entries before the first implausible one from `first` on; else `count` - 1."""
        entries = self.entries(first)
        position = entries["position"].astype(np.int64)
        number = np.arange(first, first + len(entries))
        good = (entries["hash"] >= 0) & (entries["seconds"] >= 0)
        good &= (entries["previous"] >= 0) & (entries["previous"] < number)
        good &= (position >= self.begin_position) & (position <= self.end_position)
        good[1:] &= position[1:] >= position[:-1]
        # An entry that consists only of zeros is invalid, because a lost sector reads as zeros.
        good &= (position > 0) | (entries["hash"] > 0)
        if len(entries):
            good[0] &= first > 1 or position[0] == self.begin_position
            good[-1] &= position[-1] == self.end_position
        bad = np.flatnonzero(~good)
        return first - 1 + (int(bad[0]) if len(bad) else len(entries))

    def _chained(self, slots: NDArray[np.int32], first: int) -> NDArray[np.int32]:
        """Add the entries from number `first` on to the hash slots, and return these."""
        hashes = self.entries(first)["hash"].astype(np.int64)
        numbers = np.arange(first, first + len(hashes), dtype=np.int32)
        slots[hashes % self.slot_count] = numbers  # The last entry wins if several have the same slot
        return slots

    def _slots_on_disk(self) -> NDArray[np.int32]:
        fd = self._files.descriptor(self.path)
        data = self._files.disk.pread(fd, self.slot_count * SLOT_SIZE, HEADER.size)
        return np.frombuffer(data, ">i4").astype(np.int32)

    def cut(self, position: int) -> None:
        """Remove the entries of records at or after `position`, after `load` and before `resume`."""
        self._pending = []
        self.count = self.written
        low, high = 1, self.written
        fd = self._files.descriptor(self.path)
        while low < high:
            middle = (low + high) // 2
            data = self._files.disk.pread(fd, ENTRY.size, self._entries_at + middle * ENTRY.size)
            low, high = (middle + 1, high) if ENTRY.unpack(data)[1] < position else (low, middle)
        if low == self.written:
            return
        self.count = self.written = low
        if low > 1:
            self._ends_with(self.entries(low - 1)[0])
        self.slots_written = False

    def resume(self, *, rebuild_slots: bool) -> None:
        """Make a loaded file writable. With `rebuild_slots`, add entries that its hash slots may lack."""
        if not rebuild_slots:
            self._slots = self._slots_on_disk()
            self.slots_lack = self.count
            return
        slots = None
        if 1 < self.slots_lack <= self.count:
            slots = self._chained(self._slots_on_disk(), self.slots_lack)
            if slots.max() >= self.count or slots.min() < 0:
                slots = None  # Some slots refer to removed entries, so all are computed again
        if slots is None:
            slots = self._chained(np.zeros(self.slot_count, np.int32), 1)
            self.slots_lack = 1
        self._slots = slots
        self.slots_in_use = int(np.count_nonzero(slots))
        self.slots_written = False

    # -- writing ----------------------------------------------------------------------------------

    def add(self, hashes: IntArray, positions: IntArray, times_ms: IntArray) -> int:
        """Append entries, with ascending positions. Return how many fitted into the file."""
        added = min(len(hashes), self.capacity - self.count)
        if added <= 0:
            return 0
        assert self._slots is not None
        hashes, positions, times_ms = hashes[:added], positions[:added], times_ms[:added]
        first = self.count
        seed_ms = self.begin_ms
        if first == 1:
            self.begin_ms, self.begin_position = int(times_ms[0]), int(positions[0])
        seconds = self._seconds(times_ms, self.begin_ms)
        if first == 1:
            # As in Apache's broker, the time of the first entry is relative to `seed_ms`: the begin time that
            # the header had until this entry replaced it.
            seconds[0] = self._seconds(times_ms[:1], seed_ms)[0]
        previous = chain(self._slots, hashes, np.arange(first, first + added, dtype=np.int64))
        self.slots_in_use += int(np.count_nonzero(previous == 0))
        batch = np.empty(added, ENTRY_DTYPE)
        batch["hash"] = hashes
        batch["position"] = positions
        batch["seconds"] = seconds
        batch["previous"] = previous
        self._pending.append(batch)
        self.count += added
        self.end_ms, self.end_position = int(times_ms[-1]), int(positions[-1])
        self.slots_written = False
        return added

    @staticmethod
    def _seconds(times_ms: IntArray, begin_ms: int) -> IntArray:
        if begin_ms <= 0:
            return np.zeros(len(times_ms), np.int64)
        # Java's division rounds negative values differently, but they are clipped to 0 anyway.
        return np.clip((times_ms - begin_ms) // 1000, 0, _MAX_SECONDS)

    def write(self, *, slots: bool) -> bool:
        """Write new entries, header and, with `slots`, hash slots. Return False if nothing was to write."""
        if self.written == self.count and (self.slots_written or not slots):
            return False
        fd = self._files.descriptor(self.path)
        disk = self._files.disk
        if self._pending:
            # np.concatenate would convert the entries to the byte order of the machine, so bytes are joined.
            data = b"".join([batch.tobytes() for batch in self._pending])
            write_all(disk, fd, data, self._entries_at + self.written * ENTRY.size)
        if slots and not self.slots_written and self._slots is not None:
            write_all(disk, fd, self._slots.astype(">i4").tobytes(), HEADER.size)
        header = HEADER.pack(
            self.begin_ms, self.end_ms, self.begin_position, self.end_position, self.slots_in_use, self.count
        )
        write_all(disk, fd, header, 0)
        self.written = self.count
        self._pending = []
        if slots:
            self.slots_written = True
            self.slots_lack = self.count
        return True

    def write_slots(self) -> Iterator[None]:
        """Write the hash slots in parts, one per step. Entries may be added between the steps."""
        count = self.count
        for first in range(0, self.slot_count, _SLOTS_A_STEP):
            if self._slots is None:
                return  # Between two steps, the file became full, and all its slots were written
            part = self._slots[first : first + _SLOTS_A_STEP].astype(">i4").tobytes()
            fd = self._files.descriptor(self.path)
            write_all(self._files.disk, fd, part, HEADER.size + first * SLOT_SIZE)
            yield
        self.slots_lack = max(self.slots_lack, count)

    def release(self) -> None:
        """Free the memory of the hash slots. The index file must be full and written."""
        self._slots = None

    # -- searching --------------------------------------------------------------------------------

    def overlaps(self, begin: int, end: int) -> bool:
        """Return whether the file may have entries with a time in [begin, end] (ms).

        If the file ends before it begins, the clock was set back, and any time is possible.
        """
        latest = self.end_ms + MAX_STEP_BACK_MS
        return self._earliest_ms <= end and (begin <= latest or self.end_ms < self.begin_ms)

    @property
    def _earliest_ms(self) -> int:
        return min(self.begin_ms, self.end_ms) - MAX_STEP_BACK_MS

    async def search(
        self, executor: StoreExecutor, key_hash: int, limit: int, begin: int, end: int, found: list[int],
        before: int,
    ) -> None:  # fmt: skip
        """Add the log positions of matching entries to `found`, newest first, until it has `limit` positions.

        An entry matches if its hash is `key_hash`, its position is less than `before`, and its time may be in
        [begin, end]. The exact time is unknown: it is rounded to seconds, and an entry from before the begin
        time of the file has 0 seconds. A key may have as many entries as the file holds, so the search runs
        in steps.
        """
        count = self.count
        number: int | None = None

        def step(reads: Reads) -> bool:
            """Examine the next entries of the chain. Return False if the search is complete."""
            nonlocal number
            if number is None:
                number = self._newest_of(key_hash % self.slot_count, reads)
            for _ in range(MAX_ENTRIES_PER_STEP):
                if not 0 < number < count or len(found) >= limit:
                    return False
                stored_hash, position, seconds, previous = self._entry(number, reads)
                if seconds < 0:
                    return False
                time_ms = self.begin_ms + seconds * 1000
                earliest = time_ms if seconds else self._earliest_ms
                in_range = begin <= time_ms + 999 and earliest <= end and position < before
                if stored_hash == key_hash and in_range and position not in found:
                    found.append(position)
                # The clock may have been set back before an entry with 0 seconds was added. Older entries of
                # the chain may then have later times, so such an entry does not end the search.
                if previous >= number or (seconds and time_ms + MAX_STEP_BACK_MS < begin):
                    return False
                number = previous
            return True

        while count > 1 and await executor.query(step):
            await executor.pause(0)

    def _newest_of(self, slot: int, reads: Reads) -> int:
        """Return the number of the newest entry in a chain, 0 if the chain is empty."""
        if self._slots is not None:
            return int(self._slots[slot])
        data = self._read(HEADER.size + slot * SLOT_SIZE, SLOT_SIZE, reads)
        return max(0, int.from_bytes(data, "big", signed=True))

    def _entry(self, number: int, reads: Reads) -> tuple[int, int, int, int]:
        ahead = number - self.written
        if ahead >= 0:
            for batch in self._pending:
                if ahead < len(batch):
                    entry = batch[ahead]
                    return int(entry[0]), int(entry[1]), int(entry[2]), int(entry[3])
                ahead -= len(batch)
        data = self._read(self._entries_at + number * ENTRY.size, ENTRY.size, reads)
        return ENTRY.unpack(data) if len(data) == ENTRY.size else (-1, 0, -1, 0)

    def _read(self, offset: int, length: int, reads: Reads) -> Buffer:
        return self._files.read(self.path, length, offset, reads) or b""

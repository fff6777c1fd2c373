"""A scan of the commit log, record by record, for recovery, `verify` and `rebuild`.

A record is valid if its magic number is known, it contains its own position, its parts add up to its total
size, no sector of its topic or properties consists of zeros, and its body has the stored CRC. In a raft log
the header of its entry must match, too. Where no valid record begins, the scan searches for the next magic
number that belongs to a valid record. So damage hides only the damaged records.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cometmq.protocol.record.framing import HEAD_KIND, PLAIN, Framing, follows
from cometmq.protocol.record.layout import BLANK_MAGIC_BYTES, BLANK_SIZE, MAGIC_AT, MAGICS_BEGIN
from cometmq.protocol.record.many import MAX_BATCH_RECORDS, MIN_GROUP_RECORDS, RecordGroup, valid_group
from cometmq.protocol.record.one import CLAIM_BYTES, Facts, claim_of, record_facts
from cometmq.store.base.disk import Disk, is_zero

_BLOCK = 4 << 20
_PIECE = 4096  # Number of bytes per read in an area that the device cannot read as a whole


class Damage(NamedTuple):
    """A part of a segment that holds no valid record, although valid records follow it."""

    path: str
    start: int
    stop: int


@dataclass(eq=False)
class SegmentScan:
    """A scan of one segment file. The attributes are valid after the scan.

    Attributes:
        end: The position after the last valid record, or the end of the segment if a blank record closed it.
        closed: Whether a blank record closed the segment.
        blank_end: The position after the used bytes of that blank record, or -1.
        dirty: Whether anything but zeros follows `end`.
        damage: The parts that hold no valid record although valid records follow them. The scan skips them.
        unreadable: The positions of 4 KiB pieces that the disk could not read. The content of such a piece
            after the last record is unknown, so the segment then counts as closed: none of its bytes are
            removed or overwritten.
    """

    disk: Disk
    path: str
    base: int
    length: int
    check_crc: bool = True
    framing: Framing = PLAIN

    def __post_init__(self) -> None:
        self._fd = -1
        self._data = b""
        self._view = memoryview(b"")
        self._data_at = 0
        self._most = MAX_BATCH_RECORDS  # Maximum number of records checked together; lowered after damage
        self.end = self.base
        self.closed = False
        self.blank_end = -1
        self.dirty = False
        self.damage: list[Damage] = []
        self.unreadable: set[int] = set()

    def groups(self, start: int) -> Generator[RecordGroup, None, None]:
        """Yield groups of valid records from `start` on, where a record or the segment must begin."""
        self._fd = self.disk.open(self.path, write=False)
        try:
            yield from self._walk(start - self.base)
        finally:
            self.disk.close(self._fd)

    def _walk(self, at: int) -> Iterator[RecordGroup]:
        self.end = self.base + at
        while at < self.length:
            group = self._group(at)
            if group is not None:
                self.end = group.end
                at = self.end - self.base
                yield group
                continue
            if self._blank(at):
                if self.damage and self.damage[-1].stop == self.base + at:
                    # In this segment, only a blank record follows the damage, and a blank record holds no
                    # message. So the damage is a torn end, unless a later segment holds messages.
                    self.end = self.damage.pop().start
                    self.dirty = True
                    return
                self.closed = True
                self.blank_end = self.base + at + BLANK_SIZE
                self.end = self.base + self.length
                return
            found = self._resync(at)
            if found is None:
                if any(position + _PIECE > self.base + at for position in self.unreadable):
                    self.damage.append(Damage(self.path, self.base + at, self.base + self.length))
                    self.closed, self.dirty = True, False
                    self.end = self.base + self.length
                return
            self.damage.append(Damage(self.path, self.base + at, self.base + found))
            self.dirty = False
            at = found

    def _group(self, at: int) -> RecordGroup | None:
        """Return a group of valid records that begins at `at`, or None if no valid record begins there."""
        offset = at - self._data_at
        if 0 <= offset < len(self._data):  # Usually `at` is inside `_data`, which holds many whole records
            group = valid_group(
                self._data, offset, self.base + at, self._most, check_crc=self.check_crc, framing=self.framing
            )
            if group is not None:
                self._most = min(2 * self._most, MAX_BATCH_RECORDS)
                return group
        few, heads = self._few(at)
        if not few:
            self._most = MIN_GROUP_RECORDS
            return None
        group = RecordGroup.of(few)
        return group._replace(heads=np.frombuffer(heads, HEAD_KIND)) if heads else group

    def _few(self, at: int, most: int = MIN_GROUP_RECORDS) -> tuple[list[Facts], bytes]:
        """Return the next valid records, checked one by one, and their entry headers in a raft log.

        This is needed near damage, and where the loaded part of the file ends or contains only few records.
        """
        found: list[Facts] = []
        heads = b""
        gap = self.framing.gap
        window = -1
        while at < self.length and len(found) < most:
            offset = self._window(at)
            if found and self._data_at != window:
                # Another part of the file has been loaded. End here, because this part may hold many records,
                # which are checked faster as a group.
                break
            window = self._data_at
            facts = record_facts(self._view, offset + gap, self.base + at + gap, check_crc=self.check_crc)
            if facts is None:
                break
            if gap:
                head = self._data[offset : offset + gap]
                if not follows(head, heads[-gap:], self.base + at, facts.size):
                    break
                heads += head
            found.append(facts)
            at += facts.size + gap
        return found, heads

    def _blank(self, at: int) -> bool:
        offset = self._window(at)
        return self.framing.is_blank(self._data[offset : offset + BLANK_SIZE], self.length - at)

    def _window(self, at: int) -> int:
        """Make sure that `_data` contains the whole record at `at`. Return its index in `_data`."""
        offset = at - self._data_at
        if offset < 0 or offset + self._needed(at, offset) > len(self._data):
            self._load(at, _BLOCK)
            offset = 0
            needed = self._needed(at, 0)
            if needed > len(self._data):
                self._load(at, needed)
        return offset

    def _needed(self, at: int, offset: int) -> int:
        """Return how many bytes from `at` on, which is at `_data[offset]`, a check of the record needs."""
        rest, gap = self.length - at, self.framing.gap
        least = CLAIM_BYTES + gap
        if offset + least > len(self._data):
            return min(least, rest)
        # A message body may contain the bytes of an old record. Such bytes hold the position of the old
        # record, not the position where they lie, so they are no record and their size field is ignored.
        # Otherwise each of them would cause a long read.
        size, own = claim_of(self._data, offset + gap)
        return size + gap if least < size + gap <= rest and own == self.base + at + gap else min(least, rest)

    def _load(self, at: int, length: int) -> None:
        self._data = self._read(min(self.length - at, length), at)
        self._view = memoryview(self._data)
        self._data_at = at

    def _read(self, length: int, at: int) -> bytes:
        """Return bytes of the segment. Unreadable sectors are recorded and returned as zeros."""
        try:
            return self.disk.pread(self._fd, length, at)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
        parts = []
        stop = at + length
        while at < stop:
            step = min(_PIECE - at % _PIECE, stop - at)
            try:
                parts.append(self.disk.pread(self._fd, step, at))
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                parts.append(bytes(step))
                self.unreadable.add(self.base + at - at % _PIECE)
            at += step
        return b"".join(parts)

    def _resync(self, at: int) -> int | None:
        """Return the position of the next valid record or blank record after `at`, or None."""
        place = at + 1
        hole, behind = self._hole(place)
        while place < self.length:
            data = self._read(min(_BLOCK, self.length - place, hole - place), place)
            stop = place + len(data)
            if not data:
                break  # The file has become shorter during the scan
            if not is_zero(data):
                self.dirty = True
                found = self._search_block(data, place)
                if found is not None:
                    return found
            if stop >= hole:
                stop = behind
                hole, behind = self._hole(behind)
            if stop >= self.length:
                break
            # Blocks overlap, so that a magic number that crosses the border of two blocks is found.
            place = max(place + 1, stop - self.framing.magic_at - MAGIC_AT)
        if not self.dirty and self._read(1, at).strip(b"\0"):
            self.dirty = True
        return None

    def _hole(self, at: int) -> tuple[int, int]:
        """Return start and end of a part of the segment after `at` that was never written.

        If none is found, both are the end of the segment. The search examines the position one block after
        `at`, then two blocks, four blocks and so on. It does not begin directly at `at`, because reserved
        space counts as data once it has been read, even by the read-ahead of the system.
        """
        step = _BLOCK
        while at + step < self.length:
            following = self.disk.next_data(self._fd, at + step)
            if following is None:
                return at + step, self.length
            if following >= at + step + _BLOCK:
                return at + step, following
            step *= 2
        return self.length, self.length

    def _search_block(self, data: bytes, data_at: int) -> int | None:
        at = 0
        framed = self.framing.gap > 0
        while True:
            record = data.find(MAGICS_BEGIN, at)
            # A raft log's closing blank record is not searched for, because it holds no message and its magic
            # number is too common.
            blank = -1 if framed else data.find(BLANK_MAGIC_BYTES, at)
            if record < 0 and blank < 0:
                return None
            place = min(found for found in (record, blank) if found >= 0)
            start = data_at + place - self.framing.magic_at
            if start >= data_at and (self._blank(start) if place == blank else self._few(start, 1)[0]):
                return start
            at = place + 1

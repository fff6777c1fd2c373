"""Walking the commit log record by record: what recovery, `verify` and `rebuild` see.

A record is valid when its magic is known, its own position stands in it, the length recomputed from its
parts equals its total size, no sector of its topic or properties reads as zeros, and its body has the CRC
that it gives. Where a valid record should begin and none does, the walk looks for the next one: a magic
number whose record is valid at exactly that position. So damage in the middle hides only the records that
it hit.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing
from struct import Struct
from typing import NamedTuple

from cometmq.protocol.checksum import crc32
from cometmq.protocol.record.many import LONGEST_RUN, SHORTEST_RUN, Facts, Run, valid_run
from cometmq.protocol.record.one import (
    BLANK_MAGIC,
    BLANK_STRUCT,
    BORN_V6,
    HEAD_V4,
    HEADS,
    HOST_V4,
    HOST_V6,
    MAGIC_V1,
    MAGIC_V2,
    MIN_SIZE,
    STORE_V6,
)
from cometmq.store.base.disk import Disk, is_zero

__all__ = ["Damage", "Facts", "Run", "SegmentScan", "record_facts"]

_BLOCK = 4 << 20
_SECTOR = 512
_SECTORS = 4096  # what is read at a time where the device fails
_SIZE = Struct(">i").unpack_from
_OWN_POSITION = Struct(">q").unpack_from
_OWN_AT = 28
_PLACED = _OWN_AT + 8  # bytes of a record up to its own position
_MAGICS = (MAGIC_V1 & 0xFFFFFFFF).to_bytes(4, "big")[:3]  # both record magics share their first three bytes
_BLANK = (BLANK_MAGIC & 0xFFFFFFFF).to_bytes(4, "big")


def record_facts(data: memoryview, at: int, position: int, *, check_crc: bool = True) -> Facts | None:
    """The record at data[at:], which should be the one of log position `position`; None if it is not
    valid."""
    room = len(data) - at
    if room < MIN_SIZE:
        return None
    (
        size, magic, crc, queue_id, _, queue_offset, own, sys_flag, _, _, store_ms, _, _, _, body_length,
    ) = HEAD_V4.unpack_from(data, at)  # fmt: skip
    if not MIN_SIZE <= size <= room or (magic != MAGIC_V1 and magic != MAGIC_V2) or own != position:
        return None
    body_at = at + HEAD_V4.size
    if sys_flag & (BORN_V6 | STORE_V6):
        head = HEADS[HOST_V6 if sys_flag & BORN_V6 else HOST_V4, HOST_V6 if sys_flag & STORE_V6 else HOST_V4]
        if head.size > size:
            return None
        fields = head.unpack_from(data, at)
        store_ms, body_length = fields[10], fields[14]
        body_at = at + head.size
    tail = body_at + body_length
    width = 1 if magic == MAGIC_V1 else 2
    end = at + size
    if body_length < 0 or tail + width + 2 > end:
        return None
    topic_at = tail + width
    topic_end = topic_at + (data[tail] if width == 1 else data[tail] << 8 | data[tail + 1])
    properties_at = topic_end + 2
    if properties_at > end or properties_at + (data[topic_end] << 8 | data[topic_end + 1]) != end:
        return None
    if check_crc and body_length and crc32(data[body_at:tail]) & 0x7FFFFFFF != crc:
        return None
    try:
        topic = str(data[topic_at:topic_end], "utf-8")
    except UnicodeDecodeError:
        return None
    properties = bytes(data[properties_at:end])
    if "\0" in topic or (b"\0" in properties and _lost_sector(properties, position + properties_at - at)):
        return None
    return Facts(position, size, queue_id, queue_offset, sys_flag, store_ms, topic, properties)


def _lost_sector(properties: bytes, position: int) -> bool:
    """Whether some sector holds nothing but zeros of the properties: it never reached the device. (The CRC
    does not cover them, and no client ends a property with NULs just there.)"""
    cuts = range(_SECTOR - position % _SECTOR, len(properties), _SECTOR)
    parts = zip([0, *cuts], [*cuts, len(properties)], strict=True)
    return any(not properties[start:stop].strip(b"\0") for start, stop in parts)


class Damage(NamedTuple):
    """A stretch of a segment in which no valid record could be found, although valid ones follow it."""

    path: str
    start: int
    stop: int


class SegmentScan:
    """One walk through one segment file.

    After the walk: `end` is the position behind the last valid record (or the end of the segment when a
    blank record closed it), `closed` tells that case, `blank_end` the position behind what that record uses
    (-1 without one), `dirt` whether anything but zeros follows `end`; `damage` lists what was skipped,
    `unreadable` the positions of 4 KiB pieces that the device could not read. When one of them lies behind
    the last record, nothing is known of what is there: the segment counts as closed in front of it, so that
    nothing is cut or overwritten.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        base: int,
        length: int,
        *,
        check_crc: bool = True,
        search: bool = True,
    ) -> None:
        self._disk = disk
        self._path = path
        self._base = base
        self._length = length
        self._check_crc = check_crc
        self._search = search
        self._fd = -1
        self._data = b""
        self._view = memoryview(b"")
        self._data_at = 0
        self._most = LONGEST_RUN  # records looked at together; fewer for a while behind damage
        self.end = base
        self.closed = False
        self.blank_end = -1
        self.dirt = False
        self.damage: list[Damage] = []
        self.unreadable: set[int] = set()

    def records(self, start: int) -> Iterator[Facts]:
        """Valid records from position `start` (where a record begins, or the segment's start) on."""
        with closing(self.runs(start)) as runs:  # type: ignore[type-var]
            for run in runs:
                yield from run.facts()

    def runs(self, start: int) -> Iterator[Run]:
        """The same, many at a time; damage lies between two runs, never within one."""
        self._fd = self._disk.open(self._path, write=False)
        try:
            yield from self._walk(start - self._base)
        finally:
            self._disk.close(self._fd)

    def _walk(self, at: int) -> Iterator[Run]:
        self.end = self._base + at
        while at < self._length:
            run = self._run(at)
            if run is not None:
                self.end = run.end
                at = self.end - self._base
                yield run
                continue
            if self._blank(at):
                if self.damage and self.damage[-1].stop == self._base + at:
                    # A blank alone holds no message: unless a later segment does, this is a torn tail.
                    self.end = self.damage.pop().start
                    self.dirt = True
                    return
                self.closed = True
                self.blank_end = self._base + at + BLANK_STRUCT.size
                self.end = self._base + self._length
                return
            found = self._resync(at) if self._search else None
            if found is None:
                if any(position + _SECTORS > self._base + at for position in self.unreadable):
                    self.damage.append(Damage(self._path, self._base + at, self._base + self._length))
                    self.closed, self.dirt = True, False
                    self.end = self._base + self._length
                return
            self.damage.append(Damage(self._path, self._base + at, self._base + found))
            self.dirt = False
            at = found

    def _run(self, at: int) -> Run | None:
        """Valid records from `at` on, as many as are looked at together; None if none begins there."""
        offset = at - self._data_at
        if 0 <= offset < len(self._data):  # the usual case: whole records are in the present window
            run = valid_run(self._data, offset, self._base + at, self._most, check_crc=self._check_crc)
            if run is not None:
                self._most = min(2 * self._most, LONGEST_RUN)
                return run
        few = self._few(at)
        if not few:
            self._most = SHORTEST_RUN
            return None
        return Run.of(few)

    def _few(self, at: int) -> list[Facts]:
        """Up to a short run of valid records, looked at one by one: at the end of a window, in front of
        damage, and wherever few records fill a window."""
        found: list[Facts] = []
        window = -1
        while at < self._length and len(found) < SHORTEST_RUN:
            offset = self._window(at)
            if found and self._data_at != window:
                break  # in a new window a long run may begin
            window = self._data_at
            facts = record_facts(self._view, offset, self._base + at, check_crc=self._check_crc)
            if facts is None:
                break
            found.append(facts)
            at += facts.size
        return found

    def _blank(self, at: int) -> bool:
        offset = self._window(at)
        return (
            self._data[offset + 4 : offset + 8] == _BLANK
            and int.from_bytes(self._data[offset : offset + 4], "big") == self._length - at
        )

    def _window(self, at: int) -> int:
        """Have data that holds a whole record from `at` on; returns the place of `at` in it."""
        offset = at - self._data_at
        if offset < 0 or offset + self._needed(at, offset) > len(self._data):
            self._load(at, _BLOCK)
            offset = 0
            needed = self._needed(at, 0)
            if needed > len(self._data):
                self._load(at, needed)
        return offset

    def _needed(self, at: int, offset: int) -> int:
        """Bytes that tell whether a record begins at `at`, which is `offset` in the data."""
        rest = self._length - at
        if offset + _PLACED > len(self._data):
            return min(_PLACED, rest)
        size: int = _SIZE(self._data, offset)[0]
        # Whatever its size says, bytes that name another place are no record: a body full of old records must
        # not make the walk read as much for each of them.
        own: int = _OWN_POSITION(self._data, offset + _OWN_AT)[0]
        return size if _PLACED < size <= rest and own == self._base + at else min(_PLACED, rest)

    def _load(self, at: int, length: int) -> None:
        self._data = self._read(min(self._length - at, length), at)
        self._view = memoryview(self._data)
        self._data_at = at

    def _read(self, length: int, at: int) -> bytes:
        """Bytes of the segment; zeros stand for sectors that the device cannot read, which are remembered."""
        try:
            return self._disk.pread(self._fd, length, at)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
        parts = []
        stop = at + length
        while at < stop:
            step = min(_SECTORS - at % _SECTORS, stop - at)
            try:
                parts.append(self._disk.pread(self._fd, step, at))
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                parts.append(bytes(step))
                self.unreadable.add(self._base + at - at % _SECTORS)
            at += step
        return b"".join(parts)

    def _resync(self, at: int) -> int | None:
        """Place of the next valid (or blank) record behind `at`; None if there is none."""
        place = at + 1
        hole, behind = self._hole(place)
        while place < self._length:
            data = self._read(min(_BLOCK, self._length - place, hole - place), place)
            stop = place + len(data)
            if not data:
                break  # the file is shorter than it was
            if not is_zero(data):
                self.dirt = True
                found = self._search_block(data, place)
                if found is not None:
                    return found
            if stop >= hole:
                stop = behind
                hole, behind = self._hole(behind)
            if stop >= self._length:
                break
            place = max(place + 1, stop - 8)  # blocks overlap: no magic number lies across a border unseen
        if not self.dirt and self._read(1, at).strip(b"\0"):
            self.dirt = True
        return None

    def _hole(self, at: int) -> tuple[int, int]:
        """Start and end of a stretch behind `at` in which nothing was ever written; twice the end of the
        segment if none is found.

        Looked for well ahead, before anything there is read: reserved space counts as data as soon as it has
        been read, be it by the system's reading ahead.
        """
        step = _BLOCK
        while at + step < self._length:
            following = self._disk.next_data(self._fd, at + step)
            if following is None:
                return at + step, self._length
            if following >= at + step + _BLOCK:
                return at + step, following
            step *= 2
        return self._length, self._length

    def _search_block(self, data: bytes, data_at: int) -> int | None:
        at = 0
        while True:
            record = data.find(_MAGICS, at)
            blank = data.find(_BLANK, at)
            if record < 0 and blank < 0:
                return None
            if blank >= 0 and (record < 0 or blank < record):
                start = data_at + blank - 4
                if blank >= 4 and self._length - start == int.from_bytes(data[blank - 4 : blank], "big"):
                    return start
                at = blank + 1
                continue
            start = data_at + record - 4
            if record >= 4:
                offset = self._window(start)
                found = record_facts(self._view, offset, self._base + start, check_crc=self._check_crc)
                if found is not None:
                    return start
            at = record + 1

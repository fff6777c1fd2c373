"""Walking the commit log record by record: what recovery, `verify` and `rebuild` see.

A record is valid when its magic is known, its own position stands in it, its parts add up to its total size,
no sector of its topic or properties reads as zeros, and its body has the CRC that it gives; in a raft log the
head of its entry must fit, too. Where none begins, the walk looks for the next magic number whose record is
valid at exactly its position. So damage hides only the records that it hit.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cometmq.protocol.record.framing import HEAD_KIND, PLAIN, Framing, follows
from cometmq.protocol.record.layout import BLANK_MAGIC_BYTES, BLANK_SIZE, MAGIC_AT, MAGICS_BEGIN
from cometmq.protocol.record.many import LONGEST_RUN, SHORTEST_RUN, Run, valid_run
from cometmq.protocol.record.one import CLAIM_BYTES, Facts, claim_of, record_facts
from cometmq.store.base.disk import Disk, is_zero

_BLOCK = 4 << 20
_PIECE = 4096  # what is read at a time where the device fails


class Damage(NamedTuple):
    """A stretch of a segment in which no valid record could be found, although valid ones follow it."""

    path: str
    start: int
    stop: int


@dataclass(eq=False)
class SegmentScan:
    """One walk through one segment file.

    After the walk: `end` is the position behind the last valid record (or the end of the segment when a
    blank record closed it), `closed` tells that case, `blank_end` the position behind what that record uses
    (-1 without one), `dirt` whether anything but zeros follows `end`; `damage` lists what was skipped,
    `unreadable` the positions of 4 KiB pieces that the device could not read. When one of them lies behind
    the last record, nothing is known of what is there: the segment counts as closed in front of it, so that
    nothing is cut or overwritten.
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
        self._most = LONGEST_RUN  # records looked at together; fewer for a while behind damage
        self.end = self.base
        self.closed = False
        self.blank_end = -1
        self.dirt = False
        self.damage: list[Damage] = []
        self.unreadable: set[int] = set()

    def runs(self, start: int) -> Generator[Run, None, None]:
        """Valid records from `start` (a record or the segment begins there) on; damage lies between runs."""
        self._fd = self.disk.open(self.path, write=False)
        try:
            yield from self._walk(start - self.base)
        finally:
            self.disk.close(self._fd)

    def _walk(self, at: int) -> Iterator[Run]:
        self.end = self.base + at
        while at < self.length:
            run = self._run(at)
            if run is not None:
                self.end = run.end
                at = self.end - self.base
                yield run
                continue
            if self._blank(at):
                if self.damage and self.damage[-1].stop == self.base + at:
                    # A blank alone holds no message: unless a later segment does, this is a torn tail.
                    self.end = self.damage.pop().start
                    self.dirt = True
                    return
                self.closed = True
                self.blank_end = self.base + at + BLANK_SIZE
                self.end = self.base + self.length
                return
            found = self._resync(at)
            if found is None:
                if any(position + _PIECE > self.base + at for position in self.unreadable):
                    self.damage.append(Damage(self.path, self.base + at, self.base + self.length))
                    self.closed, self.dirt = True, False
                    self.end = self.base + self.length
                return
            self.damage.append(Damage(self.path, self.base + at, self.base + found))
            self.dirt = False
            at = found

    def _run(self, at: int) -> Run | None:
        """Valid records from `at` on, as many as are looked at together; None if none begins there."""
        offset = at - self._data_at
        if 0 <= offset < len(self._data):  # the usual case: whole records are in the present window
            run = valid_run(
                self._data, offset, self.base + at, self._most, check_crc=self.check_crc, framing=self.framing
            )
            if run is not None:
                self._most = min(2 * self._most, LONGEST_RUN)
                return run
        few, heads = self._few(at)
        if not few:
            self._most = SHORTEST_RUN
            return None
        run = Run.of(few)
        return run._replace(heads=np.frombuffer(heads, HEAD_KIND)) if heads else run

    def _few(self, at: int, most: int = SHORTEST_RUN) -> tuple[list[Facts], bytes]:
        """Up to `most` records, one by one: where a window ends or holds few, and before damage; and the
        heads of their entries, if they are such."""
        found: list[Facts] = []
        heads = b""
        gap = self.framing.gap
        window = -1
        while at < self.length and len(found) < most:
            offset = self._window(at)
            if found and self._data_at != window:
                break  # in a new window a long run may begin
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
        rest, gap = self.length - at, self.framing.gap
        least = CLAIM_BYTES + gap
        if offset + least > len(self._data):
            return min(least, rest)
        # Whatever its size says, bytes that name another place are no record: a body full of old records must
        # not make the walk read as much for each of them.
        size, own = claim_of(self._data, offset + gap)
        return size + gap if least < size + gap <= rest and own == self.base + at + gap else min(least, rest)

    def _load(self, at: int, length: int) -> None:
        self._data = self._read(min(self.length - at, length), at)
        self._view = memoryview(self._data)
        self._data_at = at

    def _read(self, length: int, at: int) -> bytes:
        """Bytes of the segment; zeros stand for sectors that the device cannot read, which are remembered."""
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
        """Place of the next valid (or blank) record behind `at`; None if there is none."""
        place = at + 1
        hole, behind = self._hole(place)
        while place < self.length:
            data = self._read(min(_BLOCK, self.length - place, hole - place), place)
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
            if stop >= self.length:
                break
            # Blocks overlap: no magic number lies across a border unseen.
            place = max(place + 1, stop - self.framing.magic_at - MAGIC_AT)
        if not self.dirt and self._read(1, at).strip(b"\0"):
            self.dirt = True
        return None

    def _hole(self, at: int) -> tuple[int, int]:
        """Start and end of a stretch behind `at` that was never written; twice the end of the segment without
        one.

        Looked for well ahead: reserved space counts as data once it has been read, even by the system's read-
        ahead.
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
            # A blank that closes a raft log's segment has no magic number worth the search, and no message.
            blank = -1 if framed else data.find(BLANK_MAGIC_BYTES, at)
            if record < 0 and blank < 0:
                return None
            place = min(found for found in (record, blank) if found >= 0)
            start = data_at + place - self.framing.magic_at
            if start >= data_at and (self._blank(start) if place == blank else self._few(start, 1)[0]):
                return start
            at = place + 1

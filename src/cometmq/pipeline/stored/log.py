"""The records of a log file, read slice by slice, each record exactly once.

A file begins with a record, and every record contains its own length: this chain of lengths determines where
records begin (docs/reference/storage.md, Record). Bytes in the middle of a file cannot show where a record
begins, because the body of a message may contain whole records with correct positions. A slice therefore
starts at the start of a file, or at a record for which a consume queue of the store has an entry; brokers
write consume queues, producers cannot. The reader of the previous slice follows the chain up to the start of
the next slice: a chain that skips this position is an error. In a raft member's log, the header of an entry
precedes each record; positions in this module are positions of the entries.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from cometmq.errors import RecordError, StoreCorrupt
from cometmq.pipeline.base.declare import MOST_BYTES
from cometmq.protocol.record.framing import HEAD_KIND, PLAIN, Framing
from cometmq.protocol.record.layout import (
    BLANK_SIZE,
    HEADS,
    HOST_V6,
    LENGTH,
    MAGIC_AT,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS_BEGIN,
    MAX_PROPERTIES,
    MAX_TOPIC_V2,
    MIN_SIZE,
    PREPARED,
    ROLLBACK,
    SYS_FLAG_AT,
    TRANSACTION_MASK,
    head_for,
)
from cometmq.protocol.record.many import Rows, items_at, read_rows
from cometmq.protocol.record.one import CLAIM_BYTES, claim_of, decode_record, record_facts
from cometmq.store.inspect import Disk

_SHORT_LOOK = 64 << 10  # Size of the first read in a search for the next record, in bytes
_LONG_LOOK = 4 << 20
_LONGEST_HEAD = HEADS[HOST_V6, HOST_V6].size
# Maximum size of the topic and the properties after a record's body, in bytes.
_REST_MAX = 2 * LENGTH.size + MAX_TOPIC_V2 + MAX_PROPERTIES
_UNIT = struct.Struct(">qiq")  # Entry of a consume queue: log position, record size, tags code
_size_at = struct.Struct(">i").unpack_from
_FILE_NAME = re.compile(r"\d{20}")


DISK = Disk()


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a store's file. Raises OSError, also for links and pipes, which others may have put there."""
    fd = DISK.open(path, write=False)
    try:
        yield fd
    finally:
        os.close(fd)


def numbered_files(directory: str) -> list[tuple[int, str]]:
    """Return (first log position, path) of the files named by positions, in order. Raises OSError."""
    names = sorted(name for name in os.listdir(directory) if _FILE_NAME.fullmatch(name))
    return [(int(name), os.path.join(directory, name)) for name in names]


class Block(NamedTuple):
    """Consecutive records (at least one) with consistent lengths and positions. The bodies are unverified."""

    data: bytes
    position: int  # Log position of the first byte of `data`
    rows: Rows

    @property
    def end(self) -> int:
        """The log position after the last record."""
        rows = self.rows
        return self.position + int(rows.properties_start[-1] + rows.properties_length[-1])


class Damage(NamedTuple):
    """A range of log positions in which no record was found."""

    start: int
    stop: int
    problem: str


@dataclass(frozen=True)
class LogFile:
    """A file of a commit log, with the log positions from `base` to `end`.

    `queues` is the directory of the store's consume queues, or None if the store has none. `framing`
    describes the bytes before each record.
    """

    path: str
    base: int
    end: int
    queues: str | None
    framing: Framing = PLAIN

    def open(self) -> LogReader:
        """Open the file. Raises OSError, also for a link, a pipe or a device."""
        return LogReader(self, DISK.open(self.path, write=False))


class LogReader:
    """An open log file, which is read and never mapped, because the broker may truncate or delete it."""

    def __init__(self, file: LogFile, fd: int) -> None:
        self.file = file
        self._gap = file.framing.gap
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, position: int, length: int) -> bytes:
        """Return `length` bytes from a log position on, or fewer at the end of the file. Raises OSError."""
        try:
            return os.pread(self._fd, length, position - self.file.base)
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, self.file.path) from None

    def walk(self, start: int, stop: int, block_bytes: int) -> Iterator[Block | Damage]:
        """Yield the records that begin in [start, stop), and damaged ranges, in order.

        A record must begin at `start`. A blank record ends the file. Raises OSError, and StoreCorrupt if
        `stop` lies within a record.
        """
        gap = self._gap
        block_bytes = max(block_bytes, MIN_SIZE)
        at, wanted = start, block_bytes
        while at < stop:
            data = self.read(at, min(wanted, stop - at))
            rows = _chain(data, at, self.file.framing)
            if len(rows.start):
                block = Block(data, at, rows)
                yield block
                at, wanted = block.end, min(2 * wanted, block_bytes)
                continue
            size, own = claim_of(data[gap:]) if len(data) >= gap + CLAIM_BYTES else (0, -1)
            if own == at + gap and wanted < size + gap <= min(stop - at, MOST_BYTES):
                wanted = size + gap  # The record is longer than what was read, so read all of it
                continue
            if stop == self.file.end and self.file.framing.is_blank(data, self.file.end - at):
                return
            self._check_border(at, stop)
            found = self.next_record(at + 1, stop)
            yield Damage(at, found, _problem(data[gap:], at + gap))
            at, wanted = found, _SHORT_LOOK

    def next_record(self, place: int, stop: int) -> int:
        """Return the position of the first record between `place` and `stop`, or else `stop`.

        The bytes at a position are a record only if fields and body are consistent and, in a store with
        consume queues, the record's queue has an entry for it.
        """
        for begin, end in self._written(place + self._gap, stop):
            length = _SHORT_LOOK
            while begin < end:
                data = self.read(begin, min(length, end - begin))
                at = data.find(MAGICS_BEGIN, MAGIC_AT)
                while at >= 0:
                    if self._is_record(begin + at - MAGIC_AT, stop):
                        return begin + at - MAGIC_AT - self._gap
                    at = data.find(MAGICS_BEGIN, at + 1)
                if begin + len(data) == end or not data:
                    break  # The whole range has been searched, or the broker has truncated the file
                begin += max(1, len(data) - MAGIC_AT - len(MAGICS_BEGIN) + 1)
                length = min(2 * length, _LONG_LOOK)
        return stop

    def _written(self, place: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a range of the file that were written, without its holes.

        Brokers reserve files at full length. All parts are determined before the first read, because a read
        (even a read-ahead) fills the cache, and a hole in the cache would count as written.
        """
        found = []
        at, last = place - self.file.base, stop - self.file.base
        try:
            while at < last:
                begin = os.lseek(self._fd, at, os.SEEK_DATA)
                at = os.lseek(self._fd, begin, os.SEEK_HOLE)
                if begin < last:
                    found.append((begin + self.file.base, min(at + self.file.base, stop)))
        except OSError as failure:
            if failure.errno != errno.ENXIO:  # ENXIO means that only a hole follows
                return [(place, stop)]
        return found

    def _check_border(self, at: int, stop: int) -> None:
        head = self.read(at + self._gap, CLAIM_BYTES)
        size, own = claim_of(head) if len(head) == CLAIM_BYTES else (0, -1)
        if own != at + self._gap or not stop - at < size + self._gap <= min(self.file.end - at, MOST_BYTES):
            return
        if record_facts(self.read(own, size), 0, own) is not None:
            problem = (
                f"the consume queues name a record at log position {stop}, but that lies within the one at "
                f"{at}. Rebuild the queues (cometmq store rebuild), or set sliceBytes to more than a log file"
            )
            raise StoreCorrupt(problem, self.file.path)

    def _is_record(self, at: int, stop: int) -> bool:
        # The checks of the position and of the queue's entry come first, and the expensive check of the body
        # comes last, because a body may contain thousands of forged record headers with any length.
        head = self.read(at, _LONGEST_HEAD)
        if len(head) < CLAIM_BYTES or claim_of(head)[1] != at:
            return False
        size = claim_of(head)[0]
        if len(head) < MIN_SIZE or not MIN_SIZE <= size <= min(stop - at, MOST_BYTES):
            return False
        if self.file.queues is not None and not self._is_queued(head, at, size, self.file.queues):
            return False
        return record_facts(self.read(at, size), 0, at) is not None

    def _is_queued(self, head: bytes, at: int, size: int, queues: str) -> bool:
        """Return whether the record's consume queue has an entry with the record's position and size."""
        sys_flag = int.from_bytes(head[SYS_FLAG_AT : SYS_FLAG_AT + 4], "big", signed=True)
        form = head_for(sys_flag)
        if len(head) < form.size or sys_flag & TRANSACTION_MASK in (PREPARED, ROLLBACK):
            return False
        _, magic, _, queue_id, _, queue_offset, *_, body_length = form.unpack_from(head)
        rest = size - form.size - body_length
        if body_length < 0 or not 3 <= rest <= _REST_MAX or magic not in (MAGIC_V1, MAGIC_V2):
            return False
        width = 1 if magic == MAGIC_V1 else LENGTH.size
        behind = self.read(at + form.size + body_length, width + MAX_TOPIC_V2)
        topic = behind[width : width + int.from_bytes(behind[:width], "big")]
        if topic in (b"", b".", b"..") or b"/" in topic or b"\0" in topic:
            return False
        return _unit(os.path.join(queues, os.fsdecode(topic), str(queue_id)), queue_offset) == (at, size)


def _unit(directory: str, queue_offset: int) -> tuple[int, int] | None:
    """Return log position and size of a consume queue's entry for a queue offset, or None."""
    place = queue_offset * _UNIT.size
    try:
        files = [(base, path) for base, path in numbered_files(directory) if base <= place]
        if not files:
            return None
        base, path = files[-1]
        with opened(path) as fd:
            if place - base >= os.fstat(fd).st_size:
                return None
            unit = os.pread(fd, _UNIT.size, place - base)
    except OSError:
        return None  # The consume queue does not exist
    return _UNIT.unpack(unit)[:2] if len(unit) == _UNIT.size else None


def _chain(data: bytes, position: int, framing: Framing) -> Rows:
    """Return the consecutive valid records at the start of the data.

    The loop reads only lengths, and numpy checks the other fields of all records at once: `record_starts`,
    which checks them one by one, takes a third longer.
    """
    starts: list[int] = []
    gap = framing.gap
    at, last = gap, len(data) - MIN_SIZE
    while at <= last:
        starts.append(at)
        (size,) = _size_at(data, at)
        if size < MIN_SIZE:
            break
        at += size + gap
    rows, good = read_rows(np.frombuffer(data, np.uint8), np.array(starts, np.int64))
    good &= rows.head["physical_offset"] == rows.start + position
    if gap:
        heads = items_at(rows.data, rows.start - gap, HEAD_KIND)
        good &= framing.heads_match(heads, rows.start + position, rows.head["store_size"])
    wrong = np.flatnonzero(~good)
    return rows.pick(slice(int(wrong[0]))) if len(wrong) else rows


def _problem(data: bytes, position: int) -> str:
    """Return a description of why no record begins at the start of the data."""
    if len(data) < MIN_SIZE:
        return f"the file ends behind {len(data)} bytes"
    if not data[:BLANK_SIZE].strip(b"\0"):
        return "it begins with zeros"
    try:
        found = decode_record(data)
    except RecordError as problem:
        return f"{problem.field}: {problem.problem}"
    return f"physical offset: it says {found.physical_offset}, but lies at {position}"

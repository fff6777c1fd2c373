"""Reads a consume queue: the records of one pull, and their offsets.

Rules and limits are Apache's (docs/reference/storage.md, Reading). Budget: 0.3 µs of CPU per message at 32
messages per call. Records that are consecutive in the log are read together, so 32 of them cost one system
call and one copy from the page cache. Other records come from cached blocks of the log (log/recent.py).
"""

from __future__ import annotations

import enum
import errno
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import NamedTuple

import msgspec
import numpy as np

from cometmq import logs
from cometmq.protocol.record.layout import MAGIC_V1, MAGIC_V2, MIN_SIZE, START
from cometmq.protocol.record.one import record_facts
from cometmq.store.base.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Buffer
from cometmq.store.base.files import WAITING, NotInMemory, Reads
from cometmq.store.derived.consume_queue import FILLER, FILLER_SIZE, UNIT_DTYPE, UNIT_STRUCT, ConsumeQueue
from cometmq.store.derived.queue_ext import MIN_HASH_CODE
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.recent import BLOCK, DENSE

log = logs.logger(__name__)

FILLER_UNIT = (0, FILLER_SIZE, 0)
_FILLERS_AT_ONCE = 4096
# Maximum number of filler units that one pull skips. Skipping this number takes 0.5 ms.
_MAX_FILLERS_PER_PULL = 1 << 17
_MAGICS = (MAGIC_V1, MAGIC_V2)
_start_of: Callable[..., tuple[int, int]] = START.unpack_from
_MAX_UNITS_PER_CHECK = 64  # Maximum number of queue units that are checked together without numpy
_UNITS_AT_ONCE = 128  # Number of queue units decoded at a time while records are checked one by one
_MAX_BLOCKS_PER_READ = 64  # Maximum number of blocks that one bulk read loads; loading them takes 3 ms
_UNITS_PER_CACHED_READ = 1024  # Number of queue units (20 KiB) read at once and cached for later pulls
_MAX_CACHED_QUEUES = 64  # Maximum number of queues with cached units; the cache takes up to 1.3 MiB

TagFilter = Container[int] | Callable[[int], bool] | None
Unit = tuple[int, int, int]
"""The position, size and tags code of a record."""
RecordFilter = Callable[[bytes | bytearray, int, Sequence[Unit], int, int], tuple[int, bool | None]] | None
"""A function that searches for the next record that matches a filter (such as SQL92).

Its arguments are a block of the log, the log position of the block's first byte, a list of units, and the
range of indexes in this list: first, and last (exclusive). The record of the first unit lies in the block.

The function examines the records in the order of the units, and returns the index of a unit together with one
of these values:

- True: the record of this unit matches.
- None: the read must end at this unit.
- False: none of the examined records matches. The search continues with this unit, which lies after the range
  or whose record is outside the block.

A damaged record must match, because the reader checks only the records that match.
"""
Picked = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""The positions and sizes of the chosen records, the number of scanned units, the last scanned position."""


class Limits(NamedTuple):
    """The maximum numbers of messages and bytes in a response, for records in memory and on disk."""

    messages: int
    size: int
    messages_on_disk: int
    size_on_disk: int


BULK = Limits(1024, 1 << 20, 1024, 1 << 20)
"""The limits of a bulk read, by which a consumer fetches many messages in advance."""


@lru_cache(64)
def _units_of(count: int) -> Callable[[Buffer], tuple[int, ...]]:
    """Return a function that decodes the record positions and sizes in `count` consecutive queue units."""
    return struct.Struct(">" + "qi8x" * count).unpack_from


@lru_cache(64)
def _heads_of(count: int, size: int) -> Callable[[Buffer], tuple[bytes, ...]]:
    """Return a function that gets the first 8 bytes of `count` consecutive records of `size` bytes each."""
    return struct.Struct(f"{START.size}s{size - START.size}x" * count).unpack


class GetStatus(enum.Enum):
    """The outcome of a read. In the response to a pull, the name of the outcome is the remark."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class ReadResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a read. Joined together, the `buffers` are `count` complete commit-log records.

    `behind` is the distance in bytes from the last examined record to the end of the log, 0 if no record was
    examined.
    """

    status: GetStatus
    buffers: list[Buffer]
    count: int
    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggest_slave: bool
    behind: int = 0


def physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class QueueReader:
    """Reads the queues of one store. All methods must be called on the loop."""

    def __init__(self, log: CommitLog, config: StoreConfig, memory_bytes: int) -> None:
        self._log = log
        self.memory_bytes = memory_bytes
        self._cached_units: OrderedDict[ConsumeQueue, tuple[int, Buffer]] = OrderedDict()
        self.configure(config)
        self.refused: Callable[[int, str], None] = _log_refused  # Called for each missing or damaged record

    def configure(self, config: StoreConfig) -> None:
        self._config = config
        self._limits = Limits(
            config.max_transfer_count_on_message_in_memory,
            config.max_transfer_bytes_on_message_in_memory,
            config.max_transfer_count_on_message_in_disk,
            config.max_transfer_bytes_on_message_in_disk,
        )

    @property
    def memory_window(self) -> int:
        """The number of bytes at the end of the log that count as being in memory."""
        return self.memory_bytes * self._config.access_message_in_memory_max_ratio // 100

    def get(
        self,
        queue: ConsumeQueue | None,
        offset: int,
        max_count: int,
        *,
        tags: TagFilter = None,
        records: RecordFilter = None,
        max_bytes: int | None = None,
        bulk: bool = False,
        correct: bool = True,
        reads: Reads = WAITING,
    ) -> ReadResult:
        """Read up to `max_count` messages from `offset` on: at least one if there is any.

        Args:
            tags: A set of signed 32-bit tag hashes, or a function that accepts or rejects a tags code.
            records: A filter of whole records.
            bulk: Whether the limits of BULK apply instead of those of the settings.
            correct: Whether to correct an offset outside the queue, which a slave may not do.

        Raises NotInMemory, OSError.
        """
        if queue is None:
            return ReadResult(GetStatus.NO_MESSAGE_IN_QUEUE, [], 0, 0 if correct else offset, 0, 0, False)
        low, high = queue.min_offset, queue.max_offset
        if not low <= offset < high:
            status, corrected = _outside(offset, low, high)
            return ReadResult(status, [], 0, corrected if correct else offset, low, high, False)
        limits = _narrowed(BULK if bulk else self._limits, max_count, max_bytes)
        # Number of units to read. Without a filter, each unit yields a message. A filter may reject most
        # units, so more are read.
        several = max(1, limits.messages, limits.messages_on_disk)
        if tags is not None or records is not None:
            several = max(self._config.max_filter_message_size // UNIT, several)
        data = self._units(queue, offset, min(several, high - offset), reads)
        if not data:
            following = queue.next_file_offset(offset) if correct else offset
            return ReadResult(GetStatus.OFFSET_FOUND_NULL, [], 0, following, low, high, False)
        picked = None
        if records is None and not self._config.check_crc_on_read:
            picked = self._pick_all(data, limits) if tags is None else None
            picked = picked or self._pick(data, tags, limits)
        if picked is not None:
            positions, sizes, scanned, last = picked
            count = 0
            found: Buffer | None = b""
            if positions:
                count, found = self._records(positions, sizes, reads, partly=bulk)
            if found is not None:
                if count < len(positions):
                    # Some chosen records were not read. The next pull begins with the first unread one.
                    places = np.frombuffer(data, UNIT_DTYPE)["position"]
                    scanned = max(count, int(np.flatnonzero(places == positions[count])[0]))
                    last = positions[count - 1]
                lag = self._log.end - last
                slave = lag > self.memory_window
                following = offset + scanned
                if found:
                    return ReadResult(GetStatus.FOUND, [found], count, following, low, high, slave, lag)
                following = self._skip_fillers(queue, data, following, reads)
                return ReadResult(GetStatus.NO_MATCHED_MESSAGE, [], 0, following, low, high, slave, lag)
        return self._get_one_by_one(queue, offset, data, tags, records, limits, reads)

    def _units(self, queue: ConsumeQueue, offset: int, count: int, reads: Reads) -> Buffer | None:
        """Return the same units as `ConsumeQueue.read`, mostly from a cache, without a system call."""
        several = min(_UNITS_PER_CACHED_READ, queue.window_start - offset)
        if several <= count or queue.deleted:
            return queue.read(offset, count, reads)
        first, data = self._cached_units.get(queue) or (0, b"")
        begin = (offset - first) * UNIT
        if not 0 <= begin <= len(data) - count * UNIT:
            ahead = queue.read(offset, several, reads)
            if ahead is None:
                return None
            data, begin = ahead, 0
            self._cached_units[queue] = offset, data
            self._cached_units.move_to_end(queue)
            if len(self._cached_units) > _MAX_CACHED_QUEUES:
                self._cached_units.popitem(last=False)
        return data[begin : begin + count * UNIT]

    def _skip_fillers(self, queue: ConsumeQueue, data: Buffer, offset: int, reads: Reads) -> int:
        """Skip filler units, which stand for lost records, from `offset` on. Return the next offset.

        `data` holds the units that this read has examined already. Only after a filler unit are more skipped.
        """
        if data[-UNIT:] != FILLER:
            return offset
        begin = offset
        stop = min(queue.max_offset, offset + _MAX_FILLERS_PER_PULL)
        while offset < stop:
            try:
                more = queue.read(offset, min(stop - offset, _FILLERS_AT_ONCE), reads)
            except NotInMemory:
                if offset == begin:
                    raise
                return offset
            if more is None:
                return offset
            units = np.frombuffer(more, UNIT_DTYPE)
            real = np.flatnonzero((units["size"] != FILLER_SIZE) | (units["position"] != 0))
            if len(real):
                return offset + int(real[0])
            offset += len(units)
        return offset

    def _pick_all(self, data: Buffer, limits: Limits) -> Picked | None:
        """Choose the records of all units in `data`, at most as many as `limits` permits, with loops in C.

        The result is None if a unit is invalid, if a record is not in memory, or if the records exceed the
        size limit. Then the caller chooses records one by one with `_pick`.
        """
        limit_count, limit_bytes, *_ = limits
        count = min(len(data) // UNIT, max(1, limit_count))
        if count > _MAX_UNITS_PER_CHECK:
            return self._pick_many(data, count, limits)
        fields = _units_of(count)(data)
        positions, sizes = fields[::2], fields[1::2]
        if (
            sum(sizes) > limit_bytes
            or min(sizes) < MIN_SIZE
            or positions[0] < self._log.end - self.memory_window  # The positions ascend
        ):
            return None
        return positions, sizes, count, positions[-1]

    def _pick_many(self, data: Buffer, count: int, limits: Limits) -> Picked | None:
        """Choose records as `_pick_all` does, but with numpy, up to the size limit.

        The result is None if a unit is invalid, or if a record is not in memory and the limits differ there.
        """
        units = np.frombuffer(data, UNIT_DTYPE, count)
        sizes, positions = units["size"].astype(np.int64), units["position"].astype(np.int64)
        two_limits = limits[:2] != limits[2:] and positions.min() < self._log.end - self.memory_window
        if two_limits or sizes.min() < MIN_SIZE or sizes.max() >= FILLER_SIZE:
            return None
        fit = max(1, int(np.searchsorted(np.cumsum(sizes), limits.size, "right")))
        chosen = tuple(positions[:fit].tolist())
        return chosen, tuple(sizes[:fit].tolist()), fit, chosen[-1]

    def _pick(self, data: Buffer, tags: TagFilter, limits: Limits) -> Picked | None:
        """Choose the records that may match `tags`, unit by unit. Return None if a unit is invalid."""
        disk_below = self._log.end - self.memory_window
        limit_count, limit_bytes, disk_count, disk_bytes = limits
        accepts = None if tags is None else (tags if callable(tags) else tags.__contains__)
        any_code = callable(tags)
        positions: list[int] = []
        sizes: list[int] = []
        count = total = scanned = 0
        position = 0
        for unit in UNIT_STRUCT.iter_unpack(data):
            position, size, code = unit
            if count:
                if position < disk_below:
                    if count >= disk_count or total + size > disk_bytes:
                        break
                elif count >= limit_count or total + size > limit_bytes:
                    break
            scanned += 1
            if accepts is None or accepts(code):
                pass
            elif any_code or MIN_HASH_CODE <= code <= 0x7FFFFFFF or not tag_matches(tags, code):
                continue
            if not MIN_SIZE <= size < FILLER_SIZE:
                if unit == FILLER_UNIT:
                    continue
                return None
            positions.append(position)
            sizes.append(size)
            count += 1
            total += size
        return tuple(positions), tuple(sizes), scanned, position

    def _records(
        self, positions: tuple[int, ...], sizes: tuple[int, ...], reads: Reads, *, partly: bool
    ) -> tuple[int, Buffer | None]:
        """Return the number and the bytes of the records read, or None if a record is missing or invalid.

        With `partly`, and of records in an object store, the read may end early: before the first record
        that is not in memory, or when it has loaded `_MAX_BLOCKS_PER_READ` blocks.
        """
        if (older := self._log.older) is not None and positions[0] < self._log.min_position:
            older.require(positions, sizes, reads)
            partly = True
        total = len(positions)
        firsts = [0]  # Index of the first record of each group of records that are adjacent in the log
        # The positions ascend, so the records are adjacent if there are no other bytes between them.
        if positions[-1] + sizes[-1] - positions[0] != sum(sizes):
            ends = tuple(map(add, positions, sizes))
            firsts += [each for each in range(1, total) if positions[each] != ends[each - 1]]
        kept, parts, loaded = self._log.blocks.get, list[Buffer](), 0
        for first, stop in zip(firsts, [*firsts[1:], total], strict=True):
            start = positions[first]
            length = positions[stop - 1] + sizes[stop - 1] - start
            number, at = divmod(start, BLOCK)
            data: Buffer | None = None
            try:
                if at + length <= BLOCK:
                    data = kept(number)
                    if data is None:
                        if partly and loaded == _MAX_BLOCKS_PER_READ:
                            total = first
                            break
                        data = self._log.block(number, positions, reads)
                        loaded += data is not None
                if data is not None:
                    data = data[at : at + length]
                else:
                    data = self._run(start, length, reads)
                    if data is None:
                        return first, None
            except NotInMemory:
                if not (partly and parts):
                    raise
                total = first
                break
            if not (_begins(data, length) if stop - first == 1 else _whole(data, sizes[first:stop])):
                return first, None
            parts.append(data)
        return total, parts[0] if len(parts) == 1 else b"".join(parts)

    def _run(self, position: int, length: int, reads: Reads) -> Buffer | None:
        """Return bytes of the log, or None if the device cannot read some of them."""
        try:
            return self._log.read(position, length, reads)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            return None

    def _is_of_gone_segment(self, position: int, size: int) -> bool:
        """Return whether a valid unit refers to a segment that is no longer on the disk."""
        log = self._log
        in_segment = MIN_SIZE <= size <= log.segment_size - position % log.segment_size
        return 0 <= position < log.min_position and in_segment

    def _get_one_by_one(
        self,
        queue: ConsumeQueue,
        offset: int,
        data: Buffer,
        tags: TagFilter,
        records: RecordFilter,
        limits: Limits,
        reads: Reads,
    ) -> ReadResult:
        """Read the records of the units in `data` one by one, and skip missing and damaged ones.

        This is needed for invalid units, missing or damaged records, a filter of records, and CRC checks.
        """
        log, check_crc = self._log, self._config.check_crc_on_read
        disk_below = log.end - self.memory_window
        units, buffers = list[Unit](), list[Buffer]()
        total = scanned = skip_below = start = stop = 0
        matched, missing = -1, False  # `matched`: index in `units` of the last match; -1 without a match
        block: bytes | bytearray | None = None  # The bytes of the log from `start` to before `stop`
        while scanned < len(data) // UNIT:
            if scanned == len(units):
                units += UNIT_STRUCT.iter_unpack(data[scanned * UNIT : (scanned + _UNITS_AT_ONCE) * UNIT])
            position, size, code = units[scanned]
            if buffers:
                limit_count, limit_bytes = limits[2:] if position < disk_below else limits[:2]
                if len(buffers) >= limit_count or total + size > limit_bytes:
                    break
            if units[scanned] == FILLER_UNIT or position < skip_below or not tag_matches(tags, code):
                scanned += 1
                continue
            if position < start or position + size > stop or size < MIN_SIZE:
                try:
                    wanted = [each[0] for each in units[scanned : scanned + DENSE]]
                    block, start, stop = self._block_around(wanted, size, reads)
                except (NotInMemory, OSError) as failure:
                    begun = buffers or (records is not None and scanned)
                    if not begun or (isinstance(failure, OSError) and failure.errno != errno.EIO):
                        raise
                    break  # The next pull begins with the unreadable record and reports its damage
            if block is None and self._is_of_gone_segment(position, size):
                missing = True
                skip_below = position - position % log.segment_size + log.segment_size
                scanned += 1
                continue
            at, place = position - start, offset + scanned
            damaged = check_crc and not (
                block is not None and _belongs(block[at : at + size], position, queue, place)
            )
            if records is not None and block is not None and scanned != matched and not damaged:
                last = len(units) if tags is None and not check_crc else scanned + 1
                scanned, passes = records(block, start, units, scanned, last)
                if passes is None:
                    break
                matched = scanned if passes else -1
                continue
            scanned += 1
            if block is None or damaged or not _begins(block, size, at):
                missing = True
                self.refused(position, f"{queue.topic}/{queue.queue_id}@{place}")
                continue
            buffers.append(memoryview(block)[at : at + size])
            total += size
        following = offset + scanned
        if buffers:
            status = GetStatus.FOUND
        else:
            status = GetStatus.MESSAGE_WAS_REMOVING if missing else GetStatus.NO_MATCHED_MESSAGE
            following = self._skip_fillers(queue, data, following, reads)
        low, high, lag = queue.min_offset, queue.max_offset, log.end - units[min(scanned, len(units) - 1)][0]
        return ReadResult(status, buffers, len(buffers), following, low, high, lag > self.memory_window, lag)

    def _block_around(
        self, wanted: list[int], size: int, reads: Reads
    ) -> tuple[bytes | bytearray | None, int, int]:
        """Return bytes of the log that contain the record at `wanted[0]`, and their first and end position.

        The bytes are a whole block if the block is in the cache or was requested often enough to be loaded.
        Otherwise they are the record alone. They are None if the record is missing.
        """
        if size < MIN_SIZE:
            return None, 0, 0
        position = wanted[0]
        number, at = divmod(position, BLOCK)
        block = self._log.block(number, wanted, reads) if at + size <= BLOCK else None
        if block is not None:
            return _whole_object(block), position - at, position - at + BLOCK
        record = self._log.read(position, size, reads)
        if record is None:
            return None, 0, 0
        return bytes(record) if isinstance(record, memoryview) else record, position, position + size


def _whole_object(view: memoryview) -> bytes | bytearray:
    """Return the bytes of a view as an object that has `find`, without a copy if it is whole."""
    found = view.obj
    if isinstance(found, bytes | bytearray) and len(found) == len(view):
        return found
    return bytes(view)


@lru_cache(64)
def _narrowed(limits: Limits, count: int, size: int | None) -> Limits:
    """Return `limits`, lowered to the count and size that a client requests."""
    messages, most, messages_on_disk, most_on_disk = limits
    if size is not None:
        most, most_on_disk = min(most, size), min(most_on_disk, size)
    return Limits(min(messages, count), most, min(messages_on_disk, count), most_on_disk)


def _outside(offset: int, low: int, high: int) -> tuple[GetStatus, int]:
    """Return the status and the next offset for a requested offset outside [low, high)."""
    if high == 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE, 0
    if offset < low:
        return GetStatus.OFFSET_TOO_SMALL, low
    if offset == high:
        return GetStatus.OFFSET_OVERFLOW_ONE, offset
    return GetStatus.OFFSET_OVERFLOW_BADLY, high


def tag_matches(tags: TagFilter, code: int) -> bool:
    """Return whether a unit with the tags code `code` may match `tags`.

    The address of an entry in consumequeue_ext always matches, because clients compare the tag itself, too.
    """
    if tags is None:
        return True
    if callable(tags):
        return tags(code)
    return code < MIN_HASH_CODE or ((code + 0x80000000) & 0xFFFFFFFF) - 0x80000000 in tags


def _begins(data: Buffer, size: int, at: int = 0) -> bool:
    """Return whether a record of `size` bytes begins at data[at], and not, for example, a page of zeros."""
    stored, magic = _start_of(data, at)
    return stored == size and magic in _MAGICS


def _whole(data: Buffer, sizes: tuple[int, ...]) -> bool:
    """Return whether records of the given sizes begin in `data` where they should."""
    count, size = len(sizes), sizes[0]
    if sizes.count(size) == count:
        heads = _heads_of(count, size)(data)
        return _begins(data, size) and heads.count(heads[0]) == count
    places = accumulate(sizes[:-1], initial=0)
    return all(_begins(data, size, at) for size, at in zip(sizes, places, strict=True))


def _belongs(record: Buffer, position: int, queue: ConsumeQueue, offset: int) -> bool:
    """Return whether a record is valid, including its CRC, and belongs to the given offset of a queue."""
    facts = record_facts(memoryview(record), 0, position)
    place = queue.topic, queue.queue_id, offset
    return facts is not None and (facts.topic, facts.queue_id, facts.queue_offset) == place


def _log_refused(position: int, place: str) -> None:
    what = "the queue or the log is damaged, and the message is skipped"
    log.error("the record of %s at log position %d is missing: %s", place, position, what)

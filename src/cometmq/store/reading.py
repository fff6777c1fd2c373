"""Reading a consume queue: which records one pull gets, and what it is told about offsets.

Rules and limits are those of the storage fact sheet, section 6. Budget: 1.5 µs of CPU per message at 32
per call. Units come from the queue's window or one `preadv`; records that lie near each other in the log
are read in one go (a gap of up to 12 KiB costs less to copy than a second system call), so 32 neighbours
cost one system call and one copy from the page cache.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Callable, Container

import msgspec
import numpy as np

from cometmq.protocol.record import MAGIC_V1, MAGIC_V2, MIN_SIZE
from cometmq.store.block_cache import BLOCK
from cometmq.store.commit_log import CommitLog
from cometmq.store.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.config import StoreConfig
from cometmq.store.consume_queue import FILLER, FILLER_SIZE, UNIT_DTYPE, UNIT_STRUCT, ConsumeQueue
from cometmq.store.disk import Buffer
from cometmq.store.files import NotCached
from cometmq.store.queue_ext import LEAST_CODE
from cometmq.store.scan import record_facts

log = logging.getLogger(__name__)

FILLER_UNIT = (0, FILLER_SIZE, 0)
_FILLERS_AT_ONCE = 4096
_MOST_FILLERS = 1 << 17  # passed over by one pull: 0.5 ms
_DENSE = 4  # records of one block that make loading the whole of it worth while
_start_of = struct.Struct(">ii").unpack_from
_GAP = 12 << 10
_MAX_RUN = 128 << 10

TagFilter = Container[int] | Callable[[int], bool] | None
RecordFilter = Callable[[Buffer], bool] | None


class GetStatus(enum.Enum):
    """Outcome of a read; the names are the remarks on the wire."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class Got(msgspec.Struct, frozen=True, gc=False):
    """What a read found. The concatenation of `buffers` is `count` whole commit-log records."""

    status: GetStatus
    buffers: list[Buffer]
    count: int
    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggest_slave: bool


class QueueReader:
    """`get` over one store's log. Loop thread only."""

    __slots__ = (
        "_bytes_disk",
        "_bytes_memory",
        "_check_crc",
        "_config",
        "_count_disk",
        "_count_memory",
        "_log",
        "_ratio",
        "_scan_bytes",
        "memory_bytes",
        "refused",
    )  # fmt: skip

    def __init__(self, log: CommitLog, config: StoreConfig, memory_bytes: int) -> None:
        self._log = log
        self.memory_bytes = memory_bytes
        self.configure(config)
        self.refused: Callable[[int, str], None] = _log_refused  # told of damage that readers meet

    def configure(self, config: StoreConfig) -> None:
        """Take over parameters; they may change while the store runs."""
        self._config = config
        self._count_memory = config.max_transfer_count_on_message_in_memory
        self._bytes_memory = config.max_transfer_bytes_on_message_in_memory
        self._count_disk = config.max_transfer_count_on_message_in_disk
        self._bytes_disk = config.max_transfer_bytes_on_message_in_disk
        self._scan_bytes = config.max_filter_message_size
        self._check_crc = config.check_crc_on_read

    @property
    def memory_window(self) -> int:
        """Bytes at the end of the log that count as being in memory."""
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
        correct: bool = True,
        wait: bool = False,
    ) -> Got | NotCached:
        """Read up to `max_count` messages from `offset` on.

        `tags` is a set of signed 32-bit tag hashes or a function of the whole tags code; `records` a
        function of the whole record. With `correct` false (a slave without offsetCheckInSlave) the offset
        corrections are not applied.
        """
        if queue is None:
            return Got(GetStatus.NO_MESSAGE_IN_QUEUE, [], 0, 0 if correct else offset, 0, 0, False)
        low, high = queue.min_offset, queue.max_offset
        if not low <= offset < high:
            status, corrected = _outside(offset, low, high)
            return Got(status, [], 0, corrected if correct else offset, low, high, False)
        several = max(self._scan_bytes, max_count * UNIT) // UNIT
        if tags is None and records is None:
            several = max(1, max_count)
        data = queue.read(offset, min(several, high - offset), wait=wait)
        if isinstance(data, NotCached):
            return data
        if not data:
            following = queue.next_file_offset(offset) if correct else offset
            return Got(GetStatus.OFFSET_FOUND_NULL, [], 0, following, low, high, False)
        careful = records is not None or self._check_crc
        picked = None if careful else self._pick(data, max_count, tags, max_bytes)
        if picked is not None:
            chosen, scanned, last = picked
            buffers = self._read_runs(chosen, wait)
            if isinstance(buffers, NotCached):
                return buffers
            if buffers is not None:
                slave = self._log.end - last > self.memory_window
                if chosen:
                    return Got(GetStatus.FOUND, buffers, len(chosen), offset + scanned, low, high, slave)
                behind = self._behind_fillers(queue, data, offset + scanned, wait)
                if isinstance(behind, NotCached):
                    return behind
                return Got(GetStatus.NO_MATCHED_MESSAGE, [], 0, behind, low, high, slave)
        return self._get_one_by_one(queue, offset, data, max_count, tags, records, max_bytes, wait)

    def _behind_fillers(self, queue: ConsumeQueue, data: Buffer, offset: int, wait: bool) -> int | NotCached:
        """Where to go on after `data`, units up to `offset` that gave nothing: behind the fillers that
        follow if these ended with one. A gap of a million takes eight pulls."""
        if data[-UNIT:] != FILLER:
            return offset
        begin = offset
        stop = min(queue.max_offset, offset + _MOST_FILLERS)
        while offset < stop:
            more = queue.read(offset, min(stop - offset, _FILLERS_AT_ONCE), wait=wait)
            if more is None or isinstance(more, NotCached):
                return offset if more is None or offset > begin else more
            units = np.frombuffer(more, UNIT_DTYPE)
            real = np.flatnonzero((units["size"] != FILLER_SIZE) | (units["position"] != 0))
            if len(real):
                return offset + int(real[0])
            offset += len(units)
        return offset

    def _pick(
        self, data: Buffer, max_count: int, tags: TagFilter, max_bytes: int | None
    ) -> tuple[list[tuple[int, int]], int, int] | None:
        """Choose records from units alone: ([(position, size)], units scanned, position of the last one
        scanned). None when a unit cannot be true."""
        disk_below = self._log.end - self.memory_window
        limit_bytes = self._bytes_memory
        limit_count = min(self._count_memory, max_count)
        disk_bytes, disk_count = self._bytes_disk, min(self._count_disk, max_count)
        if max_bytes is not None:
            limit_bytes, disk_bytes = min(limit_bytes, max_bytes), min(disk_bytes, max_bytes)
        accepts = None if tags is None else (tags if callable(tags) else tags.__contains__)
        any_code = callable(tags)
        chosen: list[tuple[int, int]] = []
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
            elif any_code or LEAST_CODE <= code <= 0x7FFFFFFF or not tag_matches(tags, code):
                continue
            if not MIN_SIZE <= size < FILLER_SIZE:
                if unit == FILLER_UNIT:
                    continue
                return None
            chosen.append((position, size))
            count += 1
            total += size
        return chosen, scanned, position

    def _read_runs(self, chosen: list[tuple[int, int]], wait: bool) -> list[Buffer] | NotCached | None:
        """Bytes of the chosen records; None when one of them cannot be had, or fails the check of its CRC."""
        buffers: list[Buffer] = []
        segment = self._log.segment_size
        read = self._log.read
        index, total = 0, len(chosen)
        while index < total:
            start, size = chosen[index]
            taken = self._from_block(chosen, index, buffers, wait)
            if isinstance(taken, NotCached):
                return taken
            if taken:
                index += taken
                continue
            stop = start + size
            boundary = start - start % segment + segment
            first = index
            gaps = False
            index += 1
            while index < total:
                position, size = chosen[index]
                if position != stop:
                    if (
                        not 0 < position - stop <= _GAP
                        or position + size - start > _MAX_RUN
                        or position >= boundary
                    ):
                        break
                    gaps = True
                stop = position + size
                index += 1
            data = read(start, stop - start, wait=wait)
            if data is None or isinstance(data, NotCached):
                return data
            run = chosen[first:index]
            for at, size in run:
                stored, magic = _start_of(data, at - start)
                if stored != size or (magic != MAGIC_V1 and magic != MAGIC_V2):
                    return None  # a lost page reads as zeros: never hand that to a client
            if gaps:
                view = memoryview(data)
                buffers += [view[at - start : at - start + size] for at, size in run]
            else:
                buffers.append(data)
        return buffers

    def _from_block(
        self, chosen: list[tuple[int, int]], index: int, buffers: list[Buffer], wait: bool
    ) -> int | NotCached:
        """Take the records from `index` on that lie in one block out of it, if it is kept or worth being
        loaded. Returns how many were taken; 0 leaves them to the other way."""
        start = chosen[index][0]
        base = start - start % BLOCK
        last = index
        at = start
        while (
            last < len(chosen) and at <= chosen[last][0] and chosen[last][0] + chosen[last][1] <= base + BLOCK
        ):
            at = chosen[last][0]
            last += 1
        block = self._log.block(start, wait=wait, load=last - index >= _DENSE) if last > index else None
        if block is None or isinstance(block, NotCached):
            return 0 if block is None else block
        parts: list[Buffer] = []
        first = stop = start
        for at, size in chosen[index:last]:
            stored, magic = _start_of(block, at - base)
            if stored != size or (magic != MAGIC_V1 and magic != MAGIC_V2):
                return 0
            if at != stop:
                parts.append(block[first - base : stop - base])
                first = at
            stop = at + size
        parts.append(block[first - base : stop - base])
        buffers += parts
        return last - index

    def _get_one_by_one(
        self,
        queue: ConsumeQueue,
        offset: int,
        data: Buffer,
        max_count: int,
        tags: TagFilter,
        records: RecordFilter,
        max_bytes: int | None,
        wait: bool,
    ) -> Got | NotCached:
        """The careful way: records are filtered by content, or some are missing or damaged."""
        log = self._log
        buffers: list[Buffer] = []
        total = scanned = skip_below = 0
        missing = False
        position = 0
        for position, size, code in UNIT_STRUCT.iter_unpack(data):
            if self._batch_full(position, size, len(buffers), total, max_count, max_bytes):
                break
            scanned += 1
            if (position, size, code) == FILLER_UNIT or position < skip_below or not tag_matches(tags, code):
                continue
            record = log.read(position, size, wait=wait) if size >= MIN_SIZE else None
            if isinstance(record, NotCached):
                if not buffers:
                    return record
                scanned -= 1
                break
            if record is None and size >= MIN_SIZE and 0 <= position < log.min_position:
                missing = True
                skip_below = position - position % log.segment_size + log.segment_size
                continue
            place = offset + scanned - 1
            if (
                record is None
                or not _begins(record, size)
                or (self._check_crc and not _belongs(record, position, queue, place))
            ):
                missing = True
                self.refused(position, f"{queue.topic}/{queue.queue_id}@{place}")
                continue
            if records is not None and not records(record):
                continue
            buffers.append(record)
            total += size
        following = offset + scanned
        if buffers:
            status = GetStatus.FOUND
        else:
            status = GetStatus.MESSAGE_WAS_REMOVING if missing else GetStatus.NO_MATCHED_MESSAGE
            behind = self._behind_fillers(queue, data, following, wait)
            if isinstance(behind, NotCached):
                return behind
            following = behind
        slave = log.end - position > self.memory_window
        return Got(status, buffers, len(buffers), following, queue.min_offset, queue.max_offset, slave)

    def _batch_full(
        self, position: int, size: int, count: int, total: int, max_count: int, max_bytes: int | None
    ) -> bool:
        if count == 0:
            return False
        on_disk = self._log.end - position > self.memory_window
        limit_bytes = self._bytes_disk if on_disk else self._bytes_memory
        if max_bytes is not None:
            limit_bytes = min(limit_bytes, max_bytes)
        limit_count = self._count_disk if on_disk else self._count_memory
        return count >= max_count or total + size > limit_bytes or count >= limit_count


def _outside(offset: int, low: int, high: int) -> tuple[GetStatus, int]:
    """Status and next offset of a request outside [low, high)."""
    if high == 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE, 0
    if offset < low:
        return GetStatus.OFFSET_TOO_SMALL, low
    if offset == high:
        return GetStatus.OFFSET_OVERFLOW_ONE, offset
    return GetStatus.OFFSET_OVERFLOW_BADLY, high


def tag_matches(tags: TagFilter, code: int) -> bool:
    """Whether a unit with this tags code may be one of `tags`.

    The address of an ext unit says nothing about the tag: such a message passes, for clients compare the tag
    itself.
    """
    if tags is None:
        return True
    if callable(tags):
        return tags(code)
    return code < LEAST_CODE or ((code + 0x80000000) & 0xFFFFFFFF) - 0x80000000 in tags


def _begins(record: Buffer, size: int) -> bool:
    stored, magic = _start_of(record, 0)
    return stored == size and magic in (MAGIC_V1, MAGIC_V2)


def _belongs(record: Buffer, position: int, queue: ConsumeQueue, offset: int) -> bool:
    """Whether a record is whole, its CRC included, and the one that this unit of this queue means."""
    facts = record_facts(memoryview(record), 0, position)
    return facts is not None and (facts.topic, facts.queue_id, facts.queue_offset) == (
        queue.topic,
        queue.queue_id,
        offset,
    )


def _log_refused(position: int, place: str) -> None:
    log.error(
        "no record of %s is at position %d of the log: one of them is damaged, not served", place, position
    )

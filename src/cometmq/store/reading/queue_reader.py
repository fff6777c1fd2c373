"""Reading a consume queue: which records one pull gets, and what it is told about offsets.

Rules and limits are Apache's (docs/reference/storage.md, Reading). Budget: 1.5 µs of CPU per message at 32
per call. Units come from the queue's window or a stretch of its file that was read before; records that lie
near each other in the log are read in one go (a gap of up to 12 KiB costs less to copy than a second system
call), so 32 neighbours cost one system call and one copy from the page cache.

Most reads are plain: no filter, no limit before the last unit, all records in memory and in one run or one
block. Those are judged as a whole, by loops in C (`_plain`); what such a judgement cannot settle is looked at
unit by unit, and what even that cannot settle, record by record.
"""

from __future__ import annotations

import enum
import errno
import struct
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from operator import add, ne

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
from cometmq.store.derived.queue_ext import LEAST_CODE
from cometmq.store.log.block_cache import BLOCK, DENSE
from cometmq.store.log.commit_log import CommitLog

log = logs.logger(__name__)

FILLER_UNIT = (0, FILLER_SIZE, 0)
_FILLERS_AT_ONCE = 4096
_MOST_FILLERS = 1 << 17  # passed over by one pull: 0.5 ms
_start_of = START.unpack_from
_GAP = 12 << 10
_MAX_RUN = 128 << 10
_AHEAD = 1024  # units read at once, for the pulls that follow: 20 KiB
_MOST_PLAIN = 64  # units judged as a whole
_STRETCHES = 64  # queues of which such a stretch is kept: 1.3 MiB

TagFilter = Container[int] | Callable[[int], bool] | None
RecordFilter = Callable[[Buffer], bool] | None


@lru_cache(64)
def _units_of(count: int) -> Callable[[Buffer], tuple[int, ...]]:
    """Reads position and size of so many units, one behind the other."""
    return struct.Struct(">" + "qi8x" * count).unpack_from


@lru_cache(256)
def _heads_of(size: int) -> Callable[[Buffer], Iterator[tuple[int, int]]]:
    """Reads size and magic of records of one size that follow each other."""
    return struct.Struct(f"{START.format}{size - START.size}x").iter_unpack


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
    """What a read found. The concatenation of `buffers` is `count` whole commit-log records.

    behind: bytes from the last record looked at to the end of the log; 0 if none was.
    """

    status: GetStatus
    buffers: list[Buffer]
    count: int
    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggest_slave: bool
    behind: int = 0


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
        "_most_count",
        "_ratio",
        "_scan_bytes",
        "_stretches",
        "memory_bytes",
        "refused",
    )  # fmt: skip

    def __init__(self, log: CommitLog, config: StoreConfig, memory_bytes: int) -> None:
        self._log = log
        self._stretches: OrderedDict[ConsumeQueue, tuple[int, Buffer]] = OrderedDict()
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
        self._most_count = max(self._count_memory, self._count_disk)
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
        reads: Reads = WAITING,
    ) -> Got:
        """Read up to `max_count` messages from `offset` on: at least one, at most what the settings allow.

        `tags` is a set of signed 32-bit tag hashes or a function of the whole tags code; `records` a
        function of the whole record. With `correct` false (a slave without offsetCheckInSlave) the offset
        corrections are not applied. Raises NotInMemory, OSError.
        """
        if queue is None:
            return Got(GetStatus.NO_MESSAGE_IN_QUEUE, [], 0, 0 if correct else offset, 0, 0, False)
        low, high = queue.min_offset, queue.max_offset
        if not low <= offset < high:
            status, corrected = _outside(offset, low, high)
            return Got(status, [], 0, corrected if correct else offset, low, high, False)
        if max_count > self._most_count:  # no more units are read than messages may be given
            max_count = self._most_count
        several = max(self._scan_bytes, max_count * UNIT) // UNIT
        if tags is None and records is None:
            several = max(1, max_count)
        data = self._units(queue, offset, min(several, high - offset), reads)
        if not data:
            following = queue.next_file_offset(offset) if correct else offset
            return Got(GetStatus.OFFSET_FOUND_NULL, [], 0, following, low, high, False)
        careful = records is not None or self._check_crc
        if tags is None and not careful:
            plain = self._plain(data, max_count, max_bytes, reads)
            if plain is not None:
                count, buffer, last = plain
                lag = self._log.end - last
                slave = lag > self.memory_window
                return Got(GetStatus.FOUND, [buffer], count, offset + count, low, high, slave, lag)
        picked = None if careful else self._pick(data, max_count, tags, max_bytes)
        if picked is not None:
            chosen, scanned, last = picked
            buffers = self._read_runs(chosen, reads)
            if buffers is not None:
                lag = self._log.end - last
                slave = lag > self.memory_window
                if chosen:
                    return Got(GetStatus.FOUND, buffers, len(chosen), offset + scanned, low, high, slave, lag)
                behind = self._behind_fillers(queue, data, offset + scanned, reads)
                return Got(GetStatus.NO_MATCHED_MESSAGE, [], 0, behind, low, high, slave, lag)
        return self._get_one_by_one(queue, offset, data, max_count, tags, records, max_bytes, reads)

    def _behind_fillers(self, queue: ConsumeQueue, data: Buffer, offset: int, reads: Reads) -> int:
        """Where to go on after `data`, units up to `offset` that gave nothing: behind the fillers that
        follow if these ended with one. A gap of a million takes eight pulls."""
        if data[-UNIT:] != FILLER:
            return offset
        begin = offset
        stop = min(queue.max_offset, offset + _MOST_FILLERS)
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

    def _units(self, queue: ConsumeQueue, offset: int, count: int, reads: Reads) -> Buffer | None:
        """`ConsumeQueue.read`, by way of the stretch of the queue's file that was read last: units below the
        window never change, and a system call for each pull costs more than all its units."""
        if offset >= queue.window_start:
            return queue.read(offset, count, reads)
        kept = self._stretches.get(queue)
        if kept is not None:
            first, data = kept
            begin = (offset - first) * UNIT
            if begin >= 0 and begin + count * UNIT <= len(data):
                return data[begin : begin + count * UNIT]
        several = min(_AHEAD, queue.window_start - offset)
        if count < several:
            try:
                ahead = queue.read(offset, several, reads)
            except NotInMemory:
                ahead = None
            if ahead is not None:
                self._stretches[queue] = offset, ahead
                self._stretches.move_to_end(queue)
                if len(self._stretches) > _STRETCHES:
                    self._stretches.popitem(last=False)
                if len(ahead) >= count * UNIT:
                    return ahead[: count * UNIT]
        return queue.read(offset, count, reads)

    def _plain(
        self, data: Buffer, max_count: int, max_bytes: int | None, reads: Reads
    ) -> tuple[int, Buffer, int] | None:
        """How many records the units give to a plain read (see above), their bytes, and the position of the
        last one; None if this one is not plain."""
        log = self._log
        count = min(len(data) // UNIT, max(1, min(self._count_memory, max_count)))
        if count > _MOST_PLAIN:
            return None
        fields = _units_of(count)(data)
        positions, sizes = fields[::2], fields[1::2]
        start = min(positions)
        if (
            sum(sizes) > (self._bytes_memory if max_bytes is None else min(self._bytes_memory, max_bytes))
            or min(sizes) < MIN_SIZE
            or start < log.end - self.memory_window
        ):
            return None
        ends = tuple(accumulate(sizes, initial=start))
        one_run = ends[:-1] == positions
        stop = ends[-1] if one_run else max(map(add, positions, sizes))
        source: Buffer | None = None
        base = start - start % BLOCK  # position of the source
        if stop <= base + BLOCK:
            source = log.block(start, count, reads)
        if stop - start > _MAX_RUN and not one_run:
            scattered = self._scattered(positions, sizes, reads)
            return None if scattered is None else (count, scattered, positions[-1])
        if source is None and one_run:
            base = start
            source = self._run(start, stop - start, reads)
        if source is None:
            return None
        if one_run:
            taken = source[start - base : stop - base]
            if sizes.count(sizes[0]) == count:  # one call cuts all heads: 0.1 µs a record less
                good = list(_heads_of(sizes[0])(taken)) == [(sizes[0], MAGIC_V1)] * count
                return (count, taken, positions[-1]) if good else None
        places = [position - base for position in positions]
        if any(map(ne, map(_start_of, repeat(source), places), zip(sizes, repeat(MAGIC_V1)))):
            return None
        if not one_run:
            taken = b"".join([source[at : at + size] for at, size in zip(places, sizes, strict=True)])
        return count, taken, positions[-1]

    def _scattered(self, positions: Sequence[int], sizes: Sequence[int], reads: Reads) -> bytes | None:
        """The bytes of whole records that lie far apart, as those of one queue among thousands do; None if
        some lie together outside the blocks, or one is not what its unit says."""
        log = self._log
        kept = log.blocks.get
        parts: list[Buffer] = []
        for position, size in zip(positions, sizes, strict=True):
            number, at = divmod(position, BLOCK)
            source: Buffer | None = kept(number)
            if source is None or at + size > BLOCK:
                near = [other // BLOCK for other in positions].count(number)
                source = log.block(position, near, reads) if at + size <= BLOCK else None
                if source is None and near < DENSE:
                    source = self._run(position, size, reads)
                    at = 0
                if source is None:
                    return None
            if _start_of(source, at) != (size, MAGIC_V1):
                return None
            parts.append(source[at : at + size])
        return b"".join(parts)

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

    def _read_runs(self, chosen: list[tuple[int, int]], reads: Reads) -> list[Buffer] | None:
        """Bytes of the chosen records; None when one of them cannot be had, or fails the check of its CRC."""
        buffers: list[Buffer] = []
        segment = self._log.segment_size
        index, total = 0, len(chosen)
        while index < total:
            start, size = chosen[index]
            taken = self._from_block(chosen, index, buffers, reads)
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
            data = self._run(start, stop - start, reads)
            if data is None:
                return None
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

    def _run(self, position: int, length: int, reads: Reads) -> Buffer | None:
        """Bytes of the log for several records at once; None also when the device cannot read some of them:
        then each is read by itself."""
        try:
            return self._log.read(position, length, reads)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            return None

    def _from_block(
        self, chosen: list[tuple[int, int]], index: int, buffers: list[Buffer], reads: Reads
    ) -> int:
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
        block = self._log.block(start, last - index, reads) if last > index else None
        if block is None:
            return 0
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
        reads: Reads,
    ) -> Got:
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
            try:
                record = log.read(position, size, reads) if size >= MIN_SIZE else None
            except (NotInMemory, OSError) as failure:
                if not buffers or (isinstance(failure, OSError) and failure.errno != errno.EIO):
                    raise
                scanned -= 1  # the next read begins here, and says so
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
            following = self._behind_fillers(queue, data, following, reads)
        low, high, lag = queue.min_offset, queue.max_offset, log.end - position
        slave = lag > self.memory_window
        return Got(status, buffers, len(buffers), following, low, high, slave, lag)

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

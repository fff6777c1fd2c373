"""Queries for single records and for offsets: by log position, by key, by store time.

Queries that may examine many records are coroutines, which yield to the other work of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, closing, suppress
from functools import partial

import msgspec
import numpy as np

from cometmq import logs
from cometmq.errors import CommandError
from cometmq.protocol.codes import MAX_FRAME_LENGTH
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import PLACE_BYTES, place_of, record_facts, topic_of
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.files import WAITING, Reads
from cometmq.store.derived.consume_queue import FILLER, FILLER_SIZE, UNIT_DTYPE, ConsumeQueue
from cometmq.store.derived.index_service import NO_POSITION, IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.scan import SegmentScan

log = logs.logger(__name__)

_POSITIONS_AT_ONCE = 32  # Number of positions from the index that are examined per step
# Maximum number of records read per search. A search may read many records that do not match, because keys of
# other topics may have the same hash.
_MAX_RECORDS_READ = 256
_UNITS_A_TURN = 256  # Number of units examined per loop iteration; a record may have to be read for each unit
_BYTES_A_TURN = 1 << 20  # Number of record bytes examined per loop iteration, which takes about 1 ms


class _Found(msgspec.Struct, eq=False):
    """The result of a query by key: records of one topic and one range of store times, newest first.

    It holds at most `limit` records; `left` is the number of bytes that may still be added.
    """

    topic: str
    begin_ms: int
    end_ms: int
    limit: int
    left: int
    records: list[bytes] = msgspec.field(default_factory=list)

    def add(self, record: bytes) -> None:
        """Add a record to the result if its topic and time match.

        The check is needed because the index contains only hashes and approximate times.
        """
        place = place_of(record)
        in_range = place is not None and self.begin_ms <= place.store_timestamp_ms <= self.end_ms
        if in_range and topic_of(record) == self.topic:
            self.left -= len(record)
            if self.left >= 0:
                self.records.append(record)

    @property
    def full(self) -> bool:
        return self.left < 0 or len(self.records) >= self.limit


class Lookup(msgspec.Struct, eq=False):
    """Read-only queries of one store. When settings change, `config` is replaced."""

    commit_log: CommitLog
    queues: QueueTable
    index: IndexService
    executor: StoreExecutor
    config: StoreConfig

    def record_at(self, position: int, reads: Reads = WAITING) -> bytes | None:
        """Return the record at a log position, or None if no record begins there.

        Bytes inside a message can look like a record that is too long for a frame, so that counts as none.
        """
        head = self.commit_log.read(position, 4, reads)
        if head is None:
            return None
        size = int.from_bytes(head, "big", signed=True)
        segment = self.commit_log.segment_size
        if not 0 < size <= min(segment - position % segment, MAX_FRAME_LENGTH):
            return None
        data = self.commit_log.read(position, size, reads)
        if data is None or record_facts(memoryview(data), 0, position) is None:
            return None
        return bytes(data)

    def named_record(self, position: int, reads: Reads = WAITING) -> tuple[bytes, bool] | None:
        """Return the record at a log position that a client names, and whether it is one for certain.

        Bytes inside a message can look like a record that extends over the next messages, which may be those
        of topics that the client may not read. A record is one for certain if its queue contains it. One of a
        deleted topic is not.
        """
        record = self.record_at(position, reads)
        facts = None if record is None else record_facts(record, 0, position, check_crc=False)
        if record is None or facts is None:
            return None
        queue = self.queues.find_queue(facts.topic, facts.queue_id)
        if queue is None or not queue.min_offset <= facts.queue_offset < queue.max_offset:
            return record, False
        unit = queue.unit(facts.queue_offset, reads)
        return record, unit is not None and unit[0] == position

    async def by_key(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, max_bytes: int
    ) -> list[bytes]:
        """Return the newest records of the topic that have this key, in ascending order of position.

        Keys are compared by hash, so records with another key may be included. While the index cannot be
        written, the newest messages are not found.

        The store times `begin_ms` and `end_ms` are included.
        """
        try:
            self.index.index_waiting_keys()
        except OSError as failure:
            log.warning(
                "queries by key do not find the newest messages, because the index cannot be written: %s",
                failure,
            )
        limit = min(max_count, self.config.max_msgs_num_batch)
        found = _Found(topic, begin_ms, end_ms, limit, max_bytes)
        behind, left = NO_POSITION, max(_MAX_RECORDS_READ, limit)
        async with AsyncExitStack() as held:
            while not found.full and left > 0:
                count = min(max(limit - len(found.records), _POSITIONS_AT_ONCE), left)
                positions = await self.index.search(
                    self.executor, topic, key, count, begin_ms, end_ms, before=behind
                )
                if positions and behind == NO_POSITION:
                    await held.enter_async_context(self.executor.large_answers)
                await self._take(found, positions)
                if len(positions) < count or positions[0] <= self.commit_log.readable_min:
                    break
                behind = positions[0]
                left -= count
        return found.records[::-1]

    async def _take(self, found: _Found, positions: list[int]) -> None:
        """Add the records at the ascending `positions` to `found`, newest first, until `found` is full."""
        this_turn = 0
        for position in reversed(positions):
            record = await self.executor.query(partial(self.record_at, position))
            if record is not None:
                found.add(record)
                this_turn += len(record)
            if found.full:
                break
            if this_turn >= _BYTES_A_TURN:
                this_turn = 0
                await self.executor.pause(0)

    def store_time_at(self, position: int, reads: Reads) -> int:
        """Return the store time of the record at a position, or -1 if no record begins there."""
        older = self.commit_log.older
        if older is not None and (known := older.store_times.get(position)) is not None:
            return known
        data = self.commit_log.read(position, PLACE_BYTES, reads)
        place = None if data is None else place_of(data)
        if place is None:
            return -1
        if older is not None and position < self.commit_log.min_position:
            older.store_times[position] = place.store_timestamp_ms
        return place.store_timestamp_ms

    async def earliest_store_time(self) -> int:
        """Return the store time of the first message of the log, or -1 if it is missing or unreadable."""
        first = self.commit_log.min_position + self.commit_log.framing.gap
        if first >= self.commit_log.end:
            return -1
        try:
            return await self.executor.query(partial(self.store_time_at, first))
        except OSError:
            return -1  # The segment was deleted during the query, or cannot be read

    def store_time_of(self, queue: ConsumeQueue | None, offset: int, reads: Reads = WAITING) -> int:
        """Return the store time of the message at a queue offset, or -1 if there is no valid message."""
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return -1
        unit = queue.unit(offset, reads)
        if unit is None or unit[1] == FILLER_SIZE:
            return -1
        return self.store_time_at(unit[0], reads)

    def groups_since(self, disk: Disk, timestamp_ms: int) -> Iterator[RecordGroup]:
        """Yield the records of the log from the oldest segment on that was written at or after a time.

        These are the newest segment that begins before that time, and the later ones. If the clock was set
        back for a while, such a segment can follow others with later messages, which the times of their last
        modification show. The record of an entry that its raft group has not committed is included. May be
        called in a thread.
        """
        log, end, bases = self.commit_log, self.commit_log.end, list(self.commit_log.segments)
        facts = ((base, disk.facts(log.path_of(base))) for base in bases)
        modified = (base for base, each in facts if each is not None and each.modified_ms >= timestamp_ms)
        oldest = next(modified, end)
        scans: list[SegmentScan] = []
        begins_before = False
        for base in reversed(bases):
            if begins_before and base < oldest:
                break
            path = log.path_of(base)
            scan = SegmentScan(disk, path, base, log.segment_size, check_crc=False, framing=log.framing)
            scans.append(scan)
            if not begins_before:
                with suppress(FileNotFoundError), closing(scan.groups(base)) as groups:
                    first = next(groups, None)
                    begins_before = first is not None and first.store_ms[0] < timestamp_ms
        for scan in reversed(scans):
            with suppress(FileNotFoundError):  # Retention has deleted the segment
                for group in scan.groups(scan.base):
                    yield group
                    if group.end >= end:
                        return  # The scan would look for records in the reserved rest of the segment

    async def time_to_show(self, queue: ConsumeQueue | None, offset: int) -> int:
        """Return what `store_time_of` returns, or -1 if the object store does not answer."""
        try:
            return await self.executor.query(partial(self.store_time_of, queue, offset))
        except CommandError:
            return -1

    # -- offsets by time --------------------------------------------------------------------------

    async def offset_by_time(self, queue: ConsumeQueue | None, timestamp_ms: int, mode: str | None) -> int:
        """Return the queue offset for a store time: the beginning if no message is readable, 0 if no queue.

        Without a mode (the behavior for 4.9 clients), the message whose store time is nearest counts; of two
        equally near times, the earlier one. Of several messages with the nearest time, the first if that time
        is at or after the requested time, else the last. "LOWER" (only for 5.x clients): the first message
        stored at or after the time, or else the queue's end. "UPPER" (only for 5.x clients): the last message
        stored at or before the time, or else the queue's beginning.
        """
        if queue is None:
            return 0
        low, high = queue.min_offset, queue.max_offset
        found, stored = await self._first_between(queue, low, high, timestamp_ms)
        if mode is not None and mode.upper() == "LOWER":
            return found
        if mode is not None:
            found, stored = await self._first_between(queue, low, high, timestamp_ms + 1)
        before = await self._last_before(queue, found)
        if before is None:
            return queue.min_offset if mode is not None or found == queue.max_offset else found
        if mode is not None or found == queue.max_offset:
            return before[0]
        return found if timestamp_ms - before[1] > stored - timestamp_ms else before[0]

    async def first_since(self, queue: ConsumeQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, or the queue's end.

        The search proceeds from the beginning in growing steps. A binary search over the whole queue could
        miss the first such message if the clock was set back.
        """
        low, high, step = queue.min_offset, queue.max_offset, 0
        while low + step < high:
            real = await self._next_real(queue, low + step, high)
            if real is None:
                break
            if real[1] >= timestamp_ms:
                if not step:
                    return real[0]  # Usually the first message was stored late enough, so no search is needed
                high = real[0] + 1
                break
            low, step = real[0] + 1, max(1, 2 * step)
        return (await self._first_between(queue, low, high, timestamp_ms))[0]

    async def _first_between(
        self, queue: ConsumeQueue, low: int, high: int, timestamp_ms: int
    ) -> tuple[int, int]:
        """Return offset and store time of the first message in [low, high) stored at or after a time.

        Without one, the result is (`high`, -1).
        """
        found = (high, -1)
        while low < high:
            middle = (low + high) // 2
            real = await self._next_real(queue, middle, high)
            if real is None:
                high = middle
            elif real[1] >= timestamp_ms:
                found, high = real, middle
            else:
                low = real[0] + 1
        return found

    async def _next_real(self, queue: ConsumeQueue, low: int, high: int) -> tuple[int, int] | None:
        """Return offset and store time of the first readable message in [low, high), or None."""
        while low < high:
            stop = min(low + _UNITS_A_TURN, high)
            real = await self.executor.query(partial(self._first_real, queue, low, stop))
            if real is not None:
                return real
            low = stop
            await self.executor.pause(0)
        return None

    def _first_real(
        self, queue: ConsumeQueue, low: int, high: int, reads: Reads, *, backwards: bool = False
    ) -> tuple[int, int] | None:
        units: Iterable[tuple[int, int, int, int]] = queue.units(low, high, reads)
        for offset, position, size, _ in reversed(list(units)) if backwards else units:
            if size != FILLER_SIZE and (stored := self.store_time_at(position, reads)) >= 0:
                return offset, stored
        return None

    async def _last_before(self, queue: ConsumeQueue, offset: int) -> tuple[int, int] | None:
        """Return offset and store time of the last message before an offset, or None."""
        step = 1
        while offset > queue.min_offset:
            begin = max(queue.min_offset, offset - step)
            real = await self.executor.query(partial(self._first_real, queue, begin, offset, backwards=True))
            if real is not None:
                return real
            offset = begin
            if step > 1:
                await self.executor.pause(0)
            step = min(step * 8, _UNITS_A_TURN)
        return None


async def lost_units(
    commit_log: CommitLog,
    disk: Disk,
    executor: StoreExecutor,
    queue: ConsumeQueue,
    first: int,
    count: int,
    *,
    start: int,
    code_of: Callable[[bytes], int],
) -> bytes:
    """Compute `count` units of a queue from the log, beginning with the unit of queue offset `first`.

    An offset whose record is not found gets a filler unit. The search begins at log position `start`, where a
    record begins. None of the records searched for may lie before `start`. `code_of` returns the tags code
    for the properties of a record. Raises OSError.
    """
    start -= commit_log.framing.gap
    units = np.frombuffer(bytearray(FILLER * count), UNIT_DTYPE)
    size = commit_log.segment_size
    for base in list(commit_log.segments):
        if base + size <= start:
            continue
        scan = SegmentScan(
            disk, commit_log.path_of(base), base, size, check_crc=False, framing=commit_log.framing
        )
        try:
            with closing(scan.groups(max(start, base))) as groups:
                while (group := await executor.run(partial(next, groups, None))) is not None:
                    offsets = group.queue_offset - first
                    named = np.array([name == queue.topic for name in group.names])[group.topic]
                    ours = named & (group.queue_id == queue.queue_id) & (offsets >= 0)
                    for row in np.flatnonzero(ours & (offsets < count)).tolist():
                        if units["size"][offsets[row]] == FILLER_SIZE:
                            code = code_of(group.properties[row])
                            units[offsets[row]] = group.position[row], group.size[row], code
                    if np.any(ours & (offsets >= count - 1)):
                        return units.tobytes()
        except FileNotFoundError:
            continue  # Retention has deleted the segment during the scan
    return units.tobytes()

"""Reads the timer topic's consume queue: at the start the waiting messages, later the new ones.

Each unit that CometMQ has stored in this consume queue contains the delivery time of its message
(protocol/timers.py). So the message itself is read from the log only for data that its unit lacks, such as
the key of a recall. Units of Apache's broker contain no delivery time, so their messages are always read.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cometmq import logs
from cometmq.broker.base.times import mono_ms
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.tables.timer_state import TimerState
from cometmq.broker.timers.delivered import among, linked_positions, read_units
from cometmq.broker.timers.pending import Pending
from cometmq.broker.timers.wheel import NEVER
from cometmq.protocol.codes import TIMER_TOPIC
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.one import place_of, properties_of
from cometmq.protocol.timers import CODES_BEGIN, RECALL_FOUND, TimerCode, timer_tags_code
from cometmq.store import (
    FILLER_SIZE,
    UNIT_DTYPE,
    Clock,
    ConsumeQueue,
    MessageStore,
    TimerTable,
    lost_units,
    read_file,
)

log = logs.logger(__name__)

_UNITS_AT_ONCE = 256  # Number of consume-queue units read at a time; reading their records takes a few ms
_CHECK_POINT = struct.Struct(">7q")
CHECK_POINT_SIZE = 4096

Units = NDArray[Any]


class Known(msgspec.Struct, eq=False):
    """The timer messages that are done at the start of the broker: delivered, moved or recalled.

    Attributes:
        mark: The saved progress.
        linked: The log positions of all messages of which the log contains a copy, ascending.
        uncounted: The part of `linked` whose messages the saved progress still counts as waiting.
        apache: The queue offset and the time (ms) up to which Apache's broker has delivered, if it has used
            this store.
    """

    mark: TimerTable
    linked: NDArray[np.int64]
    uncounted: NDArray[np.int64]
    apache: tuple[int, int]
    # Hashes of the messages that Apache's broker has stored. Its copy of such a message has the same hash.
    seen: set[int] = msgspec.field(default_factory=set)

    def is_done(self, offset: int, out_ms: int) -> bool:
        """Return whether the saved progress shows that the message at a queue offset was delivered."""
        mark = self.mark
        delivered = offset < mark.queue_offset and out_ms <= mark.delivered_ms
        return delivered or (offset < self.apache[0] and out_ms < self.apache[1])

    def split(self, first: int, units: Units) -> tuple[Units, Units]:
        """Return two masks of consume-queue units, of which the first has the queue offset `first`.

        The first mask selects messages that still wait. The second one selects messages that, according to
        the log, no longer wait, although the saved progress does not show it.
        """
        offsets = first + np.arange(len(units))
        codes, positions = units["tags"].astype(np.int64), units["position"].astype(np.int64)
        outs = np.where(codes >= CODES_BEGIN, codes >> 2, np.iinfo(np.int64).max)
        done = (outs <= self.mark.delivered_ms) | (positions < self.mark.first_position)
        done &= offsets < self.mark.queue_offset
        done |= (offsets < self.apache[0]) & (outs < self.apache[1])
        linked = among(positions, self.linked)
        return ~(done | linked), linked & ~done

    def counts_done(self, offset: int, position: int) -> bool:
        """Return whether a message is done although the saved progress still counts it as waiting."""
        return offset < self.counted_offset and bool(among(np.array([position]), self.uncounted)[0])

    @property
    def counted_offset(self) -> int:
        """The queue offset up to which the saved progress has counted the waiting messages."""
        return self.mark.counted_offset if self.mark.counted_offset >= 0 else self.mark.queue_offset


@dataclass(eq=False, kw_only=True)
class Follower:
    """Reads the queue of the timer topic and adds its messages to `pending`.

    `carried` maps the log positions of copies of moved messages to the delivery times of these messages on
    the monotonic clock.
    """

    clock: Clock
    store: MessageStore
    timed: TimedSends
    state: TimerState
    pending: Pending
    carried: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._log_limit = logs.LogLimiter()
        self._newest_ms = self.store.newest_ms  # newest store time (ms) in the log at the start
        # If `load` has failed after `_begin`, the result of `_begin`, for the next call of `load`.
        self._loading: tuple[int, Known] | None = None

    @property
    def queue(self) -> ConsumeQueue | None:
        """The queue of the timer topic, or None if it does not exist yet."""
        return self.store.queues.find_queue(TIMER_TOPIC, 0)

    def behind(self) -> bool:
        """Return whether the timer topic's queue has messages that have not been read yet."""
        queue = self.queue
        return queue is not None and self.pending.followed < queue.max_offset

    async def load(self) -> None:
        """Read all messages that still wait. After an OSError, the next call continues with that read."""
        queue = self.queue
        if queue is None:
            return
        if self._loading is None:
            self._loading = await self._begin(queue)
        now_ms = self.clock.time_ms()
        ahead_ms = mono_ms(self.clock) - now_ms
        await self._take_in(queue, *self._loading, lambda _offset: ahead_ms)
        self._loading = None
        if len(self.pending):
            log.info("%d timer messages are waiting", len(self.pending))

    async def _begin(self, queue: ConsumeQueue) -> tuple[int, Known]:
        """Return the end of the timer topic's queue, and which messages no longer wait. Set `followed`."""
        mark, executor = self.state.mark, self.store.executor
        first, high, start = queue.min_offset, queue.max_offset, mark.log_position
        try:
            first = await executor.query(partial(queue.search, first, high, mark.first_position))
            first = max(min(first, mark.queue_offset), queue.min_offset)
            unit = await executor.query(partial(queue.unit, first)) if first < high else None
            start = self.store.log.end if unit is None else max(start, unit[0])
        except OSError as failure:
            # If the disk cannot read a consume-queue unit, begin at the queue's first unit: reading all units
            # logs the damage in detail.
            _raise_unless_unreadable(failure)
        counted = mark.counted_position if mark.counted_position >= 0 else mark.log_position
        before = await linked_positions(self.store, start, counted)
        uncounted = await linked_positions(self.store, max(start, counted), self.store.log.end)
        apache = await executor.run(_check_point, self.store)
        self.pending.begin(mark)
        self.pending.followed = first
        return high, Known(mark, np.union1d(before, uncounted), uncounted, apache)

    async def follow(self) -> None:
        queue = self.queue
        if queue is not None and self.pending.followed < queue.max_offset:
            await self._take_in(queue, queue.max_offset, None, self.timed.steps.ahead_ms)
            self.timed.steps.passed(self.pending.followed)

    async def _take_in(
        self, queue: ConsumeQueue, end: int, known: Known | None, ahead_ms: Callable[[int], int]
    ) -> None:
        pending, executor = self.pending, self.store.executor
        pending.followed = max(pending.followed, queue.min_offset)
        reached = self.store.log.min_position
        while pending.followed < end:
            first = pending.followed
            count = min(end - first, _UNITS_AT_ONCE)
            data = await self._units(queue, first, count, reached)
            if not data:
                pending.followed = min(queue.next_file_offset(first), end)
                continue
            units = np.frombuffer(data, UNIT_DTYPE)
            wanted = units["size"] != FILLER_SIZE
            reached = max(reached, int(units["position"].max()))
            linked = np.zeros(len(units), bool)
            if known is not None:
                to_do, linked = known.split(first, units)
                wanted &= to_do | linked
            for row in np.flatnonzero(wanted).tolist():
                # If reading this message fails, the next attempt begins with it.
                pending.followed = first + row
                position, _, code = units[row].tolist()
                if known is not None and linked[row]:
                    if known.counts_done(first + row, position):
                        await self._uncount(position)
                    pending.note_done(position, code >> 2 if code >= CODES_BEGIN else NEVER)
                else:
                    await self._take(first + row, position, code, known, ahead_ms(first + row))
            pending.followed, pending.followed_position = first + len(units), reached
            self.state.changes += 1
            self.state.waiting, self.state.recalls = len(pending), pending.recalls
            if pending.followed < end:
                await executor.pause(0)

    async def _units(self, queue: ConsumeQueue, first: int, count: int, reached: int) -> bytes:
        """Return up to `count` consume-queue units from the queue offset `first`.

        At the end of a file, fewer units are returned, and none if the file is missing. If the disk cannot
        read them, they are recomputed from the log behind `reached`, the highest position in earlier units.
        """
        store = self.store
        try:
            return await store.executor.query(partial(read_units, queue, first, count))
        except OSError as failure:
            _raise_unless_unreadable(failure)
            log.error(
                "%s is unreadable from offset %d, so its messages are searched in the log. To repair "
                "it, stop the broker and run `cometmq store rebuild`: %s",
                queue.path, first, failure,
            )  # fmt: skip
        return await lost_units(
            store.log, store.disk, store.executor, queue, first, count, start=reached, code_of=timer_tags_code
        )

    async def _take(
        self, offset: int, position: int, number: int, known: Known | None, ahead_ms: int
    ) -> None:
        """Add a consume-queue unit's message or recall to `pending`, unless the message no longer waits."""
        code = TimerCode.unpack(number) if number >= CODES_BEGIN else None
        counts = known is not None and offset >= known.counted_offset
        stepped_back = known is not None and self._newest_ms > self.clock.time_ms()
        if code is None or code.recall or counts or (stepped_back and code.delayed):
            record = await self.record(position)
            if record is None:
                return
            properties = properties_of(record)
            if code is None:
                code = TimerCode.of(properties)
                if code is None or (known is not None and self._is_known(known, offset, code, properties)):
                    return
            if code.recall:
                moved = bool(value_of(properties, b"TIMER_ROLL_TIMES"))
                if counts or (known is None and not moved):
                    self.state.count(real_topic(properties), counted_as(properties))
                key, counted = value_of(properties, b"TIMER_DEL_UNIQKEY"), counted_as(properties) < 0
                self.pending.recall(position, code.out_ms, key, counted=counted)
                return
            if counts:
                self.state.count(real_topic(properties), 1)
            place = place_of(record)
            if stepped_back and place is not None and place.store_timestamp_ms > self.clock.time_ms():
                # The store time is in the future, because the clock was set back: count the delay from now.
                ahead_ms = mono_ms(self.clock) - place.store_timestamp_ms
        due_ms = self.carried.pop(position, None)
        if due_ms is None:
            self.pending.add(position, code, ahead_ms)
        else:
            self.pending.add_due(position, due_ms, code.out_ms)

    def _is_known(self, known: Known, offset: int, code: TimerCode, properties: bytes) -> bool:
        """Return whether a message stored by Apache's broker was delivered or is a copy of an earlier one."""
        if known.is_done(offset, code.out_ms):
            return True
        hashed = hash((value_of(properties, b"REAL_TOPIC"), value_of(properties, b"UNIQ_KEY"), code))
        if hashed in known.seen and value_of(properties, b"TIMER_ROLL_TIMES"):
            return True
        known.seen.add(hashed)
        return False

    async def _uncount(self, position: int) -> None:
        record = await self.record(position)
        if record is not None:
            properties = properties_of(record)
            self.state.count(real_topic(properties), -counted_as(properties))

    async def record(self, position: int) -> bytes | None:
        """Return the record at a log position, or None if it is missing or the disk cannot read it."""
        try:
            return await self.store.executor.query(partial(self.store.lookups.record_at, position))
        except OSError as error:
            _raise_unless_unreadable(error)
            if self._log_limit.allows():
                text = "skipping the timer message at log position %d, which is unreadable: %s"
                log.error(text, position, error)
            return None


def _raise_unless_unreadable(failure: OSError) -> None:
    """Return if the error is EIO, for which a retry may never succeed. Otherwise raise the error."""
    if failure.errno != errno.EIO:
        raise failure


def counted_as(properties: bytes) -> int:
    """Return by how much a record of the timer topic changes the number of waiting messages.

    It is 1 for a message, -1 for a recall that has found its message waiting, and 0 for any other recall.
    """
    if not value_of(properties, b"TIMER_DEL_UNIQKEY"):
        return 1
    return -1 if value_of(properties, RECALL_FOUND) else 0


def real_topic(properties: bytes) -> str:
    """Return the topic to which a waiting message will be delivered."""
    return value_of(properties, b"REAL_TOPIC").decode("utf-8", "replace")


def check_point_path(store: MessageStore) -> str:
    """Return the path of Apache's file with the progress of timer messages."""
    return os.path.join(store.config.root, "config", "timercheck")


def check_point(read_ms: int, queue_offset: int, version_ms: int, changes: int) -> bytes:
    """Return the progress in the format of Apache's file timercheck and of the response to request 60.

    The progress means that all messages before `queue_offset` whose delivery time is before `read_ms` have
    been delivered (docs/reference/storage.md, Timer files).
    """
    return _CHECK_POINT.pack(read_ms, 0, queue_offset, queue_offset, 0, version_ms, changes)


def _check_point(store: MessageStore) -> tuple[int, int]:
    """Return the queue offset and the time (ms) in the file timercheck, 0 if it is missing or unreadable."""
    try:
        data = read_file(store.disk, check_point_path(store))
    except FileNotFoundError:
        return 0, 0
    except OSError as failure:
        _raise_unless_unreadable(failure)
        text = "%s is unreadable, so messages that Apache's broker has delivered may be delivered again"
        log.error(text, check_point_path(store))
        return 0, 0
    if len(data) < _CHECK_POINT.size:
        return 0, 0
    read_ms, _, queue_offset, *_ = _CHECK_POINT.unpack_from(data)
    return queue_offset, read_ms

"""From the queue of the timer topic to what waits: at the start all that is not done yet, then what comes.

The units of the queue say when their messages are due (protocol/timers.py), so records are read only for what
units cannot say: keys of recalls, and everything about messages that Apache's broker has stored.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cometmq import logs
from cometmq.broker.base.times import mono_ms
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.tables.timer_state import TimerState
from cometmq.broker.timers.pending import Pending
from cometmq.broker.timers.wheel import NEVER
from cometmq.protocol.codes import TIMER_TOPIC
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.one import place_of, properties_of
from cometmq.protocol.timers import CODES_BEGIN, RECALL_FOUND, TimerCode, timer_tags_code
from cometmq.remoting.dispatch import LogBudget
from cometmq.store import (
    FILLER_SIZE,
    UNIT_DTYPE,
    Clock,
    ConsumeQueue,
    MessageStore,
    Reads,
    TimerTable,
    links,
    lost_units,
    read_file,
)

log = logs.logger(__name__)

_UNITS_AT_ONCE = 256  # a few ms of the loop where each of their records is looked at
_CHECK_POINT = struct.Struct(">7q")
CHECK_POINT_SIZE = 4096

Units = NDArray[Any]


@dataclass(eq=False)
class Known:
    """What is known at the start of what is done. linked, uncounted: positions that copies name, ascending,
    and those of them that the mark counts among what waits. apache: the queue offset and the time up to which
    Apache's broker has delivered, if it ran on this store."""

    mark: TimerTable
    linked: NDArray[np.int64]
    uncounted: NDArray[np.int64]
    apache: tuple[int, int]
    seen: set[int] = field(default_factory=set)  # hashes of what Apache's broker has stored

    def is_done(self, offset: int, out_ms: int) -> bool:
        """Whether the message of a unit is done, as far as its time and place in the queue tell."""
        mark = self.mark
        delivered = offset < mark.queue_offset and out_ms <= mark.delivered_ms
        return delivered or (offset < self.apache[0] and out_ms < self.apache[1])

    def split(self, first: int, units: Units) -> tuple[Units, Units]:
        """(which of the units from queue offset `first` on are still to do, which are done as nothing but the
        log says)."""
        offsets = first + np.arange(len(units))
        codes, positions = units["tags"].astype(np.int64), units["position"].astype(np.int64)
        outs = np.where(codes >= CODES_BEGIN, codes >> 2, np.iinfo(np.int64).max)
        done = (outs <= self.mark.delivered_ms) | (positions < self.mark.first_position)
        done &= offsets < self.mark.queue_offset
        done |= (offsets < self.apache[0]) & (outs < self.apache[1])
        linked = _among(positions, self.linked)
        return ~(done | linked), linked & ~done

    def counts_done(self, offset: int, position: int) -> bool:
        """Whether the mark counts a message among what waits that is done."""
        return offset < self.counted_offset and bool(_among(np.array([position]), self.uncounted)[0])

    @property
    def counted_offset(self) -> int:
        """The mark counts what lies before it in the queue."""
        return self.mark.counted_offset if self.mark.counted_offset >= 0 else self.mark.queue_offset


def _among(positions: NDArray[np.int64], ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the positions are among others."""
    if not len(ascending):
        return np.zeros(len(positions), bool)
    at = np.searchsorted(ascending, positions)
    found: NDArray[np.bool_] = ascending[np.minimum(at, len(ascending) - 1)] == positions
    return found


@dataclass(eq=False, kw_only=True)
class Follower:
    """Fills `pending`. `carried`: when records that took the place of others are due, by the monotonic
    clock."""

    clock: Clock
    store: MessageStore
    timed: TimedSends
    state: TimerState
    pending: Pending
    carried: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._budget = LogBudget()
        self._newest_ms = self.store.newest_ms  # of what was stored before the start, here or by a leader
        self._loading: tuple[int, Known] | None = None  # up to which queue offset `load` goes, by what

    @property
    def queue(self) -> ConsumeQueue | None:
        """The queue of the timer topic, once there is one."""
        return self.store.queues.find(TIMER_TOPIC, 0)

    def behind(self) -> bool:
        """Whether something came that is not taken in."""
        queue = self.queue
        return queue is not None and self.pending.followed < queue.max_offset

    async def load(self) -> None:
        """Take in all that is not done yet. Raises OSError; the next call goes on where this one failed."""
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
            log.info("%d timer messages wait", len(self.pending))

    async def _begin(self, queue: ConsumeQueue) -> tuple[int, Known]:
        """Find out what is done, and with which message to begin. Raises OSError."""
        mark, off_loop = self.state.mark, self.store.off_loop
        first, high, start = queue.min_offset, queue.max_offset, mark.log_position
        try:
            first = await off_loop.ask(partial(queue.search, first, high, mark.first_position))
            first = max(min(first, mark.queue_offset), queue.min_offset)
            unit = await off_loop.ask(partial(queue.unit, first)) if first < high else None
            start = self.store.log.end if unit is None else max(start, unit[0])
        except OSError as failure:
            _raise_unless_unreadable(failure)  # then all units are looked at, which says more about that
        counted = mark.counted_position if mark.counted_position >= 0 else mark.log_position
        before = await self._links(start, counted)
        uncounted = await self._links(max(start, counted), self.store.log.end)
        apache = await off_loop.run(_check_point, self.store)
        self.pending.begin(mark)
        self.pending.followed = first
        return high, Known(mark, np.union1d(before, uncounted), uncounted, apache)

    async def _links(self, start: int, end: int) -> NDArray[np.int64]:
        """What the records of a stretch of the log name, ascending."""
        store = self.store
        found = [piece async for piece in links(store.log, store.disk, store.off_loop, start, end)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    async def follow(self) -> None:
        """Take in what has come since."""
        queue = self.queue
        if queue is not None and self.pending.followed < queue.max_offset:
            await self._take_in(queue, queue.max_offset, None, self.timed.steps.ahead_ms)
            self.timed.steps.passed(self.pending.followed)

    async def _take_in(
        self, queue: ConsumeQueue, end: int, known: Known | None, ahead_ms: Callable[[int], int]
    ) -> None:
        pending, off_loop = self.pending, self.store.off_loop
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
                pending.followed = first + row  # should this one fail, those before it are not taken twice
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
                await off_loop.pause(0)

    async def _units(self, queue: ConsumeQueue, first: int, count: int, reached: int) -> bytes:
        """So many units from an offset on, fewer at the end of a file; nothing if that is missing. What the
        device cannot read is made anew from the log, whose records up to `reached` lie before. Raises
        OSError."""
        store = self.store
        try:
            return await store.off_loop.ask(partial(_read_units, queue, first, count))
        except OSError as failure:
            _raise_unless_unreadable(failure)
            log.error(
                "%s: units from %d on are unreadable, their messages are looked for in the log; with the "
                "broker stopped, `cometmq store rebuild` repairs that: %s",
                queue.path, first, failure,
            )  # fmt: skip
        return await lost_units(
            store.log, store.disk, store.off_loop, queue, first, count, start=reached, code_of=timer_tags_code
        )

    async def _take(
        self, offset: int, position: int, number: int, known: Known | None, ahead_ms: int
    ) -> None:
        """Take in one unit."""
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
                ahead_ms = mono_ms(self.clock) - place.store_timestamp_ms  # as if it were stored now
        due_ms = self.carried.pop(position, None)
        if due_ms is None:
            self.pending.add(position, code, ahead_ms)
        else:
            self.pending.add_due(position, due_ms, code.out_ms)

    def _is_known(self, known: Known, offset: int, code: TimerCode, properties: bytes) -> bool:
        """Whether a message that Apache's broker stored is done, or one that it moved on is there as it
        was."""
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
        """The record at a log position; None if there is none, or the device cannot read it. Raises
        OSError."""
        try:
            return await self.store.off_loop.ask(partial(self.store.lookups.record_at, position))
        except OSError as error:
            _raise_unless_unreadable(error)
            if self._budget.allows():
                log.error(
                    "the timer message at log position %d is unreadable, stepped over: %s", position, error
                )
            return None


def _raise_unless_unreadable(failure: OSError) -> None:
    """Raise it again, unless it says that the device cannot read something, which may never change."""
    if failure.errno != errno.EIO:
        raise failure


def _read_units(queue: ConsumeQueue, first: int, count: int, reads: Reads) -> bytes:
    return bytes(queue.read(first, count, reads) or b"")


def counted_as(properties: bytes) -> int:
    """What a record of the timer topic adds to the number of messages that wait for its topic."""
    if not value_of(properties, b"TIMER_DEL_UNIQKEY"):
        return 1
    return -1 if value_of(properties, RECALL_FOUND) else 0


def real_topic(properties: bytes) -> str:
    """Where a message that waits will go."""
    return value_of(properties, b"REAL_TOPIC").decode("utf-8", "replace")


def check_point_path(store: MessageStore) -> str:
    """Where Apache's broker keeps how far its timers are."""
    return os.path.join(store.config.root, "config", "timercheck")


def check_point(read_ms: int, queue_offset: int, version_ms: int, changes: int) -> bytes:
    """What that file begins with, and request 60 is answered: all that was to come before `read_ms`, and lies
    before `queue_offset`, is delivered (docs/reference/storage.md, Timer files)."""
    return _CHECK_POINT.pack(read_ms, 0, queue_offset, queue_offset, 0, version_ms, changes)


def _check_point(store: MessageStore) -> tuple[int, int]:
    """(queue offset, time) up to which the file of Apache's broker says that timers are done."""
    try:
        data = read_file(store.disk, check_point_path(store))
    except FileNotFoundError:
        return 0, 0
    except OSError as failure:
        _raise_unless_unreadable(failure)
        log.error(
            "%s is unreadable: what Apache's broker has delivered may come again", check_point_path(store)
        )
        return 0, 0
    if len(data) < _CHECK_POINT.size:
        return 0, 0
    read_ms, _, queue_offset, *_ = _CHECK_POINT.unpack_from(data)
    return queue_offset, read_ms

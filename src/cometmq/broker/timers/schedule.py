"""The delivery of messages with a delay level: each level has a cursor in its queue of SCHEDULE_TOPIC_XXXX.

See docs/reference/storage.md, Delivery of delayed messages. The messages of a level become due in the order
in which they were stored. So each level needs only one timer, for its first message; if the level is idle,
the next arrival starts the timer. A delivered message is committed before the cursor moves, and contains the
position of its original record, so after a kill the log shows which messages were delivered (delivered.py).

A message that can never be delivered (its destination is missing or not permitted, or its record is damaged
or unreadable) is logged and skipped, so that the message does not block its level. If the store accepts no
messages, the level waits.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from functools import partial

import msgspec

from cometmq import logs
from cometmq.broker.base.delay_levels import STEP_MS, DelayLevels, DueTimes
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.timers.delivered import delivered, units_behind
from cometmq.broker.timers.redelivery import redeliver
from cometmq.errors import CommandError, RecordError, StoreError
from cometmq.message import MessageExt
from cometmq.periodic import Backoff, Tasks
from cometmq.protocol.bodies import DelayOffsetTable
from cometmq.protocol.codes import SCHEDULE_TOPIC, RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.record.one import iter_records, properties_of
from cometmq.remoting import Connection
from cometmq.store import Arrivals, Clock, GetStatus, MessageStore, ReadResult, Reads, link_to

log = logs.logger(__name__)

BATCH = 32  # maximum number of messages of a delay level delivered in one event-loop iteration
# The delay, in seconds, after the store has refused a message. It doubles up to ERROR_S, because a store may
# refuse messages for hours. ERROR_S is also the delay after an internal error, as in Apache's broker.
RETRY_S, ERROR_S = 0.1, 10.0
MAX_ERRORS = 3  # number of unexpected errors after which a message is skipped
# The maximum time, in seconds, that a delay level waits before it reads the clock again. An event-loop timer
# may expire too late, because the loop's clock does not count the time that the machine is suspended.
CLOCK_CHECK_INTERVAL_S = 10.0
# The maximum difference, in ms, between the store time of a message and the time at which its arrival is
# reported. A larger difference means that the wall clock may have been set in between.
MAX_SYNC_MS = 1_000


class LevelCursor(msgspec.Struct, eq=False):
    """The state of one delay level: its offset, and whether it delivers or waits for a timer."""

    level: int
    due: DueTimes
    offset: int = 0
    busy: bool = False
    refusals: Backoff = msgspec.field(default_factory=lambda: Backoff(RETRY_S, ERROR_S))
    errors: int = 0  # number of consecutive unexpected errors with the message at `offset`
    timer: asyncio.TimerHandle | None = None
    began: int = -1  # Log end before the deliveries in progress were stored; -1 if there are none


@dataclass(eq=False)
class ScheduleService:
    """Delivers messages with a delay level, on a master broker."""

    clock: Clock
    store: MessageStore
    tables: DurableTables
    levels: DelayLevels
    writer: Writer

    def __post_init__(self) -> None:
        self.offsets = self.tables.delays
        self._loop = asyncio.get_running_loop()
        self._log_limit = logs.LogLimiter()
        self.restart()

    def restart(self) -> None:
        """Reset the delivery state. Since the last stop, another broker may have delivered messages."""
        now_ms, monotonic_ms = self._times()
        # Monotonic minus wall-clock time (ms) when messages last arrived.
        self._ahead_ms = monotonic_ms - now_ms
        self.cursors = {}
        for level, delay_ms in enumerate(self.levels.delays_ms, 1):
            stored = self.store.max_offset(SCHEDULE_TOPIC, level - 1)
            self.cursors[level] = LevelCursor(level, DueTimes(delay_ms, stored, now_ms, monotonic_ms))
        self._tasks = Tasks()
        # Log positions of messages that were delivered although an earlier message of their level was not
        # delivered.
        self._delivered: set[int] = set()
        self._beginning: asyncio.Task[None] | None = None
        self._stopped = False

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues (topic, queue id) whose new messages must be reported by a call of `arrived`."""
        return [(SCHEDULE_TOPIC, level - 1) for level in self.cursors]

    def positions(self) -> dict[int, tuple[int, int]]:
        """Return the next message's offset and the end of the queue, for each used delay level."""
        ends = {level: self.store.max_offset(SCHEDULE_TOPIC, level - 1) for level in self.cursors}
        return {level: (self.offsets.get(level), end) for level, end in ends.items() if end}

    def waiting(self) -> int:
        """Return the number of messages that wait at all delay levels together."""
        return sum(maximum - delivered for delivered, maximum in self.positions().values())

    async def page(self, after: tuple[int, int], most: int) -> list[tuple[int, int]]:
        """Return the delivery times (wall clock, ms) and log positions of waiting messages, as pairs.

        The result begins after the pair `after`, and has up to `most` messages of each delay level. Some
        messages may be missing if the clock was set back while messages were stored.
        """
        found: list[tuple[int, int]] = []
        for level, cursor in self.cursors.items():
            queue = self.store.queues.find_queue(SCHEDULE_TOPIC, level - 1)
            if queue is not None and cursor.offset < queue.max_offset:
                question = partial(units_behind, queue, cursor.offset, after, most)
                found += await self.store.executor.query(question)
        return found

    def deliver_at_ms(self, message: MessageExt) -> int | None:
        """Return the delivery time (ms) of a message with a delay level, or None if it was delivered."""
        cursor = self.cursors.get(message.queue_id + 1)
        if cursor is None or message.queue_offset < cursor.offset:
            return None
        return message.store_timestamp_ms + self.levels.delay_ms(cursor.level)

    @handles(RequestCode.GET_ALL_DELAY_OFFSET)
    def get_all_delay_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the delay offsets for a slave. Only CometMQ's slaves use the log position."""
        table = {**self.offsets.to_table(), "logPosition": self.offsets.reached()}
        return frame.response(body=DelayOffsetTable.from_plain(table).encode())

    def start(self) -> None:
        """Start to deliver each delay level, from the offset at which the last run stopped."""
        for cursor in self.cursors.values():
            cursor.busy = True
        self._beginning = self._loop.create_task(self._begin())

    async def _begin(self) -> None:
        begun = {}
        for level in self.cursors:
            minimum = self.store.min_offset(SCHEDULE_TOPIC, level - 1)
            maximum = self.store.max_offset(SCHEDULE_TOPIC, level - 1)
            begun[level] = min(max(self.offsets.get(level), minimum), maximum)
        # The saved position may be beyond the log's end after a recovery.
        self.offsets.log_position = min(self.offsets.log_position, self.store.log.end)
        unknown = "could not determine the last delivered message of each delay level"
        while not self._stopped:
            try:
                begun, self._delivered = await delivered(self.store, begun, self.offsets.log_position)
                break
            except Exception as error:
                # EIO, or an error that is not an OSError, may be permanent. Then deliver anyway, because
                # repeated attempts could delay the deliveries forever.
                if not isinstance(error, OSError) or error.errno == errno.EIO:
                    log.exception("%s, deliveries may be repeated: %s", unknown, error)
                    break
                log.error("%s, trying again: %s", unknown, error)
                await asyncio.sleep(ERROR_S)
        self.offsets.reached = self._reached
        for level, cursor in self.cursors.items():
            cursor.busy = False
            self._move(cursor, begun[level])
            if cursor.offset < self.store.max_offset(SCHEDULE_TOPIC, level - 1):
                self._wake(cursor)

    def _reached(self) -> int:
        used = self.store.queues.of_topic(SCHEDULE_TOPIC)
        if not used or self._delivered:
            return self.offsets.log_position
        # In a raft group, a delivered message is stored first. The level's offset advances later, when the
        # group has committed the message. So return the end that the log had before the oldest delivery that
        # is not yet committed.
        under_way = [cursor.began for cursor in self.cursors.values() if cursor.began >= 0]
        return min(under_way, default=self.store.log.end)

    def let_go(self) -> None:
        """Keep the log position for delayOffset.json, because another broker delivers from now on."""
        self.offsets.log_position = self._reached()
        self.offsets.reached = lambda: self.offsets.log_position

    def _move(self, cursor: LevelCursor, offset: int) -> None:
        cursor.offset = offset
        self.offsets.move(cursor.level, offset)

    async def stop(self) -> None:
        self._stopped = True
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        for cursor in self.cursors.values():
            if cursor.timer is not None:
                cursor.timer.cancel()
        await self._tasks.finish()

    def arrived(self, arrivals: Arrivals) -> None:
        """Record new messages of delay levels, and wake the levels that are idle."""
        delayed = [arrival for arrival in arrivals if arrival[0] == SCHEDULE_TOPIC]
        if not delayed:
            return
        now_ms, monotonic_ms = self._times()
        ahead_ms = monotonic_ms - now_ms
        stepped = abs(ahead_ms - self._ahead_ms) > STEP_MS
        self._ahead_ms = ahead_ms
        for _, queue_id, behind, _, store_timestamp_ms in delayed:
            cursor = self.cursors.get(queue_id + 1)
            if cursor is None:
                continue
            # If the wall clock may have been set, it is unknown whether that was before or after the message
            # was stored, because a message that waits for a sync arrives here late. In this case, count the
            # delay of the message from now.
            doubtful = stepped or not 0 <= now_ms - store_timestamp_ms <= MAX_SYNC_MS
            cursor.due.steps.note(behind - 1, monotonic_ms - store_timestamp_ms if doubtful else ahead_ms)
            if cursor.timer is None and not cursor.busy:
                self._wake(cursor)

    def _times(self) -> tuple[int, int]:
        """Return the wall-clock time and the monotonic time (ms).

        They are read in this order, so that a pause between the two reads can never deliver messages early.
        """
        return self.clock.time_ms(), mono_ms(self.clock)

    def _wake(self, cursor: LevelCursor, delay_s: float = 0.0) -> None:
        if not self._stopped:
            cursor.timer = self._loop.call_later(min(delay_s, CLOCK_CHECK_INTERVAL_S), self.run, cursor)

    def run(self, cursor: LevelCursor) -> None:
        """Deliver the due messages of a delay level, and start the timer for the level's next delivery."""
        cursor.timer, cursor.busy = None, True
        self._tasks.start(self._run(cursor))

    def _read(self, cursor: LevelCursor, reads: Reads) -> ReadResult:
        return self.store.get_messages(SCHEDULE_TOPIC, cursor.level - 1, cursor.offset, BATCH, reads=reads)

    async def _run(self, cursor: LevelCursor) -> None:
        try:
            got = await self.store.executor.query(partial(self._read, cursor))
            if not self._stopped:
                self._deliver(cursor, got)
        except OSError as failure:
            cursor.errors += failure.errno == errno.EIO
            if cursor.errors < MAX_ERRORS or not await self._is_unreadable(cursor):
                self._failed(cursor)
                return
            self._step_over(cursor, cursor.offset, None, failure)
            cursor.busy, cursor.errors = False, 0
            self._move(cursor, cursor.offset + 1)
            self._wake(cursor)
        except Exception:
            self._failed(cursor)

    async def _is_unreadable(self, cursor: LevelCursor) -> bool:
        """Return whether the queue shows the next message's position, but the disk cannot read it (EIO)."""
        queue = self.store.queues.find_queue(SCHEDULE_TOPIC, cursor.level - 1)
        ask, read = self.store.executor.query, False
        try:
            unit = None if queue is None else await ask(partial(queue.unit, cursor.offset))
            read = unit is not None
            if unit is not None:
                await ask(partial(self.store.lookups.record_at, unit[0]))
        except OSError as failure:
            return read and failure.errno == errno.EIO
        return False

    def _failed(self, cursor: LevelCursor) -> None:
        log.exception("delay level %d: delivery at offset %d failed", cursor.level, cursor.offset)  # noqa: LOG004
        cursor.busy = False
        self._wake(cursor, ERROR_S)

    def _deliver(self, cursor: LevelCursor, got: ReadResult) -> None:
        """Store the due messages of a delay level. Once they are committed, advance the level's offset."""
        if got.status is not GetStatus.FOUND:
            cursor.busy = False
            if got.next_begin_offset != cursor.offset:
                # The messages at the delay level's offset were deleted, or the queue ends before this offset.
                # So continue at the nearest offset that the queue contains.
                if got.next_begin_offset > cursor.offset and self._log_limit.allows():
                    log.error(
                        "delay level %d: %d messages were deleted with their segments before "
                        "delivery, from offset %d",
                        cursor.level, got.next_begin_offset - cursor.offset, cursor.offset,
                    )  # fmt: skip
                self._move(cursor, got.next_begin_offset)
                if cursor.offset < got.max_offset:
                    self._wake(cursor)
            return
        passed: list[int] = []
        began = self.store.log.end
        reached, appended, wait_s = self._store_due(cursor, got, passed)

        def outcome(code: int, remark: str | None) -> None:
            cursor.busy = False
            # Keep `began`: in a raft group, the messages may still be committed after this error.
            if code != ResponseCode.SUCCESS:
                self._wake(cursor, self._refused(cursor, remark or ""))
                return
            cursor.began = -1
            if reached != cursor.offset:
                if cursor.refusals.failures:
                    log.info("delay level %d: delivery works again", cursor.level)
                cursor.refusals.reset()
                cursor.errors = 0
                self._move(cursor, reached)
                # Remove the positions in `passed` only after the commit. If the commit fails, the same
                # messages are read again, and the positions are still needed.
                self._delivered.difference_update(passed)
                cursor.due.steps.passed(reached)
            if wait_s:
                self._wake(cursor, wait_s)
            elif reached < self.store.max_offset(SCHEDULE_TOPIC, cursor.level - 1):
                self._wake(cursor)

        if appended:
            cursor.began = began if cursor.began < 0 else cursor.began
            self.writer.appended(outcome)
        else:
            outcome(int(ResponseCode.SUCCESS), None)

    def _store_due(self, cursor: LevelCursor, got: ReadResult, passed: list[int]) -> tuple[int, bool, float]:
        """Store the due messages of a read result, up to the first message that fails.

        The next run begins with the failed message, so that no earlier message is stored twice. `passed`
        receives the positions of messages that the last run of the broker has already delivered. Return the
        next offset, whether anything was stored, and the seconds until the next run.
        """
        _, monotonic_ms = self._times()
        data = b"".join(got.buffers)
        at, reached, appended = 0, cursor.offset, False
        try:
            for message in iter_records(data):
                offset = message.queue_offset
                if not reached <= offset < got.next_begin_offset:
                    # The offset in the record is damaged (no checksum covers it), so use the expected offset.
                    offset = reached
                due_ms = cursor.due.due_ms(offset, message.store_timestamp_ms)
                if due_ms > monotonic_ms:
                    return reached, appended, (due_ms - monotonic_ms) / 1000
                at, begins = at + message.store_size, at
                if message.physical_offset in self._delivered:
                    passed.append(message.physical_offset)
                    reached = offset + 1
                    continue
                try:
                    # A delayed message that Apache's broker stored when it committed a half message contains
                    # a link to the half message. A copy of such a message keeps this link. Any other copy is
                    # linked to the record of the delayed message.
                    link = message.prepared_transaction_offset or link_to(message.physical_offset)
                    properties = properties_of(data, begins)
                    redeliver(self.store, self.tables.topics, message, properties, link)
                    appended = True
                except CommandError as error:
                    self._step_over(cursor, offset, message.physical_offset, error.remark)
                reached = offset + 1
            return got.next_begin_offset, appended, 0.0
        except Exception as error:
            if reached != cursor.offset:
                return reached, appended, RETRY_S
            if isinstance(error, RecordError):
                self._step_over(cursor, reached, None, error)
                return reached + 1, False, 0.0
            if isinstance(error, StoreError):
                return reached, False, self._refused(cursor, str(error))
            cursor.errors += 1
            log.exception("delay level %d: delivery at offset %d failed", cursor.level, reached)
            if cursor.errors < MAX_ERRORS:
                return reached, False, ERROR_S
            self._step_over(cursor, reached, None, error)
            return reached + 1, False, 0.0

    def _step_over(self, cursor: LevelCursor, offset: int, position: int | None, why: object) -> None:
        if self._log_limit.allows():
            where = "" if position is None else f", log position {position}"
            text = "delay level %d: the message at offset %d%s is not delivered: %s"
            log.error(text, cursor.level, offset, where, why)

    def _refused(self, cursor: LevelCursor, why: str) -> float:
        """Return the delay, in seconds, after the store has refused a message. Log the first refusal."""
        if not cursor.refusals.failures:
            log.warning(
                "delay level %d: could not deliver the message at offset %d, trying again: %s",
                cursor.level, cursor.offset, why,
            )  # fmt: skip
        return cursor.refusals.next_s()

"""The delivery of messages with a delivery time (docs/reference/storage.md, Timer messages).

One task does all the work in batches: it reads new messages in the timer topic's queue, delivers due
messages, and moves messages out of segments that will be deleted. A message is delivered or moved by storing
a copy that contains the log position of the original record. All copies of a batch are written together. So
after a kill, the log shows which messages were delivered or moved (links.py), and each message is delivered
once, unless a power failure has destroyed its copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial

import msgspec

from cometmq import logs
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.send.send import Place
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.timers.following import (
    CHECK_POINT_SIZE,
    Follower,
    check_point,
    check_point_path,
    real_topic,
)
from cometmq.broker.timers.pending import Pending, Times
from cometmq.broker.timers.redelivery import append_again, check_body, redeliver
from cometmq.broker.timers.wheel import NEVER, Waiting
from cometmq.errors import CommandError, MessageIllegal, RecordError, StoreError
from cometmq.periodic import Backoff
from cometmq.protocol.codes import TIMER_TOPIC, ResponseCode
from cometmq.protocol.properties.values import put, value_of
from cometmq.protocol.record.one import decode_record, properties_of
from cometmq.protocol.timers import TimerCode, timer_tags_code
from cometmq.store import Arrivals, Clock, MessageStore, TimerTable, link_to, replace_file

log = logs.logger(__name__)

# The limits of one event-loop iteration: the number of delivered messages, and their total bytes.
BATCH, BATCH_BYTES = 32, 1 << 20
# The delay, in seconds, after the store has refused messages. The delay doubles up to ERROR_S.
RETRY_S, ERROR_S = 0.1, 10.0
MAX_ERRORS = 3  # number of unexpected errors after which a message is skipped
# The maximum time, in ms, between two readings of the clocks. An event-loop timer may expire too late,
# because the loop's clock stops while the machine is suspended, and ignores changes of the wall clock.
CLOCK_CHECK_INTERVAL_MS = 1_000


class Move(msgspec.Struct, eq=False):
    """A request to move all messages before a log position. `done` receives whether that succeeded."""

    before: int
    done: asyncio.Future[bool]

    def answer(self, worked: bool) -> None:
        """Report whether the messages were moved, unless the requester no longer waits for the result."""
        if not self.done.done():
            self.done.set_result(worked)


class Refused(Exception):
    """The store accepts no messages at present. The argument is the reason."""


@dataclass(eq=False)
class TimerService:
    """Delivers the timer messages of a master."""

    clock: Clock
    store: MessageStore
    tables: DurableTables
    timed: TimedSends
    writer: Writer

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._log_limit = logs.LogLimiter()
        self.restart()

    def restart(self) -> None:
        """Reset the delivery state. Since the last stop, another broker may have delivered messages."""
        self.pending = Pending()
        self.state = self.tables.timers
        self.state.take = self._mark
        self.follower = Follower(
            clock=self.clock, store=self.store, timed=self.timed, state=self.state, pending=self.pending
        )
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loaded = False
        self._move: Move | None = None
        self._began = -1  # log end before the current batch was stored; -1 if no batch is in progress
        self._refusals = Backoff(RETRY_S, ERROR_S)
        self._errors = 0  # number of consecutive unexpected errors with the next message

    # -- start and stop

    def queues(self) -> list[tuple[str, int]]:
        """Return the queue (topic, queue id) whose new messages must be reported by a call of `arrived`."""
        return [(TIMER_TOPIC, 0)]

    def arrived(self, arrivals: Arrivals) -> None:
        if any(arrival[0] == TIMER_TOPIC for arrival in arrivals):
            self._wake.set()

    def start(self) -> None:
        """Start to deliver timer messages, from the point at which the last run stopped."""
        self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """Stop delivering, and write Apache's file timercheck, with which Apache's broker could continue."""
        self._stopping.set()
        self._wake.set()
        if self._task is None:
            return
        if not self._loaded:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._move is not None:
            self._move.answer(False)
        queue = self.follower.queue
        if queue is None or not self._loaded:
            return
        try:
            # Read all copies first, because `mark` returns None while a copy has not been read.
            await self.follower.follow()
            mark = self.pending.mark(self.store.log.end)
            if mark is None:
                return
            offset = await self.store.executor.query(
                partial(queue.search, queue.min_offset, queue.max_offset, mark.first_position)
            )
            data = self.check_point(min(offset, self.pending.followed)).ljust(CHECK_POINT_SIZE, b"\0")
            # Flush the log before writing the file. Otherwise a power failure could destroy the copies of
            # messages that, according to the file, were delivered or moved.
            await self.tables.log_flushed()
            await asyncio.to_thread(replace_file, self.store.disk, check_point_path(self.store), data)
        except OSError as error:
            log.error("timercheck could not be written: %s", error)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            self._began = -1
            try:
                if not self._loaded:
                    await self.follower.load()
                    self._loaded = True
                await self.follower.follow()
                try:
                    busy = await self._deliver()
                except Refused:
                    # If the store refuses deliveries, first move messages out of the segments that are to be
                    # deleted: deliveries may need the space that this frees.
                    while not self._stopping.is_set() and await self._move_some():
                        await self.follower.follow()
                    raise
                busy |= await self._move_some()
                self._note_success()
                if not busy:
                    await self._sleep(self.pending.wait_ms(self.times()))
            except Refused as refusal:
                await self._failed("timer messages are not delivered, trying again: %s", refusal)
            except Exception as error:
                log.exception("delivery of timer messages failed: %s", error)
                await self._failed("", error)

    def _note_success(self) -> None:
        if self._refusals.failures:
            log.info("the delivery of timer messages works again")
        self._refusals.reset()

    async def _failed(self, line: str, why: Exception) -> None:
        """Wait before the next attempt. Log only the first of several consecutive failures."""
        if line and not self._refusals.failures:
            log.warning(line, why)
        if self._move is not None:
            self._move.answer(False)
            self._move = None
        wait_s = self._refusals.next_s()
        try:
            await asyncio.wait_for(self._stopping.wait(), wait_s if line else ERROR_S)
        except TimeoutError:
            pass

    async def _sleep(self, wait_ms: int) -> None:
        wait_s = None if wait_ms == NEVER else min(wait_ms, CLOCK_CHECK_INTERVAL_MS) / 1000
        try:
            await asyncio.wait_for(self._wake.wait(), wait_s)
        except TimeoutError:
            pass

    def times(self) -> Times:
        """Return the wall-clock time and the monotonic time.

        They are read in this order, so that a pause between the two reads can never deliver messages early.
        """
        now_ms = self.timed.wall.now_ms()
        return Times(now_ms, mono_ms(self.clock))

    def _mark(self) -> TimerTable | None:
        queue = self.follower.queue
        if not self._loaded or queue is None:
            return None
        # Remove old recalls only if all messages have been read, because an unread message may need its
        # recall.
        if not self.follower.behind():
            self.pending.forget_recalls(self.times())
        end = self.store.log.end if self._began < 0 else self._began
        mark = self.pending.mark(end)
        if mark is not None:
            mark.counted_offset, mark.counted_position = queue.max_offset, end
        return mark

    def check_point(self, queue_offset: int) -> bytes:
        """Return the progress of timer messages in the format of Apache's file timercheck."""
        now = self.times()
        return check_point(self.pending.read_ms(now), queue_offset, now.wall_ms, self.state.changes)

    # -- delivery

    async def _deliver(self) -> bool:
        """Deliver a batch of due messages. Return False if no message is due."""
        due = self.pending.due(self.times(), BATCH)
        if not due:
            return False
        records = await self._records([waiting.position for waiting in due])
        while self.follower.behind():
            # Read all new messages of the timer topic first, because one of them may recall a due message.
            await self.follower.follow()
        self.pending.forget_recalls(self.times())
        self._began = self.store.log.end
        done, appended = 0, False
        problem: Exception | None = None
        for waiting, record in zip(due, records, strict=False):
            try:
                appended |= self._deliver_one(waiting, record)
            except StoreError as refusal:
                problem = Refused(str(refusal))
                break
            except Exception as error:
                self._errors += not done
                if self._errors < MAX_ERRORS:
                    problem = error
                    break
                self._step_over(waiting.position, error)
            done += 1
        if appended:
            await self._committed()
        if done:
            self.pending.done(done)
            self._errors = 0
        self.state.changes += 1
        self.state.waiting, self.state.recalls = len(self.pending), self.pending.recalls
        for record in records[:done]:
            self._gone(record)
        self._began = -1
        if problem is not None and not done:
            raise problem
        return True

    async def _records(self, positions: list[int]) -> list[bytes | None]:
        """Return the records at these log positions, None for an unreadable one: up to BATCH_BYTES."""
        found: list[bytes | None] = []
        size = 0
        for position in positions:
            record = await self.follower.record(position)
            size += 0 if record is None else len(record)
            if found and size > BATCH_BYTES:
                break
            found.append(record)
        return found

    def _deliver_one(self, waiting: Waiting, record: bytes | None) -> bool:
        """Store a due message in its destination. Return False if it must not or can never be stored.

        Raises StoreError if the message cannot be stored at present.
        """
        if record is None:
            return False
        properties = properties_of(record)
        topic, key = value_of(properties, b"REAL_TOPIC"), value_of(properties, b"UNIQ_KEY")
        if self.pending.is_recalled(waiting.out_ms, topic, key):
            return False
        message = decode_record(record, 0)
        try:
            stamped = self._stamped(message.store_timestamp_ms, properties)
            redeliver(self.store, self.tables.topics, message, stamped, link_to(waiting.position))
        except CommandError as error:
            self._step_over(waiting.position, error.remark)
            return False
        return True

    def _stamped(self, stored_ms: int, properties: bytes) -> bytes:
        properties = put(properties, b"TIMER_ENQUEUE_MS", b"%d" % stored_ms)
        return put(properties, b"TIMER_DEQUEUE_MS", b"%d" % self.clock.time_ms())

    def _gone(self, record: bytes | None) -> None:
        """Decrease the number of waiting messages of a topic, unless a recall has already decreased it."""
        if record is None:
            return
        properties = properties_of(record)
        topic, key = value_of(properties, b"REAL_TOPIC"), value_of(properties, b"UNIQ_KEY")
        code = TimerCode.of(properties)
        if code is None or not self.pending.is_recalled(code.out_ms, topic, key, counted=True):
            self.state.count(real_topic(properties), -1)

    def _step_over(self, position: int, why: object) -> None:
        if self._log_limit.allows():
            log.error("the timer message at log position %d is not delivered: %s", position, why)

    async def _committed(self) -> None:
        """Wait until the appended messages are committed. Raises Refused if that fails."""
        done: asyncio.Future[str | None] = self._loop.create_future()

        def outcome(code: int, remark: str | None) -> None:
            done.set_result(None if code == ResponseCode.SUCCESS else remark or str(code))

        self.writer.appended(outcome)
        problem = await done
        if problem is not None:
            raise Refused(problem)

    # -- moving to the end of the log

    async def move_on(self, before: int) -> bool:
        """Move all waiting messages before a log position to the log's end. Return whether it worked."""
        if self.follower.queue is None:
            return True
        if self._stopping.is_set() or self._move is not None:
            return False
        self._move = Move(before, self._loop.create_future())
        self._wake.set()
        return await self._move.done

    async def _move_some(self) -> bool:
        """Move a batch of messages to the end of the log. Return False if no move is requested."""
        move = self._move
        if move is None:
            return False
        worked = True
        try:
            if await self._move_batch(move.before):
                return True
            self.state.changes += 1
            await self.tables.log_flushed()
        except Exception as error:
            text = "timer messages before log position %d could not be moved to the end of the log: %s"
            log.error(text, move.before, error)
            worked = False
        self._move = None
        move.answer(worked)
        return True

    async def _move_batch(self, before: int) -> bool:
        """Move a batch of messages from before a log position to the end. Return False if none is left."""
        batch = self.pending.before(before, BATCH)
        if not batch:
            return False
        records = await self._records([position for position, _ in batch])
        self._began = self.store.log.end
        copies: dict[int, int | None] = {}
        done, problem = 0, None
        for (position, due_ms), record in zip(batch, records, strict=False):
            try:
                if record is not None:
                    copy = self._move_one(position, record)
                    if copy is not None:
                        copies[copy] = due_ms
            except StoreError as refusal:
                problem = refusal
                break
            done += 1
        if copies:
            await self._committed()
            if self.store.dispatcher.waits:  # Flush, because only flushed copies are readable
                # Ignore a failed flush: the copies are in the log and will be read later.
                with contextlib.suppress(OSError):
                    await self.tables.log_flushed()
        # Record the log positions of the copies only after the commit. After a failed commit, other records
        # may get these positions.
        self.follower.carried.update((copy, due) for copy, due in copies.items() if due is not None)
        self.pending.moved(done, max(copies, default=-1))
        self._began = -1
        if problem is not None:
            raise problem
        return True

    def _move_one(self, position: int, record: bytes) -> int | None:
        """Store a copy of a waiting message. Return the copy's log position, or None if it was skipped."""
        try:
            message = decode_record(record, 0)
            times = message.properties.get("TIMER_ROLL_TIMES", "0")
            # A client may have set TIMER_ROLL_TIMES to any text.
            rolled = int(times) if times.isdecimal() and len(times) <= 9 else 0
            properties = self._stamped(message.store_timestamp_ms, properties_of(record))
            properties = put(properties, b"TIMER_ROLL_TIMES", b"%d" % (rolled + 1))
            check_body(message)
            place = Place(TIMER_TOPIC, 0, properties)
            code = timer_tags_code(properties)
            copy = append_again(self.store, message, place, link_to(position), code, makes_room=True)
        except (CommandError, RecordError, MessageIllegal) as error:
            self._step_over(position, error.remark if isinstance(error, CommandError) else error)
            return None
        return copy.physical_offset

"""Delivery of delayed messages: one cursor per level over its queue of SCHEDULE_TOPIC_XXXX (storage.md 7.2).

The messages of a level become due in the order they were stored, so each level waits for its first one with
one timer; an arrival on an idle level sets it. A delivered message is committed before the cursor moves: a
crash in between delivers it again, never loses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from cometmq import logs
from cometmq.broker.context import BrokerContext
from cometmq.broker.delay import corrected_due_time
from cometmq.errors import StoreError
from cometmq.message import MessageExt
from cometmq.protocol.bodies import DelayOffsetTable
from cometmq.protocol.codes import SCHEDULE_TOPIC, TRANS_HALF_TOPIC, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.ids import pack_host
from cometmq.protocol.properties import encode_properties, tags_code
from cometmq.protocol.record import body_crc, iter_records
from cometmq.remoting import Connection, Handler
from cometmq.store.dispatch import Arrivals
from cometmq.store.files import NotCached
from cometmq.store.reading import GetStatus, Got

log = logs.logger(__name__)

# Deliveries of one level in one tick.
BATCH = 32
# After a refused delivery the same message is tried again so much later, and after each further one twice as
# late as before, up to ERROR_S: a store may take no messages for hours.
RETRY_S = 0.1
# After an error of ours, as Apache's loop does.
ERROR_S = 10.0
# However long a message waits, the wall clock is looked at again after this: it may have been set forward.
LOOK_AGAIN_S = 10.0


class LevelCursor:
    """One level: where it stands, and whether it waits, delivers or sleeps."""

    __slots__ = ("busy", "dirty", "level", "offset", "refusals", "timer")

    def __init__(self, level: int) -> None:
        self.level = level
        self.offset = 0
        self.busy = False
        self.dirty = False
        self.refusals = 0  # in a row, of the message at `offset`
        self.timer: asyncio.TimerHandle | None = None


class ScheduleService:
    """Delivers delayed messages of a master."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._cursors = {level: LevelCursor(level) for level in range(1, context.delays.max_level + 1)}
        self._others: dict[int, int] = {}  # offsets of levels that the settings do not know
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {RequestCode.GET_ALL_DELAY_OFFSET: self.all_offsets}

    def queues(self) -> list[tuple[str, int]]:
        """Topic and queue id of those whose arrivals it must hear of."""
        return [(SCHEDULE_TOPIC, level - 1) for level in self._cursors]

    def load(self, table: Mapping[str, Any]) -> None:
        """Take delayOffset.json; levels may come as text."""
        for text, offset in (table.get("offsetTable") or {}).items():
            level = int(text)
            if level in self._cursors:
                self._cursors[level].offset = int(offset)
            else:
                self._others[level] = int(offset)

    def to_table(self) -> dict[str, Any]:
        """delayOffset.json and the body of 45: level -> next offset of its queue."""
        offsets = {level: cursor.offset for level, cursor in self._cursors.items() if cursor.offset}
        return {"offsetTable": {**offsets, **self._others}}

    def take_dirty(self) -> bool:
        """Whether an offset has changed since the last call."""
        dirty = [cursor for cursor in self._cursors.values() if cursor.dirty]
        for cursor in dirty:
            cursor.dirty = False
        return bool(dirty)

    def positions(self) -> dict[int, tuple[int, int]]:
        """level -> (delivered, stored) offsets of the levels in use, for the runtime table."""
        store = self._context.store
        found = {}
        for level, cursor in self._cursors.items():
            maximum = store.max_offset(SCHEDULE_TOPIC, level - 1)
            if maximum:
                found[level] = (cursor.offset, maximum)
        return found

    def all_offsets(self, _connection: Connection, frame: Frame) -> Frame:
        """45: the delivery offsets, for a slave."""
        return frame.response(
            ResponseCode.SUCCESS, body=DelayOffsetTable.from_plain(self.to_table()).encode()
        )

    def start(self) -> None:
        """Begin where the last run stopped, within what the queues hold."""
        store = self._context.store
        for level, cursor in self._cursors.items():
            queue_id = level - 1
            minimum, maximum = (
                store.min_offset(SCHEDULE_TOPIC, queue_id),
                store.max_offset(SCHEDULE_TOPIC, queue_id),
            )
            offset = min(max(cursor.offset, minimum), maximum)
            cursor.dirty = offset != cursor.offset
            cursor.offset = offset
            if cursor.offset < maximum:
                self._wake(cursor)

    async def stop(self) -> None:
        """Deliver nothing more."""
        self._stopped = True
        for cursor in self._cursors.values():
            if cursor.timer is not None:
                cursor.timer.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def arrived(self, arrivals: Arrivals) -> None:
        """Wake the levels that got their first message."""
        for arrival in arrivals:
            if arrival[0] == SCHEDULE_TOPIC:
                cursor = self._cursors.get(arrival[1] + 1)
                if cursor is not None and cursor.timer is None and not cursor.busy:
                    self._wake(cursor)

    def _wake(self, cursor: LevelCursor, delay_s: float = 0.0) -> None:
        if not self._stopped:
            cursor.timer = self._loop.call_later(min(delay_s, LOOK_AGAIN_S), self._run, cursor)

    def _run(self, cursor: LevelCursor) -> None:
        cursor.timer = None
        cursor.busy = True
        try:
            got = self._context.store.get_messages(SCHEDULE_TOPIC, cursor.level - 1, cursor.offset, BATCH)
            if isinstance(got, NotCached):
                task = self._loop.create_task(self._run_cold(cursor, got))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._deliver(cursor, got)
        except Exception:
            self._failed(cursor)

    async def _run_cold(self, cursor: LevelCursor, missing: NotCached) -> None:
        try:
            got = await self._context.store.get_messages_cold(
                missing, SCHEDULE_TOPIC, cursor.level - 1, cursor.offset, BATCH
            )
            if not self._stopped:
                self._deliver(cursor, got)
        except Exception:
            self._failed(cursor)

    def _failed(self, cursor: LevelCursor) -> None:
        log.exception("delay level %d: delivery at %d failed", cursor.level, cursor.offset)
        cursor.busy = False
        self._wake(cursor, ERROR_S)

    def _deliver(self, cursor: LevelCursor, got: Got) -> None:
        """Store what is due of one read, and say when to go on."""
        context = self._context
        if got.status is not GetStatus.FOUND:
            cursor.busy = False
            if got.next_begin_offset != cursor.offset:
                # Records that are gone, or a queue that begins later than the cursor stands.
                cursor.offset = got.next_begin_offset
                cursor.dirty = True
                if cursor.offset < got.max_offset:
                    self._wake(cursor)
            return
        now_ms = context.clock.time_ms()
        delay_ms = context.delays.delay_ms(cursor.level)
        wait_ms = 0
        reached = cursor.offset
        appended = False
        for message in iter_records(b"".join(got.buffers)):
            due_ms = corrected_due_time(message.store_timestamp_ms + delay_ms, now_ms, delay_ms)
            if due_ms > now_ms:
                wait_ms = due_ms - now_ms
                break
            try:
                appended = self._append(message) or appended
            except StoreError as error:
                if appended or reached != cursor.offset:
                    wait_ms = int(RETRY_S * 1000)
                else:
                    wait_ms = int(self._refused(cursor, str(error)) * 1000)
                break
            reached = message.queue_offset + 1
        else:
            reached = got.next_begin_offset

        def outcome(code: int, remark: str | None) -> None:
            cursor.busy = False
            if code != ResponseCode.SUCCESS:
                self._wake(cursor, self._refused(cursor, remark or ""))
                return
            if reached != cursor.offset:
                if cursor.refusals:
                    log.info("delay level %d: messages are delivered again", cursor.level)
                cursor.refusals = 0
                cursor.offset = reached
                cursor.dirty = True
            if wait_ms:
                self._wake(cursor, wait_ms / 1000)
            elif reached < context.store.max_offset(SCHEDULE_TOPIC, cursor.level - 1):
                self._wake(cursor)

        if appended:
            context.writer.appended(outcome)
        else:
            outcome(int(ResponseCode.SUCCESS), None)

    def _refused(self, cursor: LevelCursor, why: str) -> float:
        """Seconds to wait after the store refused the message at the cursor; the first time it is said."""
        if not cursor.refusals:
            log.warning(
                "delay level %d: message at %d not delivered, trying again: %s",
                cursor.level,
                cursor.offset,
                why,
            )
        cursor.refusals += 1
        return min(RETRY_S * (1 << min(cursor.refusals - 1, 7)), ERROR_S)

    def _append(self, message: MessageExt) -> bool:
        """Store the real message; False if it has no destination and is dropped."""
        properties = message.properties
        topic, queue_id = properties.get("REAL_TOPIC"), properties.get("REAL_QID")
        if not topic or not queue_id or not queue_id.isdecimal() or topic == TRANS_HALF_TOPIC:
            log.warning("delayed message %s has no destination and is dropped", message.offset_msg_id)
            return False
        if message.body and body_crc(message.body) != message.body_crc:
            # Stored again it would get a CRC that vouches for the damage.
            log.error(
                "delayed message %s for %s/%s is damaged at log position %d and is not delivered",
                message.msg_id, topic, queue_id, message.physical_offset,
            )  # fmt: skip
            return False
        tag = properties.get("TAGS")
        self._context.store.append(
            topic,
            int(queue_id),
            message.body,
            encode_properties(properties).encode(),
            flag=message.flag,
            sys_flag=message.sys_flag,
            born_timestamp_ms=message.born_timestamp_ms,
            born_host=pack_host(message.born_host),
            reconsume_times=message.reconsume_times,
            prepared_transaction_offset=message.prepared_transaction_offset,
            tags_code=tags_code(tag),
        )
        return True

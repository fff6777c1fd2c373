"""The expiry of leases: copies of messages that were not acked in time.

A copy goes to the group's retry topic for the message's topic, from which pops deliver it again, or to the
group's dead-letter topic once it was delivered as often as the group's `retryMaxTimes` allows. The lease ends
when the copy is stored, so a crash in between leads to a second delivery and never to a loss. While the store
refuses messages (its disk may be full), the leases expire again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cometmq import logs
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.pop.leases import Lease, Leases, QueueKey
from cometmq.broker.send.retry import DLQ_QUEUES
from cometmq.broker.send.send import Place, move
from cometmq.broker.send.send_back import properties_of_retry
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CometError, RecordError
from cometmq.message import MessageExt
from cometmq.periodic import Tasks
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, ResponseCode, has_retry_topic
from cometmq.protocol.pop import TopicKind
from cometmq.protocol.properties.values import drop, put, value_of
from cometmq.protocol.record.one import decode_record, properties_of
from cometmq.settings import INT_MAX
from cometmq.store import CACHED, Clock, GetStatus, MessageStore, NotInMemory, Reads

log = logs.logger(__name__)

SUCCESS = int(ResponseCode.SUCCESS)
RETRY_QUEUES = 1
"""The number of queues of a retry topic for pops, as in Apache's broker."""
PER_TURN = 64
"""The maximum number of expired leases that are handled in one event-loop iteration."""
MIN_INTERVAL_S = 0.02
MAX_INTERVAL_S = 1.0
"""The maximum interval between two looks at the clock, as the loop's timers ignore time of suspension."""
POSTPONED_MS = 2_000
"""The time, in ms, after which a lease expires again whose message could not be copied."""


@dataclass(eq=False, kw_only=True)
class LeaseExpiry:
    """Handles the leases that expire. `freed` is called with each queue whose ordered leases have expired."""

    clock: Clock
    store: MessageStore
    tables: DurableTables
    writer: Writer
    leases: Leases
    freed: Callable[[QueueKey], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks = Tasks()
        self._stopped = False
        self._log_limit = logs.LogLimiter()

    def arm(self) -> None:
        """Start or advance the timer for the next lease that expires."""
        deadline_ms = self.leases.next_deadline_ms()
        if deadline_ms is None or self._stopped:
            return
        delay_s = (deadline_ms - mono_ms(self.clock)) / 1000
        delay_s = min(max(delay_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        at = self._loop.time() + delay_s
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(delay_s, self._run)

    def _run(self) -> None:
        self._timer = None
        expired = self.leases.expired(mono_ms(self.clock), PER_TURN)
        for key in expired.freed:
            self.freed(key)
        for lease in expired.leases:
            self._handle(lease)
        self.arm()

    def _handle(self, lease: Lease) -> None:
        try:
            self._copy(lease, self._read(lease, CACHED))
        except NotInMemory as miss:
            self._tasks.start(self._handle_uncached(lease, miss))
        except Exception as error:
            self._failed(lease, error)

    async def _handle_uncached(self, lease: Lease, miss: NotInMemory) -> None:
        try:
            record = await self.store.executor.query(partial(self._read, lease), miss)
            self._copy(lease, record)
        except Exception as error:
            self._failed(lease, error)

    def _read(self, lease: Lease, reads: Reads) -> bytes | None:
        """Return the record of a leased message, or None if it no longer exists."""
        queue = lease.queue
        if queue is None:
            return None
        _, topic, queue_id = queue.key
        got = self.store.get_messages(topic, queue_id, lease.offset, 1, reads=reads)
        if got.status is not GetStatus.FOUND or got.next_begin_offset != lease.offset + 1:
            return None
        return b"".join(got.buffers)

    def _copy(self, lease: Lease, record: bytes | None) -> None:
        """Store a copy of a message. Its lease ends once the copy is stored."""
        queue = lease.queue
        if queue is None or self._stopped:
            return
        if record is None:
            self.leases.end(lease)
            return
        group, topic, _ = queue.key
        try:
            message = decode_record(record)
        except RecordError as error:
            log.error("a popped message of group %s is damaged and is not retried: %s", group, error)
            self.leases.end(lease)
            return
        settings = self.tables.groups.table.get(group)
        if settings is None or settings.retry_queue_nums <= 0:
            self.leases.end(lease)
            return
        times = message.reconsume_times + lease.counts
        dead = lease.counts and message.reconsume_times >= settings.retry_max_times
        if dead and has_retry_topic(group):
            place = self._dead_letter(group, message, record)
        else:
            place = self._retry(lease, group, topic, record)
        move(self.store.appender, message, place, min(times, INT_MAX))

        def outcome(_code: int, remark: str | None) -> None:
            if remark is None:
                self.leases.end(lease)
            else:
                self._failed(lease, CometError(remark))

        self.writer.appended(outcome)

    def _retry(self, lease: Lease, group: str, topic: str, record: bytes) -> Place:
        """Return the place and the properties of a message that will be delivered again."""
        target = topic if topic.startswith(RETRY_PREFIX) else TopicKind.RETRY_V1.topic(topic, group)
        self.tables.topics.ensure(target, RETRY_QUEUES)
        if self.tables.offsets.query(group, target, 0) < 0:
            self.tables.offsets.commit(group, target, 0, 0)
        properties = drop(properties_of(record), b"POP_CK")
        if not value_of(properties, b"1ST_POP_TIME"):
            properties = put(properties, b"1ST_POP_TIME", b"%d" % lease.pop.pop_ms)
        return Place(target, 0, put(properties, b"ORIGIN_GROUP", group.encode()))

    def _dead_letter(self, group: str, message: MessageExt, record: bytes) -> Place:
        """Return the place and the properties of a message that will not be delivered again."""
        target = DLQ_PREFIX + group
        self.tables.topics.ensure(target, DLQ_QUEUES)
        return Place(target, 0, put(properties_of_retry(message, record), b"DELAY", b"0"))

    def _failed(self, lease: Lease, error: Exception) -> None:
        self.leases.postpone(lease, mono_ms(self.clock) + POSTPONED_MS)
        self.arm()
        if self._log_limit.allows():
            log.warning("could not copy a message whose lease has expired, trying again: %s", error)

    def start(self) -> None:
        """Begin to handle expired leases."""
        self._stopped = False
        self.arm()

    async def stop(self) -> None:
        """Handle no further leases, and wait for work in progress."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.finish()

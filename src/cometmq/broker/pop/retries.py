"""Copies of popped messages that were not acked in time.

A copy goes to the group's retry topic for the message's topic, from which pops deliver it again, or to the
group's dead-letter topic once it was delivered as often as the group's `retryMaxTimes` allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from cometmq import logs
from cometmq.broker.base.attributes import has_priorities
from cometmq.broker.base.retry_records import ORIGIN_GROUP
from cometmq.broker.base.writer import Writer
from cometmq.broker.send.retry import DLQ_QUEUES
from cometmq.broker.send.send import Place, fitting, move
from cometmq.broker.send.send_back import properties_of_retry
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import RecordError
from cometmq.message import MessageExt
from cometmq.periodic import Tasks
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, has_retry_topic
from cometmq.protocol.pop import TopicKind
from cometmq.protocol.properties.values import drop, put, value_of
from cometmq.protocol.record.one import decode_record, properties_of
from cometmq.settings import INT_MAX
from cometmq.store import CACHED, GetStatus, MessageStore, NotInMemory, Reads

log = logs.logger(__name__)

POP_CK = b"POP_CK"
"""The property with the receipt handle of a message that was popped from a retry topic."""

MAX_COUNTERS = 100_000
"""The maximum number of entries in `Retries.copied`. Beyond this number, all of them restart at 0."""
RETRY_QUEUES = 1
"""The number of queues of a retry topic for pops, as in Apache's broker."""


class Overdue(NamedTuple):
    """A message whose lease has expired, with its place in the topic itself or in a retry topic.

    Attributes:
        pop_ms: The wall-clock time of the pop.
        counts: Whether the delivery counts as one of the group's retries.
    """

    group: str
    topic: str
    queue_id: int
    offset: int
    pop_ms: int
    counts: bool


@dataclass(eq=False)
class Retries:
    """Stores copies of overdue messages."""

    store: MessageStore
    tables: DurableTables
    writer: Writer

    def __post_init__(self) -> None:
        self._tasks = Tasks()
        self._log_limit = logs.LogLimiter()
        self.copied: dict[tuple[str, str], int] = {}
        """The number of copies in retry topics since the start, by group and topic of the message."""

    def copy(self, overdue: Overdue, done: Callable[[bool], None]) -> None:
        """Store a copy of a message, then call `done` with True.

        If the message cannot be delivered again (it no longer exists, is damaged, or the group has no retry
        queues), `done` is called without a copy. If the store does not accept a copy at present, `done` is
        called with False.
        """
        try:
            self._append(overdue, self._read(overdue, CACHED), done)
        except NotInMemory as miss:
            self._tasks.start(self._copy_uncached(overdue, miss, done))
        except Exception as error:
            self._failed(error, done)

    async def _copy_uncached(self, overdue: Overdue, miss: NotInMemory, done: Callable[[bool], None]) -> None:
        try:
            record = await self.store.executor.query(partial(self._read, overdue), miss)
            self._append(overdue, record, done)
        except Exception as error:
            self._failed(error, done)

    def _failed(self, error: object, done: Callable[[bool], None]) -> None:
        if self._log_limit.allows():
            log.warning("could not copy a message whose lease has expired, trying again: %s", error)
        done(False)

    def _read(self, overdue: Overdue, reads: Reads) -> bytes | None:
        """Return the record of a message, or None if it no longer exists."""
        _, topic, queue_id, offset, *_ = overdue
        got = self.store.get_messages(topic, queue_id, offset, 1, reads=reads)
        if got.status is not GetStatus.FOUND or got.next_begin_offset != offset + 1:
            return None
        return b"".join(got.buffers)

    def _append(self, overdue: Overdue, record: bytes | None, done: Callable[[bool], None]) -> None:
        group = overdue.group
        settings = self.tables.groups.table.get(group)
        if record is None or settings is None or settings.retry_queue_nums <= 0:
            done(True)
            return
        try:
            message = decode_record(record, check_crc=True)  # The copy gets a CRC of its own
        except RecordError as error:
            log.error("a popped message of group %s is damaged and is not delivered again: %s", group, error)
            done(True)
            return
        dead = overdue.counts and message.reconsume_times >= settings.retry_max_times
        if dead and has_retry_topic(group):
            place = self._dead_letter(group, message, record)
        else:
            place = self._retry(overdue, record)
        times = message.reconsume_times + overdue.counts
        move(self.store.appender, message, fitting(place, record), min(times, INT_MAX))

        def outcome(_code: int, remark: str | None) -> None:
            if remark is None:
                if not dead:
                    self._count(group, overdue.topic)
                done(True)
            else:
                self._failed(remark, done)

        self.writer.appended(outcome)

    def _count(self, group: str, topic: str) -> None:
        if len(self.copied) > MAX_COUNTERS:
            self.copied.clear()
        self.copied[group, topic] = self.copied.get((group, topic), 0) + 1

    def to_dead_letters(self, group: str, record: bytes, done: Callable[[bool], None]) -> None:
        """Store a copy of a message in its group's dead-letter topic, then call `done` with True.

        A group without dead letters, such as a system group, gets no copy. If the copy is not stored, `done`
        is called with False.
        """
        if not has_retry_topic(group):
            done(True)
            return
        try:
            message = decode_record(record)
            place = fitting(self._dead_letter(group, message, record), record)
            move(self.store.appender, message, place, message.reconsume_times)
        except Exception as error:
            self._failed(error, done)
        else:
            self.writer.appended(lambda _code, remark: done(remark is None))

    def _retry(self, overdue: Overdue, record: bytes) -> Place:
        """Return the retry queue of a message that is to be delivered again, and its new properties."""
        group = overdue.group
        target, queue_id = self._retry_queue(overdue)
        if self.tables.offsets.query(group, target, queue_id) < 0:
            self.tables.offsets.commit(group, target, queue_id, 0)
        properties = drop(properties_of(record), POP_CK)
        if not value_of(properties, b"1ST_POP_TIME"):
            properties = put(properties, b"1ST_POP_TIME", b"%d" % overdue.pop_ms)
        return Place(target, queue_id, put(properties, ORIGIN_GROUP, group.encode()))

    def _retry_queue(self, overdue: Overdue) -> tuple[str, int]:
        """Return the topic and the queue id of a retry, which exist then.

        The retry topic has one queue. That of a topic with priorities has as many as that topic, so that a
        retry does not wait for those of lower priority (`plan`).
        """
        topics, topic = self.tables.topics, overdue.topic
        if topic.startswith(RETRY_PREFIX):
            return topic, overdue.queue_id
        target = TopicKind.RETRY_V1.topic(topic, overdue.group)
        known = topics.get(topic)
        if known is None or not has_priorities(known):
            topics.ensure(target, RETRY_QUEUES)
            return target, 0
        count = known.read_queue_nums
        retry = topics.ensure(target, count)
        if retry.read_queue_nums < count:  # The topic has had fewer queues, or another type
            topics.put(replace(retry, read_queue_nums=count, write_queue_nums=count))
        return target, overdue.queue_id

    def _dead_letter(self, group: str, message: MessageExt, record: bytes) -> Place:
        """Return the place and the properties of a message that will not be delivered again."""
        target = DLQ_PREFIX + group
        self.tables.topics.ensure(target, DLQ_QUEUES)
        return Place(target, 0, put(properties_of_retry(message, record, group), b"DELAY", b"0"))

    async def stop(self) -> None:
        """Wait until the reads in progress have ended."""
        await self._tasks.finish()

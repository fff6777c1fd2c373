"""Deduplication of sends: a message whose key was stored within the window of its topic is not stored again.

The attribute `dedup.window.ms` gives a topic a window. The broker then remembers the keys of the topic's
newest messages and their log positions (KeyTable). A send with a known key gets the response of the first
send, which is computed from the record at that position. Table entries may be wrong: the write of a record
may have failed, or a raft group may have removed it. So each answer is based on a read of the record.

The keys come from three sources: the messages that this broker appends, the records that a raft follower
receives, and a scan of the log at the start or when a topic gets the attribute.

A delayed message counts from its send on, under its real topic. Its later delivery does not count. A
transactional message counts from its commit on: of two commits with the same key, the second stores nothing.

Topics without a window cost one comparison per send that does not match a template, and one call per tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from cometmq import logs
from cometmq.broker.base import attributes
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.replies import first_id_field, recall_field
from cometmq.broker.base.writer import NOT_COMMITTED, SYSTEM_ERROR, Writer
from cometmq.broker.send.key_table import KeyTable
from cometmq.broker.send.timed import Timed, TimedSends
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import BodyError, ConfigError
from cometmq.metrics import Families
from cometmq.periodic import Tasks
from cometmq.protocol.batch import iter_batch
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.frame import Frame
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.layout import COMMITTED, TRANSACTION_MASK
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import Facts, decode_record, record_facts
from cometmq.protocol.timers import TimerCode
from cometmq.remoting import Connection
from cometmq.store import (
    CACHED,
    WAITING_TOPICS,
    BatchRecords,
    Clock,
    MessageStore,
    Reads,
    TickMessage,
    Traits,
)

log = logs.logger(__name__)

_TRAITS = Traits()
_PUTS_PER_CHECK = 64  # the number of new keys between two checks of the total number


class First(NamedTuple):
    """The values in the response to the first send with a key. `more` contains encoded ext fields."""

    ids: bytes
    queue_id: int
    queue_offset: int
    more: bytes = b""


class BatchPlan(NamedTuple):
    """The division of a batch send into new messages and duplicates.

    Attributes:
        keys: The key of each message, or b"".
        firsts: For each message, the response to the first send with its key, or the index of an earlier
            message of the batch with its key, or None if the message is new.
        body: The encoded new messages.
    """

    keys: list[bytes]
    firsts: list[First | int | None]
    body: bytes


def key_of_record(tables: Mapping[str, KeyTable], facts: Facts) -> tuple[KeyTable, bytes] | None:
    """Return the table and the key that a record of the log belongs to, or None.

    A delayed message belongs to the table of its real topic. Its later copies, in the timer topic and in the
    real topic, belong to no table. Nor does the request to recall the message.
    """
    topic, properties = facts.topic, facts.properties
    real = value_of(properties, b"REAL_TOPIC")
    if topic in WAITING_TOPICS:
        if value_of(properties, b"TIMER_DEL_UNIQKEY") or value_of(properties, b"TIMER_ROLL_TIMES"):
            return None
        topic = real.decode("utf-8", "replace")
    elif real and facts.sys_flag & TRANSACTION_MASK != COMMITTED:
        return None
    table = tables.get(topic)
    key = b"" if table is None else table.key_of(properties)
    return (table, key) if table is not None and key else None


def records_with_keys(
    tables: Mapping[str, KeyTable], group: RecordGroup
) -> Iterator[tuple[KeyTable, bytes, Facts]]:
    """Yield the records of a group that belong to one of the tables, with table and key."""
    wanted = np.array([name in tables or name in WAITING_TOPICS for name in group.names])
    for facts in group.facts(np.flatnonzero(wanted[group.topic])) if wanted.any() else ():
        found = key_of_record(tables, facts)
        if found is not None:
            yield *found, facts


@dataclass(eq=False)
class Deduplication:
    """The key tables of all topics that have the attribute `dedup.window.ms`."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    topics: TopicTable
    writer: Writer
    timers: TimedSends

    def __post_init__(self) -> None:
        self.tables: dict[str, KeyTable] = {}
        self._appender = self.store.appender
        # The messages that this broker has appended in the current tick, by topic and key
        self._fresh: dict[tuple[str, bytes], TickMessage] = {}
        # The responses read from the disk, by log position, for the requests that wait for them
        self._read: dict[int, First | None] = {}
        self._unscanned: list[KeyTable] = []  # tables that lack the keys of earlier messages
        self._scans = Tasks()
        self._scanning = False
        self._stopped = False
        self._puts = count(1)
        self._full = False
        self.writer.on_committed = self._settle
        self.store.dispatcher.on_received = self._received

    # -- the tables

    def table_of(self, config: TopicConfig) -> KeyTable | None:
        """Create or update the table of a topic by its attributes. Return None if it has no window."""
        topic, known = config.topic_name, self.tables.get(config.topic_name)
        rule = attributes.dedup_of(config)
        if rule is None or (self.store.slave and self.store.raft_log is None):
            self.tables.pop(topic, None)
            return None
        if known is None or known.name != rule.name:
            known = self.tables[topic] = KeyTable(topic, rule.name, rule.window_ms)
            self._unscanned.append(known)
        elif known.window_ms < rule.window_ms:
            self._unscanned.append(known)
        known.window_ms = rule.window_ms
        return known

    def load(self) -> None:
        """Create the tables, and fill them from the log. Must run in a thread."""
        self._use_all()
        try:
            attributes.check_windows(self.topics.table.values(), self.config.store)
        except ConfigError as error:
            log.warning("after a restart, duplicates may be stored: %s", error)
        unscanned, self._unscanned = self._unscanned, []
        self._scan(unscanned)

    def use_topics(self) -> None:
        """Apply changed attributes of topics. A thread adds missing keys from the log."""
        self._use_all()
        if self._unscanned and not self._scanning:
            self._scanning = True
            self._scans.start(self._scan_all(), name="scan for keys of messages")

    async def _scan_all(self) -> None:
        """Scan the log for all waiting tables at once. Repeat this for tables that were added meanwhile."""
        try:
            while self._unscanned and not self._stopped:
                unscanned, self._unscanned = self._unscanned, []
                await asyncio.to_thread(self._scan, unscanned)
        finally:
            self._scanning = False

    def _use_all(self) -> None:
        for topic in [topic for topic in self.tables if self.topics.get(topic) is None]:
            del self.tables[topic]
        for config in list(self.topics.table.values()):
            if config.attributes or config.topic_name in self.tables:
                self.table_of(config)

    async def scanned(self) -> None:
        """Apply changed attributes of topics, and wait for the scans of the log."""
        self.use_topics()
        await self._scans.finish()

    async def stop(self) -> None:
        self._stopped = True
        await self._scans.finish()

    def _scan(self, unscanned: Sequence[KeyTable]) -> None:
        """Add the keys of earlier messages to tables. Must run in a thread."""
        if not unscanned:
            return
        store, now_ms = self.store, self.clock.time_ms()
        found = {each.topic: KeyTable(each.topic, each.name, each.window_ms) for each in unscanned}
        since_ms = now_ms - max(each.window_ms for each in unscanned)
        most = self.config.dedup_max_keys_per_topic
        try:
            for group in store.lookups.groups_since(store.disk, since_ms):
                if self._stopped:
                    return
                for table, key, facts in records_with_keys(found, group):
                    if not store.deleted.hides(facts.topic, facts.position):
                        table.put(key, facts.position, facts.store_ms, now_ms, most)
                self._limit_total(found.values(), now_ms)
        except OSError as error:
            log.error("keys of earlier messages are unknown, because the log cannot be read: %s", error)
        for each in unscanned:
            each.older = found[each.topic].keys
            each.forgotten += found[each.topic].forgotten
        log.info("%d topics: %d keys of earlier messages found", len(unscanned), sum(map(len, unscanned)))

    # -- sends

    def find(self, table: KeyTable, key: bytes, reads: Reads = CACHED) -> First | None:
        """Return the response to the first send with a key, or None if this send is the first.

        Raises NotInMemory if the record must be read from the disk (see `reading`), and OSError.
        """
        if self._appender.why_closed:
            return None  # the store will refuse the message, because this broker is not the leader
        fresh = self._fresh.get((table.topic, key))
        if fresh is not None:
            self._appender.encode_pending()
            return self._answer_of(fresh) if fresh.size > 0 else None
        position = table.find(key, self.clock.time_ms())
        if position is None:
            return None
        return self._read[position] if position in self._read else self._at(table, key, position, reads)

    def add(self, table: KeyTable, key: bytes, message: TickMessage) -> None:
        """Remember the key of a message that was enqueued or appended."""
        self._fresh[table.topic, key] = message

    @asynccontextmanager
    async def reading(self, table: KeyTable, keys: Sequence[bytes]) -> AsyncIterator[None]:
        """Read the records of `keys` from the disk, so that `find` does not raise NotInMemory."""
        held = []
        try:
            for key in keys:
                position = table.find(key, self.clock.time_ms())
                if position is not None and position not in self._read:
                    question = partial(self._at, table, key, position)
                    self._read[position] = await self.store.executor.query(question)
                    held.append(position)
            yield
        finally:
            for position in held:
                self._read.pop(position, None)

    def repeat(
        self, connection: Connection, frame: Frame, table: KeyTable, first: First, *, waits: bool
    ) -> None:
        """Respond to a duplicate like to the first send, when that is durable (see `respond`)."""
        table.duplicates += 1
        self.respond(connection, frame, first, waits=waits)

    def respond(self, connection: Connection, frame: Frame, first: First, *, waits: bool) -> None:
        """Send a response at the end of the tick. With `waits`, wait until the whole log is durable."""
        replies, opaque = self.writer.replies, frame.opaque

        def answer(code: int, remark: str | None) -> None:
            if remark is None and self._appender.why_closed:  # This broker no longer leads its raft group
                code, remark = SYSTEM_ERROR, NOT_COMMITTED
            if remark is not None:
                connection.respond(frame, code, remark=remark)
            else:
                ids, queue_id, offset, more = first
                connection.write(replies.reply(code, opaque, ids, queue_id, offset, more))

        self.writer.appended(None if frame.is_oneway else answer, waits)

    def _settle(self) -> None:
        """Move the keys of this tick's messages to their tables, because their positions are now known."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, {}
        now_ms = self.clock.time_ms()
        for (topic, key), message in fresh.items():
            table = self.tables.get(topic)
            if table is not None and message.size > 0:
                self._put(table, key, message.physical_offset, message.store_timestamp_ms, now_ms)

    def _received(self, group: RecordGroup) -> None:
        """Remember the keys of records that the leader of the raft group has sent."""
        if self.tables:
            now_ms = self.clock.time_ms()
            for table, key, facts in records_with_keys(self.tables, group):
                self._put(table, key, facts.position, facts.store_ms, now_ms)

    def _put(self, table: KeyTable, key: bytes, position: int, store_ms: int, now_ms: int) -> None:
        config = self.config
        table.put(key, position, store_ms, now_ms, config.dedup_max_keys_per_topic)
        if next(self._puts) % _PUTS_PER_CHECK == 0:
            self._limit_total(self.tables.values(), now_ms)
        if table.forgotten and not self._full:
            self._full = True
            log.warning(
                "topic %s: keys are forgotten before their window ends, so duplicates may be stored: "
                "dedupMaxKeysPerTopic=%d, dedupMaxKeys=%d",
                table.topic, config.dedup_max_keys_per_topic, config.dedup_max_keys,
            )  # fmt: skip

    def _limit_total(self, tables: Collection[KeyTable], now_ms: int) -> None:
        """Forget the oldest keys of the largest tables if the total exceeds dedupMaxKeys."""
        excess = sum(map(len, tables)) - self.config.dedup_max_keys
        while excess > 0:
            largest = max(tables, key=len)
            forgotten = min(excess, len(largest))
            largest.limit(len(largest) - forgotten, now_ms)
            excess -= forgotten

    # -- answers

    def _at(self, table: KeyTable, key: bytes, position: int, reads: Reads) -> First | None:
        """Return the response for the message at a log position, or None if it does not have this key."""
        record = self.store.lookups.record_at(position, reads)
        facts = None if record is None else record_facts(record, 0, position, check_crc=False)
        if record is None or facts is None or self.store.deleted.hides(facts.topic, position):
            return None
        if key_of_record({table.topic: table}, facts) != (table, key):
            return None
        ids = decode_record(record, 0).offset_msg_id.encode()
        return self._answer(ids, facts.topic, facts.queue_id, facts.queue_offset, facts.properties)

    def _answer_of(self, message: TickMessage) -> First:
        ids, queue = self.writer.replies.message_id(message.physical_offset), message.queue
        return self._answer(ids, queue.topic, queue.queue_id, message.queue_offset, message.properties)

    def _answer(self, ids: bytes, topic: str, queue_id: int, queue_offset: int, properties: bytes) -> First:
        more = first_id_field(value_of(properties, b"UNIQ_KEY"))
        if topic not in WAITING_TOPICS:
            return First(ids, queue_id, queue_offset, more)
        queue_id = int(value_of(properties, b"REAL_QID") or b"0")
        code = TimerCode.of(properties)
        if code is None:
            return First(ids, queue_id, queue_offset, more)
        timed = Timed(value_of(properties, b"REAL_TOPIC").decode("utf-8", "replace"), properties, code)
        return First(ids, queue_id, queue_offset, more + recall_field(self.timers.handle(timed)))

    # -- batches

    def keys_of_batch(self, table: KeyTable, body: bytes) -> list[bytes]:
        """Return the key of each message of a batch, or b"". An invalid batch has no keys."""
        try:
            return [table.key_of(bytes(item.properties)) for item in iter_batch(body)]
        except BodyError:
            return []  # the store will refuse the batch

    def plan(self, table: KeyTable, keys: list[bytes], body: bytes) -> BatchPlan:
        """Find the duplicates in a batch. Raises NotInMemory, as `find` does, and OSError."""
        firsts: list[First | int | None] = []
        seen: dict[bytes, int] = {}
        for number, key in enumerate(keys):
            first: First | int | None = None
            if key:
                first = seen.get(key)
                first = self.find(table, key) if first is None else first
                seen.setdefault(key, number)
            firsts.append(first)
        if any(first is not None for first in firsts):
            at, pieces = 0, []
            for first in firsts:
                end = at + int.from_bytes(body[at : at + 4], "big")
                if first is None:
                    pieces.append(body[at:end])
                at = end
            body = b"".join(pieces)
        return BatchPlan(keys, firsts, body)

    def stored(self, table: KeyTable, plan: BatchPlan, records: BatchRecords | None) -> First:
        """Remember the new messages of a batch, whose records are `records`. Return the response.

        The response has the ids of all messages, and the queue id and the queue offset of the first message.
        """
        answers: list[First] = []
        new = count()
        for key, first in zip(plan.keys, plan.firsts, strict=True):
            if first is None:
                assert records is not None
                number = next(new)
                message = TickMessage(
                    None, records.queue, b"", b"", 0, b"", None, _TRAITS,
                    size=records.sizes[number], physical_offset=records.physical_offsets[number],
                    queue_offset=records.queue_offset + number,
                    store_timestamp_ms=records.store_timestamp_ms,
                )  # fmt: skip
                answers.append(self._answer_of(message))
                if key:
                    self.add(table, key, message)
            else:
                table.duplicates += 1
                answers.append(answers[first] if isinstance(first, int) else first)
        ids = b",".join([answer.ids for answer in answers])
        return First(ids, answers[0].queue_id, answers[0].queue_offset)

    # -- metrics

    def collect(self, families: Families) -> None:
        """Add the metrics of all topics with a window."""
        config = self.config
        for topic, table in sorted(self.tables.items()):
            labels = {
                "cluster": config.broker_cluster_name, "node_type": "broker", "node_id": config.broker_name,
                "topic": topic,
            }  # fmt: skip
            for name, words, value in (
                ("duplicates", "Messages not stored, because their key was stored before.", table.duplicates),
                ("forgotten_keys", "Keys forgotten before their window ended.", table.forgotten),
            ):
                families.counter(f"cometmq_dedup_{name}", words, value, **labels)
            families.gauge("cometmq_dedup_keys", "Remembered keys of messages.", len(table), **labels)

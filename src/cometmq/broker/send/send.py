"""Sends: requests 10 and 310 (one message) and 320 (a batch), one-way or not.

A plain message takes a short path, which runs while the connection's data is read. This path needs the typed
header, one dictionary lookup for the topic, one for the stored form of the properties, and one object for the
store, which encodes all messages of an event-loop iteration at its end. All other messages (to a new topic or
a retry topic, with a delay or a delivery time, or part of a transaction) are passed to methods for their
kind. Most sends of a busy producer do not reach this module at all (see send_templates.py).

Budget: 12 µs of CPU time for a 1 KiB send with up to 64 in flight on a connection. Frame, header and store
take most of it, and this module about 3 µs.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.base.names import check_topic
from cometmq.broker.base.replies import Sender, recall_field, transaction_field
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms, time_text
from cometmq.broker.base.writer import Writer
from cometmq.broker.rates.rate_limits import Rates
from cometmq.broker.rates.throttle import SendThrottle
from cometmq.broker.send.dedup import Deduplication, First
from cometmq.broker.send.key_table import KeyTable
from cometmq.broker.send.retry import DLQ_QUEUES, RetryRules
from cometmq.broker.send.send_templates import SendTemplates
from cometmq.broker.send.stored_form import (
    StoredForm,
    StoredForms,
    cluster_pair,
    half_properties,
    is_transactional,
    routed_by_priority,
    sent_properties,
    stored_form,
    with_destination,
)
from cometmq.broker.send.timed import Timed, TimedSends, without_times
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.tables.topics import TopicTable, sys_flag_of_send
from cometmq.errors import CommandError
from cometmq.message import MessageExt
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    REVIVE_TOPIC_PREFIX,
    SCHEDULE_TOPIC,
    TBW102,
    TRANS_HALF_TOPIC,
    VERSION_4_9_7,
    Perm,
    RequestCode,
    ResponseCode,
    SysFlag,
    handles,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import SendMessageRequestHeader, SendMessageRequestHeaderV2
from cometmq.protocol.ids import pack_host
from cometmq.protocol.lite import DISPATCH, LITE_TOPIC, QUEUE_OFFSET, is_lite_parent
from cometmq.protocol.properties.values import (
    MAX_PROPERTIES_BYTES,
    append,
    drop,
    put,
    stored_tags_code,
    value_of,
)
from cometmq.protocol.record.one import properties_of
from cometmq.protocol.sql.java_values import Mismatch, to_int
from cometmq.protocol.timers import RECALL_FOUND
from cometmq.remoting import Connection, Shortcut
from cometmq.store import Appender, Clock, MessageStore, NotInMemory, StoreRefused, TickMessage, Traits
from cometmq.text import printable

BORN_V6 = int(SysFlag.BORN_HOST_V6)
MULTI_TAGS = int(SysFlag.MULTI_TAGS)
TRANSACTION_BITS = int(SysFlag.TRANSACTION_MASK)


class Place(NamedTuple):
    """The queue in which a message is stored, and the properties with which it is stored.

    `delay_ms` is set if the message waits for a delay level, and `timed` if the message waits for a delivery
    time.
    """

    topic: str
    queue_id: int
    properties: bytes
    delay_ms: int | None = None
    timed: Timed | None = None


class SendRules(NamedTuple):
    """The data of a topic that is needed to handle sends to the topic. This data is cached.

    The bits of `sys_flag` are added to the sysFlag of each message. `lite` means that the topic has lite
    topics. `dedup` are the keys of the topic's messages if sends to it are deduplicated. `rates` limits the
    sends to the topic, and `exempt` means that no limit of an account applies.
    """

    queue_limit: int
    write_queues: int
    sys_flag: int
    lite: bool
    dedup: KeyTable | None
    rates: Rates | None
    exempt: bool


@dataclass(eq=False)
class SendProcessor:
    """Handles the sends of a broker."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    retry_rules: RetryRules
    delays: DelayLevels
    stats: Stats
    writer: Writer
    timers: TimedSends
    dedup: Deduplication
    throttle: SendThrottle
    lite_properties: Callable[[str, bytes], bytes]
    """Returns the stored properties of a message to a topic that has lite topics. Raises CommandError."""

    def __post_init__(self) -> None:
        self._appender = self.store.appender
        self._cluster_pair = cluster_pair(self.config.broker_cluster_name)
        self._rules: dict[str, SendRules] = {}
        self._shared_form = lru_cache(maxsize=64)(self._form_of_batch)
        config = self.config
        self._forms = StoredForms(config.broker_cluster_name, config.region_id, config.trace_on)
        self.templates = SendTemplates(
            self.store.appender, self.store.queues, self._forms, self._half_properties
        )

    def shortcuts(self) -> dict[bytes, Shortcut]:
        """Return functions that may handle a request without decoding its header.

        Each key contains the first bytes of the headers that its function may handle.
        """
        return {b'{"code":310,': self.templates.send}

    def configure(self) -> None:
        self._forms.configure(self.config.region_id, self.config.trace_on)
        self.forget_rules()

    def forget_rules(self) -> None:
        """Drop the cached data of topics, because the topic table or a setting has changed."""
        self._rules.clear()
        self.templates.forget()

    @handles(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    def send_message(self, connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
        """Store one message or a batch. A batch is recognised by a header field, not by the request code."""
        header = frame.typed
        if type(header) is not SendMessageRequestHeaderV2:
            header = frame.header(SendMessageRequestHeader)
        rules = self._rules.get(header.topic) or self.admit(frame, header)
        if rules.rates is not None or self.throttle.limits.has_accounts:
            delay = self._delay(connection, frame, header, rules)
            if delay is not None:
                return self._send_later(delay, connection, frame)
        return self._send(connection, frame, header, rules)

    def _delay(
        self, connection: Connection, frame: Frame, header: SendMessageRequestHeader, rules: SendRules
    ) -> Awaitable[None] | None:
        """Return what a send must wait for because of a rate limit, or None."""
        limits, topic = self.throttle.limits, header.topic
        account = "" if rules.exempt else limits.account_of(frame)
        found = limits.of_send(topic, rules.rates, account)
        if not found or header.queue_id >= rules.queue_limit:
            return None
        return self.throttle.delay(connection, frame, topic, account, found, bool(header.batch))

    async def _send_later(self, delay: Awaitable[None], connection: Connection, frame: Frame) -> Frame | None:
        await delay
        return await self._send_again(connection, frame)

    async def _send_again(self, connection: Connection, frame: Frame) -> Frame | None:
        """Store a message or a batch that has waited, and for which its limits have been counted."""
        header = frame.header(SendMessageRequestHeader)
        rules = self._rules.get(header.topic) or self.admit(frame, header)
        answer = self._send(connection, frame, header, rules)
        return await answer if isinstance(answer, Awaitable) else answer

    def _send(
        self, connection: Connection, frame: Frame, header: SendMessageRequestHeader, rules: SendRules
    ) -> Frame | Awaitable[Frame | None] | None:
        queue_id = header.queue_id
        if queue_id >= rules.queue_limit:
            raise self.bad_queue(connection, frame, header)
        if queue_id < 0:
            queue_id = int(random.random() * rules.write_queues)
        if header.batch:
            return self._send_batch(connection, frame, header, queue_id, rules)
        if rules.dedup is not None:
            return self._send_once(connection, frame, header, queue_id, rules, rules.dedup)
        self._store(connection, frame, header, queue_id, rules)
        return None

    def _store(
        self,
        connection: Connection,
        frame: Frame,
        header: SendMessageRequestHeader,
        queue_id: int,
        rules: SendRules,
    ) -> TickMessage:
        """Store one message, whose sender the end of the tick answers."""
        topic = header.topic
        delay_ms, more = None, b""
        sys_flag = header.sys_flag | rules.sys_flag
        form, unique = self._forms.find(header.properties, frame.version)
        properties = form.before + unique + form.behind
        if not form.plain:
            properties, queue_id = routed_by_priority(properties, queue_id, rules.write_queues)
        asked_queue_id = queue_id
        if not form.plain or topic[0] == "%":
            place = self._redirect(frame, header, topic, queue_id, properties)
            if place.topic != topic or place.timed is not None:
                # Remove the transaction flags if the message is first stored in a topic other than its own.
                # This applies to half messages. It also applies to retries and dead letters, because old
                # clients send them with the flags of the original message.
                sys_flag &= ~TRANSACTION_BITS
            if place.timed is not None:
                return self._send_timed(connection, frame, header, place.timed, sys_flag, queue_id, form)
            if place.topic == TRANS_HALF_TOPIC:
                if compat.is_5x(frame.version):
                    more = transaction_field(value_of(place.properties, b"UNIQ_KEY"))
                if topic[0] != "%" and not rules.lite and rules.rates is None:
                    self.templates.look(frame, header, sys_flag)
            topic, queue_id, properties, delay_ms, _ = place
        elif rules.dedup is None and rules.rates is None:
            self.templates.look(frame, header, sys_flag)
        appender = self._appender
        try:
            queue = appender.queue_of(topic, queue_id)
        except StoreRefused as refusal:
            raise self._refused(refusal) from None
        sender: Sender | None = None
        if not frame.is_oneway:
            sender = Sender(connection, b"%d" % frame.opaque, asked_queue_id, form.waits, more)
        traits = Traits(
            flag=header.flag, sys_flag=sys_flag, reconsume_times=header.reconsume_times or 0,
            tags_code=form.tags_code, delay_ms=delay_ms,
        )  # fmt: skip
        message = TickMessage(
            sender, queue, frame.body, properties, header.born_timestamp, connection.peer_host,
            unique if form.only_key else None, traits,
        )  # fmt: skip
        appender.enqueue(message)
        return message

    def _send_once(
        self,
        connection: Connection,
        frame: Frame,
        header: SendMessageRequestHeader,
        queue_id: int,
        rules: SendRules,
        table: KeyTable,
    ) -> Awaitable[Frame | None] | None:
        """Store one message, unless a message with its key was stored within the window of the topic."""
        form, unique = self._forms.find(header.properties, frame.version)
        properties = form.before + unique + form.behind
        # Of the messages of transactions, those that are committed count (transactions/records.py).
        is_half = not form.plain and is_transactional(properties, header.reconsume_times or 0)
        key = b"" if is_half else table.key_of(properties)
        try:
            first = self.dedup.find(table, key) if key else None
        except NotInMemory:
            return self._send_after_reading(connection, frame, table, [key])
        if first is not None:
            self.dedup.repeat(connection, frame, table, first, waits=form.waits)
            return None
        message = self._store(connection, frame, header, queue_id, rules)
        if key:
            self.dedup.add(table, key, message)
        return None

    async def _send_after_reading(
        self, connection: Connection, frame: Frame, table: KeyTable, keys: Sequence[bytes]
    ) -> Frame | None:
        """Handle a send once the records of the first sends with its keys, which are on disk, are read."""
        async with self.dedup.reading(table, keys):
            return await self._send_again(connection, frame)

    def _send_timed(
        self,
        connection: Connection,
        frame: Frame,
        header: SendMessageRequestHeader,
        timed: Timed,
        sys_flag: int,
        queue_id: int,
        form: StoredForm,
    ) -> TickMessage:
        """Store a message with a delivery time. The response contains the recall handle."""
        try:
            message = self.timers.append(
                timed, frame.body, flag=header.flag, sys_flag=sys_flag,
                born_timestamp_ms=header.born_timestamp, born_host=connection.peer_host,
                reconsume_times=header.reconsume_times or 0,
            )  # fmt: skip
        except StoreRefused as refusal:
            raise self._refused(refusal) from None
        replies, opaque, more = self.writer.replies, frame.opaque, recall_field(self.timers.handle(timed))

        def answer(code: int, remark: str | None) -> None:
            if remark is None and not timed.code.recall:
                self.tables.timers.count(timed.topic, 1)
            if frame.is_oneway:
                return
            if remark is not None:
                connection.respond(frame, code, remark=remark)
                return
            ids = replies.message_id(message.physical_offset)
            connection.write(replies.reply(code, opaque, ids, queue_id, message.queue_offset, more))

        self.writer.appended(answer, form.waits)
        return message

    def _send_batch(
        self,
        connection: Connection,
        frame: Frame,
        header: SendMessageRequestHeader,
        queue_id: int,
        rules: SendRules,
    ) -> Frame | Awaitable[Frame | None] | None:
        """Store the messages of a batch in one queue, with consecutive offsets: all or none.

        If sends to the topic are deduplicated, only the new messages are stored.
        """
        problem = ""
        if header.topic.startswith(RETRY_PREFIX):
            problem = f"batch request does not support retry group {header.topic}"
        elif rules.lite:
            problem = f"batches are not supported by {header.topic}, which has lite topics"
        elif header.sys_flag & TRANSACTION_BITS:
            problem = "a batch cannot be part of a transaction, but its sysFlag marks it as one"
        if problem:
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, problem)
        shared, waits = self._shared_form(header.properties, compat.spreads_batch_properties(frame.version))
        born_host = connection.peer_host
        sys_flag = header.sys_flag | rules.sys_flag | (BORN_V6 if len(born_host) != 8 else 0)
        plan, body, table, batch = None, frame.body, rules.dedup, None
        keys = [] if table is None else self.dedup.keys_of_batch(table, bytes(body))
        if table is not None and any(keys):
            try:
                plan = self.dedup.plan(table, keys, bytes(body))
            except NotInMemory:
                return self._send_after_reading(connection, frame, table, keys)
            body = plan.body
        if plan is None or body:
            try:
                batch = self.store.appender.append_batch(
                    header.topic, queue_id, body, shared, sys_flag=sys_flag,
                    born_timestamp_ms=header.born_timestamp, born_host=born_host,
                    reconsume_times=header.reconsume_times or 0,
                )  # fmt: skip
            except StoreRefused as refusal:
                raise self._refused(refusal) from None
        if table is not None and plan is not None:
            answer = self.dedup.stored(table, plan, batch)
        else:
            assert batch is not None
            ids = self.writer.replies.message_ids(batch.physical_offsets)
            answer = First(ids, queue_id, batch.queue_offset)
        self.dedup.respond(connection, frame, answer, waits=waits)
        return None

    def _form_of_batch(self, sent: str | None, spreads: bool) -> tuple[bytes, bool]:
        """Return the properties that a batch adds to each of its messages, and whether its sender waits.

        `sent` are the batch's own properties. With `spreads`, they, and even WAIT, are added, as by Apache's
        broker 4.9. Raises CommandError.
        """
        properties = sent_properties(sent)
        _, waits = stored_form(properties, self._cluster_pair)
        shared = self._cluster_pair
        return append(drop(properties, b"CLUSTER"), shared) if spreads else shared, waits

    def _refused(self, refusal: StoreRefused) -> CommandError:
        self.stats.put_failed += 1
        return CommandError(refusal.response_code, refusal.remark)

    def admit(self, frame: Frame, header: SendMessageRequestHeader) -> SendRules:
        """Check a send to a topic whose data is not cached. Create the topic if allowed, and cache it."""
        config, now_ms = self.config, self.clock.time_ms()
        until = config.start_accept_send_request_time_stamp
        if now_ms < until:
            raise CommandError.failed(
                f"broker unable to service, until {time_text(until)}, for {(until - now_ms) // 1000} s more "
                "(startAcceptSendRequestTimeStamp)"
            )
        topics = self.tables.topics
        topic = header.topic
        if not config.broker_permission & Perm.WRITE and topics.is_order(topic):
            why = f"the broker[{config.broker_ip1}] sending message is forbidden"
            raise CommandError(ResponseCode.NO_PERMISSION, why)
        wanted = 4 if header.default_topic_queue_nums is None else header.default_topic_queue_nums
        known = topic_of_send(topics, topic, frame.version, header.default_topic, wanted, header.unit_mode)
        exempt = topic[0] == "%" or topics.is_system(topic) or topic == config.msg_trace_topic_name
        rules = SendRules(
            max(known.read_queue_nums, known.write_queue_nums),
            known.write_queue_nums,
            MULTI_TAGS if known.topic_filter_type == "MULTI_TAG" else 0,
            is_lite_parent(known.attributes),
            self.dedup.table_of(known),
            None if exempt else self.throttle.limits.topic_rates(known),
            exempt,
        )
        self._rules[topic] = rules
        return rules

    def bad_queue(
        self, connection: Connection, frame: Frame, header: SendMessageRequestHeader
    ) -> CommandError:
        known = self.tables.topics.get(header.topic)
        return CommandError(
            compat.invalid_parameter(frame.version),
            f"request queueId[{header.queue_id}] is illegal, {known} Producer: {connection.peer}",
        )

    def _redirect(
        self, frame: Frame, header: SendMessageRequestHeader, topic: str, queue_id: int, properties: bytes
    ) -> Place:
        """Return where a message is first stored. Raises CommandError if it is refused.

        The queue differs from that of the send if the message is a dead letter, a half message, or a message
        with a delay level.
        """
        if topic not in self._rules or not self._rules[topic].lite:
            return self._place(frame, header, topic, queue_id, properties)
        for name in (DISPATCH, QUEUE_OFFSET):  # Only the broker sets them, for messages of lite topics
            properties = drop(properties, name)
        place = self._place(frame, header, topic, queue_id, properties)
        if place.topic == topic and place.timed is None:
            return place._replace(properties=self.lite_properties(topic, place.properties))
        if value_of(properties, LITE_TOPIC):
            why = "a message of a lite topic cannot have a delivery time or be part of a transaction"
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)
        return place

    def _place(
        self, frame: Frame, header: SendMessageRequestHeader, topic: str, queue_id: int, properties: bytes
    ) -> Place:
        if topic.startswith(RETRY_PREFIX):
            group = topic[len(RETRY_PREFIX) :]
            rules, version = self.retry_rules, frame.version
            maximum = rules.maximum(rules.group(group), header.max_reconsume_times, version)
            times, now_ms = header.reconsume_times or 0, mono_ms(self.clock)
            if rules.is_dead_by_send(group, times, maximum, version, now_ms):
                self.tables.topics.ensure(DLQ_PREFIX + group, DLQ_QUEUES)
                level = compat.level_of_dead_letter(version)
                return Place(DLQ_PREFIX + group, 0, put(properties, b"DELAY", level))
        half = self._half_properties(frame, header, queue_id, properties)
        if half is not None:
            return Place(TRANS_HALF_TOPIC, 0, half)
        place = delayed(self.delays, topic, queue_id, properties)
        if place.delay_ms is not None:
            return place._replace(properties=without_times(place.properties))
        timed = self.timers.timed(topic, queue_id, drop(properties, RECALL_FOUND))
        return place._replace(timed=timed)

    def _half_properties(
        self, frame: Frame, header: SendMessageRequestHeader, queue_id: int, properties: bytes
    ) -> bytes | None:
        """Return the stored properties of a half message, or None for any other message."""
        if not is_transactional(properties, header.reconsume_times or 0):
            return None
        if self.config.reject_transaction_message:
            why = f"the broker[{self.config.broker_ip1}] sending transaction message is forbidden"
            raise CommandError(ResponseCode.NO_PERMISSION, why)
        self.tables.topics.ensure(TRANS_HALF_TOPIC, 1)
        half = half_properties(header.topic, queue_id, properties)
        return compat.half_properties(frame.version, half)


def topic_of_send(
    topics: TopicTable,
    topic: str,
    version: int,
    default_topic: str | None,
    queue_nums: int,
    unit_mode: bool | None,
) -> TopicConfig:
    """Return the configuration of a send's topic, which is created if allowed. Raises CommandError."""
    check_topic(topic, version)
    if not topics.is_sendable(topic):
        raise CommandError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")
    known = topics.get(topic)
    if known is None:
        flag = sys_flag_of_send(topic, unit_mode)
        known = topics.create_by_send(topic, default_topic, queue_nums, flag)
        if known is None and topic.startswith(RETRY_PREFIX):
            known = topics.ensure(topic, 1, sys_flag=flag)
    if known is None:
        raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
    return known


def destination(topics: TopicTable, properties: bytes) -> tuple[str, int]:
    """Return the destination (topic, queue id) of a message that has waited in another topic.

    As for a send, the topic is checked and may be created. If the queue no longer exists, another queue is
    chosen. Raises CommandError if the message cannot be stored in its destination.
    """
    topic = value_of(properties, b"REAL_TOPIC").decode("utf-8", "replace")
    queue_text = value_of(properties, b"REAL_QID").decode("utf-8", "replace")
    return checked_destination(topics, topic, queue_text)


def checked_destination(topics: TopicTable, topic: str, queue_text: str) -> tuple[str, int]:
    """Return the `destination` of a message with these properties REAL_TOPIC and REAL_QID ("" if absent)."""
    if not topic or not queue_text.isdecimal() or len(queue_text) > 10:
        why = f"it has no destination: topic {topic or None}, queue {queue_text or None}"
        raise CommandError.failed(why)
    queue_id = int(queue_text)
    # Clients may not send to the revive log, but Apache's broker leaves records for it in the timer topic.
    known = topics.get(topic) if topic.startswith(REVIVE_TOPIC_PREFIX) else None
    if known is None:
        known = topic_of_send(topics, topic, VERSION_4_9_7, TBW102, max(queue_id + 1, 4), False)
    queues = max(known.read_queue_nums, known.write_queue_nums)
    if queue_id < queues:
        return topic, queue_id
    if not known.write_queue_nums:
        why = f"topic {topic} has no queue {queue_id}, and none to write to"
        raise CommandError.failed(why)
    return topic, queue_id % known.write_queue_nums


def delayed(delays: DelayLevels, topic: str, queue_id: int, properties: bytes) -> Place:
    """Return where a message is stored: in its own queue or, with a delay level, in the schedule topic."""
    text = value_of(properties, b"DELAY").decode("utf-8", "replace")
    try:
        level = delays.effective(to_int(text)) if text else 0
    except Mismatch:
        why = f"property DELAY is not a number: {printable(text, 40)}"
        raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why) from None
    if level == 0:
        return Place(topic, queue_id, properties)
    if text != str(level):
        properties = put(properties, b"DELAY", b"%d" % level)
    properties = with_destination(properties, topic, queue_id)
    return Place(SCHEDULE_TOPIC, level - 1, properties, delays.delay_ms(level))


def fitting(place: Place, record: bytes) -> Place:
    """Return the place of a retry or dead letter, with the properties of its record if those are too long."""
    if len(place.properties) <= MAX_PROPERTIES_BYTES or place.delay_ms is not None:
        return place
    return place._replace(properties=drop(properties_of(record), b"POP_CK"))


def move(
    appender: Appender,
    message: MessageExt,
    place: Place,
    reconsume_times: int,
    prepared_position: int = 0,
    tags_code: int | None = None,
    *,
    makes_room: bool = False,
) -> TickMessage:
    """Store a copy of a message of the log in another queue. Raises StoreRefused.

    Args:
        prepared_position: The log position of the half message, if the message belongs to a transaction.
        tags_code: The tags code of the new record; None for the hash of the TAGS property.
        makes_room: See `Appender.append`.
    """
    return appender.append(
        place.topic, place.queue_id, message.body, place.properties,
        flag=message.flag, sys_flag=message.sys_flag,
        born_timestamp_ms=message.born_timestamp_ms, born_host=pack_host(message.born_host),
        reconsume_times=reconsume_times, prepared_transaction_offset=prepared_position,
        tags_code=stored_tags_code(place.properties) if tags_code is None else tags_code,
        delay_ms=place.delay_ms, stored_before=True, makes_room=makes_room,
    )  # fmt: skip

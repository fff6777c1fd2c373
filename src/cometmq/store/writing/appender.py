"""The encoding of messages into the log's write buffer, with all checks that precede it.

Usually all messages of a loop iteration are encoded together. The clock is then read once, for the store time
of all, and no function is called per message.

Budget: 1.5 µs for a 1 KiB message, of which the header of the record takes 0.3 µs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, final

import msgspec

from cometmq import logs
from cometmq.protocol.checksum import crc32
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.key_hashes import Keys
from cometmq.protocol.properties.key_hashes import key_prefix as key_prefix_of
from cometmq.protocol.record.framing import ENTRY_SIZE, encode_entry_head
from cometmq.protocol.record.layout import BLANK_SIZE, COMMITTED, ROLLBACK, TRANSACTION_MASK
from cometmq.protocol.record.one import head_of, topic_part
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import SLAVE, StoreConfig
from cometmq.store.base.refusal import Flag, RunningFlags, StoreRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.writing.batch_items import Common, Items, batch_items

log = logs.logger(__name__)

REFUSED = -1  # the `size` of a message that was refused
_PIECES = 5  # Number of byte strings of which a record consists
_MAX_TOPIC_BYTES = 255
_MAX_PROPERTIES_BYTES = 32_767
# Maximum size, in bytes, of a body that is copied, so that its message can be encoded together with others. A
# longer body is encoded immediately from the receive buffer.
COPIED = 16 * 1024
MAX_PENDING_MESSAGES = 512
# Maximum total size, in bytes, of encoded records that are joined and moved at once. Larger records are moved
# piece by piece, which saves a copy.
JOIN_LIMIT = 256 * 1024
_length = struct.Struct(">H").pack


Body: TypeAlias = bytes | bytearray | memoryview


class Traits(msgspec.Struct, frozen=True, gc=False):
    """The values that many messages have in common. `Appender.append` documents the fields."""

    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    tags_code: int = 0
    store_host: bytes | None = None
    delay_ms: int | None = None


class TickMessage(msgspec.Struct, gc=False):
    """A message to append. It holds the data to encode and, after the encoding, the location of the record.

    Consecutive messages that share one `Traits` object are encoded faster. Times are in ms.
    """

    sender: Any
    """Receives the outcome. Messages without a sender are reported only when they are refused."""
    queue: ConsumeQueue
    body: Body
    """The body of the message. It is emptied once it has been encoded."""
    properties: bytes
    born_timestamp_ms: int
    born_host: bytes
    keys: Keys
    traits: Traits
    prepared_position: int = 0
    """The log position that the record refers to: for a committed message, that of its half message; or 0."""
    size: int = 0
    """The size of the record in bytes; 0 before it is encoded, REFUSED if it was refused."""
    physical_offset: int = 0
    queue_offset: int = 0
    tags_code: int = 0
    store_timestamp_ms: int = 0
    in_queue: bool = True
    """Whether the record gets a unit in its consume queue. Half messages and rollbacks get none."""


class Refused(NamedTuple):
    """A message that was not encoded, and the reason."""

    message: TickMessage
    refusal: StoreRefused


@final
class BatchRecords(NamedTuple):
    """The encoded records of a batch send, kept until they are visible. Plural fields have one value each."""

    queue: ConsumeQueue
    key_prefix: int
    queue_offset: int
    """The queue offset of the first record in the batch."""
    physical_offsets: list[int]
    sizes: list[int]
    tags_codes: Sequence[int]
    store_timestamp_ms: int
    properties: Callable[[], Sequence[bytes]]
    """A function that creates the properties of all records. It is called only if they are needed."""
    keys: Sequence[bytes] | None
    """The key of each record if each has only one key. None if the keys must be read from the properties."""

    def part(self, start: int, stop: int) -> BatchRecords:
        """Return the records with the indexes from `start` to before `stop`."""
        part, properties, keys = slice(start, stop), self.properties, self.keys
        return self._replace(
            queue_offset=self.queue_offset + start,
            physical_offsets=self.physical_offsets[part],
            sizes=self.sizes[part],
            tags_codes=self.tags_codes[part],
            properties=lambda: properties()[part],
            keys=None if keys is None else keys[part],
        )


EncodedGroup = list[TickMessage] | BatchRecords
"""Consecutive records in the log's write buffer."""


class SizeLimits(NamedTuple):
    """The maximum sizes of a message's parts, in bytes."""

    body: int
    record: int


class EncodedTick(NamedTuple):
    """The encoded records in the order of the log, those messages with a sender, and the refused messages."""

    groups: list[EncodedGroup]
    placed: list[TickMessage]
    refused: list[Refused]


class EntryTail:
    """The newest entries of a raft log, from index `first` on, which are not in the index of the log yet.

    The index contains only durable entries. Each attribute with a plural name has one value per entry;
    positions and sizes are those of whole entries. `term` is the current term, for new entry headers.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.terms: list[int] = []
        self.term = -1

    @property
    def next(self) -> int:
        """The index that the next appended entry gets."""
        return self.first + len(self.positions)

    def head(self, position: int, record_size: int) -> bytes:
        """Add the next entry, which begins at log position `position`. Return the entry's header."""
        head = encode_entry_head(self.first + len(self.positions), self.term, position, record_size)
        self.positions.append(position)
        self.sizes.append(record_size + ENTRY_SIZE)
        self.terms.append(self.term)
        return head

    def remove_last(self, count: int) -> None:
        for column in (self.positions, self.sizes, self.terms):
            del column[len(column) - count :]

    def forget(self, count: int) -> None:
        """Remove the first `count` entries, because the index on disk contains them."""
        for column in (self.positions, self.sizes, self.terms):
            del column[:count]
        self.first += count


class Appender:
    """Encodes messages into the write buffer of the commit log. All methods must be called on the loop."""

    __slots__ = (
        "_encoded", "_first_unput", "_flags", "_gap", "_groups", "_log", "_queues", "_refused", "_time_ms",
        "entries", "limits", "pending", "store_host", "why_closed",
    )  # fmt: skip

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        clock: Clock,
        config: StoreConfig,
        flags: RunningFlags,
    ) -> None:
        self._log = commit_log
        self._gap = commit_log.framing.gap
        self.entries = EntryTail(0)  # In a raft log, the entries that contain the records; otherwise unused
        self._queues = queues
        self._time_ms = clock.time_ms
        self._flags = flags
        self.why_closed = "this broker is a slave, send to its master" if config.broker_role == SLAVE else ""
        self.pending: list[TickMessage] = []  # Messages to encode. The list object is never replaced.
        self._refused: list[Refused] = []
        self._encoded: list[TickMessage] = []
        self._first_unput = 0  # Index in `_encoded` of the first record that is not in the write buffer yet
        # Groups of unwritten records. New records are added to the last group only.
        self._groups: list[EncodedGroup] = [self._encoded]
        self.store_host = b"\x7f\0\0\1\0\0\x2a\x9f"  # 127.0.0.1:10911; the broker sets its real address
        self.set_max_message_size(config.max_message_size)

    def set_max_message_size(self, size: int) -> None:
        """Apply the setting maxMessageSize, in bytes. It may change while the store runs."""
        self.limits = SizeLimits(size, min(size + 65_536, self._max_record_bytes))

    @property
    def limits_within_store(self) -> SizeLimits:
        """The maximum sizes of messages that the store has accepted before, also above maxMessageSize."""
        return SizeLimits(self._max_record_bytes, self._max_record_bytes)

    @property
    def _max_record_bytes(self) -> int:
        """The size of the largest record that fits into a segment."""
        return self._log.segment_size - BLANK_SIZE - self._gap

    def end_tick(self) -> EncodedTick:
        """Encode pending messages, and return all records since the previous call."""
        self.encode_pending()
        groups, refused = self._groups, self._refused
        if not groups[-1]:
            groups.pop()
        lists = [group for group in groups if type(group) is list]
        placed = [message for group in lists for message in group if message.sender is not None]
        self._encoded = []
        self._groups = [self._encoded]
        self._refused = []
        return EncodedTick(groups, placed, refused)

    def roll_back(self, groups: list[EncodedGroup]) -> None:
        """Free the queue offsets and raft entry indexes of records that could not be written."""
        if self._gap:
            self.entries.remove_last(
                sum(len(group.sizes if type(group) is BatchRecords else group) for group in groups)
            )
        for group in reversed(groups):
            if type(group) is BatchRecords:
                group.queue.next_offset = group.queue_offset
                continue
            for message in reversed(group):
                if message.in_queue:
                    message.queue.next_offset = message.queue_offset

    def append(
        self,
        topic: str,
        queue_id: int,
        body: Body,
        properties: bytes,
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        tags_code: int = 0,
        index_keys: Keys = None,
        store_host: bytes | None = None,
        delay_ms: int | None = None,
        stored_before: bool = False,
        makes_room: bool = False,
    ) -> TickMessage:
        """Encode one message, to be written by the next commit. `body` is copied immediately.

        Args:
            prepared_transaction_offset: The log position that the record refers to: for a message that a
                commit stores, that of the half message.
            index_keys: The keys to index; None for those in the properties.
            delay_ms: For a delayed message, the delay. The message's consume-queue unit then contains the
                delivery time (store time plus delay) instead of a tags hash.
            stored_before: Whether the store has accepted the message before, such as a half message that is
                now committed. Then maxMessageSize, which may have been lowered since, does not apply.
            makes_room: Whether the message is a copy whose original is in a segment to be deleted. Then it
                is accepted even if the disk is full.

        Raises StoreRefused. Then nothing has changed.
        """
        queue = self.queue_of(topic, queue_id)
        traits = Traits(flag, sys_flag, reconsume_times, tags_code, store_host, delay_ms)
        message = TickMessage(
            None, queue, body, properties, born_timestamp_ms, born_host, index_keys, traits,
            prepared_transaction_offset,
        )  # fmt: skip
        limits = self.limits_within_store if stored_before else self.limits
        for refusal in self.append_all([message], limits, makes_room=makes_room).values():
            raise refusal
        return message

    def append_all(
        self, messages: list[TickMessage], limits: SizeLimits, *, makes_room: bool = False
    ) -> dict[int, StoreRefused]:
        """Encode messages that have no sender, after all pending messages. Their queues are not `deleted`.

        The refusal of one message does not affect the others. Returns the refusals, by index in `messages`.
        """
        self.encode_pending()
        known = len(self._refused)
        self._encode_or_refuse(messages, limits, makes_room=makes_room)
        refusals = {id(message): refusal for message, refusal in self._refused[known:]}
        del self._refused[known:]
        if not refusals:
            return {}
        return {number: refusals[id(each)] for number, each in enumerate(messages) if id(each) in refusals}

    def append_batch(
        self,
        topic: str,
        queue_id: int,
        body: Body,
        properties: bytes,
        *,
        sys_flag: int = 0,
        born_timestamp_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        store_host: bytes | None = None,
    ) -> BatchRecords:
        """Encode the messages of a batch send, to be written by the next commit.

        Either all messages are accepted, in one segment, or none. As in 4.9, the `properties` of the request
        are added to those of every message. Raises StoreRefused.
        """
        self.encode_pending()
        self._refuse_if_closed()
        if len(body) > self.limits.body:
            _refuse_size(self.limits, len(body), 0, 0)
        items = batch_items(body, properties)
        if items.stray_separator:
            why = "a property name or value contains a separator (0x01 or 0x02)"
            raise StoreRefused(ResponseCode.MESSAGE_ILLEGAL, why)
        queue = self._queues.get_or_make(topic, queue_id)
        topic_bytes = queue.record_topic or self._record_topic(queue)
        host = self.store_host if store_host is None else store_host
        head, sys_flag = head_of(born_host, host, sys_flag)
        sizes = items.sizes(head.size + len(topic_bytes) + 2)
        total = sum(sizes) + self._gap * len(sizes)
        if max(sizes) > self.limits.record or items.longest_properties > _MAX_PROPERTIES_BYTES:
            self._refuse_member(items, sizes)
        if total + BLANK_SIZE > self._log.segment_size:
            _refuse_size(self.limits, len(body), 0, total)
        self._claim(total)
        now = self._time_ms()
        offset = queue.next_offset
        positions = self._positions(sizes)
        rest = (sys_flag, born_timestamp_ms, born_host, now, host, reconsume_times, 0)
        common = Common(head, queue.magic, queue_id, offset, rest, topic_bytes)
        try:
            records = items.records(common, sizes, positions)
        except struct.error as problem:
            raise _illegal_number(problem) from None
        self._log.put(self._framed(records, sizes, positions) if self._gap else records)
        queue.next_offset = offset + len(sizes)
        codes, keys = items.codes_and_keys()
        appended = BatchRecords(
            queue, queue.key_prefix, offset, positions, sizes, codes, now, items.properties(), keys
        )
        if not self._encoded:
            self._groups.pop()
        self._encoded = []
        self._groups += (appended, self._encoded)
        return appended

    def _positions(self, sizes: list[int]) -> list[int]:
        """Return the log positions that consecutive records of the given sizes get at the end of the log."""
        gap = self._gap
        steps = [size + gap for size in sizes[:-1]] if gap else sizes[:-1]
        return list(accumulate(steps, initial=self._log.next + gap))

    def _framed(self, records: bytes, sizes: list[int], positions: list[int]) -> bytes:
        """Put the header of a raft entry before each of the joined records."""
        pieces: list[bytes] = []
        at = 0
        for size, position in zip(sizes, positions, strict=True):
            pieces += (self.entries.head(position - self._gap, size), records[at : at + size])
            at += size
        return b"".join(pieces)

    def _refuse_member(self, items: Items, records: list[int]) -> None:
        """Raise StoreRefused for the first oversized message of a batch."""
        for body, text, record in zip(items.bodies, items.properties()(), records, strict=True):
            if len(text) > _MAX_PROPERTIES_BYTES or record > self.limits.record:
                _refuse_size(self.limits, len(body), len(text), record)

    def queue_of(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue of a topic and queue id, created if necessary. Raises StoreRefused."""
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            self._refuse_if_closed()
            queue = self._queues.get_or_make(topic, queue_id)
        return queue

    def enqueue(self, message: TickMessage) -> None:
        """Queue a message to be encoded, and copy its body. `end_tick` returns its outcome.

        The message's queue must not be `deleted` before the message is encoded.
        """
        pending = self.pending
        pending.append(message)
        body = message.body
        if len(body) > COPIED or len(pending) >= MAX_PENDING_MESSAGES:
            self.encode_pending()
        else:
            message.body = bytes(body)

    def waiting(self) -> bool:
        """Return whether `end_tick` has anything to return."""
        return bool(self.pending or self._groups[0] or self._refused)

    def encode_pending(self) -> None:
        """Encode the pending messages. Their encoding determines the next positions in queues and log."""
        if self.pending:
            messages = self.pending.copy()
            self.pending.clear()
            self._encode_or_refuse(messages, self.limits)

    def _encode_or_refuse(
        self, messages: list[TickMessage], limits: SizeLimits, *, makes_room: bool = False
    ) -> None:
        self._first_unput = len(self._encoded)
        try:
            self._refuse_if_closed(makes_room=makes_room)
            self._encode(messages, limits)
        except BaseException as error:
            self._refuse_rest(messages, error)
            if not isinstance(error, Exception):
                raise

    def _refuse_rest(self, messages: list[TickMessage], error: BaseException) -> None:
        """Drop the records that are not in the write buffer yet, and refuse all that then have no record."""
        if isinstance(error, StoreRefused):
            refusal = error
        else:  # A lack of memory or a bug. It may affect only these messages, so the store stays usable.
            log.error("encoding a batch of messages failed", exc_info=error)
            refusal = StoreRefused(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
        lost = self._encoded[self._first_unput :]
        self.roll_back([lost])
        for message in lost:
            message.size = 0
        del self._encoded[self._first_unput :]
        self._refused += [Refused(message, refusal) for message in messages if message.size == 0]

    def _encode(self, messages: list[TickMessage], limits: SizeLimits) -> None:
        log, gap = self._log, self._gap
        now = self._time_ms()
        max_body, max_record = limits
        encoded = self._encoded.append
        pieces: list[Body] = []
        position, room = log.next + gap, log.room()
        last: Traits | None = None
        host_length = 0
        for message in messages:
            queue, body, properties = message.queue, message.body, message.properties
            born_host, traits = message.born_host, message.traits
            if traits is not last or len(born_host) != host_length:
                last, host_length = traits, len(born_host)
                flag, reconsume_times = traits.flag, traits.reconsume_times
                store_host = traits.store_host or self.store_host
                tags_code = traits.tags_code if traits.delay_ms is None else now + traits.delay_ms
                head, sys_flag = head_of(born_host, store_host, traits.sys_flag)
                pack_head, head_size = head.pack, head.size
                kind = sys_flag & TRANSACTION_MASK
                in_queue = kind in (0, COMMITTED)
            try:
                topic = queue.record_topic or self._record_topic(queue)
                body_length = len(body)
                properties_length = len(properties)
                size = head_size + body_length + len(topic) + 2 + properties_length
                if body_length > max_body or properties_length > _MAX_PROPERTIES_BYTES or size > max_record:
                    _refuse_size(limits, body_length, properties_length, size)
                if position + size > room:
                    self._put(pieces)
                    self._claim(size + gap)
                    position, room = log.next + gap, log.room()
                queue_offset = queue.next_offset if in_queue else 0
                pieces += (
                    pack_head(
                        size, queue.magic, crc32(body) & 0x7FFFFFFF, queue.queue_id, flag, queue_offset,
                        position, sys_flag, message.born_timestamp_ms, born_host, now, store_host,
                        reconsume_times, message.prepared_position, body_length,
                    ),
                    body, topic, _length(properties_length), properties,
                )  # fmt: skip
                if gap:
                    pieces.insert(-_PIECES, self.entries.head(position - gap, size))
            except struct.error as problem:
                self._refuse(message, _illegal_number(problem))
                continue
            except StoreRefused as refusal:
                # The traceback is dropped, because its frames would keep all messages of the batch in memory.
                self._refuse(message, refusal.with_traceback(None))
                continue
            if in_queue:
                queue.next_offset = queue_offset + 1
            else:
                message.in_queue = False
                if kind == ROLLBACK:
                    message.keys = ()
            message.body = b""
            message.size, message.physical_offset, message.queue_offset = size, position, queue_offset
            message.tags_code, message.store_timestamp_ms = tags_code, now
            encoded(message)
            position += size + gap
        self._put(pieces)

    def _refuse(self, message: TickMessage, refusal: StoreRefused) -> None:
        message.size = REFUSED
        self._refused.append(Refused(message, refusal))

    def _claim(self, size: int) -> None:
        try:
            self._log.claim(size)
        except OSError as failure:
            why = f"create mapped file failed, server is busy or broken. ({failure.strerror or failure})"
            raise StoreRefused(ResponseCode.SYSTEM_ERROR, why) from failure

    def _put(self, pieces: list[Body]) -> None:
        """Move encoded records to the log's write buffer."""
        if sum(map(len, pieces)) <= JOIN_LIMIT:
            self._log.put(b"".join(pieces))
        else:
            for piece in pieces:
                self._log.put(piece)
        pieces.clear()
        self._first_unput = len(self._encoded)

    def _refuse_if_closed(self, *, makes_room: bool = False) -> None:
        if self.why_closed:
            why = f"no messages are accepted: {self.why_closed}"
            raise StoreRefused(ResponseCode.SERVICE_NOT_AVAILABLE, why)
        reasons = self._flags.reasons
        if reasons and not (makes_room and reasons.keys() == {Flag.DISK_FULL}):
            why = f"the store accepts no messages: {self._flags.why()}"
            raise StoreRefused(ResponseCode.SERVICE_NOT_AVAILABLE, why)

    def _record_topic(self, queue: ConsumeQueue) -> bytes:
        """Return length and name of the topic for the records of a queue, or raise StoreRefused."""
        siblings = self._queues.of_topic(queue.topic)
        known = next((each for each in siblings if each.record_topic), None)
        if known is None:
            text, magic = topic_part(queue.topic)
            if len(text) > _MAX_TOPIC_BYTES + 2:
                why = f"topic of {len(text)} bytes is longer than {_MAX_TOPIC_BYTES}"
                raise StoreRefused(ResponseCode.MESSAGE_ILLEGAL, why)
            prefix = key_prefix_of(queue.topic)
        else:
            text, magic, prefix = known.record_topic, known.magic, known.key_prefix
        queue.record_topic, queue.magic, queue.key_prefix = text, magic, prefix
        return text


def _refuse_size(limits: SizeLimits, body: int, properties: int, record: int) -> None:
    raise StoreRefused(
        ResponseCode.MESSAGE_ILLEGAL,
        "the message is illegal, maybe msg body or properties length not matched. "
        f"msg body length limit {limits.body}B, msg properties length limit 32KB; "
        f"this one has {body}B, {properties}B and {record}B as a record",
    )


def _illegal_number(problem: struct.error) -> StoreRefused:
    return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, f"a number does not fit the record: {problem}")

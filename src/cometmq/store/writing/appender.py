"""From a message's parts to its bytes in the tick buffer, with every check that must come before.

Messages are gathered and encoded in one run, mostly that of the whole tick: with one look at the clock, which
is the time when they are stored, and without what a call for each would cost.

Budget: 1.5 µs for a 1 KiB message, of which its head takes 0.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import msgspec

from cometmq import logs
from cometmq.protocol.checksum import crc32
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.keys import Keys
from cometmq.protocol.properties.keys import key_prefix as key_prefix_of
from cometmq.protocol.record.layout import BLANK_SIZE, COMMITTED, ROLLBACK, TRANSACTION_MASK
from cometmq.protocol.record.one import head_of, topic_part
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import SLAVE, StoreConfig
from cometmq.store.base.flags import RunningFlags
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog

log = logs.logger(__name__)

_TOPIC_MAX = 255
PROPERTIES_MAX = 32_767
# Bodies of up to so many bytes wait for their encoding, with at most so many other messages. A longer one is
# encoded at once, from where it was received.
COPIED = 16 * 1024
MOST_GATHERED = 512
# Up to so many bytes encoded records are joined; a larger lot is moved piece by piece, without one more copy.
JOIN_LIMIT = 256 * 1024
_LENGTH = struct.Struct(">H")
_length = _LENGTH.pack


class Appended(msgspec.Struct, gc=False):
    """Where a message went: log position, queue offset, record size in bytes, store time in ms."""

    physical_offset: int
    queue_offset: int
    size: int
    store_timestamp_ms: int


Body: TypeAlias = bytes | bytearray | memoryview

Traits = tuple[int, int, int, int, int, "bytes | None", "int | None"]
"""What many messages have in common: flag, sysFlag, reconsume times, prepared position, tags code, store
host, delay in ms (see Appender.append)."""

Incoming = tuple[Any, ConsumeQueue, Body, bytes, int, bytes, Keys, Traits]
"""A message that is to be encoded: ticket, queue, body, properties, born time in ms, born host, keys, traits.
The ticket is for the caller, to know it again; of one with None it hears only if it is refused. Messages that
share one tuple of traits are encoded faster in a row. A plain tuple, for its cost."""

Placed = tuple[Any, int, int]
"""A message that was encoded: ticket, log position, queue offset."""

Refused = tuple[Any, StoreRefused]
"""One that was not: ticket and reason."""

Pending = tuple[ConsumeQueue | None, int, int, int, int, int, int, bytes, Keys, int]
"""A record of this tick, waiting for its dispatch: queue (None for prepared and rollback records, which
get no unit), the topic's `key_prefix`, queue offset, log position, size, tags code, store time in ms,
properties, keys to index, the queue offset behind it. A plain tuple, for its cost."""


@final
class BatchRecords(NamedTuple):
    """The records of a batch, in columns, and as such waiting for their dispatch."""

    queue: ConsumeQueue
    key_prefix: int
    queue_offset: int
    """That of the first; the others follow."""
    physical_offsets: list[int]
    sizes: list[int]
    tags_codes: Sequence[int]
    store_timestamp_ms: int
    properties: Callable[[], Sequence[bytes]]
    """Makes them: mostly nobody asks."""
    keys: Sequence[bytes] | None
    """What to index: of each record this key alone; None: the keys in its properties."""


Lot = list[Pending] | BatchRecords


class Appender:
    """Encodes into the commit log's tick buffer. Loop thread only."""

    __slots__ = (
        "_encoded",
        "_flags",
        "_log",
        "_lots",
        "_pending",
        "_placed",
        "_queues",
        "_refused",
        "_time_ms",
        "gathered",
        "largest_body",
        "largest_record",
        "shut",
        "store_host",
    )

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        clock: Clock,
        config: StoreConfig,
        flags: RunningFlags,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._time_ms = clock.time_ms
        self._flags = flags
        self.shut = "messages are put to the master, this is a slave" if config.broker_role == SLAVE else ""
        self.gathered: list[Incoming] = []  # one list for good
        self._placed: list[Placed] = []
        self._refused: list[Refused] = []
        self._encoded = 0, 0  # how many of the last lot, and of those placed, are in the tick's buffer
        self._pending: list[Pending] = []
        self._lots: list[Lot] = [self._pending]  # records of this tick, in order; the last lot grows
        self.store_host = b"\x7f\0\0\1\0\0\x2a\x9f"  # 127.0.0.1:10911 until the broker has its port
        self.set_largest(config.max_message_size)

    def set_largest(self, body: int) -> None:
        """maxMessageSize may change while the store runs."""
        self.largest_body = body
        self.largest_record = min(body + 65_536, self._log.segment_size - BLANK_SIZE)

    def take(self) -> tuple[list[Lot], list[Placed], list[Refused]]:
        """The records of this tick, and what became of each message that was gathered in it; the next ones
        belong to the next."""
        self.settle()
        lots, placed, refused = self._lots, self._placed, self._refused
        if not lots[-1]:
            lots.pop()
        self._pending = []
        self._lots = [self._pending]
        self._placed = []
        self._refused = []
        return lots, placed, refused

    def roll_back(self, lots: list[Lot]) -> None:
        """Give the queue offsets of a tick that could not be written back."""
        for lot in reversed(lots):
            if type(lot) is BatchRecords:
                lot.queue.next_offset = lot.queue_offset
                continue
            for queue, _, queue_offset, *_ in reversed(lot):
                if queue is not None:
                    queue.next_offset = queue_offset

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
    ) -> Appended:
        """Take one message into this tick. `body` is copied at once.

        index_keys: keys to index (None: taken from the properties). delay_ms: the queue unit gets store
        time plus this as its tags code (messages that wait for their delivery). stored_before: the
        message moves on within the store, so maxMessageSize, which may have been lowered since, does not
        count. Raises StoreRefused; nothing has changed then.
        """
        queue = self.queue_of(topic, queue_id)
        self.settle()
        refused = len(self._refused)
        traits = (
            flag, sys_flag, reconsume_times, prepared_transaction_offset, tags_code, store_host, delay_ms
        )  # fmt: skip
        self.gathered.append(
            (queue, queue, body, properties, born_timestamp_ms, born_host, index_keys, traits)
        )
        largest = self.largest_body, self.largest_record
        if stored_before:
            self.largest_body = self.largest_record = self._log.segment_size - BLANK_SIZE
        try:
            self.settle()
        finally:
            self.largest_body, self.largest_record = largest
        if len(self._refused) > refused:
            raise self._refused.pop()[1]
        _, position, queue_offset = self._placed.pop()
        _, _, _, _, size, _, now, *_ = self._pending[-1]
        return Appended(position, queue_offset, size, now)

    def queue_of(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made if need be. Raises StoreRefused."""
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            self.refuse_if_shut()
            queue = self._queues.get(topic, queue_id)
        return queue

    def gather(self, message: Incoming) -> None:
        """Take a message into this tick; `take` says what has become of it. Its queue must not be `deleted`
        before `settle`; a body of more than COPIED bytes is not needed any more on return."""
        gathered = self.gathered
        gathered.append(message)
        if len(message[2]) > COPIED or len(gathered) >= MOST_GATHERED:
            self.settle()

    def waiting(self) -> bool:
        """Whether there is something for `take`."""
        return bool(self.gathered or self._lots[0] or self._refused)

    def settle(self) -> None:
        """Encode what was gathered. Whoever looks at where queues or the log will go on calls it before."""
        if not self.gathered:
            return
        run = self.gathered.copy()
        self.gathered.clear()
        self._encoded = len(self._pending), len(self._placed)
        try:
            self.refuse_if_shut()
            self._encode(run)
        except BaseException as error:
            self._refuse_rest(run, error)
            if not isinstance(error, Exception):
                raise

    def _refuse_rest(self, run: list[Incoming], error: BaseException) -> None:
        """Take back what is not in the tick's buffer, and refuse what was neither placed nor refused."""
        if isinstance(error, StoreRefused):
            refusal = error
        else:  # no memory, a bug: nobody beside the run is to suffer from it
            log.error("messages could not be encoded", exc_info=error)
            refusal = StoreRefused(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
        pending, placed = self._encoded
        self.roll_back([self._pending[pending:]])
        del self._pending[pending:], self._placed[placed:]
        heard = {id(ticket) for ticket, *_ in (*self._placed, *self._refused)}
        self._refused += [(message[0], refusal) for message in run if id(message[0]) not in heard]

    def _encode(self, run: list[Incoming]) -> None:
        log = self._log
        now = self._time_ms()
        largest_body, largest_record = self.largest_body, self.largest_record
        pend, placed, refused = self._pending.append, self._placed.append, self._refused.append
        pieces: list[Body] = []
        position, room = log.next, log.room()
        last: Traits | None = None
        host_length = 0
        for ticket, queue, body, properties, born_ms, born_host, keys, traits in run:
            if traits is not last or len(born_host) != host_length:
                last, host_length = traits, len(born_host)
                flag, sys_flag, reconsume_times, prepared_position, tags_code, store_host, delay_ms = traits
                store_host = store_host or self.store_host
                if delay_ms is not None:
                    tags_code = now + delay_ms
                head, sys_flag = head_of(born_host, store_host, sys_flag)
                pack_head, head_size = head.pack, head.size
                kind = sys_flag & TRANSACTION_MASK
                with_unit = kind in (0, COMMITTED)
            try:
                topic = queue.record_topic or self.record_topic(queue)
                body_length = len(body)
                properties_length = len(properties)
                size = head_size + body_length + len(topic) + 2 + properties_length
                if body_length > largest_body or properties_length > PROPERTIES_MAX or size > largest_record:
                    self.refuse_size(body_length, properties_length, size)
                if position + size > room:
                    self._put(pieces)
                    self._claim(size)
                    position, room = log.next, log.room()
                queue_offset = queue.next_offset if with_unit else 0
                pieces += (
                    pack_head(
                        size, queue.magic, crc32(body) & 0x7FFFFFFF, queue.queue_id, flag, queue_offset,
                        position, sys_flag, born_ms, born_host, now, store_host, reconsume_times,
                        prepared_position, body_length,
                    ),
                    body, topic, _length(properties_length), properties,
                )  # fmt: skip
            except struct.error as problem:
                refused((ticket, illegal_number(problem)))
                continue
            except StoreRefused as refusal:
                refused((ticket, refusal.with_traceback(None)))  # that holds the run's messages
                continue
            behind = queue_offset + 1
            if with_unit:
                queue.next_offset = behind
            pend((
                queue if with_unit else None, queue.key_prefix, queue_offset, position, size, tags_code, now,
                properties, keys if kind != ROLLBACK else (), behind,
            ))  # fmt: skip
            if ticket is not None:
                placed((ticket, position, queue_offset))
            position += size
        self._put(pieces)

    def _claim(self, size: int) -> None:
        try:
            self._log.claim(size)
        except OSError as failure:
            raise no_segment(failure) from failure

    def _put(self, pieces: list[Body]) -> None:
        """Move encoded records to the tick's buffer."""
        if sum(map(len, pieces)) <= JOIN_LIMIT:
            self._log.put(b"".join(pieces))
        else:
            for piece in pieces:
                self._log.put(piece)
        pieces.clear()
        self._encoded = len(self._pending), len(self._placed)

    def add(self, records: BatchRecords) -> None:
        """Records that stand in the tick's buffer already, see batch_append.py."""
        if not self._pending:
            self._lots.pop()
        self._pending = []
        self._lots += (records, self._pending)

    def refuse_if_shut(self) -> None:
        if self.shut:
            raise StoreRefused(ResponseCode.SERVICE_NOT_AVAILABLE, f"no messages are taken: {self.shut}")
        if not self._flags.writeable:
            raise StoreRefused(
                ResponseCode.SERVICE_NOT_AVAILABLE, f"the store takes no messages: {self._flags.why()}"
            )

    def record_topic(self, queue: ConsumeQueue) -> bytes:
        """Find out what records need of the queue's topic. Raises StoreRefused."""
        siblings = self._queues.of_topic(queue.topic)
        known = next((each for each in siblings if each.record_topic), None)
        if known is None:
            text, magic = topic_part(queue.topic)
            if len(text) > _TOPIC_MAX + 2:
                raise StoreRefused(
                    ResponseCode.MESSAGE_ILLEGAL, f"topic of {len(text)} bytes is longer than {_TOPIC_MAX}"
                )
            prefix = key_prefix_of(queue.topic)
        else:
            text, magic, prefix = known.record_topic, known.magic, known.key_prefix
        queue.record_topic, queue.magic, queue.key_prefix = text, magic, prefix
        return text

    def refuse_size(self, body: int, properties: int, record: int) -> None:
        raise StoreRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. "
            f"msg body length limit {self.largest_body}B, msg properties length limit 32KB; "
            f"this one has {body}B, {properties}B and {record}B as a record",
        )


def illegal_number(problem: struct.error) -> StoreRefused:
    return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, f"a number does not fit the record: {problem}")


def no_segment(failure: OSError) -> StoreRefused:
    return StoreRefused(
        ResponseCode.SYSTEM_ERROR,
        f"create mapped file failed, server is busy or broken. ({failure.strerror or failure})",
    )

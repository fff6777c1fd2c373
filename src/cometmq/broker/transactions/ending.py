"""Handlers of the requests that end a transaction, or resume its checks.

- END_TRANSACTION (37): a producer commits a half message, or rolls it back. The format is described in
  docs/reference/storage.md, Transactions.
- RESUME_CHECK_HALF_MESSAGE (323): an administrator resumes the checks of a half message that was given up.

Apache's broker commits a half message as often as a producer requests it. Here, a transaction can end only
once: a second end is refused, even if it names another copy of the half message.

Budget: a commit takes 27 µs of CPU time if it soon follows its half message; a 1 KiB send takes 9 µs on the
same machine. Most half messages are found in the newest bytes of the log, which are in memory, and their
properties are parsed once for each producer and queue (half.py). The records of all transactions that end in
a tick are encoded together when the tick is committed.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cometmq import logs
from cometmq.broker.access.security import CheckTopic
from cometmq.broker.base import compat
from cometmq.broker.base.names import check_group
from cometmq.broker.base.writer import Writer, is_in_log
from cometmq.broker.transactions.half import Half, half_of
from cometmq.broker.transactions.inherited import BYTES_OF_KEY, SAME_KEY, Inherited
from cometmq.broker.transactions.ledger import Ledger
from cometmq.broker.transactions.records import Ending, TransactionRecords
from cometmq.errors import CommandError, StoreError
from cometmq.protocol.codes import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_HALF_TOPIC,
    RequestCode,
    ResponseCode,
    handles,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import EndTransactionRequestHeader, ResumeCheckHalfMessageRequestHeader
from cometmq.protocol.ids import IdError, decode_offset_id
from cometmq.protocol.properties.values import drop, put
from cometmq.protocol.record.layout import COMMITTED, ROLLBACK
from cometmq.remoting import Connection
from cometmq.settings import LONG_MAX
from cometmq.store import CACHED, Clock, MessageStore, NotInMemory, Reads
from cometmq.text import printable

log = logs.logger(__name__)

UNKNOWN = 0
MAX_WAITING_BYTES = 1 << 20
"""The maximum total size, in bytes, of half messages whose transactions wait to be ended together."""
ENDED = "the transaction has ended, or was given up"


def _no_answer(_code: int, **_remark: str | None) -> None: ...


refused = CommandError.failed


@dataclass(eq=False)
class TransactionEnds:
    """Handles the requests that end transactions or resume checks."""

    clock: Clock
    store: MessageStore
    ledger: Ledger
    inherited: Inherited
    records: TransactionRecords
    writer: Writer
    check_write: CheckTopic | None

    def __post_init__(self) -> None:
        self._log_limit = logs.LogLimiter()
        self._endings: list[Ending] = []  # the transactions that end in this tick
        self._waiting_bytes = 0
        self._resuming: set[int] = set()  # positions of half messages that are being resumed

    @handles(RequestCode.END_TRANSACTION)
    def end_transaction(self, connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
        """Handle the request to end a transaction (37). The state "unknown" changes nothing."""
        header = frame.header(EndTransactionRequestHeader)
        if self.store.slave:
            return frame.response(ResponseCode.SLAVE_NOT_AVAILABLE)
        state = header.commit_or_rollback
        if state == UNKNOWN:
            return frame.response(ResponseCode.SUCCESS)
        if state not in (COMMITTED, ROLLBACK):
            meanings = f"{COMMITTED} commits, {ROLLBACK} rolls back, 0 leaves the transaction open"
            raise refused(f"commitOrRollback {state} is invalid: {meanings}")
        try:
            half = self._recent_half(header) or self._half_at(header.commit_log_offset, CACHED)
            half = self._named(half, header, connection, frame)
            if half.offset >= self.inherited.end:
                if state == COMMITTED and (keyed := self.records.key_of(half)) is not None:
                    self.records.dedup.find(*keyed)
                self._end(connection, frame, header, half)
                return None
        except NotInMemory:
            pass
        except CommandError as error:
            raise self._log_refusal(error, header.transaction_id, header.producer_group) from None
        return self._end_later(connection, frame, header)

    async def _end_later(
        self, connection: Connection, frame: Frame, header: EndTransactionRequestHeader
    ) -> None:
        """End a transaction if that needs reads from the disk.

        These are reads of the half message; if an earlier run has stored it, of the index, which shows
        whether the transaction has already ended; and of the first message with its key.
        """
        question = partial(self._half_at, header.commit_log_offset)
        try:
            half = self._named(await self.store.executor.query(question), header, connection, frame)
            keyed = self.records.key_of(half)
            if keyed is not None and header.commit_or_rollback == COMMITTED:
                async with self.records.dedup.reading(keyed[0], [keyed[1]]):
                    pass  # When the tick ends, the record is in memory
            if self.ledger.is_open(half.offset) and await self.inherited.is_settled(half):
                self._add(Ending(half, half.offset, commits=False, answer=_no_answer))
            self._end(connection, frame, header, half)
        except CommandError as error:
            raise self._log_refusal(error, header.transaction_id, header.producer_group) from None

    def _recent_half(self, header: EndTransactionRequestHeader) -> Half | None:
        """Return the half message that a request names, or None if the log does not hold it in memory.

        The consume-queue entry proves that the record is a half message. Bytes from memory are not damaged.
        """
        queue, offset = self.store.queues.find_queue(TRANS_HALF_TOPIC, 0), header.tran_state_table_offset
        if queue is None or not queue.window_start <= offset < queue.max_offset:
            return None
        unit = queue.unit(offset)
        if unit is None or unit[0] != header.commit_log_offset:
            return None
        record = self.store.log.recent(unit[0], unit[1])
        return None if record is None else half_of(record)

    def _half_at(self, position: int, reads: Reads) -> Half | None:
        """Return the half message at a log position, or None if there is none.

        The position comes from a request, and the body of a message can contain bytes that look like a half
        message of another producer. So the consume queue must contain this position.
        """
        record = self.store.lookups.record_at(position, reads)
        half = None if record is None else half_of(record)
        if half is None or not half.is_half:
            return None
        queue = self.store.queues.find_queue(TRANS_HALF_TOPIC, 0)
        if queue is None or not queue.min_offset <= half.offset < queue.max_offset:
            return None
        unit = queue.unit(half.offset, reads)
        return half if unit is not None and unit[0] == position else None

    def _named(
        self, half: Half | None, header: EndTransactionRequestHeader, connection: Connection, frame: Frame
    ) -> Half:
        """Return the half message if the request may end it. The remarks of errors are those of Apache."""
        if half is None:
            raise refused("Find prepared transaction message failed")
        if self.check_write is not None:
            self.check_write(connection, frame, half.form.real_topic)
        if compat.is_5x(frame.version) and not header.from_transaction_check:
            immunity_ms = half.form.immunity_ms
            if immunity_ms is not None and self.clock.time_ms() - half.since_ms > immunity_ms:
                why = "CHECK_IMMUNITY_TIME_IN_SECONDS has passed: the producer will be asked"
                raise CommandError(ResponseCode.ILLEGAL_OPERATION, why)
        if half.form.group != header.producer_group:
            check_group(header.producer_group, frame.version)
            raise refused("The producer group wrong")
        if half.offset != header.tran_state_table_offset:
            raise refused("The transaction state table offset wrong")
        # CometMQ makes this check in addition to Apache's checks. After a power failure, a new half message
        # may have been stored at the position of a lost one. A request for the lost one must not end the
        # transaction of the new one.
        given, key = (header.msg_id, header.transaction_id), half.key
        if key and any(given) and key not in given and half.offset_msg_id not in given:
            raise refused("The message id wrong")
        return half

    def _log_refusal(self, error: CommandError, transaction_id: str | None, group: str) -> CommandError:
        """Log that the end of a transaction is refused, as most producers ignore it. Return the error."""
        if self._log_limit.allows():
            log.warning("end of transaction %s of group %s refused: %s", transaction_id, group, error.remark)
        return error

    def _end(
        self, connection: Connection, frame: Frame, header: EndTransactionRequestHeader, half: Half
    ) -> None:
        offset = self.ledger.standing_for(half.first, half.offset)
        if offset is None:
            raise refused(ENDED)
        commits = header.commit_or_rollback == COMMITTED
        answer = _no_answer if frame.is_oneway else partial(connection.respond, frame)
        self._add(Ending(half, offset, commits, answer))

    def _add(self, ending: Ending) -> None:
        """Schedule the end of a transaction. The ends of one event-loop tick are stored together."""
        self.ledger.take(ending.offset)
        if not self._endings:
            self.writer.before_commit(self._store_endings)
        self._endings.append(ending)
        self._waiting_bytes += len(ending.half.body) + len(ending.half.properties)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._store_endings()

    def _store_endings(self) -> None:
        endings, self._endings, self._waiting_bytes = self._endings, [], 0
        failed = self.records.end(endings)
        for number, error in failed.items():
            half, offset, _, answer = endings[number]
            self.ledger.give_back(offset)
            self._log_refusal(error, half.key, half.form.group)
            answer(error.code, remark=error.remark)
        stored = [ending for number, ending in enumerate(endings) if number not in failed]

        def outcome(code: int, remark: str | None) -> None:
            for half, offset, _, answer in stored:
                if is_in_log(code, remark):
                    self.ledger.close(offset)
                    self.ledger.ended(half.first, offset)
                else:
                    self.ledger.give_back(offset)
                    self.records.taken_back(offset)
                answer(code, remark=remark)

        if stored:
            self.writer.appended(outcome)

    # -- half messages that were given up, and resumed checks

    @handles(RequestCode.RESUME_CHECK_HALF_MESSAGE)
    async def resume_check_half_message(self, connection: Connection, frame: Frame) -> Frame | None:
        """Resume the checks of a half message that was given up (323), whose number restarts at zero."""
        header = frame.header(ResumeCheckHalfMessageRequestHeader)
        if self.store.slave:
            return frame.response(ResponseCode.SLAVE_NOT_AVAILABLE)
        half = await self._given_up(header.msg_id)
        position = half.position
        if position in self._resuming:
            raise refused("msgId: this message is being resumed by another request")
        self._resuming.add(position)
        try:
            if await self.inherited.is_resumed(half):
                raise refused("msgId: this message was resumed before")
            properties = put(half.properties, b"TRANSACTION_CHECK_TIMES", b"0")
            properties = drop(properties, b"TRAN_PREPARED_QUEUE_OFFSET")
            self.records.resume(half, properties)
        except BaseException as error:
            self._resuming.discard(position)
            if isinstance(error, StoreError):
                why = f"Put message back to RMQ_SYS_TRANS_HALF_TOPIC failed. {error}"
                raise refused(why) from None
            raise

        def outcome(code: int, remark: str | None) -> None:
            self._resuming.discard(position)
            connection.respond(frame, code, remark=remark)

        self.writer.appended(outcome)
        return None

    async def _given_up(self, msg_id: str) -> Half:
        """Return the half message that was given up and has this offset id or else this unique key.

        If several messages have the key, return the newest, because the earlier ones were resumed.
        """
        topic = TRANS_CHECK_MAX_TIME_TOPIC
        with suppress(IdError):
            position = decode_offset_id(msg_id).physical_offset
            record = await self.store.executor.query(partial(self.store.lookups.record_at, position))
            if record is not None and (there := half_of(record)).topic == topic:
                return there
        same_hash = await self.store.lookups.by_key(topic, msg_id, SAME_KEY, 0, LONG_MAX, BYTES_OF_KEY)
        for half in map(half_of, reversed(same_hash)):
            if half.topic == topic and half.key == msg_id:
                return half
        name = printable(msg_id, 64)
        raise refused(f"msgId: topic {topic} has no message with this offset id or unique key: {name}")

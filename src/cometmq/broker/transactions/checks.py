"""Transaction checks: periodic requests to producers about transactions that have not ended.

A round of checks covers the half messages that were stored before the round began, starting at the first open
one (`Ledger.head`). A round is divided into pieces, between which the event loop does other work. When a half
message is checked, a copy of it is stored at the end of the queue and replaces it, so that the head can
advance; the producer's answer names the copy. If the sender has requested more time before the first check,
the half message is copied only after many records have been stored behind it; until then the head does not
advance. As in Apache's broker, two offsets are stored as consumer offsets: the head, and the offset of the
first op message (a record that closes half messages) that is still needed (docs/reference/storage.md,
Transactions).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.writer import Writer, is_in_log
from cometmq.broker.groups.clients import ProducerTable, send_oneway
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.transactions.half import (
    Half,
    Verdict,
    check_body,
    copy_properties,
    half_of,
    judge,
    number_of,
)
from cometmq.broker.transactions.inherited import Inherited
from cometmq.broker.transactions.ledger import Ledger
from cometmq.broker.transactions.records import Damaged, TransactionRecords
from cometmq.errors import CommandError, RecordError, StoreError
from cometmq.periodic import Periodic
from cometmq.protocol.codes import (
    TRANS_GROUP,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    RequestCode,
    ResponseCode,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader
from cometmq.protocol.ids import encode_offset_id
from cometmq.protocol.record.one import queue_offset_of, record_starts
from cometmq.remoting import Connection
from cometmq.store import Clock, GetStatus, MessageStore, Reads, StoreRefused

log = logs.logger(__name__)

AT_ONCE = 32
BYTES_AT_ONCE = 1 << 20
PAUSE_S = 0.01  # pause, in seconds, after each piece of a round, so that other tasks can run
MAX_CYCLE_S = 60.0
MAX_MARKS = 64


@dataclass(eq=False)
class TransactionChecks:
    """Checks the half messages of a master in periodic rounds."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    ledger: Ledger
    inherited: Inherited
    records: TransactionRecords
    writer: Writer
    offsets: ConsumerOffsets
    producers: ProducerTable
    address: BrokerAddress
    may_write: Callable[[Connection, str], bool]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = Periodic(
            self._loop, lambda: self.config.transaction_check_interval / 1000, self.round,
            name="check of transactions",
        )  # fmt: skip
        self._turn = count()
        self._next = 0  # offset of the half message at which the next round begins
        self._room = 0  # bytes of half messages that the current round may still copy
        self._log_limit = logs.LogLimiter()
        # The ends of the op queue and of the half-message queue when a round began. Once all half messages
        # before the second offset are closed, the op messages before the first offset are no longer needed.
        self._marks: deque[tuple[int, int]] = deque()

    def start(self) -> None:
        """Start the periodic rounds of checks. The first round begins after one interval."""
        self._next = 0
        self._marks.clear()
        self._timer.start()

    async def stop(self) -> None:
        await self._timer.stop(cancel=True)

    # -- a round

    async def round(self) -> None:
        """Check all half messages that are open now, for at most MAX_CYCLE_S seconds."""
        limit = self.store.max_offset(TRANS_HALF_TOPIC, 0)
        if len(self._marks) < MAX_MARKS:
            self._marks.append((self.store.max_offset(TRANS_OP_HALF_TOPIC, 0), limit))
        self.records.pay()
        end = self.clock.monotonic() + MAX_CYCLE_S
        self._room = self.config.store.mapped_file_size_commit_log // 8
        offset: int | None = self.ledger.next_open(max(self._next, self.ledger.head))
        while offset is not None and offset < limit and self.clock.monotonic() < end:
            offset = await self._piece(offset, limit)
            await asyncio.sleep(PAUSE_S)
        self._next = offset if offset is not None and offset < limit else 0
        self.ledger.advance(limit)
        self._keep_offsets()

    def _keep_offsets(self) -> None:
        head = self.ledger.head
        self._keep(TRANS_HALF_TOPIC, head)
        while self._marks and self._marks[0][1] <= head:
            self._keep(TRANS_OP_HALF_TOPIC, self._marks.popleft()[0])

    def _keep(self, topic: str, offset: int) -> None:
        if offset != max(self.offsets.query(TRANS_GROUP, topic, 0), 0):
            self.offsets.commit(TRANS_GROUP, topic, 0, offset)

    def _read(self, offset: int, most: int, reads: Reads) -> tuple[list[Half], int]:
        """Read at most `most` half messages. Return the open, intact ones, and the offset behind them."""
        got = self.store.get_messages(TRANS_HALF_TOPIC, 0, offset, most, max_bytes=BYTES_AT_ONCE, reads=reads)
        if got.status is not GetStatus.FOUND:
            return [], got.next_begin_offset
        data = b"".join(got.buffers)
        found = []
        for start in record_starts(data)[0]:
            if not self.ledger.is_open(queue_offset_of(data, start)):
                continue
            try:
                found.append(half_of(data, start))
            except RecordError as error:
                log.error("could not read a half message after offset %d: %s", offset, error)
        return found, got.next_begin_offset

    async def _piece(self, offset: int, limit: int, at_once: int = AT_ONCE) -> int | None:
        """Check half messages, beginning with the open half message at `offset`.

        Return the offset of the next open one, or None if the round must end.
        """
        most = min(at_once, limit - offset)
        try:
            halves, behind = await self.store.executor.query(partial(self._read, offset, most))
        except OSError as error:
            if most > 1:
                # Read half as many messages, until only the unreadable message is left.
                return await self._piece(offset, limit, most // 2)
            self._say_unread(offset, error)
            return self.ledger.next_open(offset + 1)
        if behind <= offset:
            return None
        here = {half.offset for half in halves}
        for gone in range(offset, min(behind, offset + most)):
            if gone not in here and self.ledger.is_open(gone):
                self.ledger.close(gone)
        if behind > offset + most:
            self.ledger.close_range(offset + most, min(behind, limit))
        kept_ms = self.config.store.file_reserved_time * 3_600_000
        oldest_ms = self.store.retention.steady.now_ms() - kept_ms
        timeout_ms, most_checks = self.config.transaction_time_out, self.config.transaction_check_max
        now_ms = self.clock.time_ms()
        todo: list[tuple[Half, Verdict | None]] = []
        for half in halves:
            verdict = judge(half, now_ms, timeout_ms, most_checks, oldest_ms)
            if verdict is Verdict.WAIT:
                behind = limit
                break
            if verdict is Verdict.PUT_BACK and not self._is_moved(half):
                continue
            try:
                settled = await self.inherited.is_settled(half)
            except OSError as error:
                self._say_unread(half.offset, error)
                continue
            todo.append((half, None if settled else verdict))
        if todo and not await self._act(todo):
            return None
        return self.ledger.next_open(behind) if behind < limit else None

    def _is_moved(self, half: Half) -> bool:
        """Return whether to copy a half message to the end of the queue before it is due for a check.

        Retention may soon delete one that is more than a segment behind the end of the log. The bytes copied
        in a round are limited, because the copies lengthen the log, too.
        """
        since = self.store.log.end - half.position
        if since < self.config.store.mapped_file_size_commit_log or self._room <= 0:
            return False
        self._room -= len(half.body) + len(half.properties)
        return True

    def _act(self, todo: list[tuple[Half, Verdict | None]]) -> asyncio.Future[bool]:
        """Append the records for the verdicts on half messages (see `_store`).

        The result of the future is whether all verdicts were carried out.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        then: list[Callable[[], None]] = []
        taken = []
        going_on = True
        for half, verdict in todo:
            if not self.ledger.is_open(half.offset):
                continue  # the transaction has ended since its half message was read
            try:
                then.append(self._store(half, verdict))
            except (StoreError, CommandError) as error:
                log.warning("could not check half message %d, trying again later: %s", half.offset, error)
                going_on = False
                break
            self.ledger.take(half.offset)
            taken.append(half)

        def outcome(code: int, remark: str | None) -> None:
            stored = is_in_log(code, remark)
            for half in taken:
                if stored:
                    self.ledger.close(half.offset)
                else:
                    self.ledger.give_back(half.offset)
                    self.records.taken_back(half.offset)
            if stored:
                for follow in then:
                    follow()
            else:
                log.warning("could not check half messages, trying again later: %s", remark)
            if not done.done():
                done.set_result(going_on and stored)

        self.writer.appended(outcome)
        return done

    def _store(self, half: Half, verdict: Verdict | None) -> Callable[[], None]:
        """Append the records that carry out the verdict of a check on a half message.

        A verdict of None means that the transaction has ended and only its op message is missing. Return a
        function to call once the records are committed. Raises StoreError or CommandError.
        """
        if verdict is None:
            self.records.op(half.offset)
            return lambda: None
        why = f"it was asked about {half.checks} times, or is too old"
        try:
            try:
                if verdict is not Verdict.DISCARD:
                    return self._copy(half, checked=verdict is Verdict.CHECK)
            except StoreRefused as refusal:
                if refusal.response_code != ResponseCode.MESSAGE_ILLEGAL:
                    raise
                # The properties of a copy would make the message too long for a record, so the message is
                # given up.
                why = refusal.remark
            self.records.give_up(half)
        except Damaged as damage:
            why = damage.remark
            self.records.op(half.offset)
        self._log_given_up(half, why)
        return partial(self.ledger.ended, half.first, half.offset)

    def _say_unread(self, offset: int, error: OSError) -> None:
        if self._log_limit.allows():
            log.error("could not check half message %d, trying again in the next cycle: %s", offset, error)

    def _log_given_up(self, half: Half, why: str) -> None:
        if self._log_limit.allows():
            log.error(
                "transaction %s of group %s will not be checked again: %s", half.key, half.form.group, why
            )

    def _copy(self, half: Half, *, checked: bool) -> Callable[[], None]:
        properties = copy_properties(half, checked=checked)
        copy = self.records.copy(half, properties)

        def stored() -> None:
            self.ledger.copied(half.first, copy.queue_offset)
            if checked:
                self._send_check(half, properties, copy.physical_offset, copy.queue_offset)

        return stored

    # -- checks to producers

    def _send_check(self, half: Half, properties: bytes, position: int, offset: int) -> None:
        """Send a check to one connected producer of the half message's group. The producers take turns.

        A producer without write permission for the topic is skipped: any client can register for the group,
        and the check contains the message.
        """
        clients = self.producers.online(half.form.group)
        begin = next(self._turn) % max(len(clients), 1)
        in_turn = (*clients[begin:], *clients[:begin])
        client = next((each for each in in_turn if self.may_write(each.channel, half.form.real_topic)), None)
        if client is None:
            if self._log_limit.allows():
                text = "no producer of group %s is connected to check transaction %s"
                log.warning(text, half.form.group, half.key)
            return
        header = CheckTransactionStateRequestHeader(
            tran_state_table_offset=offset,
            commit_log_offset=position,
            msg_id=half.key,
            transaction_id=half.key,
            offset_msg_id=encode_offset_id(self.address.packed, position),
        )
        queue_id = number_of(half.form.real_queue_id) or 0
        body = check_body(half, properties, position, offset, queue_id)
        send_oneway(client.channel, Frame.request(RequestCode.CHECK_TRANSACTION_STATE, header, body))

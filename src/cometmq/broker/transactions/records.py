"""Stores the records of transactions: committed messages, copies of half messages, and ops.

An op closes a half message. Its twin is the record because of which the half message is closed; both are in
one write, the twin first. If the write is incomplete and the op is lost, the half message seems open, but its
twin is found (see inherited.py). The op contains the position of its twin, so an op whose twin was lost
closes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.writer import SUCCESS, Writer
from cometmq.broker.send.send import Place, destination, move
from cometmq.broker.tables.topics import TopicTable
from cometmq.broker.transactions.half import REMOVED, Half, with_beginning
from cometmq.errors import CommandError, StoreError
from cometmq.protocol.codes import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    ResponseCode,
    SysFlag,
)
from cometmq.protocol.properties.values import stored_tags_code
from cometmq.protocol.record.one import body_crc
from cometmq.store import Clock, MessageStore, TickMessage

log = logs.logger(__name__)

OP_PROPERTIES = b"TAGS\x01" + REMOVED
OP_TAGS_CODE = stored_tags_code(OP_PROPERTIES)


class Damaged(CommandError):
    """A half message cannot be stored again: the new CRC would hide that its body is damaged."""


@dataclass(eq=False, kw_only=True)
class TransactionRecords:
    """Appends the records of transactions to the store's next write. `writer` reports the outcome.

    If a method raises StoreRefused or CommandError, it has appended nothing.
    """

    clock: Clock
    store: MessageStore
    topics: TopicTable
    address: BrokerAddress
    writer: Writer
    _owed: list[tuple[int, int]] = field(default_factory=list)

    def op(self, offset: int, twin: int = 0) -> None:
        """Append an op: a record that closes the half message at `offset`.

        `twin` is the log position of the record because of which the half message is closed, or 0.
        """
        self.topics.ensure(TRANS_OP_HALF_TOPIC, 1)
        self.store.appender.append(
            TRANS_OP_HALF_TOPIC,
            0,
            b"%d" % offset,
            OP_PROPERTIES,
            born_timestamp_ms=self.clock.time_ms(),
            born_host=self.address.packed,
            prepared_transaction_offset=twin,
            tags_code=OP_TAGS_CODE,
            stored_before=True,
        )

    def _op_behind(self, twin: TickMessage, offset: int) -> None:
        """Append the op that belongs to the record `twin`, which has just been appended.

        If there is no space for the op, `pay` appends it later.
        """
        try:
            self.op(offset, twin.physical_offset)
        except (StoreError, CommandError) as error:
            log.warning("could not store the op of half message %d, trying again later: %s", offset, error)
            self._owed.append((offset, twin.physical_offset))

    def pay(self) -> None:
        """Append the ops for which there was no space earlier."""
        owed, self._owed = self._owed, []
        for number, (offset, twin) in enumerate(owed):
            try:
                self.op(offset, twin)
            except (StoreError, CommandError):
                self._owed = owed[number:]
                break
        paid = owed[: len(owed) - len(self._owed)]

        def outcome(code: int, _remark: str | None) -> None:
            if code != SUCCESS:
                self._owed += paid

        if paid:
            self.writer.appended(outcome)

    def taken_back(self, offset: int) -> None:
        """Forget an op that `pay` would append, because the record to which it belongs was not written."""
        self._owed = [owed for owed in self._owed if owed[0] != offset]

    def commit(self, half: Half, offset: int) -> None:
        """Store a committed message in its real topic.

        Close the half message, or its copy, at `offset`.
        """
        topic, queue_id = destination(self.topics, half.properties)
        properties = half.properties if offset == half.offset else with_beginning(half)
        sys_flag = half.message.sys_flag & ~int(SysFlag.TRANSACTION_MASK) | int(SysFlag.TRANSACTION_COMMIT)
        position = half.message.physical_offset
        twin = self._append(topic, queue_id, half, properties, position, sys_flag=sys_flag)
        self._op_behind(twin, offset)

    def copy(self, half: Half, properties: bytes) -> TickMessage:
        """Store a copy of a half message at the end of its queue, and close the half message."""
        twin = self._append(TRANS_HALF_TOPIC, 0, half, properties, born_timestamp_ms=half.born_ms)
        self._op_behind(twin, half.offset)
        return twin

    def give_up(self, half: Half) -> None:
        """Store a half message in the topic for half messages that are no longer checked, and close it."""
        self.topics.ensure(TRANS_CHECK_MAX_TIME_TOPIC, 1)
        twin = self._append(TRANS_CHECK_MAX_TIME_TOPIC, 0, half, half.properties)
        self._op_behind(twin, half.offset)

    def filler(self, offset: int) -> None:
        """Store a filler (an empty half message), and an op that closes the filler."""
        self.store.appender.append(
            TRANS_HALF_TOPIC,
            0,
            b"",
            b"",
            born_timestamp_ms=self.clock.time_ms(),
            born_host=self.address.packed,
        )
        self.op(offset)

    def resume(self, half: Half, properties: bytes) -> None:
        """Store a given-up half message as a new half message, so that its checks resume."""
        self._append(TRANS_HALF_TOPIC, 0, half, properties)

    def _append(
        self,
        topic: str,
        queue_id: int,
        half: Half,
        properties: bytes,
        prepared_position: int = 0,
        **changed: int,
    ) -> TickMessage:
        """Append a copy of a half message.

        `changed` has the fields in which the copy differs from the half message.
        """
        message = half.message
        if message.body and body_crc(message.body) != message.body_crc:
            why = f"the half message is damaged at log position {message.physical_offset}"
            raise Damaged(ResponseCode.SYSTEM_ERROR, why)
        place = Place(topic, queue_id, properties)
        message = replace(message, **changed) if changed else message
        return move(self.store.appender, message, place, message.reconsume_times, prepared_position)

"""Stores the records of transactions: committed messages, copies of half messages, and op messages.

An op message closes the half message whose queue offset it contains. Its twin is the record because of which
the half message is closed: the committed message, the newer copy of the half message, or its copy in the
topic of given-up messages. The twin and the op message are stored in one write, the twin first. If a crash
leaves only the twin, the half message seems open until inherited.py finds the twin. The op message contains
the log position of its twin, so an op message whose twin was lost closes nothing.

An op message closes only one half message, because it has only one twin, and because Apache's 4.9 broker
cannot read other op messages. If several transactions end in one tick, all twins are stored before the first
op message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.writer import SUCCESS, Writer
from cometmq.broker.send.dedup import Deduplication
from cometmq.broker.send.key_table import KeyTable
from cometmq.broker.send.send import checked_destination
from cometmq.broker.tables.topics import TopicTable
from cometmq.broker.transactions.half import REMOVED, Half, with_beginning
from cometmq.errors import CommandError, StoreError
from cometmq.protocol.codes import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from cometmq.protocol.properties.values import stored_tags_code
from cometmq.protocol.record.layout import COMMITTED, TRANSACTION_MASK
from cometmq.store import WAITING, Clock, ConsumeQueue, MessageStore, StoreRefused, TickMessage, Traits

log = logs.logger(__name__)

OP_PROPERTIES = b"TAGS\x01" + REMOVED
OP_TRAITS = Traits(tags_code=stored_tags_code(OP_PROPERTIES))


Target = tuple[ConsumeQueue, Traits]
"""The real queue of committed messages, and the other values that these messages have in common."""


class Ending(NamedTuple):
    """The end of a transaction.

    Attributes:
        half: The half message that the request names.
        offset: The queue offset of the half message or copy to close.
        commits: Whether the message is stored for consumers.
        answer: Receives the response code, and the remark as keyword argument.
    """

    half: Half
    offset: int
    commits: bool
    answer: Callable[..., None]


class Damaged(CommandError):
    """The body of a half message does not match its CRC, so the half message is not stored again.

    The new record would have a CRC of the damaged body, and the damage would no longer be detected.
    """


class TransactionRecords(msgspec.Struct, eq=False):
    """Appends the records of transactions to the store.

    The caller passes to `writer.appended` a function that receives the outcome of the write. If a method
    raises StoreRefused or CommandError, it has appended nothing.
    """

    clock: Clock
    store: MessageStore
    topics: TopicTable
    address: BrokerAddress
    writer: Writer
    dedup: Deduplication
    _owed: list[tuple[int, int]] = msgspec.field(default_factory=list)

    def op(self, offset: int, twin: int = 0) -> None:
        """Append an op message, which closes the half message at the queue offset `offset`.

        `twin` is the log position of the record because of which it is closed, 0 if there is none.
        """
        for refusal in self.ops([(offset, twin)]).values():
            raise refusal

    def ops(self, closed: Sequence[tuple[int, int]]) -> dict[int, StoreRefused]:
        """Append op messages in one group, each given as the arguments of `op`.

        Return the errors of those that the store refused, by their index in `closed`.
        """
        self.topics.ensure(TRANS_OP_HALF_TOPIC, 1)
        appender = self.store.appender
        queue = appender.queue_of(TRANS_OP_HALF_TOPIC, 0)
        now_ms, host = self.clock.time_ms(), self.address.packed
        ops = [
            TickMessage(None, queue, b"%d" % offset, OP_PROPERTIES, now_ms, host, (), OP_TRAITS, twin)
            for offset, twin in closed
        ]
        return appender.append_all(ops, appender.limits_within_store)

    def _op_behind(self, twin: TickMessage, offset: int) -> None:
        """Append the op message for a `twin`. If the store refuses it, `pay` appends it later."""
        try:
            self.op(offset, twin.physical_offset)
        except (StoreError, CommandError) as error:
            self._owe(offset, twin.physical_offset, error)

    def _owe(self, offset: int, twin: int, error: Exception) -> None:
        log.warning(
            "could not store the op message of half message %d, trying again later: %s", offset, error
        )
        self._owed.append((offset, twin))

    def pay(self) -> None:
        """Append the op messages that the store has refused earlier."""
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
        """Let `pay` append no op message for the half message at `offset`: its twin was not written."""
        self._owed = [owed for owed in self._owed if owed[0] != offset]

    def end(self, endings: Sequence[Ending]) -> dict[int, CommandError]:
        """Append the records of transactions that end in this tick: first all messages, then all op messages.

        A message that is a duplicate by its topic's attributes is not stored: its transaction only ends.

        Return the errors of those that could not be ended, by their index in `endings`.
        """
        failed: dict[int, CommandError] = {}
        twins: dict[int, TickMessage] = {}
        targets: dict[tuple[Hashable, ...], Target] = {}
        keys: dict[tuple[KeyTable, bytes], int] = {}
        repeated: dict[int, int] = {}  # The duplicates of messages that are appended here, and these
        for number, ending in enumerate(endings):
            if ending.commits:
                try:
                    keyed = self.key_of(ending.half)
                    if keyed is not None:
                        first = keys.setdefault(keyed, number)
                        # The end of the transaction was delayed by the read of a record that is on the disk.
                        if first != number or self.dedup.find(*keyed, WAITING) is not None:
                            keyed[0].duplicates += 1
                            repeated[number] = first
                            continue
                    twins[number] = self._committed(ending.half, ending.offset, targets)
                # Even an unexpected error of one transaction must not affect others that end in this tick.
                except Exception as error:
                    failed[number] = _command_error(error)
        numbers, appender = list(twins), self.store.appender
        refused = appender.append_all(list(twins.values()), appender.limits_within_store)
        failed |= {numbers[index]: _command_error(refusal) for index, refusal in refused.items()}
        # A duplicate of a message that was not stored must not end: its producer may commit it once more.
        failed |= {number: failed[first] for number, first in repeated.items() if first in failed}
        for (table, key), number in keys.items():
            if number in twins and number not in failed:
                self.dedup.add(table, key, twins[number])
        numbers = [number for number in range(len(endings)) if number not in failed]
        closed = [
            (endings[number].offset, twins[number].physical_offset if number in twins else 0)
            for number in numbers
        ]
        without_op: Mapping[int, Exception] = {}
        try:
            if closed:
                without_op = self.ops(closed)
        except Exception as error:
            without_op = dict.fromkeys(range(len(closed)), error)
        for index, refusal in without_op.items():
            if numbers[index] in twins:
                self._owe(*closed[index], refusal)
            else:
                failed[numbers[index]] = _command_error(refusal)
        return failed

    def key_of(self, half: Half) -> tuple[KeyTable, bytes] | None:
        """Return the table and the key for which the commit of a half message counts, or None."""
        table = self.dedup.tables.get(half.form.real_topic)
        key = b"" if table is None else table.key_of(half.properties)
        return (table, key) if table is not None and key else None

    def _committed(self, half: Half, offset: int, targets: dict[tuple[Hashable, ...], Target]) -> TickMessage:
        """Return the message that a commit stores, which closes the half message or copy at `offset`.

        `targets` caches what several committed messages of a tick have in common: to find it takes 2 µs.
        """
        form, flag, sys_flag, times = half.form, half.flag, half.sys_flag, half.reconsume_times
        key = form.real_topic, form.real_queue_id, form.tags_code, flag, sys_flag, times
        target = targets.get(key)
        if target is None:
            topic, queue_id = checked_destination(self.topics, form.real_topic, form.real_queue_id)
            queue = self.store.appender.queue_of(topic, queue_id)
            traits = Traits(flag, sys_flag & ~TRANSACTION_MASK | COMMITTED, times, form.tags_code)
            target = targets[key] = queue, traits
        queue, traits = target
        properties = half.properties if offset == half.offset else with_beginning(half)
        return TickMessage(
            None, queue, half.body, properties, half.born_timestamp_ms, half.born_host,
            half.unique if form.only_key else None, traits, half.position,
        )  # fmt: skip

    def copy(self, half: Half, properties: bytes) -> TickMessage:
        """Append a copy of a half message to the half-message queue, and close the original."""
        twin = self._append(TRANS_HALF_TOPIC, half, properties, half.born_ms)
        self._op_behind(twin, half.offset)
        return twin

    def give_up(self, half: Half) -> None:
        """Close a half message, and append it to the topic of half messages that are no longer checked."""
        self.topics.ensure(TRANS_CHECK_MAX_TIME_TOPIC, 1)
        twin = self._append(TRANS_CHECK_MAX_TIME_TOPIC, half, half.properties)
        self._op_behind(twin, half.offset)

    def filler(self, offset: int) -> None:
        """Append an empty half message, which gets the queue offset `offset`, and its op message."""
        born_ms, host = self.clock.time_ms(), self.address.packed
        self.store.appender.append(TRANS_HALF_TOPIC, 0, b"", b"", born_timestamp_ms=born_ms, born_host=host)
        self.op(offset)

    def resume(self, half: Half, properties: bytes) -> None:
        """Append a given-up half message to the half-message queue again, so that its checks resume."""
        self._append(TRANS_HALF_TOPIC, half, properties)

    def _append(
        self, topic: str, half: Half, properties: bytes, born_timestamp_ms: int | None = None
    ) -> TickMessage:
        if half.damaged:
            raise Damaged.failed(f"the half message is damaged at log position {half.position}")
        return self.store.appender.append(
            topic, 0, half.body, properties,
            flag=half.flag, sys_flag=half.sys_flag,
            born_timestamp_ms=half.born_timestamp_ms if born_timestamp_ms is None else born_timestamp_ms,
            born_host=half.born_host, reconsume_times=half.reconsume_times,
            tags_code=half.form.tags_code, stored_before=True,
        )  # fmt: skip


def _command_error(error: Exception) -> CommandError:
    if isinstance(error, CommandError):
        return error
    if isinstance(error, StoreRefused):
        return CommandError(error.response_code, error.remark)
    log.error("ending a transaction failed", exc_info=error)
    return CommandError.failed(f"{type(error).__name__}: {error}")

"""Determines which transactions of earlier runs are open, even if another broker has used the store.

An op message contains the offsets of closed half messages. But a missing op message does not prove that a
half message is open: a crash may have destroyed the op message but not the committed message or copy that was
written with it, and Apache's 5.x broker keeps op messages in memory for seconds. So before a half message of
an earlier run is used, this module searches the store for a committed message or later copy with the same
unique key. If a crash has destroyed only the committed message or copy, its op message is ignored.
"""

from __future__ import annotations

from cometmq import logs
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.transactions.half import REMOVED, Half, closed_by, ends, half_of, same_transaction
from cometmq.broker.transactions.ledger import Ledger
from cometmq.broker.transactions.records import TransactionRecords
from cometmq.errors import CommandError, RecordError, StoreError
from cometmq.message import MessageExt
from cometmq.protocol.codes import TRANS_GROUP, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from cometmq.protocol.record.one import decode_record, record_starts
from cometmq.store import WAITING, GetStatus, MessageStore

log = logs.logger(__name__)

OPS_AT_ONCE = 32
SAME_KEY = 64  # maximum number of messages with the same key that a search examines
BYTES_OF_KEY = 32 << 20
MAX_FILLERS = 1 << 20
"""The maximum number of queue offsets that a crash is assumed to have removed from the half-message queue.

A crash can destroy at most the half messages stored in one second, which are far fewer than this limit. If an
op message contains an offset that is further beyond the end of the queue, the offset is ignored.
"""


class Inherited:
    """The transactions that an earlier run of this broker, or another broker, has begun in the store.

    Half messages with queue offsets less than `end` belong to them. This run of the broker stores its half
    messages at the offset `end` and after it.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.restart()

    def restart(self) -> None:
        """Treat all half messages as those of an earlier run, because another broker may have stored them."""
        self.end = self._behind = self._store.max_offset(TRANS_HALF_TOPIC, 0)

    def begin(self, offsets: ConsumerOffsets, topic: str) -> int:
        """Return the stored consumer offset of queue 0 of `topic`, limited to the queue's bounds."""
        stored = offsets.query(TRANS_GROUP, topic, 0)
        return min(max(stored, self._store.min_offset(topic, 0)), self._store.max_offset(topic, 0))

    def load(self, offsets: ConsumerOffsets, ledger: Ledger) -> None:
        """Fill an empty ledger from the stored offset of its head and from the op messages in the store.

        It must run in a thread, before any new message is stored.
        """
        ledger.head = self.begin(offsets, TRANS_HALF_TOPIC)
        begun = offset = self.begin(offsets, TRANS_OP_HALF_TOPIC)
        while True:
            got = self._store.get_messages(TRANS_OP_HALF_TOPIC, 0, offset, OPS_AT_ONCE, reads=WAITING)
            if got.status is GetStatus.FOUND:
                for op in _readable(b"".join(got.buffers)):
                    for closed in self._closed_by(op):
                        if closed < self.end + MAX_FILLERS:
                            ledger.close(closed)
                            self._behind = max(self._behind, closed + 1)
            if got.next_begin_offset <= offset:
                break
            offset = got.next_begin_offset
        if offset > begun:
            text = "read %d op messages; half messages are open from offset %d"
            log.info(text, offset - begun, ledger.head)

    def _closed_by(self, op: MessageExt) -> list[int]:
        if op.properties.get("TAGS") != REMOVED.decode():
            return []
        twin, store = op.prepared_transaction_offset, self._store
        if twin and twin >= store.log.min_position and store.lookups.record_at(twin) is None:
            text = (
                "the op message at log position %d is ignored, because its record at position %d is missing"
            )
            log.warning(text, op.physical_offset, twin)
            return []
        return closed_by(op.body)

    def fill(self, records: TransactionRecords) -> None:
        """Store empty half messages in place of half messages that a crash has destroyed.

        This is necessary if their op messages have survived: new half messages would otherwise get the same
        offsets, and the surviving op messages would close them.
        """
        for offset in range(self.end, self._behind):
            try:
                records.filler(offset)
            except (StoreError, CommandError) as error:
                log.error("could not replace lost half messages from offset %d: %s", offset, error)
                return
        self.end = self._behind

    async def is_settled(self, half: Half) -> bool:
        """Return whether a half message of an earlier run is closed although its op message is missing.

        So it is if the transaction was committed, if a later copy exists, or if `fill` has stored it.
        """
        if half.offset >= self.end:
            return False
        if not half.form.group:
            return True  # only `fill` stores half messages without a producer group
        if not half.key:
            return False
        positions = {half.position}
        for record in await self._with_key(TRANS_HALF_TOPIC, half):
            copy = half_of(record)
            if copy.key == half.key and same_transaction(half, copy):
                if copy.offset > half.offset:
                    return True
                positions.add(copy.position)
        found = await self._with_key(half.form.real_topic, half)
        return any(ends(decode_record(record), half, positions) for record in found)

    async def is_resumed(self, given_up: Half) -> bool:
        """Return whether the checks of a half message that was given up have been resumed."""
        if not given_up.key:
            return False
        found = [half_of(record) for record in await self._with_key(TRANS_HALF_TOPIC, given_up)]
        position = given_up.position
        return any(half.key == given_up.key and half.position > position for half in found)

    async def _with_key(self, topic: str, half: Half) -> list[bytes]:
        return await self._store.lookups.by_key(topic, half.key, SAME_KEY, 0, 2**63 - 1, BYTES_OF_KEY)


def _readable(data: bytes) -> list[MessageExt]:
    """Decode records. Log and omit those that are damaged."""
    found = []
    for start in record_starts(data)[0]:
        try:
            found.append(decode_record(data, start))
        except RecordError as error:
            log.error("could not read an op message: %s", error)
    return found

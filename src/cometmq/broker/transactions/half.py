"""Half messages: their records, the properties of their copies, and the decision of a check. It does no I/O.

A copy contains the number of checks and, in TRAN_PREPARED_QUEUE_OFFSET, the queue offset at which its
transaction began. The born time of a copy is never later than the store time of the first message, so that a
producer whose clock is fast gets no additional time (docs/reference/storage.md, Transactions).
"""

from __future__ import annotations

import enum

import msgspec

from cometmq.message import MessageExt
from cometmq.protocol.codes import TRANS_HALF_TOPIC
from cometmq.protocol.ids import encode_offset_id
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.template import Template, TemplateCache, template_fields
from cometmq.protocol.properties.values import VALUE_END, decode_properties, put, value_of
from cometmq.protocol.record.layout import COMMITTED, TRANSACTION_MASK
from cometmq.protocol.record.one import Buffer, body_crc, encode_record, record_parts

REMOVED = b"d"
"""The tag of an op message, which closes the half messages whose queue offsets its body contains."""
MIN_CHECKS = 15
"""The minimum number of checks before a half message expires, because its producers may start late."""
_DIGITS = 18
_TRANSACTION_ID = b"\x02__transactionId__\x01"


def number_of(text: str | None) -> int | None:
    """Parse a decimal number of at most 18 digits without a sign. Return None for any other text."""
    return int(text) if text and len(text) <= _DIGITS and text.isascii() and text.isdigit() else None


class HalfForm(Template, frozen=True, gc=False):
    """The values that the property strings of many half messages have in common."""

    group: str
    """The producer group that can end the transaction."""
    real_topic: str
    real_queue_id: str
    immunity_ms: int | None
    """The minimum age in ms before the first check, or None if the sender has not set one."""
    checks: int | None
    """The number of checks so far, or None if this is not a copy made by a check."""
    prepared: int | None
    """The queue offset of the transaction's first message, or None if this is the first message."""


def _form_of(properties: bytes, unique: bytes) -> HalfForm:
    found = decode_properties(properties)
    seconds = number_of(found.get(names.CHECK_IMMUNITY_TIME_IN_SECONDS))
    return HalfForm(
        *template_fields(properties, unique),
        found.get(names.PGROUP, ""),
        found.get(names.REAL_TOPIC, ""),
        found.get(names.REAL_QID, ""),
        None if seconds is None else 1000 * seconds,
        number_of(found.get(names.TRANSACTION_CHECK_TIMES)),
        number_of(found.get(names.TRAN_PREPARED_QUEUE_OFFSET)),
    )


_forms = TemplateCache(_form_of)


class Half(msgspec.Struct, frozen=True, gc=False):
    """A half message as it is stored. Times are in ms; hosts are packed as in records."""

    topic: str
    queue_id: int
    offset: int
    position: int
    flag: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: bytes
    store_timestamp_ms: int
    store_host: bytes
    reconsume_times: int
    body: bytes
    crc: int
    properties: bytes
    """The properties in their stored form."""
    unique: bytes
    """The message's unique key, which is not part of `form` because it differs from message to message.

    It is empty if the message has no unique key that can be cut out of its properties.
    """
    form: HalfForm

    @property
    def first(self) -> int:
        """The queue offset of the first message of the transaction."""
        prepared = self.form.prepared
        return self.offset if prepared is None else prepared

    @property
    def key(self) -> str:
        """The unique key of the message, or ""."""
        return (self.unique or value_of(self.properties, b"UNIQ_KEY")).decode("utf-8", "replace")

    @property
    def checks(self) -> int:
        """The number of checks so far."""
        return self.form.checks or 0

    @property
    def offset_msg_id(self) -> str:
        return encode_offset_id(self.store_host, self.position)

    @property
    def since_ms(self) -> int:
        """The time (ms) from which the age of the half message is counted."""
        return self.store_timestamp_ms if self.is_first else self.born_ms

    @property
    def is_first(self) -> bool:
        """Whether this half message is the first of its transaction, or its checks were resumed."""
        return self.form.prepared is None and not self.form.checks

    @property
    def born_ms(self) -> int:
        """The born time (ms) that copies of the half message have."""
        return min(self.store_timestamp_ms, self.born_timestamp_ms)

    @property
    def damaged(self) -> bool:
        """Whether the body does not match the record's CRC."""
        return bool(self.body) and body_crc(self.body) != self.crc

    @property
    def is_half(self) -> bool:
        return self.topic == TRANS_HALF_TOPIC and self.queue_id == 0


def half_of(record: Buffer, at: int = 0) -> Half:
    """Decode a record as a half message. Raises RecordError if the record is damaged.

    The properties of a producer's half messages often differ only in the unique key. A cache keeps the parsed
    values of the other properties, so decoding a record takes only 2.5 µs.
    """
    head, body_at, body_end, topic_at, topic_end = record_parts(record, at)
    (
        size, _, crc, queue_id, flag, offset, position, sys_flag, born_ms, born_host, stored_ms, store_host,
        reconsume_times, _, _,
    ) = head  # fmt: skip
    body = bytes(record[body_at:body_end])
    properties = bytes(record[topic_end + 2 : at + size])
    # The last property of half messages of 5.x clients repeats the unique key. It is omitted from the lookup,
    # because the cache would otherwise need an entry for each message.
    named_at = properties.rfind(_TRANSACTION_ID)
    if named_at >= 0 and properties.find(VALUE_END, named_at + 1) < 0:
        form, unique = _forms.find(properties[:named_at])
    else:
        form, unique = _forms.find(properties)
    return Half(
        str(record[topic_at:topic_end], "utf-8", "replace"), queue_id, offset, position, flag, sys_flag,
        born_ms, born_host, stored_ms, store_host, reconsume_times, body, crc, properties, unique, form,
    )  # fmt: skip


# -- the decision of a check


class Verdict(enum.Enum):
    """The decision of a transaction check about an open half message."""

    WAIT = "the half message and all later ones are too young"
    PUT_BACK = "its sender has asked for more time: it stays, or a copy of it is stored behind the others"
    CHECK = "a copy is stored, and its producer is asked"
    DISCARD = "nobody will be asked any more: it goes to TRANS_CHECK_MAX_TIME_TOPIC"


def judge(half: Half, now_ms: int, timeout_ms: int, most_checks: int, oldest_ms: int) -> Verdict:
    """Decide what a transaction check does with an open half message.

    `timeout_ms` and `most_checks` are the settings transactionTimeOut and transactionCheckMax. Retention may
    delete messages whose store time is before `oldest_ms`.

    If the clock was set back, the message counts as old enough for a check. If the clock was set forward, or
    the broker was stopped for long, the message does not expire before it has been checked.
    """
    age_ms = now_ms - half.since_ms
    checks = half.checks
    if checks >= most_checks:
        return Verdict.DISCARD
    if half.since_ms < oldest_ms:
        return Verdict.DISCARD if checks >= MIN_CHECKS else Verdict.CHECK
    immunity_ms = half.form.immunity_ms
    if immunity_ms is None:
        return Verdict.WAIT if 0 <= age_ms < timeout_ms else Verdict.CHECK
    return Verdict.PUT_BACK if 0 <= age_ms < immunity_ms else Verdict.CHECK


# -- stored forms


def with_beginning(half: Half) -> bytes:
    """Return a half message's properties, with the queue offset at which its transaction began."""
    return put(half.properties, names.TRAN_PREPARED_QUEUE_OFFSET.encode(), b"%d" % half.first)


def copy_properties(half: Half, *, checked: bool) -> bytes:
    """Return the properties of the next copy of a half message."""
    properties = with_beginning(half)
    if checked:
        properties = put(properties, names.TRANSACTION_CHECK_TIMES.encode(), b"%d" % (half.checks + 1))
    return properties


def same_transaction(half: Half, other: Half) -> bool:
    """Return whether two half messages with the same key belong to the same transaction.

    A producer that has sent a message twice has two transactions with the same key, so the offsets at which
    they began are compared. Copies made by Apache's broker lack this offset, but have more checks.
    """
    by_apache = other.form.prepared is None and other.checks > half.checks
    return by_apache or other.first == half.first


def ends(message: MessageExt, half: Half, positions: set[int]) -> bool:
    """Return whether `message` is what a commit has stored for a half message at one of these positions."""
    properties = message.properties
    return (
        message.sys_flag & TRANSACTION_MASK == COMMITTED
        and properties.get(names.UNIQ_KEY) == half.key
        and (
            message.prepared_transaction_offset in positions
            or number_of(properties.get(names.TRAN_PREPARED_QUEUE_OFFSET)) == half.first
        )
    )


def closed_by(body: bytes) -> list[int]:
    """Return the queue offsets of the half messages that an op message with this body closes.

    RocketMQ 4.9 stores one offset, 5.x several offsets separated by commas.
    """
    parts = body.decode("ascii", "replace").split(",")
    return [number for part in parts if (number := number_of(part)) is not None]


def check_body(half: Half, properties: bytes, position: int, offset: int, queue_id: int) -> bytes:
    """Return the body of a transaction check: a half message's copy, with its real topic and queue.

    `properties`, `position` and `offset` (in the queue) are those of the copy.
    """
    return encode_record(
        half.form.real_topic, half.body, properties, queue_id=queue_id, queue_offset=offset,
        physical_offset=position, born_timestamp_ms=half.born_ms, born_host=half.born_host,
        store_timestamp_ms=half.store_timestamp_ms, store_host=half.store_host, flag=half.flag,
        sys_flag=half.sys_flag & ~TRANSACTION_MASK, reconsume_times=half.reconsume_times,
    )  # fmt: skip

"""A half message: what its record says, what its copies carry, and what a check does with it. No I/O in here
(docs/reference/storage.md, Transactions).

A copy carries the number of checks, and the queue offset at which its transaction began, in
TRAN_PREPARED_QUEUE_OFFSET. Its born time is never later than when the first of them was stored, so that a
producer whose clock is ahead gets no longer time.
"""

from __future__ import annotations

import enum

import msgspec

from cometmq.message import MessageExt
from cometmq.protocol.codes import TRANS_HALF_TOPIC, SysFlag
from cometmq.protocol.ids import pack_host
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import put
from cometmq.protocol.record.layout import COMMITTED, TRANSACTION_MASK
from cometmq.protocol.record.one import Buffer, decode_record, encode_record, properties_of

REMOVED = b"d"
"""Tag of an op message: the half messages that its body names are closed."""
LEAST_CHECKS = 15
"""A message is never too old before so many checks: its producers may come later than the broker."""
_DIGITS = 18


def number_of(text: str | None) -> int | None:
    """A decimal number without a sign; None for anything else."""
    return int(text) if text and len(text) <= _DIGITS and text.isascii() and text.isdigit() else None


class Half(msgspec.Struct, frozen=True):
    """A half message as it is stored."""

    message: MessageExt
    properties: bytes
    """As stored."""
    checks: int | None
    """How often it was asked for; None: this is no copy that a check has made."""
    prepared: int | None
    """Queue offset of the first message of its transaction; None: this is the first."""

    @property
    def offset(self) -> int:
        return self.message.queue_offset

    @property
    def first(self) -> int:
        """Where its transaction began."""
        return self.offset if self.prepared is None else self.prepared

    @property
    def key(self) -> str:
        """Its unique key, or nothing."""
        return self.message.properties.get(names.UNIQ_KEY, "")

    @property
    def group(self) -> str:
        """Its producer group."""
        return self.message.properties.get(names.PGROUP, "")

    @property
    def real_topic(self) -> str:
        return self.message.properties.get(names.REAL_TOPIC, "")

    @property
    def immunity_ms(self) -> int | None:
        """How old it must be before its first check, if its sender has said so."""
        seconds = number_of(self.message.properties.get(names.CHECK_IMMUNITY_TIME_IN_SECONDS))
        return None if seconds is None else 1000 * seconds

    @property
    def since_ms(self) -> int:
        """From when on its age counts: the broker's clock for the first message, not the producer's."""
        return self.message.store_timestamp_ms if self.is_first else self.born_ms

    @property
    def is_first(self) -> bool:
        """Whether no copy came before it: one that is resumed begins anew."""
        return self.prepared is None and not self.checks

    @property
    def born_ms(self) -> int:
        """What its copies say of when it was born."""
        return min(self.message.store_timestamp_ms, self.message.born_timestamp_ms)


def half_of(record: Buffer, at: int = 0) -> Half:
    """The half message of a record. Raises RecordError."""
    message = decode_record(record, at)
    found = message.properties
    return Half(
        message,
        properties_of(record, at),
        number_of(found.get(names.TRANSACTION_CHECK_TIMES)),
        number_of(found.get(names.TRAN_PREPARED_QUEUE_OFFSET)),
    )


def is_half(message: MessageExt) -> bool:
    """Whether a record is a half message; they all lie in queue 0."""
    return message.topic == TRANS_HALF_TOPIC and message.queue_id == 0


# -- what a check does


class Limits(msgspec.Struct, frozen=True):
    """transactionTimeOut, transactionCheckMax, and before which store time retention takes messages."""

    timeout_ms: int
    most_checks: int
    oldest_ms: int


class Verdict(enum.Enum):
    """What a check does with an open half message."""

    WAIT = "it is too young, and so are those behind it"
    PUT_BACK = "its sender has asked for more time: it stays, or a copy of it is stored behind the others"
    CHECK = "a copy is stored, and its producer is asked"
    DISCARD = "nobody will be asked any more: it goes to TRANS_CHECK_MAX_TIME_TOPIC"


def judge(half: Half, now_ms: int, limits: Limits) -> Verdict:
    """What becomes of an open half message. A clock that has stepped back makes it old enough. One that has
    jumped ahead, or a broker that was away for long, does not make it too old before it was asked about."""
    age_ms = now_ms - half.since_ms
    checks = half.checks or 0
    if checks >= limits.most_checks:
        return Verdict.DISCARD
    if half.since_ms < limits.oldest_ms:
        return Verdict.DISCARD if checks >= LEAST_CHECKS else Verdict.CHECK
    immunity_ms = half.immunity_ms
    if immunity_ms is None:
        return Verdict.WAIT if 0 <= age_ms < limits.timeout_ms else Verdict.CHECK
    return Verdict.PUT_BACK if 0 <= age_ms < immunity_ms else Verdict.CHECK


# -- what is stored


def with_beginning(half: Half) -> bytes:
    """Its properties, and where its transaction began."""
    return put(half.properties, names.TRAN_PREPARED_QUEUE_OFFSET.encode(), b"%d" % half.first)


def copy_properties(half: Half, *, checked: bool) -> bytes:
    """Those of the next copy."""
    properties = with_beginning(half)
    if checked:
        properties = put(properties, names.TRANSACTION_CHECK_TIMES.encode(), b"%d" % ((half.checks or 0) + 1))
    return properties


def same_transaction(half: Half, other: Half) -> bool:
    """Whether two half messages with the same key are copies of one. A producer that has sent a message twice
    has two transactions. Copies that Apache's broker has made do not say where theirs began, but they count
    its checks."""
    by_apache = other.prepared is None and (other.checks or 0) > (half.checks or 0)
    return by_apache or other.first == half.first


def ends(message: MessageExt, half: Half, positions: set[int]) -> bool:
    """Whether a message is what a commit has stored of a transaction: it names one of the half messages at
    these log positions, or the place where the transaction began."""
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
    """The half messages that an op message names: one number (4.9), or some with commas (5.x)."""
    parts = body.decode("ascii", "replace").split(",")
    return [number for part in parts if (number := number_of(part)) is not None]


def check_body(half: Half, properties: bytes, position: int, offset: int, queue_id: int) -> bytes:
    """The record that a producer is asked about: its copy at this place, with its real topic and queue."""
    message = half.message
    return encode_record(
        half.real_topic,
        message.body,
        properties,
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=position,
        born_timestamp_ms=half.born_ms,
        born_host=pack_host(message.born_host),
        store_timestamp_ms=message.store_timestamp_ms,
        store_host=pack_host(message.store_host),
        flag=message.flag,
        sys_flag=message.sys_flag & ~int(SysFlag.TRANSACTION_MASK),
        reconsume_times=message.reconsume_times,
    )

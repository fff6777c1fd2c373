"""Timer messages: the stored form of a delivery time, and the handle of a waiting message.

A message with a delivery time waits in queue 0 of rmq_sys_wheel_timer. Its property TIMER_OUT_MS holds the
time; REAL_TOPIC and REAL_QID hold the destination (docs/reference/storage.md, Timer messages). TIMER_OUT_MS
is the last whole second before the delivery time. Brokers deliver the message one second after TIMER_OUT_MS,
so it is never early.
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from cometmq.errors import ProtocolError
from cometmq.protocol.properties.values import stored_tags_code, value_of
from cometmq.protocol.sql.java_values import Mismatch, to_long

PRECISION_MS = 1000
_MAX_OUT = 1 << 45  # Upper limit of TIMER_OUT_MS: a time in the year 3084
_MIN_OUT = 1 << 31  # Lower limit of TIMER_OUT_MS, because a lower value could be the hash of a tag
CODES_BEGIN = _MIN_OUT << 2
"""The lowest tags code that CometMQ uses for timers. Apache's brokers use 32-bit hashes, which are lower."""
_DELAYED, _RECALL = 2, 1
RECALL_FOUND = b"TIMER_RECALL_FOUND"
"""The property of recalls of found messages. Clients cannot set it, and Apache's broker ignores it."""


def out_ms_of(deliver_ms: int) -> int:
    """Return TIMER_OUT_MS for a delivery time: the last whole second before it. Both are in epoch ms."""
    return (deliver_ms - 1) // PRECISION_MS * PRECISION_MS


class TimerCode(NamedTuple):
    """The tags code that a consume queue stores for a timer message.

    It contains all that a broker needs to schedule the message, so the broker need not read the record.

    Attributes:
        out_ms: The property TIMER_OUT_MS, in epoch ms.
        delayed: Whether the client gave a delay instead of a time. The monotonic clock measures delays.
        recall: Whether the message recalls another message.
    """

    out_ms: int
    delayed: bool
    recall: bool

    @property
    def due_ms(self) -> int:
        """The delivery time by the wall clock, in epoch ms."""
        return self.out_ms + PRECISION_MS

    def pack(self) -> int:
        """Return the tags code that a consume queue stores for the timer message."""
        return self.out_ms << 2 | self.delayed * _DELAYED | self.recall * _RECALL

    @classmethod
    def unpack(cls, code: int) -> TimerCode:
        """Return the `TimerCode` for a stored tags code, which must not be below CODES_BEGIN."""
        return cls(code >> 2, bool(code & _DELAYED), bool(code & _RECALL))

    @classmethod
    def of(cls, properties: bytes) -> TimerCode | None:
        """Return the `TimerCode` for a record's properties, or None if they contain no valid TIMER_OUT_MS."""
        text = value_of(properties, b"TIMER_OUT_MS")
        if not text.isdigit() or len(text) > 15 or not _MIN_OUT <= int(text) < _MAX_OUT:
            return None
        delayed = value_of(properties, b"TIMER_DELAY_SEC") or value_of(properties, b"TIMER_DELAY_MS")
        return cls(int(text), bool(delayed), bool(value_of(properties, b"TIMER_DEL_UNIQKEY")))


def timer_tags_code(properties: bytes) -> int:
    """Return the tags code that the consume queue stores for a record of rmq_sys_wheel_timer."""
    code = TimerCode.of(properties)
    return stored_tags_code(properties) if code is None else code.pack()


def delete_keys(topic: bytes, unique_key: bytes) -> tuple[bytes, bytes]:
    """Return the two possible values of TIMER_DEL_UNIQKEY in a recall of this message.

    RocketMQ 5.5.0 and CometMQ use the first value by default. RocketMQ's brokers use the second value if
    their setting `appendTopicForTimerDeleteKey` is true.
    """
    return unique_key, topic + b"+" + unique_key


class BadHandle(ProtocolError):
    """The text is not a recall handle."""


class RecallHandle(NamedTuple):
    """The handle of a message that waits for its delivery time (docs/reference/remoting.md, Recall)."""

    topic: str
    broker_name: str
    deliver_ms: int
    unique_key: str

    def encode(self) -> str:
        """Return this recall handle as the text that clients receive."""
        text = f"v1 {self.topic} {self.broker_name} {self.deliver_ms} {self.unique_key}"
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, text: str) -> RecallHandle:
        """Parse the text of a recall handle. Raises BadHandle if the text is invalid."""
        try:
            parts = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True).decode().split(" ")
        except (ValueError, binascii.Error, UnicodeError):
            raise BadHandle("recall handle is invalid") from None
        if len(parts) < 5 or parts[0] != "v1" or not parts[4]:
            raise BadHandle("recall handle is invalid")
        topic, broker_name, time, unique_key = parts[1:5]
        try:
            deliver_ms: int = to_long(time)
        except Mismatch:
            deliver_ms = -1
        return cls(topic, broker_name, deliver_ms, unique_key)

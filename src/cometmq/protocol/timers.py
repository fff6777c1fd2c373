"""Timer messages: the stored form of a delivery time, and the handle of a waiting message.

A message with a delivery time waits in queue 0 of rmq_sys_wheel_timer, with its time in TIMER_OUT_MS and its
destination in REAL_TOPIC and REAL_QID (docs/reference/storage.md, Timer messages). TIMER_OUT_MS is the last
whole second before the delivery time, so that a message delivered a second after it is never early.
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from cometmq.errors import ProtocolError
from cometmq.protocol.properties.values import stored_tags_code, value_of
from cometmq.protocol.sql.java_values import Mismatch, to_long

PRECISION_MS = 1000
_MAX_OUT = 1 << 45  # a time in the year 3084
_MIN_OUT = 1 << 31  # a lower value could be the hash of a tag
CODES_BEGIN = _MIN_OUT << 2
"""The first tags code that CometMQ uses for timers; those of Apache's broker are 32-bit hashes."""
_DELAYED, _RECALL = 2, 1
RECALL_FOUND = b"TIMER_RECALL_FOUND"
"""CometMQ's property of a recall whose message was found. Clients cannot write it; Apache ignores it."""


def out_ms_of(deliver_ms: int) -> int:
    """Return TIMER_OUT_MS for a delivery time."""
    return (deliver_ms - 1) // PRECISION_MS * PRECISION_MS


class TimerCode(NamedTuple):
    """The tags code in the queue unit of a timer message, which makes reading the record unnecessary.

    Times are in epoch ms.

    Attributes:
        delayed: Whether the time was given as a delay, which the monotonic clock measures.
        recall: Whether the message recalls another one.
    """

    out_ms: int
    delayed: bool
    recall: bool

    @property
    def due_ms(self) -> int:
        """The delivery time by the wall clock."""
        return self.out_ms + PRECISION_MS

    def pack(self) -> int:
        """Return the number stored in the unit."""
        return self.out_ms << 2 | self.delayed * _DELAYED | self.recall * _RECALL

    @classmethod
    def unpack(cls, code: int) -> TimerCode:
        """Return the code for a number from CODES_BEGIN on."""
        return cls(code >> 2, bool(code & _DELAYED), bool(code & _RECALL))

    @classmethod
    def of(cls, properties: bytes) -> TimerCode | None:
        """Return the code for a record's properties, or None if they contain no valid time."""
        text = value_of(properties, b"TIMER_OUT_MS")
        if not text.isdigit() or len(text) > 15 or not _MIN_OUT <= int(text) < _MAX_OUT:
            return None
        delayed = value_of(properties, b"TIMER_DELAY_SEC") or value_of(properties, b"TIMER_DELAY_MS")
        return cls(int(text), bool(delayed), bool(value_of(properties, b"TIMER_DEL_UNIQKEY")))


def timer_tags_code(properties: bytes) -> int:
    """Return the tags code in the queue unit of a record of rmq_sys_wheel_timer."""
    code = TimerCode.of(properties)
    return stored_tags_code(properties) if code is None else code.pack()


def delete_keys(topic: bytes, unique_key: bytes) -> tuple[bytes, bytes]:
    """Return the two values of TIMER_DEL_UNIQKEY that recall a message.

    The first is the default of 5.5.0 and of CometMQ, the second that of `appendTopicForTimerDeleteKey`.
    """
    return unique_key, topic + b"+" + unique_key


class BadHandle(ProtocolError):
    """The text is not a recall handle."""


class RecallHandle(NamedTuple):
    """The handle of a waiting message for RECALL_MESSAGE (docs/reference/remoting.md, Recall)."""

    topic: str
    broker_name: str
    deliver_ms: int
    unique_key: str

    def encode(self) -> str:
        """Return the handle as text, as clients receive it."""
        text = f"v1 {self.topic} {self.broker_name} {self.deliver_ms} {self.unique_key}"
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, text: str) -> RecallHandle:
        """Decode a handle. Raises BadHandle."""
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

"""Message traces: the records about sends and listener calls that clients write to a trace topic.

The body of such a message is a sequence of text records: a kind and its fields, separated by 0x01 and
followed by 0x02 (docs/reference/client.md, Traces). Times and durations are in ms.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias

import msgspec
from msgspec.structs import astuple, fields

from cometmq.errors import BodyError, shown
from cometmq.protocol.codes import SYSTEM_TOPIC_PREFIX, TRACE_TOPIC

_CLOUD_TRACE_TOPIC = SYSTEM_TOPIC_PREFIX + "TRACE_DATA_"
_BODY_BYTES = 118_000
"""A trace message whose body has this many bytes gets no further record, as in Java's 4.9 client."""
_KEYS_BYTES = 24_000
"""Maximum size in bytes of a trace message's keys: all properties of a message may have 32,767 bytes."""
_LINE_BYTES = 4 << 20
"""Maximum total size of the waiting trace records, in bytes: room for about 15,000 records."""
_BETWEEN, _END = "\x01", "\x02"
_LONG = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


class MessageType(IntEnum):
    """The kind of a sent message. Readers also accept unknown numbers, which later versions may write."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """The outcome of a listener's call in a trace record."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


class _Trace(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename="camel", tag_field="type", tag=str):
    """The base class of trace records. Fields are in wire order; None is written as `null`."""

    may_be_left_out: ClassVar[int] = 0
    """The number of trailing fields that are omitted from the text of a record if they are None."""


class _Named(_Trace, frozen=True, kw_only=True, gc=False):
    timestamp_ms: int
    region: str | None
    group: str | None
    topic: str | None
    msg_id: str


class _Described(_Named, frozen=True, kw_only=True, gc=False):
    tags: str | None
    keys: str | None
    store_host: str | None


class Pub(_Described, frozen=True, kw_only=True, gc=False):
    """The trace record of a send to which a broker responded. `success` means the status SEND_OK."""

    may_be_left_out: ClassVar[int] = 1
    body_length: int
    cost_ms: int
    message_type: int
    offset_msg_id: str | None
    success: bool
    client_host: str | None = None


class SubBefore(_Trace, frozen=True, kw_only=True, gc=False):
    """The record before a message is passed to a listener. The SubAfter has the same `request_id`."""

    timestamp_ms: int
    region: str | None
    group: str | None
    request_id: str
    msg_id: str
    retry_times: int
    keys: str | None


class SubAfter(_Trace, frozen=True, kw_only=True, gc=False):
    """The record after a listener's call. `cost_ms` is its duration divided by the number of messages."""

    may_be_left_out: ClassVar[int] = 2
    request_id: str
    msg_id: str
    cost_ms: int
    success: bool
    keys: str | None
    context_code: int
    timestamp_ms: int | None = None
    group: str | None = None


class EndTransaction(_Described, frozen=True, kw_only=True, gc=False):
    """The record of a commit or rollback; `from_check` marks the response to a broker's check."""

    message_type: int
    transaction_id: str | None
    state: str
    from_check: bool


class Recall(_Named, frozen=True, kw_only=True, gc=False):
    """The trace record of the recall of a delayed message (5.x)."""

    success: bool
    keys: ClassVar[None] = None


AnyTrace: TypeAlias = Pub | SubBefore | SubAfter | EndTransaction | Recall
_KINDS: dict[str, type[AnyTrace]] = {
    kind.__name__: kind for kind in (Pub, SubBefore, SubAfter, EndTransaction, Recall)
}
_FIELDS = {kind: [(each.name, each.type) for each in fields(kind)] for kind in _KINDS.values()}
_NEEDED = {kind: len(known) - kind.may_be_left_out for kind, known in _FIELDS.items()}


def encode_trace(trace: AnyTrace) -> str:
    """Encode a trace record, in 2 µs, with 0x02 at its end. Separators within fields are replaced by `?`."""
    values = astuple(trace)
    while values[-1] is None and len(values) > _NEEDED[type(trace)]:
        values = values[:-1]
    parts = [type(trace).__name__, *[value if type(value) is str else _text(value) for value in values]]
    text = _BETWEEN.join(parts)
    if text.count(_BETWEEN) != len(values) or _END in text:
        text = _BETWEEN.join(part.replace(_BETWEEN, "?").replace(_END, "?") for part in parts)
    return text + _END


def _text(value: int | bool | None) -> str:
    if value is None:
        return "null"
    return str(value).lower() if type(value) is bool else str(int(value))


def decode_trace(record: str) -> AnyTrace:
    """Parse the text of a trace record, without the 0x02 at its end.

    Fields after the last known one are ignored, as in Java. Raises BodyError if the text is invalid.
    """
    name, *texts = record.split(_BETWEEN, 32)
    kind = _KINDS.get(name)
    if kind is None:
        raise BodyError("trace", f"unknown kind {shown(name)}", "type")
    if kind is Pub and len(texts) == 12:
        texts.insert(11, "null")  # Early clients wrote no offset id
    elif kind is SubAfter and len(texts) == 5:
        texts.append("0")  # Early clients did not write the field `contextCode`
    known = _FIELDS[kind]
    if len(texts) < _NEEDED[kind]:
        raise BodyError("trace", f"a record of {name} has {len(texts)} instead of {_NEEDED[kind]} fields")
    return kind(
        **{field: _value(text, type_, field) for text, (field, type_) in zip(texts, known, strict=False)}
    )


def _value(text: str, type_: Any, field: str) -> Any:
    """Convert a field's text. As in Java, all but `true` is False. Raises BodyError for an invalid number."""
    if type_ is str:
        return text
    if type_ == (str | None):
        return None if text == "null" else text
    if type_ is bool:
        return text.lower() == "true"
    if text in ("", "null") and type_ is not int:
        return None  # RocketMQ 5 leaves time fields empty if the access channel is CLOUD
    if _LONG.fullmatch(text) is None or not -(2**63) <= (number := int(text)) < 2**63:
        raise BodyError("trace", f"{shown(text)} is not a 64-bit number", field)
    return number


def traces_about(body: bytes, msg_id: str, unreadable: list[str]) -> Iterator[AnyTrace]:
    """Yield those records of a trace message that are about the message `msg_id`.

    Only records that contain this id are parsed; `unreadable` receives an error text for each that cannot be.
    For a batch of messages, Java's clients write one record in which all ids are joined by commas.
    """
    wanted = msg_id.encode("utf-8", "replace")
    at = body.find(wanted) if wanted else -1
    while at >= 0:
        start, end = body.rfind(b"\x02", 0, at) + 1, body.find(b"\x02", at)
        end = len(body) if end < 0 else end
        try:
            trace = decode_trace(body[start:end].decode("utf-8", "replace"))
        except BodyError as error:
            unreadable.append(str(error))
        else:
            if msg_id == trace.msg_id or msg_id in trace.msg_id.split(","):
                yield trace
        at = body.find(wanted, end)


def is_trace_topic(topic: str, configured: str) -> bool:
    """Return whether a topic contains traces, such as the configured one. It is then not traced itself."""
    return topic in (configured, TRACE_TOPIC) or topic.startswith(_CLOUD_TRACE_TOPIC)


class TraceLine:
    """The queue of trace records that wait to be sent, each with the keys by which it can be queried."""

    def __init__(self, most_bytes: int = _LINE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._records: deque[bytes] = deque()
        self._keys: deque[bytes] = deque()
        """The keys of each record. Pairs of both in one deque would burden the garbage collector."""
        self._bytes = 0
        self._keys_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def size(self) -> int:
        """The total size of the waiting records and their keys, in bytes."""
        return self._bytes + self._keys_bytes

    @property
    def fills_a_message(self) -> bool:
        return self._bytes >= _BODY_BYTES or self._keys_bytes >= _KEYS_BYTES

    def add(self, trace: AnyTrace) -> bool:
        """Add a record unless the queue is full, and return whether it was added.

        The record's keys are the id and the keys of the traced message, or only the id if the message's keys
        are very long.
        """
        if self.size >= self._most_bytes:
            return False
        record = encode_trace(trace).encode("utf-8", "replace")
        words = (f"{trace.msg_id} {trace.keys}" if trace.keys else trace.msg_id).encode("utf-8", "replace")
        if len(words) > _KEYS_BYTES:
            words = trace.msg_id.encode("utf-8", "replace")[:_KEYS_BYTES]
        self._records.append(record)
        self._keys.append(words)
        self._bytes += len(record)
        self._keys_bytes += len(words)
        return True

    def take(self) -> tuple[bytes, str, int]:
        """Remove the next message of at least one record. Return its body, its keys, and their number."""
        records: list[bytes] = []
        words: list[bytes] = []
        body_bytes = keys_bytes = 0
        while self._records and body_bytes < _BODY_BYTES:
            if records and keys_bytes + len(self._keys[0]) > _KEYS_BYTES:
                break
            record, keys = self._records.popleft(), self._keys.popleft()
            records.append(record)
            words += keys.split()
            body_bytes += len(record)
            keys_bytes += len(keys)
        self._bytes -= body_bytes
        self._keys_bytes -= keys_bytes
        return b"".join(records), b" ".join(dict.fromkeys(words)).decode("utf-8", "replace"), len(records)

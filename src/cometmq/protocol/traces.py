"""Message traces: what clients write of their sends and of their listeners' calls into a trace topic.

The body of such a message is text, records one after another: a kind and its fields with 0x01 in between,
0x02 behind the last one (docs/reference/client.md, Traces). Times are milliseconds, of spans too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias

import msgspec
from msgspec.structs import astuple, fields

from cometmq.errors import BodyError, shown

__all__ = [
    "AnyTrace",
    "ConsumeCode",
    "EndTransaction",
    "MessageType",
    "Pub",
    "Recall",
    "SubAfter",
    "SubBefore",
    "decode_trace",
    "encode_trace",
    "traces_about",
]

_BETWEEN, _END = "\x01", "\x02"
_LONG = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


class MessageType(IntEnum):
    """What kind of message was sent. Readers take numbers of later versions too."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """How a listener's call ended."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


class _Trace(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename="camel", tag_field="type", tag=str):
    """Base of the kinds: their fields are in the order of the wire. None is written as `null`."""

    may_be_left_out: ClassVar[int] = 0
    """Fields at the end that are not written where they are None."""


class Pub(_Trace, frozen=True, kw_only=True, gc=False):
    """A send that a broker answered. success: the status was SEND_OK."""

    may_be_left_out: ClassVar[int] = 1
    timestamp_ms: int
    region: str | None
    group: str | None
    topic: str | None
    msg_id: str
    tags: str | None
    keys: str | None
    store_host: str | None
    body_length: int
    cost_ms: int
    message_type: int
    offset_msg_id: str | None
    success: bool
    client_host: str | None = None


class SubBefore(_Trace, frozen=True, kw_only=True, gc=False):
    """A message that a listener is about to get. request_id: the same in the SubAfter of the call."""

    timestamp_ms: int
    region: str | None
    group: str | None
    request_id: str
    msg_id: str
    retry_times: int
    keys: str | None


class SubAfter(_Trace, frozen=True, kw_only=True, gc=False):
    """A message that a listener has handled, or not. cost_ms: of the call, shared out among its messages."""

    may_be_left_out: ClassVar[int] = 2
    request_id: str
    msg_id: str
    cost_ms: int
    success: bool
    keys: str | None
    context_code: int
    timestamp_ms: int | None = None
    group: str | None = None


class EndTransaction(_Trace, frozen=True, kw_only=True, gc=False):
    """The end of a transaction, as its producer told the broker. from_check: when the broker asked."""

    timestamp_ms: int
    region: str | None
    group: str | None
    topic: str | None
    msg_id: str
    tags: str | None
    keys: str | None
    store_host: str | None
    message_type: int
    transaction_id: str | None
    state: str
    from_check: bool


class Recall(_Trace, frozen=True, kw_only=True, gc=False):
    """A delayed message that was called back (5.x)."""

    timestamp_ms: int
    region: str | None
    group: str | None
    topic: str | None
    msg_id: str
    success: bool


AnyTrace: TypeAlias = Pub | SubBefore | SubAfter | EndTransaction | Recall
_KINDS: dict[str, type[AnyTrace]] = {
    kind.__name__: kind for kind in (Pub, SubBefore, SubAfter, EndTransaction, Recall)
}
_FIELDS = {kind: [(each.name, each.type) for each in fields(kind)] for kind in _KINDS.values()}
_NEEDED = {kind: len(known) - kind.may_be_left_out for kind, known in _FIELDS.items()}


def encode_trace(trace: AnyTrace) -> str:
    """The record, its end included. Separators inside of fields are replaced by `?`. 2 µs."""
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
    """Read a record, without its end. Raises BodyError. Further fields are left out, as Java leaves them."""
    name, *texts = record.split(_BETWEEN, 32)
    kind = _KINDS.get(name)
    if kind is None:
        raise BodyError("trace", f"there is no kind {shown(name)}", "type")
    if kind is Pub and len(texts) == 12:
        texts.insert(11, "null")  # early clients wrote no offset id
    elif kind is SubAfter and len(texts) == 5:
        texts.append("0")  # and no context code
    known = _FIELDS[kind]
    if len(texts) < _NEEDED[kind]:
        raise BodyError("trace", f"a record of {name} has {_NEEDED[kind]} fields, this one {len(texts)}")
    return kind(
        **{field: _value(text, type_, field) for text, (field, type_) in zip(texts, known, strict=False)}
    )


def _value(text: str, type_: Any, field: str) -> Any:
    """A field's value; as Java, what is not `true` is false."""
    if type_ is str:
        return text
    if type_ == (str | None):
        return None if text == "null" else text
    if type_ is bool:
        return text.lower() == "true"
    if text in ("", "null") and type_ is not int:
        return None  # empty: what 5.x leaves of a time on the cloud channel
    if _LONG.fullmatch(text) is None or not -(2**63) <= (number := int(text)) < 2**63:
        raise BodyError("trace", f"{shown(text)} is no number of 64 bits", field)
    return number


def traces_about(body: bytes, msg_id: str, unreadable: list[str]) -> Iterator[AnyTrace]:
    """The records of a body about one message. unreadable: takes the reasons why others cannot be read.

    Only records that hold the id are looked at. A batch of Java's has one record, its ids joined by commas.
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

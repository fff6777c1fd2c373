"""What all JSON bodies share: typed reading of both dialects, and writing what Java's fastjson reads.

A body class declares its fields in Python names; the wire has their camelCase. Fields without a value (None)
are not written, all others are, as fastjson does. Keys are sorted. Reading is tolerant as Java is: unknown
keys are ignored, missing and null ones take the default, numbers and booleans may be quoted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec

from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.lenient import Json, LenientError, ObjectKey, read_lenient

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

SERVER_MAX = 1 << 20
"""For what servers read: nobody may keep them busy for seconds."""
CLIENT_MAX = 16 << 20
"""For what only clients and tools read: a table of queues may be as long as a frame."""

BYTES_OF_A_VALUE = 16
"""Queues and subscriptions have fewer values for their length."""

_encode = msgspec.json.encode
_decoders: dict[type, Callable[[Buffer], Any] | None] = {}


def always(value: T, name: str | None = None) -> T:
    """A default that is written even if it is the value (msgspec leaves only defaults out that it can
    compare).

    name: on the wire, where it is not the camelCase of the field's.
    """
    return msgspec.field(default_factory=lambda: value, name=name)


def empty(kind: Callable[[], T], name: str | None = None) -> T:
    """An empty collection as the default, written as such: Java's tools want it to be there."""
    return msgspec.field(default_factory=lambda: kind(), name=name)


class Body(msgspec.Struct, rename="camel", omit_defaults=True):
    """Root of the JSON bodies and their parts."""

    # Bodies with queues as keys are no JSON: there is no strict reader for them.
    STRICT: ClassVar[bool] = True
    # Longest body in bytes that is read although it is not standard JSON. There may be one value for so many
    # bytes: it is the values that take time.
    LENIENT_MAX: ClassVar[int] = SERVER_MAX

    def encode(self) -> bytes:
        """The body's bytes."""
        return _encode(self, order="sorted")

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Read a body in either dialect. Raises BodyError."""
        if cls.STRICT:
            decode = _decoders.get(cls)
            if decode is None:
                decode = _decoders[cls] = msgspec.json.Decoder(cls, strict=False).decode
            try:
                found: Self = decode(data)
                return found
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                pass  # not JSON, or not quite these types: the way below says what is wrong
        if not data:
            raise BodyError(cls.__name__, "there is no body")
        if len(data) > cls.LENIENT_MAX:
            raise BodyError(cls.__name__, f"{len(data)} bytes are not standard JSON of the expected form")
        try:
            value = read_lenient(data, most=cls.LENIENT_MAX // BYTES_OF_A_VALUE)
        except LenientError as error:
            raise BodyError(cls.__name__, str(error)) from None
        return cls.from_plain(value)

    @classmethod
    def from_plain(cls, value: Json) -> Self:
        """A body of the values that the lenient reader made. Raises BodyError."""
        if not isinstance(value, dict):
            raise BodyError(cls.__name__, "it is not an object")
        try:
            return msgspec.convert(tidy(cls.prepare(value)), cls, strict=False)
        except (msgspec.ValidationError, UnicodeError, OverflowError, ValueError) as error:
            problem, _, field = str(error).partition(" - at ")
            raise BodyError(cls.__name__, problem, field.strip("`")) from None

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        """Bring foreign forms of this body into the usual one, before its types are checked."""
        return value


def tidy(value: Json) -> Json:
    """Plain values without nulls in objects, and with queues where objects are keys."""
    if isinstance(value, dict):
        return {_key(key): tidy(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [tidy(item) for item in value]
    return value


def _key(key: Any) -> Any:
    """A queue of an object key. Raises ValidationError for another object."""
    return msgspec.convert(key.as_dict(), MessageQueue, strict=False) if isinstance(key, ObjectKey) else key


# -- writing fastjson's dialect


def queue_key(queue: MessageQueue) -> bytes:
    """A queue as fastjson writes it where a key should be: fields in this order
    (docs/reference/remoting.md, JSON dialect)."""
    return b'{"brokerName":%b,"queueId":%d,"topic":%b}' % (
        _encode(queue.broker_name),
        queue.queue_id,
        _encode(queue.topic),
    )


def write_queue_map(table: Mapping[MessageQueue, Any]) -> bytes:
    """A map with queues as keys: `{{...}:value,...}`."""
    pairs = [queue_key(queue) + b":" + _encode(table[queue], order="sorted") for queue in sorted(table)]
    return b"{" + b",".join(pairs) + b"}"


def write_int_map(table: Mapping[int, Any]) -> bytes:
    """A map with bare integers as keys: `{0:value,...}`."""
    pairs = [b"%d:%b" % (key, _encode(table[key], order="sorted")) for key in sorted(table)]
    return b"{" + b",".join(pairs) + b"}"


def write_object(fields: Iterable[tuple[str, bytes | None]]) -> bytes:
    """An object of (key, value as JSON); None leaves the field out."""
    return (
        b"{"
        + b",".join([b'"%b":%b' % (key.encode(), text) for key, text in fields if text is not None])
        + b"}"
    )


def write_map(table: Mapping[str, bytes]) -> bytes:
    """A map with text keys and values that are JSON already."""
    return b"{" + b",".join([_encode(key) + b":" + table[key] for key in sorted(table)]) + b"}"


def write_value(value: Any) -> bytes:
    """Any value in standard JSON, keys sorted."""
    return _encode(value, order="sorted")


def ascii_json(data: bytes) -> bytes:
    """The same JSON with everything but ASCII escaped, as the standard form of a route has it."""
    if data.isascii():
        return data
    return json.dumps(msgspec.json.decode(data), ensure_ascii=True, separators=(",", ":")).encode()


def tables_in(value: dict[Any, Json], *names: str) -> dict[Any, Json]:
    """A copy of an object in which each of these fields that is null is an empty table."""
    return {**value, **{name: {} for name in names if value.get(name) is None}}

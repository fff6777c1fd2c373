"""What all JSON bodies share: typed reading of both dialects, and writing what Java's fastjson reads.

A body class declares its fields in Python names; the wire has their camelCase. Fields without a value (None)
are not written, all others are, as fastjson does. Keys are sorted. Reading is tolerant as Java is: unknown
keys are ignored, missing and null ones take the default, numbers and booleans may be quoted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec

from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.lenient import Json, LenientError, ObjectKey, read_lenient

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

SERVER_MAX = 1 << 20
"""For what servers read: no body may keep them busy for seconds."""
CLIENT_MAX = 16 << 20
"""For what only clients and tools read: a table of queues may fill a frame."""

BYTES_OF_A_VALUE = 16
"""Queues and subscriptions have fewer values for their length."""

_encode = msgspec.json.Encoder(order="sorted").encode
_standard: set[type] = set()
"""Classes whose values fastjson writes as everybody does, as far as they have been met."""
_decoders: dict[type, Callable[[Buffer], Any] | None] = {}


def always(value: T, name: str | None = None) -> T:
    """A default that is written too (msgspec leaves out only defaults that it can compare).

    name: on the wire, where it is not the field's in camelCase.
    """
    return msgspec.field(default_factory=lambda: value, name=name)


def empty(kind: Callable[[], T], name: str | None = None) -> T:
    """An empty collection as the default, which is written too: Java's tools expect it."""
    return msgspec.field(default_factory=lambda: kind(), name=name)


class Body(msgspec.Struct, rename="camel", omit_defaults=True):
    """Root of the JSON bodies and their parts."""

    # Whether integers or queues may be keys, which fastjson writes in ways that are no JSON.
    FASTJSON: ClassVar[bool] = False
    # Bodies with queues as keys are no JSON: there is no strict reader for them.
    STRICT: ClassVar[bool] = True
    # Longest body in bytes that is read although it is not standard JSON. There may be one value for so many
    # bytes: it is the values that take time.
    LENIENT_MAX: ClassVar[int] = SERVER_MAX

    def encode(self) -> bytes:
        """The body's bytes."""
        return write_fastjson(self)

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


class IntegerKeyed(Body):
    """Root of the bodies with integers as keys. Tools and slaves read most of them, and they may be long."""

    FASTJSON: ClassVar[bool] = True
    LENIENT_MAX: ClassVar[int] = CLIENT_MAX


class QueueKeyed(IntegerKeyed):
    """Root of the bodies with queues as keys."""

    STRICT: ClassVar[bool] = False


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


def write_fastjson(value: Any, bare: bool = True) -> bytes:
    """A value as fastjson writes it: queues as keys, and integers as keys, which `bare` false puts in quotes.

    Keys are sorted; fields of a body that are None are left out.
    """
    kind = value.__class__
    if kind is list:
        if _standard.issuperset(map(type, value)):
            return _encode(value)
        return b"[" + b",".join([write_fastjson(item, bare) for item in value]) + b"]"
    if kind is dict:
        parts = [
            (b"%d:" % key if bare and key.__class__ is int else _key_text(key))
            + (_encode(item) if (item := value[key]).__class__ in _standard else write_fastjson(item, bare))
            for key in sorted(value)
        ]
    elif issubclass(kind, Body) and kind.FASTJSON:
        parts = [
            key + (_encode(item) if item.__class__ in _standard else write_fastjson(item, bare))
            for key, field in _fields_of(kind)
            if (item := getattr(value, field)) is not None
        ]
    else:
        _standard.add(kind)
        return _encode(value)
    return b"{" + b",".join(parts) + b"}"


@cache
def _fields_of(kind: type[Body]) -> list[tuple[bytes, str]]:
    """Name on the wire as a key, and name, of each field in the order of the wire."""
    names = sorted(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    return [(_key_text(name), field) for name, field in names]


def _key_text(key: str | int | MessageQueue) -> bytes:
    if not isinstance(key, MessageQueue):
        return _encode(str(key)) + b":"
    # Its fields stand in this order (docs/reference/remoting.md, JSON dialect).
    name, topic = _encode(key.broker_name), _encode(key.topic)
    return b'{"brokerName":%b,"queueId":%d,"topic":%b}:' % (name, key.queue_id, topic)


def ascii_json(data: bytes) -> bytes:
    """The same JSON with everything but ASCII escaped, as the standard form of a route has it."""
    if data.isascii():
        return data
    return json.dumps(msgspec.json.decode(data), ensure_ascii=True, separators=(",", ":")).encode()

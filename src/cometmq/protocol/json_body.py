"""The base of all JSON bodies: typed reading of JSON and fastjson's dialect, and writing for fastjson.

A body class declares its fields with Python names; on the wire they have camelCase names. As in fastjson,
fields that are None are omitted and all others are written. Keys are sorted. Reading is as tolerant as
Java's: unknown keys are ignored, missing keys and null values get the field's default, numbers and booleans
may be quoted.
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

MAX_SERVER_BYTES = 1 << 20
"""The maximum size, in bytes, of a body that is not standard JSON, for a server: more could take seconds."""
MAX_CLIENT_BYTES = 16 << 20
"""The same for clients and tools: the maximum size of a frame, because such bodies can hold large tables."""

BYTES_OF_A_VALUE = 16
"""A body with a size limit of n bytes may have n / 16 values. Real bodies have fewer."""

_encode = msgspec.json.Encoder(order="sorted").encode
_standard: set[type] = set()
"""The types whose values fastjson writes as standard JSON. A type is added when it is first encoded."""
_decoders: dict[type, Callable[[Buffer], Any] | None] = {}


def always(value: T, name: str | None = None) -> T:
    """Return the definition of a field that is encoded even if it has its default value.

    msgspec omits a field that has its default value, unless a function creates the default: it does not
    compare with the function's result. `name` is the wire name, if it is not the field's name in camelCase.
    """
    return msgspec.field(default_factory=lambda: value, name=name)


def empty(kind: Callable[[], T], name: str | None = None) -> T:
    """Return the definition of a field that is encoded (see `always`) even if it is an empty collection."""
    return msgspec.field(default_factory=lambda: kind(), name=name)


class Body(msgspec.Struct, rename="camel", omit_defaults=True):
    """The base class of JSON bodies and their parts."""

    # Whether keys may be integers or queues. fastjson writes such keys in its dialect, not as standard JSON.
    FASTJSON: ClassVar[bool] = False
    # Whether to try the fast reader of standard JSON before the lenient reader. Bodies with queues as keys
    # are never standard JSON.
    STRICT: ClassVar[bool] = True
    # The maximum size in bytes of a body that is not standard JSON. Such a body may have at most
    # MAX_LENIENT_BYTES / BYTES_OF_A_VALUE values, because the time to read it depends on their number.
    MAX_LENIENT_BYTES: ClassVar[int] = MAX_SERVER_BYTES

    # A byte, and the maximum number of its occurrences in a body: it bounds the number of decoded values.
    MAX_OCCURRENCES: ClassVar[tuple[bytes, int] | None] = None

    def encode(self) -> bytes:
        return write_fastjson(self)

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Decode a body from standard JSON or fastjson's dialect. Raises BodyError."""
        if cls.MAX_OCCURRENCES is not None:
            byte, most = cls.MAX_OCCURRENCES
            if (count := bytes(data).count(byte)) > most:
                raise BodyError(cls.__name__, f"it contains {byte.decode()!r} {count} times, at most {most}")
        if cls.STRICT:
            decode = _decoders.get(cls)
            if decode is None:
                decode = _decoders[cls] = msgspec.json.Decoder(cls, strict=False).decode
            try:
                found: Self = decode(data)
                return found
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                pass  # Not standard JSON: the lenient reader accepts the body or reports the error
        if not data:
            raise BodyError(cls.__name__, "there is no body")
        if len(data) > cls.MAX_LENIENT_BYTES:
            raise BodyError(cls.__name__, f"{len(data)} bytes are not standard JSON of the expected form")
        try:
            value = read_lenient(data, most=cls.MAX_LENIENT_BYTES // BYTES_OF_A_VALUE)
        except LenientError as error:
            raise BodyError(cls.__name__, str(error)) from None
        return cls.from_plain(value)

    @classmethod
    def from_plain(cls, value: Json) -> Self:
        """Create a body from the values that the lenient reader returned. Raises BodyError."""
        if not isinstance(value, dict):
            raise BodyError(cls.__name__, "it is not an object")
        try:
            return msgspec.convert(tidy(cls.prepare(value)), cls, strict=False)
        except (msgspec.ValidationError, UnicodeError, OverflowError, ValueError) as error:
            problem, _, field = str(error).partition(" - at ")
            raise BodyError(cls.__name__, problem, field.strip("`")) from None

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        """Convert a parsed body of clients that write it differently to the usual form."""
        return value


class IntegerKeyed(Body):
    """The base class of bodies with integer keys. They may be larger: mostly tools and slaves read them."""

    FASTJSON: ClassVar[bool] = True
    MAX_LENIENT_BYTES: ClassVar[int] = MAX_CLIENT_BYTES


class QueueKeyed(IntegerKeyed):
    """The base class of bodies with queues as keys."""

    STRICT: ClassVar[bool] = False


def tidy(value: Json) -> Json:
    """Omit null values of objects that the lenient reader returned, and convert keys that describe queues."""
    if isinstance(value, dict):
        return {_key(key): tidy(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [tidy(item) for item in value]
    return value


def _key(key: Any) -> Any:
    """Convert a key of a decoded map. Raises ValidationError if it is an object that describes no queue."""
    return msgspec.convert(key.as_dict(), MessageQueue, strict=False) if isinstance(key, ObjectKey) else key


# -- writing fastjson's dialect


def write_fastjson(value: Any, bare: bool = True) -> bytes:
    """Return a value in fastjson's dialect, in which queues and integers (unquoted if `bare`) may be keys."""
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
    """Return the encoded wire name and the Python name of each field of a body class, in wire order."""
    names = sorted(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    return [(_key_text(name), field) for name, field in names]


def _key_text(key: str | int | MessageQueue) -> bytes:
    if not isinstance(key, MessageQueue):
        return _encode(str(key)) + b":"
    # The fields of a queue have a fixed order (docs/reference/remoting.md, JSON dialect).
    name, topic = _encode(key.broker_name), _encode(key.topic)
    return b'{"brokerName":%b,"queueId":%d,"topic":%b}:' % (name, key.queue_id, topic)


def ascii_json(data: bytes) -> bytes:
    """Return JSON with all non-ASCII characters escaped, as name servers write a route in standard JSON."""
    if data.isascii():
        return data
    return json.dumps(msgspec.json.decode(data), ensure_ascii=True, separators=(",", ":")).encode()

"""Parsers for the parts of HTTP requests: path, query, headers, outgoing messages and handles."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Meta

from cometmq.grpc.gateway import events
from cometmq.grpc.gateway.exchange import Header, HttpError
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.receives import MAX_ACKS, MAX_INVISIBLE_MS
from cometmq.grpc.service.sends import MAX_MESSAGES
from cometmq.grpc.service.sent import MAX_KEYS, MAX_PROPERTIES
from cometmq.settings import INT_MAX

MAX_PARAMETERS = 16
MAX_HANDLE_LENGTH = 2048
MAX_PROPERTIES_BYTES = 128 * 1024
"""The maximum size of the properties of a message as JSON: 16 KiB are allowed, which may be escaped."""
MAX_DELAY_S = 10 * 366 * 86_400
"""The maximum delay in seconds. The broker has a lower limit, `timerMaxDelaySec`."""
PROPERTY_HEADER = b"x-mq-property"
_SINGLE = (b"authorization", b"content-type")


class Target(NamedTuple):
    """The decoded parts of a request's path, and its query."""

    parts: tuple[str, ...]
    query: dict[str, str]


def read_target(target: bytes) -> Target:
    """Parse a request's path and query. Raises ServiceError."""
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        raise ServiceError(Code.BAD_REQUEST, "path: must begin with /")
    try:
        parts = tuple(_unquoted(part) for part in path[1:].split(b"/"))
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS
        )
    except ValueError as error:  # or UnicodeDecodeError
        raise ServiceError(Code.BAD_REQUEST, f"path: invalid path or query: {error}") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ServiceError(Code.BAD_REQUEST, "path: the query contains a parameter twice")
    return Target(parts, found)


def _unquoted(part: bytes) -> str:
    found = unquote_to_bytes(part)
    if b"%" in part and len(found) != len(part) - 2 * part.count(b"%"):
        raise ValueError("incomplete percent-encoding")
    return found.decode()


def number(name: str, text: str | None, default: float, low: float, high: float) -> float:
    """Parse a numeric parameter, or return `default` if it is missing. Raises ServiceError."""
    if text is None:
        return default
    try:
        if len(text) > 20 or not text.isascii() or "_" in text:
            raise ValueError
        found = float(text)
    except ValueError:
        raise ServiceError(Code.BAD_REQUEST, f"{name}: {text[:80]!r} is not a number") from None
    if not low <= found <= high:
        raise ServiceError(Code.BAD_REQUEST, f"{name}: {found:g} is not from {low:g} to {high:g}")
    return found


def media_type(value: bytes) -> str:
    """Return the media type in a Content-Type header, without its parameters."""
    return value.decode("latin-1").partition(";")[0].strip().lower()


# -- messages to send


class JsonMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a JSON batch. `delay` is in seconds."""

    body: str | None = None
    body_base64: str | None = None
    tag: str = ""
    keys: Annotated[list[str], Meta(max_length=MAX_KEYS)] = msgspec.field(default_factory=list)
    group: str = ""
    delay: Annotated[float, Meta(ge=0, le=MAX_DELAY_S)] | None = None
    priority: Annotated[int, Meta(ge=0, le=INT_MAX)] | None = None
    properties: Annotated[dict[str, str], Meta(max_length=MAX_PROPERTIES)] = msgspec.field(
        default_factory=dict
    )

    def content(self) -> events.Content:
        """Return the body and the properties. Raises ServiceError."""
        if (self.body is None) == (self.body_base64 is None):
            raise ServiceError(Code.BAD_REQUEST, "body: each message needs either body or body_base64")
        if self.body_base64 is None:
            return events.Content(str(self.body).encode(), self.properties)
        try:
            return events.Content(base64.b64decode(self.body_base64, validate=True), self.properties)
        except (binascii.Error, ValueError) as error:
            raise ServiceError(Code.BAD_REQUEST, f"body_base64: {error}") from None


class _Large(msgspec.Struct):
    """The part of a message of a JSON batch that may take long to decode."""

    properties: msgspec.Raw = msgspec.Raw()


class _Sizes(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a JSON batch, before the messages are decoded, which may take much longer."""

    messages: Annotated[list[_Large], Meta(min_length=1, max_length=MAX_MESSAGES)]


class JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a JSON batch."""

    messages: list[JsonMessage]


def outgoing(topic: str, headers: Sequence[Header], body: bytes) -> list[Any]:
    """Return a `Message` for each message or event in the body of a request. Raises ServiceError."""
    values = dict(headers)
    kind = media_type(values.get(b"content-type", b""))
    if kind == events.BATCH:
        contents = events.from_batch(body)
    elif kind == events.EVENT:
        contents = [events.from_structured(body)]
    elif kind.startswith("application/cloudevents"):
        problem = f"content-type: {kind[:80]!r} is not supported, events must be JSON"
        raise HttpError(Code.BAD_REQUEST, problem, 415)
    elif b"ce-specversion" in values:
        contents = [events.from_binary(headers, body)]
    else:
        contents = [events.Content(body, {})]
    texts = {name: value.decode("latin-1") for name, value in values.items()}
    priority = number("x-mq-priority", texts.get(b"x-mq-priority"), -1, 0, INT_MAX)
    delay_s = number("x-mq-delay", texts.get(b"x-mq-delay"), -1, 0, MAX_DELAY_S)
    given = JsonMessage(
        tag=_text(values, b"x-mq-tag"),
        keys=_text(values, b"x-mq-keys").split(),
        group=_text(values, b"x-mq-group"),
        delay=None if delay_s < 0 else delay_s,
        priority=None if priority < 0 else int(priority),
    )
    properties = _properties(headers)
    return [_message(topic, given, each.body, properties | each.properties) for each in contents]


def outgoing_batch(topic: str, body: bytes) -> list[Any]:
    """Return a `Message` for each message of a JSON batch. Raises ServiceError."""
    most = MAX_PROPERTIES_BYTES
    if any(memoryview(each.properties).nbytes > most for each in events.decode_json(body, _Sizes).messages):
        problem = f"properties: more than {most} bytes of JSON"
        raise ServiceError(Code.MESSAGE_PROPERTIES_TOO_LARGE, problem)
    batch = events.decode_json(body, JsonBatch)
    return [_message(topic, each, *each.content()) for each in batch.messages]


def _message(topic: str, given: JsonMessage, body: bytes, properties: dict[str, str]) -> Any:
    message = messages().Message()
    message.topic.name = topic
    message.body = body
    system = message.system_properties
    system.message_id = f"01{secrets.token_hex(16).upper()}"  # has the format of 5.x clients
    system.born_timestamp.GetCurrentTime()
    message.user_properties.update(properties)
    system.keys.extend(given.keys)
    if given.tag:
        system.tag = given.tag
    if given.group:
        system.message_group = given.group
    if given.priority is not None:
        system.priority = given.priority
    if given.delay is not None:
        now_ms = system.born_timestamp.ToMilliseconds()
        system.delivery_timestamp.FromMilliseconds(now_ms + int(given.delay * 1000))
    return message


def check_headers(headers: Sequence[Header]) -> None:
    """Raise ServiceError if a header is repeated that must be unique, or if the body is compressed."""
    seen = set()
    for name, value in headers:
        if name in seen and (name in _SINGLE or name.startswith(b"x-mq-")):
            raise ServiceError(Code.BAD_REQUEST, f"{name.decode()}: the header is repeated")
        if name == b"content-encoding" and value.lower() != b"identity":
            raise HttpError(Code.BAD_REQUEST, "content-encoding: compressed bodies are not supported", 415)
        if name != PROPERTY_HEADER:
            seen.add(name)


def _text(values: dict[bytes, bytes], name: bytes) -> str:
    return events.decoded_header(name.decode(), values.get(name, b""))


def _properties(headers: Sequence[Header]) -> dict[str, str]:
    """Return the properties in the headers `x-mq-property: name=value`. Raises ServiceError."""
    properties: dict[str, str] = {}
    for name, value in headers:
        if name == PROPERTY_HEADER:
            key, separator, text = value.partition(b"=")
            if not separator:
                raise ServiceError(Code.BAD_REQUEST, "x-mq-property: expected name=value")
            key_text, value_text = (events.decoded_header("x-mq-property", each) for each in (key, text))
            if properties.setdefault(key_text, value_text) != value_text:
                raise ServiceError(Code.BAD_REQUEST, f"x-mq-property: {key_text[:80]!r} has two values")
    return properties


# -- handles


class Handle(NamedTuple):
    """The handle of a received message, which identifies its lease."""

    receipt: str
    message_id: str
    lite_topic: str

    def encode(self) -> str:
        """Return the handle as text that needs no escaping in URLs, headers and JSON."""
        return base64.urlsafe_b64encode("\n".join(self).encode()).rstrip(b"=").decode()


def read_handle(text: str) -> Handle:
    """Decode a handle. Raises ServiceError."""
    try:
        if len(text) > MAX_HANDLE_LENGTH:
            raise ValueError
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        return Handle(*base64.b64decode(padded, b"-_", validate=True).decode().split("\n"))
    except (ValueError, TypeError):  # TypeError: a wrong number of parts
        raise ServiceError(Code.INVALID_RECEIPT_HANDLE, f"receipt_handle: invalid {text[:80]!r}") from None


class Recall(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that cancels a delayed message."""

    recall_handle: str


class Ack(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that acknowledges messages."""

    handles: Annotated[list[str], Meta(min_length=1, max_length=MAX_ACKS)]


A = TypeVar("A", bound=Ack)


def read_handles(body: bytes, kind: type[A]) -> A:
    """Decode a request about handles. Raises ServiceError."""
    most = MAX_ACKS * (MAX_HANDLE_LENGTH + 8)
    if len(body) > most:
        raise HttpError(Code.BAD_REQUEST, f"body: {len(body)} bytes, at most {most}", 413)
    found: A = events.decode_json(body, kind)
    return found


class Nack(Ack):
    """The body of a request that returns messages to the queue. `delay` is in seconds."""

    delay: Annotated[float, Meta(ge=0, le=MAX_INVISIBLE_MS / 1000)] = 0.0


class Extend(Ack):
    """The body of a request that changes leases. `invisible` is their remaining time in seconds."""

    invisible: Annotated[float, Meta(ge=0, le=MAX_INVISIBLE_MS / 1000)]

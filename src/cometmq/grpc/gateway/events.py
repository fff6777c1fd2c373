"""Conversion between CloudEvents and RocketMQ messages (docs/http.md, CloudEvents).

Messages have the properties of CloudEvents' Java SDK (cloudevents-rocketmq). In binary mode, the property of
an attribute has the prefix `CE_`, such as `CE_id`. The property of `datacontenttype` is `CE_contenttype`. The
body is the data, or one zero byte without data. In structured mode, the body is the event as JSON.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.sends import MAX_MESSAGES
from cometmq.grpc.service.sent import MAX_PROPERTIES, check_count

PREFIX = "CE_"
CONTENT_TYPE = "CE_contenttype"
SPEC_VERSION = "CE_specversion"
EVENT, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
NO_DATA = b"\0"
HEADER = "ce-"
MAX_ATTRIBUTES_BYTES = 64 * 1024
"""The maximum size of an event as JSON without its data. Many members would take long to decode."""
VERSIONS = ("1.0", "0.3")
REQUIRED = ("specversion", "id", "source", "type")
_ATTRIBUTE = re.compile(r"[a-z0-9]{1,64}", re.ASCII)
_MEDIA_TYPE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?", re.ASCII)
# The characters of a header's value that CloudEvents' HTTP binding does not encode.
_PLAIN = "".join(map(chr, range(0x21, 0x7F))).translate(str.maketrans("", "", '"%'))


class Content(NamedTuple):
    """The body and the properties of an outgoing message."""

    body: bytes
    properties: dict[str, str]


class Stored(NamedTuple):
    """The parts of a received message that its event contains."""

    topic: str
    message_id: str
    stored_at: str
    properties: Mapping[str, str]
    body: bytes


def decoded_header(name: str, value: bytes) -> str:
    """Decode the value of a header, which is UTF-8 and may be percent-encoded. Raises ServiceError."""
    try:
        return unquote(value.decode(), errors="strict")
    except UnicodeDecodeError:
        raise ServiceError(Code.BAD_REQUEST, f"{name}: the value is not UTF-8") from None


def encoded_header(text: str) -> bytes:
    """Return a text percent-encoded, as the value of a header."""
    return quote(text, safe=_PLAIN, errors="replace").encode()


# -- to messages


def from_binary(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Content:
    """Return the message for an event in binary mode. Raises ServiceError."""
    properties: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("ascii", "replace")
        if name == "content-type":
            properties[CONTENT_TYPE] = decoded_header(name, value)
        elif name.startswith(HEADER):
            attribute = name.removeprefix(HEADER)
            _check_attribute(name, attribute)
            key = PREFIX + attribute
            if key in properties or attribute in ("contenttype", "datacontenttype"):
                raise ServiceError(
                    Code.BAD_REQUEST, f"{name}: the header is repeated, or duplicates content-type"
                )
            properties[key] = decoded_header(name, value)
    _check_required(HEADER, {key.removeprefix(PREFIX): value for key, value in properties.items()})
    return Content(body or NO_DATA, properties)


def from_structured(event: bytes) -> Content:
    """Return the message for an event as JSON. Raises ServiceError."""
    fields = _members(event)
    check_count("body", len(fields), MAX_PROPERTIES)
    for name in fields:
        if name not in ("data", "data_base64"):
            _check_attribute(name, name)
    if "data" in fields and "data_base64" in fields:
        raise ServiceError(Code.BAD_REQUEST, "data_base64: the event has both data and data_base64")
    _check_required("", {name: decode_json(fields[name], Any) for name in REQUIRED if name in fields})
    return Content(event, {CONTENT_TYPE: EVENT})


def from_batch(events: bytes) -> list[Content]:
    """Return the messages for several events as JSON. Raises ServiceError."""
    found: list[msgspec.Raw] = decode_json(events, list[msgspec.Raw])
    if len(found) > MAX_MESSAGES:
        raise ServiceError(Code.BAD_REQUEST, f"messages: {len(found)}, at most {MAX_MESSAGES}")
    return [from_structured(bytes(each)) for each in found]


class _Data(msgspec.Struct):
    """The members of an event that may be large. Reading over others is much faster than decoding them."""

    data: msgspec.Raw = msgspec.Raw()
    data_base64: msgspec.Raw = msgspec.Raw()


def _members(event: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, without decoding their values. Raises ServiceError."""
    large: _Data = decode_json(event, _Data)
    rest = len(event) - memoryview(large.data).nbytes - memoryview(large.data_base64).nbytes
    if rest > MAX_ATTRIBUTES_BYTES:
        problem = f"body: the event has {rest} bytes beside its data, at most {MAX_ATTRIBUTES_BYTES}"
        raise ServiceError(Code.MESSAGE_PROPERTIES_TOO_LARGE, problem)
    found: dict[str, msgspec.Raw] = decode_json(event, dict[str, msgspec.Raw])
    try:
        event.decode()  # msgspec does not check the encoding of values that it does not decode
    except UnicodeDecodeError:
        raise ServiceError(Code.BAD_REQUEST, "body: the event is not UTF-8") from None
    return found


def decode_json(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode a JSON document to a type. Raises ServiceError, which names the invalid field if possible."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        # The path ends in an invalid field. The text before the path names a missing or unknown field.
        problem, _, path = str(error).partition(" - at ")
        field = problem.split("`")[1] if " field `" in problem else path.strip("`").rpartition(".")[2]
        where = f" at {path}" if path else ""
        field = field if field.isidentifier() else "body"
        raise ServiceError(Code.BAD_REQUEST, f"{field}: {problem}{where}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ServiceError(Code.BAD_REQUEST, f"body: invalid JSON: {error}") from None


def _check_attribute(field: str, name: str) -> None:
    if not _ATTRIBUTE.fullmatch(name):
        problem = f"{field[:80]}: invalid attribute name: only a to z and 0 to 9 are allowed"
        raise ServiceError(Code.BAD_REQUEST, problem)


def _check_required(prefix: str, attributes: Mapping[str, Any]) -> None:
    for name in REQUIRED:
        value = attributes.get(name)
        if not isinstance(value, str) or not value:
            problem = f"{prefix}{name}: the event must have this attribute, as a string that is not empty"
            raise ServiceError(Code.BAD_REQUEST, problem)
    if attributes["specversion"] not in VERSIONS:
        problem = f"{prefix}specversion: {attributes['specversion'][:20]!r} is not one of {VERSIONS}"
        raise ServiceError(Code.BAD_REQUEST, problem)


# -- from messages


def is_structured(message: Stored) -> bool:
    """Return whether a message contains an event as JSON."""
    return message.properties.get(CONTENT_TYPE, "").partition(";")[0].strip().lower() == EVENT


def attributes_of(message: Stored) -> dict[str, str]:
    """Return the attributes of the event in a message, or of a new event if the message contains none."""
    properties = message.properties
    if SPEC_VERSION not in properties:
        return {
            "specversion": "1.0",
            "id": message.message_id,
            "source": f"/v1/topics/{quote(message.topic, safe='')}",
            "type": "cometmq.message",
            "time": message.stored_at,
        }
    return {
        name.removeprefix(PREFIX): value
        for name, value in properties.items()
        if name.startswith(PREFIX)
        and name not in (CONTENT_TYPE, "CE_data", "CE_datacontenttype")
        and _ATTRIBUTE.fullmatch(name[len(PREFIX) :])
    }


def content_type_of(message: Stored) -> str:
    """Return the media type of a body, or "" if the message has none that is valid in a header."""
    found = message.properties.get(CONTENT_TYPE, "")
    return found if _MEDIA_TYPE.fullmatch(found) else ""


def to_structured(message: Stored, **extensions: str) -> bytes:
    """Return the JSON event that a message contains, or a new one, with additional attributes."""
    if is_structured(message):
        try:
            contained = _members(message.body)
            return msgspec.json.encode(contained | extensions) if extensions else message.body
        except ServiceError:
            pass  # Any client can send an invalid event. The body becomes the data of a new event
    event: dict[str, Any] = attributes_of(message) | extensions
    kind = content_type_of(message)
    if kind:
        event["datacontenttype"] = kind
    if message.body != NO_DATA:
        name, data = _data_of(message.body, kind.partition(";")[0].strip().lower())
        event[name] = data
    return msgspec.json.encode(event)


def _data_of(body: bytes, kind: str) -> tuple[str, Any]:
    """Return the name and the value of the member of an event that contains the data."""
    try:
        if kind == "application/json" or kind.endswith("+json"):
            msgspec.json.decode(body, type=msgspec.Raw)
            body.decode()  # The line above does not check the encoding
            return "data", msgspec.Raw(body)
        if kind.startswith("text/"):
            return "data", body.decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    return "data_base64", base64.b64encode(body).decode()

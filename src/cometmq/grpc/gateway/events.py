"""CloudEvents and RocketMQ messages (docs/http.md, CloudEvents).

The properties are those of CloudEvents' Java SDK (cloudevents-rocketmq). Binary mode: the attribute `id` is
the property `CE_id`, and so on; `datacontenttype` is `CE_contenttype`; the body is the data, or one zero byte
without data. Structured mode: the body is the event as JSON, and `CE_contenttype` its media type.
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

PREFIX = "CE_"
CONTENT_TYPE = "CE_contenttype"
SPEC_VERSION = "CE_specversion"
EVENT, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
NO_DATA = b"\0"
HEADER = "ce-"
VERSIONS = ("1.0", "0.3")
REQUIRED = ("specversion", "id", "source", "type")
_ATTRIBUTE = re.compile(r"[a-z0-9]{1,64}", re.ASCII)
_MEDIA_TYPE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?", re.ASCII)
# The characters of a header's value that CloudEvents' HTTP binding leaves as they are.
_PLAIN = "".join(map(chr, range(0x21, 0x7F))).translate(str.maketrans("", "", '"%'))


class Content(NamedTuple):
    """The body and the properties of a message that is to be sent."""

    body: bytes
    properties: dict[str, str]


class Stored(NamedTuple):
    """The parts of a received message from which an event is made."""

    topic: str
    message_id: str
    stored_at: str
    properties: Mapping[str, str]
    body: bytes


def decoded_header(name: str, value: bytes) -> str:
    """Return the text of a header: UTF-8, perhaps percent-encoded. Raises ServiceError."""
    try:
        return unquote(value.decode(), errors="strict")
    except UnicodeDecodeError:
        raise ServiceError(Code.BAD_REQUEST, f"{name}: the header is not UTF-8") from None


def encoded_header(text: str) -> bytes:
    """Return a text as the value of a header: percent-encoded."""
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
                    Code.BAD_REQUEST, f"{name}: the header is repeated, or that of content-type"
                )
            properties[key] = decoded_header(name, value)
    _check_required(HEADER, {key.removeprefix(PREFIX): value for key, value in properties.items()})
    return Content(body or NO_DATA, properties)


def from_structured(event: bytes) -> Content:
    """Return the message for an event as JSON. Raises ServiceError."""
    fields = _members(event)
    for name in fields:
        if name not in ("data", "data_base64"):
            _check_attribute(name, name)
    if "data" in fields and "data_base64" in fields:
        raise ServiceError(Code.BAD_REQUEST, "data_base64: the event has data, too")
    _check_required("", {name: decode_json(fields[name], Any) for name in REQUIRED if name in fields})
    return Content(event, {CONTENT_TYPE: EVENT})


def from_batch(events: bytes) -> list[Content]:
    """Return the messages for several events as JSON. Raises ServiceError."""
    return [from_structured(bytes(each)) for each in decode_json(events, list[msgspec.Raw])]


def _members(event: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, which stay encoded. Raises ServiceError."""
    found: dict[str, msgspec.Raw] = decode_json(event, dict[str, msgspec.Raw])
    try:
        event.decode()  # msgspec does not check this in the parts that stay encoded
    except UnicodeDecodeError:
        raise ServiceError(Code.BAD_REQUEST, "body: the event is not UTF-8") from None
    return found


def decode_json(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return a JSON document as a value of a type. Raises ServiceError, which names the field if it can."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        # The field is at the end of the path, or named before it if it is missing or unknown.
        problem, _, path = str(error).partition(" - at ")
        field = problem.split("`")[1] if " field `" in problem else path.strip("`").rpartition(".")[2]
        where = f" at {path}" if path else ""
        field = field if field.isidentifier() else "body"
        raise ServiceError(Code.BAD_REQUEST, f"{field}: {problem}{where}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ServiceError(Code.BAD_REQUEST, f"body: no valid JSON document: {error}") from None


def _check_attribute(field: str, name: str) -> None:
    if not _ATTRIBUTE.fullmatch(name):
        problem = f"{field[:80]}: no name of an attribute, which consists of a to z and 0 to 9"
        raise ServiceError(Code.BAD_REQUEST, problem)


def _check_required(prefix: str, attributes: Mapping[str, Any]) -> None:
    for name in REQUIRED:
        value = attributes.get(name)
        if not isinstance(value, str) or not value:
            problem = f"{prefix}{name}: the event needs this attribute, which is a text"
            raise ServiceError(Code.BAD_REQUEST, problem)
    if attributes["specversion"] not in VERSIONS:
        problem = f"{prefix}specversion: {attributes['specversion'][:20]!r} is not one of {VERSIONS}"
        raise ServiceError(Code.BAD_REQUEST, problem)


# -- from messages


def is_structured(message: Stored) -> bool:
    """Return whether a message contains an event as JSON."""
    return message.properties.get(CONTENT_TYPE, "").partition(";")[0].strip().lower() == EVENT


def attributes_of(message: Stored) -> dict[str, str]:
    """Return the attributes of a message in binary mode, or those of an event made of any other message."""
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
    """Return the media type of a message's body, "" if the message names none that a header can hold."""
    found = message.properties.get(CONTENT_TYPE, "")
    return found if _MEDIA_TYPE.fullmatch(found) else ""


def to_structured(message: Stored, **extensions: str) -> bytes:
    """Return a message as a JSON event with further attributes: that which it contains, or a new one."""
    if is_structured(message):
        try:
            contained = _members(message.body)
            return msgspec.json.encode(contained | extensions) if extensions else message.body
        except ServiceError:
            pass  # Any client can send such a message: it becomes the data of an event
    event: dict[str, Any] = attributes_of(message) | extensions
    kind = content_type_of(message)
    if kind:
        event["datacontenttype"] = kind
    if message.body != NO_DATA:
        name, data = _data_of(message.body, kind.partition(";")[0].strip().lower())
        event[name] = data
    return msgspec.json.encode(event)


def _data_of(body: bytes, kind: str) -> tuple[str, Any]:
    """Return the member of an event that contains its data."""
    try:
        if kind == "application/json" or kind.endswith("+json"):
            msgspec.json.decode(body)
            return "data", msgspec.Raw(body)
        if kind.startswith("text/"):
            return "data", body.decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    return "data_base64", base64.b64encode(body).decode()

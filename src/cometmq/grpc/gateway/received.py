"""Conversion of received messages to HTTP responses, in the form that a client accepts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from cometmq.errors import BodyError, BodyTooLarge
from cometmq.grpc.gateway import events
from cometmq.grpc.gateway.events import encoded_header
from cometmq.grpc.gateway.exchange import Header, HttpError, Response, json_response, of_status
from cometmq.grpc.gateway.requests import Handle
from cometmq.grpc.rpc.enums import Code, Encoding
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import decompress

JSON, RAW = "application/json", "application/octet-stream"
HANDLE = "cometmqhandle"
"""The extension attribute for the message's handle in a batch of events, which has no headers per event."""
MAX_PLAIN_BYTES = 4 << 20
"""The maximum total size of decompressed bodies in a response. Further bodies stay compressed."""

Render = Callable[[Sequence[Any]], Response]


def renderer(accept: str) -> tuple[Render, bool]:
    """Return the function that makes the response for an Accept header.

    The second value is whether the response contains a single message. Raises HttpError.
    """
    forms: dict[str, tuple[Render, bool]] = {
        JSON: (_as_json, False),
        "*/*": (_as_json, False),
        "application/*": (_as_json, False),
        events.BATCH: (_as_batch, False),
        events.EVENT: (_as_event, True),
        RAW: (_as_body, True),
    }
    for each in accept.lower().split(",") if accept else (JSON,):
        form = forms.get(each.partition(";")[0].strip())
        if form is not None:
            return form
    known = ", ".join(each for each in forms if "*" not in each)
    raise HttpError(Code.BAD_REQUEST, f"accept: expected one of {known}", 406)


def _messages(parts: Sequence[Any]) -> list[Any] | Response:
    """Return the messages of a receive, or a response with its problem."""
    status = next(each.status for each in parts if each.WhichOneof("content") == "status")
    if status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
        return of_status(status)
    found = [each.message for each in parts if each.WhichOneof("content") == "message"]
    left = MAX_PLAIN_BYTES
    for message in found:
        system = message.system_properties
        if system.body_encoding == Encoding.GZIP:
            try:
                message.body = decompress(SysFlag.COMPRESSED, message.body, left)
            except (BodyError, BodyTooLarge):
                continue
            left -= len(message.body)
            system.body_encoding = Encoding.IDENTITY
    return found


def _as_json(parts: Sequence[Any]) -> Response:
    found = _messages(parts)
    if isinstance(found, Response):
        return found
    return json_response({"messages": [_document(message) for message in found]})


def _document(message: Any) -> dict[str, Any]:
    """Return a message as a JSON object."""
    system = message.system_properties
    document: dict[str, Any] = {
        "message_id": system.message_id,
        "handle": _handle(message),
        "queue": system.queue_id,
        "offset": system.queue_offset,
        "attempt": system.delivery_attempt,
        "keys": list(system.keys),
        "properties": dict(message.user_properties),
        "born_at": system.born_timestamp.ToJsonString(),
        "stored_at": system.store_timestamp.ToJsonString(),
    }
    optional = {"tag": system.tag, "group": system.message_group, "lite_topic": system.lite_topic}
    document |= {name: value for name, value in optional.items() if value}
    if system.HasField("priority"):
        document["priority"] = system.priority
    if system.body_encoding == Encoding.GZIP:
        document["body_encoding"] = "compressed"
    try:
        document["body"] = message.body.decode()
    except UnicodeDecodeError:
        document["body_base64"] = base64.b64encode(message.body).decode()
    return document


def _as_batch(parts: Sequence[Any]) -> Response:
    """Return the messages as a batch of events, which have their handles as an extension attribute."""
    found = _messages(parts)
    if isinstance(found, Response):
        return found
    listed = [events.to_structured(_stored(each), **{HANDLE: _handle(each)}) for each in found]
    return Response(200, ((b"content-type", events.BATCH.encode()),), b"[%s]" % b",".join(listed))


def _single(parts: Sequence[Any]) -> Any:
    """Return the only message of a receive, or a Response if there is no message or a problem."""
    found = _messages(parts)
    if isinstance(found, Response):
        return found
    return found[0] if found else Response(204, ())


def _as_event(parts: Sequence[Any]) -> Response:
    message = _single(parts)
    if isinstance(message, Response):
        return message
    kind = ((b"content-type", events.EVENT.encode()),)
    return Response(200, kind + _headers(message), events.to_structured(_stored(message)))


def _as_body(parts: Sequence[Any]) -> Response:
    """Return a single message: the body, and the rest in headers. An event keeps its mode (see events.py)."""
    message = _single(parts)
    if isinstance(message, Response):
        return message
    stored = _stored(message)
    kind, is_event = events.content_type_of(stored), events.SPEC_VERSION in stored.properties
    headers: list[Header] = []
    if kind or not is_event:
        headers.append((b"content-type", (kind or RAW).encode()))
    body = message.body
    if is_event:
        headers += [
            (f"ce-{name}".encode(), encoded_header(value))
            for name, value in events.attributes_of(stored).items()
        ]
        body = b"" if body == events.NO_DATA else body
    return Response(200, (*headers, *_headers(message)), body)


def _headers(message: Any) -> tuple[Header, ...]:
    """Return the headers that describe a message."""
    system = message.system_properties
    headers = [
        (b"x-mq-message-id", encoded_header(system.message_id)),
        (b"x-mq-handle", _handle(message).encode()),
        (b"x-mq-queue", b"%d" % system.queue_id),
        (b"x-mq-offset", b"%d" % system.queue_offset),
        (b"x-mq-attempt", b"%d" % system.delivery_attempt),
    ]
    for name, texts in (
        (b"x-mq-tag", [system.tag]),
        (b"x-mq-keys", system.keys),
        (b"x-mq-group", [system.message_group]),
    ):
        if value := b" ".join(encoded_header(text) for text in texts if text):
            headers.append((name, value))
    if system.body_encoding == Encoding.GZIP:
        headers.append((b"x-mq-body-encoding", b"compressed"))
    headers += [
        (b"x-mq-property", encoded_header(name).replace(b"=", b"%3D") + b"=" + encoded_header(value))
        for name, value in message.user_properties.items()
        if not name.startswith(events.PREFIX)
    ]
    return tuple(headers)


def _handle(message: Any) -> str:
    system = message.system_properties
    return Handle(system.receipt_handle, system.message_id, system.lite_topic).encode()


def _stored(message: Any) -> events.Stored:
    system = message.system_properties
    return events.Stored(
        message.topic.name,
        system.message_id,
        system.store_timestamp.ToJsonString(),
        message.user_properties,
        message.body,
    )

"""The OpenAPI document of the HTTP gateway (docs/http.md). Its paths are the routes of `Gateway`."""

from __future__ import annotations

from typing import Any

from cometmq.grpc.gateway.events import BATCH, EVENT
from cometmq.grpc.gateway.received import JSON, RAW
from cometmq.grpc.service.receives import (
    MAX_ACKS,
    MAX_BATCH,
    MAX_INVISIBLE_MS,
    MAX_POLL_MS,
    MIN_INVISIBLE_MS,
)
from cometmq.grpc.service.renewals import RENEWED_MS
from cometmq.grpc.service.sends import MAX_MESSAGES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
BYTES: Schema = {"type": "string", "contentEncoding": "base64"}
MAX_INVISIBLE_S = MAX_INVISIBLE_MS // 1000


def openapi_document() -> Schema:
    """Return the document, in the form of OpenAPI 3.1."""
    group = "/v1/topics/{topic}/groups/{group}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "CometMQ HTTP gateway", "version": "1"},
        "security": [{"account": []}, {}],
        "paths": {
            "/healthz": {"get": _operation("health", "Whether the broker serves requests.", security=[])},
            "/v1/openapi.json": {"get": _operation("openapi", "This document.", security=[])},
            "/v1/topics/{topic}/messages": {"post": _send()},
            "/v1/topics/{topic}/batch": {"post": _send_batch()},
            f"{group}/messages": {"post": _receive()},
            f"{group}/ack": {"post": _about_leases("ack", "Mark messages as consumed.")},
            f"{group}/nack": {
                "post": _about_leases(
                    "nack", "Give messages back, perhaps after a delay in seconds.", "delay"
                )
            },
            f"{group}/extend": {
                "post": _about_leases("extend", "Let leases end that many seconds from now.", "invisible")
            },
        },
        "components": {
            "securitySchemes": {"account": {"type": "http", "scheme": "basic"}},
            "schemas": _schemas(),
        },
    }


def _operation(name: str, summary: str, content: Schema | None = None, **more: Any) -> Schema:
    """Return an operation, whose responses beside 200 are problems."""
    answer: Schema = {"description": "Success"}
    answer["content"] = content or _content({"type": "object"})
    problem = {"description": "A problem", "content": _content(_of("Problem"), "application/problem+json")}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": answer, "default": problem},
        **more,
    }


def _send() -> Schema:
    headers = [
        _parameter("x-mq-tag", "header", TEXT, "Tag of the message."),
        _parameter("x-mq-keys", "header", TEXT, "Keys, separated by blanks."),
        _parameter("x-mq-group", "header", TEXT, "Message group: its messages are consumed in order."),
        _parameter("x-mq-delay", "header", NUMBER, "Seconds until the message is delivered."),
        _parameter("x-mq-priority", "header", INTEGER, "Priority, for topics with priorities."),
        _parameter("x-mq-property", "header", TEXT, "name=value; may be repeated."),
    ]
    event = {"type": "object"}
    bodies = {"*/*": {}, EVENT: {"schema": event}, BATCH: {"schema": {"type": "array", "items": event}}}
    found = {"oneOf": [_of("Sent"), _results("Sent")]}
    return _operation(
        "send",
        "Send a message, a CloudEvent (binary or structured), or a batch of CloudEvents.",
        _content(found),
        parameters=[_parameter("topic", "path", TEXT, "Topic."), *headers],
        requestBody={"required": True, "content": bodies},
    )


def _send_batch() -> Schema:
    items = {"type": "array", "items": _of("Message"), "minItems": 1, "maxItems": MAX_MESSAGES}
    return _operation(
        "sendBatch",
        "Send several messages. Each one has a result of its own; 207: some were not stored.",
        _content(_results("Sent")),
        parameters=[_parameter("topic", "path", TEXT, "Topic.")],
        requestBody={"required": True, "content": _content(_object({"messages": items}, "messages"))},
    )


def _receive() -> Schema:
    lease = {"type": "number", "minimum": MIN_INVISIBLE_MS / 1000, "maximum": MAX_INVISIBLE_S}
    lease["default"] = RENEWED_MS / 1000
    parameters = [
        _parameter("topic", "path", TEXT, "Topic."),
        _parameter("group", "path", TEXT, "Consumer group."),
        _parameter(
            "max", "query", {"type": "integer", "minimum": 1, "maximum": MAX_BATCH, "default": 1}, "Messages."
        ),
        _parameter(
            "wait",
            "query",
            {"type": "number", "minimum": 0, "maximum": MAX_POLL_MS / 1000, "default": 0},
            "Seconds to wait for a message.",
        ),
        _parameter("invisible", "query", lease, "Seconds until a message that is not acknowledged returns."),
        _parameter("tags", "query", TEXT, "Tags, separated by ||."),
        _parameter("sql", "query", TEXT, "SQL92 filter."),
    ]
    event = {"type": "object"}
    listed = _object({"messages": {"type": "array", "items": _of("Received")}}, "messages")
    content = {
        JSON: {"schema": listed},
        EVENT: {"schema": event},
        BATCH: {"schema": {"type": "array", "items": event}},
        RAW: {},
    }
    found = _operation("receive", "Lease messages, in the form of the Accept header.", content)
    found["responses"]["204"] = {"description": "No message, for a form that holds a single one"}
    return {**found, "parameters": parameters}


def _about_leases(name: str, summary: str, field: str = "") -> Schema:
    handles = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_ACKS}
    fields = {"handles": handles}
    if field:
        fields[field] = {"type": "number", "minimum": 0, "maximum": MAX_INVISIBLE_S}
    required = ["handles", *([field] if field == "invisible" else [])]
    return _operation(
        name,
        f"{summary} 207: some handles failed.",
        _content(_results("Handled")),
        parameters=[
            _parameter("topic", "path", TEXT, "Topic."),
            _parameter("group", "path", TEXT, "Consumer group."),
        ],
        requestBody={"required": True, "content": _content(_object(fields, *required))},
    )


def _schemas() -> Schema:
    message = {
        "body": TEXT,
        "body_base64": BYTES,
        "tag": TEXT,
        "keys": {"type": "array", "items": TEXT},
        "group": TEXT,
        "delay": NUMBER,
        "priority": INTEGER,
        "properties": TEXTS,
    }
    failure = {"code": TEXT, "detail": TEXT}
    place = {"message_id": TEXT, "queue": INTEGER, "offset": INTEGER}
    received = {
        **{name: schema for name, schema in message.items() if name != "delay"},
        **place,
        "handle": TEXT,
        "attempt": INTEGER,
        "born_at": TEXT,
        "stored_at": TEXT,
        "lite_topic": TEXT,
        "body_encoding": TEXT,
    }
    return {
        "Message": _object(message),
        "Sent": _object({**place, "recall_handle": TEXT, **failure}),
        "Received": _object(received, "message_id", "handle", "queue", "offset", "attempt"),
        "Handled": _object({"handle": TEXT, **failure}, "handle", "code"),
        "Problem": _object(
            {"title": TEXT, "status": INTEGER, "detail": TEXT, "field": TEXT}, "title", "status", "detail"
        ),
    }


def _parameter(name: str, place: str, schema: Schema, description: str) -> Schema:
    found = {"name": name, "in": place, "schema": schema, "description": description}
    return {**found, "required": True} if place == "path" else found


def _object(fields: Schema, *required: str) -> Schema:
    found: Schema = {"type": "object", "properties": fields}
    return {**found, "required": list(required)} if required else found


def _results(schema: str) -> Schema:
    return _object({"results": {"type": "array", "items": _of(schema)}}, "results")


def _of(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}


def _content(schema: Schema, kind: str = JSON) -> Schema:
    return {kind: {"schema": schema}}

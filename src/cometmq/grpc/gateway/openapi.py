"""The OpenAPI document of the HTTP gateway (docs/http.md). Its paths are the routes of `Gateway`."""

from __future__ import annotations

from typing import Any

import msgspec

from cometmq.grpc.gateway.events import BATCH, EVENT
from cometmq.grpc.gateway.received import JSON, RAW
from cometmq.grpc.gateway.requests import MAX_DELAY_S, Ack, Extend, JsonBatch, JsonMessage, Nack, Recall
from cometmq.grpc.service.receives import MAX_BATCH, MAX_INVISIBLE_MS, MAX_POLL_MS, MIN_INVISIBLE_MS
from cometmq.grpc.service.renewals import RENEWED_MS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
EVENT_OBJECT: Schema = {"type": "object"}
REFERENCE = "#/components/schemas/{name}"


def openapi_document() -> Schema:
    """Return the OpenAPI 3.1 document."""
    topic, group = "/v1/topics/{topic}", "/v1/topics/{topic}/groups/{group}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "CometMQ HTTP gateway", "version": "1"},
        "security": [{"account": []}, {}],
        "paths": {
            "/healthz": {"get": _operation("health", "Check that the broker serves requests.", security=[])},
            "/v1/openapi.json": {"get": _operation("openapi", "Return this document.", security=[])},
            f"{topic}/messages": {"post": _send()},
            f"{topic}/batch": {
                "post": _operation(
                    "sendBatch",
                    "Send several messages. The status 207 means that some were not stored.",
                    _content(_results("Sent")),
                    parameters=[_path("topic")],
                    requestBody=_body("JsonBatch"),
                )
            },
            f"{topic}/recall": {
                "post": _operation(
                    "recall",
                    "Cancel a delayed message before its delivery.",
                    _content(_of("Sent")),
                    parameters=[_path("topic")],
                    requestBody=_body("Recall"),
                )
            },
            f"{group}/messages": {"post": _receive()},
            f"{group}/ack": {"post": _about_leases("ack", "Mark messages as consumed.", "Ack")},
            f"{group}/nack": {"post": _about_leases("nack", "Return messages to the queue.", "Nack")},
            f"{group}/extend": {
                "post": _about_leases("extend", "Set the remaining time of leases.", "Extend")
            },
        },
        "components": {
            "securitySchemes": {"account": {"type": "http", "scheme": "basic"}},
            "schemas": _schemas(),
        },
    }


def _operation(name: str, summary: str, content: Schema | None = None, **more: Any) -> Schema:
    """Return an operation. All responses but 200 are problems."""
    success = {"description": "Success", "content": content or _content({"type": "object"})}
    problem = {"description": "A problem", "content": _content(_of("Problem"), "application/problem+json")}
    responses = {"200": success, "default": problem}
    return {"operationId": name, "summary": summary, "responses": responses, **more}


def _send() -> Schema:
    delay = {"type": "number", "minimum": 0, "maximum": MAX_DELAY_S}
    bodies = {
        "*/*": {},
        EVENT: {"schema": EVENT_OBJECT},
        BATCH: {"schema": {"type": "array", "items": EVENT_OBJECT}},
    }
    return _operation(
        "send",
        "Send a message, a CloudEvent (binary or structured), or a batch of CloudEvents.",
        _content({"oneOf": [_of("Sent"), _results("Sent")]}),
        parameters=[
            _path("topic"),
            _parameter("x-mq-tag", "header", TEXT, "Tag of the message."),
            _parameter("x-mq-keys", "header", TEXT, "Keys, separated by spaces."),
            _parameter("x-mq-group", "header", TEXT, "Message group, consumed in order."),
            _parameter("x-mq-delay", "header", delay, "Seconds until the message is delivered."),
            _parameter("x-mq-priority", "header", INTEGER, "Priority, for topics with priorities."),
            _parameter("x-mq-property", "header", TEXT, "A property, as name=value. May be repeated."),
        ],
        requestBody={"required": True, "content": bodies},
    )


def _receive() -> Schema:
    most = {"type": "integer", "minimum": 1, "maximum": MAX_BATCH, "default": 1}
    wait = {"type": "number", "minimum": 0, "maximum": MAX_POLL_MS / 1000, "default": 0}
    lease: Schema = {"type": "number", "default": RENEWED_MS / 1000}
    lease |= {"minimum": MIN_INVISIBLE_MS / 1000, "maximum": MAX_INVISIBLE_MS / 1000}
    content = {
        **_content(
            {"type": "object", "properties": {"messages": {"type": "array", "items": _of("Received")}}}
        ),
        EVENT: {"schema": EVENT_OBJECT},
        BATCH: {"schema": {"type": "array", "items": EVENT_OBJECT}},
        RAW: {},
    }
    parameters = [
        _path("topic"),
        _path("group"),
        _parameter("max", "query", most, "The maximum number of messages."),
        _parameter("wait", "query", wait, "Seconds to wait for a message."),
        _parameter("invisible", "query", lease, "Seconds until an unacknowledged message is redelivered."),
        _parameter("tags", "query", TEXT, "Tags, separated by ||."),
        _parameter("sql", "query", TEXT, "SQL92 filter."),
    ]
    summary = "Lease messages. The Accept header selects their form."
    found = _operation("receive", summary, content, parameters=parameters)
    found["responses"]["204"] = {"description": "No message (for forms with a single message)"}
    return found


def _about_leases(name: str, summary: str, body: str) -> Schema:
    return _operation(
        name,
        f"{summary} The status 207 means that some handles failed.",
        _content(_results("Handled")),
        parameters=[_path("topic"), _path("group")],
        requestBody=_body(body),
    )


def _schemas() -> Schema:
    bodies = (JsonBatch, Recall, Ack, Nack, Extend)
    _, of_requests = msgspec.json.schema_components(bodies, ref_template=REFERENCE)
    failure = {"code": TEXT, "detail": TEXT}
    place = {"message_id": TEXT, "queue": INTEGER, "offset": INTEGER}
    message = of_requests[JsonMessage.__name__]["properties"]
    more = dict.fromkeys(("handle", "born_at", "stored_at", "lite_topic", "body_encoding"), TEXT)
    fields = {
        "Sent": {**place, "recall_handle": TEXT, **failure},
        "Received": {**message, **place, **more, "attempt": INTEGER},
        "Handled": {"handle": TEXT, **failure},
        "Problem": {"title": TEXT, "status": INTEGER, "detail": TEXT, "field": TEXT},
    }
    return of_requests | {name: {"type": "object", "properties": each} for name, each in fields.items()}


def _parameter(name: str, place: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": place, "schema": schema, "description": description}


def _path(name: str) -> Schema:
    return {"name": name, "in": "path", "schema": TEXT, "required": True}


def _results(schema: str) -> Schema:
    return {"type": "object", "properties": {"results": {"type": "array", "items": _of(schema)}}}


def _of(schema: str) -> Schema:
    return {"$ref": REFERENCE.format(name=schema)}


def _content(schema: Schema, kind: str = JSON) -> Schema:
    return {kind: {"schema": schema}}


def _body(schema: str) -> Schema:
    return {"required": True, "content": _content(_of(schema))}

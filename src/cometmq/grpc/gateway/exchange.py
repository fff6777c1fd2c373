"""HTTP requests as calls of the gRPC service, and their responses.

The handlers of the RPCs also serve HTTP requests. They respond with protobuf messages, which the function
`render` of a request converts to an HTTP response. Errors are problem details (RFC 9457).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from cometmq.grpc.rpc.calls import BodyReader, Call, Calls, Message, Method
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import GrpcStatus, ServiceError
from cometmq.text import shortened

Header = tuple[bytes, bytes]

MAX_DETAIL_LENGTH = 512
STATUSES = {
    Code.MULTIPLE_RESULTS: 207,
    Code.MESSAGE_BODY_EMPTY: 400,
    Code.HA_NOT_AVAILABLE: 503,
    Code.NOT_IMPLEMENTED: 501,
    Code.UNSUPPORTED: 501,
    Code.VERSION_UNSUPPORTED: 501,
}
"""The HTTP statuses of codes that do not begin with their HTTP status."""
GRPC_STATUSES = {
    Code.MULTIPLE_RESULTS: 207,
    GrpcStatus.INVALID_ARGUMENT: 400,
    GrpcStatus.DEADLINE_EXCEEDED: 408,
    GrpcStatus.RESOURCE_EXHAUSTED: 413,
    GrpcStatus.UNAVAILABLE: 503,
}
"""The HTTP statuses of calls that end with a gRPC status: for example too slow, too large, or at a stop."""
FIELDS = {
    "user_properties": "properties",
    "message_group": "group",
    "delivery_timestamp": "delay",
    "invisible_duration": "invisible",
    "receipt_handle": "handles",
    "entries": "handles",
}
"""The names in the HTTP API of fields that have other names in the RPCs."""
FIELD_OF_CODE = {
    Code.TOPIC_NOT_FOUND: "topic",
    Code.CONSUMER_GROUP_NOT_FOUND: "group",
    Code.INVALID_RECEIPT_HANDLE: "handles",
}
RETRY_AFTER = (b"retry-after", b"1")


class HttpError(ServiceError):
    """A request is refused with an HTTP status that differs from that of its code."""

    status: int
    headers: tuple[Header, ...] = ()


class Response(NamedTuple):
    """An HTTP response. `headers` lacks content-length, which is added when the response is sent."""

    status: int
    headers: tuple[Header, ...]
    body: bytes = b""


class HttpCall(Call):
    """An HTTP request.

    Attributes:
        headers: The headers of the request, including its pseudo-headers.
        render: A function that converts the handler's messages to the response.
    """

    __slots__ = ("_parts", "headers", "render")

    def __init__(self, calls: Calls, stream_id: int, method: Method, headers: list[Header]) -> None:
        metadata = dict(headers)
        metadata.pop(b"grpc-timeout", None)
        # Each connection counts as a separate client.
        metadata[b"x-mq-client-id"] = f"http@{calls.connection.peer}".encode()
        metadata[b"x-mq-language"] = b"HTTP"
        super().__init__(calls, stream_id, method, metadata)
        self.reader = BodyReader(method.max_request)
        self.headers = headers
        self.render: Callable[[Sequence[Any]], Response] = lambda parts: of_status(parts[0].status)
        self._parts: list[bytes] = []

    def send(self, *encoded: bytes) -> None:
        """Keep messages of a server stream until its end."""
        self._parts += encoded

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """Send the response: the kept messages if `status` is OK, otherwise a problem."""
        if self.ended:
            return
        self.outcome = status
        if status is GrpcStatus.OK:
            self.outcome = Code.OK
            response = messages().ReceiveMessageResponse
            self.answer(self.render([response.FromString(part) for part in self._parts]))
        else:
            self.answer(problem(GRPC_STATUSES.get(status, 500), status.name, text))

    def respond(self, message: Message) -> None:
        """Respond to the request with one message."""
        if not self.ended:
            self.outcome = message.status.code
            self.answer(self.render([message]))

    def answer(self, response: Response) -> None:
        """Send a response and end the call."""
        if self.ended:
            return
        calls, body = self._calls, response.body
        headers = [
            (b":status", b"%d" % response.status),
            *response.headers,
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if response.status != 204:
            headers.append((b"content-length", b"%d" % len(body)))
        if self.metadata[b":method"] == b"HEAD":
            body = b""
        calls.http.send_headers(self.stream_id, headers, end_stream=not body)
        if body:
            calls.http.send_data(self.stream_id, body, end_stream=True)
        calls.end(self)
        calls.connection.mark_dirty()


def json_response(content: Any, status: int = 200, kind: bytes = b"application/json") -> Response:
    """Return a response with a JSON document."""
    return Response(status, ((b"content-type", kind),), msgspec.json.encode(content))


def status_of(code: int) -> int:
    """Return the HTTP status for a code of RocketMQ."""
    status = STATUSES.get(Code(code), code // 100)
    return status if 200 <= status < 600 else 500


def of_status(status: Any, **more: Any) -> Response:
    """Return a problem for a `Status` message. `more` are additional members of the document."""
    code = Code(status.code)
    return problem(status_of(code), code.name, status.message, FIELD_OF_CODE.get(code, ""), **more)


def problem(status: int, code: str, detail: str, field: str = "", **more: Any) -> Response:
    """Return a problem. A detail of the form "FIELD: PROBLEM" overrides `field`."""
    name, separator, rest = detail.partition(": ")
    if separator and name.replace("-", "_").isidentifier():
        field = FIELDS.get(name, name)
        detail = f"{field}: {rest}"
    content = {"title": code, "status": status, "detail": shortened(detail, MAX_DETAIL_LENGTH), **more}
    if field:
        content["field"] = field
    response = json_response(content, status, b"application/problem+json")
    extra: tuple[Header, ...] = ()
    if status in (429, 503):
        extra = (RETRY_AFTER,)
    elif status == 401:
        extra = ((b"www-authenticate", b'Basic realm="CometMQ", charset="UTF-8"'),)
    return response._replace(headers=response.headers + extra)

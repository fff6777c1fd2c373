"""The calls of one HTTP/2 connection, without I/O: from its events to requests, from responses to frames.

A call ends exactly once: by `Call.finish`, or because it is cancelled (its client resets the stream or the
connection ends), or because its deadline expires. Afterwards, `send` and `finish` do nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from enum import Enum
from typing import Any, Protocol, TypeAlias

import msgspec

from cometmq.grpc.http2 import hpack
from cometmq.grpc.http2.connection import (
    ConnectionEnded,
    DataReceived,
    Event,
    HeadersReceived,
    Http2Connection,
)
from cometmq.grpc.http2.errors import ErrorCode
from cometmq.grpc.rpc.status import OK_TRAILERS, GrpcStatus, Headers, RpcError, timeout_s, trailers

CONTENT_TYPE = b"application/grpc"
RESPONSE_HEADERS: Headers = (
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", b"identity"),
)
RESPONSE_BLOCK, OK_BLOCK = hpack.encode(RESPONSE_HEADERS), hpack.encode(OK_TRAILERS)
NOT_GRPC = (
    "This port serves the gRPC API of RocketMQ (apache.rocketmq.v2.MessagingService) for 5.x clients.\n"
)


PREFIX = 5  # Bytes before a message: a flag and its length
_pack_prefix = struct.Struct(">BI").pack
_prefix_at = struct.Struct(">BI").unpack_from


def frame_message(message: bytes) -> bytes:
    """Return an uncompressed message with its prefix."""
    return _pack_prefix(0, len(message)) + message


class MessageReader:
    """Splits the data of one call into messages of at most `limit` bytes."""

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """The number of bytes kept of an incomplete message."""
        return len(self._buffer)

    def read(self, data: bytes) -> list[bytes]:
        """Return the messages that the next part of the data completes. Raises RpcError."""
        buffer: bytes | bytearray = data
        if not self._buffer and len(data) >= PREFIX and PREFIX + self._size_at(data, 0) == len(data):
            return [data[PREFIX:]]
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        pos = 0
        found = []
        while len(buffer) - pos >= PREFIX:
            stop = pos + PREFIX + self._size_at(buffer, pos)
            if stop > len(buffer):
                break
            with memoryview(buffer) as view:
                found.append(bytes(view[pos + PREFIX : stop]))
            pos = stop
        if buffer is self._buffer:
            del self._buffer[:pos]
        else:
            self._buffer += buffer[pos:]
        return found

    def take(self) -> bytes:
        """Remove and return the bytes kept of an incomplete message."""
        kept = bytes(self._buffer)
        self._buffer.clear()
        return kept

    def _size_at(self, buffer: bytes | bytearray, pos: int) -> int:
        flag, size = _prefix_at(buffer, pos)
        if flag == 1:
            raise RpcError(GrpcStatus.UNIMPLEMENTED, "a message is compressed, which is not supported")
        if flag:
            raise RpcError(GrpcStatus.INTERNAL, f"the flag byte of a message is {flag}, not 0")
        if size > self._limit:
            problem = f"a message of {size} bytes is larger than the limit of {self._limit} bytes"
            raise RpcError(GrpcStatus.RESOURCE_EXHAUSTED, problem)
        return int(size)


class BodyReader(MessageReader):
    """Keeps the body of a request that is not gRPC, of at most `limit` bytes."""

    __slots__ = ()

    def read(self, data: bytes) -> list[bytes]:
        """Keep a part of the body. Raises RpcError."""
        if len(self._buffer) + len(data) > self._limit:
            problem = f"body: more than {self._limit} bytes"
            raise RpcError(GrpcStatus.RESOURCE_EXHAUSTED, problem)
        self._buffer += data
        return []


class Message(Protocol):
    """A protobuf message of a response. `status` is a `Status` of RocketMQ."""

    @property
    def status(self) -> Any: ...

    def SerializeToString(self) -> bytes: ...  # noqa: N802 (protobuf's name)


Handler: TypeAlias = "Callable[..., Message | Awaitable[Message | None] | None]"


class Kind(Enum):
    """Which side of a call sends a stream of messages instead of one message."""

    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDI = "bidi"


class Method(msgspec.Struct, frozen=True):
    """A method that clients may call.

    Attributes:
        parse: Returns the request for its bytes. Its exceptions are errors of the client.
        status_response: Returns a response that contains only a status with this code and text.
        handler: Handles a call: see `GrpcServer`.
        max_request: The maximum size of a request in bytes.
        make: Of the method HTTP: creates the call with the list of its headers.
    """

    name: str
    kind: Kind
    parse: Callable[[bytes], Any]
    status_response: Callable[[int, str], Message]
    handler: Handler
    max_request: int
    make: Callable[[Calls, int, Method, list[tuple[bytes, bytes]]], Call] | None = None


HTTP = b"*"
"""The key of the method that handles all requests that are not gRPC (gateway/). It is no path."""


class Call:
    """One call of a client.

    Attributes:
        metadata: The headers of the request. Names are in lower case.
        deadline: The time, on the clock of the event loop, until which the client waits. None: no limit.
        on_message: Of a bidi call: receives each parsed request.
        on_half_close: Of a bidi call: is called after the client's last message.
        on_cancel: Is called when the call ends other than by `finish`.
        on_lost: Is called if the call has ended by `finish`, but its client takes not all of the response.
        on_stored: Is called with the header of the broker's response for each message that a send stores.
        ended: Whether the call has ended.
        outcome: How the call has ended: a code of RocketMQ or, without one, a GrpcStatus.
    """

    __slots__ = (
        *("_calls", "_headers_sent", "begun", "buffered", "connection", "deadline", "ended", "metadata"),
        *("method", "on_cancel", "on_half_close", "on_lost", "on_message", "on_stored", "outcome"),
        *("reader", "request", "size", "stream_id"),
    )

    def __init__(self, calls: Calls, stream_id: int, method: Method, metadata: dict[bytes, bytes]) -> None:
        self._calls = calls
        self.stream_id = stream_id
        self.method = method
        self.metadata = metadata
        timeout = metadata.get(b"grpc-timeout")
        self.deadline = None if timeout is None else calls.now + timeout_s(timeout)
        self.connection = calls.connection
        self.on_message: Callable[[Any], None] | None = None
        self.on_half_close: Callable[[], None] | None = None
        self.on_cancel: Callable[[], object] | None = None
        self.on_lost: Callable[[], object] | None = None
        self.on_stored: Callable[[Any], object] | None = None
        self.ended = False
        self.outcome: int = GrpcStatus.CANCELLED
        # The state of the request, for `Calls`. The reader is None after the client's last message.
        self.reader: MessageReader | None = MessageReader(calls.max_message)
        self.request: bytes | None = None
        self.begun = calls.now  # Time at which the incomplete request, or the call, has begun
        self.buffered = 0  # Bytes of an incomplete request
        self.size = 0  # Bytes of the request that is handled
        self._headers_sent = False

    def text(self, name: bytes) -> str:
        """Return the value of a request header, "" if it is missing."""
        return self.metadata.get(name, b"").decode("utf-8", "replace")

    @property
    def unsent(self) -> int:
        """The number of bytes of responses that wait for the client to receive earlier ones."""
        return self._calls.http.unsent(self.stream_id)

    def send(self, *messages: bytes) -> None:
        """Send encoded messages. Messages after the end of the call are dropped."""
        if self.ended:
            return
        calls = self._calls
        if not self._headers_sent:
            self._headers_sent = True
            calls.http.send_headers(self.stream_id, RESPONSE_HEADERS)
        calls.http.send_data(self.stream_id, b"".join(map(frame_message, messages)))
        calls.connection.mark_dirty()

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """End the call, after the messages sent so far."""
        if self.ended:
            return
        headers = trailers(status, text)
        calls = self._calls
        if self.outcome == GrpcStatus.CANCELLED:
            self.outcome = status
        if not self._headers_sent:
            headers = RESPONSE_HEADERS + headers
        calls.http.send_headers(self.stream_id, headers, end_stream=True)
        calls.end(self)
        calls.connection.mark_dirty()

    def respond(self, message: Message) -> None:
        """Send a response and end the call."""
        if self.ended:
            return
        self.outcome = message.status.code
        if self._headers_sent:
            self.send(message.SerializeToString())
            self.finish()
            return
        calls, data = self._calls, frame_message(message.SerializeToString())
        calls.http.send_response(self.stream_id, RESPONSE_BLOCK, data, OK_BLOCK)
        calls.end(self)
        calls.connection.mark_dirty()

    def fail(self, error: Exception) -> None:
        """End the call with the response to an exception of its handler."""
        self._calls.dispatch.fail(self, error)


class Dispatch(Protocol):
    """The parts of `dispatch.Dispatcher` that this module uses."""

    def begin(self, call: Call, request: bytes | None) -> None: ...

    def deliver(self, call: Call, message: bytes) -> None: ...

    def notify(self, call: Call, callback: Callable[[], object] | None) -> None: ...

    def fail(self, call: Call, error: Exception) -> None: ...

    def count(self, call: Call) -> None: ...


class Owner(Protocol):
    """The parts of a connection that this module uses."""

    peer: str
    state: Any

    def mark_dirty(self) -> None:
        """Send the output of the HTTP/2 connection at the end of this iteration of the event loop."""

    def release(self) -> None:
        """Read again, if reading was paused because of the size of the requests that are handled."""


class Calls:
    """The calls of one connection.

    Args:
        methods: The methods by path.
        connection: The connection, for its output and for handlers.
        max_message: The maximum size of a request in bytes.
        max_buffered: The maximum size in bytes of all incomplete requests of this connection.
    """

    def __init__(
        self,
        http: Http2Connection,
        methods: Mapping[bytes, Method],
        dispatch: Dispatch,
        connection: Owner,
        max_message: int,
        max_buffered: int,
        now: float,
    ) -> None:
        self.http = http
        self.connection = connection
        self.max_message = max_message
        self.now = now
        self.buffered = 0  # Bytes of incomplete requests
        self.completed = 0  # Number of messages received so far
        self.handled = 0  # Bytes of the requests that are handled
        self._methods = methods
        self.dispatch = dispatch
        self._max_buffered = max_buffered
        self._open: dict[int, Call] = {}
        self._waiting: dict[int, Call] = {}
        """Ended calls with `on_lost` whose responses wait for the windows of the client, or have done so."""

    def __len__(self) -> int:
        return len(self._open)

    def receive(self, events: Iterable[Event], now: float) -> ConnectionEnded | None:
        """Handle events of the HTTP/2 connection, and return its end if that is one of them."""
        self.now = now
        for event in events:
            kind = type(event)
            if kind is DataReceived:
                self._on_data(event)  # type: ignore[arg-type]
            elif kind is HeadersReceived:
                self._on_headers(event)  # type: ignore[arg-type]
            elif isinstance(event, ConnectionEnded):
                self.cancel_all()
                return event
            else:
                call = self._open.get(event.stream_id)
                if call is not None:
                    self._cancel(call)
                elif (call := self._waiting.pop(event.stream_id, None)) is not None:
                    self.dispatch.notify(call, call.on_lost)
        return None

    def expire(self, now: float, grace_s: float, rate: int) -> None:
        """End the calls whose deadlines have passed, and those whose clients send too slowly.

        A request may take `grace_s` seconds. If it takes longer, `rate` bytes of it must have arrived for
        each further second.
        """
        for call in list(self._waiting.values()):
            if call.deadline is not None and call.deadline <= now and self.http.is_open(call.stream_id):
                del self._waiting[call.stream_id]
                self.http.reset(call.stream_id, ErrorCode.CANCEL)
                self.dispatch.notify(call, call.on_lost)
                self.connection.mark_dirty()
        for call in list(self._open.values()):
            if call.deadline is not None and call.deadline <= now:
                self._abort(call, GrpcStatus.DEADLINE_EXCEEDED, "the server has not responded in time")
                continue
            is_incomplete = call.buffered or (call.reader is not None and call.method.kind is not Kind.BIDI)
            if is_incomplete and call.buffered < (now - call.begun - grace_s) * rate:
                problem = f"{call.buffered} bytes of a request in {now - call.begun:.0f} s"
                self._abort(call, GrpcStatus.DEADLINE_EXCEEDED, problem)

    def end_all(self, kinds: Container[Kind], status: GrpcStatus, text: str) -> None:
        """End the calls of some kinds, and cancel the work for them."""
        for call in list(self._open.values()):
            if call.method.kind in kinds:
                self._abort(call, status, text)

    def cancel_all(self) -> None:
        """Cancel all calls, because the connection has ended."""
        for call in list(self._open.values()):
            self._cancel(call)
        waiting, self._waiting = self._waiting, {}
        for stream_id, call in waiting.items():
            if self.http.is_open(stream_id):
                self.dispatch.notify(call, call.on_lost)

    def end(self, call: Call) -> None:
        """Forget a call that ends."""
        call.ended = True
        self.dispatch.count(call)
        self._open.pop(call.stream_id, None)
        if call.on_lost is not None and self.http.is_open(call.stream_id):
            self._waiting = {key: each for key, each in self._waiting.items() if self.http.is_open(key)}
            self._waiting[call.stream_id] = call
        call.reader = None
        self._count_buffered(call, 0)
        if call.size:
            self.handled -= call.size
            self.connection.release()

    def _abort(self, call: Call, status: GrpcStatus, text: str) -> None:
        call.finish(status, text)
        self._cancel(call)

    def _cancel(self, call: Call) -> None:
        if not call.ended:
            self.end(call)
        self.dispatch.notify(call, call.on_cancel)

    def _count_buffered(self, call: Call, size: int) -> None:
        """Record that `size` bytes of incomplete requests of a call are kept."""
        self.buffered += size - call.buffered
        call.buffered = size

    # -- events

    def _on_headers(self, event: HeadersReceived) -> None:
        metadata = dict(event.headers)
        is_grpc = self.http.carries_grpc and metadata.get(b"content-type", b"").startswith(CONTENT_TYPE)
        path = metadata[b":path"]
        method = self._methods.get(path if is_grpc else HTTP)
        if method is None:
            if not is_grpc:
                self._refuse_http(event.stream_id, metadata[b":method"])
                return
            name = path.decode("utf-8", "replace")
            self._refuse(event.stream_id, RpcError(GrpcStatus.UNIMPLEMENTED, f"there is no method {name}"))
            return
        try:
            if method.make is None:
                call = Call(self, event.stream_id, method, metadata)
            else:
                call = method.make(self, event.stream_id, method, event.headers)
        except RpcError as error:
            self._refuse(event.stream_id, error)
            return
        self._open[event.stream_id] = call
        if method.kind is Kind.BIDI:
            self.dispatch.begin(call, None)
        if event.end_stream:
            self._half_close(call)

    def _on_data(self, event: DataReceived) -> None:
        data = event.data
        self.http.consumed(event.stream_id, len(data))
        call = self._open.get(event.stream_id)
        if call is None or call.reader is None:  # the call has ended, and its client may not have noticed yet
            return
        try:
            for message in call.reader.read(data) if data else ():
                self._on_message(call, message)
        except RpcError as error:
            self._abort(call, error.status, error.problem)
        if call.ended:
            return
        if event.end_stream:
            self._half_close(call)
            return
        size = call.reader.buffered + (len(call.request) if call.request is not None else 0)
        if size and not call.buffered:
            call.begun = self.now
        self._count_buffered(call, size)
        if self.buffered > self._max_buffered:
            problem = f"the incomplete requests of a connection are larger than {self._max_buffered} bytes"
            self._abort(call, GrpcStatus.RESOURCE_EXHAUSTED, problem)

    def _on_message(self, call: Call, message: bytes) -> None:
        self.completed += 1
        if call.method.kind is Kind.BIDI:
            self._count_buffered(call, 0)
            if not call.ended:  # an earlier message of the same data may have ended it
                self.dispatch.deliver(call, message)
        elif call.request is not None:
            raise RpcError(GrpcStatus.INVALID_ARGUMENT, "the call has more than one request")
        else:
            call.request = message

    def _half_close(self, call: Call) -> None:
        """Handle the end of a call's requests."""
        incomplete = call.reader.buffered if call.reader is not None else 0
        if call.method.make is not None and call.reader is not None:
            call.request, incomplete = call.reader.take(), 0
        call.reader = None
        self._count_buffered(call, 0)
        if incomplete:
            problem = f"the call ends {incomplete} bytes into a message"
            self._abort(call, GrpcStatus.INVALID_ARGUMENT, problem)
        elif call.method.kind is Kind.BIDI:
            self.dispatch.notify(call, call.on_half_close)
        elif call.request is None:
            self._abort(call, GrpcStatus.INVALID_ARGUMENT, "the call has no request")
        else:
            request, call.request = call.request, None
            call.size = len(request)
            self.handled += call.size
            self.dispatch.begin(call, request)

    @property
    def serves_http(self) -> bool:
        """Whether there is a handler of requests that are not gRPC."""
        return HTTP in self._methods

    # -- refused requests

    def _refuse(self, stream_id: int, error: RpcError) -> None:
        headers = RESPONSE_HEADERS + trailers(error.status, error.problem)
        self.http.send_headers(stream_id, headers, end_stream=True)
        self.connection.mark_dirty()

    def _refuse_http(self, stream_id: int, method: bytes) -> None:
        """Answer a request that is not gRPC, for instance of a browser."""
        status = b"415" if method == b"POST" else b"404"
        self.http.send_headers(stream_id, ((b":status", status), (b"content-type", b"text/plain")))
        self.http.send_data(stream_id, NOT_GRPC.encode(), end_stream=True)
        self.connection.mark_dirty()

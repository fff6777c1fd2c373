"""The server side of an HTTP/1.1 connection without I/O, with the events and methods of `Http2Connection`.

Each request is a stream, and one stream is open at a time. Bytes of the next request are kept until the
response is complete (`is_occupied`, `has_more`). The package h11 parses requests. This module is imported
when the first HTTP/1.1 connection arrives.

Requests that an upstream proxy could parse differently are refused: Content-Length with Transfer-Encoding,
Transfer-Encoding in HTTP/1.0, different values of Content-Length, and unknown transfer encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import h11
import msgspec

from cometmq.grpc.http2.connection import ConnectionEnded, DataReceived, Event, HeadersReceived

MAX_HEAD_BYTES = 16 * 1024
"""The maximum size of a request line with its headers, and of the header of a chunk."""
HEAD_S = 30.0
"""The timeout, in seconds, for the head of a request, from its first byte on."""
MAX_DISCARDED_BYTES, DISCARD_S = 1 << 20, 10.0
"""Limits on the bytes and seconds for which a request is read after its early refusal. The client can receive
the response while the connection stays open."""


class Http1Connection:
    """The connection of a client.

    Args:
        now: The current time of a monotonic clock, in seconds.
        on_free: Called when the connection can handle the next request.
    """

    __slots__ = (
        *("_discarded", "_ended", "_head_since", "_is_complete", "_leaving", "_now", "_on_free", "_open"),
        *("_out", "_parser", "_refused_at", "_stream", "has_more"),
    )
    carries_grpc = False

    def __init__(self, now: float, on_free: Callable[[], None]) -> None:
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._on_free = on_free
        self._now = now
        self._out: list[bytes] = []
        self._stream = 0
        self._open = False  # Whether the response to the current request is incomplete
        self._is_complete = False  # Whether the current request has arrived completely
        self._head_since: float | None = now
        self._refused_at: float | None = None  # When the response to an incomplete request was sent
        self._discarded = 0
        self._leaving = False
        self._ended = False
        self.has_more = False
        """Whether bytes of further requests were received and not parsed yet."""

    # -- state

    @property
    def open_streams(self) -> int:
        return int(self._open)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended. The caller then writes the output and closes the socket."""
        return self._ended

    @property
    def is_occupied(self) -> bool:
        """Whether a complete request waits for its response. Bytes of the next request must wait."""
        return self._open and self._is_complete

    @property
    def unsent_total(self) -> int:
        """The number of bytes of output that were not taken yet."""
        return sum(map(len, self._out))

    def is_open(self, stream_id: int) -> bool:
        """Return whether the response to a request is incomplete, or its output was not taken yet."""
        return stream_id == self._stream and (self._open or bool(self._out))

    def take_output(self) -> list[bytes]:
        """Remove and return the bytes to be written to the socket."""
        out, self._out = self._out, []
        return out

    # -- the application's actions

    def send_headers(
        self, stream_id: int, headers: Sequence[tuple[bytes, bytes]], end_stream: bool = False
    ) -> None:
        """Send the headers of a response. The first header is `:status`."""
        if stream_id != self._stream or not self._open:
            return
        (_, status), *others = headers
        if self._leaving or not self._is_complete:
            others.append((b"connection", b"close"))
        reason = HTTPStatus(int(status)).phrase
        self._send(h11.Response(status_code=int(status), headers=others, reason=reason))
        if end_stream:
            self._finish()

    def send_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """Send data of a response."""
        if stream_id == self._stream and self._open:
            self._send(h11.Data(data=data))
            if end_stream:
                self._finish()

    def consumed(self, stream_id: int, size: int) -> None:
        """Do nothing: HTTP/1.1 has no windows."""

    def goaway(self) -> None:
        """End the connection after the current response."""
        self._leaving = True
        self._ended = self._ended or not self._open

    def _send(self, event: h11.Event) -> None:
        if data := self._parser.send(event):
            self._out.append(data)

    def _finish(self) -> None:
        """End a response and its request."""
        self._send(h11.EndOfMessage())
        self._open = False
        parser = self._parser
        if parser.our_state is h11.DONE and parser.their_state is h11.DONE and not self._leaving:
            parser.start_next_cycle()
            self.has_more = bool(parser.trailing_data[0])
            self._head_since = None
            self._on_free()
        elif self._is_complete:
            self._ended = True
        else:
            self._refused_at = self._now

    # -- received bytes

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Process received bytes and return their events in order. ConnectionEnded is the last event."""
        events: list[Event] = []
        self.has_more = False
        if self._ended:
            return events
        parser, self._now = self._parser, now
        try:
            if data:  # h11 interprets empty data as the end of the connection
                parser.receive_data(data)
            while not self._ended:
                event = parser.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                if self._refused_at is not None:
                    self._discard(event, now - self._refused_at > DISCARD_S)
                elif isinstance(event, h11.Request):
                    events.append(self._begin(event))
                elif isinstance(event, h11.Data):
                    events.append(DataReceived(self._stream, bytes(event.data), False))
                elif isinstance(event, h11.EndOfMessage):
                    self._is_complete = True
                    events.append(DataReceived(self._stream, b"", True))
            self._check_time(now)
        except h11.RemoteProtocolError as error:
            self._refuse(error)
        if self._ended:
            events.append(ConnectionEnded(0, "the HTTP/1.1 connection has ended"))
        return events

    def _begin(self, request: h11.Request) -> HeadersReceived:
        if request.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("the version is not 1.0 or 1.1", error_status_hint=505)
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
            problem = "Transfer-Encoding is invalid with Content-Length and in HTTP/1.0"
            raise h11.RemoteProtocolError(problem, error_status_hint=400)
        self._stream += 1
        self._open, self._is_complete, self._head_since = True, False, None
        if self._parser.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))
        headers = [(b":method", request.method), (b":path", request.target), *request.headers]
        return HeadersReceived(self._stream, headers, False)

    def _check_time(self, now: float) -> None:
        """Raise RemoteProtocolError if the head of a request arrives too slowly."""
        if self._parser.their_state is not h11.IDLE:
            return
        if self._head_since is None:
            self._head_since = now
        elif now - self._head_since > HEAD_S:
            raise h11.RemoteProtocolError("the head of a request took too long", error_status_hint=408)

    def _discard(self, event: object, late: bool) -> None:
        """Drop a part of a refused request. End the connection at the end of the request or at a limit."""
        if isinstance(event, h11.Data):
            self._discarded += len(event.data)
            self._ended = late or self._discarded > MAX_DISCARDED_BYTES
        else:
            self._ended = True

    def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """Respond to an invalid request, if a response can still be sent, and end the connection."""
        status = error.error_status_hint
        if self._parser.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(
                {"title": "Invalid HTTP request", "status": status, "detail": str(error)}
            )
            headers = [
                (b"content-type", b"application/problem+json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            self._send(h11.Response(status_code=status, headers=headers))
            self._send(h11.Data(data=body))
            self._send(h11.EndOfMessage())
        self._open, self._ended = False, True

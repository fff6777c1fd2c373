"""One TCP connection of gRPC clients: between its socket and the HTTP/2 and gRPC cores.

All connections of a loop read into one buffer, and send the output of one iteration of the event loop in one
write (cometmq/remoting/tick.py).

Budget, for calls of which 16 arrive together, on a busy machine and without the sockets: 40 µs of CPU for a
SendMessage of 1 KiB, 40 µs for an AckMessage, 30 µs for each received message of 1 KiB. A send consists of
frames and headers (5 µs, templates.py), the call with its response (8 µs), the conversion (7 µs, sent.py) and
the broker (20 µs). No call needs a task, a timer or an encoded request to the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, cast

from cometmq import logs
from cometmq.grpc.http2.connection import Http2Connection, Http2Limits
from cometmq.grpc.http2.frames import PREFACE
from cometmq.grpc.listener.dispatch import Dispatcher
from cometmq.grpc.rpc.calls import NOT_GRPC, Calls, Method
from cometmq.remoting import Limits, Tick, describe_peer

log = logs.logger(__name__)

SLICE = 16 * 1024  # Bytes that are handled between two checks of `Limits.callback_s`
JOIN_LIMIT = 64 * 1024  # Output up to this size is joined into one block
MAX_INCOMPLETE_REQUESTS = 4
"""The incomplete requests of a connection may take this many times the size of the largest request."""
GOAWAY_S = 0.2
"""Time between the two GOAWAY frames of a connection that ends: at least a round trip."""
SILENCE_S = 600.0
"""A connection with open streams is closed after this time without a byte from its client. Clients send a
heartbeat every 10 s, or at least a PING every 5 minutes."""

_HTTP1 = tuple(
    f"{method} ".encode() for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
)
_SNIFFED = 3
"""How many bytes tell the preface of HTTP/2 from the requests of HTTP/1.1."""
_NO_H11 = (
    "HTTP/1.1 at this port needs the extra http: pip install 'cometmq[http]', then start the broker again.\n"
)
_TLS_HANDSHAKE = 0x16


class GrpcConnection(asyncio.BufferedProtocol):
    """A connection that carries HTTP/2.

    Attributes:
        state: Data that handlers attach to the connection.
        peer: The address of the client, "ip:port".
        peer_host: The same address in the form of records (4 or 16 bytes of address, 4 of port).
    """

    __slots__ = (
        *("_active", "_backlog", "_client", "_closing", "_dirty", "_fresh", "_goaway_at", "_http"),
        *("_idle_since", "_limits", "_log_limit", "_loop", "_on_close", "_on_open", "_reading", "_resuming"),
        *("_sent_bytes", "_stalled_at", "_stalled_sent", "_tick", "_transport", "_write_paused", "calls"),
        *("closed", "peer", "peer_host", "state"),
    )

    def __init__(
        self,
        methods: Mapping[bytes, Method],
        dispatcher: Dispatcher,
        tick: Tick,
        limits: Limits,
        log_limit: logs.LogLimiter,
        on_open: Callable[[GrpcConnection], None],
        on_close: Callable[[GrpcConnection], None],
        client: tuple[str, int] | None = None,
    ) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._tick = tick
        self._limits = limits
        self._log_limit = log_limit
        self._on_open = on_open
        self._on_close = on_close
        self._http = Http2Connection(Http2Limits(), now)
        most = limits.max_frame
        self.calls = Calls(self._http, methods, dispatcher, self, most, MAX_INCOMPLETE_REQUESTS * most, now)
        self._transport: asyncio.Transport | None = None
        self._backlog = b""  # Received bytes that a later iteration of the event loop will handle
        self._fresh = True  # Whether no byte has been received yet
        self._reading = True
        self._resuming = False  # Whether a call of `_go_on`, which continues reading, is scheduled
        self._dirty = False  # Whether `flush` will be called
        self._sent_bytes = 0  # Number of bytes passed to the transport so far
        self._write_paused = False
        self._stalled_at = now
        self._stalled_sent = 0
        self._active = True
        self._idle_since = now
        self._goaway_at: float | None = None
        self._closing = False
        self.closed = False
        self.peer = ""
        self.peer_host = b""
        self.state: Any = None

    # -- writing

    def mark_dirty(self) -> None:
        """Send the queued output at the end of this iteration of the event loop."""
        if not self._dirty:
            self._dirty = True
            self._tick.mark_dirty(self)

    def flush(self) -> None:
        """Pass the output to the transport, unless the peer does not read. Only tick.py calls this."""
        self._dirty = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not self._write_paused:
            out = self._http.take_output()
            size = sum(map(len, out))
            self._sent_bytes += size
            if size > JOIN_LIMIT:
                transport.writelines(out)
            elif out:
                transport.write(b"".join(out))
        waiting = self._waiting(transport)
        if waiting > self._limits.write_evict:
            self.cut(f"it does not receive its responses, of which {waiting} bytes wait")
        elif waiting:
            self._tick.unsent.keep(self, waiting, self._limits.write_total, fresh=False)
        else:
            self._tick.unsent.drop(self)
        if self._closing or (self._http.closed and not self._http.unsent_total):
            self.close()

    def _waiting(self, transport: asyncio.Transport) -> int:
        """Return the number of bytes of responses that the peer has not received."""
        return self._http.unsent_total + transport.get_write_buffer_size()

    # -- closing

    def goaway(self) -> None:
        """End the connection after its open calls: ask the client to open no more, then close.

        The second call, at least GOAWAY_S after the first, refuses further calls.
        """
        if self._goaway_at is None:
            self._goaway_at = self._loop.time()
        self._http.goaway()
        self.mark_dirty()

    def close(self) -> None:
        """Close the connection after the bytes that were passed to the transport."""
        if not self.closed:
            self.closed = True
            self._stalled_at = self._loop.time()
            if self._transport is not None:
                self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately. Unsent bytes are lost."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def cut(self, why: str) -> None:
        """Abort the connection, and log the reason `why`."""
        if self._log_limit.allows():
            log.warning("%s: %s; closed", self.peer, why)
        self.abort()

    def check(self, now: float) -> None:
        """End late calls, and the connection if it is idle or stalled. Called about once per second."""
        limits = self._limits
        transport = self._transport
        if transport is None:
            return
        if self.closed:  # A closed connection waits until its peer has received the last responses
            if now - self._stalled_at >= limits.write_stall_s:
                transport.abort()
            return
        self.calls.expire(now, limits.frame_grace_s, limits.frame_rate)
        if self._goaway_at is not None and now - self._goaway_at >= GOAWAY_S:
            self.goaway()
        # Responses that wait for the windows of single streams stay below `write_low`: a client may have
        # stopped to read one stream, but uses the others.
        waiting = self._waiting(transport)
        taken = self._sent_bytes - transport.get_write_buffer_size()
        if taken != self._stalled_sent or waiting <= limits.write_low:
            self._stalled_sent = taken
            self._stalled_at = now
        elif now - self._stalled_at >= limits.write_stall_s:
            self.cut(f"no response received for {now - self._stalled_at:.0f} s")
            return
        if self._active:
            self._active = False
            self._idle_since = now
        elif self._http.open_streams:
            if now - self._idle_since >= SILENCE_S:
                self.cut(f"no byte received for {SILENCE_S:.0f} s")
        elif now - self._idle_since >= limits.idle_s and self._goaway_at is None:
            self.goaway()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. The server's settings are sent after the client's first bytes."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer, self.peer_host = describe_peer(self._client or transport.get_extra_info("peername"))
        self._transport.set_write_buffer_limits(high=self._limits.write_high, low=self._limits.write_low)
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        """Cancel the open calls and call the close callback, whichever side closed the connection."""
        self.closed = True
        self._backlog = b""
        self._transport = None
        self._tick.unsent.drop(self)
        self._tick.partial.drop(self)
        self.calls.cancel_all()
        self._on_close(self)

    def eof_received(self) -> None:
        """Let asyncio close the transport: a client that sends no more ends its HTTP/2 connection."""

    def pause_writing(self) -> None:
        """Stop reading, because the peer receives its responses too slowly."""
        self._write_paused = True
        self._pause_reading()

    def resume_writing(self) -> None:
        """Start reading again, because the peer has received enough of its responses."""
        self._write_paused = False
        self.mark_dirty()
        self._resume_soon()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        """Return the buffer for the next read."""
        return self._tick.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes just read from the socket."""
        self._active = True
        if self.closed or self._closing:
            return
        if not self._tick.scheduled:
            self._tick.schedule()
        data = bytes(self._tick.scratch[:nbytes])
        if self._fresh:
            data = self._backlog + data
            if len(data) < _SNIFFED and PREFACE.startswith(data):
                self._backlog = data
                return
            self._fresh = False
            if self._answer_other_protocol(data):
                return
        elif self._backlog:  # further requests behind one of HTTP/1.1
            data = self._backlog + data
        self._handle(data)

    # -- received bytes

    def _answer_other_protocol(self, data: bytes) -> bool:
        """Refuse a client that does not begin with HTTP/2. Return False if it may be one."""
        if data[0] == _TLS_HANDSHAKE:
            self.cut("it uses TLS, which tls.server.mode=disabled switches off at this port")
            return True
        if self.calls.serves_http and data[:1].isalpha() and not data.startswith(PREFACE[:_SNIFFED]):
            return not self._begin_http1()
        if data.startswith(_HTTP1):
            self._answer_http1("404 Not Found", NOT_GRPC)
            return True
        return False

    def _begin_http1(self) -> bool:
        """Let HTTP/1.1 take the place of HTTP/2. Return False, after an answer, if its parser is missing."""
        try:
            from cometmq.grpc.http1.connection import Http1Connection
        except ImportError:
            self._answer_http1("501 Not Implemented", _NO_H11)
            return False
        http: Any = Http1Connection(self._loop.time(), self._request_ended)
        self._http = self.calls.http = http
        return True

    def _answer_http1(self, status: str, text: str) -> None:
        """Respond to an HTTP/1.1 client without a parser, and close the connection."""
        assert self._transport is not None
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        self._transport.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        self.close()

    def _handle(self, data: bytes) -> None:
        """Handle received bytes, or some of them and keep the others for a later loop iteration.

        The bytes of an HTTP/1.1 request are also kept until the response to the one before it is sent. As
        long as they are few, the connection is read, so that its end is noticed.
        """
        calls, http = self.calls, self._http
        completed = calls.completed
        until = monotonic() + self._limits.callback_s
        now = self._loop.time()
        size = len(data)
        pos = 0
        while (pos < size or http.has_more) and not http.is_occupied and not self._is_busy():
            stop = min(pos + SLICE, size)
            ended = calls.receive(http.receive(data[pos:stop], now), now)
            pos = stop
            if ended is not None:
                self._end(ended.error_code, ended.reason)
                return
            if monotonic() >= until:
                self._resume_soon()
                break
        self._backlog = data[pos:]
        is_waiting = http.is_occupied and len(self._backlog) < SLICE
        if self._resuming or (self._backlog and not is_waiting) or self._is_busy():
            self._pause_reading()
        if calls.buffered:
            fresh = calls.completed != completed
            self._tick.partial.keep(self, calls.buffered, self._limits.partial_total, fresh)
        else:
            self._tick.partial.drop(self)
        self.mark_dirty()

    def _end(self, code: int, reason: str) -> None:
        """Close the connection after its last output."""
        if code and self._log_limit.allows():
            log.info("closing the connection of %s: %s", self.peer, reason)
        self._closing = True
        self._pause_reading()
        self.mark_dirty()

    def _is_busy(self) -> bool:
        """Return whether reading pauses until the peer reads or handlers have completed large requests."""
        return self._write_paused or self.calls.handled > self._limits.max_frame

    def release(self) -> None:
        """Read again, if reading was paused because of the size of the requests that are handled."""
        if not self._reading and not self._is_busy():
            self._resume_soon()

    def _request_ended(self) -> None:
        """Handle the bytes that were kept until the end of an HTTP/1.1 request."""
        if self._backlog or self._http.has_more:
            self._resume_soon()

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            self._tick.schedule()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Continue reading: first handle the bytes that were kept, then read the socket again."""
        self._resuming = False
        if self.closed or self._closing or self._is_busy():
            return
        if self._backlog or self._http.has_more:
            self._handle(self._backlog)
        transport = self._transport
        if self._backlog or self._resuming or self._reading or transport is None or transport.is_closing():
            return
        self._reading = True
        transport.resume_reading()

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

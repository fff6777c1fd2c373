"""The server side of an HTTP/2 connection (RFC 9113) without I/O.

The caller passes received bytes and the time to `receive`, handles the returned events, and writes the
output. Nothing that the peer does raises an exception: a violation of the protocol or of a limit ends the
stream or the connection. Http2Limits bounds all state except unsent responses, which the caller must bound.

Frames of a stream that has ended are ignored, because the peer may have sent them before it received the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import msgspec

from cometmq.grpc.http2 import frames, hpack
from cometmq.grpc.http2.errors import ErrorCode, Http2Error
from cometmq.grpc.http2.sending import Sender, Stream
from cometmq.grpc.http2.templates import HeaderTemplates, check_request

_OF_CONNECTION = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))
_OF_STREAMS = frozenset(range(frames.CONTINUATION + 1)) - _OF_CONNECTION - {frames.WINDOW_UPDATE}
_PING_BYTES = 8
_PRIORITY_BYTES = 5
_MIN_GOAWAY_BYTES = 8
# With this many open streams, a change of their windows costs as much as one more idle frame.
_STREAMS_PER_COST = 10

MAX_LEARNED = 256
"""The maximum number of header blocks of one connection that are cached (templates.py)."""


class HeadersReceived(msgspec.Struct, frozen=True, gc=False):
    """A request has begun. With `end_stream` it has no data."""

    stream_id: int
    headers: list[tuple[bytes, bytes]]
    end_stream: bool


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """Data of a request. The application must report it by `consumed`, to receive more.

    With `end_stream` the request is complete; the data may then be empty. Trailers of a request are dropped.
    """

    stream_id: int
    data: bytes
    end_stream: bool


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """A stream has ended early: the peer reset it, or violated the protocol on it."""

    stream_id: int
    error_code: int


class ConnectionEnded(msgspec.Struct, frozen=True, gc=False):
    """The connection has ended with all its streams. The caller writes the output and closes the socket."""

    error_code: int
    reason: str


Event: TypeAlias = HeadersReceived | DataReceived | StreamReset | ConnectionEnded


KIB = 1024
MIB = 1024 * KIB


class Http2Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a connection. Sizes are in bytes.

    Attributes:
        max_streams: The maximum number of open streams. Further ones are refused.
        max_frame: The maximum size of a received frame's payload.
        max_header_list: The maximum size of a request's headers, with 32 bytes added for each. A stream with
            more is reset.
        max_header_block, max_header_frames: The maximum size and number of frames of an encoded header block.
            A connection that exceeds one of them ends.
        stream_window, connection_window: The maximum number of bytes that the application has not consumed,
            of one stream and of all.
        max_replies: The maximum number of replies to frames such as PING since the last output was taken.
        early_resets, early_resets_per_s: How many streams may end within EARLY_S after their start by a reset
            of the peer or by its violation of the protocol: at once, and per second on average.
        idle_frames_per_s: The maximum number of frames per second that do nothing for a request: PING,
            SETTINGS, empty DATA, frames of unknown types. A SETTINGS frame that changes the windows of open
            streams counts as more. Clients that measure round-trip times send thousands of PING per second.
    """

    max_streams: int = 1000
    max_frame: int = 16 * KIB
    max_header_list: int = 16 * KIB
    max_header_block: int = 32 * KIB
    max_header_frames: int = 32
    stream_window: int = 1 * MIB
    connection_window: int = 16 * MIB
    max_replies: int = 10_000
    early_resets: int = 2_000
    early_resets_per_s: int = 200
    idle_frames_per_s: int = 10_000


EARLY_S = 1.0
"""The age in seconds up to which the end of a stream counts as early."""


class Allowance:
    """Limits a number of events: `burst` at once, and `per_s` per second on average."""

    __slots__ = ("_burst", "_left", "_per_s", "_since")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst = self._left = burst
        self._per_s = per_s
        self._since = now

    def take(self, now: float, count: float = 1) -> bool:
        """Count events. Returns False if there were too many."""
        self._left = min(self._burst, self._left + (now - self._since) * self._per_s) - count
        self._since = now
        return self._left >= 0


@cache
def _templates_of(max_header_list: int) -> HeaderTemplates:  # noqa: ARG001 (caches depend on the limit)
    return HeaderTemplates()


class Http2Connection:
    """One connection of a client.

    While the peer does not read, the caller leaves the output where it is: what is queued here counts towards
    the limits. `now` is the time in seconds of a monotonic clock.
    """

    __slots__ = (
        *("_block", "_block_end", "_block_frames", "_block_stream", "_credit", "_decoder", "_early_resets"),
        *("_end", "_events", "_goaways", "_idle_frames", "_last_stream", "_learned", "_limits", "_now"),
        *("_only", "_peer_leaves", "_preamble", "_reader", "_replies", "_sender", "_streams", "_templates"),
        "_window",
    )
    # An HTTP/1.1 connection has other values (http1/connection.py).
    carries_grpc = True
    is_occupied = False
    has_more = False

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self._now = now
        self._events: list[Event] = []
        self._reader = frames.FrameReader(limits.max_frame)
        self._decoder = hpack.Decoder()
        self._templates = _templates_of(limits.max_header_list)
        self._learned = 0  # the number of blocks that this connection has added to the cache
        self._sender = Sender(self._sent_end)
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._only: int | None = frames.SETTINGS  # the one allowed type of the next frame
        self._preamble = hpack.NO_TABLE
        # An incomplete header block.
        self._block = bytearray()
        self._block_frames = 0
        self._block_stream = 0
        self._block_end = False
        # Flow control of received data.
        self._window = limits.connection_window
        self._credit = 0
        # Abuse.
        self._replies = 0
        self._early_resets = Allowance(limits.early_resets, limits.early_resets_per_s, now)
        self._idle_frames = Allowance(limits.idle_frames_per_s, limits.idle_frames_per_s, now)
        # The end.
        self._goaways = 0
        self._peer_leaves = False
        self._end: ConnectionEnded | None = None
        self._greet()

    def _greet(self) -> None:
        limits = self._limits
        self._sender.write(
            frames.settings(
                {
                    frames.HEADER_TABLE_SIZE: 0,
                    frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.stream_window,
                    frames.MAX_FRAME_SIZE: limits.max_frame,
                    frames.MAX_HEADER_LIST_SIZE: limits.max_header_list,
                }
            )
        )
        self._sender.write(frames.window_update(0, limits.connection_window - frames.DEFAULT_WINDOW))

    # -- state

    @property
    def open_streams(self) -> int:
        """The number of streams that have not ended."""
        return len(self._streams)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended: after an error, or after GOAWAY and the end of all streams."""
        return self._end is not None or (not self._streams and (self._goaways > 1 or self._peer_leaves))

    @property
    def unsent_total(self) -> int:
        """The bytes of data queued for the peer's windows, and of output that was not taken."""
        return self._sender.unsent

    def is_open(self, stream_id: int) -> bool:
        """Return whether a stream has not ended, for instance because a part of its response is queued."""
        return stream_id in self._streams

    def unsent(self, stream_id: int) -> int:
        """Return the number of bytes of a stream's data that are queued for the peer's windows."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.unsent

    def take_output(self) -> list[bytes]:
        """Return the bytes to write to the socket now. They are then no longer counted."""
        self._replies = 0
        return self._sender.take_output()

    # -- the application's actions

    def send_headers(
        self, stream_id: int, headers: Sequence[tuple[bytes, bytes]], end_stream: bool = False
    ) -> None:
        """Send the headers or the trailers of a response, after data that is queued.

        After `end_stream`, the stream ends even if the request is incomplete: the peer is then told by a
        RST_STREAM with NO_ERROR to send no more of it.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.ending:
            block = self._preamble + hpack.encode(headers)
            self._preamble = b""
            self._sender.send_headers(stream, block, end_stream)

    def send_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """Send data of a response. It is queued while the peer's windows are closed."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.ending:
            self._sender.send_data(stream, data, end_stream)

    def send_response(self, stream_id: int, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: its headers and trailers, which `hpack.encode` has encoded, and its data."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.ending:
            block, self._preamble = self._preamble + block, b""
            self._sender.send_response(stream, block, data, trailers)

    def reset(self, stream_id: int, error_code: int) -> None:
        """End a stream at once. Its queued data is discarded."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            self._sender.write(frames.reset(stream_id, error_code))

    def consumed(self, stream_id: int, size: int) -> None:
        """Allow the peer to send more. What is unconsumed at the end of a stream goes back by itself."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.unconsumed -= size
        self._return_credit(size)
        stream.credit += size
        if stream.credit * 2 >= self._limits.stream_window and not stream.peer_ended:
            self._sender.write(frames.window_update(stream_id, stream.credit))
            stream.receive_window += stream.credit
            stream.credit = 0

    def goaway(self, error_code: int = 0) -> None:
        """End the connection: with an error at once, and otherwise in two steps.

        The first call asks the peer to open no more streams. The second call, at least a round trip later,
        makes the connection ignore new streams and end with the last open one.
        """
        if self.closed:
            return
        if error_code:
            self._fail(error_code, "the server ends the connection")
            return
        self._goaways += 1
        if self._goaways <= 2:
            last = frames.MAX_STREAM_ID if self._goaways == 1 else self._last_stream
            self._sender.write(frames.goaway(last, ErrorCode.NO_ERROR))

    # -- received bytes

    def receive(self, data: bytes | memoryview, now: float) -> list[Event]:
        """Process received bytes and return what has happened, in order; ConnectionEnded comes last."""
        if self.closed:
            return []
        self._now = now
        events = self._events = []
        try:
            for kind, flags, stream_id, payload in self._reader.frames(data):
                try:
                    self._on_frame(kind, flags, stream_id, payload)
                except Http2Error as error:
                    if not error.stream_id:
                        raise
                    self._end_stream(error)
        except Http2Error as error:
            self._fail(error.code, error.reason)
        if self.closed:
            events.append(self._end or ConnectionEnded(ErrorCode.NO_ERROR, "all streams have ended"))
        return events

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._only is not None and kind != self._only:
            what = "SETTINGS" if self._only == frames.SETTINGS else "CONTINUATION"
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} stands in the place of {what}"
            )
        if kind in (_OF_CONNECTION if stream_id else _OF_STREAMS):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} is for stream {stream_id}")
        if kind == frames.DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == frames.HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._on_reset(stream_id, payload)
        else:
            self._count_idle_frame()
            self._on_idle_frame(kind, flags, stream_id, payload)

    def _on_idle_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == frames.PING:
            if len(payload) != _PING_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a PING frame has a wrong size")
            if not flags & frames.ACK:
                self._reply(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.GOAWAY:
            if len(payload) < _MIN_GOAWAY_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY frame is too short")
            self._peer_leaves = True
        elif kind == frames.PRIORITY and len(payload) != _PRIORITY_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a PRIORITY frame has a wrong size", stream_id)
        elif kind == frames.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client may not send PUSH_PROMISE")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._window -= size
        if self._window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        stream = self._streams.get(stream_id)
        if stream is None or stream.peer_ended:
            self._return_credit(size)
            self._check_opened(stream_id, "DATA")
            if stream is not None:
                raise Http2Error(ErrorCode.STREAM_CLOSED, "data after the end of the request", stream_id)
            return
        stream.receive_window -= size
        stream.unconsumed += size
        if stream.receive_window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window", stream_id)
        data = frames.without_padding("DATA", flags, payload) if flags & frames.PADDED else payload
        end = bool(flags & frames.END_STREAM)
        if end:
            stream.peer_ended = True
        elif not data:
            self._count_idle_frame()
        if len(data) < size:
            self.consumed(stream_id, size - len(data))
        if data or end:
            self._events.append(DataReceived(stream_id, data, end))

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.PRIORITY_FIELDS):
            payload = frames.without_padding("HEADERS", flags, payload)
            if flags & frames.PRIORITY_FIELDS:
                if len(payload) < _PRIORITY_BYTES:
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a HEADERS frame is too short")
                payload = payload[_PRIORITY_BYTES:]
        end = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, payload, end)
            return
        self._only = frames.CONTINUATION
        self._block += payload
        self._block_frames = 1
        self._block_stream = stream_id
        self._block_end = end

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._only is None or stream_id != self._block_stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame continues no header block")
        self._block += payload
        self._block_frames += 1
        limits = self._limits
        if len(self._block) > limits.max_header_block or self._block_frames > limits.max_header_frames:
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large or has too many frames"
            )
        if flags & frames.END_HEADERS:
            self._only = None
            block = bytes(self._block)
            self._block.clear()
            self._on_block(stream_id, block, self._block_end)

    def _on_block(self, stream_id: int, block: bytes, end: bool) -> None:
        # Each block must be decoded, even for a stream that is refused: it changes the decoder's table.
        independent = self._decoder.is_independent(block)
        known = self._templates.find(block) if independent else None
        headers = self._decoder.decode(block) if known is None else known
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.peer_ended:
                raise Http2Error(ErrorCode.STREAM_CLOSED, "headers after the end of the request", stream_id)
            if not end:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "trailers do not end the request", stream_id)
            stream.peer_ended = True
            self._events.append(DataReceived(stream_id, b"", True))
            return
        if stream_id % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a client may not open stream {stream_id}")
        if stream_id <= self._last_stream:
            self._count_idle_frame()
            return
        self._last_stream = stream_id
        if self._goaways > 1:
            self._count_idle_frame()
            return
        if len(self._streams) >= self._limits.max_streams:
            self._reply(frames.reset(stream_id, ErrorCode.REFUSED_STREAM))
            return
        if known is None:
            check_request(stream_id, headers, self._limits.max_header_list)
            if independent and self._learned < MAX_LEARNED:
                self._learned += self._templates.learn(block, headers)
        stream = self._sender.new_stream(stream_id, self._now, self._limits.stream_window)
        stream.peer_ended = end
        self._streams[stream_id] = stream
        self._events.append(HeadersReceived(stream_id, headers, end))

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        code = frames.read_word("RST_STREAM", payload)
        self._check_opened(stream_id, "RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._forget(stream)
        self._events.append(StreamReset(stream_id, code))
        if self._now - stream.opened < EARLY_S:
            self._count_early_reset()

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload or self._only is not None:
                raise Http2Error(
                    ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame with ACK is not empty or the first"
                )
            return
        self._only = None
        values = frames.read_settings(payload)
        streams = list(self._streams.values()) if frames.INITIAL_WINDOW_SIZE in values else []
        self._count_idle_frame(len(streams) // _STREAMS_PER_COST)
        self._sender.apply_settings(values, streams)
        self._reply(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        size = frames.read_word("WINDOW_UPDATE", payload) & frames.MAX_WINDOW
        if stream_id:
            self._check_opened(stream_id, "WINDOW_UPDATE")
        if size == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE frame of 0 bytes", stream_id)
        if stream_id == 0:
            self._sender.open_window(size)
            return
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._sender.open_stream_window(stream, size)

    # -- parts

    def _check_opened(self, stream_id: int, what: str) -> None:
        """Raise Http2Error if a stream has never been opened. If it is not open, it has ended."""
        if stream_id > self._last_stream or stream_id % 2 == 0:
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, f"{what} for stream {stream_id}, which was never opened"
            )

    def _return_credit(self, size: int) -> None:
        self._credit += size
        if self._credit * 2 >= self._limits.connection_window:
            self._sender.write(frames.window_update(0, self._credit))
            self._window += self._credit
            self._credit = 0

    def _sent_end(self, stream: Stream) -> None:
        self._forget(stream)
        if not stream.peer_ended:
            self._sender.write(frames.reset(stream.id, ErrorCode.NO_ERROR))

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.id]
        self._sender.discard(stream)
        if stream.unconsumed > 0:
            self._return_credit(stream.unconsumed)

    def _end_stream(self, error: Http2Error) -> None:
        """Reset a stream on which the peer has violated the protocol; the stream may not exist."""
        self._reply(frames.reset(error.stream_id, error.code))
        stream = self._streams.get(error.stream_id)
        if stream is not None:
            self._forget(stream)
            self._events.append(StreamReset(error.stream_id, error.code))
        if stream is None or self._now - stream.opened < EARLY_S:
            self._count_early_reset()

    def _reply(self, frame: bytes) -> None:
        self._replies += 1
        if self._replies > self._limits.max_replies:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read the replies that it causes")
        self._sender.write(frame)

    def _count_idle_frame(self, count: int = 1) -> None:
        if not self._idle_frames.take(self._now, count):
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that belong to no request")

    def _count_early_reset(self) -> None:
        if not self._early_resets.take(self._now):
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset soon after their start"
            )

    def _fail(self, code: int, reason: str) -> None:
        for stream in list(self._streams.values()):
            self._sender.discard(stream)
        self._streams.clear()
        self._sender.write(frames.goaway(self._last_stream, code, reason))
        self._end = ConnectionEnded(code, reason)

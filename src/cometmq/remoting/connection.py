"""One TCP connection of a server or client: its frames, and its calls that wait for responses.

Reading. All connections of a loop read into one shared buffer, because the loop has the bytes handled before
it reads for the next connection. Frames are handled inside that buffer. The beginning of an incomplete frame
is kept as `_tail` and prepended to the next read. A frame longer than TAIL_LIMIT gets a buffer of its own.
That buffer is at most twice as large as the bytes that have arrived, so a large length field alone costs no
memory, and it is freed with the frame. A frame must arrive at a minimum rate (`check`), and the total size of
all buffers is limited (PartialFrames of tick.py).

Writing. `write` queues bytes. At the end of an event-loop iteration, tick.py passes all of them to the
transport in one call. A server reads no more from a peer that does not read its responses, and finally closes
the connection. A client does neither because of its own unsent requests: two peers that wait for each other
to read would not go on, and a lost connection fails all requests. Instead, its sends wait (`full`).
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Any, TypeAlias, cast

from cometmq import logs
from cometmq.errors import FrameError, RequestTimeout, SendFailed
from cometmq.protocol.frame import Frame, decode_frame_at, encode_frame
from cometmq.remoting.calls import CallTable, Waiter
from cometmq.remoting.limits import HANDLER_BYTES, Limits
from cometmq.remoting.peer import HTTP2_ANSWER, HTTP2_WORD, describe_peer
from cometmq.remoting.tick import Tick

log = logs.logger(__name__)

Bytes = bytes | bytearray | memoryview
Handler: TypeAlias = "Callable[[Connection, Frame], Frame | Awaitable[Frame | None] | None]"
# A shortcut handles a request without decoding it and returns True, or does nothing and returns False. Its
# arguments are the connection, the buffer, the start and end of the header, and the end of the frame.
Shortcut: TypeAlias = "Callable[[Connection, memoryview, int, int, int], bool]"

TAIL_LIMIT = 64 * 1024
# Queued responses are joined into blocks of up to this many bytes; larger ones are passed on uncopied.
JOIN_LIMIT = 64 * 1024
MIN_PAYLOAD = 4  # Minimum number of bytes after a frame's length word: the 4-byte length of the header
SHORTCUT_AT = 20  # Bytes that select a shortcut: length word, header word, and the header's first 12 bytes

_length_at = struct.Struct(">I").unpack_from
_words_and_prefix_at = struct.Struct(">II12s").unpack_from


class Connection(asyncio.BufferedProtocol):
    """A TCP connection that carries frames in both directions.

    Attributes:
        state: Data that the owner of the connection attaches to it.
        peer: The address of the other end, "ip:port".
        peer_host: The same address, encoded as in records: 4 or 16 bytes of IP address, and 4 of port.
        addr: The address that errors name. In a client it is the address to which the client's caller
            connected; in a server it equals `peer`.
        working: The number of the peer's requests that are processed after the read callback has returned;
            see `Limits.handlers`.
        partner: The other end of a connection in memory within one event loop. Responses, and the requests of
            `ask`, are passed to it as frames, without being encoded. None for all other connections.
    """

    __slots__ = (
        "_active", "_asked", "_backlog", "_buf", "_calls", "_dialed", "_dispatch", "_end", "_ending",
        "_frame_since", "_fresh", "_idle_since", "_limits", "_loop", "_on_close", "_on_open", "_out",
        "_out_bytes", "_outgoing", "_reading", "_resumed", "_resuming", "_scratch", "_sent_bytes",
        "_shortcuts", "_stalled_at", "_stalled_sent", "_start", "_tail", "_tick", "_transport",
        "_write_paused", "addr", "closed", "partner", "peer", "peer_host", "state", "working",
    )  # fmt: skip

    def __init__(
        self,
        dispatch: Callable[[Connection, Frame], None],
        tick: Tick,
        limits: Limits,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        addr: str = "",
        shortcuts: Mapping[bytes, Shortcut] | None = None,
        outgoing: Callable[[Frame], None] | None = None,
        dialed: bool = False,
    ) -> None:
        self._dialed = dialed  # Whether this side is the client
        self._outgoing = outgoing
        self._dispatch = dispatch
        # This is the server's own mapping, not a copy, so later changes by the server take effect here.
        self._shortcuts = {} if shortcuts is None else shortcuts
        self._tick = tick
        self._limits = limits
        self._on_open = on_open
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls = CallTable(self._loop, addr)
        self._scratch = tick.scratch
        self._tail: bytes = b""
        self._buf: memoryview | None = None  # The connection's own buffer
        self._start = self._end = 0  # The unread bytes of `_buf`
        self._fresh = True  # Whether the incomplete frame began after the last call of `check`
        self._frame_since = 0.0
        self._backlog = False  # Whether `_buf` holds complete frames that a later loop iteration will handle
        self._reading = True
        self._resuming = False  # Whether a call of `_go_on`, which continues reading, is scheduled
        self._ending = False  # Whether the connection reads no more frames and closes after this iteration
        self._asked: deque[Frame] = deque()  # Requests of `ask` that wait, see `handle`
        self._out: list[Bytes] = []
        self._out_bytes = 0
        self._sent_bytes = 0  # Number of bytes passed to the transport so far
        self._write_paused = False
        self._resumed: asyncio.Event | None = None  # Set when the transport has sent most of its bytes
        self._stalled_at = 0.0
        self._stalled_sent = 0
        self._active = True
        self._idle_since = self._loop.time()
        self.closed = False
        self.partner: Connection | None = None
        self.working = 0
        self.addr, self.peer, self.peer_host = addr, "", b""
        self.state: Any = None

    # -- writing

    def write(self, data: Bytes) -> None:
        """Queue complete frames, to be sent at the end of the loop iteration unless the connection is closed.

        `data` must not change afterwards, because most of it is passed to the transport without a copy.
        """
        if self.closed:
            return
        out = self._out
        if not out:
            self._tick.mark_dirty(self)
        out.append(data)
        self._out_bytes += len(data)

    def respond(
        self, request: Frame, code: int, *, remark: str | None = None, ext: dict[str, str] | None = None
    ) -> None:
        """Respond to `request`, unless it is one-way."""
        if not request.is_oneway:
            self.answer(request.response(code, remark, ext=ext))

    def answer(self, response: Frame) -> None:
        """Send a response."""
        if self.partner is None:
            self.write(encode_frame(response))
        else:
            self.partner.resolve(response)

    def resolve(self, response: Frame) -> None:
        """Pass a received response to the call that waits for it."""
        if not self._calls.resolve(response):
            log.debug("%s answered request %d, for which no caller waits", self.peer, response.opaque)

    def flush(self) -> None:
        """Pass the queued bytes to the transport: for tick.py, and for code that will block the loop."""
        out = self._out
        if not out:
            return
        self._out = []
        size = self._out_bytes
        self._out_bytes = 0
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._active = True
        self._sent_bytes += size
        if len(out) == 1:
            transport.write(out[0])
        elif size <= JOIN_LIMIT:
            transport.write(b"".join(out))
        else:
            transport.writelines(out)
        if self._write_paused and not self._dialed:
            waiting = transport.get_write_buffer_size()
            if waiting > self._limits.write_evict:
                self.cut(f"it does not read its responses: {waiting} bytes are unsent")
            else:
                self._tick.unsent.keep(self, waiting, self._limits.write_total, fresh=False)

    # -- requests that this side sends

    def request(self, frame: Frame, timeout_s: float) -> asyncio.Future[Frame]:
        """Send a request with a new opaque number. Return the future of its response. Raises SendFailed."""
        self._number(frame)
        data = encode_frame(frame)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._calls.add(frame.opaque, frame.code, timeout_s, future)
        self.write(data)
        return future

    def ask(self, frame: Frame, timeout_s: float, waiter: Waiter) -> None:
        """Let the other end of a connection in memory handle a request now, and pass on its response.

        The numbers in the header must be valid, because they are not decoded. The waiter may be called before
        this method returns. Raises SendFailed if the connection is closed.
        """
        partner = self.partner
        if partner is None or partner.closed:
            raise SendFailed(self.addr, frame.code)
        self._number(frame)
        self._calls.add(frame.opaque, frame.code, timeout_s, waiter)
        self._tick.schedule()
        partner.handle(frame)

    def handle(self, request: Frame) -> None:
        """Handle a request from `ask`. At the limit of requests in progress, it waits until some are done."""
        self._active = True
        if self.working < self._limits.handlers and not self._asked:
            self._dispatch(self, request)
        else:
            request.body = bytes(request.body)
            self._asked.append(request)

    def _number(self, request: Frame) -> None:
        """Prepare a request, and give it a new opaque number. Raises SendFailed."""
        if self.closed or self._transport is None:
            raise SendFailed(self.addr, request.code)
        if self._outgoing is not None:
            self._outgoing(request)
        request.opaque = self._calls.next_opaque()

    async def call(self, frame: Frame, timeout_s: float = 3.0) -> Frame:
        """Send a request and return its response. Raises RequestTimeout or SendFailed."""
        return await self.request(frame, timeout_s)

    def oneway(self, frame: Frame) -> None:
        """Send a request that gets no response. Raises SendFailed if the connection is closed."""
        self._number(frame)
        frame.flag |= 2
        self.write(encode_frame(frame))

    @property
    def full(self) -> bool:
        """Whether so many bytes are unsent that requests with messages must wait (`room`)."""
        unsent = self._out_bytes
        if self._write_paused and self._transport is not None:
            unsent += self._transport.get_write_buffer_size()
        return unsent > self._limits.write_wait

    async def room(self, code: int, timeout_s: float) -> None:
        """Wait until the connection is not `full`, or is closed. Raises RequestTimeout with this code."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.full and not self.closed:
                    if self._write_paused:
                        self._resumed = self._resumed or asyncio.Event()
                        await self._resumed.wait()
                    else:  # The queued bytes are passed to the transport at the end of this loop iteration
                        await asyncio.sleep(0)
        except TimeoutError:
            raise RequestTimeout(self.addr, code, timeout_s) from None

    @property
    def outstanding(self) -> int:
        """The number of this side's requests that wait for responses."""
        return len(self._calls)

    # -- requests that are processed outside the read

    def hold(self, size: int = 0) -> None:
        """Count a request, with a body of `size` bytes, that is processed after the read callback returns."""
        self.working += 1 + size // HANDLER_BYTES

    def release(self, size: int = 0) -> None:
        """Record that a request counted by `hold` is done. Below the limit, more requests are handled."""
        self.working -= 1 + size // HANDLER_BYTES
        if (self._asked or not self._reading) and self.working < self._limits.handlers:
            self._resume_soon()

    @property
    def buffered(self) -> int:
        """The size in bytes of the buffer that holds an incomplete frame."""
        return len(self._tail) if self._buf is None else len(self._buf)

    # -- closing

    def close(self) -> None:
        """Send the queued bytes, then close. Outstanding calls fail."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        self._stalled_at = self._loop.time()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately. Unsent bytes are lost."""
        self.closed = True
        self._out.clear()
        if self._transport is not None:
            self._transport.abort()

    def cut(self, why: str) -> None:
        """Abort the connection, and log the reason `why`."""
        log.warning("%s: %s; closed", self.peer, why)
        self._buf = None
        self._tail = b""
        self.abort()

    def check(self, now: float) -> None:
        """Close the connection if it is idle, and abort it if its peer is stalled.

        A peer is stalled if it receives none of the bytes for it or does not complete a frame. This method is
        called about once per second.
        """
        transport = self._transport
        if transport is None:
            return
        if self.closed:  # A closed connection waits until its peer has received the last responses
            if now - self._stalled_at >= self._limits.write_stall_s:
                transport.abort()
            return
        if self._write_paused:
            waiting = transport.get_write_buffer_size()
            if not self._dialed:
                self._tick.unsent.keep(self, waiting, self._limits.write_total, fresh=False)
            taken = self._sent_bytes - waiting
            if taken != self._stalled_sent:
                self._stalled_sent = taken
                self._stalled_at = now
            elif now - self._stalled_at >= self._limits.write_stall_s:
                what = "requests" if self._dialed else "responses"
                self.cut(f"it has received none of its {what} for {now - self._stalled_at:.0f} s")
                return
        if (self._tail or self._buf is not None) and self._frame_is_late(now):
            return
        if self._active:
            self._active = False
            self._idle_since = now
        elif now - self._idle_since >= self._limits.idle_s:
            log.debug("%s idle for %.0f s; closed", self.peer, now - self._idle_since)
            self.close()

    def _frame_is_late(self, now: float) -> bool:
        """Abort the connection if its peer sends a frame too slowly. Return whether it was aborted."""
        if self._fresh or not self._reading:
            self._fresh = False
            self._frame_since = now
            return False
        took = now - self._frame_since
        came = len(self._tail) if self._buf is None else self._end - self._start
        if came >= (took - self._limits.frame_grace_s) * self._limits.frame_rate:
            return False
        self.cut(f"{came} bytes of a frame in {took:.0f} s, and not yet all of it")
        return True

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport and begin to use it."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer, self.peer_host = describe_peer(transport.get_extra_info("peername"))
        if not self.addr:
            self.addr = self._calls.addr = self.peer
        self._transport.set_write_buffer_limits(high=self._limits.write_high, low=self._limits.write_low)
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        """Fail the outstanding calls and call the close callback, whichever side closed the connection."""
        self.closed = True
        self._out.clear()
        self._asked.clear()
        self._forget()
        self._tick.unsent.drop(self)
        self._wake()
        self._calls.fail_all(lambda code: SendFailed(self.addr, code))
        if self._on_close is not None:
            try:
                self._on_close(self)
            except Exception:
                log.exception("the close callback of %s failed", self.peer)
        self._transport = None

    def eof_received(self) -> bool:
        """Close after this loop iteration's responses, because the peer sends no more but may still read."""
        self._end_soon()
        # If this method returns True, the transport stays open for writing. TLS does not support that.
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        """Stop reading requests, because the peer receives its responses too slowly."""
        self._write_paused = True
        self._stalled_at = self._loop.time()
        self._stalled_sent = -1
        if not self._dialed:
            self._pause_reading()

    def resume_writing(self) -> None:
        """Start reading and sending again, because the peer has received enough."""
        self._write_paused = False
        self._tick.unsent.drop(self)
        self._wake()
        self._resume_soon()

    def _wake(self) -> None:
        """Continue the callers of `room`."""
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        """Return the buffer for the next read."""
        buf = self._buf
        if buf is not None:
            return buf[self._end :]
        tail = self._tail
        if tail:
            size = len(tail)
            self._scratch[:size] = tail
            return self._scratch[size:]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the frames that the bytes just read from the socket complete."""
        self._active = True
        if self.closed or self._ending:
            return
        if not self._tick.scheduled:
            self._tick.schedule()
        buf = self._buf
        if buf is None:
            scratch = self._scratch
            tail = self._tail
            end = len(tail) + nbytes if tail else nbytes
            pos = self._handle(scratch, 0, end)
            if pos != end:
                self._keep(scratch, pos, end, fresh=bool(pos or not tail))
            elif tail:
                self._forget()
        else:
            self._end += nbytes
            pos = self._handle(buf, self._start, self._end)
            self._keep(buf, pos, self._end, fresh=pos != self._start)

    # -- frames

    def _handle(self, buf: memoryview, pos: int, end: int) -> int:
        """Handle the complete frames in buf[pos:end], and return the end of the last handled frame.

        Stop early when one of these reaches its limit: the number of frames handled in this callback, the
        duration of the callback, the number of requests in progress, or the number of unsent bytes.
        """
        limits = self._limits
        max_payload = limits.max_frame - 4
        write_high = limits.write_high
        most_working = limits.handlers
        left = limits.frames_per_callback if self.working < most_working else 0
        until = 0.0
        dispatch = self._dispatch
        shortcuts = self._shortcuts
        self._backlog = False
        while end - pos >= 4:
            shortcut = None
            if shortcuts and end - pos >= SHORTCUT_AT:
                size, word, prefix = _words_and_prefix_at(buf, pos)
                shortcut = shortcuts.get(prefix)
            else:
                size = _length_at(buf, pos)[0]
            stop = pos + 4 + size
            if not MIN_PAYLOAD <= size <= max_payload:
                self._refuse_length(size)
                return end
            if stop > end:
                break
            if left == 0 or self._out_bytes > write_high:
                self._backlog = True
                break
            left -= 1
            if shortcut is not None:
                header_at = pos + 8
                header_end = header_at + word
                if header_end <= stop and shortcut(self, buf, header_at, header_end, stop):
                    pos = stop
                    continue
            try:
                frame = decode_frame_at(buf, pos + 4, stop)
            except FrameError as error:
                self._refuse(error)
                return end
            pos = stop
            if frame.flag & 1:
                self.resolve(frame)
            else:
                until = until or monotonic() + limits.callback_s
                dispatch(self, frame)
                if self.working >= most_working:
                    left = 0
                elif monotonic() >= until:
                    left = 0
                    self._pause_reading()  # Let the loop serve other connections before the next read
                    self._resume_soon()
            if self.closed:
                return end
        return pos

    def _keep(self, buf: memoryview, pos: int, end: int, fresh: bool) -> None:
        """Keep buf[pos:end], which were not handled, for the next read. `fresh`: they begin a new frame."""
        if pos == end or self.closed:
            self._forget()
            return
        if fresh:
            self._fresh = True
        self._store(buf, pos, end)
        self._tick.partial.keep(self, self.buffered, self._limits.partial_total, fresh)

    def _forget(self) -> None:
        """Drop the bytes kept for the next read."""
        self._tail = b""
        self._buf = None
        self._tick.partial.drop(self)

    def _store(self, buf: memoryview, pos: int, end: int) -> None:
        rest = end - pos
        own = self._buf
        if self._backlog:
            if own is None:
                self._move(buf, pos, end, rest)
            else:
                self._start = pos
                self._end = end
            self._pause_reading()
            self._resume_soon()
            return
        need = 4 + _length_at(buf, pos)[0] if rest >= 4 else 4
        if need <= TAIL_LIMIT:
            self._tail = bytes(buf[pos:end])
            self._buf = None
        elif own is not None and len(own) - pos >= need:
            self._start = pos
            self._end = end
        else:
            # Only as large as the bytes that have arrived require: the frame's length field may be false.
            self._move(buf, pos, end, min(need, max(TAIL_LIMIT, 2 * rest)))

    def _move(self, buf: memoryview, pos: int, end: int, capacity: int) -> None:
        grown = memoryview(bytearray(capacity))
        rest = end - pos
        grown[:rest] = buf[pos:end]
        self._buf = grown
        self._tail = b""
        self._start = 0
        self._end = rest

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            self._tick.schedule()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Continue reading: first handle the frames in the buffer, then read the socket again."""
        self._resuming = False
        if self.closed or self._ending or self.working >= self._limits.handlers:
            return
        while self._asked and self.working < self._limits.handlers:
            self._tick.schedule()
            self._dispatch(self, self._asked.popleft())
        if self._write_paused and not self._dialed:
            return
        if self._backlog:
            self._tick.schedule()
            buf = cast(memoryview, self._buf)
            self._keep(buf, self._handle(buf, self._start, self._end), self._end, fresh=True)
        transport = self._transport
        if not self._backlog and not self._reading and transport is not None and not transport.is_closing():
            self._reading = True
            transport.resume_reading()

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _refuse_length(self, size: int) -> None:
        if size == HTTP2_WORD:
            self.write(HTTP2_ANSWER)
            problem = "it is a gRPC client, which needs the port of the setting grpcPort"
        else:
            problem = f"frame length {size} is not within {MIN_PAYLOAD} to {self._limits.max_frame - 4}"
        self._refuse(FrameError(problem))

    def _refuse(self, error: FrameError) -> None:
        """Close the connection after an invalid frame. Requests before that frame still get responses."""
        log.info("closing the connection of %s after an invalid frame: %s", self.peer, error)
        self._backlog = False
        self._pause_reading()
        self._end_soon()

    def _end_soon(self) -> None:
        """Close the connection at the end of this loop iteration. Until then, callbacks may still respond."""
        if not self._ending:
            self._ending = True
            self._tick.schedule()
            self._loop.call_soon(self.close)

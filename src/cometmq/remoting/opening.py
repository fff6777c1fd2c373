"""A new connection to a server with TLS, until its first byte shows whether the client uses TLS.

A server behind proxies reads the PROXY header before that byte (proxy_header.py).

A connection without TLS is then passed to the server's protocol, for instance a `Connection`, with the bytes
received so far. From then on the transport calls that protocol directly. A TLS connection is passed on after
its handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from cometmq import logs
from cometmq.errors import FrameError
from cometmq.periodic import Tasks
from cometmq.remoting.limits import Limits
from cometmq.remoting.peer import describe_peer, host_of_peer
from cometmq.remoting.proxy_header import read_proxy_header

log = logs.logger(__name__)

HANDSHAKE = 0x16
"""The first byte of a TLS handshake. A frame without TLS begins with this byte only if it is 369 MB long."""
READ_SIZE = 4096
MAX_EARLY_BYTES = 1 << 20
"""Maximum number of bytes that may arrive after a TLS handshake, before the server's protocol takes over."""


class Tls(Protocol):
    """The part of `tls.ServerTls` that this module uses."""

    @property
    def enforcing(self) -> bool: ...
    @property
    def context(self) -> ssl.SSLContext: ...


class Openings:
    """The new connections of a server. Their number and duration are limited.

    Args:
        tls: The server's TLS. None: connections are passed on without a look at their first byte.
        make: Creates the protocol that takes a connection over.
        make_proxied: The same for a connection whose PROXY header names the client's host and port. None: the
            server reads no PROXY headers.
        make_tls: Creates the server's TLS when a client uses TLS for the first time, if `tls` is None.
        is_proxy: Returns whether a host may send PROXY headers. None: each may.
    """

    def __init__(
        self,
        tls: Tls | None,
        limits: Limits,
        make: Callable[[], asyncio.BufferedProtocol],
        make_proxied: Callable[[tuple[str, int]], asyncio.BufferedProtocol] | None = None,
        make_tls: Callable[[], Coroutine[Any, Any, Tls]] | None = None,
        is_proxy: Callable[[str], bool] | None = None,
    ) -> None:
        self.tls = tls
        self.make_tls = make_tls
        self._made_tls: asyncio.Task[Tls] | None = None
        self.limits = limits
        self.make = make
        self.make_proxied = make_proxied
        self.is_proxy = is_proxy
        self.loop = asyncio.get_running_loop()
        self.open: set[Opening] = set()
        self.handshakes = Tasks()
        self.shaking: dict[Opening, str] = {}
        """The connections with a TLS handshake under way, the oldest first, and their hosts."""
        self.closed = False
        self._log_limit = logs.LogLimiter()

    def __call__(self) -> Opening:
        return Opening(self)

    def made_tls(self, make: Callable[[], Coroutine[Any, Any, Tls]]) -> asyncio.Task[Tls]:
        """Return the task that creates the server's TLS. It runs once: a failure is final."""
        if self._made_tls is None:
            self._made_tls = self.handshakes.start(make())
        return self._made_tls

    def make_room(self) -> None:
        """Abort a handshake, the oldest of the host with the most, if too many keep other clients out."""
        if len(self.shaking) < self.limits.handshakes:
            return
        ((busiest, _),) = Counter(self.shaking.values()).most_common(1)
        oldest = next(each for each, host in self.shaking.items() if host == busiest)
        del self.shaking[oldest]
        oldest.abort()

    def refused(self, peer: str, why: str) -> None:
        """Log that a connection was refused, at a limited rate: any client can cause such lines."""
        if self._log_limit.allows():
            log.info("%s: %s; closed", peer, why)

    async def close_all(self) -> None:
        """Close the connections that have sent no byte, also those that are accepted after this call."""
        self.closed = True
        for opening in list(self.open):
            opening.abort()
        await self.handshakes.finish(cancel=True)


class Opening(asyncio.BufferedProtocol):
    """A new connection. `_early` holds the bytes that arrive before the server's protocol takes it over."""

    __slots__ = (
        *("_buffer", "_client", "_early", "_is_at_header", "_openings", "_peer", "_secure", "_timer"),
        "_transport",
    )

    def __init__(self, openings: Openings) -> None:
        self._openings = openings
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(READ_SIZE))
        self._early = bytearray()
        self._secure = False
        self._peer = ""
        self._is_at_header = False  # Whether a PROXY header may follow
        self._client: tuple[str, int] | None = None  # The client that the header names

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        openings = self._openings
        self._transport = cast(asyncio.Transport, transport)
        self._peer, _ = describe_peer(transport.get_extra_info("peername"))
        if openings.closed:
            self._transport.abort()
            return
        if openings.make_proxied is not None:
            self._is_at_header = openings.is_proxy is None or openings.is_proxy(host_of_peer(transport))
        openings.open.add(self)
        self._timer = openings.loop.call_later(openings.limits.idle_s, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._done()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._early += self._buffer[:nbytes]
        if self._secure:
            if len(self._early) > MAX_EARLY_BYTES:
                self.abort()
            return
        if self._is_at_header:
            self._read_proxy_header()
        if self._early and not self._is_at_header:
            self._begin()

    def _read_proxy_header(self) -> None:
        """Remove the PROXY header from the received bytes, if it is complete."""
        try:
            header = read_proxy_header(bytes(self._early))
        except FrameError as error:
            self._refuse(str(error))
            return
        if header is not None:
            self._is_at_header = False
            self._client = header.client
            del self._early[: header.size]

    def _begin(self) -> None:
        """Pass the connection on, or begin its TLS handshake."""
        tls, make_tls = self._openings.tls, self._openings.make_tls
        if tls is not None and self._early[0] == HANDSHAKE:
            self._begin_handshake(tls.context)
        elif make_tls is not None and self._early[0] == HANDSHAKE:
            assert self._transport is not None
            self._transport.pause_reading()  # `start_tls` resumes it
            self._openings.made_tls(make_tls).add_done_callback(self._use_tls)
        elif tls is not None and tls.enforcing:
            self._refuse("it does not use TLS, but tls.server.mode is enforcing")
        else:
            self._hand_over(self._transport)

    def _use_tls(self, made: asyncio.Task[Tls]) -> None:
        """Begin the handshake, unless the connection has been closed or the TLS could not be created."""
        error = "the server is stopping" if made.cancelled() else made.exception()
        if self not in self._openings.open:
            return
        if error is not None:
            self._refuse(f"no certificate could be made: {error}")
            return
        self._openings.tls = made.result()
        self._begin()

    def abort(self) -> None:
        self._done()
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, why: str) -> None:
        self._openings.refused(self._peer, why)
        self.abort()

    def _done(self) -> None:
        self._openings.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _hand_over(self, transport: asyncio.Transport | None) -> None:
        """Replace this protocol with the server's, which gets the transport and the bytes received so far."""
        self._done()
        if transport is None or transport.is_closing():
            return
        openings = self._openings
        if self._client is not None and openings.make_proxied is not None:
            connection = openings.make_proxied(self._client)
        else:
            connection = openings.make()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        feed(connection, self._early)

    def _begin_handshake(self, context: ssl.SSLContext) -> None:
        openings = self._openings
        openings.make_room()
        openings.shaking[self] = (
            self._client[0] if self._client is not None else self._peer.rpartition(":")[0]
        )
        self._done()
        self._secure = True
        hello, self._early = self._early, bytearray()
        openings.handshakes.start(self._shake_hands(context))
        # `_feed_handshake` must run after the first step of the handshake's task and the callbacks that this
        # step schedules, but before the next read. Two nested calls of call_soon achieve that.
        openings.loop.call_soon(openings.loop.call_soon, self._feed_handshake, hello)

    def _feed_handshake(self, hello: bytearray) -> None:
        """Pass the bytes read so far to the TLS protocol, which reads the connection from then on."""
        transport = self._transport
        assert transport is not None
        if not transport.is_closing():
            feed(cast(asyncio.BufferedProtocol, transport.get_protocol()), hello)

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        openings = self._openings
        assert self._transport is not None
        try:
            secure = await openings.loop.start_tls(
                self._transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=openings.limits.handshake_s,
                ssl_shutdown_timeout=openings.limits.handshake_s,
            )
        except (OSError, asyncio.CancelledError) as error:  # `ssl.SSLError` is a subclass of OSError
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._refuse(f"the TLS handshake failed: {reason}")
            return
        finally:
            openings.shaking.pop(self, None)
        self._hand_over(secure)


def feed(protocol: asyncio.BufferedProtocol, data: bytes | bytearray) -> None:
    """Pass bytes to a protocol as if they had just been read."""
    view = memoryview(data)
    while view:
        buffer = memoryview(protocol.get_buffer(len(view)))
        size = min(len(buffer), len(view))
        buffer[:size] = view[:size]
        protocol.buffer_updated(size)
        view = view[size:]

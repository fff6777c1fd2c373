"""Forwards client connections from a follower to the leader, and from a slave to its master.

A 5.x client knows only the endpoints in its settings, or one address of all brokers. If it reaches a broker
that does not lead, this broker forwards all bytes, of any protocol, to the leader, and names the client in a
PROXY header. While no leader is known, connections wait. If another broker becomes the leader, the
connections are closed, and clients connect again.

A connection that begins with a PROXY header comes from another follower. It is not forwarded again, because
two slaves can be configured to follow each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from cometmq import logs
from cometmq.errors import CometError, ConnectError
from cometmq.periodic import Backoff, Tasks
from cometmq.remoting import describe_peer, dial, feed, is_proxied, proxy_header

log = logs.logger(__name__)

WAIT_S = 15.0
"""The time, in seconds, for which a connection waits for a leader that accepts it. Clients wait for 20 s."""
RETRY_S, MAX_RETRY_S = 0.1, 1.0
"""The pause, in seconds, after the first and after later failed attempts. Thousands may wait."""
LINGER_S = 5.0
"""The time, in seconds, in which a side must read the last bytes after the other side has closed."""
MAX_FORWARDS = 10_000
"""The maximum number of forwarded client connections. Each needs a second connection, to the leader."""

Address = tuple[str, int]


class Forwards:
    """Accepts connections while this broker does not lead. Must be created in a running event loop.

    Args:
        leader: Returns the broker address of the leader: "" while it is unknown, None if this broker leads.
        endpoint_of: Returns the endpoint's address of a broker. Raises CometError.
        make: Creates the protocol of a connection that this broker serves itself.
        names_clients: Whether to send a PROXY header to the leader. False if proxies already send one.
    """

    def __init__(
        self,
        leader: Callable[[], str | None],
        endpoint_of: Callable[[str], Awaitable[Address]],
        make: Callable[[], asyncio.BufferedProtocol],
        names_clients: bool,
    ) -> None:
        self.leader = leader
        self.endpoint_of = endpoint_of
        self.make = make
        self.names_clients = names_clients
        self.open: set[Forward] = set()
        self.tasks = Tasks()
        self.log_limit = logs.LogLimiter()

    def leader_changed(self) -> None:
        """Close the connections to a former leader."""
        leader = self.leader()
        for each in list(self.open):
            if each.leader not in ("", leader):
                each.close()

    async def close_all(self) -> None:
        """Close all connections."""
        for each in list(self.open):
            each.close()
        await self.tasks.finish(cancel=True)


class _Side(asyncio.Protocol):
    """One of two connections. It forwards received bytes to the other connection."""

    other: _Side | None = None
    transport: asyncio.Transport | None = None
    early = b""  # bytes that arrived before the other side was connected

    def __init__(self) -> None:
        self._began = asyncio.Event()  # set by the first bytes, and when the connection ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if (other := self._other()) is not None:
            other.write(data)
        elif self.other is None and self.transport is not None:
            self.early += data
            self.transport.pause_reading()
            self._began.set()

    def pause_writing(self) -> None:
        if (other := self._other()) is not None:
            other.pause_reading()

    def resume_writing(self) -> None:
        if (other := self._other()) is not None:
            other.resume_reading()

    def _other(self) -> asyncio.Transport | None:
        """Return the transport of the other side if it is open."""
        other = None if self.other is None else self.other.transport
        return None if other is None or other.is_closing() else other

    def connection_lost(self, _error: Exception | None) -> None:
        self._began.set()
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Close the connection after its unsent bytes."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)


class Forward(_Side):
    """The connection of a client. It is read only once before the leader has accepted the other side.

    Attributes:
        leader: The broker address of the leader to which it is connected, or "".
    """

    def __init__(self, forwards: Forwards) -> None:
        super().__init__()
        self._forwards = forwards
        self.leader = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        forwards = self._forwards
        assert self.transport is not None
        if len(forwards.open) >= MAX_FORWARDS:
            self.transport.abort()
            return
        forwards.open.add(self)
        forwards.tasks.start(self._connect(self.transport))

    def connection_lost(self, error: Exception | None) -> None:
        self._forwards.open.discard(self)
        super().connection_lost(error)

    async def _connect(self, transport: asyncio.Transport) -> None:
        """Connect to the leader when it is known. If this broker is the leader, serve the client."""
        forwards = self._forwards
        problem: object = "the client has sent no data"
        backoff = Backoff(RETRY_S, MAX_RETRY_S)
        try:
            async with asyncio.timeout(WAIT_S):
                await self._began.wait()
                problem = "no leader is known"
                while not transport.is_closing():
                    leader = forwards.leader()
                    if leader is None:
                        self._serve(transport)
                        return
                    if leader:
                        try:
                            await self._connect_to(leader, transport)
                        except (OSError, CometError) as error:
                            problem = error
                        else:
                            return
                    await asyncio.sleep(backoff.next_s())
        except TimeoutError:
            if forwards.log_limit.allows():
                peer, _ = describe_peer(transport.get_extra_info("peername"))
                log.warning("%s was not forwarded to the leader: %s", peer, problem)
            transport.abort()

    async def _connect_to(self, leader: str, transport: asyncio.Transport) -> None:
        """Connect to a leader. Raises OSError or CometError."""
        forwards, side = self._forwards, _Side()
        if forwards.names_clients and is_proxied(self.early):
            raise ConnectError(leader, "another follower has forwarded the connection to this one")
        upstream, _ = await dial(lambda: side, *await forwards.endpoint_of(leader))
        if transport.is_closing() or upstream.is_closing() or forwards.leader() != leader:
            upstream.abort()
            raise ConnectError(leader, "it is no longer the leader")
        self.leader, self.other, side.other = leader, side, self
        transport.resume_reading()  # the writes may pause it again
        if forwards.names_clients:
            upstream.write(proxy_header(transport.get_extra_info("peername")))
        upstream.write(self.early)
        self.early = b""

    def _serve(self, transport: asyncio.Transport) -> None:
        """Let this broker serve the client."""
        self._forwards.open.discard(self)
        protocol = self._forwards.make()
        transport.pause_reading()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if not transport.is_closing():
            transport.resume_reading()  # the protocol may pause it again
        feed(protocol, self.early)

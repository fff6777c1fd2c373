"""Connections between two asyncio protocols in memory, without sockets.

The two protocols may run in different event loops and threads. In tests, connections to a host that has a
network in memory (`serving`) use no sockets.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

MakeProtocol = Callable[[], asyncio.BufferedProtocol]
FIRST_FREE_PORT, LAST_PORT = 32768, 65535
HIGH_WATER = 64 * 1024
LOOPBACK = "127.0.0.1"


class MemoryNetwork:
    """In-memory connections of one host, for `cometmq.remoting.serving`."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._listening: dict[int, tuple[asyncio.AbstractEventLoop, MakeProtocol]] = {}
        self._ports = itertools.cycle(range(FIRST_FREE_PORT, LAST_PORT + 1))

    def listen(self, make: MakeProtocol, port: int) -> tuple[int, Callable[[], None]]:
        """Listen on a port (0: any free one). Return it, and a function that ends that. Raises OSError."""
        if port == 0:
            port = self._free_port()
        if not 0 < port <= LAST_PORT:
            raise OSError(errno.EADDRNOTAVAIL, f"port {port} is not one of 0 to {LAST_PORT}")
        if port in self._listening:
            raise OSError(errno.EADDRINUSE, f"port {port} in memory is in use")
        self._listening[port] = asyncio.get_running_loop(), make
        return port, lambda: self._listening.pop(port, None) and None

    def connect(self, make: MakeProtocol, port: int) -> asyncio.BufferedProtocol:
        """Connect to a port and return the client's protocol. Raises ConnectionRefusedError."""
        if port not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"no server listens at {self.host}:{port}")
        loop, make_there = self._listening[port]
        here = MemoryTransport(asyncio.get_running_loop(), self.host, port)
        there = MemoryTransport(loop, self.host, self._free_port(), here)
        protocol = make()
        there.run_there(lambda: there.begin(make_there()))
        here.begin(protocol)
        return protocol

    def _free_port(self) -> int:
        """Return the next port that has no listener. After the last port, continue with the first one.

        A new connection may get the port of an earlier connection, if 32,768 other connections were made in
        between. This does no harm, because the port is only part of the connection's name.
        """
        if FIRST_FREE_PORT + len(self._listening) > LAST_PORT:
            raise OSError(errno.EADDRINUSE, f"all {len(self._listening)} in-memory ports are in use")
        return next(port for port in self._ports if port not in self._listening)


_networks: dict[str, MemoryNetwork] = {}


def network_of(host: str) -> MemoryNetwork | None:
    """Return the network in memory that is used for `host`, or None if sockets are used."""
    return _networks.get(host)


@contextmanager
def serving(host: str, network: MemoryNetwork) -> Iterator[None]:
    """During a `with` block, use `network` instead of sockets to connect to `host` and to listen on it."""
    _networks[host] = network
    try:
        yield
    finally:
        del _networks[host]


def connect_in_memory(
    client: asyncio.BaseProtocol, server: asyncio.BaseProtocol, name: tuple[str, int]
) -> None:
    """Connect a client to a server of the same event loop, which sees `name` as its host and port."""
    loop = asyncio.get_running_loop()
    here = MemoryTransport(loop, LOOPBACK, 0)
    there = MemoryTransport(loop, *name, here)
    there.begin(server)
    here.begin(client)


class MemoryTransport(asyncio.Transport):
    """One end of a connection. Only `run_there` may be called outside the event loop of this end."""

    peer: MemoryTransport

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peer_host: str,
        peer_port: int,
        peer: MemoryTransport | None = None,
    ) -> None:
        super().__init__({"peername": (peer_host, peer_port)})
        if peer is not None:
            self.peer, peer.peer = peer, self
        self._loop = loop
        self._protocol: asyncio.BufferedProtocol | None = None
        self._closing = False
        self._ended = False  # whether `connection_lost` has been called
        self._came: deque[bytes] = deque()  # bytes received but not yet passed to the protocol
        self._end_came = False
        self._reading = True
        self._unread = 0  # number of bytes sent that the peer has not yet read
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._paused = False

    def run_there(self, callback: Callable[[], object]) -> None:
        """Schedule a callback in the event loop of this end of the connection, unless the loop is closed."""
        if asyncio.get_running_loop() is self._loop:
            self._loop.call_soon(callback)
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass  # The event loop is closed, and so are its connections, which no longer need the callback

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Attach the protocol and report the connection to it."""
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol
        protocol.connection_made(self)

    # -- asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send bytes to the peer. The call is ignored after `close`."""
        if self._closing or not data:
            return
        piece = bytes(data)
        self._unread += len(piece)
        self.peer.run_there(lambda: self.peer.arrived(piece))
        if self._unread > self._high and not self._paused and self._protocol is not None:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        """Send all pieces in one write."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Close both ends once the peer has received all bytes that this end has written."""
        if not self._closing:
            self._closing = True
            self.peer.run_there(self.peer.peer_closed)
            self._loop.call_soon(self._lost)

    def abort(self) -> None:
        """Close the connection. There are no unsent bytes to discard: `write` passes all to the peer."""
        self.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._closing

    def get_write_buffer_size(self) -> int:
        """Return the number of written bytes that the peer has not read yet."""
        return self._unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the numbers of unread bytes at which the protocol must pause writing and may resume writing."""
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def pause_reading(self) -> None:
        """Buffer received bytes until `resume_reading`."""
        self._reading = False

    def resume_reading(self) -> None:
        """Pass buffered bytes to the protocol immediately, and later bytes when they arrive."""
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._read)

    # -- events from the peer

    def arrived(self, piece: bytes) -> None:
        """Receive bytes that the peer has written."""
        self._came.append(piece)
        self._read()

    def peer_closed(self) -> None:
        """Handle the end of the stream that the peer sends."""
        self._end_came = True
        self._read()

    def _read(self) -> None:
        protocol = self._protocol
        while self._came and self._reading and not self._closing and protocol is not None:
            piece = self._came.popleft()
            buffer = memoryview(protocol.get_buffer(len(piece))).cast("B")
            taken = min(len(buffer), len(piece))
            buffer[:taken] = piece[:taken]
            if taken < len(piece):
                self._came.appendleft(piece[taken:])
            self.peer.run_there(partial(self.peer.was_taken, taken))
            protocol.buffer_updated(taken)
        if self._end_came and not self._came and self._reading and not self._closing:
            self._closing = True
            self._lost()

    def was_taken(self, count: int) -> None:
        """Record that the peer has read `count` bytes that this end has written."""
        self._unread -= count
        if self._paused and self._unread <= self._low and self._protocol is not None and not self._ended:
            self._paused = False
            self._protocol.resume_writing()

    def _lost(self) -> None:
        if not self._ended and self._protocol is not None:
            self._ended = True
            self._came.clear()
            self._protocol.connection_lost(None)

"""A TCP proxy on 127.0.0.1 that injects network faults into connections.

    async with FaultProxy("127.0.0.1:10911") as proxy:
        ...  # connect to proxy.addr
        proxy.inflict(Fault(kind=Kind.STALL, seconds=0.5))

Faults come from the proxy's script, each after a number of bytes, or from a call of `inflict`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self, cast

from cometmq.errors import ClientStateError, ConfigError
from cometmq.periodic import Running
from cometmq.remoting import loop_in_thread, network_of, parse_addr, stop_accepting
from cometmq.testing.faults import Direction, Fault, Kind, Script, no_faults

HOST = "127.0.0.1"
BACKLOG = 1024
# Maximum number of bytes forwarded at once unless a SPLIT fault sets a smaller one; never reached in practice
WHOLE = 1 << 30
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # l_onoff = 1, l_linger = 0 s: closing the socket sends a reset


class Proxy(Running, ABC):
    """A server that runs in `async with`, or in a thread for blocking code."""

    @abstractmethod
    async def start(self) -> object:
        """Listen on free ports of 127.0.0.1."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop listening and close all connections."""

    @contextlib.contextmanager
    def run_in_thread(self) -> Iterator[Self]:
        """Run the proxy in a thread with its own event loop until the `with` block ends."""
        with loop_in_thread("cometmq-proxy") as run:
            run(self.start())
            try:
                yield self
            finally:
                run(self.stop())


class FaultProxy(Proxy):
    """A TCP proxy that forwards connections to one target and injects faults into them.

    Start it with `async with`, with `start` and `stop`, or with `run_in_thread` for blocking code. Clients
    connect to `addr`. Methods without `async` may be called from any thread.

    Args:
        target: Address ("host:port") of the server behind the proxy.
        script: Faults of each connection by its number. Default: none.

    Attributes:
        target: Address ("host:port") of the server behind the proxy.
        script: Faults of later connections; may be replaced at any time.
        addr: Address ("host:port") of the proxy, once started.
        accepted: Number of connections accepted so far.
        happened: Number of injected faults by kind. A fault of both directions counts twice.
    """

    def __init__(self, target: str, script: Script = no_faults) -> None:
        self.target = target
        self.script = script
        self.addr = ""
        self.accepted = 0
        self.happened: Counter[Kind] = Counter()
        self._open: dict[ProxiedConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def connections(self) -> list[ProxiedConnection]:
        """Open connections, the oldest first."""
        return list(self._open)

    def inflict(self, fault: Fault) -> None:
        """Inject a fault into all open connections.

        Args:
            fault: The fault. Its `after` counts bytes from the call on.

        Raises:
            ClientStateError: The proxy is not running.
        """

        def work() -> None:
            for connection in self.connections:
                connection.inflict(fault)

        self._soon(work)

    def heal(self) -> None:
        """End all faults and remove the script: from now on all bytes pass.

        Raises:
            ClientStateError: The proxy is not running.
        """
        self.script = no_faults

        def work() -> None:
            for connection in self.connections:
                connection.heal()

        self._soon(work)

    def _soon(self, work: Callable[[], object]) -> None:
        if self._loop is None:
            raise ClientStateError("the proxy is not running: start() it, or use it in `async with`")
        self._loop.call_soon_threadsafe(work)

    async def start(self) -> str:
        """Listen on a free port of 127.0.0.1.

        Returns:
            The proxy's address, `addr`.

        Raises:
            ConfigError: The target is the address of a `TestBroker`, which has no sockets.
        """
        check_target(self.target)
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(self._accept, HOST, 0, backlog=BACKLOG)
        self.addr = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self.addr

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._server is None:
            return
        stop_accepting(self._server)
        self._server = None
        # Let the loop run once, so that connections that were just accepted are added to `_open`
        await asyncio.sleep(0)
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> asyncio.Protocol:
        connection = ProxiedConnection(self.accepted, self.happened)
        self.accepted += 1
        for fault in self.script(connection.number):
            connection.inflict(fault)
        task = asyncio.get_running_loop().create_task(connection.run(self.target))
        self._open[connection] = task
        task.add_done_callback(lambda _: self._open.pop(connection))
        return connection.client


def check_target(target: str) -> None:
    """Raise ConfigError if the target is the address of a `TestBroker`, which has no sockets."""
    if network_of(target.rpartition(":")[0]) is not None:
        raise ConfigError(
            "target", target, "a broker with sockets, as local_broker() starts, not a TestBroker"
        )


class ProxiedConnection:
    """One connection through a proxy.

    Attributes:
        number: Number of the connection, counted from 0 for each proxy.
    """

    def __init__(self, number: int, happened: Counter[Kind]) -> None:
        self.number = number
        self.client, self._server = _End(self), _End(self)
        self._flows = {
            Direction.TO_SERVER: _Flow(self.client, self._server, self.cut, happened),
            Direction.TO_CLIENT: _Flow(self._server, self.client, self.cut, happened),
        }
        self._over = asyncio.Event()

    @property
    def passed(self) -> dict[Direction, int]:
        """Number of bytes forwarded so far, by direction."""
        return {direction: flow.passed for direction, flow in self._flows.items()}

    def inflict(self, fault: Fault) -> None:
        """Inject a fault whose `after` counts bytes from the call on.

        Must be called in the proxy's event loop.
        """
        for direction in fault.directions:
            self._flows[direction].add(fault)

    def heal(self) -> None:
        """End all faults of this connection. Must be called in the proxy's event loop."""
        for flow in self._flows.values():
            flow.heal()

    def cut(self) -> None:
        """Reset the connection at both ends. Must be called in the event loop of the proxy."""
        for end in (self.client, self._server):
            end.reset()
        self._over.set()

    async def run(self, target: str) -> None:
        """Connect to the target and forward bytes until both directions have ended, or `cut` is called."""
        try:
            host, port = parse_addr(target)
            await asyncio.get_running_loop().create_connection(lambda: self._server, host, port)
            for flow in self._flows.values():
                flow.go_on()
            await self._over.wait()
        except OSError:
            pass  # The target cannot be reached. `cut` resets the client's connection.
        finally:
            for flow in self._flows.values():
                flow.stop()
            self.cut()

    def ended(self, end: _End, error: Exception | None) -> None:
        """Handle the end of a transport, which was closed by the proxy or by the transport's peer."""
        if error is not None or not all(flow.ended for flow in self._flows.values()):
            self.cut()
        other = self._server if end is self.client else self.client
        if other.transport is None or other.transport.is_closing():
            self._over.set()

    def flow_ended(self) -> None:
        """Close both ends once both directions have ended."""
        if all(flow.ended for flow in self._flows.values()):
            for end in (self.client, self._server):
                end.close()


class _End(asyncio.Protocol):
    """One side of a proxied connection: the transport to the client or to the server."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.out: _Flow  # The flow of bytes that this side's peer (client or server) sends
        self.into: _Flow  # The flow of bytes that this side's peer (client or server) receives

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.out.came(data)

    def eof_received(self) -> bool:
        self.out.end_came()
        return True  # Returning True keeps the transport open for bytes of the other direction

    def pause_writing(self) -> None:
        self.into.hold(True)

    def resume_writing(self) -> None:
        self.into.hold(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.ended(self, exc)

    def end(self) -> None:
        """End the stream to the peer. The peer may still send."""
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError):  # The socket may be closed; then `connection_lost` follows
                self.transport.write_eof()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        found = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            cast(socket.socket, found).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        transport.abort()


class _Flow:
    """The bytes of one direction, and the faults injected into them."""

    def __init__(self, source: _End, target: _End, cut: Callable[[], None], happened: Counter[Kind]) -> None:
        self._source, self._target, self._cut, self._happened = source, target, cut, happened
        source.out = target.into = self
        self.passed = 0
        self.ended = False
        # Pairs, in ascending order: the value of `passed` at which a fault is injected, and the fault
        self._due: list[tuple[int, Fault]] = []
        self._waiting = bytearray()
        self._end_came = False
        self._held = False  # whether the target's write buffer is full
        self._timer: asyncio.TimerHandle | None = None  # timer of a stall, a delay, or a pause between pieces
        self._stalled = False
        self._delay_s = 0.0
        self._delayed = False  # Whether a DELAY fault has already held back the bytes in `_waiting`
        self._piece = WHOLE
        self._deaf = False  # Whether the direction is half closed, so that received bytes are dropped

    def add(self, fault: Fault) -> None:
        """Add a fault that happens after `after` more bytes."""
        self._due.append((self.passed + fault.after, fault))
        self._due.sort(key=lambda due: due[0])
        self.go_on()

    def heal(self) -> None:
        self._due.clear()
        self.stop()
        self._delay_s, self._piece = 0.0, WHOLE
        self.go_on()

    def stop(self) -> None:
        """End a stall, a delay or a wait between pieces."""
        self._stalled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def came(self, data: bytes) -> None:
        self._waiting += data
        self.go_on()

    def end_came(self) -> None:
        self._end_came = True
        self.go_on()

    def hold(self, held: bool) -> None:
        self._held = held
        self.go_on()

    def go_on(self) -> None:
        """Forward bytes until a fault or the target's full buffer stops the flow."""
        source, target = self._source.transport, self._target.transport
        if source is None or target is None:
            return
        while self._timer is None and not self._stalled and not self.ended:
            if self._due and self._due[0][0] <= self.passed:
                self._do(self._due.pop(0)[1])
            elif self._held or not self._waiting:
                break
            elif self._delay_s and not self._delayed:
                self._delayed = True
                self._wait(self._delay_s)
            else:
                self._pass(target)
        if self._end_came and not self._waiting and self._timer is None and not self._stalled:
            self._finish()
        if not source.is_closing():
            # The proxy stops reading while bytes wait to be forwarded, so that a stall also stops the sender.
            (source.pause_reading if self._waiting else source.resume_reading)()

    def _pass(self, target: asyncio.Transport) -> None:
        size = min(self._piece, len(self._waiting))
        if self._due:
            size = min(size, self._due[0][0] - self.passed)
        piece = bytes(self._waiting[:size])
        del self._waiting[:size]
        self.passed += size
        self._delayed = bool(self._waiting)
        if not self._deaf:
            target.write(piece)
        if self._piece != WHOLE and self._waiting:
            self._wait(0)  # A pause of one loop iteration, so that the receiver reads the pieces one by one

    def _do(self, fault: Fault) -> None:
        self._happened[fault.kind] += 1
        match fault.kind:
            case Kind.CUT:
                self.ended = True
                self._cut()
            case Kind.HALF_CLOSE:
                self._target.end()
                self._deaf = True
            case Kind.STALL if math.isinf(fault.seconds):
                self._stalled = True
            case Kind.STALL:
                self._wait(fault.seconds)
            case Kind.DELAY:
                self._delay_s = fault.seconds
            case Kind.SPLIT:
                self._piece = fault.size

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self.go_on()

    def _finish(self) -> None:
        if not self.ended:
            self.ended = True
            if not self._deaf:
                self._target.end()
            self._source.connection.flow_ended()

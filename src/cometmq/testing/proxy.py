"""A TCP proxy on 127.0.0.1 that does to connections what networks do to them.

async with FaultProxy("127.0.0.1:10911") as proxy:
    ...  # connect to proxy.addr
    proxy.inflict(Fault(kind=Kind.STALL, seconds=0.5))

The faults of a connection come from the proxy's script, each at its byte, or from `inflict`, now.
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
from types import TracebackType
from typing import Self, cast

from cometmq.errors import ClientStateError, ConfigError
from cometmq.remoting import loop_in_thread, network_of, parse_addr, stop_accepting
from cometmq.testing.faults import Direction, Fault, Kind, Script, no_faults

HOST = "127.0.0.1"
BACKLOG = 1024
WHOLE = 1 << 30  # bytes of a piece that is not split
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: the peer gets a reset


class Proxy(ABC):
    """What is started and stopped in `async with`, or runs in a thread for blocking code."""

    @abstractmethod
    async def start(self) -> object:
        """Listen on free ports of 127.0.0.1."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop listening and cut what is open."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @contextlib.contextmanager
    def run_in_thread(self) -> Iterator[Self]:
        """Run it on a loop in a thread of its own while the block runs."""
        with loop_in_thread("cometmq-proxy") as run:
            run(self.start())
            try:
                yield self
            finally:
                run(self.stop())


class FaultProxy(Proxy):
    """Passes connections on to `target` ("host:port"). `start` and `stop`, `async with`, or `run_in_thread`.

    `inflict` and `heal` may be called from any thread.
    """

    def __init__(self, target: str, script: Script = no_faults) -> None:
        self.target = target
        self.script = script
        """Faults of connections to come; may be replaced."""
        self.addr = ""
        """ "host:port", once it is started."""
        self.accepted = 0
        """How many connections there have been."""
        self.happened: Counter[Kind] = Counter()
        """How often each kind of fault has come, counted by direction."""
        self._open: dict[ProxiedConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def connections(self) -> list[ProxiedConnection]:
        """Those that are open, the oldest first."""
        return list(self._open)

    def inflict(self, fault: Fault) -> None:
        """A fault of all open connections, `after` bytes from now."""

        def work() -> None:
            for connection in self.connections:
                connection.inflict(fault)

        self._soon(work)

    def heal(self) -> None:
        """End all stalls, forget all other faults, and the script: from now on everything passes."""
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
        """Listen on a free port; returns `addr`. Raises ConfigError for a target without sockets."""
        check_target(self.target)
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(self._accept, HOST, 0, backlog=BACKLOG)
        self.addr = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self.addr

    async def stop(self) -> None:
        """Stop listening and cut what is open."""
        if self._server is None:
            return
        stop_accepting(self._server)
        self._server = None
        await asyncio.sleep(0)  # what was accepted just then is among the open ones
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
    """Raises ConfigError for the address of a TestBroker, which has no sockets."""
    if network_of(target.rpartition(":")[0]) is not None:
        raise ConfigError(
            "target", target, "a broker with sockets, as local_broker() starts, not a TestBroker"
        )


class ProxiedConnection:
    """One connection through a proxy: two ends, two directions, each with its faults."""

    def __init__(self, number: int, happened: Counter[Kind]) -> None:
        self.number = number
        """The n-th connection of its proxy, from 0."""
        self.client, self._server = _End(self), _End(self)
        self._flows = {
            Direction.TO_SERVER: _Flow(self.client, self._server, self.cut, happened),
            Direction.TO_CLIENT: _Flow(self._server, self.client, self.cut, happened),
        }
        self._over = asyncio.Event()

    @property
    def passed(self) -> dict[Direction, int]:
        """Bytes that were passed on so far."""
        return {direction: flow.passed for direction, flow in self._flows.items()}

    def inflict(self, fault: Fault) -> None:
        """A fault, `after` bytes from now. In the proxy's loop."""
        for direction in fault.directions:
            self._flows[direction].add(fault)

    def heal(self) -> None:
        """End stalls and forget other faults. In the proxy's loop."""
        for flow in self._flows.values():
            flow.heal()

    def cut(self) -> None:
        """Reset both ends. In the proxy's loop."""
        for end in (self.client, self._server):
            end.reset()
        self._over.set()

    async def run(self, target: str) -> None:
        """Connect to the target and pass on until both directions have ended, or it is cut."""
        try:
            host, port = parse_addr(target)
            await asyncio.get_running_loop().create_connection(lambda: self._server, host, port)
            for flow in self._flows.values():
                flow.go_on()
            await self._over.wait()
        except OSError:
            pass  # the target cannot be reached; the client learns it at once
        finally:
            for flow in self._flows.values():
                flow.stop()
            self.cut()

    def ended(self, end: _End, error: Exception | None) -> None:
        """One end is closed, by us or by its peer."""
        if error is not None or not all(flow.ended for flow in self._flows.values()):
            self.cut()
        other = self._server if end is self.client else self.client
        if other.transport is None or other.transport.is_closing():
            self._over.set()

    def flow_ended(self) -> None:
        """One direction has ended."""
        if all(flow.ended for flow in self._flows.values()):
            for end in (self.client, self._server):
                end.close()


class _End(asyncio.Protocol):
    """The client's or the server's end."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.out: _Flow  # what comes from here
        self.into: _Flow  # what goes there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.out.came(data)

    def eof_received(self) -> bool:
        self.out.end_came()
        return True  # the other direction may go on

    def pause_writing(self) -> None:
        self.into.hold(True)

    def resume_writing(self) -> None:
        self.into.hold(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.ended(self, exc)

    def end(self) -> None:
        """The peer gets its end, and may still send."""
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError):  # it is gone, and we shall be told
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
    """The bytes of one direction, and what happens to them."""

    def __init__(self, source: _End, target: _End, cut: Callable[[], None], happened: Counter[Kind]) -> None:
        self._source, self._target, self._cut, self._happened = source, target, cut, happened
        source.out = target.into = self
        self.passed = 0
        self.ended = False
        self._due: list[tuple[int, Fault]] = []  # by the count of bytes that pass before
        self._waiting = bytearray()
        self._end_came = False
        self._held = False  # the target takes no more for now
        self._timer: asyncio.TimerHandle | None = None  # of a stall, a delay, or the next piece
        self._stalled = False
        self._delay_s = 0.0
        self._delayed = False  # what waits has waited
        self._piece = WHOLE
        self._deaf = False  # half closed: what comes is lost

    def add(self, fault: Fault) -> None:
        """A fault, `after` bytes from now."""
        self._due.append((self.passed + fault.after, fault))
        self._due.sort(key=lambda due: due[0])
        self.go_on()

    def heal(self) -> None:
        self._due.clear()
        self.stop()
        self._delay_s, self._piece = 0.0, WHOLE
        self.go_on()

    def stop(self) -> None:
        """End a wait."""
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
        """Pass on what may pass, until something makes it wait."""
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
            # More is read only when this is gone, so a stall reaches the sender.
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
            self._wait(0)  # so that the receiver may see the pieces one by one

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

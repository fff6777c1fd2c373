"""The network of a run: connections with delay, loss, resets and cuts.

A connection behaves like TCP: data arrives in order or not at all. A lost packet arrives later. Across a cut
all data waits until the cut is healed.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import OWNER, Process, Scheduler

RETRANSMIT_S = 0.2
_HIGH_WATER = 64 * 1024


class Network:
    """The connections between all hosts of a run, and their faults.

    Attributes:
        delay_s: Mean delay in seconds.
        loss: Share of packets that are lost.
        cuts: Directions (from, to) in which no data passes.
        seen: Number of faults by kind.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.chance = scheduler.chance
        self.delay_s = 0.0005
        self.loss = 0.0
        self.cuts: set[tuple[str, str]] = set()
        self.seen: Counter[str] = Counter()
        self._listeners: dict[tuple[str, int], tuple[Process, Callable[[], Any]]] = {}
        self._open: list[Transport] = []
        self._healed: list[asyncio.Future[None]] = []
        self._next_port = 40_000

    # -- faults

    def cut(self, *directions: tuple[str, str]) -> None:
        """Cut these directions."""
        self.cuts.update(directions)

    def heal(self) -> None:
        """End all cuts."""
        self.cuts.clear()
        for transport in list(self._open):
            transport.go_on()
        healed, self._healed = self._healed, []
        for future in healed:
            if not future.done():
                future.set_result(None)

    def reset_some(self, share: float) -> None:
        """Reset this share of the connections; data in flight is lost."""
        for transport in list(self._open):
            if self.chance.random() < share / 2:
                self.seen["reset"] += 1
                transport.break_both()

    def lose_process(self, process: Process, *, silently: bool) -> None:
        """Close the connections of a process; the peers are notified unless its machine is lost, too."""
        for place in [place for place, (whose, _) in self._listeners.items() if whose is process]:
            del self._listeners[place]
        for transport in list(self._open):
            if transport.process is process:
                transport.gone(silently)

    def delay(self) -> float:
        """Return the delay of a packet in seconds."""
        delay = self.delay_s * (0.5 + self.chance.random())
        if self.loss and self.chance.random() < self.loss:
            self.seen["loss"] += 1
            delay += RETRANSMIT_S * self.chance.choice((1, 1, 3))
        return delay

    # -- connections

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> _Listener:
        """Do the work of `loop.create_server`."""
        owner = OWNER.get()
        assert owner is not None
        if port == 0:
            self._next_port += 1
            port = self._next_port
        taken = self._listeners.get((owner.host, port))
        if taken is not None and taken[0].alive:
            raise OSError(errno.EADDRINUSE, f"port {port} is in use")
        self._listeners[owner.host, port] = owner, factory
        return _Listener(self, (owner.host, port))

    def close_listener(self, place: tuple[str, int]) -> None:
        self._listeners.pop(place, None)

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[Transport, Any]:
        """Do the work of `loop.create_connection`.

        Across a cut the response waits until the cut is healed.
        """
        source = OWNER.get()
        assert source is not None
        await asyncio.sleep(2 * self.delay())
        while (source.host, host) in self.cuts or (host, source.host) in self.cuts:
            self.seen["cut"] += 1
            healed = self.scheduler.create_future()
            self._healed.append(healed)
            await healed
            await asyncio.sleep(2 * self.delay())
        listener = self._listeners.get((host, port))
        if listener is None or not listener[0].alive:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        process, make_there = listener
        self._next_port += 1
        here = Transport(self, source, (source.host, self._next_port), (host, port))
        there = Transport(self, process, (host, port), (source.host, self._next_port))
        here.peer, there.peer = there, here
        self._open += (here, there)
        self.scheduler.call_soon(there.begin, make_there, context=process.context)
        protocol = here.begin(factory)
        return here, protocol

    def closed(self, transport: Transport) -> None:
        self._open.remove(transport)


class _Listener:
    """A replacement for the server of `loop.create_server`."""

    def __init__(self, network: Network, place: tuple[str, int]) -> None:
        self._network = network
        self._place = place

    @property
    def sockets(self) -> list[_Listener]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return self._place

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def close(self) -> None:
        self._network.close_listener(self._place)

    async def wait_closed(self) -> None:
        """Return immediately."""


class _Socket:
    """A replacement for a connection's socket; its options have no effect."""

    def setsockopt(self, *_: Any) -> None:
        """Ignore the option."""


class Transport(asyncio.Transport):
    """One side of a connection."""

    peer: Transport

    def __init__(
        self, network: Network, process: Process, own: tuple[str, int], other: tuple[str, int]
    ) -> None:
        super().__init__({"peername": other, "sockname": own, "socket": _Socket()})
        self.process = process
        self._network = network
        self._direction = own[0], other[0]
        self._protocol: Any = None
        self._last = 0.0  # arrival time of the last data for the peer
        self._stalled: list[bytes | None] = []  # written but held back by a cut; None is the end
        self._came: list[bytes | None] = []  # arrived but not read; None is the end
        self._reading = True
        self._closing = self.ended = False
        self._unread = 0
        self._high = _HIGH_WATER
        self._paused = False

    def begin(self, factory: Callable[[], Any]) -> Any:
        """Begin the connection on this side."""
        self._protocol = factory()
        self._protocol.connection_made(self)
        self._take()
        return self._protocol

    # -- called by the process

    def write(self, data: Any) -> None:
        if self._closing or self.ended or not data:
            return
        piece = bytes(data)
        self._unread += len(piece)
        self._send(piece)
        if self._unread > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._send(None)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._send(None)
            self._network.scheduler.call_soon(self.end, None, context=self.process.context)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing or self.ended

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_write_buffer_size(self) -> int:
        return self._unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_WATER if high is None else high

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._network.scheduler.call_soon(self._take, context=self.process.context)

    # -- towards the peer

    def _send(self, piece: bytes | None) -> None:
        if self._stalled or self._direction in self._network.cuts:
            self._network.seen["cut"] += 1
            self._stalled.append(piece)
            return
        scheduler, peer = self._network.scheduler, self.peer
        self._last = max(self._last, scheduler.now + self._network.delay())
        if peer.process.alive:
            scheduler.call_at(self._last, peer.arrived, piece, context=peer.process.context)
        else:  # its host reports a closed port
            scheduler.call_at(self._last, self.end, ConnectionResetError(), context=self.process.context)

    def go_on(self) -> None:
        """Send the data that a cut held back."""
        stalled, self._stalled = self._stalled, []
        for piece in stalled:
            self._send(piece)

    def gone(self, silently: bool) -> None:
        """Handle the end of the process."""
        self._closing = self.ended = True
        self._network.closed(self)
        if not silently:
            self._send(None)

    def break_both(self) -> None:
        """Reset the connection on both sides."""
        for side in (self, self.peer):
            context = side.process.context
            self._network.scheduler.call_soon(side.end, ConnectionResetError(), context=context)

    def arrived(self, piece: bytes | None) -> None:
        """Receive data from the peer, or its end."""
        if not self.ended:
            self._came.append(piece)
            self._take()

    def _take(self) -> None:
        protocol = self._protocol
        while self._came and self._reading and not self.ended and protocol is not None:
            piece = self._came.pop(0)
            if piece is None:
                self.end(None)
                return
            peer = self.peer
            peer.was_read(len(piece))
            if isinstance(protocol, asyncio.BufferedProtocol):
                rest = memoryview(piece)
                while rest and not self.ended:
                    buffer = memoryview(protocol.get_buffer(len(rest))).cast("B")
                    count = min(len(buffer), len(rest))
                    buffer[:count] = rest[:count]
                    rest = rest[count:]
                    protocol.buffer_updated(count)
            else:
                protocol.data_received(piece)

    def was_read(self, count: int) -> None:
        """Record that the peer has read `count` bytes."""
        self._unread -= count
        if self._paused and self._unread <= self._high // 4 and not self.ended:
            self._paused = False
            self._network.scheduler.call_soon(self._resume_writing, context=self.process.context)

    def _resume_writing(self) -> None:
        if not self.ended:
            self._protocol.resume_writing()

    def end(self, error: Exception | None) -> None:
        """End the connection on this side."""
        if not self.ended:
            self.ended = self._closing = True
            self._network.closed(self)
            if error is None and not self._stalled:
                self._send(None)
            if self._protocol is not None:
                self._protocol.connection_lost(error)

"""A master's HA port: slaves connect to it and receive the log, and writes wait for the slaves' reports.

ha_master.py decides what to send. All work happens at the end of an event-loop tick: records that were
written or flushed are sent to the slaves, and slaves' reports end the waits of the writes that the slaves
have stored. As with Apache's broker, any host that can connect to the port can read all messages
(docs/security.md).

Budget with SYNC_MASTER and 64 sends of 1 KiB in flight: 3 µs of CPU per message in ticks of 20 messages. This
includes the responses to the senders.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import cast

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.stats import Rate
from cometmq.broker.replication.ha_master import (
    HEADER,
    SEND_BYTES,
    TURN_INTERVAL_S,
    Beat,
    Close,
    HaMaster,
    LogState,
    Reports,
    Send,
    cut,
)
from cometmq.broker.replication.waits import Waiter, Waits
from cometmq.errors import CommandError
from cometmq.periodic import Periodic, Tasks
from cometmq.protocol.codes import ResponseCode
from cometmq.remoting import Tick, network_of, stop_accepting
from cometmq.store import CACHED, Buffer, Clock, MessageStore, NotInMemory, Reads

log = logs.logger(__name__)

MAX_SLAVES = 32
_REPORT_BYTES = 4096


class SlaveLink(asyncio.BufferedProtocol):
    """The connection of one slave to the HA port."""

    def __init__(self, server: HaServer) -> None:
        self._server = server
        self._buffer = bytearray(_REPORT_BYTES)
        self._reports = Reports()
        self.transport: asyncio.Transport | None = None
        self.number = -1
        self.peer = "?"
        self.full = False  # Whether the transport has paused writing
        self.sent = Rate()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=SEND_BYTES)
        name = transport.get_extra_info("peername") or ("?", 0)
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        self._server.opened(self, host=str(name[0]) if isinstance(name, tuple) else self.peer)

    def get_buffer(self, _size_hint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        position = self._reports.feed(bytes(self._buffer[:size]))
        if position is not None:
            self._server.reported(self, position)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._server.took(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._server.closed(self)


class HaServer:
    """Sends the log to slaves, and completes the writes that wait for them. Not thread-safe."""

    decide = False

    def __init__(self, config: BrokerConfig, clock: Clock, store: MessageStore, tick: Tick) -> None:
        self._config = config
        self._clock = clock
        self._store = store
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self.core = HaMaster(config)
        self.links: dict[int, SlaveLink] = {}
        self._waits = Waits(clock, int(ResponseCode.FLUSH_SLAVE_TIMEOUT))
        self._reading = Tasks()
        self._made = 0
        self._stopped = False
        self._refusals = logs.LogLimiter(20, 60.0, log)
        self._stop_listening: Callable[[], None] | None = None
        self._turns = Periodic(self._loop, TURN_INTERVAL_S, tick.schedule, name="check of the slaves")

    # -- start and stop

    async def start(self, interface: str, port: int) -> int:
        """Listen on a port, and return its number. Port 0 means any free port. Raises OSError."""
        network = network_of(interface)
        if network is not None:
            port, self._stop_listening = network.listen(lambda: SlaveLink(self), port)
        else:
            listener = await self._loop.create_server(
                lambda: SlaveLink(self), interface, port, reuse_address=True
            )
            port = listener.sockets[0].getsockname()[1]
            self._stop_listening = partial(stop_accepting, listener)
        self._turns.start()
        return port

    def stop(self) -> None:
        """Close all connections to slaves. Writes that wait for slaves receive SLAVE_NOT_AVAILABLE."""
        self._stopped = True
        if self._stop_listening is not None:
            self._stop_listening()
        self._turns.cancel()
        for task in self._reading:
            task.cancel()
        for link in list(self.links.values()):
            self._close(link)
        self._waits.end_all(int(ResponseCode.SLAVE_NOT_AVAILABLE))

    # -- events

    def opened(self, link: SlaveLink, host: str) -> None:
        """Register a new connection, from a slave or from any other client that connects to the port."""
        assert link.transport is not None
        if self._stopped:  # Close a connection that was accepted just before the port was closed
            link.transport.abort()
            return
        if len(self.links) >= MAX_SLAVES and not self._makes_room():
            if self._refusals.allows():
                log.warning("slave %s refused: %d slaves are connected", link.peer, len(self.links))
            link.transport.abort()
            return
        self._made += 1
        link.number = self._made
        self.links[link.number] = link
        self.core.opened(self._clock.monotonic(), link.number, host)

    def _makes_room(self) -> bool:
        """Close a connection to make room for a new one. Return whether one was closed.

        A connection that has sent no report is closed first. If there is none, the oldest connection of the
        address with the most connections is closed, so that a host that opens many connections cannot exclude
        slaves. No connection is closed if each address has only one.
        """
        slaves = self.core.slaves
        hosts = Counter(slave.host for slave in slaves.values())
        found = [
            (slave.acked < 0 and slave.reported is None, hosts[slave.host], -number)
            for number, slave in slaves.items()
        ]
        silent, count, number = max(found)
        if not silent and count == 1:
            return False
        self._refuse(self.links[-number], Close(-number, "replaced by a newer connection"))
        return True

    def reported(self, link: SlaveLink, position: int) -> None:
        self.core.reported(self._clock.monotonic(), link.number, position)
        self._tick.schedule()

    def took(self, link: SlaveLink) -> None:
        """Continue to send on a connection whose write buffer has room again."""
        self.core.taken(self._clock.monotonic(), link.number)
        self._tick.schedule()

    def closed(self, link: SlaveLink) -> None:
        self.core.closed(link.number)
        if self.links.pop(link.number, None) is not None:
            log.info("slave %s disconnected", link.peer)

    # -- writes that wait

    def wait_for(self, position: int, waiter: Waiter) -> None:
        """Call `waiter` with SUCCESS once enough slaves have the log up to `position`.

        The code is SLAVE_NOT_AVAILABLE if too few slaves keep up, and FLUSH_SLAVE_TIMEOUT after a timeout.
        """
        needed = self.core.needed(position)
        if needed is None:
            waiter(int(ResponseCode.SLAVE_NOT_AVAILABLE))
        elif not needed:
            waiter(int(ResponseCode.SUCCESS))
        else:
            self._waits.add(needed, position, self._config.slave_timeout / 1000, waiter)

    # -- the end of a tick

    def log_state(self) -> LogState:
        """Return the begin and end of the log, and the end of the part that slaves may receive."""
        store, log = self._store, self._store.log
        end = log.end
        sendable = min(store.flusher.flushed, end) if store.config.sync_flush else end
        return LogState(log.min_position, sendable, end, log.segment_size, log.readable_min)

    def end_tick(self) -> None:
        """Send new records to the slaves, and complete the writes that enough slaves have stored."""
        if not self.links:
            return
        for effect in self.core.turn(self._clock.monotonic(), self.log_state()):
            link = self.links[effect.slave]
            if isinstance(effect, Send):
                self._send(link, effect)
            elif isinstance(effect, Beat):
                self._write(link, HEADER.pack(effect.position, 0))
            else:
                self._refuse(link, effect)
        self._waits.reached(self.core.copies)

    def _send(self, link: SlaveLink, send: Send) -> None:
        question = partial(self._store.log.read, send.position, send.size)
        try:
            self._send_data(link, send, question(CACHED))
        except NotInMemory as miss:
            self._reading.start(self._send_cold(link, send, question, miss))
        except (CommandError, OSError) as error:
            self._unreadable(link, send, error)

    async def _send_cold(
        self, link: SlaveLink, send: Send, question: Callable[[Reads], Buffer | None], miss: NotInMemory
    ) -> None:
        try:
            self._send_data(link, send, await self._store.executor.query(question, miss))
        except (CommandError, OSError) as error:  # CommandError: a segment that is in the object store
            self._unreadable(link, send, error)

    def _send_data(self, link: SlaveLink, send: Send, data: Buffer | None) -> None:
        if link.number not in self.links:
            return
        if data is None:
            self._refuse(link, Close(link.number, f"the log at {send.position} was deleted meanwhile"))
            return
        with memoryview(data) as view:
            frames = b"".join(cut(send.position, view, self._config.ha_transfer_batch_size))
        link.sent.add(self._clock.monotonic(), send.size)
        self._write(link, frames)
        if not link.full and link.number in self.links:
            self.core.taken(self._clock.monotonic(), link.number)
            if send.position + send.size < self._store.log.end:
                self._loop.call_soon(self._tick.schedule)

    def _unreadable(self, link: SlaveLink, send: Send, error: Exception) -> None:
        self._refuse(link, Close(link.number, f"the log at {send.position} cannot be read: {error}"))

    @staticmethod
    def _write(link: SlaveLink, data: bytes) -> None:
        if link.transport is not None:
            link.transport.write(data)

    def _refuse(self, link: SlaveLink, close: Close) -> None:
        if self._refusals.allows():
            log.warning("closing the connection of slave %s: %s", link.peer, close.reason)
        self._close(link)

    def _close(self, link: SlaveLink) -> None:
        self.core.closed(link.number)
        self.links.pop(link.number, None)
        if link.transport is not None:
            link.transport.abort()

"""A slave's connections to its master: to the HA port for the log, to the main port for requests.

ha_slave.py decides what to do. Log bytes received in an event-loop tick are written and dispatched at the end
of that tick. Then the slave reports the end of these bytes to the master. With SYNC_FLUSH, the slave reports
a position only once the log is on the disk up to there.

Budget: 10 µs of CPU per message of 1 KiB in ticks of 40 messages. To check, write and dispatch the records at
the end of the tick takes 9 µs of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.stats import Rate
from cometmq.broker.replication.ha_master import REPORT
from cometmq.broker.replication.ha_slave import (
    Compare,
    Connect,
    Effect,
    HaSlave,
    MasterAddress,
    MasterLog,
    Phase,
    Pieces,
    Report,
    Tail,
    find_divergence,
)
from cometmq.errors import BrokerError, CometError
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import KVTable
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ViewMessageRequestHeader
from cometmq.remoting import RemotingClient, Tick, dial, network_of, parse_addr
from cometmq.store import Arrivals, Clock, MessageStore

log = logs.logger(__name__)

TURN_INTERVAL_S = 0.5
_READ_BYTES = 1 << 20
_CONNECT_S = 5.0


class LogsDiverged(CometError):
    """The contents of a master's and a slave's log differ, so the slave cannot copy the master's log."""


class MasterLink(asyncio.BufferedProtocol):
    """The connection of a slave to its master's HA port."""

    def __init__(self, client: HaClient) -> None:
        self._client = client
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._pieces = Pieces()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _size_hint: int) -> memoryview:
        return self._view

    def buffer_updated(self, size: int) -> None:
        self._client.received(self, self._pieces, self._view[:size])

    def connection_lost(self, error: Exception | None) -> None:
        self._client.closed(self, f"the master has closed the connection{f': {error}' if error else ''}")


@dataclass(eq=False)
class HaClient:
    """Copies a master's log to a slave's store. Must be used only in the event loop's thread.

    `visible` is called with the messages that consumers can read from now on.
    """

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    remoting: RemotingClient
    tick: Tick
    visible: Callable[[int, Arrivals], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.core = HaSlave(self.config)
        self.received_bytes = Rate()
        self.read_ms = self.written_ms = 0
        self._link: MasterLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._logged_state = ""
        self._turns = Periodic(self._loop, TURN_INTERVAL_S, self.tick.schedule, name="check of the master")

    def start(self) -> None:
        """Start to follow the master once its address is known."""
        self._turns.start()
        self.tick.schedule()

    async def stop(self) -> None:
        """Write the log bytes received so far to the store, and close the connection to the master."""
        self._turns.cancel()
        self.end_tick()
        self._drop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def follow(self, master: MasterAddress) -> None:
        self.core.follow(self.clock.monotonic(), master)
        self.tick.schedule()

    @property
    def lag(self) -> int:
        """The number of bytes by which the slave's log is behind the master's, or -1 if that is unknown."""
        end = self.core.master_end
        return -1 if end < 0 else max(0, end - self.store.replica.end)

    # -- events

    def received(self, link: MasterLink, pieces: Pieces, data: memoryview) -> None:
        """Decode bytes from the master. Log bytes are written at the end of the event-loop tick."""
        if link is not self._link:
            return
        now = self.clock.monotonic()
        self.read_ms = self.clock.time_ms()
        self.received_bytes.add(now, len(data))
        try:
            for position, piece in pieces.feed(data):
                self.core.received(now, position + len(piece))
                if len(piece):
                    self.store.replica.append(position, piece)
        except (CometError, OSError) as error:
            self.closed(link, str(error))
            return
        self.tick.schedule()

    def closed(self, link: MasterLink, reason: str) -> None:
        """Handle a connection that has been closed, or must be closed because of an error."""
        if link is self._link:
            self.core.lost(self.clock.monotonic(), reason)
            self._drop()
            self.tick.schedule()

    # -- the end of a tick

    def end_tick(self) -> None:
        """Write the log bytes of this event-loop tick. Then carry out the effects of `HaSlave.turn`."""
        replica = self.store.replica
        if self._link is not None:
            before = replica.end
            commit = replica.commit()
            if commit.visible:
                self.visible(commit.visible, commit.arrivals)
            if replica.end != before:
                self.written_ms = self.clock.time_ms()
            if commit.error is not None:
                self.closed(self._link, str(commit.error))
        for effect in self.core.turn(self.clock.monotonic(), replica.end, replica.safe):
            self._do(effect)
        self._log_state()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Report):
            if self._link is not None and self._link.transport is not None:
                self._link.transport.write(REPORT.pack(effect.position))
        elif isinstance(effect, Compare):
            self._begin(self._compare(effect.addr))
        elif isinstance(effect, Connect):
            self._begin(self._connect(effect.ha_addr))
        else:
            self._drop()

    def _log_state(self) -> None:
        core = self.core
        state = core.problem or core.phase.value
        if core.phase not in (Phase.FOLLOWING, Phase.STOPPED, Phase.PAUSING) or state == self._logged_state:
            return
        self._logged_state = state
        if core.phase is Phase.STOPPED:
            log.error(
                "replication stopped: %s. Stop this broker, then truncate its log with `cometmq store "
                "truncate` or empty its store directory",
                state,
            )
        elif core.phase is Phase.PAUSING:
            log.warning("replication from the master failed, trying again: %s", state)
        elif core.master is not None:
            text, end = "replicating from master %s, from log position %d", self.store.replica.end
            log.info(text, core.master.ha_addr, end)

    # -- asking and connecting

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._loop.create_task(work)

    async def _compare(self, addr: str) -> None:
        """Compare the slave's log with the master's, and report the result to HaSlave."""
        try:
            divergence = await self._find_divergence(addr)
        except (CometError, OSError, ValueError, KeyError) as error:
            self.core.lost(self.clock.monotonic(), f"the master {addr} cannot be asked: {error}")
        else:
            self.core.compared(self.clock.monotonic(), divergence)
        self.tick.schedule()

    async def confirm(self, addr: str) -> None:
        """Check that the log of the master at `addr` can continue the slave's log.

        If the logs differ and `addr` is the slave's current master, stop the replication. Raises LogsDiverged
        then, or if the logs cannot be compared, and CometError if the master did not answer.
        """
        try:
            divergence = await self._find_divergence(addr)
        except (OSError, ValueError, KeyError) as error:
            raise LogsDiverged(f"the logs of master and slave cannot be compared: {error}") from error
        if divergence:
            if self.core.master is not None and self.core.master.addr == addr:
                self.core.report_divergence(self.clock.monotonic(), divergence)
                self.tick.schedule()
            raise LogsDiverged(divergence)

    async def _find_divergence(self, addr: str) -> str:
        own = await self._tail()
        return "" if own is None else find_divergence(own, await self._request_log(addr, own.position))

    async def _tail(self) -> Tail | None:
        store = self.store
        if store.replica.empty:
            return None
        position = store.writer.covered().last
        record = None
        if position >= 0:
            record = await store.executor.query(partial(store.lookups.record_at, position))
        return Tail(store.replica.end, position, record)

    async def _request_log(self, addr: str, position: int) -> MasterLog:
        answer = await self.remoting.call(addr, Frame.request(RequestCode.GET_BROKER_RUNTIME_INFO))
        table = KVTable.decode(success(answer).body).table
        record = None
        if position >= 0:
            header = ViewMessageRequestHeader(offset=position)
            answer = await self.remoting.call(addr, Frame.request(RequestCode.VIEW_MESSAGE_BY_ID, header))
            if answer.code == ResponseCode.SYSTEM_BUSY:  # The master's object store does not answer now
                success(answer)
            record = bytes(answer.body) if answer.code == ResponseCode.SUCCESS else None
        first = table.get("tieredMinOffset", table["commitLogMinOffset"])
        return MasterLog(int(first), int(table["commitLogMaxOffset"]), record)

    async def _connect(self, ha_addr: str) -> None:
        try:
            host, port = parse_addr(ha_addr)
            network = network_of(host)
            link = self._link = MasterLink(self)
            if network is not None:
                network.connect(lambda: link, port)
            else:
                async with asyncio.timeout(_CONNECT_S):
                    await dial(lambda: link, host, port)
        except (CometError, OSError) as error:  # OSError includes TimeoutError
            self._link = None
            reason = f"no connection to the master's port {ha_addr}: {str(error) or 'no answer'}"
            self.core.lost(self.clock.monotonic(), reason)
        else:
            self.core.connected(self.clock.monotonic())
        self.tick.schedule()

    def _drop(self) -> None:
        """Close the connection, and cancel any connection attempt or comparison that is in progress."""
        link, self._link = self._link, None
        if link is not None and link.transport is not None:
            link.transport.abort()
        if self._task is not None:
            self._task.cancel()
        self.store.replica.forget()


def success(answer: Frame) -> Frame:
    """Return a response if its code is SUCCESS. Raise BrokerError otherwise."""
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, remark=answer.remark or "")
    return answer

"""Back-pressure: measures the load of a broker and refuses requests while the broker is overloaded.

A timer measures the load 50 times per second. While the broker refuses requests with some request code, a
handler that refuses them replaces the server's handler for this code. So accepted requests need no check. The
module pressure.py decides which request codes to refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.pressure import Excess, Load, exceeded, remark
from cometmq.broker.base.writer import Writer
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Handler
from cometmq.store import MessageStore

log = logs.logger(__name__)

MEASURE_INTERVAL_S = 0.02
WARNING_INTERVAL_S = 10.0  # Minimum interval, in seconds, between two log lines about refused requests


@dataclass(eq=False)
class Protection:
    """Measures the load, and refuses requests by replacing their handlers in the RemotingServer."""

    config: BrokerConfig
    store: MessageStore
    writer: Writer
    override_handlers: Callable[[Collection[int], Handler], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._late_ms = 0  # Delay of the event loop in ms at the last measurement
        self._exceeded: dict[int, list[Excess]] = {}
        self._log_limit = logs.LogLimiter(1, WARNING_INTERVAL_S)
        self.load = Load()
        self.refused = 0
        """The number of refused requests since the start."""

    def start(self) -> None:
        """Start to measure the broker's load periodically."""
        self._due = self._loop.time() + MEASURE_INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._measure)

    def stop(self) -> None:
        """Stop measuring the load, and accept all requests again."""
        if self._timer is not None:
            self._timer.cancel()
        self._refuse({})

    @property
    def why(self) -> str:
        """The limits that are exceeded now, as text, or "" if no request is refused."""
        return "; ".join(dict.fromkeys(str(each) for excess in self._exceeded.values() for each in excess))

    def _measure(self) -> None:
        late_ms = int((self._loop.time() - self._due) * 1000)
        flusher = self.store.flusher
        self.load = Load(
            # Use the smaller one of two measurements, so that a single stall that is already over causes no
            # refusals: the requests that waited during the stall are best served now.
            lag_ms=min(late_ms, self._late_ms),
            sync_ms=int(flusher.syncing_s * 1000) if self.store.config.sync_flush else 0,
            waiting=self.writer.waiting,
            unflushed=flusher.unflushed,
        )
        self._late_ms = late_ms
        if 0 < self.config.max_unflushed_bytes <= 2 * self.load.unflushed:
            flusher.request()  # Sync early, because half of `maxUnflushedBytes` is reached
        self._refuse(exceeded(self.load, self.config))
        self.start()

    def _refuse(self, found: dict[int, list[Excess]]) -> None:
        before, self._exceeded = self._exceeded, found
        if before.keys() == found.keys():
            return
        self.override_handlers(found.keys(), self._answer)
        if found and self._log_limit.allows():
            log.warning(
                "the broker is overloaded and refuses requests: %s; %d refused so far", self.why, self.refused
            )

    def _answer(self, _connection: Connection, frame: Frame) -> Frame:
        self.refused += 1
        return frame.response(ResponseCode.SYSTEM_BUSY, remark(self._exceeded[frame.code], self.load))

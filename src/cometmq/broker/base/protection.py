"""Back-pressure: measures the load of a broker and refuses requests that it could not serve in time.

A timer measures 50 times per second. Refused requests get another handler in the server's table, so accepted
requests cost nothing more. pressure.py decides.
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
WARNING_INTERVAL_S = 10.0  # the minimum interval between two log lines about refusals


@dataclass(eq=False, kw_only=True)
class Protection:
    """The measurement of the load, and the refusal of requests by RemotingServer's override_handlers."""

    config: BrokerConfig
    store: MessageStore
    writer: Writer
    override_handlers: Callable[[Collection[int], Handler], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._late_ms = 0  # the delay of the loop at the last measurement
        self._exceeded: dict[int, list[Excess]] = {}
        self._log_limit = logs.LogLimiter(1, WARNING_INTERVAL_S)
        self.load = Load()
        self.refused = 0
        """The number of refused requests since the start."""

    def start(self) -> None:
        """Start to measure the load."""
        self._due = self._loop.time() + MEASURE_INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._measure)

    def stop(self) -> None:
        """Stop measuring, and refuse no more requests."""
        if self._timer is not None:
            self._timer.cancel()
        self._refuse({})

    @property
    def why(self) -> str:
        """Return the limits that are exceeded now, or "" if no request is refused."""
        return "; ".join(dict.fromkeys(str(each) for excess in self._exceeded.values() for each in excess))

    def _measure(self) -> None:
        late_ms = int((self._loop.time() - self._due) * 1000)
        flusher = self.store.flusher
        self.load = Load(
            # A single stall that is over does not count, because the waiting requests are best served now.
            lag_ms=min(late_ms, self._late_ms),
            sync_ms=int(flusher.syncing_s * 1000) if self.store.config.sync_flush else 0,
            waiting=self.writer.waiting,
            unflushed=flusher.unflushed,
        )
        self._late_ms = late_ms
        if 0 < self.config.max_unflushed_bytes <= 2 * self.load.unflushed:
            flusher.request()  # this sync does not depend on the flush interval
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

"""Back-pressure: measures how far a broker keeps up, and refuses what it would only keep waiting.

A timer looks 50 times a second. What is refused is diverted from its handlers in the server's table, so a
request that is not refused pays nothing. pressure.py decides.
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

LOOK_S = 0.02
REST_S = 10.0  # from one line of the log about it to the next


@dataclass(eq=False, kw_only=True)
class Protection:
    """Looks, and refuses. divert: has a handler take the requests of these codes (RemotingServer.divert)."""

    config: BrokerConfig
    store: MessageStore
    writer: Writer
    divert: Callable[[Collection[int], Handler], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._late_ms = 0  # at the last look
        self._exceeded: dict[int, list[Excess]] = {}
        self._said_at = -REST_S
        self.load = Load()
        self.refused = 0
        """Requests, since the start."""

    def start(self) -> None:
        """Begin to look."""
        self._due = self._loop.time() + LOOK_S
        self._timer = self._loop.call_at(self._due, self._look)

    def stop(self) -> None:
        """Look no more, and refuse nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._refuse({})

    @property
    def why(self) -> str:
        """The limits that are exceeded now; "" when nothing is refused."""
        return "; ".join(dict.fromkeys(str(each) for excess in self._exceeded.values() for each in excess))

    def _look(self) -> None:
        late_ms = int((self._loop.time() - self._due) * 1000)
        flusher = self.store.flusher
        self.load = Load(
            # One stall that is over does not count: the requests that waited are served best at once.
            lag_ms=min(late_ms, self._late_ms),
            sync_ms=int(flusher.syncing_s * 1000) if self.store.config.sync_flush else 0,
            waiting=self.writer.waiting,
            unflushed=flusher.unflushed,
        )
        self._late_ms = late_ms
        if 0 < self.config.max_unflushed_bytes <= 2 * self.load.unflushed:
            flusher.request()  # whatever the flush interval is
        self._refuse(exceeded(self.load, self.config))
        self.start()

    def _refuse(self, found: dict[int, list[Excess]]) -> None:
        before, self._exceeded = self._exceeded, found
        if before.keys() == found.keys():
            return
        self.divert(found.keys(), self._answer)
        now = self._loop.time()
        if found and now - self._said_at >= REST_S:
            self._said_at = now
            log.warning("the broker is busy and refuses requests: %s; %d so far", self.why, self.refused)

    def _answer(self, _connection: Connection, frame: Frame) -> Frame:
        self.refused += 1
        return frame.response(ResponseCode.SYSTEM_BUSY, remark(self._exceeded[frame.code], self.load))

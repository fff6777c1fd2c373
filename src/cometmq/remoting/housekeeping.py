"""The periodic check of the connections of one server or client, about once per second."""

from __future__ import annotations

import asyncio

from cometmq.remoting.connection import Connection


class ConnectionTable:
    """The open connections. One timer for all of them closes idle and stalled ones."""

    __slots__ = ("_empty", "_loop", "_period_s", "_timer", "connections")

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        self._loop = loop
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.connections: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        """Add an open connection."""
        self.connections.add(connection)
        self._empty.clear()
        if self._timer is None:
            self._timer = self._loop.call_later(self._period_s, self._scan)

    def discard(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def close_all(self, grace_s: float) -> None:
        """Close every connection; after `grace_s` seconds abort those with unsent responses."""
        for connection in list(self.connections):
            connection.close()
        try:
            await asyncio.wait_for(self._empty.wait(), grace_s)
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
            await self._empty.wait()

    def _scan(self) -> None:
        self._timer = self._loop.call_later(self._period_s, self._scan)
        now = self._loop.time()
        for connection in list(self.connections):
            connection.check(now)

"""The check of all connections of a server or client, about once per second."""

from __future__ import annotations

import asyncio

from cometmq.remoting.connection import Connection


class ConnectionTable:
    """The open connections of a server or client. One timer closes all that are idle or stalled."""

    __slots__ = ("_empty", "_loop", "_period_s", "_timer", "connections")

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        self._loop = loop
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.connections: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._empty.clear()
        if self._timer is None:
            self._timer = self._loop.call_later(self._period_s, self._scan)

    def discard(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def close_all(self, grace_s: float) -> None:
        """Close every connection. After `grace_s` seconds, abort those that still have unsent responses."""
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

"""Checks all connections of a server or client about once per second, and closes idle and stalled ones."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from cometmq.remoting.tick import Link

C = TypeVar("C", bound=Link)


class ConnectionTable(Generic[C]):
    """The open connections of a server or client. One timer closes all that are idle or stalled."""

    __slots__ = ("_empty", "_loop", "_period_s", "_timer", "connections")

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        self._loop = loop
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.connections: set[C] = set()

    def add(self, connection: C) -> None:
        self.connections.add(connection)
        self._empty.clear()
        if self._timer is None:
            self._timer = self._loop.call_later(self._period_s, self._scan)

    def discard(self, connection: C) -> None:
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
        if not await self.wait_empty(grace_s):
            for connection in list(self.connections):
                connection.abort()
            await self._empty.wait()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all connections are closed, and return whether they are."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _scan(self) -> None:
        self._timer = self._loop.call_later(self._period_s, self._scan)
        now = self._loop.time()
        for connection in list(self.connections):
            connection.check(now)

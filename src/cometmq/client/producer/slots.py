"""A bound on how many things are under way at once, as cheap as a counter while it is not reached."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Slots"]


class Slots:
    """Use: `if slots.full: await slots.room()`, then `slots.take()` at once and `slots.give_back()` in the
    end."""

    __slots__ = ("_drained", "_waiting", "limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._drained: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        return self.taken >= self.limit

    async def room(self) -> None:
        """Wait, first come first served, until a slot is free."""
        while self.taken >= self.limit:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            except asyncio.CancelledError:
                # The slot we were woken for is the next one's.
                if future.done() and not future.cancelled():
                    self._wake()
                raise

    def take(self) -> None:
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        if self._waiting:
            self._wake()
        elif self._drained is not None and not self.taken and not self._drained.done():
            self._drained.set_result(None)

    async def drained(self) -> None:
        """Wait until nothing is under way and nobody waits."""
        while self.taken or self._waiting:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def _wake(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

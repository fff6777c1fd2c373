"""Helpers that let the event loop run other tasks during a request about many queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

from cometmq.protocol.bodies import Body

T = TypeVar("T")

QUEUES_PER_TURN = 64
"""Other tasks of the event loop run after this many items, of up to 20 µs each: after about 1 ms."""
ENTRIES_INLINE = 512
"""The event loop encodes a response with at most 512 entries, at 3 µs each. A thread encodes a longer one."""


class Turns:
    """Iterates over the queues, topics or groups of one request, with pauses in which other tasks can run."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = QUEUES_PER_TURN

    async def each(self, items: Iterable[T]) -> AsyncIterator[T]:
        """Yield the items. Other tasks run after every 64 items, counted across all calls."""
        for item in items:
            self._left -= 1
            if not self._left:
                self._left = QUEUES_PER_TURN
                await asyncio.sleep(0)
            yield item


async def slices(items: Sequence[T], size: int = 1024) -> AsyncIterator[Sequence[T]]:
    """Yield a long list in slices of `size` items, and let other tasks run between two slices."""
    for at in range(0, len(items), size):
        if at:
            await asyncio.sleep(0)
        yield items[at : at + size]


async def encoded(body: Body, entries: int) -> bytes:
    """Encode a body that no longer changes: in the event loop if it has few entries, else in a thread."""
    return body.encode() if entries <= ENTRIES_INLINE else await asyncio.to_thread(body.encode)

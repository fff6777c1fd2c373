"""Helpers for requests about many queues, which let the event loop do other work in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

from cometmq.protocol.bodies import Body

T = TypeVar("T")

QUEUES_PER_TURN = 64
"""The number of queues per turn. A queue costs up to 20 µs, so a turn takes about a millisecond."""
ENTRIES_INLINE = 512
"""The number of entries of a response that are encoded in the loop, at 3 µs each. A thread encodes more."""


class Turns:
    """A counter of the queues, topics or groups that one request has processed."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = QUEUES_PER_TURN

    async def each(self, items: Iterable[T]) -> AsyncIterator[T]:
        """Yield the items, and yield to the event loop after every 64 items, counted over all calls."""
        for item in items:
            self._left -= 1
            if not self._left:
                self._left = QUEUES_PER_TURN
                await asyncio.sleep(0)
            yield item


async def slices(items: Sequence[T], size: int = 1024) -> AsyncIterator[Sequence[T]]:
    """Yield parts of a long list from a request, and let the loop do other work after each."""
    for at in range(0, len(items), size):
        if at:
            await asyncio.sleep(0)
        yield items[at : at + size]


async def encoded(body: Body, entries: int) -> bytes:
    """Return the encoded bytes of a body that does not change any more."""
    return body.encode() if entries <= ENTRIES_INLINE else await asyncio.to_thread(body.encode)

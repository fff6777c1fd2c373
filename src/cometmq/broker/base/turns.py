"""Requests about many queues let the loop do its other work in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

from cometmq.protocol.bodies import Body

T = TypeVar("T")

QUEUES_PER_TURN = 64
"""A queue costs up to 20 µs, so that a turn lasts about a millisecond."""
ENTRIES_INLINE = 512
"""Entries of an answer that are encoded in the loop, at some 3 µs each; more are encoded by a thread."""


class Turns:
    """One request's count of the queues, topics or groups that it has looked at."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = QUEUES_PER_TURN

    async def each(self, items: Iterable[T]) -> AsyncIterator[T]:
        """The items; after every 64 of all calls the rest of the loop has its turn."""
        for item in items:
            self._left -= 1
            if not self._left:
                self._left = QUEUES_PER_TURN
                await asyncio.sleep(0)
            yield item


async def slices(items: Sequence[T], size: int = 1024) -> AsyncIterator[Sequence[T]]:
    """Parts of a long list that came with a request, with a turn for the rest of the loop between them."""
    for at in range(0, len(items), size):
        if at:
            await asyncio.sleep(0)
        yield items[at : at + size]


async def encoded(body: Body, entries: int) -> bytes:
    """The bytes of a body that nobody changes any more."""
    return body.encode() if entries <= ENTRIES_INLINE else await asyncio.to_thread(body.encode)

"""Consumed offsets of a group: in memory first, persisted every few seconds, at the loss of a queue and at
the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from cometmq import logs
from cometmq.errors import CometError
from cometmq.message import MessageQueue

__all__ = ["OffsetStore"]

log = logs.logger("cometmq.client.consumer.consumer_offsets")

_AT_ONCE = 64  # questions under way at a time; a member may hold thousands of queues

ReadOffset = Callable[[MessageQueue], Awaitable[int | None]]
WriteOffset = Callable[[dict[MessageQueue, int]], Awaitable[dict[MessageQueue, Exception]]]
"""Persist a table; answers what failed."""


class OffsetStore:
    """`read` gives the stored offset (None: none stored; raises when it cannot be read), `write` stores a
    table."""

    def __init__(self, read: ReadOffset, write: WriteOffset) -> None:
        self._read = read
        self._write = write
        self._offsets: dict[MessageQueue, int] = {}
        self._dirty: set[MessageQueue] = set()
        self._persisting = asyncio.Lock()

    def update(self, queue: MessageQueue, offset: int, *, increase_only: bool = True) -> None:
        current = self._offsets.get(queue)
        if current is None or offset > current or (not increase_only and offset != current):
            self._offsets[queue] = offset
            self._dirty.add(queue)

    def memory(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    async def stored(self, queue: MessageQueue) -> int | None:
        return await self._read(queue)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Memory first, then the store."""
        offset = self._offsets.get(queue)
        return offset if offset is not None else await self._read(queue)

    def snapshot(self) -> dict[MessageQueue, int]:
        return dict(self._offsets)

    async def persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store what changed since the last time (of `queues`, else of all). What fails stays due for the
        next time.

        Raises the first failure, after everything has been tried.
        """
        async with self._persisting:
            due = self._dirty if queues is None else self._dirty.intersection(queues)
            table = {queue: self._offsets[queue] for queue in due}
            if not table:
                return
            failures = await self._write(table)
            for queue, offset in table.items():
                # An offset that moved while it was written stays dirty.
                if queue not in failures and self._offsets.get(queue, offset) == offset:
                    self._dirty.discard(queue)
            for queue, failure in failures.items():
                log.warning("offset %d of %s was not stored: %s", table[queue], queue, failure)
            if failures:
                raise next(iter(failures.values()))

    async def persist_last(self) -> None:
        """`persist` at the end, then ask whether the store still has it all, and store again what it lost.

        A pull carries its queue's offset, and a broker may serve one that was sent before only now: then an
        older offset replaces what was confirmed. Raises as `persist`.
        """
        await self.persist()
        queues = list(self._offsets)
        for at in range(0, len(queues), _AT_ONCE):
            asked = queues[at : at + _AT_ONCE]
            answers = await asyncio.gather(*map(self._read, asked), return_exceptions=True)
            for queue, stored in zip(asked, answers, strict=True):
                if stored is None or (isinstance(stored, int) and stored < self._offsets[queue]):
                    self._dirty.add(queue)
        await self.persist()

    async def release(self, queue: MessageQueue) -> None:
        """Persist and forget a queue that somebody else reads from now on."""
        try:
            await self.persist([queue])
        except CometError:
            pass  # logged; the next owner starts where the last persist left it and repeats the rest
        finally:
            self.forget(queue)

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self._dirty.discard(queue)

"""A group's offsets on the brokers."""

from __future__ import annotations

import asyncio

from cometmq.errors import CometError
from cometmq.message import MessageQueue

from .instance import ClientInstance

__all__ = ["RemoteOffsets"]

_AT_ONCE = 64
"""Updates under way at a time; a member may hold thousands of queues."""


class RemoteOffsets:
    def __init__(self, client: ClientInstance, group: str) -> None:
        self._client = client
        self._group = group

    async def read(self, queue: MessageQueue) -> int | None:
        return await self._client.brokers.consumer_offset(
            await self._client.find_addr(queue), self._group, queue
        )

    async def write(self, table: dict[MessageQueue, int]) -> dict[MessageQueue, Exception]:
        failures: dict[MessageQueue, Exception] = {}
        entries = iter(table.items())

        async def some() -> None:
            for queue, offset in entries:
                try:
                    addr = await self._client.find_addr(queue)
                    await self._client.brokers.update_consumer_offset(addr, self._group, queue, offset)
                except CometError as error:
                    failures[queue] = error

        await asyncio.gather(*(some() for _ in range(min(_AT_ONCE, len(table)))))
        return failures

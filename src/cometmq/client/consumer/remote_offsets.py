"""A group's offsets on the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from cometmq.client.cluster.instance import ClientInstance
from cometmq.errors import CometError
from cometmq.message import MessageQueue

__all__ = ["RemoteOffsets", "commit_rounds"]

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

        async def some(entries: Iterator[MessageQueue]) -> None:
            for queue in entries:
                try:
                    addr = await self._client.find_addr(queue)
                    await self._client.brokers.update_consumer_offset(addr, self._group, queue, table[queue])
                except CometError as error:
                    failures[queue] = error

        for each in commit_rounds(table):
            entries = iter(each)
            await asyncio.gather(*(some(entries) for _ in range(min(_AT_ONCE, len(each)))))
        return failures


def commit_rounds(queues: Iterable[MessageQueue]) -> tuple[list[MessageQueue], list[MessageQueue]]:
    """The first queue of each topic, and the others, whose commits must wait for those of the first.

    Apache 4.9's broker makes a group's table of a topic when a commit finds none: of two commits that come
    together each makes one, and what went into the one that is replaced is lost, although it was confirmed.
    """
    first: dict[str, MessageQueue] = {}
    rest = [queue for queue in queues if first.setdefault(queue.topic, queue) is not queue]
    return list(first.values()), rest

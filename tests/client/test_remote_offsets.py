"""Commits to brokers: what Apache's broker loses when two of them come together never comes together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, cast

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.consumer.remote_offsets import RemoteOffsets
from cometmq.message import MessageQueue


class TornBroker:
    """Looks for a table, thinks, and puts its own in place if there was none, as Apache's threads do."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, int]] = {}
        self.under_way: defaultdict[str, int] = defaultdict(int)
        self.most = 0
        self.brokers = self

    async def find_addr(self, queue: MessageQueue) -> str:
        return "127.0.0.1:1"

    async def update_consumer_offset(self, addr: str, group: str, queue: MessageQueue, offset: int) -> None:
        table = self.tables.get(queue.topic)
        self.under_way[queue.topic] += 1
        self.most = max(self.most, self.under_way[queue.topic])
        await asyncio.sleep(0)
        self.under_way[queue.topic] -= 1
        if table is None:
            self.tables[queue.topic] = {queue.queue_id: offset}
        else:
            table[queue.queue_id] = offset


async def test_a_new_groups_first_commits_all_stay() -> None:
    broker = TornBroker()
    wanted = {MessageQueue(topic, "a", number): number + 1 for topic in "TUV" for number in range(100)}
    assert await RemoteOffsets(cast(ClientInstance, cast(Any, broker)), "g").write(wanted) == {}
    held = {
        MessageQueue(topic, "a", number): offset
        for topic, table in broker.tables.items()
        for number, offset in table.items()
    }
    assert held == wanted
    assert broker.most > 1  # the others go together

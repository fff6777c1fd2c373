"""A console for a fake cluster: 16 brokers, 5,000 topics, 2,300 groups, and one broker that hangs.

A name server that is asked for a route hangs, too. At its stop it prints the number of queries by name as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cometmq.admin import GroupQueueProgress, QueueProgress
from cometmq.cli.standalone import announcement
from cometmq.console.app import Console, ConsoleOptions
from cometmq.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicConfigTable,
    TopicRouteData,
)

BROKERS, TOPICS, GROUPS = 16, 5000, 2300
ADDRS = {f"broker-{number:02d}": f"10.0.0.{number}:10911" for number in range(BROKERS)}
HANGS = "broker-hangs"
ADDRS[HANGS] = "10.0.1.0:10911"
TABLE = TopicConfigTable(
    topic_config_table={
        name: TopicConfig(topic_name=name, attributes={})
        for name in (f"topic-{n:05d}" for n in range(TOPICS))
    }
).encode()


class MadeUp:
    """A stand-in for Admin. Tables are decoded at each query, as in the real class."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def cluster_info(self) -> ClusterInfo:
        brokers = {
            name: BrokerData(cluster="C", broker_name=name, broker_addrs={0: a}) for name, a in ADDRS.items()
        }
        return ClusterInfo(broker_addr_table=brokers, cluster_addr_table={"C": sorted(ADDRS)})

    async def _check(self, question: str, addr: str) -> None:
        self.asked[f"{question} {addr}"] += 1
        if addr == ADDRS[HANGS]:
            await asyncio.Event().wait()

    async def runtime(self, addr: str) -> dict[str, str]:
        await self._check("brokers", addr)
        return {"putTps": "1.0 1.0 1.0"}

    async def route(self, _topic: str) -> TopicRouteData:
        await asyncio.Event().wait()
        raise AssertionError

    async def topic_configs(self, addr: str) -> TopicConfigTable:
        await self._check("topics", addr)
        return TopicConfigTable.decode(TABLE)

    async def topics(self) -> list[str]:
        return []

    async def groups_at(self, addr: str) -> dict[str, SubscriptionGroupConfig]:
        await self._check("groups", addr)
        return {f"group-{n:05d}": SubscriptionGroupConfig(group_name=f"group-{n:05d}") for n in range(GROUPS)}

    async def broker_consume_stats(self, addr: str) -> list[GroupQueueProgress]:
        await self._check("progress", addr)
        return [
            GroupQueueProgress(
                group=f"group-{number:05d}",
                queue=QueueProgress(
                    topic=f"topic-{number:05d}",
                    broker_name=addr,
                    queue_id=0,
                    broker_offset=number,
                    consumer_offset=0,
                    last_timestamp=1,
                ),
            )
            for number in range(GROUPS)
        ]


async def main(data: Path) -> None:
    console = Console(ConsoleOptions(namesrv="127.0.0.1:1", data=data, port=0))
    admin: Any = MadeUp()
    connection = console.services.clusters.connections["default"]
    connection.admin = connection.cluster._admin = admin  # noqa: SLF001
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await console.start()
    print(announcement(console), flush=True)
    await stopped.wait()
    await console.stop()
    print(json.dumps(admin.asked), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

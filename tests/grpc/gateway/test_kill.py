"""Each message arrives at least once although the broker is killed and HTTP clients disappear."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest
from tests.faults.test_kill import BrokerProcess
from tests.ports import free_port

MESSAGES = 300
PRODUCERS = CONSUMERS = 3
SEED = 35


class Run:
    """The messages that the clients have sent and received so far."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}/v1/topics/Orders"
        self.todo = list(range(MESSAGES))
        self.stored: set[str] = set()
        self.received: Counter[str] = Counter()
        self.acknowledged = 0
        self.dice = random.Random(SEED)

    def is_complete(self) -> bool:
        return len(self.stored) == MESSAGES and self.stored <= self.received.keys()

    async def produce(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as web:
            while self.todo:
                body = str(self.todo.pop())
                while body not in self.stored:
                    try:
                        answer = await web.post(f"{self.base}/messages", content=body)
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
                        continue
                    if answer.status_code == 200:
                        self.stored.add(body)

    async def consume(self) -> None:
        group = f"{self.base}/groups/G"
        while not self.is_complete():
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=30) as web:
                    params = {"max": 8, "wait": 1, "invisible": 10}
                    answer = await web.post(f"{group}/messages", params=params)
                    found = answer.json()["messages"] if answer.status_code == 200 else []
                    if not found or self.dice.random() < 0.1:
                        continue  # The client disappears with the messages that it has received
                    self.received.update(each["body"] for each in found)
                    handles = [each["handle"] for each in found]
                    await web.post(f"{group}/ack", json={"handles": handles})
                    self.acknowledged += len(handles)
            except httpx.TransportError:
                await asyncio.sleep(0.05)


@pytest.mark.slow("kills a broker; leases that are lost last 10 s")
async def test_each_message_arrives_through_kills_of_broker_and_clients(tmp_path: Path) -> None:
    port = free_port()
    broker, run = BrokerProcess(tmp_path, grpcPort=str(port)), Run(port)
    broker.spawn()
    try:
        await broker.ready()
        clients = [run.produce() for _ in range(PRODUCERS)] + [run.consume() for _ in range(CONSUMERS)]
        working = asyncio.gather(*clients)
        for share in (3, 2):
            while len(run.stored) < MESSAGES // share and not working.done():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(broker.kill)
            broker.spawn()
            await broker.ready()
        await asyncio.wait_for(working, 300)
    finally:
        broker.kill()

    assert run.acknowledged > MESSAGES // 2
    assert sum(run.received.values()) < 2 * MESSAGES  # few messages arrive twice

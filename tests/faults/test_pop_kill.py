"""kill -9 and clean stops of a broker among pop consumers.

No message whose send was acknowledged is lost: each is acked in the end. Messages may be delivered again. No
message is delivered while it is leased, unless a kill has destroyed the lease. COMETMQ_KILL_CYCLES sets the
number of cycles (6 here at most), COMETMQ_KILL_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.broker.pop.conftest import PopClient
from tests.faults.test_kill import CYCLES, SEED, TOPIC, BrokerProcess
from tests.kit.brokers import Peer

from cometmq.errors import RemotingError
from cometmq.protocol.codes import ResponseCode

MEMBERS = 3
MAX_INVISIBLE_MS = 2_000


class History:
    """What the clients know: acknowledged sends, deliveries, and acks with a response."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.delivered: Counter[str] = Counter()
        self.acked: set[str] = set()


async def produce(peer: Peer, history: History, cycle: int) -> None:
    with contextlib.suppress(RemotingError):
        for number in range(1_000_000):
            body = f"{cycle}-{number}"
            answer = await peer.send(TOPIC, body.encode(), number % 4)
            assert answer.code == 0, answer.remark
            history.sent.add(body)
            await asyncio.sleep(0.002)


async def consume(peer: Peer, history: History, dice: random.Random, *, patient: bool = False) -> None:
    """Pop and ack until the broker is gone. Some messages are given back, and some are forgotten."""
    consumer = PopClient(peer)
    with contextlib.suppress(RemotingError):
        while not patient or history.sent - history.acked:
            invisible_ms = dice.randrange(100, MAX_INVISIBLE_MS)
            found = await consumer.pop(dice.randint(1, 32), invisible_ms=invisible_ms, hold_ms=500)
            if found.code == ResponseCode.TOPIC_NOT_EXIST:
                await asyncio.sleep(0.01)
            for body, handle in zip(found.bodies, found.handles, strict=True):
                history.delivered[body] += 1
                fate = 1.0 if patient else dice.random()
                if fate < 0.1:
                    continue
                if fate < 0.2:
                    await consumer.renew(handle, dice.randrange(500))
                elif await consumer.ack(handle) == 0:
                    history.acked.add(body)


@pytest.mark.slow("kills and stops brokers while members pop")
async def test_no_message_is_lost_through_kills_and_stops(tmp_path: Path) -> None:
    print(f"COMETMQ_KILL_SEED={SEED}")
    dice, history = random.Random(SEED), History()
    broker = BrokerProcess(tmp_path)
    try:
        for cycle in range(min(CYCLES, 6)):
            broker.spawn()
            await broker.ready()
            peers = [Peer(broker.addr) for _ in range(MEMBERS + 1)]
            clients = [asyncio.create_task(produce(peers[0], history, cycle))]
            clients += [asyncio.create_task(consume(peer, history, dice)) for peer in peers[1:]]
            await asyncio.sleep(dice.uniform(0.5, 2))
            await asyncio.to_thread(broker.terminate if dice.random() < 0.4 else broker.kill)
            await asyncio.gather(*clients)
            for peer in peers:
                await peer.close()
        broker.spawn()
        await broker.ready()
        async with Peer(broker.addr) as peer, asyncio.timeout(120):
            await consume(peer, history, dice, patient=True)
        assert history.sent
        assert history.sent <= history.acked
    finally:
        await asyncio.to_thread(broker.kill)

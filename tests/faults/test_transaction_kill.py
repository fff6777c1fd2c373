"""kill -9 of the broker, or of the producer, at every step of a transaction: each ends once and correctly.

COMETMQ_KILL_CYCLES sets the number of kills of the broker under load (a fifth of it, 4 by default).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.faults.transaction_child import STEPS, Database
from tests.interop.comet import CometBroker, CometNamesrv

from cometmq import (
    CometError,
    Message,
    MessageExt,
    ProducerOptions,
    PullConsumer,
    PullStatus,
    TransactionProducer,
    TransactionState,
)

CYCLES = max(4, int(os.environ.get("COMETMQ_KILL_CYCLES", "12")) // 5)
TOPIC = "Orders"
COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
SOON = {"transactionCheckInterval": "200", "transactionTimeOut": "200", "transactionCheckMax": "10000"}
# Sends are not retried, since a message sent twice would be two transactions.
ONE_TRY = ProducerOptions(retry_times=0, send_timeout_s=10.0)


class Cluster:
    """A name server, and a broker that may be killed and restarts on the same port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = CometNamesrv(directory / "names")
        self.namesrv = f"127.0.0.1:{self.names.port}"
        self.port = 0
        self._count = itertools.count()
        self.start()

    def start(self) -> None:
        self.broker = CometBroker(
            self.directory / f"broker-{next(self._count)}", self.namesrv,
            port=self.port, store=self.directory / "store", settings=SOON,
        )  # fmt: skip
        self.port = self.broker.port

    def kill(self) -> None:
        self.broker.process.kill()

    def close(self) -> None:
        self.kill()
        self.names.process.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


async def seen(namesrv: str) -> Counter[str]:
    """Count the stored copies of each message."""
    found: Counter[str] = Counter()
    async with PullConsumer("reader", namesrv=namesrv) as consumer:
        for queue in await consumer.fetch_queues(TOPIC):
            offset = 0
            while True:
                result = await consumer.pull(queue, offset)
                offset = result.next_begin_offset
                found.update(message.body.decode() for message in result.messages)
                if result.status is PullStatus.NO_NEW_MSG:
                    break
    return found


async def settled(namesrv: str, listener: object, wanted: Counter[str], maybe: set[str]) -> None:
    """Let a producer answer checks until all wanted messages are there; check that there are no others."""
    finisher = TransactionProducer("PG", listener, topics=[TOPIC], namesrv=namesrv)  # type: ignore[arg-type]
    async with finisher, asyncio.timeout(60):
        while True:
            try:
                found = await seen(namesrv)
                if found.keys() >= wanted.keys():
                    break
            except CometError:
                pass  # the broker is still starting
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # further rounds of checks would store wrong messages now
        found = await seen(namesrv)
    assert {body: count for body, count in found.items() if body not in maybe} == dict(wanted)
    assert all(count == 1 for count in found.values())


# -- the producer dies -----------------------------------------------------------------------------


@pytest.mark.representative("told")
@pytest.mark.thorough("each moment of a transaction")
@pytest.mark.parametrize("step", STEPS)
async def test_a_producer_that_dies(step: str, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "database").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.faults.transaction_child", cluster.namesrv]
    done = await asyncio.to_thread(
        subprocess.run, [*command, str(tmp_path / "database"), step], env=environment, timeout=60
    )
    assert done.returncode == -9
    wanted = Counter() if step == "begun" else Counter([step])
    await settled(cluster.namesrv, Database(tmp_path / "database"), wanted, set())


# -- the broker dies -------------------------------------------------------------------------------


class Plans:
    """A listener that follows its messages' properties, and kills the broker at one step of one of them."""

    def __init__(self, cluster: Cluster, step: str) -> None:
        self.cluster = cluster
        self.step = step

    async def maybe_kill(self, step: str) -> None:
        if step == self.step:
            self.step = ""
            self.cluster.kill()
            await asyncio.to_thread(self.cluster.start)

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        del argument
        await self.maybe_kill("local")
        return TransactionState[message.properties["local"]]

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        await self.maybe_kill("asked")
        loop = asyncio.get_running_loop()
        self.later = [loop.create_task(self.after(0.002)) for _ in range(self.step == "answered")]
        return TransactionState[message.properties["check"]]

    async def after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.maybe_kill("answered")


@pytest.mark.representative("told")
@pytest.mark.thorough("each moment of a transaction")
@pytest.mark.parametrize("step", ["local", "told", "asked", "answered", "between"])
async def test_a_broker_that_dies(step: str, cluster: Cluster) -> None:
    listener = Plans(cluster, step)
    wanted: Counter[str] = Counter()
    producer = TransactionProducer("PG", listener, topics=[TOPIC], namesrv=cluster.namesrv, options=ONE_TRY)
    async with producer:
        for local, check in itertools.product(("COMMIT", "ROLLBACK", "UNKNOWN"), ("COMMIT", "ROLLBACK")):
            if "UNKNOWN" not in (local, check) and local != check:
                continue  # a decision must not change
            body = f"{local} {check}"
            message = Message(TOPIC, body.encode(), properties={"local": local, "check": check})
            while True:
                try:
                    await producer.send_in_transaction(message)
                except CometError:
                    await asyncio.sleep(0.1)
                else:
                    break
            if "COMMIT" in (local, check):
                wanted[body] += 1
            if step == "told":
                await listener.maybe_kill("told")
        if step == "between":
            await asyncio.sleep(0.3)  # the kill is near the check or its response
            await listener.maybe_kill("between")
    await settled(cluster.namesrv, listener, wanted, set())


class Certain:
    """A listener with a fixed outcome for each transaction; some outcomes are UNKNOWN at first."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        del argument
        return UNKNOWN if self.dice.random() < 0.3 else await self.check_local_transaction(message)

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return ROLLBACK if message.body.endswith(b"3") else COMMIT


async def under_load(
    producer: TransactionProducer, numbers: Iterator[int]
) -> AsyncIterator[tuple[str, bool]]:
    """Send messages until the broker is gone; yield each message and whether it was acknowledged."""
    while True:
        body = str(next(numbers))
        try:
            await producer.send_in_transaction(Message(TOPIC, body.encode()))
        except CometError:
            yield body, False
            return
        yield body, True


@pytest.mark.slow("kills brokers")
async def test_a_broker_that_dies_again_and_again_under_load(cluster: Cluster) -> None:
    numbers, dice = itertools.count(), random.Random(CYCLES)
    sure: set[str] = set()
    maybe: set[str] = set()
    for cycle in range(CYCLES):
        producer = TransactionProducer(
            "PG", Certain(cycle), topics=[TOPIC], namesrv=cluster.namesrv, options=ONE_TRY
        )

        async def send(producer: TransactionProducer = producer) -> None:
            async for body, certain in under_load(producer, numbers):
                (sure if certain else maybe).add(body)

        async with producer:
            senders = [asyncio.create_task(send()) for _ in range(16)]
            await asyncio.sleep(dice.uniform(0.3, 1.0))
            cluster.kill()
            await asyncio.gather(*senders)
        await asyncio.to_thread(cluster.start)
    assert len(sure) > 50 * CYCLES
    wanted = Counter(body for body in sure if not body.endswith("3"))
    await settled(cluster.namesrv, Certain(0), wanted, {body for body in maybe if not body.endswith("3")})

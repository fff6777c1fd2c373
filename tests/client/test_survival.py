"""Clients survive restarts of their servers, and a killed consumer's messages reach the remaining members."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.client.scenarios import FROM_FIRST, Ledger, bodies, fill
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq import BrokerError, Message, NoRouteError, Producer, ProducerOptions, PushConsumer
from cometmq.client import ClientOptions
from cometmq.errors import RemotingError
from cometmq.standalone import Standalone

QUICK = ClientOptions(route_interval_s=0.5, heartbeat_interval_s=0.5)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Standalone]:
    running = Standalone(tmp_path, free_port(), free_port())  # a restart must use the same ports
    await running.start()
    yield running
    await running.stop()


def ports(cluster: Standalone) -> tuple[int, int]:
    (broker_addr,) = cluster.broker_addrs.values()
    return int(cluster.namesrv_addr.rpartition(":")[2]), int(broker_addr.rpartition(":")[2])


async def test_a_restart_of_all_servers_is_survived(cluster: Standalone, tmp_path: Path) -> None:
    before, after = bodies(50, "before"), bodies(50, "after")
    ledger = Ledger()
    options = ProducerOptions(send_timeout_s=5.0, retry_times=20)
    namesrv_port, broker_port = ports(cluster)
    producer = Producer("p", namesrv=cluster.namesrv_addr, options=options, client_options=QUICK)
    consumer = PushConsumer(
        "g", ledger.listener, "T", namesrv=cluster.namesrv_addr, options=FROM_FIRST, client_options=QUICK
    )
    async with producer:
        await producer.send_many([Message("T", body) for body in before])
        async with consumer:
            await ledger.has_all(before)
            await cluster.stop()
            again = Standalone(tmp_path, namesrv_port, broker_port)
            await again.start()
            try:
                for body in after:
                    await send_at_last(producer, Message("T", body))
                await ledger.has_all(after)

                async def well() -> bool:
                    return consumer.health().ok

                await until(well, "the consumer well again")
            finally:
                await consumer.stop()
                await producer.stop()
                await again.stop()
    assert set(ledger.bodies) == {*before, *after}


async def send_at_last(producer: Producer, message: Message) -> None:
    """Send a message, and retry until the send succeeds, as a program does that must not lose messages."""

    async def sent() -> bool:
        try:
            await producer.send(message)
        except (RemotingError, BrokerError, NoRouteError):
            return False
        return True

    await until(sent, f"{message.body!r} sent")


CONSUMER = """
import asyncio, sys
from cometmq import *
async def main():
    async def listener(messages):
        for message in messages:
            print(message.body.decode(), flush=True)
        await asyncio.sleep(0.005)
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_concurrency=2)
    async with PushConsumer("g", listener, "T", namesrv=sys.argv[1], options=options):
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_what_a_killed_consumer_had_not_done_reaches_the_others(cluster: Standalone) -> None:
    sent = bodies(600)
    await fill(cluster.namesrv_addr, "T", sent)
    ledger = Ledger()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, cluster.namesrv_addr, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    printed: list[bytes] = []
    try:
        async with asyncio.timeout(30):
            while len(printed) < 100:
                printed.append((await process.stdout.readline()).strip())
        async with PushConsumer("g", ledger.listener, "T", namesrv=cluster.namesrv_addr, options=FROM_FIRST):
            os.kill(process.pid, signal.SIGKILL)
            printed += (await process.stdout.read()).split()
            await process.wait()
            await ledger.wait_until(
                lambda ledger: ledger.bodies.keys() | set(printed) >= set(sent),
                "every message consumed by one of them",
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert ledger.bodies.keys() | set(printed) == set(sent)
    assert max(ledger.bodies.values()) == 1


async def test_a_producer_outlives_a_broker_restart_without_loss(cluster: Standalone, tmp_path: Path) -> None:
    namesrv_port, broker_port = ports(cluster)
    acknowledged: list[bytes] = []
    stop = asyncio.Event()

    async def keep_sending(producer: Producer) -> None:
        number = 0
        while not stop.is_set():
            body = b"%d" % number
            await send_at_last(producer, Message("T", body))
            acknowledged.append(body)
            number += 1

    async with Producer("p", namesrv=cluster.namesrv_addr, client_options=QUICK) as producer:
        sending = asyncio.create_task(keep_sending(producer))

        async def reached(count: int) -> bool:
            return len(acknowledged) >= count

        await until(lambda: reached(100), "100 messages sent")
        await cluster.stop()
        again = Standalone(tmp_path, namesrv_port, broker_port)
        await again.start()
        try:
            target = len(acknowledged) + 100
            await until(lambda: reached(target), "100 more messages sent")
            stop.set()
            await sending
            ledger = Ledger()
            async with PushConsumer(
                "g", ledger.listener, "T", namesrv=again.namesrv_addr, options=FROM_FIRST
            ):
                await ledger.has_all(acknowledged)
        finally:
            await again.stop()

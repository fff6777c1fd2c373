"""Pops of groups that have a rate limit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.broker.lite.conftest import LiteClient, set_group, set_up
from tests.broker.pop.conftest import PopClient
from tests.broker.rates.conftest import limit_group
from tests.kit.brokers import create, running
from tests.kit.waiting import until
from tests.store.cold_disk import ColdDisk

from cometmq.broker.pop.polls import THROTTLED, PollKey


class TestARateLimit:
    async def test_a_group_pops_at_its_rate(self, cluster, peer, consumer):
        await limit_group(peer, messages=20)
        await peer.send_numbers(35)
        bodies, began = [], time.monotonic()
        while len(bodies) < 35:
            bodies += (await consumer.pop(hold_ms=20_000)).bodies
        assert time.monotonic() - began >= 0.6
        assert bodies == [str(number) for number in range(35)]
        assert cluster.broker.parts.rates.delayed_receives["G", "group"] >= 1

    async def test_bytes_count_and_acks_and_notifications_do_not_wait(self, cluster, peer, consumer):
        await limit_group(peer, bytes=500)
        await peer.send(body=bytes(1_000))
        await peer.send(body=b"next")
        first = await consumer.pop(1)
        assert len(first.messages) == 1
        assert (await consumer.pop(hold_ms=100)).code == 210
        assert await consumer.ack(first.handles[0]) == 0
        assert (await consumer.notification()).ext["hasMsg"] == "true"
        began = time.monotonic()
        assert (await consumer.pop(hold_ms=20_000)).bodies == ["next"]
        assert time.monotonic() - began >= 0.2

    async def test_pops_that_wait_for_the_disk_do_not_share_tokens(self, tmp_path):
        async with running(tmp_path) as (_, peer):
            await create(peer, read=8, write=8)
            for number in range(64):
                await peer.send(queue_id=number % 8)
        disk = ColdDisk()
        async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (broker, peer):
            await limit_group(peer, messages=8)
            now_ms = broker.parts.rates.now_ms()
            broker.parts.rates.now_ms = lambda: now_ms  # No token is added
            disk.cold = True
            disk.go_on.clear()
            consumer = PopClient(peer)
            pops = [asyncio.create_task(consumer.pop(queue_id=number)) for number in range(8)]
            await until(lambda: sum(pop.done() for pop in pops) == 7)
            disk.go_on.set()
            assert sum(len(popped.messages) for popped in await asyncio.gather(*pops)) == 8

    async def test_a_throttled_pop_is_not_woken_by_messages_but_can_be_withdrawn(
        self, cluster, peer, consumer
    ):
        await limit_group(peer, bytes=1)
        await peer.send_numbers(2)
        await consumer.pop(1)
        polls = cluster.broker.parts.pops.pops.polls
        waiting = asyncio.create_task(consumer.pop(hold_ms=50_000))
        await until(lambda: len(polls) == 1)
        (pop,) = polls.wake_group("G", "", THROTTLED)
        cluster.broker.parts.pops.pops.serve(pop)
        await peer.send_numbers(3)
        assert cluster.broker.parts.rates.delayed_receives["G", "group"] == 2
        cluster.broker.parts.pops.pops.withdraw(pop.owner, pop.opaque)
        assert (await waiting).code == 210
        assert len(polls) == 0

    async def test_after_the_wait_a_pop_waits_for_messages(self, cluster, peer, consumer):
        await limit_group(peer, messages=5)
        await peer.send_numbers(5)
        assert len((await consumer.pop()).messages) == 5
        waiting = asyncio.create_task(consumer.pop(hold_ms=50_000))
        polls = cluster.broker.parts.pops.pops.polls
        await until(lambda: polls.count(PollKey("G", "Orders", -1)) == 1)
        await peer.send_numbers(3)
        assert (await waiting).bodies == ["0"]


async def test_lite_pops_that_wait_for_the_disk_do_not_share_tokens(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(8)]
    async with running(tmp_path) as (_, peer):
        await set_up(peer)
        for name in names:
            await LiteClient(peer).send(name, "first", "second")
    disk = ColdDisk()
    async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (broker, peer):
        await set_group(peer, orderly=True, rates={"messages": 4})
        clients = [LiteClient(peer, name) for name in names]
        for client in clients:
            await client.subscribe(client.client_id)
        now_ms = broker.parts.rates.now_ms()
        broker.parts.rates.now_ms = lambda: now_ms  # No token is added
        disk.cold = True
        disk.go_on.clear()
        popping = [asyncio.create_task(client.pop(2)) for client in clients]
        await until(lambda: sum(each.done() for each in popping) == 6)
        disk.go_on.set()
        assert sum(len(popped.messages) for popped in await asyncio.gather(*popping)) == 4

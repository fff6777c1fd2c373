"""Consumers of lite topics with a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.broker.lite.conftest import GROUP, PARENT, set_group, set_up
from tests.kit.brokers import Cluster, records, running
from tests.kit.waiting import until

from cometmq import ConsumeFromWhere, LiteConsumer, Message, Producer, SimpleOptions, SyncLiteConsumer
from cometmq.client.simple import lite
from cometmq.errors import BrokerError, ConfigError, MessageIllegal
from cometmq.message import MessageExt, MessageQueue
from cometmq.standalone import Standalone

OPTIONS = SimpleOptions(wait_s=20)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Standalone(tmp_path, 0, 0) as standalone:
        running = Cluster(standalone)
        await set_up(running.peer())
        yield running
        await running.close_peers()


@pytest.fixture
async def producer(cluster: Cluster) -> AsyncIterator[Producer]:
    async with Producer("P", namesrv=cluster.namesrv_addr) as running:
        yield running


def consumer_of(cluster: Cluster, *names: str) -> LiteConsumer:
    return LiteConsumer(GROUP, PARENT, names, namesrv=cluster.namesrv_addr, options=OPTIONS)


async def send(producer: Producer, name: str, *bodies: str) -> None:
    for body in bodies:
        await producer.send(Message(PARENT, body.encode(), lite_topic=name))


async def take(consumer: LiteConsumer, count: int) -> list[str]:
    found: list[MessageExt] = []
    while len(found) < count:
        more = await consumer.receive()
        assert more
        await consumer.ack(*more)
        found += more
    return [each.body.decode() for each in found]


async def test_it_receives_from_its_lite_topics(cluster: Cluster, producer: Producer) -> None:
    async with consumer_of(cluster, "s1") as consumer:
        await send(producer, "s1", "1", "2")
        await send(producer, "s2", "other")
        assert await take(consumer, 2) == ["1", "2"]
        await consumer.subscribe("s2", "s3")
        assert await take(consumer, 1) == ["other"]
        await consumer.unsubscribe("s1", "s2")
        await send(producer, "s1", "unheard")
        waiting = asyncio.create_task(take(consumer, 1))
        await send(producer, "s3", "heard")
        assert await waiting == ["heard"]
        assert consumer.lite_topics == {"s3"}
        subscriptions = cluster.broker.parts.lite.subscriptions
        assert subscriptions.count == 1
    assert subscriptions.count == 0


async def test_a_lease_is_changed_and_a_message_becomes_a_dead_letter(
    cluster: Cluster, producer: Producer
) -> None:
    await send(producer, "s1", "poison", "good")
    async with consumer_of(cluster, "s1") as consumer:
        (first,) = await consumer.receive()
        await consumer.change_invisibility(first, 0)
        (again,) = await consumer.receive()
        assert (again.body, again.reconsume_times) == (b"poison", 1)
        await consumer.dead_letter(again)
        assert await take(consumer, 1) == ["good"]
        (dead,) = records(await cluster.peer().pull(f"%DLQ%{GROUP}"))
        assert dead.body == b"poison"


async def test_a_subscription_may_set_the_offset(cluster: Cluster, producer: Producer) -> None:
    await send(producer, "s1", "1", "2")
    async with consumer_of(cluster) as consumer:
        await consumer.subscribe("s1", start=ConsumeFromWhere.LAST_OFFSET)
        await send(producer, "s1", "3")
        assert await take(consumer, 1) == ["3"]
        await consumer.subscribe("s1", start=ConsumeFromWhere.FIRST_OFFSET)
        assert await take(consumer, 3) == ["1", "2", "3"]
        with pytest.raises(ConfigError, match="FIRST_OFFSET or LAST_OFFSET"):
            await consumer.subscribe("s1", start=ConsumeFromWhere.TIMESTAMP)


async def test_another_member_of_an_exclusive_group_takes_over(cluster: Cluster, producer: Producer) -> None:
    await set_group(cluster.peer(), sub_model="Exclusive")
    async with consumer_of(cluster, "s1") as consumer, consumer_of(cluster) as other:
        assert await consumer.receive(wait_s=0) == []
        await other.subscribe("s1")
        await until(lambda: not consumer.lite_topics)
        await send(producer, "s1", "1")
        assert await take(other, 1) == ["1"]


async def test_a_wildcard_group_needs_no_names(cluster: Cluster, producer: Producer) -> None:
    await set_group(cluster.peer(), sub_wildcard="true")
    async with consumer_of(cluster) as consumer:
        await send(producer, "s1", "1")
        await send(producer, "s2", "2")
        assert sorted(await take(consumer, 2)) == ["1", "2"]


async def test_it_receives_from_all_brokers_of_the_parent_topic(
    cluster: Cluster, producer: Producer, tmp_path: Path
) -> None:
    settings = {"brokerName": "broker-b", "namesrvAddr": cluster.namesrv_addr}
    async with running(tmp_path / "b", **settings) as (broker, peer):
        await set_up(peer)
        async with consumer_of(cluster, "s1") as consumer:
            for name in ("broker-a", "broker-b"):
                message = Message(PARENT, name.encode(), lite_topic="s1")
                await producer.send(message, queue=MessageQueue(PARENT, name, 0))
            assert sorted(await take(consumer, 2)) == ["broker-a", "broker-b"]
            waiting = asyncio.create_task(take(consumer, 1))
            message = Message(PARENT, b"later", lite_topic="s1")
            await producer.send(message, queue=MessageQueue(PARENT, "broker-b", 0))
            assert await waiting == ["later"]
            assert broker.parts.lite.subscriptions.count == 1


async def test_subscriptions_are_repeated(
    cluster: Cluster, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite, "REPEAT_S", 0.05)
    async with consumer_of(cluster, "s1") as consumer:
        assert await consumer.receive(wait_s=0) == []
        (subscriber,) = cluster.broker.parts.lite.subscriptions
        cluster.broker.parts.lite.unsubscribe(subscriber, ["s1", *subscriber.lmqs])
        await send(producer, "s1", "1")
        assert await take(consumer, 1) == ["1"]


async def test_refusals_name_the_reason(cluster: Cluster) -> None:
    for name in ("a b", "x" * 65, ""):
        with pytest.raises(MessageIllegal, match="1 to 64 letters"):
            consumer_of(cluster, name)
    await set_group(cluster.peer(), sub_client_quota="1")
    async with consumer_of(cluster, "s1") as consumer:
        assert await consumer.receive(wait_s=0) == []
        with pytest.raises(BrokerError, match="the quota of the client is 1"):
            await consumer.subscribe("s2")
        assert consumer.lite_topics == {"s1"}


async def test_without_an_event_loop(cluster: Cluster, producer: Producer) -> None:
    await send(producer, "s1", "1")

    def consume() -> bytes:
        with SyncLiteConsumer(GROUP, PARENT, namesrv=cluster.namesrv_addr, options=OPTIONS) as consumer:
            consumer.subscribe("s1")
            (message,) = consumer.receive()
            consumer.ack(message)
            assert consumer.lite_topics == {"s1"}
            return message.body

    assert await asyncio.to_thread(consume) == b"1"

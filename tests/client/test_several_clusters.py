"""Two clusters in one process with equal topic and group names: no message comes from the wrong cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cometmq import (
    Admin,
    ClientInstance,
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageStream,
    Producer,
    PushConsumer,
    PushOptions,
    SyncProducer,
    SyncPullConsumer,
)
from cometmq.testing import LocalBroker, local_broker

FIRST = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
TOPIC, GROUP = "Shared", "g-shared"


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalBroker]]:
    """Start two clusters whose brokers have the same name, too."""
    with ExitStack() as stack:
        names = ("east", "west")
        yield {name: stack.enter_context(local_broker(tmp_path_factory.mktemp(name))) for name in names}


@pytest.mark.parametrize("shared", [False, True], ids=["own connections", "an instance for each cluster"])
async def test_each_client_sees_its_own_cluster(clusters: dict[str, LocalBroker], shared: bool) -> None:
    topic = f"{TOPIC}-{shared}"
    got: dict[str, set[bytes]] = {name: set() for name in clusters}
    complete = {name: asyncio.Event() for name in clusters}

    async def work(name: str, cluster: LocalBroker) -> None:
        async def listener(messages: list[MessageExt]) -> None:
            got[name].update(message.body for message in messages)
            if len(got[name]) == 50:
                complete[name].set()

        client = ClientInstance(cluster.namesrv) if shared else None
        at = {"client": client} if client is not None else {"namesrv": cluster.namesrv}
        async with (
            Producer(GROUP, **at) as producer,  # type: ignore[arg-type]
            PushConsumer(GROUP, listener, topic, options=FIRST, **at) as consumer,  # type: ignore[arg-type]
        ):
            await producer.send_many([Message(topic, f"{name}-{number}".encode()) for number in range(50)])
            await complete[name].wait()
            assert consumer.health().ok
        if client is not None:
            await client.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(name, cluster) for name, cluster in clusters.items()))
    assert got == {name: {f"{name}-{number}".encode() for number in range(50)} for name in clusters}


async def test_the_offsets_of_a_group_are_those_of_its_cluster(clusters: dict[str, LocalBroker]) -> None:
    for name, cluster in clusters.items():
        async with (
            asyncio.timeout(60),
            Producer("p", namesrv=cluster.namesrv) as producer,
            MessageStream("g-offsets", "Offsets", namesrv=cluster.namesrv, options=FIRST) as stream,
        ):
            await producer.send(Message("Offsets", name.encode()))
            message = await anext(stream)
            assert message.body == name.encode()
            await stream.ack(message)
            assert sum((await stream.lag()).values()) == 0
        async with Admin(cluster.namesrv) as admin:
            assert "Offsets" in (await admin.topics())


def test_blocking_clients_share_a_thread_and_no_cluster(clusters: dict[str, LocalBroker]) -> None:
    east, west = clusters.values()
    with (
        SyncProducer("p", namesrv=east.namesrv) as to_east,
        SyncProducer("p", namesrv=west.namesrv) as to_west,
        SyncPullConsumer("g-blocking", namesrv=east.namesrv) as in_east,
        SyncPullConsumer("g-blocking", namesrv=west.namesrv) as in_west,
    ):
        to_east.send(Message("Blocking", b"east"))
        to_west.send(Message("Blocking", b"west"))
        for consumer, body in ((in_east, b"east"), (in_west, b"west")):
            queues = consumer.fetch_queues("Blocking")
            bodies = [message.body for queue in queues for message in consumer.pull(queue, 0).messages]
            assert bodies == [body]

"""Our client and Java's in the same namespace, on our broker and on Apache's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.client.scenarios import FROM_FIRST, PATIENT, Ledger, bodies
from tests.interop.driver import Driver, body_of, message
from tests.interop.space import Cluster, Space
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ClientOptions,
    ConsumeFromWhere,
    Message,
    Producer,
    PushConsumer,
    PushOptions,
)
from cometmq.client import AllocateByConsistentHash

SPACE = "tenant-1"


@pytest.fixture(params=[("ours", "4.9.8"), ("5.5.0", "5.5.0")], ids=lambda each: f"{each[0]}-java-{each[1]}")
def space(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    apache_clusters: Callable[[str], Cluster],
    java_clients: Callable[[str], Driver],
) -> Iterator[Space]:
    servers, client = request.param
    one = Space(java_clients(client), cluster if servers == "ours" else apache_clusters(servers))
    yield one
    one.close()


async def test_members_of_both_kinds_share_a_group_of_a_namespace(space: Space) -> None:
    ledger, namesrv, topic = Ledger(), space.cluster.namesrv, space.topic
    options = ClientOptions(namespace=SPACE, api_timeout_s=30.0)
    async with (
        ClientInstance(namesrv, options) as client,
        Producer("p", client=client, options=PATIENT) as ours,
    ):
        await ours.send(Message(topic, b"makes the topic"))
        async with PushConsumer(
            space.group, ledger.listener, topic, client=client, options=FROM_FIRST
        ) as consumer:
            await ledger.has_all([b"makes the topic"])
            theirs = await asyncio.to_thread(space.push, namespace=SPACE)

            async def shared() -> bool:
                return len([queue for queue in consumer.assignment if queue.topic == topic]) == 2

            await until(shared, "the queues shared evenly")
            sender = await asyncio.to_thread(space.producer, namespace=SPACE)
            by_us, by_java = bodies(40, "us"), bodies(40, "java")
            await ours.send_many(Message(topic, body) for body in by_us)
            sent = [message(topic, body) for body in by_java]
            await asyncio.to_thread(space.java.send, sender, sent)
            wanted = {*by_us, *by_java}
            await ledger.wait_until(lambda ledger: len(wanted & set(ledger.bodies)) >= 30, "a share of ours")

            def all_came() -> bool:
                got = {body_of(each) for each in space.java.delivered(theirs)} | set(ledger.bodies)
                return wanted <= got

            await until(lambda: asyncio.to_thread(all_came), "all")
    received = space.java.delivered(theirs)
    assert {each["topic"] for each in received} == {topic} == {each.topic for each in ledger.messages}
    every = [each.body for each in ledger.messages] + [body_of(each) for each in received]
    assert Counter(body for body in every if body in wanted) == Counter(wanted)


async def test_members_of_both_kinds_share_by_the_same_hash(space: Space) -> None:
    """The hash is that of names with the namespace.

    A queue with two owners delivers its message twice, and a queue without an owner never.
    """
    ledger, namesrv, topic = Ledger(), space.cluster.namesrv, space.topic
    options = ClientOptions(namespace=SPACE, api_timeout_s=30.0)
    hashing = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET, allocate_strategy=AllocateByConsistentHash()
    )
    async with (
        ClientInstance(namesrv, options) as client,
        Producer("p", client=client, options=PATIENT) as ours,
    ):
        await ours.send(Message(topic, b"makes the topic"))
        async with PushConsumer(
            space.group, ledger.listener, topic, client=client, options=hashing
        ) as consumer:
            await ledger.has_all([b"makes the topic"])
            theirs = await asyncio.to_thread(space.push, namespace=SPACE, consistentHash=True)
            queues = await client.read_queues(topic)

            async def shared() -> bool:
                members = await client.consumer_ids(topic, space.group)
                wrapped = sorted(client.namespace.wrap_queue(queue) for queue in queues)
                mine = AllocateByConsistentHash().allocate(client.client_id, wrapped, sorted(members))
                held = {queue for queue in consumer.assignment if queue.topic == topic}
                return len(members) == 2 and held == {client.namespace.unwrap_queue(queue) for queue in mine}

            await until(shared, "the queues shared by hash")
            wanted = {b"in queue %d" % queue.queue_id for queue in queues}
            for queue in queues:
                await ours.send(Message(topic, b"in queue %d" % queue.queue_id), queue=queue)

            def got() -> list[bytes]:
                return [each.body for each in ledger.messages] + [
                    body_of(each) for each in space.java.delivered(theirs)
                ]

            async def all_came() -> bool:
                return wanted <= set(await asyncio.to_thread(got))

            await until(all_came, "all")
    assert Counter(body for body in got() if body in wanted) == Counter(wanted)

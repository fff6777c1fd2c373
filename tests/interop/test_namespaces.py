"""Our client and Java's in the same namespace, on our broker and on Apache's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.client.scenarios import FROM_FIRST, PATIENT, Ledger, bodies, until
from tests.interop.driver import Driver, body_of, message
from tests.interop.space import Cluster, Space

from cometmq import ClientInstance, ClientOptions, Message, Producer, PushConsumer

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

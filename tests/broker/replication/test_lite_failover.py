"""Lite topics when a slave becomes the master, and when another member leads a raft group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.broker.lite.conftest import GROUP, PARENT, LiteClient, set_up
from tests.broker.replication.conftest import Group
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.broker.replication.test_pop_failover import AS_MASTER
from tests.kit.brokers import refused
from tests.kit.waiting import until

from cometmq.broker.admin import lite as lite_admin
from cometmq.broker.replication import raft
from cometmq.broker.server import Broker
from cometmq.protocol.lite import lmq_name

S1, S2 = lmq_name(PARENT, "s1"), lmq_name(PARENT, "s2")


def queues_of(broker: Broker) -> Any:
    return broker.parts.lite.queues


async def copied(group: Group) -> None:
    """Let the slave copy the master's log and tables."""
    await group.equal()
    await group.brokers["slave"].parts.replication.sync.sync()


async def pair(group: Group) -> tuple[Broker, Broker]:
    """Start a master with a parent topic, and a slave that has copied it."""
    master, slave = await group.master(), await group.slave()
    await group.known()
    await set_up(group.peers["master"])
    await copied(group)
    return master, slave


async def test_a_slave_that_becomes_the_master_serves_the_lite_topics(group: Group) -> None:
    _, slave = await pair(group)
    client = LiteClient(group.peers["master"])
    await client.send("s1", "1", "2", "3", queue_id=1)
    await client.send("s2", "other")
    await client.subscribe("s1", "s2")
    assert sorted(await client.take(2)) == ["1", "other"]
    await copied(group)
    lite = slave.parts.lite
    assert (lite.queues.end(S1), lite.queues.end(S2)) == (3, 1)
    assert (lite.queues.query(GROUP, S1, 0), lite.queues.query(GROUP, S2, 0)) == (1, 1)
    refused(await LiteClient(group.peers["slave"]).change("PARTIAL_ADD", "s1"), 1, "this broker is a slave")
    await group.stop("master")
    await group.stop("slave")
    await group.again("slave", **AS_MASTER)
    client = LiteClient(group.peers["slave"])
    await client.send("s1", "4")
    assert await client.take(3) == ["2", "3", "4"]


async def test_a_slave_copies_changed_offsets_alone(group: Group, monkeypatch: Any) -> None:
    monkeypatch.setattr(lite_admin, "OFFSETS_PER_PAGE", 2)
    master, slave = await pair(group)
    client = LiteClient(group.peers["master"])
    names = [f"s{number}" for number in range(5)]
    for name in names:
        await client.send(name, name)
    await client.subscribe(*names)
    assert sorted(await client.take(5)) == names
    await copied(group)
    assert [queues_of(slave).query(GROUP, lmq_name(PARENT, name), 0) for name in names] == [1] * 5
    queues_of(slave).commit(GROUP, S1, 0, 0)
    queues_of(master).commit(GROUP, S2, 0, 0)
    await copied(group)
    assert queues_of(slave).query(GROUP, S1, 0) == 0  # Not copied once more
    assert queues_of(slave).query(GROUP, S2, 0) == 0  # A smaller offset is copied, too
    await group.stop("master")
    await group.again("master")
    await copied(group)
    assert queues_of(slave).query(GROUP, S1, 0) == 1  # The master was restarted: all are copied
    client = LiteClient(group.peers["master"])
    assert (await client.change("PARTIAL_REMOVE", *names[1:])).code == 0
    await copied(group)
    assert queues_of(slave).subscriptions() == [("c1", GROUP, PARENT, lmq_name(PARENT, "s0"))]


async def test_a_slave_notices_that_a_parent_topic_was_created_again(group: Group) -> None:
    _, slave = await pair(group)
    client = LiteClient(group.peers["master"])
    await client.send("s1", "old", "old")
    await client.send("s2", "old")
    await group.equal()
    assert (await group.peers["master"].delete_topic(PARENT)).code == 0
    lite = group.brokers["master"].parts.lite
    await until(lambda: lite.queues.count == 0)
    await set_up(group.peers["master"])
    await until(lambda: lite.parent_queues.is_ready(PARENT))
    await client.send("s1", "new")
    await copied(group)
    await slave.parts.lite.check()
    lite = slave.parts.lite
    assert (lite.queues.count, lite.queues.end(S1), lite.queues.end(S2)) == (1, 1, 0)


async def test_the_next_leader_of_a_raft_group_serves_the_lite_topics(
    tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    monkeypatch.setattr(raft, "SYNC_S", 0.05)
    async with RaftGroup(tmp_path) as group:
        first = await group.leader()
        await set_up(group.peers[first])
        client = LiteClient(group.peers[first])
        lite = group.brokers[first].parts.lite
        await until(lambda: lite.is_open and lite.parent_queues.is_ready(PARENT))
        await client.send("s1", "1", "2")
        await client.subscribe("s1")
        assert await client.take(1) == ["1"]
        followers = group.followers()
        # A follower opens its database once it has the parent topic.
        await until(lambda: all(group.brokers[each].parts.lite.is_open for each in followers))
        await until(lambda: {queues_of(group.brokers[each]).query(GROUP, S1, 0) for each in followers} == {1})
        refused((await LiteClient(group.peers[followers[0]]).pop()).answer, 1, "slave")
        second = followers[0]
        await until(lambda: queues_of(group.brokers[second]).subscriptions() == [("c1", GROUP, PARENT, S1)])
        await group.hand_over(second)
        client = LiteClient(group.peers[second])
        assert await client.take(1) == ["2"]  # Without a new subscription
        await client.send("s1", "3")
        assert await client.take(1) == ["3"]
        follower = group.brokers[first].parts.lite
        await until(lambda: follower.queues.query(GROUP, S1, 0) == 3)
        await group.hand_over(first)  # It led before: its old leases and subscriptions do not matter
        client = LiteClient(group.peers[first])
        await client.send("s1", "4")
        assert await client.take(1) == ["4"]


@pytest.mark.slow("leaders change under load")
async def test_no_message_of_a_lite_topic_is_lost_or_out_of_order_when_leaders_change(
    tmp_path: Any, monkeypatch: Any
) -> None:
    """Messages may be delivered again, but the first deliveries are in the order of the sends."""
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    monkeypatch.setattr(raft, "SYNC_S", 0.05)
    names = [f"s{number}" for number in range(4)]
    sent: dict[str, list[str]] = {name: [] for name in names}
    first: dict[str, list[str]] = {name: [] for name in names}
    async with RaftGroup(tmp_path) as group:
        leader = await group.leader()
        await set_up(group.peers[leader])
        done = asyncio.Event()

        async def send(name: str) -> None:
            number = 0
            while not done.is_set():
                number += 1
                answer = await LiteClient(group.peers[leader]).send(name, f"{name}-{number}")
                if answer.code == 0:  # A refused one may be stored or not
                    sent[name].append(f"{name}-{number}")
                await asyncio.sleep(0.005)

        async def consume() -> None:
            while not all(set(sent[name]) <= set(first[name]) for name in names) or not done.is_set():
                client = LiteClient(group.peers[leader])
                await client.change("COMPLETE_ADD", *names)
                popped = await client.pop(hold_ms=200)
                for number, message in enumerate(popped.messages):
                    body = message.body.decode()
                    known = first[message.properties["__LITE_TOPIC"]]
                    if body not in known:
                        known.append(body)
                    await client.ack(popped, number)

        working = [asyncio.create_task(send(name)) for name in names]
        consuming = asyncio.create_task(consume())
        for _ in range(3):
            count = sum(map(len, sent.values()))
            await until(lambda count=count: sum(map(len, sent.values())) > count + 40)
            following = next(each for each in group.brokers if each != leader)
            await group.hand_over(following)
            leader = following
        await until(lambda: sum(map(len, sent.values())) > 200)
        done.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*working, consuming)
    for name in names:
        assert [body for body in first[name] if body in set(sent[name])] == sent[name]

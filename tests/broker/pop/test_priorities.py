"""Messages with priorities: the queues to which sends go, and the order in which pops read."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.pop.conftest import RETRY_TOPIC, V5, offset_in
from tests.kit.brokers import create, take
from tests.kit.waiting import until

from cometmq.broker.pop import pops

PRIORITY = "_SYS_MSG_PRIORITY_"


@pytest.fixture
async def urgent(cluster, peer):
    """Return a function that sends a message with a priority to a topic of four priorities."""
    await create(peer, read=4, write=4, version=V5, attributes="+message.type=PRIORITY")

    async def send(priority, body=None, **more):
        answer = await peer.send(
            body=b"%d" % priority if body is None else body, properties={PRIORITY: str(priority), **more}
        )
        return int(answer.ext["queueId"])

    return send


async def test_the_priority_is_the_queue(urgent):
    assert [await urgent(priority) for priority in (0, 2, 3, 9, 2**31, -1)] == [0, 2, 3, 3, 3, 0]


@pytest.mark.parametrize(
    "other",
    [{"DELAY": "1"}, {"__SHARDINGKEY": "g"}, {"TIMER_DELAY_MS": "5"}, {"TRAN_MSG": "true", "PGROUP": "P"}],
)
async def test_a_message_of_another_kind_loses_its_priority(peer, urgent, other):
    for _ in range(3):  # The headers of half messages are cached from the second one on
        assert await urgent(2, **other) == 0
    name = "RMQ_SYS_TRANS_HALF_TOPIC" if "TRAN_MSG" in other else "Orders"
    for message in await take(peer, name, 3):
        assert PRIORITY not in message.properties


async def test_pops_read_the_highest_priority_first(urgent, consumer):
    for priority in (1, 0, 3, 2, 3):
        await urgent(priority)
    assert [(await consumer.pop(1)).bodies[0] for _ in range(3)] == ["3", "3", "2"]
    assert (await consumer.pop()).bodies == ["1", "0"]


async def test_the_factor_of_a_group_is_its_share_of_such_pops(urgent, peer, consumer, monkeypatch):
    await peer.set_group(b'{"groupName":"G","attributes":{"priority.factor":"40"}}')
    await urgent(3)
    await urgent(0)
    monkeypatch.setattr(pops.random, "randrange", lambda end: 40 if end == 100 else 0)
    assert (await consumer.pop(1)).bodies == ["0"]


async def test_a_retry_keeps_its_priority(cluster, urgent, peer, consumer, monkeypatch):
    monkeypatch.setattr(pops, "RETRY_FIRST", 0.0)
    for priority in (0, 1, 3):
        await urgent(priority)
    found = await consumer.pop()
    assert found.bodies == ["3", "1", "0"]
    for handle in reversed(found.handles):
        await consumer.renew(handle, 0)
    store = cluster.broker.parts.store
    await until(lambda: [store.max_offset(RETRY_TOPIC, each) for each in range(4)] == [1, 1, 0, 1])
    await urgent(2)
    again = await consumer.pop()
    assert (again.bodies, again.handles[0].queue_id) == (["3", "2", "1", "0"], 3)
    (retry, *_) = again.handles
    await consumer.renew(retry, 0)
    assert (await consumer.pop_until(5)).messages[0].reconsume_times == 2
    assert offset_in(cluster, 3, RETRY_TOPIC) == 1


async def test_a_retry_in_any_queue_wakes_a_parked_pop(cluster, urgent, consumer):
    await urgent(3)
    (handle,) = (await consumer.pop()).handles
    waiting = asyncio.create_task(consumer.pop(hold_ms=20_000))
    await until(lambda: len(cluster.broker.parts.pops.pops.polls))
    await consumer.renew(handle, 0)
    assert (await waiting).bodies == ["3"]


async def test_the_retry_topic_of_a_topic_that_gets_priorities_grows(cluster, peer, consumer):
    cluster.broker.parts.tables.topics.ensure(RETRY_TOPIC, 1)
    await create(peer, read=4, write=4, version=V5, attributes="+message.type=PRIORITY")
    await peer.send(body=b"1", properties={PRIORITY: "2"})
    (handle,) = (await consumer.pop()).handles
    await consumer.renew(handle, 0)
    assert (await consumer.pop_until(5)).handles[0].queue_id == 2

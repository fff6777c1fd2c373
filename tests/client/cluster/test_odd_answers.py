"""Malformed responses of name servers and brokers are reported, limited in cost, and stop nothing else."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.fakes import Box, ignore
from tests.kit.fakes import FakeBroker, FakeNamesrv, pull_answer
from tests.kit.waiting import until

from cometmq import Message, Producer, PullConsumer, PushConsumer
from cometmq.client.cluster import broker_api
from cometmq.errors import BodyError
from cometmq.protocol.bodies import BrokerData, ConsumerList, QueueData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame


@pytest.mark.parametrize("addr", ["..:1", "a\0b:1", "x" * 100 + ":1", "no port"])
async def test_an_address_that_is_none_ends_no_consumer(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box, addr: str, caplog: pytest.LogCaptureFixture
) -> None:
    route = namesrv.routes["T"]
    route.queue_datas.append(QueueData(broker_name="broker-x", read_queue_nums=1, write_queue_nums=1))
    route.broker_datas.append(BrokerData(broker_name="broker-x", broker_addrs={0: addr}))
    broker.store("T", 0, b"a")
    async with box.consumer() as member:
        await box.has(1)
        problems = member.health().problems
    assert any("broker-x" in problem for problem in problems)
    assert "contains invalid addresses" in caplog.text
    async with Producer("p", namesrv=namesrv.addr) as producer:
        for _ in range(3):
            assert (await producer.send(Message("T", b"x"))).queue.broker_name == "broker-a"


async def test_a_route_of_a_billion_queues_is_refused_by_name(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    for data in namesrv.routes["T"].queue_datas:
        data.read_queue_nums = data.write_queue_nums = 1_000_000_000

    async with PushConsumer("g", ignore, "T", namesrv=namesrv.addr) as member:
        assert any("topic T has 1000000000 queues" in problem for problem in member.health().problems)
    async with Producer("p", namesrv=namesrv.addr) as producer:
        with pytest.raises(BodyError, match="a client accepts 262144 at most"):
            await producer.send(Message("T", b"x"))


async def test_a_group_of_too_many_members_is_named(
    namesrv: FakeNamesrv, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_api, "MAX_MEMBERS", 10)
    body = ConsumerList(consumer_id_list=[f"c{number}" for number in range(11)]).encode()
    broker.on(RequestCode.GET_CONSUMER_LIST_BY_GROUP, lambda frame: frame.response(0, body=body))

    async with PushConsumer("g", ignore, "T", namesrv=namesrv.addr) as member:
        assert any("group g has 11 members" in problem for problem in member.health().problems)
        assert member.assignment == ()


@pytest.mark.parametrize("kind", ["push", "pull"])
@pytest.mark.parametrize(
    ("code", "next_offset", "most"),
    [
        (ResponseCode.PULL_NOT_FOUND, 0, 20),
        (ResponseCode.SUCCESS, 0, 20),
        (ResponseCode.PULL_OFFSET_MOVED, 5, 5),
    ],
)
async def test_a_broker_that_holds_no_pulls_is_not_asked_too_fast(
    namesrv: FakeNamesrv, broker: FakeBroker, kind: str, code: ResponseCode, next_offset: int, most: int
) -> None:
    asked = 0

    def nothing_new(frame: Frame) -> Frame:
        nonlocal asked
        asked += 1
        return pull_answer(frame, code, next_offset, 10)

    broker.on(RequestCode.PULL_MESSAGE, nothing_new)
    if kind == "push":
        async with PushConsumer("g", ignore, "T", namesrv=namesrv.addr):
            await until(lambda: asked)
            await asyncio.sleep(0.3)
    else:
        async with PullConsumer("g", namesrv=namesrv.addr) as consumer:
            await consumer.assign_topic("T")
            await until(lambda: asked)
            await asyncio.sleep(0.3)
    assert asked <= most  # without a delay there would be thousands

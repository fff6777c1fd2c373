"""Tests with name servers that hang, stop, come back, or disagree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import Message, NoRouteError, Producer, ProducerOptions, SendStatus
from cometmq.client.cluster import instance
from cometmq.client.cluster.namesrv_api import NamesrvApi
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.errors import BodyError, BrokerError, ConnectError
from cometmq.protocol.codes import ORDER_TOPIC_CONFIG, RequestCode, ResponseCode
from cometmq.protocol.headers import GetKVConfigResponseHeader
from cometmq.remoting import RemotingClient

NOBODY = "127.0.0.1:1"


@pytest.fixture
async def other(broker: FakeBroker) -> AsyncIterator[FakeNamesrv]:
    async with FakeNamesrv() as server:
        server.serve("T", broker, queues=1)
        yield server


@asynccontextmanager
async def api(*addrs: str, current: str, timeout_s: float = 3.0) -> AsyncIterator[NamesrvApi]:
    """Create an API that sends its first request to `current`."""
    remoting = RemotingClient()
    names = NamesrvApi(remoting, [current], timeout_s)
    names.use(addrs)
    yield names
    await remoting.close()


async def test_one_that_hangs_is_passed_over_within_a_send(namesrv: FakeNamesrv, other: FakeNamesrv) -> None:
    namesrv.hangs = True
    async with Producer("p", namesrv=f"{namesrv.addr};{other.addr}") as producer:
        producer.client.namesrv.current = namesrv.addr
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        assert producer.client.namesrv.current == other.addr


async def test_one_that_is_gone_is_passed_over_at_once(namesrv: FakeNamesrv) -> None:
    async with asyncio.timeout(30), api(NOBODY, namesrv.addr, current=NOBODY, timeout_s=90.0) as names:
        await names.route("T")
        assert names.current == namesrv.addr
        assert await names.route("T")
    assert namesrv.asked == ["T", "T"]


async def test_one_that_answers_is_kept_though_another_would_too(
    namesrv: FakeNamesrv, other: FakeNamesrv
) -> None:
    async with api(namesrv.addr, other.addr, current=other.addr) as names:
        for _ in range(5):
            await names.route("T")
    assert (namesrv.asked, len(other.asked)) == ([], 5)


async def test_what_one_does_not_know_is_asked_of_the_others(
    namesrv: FakeNamesrv, other: FakeNamesrv, broker: FakeBroker
) -> None:
    other.serve("U", broker)
    async with api(NOBODY, namesrv.addr, other.addr, current=namesrv.addr) as names:
        assert (await names.route("U")).broker_datas[0].broker_name == "broker-a"
        assert names.current == namesrv.addr  # the only name server that responds
        with pytest.raises(NoRouteError) as caught:
            await names.route("nowhere")
        assert [addr for addr, _ in caught.value.asked] == [namesrv.addr, other.addr, NOBODY]


@pytest.mark.parametrize("queues", [None, 10**9], ids=["no route", "a billion queues"])
async def test_one_that_answers_nonsense_is_passed_over(
    namesrv: FakeNamesrv, broker: FakeBroker, queues: int | None
) -> None:
    async with FakeNamesrv() as broken:
        if queues is None:
            broken.serve("T")
            broken.routes["T"] = Mock(encode=lambda: b"nonsense")
        else:
            broken.serve("T", broker, queues=queues)
        async with Producer("p", namesrv=f"{broken.addr};{namesrv.addr}") as producer:
            producer.client.namesrv.current = broken.addr
            assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
            assert producer.client.namesrv.current == namesrv.addr
        async with Producer("p", namesrv=broken.addr) as producer:
            with pytest.raises(BodyError):
                await producer.send(Message("T", b"x"))


async def test_an_order_configuration_that_one_lost_is_asked_of_the_others(
    namesrv: FakeNamesrv, other: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.QUERY_NOT_FOUND)
    namesrv.serve("TBW102", broker)
    conf = GetKVConfigResponseHeader(value="broker-b:4")
    other.on(RequestCode.GET_KV_CONFIG, lambda frame: frame.response(header=conf))
    async with Producer("p", namesrv=f"{namesrv.addr};{other.addr}") as producer:
        producer.client.namesrv.current = namesrv.addr
        with pytest.raises(NoRouteError, match=r"ordered, and the brokers of its queues \(broker-b:4\)"):
            await producer.send(Message("Ordered", b"x"))
        other.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.QUERY_NOT_FOUND)
        assert (await producer.send(Message("Ordered", b"x"))).status is SendStatus.SEND_OK


async def test_an_order_configuration_is_not_waited_for_if_a_name_server_hangs(
    namesrv: FakeNamesrv, other: FakeNamesrv, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "_ORDER_CONFIG_S", 0.1)
    namesrv.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.QUERY_NOT_FOUND)
    namesrv.serve("TBW102", broker)
    other.on(RequestCode.GET_KV_CONFIG, lambda frame: None)
    options = ProducerOptions(send_timeout_s=2.5)  # less than the timeout of a request to a name server
    async with Producer("p", namesrv=f"{namesrv.addr};{other.addr}", options=options) as producer:
        assert (await producer.send(Message("New", b"x"))).status is SendStatus.SEND_OK


async def test_a_key_is_absent_if_one_has_no_value_and_none_has_one(
    namesrv: FakeNamesrv, other: FakeNamesrv
) -> None:
    other.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.SYSTEM_BUSY)
    async with api(NOBODY, namesrv.addr, other.addr, current=other.addr) as names:
        namesrv.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.QUERY_NOT_FOUND)
        assert await names.kv_config(ORDER_TOPIC_CONFIG, "T") is None
        names.use([other.addr])
        with pytest.raises(BrokerError, match="refused"):
            await names.kv_config(ORDER_TOPIC_CONFIG, "T")
        names.use([NOBODY])
        with pytest.raises(ConnectError):
            await names.kv_config(ORDER_TOPIC_CONFIG, "T")


async def test_the_template_is_not_looked_up_while_no_name_server_answers(namesrv: FakeNamesrv) -> None:
    namesrv.hangs = True
    async with Producer("p", namesrv=namesrv.addr) as producer:
        producer.client.namesrv.timeout_s = 0.05
        with pytest.raises(NameServersUnreachable):
            await producer.client.publish_route("New")
    assert namesrv.asked == ["New"]
    assert RequestCode.GET_KV_CONFIG not in namesrv.requests


async def test_where_two_disagree_the_current_one_counts_until_it_is_gone(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    async with FakeBroker("broker-b") as newer, api(namesrv.addr, current=namesrv.addr) as names:
        async with FakeNamesrv() as other:
            other.serve("T", broker, newer)
            names.use([namesrv.addr, other.addr])
            names.current = other.addr
            for _ in range(3):
                assert len((await names.route("T")).broker_datas) == 2
        assert len((await names.route("T")).broker_datas) == 1
        assert names.current == namesrv.addr


async def test_a_list_that_is_replaced_keeps_the_current_one(namesrv: FakeNamesrv) -> None:
    async with api("a:1", "b:1", current="a:1") as names:
        names.use(["c:1", "a:1"])
        assert names.current == "a:1"
        names.use(["c:1"])
        assert names.current == "c:1"
        names.use([])
        with pytest.raises(NoRouteError, match="no name server was asked"):
            await names.route("T")
        names.use([namesrv.addr])
        assert await names.route("T")


async def test_a_host_name_is_an_address_too(namesrv: FakeNamesrv) -> None:
    port = namesrv.addr.rpartition(":")[2]
    async with Producer("p", namesrv=f"localhost:{port}") as producer:
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK

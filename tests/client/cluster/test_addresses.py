"""Brokers reached at an address other than the registered one: a forwarded port, or the VIP channel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    Admin,
    ClientOptions,
    ConnectError,
    ConsumeFromWhere,
    Message,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullOptions,
)
from cometmq.protocol.addresses import vip_address
from cometmq.protocol.bodies import BrokerData, QueueData, TopicRouteData
from cometmq.protocol.codes import RequestCode
from cometmq.testing import LocalBroker, local_broker


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """Start a broker that registers an address that is unreachable from here, as one in a container may."""
    with local_broker(tmp_path_factory.mktemp("broker"), {"brokerIP1": "192.0.2.1"}) as running:
        yield running


async def use(namesrv: str, options: ClientOptions, send_timeout_s: float = 60.0) -> bytes:
    """Send a message, look it up by id, and consume it."""
    once = ProducerOptions(retry_times=0, send_timeout_s=send_timeout_s)
    async with Producer("p", namesrv=namesrv, options=once, client_options=options) as producer:
        await producer.create_topic("TBW102", "Mapped", 1)
        sent = await producer.send(Message("Mapped", b"x"))
        assert (await producer.view_message(sent.msg_id, "Mapped")).body == b"x"
    first = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PullConsumer("g", namesrv=namesrv, options=first, client_options=options) as consumer:
        (message,) = (await consumer.pull(sent.queue, sent.queue_offset)).messages
    async with Admin(namesrv, options=options) as admin:
        assert "Mapped" in await admin.topics()
    return bytes(message.body)


async def test_a_broker_is_connected_where_the_map_says(
    hidden: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = hidden.broker_addr.rpartition(":")[2]
    with pytest.raises(ConnectError, match=r"192\.0\.2\.1"):
        await use(hidden.namesrv, ClientOptions(), 1.0)
    by_port = {f"192.0.2.1:{port}": f"127.0.0.1:{port}"}
    for mapped in (by_port, {"192.0.2.1": "127.0.0.1"}):
        assert await use(hidden.namesrv, ClientOptions(address_map=mapped)) == b"x"
    monkeypatch.setenv("COMETMQ_ADDRESS_MAP", f"192.0.2.1:{port}=127.0.0.1:{port}")
    assert await use(hidden.namesrv, ClientOptions()) == b"x"


async def test_what_is_not_in_the_map_is_connected_as_it_is(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    options = ClientOptions(address_map={"127.0.0.1:1": "127.0.0.1:2", "elsewhere": "127.0.0.9"})
    async with Producer("p", namesrv=namesrv.addr, client_options=options) as producer:
        await producer.send(Message("T", b"x"))
        with pytest.raises(ConnectError):
            await producer.client.remoting.connect("127.0.0.1:1")
    assert len(broker.sent) == 1


@pytest.mark.parametrize(
    ("addr", "vip"), [("a:10911", "a:10909"), ("[::1]:10911", "[::1]:10909"), ("a:2", "a:2"), ("a:3", "a:1")]
)
def test_the_vip_channel_is_two_ports_below(addr: str, vip: str) -> None:
    assert vip_address(addr) == vip


async def test_sends_go_to_the_vip_channel_if_that_is_asked_for() -> None:
    async with FakeBroker() as vip, FakeNamesrv() as namesrv:
        host, _, port = vip.addr.rpartition(":")
        namesrv.routes["T"] = TopicRouteData(
            queue_datas=[QueueData(broker_name="broker-a", read_queue_nums=1, write_queue_nums=1, perm=6)],
            broker_datas=[
                BrokerData(cluster="C", broker_name="broker-a", broker_addrs={0: f"{host}:{int(port) + 2}"})
            ],
        )
        options = ClientOptions(vip_channel=True)
        async with Producer("p", namesrv=namesrv.addr, client_options=options) as producer:
            await producer.send(Message("T", b"x"))
            await producer.send_oneway(Message("T", b"y"))
            await vip.wait_for(lambda: len(vip.sent) == 2)
    assert set(vip.requests) == {RequestCode.SEND_MESSAGE_V2}

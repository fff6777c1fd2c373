"""Registration with every name server, in time, and without delay by an unreachable one."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from tests.kit.brokers import Peer, create
from tests.kit.fakes import FakeServer
from tests.kit.waiting import until
from tests.namesrv.conftest import running as name_server

from cometmq.protocol.bodies import RegisterBrokerBody, TopicRouteData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    CreateTopicRequestHeader,
    GetRouteInfoRequestHeader,
    RegisterBrokerRequestHeader,
)


async def route(addr: str, topic: str) -> TopicRouteData | None:
    async with Peer(addr) as peer:
        answer = await peer.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))
    return TopicRouteData.decode(answer.body) if answer.code == 0 else None


async def test_every_name_server_knows_the_broker_and_forgets_it_when_it_stops(tmp_path, start_cluster):
    async with name_server(tmp_path) as second, name_server(tmp_path) as third:
        addresses = [f"127.0.0.1:{server.port}" for server in (second, third)]
        cluster = await start_cluster(namesrvAddr=";".join(addresses))
        await create(cluster.peer())
        for addr in addresses:
            found = await route(addr, "Orders")
            assert found.broker_datas[0].broker_addrs == {0: cluster.addr}
            assert found.queue_datas[0].write_queue_nums == 2
        await cluster.close_peers()
        await cluster.standalone.stop()
        for addr in addresses:
            assert await route(addr, "Orders") is None


async def test_a_dead_and_a_deaf_name_server_do_not_hold_up_the_living_one(tmp_path, start_cluster):
    deaf = socket.create_server(("127.0.0.1", 0))  # the backlog accepts connections; no response is ever sent
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead_port = closed.getsockname()[1]
    async with name_server(tmp_path) as living:
        addresses = f"127.0.0.1:{dead_port};127.0.0.1:{deaf.getsockname()[1]};127.0.0.1:{living.port}"
        # The start waits for all name servers.
        cluster = await start_cluster(namesrvAddr=addresses, registerBrokerTimeoutMills="200")
        cluster.broker.parts.registrar.config.register_broker_timeout_mills = 60_000
        await cluster.peer().send("Fresh")
        async with asyncio.timeout(30):
            while await route(f"127.0.0.1:{living.port}", "Fresh") is None:
                await asyncio.sleep(0.005)
    deaf.close()


async def test_a_name_server_that_comes_later_is_told_by_the_periodic_registration(
    tmp_path, start_cluster, monkeypatch
):
    monkeypatch.setattr("cometmq.broker.base.config.BrokerConfig.register_period_ms", 50)
    async with name_server(tmp_path) as late:
        port = late.port
    cluster = await start_cluster(namesrvAddr=f"127.0.0.1:{port}")
    await create(cluster.peer())
    async with name_server(tmp_path, listenPort=str(port)), asyncio.timeout(60):
        while await route(f"127.0.0.1:{port}", "Orders") is None:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("compressed", [False, True])
async def test_what_is_sent(start_cluster, compressed):
    seen = []

    def register(frame):
        header = frame.header(RegisterBrokerRequestHeader)
        seen.append(
            (header, RegisterBrokerBody.decode(bytes(frame.body), bool(header.compressed), frame.version))
        )
        return frame.response(0, ext={})

    async with FakeServer({RequestCode.REGISTER_BROKER: register}) as server:
        cluster = await start_cluster(
            namesrvAddr=server.addr, compressedRegister=str(compressed).lower(), brokerIP2="127.0.0.9"
        )
        header, body = seen[-1]
        ha_port = cluster.broker.parts.registrar.address.ha_port
        assert (header.broker_name, header.broker_id) == ("broker-a", 0)
        assert header.cluster_name == "DefaultCluster"
        assert (header.broker_addr, header.ha_server_addr) == (cluster.addr, f"127.0.0.9:{ha_port}")
        assert bool(header.compressed) is compressed
        topics = cluster.broker.parts.tables.topics
        assert body.data_version == topics.version
        assert set(body.topics) == set(topics.table)
        peer = cluster.peer()
        count = len(seen)
        await asyncio.gather(*(peer.send(f"T{n}") for n in range(50)))
        await until(lambda: len(seen[-1][1].topics) == len(topics.table))
        assert len(seen) - count < 50  # simultaneous changes share one registration
        await cluster.close_peers()
        await cluster.standalone.stop()


async def test_the_topics_of_a_broker_always_fit_into_a_registration(start_cluster, monkeypatch):
    """A frame above the size limit is never sent: one topic too many would unregister the broker."""
    cluster = await start_cluster()
    parts = cluster.broker.parts
    peer = cluster.peer()
    start = parts.tables.topics.registered_bytes
    for number, name in enumerate(("BYTES_BY_SEND", "BYTES_BY_GROUPS", "MAX_REGISTRATION_BYTES"), 1):
        monkeypatch.setattr(f"cometmq.broker.tables.topics.{name}", start + number * 5000)
    table = parts.tables.topics.table

    async def until_refused(make):
        for number in range(30):
            before = len(table)
            answer = await make(number)
            if answer.code or len(table) == before:
                return answer
        raise AssertionError("there is no end")

    sent = await until_refused(lambda n: peer.send(f"{n}".rjust(127, "t")))
    beaten = await until_refused(lambda n: peer.heartbeat(group=f"{n}".rjust(120, "g"), topics={}))
    header = CreateTopicRequestHeader(
        topic="", read_queue_nums=1024, write_queue_nums=1024, perm=6, topic_sys_flag=-(2**31),
        attributes="+message.type=TRANSACTION,+retention.bytes=100000000000000000",
    )  # fmt: skip
    made = await until_refused(
        lambda n: peer.call(17, msgspec.structs.replace(header, topic=f"{n}".rjust(127, "a")))
    )
    assert (sent.code, beaten.code, made.code) == (17, 0, 1)
    assert "only administrators can create topics" in sent.remark
    assert f"{start + 15_000}" in made.remark
    name = "0".rjust(127, "t")
    longer = [
        await peer.call(17, msgspec.structs.replace(header, topic=f"{n}".rjust(127, "t"))) for n in range(10)
    ]
    assert longer[-1].code == 1
    assert (await peer.send(name)).code == 0
    assert (
        len(parts.registrar.registration()[1]) < start + 15_000 < 2 * len(parts.registrar.registration()[1])
    )
    assert (await peer.delete_topic(name)).code == 0
    counted = parts.tables.topics.registered_bytes
    await cluster.restart()
    assert cluster.broker.parts.tables.topics.registered_bytes == counted

"""Registration: with every name server, in time, and never held up by a dead one."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from tests.broker.conftest import Peer, until

from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.bodies import RegisterBrokerBody, TopicRouteData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    CreateTopicRequestHeader,
    DeleteTopicRequestHeader,
    GetRouteInfoRequestHeader,
    RegisterBrokerRequestHeader,
)
from cometmq.remoting import RemotingServer


async def name_server(directory) -> NameServer:
    directory.mkdir()
    config = NamesrvConfig(
        listen_port=0,
        bind_address="127.0.0.1",
        kv_config_path=str(directory / "kv.json"),
        config_store_path=str(directory / "namesrv.properties"),
    )
    server = NameServer(config)
    await server.start()
    return server


async def route(addr: str, topic: str) -> TopicRouteData | None:
    peer = Peer(addr)
    answer = await peer.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))
    await peer.close()
    return TopicRouteData.decode(answer.body) if answer.code == 0 else None


async def create(peer: Peer, topic: str) -> None:
    header = CreateTopicRequestHeader(topic=topic, read_queue_nums=2, write_queue_nums=2, perm=6)
    assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0


async def test_every_name_server_knows_the_broker_and_forgets_it_when_it_stops(tmp_path, start_cluster):
    second, third = await name_server(tmp_path / "n2"), await name_server(tmp_path / "n3")
    addresses = [f"127.0.0.1:{server.port}" for server in (second, third)]
    cluster = await start_cluster(namesrvAddr=";".join(addresses))
    await create(cluster.peer(), "Orders")
    for addr in addresses:
        found = await route(addr, "Orders")
        assert found.broker_datas[0].broker_addrs == {0: cluster.addr}
        assert found.queue_datas[0].write_queue_nums == 2
    await cluster.close_peers()
    await cluster.standalone.stop()
    for addr in addresses:
        assert await route(addr, "Orders") is None
    await second.stop()
    await third.stop()


async def test_a_dead_and_a_deaf_name_server_do_not_hold_up_the_living_one(tmp_path, start_cluster):
    living = await name_server(tmp_path / "living")
    deaf = socket.create_server(("127.0.0.1", 0))  # accepts by backlog, never answers
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead_port = closed.getsockname()[1]
    addresses = f"127.0.0.1:{dead_port};127.0.0.1:{deaf.getsockname()[1]};127.0.0.1:{living.port}"
    cluster = await start_cluster(namesrvAddr=addresses, registerBrokerTimeoutMills="300")
    await cluster.peer().send("Fresh")
    async with asyncio.timeout(0.25):
        while await route(f"127.0.0.1:{living.port}", "Fresh") is None:
            await asyncio.sleep(0.005)
    deaf.close()
    await living.stop()


async def test_a_name_server_that_comes_later_is_told_by_the_periodic_registration(
    tmp_path, start_cluster, monkeypatch
):
    monkeypatch.setattr("cometmq.broker.base.config.BrokerConfig.register_period_ms", 50)
    late = await name_server(tmp_path / "late")
    port = late.port
    await late.stop()
    cluster = await start_cluster(namesrvAddr=f"127.0.0.1:{port}")
    await create(cluster.peer(), "Orders")
    late = NameServer(
        NamesrvConfig(
            listen_port=port,
            bind_address="127.0.0.1",
            kv_config_path=str(tmp_path / "late" / "kv.json"),
            config_store_path=str(tmp_path / "late" / "n.properties"),
        )
    )
    await late.start()
    async with asyncio.timeout(5):
        while await route(f"127.0.0.1:{port}", "Orders") is None:
            await asyncio.sleep(0.02)
    await late.stop()


@pytest.mark.parametrize("compressed", [False, True])
async def test_what_is_sent(start_cluster, compressed):
    seen = []

    def register(_connection, frame):
        header = frame.header(RegisterBrokerRequestHeader)
        seen.append(
            (header, RegisterBrokerBody.decode(bytes(frame.body), bool(header.compressed), frame.version))
        )
        return frame.response(0, ext={})

    server = RemotingServer({RequestCode.REGISTER_BROKER: register})
    port = await server.start("127.0.0.1", 0)
    cluster = await start_cluster(
        namesrvAddr=f"127.0.0.1:{port}", compressedRegister=str(compressed).lower(), brokerIP2="127.0.0.9"
    )
    header, body = seen[-1]
    broker_port = cluster.broker.port
    assert (header.broker_name, header.cluster_name, header.broker_id) == ("broker-a", "DefaultCluster", 0)
    assert (header.broker_addr, header.ha_server_addr) == (cluster.addr, f"127.0.0.9:{broker_port + 1}")
    assert bool(header.compressed) is compressed
    topics = cluster.broker.parts.tables.topics
    assert body.data_version == topics.version
    assert set(body.topics) == set(topics.table)
    peer = cluster.peer()
    count = len(seen)
    await asyncio.gather(*(peer.send(f"T{n}") for n in range(50)))
    await until(lambda: len(seen[-1][1].topics) == len(topics.table))
    assert len(seen) - count < 50  # changes that come together leave together
    await cluster.close_peers()
    await cluster.standalone.stop()
    await server.stop()


async def test_the_topics_of_a_broker_always_fit_into_a_registration(start_cluster, monkeypatch):
    """A frame too long is never sent: a broker with one topic too many would be in no route any more."""
    cluster = await start_cluster()
    parts = cluster.broker.parts
    peer = cluster.peer()
    start = parts.tables.topics.registered_bytes
    for number, name in enumerate(("BYTES_BY_SEND", "BYTES_BY_GROUPS", "BYTES_MAX"), 1):
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
    assert "only administrators make more" in sent.remark
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
    header = DeleteTopicRequestHeader(topic=name)
    assert (await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, header)).code == 0
    counted = parts.tables.topics.registered_bytes
    await cluster.restart()
    assert cluster.broker.parts.tables.topics.registered_bytes == counted

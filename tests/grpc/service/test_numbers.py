"""What metrics and tools show of gRPC clients."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.admin.test_metrics import METRICS, look, value
from tests.grpc.service.caller import SETTINGS, consumer_settings, message, producer_settings
from tests.kit.brokers import create
from tests.kit.waiting import until

from cometmq.admin import Admin
from cometmq.admin.commands import formats
from cometmq.grpc.rpc.enums import ClientType, Code
from cometmq.metrics import port


@pytest.fixture
async def measured(start_cluster, monkeypatch):
    monkeypatch.setattr(port, "KEEP_S", 0.0)
    monkeypatch.setattr(port, "REUSE_FACTOR", 0)
    cluster = await start_cluster(**SETTINGS, **METRICS)
    await create(cluster.peer(), "Orders", 1, 1)
    return cluster


async def online(caller, command, group="", kind=ClientType.PRODUCER):
    """Send a client's settings and a heartbeat. Return its telemetry stream."""
    stream = caller.telemetry()
    await stream.write(command)
    await stream.read()
    await caller.heartbeat(group, kind)
    return stream


async def test_calls_connections_and_clients_are_counted(measured, connect):
    caller = await connect(measured, x_mq_client_version="5.1.2")
    await caller.send(message())
    assert (await caller.send(message("no topic"))).status.code == Code.ILLEGAL_TOPIC
    assert len(await caller.receive(auto_renew=True, invisible_s=None)) == 1
    assert await caller.receive() == []
    polling = caller.receiving(caller.receive_request(poll_s=20))
    reading = asyncio.create_task(polling.read())
    await until(lambda: len(measured.broker.parts.pops.pops.polls))
    polling.cancel()
    await asyncio.wait([reading])
    stream = await online(caller, producer_settings("Orders"))
    async with asyncio.timeout(60):
        while True:
            found = await look(measured.broker.parts.metrics.port)
            calls = {
                (row["method"], row["code"]): number for row, number in found["cometmq_grpc_calls_total"]
            }
            if ("ReceiveMessage", "CANCELLED") in calls:
                break
    stream.cancel()
    node = {"node_type": "proxy", "node_id": "broker-a"}
    assert value(found, "rocketmq_proxy_up", **node, proxy_mode="local") == 1
    assert value(found, "cometmq_grpc_connections", **node) == 1
    assert value(found, "cometmq_grpc_clients", **node) == 1
    assert value(found, "cometmq_grpc_renewed_leases", **node) == 1
    assert calls == {
        ("SendMessage", "OK"): 1,
        ("SendMessage", "ILLEGAL_TOPIC"): 1,
        ("ReceiveMessage", "OK"): 1,
        ("ReceiveMessage", "MESSAGE_NOT_FOUND"): 1,
        ("ReceiveMessage", "CANCELLED"): 1,
        ("Heartbeat", "OK"): 1,
    }
    connections = {"language": "java", "version": "v5_1_2", "protocol_type": "grpc"}
    assert value(found, "rocketmq_producer_connections", **connections) == 1


@pytest.mark.parametrize(
    ("version", "shown"),
    [("5.0.8", "V5_0_8"), ("5.2.0-SNAPSHOT", "V5_2_0"), ("1.0.8", "V5_0_0"), ("5.10.0", "V5_0_0")],
)
async def test_tools_show_what_kind_of_client_it_is(measured, connect, version, shown):
    caller = await connect(measured, x_mq_client_version=version)
    stream = await online(caller, producer_settings("Orders"))
    simple = await connect(measured, "client-2", x_mq_client_version=version)
    second = await online(
        simple, consumer_settings("G", kind=ClientType.SIMPLE_CONSUMER), "G", ClientType.SIMPLE_CONSUMER
    )
    await caller.send(message())
    assert len(await simple.receive()) == 1
    async with Admin(measured.namesrv_addr) as admin:
        connected = await admin.consumer_connection("G")
        assert formats.client_version(connected.connection_set[0]) == f"{shown} gRPC SIMPLE_CONSUMER"
        (client,) = await admin.producer_connection("Orders", "Orders")
        assert formats.client_version(client) == f"{shown} gRPC PRODUCER"
        assert "grpcType=PRODUCER" in next(iter(formats.producers(await admin.producers(measured.addr))))
        members = await admin.subscriptions("G")
        assert members.consume_type == "CONSUME_POP"
        (member,) = members.members
        assert (member.grpc_type, member.language, member.problem) == ("SIMPLE_CONSUMER", "JAVA", "")
        assert member.subscriptions == {"Orders": "*"}
        (summary,) = [each for each in await admin.groups() if each.group == "G"]
        assert (summary.consume_type, summary.diff_total) == ("POP", 1)
        progress = await admin.progress("G")
        assert progress.leased_total == 1
        assert "Inflight Total: 1" in formats.group_progress(progress, show_client_ip=False, total=1)
    stream.cancel()
    second.cancel()


async def test_tools_show_a_trace_context(measured, connect):
    caller = await connect(measured)
    unique_key = "01" + 16 * "AB"
    await caller.send(message(message_id=unique_key, trace_context="00-4bf9-00f0-01"))
    async with Admin(measured.namesrv_addr) as admin:
        found = await admin.message_by_id(unique_key, "Orders")
    assert found.properties["TRACE_CONTEXT"] == "00-4bf9-00f0-01"

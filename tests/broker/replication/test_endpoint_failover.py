"""5.x clients of a raft group, and of a master and its slave: each member passes them on to the leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc.aio import AioRpcError
from tests.broker.replication.conftest import Group as MasterAndSlaves
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.grpc.service.caller import Caller, consumer_settings, message
from tests.grpc.serving import client
from tests.ports import free_port

from cometmq.broker.replication import raft
from cometmq.broker.server import Broker
from cometmq.grpc.rpc.enums import Code

pytestmark = pytest.mark.slow("elections of raft groups")
GRPC = {"autoCreateTopicEnable": "true", "brokerFastFailureEnable": "false"}


class EndpointGroup(RaftGroup):
    """A raft group whose members have endpoints for 5.x clients."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, **GRPC)
        self.endpoints = {member: free_port() for member in self.addresses}

    async def start(self, member: str, **settings: str) -> Broker:
        return await super().start(member, grpcPort=str(self.endpoints[member]), **settings)


@pytest.fixture
async def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EndpointGroup]:
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    async with EndpointGroup(tmp_path) as made:
        await made.leader()
        yield made


@pytest.fixture
async def connect() -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:

        async def connected(port: int, client_id: str = "client-1") -> Caller:
            return Caller(await stack.enter_async_context(client(port)), client_id)

        yield connected


async def sent(caller: Caller, body: bytes) -> None:
    """Send a message, again until it is stored."""

    async def stored() -> bool:
        try:
            response = await caller.send(message(body=body))
        except AioRpcError:
            return False
        return bool(response.status.code == Code.OK)

    async with asyncio.timeout(60):
        while not await stored():
            await asyncio.sleep(0.1)


async def received(caller: Caller, count: int) -> list[bytes]:
    """Receive and acknowledge messages."""
    bodies: list[bytes] = []
    async with asyncio.timeout(60):
        while len(bodies) < count:
            try:
                found = await caller.receive(count=1, poll_s=5)
            except AioRpcError:
                await asyncio.sleep(0.1)
                continue
            if found:
                assert (await caller.ack(*found)).status.code == Code.OK
            bodies += [each.body for each in found]
    return bodies


async def test_each_member_serves_5x_clients(group: EndpointGroup, connect: Any) -> None:
    leader = group.brokers[await group.leader()]
    callers = [await connect(port, f"client-{name}") for name, port in group.endpoints.items()]
    for number, caller in enumerate(callers):
        await sent(caller, b"%d" % number)
    bodies = [body for caller in callers for body in await received(caller, 1)]
    assert sorted(bodies) == [b"0", b"1", b"2"]
    assert leader.endpoint is not None
    assert {each.client_id for each in leader.endpoint.clients.connected} == {
        f"client-{name}" for name in group.endpoints
    }


async def test_clients_go_on_after_a_change_of_the_leader(group: EndpointGroup, connect: Any) -> None:
    leader = await group.leader()
    to, other = group.followers()
    callers = [await connect(group.endpoints[name], f"client-{name}") for name in (leader, to, other)]
    for caller in callers:
        await sent(caller, b"before")
    stream = callers[0].telemetry()
    await stream.write(consumer_settings())
    await stream.read()
    await group.hand_over(to)
    with pytest.raises(AioRpcError, match="is no longer the leader"):
        await stream.read()
    for caller in callers:
        await sent(caller, b"after")
    assert sorted(await received(callers[2], 6)) == [b"after"] * 3 + [b"before"] * 3
    endpoint = group.brokers[to].endpoint
    assert endpoint is not None
    assert len(endpoint.clients.connected) == 3


async def test_a_client_of_a_follower_goes_on_after_the_leader_has_stopped(
    group: EndpointGroup, connect: Any
) -> None:
    leader = await group.leader()
    caller = await connect(group.endpoints[group.followers()[0]])
    await sent(caller, b"before")
    await group.stop(leader)
    await sent(caller, b"after")
    assert sorted(await received(caller, 2)) == [b"after", b"before"]


async def test_a_slave_passes_clients_on_to_its_master(tmp_path: Path, connect: Any) -> None:
    pair = MasterAndSlaves(tmp_path)
    ports = {"master": free_port(), "slave": free_port()}
    try:
        master = await pair.master(grpcPort=str(ports["master"]), brokerRole="ASYNC_MASTER", **GRPC)
        await pair.slave(grpcPort=str(ports["slave"]), **GRPC)
        await pair.known()
        caller = await connect(ports["slave"])
        await sent(caller, b"1")
        assert await received(caller, 1) == [b"1"]
        assert master.endpoint is not None
        (found,) = master.endpoint.clients.connected
        assert found.peer[1] not in ports.values()
    finally:
        await pair.close()

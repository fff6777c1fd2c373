"""Pop consumers when a slave becomes the master, and when another member leads a raft group."""

from __future__ import annotations

import pytest
from tests.broker.pop.conftest import PopClient
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.kit.brokers import Peer, copy_running, create
from tests.kit.waiting import until

from cometmq.broker.replication import raft
from cometmq.protocol.codes import ResponseCode

AS_MASTER = {"brokerRole": "ASYNC_MASTER", "brokerId": "0"}
BODIES = ["m0", "m1", "m2", "m3"]


async def send_all(peer: Peer) -> None:
    await create(peer, "Orders", read=1, write=1)
    assert (await peer.set_group(b'{"groupName":"G"}')).code == 0
    for body in BODIES:
        assert (await peer.send(body=body.encode())).code == 0


async def is_refused(peer: Peer) -> bool:
    """Return whether a broker refuses pops and names the reason."""
    found = await PopClient(peer).pop()
    return found.code == ResponseCode.SYSTEM_ERROR and "this broker is a slave" in found.answer.remark


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("first_stopped", ["slave", "master"])
async def test_a_slave_that_becomes_the_master_loses_no_message(group, ordered, first_stopped):
    """If the master stops first, the slave gets the checkpoints that a clean stop writes."""
    await group.master()
    slave = await group.slave()
    await group.known()
    await send_all(group.peers["master"])
    consumer = PopClient(group.peers["master"])
    popped = await consumer.pop(order=ordered)
    assert popped.bodies == BODIES
    for number in (0, 2):
        assert await consumer.ack(popped.handles[number]) == 0
    await group.equal()
    await slave.parts.replication.sync.sync()
    assert await is_refused(group.peers["slave"])
    await group.stop(first_stopped)
    await group.stop("slave" if first_stopped == "master" else "master")
    await group.again("slave", **AS_MASTER)
    consumer = PopClient(group.peers["slave"])
    again = await consumer.pop(order=ordered)
    assert again.bodies == BODIES[1:]
    for handle in again.handles[:2]:
        assert await consumer.ack(handle) == 0
    if first_stopped == "slave":
        assert await consumer.ack(popped.handles[3]) == ResponseCode.NO_MESSAGE
    assert await consumer.ack(again.handles[2]) == 0
    assert (await consumer.pop(order=ordered)).code == ResponseCode.POLLING_TIMEOUT


async def test_leases_of_a_former_master_are_not_used_after_its_next_promotion(group):
    """The file names messages that were acked at offsets which other messages may have now."""
    broker = await group.master(brokerRole="ASYNC_MASTER")
    await send_all(group.peers["master"])
    consumer = PopClient(group.peers["master"])
    popped = await consumer.pop()
    for handle in popped.handles[1:]:
        assert await consumer.ack(handle) == 0
    await broker.parts.pops.lease_file.save_now()
    await broker.parts.tables.offsets_file.save_now()
    copy_running(group.root / "master", group.root / "killed")
    await group.slave("killed")
    await group.stop("killed")
    (group.root / "killed" / "abort").touch()
    await group.again("killed", **AS_MASTER)
    assert (await PopClient(group.peers["killed"]).pop()).bodies == BODIES


async def test_the_next_leader_of_a_raft_group_continues_at_the_first_message_that_is_not_acked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    monkeypatch.setattr(raft, "SYNC_S", 0.05)
    async with RaftGroup(tmp_path) as group:
        first = await group.leader()
        await send_all(group.peers[first])
        consumer = PopClient(group.peers[first])
        popped = await consumer.pop(order=True)
        assert popped.bodies == BODIES
        assert await consumer.ack(popped.handles[0]) == 0
        followers = group.followers()
        await until(lambda: {floor(group, member) for member in followers} == {1})
        assert await is_refused(group.peers[followers[0]])
        await group.stop(first)
        consumer = PopClient(group.peers[await group.leader()])
        assert await consumer.ack(popped.handles[3]) == 0  # an old handle, of a message that is not leased
        again = await consumer.pop(order=True)
        assert again.bodies == BODIES[1:3]
        assert await consumer.ack(popped.handles[1]) == ResponseCode.NO_MESSAGE  # it is leased again
        for handle in again.handles:
            assert await consumer.ack(handle) == 0
        assert (await consumer.pop(order=True)).code == ResponseCode.POLLING_TIMEOUT


def floor(group: RaftGroup, member: str) -> int:
    return group.brokers[member].parts.tables.offsets.query("G", "Orders", 0)

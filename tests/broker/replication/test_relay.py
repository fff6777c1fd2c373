"""Sends that reach a leader of a raft group while it hands over, and as a former leader."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.kit.brokers import Peer, records
from tests.kit.waiting import until

from cometmq.broker.replication import raft
from cometmq.broker.send import relay
from cometmq.protocol.codes import RequestCode, ResponseCode


@pytest.fixture
async def group(tmp_path, monkeypatch):
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    async with RaftGroup(tmp_path) as made:
        yield made


async def bodies(peer: Peer, **more: object) -> list[bytes]:
    return [bytes(message.body) for message in records(await peer.pull(**more))]


async def test_a_former_leader_passes_sends_on_and_other_followers_refuse_them(group, monkeypatch):
    leader = await group.leader()
    former = group.peers[leader]
    for number in range(3):  # the broker knows the header by then, and takes its shortcut
        assert (await former.send(body=b"%d" % number)).code == ResponseCode.SUCCESS
    to, other = group.followers()
    assert (await group.change(leader, "transfer", to)).code == ResponseCode.SUCCESS
    answers = await asyncio.gather(*(former.send(body=b"held %d" % number) for number in range(5)))
    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    await until(lambda: group.leads(to))
    answer = await former.send(body=b"relayed")
    assert (answer.code, answer.ext["queueOffset"]) == (ResponseCode.SUCCESS, "8")
    assert sorted(await bodies(group.peers[to])) == sorted(
        [b"0", b"1", b"2", b"relayed", *(b"held %d" % number for number in range(5))]
    )
    assert (await group.peers[other].send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
    refused = await former.send(body=b"", topic="Orders", queue_id=999)
    assert refused.code not in (ResponseCode.SUCCESS, ResponseCode.SERVICE_NOT_AVAILABLE)
    monkeypatch.setattr(relay, "RELAY_S", 0.0)
    group.brokers[leader].parts.replication.hand_over()
    assert (await former.send(body=b"late")).code == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_a_handoff_that_is_aborted_holds_sends_and_refuses_what_is_too_much(group, monkeypatch):
    leader = await group.leader()
    away = group.followers()[0]
    await group.stop(away)
    assert (await group.change(leader, "transfer", away)).code == ResponseCode.SUCCESS
    monkeypatch.setattr(relay, "MAX_HELD_BYTES", 1)
    held = asyncio.create_task(group.peers[leader].send(body=b"held"))
    await asyncio.sleep(0.05)
    refused = await group.peers[leader].send(body=b"too much")
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert (await held).code == ResponseCode.SUCCESS
    assert await bodies(group.peers[leader]) == [b"held"]


async def test_what_a_leader_may_have_stored_is_not_reported_as_refused(group, monkeypatch):
    leader = await group.leader()
    former = group.peers[leader]
    assert (await former.send(body=b"first")).code == ResponseCode.SUCCESS
    to = group.followers()[0]
    await group.hand_over(to)
    successor = group.brokers[to].parts
    monkeypatch.setattr(relay, "HOLD_S", 0.3)
    kept = []
    successor.server.override_handlers(
        [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2], lambda _connection, frame: kept.append(frame)
    )
    answer = await former.send(body=b"?")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "may have stored the message" in answer.remark
    assert [frame.flag for frame in kept] == [relay.RELAYED_FLAG]

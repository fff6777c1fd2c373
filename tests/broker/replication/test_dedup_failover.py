"""Deduplicated sends when a slave becomes the master, and when another member leads a raft group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.replication.conftest import Group
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.broker.replication.test_pop_failover import AS_MASTER
from tests.broker.send.test_dedup import BATCH, WINDOW, attributes, item, place, send, stored
from tests.kit.brokers import Peer, create
from tests.kit.waiting import until

from cometmq.broker.base.writer import NOT_COMMITTED
from cometmq.broker.replication import raft
from cometmq.protocol.batch import encode_batch

Answers = list[tuple[str, str, str]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)


async def send_all(peer: Peer) -> Answers:
    """Send plain, delayed and batched messages with keys. Return the answers of all but the batch."""
    found = [place(await send(peer, f"K{number}", queue_id=number % 3)) for number in range(30)]
    found.append(place(await send(peer, "level", properties={"DELAY": "15"})))
    timed = await send(peer, "timed", queue_id=2, properties={"TIMER_DELAY_SEC": "3600"})
    assert timed.ext is not None
    found.append((*place(timed)[:2], timed.ext["recallHandle"]))
    batch = encode_batch([item("K0"), item("B1"), item("B2")])
    ids, queue_id, offset = place(await peer.send(body=batch, code=BATCH, batch=True))
    assert (ids.split(",")[0], queue_id, offset) == found[0]
    return [*found, *((msg_id, "0", "") for msg_id in ids.split(",")[1:])]


async def check_all(peer: Peer, first: Answers) -> None:
    """Send the same messages again, and compare the answers with the first ones."""
    again = await send_all(peer)
    assert again == first


async def test_a_slave_that_becomes_the_master_knows_the_keys(group: Group) -> None:
    await group.master()
    slave = await group.slave()
    await group.known()
    await attributes(group.peers["master"], WINDOW)
    first = await send_all(group.peers["master"])
    await group.equal()
    assert slave.parts.replication.sync is not None
    await slave.parts.replication.sync.sync()
    assert not slave.parts.dedup.tables  # it needs none until its next start
    await group.stop("master")
    await group.stop("slave")
    await group.again("slave", **AS_MASTER)
    await check_all(group.peers["slave"], first)
    assert len(await stored(group.peers["slave"])) == 32


async def test_the_next_leader_knows_the_keys(tmp_path: Path, quick: None) -> None:
    """Also those of messages from before the attribute, and from before its own start."""
    async with RaftGroup(tmp_path) as group:
        leader = await group.leader()
        peer = group.peers[leader]
        await create(peer, "Orders", 4, 4)
        before = place(await send(peer, "before"))
        await attributes(peer, WINDOW)
        first = await send_all(peer)
        for _ in range(2):
            await group.equal()
            to = group.followers()[0]
            await group.hand_over(to)
            await group.leader()
            await check_all(group.peers[to], first)
            assert place(await send(group.peers[to], "before")) == before
        assert len(await stored(group.peers[to])) == 33


@pytest.mark.slow("elections, and a write that times out")
async def test_a_message_that_the_group_removed_is_not_a_duplicate(tmp_path: Path, quick: None) -> None:
    async with RaftGroup(tmp_path, slaveTimeout="300") as group:
        old = await group.leader()
        await attributes(group.peers[old], WINDOW)
        kept = place(await send(group.peers[old], "kept"))
        await group.equal()
        for member in group.followers():
            await group.stop(member)
        lost = await asyncio.gather(*(send(group.peers[old], "lost", body=b"one") for _ in range(2)))
        lost.append(await send(group.peers[old], "lost", body=b"two"))  # The first one still waits
        assert [answer.remark for answer in lost] == [NOT_COMMITTED] * 3
        await group.stop(old)
        others = [member for member in group.addresses if member != old]
        await asyncio.gather(*map(group.start, others))
        leader = await group.leader()
        second = place(await send(group.peers[leader], "lost", body=b"three"))
        await group.start(old)
        await group.equal()
        await group.hand_over(old)
        assert place(await send(group.peers[old], "lost")) == second
        assert place(await send(group.peers[old], "kept")) == kept
        assert await stored(group.peers[old]) == [b"hello", b"three"]


@pytest.mark.slow("elections, and a write that times out")
async def test_a_message_whose_commit_was_uncertain_gets_its_answer_once_it_is_committed(
    tmp_path: Path, quick: None
) -> None:
    async with RaftGroup(tmp_path, slaveTimeout="300") as group:
        leader = await group.leader()
        await attributes(group.peers[leader], WINDOW)
        for member in group.followers():
            await group.stop(member)
        assert (await send(group.peers[leader], "K")).remark == NOT_COMMITTED
        await asyncio.gather(*(group.start(member) for member in group.addresses if member != leader))
        await group.leader()
        await group.equal()
        now = await group.leader()
        await until(lambda: group.leads(now))
        first = place(await send(group.peers[now], "K"))
        assert place(await send(group.peers[now], "K")) == first
        assert len(await stored(group.peers[now])) == 1

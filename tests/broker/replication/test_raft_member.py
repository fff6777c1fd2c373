"""A single raft member, and the messages that its peers send in one tick."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until
from tests.ports import HOST, free_port
from tests.store.raft_log.members import add, elect, hand_over, leader, member, raft_log, seen

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication import raft_state, raft_wire
from cometmq.broker.replication.raft_member import RaftMember
from cometmq.errors import CometError, RaftMessageError, RaftRefused
from cometmq.protocol.codes import ResponseCode
from cometmq.raft import (
    AppendRequest,
    AppendResponse,
    HardState,
    Members,
    MembersEntry,
    RaftOptions,
    TransferRequest,
    VoteRequest,
    VoteResponse,
)
from cometmq.remoting import Tick
from cometmq.store import Clock, MessageStore

NAMES = ("n0", "n1", "n2")
START = MembersEntry(-1, -1, Members(frozenset(NAMES)))


class Desk:
    """A leader role whose preparation can be delayed."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.prepared = 0

    async def prepare(self) -> None:
        self.prepared += 1
        await self.open.wait()

    def lead(self) -> None: ...

    def follow(self) -> None: ...

    def met(self) -> None: ...

    def hand_over(self) -> None: ...

    async def copy_tables(self) -> None: ...


class Alone:
    """A member whose peers' messages the test writes."""

    def __init__(self, store: MessageStore, *names: str) -> None:
        self.desk = Desk()
        self.tick = Tick()
        self.store = store
        begun = HardState(members=(MembersEntry(-1, -1, Members(frozenset(names))),))
        raft_state.save(store.disk, raft_log(store).directory, begun, HardState())
        addresses = ";".join(f"{name}-{HOST}:{free_port()}" for name in names)
        config = BrokerConfig(store=store.config.replace(d_leger_peers=addresses))
        self.member = RaftMember(
            config, Clock(), store, self.tick,
            end_tick=lambda: None, leader_role=self.desk,
            options=RaftOptions(heartbeat_ms=20, election_ms=100),
        )  # fmt: skip
        self.member.stopped = False  # it runs without a start, so that it does not connect
        self.tick.at_end(self.member.end_tick)


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Alone]:
    made = Alone(member(tmp_path / "n0"), *NAMES)
    yield made
    await made.member.stop()
    made.store.close()


def entries(source: MessageStore, sender: str, term: int, first: int, stop: int) -> AppendRequest:
    """Build the append request of a leader whose log is `source`."""
    log = raft_log(source)
    data = bytes(log.read(log.range(first, stop, 1 << 20)))
    return AppendRequest(
        group="g", sender=sender, to="n0", term=term, prev_index=first - 1,
        prev_term=log.term_of(first - 1) if first else -1, count=stop - first,
        entries_term=log.term_of(first), last=log.last, commit=-1,
        members=() if first else (START,), payload=data,
    )  # fmt: skip


async def test_entries_of_two_leaders_in_one_tick_are_taken_in_their_order(
    alone: Alone, tmp_path: Path
) -> None:
    old, new = leader(tmp_path / "old", name="n1"), member(tmp_path / "new", name="n2")
    add(old, b"one", b"two", b"three")
    hand_over(old, new, stop=2)
    raft_log(new).commit_to(1)
    elect(new, 2)
    alone.member.peers.receive(entries(old, "n1", 1, 0, 4))
    alone.member.peers.receive(entries(new, "n2", 2, 2, 3))
    alone.member.turn()
    own = raft_log(alone.store)
    await until(lambda: own.last == 2)
    assert [own.term_of(index) for index in range(3)] == [1, 1, 2]
    add(new, b"four")
    alone.member.peers.receive(entries(new, "n2", 2, 3, 4))  # the member keeps working
    alone.member.turn()
    await until(lambda: own.last == 3)
    old.close()
    new.close()


async def test_entries_that_are_none_are_refused(alone: Alone, tmp_path: Path) -> None:
    source = leader(tmp_path / "old", name="n1")
    request = entries(source, "n1", 1, 0, 1)
    with pytest.raises(RaftMessageError, match="payload"):
        alone.member.peers.receive(
            AppendRequest(
                group="g", sender="n1", to="n0", term=1, prev_index=-1, prev_term=-1, count=1, last=0,
                commit=-1, members=request.members,
            )
        )  # fmt: skip
    alone.member.peers.receive(request)
    alone.member.turn()
    await until(lambda: raft_log(alone.store).last == 0)
    source.close()


async def test_whatever_bytes_come_the_member_goes_on(alone: Alone, tmp_path: Path) -> None:
    """Bytes of valid frames are changed: the member refuses each frame or handles it as a valid one."""
    source = leader(tmp_path / "old", name="n1")
    add(source, b"one", b"two")
    said: dict[str, Any] = {"group": "g", "sender": "n1", "to": "n0", "term": 1}
    frames = raft_wire.frame([entries(source, "n1", 1, 0, 3)]) + raft_wire.frame([
        VoteRequest(**said, last_index=3, last_term=1), VoteResponse(**said, granted=True),
        AppendResponse(**said, match=1, written=1), TransferRequest(**said),
    ])  # fmt: skip
    chance, refused = random.Random(7), 0
    for _ in range(400):
        data = bytearray(raft_wire.handshake("g", "n1", "h:1", "h:2") + frames)
        for _ in range(chance.choice((1, 1, 2, 8))):
            data[chance.randrange(len(data))] = chance.choice((0, 0x7F, 0xFF, chance.randrange(256)))
        try:
            for message in raft_wire.Frames("g", "n0").feed(bytes(data)):
                alone.member.peers.receive(message)
        except CometError:
            refused += 1
        alone.member.turn()
        await asyncio.sleep(0)
    assert refused > 100
    assert not alone.member.failed
    committed = raft_log(alone.store).committed
    assert all(raft_log(alone.store).term_of(index) == 1 for index in range(committed + 1))
    source.close()


async def test_a_leadership_won_again_while_the_first_was_prepared_is_taken_up(tmp_path: Path) -> None:
    alone = Alone(member(tmp_path / "n0"), "n0")
    alone.desk.open.clear()
    alone.member.turn()
    await until(lambda: alone.desk.prepared)
    term = alone.member.node.term
    alone.member.peers.receive(
        AppendResponse(group="g", sender="n9", to="n0", term=term + 5, match=-1, written=-1)
    )
    alone.member.turn()
    await until(lambda: alone.member.node.term > term + 5 and alone.member.node.ready)
    alone.desk.open.set()
    await until(lambda: alone.member.leading)
    answers: list[int] = []
    alone.member.waits.wait_for(alone.store.log.end, answers.append)  # every entry is committed
    assert answers == [ResponseCode.SUCCESS]
    await alone.member.stop()
    alone.store.close()


async def test_what_is_committed_is_shown_although_the_next_entry_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.broker.replication.raft_member.DISK_TEST_INTERVAL_S", 0.05)
    disk = FaultyDisk(really_sync=False)
    alone, source = Alone(member(tmp_path / "n0", disk), *NAMES), leader(tmp_path / "old", name="n1")
    add(source, b"one", b"two")
    own, receive = raft_log(alone.store), alone.member.peers.receive
    receive(entries(source, "n1", 1, 0, 2))
    alone.member.turn()
    await until(lambda: own.last == 1)
    full = disk.fail("pwrite", error=errno.ENOSPC, match="dledger-n0/data", times=1 << 30)
    receive(msgspec.structs.replace(entries(source, "n1", 1, 2, 3), commit=1))
    alone.member.turn()
    assert full.times < 1 << 30
    assert (own.last, own.committed, seen(alone.store)) == (1, 1, [b"one"])
    disk.heal()

    def written() -> bool:
        receive(msgspec.structs.replace(entries(source, "n1", 1, 2, 3), commit=2))
        alone.member.turn()
        return own.committed == 2

    await until(written)
    assert seen(alone.store) == [b"one", b"two"]
    await alone.member.stop()
    alone.store.close()
    source.close()


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_a_member_goes_on_when_the_index_of_entries_can_be_written_again(
    tmp_path: Path, flush: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.broker.replication.raft_member.DISK_TEST_INTERVAL_S", 0.05)
    disk = FaultyDisk(really_sync=False)
    alone = Alone(member(tmp_path / "n0", disk, flush_disk_type=flush), "n0")
    log, flusher = raft_log(alone.store), alone.store.flusher
    alone.member.turn()
    await until(lambda: alone.member.leading)
    flusher.request()
    full = disk.fail("pwrite", error=errno.ENOSPC, match="dledger-n0/index", times=1 << 30)
    add(alone.store, b"one")
    flusher.request()
    await until(lambda: not alone.member.leading)
    await until(lambda: full.times < (1 << 30) - 3)  # the write is retried, and the member does not lead
    assert not alone.member.leading
    disk.heal()
    await until(lambda: alone.member.leading)
    flusher.request()
    assert log.synced == log.committed == log.last
    await alone.member.stop()
    assert seen(alone.store) == [b"one"]
    alone.store.close()


async def test_a_transfer_does_not_wait_for_the_tables_for_as_long_as_sends_are_held(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, copied = alone.member, asyncio.Event()
    monkeypatch.setattr("cometmq.broker.replication.raft_member.TRANSFER_COPY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(alone.desk, "copy_tables", copied.wait)
    monkeypatch.setattr(member, "leading", True)
    with pytest.raises(RaftRefused, match="no majority has copied the leader's tables in time"):
        await member.transfer("n1")
    monkeypatch.setattr(member, "leading", False)

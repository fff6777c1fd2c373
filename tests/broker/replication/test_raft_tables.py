"""Topics, groups and offsets of a raft group: a confirmed change survives the loss of the leader."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.pop.conftest import set_mode
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.kit.brokers import commit, create, records
from tests.kit.waiting import until

from cometmq.broker.replication import raft, raft_tables
from cometmq.broker.replication.metadata_sync import MetadataSync, NotTheMaster
from cometmq.broker.replication.raft_tables import GroupSync, RaftTables
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.tables.versions import Versions, order
from cometmq.errors import CommandError, RequestTimeout
from cometmq.protocol.bodies import DataVersion
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers.admin import CopySettingsHeader, DeleteSubscriptionGroupRequestHeader


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Make elections take one or two seconds, and copy tables only on request."""
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    monkeypatch.setattr(raft, "SYNC_S", 1000.0)


@pytest.fixture
async def group(tmp_path, monkeypatch):
    monkeypatch.setattr(raft, "SYNC_S", 0.05)  # a member that joins late has no vote before it has a copy
    async with RaftGroup(tmp_path) as made:
        monkeypatch.setattr(raft, "SYNC_S", 1000.0)
        await made.stop_all()
        await made.start_all()
        yield made


def tables(group, member):
    return group.brokers[member].parts.tables


async def copied(group, member):
    """Let a follower copy the tables.

    A change is confirmed once a majority has it, and the third member may not have been asked by then.
    """
    async with asyncio.timeout(60):
        while True:
            leader = await group.leader()
            header = CopySettingsHeader(leader=leader, term=(await group.status(leader)).term)
            if (await group.peers[member].call(RequestCode.COPY_SETTINGS, header)).code == 0:
                return
            await asyncio.sleep(0.05)


async def test_settings_that_were_answered_are_known_to_whoever_leads_next(group):
    first = await group.leader()
    peer = group.peers[first]
    await create(peer, "Wide", read=7, write=7, perm=4)
    await create(peer, "Gone")
    for name in (b"G", b"H"):
        assert (await peer.set_group(b'{"groupName":"%b","retryMaxTimes":3}' % name)).code == 0
    assert (await peer.delete_topic("Gone")).code == 0
    header = DeleteSubscriptionGroupRequestHeader(group_name="H")
    assert (await peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)).code == 0
    assert (await set_mode(peer, topic="Wide")).code == 0
    refusal = await set_mode(group.peers[group.followers()[0]], topic="Wide")
    assert "does not lead its raft group" in refusal.remark
    await group.stop(first)
    found = tables(group, await group.leader())
    assert (found.topics.table["Wide"].read_queue_nums, found.topics.table["Wide"].perm) == (7, 4)
    assert found.groups.table["G"].retry_max_times == 3
    assert found.modes.modes["Wide", "G"].mode == "POP"
    assert "Gone" not in found.topics.table
    assert "H" not in found.groups.table


async def test_a_topic_that_was_deleted_stays_so_with_its_messages(group):
    first = await group.leader()
    peer = group.peers[first]
    for topic in ("Gone", "Kept"):
        await create(peer, topic)
        for number in range(3):
            assert (await peer.send(topic, b"%d" % number)).code == 0
    await group.equal()
    assert (await peer.delete_topic("Gone")).code == 0
    await group.stop(first)
    parts = group.brokers[await group.leader()].parts
    assert "Gone" not in parts.tables.topics.table
    assert lengths(parts, "Gone") == []
    assert lengths(parts, "Kept") == [3]


def lengths(parts, topic):
    return [queue.max_offset - queue.min_offset for queue in parts.store.queues.of_topic(topic)]


async def test_a_topic_that_is_made_anew_is_whole_on_who_was_away(group):
    """A member that was away first reads the old topic's records, which the new topic's records follow."""
    leader = await group.leader()
    away = group.followers()[0]
    await group.equal()
    await group.stop(away)
    peer = group.peers[leader]
    for bodies in ((b"old", b"older", b"oldest"), (b"new", b"newer")):
        await create(peer, "Again")
        for body in bodies:
            assert (await peer.send("Again", body)).code == 0
        if bodies[0] == b"old":
            assert (await peer.delete_topic("Again")).code == 0
    await group.start(away)
    await group.equal()
    await group.hand_over(away)
    assert (await group.peers[away].send("Again", b"newest")).code == 0
    found = [bytes(each.body) for each in records(await group.peers[away].pull("Again"))]
    assert found == [b"new", b"newer", b"newest"]
    await group.equal()
    assert lengths(group.brokers[leader].parts, "Again") == [3]


async def test_a_topic_that_was_deleted_does_not_come_back_with_who_was_away(group):
    leader = await group.leader()
    away, other = group.followers()
    peer = group.peers[leader]
    await create(peer, "Gone")
    for number in range(3):
        assert (await peer.send("Gone", b"%d" % number)).code == 0
    await group.equal()
    await copied(group, away)
    assert "Gone" in tables(group, away).topics.table
    await group.stop(away)
    assert (await peer.delete_topic("Gone")).code == 0
    await group.stop(leader)
    await group.start(away)
    await until(lambda: any(map(group.leads, group.brokers)))
    await group.hand_over(away)
    for member in (away, other):
        parts = group.brokers[member].parts
        await until(lambda parts=parts: not parts.store.queues.of_topic("Gone"))
        assert "Gone" not in parts.tables.topics.table


async def test_a_deletion_of_a_leader_that_was_left_takes_nothing_from_later_ones(group):
    """The deletion was stored only on the deposed leader, and the topic stayed in use under the next one."""
    leader = await group.leader()
    left, other = group.followers()
    peer = group.peers[leader]
    await create(peer, "Kept")
    await peer.send("Kept", b"old")
    await group.equal()
    store = group.brokers[left].parts.store
    store.deleted.add(["Kept"], store.log.end, 0)
    await peer.send("Kept", b"new")
    await group.equal()
    await group.stop(leader)
    if await group.leader() == left:
        await group.brokers[other].parts.replication.sync.sync()  # the former leader sends its deletion here
        assert lengths(group.brokers[other].parts, "Kept") == [2]
        assert (await group.change(left, "transfer", other)).code == 0
        await until(lambda: group.leads(other))
    found = [bytes(each.body) for each in records(await group.peers[other].pull("Kept"))]
    assert found == [b"old", b"new"]


async def test_who_was_just_elected_is_not_asked_what_is_deleted(group, monkeypatch):
    """A new leader may not know yet that an entry is committed, although its follower does."""
    leader, follower = await group.leader(), group.followers()[0]
    peer = group.peers[leader]
    await create(peer, "Kept")
    await peer.send("Kept")
    await group.equal()
    monkeypatch.setattr(raft.RaftReplication, "serves", False)
    tables(group, leader).topics.delete("Kept")
    group.brokers[leader].parts.store.queues.move_to_trash("Kept")
    copies = group.brokers[follower].parts.replication.sync
    with pytest.raises(NotTheMaster, match="does not accept messages yet"):
        await copies.settings()
    assert lengths(group.brokers[follower].parts, "Kept") == [1]


async def test_a_topic_is_deleted_while_others_get_messages(group):
    leader = await group.leader()
    peer = group.peers[leader]
    await create(peer, "Gone")
    assert (await peer.send("Gone")).code == 0

    async def load():
        while True:
            await asyncio.gather(*(peer.send("Busy") for _ in range(20)))

    sending = asyncio.create_task(load())
    try:
        await until(lambda: group.brokers[leader].parts.store.max_offset("Busy", 0) > 100)
        assert (await peer.delete_topic("Gone")).code == 0
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    for member in group.followers():
        await copied(group, member)
    for member in group.brokers:
        await until(lambda m=member: not group.brokers[m].parts.store.queues.of_topic("Gone"))


@pytest.fixture
def without_copies(monkeypatch):
    """Yield a list of members that copy no tables."""
    members = []
    copy = RaftTables.copy

    async def refuse(self, header):
        if self.member in members:
            raise RequestTimeout("nobody", 0, 0.0)
        await copy(self, header)

    monkeypatch.setattr(RaftTables, "copy", refuse)
    return members


async def test_a_leader_that_has_not_copied_asks_the_others(group, without_copies):
    first = await group.leader()
    other = group.followers()[0]
    without_copies.append(other)
    await create(group.peers[first], "Wide", read=7, write=7)
    assert (await group.peers[first].set_group(b'{"groupName":"G","retryMaxTimes":3}')).code == 0
    assert "Wide" not in tables(group, other).topics.table
    await group.equal()
    await group.hand_over(other)
    assert tables(group, other).topics.table["Wide"].read_queue_nums == 7
    assert tables(group, other).groups.table["G"].retry_max_times == 3


async def test_what_a_majority_does_not_get_is_not_answered_as_done(group, without_copies, monkeypatch):
    without_copies += group.brokers
    with monkeypatch.context() as patch:
        patch.setattr(raft_tables, "MAJORITY_TIMEOUT_S", 0.3)
        answer = await create(group.peers[await group.leader()], "Wide")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "it is done, but the next leader may not know it: 0 of 2 other" in answer.remark
    without_copies.clear()
    assert (await create(group.peers[await group.leader()], "Wide")).code == 0


async def test_a_leader_that_has_lost_its_group_deletes_nothing(group, without_copies, monkeypatch):
    leader = await group.leader()
    peer = group.peers[leader]
    await create(peer, "Kept")
    await peer.send("Kept")
    without_copies += group.brokers
    monkeypatch.setattr(raft_tables, "MAJORITY_TIMEOUT_S", 0.3)
    for answer in (await peer.delete_topic("Kept"), await peer.call(RequestCode.CLEAN_UNUSED_TOPIC)):
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "nothing is done: the next leader may not know it: 0 of 2 other" in answer.remark
    parts = group.brokers[leader].parts
    assert lengths(parts, "Kept") == [1]
    assert "Kept" in parts.tables.topics.table


async def test_settings_are_changed_at_the_leader_alone(group):
    leader = await group.leader()
    await group.equal()
    peer = group.peers[group.followers()[0]]
    for answer in (
        await create(peer, "Wide"),
        await peer.delete_topic("Wide"),
        await peer.set_group(b'{"groupName":"G"}'),
    ):
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert (
            f"does not lead its raft group; change topics and groups at its leader, {leader}" in answer.remark
        )


async def test_a_change_of_a_former_leadership_is_not_kept_by_this_one(group):
    leader = await group.leader()
    own = tables(group, leader)
    since = own.check_changeable()
    await own.topics_kept(since)
    with pytest.raises(CommandError, match="has led since"):
        await own.topics_kept(since - 1)


async def test_a_table_that_is_too_long_keeps_nobody_from_leading(group, monkeypatch, caplog):
    monkeypatch.setattr(ConsumerOffsets, "groups", lambda _self: 1 / 0)  # makes a handler fail
    first = await group.leader()
    await create(group.peers[first], "Wide", read=7, write=7)
    await group.stop(first)
    assert tables(group, await group.leader()).topics.table["Wide"].read_queue_nums == 7
    assert "a table of member 127.0.0.1" in caplog.text


async def test_only_the_leader_of_the_term_is_copied(group):
    leader = await group.leader()
    await group.equal()
    follower = group.followers()[0]
    term = (await group.status(leader)).term
    for header in (
        CopySettingsHeader(leader=leader, term=term - 1),
        CopySettingsHeader(leader=follower, term=term),
    ):
        answer = await group.peers[follower].call(RequestCode.COPY_SETTINGS, header)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"{follower} follows {leader} in term {term}" in answer.remark
    assert (await group.peers[follower].call(RequestCode.COPY_SETTINGS)).remark.startswith("HeaderError")


async def test_who_was_away_for_long_does_not_lead_with_old_offsets(group, monkeypatch):
    for member in group.addresses:
        await group.stop(member)
    monkeypatch.setattr(raft, "SYNC_S", 0.05)
    await asyncio.gather(*map(group.start, group.addresses))

    async def committed(offset):
        """Commit an offset at the current leader and let all members copy it."""
        async with asyncio.timeout(60):
            while {tables(group, each).offsets.query("G", "Orders", 0) for each in group.brokers} != {offset}:
                await commit(group.peers[await group.leader()], 0, offset)
                await asyncio.sleep(0.05)

    await group.peers[await group.leader()].send_numbers(9)
    await committed(2)
    away = group.followers()[0]
    await group.stop(away)
    await committed(7)
    monkeypatch.setattr(raft, "SYNC_S", 1000.0)
    await group.start(away)
    assert tables(group, away).offsets.query("G", "Orders", 0) == 2
    await group.hand_over(away)
    assert tables(group, away).offsets.query("G", "Orders", 0) == 7


async def test_a_former_leader_does_not_undo_a_reset(group):
    first, former = await group.leader(), group.followers()[0]
    await commit(group.peers[first], 0, 5)
    copies = group.brokers[former].parts.replication.sync
    await copies.sync()
    assert (await group.change(first, "transfer", former)).code == 0
    await until(lambda: group.leads(former))
    await commit(group.peers[former], 0, 9)
    assert (await group.change(former, "transfer", first)).code == 0
    await until(lambda: group.leads(first))
    await commit(group.peers[first], 0, 2)
    await until(lambda: copies.master_addr == group.brokers[first].addr)
    await copies.sync()
    assert copies.failure == ""
    for member in (first, former):
        assert tables(group, member).offsets.query("G", "Orders", 0) == 2


async def test_a_leader_that_does_not_learn_the_tables_lets_another_try(group, monkeypatch, caplog):
    await group.leader()
    lonely = group.followers()[0]
    read = RaftTables.read

    async def ask(self, addr):
        if self.member == lonely:
            raise RequestTimeout(addr, 0, 0.0)
        return await read(self, addr)

    monkeypatch.setattr(RaftTables, "read", ask)
    await group.equal()
    said = f"{lonely} does not accept messages yet: 0 of 2 other members have answered"
    with monkeypatch.context() as patch:
        patch.setattr(raft_tables, "MAJORITY_TIMEOUT_S", 1.0)
        await group.hand_over(lonely, lambda: said in caplog.text)
    await until(lambda: any(group.leads(member) for member in group.brokers if member != lonely))


async def test_copies_never_go_back(group):
    leader = await group.leader()
    await group.equal()
    follower = group.followers()[0]
    await create(group.peers[leader], "Wide")
    own = tables(group, follower).topics
    own.replace(DataVersion(timestamp=0, counter=0, state_version=1000), {})
    sync = MetadataSync(
        group.brokers[follower].parts.store, tables(group, follower), group.peers[leader].remoting,
        newer_only=True,
    )  # fmt: skip
    sync.follow(group.brokers[leader].addr)
    await sync.settings()
    assert not own.table


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (None, DataVersion(timestamp=5, counter=0)),
        (DataVersion(timestamp=5, counter=0), DataVersion(timestamp=1, counter=1)),
        (DataVersion(timestamp=5, counter=9), DataVersion(timestamp=1, counter=1, state_version=1)),
        (
            DataVersion(timestamp=5, counter=9, state_version=1),
            DataVersion(timestamp=1, counter=1, state_version=2),
        ),
    ],
)
def test_versions_have_an_order(older, newer):
    assert order(older) < order(newer)


def test_a_follower_counts_no_versions():
    versions = Versions(lambda: 7, term=3, counts=False)
    version = DataVersion(timestamp=1, counter=2, state_version=1)
    assert versions.after(version) == version
    versions.counts = True
    assert versions.after(version) == DataVersion(timestamp=7, counter=3, state_version=3)


async def test_offsets_that_a_crash_has_lowered_are_older_than_those_of_others(group):
    member = (await group.leader(), *group.followers())[1]
    offsets = tables(group, member).offsets
    offsets.commit("G", "Orders", 0, 99)
    before = offsets.version = DataVersion(timestamp=1, counter=7, state_version=3)
    await group.stop(member)
    (group.root / member / "abort").touch()
    await group.start(member)
    offsets = tables(group, member).offsets
    assert offsets.query("G", "Orders", 0) == 0
    assert order(offsets.version) < order(before)


async def test_who_lost_its_disk_counts_once_it_has_the_tables_too(group, monkeypatch):
    leader, lost = await group.leader(), group.followers()[0]
    await create(group.peers[leader], "Kept")
    await group.stop(lost)
    group.wipe(lost)
    await group.start(lost)  # it copies no tables for now
    await group.equal()
    node = group.brokers[lost].parts.replication
    await until(lambda: node.status().leader == leader)
    assert (await group.peers[leader].send("Kept")).code == 0
    await group.equal()
    assert group.is_suspect(lost)
    (match,) = [each.match for each in (await group.status(leader)).members if each.member == lost]
    assert match == -1
    await group.stop(lost)
    monkeypatch.setattr(raft, "SYNC_S", 0.05)
    await group.start(lost)
    await until(lambda: not group.is_suspect(lost), 20)
    assert "Kept" in tables(group, lost).topics.table
    assert "Kept" in (group.root / lost / "config" / "topics.json").read_text()


async def test_who_lost_its_disk_does_not_count_before_it_has_the_offsets(group, monkeypatch):
    leader, lost = await group.leader(), group.followers()[0]
    await create(group.peers[leader], "Kept")
    assert (await group.peers[leader].send("Kept")).code == 0
    tables(group, leader).offsets.commit("G", "Kept", 0, 1)
    await group.stop(lost)
    group.wipe(lost)
    monkeypatch.setattr(raft, "SYNC_S", 0.05)
    rounds = []
    with monkeypatch.context() as patched:
        sync, extent = GroupSync.sync, GroupSync._extent  # noqa: SLF001

        async def count(self):
            await sync(self)
            rounds.append(self.failure)

        async def far(self):
            return (await extent(self))._replace(end=1 << 40)

        patched.setattr(GroupSync, "sync", count)
        patched.setattr(GroupSync, "_extent", far)
        await group.start(lost)
        await group.equal()
        await until(lambda: group.brokers[lost].parts.replication.sync.offsets_wait)
        seen = len(rounds)
        await until(lambda: len(rounds) > seen + 5)
        assert group.is_suspect(lost)
        await group.stop(lost)
    await group.start(lost)
    await until(lambda: not group.is_suspect(lost), 20)
    assert tables(group, lost).offsets.query("G", "Kept", 0) == 1

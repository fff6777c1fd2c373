"""Brokers of a raft group in one process, connected over sockets."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from tests.broker.replication.raft_group import ELECTION_S, OPTIONS, RaftGroup
from tests.kit.brokers import Peer, commit, create, records, running
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq.broker.replication import raft, raft_member
from cometmq.broker.replication.raft_member import RaftMember
from cometmq.broker.send import relay
from cometmq.broker.tables.topics import READ_WRITE, topic_of
from cometmq.client import Producer
from cometmq.message import Message, MessageQueue, SendStatus
from cometmq.protocol.bodies import LockBatchBody
from cometmq.protocol.bodies.admin import HaRuntimeInfo
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import GetRouteInfoRequestHeader, ViewMessageRequestHeader
from cometmq.protocol.java_properties import parse_properties
from cometmq.protocol.record.framing import ENTRY_SIZE
from cometmq.raft import RaftNode
from cometmq.store import Flag


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Make elections take one or two seconds."""
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)


@pytest.fixture
async def group(tmp_path):
    async with RaftGroup(tmp_path) as made:
        yield made


async def send(group, leader, *bodies, **more):
    for body in bodies:
        answer = await group.peers[leader].send(body=body, **more)
        assert answer.code == ResponseCode.SUCCESS, answer.remark


async def bodies(peer, **more):
    return [bytes(message.body) for message in records(await peer.pull(**more))]


async def test_what_the_leader_answers_is_read_from_each_member(group):
    leader = await group.leader()
    await send(group, leader, b"one", b"two", b"three")
    await group.equal()
    for member in group.brokers:
        await until(lambda m=member: "Orders" in group.brokers[m].parts.tables.topics.table)
        assert await bodies(group.peers[member]) == [b"one", b"two", b"three"]
    assert len({group.log_bytes(member) for member in group.brokers}) == 1


async def test_followers_refuse_and_say_what_they_are(group):
    leader = await group.leader()
    follower = group.followers()[0]
    refused = await group.peers[follower].send()
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "follower" in refused.remark
    await until(lambda: group.brokers[follower].parts.replication.facts()["raftLeader"] == leader)
    status = await group.status(follower)
    assert (status.role, status.leader, status.member) == ("follower", leader, follower)
    facts = group.brokers[follower].parts.replication.facts()
    assert (facts["brokerRole"], facts["raftLeader"]) == ("SLAVE", leader)
    for member, role, broker_id in (
        (leader, "SYNC_MASTER", "0"),
        (follower, "SLAVE", f"{int(follower[1]) + 1}"),
    ):
        settings = (await group.peers[member].call(RequestCode.GET_BROKER_CONFIG)).body
        shown = parse_properties(bytes(settings).decode())
        assert (shown["brokerRole"], shown["brokerId"]) == (role, broker_id)
        runtime = group.brokers[member].parts.replication.facts()
        assert runtime["brokerRole"] == role
    locks = LockBatchBody(consumer_group="G", client_id="c", mq_set=[MessageQueue("Orders", "broker-a", 0)])
    for member, code in ((leader, ResponseCode.SUCCESS), (follower, ResponseCode.SLAVE_NOT_AVAILABLE)):
        answer = await group.peers[member].call(RequestCode.LOCK_BATCH_MQ, None, locks.encode())
        assert answer.code == code


async def test_another_leads_when_the_leader_stops_and_nothing_is_lost(group):
    first = await group.leader()
    await send(group, first, b"one", b"two")
    await group.stop(first)
    second = await group.leader()
    await send(group, second, b"three")
    assert await bodies(group.peers[second]) == [b"one", b"two", b"three"]
    await group.start(first)
    await group.equal()
    await until(lambda: "Orders" in group.brokers[first].parts.tables.topics.table)
    assert await bodies(group.peers[first]) == [b"one", b"two", b"three"]
    assert await group.leader() == second


async def test_without_a_majority_nothing_is_stored_or_shown(group):
    leader = await group.leader()
    await send(group, leader, b"one")
    await group.equal()
    for member in group.followers():
        await group.stop(member)
    answers = await asyncio.gather(*(group.peers[leader].send(body=b"lost") for _ in range(3)))
    assert {answer.code for answer in answers} <= {
        ResponseCode.SYSTEM_ERROR, ResponseCode.SERVICE_NOT_AVAILABLE,
    }  # fmt: skip
    await until(lambda: not group.leads(leader))
    assert await bodies(group.peers[leader]) == [b"one"]


async def test_messages_that_wait_come_from_the_next_leader(tmp_path):
    async with RaftGroup(tmp_path, messageDelayLevel="1s 2s") as group:
        first = await group.leader()
        await send(group, first, b"later", properties={"DELAY": "2"})
        await send(group, first, b"timer", properties={"TIMER_DELAY_SEC": "2"}, queue_id=1)
        await group.equal()
        for member in group.followers():
            await until(lambda m=member: "Orders" in group.brokers[m].parts.tables.topics.table)
        await group.stop(first)
        peer = group.peers[await group.leader()]
        assert await bodies(peer, hold_ms=10_000) == [b"later"]
        assert await bodies(peer, queue_id=1, hold_ms=10_000) == [b"timer"]


async def test_the_leadership_is_handed_over(group):
    leader = await group.leader()
    other = group.followers()[0]
    refused = await group.change(other, "transfer", leader)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "does not lead" in refused.remark
    await group.hand_over(other)
    assert not group.leads(leader)
    assert (await group.change(other, "dance", leader)).remark.startswith("action is none of transfer,")


async def test_a_member_is_replaced_while_the_group_runs(group):
    leader = await group.leader()
    await send(group, leader, *(b"%d" % number for number in range(50)))
    lost = group.followers()[0]
    await group.stop(lost)
    assert (await group.change(leader, "remove", lost)).code == ResponseCode.SUCCESS
    await until(lambda: len(group.brokers[leader].parts.replication.status().members) == 2)

    unknown = await group.change(leader, "addLearner", "n7")
    assert "n7 sent no address" in unknown.remark
    group.addresses["n7"] = f"127.0.0.1:{free_port()}"
    await group.start("n7", dLegerJoin="true")

    async def joined(action):
        answer = await group.change(leader, action, "n7")
        return answer.code == ResponseCode.SUCCESS

    async with asyncio.timeout(60):
        await until(lambda: joined("addLearner"))
        await until(lambda: joined("promote"))
    n7 = group.brokers["n7"].parts.replication
    await until(lambda: {each.member for each in n7.status().members if each.voter} == set(group.brokers))
    await group.equal()
    await until(lambda: "Orders" in group.brokers["n7"].parts.tables.topics.table)
    assert (await bodies(group.peers["n7"]))[:3] == [b"0", b"1", b"2"]
    await group.stop(leader)
    await send(group, await group.leader(), b"50")


async def test_members_change_under_load_and_every_send_is_answered(group):
    leader = await group.leader()
    other = group.followers()[0]
    answers, done = [], False

    async def keep_sending():
        while not done:
            answer = await group.peers[leader].send()
            answers.append(answer.code)
            await asyncio.sleep(0)

    senders = [asyncio.create_task(keep_sending()) for _ in range(8)]
    for action in ("remove", "addLearner", "promote") * 2:
        async with asyncio.timeout(60):
            while (await group.change(leader, action, other)).code != ResponseCode.SUCCESS:
                await asyncio.sleep(0.02)
    done = True
    async with asyncio.timeout(60):
        await asyncio.gather(*senders)
    assert group.leads(leader)
    assert set(answers) <= {ResponseCode.SUCCESS, ResponseCode.SERVICE_NOT_AVAILABLE}


@pytest.mark.slow("waits for two elections that must not come")
@pytest.mark.representative
async def test_a_member_that_lost_its_disk_has_no_vote_until_it_is_whole(group):
    has_all = await group.leader()
    lost, late = group.followers()
    await group.stop(late)
    await send(group, has_all, b"one")
    await group.equal()
    await group.stop(lost)
    await group.stop(has_all)
    group.wipe(lost)
    await asyncio.gather(group.start(lost), group.start(late))
    await asyncio.sleep(2 * ELECTION_S)  # the two members would be a majority
    assert not any(map(group.leads, group.brokers))
    await group.start(has_all)
    assert await group.leader() == has_all
    await group.equal()
    await group.stop(late)
    await send(group, await group.leader(), b"two")  # needs the vote of the member that was lost
    await until(lambda: "Orders" in group.brokers[lost].parts.tables.topics.table)
    await group.equal()
    assert await bodies(group.peers[lost]) == [b"one", b"two"]


async def test_a_group_begins_when_all_of_its_members_are_there(group):
    await group.stop_all()
    for member in group.addresses:
        group.wipe(member)
    await asyncio.gather(group.start("n0"), group.start("n1"))
    await asyncio.sleep(2 * ELECTION_S)
    assert {(await group.status(each)).term for each in group.brokers} == {0}
    await group.start("n2")
    await send(group, await group.leader(), b"one")


async def test_a_group_whose_members_differ_in_their_file_does_not_begin_and_says_so(group, caplog):
    await group.stop_all()
    for member in group.addresses:
        group.wipe(member)
    more = ";".join(f"{name}-{addr}" for name, addr in {**group.addresses, "n3": "127.0.0.1:1"}.items())
    await asyncio.gather(group.start("n0"), group.start("n1"), group.start("n2", dLegerPeers=more))
    words = "dLegerPeers must be equal where a group begins: at n2 n0;n1;n2;n3, here n0;n1;n2"
    await until(lambda: group.brokers["n0"].parts.replication.facts()["haProblem"] == words)
    found = HaRuntimeInfo.decode((await group.peers["n0"].call(RequestCode.GET_BROKER_HA_STATUS)).body)
    assert found.problem == words
    assert words in caplog.text
    assert {(await group.status(each)).term for each in group.brokers} == {0}
    await group.stop("n2")
    await group.start("n2")
    await send(group, await group.leader(), b"one")
    assert {each.parts.replication.facts()["haProblem"] for each in group.brokers.values()} == {"none"}


async def test_a_leader_whose_disk_fails_leaves(group):
    leader = await group.leader()
    await group.equal()
    group.brokers[leader].parts.store.flags.raise_flag(Flag.NOT_WRITEABLE, "a test")
    await until(lambda: any(group.leads(member) for member in group.brokers if member != leader))
    assert not group.leads(leader)
    await send(group, await group.leader(), b"one")


async def test_a_member_whose_log_rots_gets_it_again_and_then_its_vote(tmp_path, caplog):
    async with RaftGroup(tmp_path, flushDiskType="SYNC_FLUSH") as group:
        leader = await group.leader()
        await send(group, leader, b"one", b"two", b"three")
        await group.equal()
        rots, other = group.followers()
        await group.stop(rots)
        path = next((tmp_path / rots / f"dledger-{rots}" / "data").iterdir())
        data = path.read_bytes()
        at = data.index(b"three")
        path.write_bytes(data[:at] + b"eerht" + data[at + 5 :])
        await group.start(rots)
        assert group.brokers[rots].parts.replication.facts()["raftSuspect"] == "true"
        await group.equal()
        await until(lambda: group.brokers[rots].parts.replication.facts()["raftSuspect"] == "false")
        await until(lambda: "Orders" in group.brokers[rots].parts.tables.topics.table)
        assert await bodies(group.peers[rots]) == [b"one", b"two", b"three"]
        await group.stop(leader)  # the remaining member is now needed for a majority
        assert await group.leader() in (rots, other)
    assert "is missing" in caplog.text


async def test_name_servers_know_what_a_new_leader_had_as_a_follower(tmp_path, monkeypatch):
    monkeypatch.setattr(raft, "SYNC_S", 3600.0)
    async with RaftGroup(tmp_path) as group:
        leader = await group.leader()
        for follower in group.followers():
            parts = group.brokers[follower].parts
            parts.tables.topics.put(topic_of("Own", 3, READ_WRITE))
            await parts.registrar.registered()
        monkeypatch.setattr(RaftMember, "retire", RaftMember.stop)  # skips the handoff
        await group.stop(leader)
        second = await group.leader()
        async with Peer(group.namesrv) as asking:

            async def known():
                answer = await asking.call(
                    RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="Own")
                )
                return answer.code == ResponseCode.SUCCESS

            await group.brokers[second].parts.registrar.registered()
            assert await known()


async def test_offsets_and_topics_are_copied_from_the_leader(group):
    leader = await group.leader()
    await send(group, leader, b"one", topic="Fresh")
    await commit(group.peers[leader], 0, 1, topic="Fresh")
    follower = group.brokers[group.followers()[0]].parts
    await until(lambda: follower.tables.offsets.queues("G", "Fresh") == {0: 1})
    assert "Fresh" in follower.tables.topics.table


async def test_a_topic_that_was_deleted_and_made_anew_is_the_next_leaders_too(group):
    first = await group.leader()
    for body in (b"old", b"new"):
        await send(group, first, body, body, topic="Fresh")
        await group.equal()
        assert [store_of(group, each).max_offset("Fresh", 0) for each in group.brokers] == [2, 2, 2]
        if body == b"old":
            await group.peers[first].delete_topic("Fresh")
    await until(
        lambda: all("Fresh" in group.brokers[each].parts.tables.topics.table for each in group.brokers)
    )
    await group.stop(first)
    second = await group.leader()
    await send(group, second, b"newer", topic="Fresh")
    assert await bodies(group.peers[second], topic="Fresh") == [b"new", b"new", b"newer"]


def store_of(group, member):
    return group.brokers[member].parts.store


async def test_a_log_that_rolls_and_is_restarted_is_the_same_everywhere(tmp_path):
    async with RaftGroup(tmp_path, mappedFileSizeCommitLog="8192", flushDiskType="SYNC_FLUSH") as group:
        leader = await group.leader()
        for number in range(60):
            await send(group, leader, b"%d" % number * 100, queue_id=number % 4)
        for member in list(group.brokers):
            await group.stop(member)
        await asyncio.gather(*(group.start(member) for member in group.addresses))
        await send(group, await group.leader(), b"last")
        await group.equal()
        assert len({group.log_bytes(member) for member in group.brokers}) == 1


HOURS = ";".join(f"{hour:02}" for hour in range(24))


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_member_far_behind_begins_where_the_leaders_log_does(tmp_path, caplog, flush):
    old = {"fileReservedTime": "0", "deleteWhen": HOURS, "cleanResourceInterval": "100"}
    async with RaftGroup(tmp_path, mappedFileSizeCommitLog="8192", flushDiskType=flush, **old) as group:
        leader = await group.leader()
        await send(group, leader, b"first")
        await group.equal()
        away = group.followers()[0]
        await group.stop(away)
        for number in range(40):
            await send(group, leader, b"%d" % number * 100)
        raft_log = group.brokers[leader].parts.store.raft_log
        await until(lambda: raft_log.first > 10)
        await group.start(away)
        await group.equal()
        own = group.brokers[away].parts.store
        assert own.raft_log.first >= raft_log.first - 20
        assert own.raft_log.first > 1
        assert own.min_offset("Orders", 0) > 0
        await group.stop(away)
        await group.start(away)
        await send(group, await group.leader(), b"last")
        await group.equal()
    assert "takes no part" not in caplog.text


async def test_a_follower_deletes_what_its_leader_has_deleted(tmp_path):
    old = {"fileReservedTime": "0", "deleteWhen": HOURS, "cleanResourceInterval": "100"}
    async with RaftGroup(tmp_path, mappedFileSizeCommitLog="8192", **old) as group:
        leader = await group.leader()
        for number in range(100):
            await send(group, leader, b"%d" % number * 200)
        await group.equal()
        ledgers = [broker.parts.store.raft_log for broker in group.brokers.values()]
        ends = {raft_log.last for raft_log in ledgers}
        await until(lambda: all(raft_log.first > min(ends) - 30 for raft_log in ledgers))


async def test_requests_about_a_group_are_none_of_a_master(tmp_path):
    async with running(tmp_path) as (_, peer):
        answer = await peer.call(RequestCode.GET_RAFT_STATUS)
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def ha_status(peer):
    return HaRuntimeInfo.decode((await peer.call(RequestCode.GET_BROKER_HA_STATUS)).body)


async def test_the_leader_says_how_far_each_member_is_and_a_follower_whom_it_follows(group):
    leader = await group.leader()
    await send(group, leader, b"one", b"two")
    await group.equal()
    away = group.followers()[0]
    near = group.followers()[1]
    end = group.brokers[away].parts.store.log.end
    await group.stop(away)
    await send(group, leader, b"three" * 100)

    def named(member):
        return f"{member}-{group.addresses[member]}"

    async with asyncio.timeout(60):
        while (status := await ha_status(group.peers[leader])).in_sync_slave_nums != 1:
            await asyncio.sleep(0.05)
    found = {each.addr: each for each in status.ha_connection_info}
    assert found.keys() == {named(away), named(near)}
    assert status.master
    assert found[named(near)].in_sync
    assert found[named(near)].diff == 0
    assert not found[named(away)].in_sync
    assert found[named(away)].slave_ack_offset == end
    assert found[named(away)].diff == status.master_commit_log_max_offset - end > 500
    facts = group.brokers[leader].parts.replication.facts()
    assert (facts["raftLag"], facts["haLagBytes"]) == ("1", str(found[named(away)].diff))

    follows = await ha_status(group.peers[near])
    info = follows.ha_client_runtime_info
    assert not follows.master
    assert (info.master_addr, info.max_offset) == (named(leader), status.master_commit_log_max_offset)
    assert info.last_read_timestamp >= info.last_write_timestamp > 0
    assert info.activated
    assert group.brokers[near].parts.replication.facts()["raftLag"] == "0"


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr(raft_member, "PREFER_INTERVAL_S", 0.3)


@pytest.mark.usefixtures("looks_often")
async def test_a_preferred_member_leads_once_it_is_there(tmp_path):
    async with RaftGroup(tmp_path, preferredLeaderId="n2") as group:
        await until(lambda: group.leads("n2"))
        await group.stop("n2")
        other = await group.leader()
        assert other != "n2"
        for number in range(20):
            # Until the leader detects the loss of n2, it may attempt a handoff and refuses messages
            # meanwhile.
            while (await group.peers[other].send(body=b"%d" % number)).code != ResponseCode.SUCCESS:
                await asyncio.sleep(0.05)
        await group.start("n2")
        await until(lambda: group.leads("n2"))
        assert len(await bodies(group.peers["n2"])) == 20
        await send(group, "n2", b"more")


async def test_a_producer_outlasts_a_handoff_that_fails(group, monkeypatch):
    """A leader that holds no sends (broker/send/relay.py) refuses them for a second and stays leader."""
    monkeypatch.setattr(relay, "MAX_HELD_BYTES", 0)
    leader = await group.leader()
    async with Producer("senders", namesrv=group.namesrv) as producer:
        await producer.send(Message("Orders", b"before"))
        away = group.followers()[0]
        await group.stop(away)
        assert (await group.change(leader, "transfer", away)).code == ResponseCode.SUCCESS
        refused = await group.peers[leader].send(body=b"during")
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "is being transferred" in refused.remark
        sent = await producer.send(Message("Orders", b"during"), timeout_s=30)
        assert sent.status is SendStatus.SEND_OK


async def test_a_producer_finds_the_new_leader_within_a_send(group):
    leader = await group.leader()
    # A topic that a send creates is replicated with a delay, in which this test must not request a transfer.
    assert (await create(group.peers[leader], "Orders", 4, 4)).code == ResponseCode.SUCCESS
    async with Producer("senders", namesrv=group.namesrv) as producer:
        await producer.send(Message("Orders", b"before"))
        to = group.followers()[0]
        assert (await group.change(leader, "transfer", to)).code == ResponseCode.SUCCESS
        sent = await producer.send(Message("Orders", b"during"), timeout_s=30)
        assert sent.status is SendStatus.SEND_OK
        assert await group.leader() == to


async def test_while_the_preferred_member_is_away_nobody_hands_over(tmp_path, monkeypatch):
    looks = []
    prefer = raft_member.RaftMember.prefer
    monkeypatch.setattr(raft_member, "PREFER_INTERVAL_S", 0.1)
    monkeypatch.setattr(
        raft_member.RaftMember, "prefer", lambda self, now: looks.append(now) or prefer(self, now)
    )
    async with RaftGroup(tmp_path, preferredLeaderId="n2") as group:
        await group.leader()  # a new group starts only with all of its members
        await group.stop("n2")
        leader = await group.leader()
        term = (await group.status(leader)).term
        await until(lambda: len(looks) >= 5)
        assert await group.leader() == leader
        assert (await group.status(leader)).term == term
        assert all(second - first >= 0.1 for first, second in itertools.pairwise(looks))


@pytest.mark.usefixtures("looks_often")
async def test_a_leader_with_a_full_disk_hands_over_to_one_with_room(group):
    first = await group.leader()
    full, room = group.followers()
    for member in (full, first):
        group.brokers[member].parts.store.flags.raise_flag(Flag.DISK_FULL, "a test")
    await until(lambda: group.leads(room))
    await send(group, room, b"one")


@pytest.mark.usefixtures("looks_often")
async def test_where_all_disks_are_full_the_leader_refuses_and_stays(group):
    leader = await group.leader()
    for broker in group.brokers.values():
        broker.parts.store.flags.raise_flag(Flag.DISK_FULL, "a test")
    term = (await group.status(leader)).term
    await asyncio.sleep(1.0)
    assert (await group.status(leader)).term == term
    assert (await group.peers[leader].send()).code == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_a_member_that_is_about_to_stop_does_not_lead_any_more(group):
    leader = await group.leader()
    leaving, stays = group.followers()
    await group.equal()
    await group.brokers[leaving].parts.replication.retire()
    assert (await group.change(leader, "transfer", leaving)).code == ResponseCode.SUCCESS
    await group.stop(leader)
    assert await group.leader() == stays


async def test_a_message_that_is_not_committed_cannot_be_viewed(group):
    leader = await group.leader()
    store = group.brokers[leader].parts.store
    await send(group, leader, b"one")
    await group.equal()
    for member in group.followers():
        await group.stop(member)
    end = store.log.end
    sending = asyncio.create_task(group.peers[leader].send(body=b"lost"))
    await until(lambda: store.log.end > end)

    async def view(position):
        header = ViewMessageRequestHeader(offset=position + ENTRY_SIZE)
        return await group.peers[leader].call(RequestCode.VIEW_MESSAGE_BY_ID, header)

    assert (await view(end)).code == ResponseCode.SYSTEM_ERROR
    place = store.raft_log.location_of(store.raft_log.committed)
    assert (await view(place.position)).code == ResponseCode.SUCCESS
    assert (await sending).code != ResponseCode.SUCCESS


async def test_a_member_that_has_failed_says_so(group, monkeypatch):
    leader = await group.leader()
    tick = RaftNode.tick

    def broken(self, now_ms):
        if self.me == leader:
            raise ZeroDivisionError("a test")
        tick(self, now_ms)

    monkeypatch.setattr(RaftNode, "tick", broken)
    await until(lambda: any(group.leads(member) for member in group.brokers if member != leader))
    assert (await group.status(leader)).role == "failed"
    assert group.brokers[leader].parts.replication.facts()["brokerRole"] == "SLAVE"
    assert not group.brokers[leader].parts.replication.ha_status().master
    problem = await asyncio.to_thread(group.brokers[leader].parts.metrics.why_not_ready)
    assert "takes no part until" in problem

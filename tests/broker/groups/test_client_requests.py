"""Heartbeats, change notices, queue locks, and the limits of a single connection."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.brokers import Peer, records, refused, running, subscription
from tests.kit.waiting import until

from cometmq.broker.base import attributes
from cometmq.broker.groups.clients import EXPIRED_MS, REST_S
from cometmq.broker.groups.clients import MAX_GROUPS_PER_CONNECTION as MAX_GROUPS
from cometmq.broker.groups.locks import LOCK_LIVE_MS
from cometmq.broker.tables import subscription_groups
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    ConsumerList,
    HeartbeatData,
    KVTable,
    LockBatchBody,
    LockBatchResult,
    ProducerData,
    ProducerTableInfo,
    SubscriptionData,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    ConsumerGroupRequestHeader,
    UnregisterClientRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.store import Clock, ManualClock

NOTIFY = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


async def consumer_ids(peer, group="G"):
    header = ConsumerGroupRequestHeader(consumer_group=group)
    answer = await peer.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
    return answer if answer.code else ConsumerList.decode(answer.body).consumer_id_list


QUEUES = tuple(MessageQueue("Orders", "broker-a", n) for n in range(2))


async def locked(peer, client_id, queues=QUEUES):
    """Request locks and return the queues that the client owns afterwards."""
    body = LockBatchBody(consumer_group="G", client_id=client_id, mq_set=list(queues))
    answer = await peer.call(RequestCode.LOCK_BATCH_MQ, None, body.encode())
    return LockBatchResult.decode(answer.body).lock_ok_mq_set


class TestHeartbeats:
    async def test_members_are_listed_and_told_of_each_other(self, cluster, peer):
        answer = await peer.heartbeat("c1")
        assert (answer.code, bytes(answer.body)) == (0, b"")
        assert (await peer.notice(NOTIFY)).ext == {"consumerGroup": "G"}
        second = cluster.peer()
        await second.heartbeat("c2")
        assert (await peer.notice(NOTIFY)).ext == {"consumerGroup": "G"}
        assert await consumer_ids(peer) == ["c1", "c2"]
        await second.close()
        await peer.notice(NOTIFY)
        assert await consumer_ids(peer) == ["c1"]

    async def test_the_same_heartbeat_again_tells_nobody(self, peer):
        await peer.heartbeat("c1")
        await peer.notice(NOTIFY)
        await peer.heartbeat("c1")
        assert await consumer_ids(peer) == ["c1"]
        assert peer.notices.empty()

    async def test_a_group_can_ask_not_to_be_told(self, peer):
        await peer.set_group(b'{"groupName":"Quiet","notifyConsumerIdsChangedEnable":false}')
        await peer.heartbeat(group="Quiet")
        assert await consumer_ids(peer, "Quiet") == ["c1"]
        assert peer.notices.empty()

    async def test_unregistering_leaves_the_named_groups_only(self, cluster, peer):
        await peer.heartbeat(producers=("PG", "CLIENT_INNER_PRODUCER"))
        other = cluster.peer()
        await other.heartbeat("c2")
        answer = await peer.call(
            RequestCode.UNREGISTER_CLIENT,
            UnregisterClientRequestHeader(client_id="c1", producer_group="PG", consumer_group="G"),
        )
        assert (answer.code, answer.ext) == (0, {})
        await other.notice(NOTIFY)
        assert await consumer_ids(peer) == ["c2"]
        assert list(cluster.broker.parts.producers.groups) == ["CLIENT_INNER_PRODUCER"]

    async def test_a_group_nobody_is_in(self, peer):
        answer = await consumer_ids(peer, "Empty")
        assert (answer.code, answer.remark, answer.ext) == (1, "no consumer for this group, Empty", {})

    async def test_a_heartbeat_makes_the_group_and_its_retry_topic(self, cluster, peer):
        await peer.heartbeat()
        parts = cluster.broker.parts
        retry = parts.tables.topics.table["%RETRY%G"]
        assert (retry.read_queue_nums, retry.write_queue_nums, retry.perm) == (1, 1, 6)
        assert "G" in parts.tables.groups.table
        await cluster.restart()
        parts = cluster.broker.parts
        assert "%RETRY%G" in parts.tables.topics.table
        assert "G" in parts.tables.groups.table

    async def test_a_route_query_makes_nothing(self, cluster, peer):
        namesrv = cluster.peer(cluster.namesrv_addr)
        assert (await namesrv.call(105, None, ext={"topic": "%RETRY%G"})).code == 17
        assert "%RETRY%G" not in cluster.broker.parts.tables.topics.table

    async def test_enums_as_ordinals_and_missing_sets(self, cluster, peer):
        body = (
            b'{clientID:"cpp","consumerDataSet":[{"groupName":"G","consumeType":0,"messageModel":0,'
            b'"consumeFromWhere":4,"subscriptionDataSet":[{"topic":"T","subString":"*","subVersion":"3"}]}]}'
        )
        assert (await peer.call(RequestCode.HEART_BEAT, None, body, language="CPP")).code == 0
        known = cluster.broker.parts.consumers.groups["G"]
        assert (known.consume_type, known.message_model) == ("CONSUME_ACTIVELY", "BROADCASTING")
        assert known.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
        assert known.subscriptions["T"].sub_version == 3
        assert known.find("cpp").language == "CPP"
        assert (await peer.call(RequestCode.HEART_BEAT, None, b"{}")).code == 0

    @pytest.mark.parametrize(("text", "kept"), [("SIMPLE_CONSUMER", "SIMPLE_CONSUMER"), ("x" * 9999, "")])
    async def test_only_known_types_of_grpc_clients_are_kept(self, cluster, peer, text, kept):
        body = HeartbeatData(client_id="c", consumer_data_set=[ConsumerData(group_name="G")]).encode()
        await peer.call(RequestCode.HEART_BEAT, None, body, ext={"grpcType": text})
        assert cluster.broker.parts.consumers.groups["G"].find("c").grpc_type == kept

    @pytest.mark.parametrize("body", [b"", b"nonsense", b"[1", b'{"consumerDataSet":[{}]}'])
    async def test_a_body_that_cannot_be_read_is_answered_with_1(self, peer, body):
        assert (await peer.call(RequestCode.HEART_BEAT, None, body)).code == 1
        assert (await peer.heartbeat()).code == 0

    async def test_silent_clients_lose_their_connection(self, cluster, peer, monkeypatch):
        await peer.heartbeat(producers=("PG",))
        parts = cluster.broker.parts
        now_s = Clock().monotonic()
        later = now_s + (EXPIRED_MS + 1) / 1000
        monkeypatch.setattr(Clock, "monotonic", lambda self: later)
        parts.clients.expire()
        await until(lambda: peer.remoting.connection(peer.addr) is None)
        assert parts.consumers.groups == {}
        assert parts.producers.groups == {}

    @pytest.mark.parametrize("step_s", [-86_400 * 365, -121, 61, 121, 86_400 * 365])
    async def test_a_clock_that_is_set_closes_nobody_and_frees_nothing(self, stepping, step_s):
        broker, clock, peer, other = stepping
        clock.now_ms += step_s * 1000
        broker.parts.clients.expire()
        assert await consumer_ids(peer) == ["c1"]
        assert await locked(other, "c2") == []
        assert len(broker.parts.locks) == len(QUEUES)
        shown = ProducerTableInfo.decode((await peer.call(RequestCode.GET_ALL_PRODUCER_INFO)).body)
        assert shown.data["PG"][0].last_update_timestamp == clock.now_ms
        answer = await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = KVTable.decode(answer.body).table
        assert table["runtime"].startswith("[ 0 days, 0 hours, 0 minutes, 0 seconds ]")

    async def test_time_that_goes_by_does_whatever_the_clock_says(self, stepping):
        broker, clock, peer, other = stepping
        clock.now_s += LOCK_LIVE_MS / 1000 + 0.1
        clock.now_ms -= 86_400_000
        broker.parts.clients.expire()
        assert len(broker.parts.locks) == 0
        assert await locked(other, "c2") == list(QUEUES)
        clock.now_s += (EXPIRED_MS - LOCK_LIVE_MS) / 1000
        broker.parts.clients.expire()
        await until(lambda: peer.remoting.connection(peer.addr) is None)

    async def test_after_sleep_locks_are_free_and_clients_have_time_to_report(self, stepping):
        broker, clock, peer, other = stepping
        clock.sleep(EXPIRED_MS / 1000 + 1)
        broker.parts.clients.expire()
        assert await locked(other, "c2") == list(QUEUES)
        assert await consumer_ids(peer) == ["c1"]


@pytest.fixture
async def stepping(tmp_path):
    """Start a broker with a manual clock and two clients; the first is a member that owns both queues."""
    clock = ManualClock()
    async with running(tmp_path, clock=clock) as (broker, peer), Peer(broker.addr) as other:
        await peer.heartbeat("c1", producers=("PG",))
        assert await locked(peer, "c1") == list(QUEUES)
        yield broker, clock, peer, other


class TestBounds:
    """Limits on the memory and work that one connection can cause."""

    async def beat(self, peer, groups=(), producers=(), client_id="c1"):
        data = HeartbeatData(
            client_id=client_id,
            consumer_data_set=[
                ConsumerData(group_name=name, subscription_data_set=list(subscriptions))
                for name, subscriptions in groups
            ],
            producer_data_set=[ProducerData(group_name=name) for name in producers],
        )
        return await peer.call(RequestCode.HEART_BEAT, None, data.encode())

    @pytest.mark.parametrize(
        ("beat", "words"),
        [
            ({"groups": [(f"G{n}", ()) for n in range(MAX_GROUPS + 1)]}, "1001 consumer and producer groups"),
            ({"groups": [("G", ())] * (MAX_GROUPS + 1)}, "at most 1000"),
            ({"producers": [f"P{n}" for n in range(MAX_GROUPS + 1)]}, "1001 consumer and producer groups"),
            (
                {"groups": [("G", [subscription(f"T{n}") for n in range(1_001)])]},
                "more than 1000 subscriptions: 1001",
            ),
            (
                {"groups": [(f"G{n}", [subscription("T", 1, "tag||" * 5_000)]) for n in range(501)]},
                "long subscriptions count several times",
            ),
            ({"client_id": "c" * 1_025}, "more than 1024 characters: 1025"),
        ],
    )
    async def test_a_heartbeat_that_says_too_much_is_refused_whole(self, cluster, peer, beat, words):
        refused(await self.beat(peer, **beat), 1, words)
        parts = cluster.broker.parts
        assert (parts.consumers.groups, parts.producers.groups) == ({}, {})
        assert "%RETRY%G0" not in parts.tables.topics.table

    async def test_a_heartbeat_is_not_read_if_it_names_too_much(self, peer):
        groups = b",".join([b'{"groupName":"G"}'] * 50_000)
        answer = await peer.call(RequestCode.HEART_BEAT, body=b'{"producerDataSet":[%b]}' % groups)

        said = "the heartbeat has more than 50000 groups and subscriptions: 50001"
        assert (answer.code, answer.remark) == (1, said)

    async def test_many_heartbeats_bring_no_more_groups_than_one(self, cluster, peer):
        for start in range(0, MAX_GROUPS, 250):
            names = [f"{start + n}" for n in range(250)]
            assert (await self.beat(peer, [("G" + n, ()) for n in names], ["P" + n for n in names])).code == 0
        assert (await self.beat(peer, [("one more", ())])).code == 1
        assert (await self.beat(peer, (), ["one more"])).code == 1
        assert (await self.beat(peer, [("G7", [subscription("T")])], ["P7"])).code == 0
        leaving = UnregisterClientRequestHeader(client_id="c1", producer_group="P7", consumer_group="G7")
        assert (await peer.call(RequestCode.UNREGISTER_CLIENT, leaving)).code == 0
        assert (await self.beat(peer, [("one-more", ())], ["one-more"])).code == 0
        parts = cluster.broker.parts
        assert len(parts.consumers.groups) == len(parts.producers.groups) == MAX_GROUPS
        await peer.close()
        await until(lambda: not parts.producers.groups)
        assert parts.consumers.groups == {}
        assert parts.consumers.groups_of == parts.producers.groups_of == {}

    async def test_groups_and_topics_come_by_themselves_up_to_a_number(self, cluster, peer, monkeypatch):
        parts = cluster.broker.parts
        monkeypatch.setattr(
            subscription_groups, "MAX_AUTO_CREATED_GROUPS", len(parts.tables.groups.table) + 3
        )
        monkeypatch.setattr(
            "cometmq.broker.tables.topics.BYTES_BY_SEND", parts.tables.topics.registered_bytes + 1000
        )
        for start in range(0, 10, 2):
            assert (await self.beat(peer, [(f"G{start + n}", ()) for n in range(2)])).code == 0
        made = {name for name in parts.tables.groups.table if name.startswith("G")}
        assert made == {"G0", "G1", "G2"}
        retries = {name for name in parts.tables.topics.table if name.startswith("%")}
        assert retries == {"%RETRY%" + group for group in made}
        codes = [(await peer.send(f"T{n}")).code for n in range(5)]
        assert codes == [0, 0, 0, 17, 17]
        refused(await peer.send("%RETRY%elsewhere"), 17, "only administrators can create topics")
        assert (await peer.pull("T0", group="G9")).code == 26
        assert (await peer.set_group(b'{"groupName":"G9"}')).code == 0
        assert len(records(await peer.pull("T0", group="G9"))) == 1
        monkeypatch.setattr(
            "cometmq.broker.tables.subscription_groups.MAX_GROUPS", len(parts.tables.groups.table)
        )
        assert (await peer.set_group(b'{"groupName":"G9"}')).code == 0
        refused(await peer.set_group(b'{"groupName":"G10"}'), 1, "groups is reached")

    async def test_offsets_beyond_what_there_is_room_for_are_refused(self, peer, monkeypatch):
        monkeypatch.setattr("cometmq.broker.tables.consumer_offsets.MAX_OFFSETS", 3)
        codes = []
        for queue_id in (0, 1, 2, 3, 1):
            header = UpdateConsumerOffsetRequestHeader("G", "Nowhere", queue_id, commit_offset=5)
            codes.append((await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code)
        assert codes == [0, 0, 0, 1, 0]

    async def test_the_limits_of_topics_are_worked_out_once_for_all_groups_of_a_heartbeat(
        self, cluster, peer, monkeypatch
    ):
        worked_out = []
        really = attributes.limits
        monkeypatch.setattr(attributes, "limits", lambda table: worked_out.append(1) or really(table))
        assert (await self.beat(peer, [(f"G{n}", ()) for n in range(500)])).code == 0
        assert len(cluster.broker.parts.tables.topics.table) > 500
        assert 1 <= len(worked_out) <= 2

    async def test_subscriptions_that_alternate_are_told_once_in_a_while(self, peer):
        loop = asyncio.get_running_loop()
        begun = loop.time()
        changes = 0
        while loop.time() - begun < 2.5 * REST_S:
            both = [("G", [subscription("A")]), ("G", [subscription("B")])]
            assert (await self.beat(peer, both * 50)).code == 0
            changes += 100
        await asyncio.sleep(2 * REST_S)
        told = peer.notices.qsize()
        assert 2 <= told <= 2 + (loop.time() - begun) / REST_S < changes

    async def test_the_last_change_is_told_too(self, cluster, peer):
        """A member that was notified before the last one joined is notified again after that."""
        await peer.heartbeat("c0")
        others = [cluster.peer() for _ in range(5)]
        for number, other in enumerate(others, 1):
            await other.heartbeat(f"c{number}")
        members = []
        while len(members) < 6:
            await peer.notice(NOTIFY)
            members = await consumer_ids(peer)
        await asyncio.sleep(3 * REST_S)
        assert peer.notices.qsize() <= 2


class TestChecks:
    @pytest.mark.parametrize(
        ("kind", "expression", "version", "code", "words"),
        [
            ("TAG", "a", 407, 0, ""),
            ("", "a", 407, 0, ""),
            ("SQL92", "a > 1", 407, 0, ""),
            ("SQL92", "a > > 1", 407, 23, "column 5: '>' stands"),
            ("SQL92", "", 407, 23, "column 1: the expression ends"),
            ("SQL92", "a" * 10_000, 407, 23, "10000 characters, at most 8192"),
            ("SQL92", "contains > 1", 407, 0, ""),
            ("SQL92", "contains > 1", 453, 23, "column 1"),
            ("XPATH", "a > 1", 407, 23, "not XPATH"),
        ],
    )
    async def test_whether_a_subscription_would_be_served(self, peer, kind, expression, version, code, words):
        answer = await checked(peer, kind, expression, version=version)
        assert (answer.code, words in (answer.remark or "")) == (code, True), answer.remark

    async def test_a_broker_without_property_filters_refuses_them_with_their_name(self, started):
        _, peer = await started(enablePropertyFilter="false")
        refused(
            await checked(peer, "SQL92", "a > > 1"), 1, "does not support consumer to filter message by SQL92"
        )
        assert (await checked(peer, "TAG", "a")).code == 0


async def checked(peer, kind, expression, **request):
    data = SubscriptionData(topic="T", sub_string=expression, expression_type=kind)
    body = CheckClientRequestBody(client_id="c", group="G", subscription_data=data)
    return await peer.call(RequestCode.CHECK_CLIENT_CONFIG, None, body.encode(), **request)


class TestLocks:
    async def test_one_client_holds_a_queue(self, peer):
        assert await locked(peer, "c1") == list(QUEUES)
        assert await locked(peer, "c2") == []
        body = LockBatchBody(consumer_group="G", client_id="c1", mq_set=list(QUEUES[:1]))
        await peer.oneway(RequestCode.UNLOCK_BATCH_MQ, None, body.encode())
        assert await locked(peer, "c2") == list(QUEUES[:1])

    async def test_names_that_are_none_are_not_kept(self, cluster, peer):
        body = LockBatchBody("G", "c" * 2_000, list(QUEUES))
        answer = await peer.call(RequestCode.LOCK_BATCH_MQ, None, body.encode())
        assert (answer.code, "more than 1024 characters: 2000" in answer.remark) == (1, True)
        assert await locked(peer, "c1", [MessageQueue("T" * 1_000, "broker-a", 0), *QUEUES]) == list(QUEUES)
        assert len(cluster.broker.parts.locks) == len(QUEUES)


async def test_two_connections_change_a_group_together(cluster):
    peers = [cluster.peer() for _ in range(6)]
    await asyncio.gather(*(peer.heartbeat(f"c{n}") for n, peer in enumerate(peers)))
    assert sorted(await consumer_ids(peers[0])) == [f"c{n}" for n in range(6)]
    await asyncio.gather(*(peer.close() for peer in peers[1:]))
    known = cluster.broker.parts.consumers.groups["G"]
    await until(lambda: known.client_ids() == ["c0"])

"""Heartbeats, groups, change notices, queue locks: tables with a fake clock, requests over sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cometmq.broker.clients import EXPIRED_MS, ConsumerTable, ProducerTable
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    CheckClientRequestBody,
    ConsumerList,
    LockBatchBody,
    LockBatchResult,
    SubscriptionData,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import GetConsumerListByGroupRequestHeader, UnregisterClientRequestHeader
from cometmq.standalone import Standalone

from .conftest import Peer, records, until

T0 = 1_000_000
PUSH = ("CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET")
NOTIFY = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


def subscription(topic: str, version: int = 1, expression: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=expression, sub_version=version)


class TestConsumerTable:
    def register(self, table, channel, client_id, topics=("T",), version=1, now=T0):
        return table.register(
            "G", channel, (client_id, "JAVA", 407), PUSH, [subscription(t, version) for t in topics], now
        )

    def test_what_counts_as_a_change(self):
        table = ConsumerTable()
        assert self.register(table, "ch1", "c1")
        assert not self.register(table, "ch1", "c1")
        assert not self.register(table, "ch1", "c1", version=2)
        assert self.register(table, "ch1", "c1", topics=("T", "U"))
        assert self.register(table, "ch1", "c1", topics=("U",))
        assert self.register(table, "ch2", "c2", topics=("U",))
        assert self.register(table, "ch2", "another id on the same channel", topics=("U",))
        assert table.subscription("G", "T") is None

    def test_a_subscription_is_replaced_by_a_higher_version_only(self):
        table = ConsumerTable()
        table.register("G", "ch", ("c", "JAVA", 1), PUSH, [subscription("T", 5, "A")], T0)
        table.register("G", "ch", ("c", "JAVA", 1), PUSH, [subscription("T", 4, "B")], T0)
        assert table.subscription("G", "T").sub_string == "A"
        table.register("G", "ch", ("c", "JAVA", 1), PUSH, [subscription("T", 6, "C")], T0)
        assert table.subscription("G", "T").sub_string == "C"

    def test_silence_of_120_s_ends_a_membership_and_a_heartbeat_prolongs_it(self):
        table = ConsumerTable()
        self.register(table, "ch1", "c1")
        self.register(table, "ch2", "c2", now=T0 + 60_000)
        assert table.expire(T0 + EXPIRED_MS) == ([], [])
        assert table.expire(T0 + EXPIRED_MS + 1) == (["ch1"], ["G"])
        assert table.groups["G"].members.client_ids() == ["c2"]
        self.register(table, "ch2", "c2", now=T0 + 100_000)
        assert table.expire(T0 + 60_000 + EXPIRED_MS + 1) == ([], [])
        assert table.expire(T0 + 100_001 + EXPIRED_MS) == (["ch2"], ["G"])
        assert table.groups == {}

    def test_a_closed_channel_leaves_every_group(self):
        table = ConsumerTable()
        for group in ("G", "H"):
            table.register(group, "ch1", ("c1", "JAVA", 1), PUSH, [], T0)
        table.register("H", "ch2", ("c2", "JAVA", 1), PUSH, [], T0)
        assert table.channel_closed("ch1") == ["G", "H"]
        assert list(table.groups) == ["H"]
        assert table.channel_closed("ch1") == []
        assert not table.unregister("Nobody", "ch1")

    def test_a_client_that_reconnects_is_listed_once(self):
        table = ConsumerTable()
        self.register(table, "old", "c1")
        self.register(table, "new", "c1")
        assert table.groups["G"].members.client_ids() == ["c1"]
        assert table.groups["G"].members.find("c1").channel == "new"
        assert table.groups["G"].members.find("c9") is None


def test_producers_come_stay_and_go():
    table = ProducerTable()
    for group in ("P", "Q"):
        table.register(group, "ch1", "c1", "GO", 317, T0)
    table.register("P", "ch2", "c2", "JAVA", 407, T0 + 1000)
    assert table.find_client("c1").language == "GO"
    table.unregister("Q", "ch1")
    assert list(table.groups) == ["P"]
    assert table.expire(T0 + EXPIRED_MS + 1) == ["ch1"]
    table.channel_closed("ch2")
    assert table.groups == {}
    assert table.find_client("c1") is None


async def consumer_ids(peer, group="G"):
    answer = await peer.call(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListByGroupRequestHeader(consumer_group=group)
    )
    if answer.code:
        return answer
    return ConsumerList.decode(answer.body).consumer_id_list


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
        settings = b'{"groupName":"Quiet","notifyConsumerIdsChangedEnable":false}'
        await peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, settings)
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
        assert list(cluster.broker.parts.context.producers.groups) == ["CLIENT_INNER_PRODUCER"]

    async def test_a_group_nobody_is_in(self, peer):
        answer = await consumer_ids(peer, "Empty")
        assert (answer.code, answer.remark, answer.ext) == (1, "no consumer for this group, Empty", {})

    async def test_a_heartbeat_makes_the_group_and_its_retry_topic(self, cluster, peer):
        await peer.heartbeat()
        context = cluster.broker.parts.context
        retry = context.topics.table["%RETRY%G"]
        assert (retry.read_queue_nums, retry.write_queue_nums, retry.perm) == (1, 1, 6)
        assert "G" in context.groups.table
        await cluster.restart()
        context = cluster.broker.parts.context
        assert "%RETRY%G" in context.topics.table
        assert "G" in context.groups.table

    async def test_a_route_query_makes_nothing(self, cluster, peer):
        namesrv = cluster.peer(cluster.namesrv_addr)
        assert (await namesrv.call(105, None, ext={"topic": "%RETRY%G"})).code == 17
        assert "%RETRY%G" not in cluster.broker.parts.context.topics.table

    async def test_enums_as_ordinals_and_missing_sets(self, cluster, peer):
        body = (
            b'{clientID:"cpp","consumerDataSet":[{"groupName":"G","consumeType":0,"messageModel":0,'
            b'"consumeFromWhere":4,"subscriptionDataSet":[{"topic":"T","subString":"*","subVersion":"3"}]}]}'
        )
        assert (await peer.call(RequestCode.HEART_BEAT, None, body, language="CPP")).code == 0
        known = cluster.broker.parts.context.consumers.groups["G"]
        assert (known.consume_type, known.message_model, known.consume_from_where) == (
            "CONSUME_ACTIVELY",
            "BROADCASTING",
            "CONSUME_FROM_FIRST_OFFSET",
        )
        assert known.subscriptions["T"].sub_version == 3
        assert known.members.find("cpp").language == "CPP"
        assert (await peer.call(RequestCode.HEART_BEAT, None, b"{}")).code == 0

    @pytest.mark.parametrize("body", [b"", b"nonsense", b"[1", b'{"consumerDataSet":[{}]}'])
    async def test_a_body_that_cannot_be_read_is_answered_with_1(self, peer, body):
        assert (await peer.call(RequestCode.HEART_BEAT, None, body)).code == 1
        assert (await peer.heartbeat()).code == 0

    async def test_silent_clients_lose_their_connection(self, cluster, peer, monkeypatch):
        await peer.heartbeat(producers=("PG",))
        parts = cluster.broker.parts
        now = parts.context.clock.time_ms()
        monkeypatch.setattr(type(parts.context.clock), "time_ms", lambda self: now + EXPIRED_MS + 1)
        parts.clients.expire()
        await until(lambda: peer.remoting.connection(peer.addr) is None)
        assert parts.context.consumers.groups == {}
        assert parts.context.producers.groups == {}


class TestChecks:
    @pytest.mark.parametrize(("kind", "code"), [("TAG", 0), (None, 0), ("SQL92", 1)])
    async def test_whether_a_subscription_would_be_served(self, peer, kind, code):
        data = SubscriptionData(topic="T", sub_string="a", expression_type=kind or "")
        body = CheckClientRequestBody(client_id="c", group="G", subscription_data=data)
        assert (await peer.call(RequestCode.CHECK_CLIENT_CONFIG, None, body.encode())).code == code


class TestLocks:
    QUEUES = tuple(MessageQueue("Orders", "broker-a", n) for n in range(2))

    async def lock(self, peer, client_id):
        body = LockBatchBody(consumer_group="G", client_id=client_id, mq_set=list(self.QUEUES))
        answer = await peer.call(RequestCode.LOCK_BATCH_MQ, None, body.encode())
        return LockBatchResult.decode(answer.body).lock_ok_mq_set

    async def test_one_client_holds_a_queue(self, peer):
        assert await self.lock(peer, "c1") == list(self.QUEUES)
        assert await self.lock(peer, "c2") == []
        body = LockBatchBody(consumer_group="G", client_id="c1", mq_set=list(self.QUEUES[:1]))
        await peer.oneway(RequestCode.UNLOCK_BATCH_MQ, None, body.encode())
        assert await self.lock(peer, "c2") == list(self.QUEUES[:1])


async def test_unknown_codes_are_answered_as_apache_does(peer):
    answer = await peer.call(9999)
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


async def test_two_connections_change_a_group_together(cluster):
    peers = [cluster.peer() for _ in range(6)]
    await asyncio.gather(*(peer.heartbeat(f"c{n}") for n, peer in enumerate(peers)))
    assert sorted(await consumer_ids(peers[0])) == [f"c{n}" for n in range(6)]
    await asyncio.gather(*(peer.close() for peer in peers[1:]))
    known = cluster.broker.parts.context.consumers.groups["G"]
    await until(lambda: known.members.client_ids() == ["c0"])


def two_free_ports_apart() -> int:
    """A port P so that P and P-2 are free now."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port - 2)):
                    return port
            except OSError:
                continue


class TestFastPort:
    async def test_it_serves_everything_but_pulls(self, tmp_path):
        port = two_free_ports_apart()
        async with Standalone(tmp_path, 0, port):
            vip = Peer(f"127.0.0.1:{port - 2}")
            assert (await vip.send()).code == 0
            assert (await vip.heartbeat()).code == 0
            refused = await vip.pull()
            assert (refused.code, refused.remark) == (3, " request type 11 not supported")
            main = Peer(f"127.0.0.1:{port}")
            assert len(records(await main.pull())) == 1
            await vip.close()
            await main.close()

    async def test_a_taken_fast_port_is_a_warning_and_no_more(self, tmp_path, caplog):
        port = two_free_ports_apart()
        with socket.create_server(("127.0.0.1", port - 2)):
            async with Standalone(tmp_path, 0, port):
                main = Peer(f"127.0.0.1:{port}")
                assert (await main.send()).code == 0
                await main.close()
        assert f"port {port - 2}" in caplog.text

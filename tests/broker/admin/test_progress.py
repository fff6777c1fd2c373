"""Requests of tools about queues and about the progress of consumer groups."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.broker.pop.conftest import RETRY_TOPIC, PopClient
from tests.kit.brokers import commit, create, queue, records, refused
from tests.kit.waiting import until

from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    BrokerConsumeStats,
    BrokerStatsData,
    ConsumerOffsetTable,
    ConsumeStats,
    GroupList,
    QueryConsumeQueueBody,
    QueryConsumeTimeSpanBody,
    QueryCorrectionOffsetBody,
    TopicStatsTable,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    CloneGroupOffsetRequestHeader,
    GetConsumeStatsRequestHeader,
    GroupTopicRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryCorrectionOffsetRequestHeader,
    TopicRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from cometmq.protocol.properties.values import java_hash

NEW = 513
INT64_MAX = 2**63 - 1


class TestProgress:
    async def test_of_a_topic(self, peer):
        await create(peer)
        for _ in range(3):
            await peer.send(queue_id=1)
        answer = await peer.call(RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic="Orders"))
        table = TopicStatsTable.decode(answer.body).offset_table
        assert {q.queue_id: (o.min_offset, o.max_offset) for q, o in table.items()} == {0: (0, 0), 1: (0, 3)}
        last = records(await peer.pull(queue_id=1, offset=2))[0].store_timestamp_ms
        assert (table[queue(1)].last_update_timestamp, table[queue(0)].last_update_timestamp) == (last, 0)
        assert (await peer.call(RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic="X"))).code == 17

    async def stats(self, peer, **header):
        answer = await peer.call(
            RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="G", **header)
        )
        assert answer.code == 0
        return ConsumeStats.decode(answer.body).offset_table

    async def test_of_a_groups_progress(self, peer):
        await create(peer)
        for _ in range(3):
            await peer.send(queue_id=1)
        assert await self.stats(peer) == {}
        await commit(peer, 1, 2)
        await commit(peer, 0, 9, topic="Gone")
        table = await self.stats(peer)
        progress = table[queue(1)]
        second = records(await peer.pull(queue_id=1, offset=1))[0]
        assert (progress.broker_offset, progress.consumer_offset) == (3, 2)
        assert progress.last_timestamp == second.store_timestamp_ms
        assert (table[queue(0)].broker_offset, table[queue(0)].consumer_offset) == (0, 0)
        assert len(table) == 2
        assert len(await self.stats(peer, topic="Orders")) == 2
        assert await self.stats(peer, topic="Elsewhere") == {}
        await peer.heartbeat(topics={"Other": "*"})
        assert await self.stats(peer) == {}  # the group is online and does not subscribe to Orders

    async def test_of_a_group_that_pops(self, cluster, peer):
        await create(peer, "Orders", 1, 1)
        await peer.send_numbers(5)
        await peer.heartbeat(consume_type="CONSUME_POP")
        consumer = PopClient(peer)
        popped = await consumer.pop(3)
        await consumer.ack(popped.handles[1])
        row = (await self.stats(peer))[queue(0)]
        # Messages 0 and 2 are leased, 3 and 4 are ready
        assert (row.broker_offset, row.consumer_offset, row.pull_offset, row.leased) == (5, 0, 3, 2)
        assert row.oldest_pop_time == popped.handles[0].pop_time_ms
        for handle in popped.handles[::2]:
            await consumer.ack(handle)
        row = (await self.stats(peer))[queue(0)]
        assert (row.consumer_offset, row.pull_offset, row.leased, row.oldest_pop_time) == (3, 3, 0, None)

    async def test_retries_of_an_online_group_that_pops_count(self, cluster, peer):
        await create(peer, "Orders", 1, 1)
        await peer.send()
        await peer.heartbeat(consume_type="CONSUME_POP")
        await PopClient(peer).pop(invisible_ms=1)
        offsets = cluster.broker.parts.tables.offsets
        await until(lambda: offsets.query("G", "Orders", 0) == 1)
        table = await self.stats(peer)
        assert table[queue(0)].leased == 0
        row = table[MessageQueue(RETRY_TOPIC, "broker-a", 0)]
        assert (row.broker_offset, row.consumer_offset, row.leased) == (1, 0, 0)

    async def test_who_consumes_a_topic(self, peer):
        await commit(peer, 0, 1, group="ByOffset")
        await peer.heartbeat(group="BySubscription")
        answer = await peer.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequestHeader(topic="Orders"))
        assert GroupList.decode(answer.body).group_list == ["ByOffset", "BySubscription"]

    async def test_the_entries_of_a_queue(self, peer):
        for tag in ("A", "B", "C"):
            await peer.send(properties={"TAGS": tag})
        sizes = [message.store_size for message in records(await peer.pull())]
        header = QueryConsumeQueueRequestHeader(
            topic="Orders", queue_id=0, index=1, count=9, consumer_group="G"
        )
        body = QueryConsumeQueueBody.decode((await peer.call(RequestCode.QUERY_CONSUME_QUEUE, header)).body)
        assert (body.min_queue_index, body.max_queue_index) == (0, 3)
        assert [(entry.physic_offset, entry.physic_size, entry.tags_code) for entry in body.queue_data] == [
            (sizes[0], sizes[1], java_hash("B")),
            (sizes[0] + sizes[1], sizes[2], java_hash("C")),
        ]
        assert "not online" in body.filter_data
        for bad in (
            QueryConsumeQueueRequestHeader(topic="Orders", queue_id=0, index=3, count=1),
            QueryConsumeQueueRequestHeader(topic="X", queue_id=0, index=0, count=1),
        ):
            assert (await peer.call(RequestCode.QUERY_CONSUME_QUEUE, bad)).code == 1

    async def test_the_times_of_a_topics_queues(self, peer):
        await create(peer)
        for _ in range(3):
            await peer.send()
            await asyncio.sleep(0.01)
        await commit(peer, 0, 2)
        header = GroupTopicRequestHeader(topic="Orders", group="G")
        answer = await peer.call(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
        used, empty = QueryConsumeTimeSpanBody.decode(answer.body).consume_time_span_set
        times = [message.store_timestamp_ms for message in records(await peer.pull())]
        assert used.message_queue == queue(0)
        assert (used.min_time_stamp, used.max_time_stamp) == (times[0], times[2])
        assert used.consume_time_stamp == times[1]
        assert used.delay_time >= 0
        assert used.min_time_stamp_str.endswith(f":{times[0] % 1000:03d}")
        assert (empty.min_time_stamp, empty.max_time_stamp, empty.delay_time) == (-1, -1, 0)
        header = GroupTopicRequestHeader(topic="X", group="G")
        assert (await peer.call(RequestCode.QUERY_CONSUME_TIME_SPAN, header)).code == 17

    async def test_offsets_are_cloned(self, cluster, peer):
        await create(peer)
        await commit(peer, 0, 4)
        await commit(peer, 0, 9, topic="Gone")
        header = CloneGroupOffsetRequestHeader(src_group="G", dest_group="H")
        assert (await peer.call(RequestCode.CLONE_GROUP_OFFSET, header)).code == 0
        offsets = cluster.broker.parts.tables.offsets
        assert (offsets.query("H", "Orders", 0), offsets.query("H", "Gone", 0)) == (4, -1)
        await peer.heartbeat(topics={"Other": "*"})
        header = CloneGroupOffsetRequestHeader(src_group="G", dest_group="I")
        await peer.call(RequestCode.CLONE_GROUP_OFFSET, header)
        assert offsets.query("I", "Orders", 0) == -1  # the online source group does not subscribe to it

    @pytest.mark.parametrize(
        ("left_out", "compared", "expected"),
        [
            (None, "X", {0: 2, 1: 4}),
            ("H", "X", {0: 3}),
            ("G,H", "X", {}),
            (None, "G", {0: 2, 1: 4}),
            (None, "H", {0: 2, 1: 4}),
            ("H", "H", {0: INT64_MAX}),
        ],
    )
    async def test_correction_offsets_are_the_lowest_of_all_groups(
        self, cluster, peer, left_out, compared, expected
    ):
        await create(peer)
        for group, queue_id, offset in (("G", 0, 3), ("H", 0, 2), ("H", 1, 4), ("behind", 0, -1)):
            cluster.broker.parts.tables.offsets.commit(group, "Orders", queue_id, offset)
        header = QueryCorrectionOffsetRequestHeader(
            topic="Orders", compare_group=compared, filter_groups=left_out
        )
        answer = await peer.call(RequestCode.QUERY_CORRECTION_OFFSET, header)
        assert QueryCorrectionOffsetBody.decode(answer.body).correction_offsets == expected

    async def test_the_progress_of_all_groups(self, cluster, peer):
        await create(peer)
        await peer.send_numbers(5)
        await peer.pull()  # creates the group
        await commit(peer, 0, 2)
        answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, None, ext={"isOrder": "false"})
        body = BrokerConsumeStats.decode(answer.body)
        assert (body.broker_addr, body.total_diff) == (cluster.addr, 3)
        tables = {group: tables for row in body.consume_stats_list for group, tables in row.items()}
        assert tables["G"][0].offset_table[queue(0)].consumer_offset == 2
        assert tables["TOOLS_CONSUMER"] == []
        answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, None, ext={"isOrder": "true"})
        assert BrokerConsumeStats.decode(answer.body).total_diff == 0

    async def test_a_group_that_only_has_offsets_is_among_all_groups(self, cluster, peer):
        await create(peer)
        await peer.send_numbers(5)
        cluster.broker.parts.tables.offsets.commit("stored", "Orders", 0, 0)
        assert "stored" not in cluster.broker.parts.tables.groups.table
        answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, None, ext={"isOrder": "false"})
        body = BrokerConsumeStats.decode(answer.body)
        assert body.total_diff == 5
        assert [
            tables for row in body.consume_stats_list for group, tables in row.items() if group == "stored"
        ]

    async def test_the_rate_counts_topics_without_stored_offsets(self, cluster, peer):
        await create(peer)
        await peer.send_numbers(5)
        await peer.heartbeat(topics={"Orders": "*"})
        await peer.pull()
        await asyncio.sleep(0.01)
        answer = await peer.call(
            RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="G")
        )
        stats = ConsumeStats.decode(answer.body)
        assert (stats.offset_table, stats.consume_tps > 0) == ({}, True)

    async def test_groups_with_members_are_named_beside_the_offsets(self, started):
        cluster, peer = await started(autoCreateSubscriptionGroup="false")
        await peer.heartbeat(topics={"Orders": "*"})
        assert "G" not in cluster.broker.parts.tables.groups.table
        answer = await peer.call(RequestCode.GET_ALL_CONSUMER_OFFSET)
        table = ConsumerOffsetTable.decode(answer.body)
        assert (table.offset_table, table.online_groups) == ({}, ["G"])

    async def test_what_5_x_tools_ask_of_a_group(self, cluster, peer):
        await commit(peer, 0, 2)
        await peer.heartbeat(topics={"Orders": "TagA"})
        answer = await peer.call(RequestCode.QUERY_TOPICS_BY_CONSUMER, None, ext={"group": "G"}, version=NEW)
        assert json.loads(bytes(answer.body)) == {"brokerAddr": cluster.addr, "topicList": ["Orders"]}
        ext = {"group": "G", "topic": "Orders"}
        answer = await peer.call(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, None, ext=ext, version=NEW)
        body = json.loads(bytes(answer.body))
        assert (body["group"], body["topic"]) == ("G", "Orders")
        assert body["subscriptionData"]["subString"] == "TagA"
        answer = await peer.call(
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, None, ext={"group": "X"}, version=NEW
        )
        assert json.loads(bytes(answer.body)) == {"group": "X", "topic": ""}


class TestCounted:
    async def counted(self, peer, name, key):
        header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
        return await peer.call(RequestCode.VIEW_BROKER_STATS_DATA, header)

    async def test_messages_into_a_topic_and_out_of_it(self, peer):
        await create(peer)
        for _ in range(3):
            await peer.send(queue_id=1)
        await peer.pull(queue_id=1)
        came = BrokerStatsData.decode((await self.counted(peer, "TOPIC_PUT_NUMS", "Orders")).body)
        assert (came.stats_minute.sum, came.stats_hour.sum, came.stats_day.sum) == (3, 3, 3)
        assert came.stats_minute.tps >= came.stats_day.tps > 0
        went = BrokerStatsData.decode((await self.counted(peer, "GROUP_GET_NUMS", "Orders@G")).body)
        assert went.stats_minute.sum == 3

    async def test_messages_of_the_whole_broker(self, peer):
        """rocketmq-exporter derives rocketmq_broker_tps and _qps from these values."""
        await peer.send_numbers(3)
        await peer.send("Other")
        await peer.pull()
        for name, count in (("BROKER_PUT_NUMS", 4), ("BROKER_GET_NUMS", 3)):
            found = BrokerStatsData.decode((await self.counted(peer, name, "DefaultCluster")).body)
            assert (found.stats_minute.sum, found.stats_day.sum) == (count, count)
            refused(
                await self.counted(peer, name, "Elsewhere"), 1, f"The stats <{name}> <Elsewhere> not exist"
            )

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("TOPIC_PUT_NUMS", "Orders"),
            ("TOPIC_PUT_NUMS", "Nowhere"),
            ("TOPIC_PUT_NUMS", "Orders@G"),
            ("GROUP_GET_NUMS", "Orders"),
            ("GROUP_GET_NUMS", "Orders@G"),
            ("QUEUE_PUT_NUMS", "Orders@0"),
        ],
    )
    async def test_what_was_not_counted(self, peer, name, key):
        await create(peer)
        refused(await self.counted(peer, name, key), 1, f"The stats <{name}> <{key}> not exist")

"""What the tools ask of a broker, over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.broker.conftest import records, until

from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    BrokerConsumeStats,
    ConsumerConnection,
    ConsumeStats,
    GetConsumerStatusBody,
    GroupList,
    KVTable,
    ProducerConnection,
    ProducerTableInfo,
    QueryConsumeQueueBody,
    QueryConsumeTimeSpanBody,
    ResetOffsetBody,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TopicConfig,
    TopicConfigTable,
    TopicList,
    TopicRouteData,
    TopicStatsTable,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    CloneGroupOffsetRequestHeader,
    ConsumeMessageDirectlyRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicRequestHeader,
    GetConsumerConnectionListRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    GetConsumeStatsRequestHeader,
    GetProducerConnectionListRequestHeader,
    GetRouteInfoRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryConsumeTimeSpanRequestHeader,
    ResetOffsetRequestHeader,
    TopicRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.protocol.java_properties import parse_properties
from cometmq.protocol.properties.values import java_hash

NEW = 513


def queue(number: int, topic: str = "Orders") -> MessageQueue:
    return MessageQueue(topic, "broker-a", number)


async def create(peer, topic="Orders", read=2, write=2, perm=6, version=407, **more):
    header = CreateTopicRequestHeader(
        topic=topic, read_queue_nums=read, write_queue_nums=write, perm=perm, default_topic="TBW102", **more
    )
    return await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header, version=version)


async def commit(peer, queue_id, offset, group="G", topic="Orders"):
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
    )
    assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code == 0


class TestTopics:
    async def test_a_created_topic_is_in_the_route_when_the_answer_comes(self, cluster, peer):
        assert (await create(peer, read=3, write=2, perm=6, topic_filter_type="SINGLE_TAG")).code == 0
        namesrv = cluster.peer(cluster.namesrv_addr)
        answer = await namesrv.call(105, GetRouteInfoRequestHeader(topic="Orders"))
        (data,) = TopicRouteData.decode(answer.body).queue_datas
        assert (data.broker_name, data.read_queue_nums, data.write_queue_nums, data.perm) == (
            "broker-a",
            3,
            2,
            6,
        )

    async def test_a_change_counts_for_the_next_send(self, peer):
        await create(peer, write=1, read=1)
        assert (await peer.send(queue_id=1)).code == 1
        await create(peer, write=4, read=4)
        assert (await peer.send(queue_id=1)).code == 0

    @pytest.mark.parametrize(
        ("topic", "more", "code"),
        [
            ("TBW102", {}, 1),
            ("broker-a", {}, 1),
            ("DefaultCluster", {}, 1),
            ("rmq_sys_x", {}, 1),
            ("a b", {}, 1),
            ("TBW102", {"version": NEW}, 29),
            ("Fine", {"topic_filter_type": "ODD"}, 1),
            ("Fine", {"perm": 99}, 1),
            ("Fine", {"write": -1}, 1),
        ],
    )
    async def test_what_cannot_be_created(self, cluster, peer, topic, more, code):
        before = cluster.broker.parts.context.topics.version
        assert (await create(peer, topic, **more)).code == code
        assert cluster.broker.parts.context.topics.version == before

    async def test_deleting_takes_queues_and_offsets_along(self, cluster, peer):
        await peer.send()
        await commit(peer, 0, 1)
        pulling = asyncio.create_task(peer.pull(offset=1, hold_ms=15_000))
        await until(lambda: len(cluster.broker.parts.pulls.long_poll))
        assert (
            await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequestHeader(topic="Orders"))
        ).code == 0
        assert (await pulling).code != 0
        assert (await peer.pull()).code == 17
        await peer.send(body=b"new life")
        assert [m.queue_offset for m in records(await peer.pull())] == [0]
        assert cluster.broker.parts.context.offsets.query("G", "Orders", 0) == -1

    async def test_deleting_the_unknown_is_fine_and_the_systems_own_is_not(self, peer):
        for topic, code in (("Nothing", 0), ("TBW102", 1)):
            header = DeleteTopicRequestHeader(topic=topic)
            assert (await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, header)).code == code

    async def test_tables_and_single_topics_are_shown(self, peer):
        await create(peer)
        answer = await peer.call(RequestCode.GET_ALL_TOPIC_CONFIG)
        table = TopicConfigTable.decode(answer.body)
        assert table.topic_config_table["Orders"].write_queue_nums == 2
        assert table.data_version.counter > 0
        assert {"TBW102", "SELF_TEST_TOPIC", "SCHEDULE_TOPIC_XXXX", "BenchmarkTest", "broker-a"} <= set(
            table.topic_config_table
        )
        answer = await peer.call(
            RequestCode.GET_TOPIC_CONFIG, TopicRequestHeader(topic="Orders"), version=NEW
        )
        assert TopicConfig.decode(answer.body).read_queue_nums == 2
        assert (await peer.call(RequestCode.GET_TOPIC_CONFIG, TopicRequestHeader(topic="X"))).code == 17
        answer = await peer.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
        assert {"TBW102", "broker-a", "DefaultCluster"} <= set(TopicList.decode(answer.body).topic_list)

    async def test_the_name_servers_list_of_ordered_topics_sets_the_flag(self, cluster, peer):
        await create(peer)
        namesrv = cluster.peer(cluster.namesrv_addr)
        ext = {"namespace": "ORDER_TOPIC_CONFIG", "key": "Orders", "value": "broker-a:2"}
        assert (await namesrv.call(100, None, ext=ext)).code == 0
        await create(peer, "Another")  # any registration brings the answer
        topics = cluster.broker.parts.context.topics
        await until(lambda: topics.table["Orders"].order)
        assert not topics.table["Another"].order


class TestGroups:
    async def test_set_show_and_delete(self, cluster, peer):
        body = b'{"groupName":"G","retryMaxTimes":3,"consumeBroadcastEnable":false}'
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)).code == 0
        answer = await peer.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        table = SubscriptionGroupTable.decode(answer.body).subscription_group_table
        assert (
            table["G"].retry_max_times,
            table["G"].consume_broadcast_enable,
            table["G"].consume_enable,
        ) == (
            3,
            False,
            True,
        )
        assert "TOOLS_CONSUMER" in table
        answer = await peer.call(
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, None, ext={"group": "G"}, version=NEW
        )
        assert SubscriptionGroupConfig.decode(answer.body).retry_max_times == 3
        assert (
            await peer.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, None, ext={"group": "X"})
        ).code == 26
        await cluster.restart()
        assert cluster.broker.parts.context.groups.table["G"].retry_max_times == 3

    @pytest.mark.parametrize("flag", [None, "remove_offset", "clean_offset"])
    async def test_deleting_takes_the_offsets_only_if_asked(self, cluster, peer, flag):
        await peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, b'{"groupName":"G"}')
        await commit(peer, 0, 4)
        header = DeleteSubscriptionGroupRequestHeader(group_name="G", **({flag: True} if flag else {}))
        assert (await peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)).code == 0
        context = cluster.broker.parts.context
        assert "G" not in context.groups.table
        assert context.offsets.query("G", "Orders", 0) == (-1 if flag else 4)

    @pytest.mark.parametrize("body", [b"", b"{}", b'{"groupName":""}', b"no json"])
    async def test_a_group_that_cannot_be_read(self, peer, body):
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)).code == 1


class TestStatistics:
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
        assert await self.stats(peer) == {}  # an online group that does not subscribe the topic

    async def test_who_consumes_a_topic(self, peer):
        await commit(peer, 0, 1, group="ByOffset")
        await peer.heartbeat(group="BySubscription")
        answer = await peer.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequestHeader(topic="Orders"))
        assert GroupList.decode(answer.body).group_list == ["ByOffset", "BySubscription"]

    async def test_who_is_connected(self, peer):
        await peer.heartbeat("c1", topics={"Orders": "TagA"}, producers=("PG",), version=409)
        header = GetConsumerConnectionListRequestHeader(consumer_group="G")
        body = ConsumerConnection.decode(
            (await peer.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)).body
        )
        (client,) = body.connection_set
        assert (client.client_id, client.language, client.version) == ("c1", "PYTHON", 409)
        assert client.client_addr.startswith("127.0.0.1:")
        assert body.subscription_table["Orders"].code_set == [java_hash("TagA")]
        assert (body.consume_type, body.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
        header = GetProducerConnectionListRequestHeader(producer_group="PG")
        answer = await peer.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, header)
        assert [c.client_id for c in ProducerConnection.decode(answer.body).connection_set] == ["c1"]

    async def test_who_is_not(self, peer):
        header = GetConsumerConnectionListRequestHeader(consumer_group="X")
        assert (await peer.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)).code == 206
        header = GetProducerConnectionListRequestHeader(producer_group="X")
        assert (await peer.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, header)).code == 1

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


class TestGroupsAsAWhole:
    async def test_the_times_of_a_topics_queues(self, peer):
        await create(peer)
        for _ in range(3):
            await peer.send()
            await asyncio.sleep(0.01)
        await commit(peer, 0, 2)
        header = QueryConsumeTimeSpanRequestHeader(topic="Orders", group="G")
        answer = await peer.call(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
        used, empty = QueryConsumeTimeSpanBody.decode(answer.body).consume_time_span_set
        times = [message.store_timestamp_ms for message in records(await peer.pull())]
        assert (used.message_queue, used.min_time_stamp, used.max_time_stamp) == (
            queue(0),
            times[0],
            times[2],
        )
        assert used.consume_time_stamp == times[1]
        assert used.delay_time >= 0
        assert used.min_time_stamp_str.endswith(f":{times[0] % 1000:03d}")
        assert (empty.min_time_stamp, empty.max_time_stamp, empty.delay_time) == (-1, -1, 0)
        header = QueryConsumeTimeSpanRequestHeader(topic="X", group="G")
        assert (await peer.call(RequestCode.QUERY_CONSUME_TIME_SPAN, header)).code == 17

    async def test_offsets_are_cloned(self, cluster, peer):
        await create(peer)
        await commit(peer, 0, 4)
        await commit(peer, 0, 9, topic="Gone")
        header = CloneGroupOffsetRequestHeader(src_group="G", dest_group="H")
        assert (await peer.call(RequestCode.CLONE_GROUP_OFFSET, header)).code == 0
        offsets = cluster.broker.parts.context.offsets
        assert (offsets.query("H", "Orders", 0), offsets.query("H", "Gone", 0)) == (4, -1)
        await peer.heartbeat(topics={"Other": "*"})
        header = CloneGroupOffsetRequestHeader(src_group="G", dest_group="I")
        await peer.call(RequestCode.CLONE_GROUP_OFFSET, header)
        assert offsets.query("I", "Orders", 0) == -1  # the online source does not subscribe it

    async def test_the_progress_of_all_groups(self, cluster, peer):
        await create(peer)
        for _ in range(5):
            await peer.send()
        await peer.pull()  # makes the group
        await commit(peer, 0, 2)
        answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, None, ext={"isOrder": "false"})
        body = BrokerConsumeStats.decode(answer.body)
        assert (body.broker_addr, body.total_diff) == (cluster.addr, 3)
        tables = {group: tables for row in body.consume_stats_list for group, tables in row.items()}
        assert tables["G"][0].offset_table[queue(0)].consumer_offset == 2
        assert tables["TOOLS_CONSUMER"] == []
        answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, None, ext={"isOrder": "true"})
        assert BrokerConsumeStats.decode(answer.body).total_diff == 0

    async def test_all_producers(self, peer):
        await peer.heartbeat("c1", None, producers=("P", "Q"))
        answer = await peer.call(RequestCode.GET_ALL_PRODUCER_INFO)
        data = ProducerTableInfo.decode(answer.body).data
        assert {group: [info.client_id for info in infos] for group, infos in data.items()} == {
            "P": ["c1"],
            "Q": ["c1"],
        }
        assert data["P"][0].remote_ip.startswith("/127.0.0.1:")

    async def test_what_5_x_tools_ask_of_a_group(self, cluster, peer):
        await commit(peer, 0, 2)
        await peer.heartbeat(topics={"Orders": "TagA"})
        answer = await peer.call(RequestCode.QUERY_TOPICS_BY_CONSUMER, None, ext={"group": "G"}, version=NEW)
        assert json.loads(bytes(answer.body)) == {"brokerAddr": cluster.addr, "topicList": ["Orders"]}
        ext = {"group": "G", "topic": "Orders"}
        answer = await peer.call(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, None, ext=ext, version=NEW)
        body = json.loads(bytes(answer.body))
        assert (body["group"], body["topic"], body["subscriptionData"]["subString"]) == (
            "G",
            "Orders",
            "TagA",
        )
        answer = await peer.call(
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, None, ext={"group": "X"}, version=NEW
        )
        assert json.loads(bytes(answer.body)) == {"group": "X", "topic": ""}


class TestConsumersAreTold:
    async def reset(self, peer, timestamp, force=True, language="PYTHON"):
        header = ResetOffsetRequestHeader(topic="Orders", group="G", timestamp=timestamp, is_force=force)
        return await peer.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, language=language)

    async def test_an_offset_reset_reaches_the_consumers(self, cluster, peer):
        await create(peer)
        for _ in range(3):
            await peer.send()
        await commit(peer, 0, 3)
        await commit(peer, 1, 0)
        assert (await self.reset(peer, 0)).code == 206
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        answer = await self.reset(peer, 0)
        assert answer.code == 0
        assert ResetOffsetBody.decode(answer.body).offset_table == {queue(0): 0, queue(1): 0}
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert told.ext == {"topic": "Orders", "group": "G", "timestamp": "0", "isForce": "true"}
        assert bytes(told.body).startswith(b'{"offsetTable":{{"brokerName":"broker-a"')
        await self.reset(peer, -1)
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert ResetOffsetBody.decode(told.body).offset_table == {queue(0): 3, queue(1): 0}
        await self.reset(peer, -1, language="CPP")
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert bytes(told.body).startswith(b'{"offsetTable":[{')

    async def test_without_force_offsets_only_go_back(self, cluster, peer):
        await create(peer)
        for _ in range(3):
            await peer.send()
        await commit(peer, 0, 1)
        await commit(peer, 1, 0)
        await cluster.peer().heartbeat("c1")
        answer = await self.reset(peer, -1, force=False)
        assert ResetOffsetBody.decode(answer.body).offset_table == {queue(0): 1, queue(1): 0}

    async def test_resets_that_cannot_be(self, peer):
        assert (await self.reset(peer, 0)).code == 1
        await create(peer)
        answer = await self.reset(peer, 0)
        assert (answer.code, answer.remark) == (1, "THe consumer group <G> not exist")

    async def test_running_info_comes_from_the_client(self, cluster, peer):
        consumer = cluster.peer()
        header = GetConsumerRunningInfoRequestHeader(consumer_group="G", client_id="c1", jstack_enable=False)
        assert (await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)).code == 1
        await consumer.heartbeat("c1")
        consumer.answers[RequestCode.GET_CONSUMER_RUNNING_INFO] = lambda asked: asked.response(
            0, body=b'{"properties":{}}'
        )
        answer = await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        assert (answer.code, bytes(answer.body)) == (0, b'{"properties":{}}')
        asked = await consumer.notice(RequestCode.GET_CONSUMER_RUNNING_INFO)
        assert asked.ext == {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "false"}

    async def test_old_clients_and_silent_clients(self, cluster, peer, monkeypatch):
        monkeypatch.setattr("cometmq.broker.admin.consumers.FORWARD_TIMEOUT_S", 0.2)
        header = GetConsumerRunningInfoRequestHeader(consumer_group="G", client_id="c1")
        consumer = cluster.peer()
        await consumer.heartbeat("c1", version=61)
        assert (await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)).code == 1
        await consumer.heartbeat("c1", version=409)
        assert (await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)).code == 207

    async def test_direct_consumption_brings_the_record_along(self, cluster, peer):
        sent = await peer.send(body=b"once more")
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        consumer.answers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = lambda asked: asked.response(
            0, body=b'{"consumeResult":"CR_SUCCESS"}'
        )
        header = ConsumeMessageDirectlyRequestHeader(
            consumer_group="G", client_id="c1", msg_id=sent.ext["msgId"]
        )
        answer = await peer.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        assert json.loads(bytes(answer.body)) == {"consumeResult": "CR_SUCCESS"}
        asked = await consumer.notice(RequestCode.CONSUME_MESSAGE_DIRECTLY)
        asked.code = 0
        assert [m.body for m in records(asked)] == [b"once more"]
        assert asked.ext["brokerName"] == "broker-a"

    async def test_how_far_the_consumers_are(self, cluster, peer):
        header = GetConsumerStatusRequestHeader(topic="Orders", group="G")
        assert (await peer.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)).code == 1
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        said = GetConsumerStatusBody(message_queue_table={queue(0): 5})
        consumer.answers[RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT] = lambda asked: asked.response(
            0, body=said.encode()
        )
        answer = await peer.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
        assert GetConsumerStatusBody.decode(answer.body).consumer_table == {"c1": {queue(0): 5}}


class TestSettings:
    async def test_all_settings_are_shown_under_rocketmqs_names(self, cluster, peer):
        answer = await peer.call(RequestCode.GET_BROKER_CONFIG)
        shown = parse_properties(bytes(answer.body).decode())
        assert set(json.loads(answer.ext["version"])) == {"counter", "timestamp"}
        assert shown["brokerName"] == "broker-a"
        assert shown["brokerIP1"] == "127.0.0.1"
        assert shown["autoCreateTopicEnable"] == "true"
        assert shown["mappedFileSizeCommitLog"] == str(64 * 1024 * 1024)
        assert shown["sendMessageThreadPoolNums"] == "4"

    async def test_known_keys_are_set_at_once_and_unknown_ones_ignored(self, cluster, peer):
        body = b"autoCreateTopicEnable=false\nnoSuchKey=1\nmaxMessageSize=100\n"
        assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body)).code == 0
        assert (await peer.send("New")).code == 17
        await create(peer)
        assert (await peer.send(body=b"x" * 101)).code == 13
        shown = parse_properties(bytes((await peer.call(RequestCode.GET_BROKER_CONFIG)).body).decode())
        assert (shown["autoCreateTopicEnable"], shown["maxMessageSize"]) == ("false", "100")
        assert "noSuchKey" not in shown
        written = parse_properties(Path(cluster.broker.config.broker_config_path).read_text())
        assert written["maxMessageSize"] == "100"

    async def test_what_answers_to_sends_say_of_traces(self, peer):
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b'traceOn=false\nregionId=100% "north"\n')
        ext = (await peer.send()).ext
        assert (ext["TRACE_ON"], ext["MSG_REGION"]) == ("false", '100% "north"')

    async def test_a_changed_permission_reaches_the_routes(self, cluster, peer):
        await create(peer)
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"brokerPermission=4\n")
        namesrv = cluster.peer(cluster.namesrv_addr)
        async with asyncio.timeout(5):
            while True:
                answer = await namesrv.call(105, GetRouteInfoRequestHeader(topic="Orders"))
                if TopicRouteData.decode(answer.body).queue_datas[0].perm == 4:
                    break
                await asyncio.sleep(0.01)

    async def test_the_runtime_table(self, cluster, peer):
        await peer.send(properties={"DELAY": "18"})
        await peer.send()
        await peer.pull()
        answer = await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = KVTable.decode(answer.body).table
        assert (table["brokerVersionDesc"], table["brokerVersion"]) == ("V4_9_7", "407")
        assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("2", "1")
        assert table["scheduleMessageOffset_18"] == "0,1"
        assert int(table["commitLogMaxOffset"]) > 0
        for name in (
            "putTps",
            "getTotalTps",
            "getFoundTps",
            "getMissTps",
            "getTransferedTps",
            "getTransferredTps",
        ):
            assert len([float(word) for word in table[name].split(" ")]) == 3
        assert {"runtime", "bootTimestamp", "commitLogDiskRatio", "consumeQueueDiskRatio"} <= set(table)

    @pytest.mark.parametrize("code", [306, 316, 329])
    async def test_clean_up_requests_succeed_and_keep_what_is_configured(self, peer, code):
        await peer.send()
        assert (await peer.call(code)).code == 0
        assert len(records(await peer.pull())) == 1

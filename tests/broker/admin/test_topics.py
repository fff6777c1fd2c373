"""Administration of topics and groups: creation, changes, display and deletion."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from tests.kit.brokers import commit, create, held, records
from tests.kit.waiting import until

from cometmq.protocol.bodies import (
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TopicConfig,
    TopicConfigTable,
    TopicList,
    TopicRouteData,
)
from cometmq.protocol.codes import TIMER_TOPIC, TRANS_HALF_TOPIC, RequestCode
from cometmq.protocol.headers import (
    DeleteSubscriptionGroupRequestHeader,
    GetRouteInfoRequestHeader,
    TopicRequestHeader,
)

NEW = 513


class TestTopics:
    async def test_a_created_topic_is_in_the_route_when_the_answer_comes(self, cluster, peer):
        assert (await create(peer, read=3, write=2, perm=6, topic_filter_type="SINGLE_TAG")).code == 0
        namesrv = cluster.peer(cluster.namesrv_addr)
        answer = await namesrv.call(105, GetRouteInfoRequestHeader(topic="Orders"))
        (data,) = TopicRouteData.decode(answer.body).queue_datas
        assert data.broker_name == "broker-a"
        assert (data.read_queue_nums, data.write_queue_nums, data.perm) == (3, 2, 6)

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
        before = cluster.broker.parts.tables.topics.version
        assert (await create(peer, topic, **more)).code == code
        assert cluster.broker.parts.tables.topics.version == before

    async def test_several_are_made_by_one_request_of_5x(self, cluster, peer):
        body = (
            b'{"topicConfigList":[{"topicName":"One","readQueueNums":3,"writeQueueNums":2,"perm":6,'
            b'"attributes":{"+message.type":"FIFO"}},{"topicName":"Two","order":true}]}'
        )
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, body, version=NEW)).code == 0
        table = cluster.broker.parts.tables.topics.table
        one, two = table["One"], table["Two"]
        assert (one.read_queue_nums, one.write_queue_nums, one.attributes) == (3, 2, {"message.type": "FIFO"})
        assert (two.read_queue_nums, two.order) == (16, True)
        namesrv = cluster.peer(cluster.namesrv_addr)
        answer = await namesrv.call(105, GetRouteInfoRequestHeader(topic="Two"))
        assert TopicRouteData.decode(answer.body).queue_datas[0].write_queue_nums == 16

    @pytest.mark.parametrize("wrong", [b'{"topicName":"TBW102"}', b'{"topicName":"T","perm":99}', b"7"])
    async def test_one_of_them_that_cannot_be_leaves_all_as_they_were(self, cluster, peer, wrong):
        before = cluster.broker.parts.tables.topics.version
        body = b'{"topicConfigList":[{"topicName":"One"},' + wrong + b"]}"
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, body)).code != 0
        assert cluster.broker.parts.tables.topics.version == before

    async def test_several_groups_are_made_by_one_request_of_5x(self, cluster, peer):
        body = b'{"groupConfigList":[{"groupName":"A","retryMaxTimes":3},{"groupName":"B"}]}'
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, None, body)).code == 0
        groups = cluster.broker.parts.tables.groups.table
        assert (groups["A"].retry_max_times, groups["B"].retry_max_times) == (3, 16)
        wrong = b'{"groupConfigList":[{"groupName":"C"},{"groupName":"a b"}]}'
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, None, wrong)).code == 1
        assert "C" not in groups

    async def test_deleting_takes_queues_and_offsets_along(self, cluster, peer):
        await peer.send()
        await commit(peer, 0, 1)
        pulling = await held(cluster, peer)
        assert (await peer.delete_topic("Orders")).code == 0
        assert (await pulling).code != 0
        assert (await peer.pull()).code == 17
        await peer.send(body=b"new life")
        assert [m.queue_offset for m in records(await peer.pull())] == [0]
        assert cluster.broker.parts.tables.offsets.query("G", "Orders", 0) == -1

    async def test_deleting_the_unknown_is_fine_and_the_systems_own_is_not(self, peer):
        for topic, code in (("Nothing", 0), ("TBW102", 1)):
            assert (await peer.delete_topic(topic)).code == code

    async def test_queues_of_unknown_topics_are_deleted_and_the_systems_own_are_not(self, cluster, peer):
        await peer.send(properties={"TIMER_DELAY_SEC": "60"})
        await peer.send(properties={"TRAN_MSG": "true", "PGROUP": "PG"})
        await peer.send(topic="Unused")
        topics = cluster.broker.parts.tables.topics
        for name in (TIMER_TOPIC, TRANS_HALF_TOPIC, "Unused"):  # as if the topic table were lost
            topics.delete(name)
        assert (await peer.call(RequestCode.CLEAN_UNUSED_TOPIC)).code == 0
        assert cluster.broker.parts.store.queues.topics() == [TRANS_HALF_TOPIC, TIMER_TOPIC]

    async def test_requests_that_wait_hold_no_copies_of_all_names(self, cluster, peer, monkeypatch):
        parts = cluster.broker.parts
        await create(peer)
        config = parts.tables.topics.table["Orders"]
        parts.tables.topics.table.update({f"T{number}": config for number in range(5000)})
        queues = parts.store.queues
        for number in range(5000):
            queues.get_or_make(f"T{number}", 0)
        began, go_on = [], asyncio.Event()

        async def wait(*_):
            began.append(1)
            await go_on.wait()

        monkeypatch.setattr(parts.store.deletion, "_remove_files", wait)
        monkeypatch.setattr(parts.store.executor, "pause", wait)
        codes = [RequestCode.CLEAN_UNUSED_TOPIC, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE]
        tracemalloc.start()
        requests = [asyncio.create_task(peer.call(codes[number % 2])) for number in range(100)]
        await asyncio.create_task(peer.call(RequestCode.GET_BROKER_CONFIG))  # is handled after them
        await until(lambda: len(began) >= 2)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        go_on.set()
        assert [each.code for each in await asyncio.gather(*requests)] == [0] * 100
        assert held_bytes < 1_500_000  # it would be 15 MB if each request held all names

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

    @pytest.mark.parametrize(
        ("settings", "made"),
        [
            ({}, set()),
            ({"traceTopicEnable": "true"}, {"RMQ_SYS_TRACE_TOPIC"}),
            ({"traceTopicEnable": "true", "msgTraceTopicName": "Mine"}, {"Mine"}),
        ],
    )
    async def test_the_trace_topic_is_made_at_the_start_if_wanted(self, start_cluster, settings, made):
        cluster = await start_cluster(**settings)
        table = cluster.broker.parts.tables.topics.table
        assert table.keys() & {"RMQ_SYS_TRACE_TOPIC", "Mine"} == made
        assert all((table[name].read_queue_nums, table[name].perm) == (1, 6) for name in made)

    async def test_the_name_servers_list_of_ordered_topics_sets_the_flag(self, cluster, peer):
        await create(peer)
        namesrv = cluster.peer(cluster.namesrv_addr)
        ext = {"namespace": "ORDER_TOPIC_CONFIG", "key": "Orders", "value": "broker-a:2"}
        assert (await namesrv.call(100, None, ext=ext)).code == 0
        await create(peer, "Another")  # any registration returns the new order configuration
        topics = cluster.broker.parts.tables.topics
        await until(lambda: topics.table["Orders"].order)
        assert not topics.table["Another"].order


class TestGroups:
    async def test_set_show_and_delete(self, cluster, peer):
        body = b'{"groupName":"G","retryMaxTimes":3,"consumeBroadcastEnable":false}'
        assert (await peer.set_group(body)).code == 0
        answer = await peer.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        table = SubscriptionGroupTable.decode(answer.body).subscription_group_table
        assert (
            table["G"].retry_max_times,
            table["G"].consume_broadcast_enable,
            table["G"].consume_enable,
        ) == (3, False, True)
        assert "TOOLS_CONSUMER" in table
        answer = await peer.call(
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, None, ext={"group": "G"}, version=NEW
        )
        assert SubscriptionGroupConfig.decode(answer.body).retry_max_times == 3
        assert (
            await peer.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, None, ext={"group": "X"})
        ).code == 26
        await cluster.restart()
        assert cluster.broker.parts.tables.groups.table["G"].retry_max_times == 3

    @pytest.mark.parametrize("flag", [None, "remove_offset", "clean_offset"])
    async def test_deleting_takes_the_offsets_only_if_asked(self, cluster, peer, flag):
        await peer.set_group(b'{"groupName":"G"}')
        await commit(peer, 0, 4)
        header = DeleteSubscriptionGroupRequestHeader(group_name="G", **({flag: True} if flag else {}))
        assert (await peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)).code == 0
        parts = cluster.broker.parts
        assert "G" not in parts.tables.groups.table
        assert parts.tables.offsets.query("G", "Orders", 0) == (-1 if flag else 4)

    @pytest.mark.parametrize("body", [b"", b"{}", b'{"groupName":""}', b"no json"])
    async def test_a_group_that_cannot_be_read(self, peer, body):
        assert (await peer.set_group(body)).code == 1

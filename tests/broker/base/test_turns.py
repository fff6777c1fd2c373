"""Topics with many queues: a limit on their number, and requests that yield to other tasks."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from tests.kit.brokers import records, running, table_on_disk

from cometmq.broker.base import turns as turns_module
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import LockBatchBody, TopicConfig, TopicList
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    CloneGroupOffsetRequestHeader,
    CreateTopicRequestHeader,
    GetBrokerConsumeStatsRequestHeader,
    GetConsumeStatsRequestHeader,
    GroupTopicRequestHeader,
    ResetOffsetRequestHeader,
    TopicRequestHeader,
)
from cometmq.protocol.headers.admin import PurgeTopicRequestHeader

INT_MAX = (1 << 31) - 1
CREATE, GROUP = RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP


def topic(name: str, read: int, write: int) -> CreateTopicRequestHeader:
    return CreateTopicRequestHeader(topic=name, read_queue_nums=read, write_queue_nums=write, perm=6)


class TestLimit:
    @pytest.mark.parametrize(
        ("field", "number", "code", "header", "body"),
        [
            ("readQueueNums", 1025, CREATE, topic("T", 1025, 1), b""),
            ("writeQueueNums", INT_MAX, CREATE, topic("T", 1, INT_MAX), b""),
            ("writeQueueNums", -1, CREATE, topic("T", 1, -1), b""),
            ("retryQueueNums", INT_MAX, GROUP, None, b'{"groupName":"G","retryQueueNums":2147483647}'),
            ("retryQueueNums", -1, GROUP, None, b'{"groupName":"G","retryQueueNums":-1}'),
        ],
    )
    async def test_a_refusal_names_field_limit_and_setting(
        self, cluster, peer, field, number, code, header, body
    ):
        parts = cluster.broker.parts
        for version, expected in ((407, 1), (493, 29)):
            answer = await peer.call(code, header, body, version=version)
            assert answer.code == expected
            assert answer.remark == f"{field} {number} must be between 0 and 1024 (maxTopicQueueNums)"
        assert "T" not in parts.tables.topics.table
        assert "G" not in parts.tables.groups.table

    async def test_the_setting_counts_at_once(self, cluster, peer):
        assert (await peer.call(CREATE, topic("T", 1024, 1024))).code == 0
        assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"maxTopicQueueNums=9")).code == 0
        assert (await peer.call(CREATE, topic("T", 10, 9))).code == 1
        assert (await peer.call(CREATE, topic("T", 9, 9))).code == 0

    async def test_topics_that_are_made_by_the_way_keep_to_it(self, start_cluster):
        cluster = await start_cluster(maxTopicQueueNums="3", defaultTopicQueueNums="2")
        peer, table = cluster.peer(), cluster.broker.parts.tables.topics.table
        parts = cluster.broker.parts
        assert (await peer.send("ByTemplate", default_topic_queue_nums=99)).code == 0
        assert (
            await peer.send("ByCluster", default_topic="DefaultCluster", default_topic_queue_nums=99)
        ).code == 0
        parts.tables.groups.find("G").retry_queue_nums = INT_MAX
        await peer.heartbeat("c", "G")
        made = [table[name] for name in ("ByTemplate", "ByCluster", "%RETRY%G")]
        assert [(t.read_queue_nums, t.write_queue_nums) for t in made] == [(2, 2), (3, 3), (3, 3)]

    async def test_a_table_that_holds_more_is_served_and_messages_stay_within_reach(self, tmp_path, caplog):
        async with running(tmp_path, maxTopicQueueNums="2000") as (_, peer):
            for name in ("Wide", "Poisoned"):
                assert (await peer.call(CREATE, topic(name, 2000, 2000))).code == 0
            assert (await peer.send("Wide", queue_id=1500)).code == 0
            assert (await peer.call(GROUP, None, b'{"groupName":"G"}')).code == 0
        config = tmp_path / "config"
        topics, groups = (
            table_on_disk(tmp_path, "topics.json"),
            table_on_disk(tmp_path, "subscriptionGroup.json"),
        )
        topics["topicConfigTable"]["Poisoned"].update(readQueueNums=INT_MAX, writeQueueNums=INT_MAX)
        groups["subscriptionGroupTable"]["G"]["retryQueueNums"] = INT_MAX
        (config / "topics.json").write_text(json.dumps(topics))
        (config / "subscriptionGroup.json").write_text(json.dumps(groups))
        async with running(tmp_path) as (broker, peer):
            table = broker.parts.tables.topics.table
            assert table["Wide"].write_queue_nums == 1501
            assert {table[name].write_queue_nums for name in ("Poisoned", "BenchmarkTest")} == {1024}
            assert broker.parts.tables.groups.table["G"].retry_queue_nums == 1024
            assert len(records(await peer.pull("Wide", 1500))) == 1
        assert f"topic Poisoned had {INT_MAX} queues, more than maxTopicQueueNums=1024" in caplog.text
        assert f"group G had {INT_MAX} retry queues" in caplog.text


MANY = 640
QUEUES = [MessageQueue("Wide", "broker-a", queue_id) for queue_id in range(5000)]
LOCKS = LockBatchBody(consumer_group="G", client_id="c", mq_set=QUEUES).encode()


@pytest.mark.parametrize(
    ("code", "header", "body", "turns"),
    [
        (RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic="Wide"), b"", 10),
        (RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="G"), b"", 20),
        (RequestCode.GET_BROKER_CONSUME_STATS, GetBrokerConsumeStatsRequestHeader(is_order=False), b"", 20),
        (
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            GroupTopicRequestHeader(topic="Wide", group="G"),
            b"",
            10,
        ),
        (
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            ResetOffsetRequestHeader(topic="Wide", group="G", timestamp=1, is_force=True),
            b"",
            10,
        ),
        (
            RequestCode.CLONE_GROUP_OFFSET,
            CloneGroupOffsetRequestHeader(src_group="G", dest_group="H", topic=None, offline=True),
            b"",
            10,
        ),
        (RequestCode.GET_ALL_CONSUMER_OFFSET, None, b"", 10),
        (RequestCode.LOCK_BATCH_MQ, None, LOCKS, 4),
        (RequestCode.UNLOCK_BATCH_MQ, None, LOCKS, 4),
        (RequestCode.PURGE_TOPIC, PurgeTopicRequestHeader(topic="Wide", before=1), b"", 10),
    ],
    ids=lambda value: value.name if isinstance(value, RequestCode) else "",
)
async def test_a_request_about_many_queues_gives_others_their_turns(
    cluster, monkeypatch, code, header, body, turns
):
    monkeypatch.setattr(turns_module, "ENTRIES_INLINE", 1 << 30)
    parts = cluster.broker.parts
    for name, queues in [("Wide", MANY), *((f"T{number}", 1) for number in range(MANY))]:
        parts.tables.topics.table[name] = TopicConfig(
            topic_name=name, read_queue_nums=queues, write_queue_nums=queues
        )
        for queue_id in range(queues):
            parts.tables.offsets.commit("G", name, queue_id, 1)
    parts.tables.groups.find("G")
    for queue_id in range(MANY):
        parts.store.queues.get_or_make("Wide", queue_id)
    handler = parts.handlers[code]
    request = asyncio.ensure_future(handler(SimpleNamespace(peer="test"), Frame.request(code, header, body)))
    passed = 0
    while not request.done():
        await asyncio.sleep(0)
        passed += 1
    assert passed > turns
    if code != RequestCode.INVOKE_BROKER_TO_RESET_OFFSET:  # fails, because no client is online
        assert (await request).code == 0
    else:
        request.exception()


async def test_a_long_answer_is_encoded_by_a_thread():
    threads = []

    class Watched(TopicList):
        def encode(self) -> bytes:
            threads.append(threading.current_thread())
            return super().encode()

    for entries in (turns_module.ENTRIES_INLINE, turns_module.ENTRIES_INLINE + 1):
        assert json.loads(await turns_module.encoded(Watched(["T"]), entries))["topicList"] == ["T"]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]

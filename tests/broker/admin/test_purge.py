"""Retention of single topics and purges, over real sockets."""

from __future__ import annotations

import json
import os

import pytest
from tests.kit.brokers import records
from tests.kit.waiting import until

from cometmq.protocol.bodies.admin import PurgeResult
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import CreateTopicRequestHeader
from cometmq.protocol.headers.admin import PurgeTopicRequestHeader

TOO_SMALL = ResponseCode.PULL_OFFSET_MOVED


async def topic(peer, attributes=None, name="Orders"):
    header = CreateTopicRequestHeader(
        topic=name, read_queue_nums=2, write_queue_nums=2, perm=6, topic_filter_type="SINGLE_TAG",
        attributes=attributes,
    )  # fmt: skip
    return await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def purge(peer, **more):
    answer = await peer.call(RequestCode.PURGE_TOPIC, PurgeTopicRequestHeader(topic="Orders", **more))
    assert answer.code == 0, answer.remark
    queues = PurgeResult.decode(answer.body).queues
    return [(queue.queue_id, queue.min_offset, queue.purged_to, queue.max_offset) for queue in queues]


async def test_a_purge_shows_then_does_then_lasts(cluster, peer):
    await topic(peer)
    for _ in range(3):
        await peer.send(queue_id=0)
    await peer.send(queue_id=1)

    assert await purge(peer) == [(0, 0, 3, 3), (1, 0, 1, 1)]
    assert len(records(await peer.pull(offset=0))) == 3
    assert await purge(peer, queue_id=0, before=1, execute=True) == [(0, 0, 0, 3)]
    assert await purge(peer, queue_id=0, execute=True) == [(0, 0, 3, 3)]
    assert (await peer.pull(offset=0)).code == TOO_SMALL
    assert await purge(peer) == [(0, 3, 3, 3), (1, 0, 1, 1)]

    await cluster.restart()
    again = cluster.peer()
    assert await purge(again) == [(0, 3, 3, 3), (1, 0, 1, 1)]
    await again.send(queue_id=0, body=b"after")
    assert [message.body for message in records(await again.pull(offset=3))] == [b"after"]


@pytest.mark.parametrize(
    ("name", "code"), [("Nobody", ResponseCode.TOPIC_NOT_EXIST), ("SCHEDULE_TOPIC_XXXX", 1), ("a b", 1)]
)
async def test_what_cannot_be_purged(peer, name, code):
    answer = await peer.call(RequestCode.PURGE_TOPIC, PurgeTopicRequestHeader(topic=name, execute=True))
    assert answer.code == code


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("+retention.hours=3", ["retention.hours", "'3'", "retention.ms, retention.bytes"]),
        ("+retention.ms=soon", ["retention.ms", "'soon'", "milliseconds above 0"]),
        ("+retention.ms=0", ["retention.ms", "'0'"]),
        ("+retention.bytes=-1", ["retention.bytes", "'-1'", "bytes per queue above 0"]),
        ("+retention.ms=259200001", ["at most 259200000", "fileReservedTime=72"]),
        ("+message.type=ODD", ["message.type", "'ODD'", "FIFO"]),
        ("retention.ms=5", ["attributes", "+key=value or -key"]),
        ("+retention.ms", ["+key=value or -key"]),
        ("-retention.ms=5", ["+key=value or -key"]),
        ("-odd", ["odd"]),
    ],
)
async def test_attributes_that_are_refused(cluster, peer, attributes, said):
    answer = await topic(peer, attributes)
    assert answer.code == 1
    for words in said:
        assert words in answer.remark
    assert cluster.broker.parts.tables.topics.get("Orders") is None


async def test_a_topics_own_retention_is_kept_and_moves_its_queues(cluster, peer):
    assert (await topic(peer, "+retention.bytes=500,+message.type=NORMAL")).code == 0
    assert (await topic(peer)).code == 0  # a change that does not name attributes keeps them
    for _ in range(5):
        await peer.send(body=bytes(100))
    assert await cluster.broker.parts.store.topic_retention.topic_cycle() > 0
    first = cluster.broker.parts.store.min_offset("Orders", 0)
    assert 0 < first < 5
    assert (await peer.pull(offset=0)).code == TOO_SMALL

    await cluster.restart()
    store = cluster.broker.parts.store
    assert store.min_offset("Orders", 0) == first
    peer = cluster.peer()
    kept = json.loads((await _config(peer)).body)["attributes"]
    assert kept == {"retention.bytes": "500", "message.type": "NORMAL"}
    for _ in range(5):
        await peer.send(body=bytes(100))
    assert await store.topic_retention.topic_cycle() == 5
    assert (await topic(peer, "-retention.bytes")).code == 0
    await peer.send(body=bytes(1000))
    assert await store.topic_retention.topic_cycle() == 0


async def _config(peer):
    from cometmq.protocol.headers import TopicRequestHeader

    return await peer.call(RequestCode.GET_TOPIC_CONFIG, TopicRequestHeader(topic="Orders"))


async def test_the_background_applies_settings_that_changed_while_it_ran(started):
    cluster, peer = await started(cleanResourceInterval="20")
    await topic(peer, "+retention.bytes=1")
    await peer.send()
    store = cluster.broker.parts.store
    await until(lambda: store.min_offset("Orders", 0) == 1)

    settings = b"flushDiskType=SYNC_FLUSH\ndeleteWhen=07"
    answer = await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, settings)
    assert answer.code == 0
    assert (await peer.send()).code == 0
    assert store.flusher.flushed == store.log.end
    assert store.config.delete_when == "07"


async def test_expired_segments_and_queue_files_go_on_request(start_cluster):
    cluster = await start_cluster(
        mappedFileSizeCommitLog="65536",
        mappedFileSizeConsumeQueue="200",
        deleteWhen="99",
        diskMaxUsedSpaceRatio="95",
        cleanResourceInterval="3600000",
    )
    peer = cluster.peer()
    for _ in range(100):
        await peer.send(body=bytes(3000))
    store = cluster.broker.parts.store
    first = store.queues.find_queue("Orders", 0)
    store.queues.write_dirty()
    files = len(first.positions)
    os.utime(store.log.path_of(store.log.segments[0]), (1, 1))
    os.utime(store.log.path_of(store.log.segments[1]), (1, 1))

    assert store.log.min_position == 0
    assert (await peer.call(RequestCode.DELETE_EXPIRED_COMMITLOG)).code == 0
    assert store.log.min_position == 2 * 65536
    assert store.min_offset("Orders", 0) > 30
    assert len(first.positions) < files
    assert (await peer.pull(offset=0)).code == TOO_SMALL
    assert (await peer.call(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)).code == 0

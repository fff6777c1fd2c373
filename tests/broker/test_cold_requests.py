"""While a request waits for data from the device, other requests are served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from tests.kit.brokers import Peer, commit, offset_of, running
from tests.store.cold_disk import ColdDisk

from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    ConsumerSendMsgBackRequestHeader,
    GetConsumeStatsRequestHeader,
    GroupTopicRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryConsumerOffsetRequestHeader,
    QueryMessageRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    TopicRequestHeader,
    ViewMessageRequestHeader,
)
from cometmq.protocol.headers.admin import PurgeTopicRequestHeader

Q = {"topic": "Orders", "queue_id": 0}
REQUESTS = {
    "12 by key": (
        RequestCode.QUERY_MESSAGE,
        QueryMessageRequestHeader(
            topic="Orders", key="k3", max_num=9, begin_timestamp=0, end_timestamp=1 << 60
        ),
    ),
    "14 first offset": (
        RequestCode.QUERY_CONSUMER_OFFSET,
        QueryConsumerOffsetRequestHeader(consumer_group="New", **Q),
    ),
    "29 by time": (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffsetRequestHeader(timestamp=1 << 50, **Q)),
    "32 earliest": (RequestCode.GET_EARLIEST_MSG_STORETIME, QueueRequestHeader(**Q)),
    "33 by position": (RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=0)),
    "36 send back": (
        RequestCode.CONSUMER_SEND_MSG_BACK,
        ConsumerSendMsgBackRequestHeader(offset=0, group="G", delay_level=3),
    ),
    "202 topic status": (RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic="Orders")),
    "208 progress": (RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="G")),
    "303 time span": (
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        GroupTopicRequestHeader(topic="Orders", group="G"),
    ),
    "321 queue entries": (
        RequestCode.QUERY_CONSUME_QUEUE,
        QueryConsumeQueueRequestHeader(index=1, count=3, consumer_group=None, **Q),
    ),
    "21001 purge": (RequestCode.PURGE_TOPIC, PurgeTopicRequestHeader(topic="Orders", before=1 << 50)),
}


def timeless(body: bytes) -> bytes:
    """Remove the values that depend on the time of the request."""
    return re.sub(rb'"(consumeTps|delayTime)":[0-9.]+', b"", bytes(body))


@pytest.fixture
async def cold(tmp_path) -> AsyncIterator[tuple[ColdDisk, Peer, Peer]]:
    """Start a broker on a store of which nothing is in memory; yield its disk and two clients."""
    async with running(tmp_path) as (_, peer):
        for number in range(5):
            await peer.send(properties={"KEYS": f"k{number}"})
        await commit(peer, 0, 2)
    disk = ColdDisk()
    async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (broker, peer):
        other = Peer(broker.addr)
        yield disk, peer, other
        disk.go_on.set()
        await other.close()


@pytest.mark.parametrize("name", REQUESTS)
async def test_one_request_waits_and_the_others_do_not(cold, name: str) -> None:
    disk, asking, other = cold
    code, header = REQUESTS[name]
    await other.pull(offset=0, group="G")  # creates the group that some requests name
    warm = await asking.call(code, header)
    disk.waiting.clear()
    disk.cold = True
    disk.go_on.clear()

    waiting = asyncio.create_task(asking.call(code, header))
    assert await asyncio.to_thread(disk.waiting.wait, 20)
    bound = await other.call(RequestCode.GET_MAX_OFFSET, QueueRequestHeader(topic="Other", queue_id=0))
    assert offset_of(bound) == 0
    assert (await other.send("Other")).code == 0
    assert not waiting.done()

    disk.go_on.set()
    answer = await waiting
    assert (answer.code, answer.ext, timeless(answer.body)) == (warm.code, warm.ext, timeless(warm.body))
    assert answer.code in (0, 22)
    assert disk.in_the_loop == 0

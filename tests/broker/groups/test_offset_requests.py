"""Requests for consumer offsets, and for the bounds and times of queues."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.brokers import offset_of, records

from cometmq.protocol.bodies import ConsumerOffsetTable
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

OLD, NEW = 409, 513


async def query(peer, topic="Orders", group="G", version=OLD, **more):
    header = QueryConsumerOffsetRequestHeader(consumer_group=group, topic=topic, queue_id=0, **more)
    return await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, header, version=version)


async def update(peer, offset, topic="Orders", group="G", version=OLD, queue_id=0):
    header = UpdateConsumerOffsetRequestHeader(group, topic, queue_id, commit_offset=offset)
    return await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header, version=version)


class TestConsumerOffsets:
    async def test_what_was_stored_is_answered_and_survives_a_restart(self, cluster, peer):
        answer = await update(peer, 5)
        assert (answer.code, answer.ext, answer.remark) == (0, None, None)
        assert offset_of(await query(peer)) == 5
        await update(peer, 2)
        assert offset_of(await query(peer)) == 2
        await cluster.restart()
        assert offset_of(await query(cluster.peer())) == 2

    @pytest.mark.parametrize("version", [OLD, NEW])
    async def test_a_new_group_begins_a_young_queue_at_0(self, peer, version):
        await peer.send()
        assert offset_of(await query(peer, version=version)) == 0

    async def test_a_queue_that_left_memory_gives_22(self, started):
        _, peer = await started(accessMessageInMemoryMaxRatio="0")
        await peer.send()
        await peer.send()
        answer = await query(peer)
        assert (answer.code, answer.ext) == (22, {})

    async def test_an_unknown_topic(self, peer):
        assert offset_of(await query(peer, "Nowhere", version=OLD)) == 0
        assert (await query(peer, "Nowhere", version=NEW)).code == 22

    @pytest.mark.parametrize("version", [OLD, NEW])
    async def test_a_client_can_refuse_the_zero(self, peer, version):
        await peer.send()
        assert (await query(peer, version=version, set_zero_if_not_found=False)).code == 22
        assert offset_of(await query(peer, version=version, set_zero_if_not_found=True)) == 0

    async def test_what_4_9_stores_and_5_x_refuses(self, peer):
        assert (await update(peer, 3, "Nowhere")).code == 0
        assert (await update(peer, -7)).code == 0
        await peer.send()
        assert (await update(peer, 3, "Nowhere", version=NEW)).code == 17
        assert (await update(peer, -7, version=NEW)).code == 29
        assert (await update(peer, 1, version=NEW, queue_id=-1)).code == 29
        assert (await update(peer, 1, version=NEW)).code == 0

    async def test_oneway_updates_count(self, peer):
        header = UpdateConsumerOffsetRequestHeader("G", "T", 0, commit_offset=4)
        await peer.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        assert offset_of(await query(peer, "T")) == 4

    async def test_the_whole_table(self, peer):
        await update(peer, 4)
        answer = await peer.call(RequestCode.GET_ALL_CONSUMER_OFFSET)
        assert bytes(answer.body) == b'{"offsetTable":{"Orders@G":{0:4}}}'
        assert ConsumerOffsetTable.decode(answer.body).offset_table == {"Orders@G": {0: 4}}


class TestBounds:
    async def bounds(self, peer, topic, queue_id=0):
        high = await peer.call(RequestCode.GET_MAX_OFFSET, QueueRequestHeader(topic, queue_id))
        low = await peer.call(RequestCode.GET_MIN_OFFSET, QueueRequestHeader(topic, queue_id))
        header = QueueRequestHeader(topic, queue_id)
        earliest = await peer.call(RequestCode.GET_EARLIEST_MSG_STORETIME, header)
        return offset_of(low), offset_of(high), offset_of(earliest, "timestamp")

    async def test_of_a_queue_with_messages_and_of_none(self, peer):
        await peer.send()
        await peer.send()
        (first, _) = records(await peer.pull())
        assert await self.bounds(peer, "Orders") == (0, 2, first.store_timestamp_ms)
        assert await self.bounds(peer, "Orders", 3) == (0, 0, -1)
        assert await self.bounds(peer, "Nowhere") == (0, 0, -1)

    async def test_offsets_by_time(self, peer):
        times = []
        for _ in range(3):
            offset = int((await peer.send()).ext["queueOffset"])
            times.append(records(await peer.pull(offset=offset))[0].store_timestamp_ms)
            await asyncio.sleep(0.05)

        async def search(when, version, boundary=None):
            header = SearchOffsetRequestHeader(
                topic="Orders", queue_id=0, timestamp=when, boundary_type=boundary
            )
            return offset_of(await peer.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, version=version))

        first, second, third = times
        whens = (0, first, second + 1, third - 1, third + 9999)
        assert [await search(when, OLD) for when in whens] == [0, 0, 1, 2, 2]
        assert [await search(when, NEW) for when in (first, first + 1, third, third + 1)] == [0, 1, 2, 3]
        assert [await search(when, NEW, "upper") for when in (first, third - 1, third + 9999)] == [0, 1, 2]
        header = SearchOffsetRequestHeader(topic="Nowhere", queue_id=0, timestamp=5)
        assert offset_of(await peer.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)) == 0

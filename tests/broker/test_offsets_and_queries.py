"""Consumer offsets, queue bounds, times, and messages by id and key, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.conftest import offset_of, records

from cometmq.protocol.bodies import ConsumerOffsetTable
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    GetEarliestMsgStoretimeRequestHeader,
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    QueryConsumerOffsetRequestHeader,
    QueryMessageRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
    ViewMessageRequestHeader,
)
from cometmq.protocol.ids import decode_offset_id
from cometmq.store.reading.lookup import Lookup

OLD, NEW = 409, 513


async def query(peer, topic="Orders", group="G", version=OLD, **more):
    header = QueryConsumerOffsetRequestHeader(consumer_group=group, topic=topic, queue_id=0, **more)
    return await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, header, version=version)


async def update(peer, offset, topic="Orders", group="G", version=OLD, queue_id=0):
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
    )
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

    async def test_a_queue_that_left_memory_gives_22(self, start_cluster):
        cluster = await start_cluster(accessMessageInMemoryMaxRatio="0")
        peer = cluster.peer()
        await peer.send()
        await peer.send()
        answer = await query(peer)
        assert (answer.code, answer.ext) == (22, {})

    async def test_an_unknown_topic(self, peer):
        assert offset_of(await query(peer, "Nowhere", version=OLD)) == 0
        assert (await query(peer, "Nowhere", version=NEW)).code == 22

    async def test_a_5_x_client_can_refuse_the_zero(self, peer):
        await peer.send()
        assert (await query(peer, version=NEW, set_zero_if_not_found=False)).code == 22
        assert offset_of(await query(peer, version=NEW, set_zero_if_not_found=True)) == 0

    async def test_what_4_9_stores_and_5_x_refuses(self, peer):
        assert (await update(peer, 3, "Nowhere")).code == 0
        assert (await update(peer, -7)).code == 0
        await peer.send()
        assert (await update(peer, 3, "Nowhere", version=NEW)).code == 17
        assert (await update(peer, -7, version=NEW)).code == 29
        assert (await update(peer, 1, version=NEW, queue_id=-1)).code == 29
        assert (await update(peer, 1, version=NEW)).code == 0

    async def test_oneway_updates_count(self, peer):
        header = UpdateConsumerOffsetRequestHeader(consumer_group="G", topic="T", queue_id=0, commit_offset=4)
        await peer.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        assert offset_of(await query(peer, "T")) == 4

    async def test_the_whole_table(self, peer):
        await update(peer, 4)
        answer = await peer.call(RequestCode.GET_ALL_CONSUMER_OFFSET)
        assert bytes(answer.body) == b'{"offsetTable":{"Orders@G":{0:4}}}'
        assert ConsumerOffsetTable.decode(answer.body).offset_table == {"Orders@G": {0: 4}}


class TestBounds:
    async def bounds(self, peer, topic, queue_id=0):
        high = await peer.call(
            RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic=topic, queue_id=queue_id)
        )
        low = await peer.call(
            RequestCode.GET_MIN_OFFSET, GetMinOffsetRequestHeader(topic=topic, queue_id=queue_id)
        )
        header = GetEarliestMsgStoretimeRequestHeader(topic=topic, queue_id=queue_id)
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
            answer = await peer.send()
            times.append(
                records(await peer.pull(offset=int(answer.ext["queueOffset"])))[0].store_timestamp_ms
            )
            await asyncio.sleep(0.05)

        async def search(when, version, boundary=None):
            header = SearchOffsetRequestHeader(
                topic="Orders", queue_id=0, timestamp=when, boundary_type=boundary
            )
            return offset_of(await peer.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, version=version))

        first, second, third = times
        assert [await search(when, OLD) for when in (0, first, second + 1, third - 1, third + 9999)] == [
            0,
            0,
            1,
            2,
            2,
        ]
        assert [await search(when, NEW) for when in (first, first + 1, third, third + 1)] == [0, 1, 2, 3]
        assert [await search(when, NEW, "upper") for when in (first, third - 1, third + 9999)] == [0, 1, 2]
        header = SearchOffsetRequestHeader(topic="Nowhere", queue_id=0, timestamp=5)
        assert offset_of(await peer.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)) == 0


class TestQueries:
    async def query(self, peer, key, topic="Orders", unique="false", maximum=32, begin=0, end=2**62):
        header = QueryMessageRequestHeader(
            topic=topic, key=key, max_num=maximum, begin_timestamp=begin, end_timestamp=end
        )
        return await peer.call(RequestCode.QUERY_MESSAGE, header, ext={"_UNIQUE_KEY_QUERY": unique})

    async def test_by_key_and_by_unique_key(self, peer):
        await peer.send(body=b"one", properties={"KEYS": "a b", "UNIQ_KEY": "U1"})
        await peer.send(body=b"two", properties={"KEYS": "b", "UNIQ_KEY": "U2"})
        await peer.send("Other", body=b"elsewhere", properties={"KEYS": "b"})
        found = await self.query(peer, "b")
        assert [m.body for m in records(found)] == [b"one", b"two"]
        assert int(found.ext["indexLastUpdateTimestamp"]) > 0
        assert int(found.ext["indexLastUpdatePhyoffset"]) > 0
        assert [m.body for m in records(await self.query(peer, "a"))] == [b"one"]
        assert [m.body for m in records(await self.query(peer, "U2", unique="true", maximum=0))] == [b"two"]
        assert len(records(await self.query(peer, "b", maximum=1))) == 1

    async def test_an_answer_fits_a_frame_and_holds_the_newest(self, peer):
        for number in range(5):
            await peer.send(body=b"%d" % number + bytes(4_000_000), properties={"KEYS": "large"})
        found = records(await self.query(peer, "large"))
        assert [m.body[:1] for m in found] == [b"1", b"2", b"3", b"4"]

    async def test_few_queries_at_once_have_their_answers_in_memory(self, cluster, monkeypatch):
        by_key = Lookup.by_key
        most_at_once = {}
        peers = [cluster.peer() for _ in range(6)]

        async def counted(*asked_for):
            nonlocal under_way
            under_way += 1
            most_at_once[asked] = max(most_at_once.get(asked, 0), under_way)
            await asyncio.sleep(0.001)
            under_way -= 1
            return await by_key(*asked_for)

        for peer in peers:
            await peer.send(properties={"KEYS": "a"})
        monkeypatch.setattr(Lookup, "by_key", counted)
        for asked in (1, 6):
            under_way = 0
            found = await asyncio.gather(
                *(self.query(peer, "a") for peer in peers[:asked] for _ in range(30))
            )
            assert {answer.code for answer in found} == {0}
        assert most_at_once == {1: 4, 6: 24}

    async def test_the_number_asked_for_is_clamped(self, peer):
        for _ in range(67):
            await peer.send(properties={"KEYS": "a"})
        assert len(records(await self.query(peer, "a", maximum=2**31 - 1))) == 64  # maxMsgsNumBatch
        assert [(await self.query(peer, "a", maximum=number)).code for number in (0, -1)] == [22, 22]

    async def test_nothing_found_is_22_with_the_same_fields(self, peer):
        await peer.send(properties={"KEYS": "a"})
        answer = await self.query(peer, "nobody")
        assert answer.code == 22
        assert set(answer.ext) == {"indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"}
        assert (await self.query(peer, "a", begin=0, end=1000)).code == 22

    async def test_without_the_extra_field_and_after_a_restart(self, cluster, peer):
        await peer.send(body=b"one", properties={"KEYS": "a"})
        await cluster.restart()
        peer = cluster.peer()
        header = QueryMessageRequestHeader(
            topic="Orders", key="a", max_num=9, begin_timestamp=0, end_timestamp=2**62
        )
        assert [m.body for m in records(await peer.call(RequestCode.QUERY_MESSAGE, header))] == [b"one"]

    async def test_by_offset_id(self, peer):
        await peer.send(body=b"first")
        offset = decode_offset_id((await peer.send(body=b"second")).ext["msgId"]).physical_offset
        found = await peer.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=offset))
        assert [m.body for m in records(found)] == [b"second"]
        assert found.ext is None

    @pytest.mark.parametrize("offset", [1, 7, 10**9, -1])
    async def test_an_offset_where_no_record_begins(self, peer, offset):
        await peer.send()
        answer = await peer.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=offset))
        assert answer.code == 1
        assert str(offset) in answer.remark

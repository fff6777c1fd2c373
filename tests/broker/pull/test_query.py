"""Look-ups of single messages by key and by offset id."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.brokers import records, refused

from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import QueryMessageRequestHeader, ViewMessageRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.store.reading.lookup import Lookup


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

    async def test_keys_of_other_topics_with_the_same_hash_hide_little(self, peer):
        """The topics KeysAa and KeysBB have the same hash, so equal keys have the same index hash in both."""

        async def found(maximum):
            return [m.body for m in records(await self.query(peer, "k", "KeysBB", maximum=maximum))]

        await peer.send("KeysBB", body=b"old", properties={"KEYS": "k"})
        for count in (100, 60):
            for _ in range(count):
                await peer.send("KeysAa", properties={"KEYS": "k"})
            await peer.send("KeysBB", body=b"%d" % count, properties={"KEYS": "k"})
        assert await found(32) == [b"old", b"100", b"60"]
        assert await found(2) == [b"100", b"60"]
        for _ in range(100):
            await peer.send("KeysAa", properties={"KEYS": "k"})
        assert await found(1) == [b"60"]
        assert await found(32) == [b"100", b"60"]  # only a limited number of records is read

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
        assert len(records(await self.query(peer, "a", maximum=2**31 - 1))) == 64  # the limit maxMsgsNumBatch
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
        refused(
            await peer.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=offset)),
            1,
            str(offset),
        )

"""Lists, counts and checkpoints of waiting timer messages, as tools see them."""

from __future__ import annotations

import asyncio
import struct

import pytest
from tests.broker.timers.kit import move_all, now_ms, recall, short_retention, waiting
from tests.kit.brokers import copy_running, running, take
from tests.kit.waiting import until

from cometmq.broker.tables.durable import save_changes
from cometmq.protocol.bodies import TimerMetrics
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ListTimersRequestHeader
from cometmq.protocol.timers import RecallHandle


class TestLists:
    async def test_pages_by_the_time_of_delivery(self, peer):
        for minutes in (5, 1, 4, 2, 3):
            properties = {
                "TIMER_DELAY_SEC": str(60 * minutes),
                "KEYS": f"k{minutes} all",
                "UNIQ_KEY": f"U{minutes}",
            }
            topic = "Odd" if minutes % 2 else "Even"
            await peer.send(topic=topic, body=b"%d" % minutes, properties=properties)
        first, page = await waiting(peer, max_msg_nums=3)
        assert ([m.body for m in first], page.more, page.waiting) == ([b"1", b"2", b"3"], True, 5)
        after = {"after_ms": page.after_ms, "after_position": page.after_position}
        second, page = await waiting(peer, max_msg_nums=3, **after)
        assert ([m.body for m in second], page.more) == ([b"4", b"5"], False)
        assert [m.body for m in (await waiting(peer, topic="Even"))[0]] == [b"2", b"4"]
        for key in ("k4", "U4"):
            assert [m.body for m in (await waiting(peer, key=key))[0]] == [b"4"]
        assert len((await waiting(peer, key="all", topic="Odd"))[0]) == 3

    async def test_long_messages_that_are_looked_at_leave_the_loop_its_turns(self, cluster, peer):
        for _ in range(6):
            await peer.send(body=bytes(1 << 20), properties={"TIMER_DELAY_SEC": "60"})
        await until(lambda: len(cluster.broker.parts.timers.pending) == 6)
        frame = Frame.request(RequestCode.LIST_TIMERS, ListTimersRequestHeader(topic="Other"))
        listing = cluster.broker.parts.handlers[RequestCode.LIST_TIMERS](None, frame)
        turns = list(listing.__await__())
        assert len(turns) == 6

    async def test_levels_are_listed_among_the_rest_in_pages(self, peer):
        for number, level in enumerate((18, 17, 18, 14, 17)):
            await peer.send(body=b"%d" % number, properties={"DELAY": str(level), "KEYS": f"k{number}"})
        await peer.send(body=b"timed", properties={"TIMER_DELAY_SEC": "1200"})
        bodies, times, after, more = [], [], {}, True
        while more:
            found, page = await waiting(peer, max_msg_nums=2, **after)
            bodies += [m.body for m in found]
            times += map(int, page.deliver_at.split(","))
            after, more = {"after_ms": page.after_ms, "after_position": page.after_position}, page.more
        assert bodies == [b"3", b"timed", b"1", b"4", b"0", b"2"]
        assert times == sorted(times)
        assert page.waiting == 6
        found, page = await waiting(peer, key="k4", topic="Orders")
        assert [m.body for m in found] == [b"4"]
        assert (page.deliver_at, page.more) == (str(times[3]), False)
        assert (await waiting(peer, key="k4", topic="Other"))[0] == []

    async def test_what_a_level_has_delivered_is_not_listed(self, fast):
        peer = fast.peer()
        for level in ("1", "4"):
            await peer.send(body=level.encode(), properties={"DELAY": level, "KEYS": "k"})
        await take(peer, "Orders", 2)
        await until(lambda: not fast.broker.parts.schedule.waiting())
        assert (await waiting(peer))[0] == []
        assert (await waiting(peer, key="k"))[0] == []

    @pytest.mark.parametrize(("count", "size"), [(65, 10), (20, 100_000)])
    @pytest.mark.parametrize("wait", [{"TIMER_DELAY_SEC": "600"}, {"DELAY": "17"}], ids=["time", "level"])
    async def test_by_key_the_answer_says_that_there_are_more(self, peer, count, size, wait):
        for number in range(count):
            await peer.send(body=b"x" * size, properties={"KEYS": "k", **wait})
            if number == 2:
                found, page = await waiting(peer, key="k")
                assert (len(found), page.more) == (3, False)
        found, page = await waiting(peer, key="k")
        assert 3 < len(found) < count
        assert page.more

    async def test_counts_and_check_point_as_5x_tells_them(self, cluster, peer):
        for topic, delay in (("A", 60), ("A", 70), ("B", 1)):
            await peer.send(topic=topic, properties={"TIMER_DELAY_SEC": str(delay)})
        await take(peer, "B", 1)
        metrics = TimerMetrics.decode((await peer.call(RequestCode.GET_TIMER_METRICS)).body)
        assert {topic: metric.count for topic, metric in metrics.timing_count.items()} == {"A": 2}
        assert metrics.timing_count["A"].time_stamp < metrics.data_version.timestamp - 500  # B was sent later
        assert TimerMetrics.decode((await peer.call(RequestCode.GET_TIMER_METRICS)).body) == metrics
        await cluster.restart()
        peer = cluster.peer()
        metrics = TimerMetrics.decode((await peer.call(RequestCode.GET_TIMER_METRICS)).body)
        assert metrics.timing_count["A"].count == 2
        await until(lambda: cluster.broker.parts.timers.pending.followed == 3)
        body = (await peer.call(RequestCode.GET_TIMER_CHECK_POINT)).body
        read_ms, flushed, queue_offset, of_master, _, _, _ = struct.unpack(">7q", body)
        assert (flushed, queue_offset, of_master) == (0, 3, 3)
        assert 0 <= now_ms() - read_ms < 10_000

    @pytest.mark.slow("a message is delivered after 4 s")
    @pytest.mark.representative
    async def test_a_recall_is_counted_when_it_finds_its_message_and_once(self, tmp_path):
        """The count also survives a kill. The copied store's table does not contain the last recall."""

        def counts(broker):
            return broker.parts.tables.timers.counts

        async with running(tmp_path / "a", recallMessageEnable="true") as (broker, peer):
            handles = []
            for number in range(4):
                properties = {"TIMER_DELAY_SEC": "60" if number else "4", "UNIQ_KEY": f"U{number}"}
                handles.append((await peer.send(properties=properties)).ext["recallHandle"])
            assert counts(broker) == {"Orders": 4}
            await recall(peer, handles[0])
            await until(lambda: counts(broker) == {"Orders": 3})
            answers = await asyncio.gather(*(recall(peer, handles[1]) for _ in range(3)))
            assert [answer.code for answer in answers] == [0, 0, 0]
            unknown = RecallHandle("Orders", "broker-a", now_ms() + 50_000, "nobody").encode()
            assert (await recall(peer, unknown)).code == 0
            await until(lambda: broker.parts.timers.pending.recalls == 5)
            assert counts(broker) == {"Orders": 2}
            tables = broker.parts.tables
            save_changes(tables.timers, tables.timers_file)
            await tables.timers_file.saved()
            await recall(peer, handles[2])
            await until(lambda: counts(broker) == {"Orders": 1})
            copy_running(tmp_path / "a", tmp_path / "b")
            await until(lambda: len(broker.parts.timers.pending) == 4 + 6 - 1)  # the first one is due
            assert counts(broker) == {"Orders": 1}
        async with running(tmp_path / "b", recallMessageEnable="true") as (broker, peer):
            await until(lambda: len(broker.parts.timers.pending) == 9)
            assert counts(broker) == {"Orders": 1}

    async def test_a_recall_that_a_client_sends_as_a_message_is_not_counted(self, cluster, peer):
        await peer.send()
        await peer.send(properties={"TIMER_DELAY_SEC": "60"})
        found = {"TIMER_RECALL_FOUND": "true"}  # a property that only the broker may set
        for more in ({}, found):
            properties = {"TIMER_DELAY_SEC": "60", "TIMER_DEL_UNIQKEY": "U", "UNIQ_KEY": "U", **more}
            await peer.send(properties=properties)
        await until(lambda: cluster.broker.parts.timers.pending.recalls == 2)
        assert cluster.broker.parts.tables.timers.counts == {"Orders": 1}

    async def test_a_mark_is_taken_also_while_something_waits_to_be_taken_in(
        self, cluster, peer, monkeypatch
    ):
        """Under a load of many sends some message always waits to be read from the log."""
        await peer.send(properties={"TIMER_DELAY_SEC": "60"})
        timers = cluster.broker.parts.timers
        await until(lambda: timers.pending.followed == 1)
        with monkeypatch.context() as patch:
            patch.setattr(timers.follower, "behind", lambda: True)
            mark = timers.state.take()
        assert mark is not None
        assert mark.queue_offset == 1

    async def test_counts_after_a_kill(self, tmp_path):
        """The counts include messages moved or stored before the last checkpoint: the log is read again."""
        async with running(tmp_path / "a", **short_retention()) as (broker, peer):
            for topic, delay in (("Orders", 1), ("A", 60), ("A", 70)):
                await peer.send(topic=topic, properties={"TIMER_DELAY_SEC": str(delay)})
            await move_all(broker, peer)
            await take(peer, "Orders", 1)
            tables = broker.parts.tables
            save_changes(tables.timers, tables.timers_file)
            await tables.timers_file.saved()
            await peer.send(topic="B", properties={"TIMER_DELAY_SEC": "60"})
            await peer.send(properties={"TIMER_DELAY_SEC": "1"})
            await take(peer, "Orders", 2)
            copy_running(tmp_path / "a", tmp_path / "b")
        async with running(tmp_path / "b", **short_retention()) as (broker, peer):
            await until(lambda: len(broker.parts.timers.pending) == 3)
            assert broker.parts.tables.timers.counts == {"A": 2, "B": 1}

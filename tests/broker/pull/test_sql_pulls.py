"""Pulls with SQL92 filters over real sockets: matches, refusals, and waiting for one another."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.kit.brokers import records, refused, running
from tests.kit.waiting import until
from tests.store.cold_disk import ColdDisk

from cometmq.broker.pull import pull as pull_module
from cometmq.protocol.codes import ResponseCode

SQL = "SQL92"
FIVES = "n = 5 AND region IN ('eu', 'us')"


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """Remove the time limit of a filter scan (1 ms), which a busy machine exceeds quickly."""
    monkeypatch.setattr(pull_module, "FILTER_SCAN_S", 60.0)


async def send(peer, *numbers, region="eu", **more):
    for number in numbers:
        await peer.send(body=b"%d" % number, properties={"n": str(number), "region": region}, **more)


async def pull(peer, expression, offset=0, **more):
    return await peer.pull(expression=expression, expression_type=SQL, offset=offset, **more)


def following(answer):
    return int(answer.ext["nextBeginOffset"])


def bodies(answer):
    return [message.body for message in records(answer)]


def parked_at(cluster):
    """Return the offsets at which pulls are parked."""
    queues = cluster.broker.parts.pulls.long_poll.queues
    return [held.pull_from for here in queues.values() for pulls in here.filters.values() for held in pulls]


class TestWhatPasses:
    async def test_only_what_passes_comes_and_the_offset_passes_the_others(self, peer):
        await send(peer, 4, 5, 6, 5)
        await send(peer, 5, region="asia")
        answer = await pull(peer, FIVES)
        assert (bodies(answer), following(answer)) == ([b"5", b"5"], 5)
        nothing = await pull(peer, "n > 100")
        assert (nothing.code, nothing.remark, following(nothing)) == (20, "NO_MATCHED_MESSAGE", 5)

    async def test_the_filter_may_come_by_heartbeat(self, peer):
        await send(peer, 4, 5)
        await peer.heartbeat(topics={"Orders": FIVES}, expression_type=SQL, sub_version=7)
        assert bodies(await peer.pull(expression=None, sub_version=7)) == [b"5"]
        refused(await peer.pull(expression=None, sub_version=8), 25, "not latest")
        await peer.heartbeat(topics={"Orders": "n = 4"}, expression_type=SQL, sub_version=8)
        assert bodies(await peer.pull(expression=None, sub_version=8)) == [b"4"]

    async def test_rocketmqs_own_properties_can_be_tested(self, peer):
        for tag in ("A", "B"):
            await peer.send(body=tag.encode(), properties={"TAGS": tag, "KEYS": "k"})
        assert bodies(await pull(peer, "TAGS = 'B' AND KEYS IS NOT NULL")) == [b"B"]

    async def test_an_evaluation_that_goes_wrong_is_no_match(self, peer):
        await peer.send(properties={"n": "many"})
        assert (await pull(peer, "n > 1 OR TRUE")).code == 20
        assert (await pull(peer, "NOT (n > 1)")).code == 20

    async def test_clients_of_5x_have_more_words(self, peer):
        await peer.send(body=b"x", properties={"contains": "x", "s": "abc"})
        assert bodies(await pull(peer, "contains = 'x'", version=407)) == [b"x"]
        refused(await pull(peer, "contains = 'x'", version=453), 23, "column 1")
        assert bodies(await pull(peer, "s CONTAINS 'b'", version=453)) == [b"x"]
        assert (await pull(peer, "s CONTAINS 'b'", version=407)).code == 20

    async def test_an_answer_has_no_more_than_was_asked_for(self, peer):
        await send(peer, *[5] * 6)
        answer = await pull(peer, FIVES, max_msg_nums=4)
        assert (len(records(answer)), following(answer)) == (4, 4)


class TestRefusals:
    async def test_a_pull_with_a_wrong_expression_is_told_where_it_is_wrong(self, peer):
        await peer.send()
        refused(
            await pull(peer, "n > > 5"), 23, "parse the consumer's subscription failed: column 5: '>' stands"
        )
        refused(await pull(peer, ""), 23, "column 1")
        refused(await pull(peer, "n = 5 OR " * 2_000), 23, "at most 8192")
        refused(await peer.pull(expression="n > 5", expression_type="XPATH"), 23, "not XPATH")

    async def test_a_heartbeat_with_a_wrong_expression_is_taken_and_its_pulls_are_refused(self, peer):
        await peer.send()
        assert (await peer.heartbeat(topics={"Orders": "n > > 5"}, expression_type=SQL)).code == 0
        refused(await peer.pull(expression=None), 27, "Your expression may be wrong! column 5")

    async def test_without_property_filters_such_pulls_are_refused(self, started):
        _, peer = await started(enablePropertyFilter="false")
        await send(peer, 5)
        words = "The broker does not support consumer to filter message by SQL92"
        refused(await pull(peer, FIVES), 1, words)
        await peer.heartbeat(topics={"Orders": FIVES}, expression_type=SQL)
        refused(await peer.pull(expression=None), 1, words)


class TestHolding:
    async def test_a_held_pull_answers_when_something_passes_and_not_before(self, cluster, peer):
        await send(peer, 4)
        pulling = asyncio.create_task(pull(peer, FIVES, offset=1, hold_ms=15_000))
        await until(lambda: parked_at(cluster) == [1])
        other = cluster.peer()
        for number in (1, 2, 3):
            await send(other, number)
            await until(lambda n=number: parked_at(cluster) == [n + 1])
        assert not pulling.done()
        await send(other, 5)
        answer = await pulling
        assert (bodies(answer), following(answer)) == ([b"5"], 5)

    async def test_at_its_end_a_held_pull_has_passed_what_it_has_seen(self, cluster, peer):
        await send(peer, 4)
        begun = time.monotonic()
        pulling = asyncio.create_task(pull(peer, FIVES, hold_ms=600))
        await until(lambda: len(cluster.broker.parts.pulls.long_poll))
        await send(cluster.peer(), 3)
        answer = await pulling
        assert time.monotonic() - begun >= 0.6
        assert (answer.code, following(answer)) == (19, 2)

    async def test_a_pull_without_room_is_answered_soon_and_its_connection_goes_on(self, started):
        cluster, peer = await started(maxHeldPullsPerConnection="1", shortPollingTimeMills="300")
        await send(peer, 4)
        first = asyncio.create_task(pull(peer, FIVES, hold_ms=15_000))
        await until(lambda: len(cluster.broker.parts.pulls.long_poll) == 1)
        second = asyncio.create_task(pull(peer, FIVES, hold_ms=15_000))
        await until(lambda: len(cluster.broker.parts.pulls.long_poll) == 2)
        await send(cluster.peer(), 3)
        # When the first pull is to be parked again, the second one has taken its room.
        assert [following(await each) for each in (first, second)] == [2, 2]
        await send(peer, 5)
        assert bodies(await pull(peer, FIVES)) == [b"5"]

    async def test_a_broker_that_stops_answers_a_pull_whose_filter_is_being_compiled(self, tmp_path):
        async with running(tmp_path) as (broker, peer):
            await send(peer, 5)
            filters = broker.parts.pulls.checks.filters
            begun, compiling = asyncio.Event(), filters.compile

            async def slowly(key, connection):
                await compiling(key, connection)
                begun.set()
                await asyncio.sleep(0.1)

            filters.compile = slowly
            pulling = asyncio.create_task(pull(peer, FIVES))
            await begun.wait()
            await broker.parts.pulls.stop()
            assert bodies(await pulling) == [b"5"]
            late = await pull(peer, "a = 6")
            assert (late.code, late.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, "the broker stops")

    async def test_a_broker_that_stops_answers_held_pulls(self, tmp_path):
        async with running(tmp_path) as (broker, peer):
            await send(peer, 4)
            pulling = asyncio.create_task(pull(peer, FIVES, hold_ms=15_000))
            await until(lambda: len(broker.parts.pulls.long_poll))
            await broker.parts.pulls.stop()
            assert (await pulling).code == 19

    async def test_a_deleted_topic_ends_them(self, cluster, peer):
        await send(peer, 4)
        pulling = asyncio.create_task(pull(peer, FIVES, hold_ms=15_000))
        await until(lambda: len(cluster.broker.parts.pulls.long_poll))
        await cluster.peer().delete_topic("Orders")
        assert (await pulling).code == 17

    async def test_a_filter_that_changes_meanwhile_holds_for_what_comes(self, cluster, peer):
        await send(peer, 1)
        await peer.heartbeat(topics={"Orders": "n = 5"}, expression_type=SQL, sub_version=1)
        pulling = asyncio.create_task(peer.pull(expression=None, offset=1, hold_ms=15_000))
        await until(lambda: len(cluster.broker.parts.pulls.long_poll))
        await cluster.peer().heartbeat("c2", topics={"Orders": "n = 6"}, expression_type=SQL, sub_version=2)
        await send(cluster.peer(), 6)
        assert bodies(await pulling) == [b"6"]


class TestShares:
    async def test_a_look_ends_with_its_time_and_the_next_goes_on(self, peer, monkeypatch):
        await send(peer, 1, 2, 5, 3)
        monkeypatch.setattr(pull_module, "FILTER_SCAN_S", 0.0)
        seen, offset = [], 0
        while offset < 4:
            answer = await pull(peer, FIVES, offset)
            seen.append((answer.code, following(answer)))
            offset = following(answer)
        assert seen == [(20, 1), (20, 2), (0, 3), (20, 4)]

    async def test_readers_with_far_to_go_do_not_stop_the_others(self, cluster, peer, monkeypatch):
        """Eight pulls match no message, and each scan yields to the event loop after every message.

        Sends and pulls by tag are answered between the scans.
        """
        await send(peer, *range(200))
        monkeypatch.setattr(pull_module, "FILTER_SCAN_S", 0.0)
        looks = 0

        async def read(number):
            nonlocal looks
            reader, offset = cluster.peer(), 0
            while offset < 200:
                offset = following(await pull(reader, "n > 1000", offset, group=f"G{number}"))
                looks += 1

        reading = [asyncio.create_task(read(number)) for number in range(8)]
        await until(lambda: looks > 8)
        other, between = cluster.peer(), []
        for _ in range(10):
            before = looks
            await other.send(topic="Others")
            assert (await other.pull("Others")).code == 0
            between.append(looks - before)
        await asyncio.gather(*reading)
        assert looks == 8 * 200
        assert max(between) < 200

    async def test_what_is_not_in_memory_is_read_by_a_thread(self, tmp_path):
        async with running(tmp_path) as (_, peer):
            await send(peer, 4, 5, 6, 5)
        disk = ColdDisk()
        async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (_, peer):
            disk.cold = True
            found, offset = [], 0
            while offset < 4:
                answer = await pull(peer, FIVES, offset)
                found += bodies(answer) if answer.code == 0 else []
                assert following(answer) > offset
                offset = following(answer)
            assert found == [b"5", b"5"]
            assert disk.in_the_loop == 0

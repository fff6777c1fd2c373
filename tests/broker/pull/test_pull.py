"""Pulls over real sockets: found messages, parked pulls, wake-ups and refusals."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.kit.brokers import COMMIT, SUSPEND, Peer, held, records, refused, running
from tests.kit.waiting import until

from cometmq.broker.pull.backlog import Backlog
from cometmq.broker.pull.pull import PullProcessor
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import CreateTopicRequestHeader, DeleteSubscriptionGroupRequestHeader
from cometmq.remoting import Limits
from cometmq.store.base.disk import Disk
from cometmq.store.reading.queue_reader import GetStatus, ReadResult


def bounds(answer):
    return tuple(int(answer.ext[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset"))


@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE])
async def test_messages_come_in_order_and_say_where_to_go_on(peer, code):
    await peer.send_numbers(40)
    first = await peer.pull(code=code)
    assert [m.body for m in records(first)] == [b"%d" % n for n in range(32)]
    assert (first.remark, bounds(first), first.ext["suggestWhichBrokerId"]) == ("FOUND", (32, 0, 40), "0")
    rest = await peer.pull(offset=32, code=code)
    assert [m.body for m in records(rest)] == [b"%d" % n for n in range(32, 40)]
    few = await peer.pull(offset=3, max_msg_nums=2, code=code)
    assert [m.body for m in records(few)] == [b"3", b"4"]


async def test_a_bulk_pull_gets_more_than_others_and_waits_for_its_turn(peer):
    await peer.send_numbers(300)
    answers = await asyncio.gather(*(peer.pull(max_msg_nums=1000, bulk=bulk) for bulk in (True, False, None)))
    assert [len(records(answer)) for answer in answers] == [300, 32, 32]
    nothing = await peer.pull(offset=300, bulk=True)
    assert nothing.code == 19


@pytest.mark.parametrize(
    ("offset", "sent", "code", "remark", "following"),
    [
        (0, 0, 19, "NO_MESSAGE_IN_QUEUE", 0),
        (5, 0, 21, "NO_MESSAGE_IN_QUEUE", 0),
        (2, 2, 19, "OFFSET_OVERFLOW_ONE", 2),
        (3, 2, 21, "OFFSET_OVERFLOW_BADLY", 2),
        (-1, 2, 21, "OFFSET_TOO_SMALL", 0),
    ],
)
async def test_offsets_outside_the_queue_are_corrected(peer, offset, sent, code, remark, following):
    await peer.send(queue_id=1)
    await peer.send_numbers(sent)
    answer = await peer.pull(offset=offset)
    assert (answer.code, answer.remark, bounds(answer)[0]) == (code, remark, following)


@pytest.mark.parametrize(
    ("status", "code"), [(GetStatus.MESSAGE_WAS_REMOVING, 20), (GetStatus.OFFSET_FOUND_NULL, 19)]
)
async def test_what_is_not_there_any_more_moves_the_reader_on(cluster, peer, monkeypatch, status, code):
    await peer.send_numbers(3)
    answer = ReadResult(status, [], 0, 2, 1, 3, False)
    monkeypatch.setattr(type(cluster.broker.parts.store), "get_messages", lambda *_, **__: answer)
    answer = await peer.pull(offset=1)
    assert (answer.code, answer.remark, bounds(answer)) == (code, status.name, (2, 1, 3))


class TestTags:
    async def test_only_wanted_tags_come_and_the_offset_passes_the_others(self, peer):
        for tag in ("A", "B", "C", "A", None):
            await peer.send(properties={"TAGS": tag} if tag else {})
        answer = await peer.pull(expression="A || C")
        assert [m.tags for m in records(answer)] == ["A", "C", "A"]
        assert bounds(answer)[0] == 5
        nothing = await peer.pull(expression="X")
        assert (nothing.code, nothing.remark, bounds(nothing)[0]) == (20, "NO_MATCHED_MESSAGE", 5)

    @pytest.mark.parametrize("expression", ["*", ""])
    async def test_everything_passes(self, peer, expression):
        await peer.send(properties={"TAGS": "A"})
        await peer.send()
        assert len(records(await peer.pull(expression=expression))) == 2

    async def test_blank_tags_match_nothing_and_separators_alone_are_an_error(self, peer):
        await peer.send(properties={"TAGS": "A"})
        assert (await peer.pull(expression=" || ")).code == 20
        assert (await peer.pull(expression="||")).code == 23
        await peer.heartbeat(topics={"Orders": "||"})
        assert (await peer.pull(expression=None)).code == 23


class TestHolding:
    async def test_an_arrival_wakes_a_held_pull_at_once(self, cluster, peer):
        await peer.send()
        pulling = await held(cluster, peer)
        begun = time.monotonic()
        await peer.send(body=b"news")
        assert [m.body for m in records(await pulling)] == [b"news"]
        assert time.monotonic() - begun < 10.0  # a parked pull would wait 15 s

    async def test_the_sender_is_answered_before_the_reader(self, cluster, peer):
        """On one connection the response to the send is written before the response to the parked pull."""
        await peer.send()
        order = []
        pulling = await held(cluster, peer)
        pulling.add_done_callback(lambda _: order.append("pull"))
        sending = asyncio.create_task(peer.send())
        sending.add_done_callback(lambda _: order.append("send"))
        await asyncio.gather(pulling, sending)
        assert order == ["send", "pull"]

    async def test_a_pull_runs_out_after_its_time_with_19(self, peer):
        await peer.send()
        begun = time.monotonic()
        answer = await peer.pull(offset=1, hold_ms=200)
        elapsed = time.monotonic() - begun
        assert (answer.code, answer.remark, bounds(answer)) == (19, "OFFSET_OVERFLOW_ONE", (1, 0, 1))
        assert 0.2 <= elapsed < 20.0

    async def test_an_empty_queue_is_waited_for_too(self, cluster, peer):
        await peer.send(queue_id=1)
        pulling = await held(cluster, peer, offset=0)
        await peer.send(body=b"first")
        assert [m.body for m in records(await pulling)] == [b"first"]

    async def test_a_wrong_tag_does_not_wake(self, cluster, peer):
        await peer.send()
        pulling = await held(cluster, peer, expression="A")
        await peer.send(properties={"TAGS": "B"})
        assert len(cluster.broker.parts.pulls.long_poll) == 1
        await peer.send(body=b"mine", properties={"TAGS": "A"})
        answer = await pulling
        assert [m.body for m in records(answer)] == [b"mine"]
        assert bounds(answer)[0] == 3

    async def test_short_polling_waits_a_fixed_time(self, started):
        _, peer = await started(longPollingEnable="false", shortPollingTimeMills="100")
        await peer.send()
        begun = time.monotonic()
        assert (await peer.pull(offset=1, hold_ms=15_000)).code == 19
        assert time.monotonic() - begun < 10.0

    @pytest.mark.parametrize(("limit", "value"), [("WOKEN_PER_TICK", 3), ("WOKEN_BYTES", 1)])
    async def test_many_groups_wake_from_one_message_however_few_a_tick_serves(
        self, cluster, peer, monkeypatch, limit, value
    ):
        monkeypatch.setattr(f"cometmq.broker.pull.pull.{limit}", value)
        served, serve = [0], PullProcessor.serve_late
        cluster.broker.parts.tick.at_end(lambda: served.append(0))

        def count(processor, request):
            served[-1] += 1
            serve(processor, request)

        monkeypatch.setattr(PullProcessor, "serve_late", count)
        await peer.send()
        pulls = [asyncio.create_task(peer.pull(offset=1, group=f"G{n}", hold_ms=15_000)) for n in range(20)]
        await until(lambda: len(cluster.broker.parts.pulls.long_poll) == 20)
        await peer.send(body=b"for all")
        for answer in await asyncio.gather(*pulls):
            assert [m.body for m in records(answer)] == [b"for all"]
        assert (sum(served), max(served)) == (20, value)

    async def test_pulls_of_a_lost_connection_are_forgotten(self, cluster, peer):
        await peer.send()
        other = cluster.peer()
        pulling = await held(cluster, other)
        await other.close()
        await asyncio.gather(pulling, return_exceptions=True)
        await until(lambda: not len(cluster.broker.parts.pulls.long_poll))

    async def test_a_stopping_broker_answers_what_it_holds(self, cluster, peer):
        await peer.send()
        pulling = await held(cluster, peer)
        await cluster.standalone.stop()
        assert (await pulling).code == 19


def topic_settings(perm):
    return CreateTopicRequestHeader(topic="Orders", read_queue_nums=4, write_queue_nums=4, perm=perm)


class TestWhatChangesMeanwhile:
    """A parked pull gets the same response as a new pull would get."""

    async def topic_closed(self, cluster, peer):
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_settings(2))).code == 0

    async def topic_narrowed(self, cluster, peer):
        topic = cluster.broker.parts.tables.topics.get("Orders")
        topic.read_queue_nums = 0

    async def topic_deleted(self, cluster, peer):
        assert (await peer.delete_topic("Orders")).code == 0

    async def topic_made_again(self, cluster, peer):
        await self.topic_deleted(cluster, peer)
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_settings(6))).code == 0

    async def broker_closed(self, cluster, peer):
        assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"brokerPermission=2")).code == 0

    async def group_closed(self, cluster, peer):
        await peer.set_group(b'{"groupName":"G","consumeEnable":false}')

    async def group_deleted(self, cluster, peer):
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"autoCreateSubscriptionGroup=false")
        header = DeleteSubscriptionGroupRequestHeader(group_name="G")
        assert (await peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)).code == 0

    async def other_tags(self, cluster, peer):
        await peer.heartbeat(topics={"Orders": "B"}, sub_version=2)

    async def no_subscription(self, cluster, peer):
        for each in cluster._peers:  # noqa: SLF001 - the topic remains while one member lists it
            await each.heartbeat(topics={"Other": "*"}, sub_version=2)

    @pytest.mark.parametrize("waits", ["parked", "in line"])
    @pytest.mark.parametrize(
        ("change", "code"),
        [
            ("topic_closed", 16),
            ("topic_narrowed", 1),
            ("topic_deleted", 17),
            ("topic_made_again", 21),
            ("broker_closed", 16),
            ("group_closed", 16),
            ("group_deleted", 26),
            ("other_tags", 20),
            ("no_subscription", 24),
        ],
    )
    async def test_it_is_checked_again(self, cluster, peer, monkeypatch, waits, change, code):
        pulls = cluster.broker.parts.pulls
        await peer.heartbeat(topics={"Orders": "A"})
        await peer.send(properties={"TAGS": "A"})
        if waits == "in line":
            monkeypatch.setattr("cometmq.broker.pull.pull.WOKEN_PER_TICK", 0)
        pulling = await held(cluster, peer, expression=None, sub_version=1)
        other = cluster.peer()
        if waits == "in line":
            await other.send(properties={"TAGS": "A"})
            assert not len(pulls.long_poll)  # the pull is woken and its turn does not come
            await getattr(self, change)(cluster, other)
            monkeypatch.undo()
        else:
            await getattr(self, change)(cluster, other)
            if change not in ("topic_deleted", "topic_made_again", "broker_closed"):
                await other.send(properties={"TAGS": "A"})
            pulls.wake(pulls.long_poll.wake_all())
        woken = await pulling
        fresh = await peer.pull(offset=1, expression=None, sub_version=1)
        assert woken.code == fresh.code == code or (change, woken.code) == ("topic_made_again", 17)
        if woken.code == code:
            assert (woken.remark, woken.ext) == (fresh.remark, fresh.ext)

    async def test_new_tags_count_for_a_pull_that_waits(self, cluster, peer):
        await peer.heartbeat(topics={"Orders": "A"})
        await peer.send(properties={"TAGS": "A"})
        pulling = await held(cluster, peer, expression=None, sub_version=1)
        await self.other_tags(cluster, peer)
        await peer.send(properties={"TAGS": "B"}, body=b"of the new tag")
        cluster.broker.parts.pulls.recheck()
        assert [m.body for m in records(await pulling)] == [b"of the new tag"]


class TestRoom:
    """The number of parked pulls is limited; a pull beyond the limit is handled as without long polling."""

    @pytest.mark.parametrize("limit", ["maxHeldPullsPerConnection", "maxHeldPullsPerQueue"])
    async def test_a_pull_too_many_is_answered_after_a_short_time(self, started, limit):
        cluster, peer = await started(**{limit: "3", "shortPollingTimeMills": "100"})
        long_poll = cluster.broker.parts.pulls.long_poll
        await peer.send()
        parked = [asyncio.create_task(peer.pull(offset=1, hold_ms=15_000, group=f"G{n}")) for n in range(3)]
        await until(lambda: len(long_poll) == 3)
        for _ in range(2):
            begun = time.monotonic()
            answer = await peer.pull(offset=1, hold_ms=15_000, group="G3")
            assert (answer.code, answer.remark, bounds(answer)) == (19, "OFFSET_OVERFLOW_ONE", (1, 0, 1))
            assert time.monotonic() - begun >= 0.1
        late = asyncio.create_task(peer.pull(offset=1, hold_ms=15_000, group="G4"))
        await until(lambda: len(long_poll) == 4)
        await peer.send(body=b"news")
        for pull in (*parked, late):
            assert [m.body for m in records(await pull)] == [b"news"]
        assert (await peer.pull(offset=2, hold_ms=1, group="G4")).code == 19

    async def test_long_subscriptions_count_for_more_than_one_pull(self, started):
        cluster, peer = await started(maxHeldPullsPerConnection="10", shortPollingTimeMills="50")
        await peer.send()
        tags = "||".join(f"tag{n}" for n in range(300))
        pulling = await held(cluster, peer, expression=tags)
        assert (await peer.pull(offset=1, hold_ms=15_000, expression=tags)).code == 19
        pulling.cancel()

    async def test_an_expression_that_is_too_long_is_refused(self, peer):
        await peer.send()
        refused(await peer.pull(expression="tag||" * 10_000), 23, "at most 32767")

    async def test_who_sends_ever_more_pulls_is_not_read_until_some_are_answered(self, start_cluster):
        cluster = await start_cluster(maxHeldPullsPerConnection="1", shortPollingTimeMills="300")
        greedy, other = cluster.peer(), cluster.peer()
        await other.send()
        long_poll = cluster.broker.parts.pulls.long_poll
        most = 1 + Limits().handlers
        pulls = [asyncio.create_task(greedy.pull(offset=1, hold_ms=15_000)) for _ in range(2 * most)]
        await until(lambda: len(long_poll) == most)
        assert (await other.send("Others")).code == 0
        assert len(long_poll) <= most
        answered = (pull for pull in asyncio.as_completed(pulls))
        for _ in range(2 * most - 1):
            assert (await next(answered)).code == 19
        await other.send()
        assert (await next(answered)).code == 0


class TestCommitting:
    async def test_the_offset_of_a_pull_that_may_be_held_is_stored(self, cluster, peer):
        await peer.send()
        await peer.pull(flags=COMMIT | SUSPEND, commit_offset=7, hold_ms=1)
        offsets = cluster.broker.parts.tables.offsets
        assert offsets.query("G", "Orders", 0) == 7
        await peer.pull(flags=COMMIT, commit_offset=9)
        assert offsets.query("G", "Orders", 0) == 7


class TestRefusals:
    async def test_what_does_not_exist(self, peer):
        answer = await peer.pull("Nowhere")
        assert (answer.code, answer.remark) == (17, "topic[Nowhere] not exist, apply first please!")

    @pytest.mark.parametrize(("version", "code"), [(407, 1), (513, 29)])
    @pytest.mark.parametrize("queue_id", [4, -1])
    async def test_a_queue_that_does_not_exist(self, peer, version, code, queue_id):
        await peer.send()
        refused(await peer.pull(queue_id=queue_id, version=version), code, "is illegal")

    async def test_a_topic_without_read_permission(self, peer):
        header = CreateTopicRequestHeader(topic="WriteOnly", read_queue_nums=1, write_queue_nums=1, perm=2)
        assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
        assert (await peer.pull("WriteOnly")).code == 16

    async def test_a_group_that_may_not_consume_or_not_be_made(self, started):
        _, peer = await started(autoCreateSubscriptionGroup="false")
        await peer.send()
        answer = await peer.pull(group="Unknown")
        assert (answer.code, answer.remark) == (26, "subscription group [Unknown] does not exist")
        assert (await peer.pull(group="TOOLS_CONSUMER")).code == 0
        assert (await peer.set_group(b'{"groupName":"Closed","consumeEnable":false}')).code == 0
        assert (await peer.pull(group="Closed")).code == 16

    async def test_without_a_subscription_of_its_own_a_pull_needs_the_heartbeat(self, peer):
        await peer.send(properties={"TAGS": "A"})
        unknown = await peer.pull(expression=None)
        assert (unknown.code, unknown.ext) == (24, {})
        await peer.heartbeat(topics={"Other": "*"})
        assert (await peer.pull(expression=None)).code == 24
        await peer.heartbeat(topics={"Orders": "B"}, sub_version=5)
        newer = await peer.pull(expression=None, sub_version=6)
        assert (newer.code, newer.ext) == (25, {})
        assert (await peer.pull(expression=None, sub_version=5)).code == 20
        await peer.heartbeat(topics={"Orders": "A"}, sub_version=6)
        assert len(records(await peer.pull(expression=None, sub_version=5))) == 1

    async def test_broadcasting_can_be_forbidden_to_a_group(self, peer):
        await peer.send()
        await peer.set_group(b'{"groupName":"G","consumeBroadcastEnable":false}')
        await peer.heartbeat(message_model="BROADCASTING")
        assert (await peer.pull(expression=None)).code == 16

    async def test_a_broker_without_read_permission(self, started):
        _, peer = await started(brokerPermission="2")
        await peer.send()
        assert (await peer.pull()).code == 16


class ColdDisk(Disk):
    """A disk with an empty page cache."""

    __slots__ = ("refused",)

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    def pread_cached(self, fd, length, offset):
        self.refused += 1


class TestColdReads:
    @pytest.fixture
    async def cold(self, tmp_path):
        """Restart a broker on a store of 40 messages, none of which is in memory."""
        async with running(tmp_path) as (_, peer):
            for number in range(40):
                await peer.send(body=b"%d" % number * 500, properties={"TAGS": "A" if number % 2 else "B"})
        async with running(tmp_path, ColdDisk()) as (broker, _):
            yield broker

    async def client(self, cold):
        async with Peer(cold.addr) as connected:
            yield connected

    peer, other = pytest.fixture(client), pytest.fixture(client)

    async def test_records_that_are_not_in_memory_come_by_way_of_a_thread(self, cold, peer):
        answers = await asyncio.gather(*(peer.pull(offset=n) for n in (0, 8, 16)))
        assert cold.parts.store.disk.refused > 0
        for first, answer in zip((0, 8, 16), answers, strict=True):
            found = records(answer)
            assert [m.queue_offset for m in found] == list(range(first, first + len(found)))
        assert {m.tags for m in records(await peer.pull(expression="A"))} == {"A"}

    async def test_so_many_reads_of_one_connection_are_in_flight_and_no_more(
        self, cold, peer, other, monkeypatch
    ):
        gate, reads = asyncio.Event(), 0
        really = type(cold.parts.store.executor).query

        async def wait(*asked, **named):
            nonlocal reads
            reads += 1
            await gate.wait()
            return await really(*asked, **named)

        monkeypatch.setattr(type(cold.parts.store.executor), "query", wait)
        most = Limits().handlers
        pulls = [asyncio.create_task(peer.pull(group=f"G{n}")) for n in range(2 * most)]
        try:
            await until(lambda: reads == most)
            assert (await other.send("Others")).code == 0
            assert reads == most
        finally:
            gate.set()  # a broker's stop waits for its reads
        assert {answer.code for answer in await asyncio.gather(*pulls)} == {0}

    async def test_a_read_that_fails_is_answered(self, cold, peer, monkeypatch):

        async def fail(*_args, **_named):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(type(cold.parts.store.executor), "query", fail)
        refused(await peer.pull(), 1, "Input/output error")

    async def test_a_drain_waits_its_turn_until_it_has_nearly_caught_up(self, peer, other, monkeypatch):
        waited, wait = [], Backlog.wait

        def note(backlog, request):
            waited.append(request.header.queue_offset)
            return wait(backlog, request)

        monkeypatch.setattr(Backlog, "wait", note)

        async def drain():
            offsets = [0]
            while offsets[-1] < 40:
                answer = await peer.pull(offset=offsets[-1], max_msg_nums=5)
                offsets.append(bounds(answer)[0])
                assert [m.queue_offset for m in records(answer)] == list(range(*offsets[-2:]))
            return offsets

        with monkeypatch.context() as far:
            far.setattr("cometmq.broker.pull.pull.NEAR", 0)
            offsets, *sent = await asyncio.gather(drain(), *(other.send("Other") for _ in range(50)))
            assert len(sent) == 50
            assert waited == offsets[1:-1]
        await peer.pull(offset=8)
        await peer.pull(offset=0, max_msg_nums=1)
        assert waited == [*offsets[1:-1], 8]

    async def test_a_pull_that_waits_and_fails_is_answered(self, cold, peer, monkeypatch):
        monkeypatch.setattr("cometmq.broker.pull.pull.NEAR", 0)
        assert (await peer.pull()).code == 0
        with monkeypatch.context() as broken:

            def fail(*_args):
                raise OSError(5, "Input/output error")

            broken.setattr(ColdDisk, "pread_cached", fail)
            answer = await peer.pull(offset=8)
            assert (answer.code, answer.remark) == (1, "OSError: [Errno 5] Input/output error")
        assert records(await peer.pull(offset=8))[0].queue_offset == 8

    async def test_a_pull_that_waits_is_answered_when_the_broker_stops(self, cold, peer, monkeypatch):
        monkeypatch.setattr("cometmq.broker.pull.pull.NEAR", 0)
        assert (await peer.pull()).code == 0
        waits = asyncio.Event()
        monkeypatch.setattr(Backlog, "serve_some", lambda _: waits.set())
        waiting = asyncio.create_task(peer.pull(offset=8))
        await waits.wait()
        await cold.stop()
        assert records(await waiting)[0].queue_offset == 8

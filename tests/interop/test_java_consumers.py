"""Apache's Java consumers with our servers: push, pull, sharing, failover, retries, delays."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest
from tests.client.group.test_allocate import NEARBY
from tests.interop import wire
from tests.interop.driver import Driver, JavaError, Json, body_of, message
from tests.interop.processes import PATIENCE_S
from tests.interop.space import Space, assert_exactly_once, bodies
from tests.interop.store_input import QUERY_OFFSET, max_offset
from tests.kit.waiting import wait_until

from cometmq import MessageExt
from cometmq.admin import Admin, Resending, Selection
from cometmq.admin.dead_letters import original_topic
from cometmq.admin.errors import UnknownNameError


def _send(space: Space, count: int, word: str = "m", **each: object) -> list[bytes]:
    sent = [f"{word}-{number}".encode() for number in range(count)]
    producer = space.producer()
    space.java.send(producer, [message(space.topic, body, **each) for body in sent], "async")  # type: ignore[arg-type]
    return sent


def test_a_tag_expression_brings_its_tags_and_nothing_else(space: Space) -> None:
    wanted = _send(space, 20, "a", tags="A") + _send(space, 20, "b", tags="B")
    _send(space, 20, "c", tags="C")
    _send(space, 20, "none")
    consumer = space.push(expression="A || B")
    space.java.wait_delivered(consumer, 40)
    last = _send(space, 1, "last", tags="B")  # earlier messages have been filtered by then
    got = space.java.wait_delivered(consumer, 41)
    assert_exactly_once(got, wanted + last)


def test_what_members_have_set_is_known_before_any_of_them_has_failed(space: Space) -> None:
    """Only the members' running infos contain the maximum of retries; heartbeats contain the other values."""
    _send(space, 1)
    space.push()

    async def settings() -> dict[str, str]:
        async with Admin(space.cluster.namesrv) as admin:
            try:
                found = await admin.subscriptions(space.group)
            except UnknownNameError:
                return {}  # the name server does not know the group yet
            assert found.setting_differences == {}
            return found.members[0].settings

    wanted = {"messageModel": "CLUSTERING", "maxReconsumeTimes": "16"}
    wait_until("its settings", lambda: wanted.items() <= asyncio.run(settings()).items())


def test_an_sql_filter_brings_what_passes_and_nothing_else(space: Space) -> None:
    """Push consumers (also parked pulls and retries), lite pulls and plain pulls get matching messages."""
    text, wrong = "n > 10 AND (s IS NULL OR s <> 'it''s')", "n > > 10"
    wanted = _send(space, 20, "a", properties={"n": "11"}) + _send(
        space, 20, "b", properties={"n": "12", "s": "x"}
    )
    _send(space, 20, "c", properties={"n": "10"})
    _send(space, 20, "d", properties={"n": "11", "s": "it's"})
    _send(space, 20, "e", properties={"n": "many"})
    consumer = space.push(expression=text, sql=True, failTimes=1, failDelayLevel=1)
    space.java.wait_delivered(consumer, 80)
    _send(space, 1, "late", properties={"n": "1"})
    wanted += _send(space, 1, "last", properties={"n": "11"})
    got = space.java.wait_delivered(consumer, 82)
    assert_exactly_once([each for each in got if not each["failed"]], wanted)
    assert_exactly_once([each for each in got if each["failed"]], wanted)
    assert_exactly_once(_pulled_by_sql(space, text), wanted)
    lite = space.lite(topics={space.topic: text}, group=space.group + "-lite", sql=True)
    found: list[Json] = []
    wait_until(
        "all by lite", lambda: found.extend(space.java.call("lite_poll", name=lite)) or len(found) >= 41
    )
    assert_exactly_once(found, wanted)
    with pytest.raises(JavaError) as refused:
        space.push(expression=wrong, sql=True, group=space.group + "-wrong")
    assert refused.value.code == 23


def _pulled_by_sql(space: Space, text: str) -> list[Json]:
    """Pull with an SQL filter, once a heartbeat has shown the client the broker's version."""
    puller = space.pull()
    space.pull_queue(puller, 0)  # sends a heartbeat to the broker
    found: list[Json] = []

    def pulled() -> bool:
        try:
            found[:] = space.pull_topic(puller, expression=text, sql=True)
        except JavaError as error:
            if "does not upgrade to support" not in error.message:
                raise
            return False
        return True

    wait_until("a heartbeat of the pull consumer", pulled)
    return found


def test_a_waiting_consumer_gets_a_new_message_at_once(space: Space) -> None:
    producer = space.producer()
    space.java.send(producer, [message(space.topic, b"warm-up %d" % n) for n in range(8)])
    consumer = space.push()
    space.java.wait_delivered(consumer, 8)
    waits = []
    for number in range(10):
        began = time.monotonic()
        space.java.send(producer, [message(space.topic, b"now %d" % number)])
        space.java.wait_delivered(consumer, 9 + number)
        waits.append(time.monotonic() - began)
    assert sorted(waits)[5] < 1, waits  # a broker that only polled would need seconds


@pytest.mark.representative("4.9.8")
def test_a_restarted_group_goes_on_where_it_stopped(space: Space) -> None:
    _send(space, 50, "before")
    first = space.push()
    space.java.wait_delivered(first, 50)
    space.stop(first)
    new = _send(space, 20, "after")
    second = space.push()
    assert_exactly_once(space.java.wait_delivered(second, 20), new)


def test_a_new_group_may_start_at_the_end(space: Space) -> None:
    _send(space, 300, "old")
    # CONSUME_FROM_LAST_OFFSET also reads a new queue in memory from 0, because Apache's broker returns 0 for
    # it. So the group's offsets are stored first.
    puller = space.pull()
    for number in range(4):
        top = max_offset(space.broker_port, space.topic, number)
        space.java.call("offset_update", name=puller, queue=space.queue(number), offset=top)
        wait_until("offset stored", lambda n=number, t=top: _stored_offset(space, n) == t)
    space.stop(puller)  # otherwise it would keep its share of the group's queues
    consumer = space.push(**{"from": "CONSUME_FROM_LAST_OFFSET"})
    new = _send(space, 20, "new")
    assert_exactly_once(space.java.wait_delivered(consumer, 20), new)


def _stored_offset(space: Space, queue_id: int) -> int:
    ext = {"consumerGroup": space.group, "topic": space.topic, "queueId": str(queue_id)}
    header, _ = wire.call(space.broker_port, QUERY_OFFSET, ext)
    return int(header["extFields"]["offset"]) if header["code"] == 0 else -header["code"]


def test_broadcasting_brings_every_message_to_every_consumer(space: Space) -> None:
    sent = _send(space, 30)
    first, second = space.push(broadcasting=True), space.push(broadcasting=True)
    assert_exactly_once(space.java.wait_delivered(first, 30), sent)
    assert_exactly_once(space.java.wait_delivered(second, 30), sent)


def test_pulling_by_hand_says_what_there_is(space: Space) -> None:
    producer, puller = space.producer(), space.pull()
    space.java.send(
        producer, [message(space.topic, b"%d" % n, tags="AB"[n % 2]) for n in range(40)], "selector", select=0
    )
    assert len(space.pull_queue(puller, 0)) == 40  # waits for the route

    def pull(offset: int, **more: object) -> Json:
        result: Json = space.java.call("pull", name=puller, queue=space.queue(0), offset=offset, **more)
        return result

    found = pull(0, max=10)
    assert (found["status"], found["next"], found["min"], found["max"]) == ("FOUND", 10, 0, 40)
    assert [body_of(each) for each in found["messages"]] == [b"%d" % n for n in range(10)]
    filtered = pull(0, max=10, expression="A")
    assert [body_of(each) for each in filtered["messages"]] == [b"%d" % n for n in range(0, 20, 2)]
    nothing = pull(0, expression="C")
    assert (nothing["status"], nothing["messages"]) == ("NO_MATCHED_MSG", [])
    assert nothing["next"] == 40
    assert pull(40)["status"] == "NO_NEW_MSG"
    beyond = pull(1000)
    assert (beyond["status"], beyond["next"]) == ("OFFSET_ILLEGAL", 40)


def test_a_blocking_pull_waits_for_the_next_message(space: Space) -> None:
    producer, puller = space.producer(), space.pull()
    space.java.send(producer, [message(space.topic, b"one")], "selector", select=0)
    assert bodies(space.pull_queue(puller, 0)) == [b"one"]  # waits for the route
    waiting = space.java.start("pull", name=puller, queue=space.queue(0), offset=1, block=True)
    space.java.call("ping")
    assert not waiting.done()
    space.java.send(producer, [message(space.topic, b"two")], "queue", queue=space.queue(0))
    assert bodies(waiting.result(PATIENCE_S)["messages"]) == [b"two"]


def test_lite_pull_reads_all_commits_and_resumes(space: Space) -> None:
    sent = _send(space, 60)
    first = space.lite(autoCommit=False)
    got: list[Json] = []
    wait_until("60 messages", lambda: got.extend(space.java.call("lite_poll", name=first)) or len(got) >= 60)
    assert_exactly_once(got, sent)
    space.java.call("lite_commit", name=first)
    space.stop(first)
    assert sum(_stored_offset(space, number) for number in range(4)) == 60
    more = _send(space, 5, "more")
    second = space.lite(autoCommit=False)
    again: list[Json] = []
    wait_until(
        "5 messages", lambda: again.extend(space.java.call("lite_poll", name=second)) or len(again) >= 5
    )
    assert_exactly_once(again, more)


PATIENT = "-Drocketmq.client.rebalance.waitInterval=600000"
"""A long rebalance interval.

Clients of other tests rebalance each second, but here only the broker's notice may tell them about a change.
"""


def test_two_consumers_share_and_hand_over_queues(
    space: Space, own_java_client: Callable[..., Driver]
) -> None:
    java = own_java_client(space.java.version, PATIENT)
    _send(space, 8, "warm-up")
    first, second = (space.push(java=java, routeMillis=30_000) for _ in range(2))
    for each in (first, second):
        wait_until(f"{each} has two queues", lambda name=each: len(_queues(space, java, name)) == 2)
    shared = _send(space, 80, "shared")

    def bodies_at(name: str) -> set[bytes]:
        return {body_of(each) for each in java.delivered(name)} & set(shared)

    # On a busy machine, a client that closes its connection after a slow request receives some of them again.
    wait_until("80 messages on two consumers", lambda: len(bodies_at(first) | bodies_at(second)) == 80)
    assert bodies_at(first)
    assert bodies_at(second)
    # The unregistration notifies the first consumer, which gets all messages long before its next rebalance.
    space.stop(second)
    wait_until("first has all queues", lambda: len(_queues(space, java, first)) == 4)
    alone = _send(space, 40, "alone")

    def missing() -> set[bytes]:
        return set(alone) - {body_of(each) for each in java.delivered(first)}

    wait_until("40 messages on one", lambda: not missing())


def test_a_killed_consumers_queues_are_taken_over(
    space: Space, own_java_client: Callable[..., Driver]
) -> None:
    healthy, victim = (own_java_client(space.java.version, PATIENT) for _ in range(2))
    _send(space, 8, "warm-up")
    survivor = space.push(java=healthy, routeMillis=30_000)
    dying = space.push(java=victim, routeMillis=30_000)
    for java, each in ((healthy, survivor), (victim, dying)):
        wait_until(f"{each} has two queues", lambda j=java, name=each: len(_queues(space, j, name)) == 2)
    before = _send(space, 100, "before")
    wait_until("both consume", lambda: victim.delivered(dying) and healthy.delivered(survivor))
    victim.kill()
    after = _send(space, 100, "after")
    wait_until("survivor has all queues", lambda: len(_queues(space, healthy, survivor)) == 4)
    seen_by_dead = {body_of(each) for each in victim.delivered(dying)}

    def missing() -> set[bytes]:
        seen = {body_of(each) for each in healthy.delivered(survivor)} | seen_by_dead
        return set(before + after) - seen

    wait_until("every message seen", lambda: not missing())
    # Only messages that the killed consumer had not committed are delivered again, once. A warm-up message
    # may be, too: Java's client does not commit a message in progress when its queue is reassigned.
    counts = Counter(body_of(each) for each in healthy.delivered(survivor))
    twice = {body for body in (*before, *after) if counts[body] > 1}
    assert not twice


def _queues(space: Space, java: Driver, consumer: str) -> set[int]:
    queues = java.call("push_queues", name=consumer)
    return {each["queueId"] for each in queues if each["topic"] == space.topic}


def test_a_failed_message_comes_again_until_it_succeeds(space: Space) -> None:
    sent = _send(space, 6, tags="A", keys="retried")
    consumer = space.push(expression="A", failTimes=2, failDelayLevel=1)
    got = space.java.wait_delivered(consumer, 18)
    tries: dict[bytes, list[tuple[int, bool]]] = {}
    for each in got:
        tries.setdefault(body_of(each), []).append((each["reconsumeTimes"], each["failed"]))
        assert each["topic"] == space.topic
        assert (each["tags"], each["keys"]) == ("A", "retried")
    assert tries == {body: [(0, True), (1, True), (2, False)] for body in sent}
    ids = {body: {each["msgId"] for each in got if body_of(each) == body} for body in sent}
    assert all(len(each) == 1 for each in ids.values())  # the unique key is the same in all attempts


def test_a_message_that_always_fails_ends_in_the_dead_letter_topic(space: Space) -> None:
    sent = _send(space, 3)
    consumer = space.push(failTimes=99, failDelayLevel=1, maxReconsumeTimes=1)
    got = space.java.wait_delivered(consumer, 6)
    assert Counter(each["reconsumeTimes"] for each in got) == {0: 3, 1: 3}
    everything = Selection(group=space.group)

    async def dead() -> list[MessageExt]:
        async with Admin(space.cluster.namesrv) as admin:
            return [letter async for letter in admin.dead_letters(everything)]

    async def send_again() -> list[str]:
        async with Admin(space.cluster.namesrv) as admin:
            return [result.state async for result in admin.resend(everything, Resending())]

    wait_until("three dead letters", lambda: len(asyncio.run(dead())) >= 3)
    letters = asyncio.run(dead())
    assert_exactly_once([each for each in got if each["reconsumeTimes"] == 1], sent)
    assert [(each.reconsume_times, original_topic(each)) for each in letters] == [(2, space.topic)] * 3
    assert asyncio.run(send_again()) == ["RESENT"] * 3
    again = space.java.wait_delivered(consumer, 12)[6:]
    assert {(each["topic"], each["properties"]["DLQ_RESEND_TIMES"]) for each in again} == {(space.topic, "1")}
    assert {each["msgId"] for each in again} == {each["msgId"] for each in got}
    wait_until("dead again", lambda: len(asyncio.run(dead())) == 6)


def test_an_ordered_consumer_keeps_the_order_through_failures(space: Space) -> None:
    producer = space.producer()
    for key in range(4):
        messages = [message(space.topic, f"{key}:{n:02d}".encode()) for n in range(25)]
        space.java.send(producer, messages, "selector", select=key)
    consumer = space.push(orderly=True, failTimes=1, suspendMillis=10)
    got = space.java.wait_delivered(consumer, lambda seen: sum(not each["failed"] for each in seen) >= 100)
    for key in range(4):
        order = [body_of(each) for each in got if not each["failed"] and each["queueId"] == key]
        assert order == [f"{key}:{n:02d}".encode() for n in range(25)]
    assert Counter(body_of(each) for each in got if each["failed"]).keys() == {body_of(each) for each in got}


@pytest.mark.parametrize(("level", "seconds"), [(1, 1), (2, 5)])
def test_a_delayed_message_comes_when_it_is_due(space: Space, level: int, seconds: int) -> None:
    consumer = space.push()
    sent = _send(space, 10, tags="late", delay=level)
    got = space.java.wait_delivered(consumer, 10)
    assert_exactly_once(got, sent)
    for each in got:
        waited = each["storeTimestamp"] - each["bornTimestamp"]  # delivery stores the message again
        assert seconds * 1000 <= waited < seconds * 1000 + 30_000
        assert (each["topic"], each["tags"], each["properties"]["DELAY"]) == (space.topic, "late", str(level))


@pytest.mark.parametrize("version", ["4.9.8", "5.5.0"])
def test_binary_headers_are_served(
    version: str, cluster: object, own_java_client: Callable[..., Driver]
) -> None:
    java = own_java_client(version, "-Drocketmq.serialize.type=ROCKETMQ")
    space = Space(java, cluster)  # type: ignore[arg-type]
    sent = _send(space, 20, tags="A", keys="binary", properties={"a": "b"})
    consumer = space.push(expression="A", failTimes=1, failDelayLevel=1)
    got = java.wait_delivered(consumer, 40)
    assert_exactly_once([each for each in got if not each["failed"]], sent)
    assert_exactly_once(space.pull_topic(space.pull(group=space.group + "-pull")), sent)
    space.close()


@pytest.mark.parametrize(("members", "rooms", "expected"), [each for each in NEARBY if each[1]])
def test_machine_rooms_are_shared_as_javas_class_shares_them(
    java: Driver, members: list[str], rooms: dict[str, int], expected: list[dict[str, list[int]]]
) -> None:
    queues = [f"{room}@broker#{number}" for room, count in rooms.items() for number in range(count)]
    for member, share in zip(members, expected, strict=True):
        found = java.call("allocate_nearby", member=member, members=members, queues=queues)
        wanted = {f"{room}@broker#{number}" for room, numbers in share.items() for number in numbers}
        assert set(found) == wanted

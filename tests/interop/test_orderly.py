"""Message order: our members on Apache's brokers, Java's on ours, and both in one group."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.client.orderly_members import members_come_and_go, traffic
from tests.client.orderly_scenarios import ORDERLY
from tests.interop.apache import ApacheBroker
from tests.interop.driver import Driver, Json, body_of, message
from tests.interop.jars import CLIENT_VERSIONS, SERVER_VERSIONS
from tests.interop.processes import QUICK
from tests.interop.space import Cluster, Space
from tests.kit.waiting import until, wait_until
from tests.long_form import long_form

from cometmq import MessageExt, PushConsumer

LIVE_S = 6.0
QUICK_REBALANCE = "-Drocketmq.client.rebalance.waitInterval=1000"


@long_form("half a minute for each version of Apache's")
@pytest.mark.parametrize("version", SERVER_VERSIONS)
async def test_no_message_overlaps_or_overtakes_another_on_apaches_broker(
    version: str, names: str, tmp_path: Path
) -> None:
    """The scenario is that of test_orderly_members.py, which runs it against our broker."""
    flag = f"-Drocketmq.broker.rebalance.lockMaxLiveTime={LIVE_S * 1000:.0f}"
    jvm = ["-Xms256m", "-Xmx768m", *QUICK, flag]
    name = f"orderly-{version}"
    broker = await asyncio.to_thread(lambda: ApacheBroker(version, tmp_path, names, name=name, jvm=jvm))
    try:
        await members_come_and_go(names, LIVE_S)
    finally:
        broker.kill()


@pytest.mark.parametrize("version", CLIENT_VERSIONS)
def test_javas_orderly_members_hand_queues_over(
    version: str, cluster: Cluster, own_java_client: Callable[..., Driver]
) -> None:
    # After it has released a queue, 4.9.8 unlocks the queue 20 s later if messages are cached.
    java = own_java_client(version, QUICK_REBALANCE, "-Drocketmq.client.unlockDelayTimeMills=500")
    space = Space(java, cluster)
    producer = space.producer()
    for key in range(4):
        sent = [message(space.topic, f"{key}:{n:03d}".encode()) for n in range(150)]
        space.java.send(producer, sent, "selector", select=key)
    first = space.push(orderly=True, sleepMillis=5)
    space.java.wait_delivered(first, 40)
    second = space.push(orderly=True, sleepMillis=5)
    space.java.wait_delivered(second, 40)
    space.stop(first)

    def seen() -> list[Json]:
        return space.java.delivered(first) + space.java.delivered(second)

    wait_until("all 600 messages", lambda: len({body_of(each) for each in seen()}) == 600)
    space.close()
    assert_in_order(space.java.delivered(first), space.java.delivered(second))
    assert_one_at_a_time(seen())


def assert_one_at_a_time(delivered: list[Json]) -> None:
    """Check that no two calls for a queue overlap, in the same member or in different ones."""
    ends: dict[int, int] = {}
    for call in sorted(delivered, key=lambda each: int(each["began"])):
        assert call["began"] >= ends.get(call["queueId"], 0), call
        ends[call["queueId"]] = call["ended"]


def assert_in_order(*members: list[Json]) -> None:
    """Check each member's order per queue, and that a handover repeats only messages in progress."""
    for delivered in members:
        by_queue = defaultdict(list)
        for each in delivered:
            by_queue[each["queueId"]].append(each["queueOffset"])
        for offsets in by_queue.values():
            assert offsets == sorted(offsets)
    counts = Counter(body_of(each) for delivered in members for each in delivered)
    assert sum(count - 1 for count in counts.values()) <= 8, counts.most_common(10)


@long_form("members of ours and Java's come and go for half a minute")
async def test_our_members_and_javas_hand_queues_over(java: Driver, cluster: Cluster) -> None:
    space = Space(java, cluster)
    ours: list[tuple[int, int]] = []

    async def listener(messages: list[MessageExt]) -> None:
        ours.extend((message.queue_id, message.queue_offset) for message in messages)

    def member() -> PushConsumer:
        return PushConsumer(space.group, listener, space.topic, namesrv=cluster.namesrv, options=ORDERLY)

    def theirs() -> list[tuple[int, int]]:
        return [(each["queueId"], each["queueOffset"]) for each in java.delivered(name)]

    async def goes_on(calls: Callable[[], list[tuple[int, int]]], queues: int) -> None:
        """Wait until `queues` queues have had five more calls each."""
        before = len(calls())

        async def enough() -> bool:
            news = Counter(queue for queue, _ in calls()[before:])
            return sum(count >= 5 for count in news.values()) >= queues

        await until(enough, f"{queues} queues consumed on")

    last = member()
    try:
        async with traffic(cluster.namesrv, space.topic) as sent:
            async with member():
                await goes_on(lambda: ours, 4)
                name = await asyncio.to_thread(space.push, orderly=True)
                await goes_on(theirs, 2)
                await goes_on(lambda: ours, 2)
            await goes_on(theirs, 4)
            await last.start()
            await goes_on(lambda: ours, 2)
            await asyncio.to_thread(space.stop, name)
            await goes_on(lambda: ours, 4)

        async def all_handled() -> bool:
            return len({*ours, *theirs()}) == sum(sent)

        await until(all_handled, "all messages handled")
    finally:
        await last.stop()
        await asyncio.to_thread(space.close)
    for calls in (ours, theirs()):
        for queue_id in range(4):
            offsets = [offset for queue, offset in calls if queue == queue_id]
            assert offsets == sorted(offsets)
    # Only messages in progress when Java's consumer released a queue are delivered twice.
    assert len(ours) + len(theirs()) <= sum(sent) + 6

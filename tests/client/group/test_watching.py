"""Consumers that make no progress report that and their lag."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    BrokerError,
    ClientOptions,
    ConfigError,
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    SyncPullConsumer,
)
from cometmq.client import QueueHealth
from cometmq.client.group.watching import Watchdog, lag_of
from cometmq.testing import LocalBroker

QUEUE = MessageQueue("T", "b", 0)
FIRST = ConsumeFromWhere.FIRST_OFFSET


def health(
    next_offset: int = 10,
    committed: int | None = 5,
    held: int = 0,
    waiting: str | None = None,
    call_s: float | None = None,
) -> QueueHealth:
    return QueueHealth(QUEUE, next_offset, committed, committed, held, 0, 0.0, 0.0, waiting, None, call_s)


CALL = "T/b/0: the call of the scheduled function has moved no offset for 60 s"
HELD = "T/b/0: no progress with 5 held messages for 60 s"


@pytest.mark.parametrize(
    ("looks", "problem"),
    [
        ([(0, health(held=5)), (59, health(held=5))], None),
        ([(0, health(held=5)), (60, health(held=5))], HELD),
        ([(0, health(held=5)), (60, health(held=5, waiting="5 messages held, limit 4"))], HELD),
        ([(0, health(held=6)), (60, health(held=5))], None),
        # New messages keep arriving while no older one is completed.
        ([(0, health(8, held=3)), (60, health(10, held=5))], HELD),
        ([(0, health(held=5)), (60, health(held=5, committed=6))], None),
        ([(0, health(held=5)), (60, health(held=5)), (61, health(held=4))], None),
        ([(0, health(held=5, waiting="suspended")), (60, health(held=5, waiting="suspended"))], None),
        ([(0, health(held=5, waiting="suspended")), (60, health(held=5))], HELD),
        ([(0, health(held=5)), (60, health(held=5, waiting="paused"))], None),
        ([(0, health(held=5)), (50, health(held=5, waiting="suspended")), (70, health(held=5))], None),
        ([(0, health()), (600, health())], None),
        ([(0, health(call_s=1)), (60, health(call_s=61))], CALL),
        ([(0, health(call_s=1)), (60, health(call_s=0.1))], None),
        ([(0, health(call_s=1)), (60, health(call_s=61, committed=6))], None),
        ([(0, health(held=5)), (60, health(held=5)), (61, None)], None),
    ],
)
def test_a_queue_that_stands_still_is_named(
    looks: list[tuple[float, QueueHealth | None]], problem: str | None
) -> None:
    now: list[QueueHealth] = []
    watchdog = Watchdog("group g", 60.0, lambda _: now)
    for moment, state in looks:
        now[:] = [] if state is None else [state]
        watchdog.check_queues(moment)
    assert watchdog.sentences() == (() if problem is None else (problem,))


def test_a_stall_is_logged_at_its_begin_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    now = [health(held=5)]
    watchdog = Watchdog("group g", 60.0, lambda _: now)
    with caplog.at_level(logging.INFO, "cometmq.client.consumer"):
        for moment in (0, 60, 70, 80):
            watchdog.check_queues(moment)
        now[:] = [health(held=4)]
        watchdog.check_queues(90)
    assert caplog.messages == [
        "group g: queue T@b:0 is stalled: no progress with 5 held messages for 60 s",
        "group g: queue T@b:0 makes progress again, or was revoked",
    ]


@pytest.mark.parametrize(
    ("state", "end", "lag"),
    [(health(committed=5), 20, 15), (health(committed=None, held=3), 12, 5), (health(committed=30), 20, 0)],
)
async def test_the_lag_is_what_is_not_done(state: QueueHealth, end: int, lag: int) -> None:
    async def max_offset(queue: MessageQueue) -> int:
        return end

    async def done_offset(queue: MessageQueue) -> int:
        return 7

    assert await lag_of({QUEUE: state.done_offset}, max_offset, done_offset) == {QUEUE: lag}


async def test_a_lag_that_cannot_be_asked_for_is_an_error() -> None:
    async def max_offset(queue: MessageQueue) -> int:
        raise BrokerError(1, remark="no")

    with pytest.raises(BrokerError):
        await lag_of({QUEUE: 0}, max_offset, max_offset)


async def sent(local: LocalBroker, topic: str, count: int) -> MessageQueue:
    async with Producer("p", namesrv=local.namesrv) as producer:
        queue = (await producer.queues(topic))[0]
        for _ in range(count):
            await producer.send(Message(topic, b"x"), queue=queue)
    return queue


async def test_a_push_consumer_whose_listener_hangs_is_not_well(local: LocalBroker) -> None:
    queue = await sent(local, "Hanging", 3)
    go_on = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        await go_on.wait()

    options = PushOptions(consume_from_where=FIRST, stall_after_s=0.1)
    async with (
        asyncio.timeout(60),
        PushConsumer("g-hanging", listener, "Hanging", namesrv=local.namesrv, options=options) as consumer,
    ):
        await until(
            lambda: any("no progress with 3 held messages" in each for each in consumer.health().problems)
        )
        assert (await consumer.lag())[queue] == 3
        go_on.set()
        await until(lambda: consumer.health().ok)
        assert (await consumer.lag())[queue] == 0


async def test_a_pull_consumer_that_nobody_polls_is_not_well(local: LocalBroker) -> None:
    queue = await sent(local, "Unpolled", 3)
    options = PullOptions(consume_from_where=FIRST, stall_after_s=0.1)
    async with (
        asyncio.timeout(60),
        PullConsumer("g-unpolled", namesrv=local.namesrv, options=options) as consumer,
    ):
        await consumer.assign([queue])
        await until(lambda: not (consumer.health().ok))
        assert "held messages for 0.1 s" in consumer.health().problems[0]
        assert await consumer.lag() == {queue: 3}
        while await consumer.poll(0):
            pass
        await until(lambda: consumer.health().ok)
        assert await consumer.lag() == {queue: 0}


@pytest.mark.parametrize("iterates", [False, True])
async def test_what_was_given_out_is_not_done_before_it_is_acknowledged(
    local: LocalBroker, iterates: bool
) -> None:
    queue = await sent(local, f"GivenOut{iterates}", 3)
    options = PullOptions(consume_from_where=FIRST, auto_commit=iterates, stall_after_s=0.1)
    name = f"g-given-{iterates}"
    async with (
        asyncio.timeout(60),
        PullConsumer(name, namesrv=local.namesrv, options=options) as consumer,
    ):
        await consumer.assign([queue])
        if iterates:
            messages = aiter(consumer)
            await anext(messages)
        else:
            assert len(await consumer.poll()) == 3
        assert consumer.health().queues[0].held_count == 3
        assert await consumer.lag() == {queue: 3}
        await until(lambda: not (consumer.health().ok))
        if iterates:
            await anext(messages)
            assert await consumer.lag() == {queue: 2}
        else:
            assert await consumer.poll(0) == []
            assert consumer.health().queues[0].held_count == 0
            assert await consumer.lag() == {queue: 3}  # the position from which a restart would continue
            await consumer.commit()
            assert await consumer.lag() == {queue: 0}


async def test_the_blocking_face_has_health_and_lag(local: LocalBroker) -> None:
    queue = await sent(local, "FaceLag", 2)

    def ask() -> tuple[bool, dict[MessageQueue, int]]:
        options = PullOptions(consume_from_where=FIRST)
        with SyncPullConsumer("g-face", namesrv=local.namesrv, options=options) as consumer:
            consumer.assign([queue])
            return consumer.health().ok, consumer.lag()

    assert await asyncio.to_thread(ask) == (True, {queue: 2})


@pytest.mark.parametrize("kind", [PushOptions, PullOptions])
def test_the_time_of_a_stall_is_positive(kind: type[PushOptions | PullOptions]) -> None:
    with pytest.raises(ConfigError, match="stall_after_s"):
        kind(stall_after_s=0)


@pytest.mark.parametrize("kind", ["async", "object", "thread"])
async def test_who_assigns_by_hand_is_told_of_other_queues(
    namesrv: FakeNamesrv, broker: FakeBroker, kind: str
) -> None:
    told: asyncio.Queue[tuple[str, tuple[MessageQueue, ...]]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    async def on_change(topic: str, queues: tuple[MessageQueue, ...]) -> None:
        await told.put((topic, queues))

    def in_a_thread(topic: str, queues: tuple[MessageQueue, ...]) -> None:
        loop.call_soon_threadsafe(told.put_nowait, (topic, queues))

    async def broken(topic: str, queues: tuple[MessageQueue, ...]) -> None:
        await told.put(("broken", queues))
        raise ValueError("a bug")

    class OnChange:
        async def __call__(self, topic: str, queues: tuple[MessageQueue, ...]) -> None:
            await on_change(topic, queues)

    function = {"async": on_change, "object": OnChange(), "thread": in_a_thread}[kind]
    options = ClientOptions(route_interval_s=0.02)
    async with (
        asyncio.timeout(60),
        PullConsumer("g", namesrv=namesrv.addr, client_options=options) as consumer,
    ):
        namesrv.serve("T", broker, queues=1)
        for topic in ("T", "U", "V"):  # U has not been checked yet, and V is no longer watched
            await consumer.watch_queues(topic, function)
        await consumer.watch_queues("V", None)
        namesrv.serve("V", broker, queues=2)
        namesrv.serve("T", broker, queues=2)
        two = tuple(MessageQueue("T", "broker-a", number) for number in range(2))
        assert await told.get() == ("T", two)
        await consumer.watch_queues("T", broken)
        namesrv.serve("T", broker, queues=1)
        assert await told.get() == ("broken", two[:1])
        del namesrv.routes["T"]
        namesrv.serve("U", broker, queues=1)
        assert await told.get() == ("U", (MessageQueue("U", "broker-a", 0),))


async def test_who_watches_queues_may_stop_the_consumer(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    options = ClientOptions(route_interval_s=0.02)
    consumer = PullConsumer("g", namesrv=namesrv.addr, client_options=options)

    async def stop(topic: str, queues: tuple[MessageQueue, ...]) -> None:
        consumer.update_offset(queues[0], 3)
        await consumer.stop()

    async with asyncio.timeout(60), consumer:
        await consumer.watch_queues("T", stop)
        namesrv.serve("T", broker, queues=2)
        await consumer.wait_stopped()
    assert broker.offsets == {("T", 0): 3}

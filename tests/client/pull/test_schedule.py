"""Functions scheduled for each queue of a pull consumer: when they are called, and the offsets they store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv, pull_answer
from tests.kit.waiting import until

from cometmq import MessageQueue, PullConsumer, PullOptions, PullTurn, sql92
from cometmq.client.pull import schedule
from cometmq.errors import BrokerError, ClientStateError, ConfigError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame

QUEUES = [MessageQueue("T", "broker-a", number) for number in range(2)]


@pytest.fixture
async def consumer(broker: FakeBroker, namesrv: FakeNamesrv) -> AsyncIterator[PullConsumer]:
    namesrv.serve("T", broker, queues=2)
    namesrv.serve("U", broker, queues=1)

    def pull(frame: Frame) -> Frame | None:
        held = broker.pull(frame)
        offset = broker.pulls[-1].queue_offset
        return held or pull_answer(frame, ResponseCode.PULL_NOT_FOUND, offset, offset)

    broker.on(RequestCode.PULL_MESSAGE, pull)
    async with PullConsumer("g", namesrv=namesrv.addr) as running:
        yield running


class Reader:
    """A scheduled function as a user writes it; it collects the pulled messages by queue."""

    def __init__(self) -> None:
        self.bodies: dict[int, list[bytes]] = {0: [], 1: []}
        self.calls = 0
        self.running = 0
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = 0

    async def __call__(self, queue: MessageQueue, turn: PullTurn) -> None:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            if self.failing:
                self.failing -= 1
                raise RuntimeError("not now")
            turn.next_delay_s = 0.01
            result = await turn.consumer.pull(queue, await turn.consumer.committed(queue) or 0, max_count=2)
            self.bodies[queue.queue_id] += [message.body for message in result.messages]
            turn.consumer.update_offset(queue, result.next_begin_offset)
        finally:
            self.running -= 1

    async def has(self, count: int) -> None:
        await until(lambda: sum(map(len, self.bodies.values())) >= count)


def fill(broker: FakeBroker) -> None:
    for number in range(5):
        broker.store("T", 0, b"%d" % number)
    broker.store("T", 1, b"other")


async def test_each_queue_is_read_by_its_own_calls(consumer: PullConsumer, broker: FakeBroker) -> None:
    fill(broker)
    reader = Reader()
    await consumer.schedule("T", reader)
    await reader.has(6)
    assert list(consumer.assignment) == QUEUES
    assert reader.bodies == {0: [b"0", b"1", b"2", b"3", b"4"], 1: [b"other"]}
    await consumer.stop()
    assert broker.offsets == {("T", 0): 5, ("T", 1): 1}
    assert reader.running == 0


async def test_a_queue_that_is_lost_ends_its_call_and_stores_its_offset(
    consumer: PullConsumer, broker: FakeBroker
) -> None:
    fill(broker)
    reader = Reader()
    reader.gate.clear()
    await consumer.schedule("T", reader)
    broker.members = sorted([*broker.members, "!another"])
    await consumer.rebalance()
    assert list(consumer.assignment) == QUEUES[1:]
    assert broker.offsets == {}
    broker.members.remove("!another")
    await consumer.rebalance()
    assert list(consumer.assignment) == QUEUES[1:]  # the last call for this queue is still running
    reader.gate.set()
    await broker.wait_for(lambda: ("T", 0) in broker.offsets)
    async with asyncio.timeout(60):
        while list(consumer.assignment) != QUEUES:
            await consumer.rebalance()
    await reader.has(6)
    assert reader.bodies[0] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_function_that_fails_is_named_and_called_again(
    consumer: PullConsumer, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_AFTER_FAILURE_S", 0.3)
    fill(broker)
    reader = Reader()
    reader.failing = 2
    await consumer.schedule("T", reader)
    await until(lambda: consumer.health().problems)
    assert "not now" in consumer.health().problems[0]
    assert "not now" in str(consumer.problems)
    await reader.has(6)
    assert consumer.health().ok


async def test_a_call_that_hangs_is_noticed_and_what_it_has_left_is_counted(
    broker: FakeBroker, namesrv: FakeNamesrv
) -> None:
    namesrv.serve("T", broker, queues=2)
    fill(broker)
    broker.offsets = {("T", 0): 2}
    reader = Reader()
    reader.gate.clear()
    options = PullOptions(stall_after_s=0.1)
    async with (
        asyncio.timeout(60),
        PullConsumer("g", namesrv=namesrv.addr, options=options) as consumer,
    ):
        await consumer.schedule("T", reader)
        assert [each.queue for each in consumer.health().queues] == QUEUES
        assert await consumer.lag() == {QUEUES[0]: 3, QUEUES[1]: 1}
        await until(
            lambda: any("has moved no offset for 0.1 s" in each for each in consumer.health().problems)
        )
        assert consumer.health().queues[0].call_s
        consumer.update_offset(QUEUES[0], 4)
        assert await consumer.lag() == {QUEUES[0]: 1, QUEUES[1]: 1}
        reader.gate.set()


@pytest.mark.parametrize("delay", ["soon", None, float("nan"), float("inf"), -1.0])
async def test_a_delay_that_is_none_is_a_failure(
    consumer: PullConsumer, monkeypatch: pytest.MonkeyPatch, delay: Any
) -> None:
    monkeypatch.setattr(schedule, "_AFTER_FAILURE_S", 0.01)
    calls = asyncio.Semaphore(0)

    async def function(queue: MessageQueue, turn: PullTurn) -> None:
        turn.next_delay_s = delay
        calls.release()

    await consumer.schedule("T", function)
    async with asyncio.timeout(60):
        for _ in range(8):
            await calls.acquire()
    assert "next_delay_s" in consumer.health().problems[0]


async def test_so_many_calls_run_at_once(
    consumer: PullConsumer, namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.serve("T", broker, queues=50)
    reader = Reader()
    reader.gate.clear()
    await consumer.client.refresh_routes(["T"])
    await consumer.schedule("T", reader)
    await until(lambda: reader.running >= 20)
    await asyncio.sleep(0.05)
    assert reader.most == 20
    reader.gate.set()


async def test_a_topic_is_scheduled_or_read_ahead(consumer: PullConsumer, broker: FakeBroker) -> None:
    reader = Reader()
    broker.store("U", 0, b"ahead")
    await consumer.schedule("T", reader)
    await consumer.subscribe("U")
    with pytest.raises(ClientStateError, match="has subscribed to U"):
        await consumer.schedule("U", reader)
    assert [message.body for message in await consumer.poll()] == [b"ahead"]
    await consumer.unsubscribe("T")
    assert consumer.assignment == (MessageQueue("U", "broker-a", 0),)


async def test_a_plain_function_is_refused_before_it_is_called(consumer: PullConsumer) -> None:
    called: list[object] = []
    with pytest.raises(ConfigError, match="an async function"):
        await consumer.schedule("T", lambda queue, turn: called.append(queue))  # type: ignore[arg-type,func-returns-value]
    assert (called, consumer.assignment) == ([], ())


async def test_what_a_broker_refuses_is_not_scheduled(consumer: PullConsumer, broker: FakeBroker) -> None:
    broker.refuse(RequestCode.CHECK_CLIENT_CONFIG, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "column 7")
    with pytest.raises(BrokerError, match="column 7"):
        await consumer.schedule("T", Reader(), sql92("a >> 1"))
    await consumer.subscribe("T")
    assert list(consumer.assignment) == QUEUES


async def test_a_function_may_stop_its_consumer(consumer: PullConsumer, broker: FakeBroker) -> None:
    called = []

    async def stop(queue: MessageQueue, turn: PullTurn) -> None:
        called.append(queue.queue_id)
        turn.consumer.update_offset(queue, 3)
        await turn.consumer.stop()

    async with asyncio.timeout(60):
        await consumer.schedule("T", stop)
        await consumer.wait_stopped()
    assert called
    assert broker.offsets == {("T", number): 3 for number in called}

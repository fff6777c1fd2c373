"""What a push consumer may say about queues: only of those it holds, and a pull that got lost is noticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.client.fakes import Box, FakeBroker, FakeNamesrv, ignore, push_consumer

from cometmq import (
    ClientInstance,
    ConsumeContext,
    ConsumeFromWhere,
    MessageExt,
    MessageQueue,
    PullConsumer,
    PullTurn,
    PushConsumer,
    PushOptions,
)
from cometmq.client.cluster import workers
from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.routes import topic_route
from cometmq.client.consumer import queue_puller
from cometmq.message import PullResult
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ResetOffsetBody
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ConsumeMessageDirectlyRequestHeader, ResetOffsetRequestHeader
from cometmq.protocol.record.one import encode_record


async def test_a_reset_moves_only_the_queues_that_are_held(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    namesrv.serve("T", broker, queues=4)

    def beat(frame: Frame) -> Frame | None:
        answer = broker.answer(frame)
        broker.members = sorted([*broker.members, "~another"])
        return answer

    broker.on(RequestCode.HEART_BEAT, beat)
    async with push_consumer(namesrv, ignore) as member:
        assert [queue.queue_id for queue in member.assignment] == [0, 1]
        header = ResetOffsetRequestHeader(topic="T", group="g", timestamp=0, is_force=True)
        table = {MessageQueue("T", "broker-a", queue_id): 7 for queue_id in range(4)}
        body = ResetOffsetBody(offset_table=table).encode()
        answer = await broker.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, body)
        assert answer.code == ResponseCode.SUCCESS
        assert broker.offsets == {("T", 0): 7, ("T", 1): 7}
    assert broker.offsets.keys() == {("T", 0), ("T", 1)}


async def test_a_pull_that_never_comes_back_is_given_up_and_its_queue_taken_anew(
    broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pull = BrokerApi.pull
    lost: list[MessageQueue] = []

    async def lossy(api: BrokerApi, addr: str, queue: MessageQueue, *args: Any) -> PullResult:
        if queue.topic == "T" and not lost:
            lost.append(queue)
            await asyncio.Event().wait()
        return await pull(api, addr, queue, *args)

    monkeypatch.setattr(BrokerApi, "pull", lossy)
    broker.store("T", 0, b"waited for")
    async with box.consumer(broker_suspend_s=0.01, suspend_timeout_s=0.01) as member:
        await member.rebalance()
        assert not box.messages  # not so soon
        monkeypatch.setattr(queue_puller, "_LATE_S", 0.0)
        async with asyncio.timeout(20):
            while not any("no answer to a pull" in problem for problem in member.health().problems):
                await asyncio.sleep(0.1)
        monkeypatch.undo()
        monkeypatch.setattr(BrokerApi, "pull", lossy)
        monkeypatch.setattr(queue_puller, "PULL_MAX_IDLE_S", 0.02)
        async with asyncio.timeout(20):
            while not box.messages:
                await asyncio.sleep(0.01)
                await member.rebalance()
    assert len(lost) == 1
    assert "has not come back" in caplog.text


@pytest.mark.parametrize("failure", [MemoryError("no room"), RuntimeError("a bug")])
async def test_a_pull_that_fails_in_an_odd_way_is_named_and_tried_again(
    broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    pull = BrokerApi.pull
    failing = True

    async def fails(api: BrokerApi, addr: str, queue: MessageQueue, *args: Any, **kw: Any) -> PullResult:
        if failing:
            raise failure
        return await pull(api, addr, queue, *args, **kw)

    monkeypatch.setattr(BrokerApi, "pull", fails)
    broker.store("T", 0, b"waited for")
    async with box.consumer() as member:
        async with asyncio.timeout(20):
            while not any(repr(failure) in problem for problem in member.health().problems):
                await asyncio.sleep(0.01)
        failing = False
        await box.has(1)


async def test_messages_consumed_on_request_have_own_topics(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    seen: list[tuple[str, str]] = []

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> None:
        seen.extend((message.topic, context.queue.topic) for message in messages)

    async with PushConsumer("g", listener, "T", namesrv=namesrv.addr) as member:
        header = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id=member.client.client_id)
        for topic in ("%RETRY%g", "%RETRY%other"):
            record = encode_record(topic, b"again", b"RETRY_TOPIC\x01T")
            answer = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header, record)
            assert ConsumeMessageDirectlyResult.decode(answer.body).consume_result == "CR_SUCCESS"
        refused = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
    assert seen == [("T", "%RETRY%g"), ("%RETRY%other", "%RETRY%other")]
    assert (refused.code, "no record" in (refused.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


async def test_a_rebalance_beside_the_stop_takes_no_queue_up(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    """On a shared client the pulls of a queue that nobody consumes would go on for ever."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    queue = MessageQueue("T", "broker-a", 0)

    async def slowly(frame: Frame) -> Frame | None:
        asked.set()
        await go_on.wait()
        return broker.answer(frame)

    async with ClientInstance(namesrv.addr) as client:
        options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        member = PushConsumer("g", ignore, "T", client=client, options=options)
        await member.start()
        namesrv.serve("T", broker, queues=2)
        await client.refresh_routes(["T"])
        await member.rebalance()
        assert queue in member.assignment
        broker.on(RequestCode.QUERY_CONSUMER_OFFSET, slowly)
        namesrv.serve("T", broker, queues=3)
        client.routes.put(topic_route("T", await client.namesrv.route("T")))
        round_ = asyncio.create_task(member.rebalance())
        await asked.wait()
        await member.stop()
        go_on.set()
        await asyncio.gather(round_, return_exceptions=True)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("cometmq-pull")]


@pytest.mark.parametrize("kind", ["push", "pull", "schedule"])
async def test_a_task_that_somebody_else_cancels_is_begun_again(
    kind: str, namesrv: FakeNamesrv, broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an `asyncio.all_tasks()` that knows no better."""
    monkeypatch.setattr(workers, "_AGAIN_S", 0.01)
    called, over = asyncio.Event(), asyncio.Event()

    async def function(queue: MessageQueue, turn: PullTurn) -> None:
        called.set()
        await over.wait()

    async with (
        box.consumer() if kind == "push" else PullConsumer("g", namesrv=namesrv.addr) as consumer,
        asyncio.timeout(20),
    ):
        if isinstance(consumer, PullConsumer):
            await (consumer.schedule("T", function) if kind == "schedule" else consumer.assign_topic("T"))
        await (called.wait() if kind == "schedule" else broker.wait_for(lambda: bool(broker.pulls)))
        called.clear()
        broker.store("T", 0, b"waited for")
        names = ("cometmq-pull-T", "cometmq-fetch", "cometmq-schedule")
        cancelled = [task for task in asyncio.all_tasks() if task.get_name().startswith(names)]
        assert len(cancelled) == 1
        cancelled[0].cancel()
        if isinstance(consumer, PushConsumer):
            await box.has(1)
        elif kind == "pull":
            assert [message.body for message in await consumer.poll(10)] == [b"waited for"]
        else:
            await called.wait()
            over.set()  # a stop waits for the call

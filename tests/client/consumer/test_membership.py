"""A push consumer reports and stores offsets only for queues that it owns, and detects a lost pull."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.client.fakes import Box, ignore, push_consumer
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
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
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo, ResetOffsetBody
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    ResetOffsetRequestHeader,
)
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
        assert not box.messages  # the delay has not passed yet
        monkeypatch.setattr(queue_puller, "_LATE_S", 0.0)
        await until(lambda: any("no answer to a pull" in problem for problem in member.health().problems))
        monkeypatch.undo()
        monkeypatch.setattr(BrokerApi, "pull", lossy)
        monkeypatch.setattr(queue_puller, "PULL_MAX_IDLE_S", 0.02)
        async with asyncio.timeout(60):
            while not box.messages:
                await asyncio.sleep(0.01)
                await member.rebalance()
    assert len(lost) == 1
    assert "did not return" in caplog.text


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
        await until(lambda: any(repr(failure) in problem for problem in member.health().problems))
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


@pytest.mark.parametrize(
    ("says", "result", "remark"),
    [
        (ConsumeStatus.RECONSUME_LATER, "CR_LATER", None),
        (ValueError("price"), "CR_THROW_EXCEPTION", "ValueError('price')"),
    ],
)
async def test_what_a_listener_says_on_request_is_told(
    namesrv: FakeNamesrv, broker: FakeBroker, says: ConsumeStatus | Exception, result: str, remark: str | None
) -> None:
    async def listener(messages: list[MessageExt]) -> ConsumeStatus:
        if isinstance(says, Exception):
            raise says
        return says

    async with PushConsumer("g", listener, "T", namesrv=namesrv.addr) as member:
        header = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id=member.client.client_id)
        record = encode_record("T", b"by hand")
        answer = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header, record)
    told = ConsumeMessageDirectlyResult.decode(answer.body)
    assert (told.consume_result, told.remark, told.order) == (result, remark, False)
    assert broker.sent_back == []


@pytest.mark.parametrize("plain", [False, True], ids=["task", "thread"])
async def test_an_operator_sees_where_a_listener_hangs(
    namesrv: FakeNamesrv, broker: FakeBroker, plain: bool
) -> None:
    called, release, hold = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def wait_for_the_printer(secret: str) -> None:
        called.set()
        await release.wait()

    async def hangs(messages: list[MessageExt]) -> None:
        await wait_for_the_printer("s3cret")

    def hangs_in_thread(messages: list[MessageExt]) -> None:
        loop.call_soon_threadsafe(called.set)
        hold.wait(20)

    broker.store("T", 0, b"body")
    async with push_consumer(namesrv, hangs_in_thread if plain else hangs) as member:
        await called.wait()
        told = {}
        for jstack in (False, True):
            header = GetConsumerRunningInfoRequestHeader(
                consumer_group="g", client_id=member.client.client_id, jstack_enable=jstack
            )
            answer = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
            told[jstack] = ConsumerRunningInfo.decode(answer.body).jstack
        release.set()
        hold.set()
    assert told[False] is None
    lines = (told[True] or "").splitlines()
    names = [line.split()[1].rpartition(".")[2] for line in lines if line.startswith("    at ")]
    if plain:
        assert "hangs_in_thread" in names
    else:
        inner = names.index("wait_for_the_printer")
        assert names[inner + 1] == "hangs"
    assert any(Path(__file__).name in line for line in lines)
    assert "s3cret" not in (told[True] or "")
    assert any(line.startswith('task "cometmq-') for line in lines)


async def test_limits_of_a_topic_are_shared_out_among_its_queues(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.serve("T", broker, queues=2)
    for number in range(60):
        broker.store("T", number % 2, b"x")
    release = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        await release.wait()

    async with push_consumer(namesrv, listener, pull_batch_size=5, topic_max_count=20) as member:
        await until(
            lambda: (
                [queue.waiting for queue in member.health().queues if queue.queue.topic == "T"]
                == ["15 messages held, limit 10"] * 2
            )
        )
        release.set()


async def test_a_rebalance_beside_the_stop_takes_no_queue_up(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    """On a shared client, a queue that is assigned after the stop would be pulled forever."""
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
    """For example, user code may cancel every task in `asyncio.all_tasks()`."""
    monkeypatch.setattr(workers, "_AGAIN_S", 0.01)
    called, over = asyncio.Event(), asyncio.Event()

    async def function(queue: MessageQueue, turn: PullTurn) -> None:
        called.set()
        await over.wait()

    async with (
        box.consumer() if kind == "push" else PullConsumer("g", namesrv=namesrv.addr) as consumer,
        asyncio.timeout(60),
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
            over.set()  # the stop waits until the running call ends

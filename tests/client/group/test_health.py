"""health() describes in complete sentences what prevents a consumer from consuming."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.client.fakes import Box, push_consumer
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import ConsumeStatus, MessageExt, PullConsumer, PushConsumer
from cometmq.protocol.codes import RequestCode, ResponseCode


@pytest.mark.parametrize("how", ["raises", "asks for later"])
async def test_a_listener_that_always_fails_is_named(
    how: str, namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    gate = asyncio.Semaphore(0)

    async def on_messages(messages: list[MessageExt]) -> ConsumeStatus:
        await gate.acquire()
        if messages[0].body == b"good":
            return ConsumeStatus.SUCCESS
        if how == "raises":
            raise KeyError("price")
        return ConsumeStatus.RECONSUME_LATER

    async def handled(count: int) -> None:
        gate.release()
        await until(lambda: member.health().failed + member.health().consumed >= count)

    namesrv.serve("%RETRY%g", broker, queues=1)
    for body in (b"bad", b"bad", b"bad", b"good"):
        broker.store("T", 0, body)
    async with push_consumer(namesrv, on_messages, consume_concurrency=1) as member:
        for count in (1, 2):
            await handled(count)
            assert member.health().ok  # a single failure may be an accident
        await handled(3)
        (problem,) = member.health().problems
        assert "on_messages failed 3 times in a row, last: " in problem
        assert ("KeyError('price')" if how == "raises" else "it asked for later") in problem
        assert not member.health().ok
        await handled(4)
        assert member.health().ok


@pytest.mark.parametrize("kind", ["push", "pull"])
async def test_flow_control_without_an_end_is_named(
    kind: str,
    box: Box,
    broker: FakeBroker,
    namesrv: FakeNamesrv,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def pulls() -> int:
        return broker.requests.count(RequestCode.PULL_MESSAGE)

    async def until_it_is(well: bool) -> None:
        await until(lambda: member.health().ok is well)

    broker.store("T", 0, b"waited for")
    broker.refuse(RequestCode.PULL_MESSAGE, ResponseCode.FLOW_CONTROL, "too many at once")
    member: PushConsumer | PullConsumer = (
        box.consumer() if kind == "push" else PullConsumer("g", namesrv=namesrv.addr)
    )
    async with member:
        if isinstance(member, PullConsumer):
            await member.assign_topic("T")
        begun = time.monotonic()
        await broker.wait_for(lambda: pulls() >= 10)
        assert time.monotonic() - begun < 9 * 1.0  # shorter than the delays after other errors
        assert member.health().ok  # brokers refuse single requests in normal operation
        monkeypatch.setattr("cometmq.client.consumer.queue_puller._FLOW_CONTROL_LONG_S", 0.05)
        await until_it_is(False)
        (problem,) = member.health().problems
        assert "flow control refuses each pull" in problem
        assert "too many at once" in problem
        before = pulls()
        await broker.wait_for(lambda: pulls() >= before + 5)
        assert caplog.text.count("flow control refuses each pull") == 1
        del broker.scripts[RequestCode.PULL_MESSAGE]
        if isinstance(member, PullConsumer):
            assert [message.body for message in await member.poll(20.0)] == [b"waited for"]
        else:
            await box.has(1)
        await until_it_is(True)

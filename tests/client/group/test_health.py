"""health() says in whole sentences what keeps a consumer from its work."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.fakes import FakeBroker, FakeNamesrv, push_consumer

from cometmq import ConsumeStatus, MessageExt


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
        async with asyncio.timeout(20):
            while member.health().failed + member.health().consumed < count:
                await asyncio.sleep(0.005)

    namesrv.serve("%RETRY%g", broker, queues=1)
    for body in (b"bad", b"bad", b"bad", b"good"):
        broker.store("T", 0, body)
    async with push_consumer(namesrv, on_messages, consume_concurrency=1) as member:
        for count in (1, 2):
            await handled(count)
            assert member.health().ok  # may be an accident
        await handled(3)
        (problem,) = member.health().problems
        assert "on_messages failed 3 times in a row, last: " in problem
        assert ("KeyError('price')" if how == "raises" else "it asked for later") in problem
        assert not member.health().ok
        await handled(4)
        assert member.health().ok

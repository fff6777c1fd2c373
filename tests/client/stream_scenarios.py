"""Scenarios for streams and idempotent listeners, run against any broker like those in scenarios.py."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.client.scenarios import FROM_FIRST, PATIENCE_S, PATIENT_CLIENT, Scenario, bodies, fill, names

from cometmq import MemoryMarks, MessageExt, MessageStream, idempotent


async def a_stream_goes_on_where_another_stopped(namesrv: str) -> None:
    """Messages are acknowledged in any order, one is rejected, and the last is left unacknowledged.

    A message keeps its idempotency key through its retries.
    """
    name = names("stream")
    sent = bodies(40)
    await fill(namesrv, name.topic, sent)
    came: Counter[bytes] = Counter()
    handled: list[bytes] = []

    async def handle(message: MessageExt) -> None:
        handled.append(message.body)

    once = idempotent(name.group, handle, MemoryMarks())

    async def take(stream: MessageStream, count: int) -> list[MessageExt]:
        taken = [await anext(stream) for _ in range(count)]
        for message in taken:
            came[message.body] += 1
            await once([message])
            assert message.topic == name.topic
        return taken

    async with asyncio.timeout(PATIENCE_S):
        async with MessageStream(
            name.group, name.topic, namesrv=namesrv, options=FROM_FIRST, client_options=PATIENT_CLIENT
        ) as stream:
            first = await take(stream, 20)
            left, refused = first.pop(), first.pop()
            await stream.nack(refused, delay_level=1)
            for message in reversed(first):
                await stream.ack(message)
        async with MessageStream(
            name.group, name.topic, namesrv=namesrv, options=FROM_FIRST, client_options=PATIENT_CLIENT
        ) as stream:
            for message in await take(stream, 22):
                await stream.ack(message)
            while sum((await stream.lag()).values()):
                await asyncio.sleep(0.1)
            assert stream.health().failed == 0
    assert came == Counter({**dict.fromkeys(sent, 1), refused.body: 2, left.body: 2})
    assert Counter(handled) == dict.fromkeys(sent, 1)


STREAM_SCENARIOS: list[Scenario] = [a_stream_goes_on_where_another_stopped]

"""A process with one consumer of each kind on one topic, which SIGTERM stops.

Prints "KIND BODY" for each handled message. Arguments: name server, topic.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from cometmq import (
    ConsumeFromWhere,
    MessageExt,
    MessageStream,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    stop_on_signal,
)

FIRST = ConsumeFromWhere.FIRST_OFFSET


def say(kind: str, messages: list[MessageExt]) -> None:
    for message in messages:
        os.write(1, b"%s %s\n" % (kind.encode(), message.body))  # one write per line: several threads print


async def main(namesrv: str, topic: str) -> None:
    async def on_loop(messages: list[MessageExt]) -> None:
        await asyncio.sleep(0.01)
        say("loop", messages)

    def in_thread(messages: list[MessageExt]) -> None:
        time.sleep(0.01)
        say("thread", messages)

    async def from_stream() -> None:
        async for message in stream:
            await asyncio.sleep(0.001)
            say("stream", [message])
            await stream.ack(message)

    options = PushOptions(consume_from_where=FIRST)
    orderly = PushOptions(consume_from_where=FIRST, orderly=True)

    async def in_order(messages: list[MessageExt]) -> None:
        await asyncio.sleep(0.002)
        say("order", messages)

    async def polled() -> None:
        await puller.subscribe(topic)
        while puller.state == "running":
            say("pull", await puller.poll(0.1))
            await puller.commit()
            await asyncio.sleep(0.01)

    async with (
        PushConsumer("g-loop", on_loop, topic, namesrv=namesrv, options=options) as one,
        PushConsumer("g-thread", in_thread, topic, namesrv=namesrv, options=options) as two,
        PushConsumer("g-order", in_order, topic, namesrv=namesrv, options=orderly) as three,
        MessageStream("g-stream", topic, namesrv=namesrv, options=options) as stream,
        PullConsumer("g-pull", namesrv=namesrv, options=PullOptions(consume_from_where=FIRST)) as puller,
    ):
        polling = asyncio.create_task(polled())
        async with stop_on_signal(one, two, three, stream):
            await from_stream()
            for consumer in (one, two, three):
                await consumer.wait_stopped()
        await puller.stop()
        await asyncio.gather(polling, return_exceptions=True)


asyncio.run(main(*sys.argv[1:]))

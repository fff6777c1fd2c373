"""Consume orders as a member of a group, which shares the queues with every other copy that runs.

Start a cluster first (`cometmq standalone`), then: python examples/consume.py [127.0.0.1:9876]
Ctrl-C ends it in order.
"""

import asyncio
import signal
import sys

from cometmq import ConsumeFromWhere, MessageExt, PushConsumer, PushOptions


async def on_orders(messages: list[MessageExt]) -> None:
    """An exception means: again later, up to 16 times, then to the dead letters."""
    for message in messages:
        again = f", try {message.reconsume_times + 1}" if message.reconsume_times else ""
        print(f"{message.queue} {message.queue_offset}: {message.body.decode()}{again}", flush=True)


async def main(namesrv: str) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer(
        "billing", on_orders, {"Orders": "*"}, namesrv=namesrv, options=options
    ) as consumer:
        await stop.wait()
        health = consumer.health()
    # Leaving the block waited for running listeners, stored the offsets and left the group.
    print(f"{health.consumed} consumed, {health.failed} failed", *health.problems, sep="\n", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"))

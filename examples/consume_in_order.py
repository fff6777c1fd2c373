"""Consume orders step by step: the messages of a queue come one after another, whichever copy of this runs.

Start a cluster first (`cometmq standalone`), send with examples/send.py, which puts the steps of an order
into one queue, then: python examples/consume_in_order.py [127.0.0.1:9876]
Ctrl-C ends it in order.
"""

import asyncio
import signal
import sys

from cometmq import (
    ConsumeFromWhere,
    MessageExt,
    OrderlyContext,
    OrderlyStatus,
    PushConsumer,
    PushOptions,
)


async def on_step(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
    """An exception means the same as here the first try of `paid`: the same message again in a moment, and
    nothing else of its queue before that."""
    (message,) = messages
    step = message.body.decode()
    if step.endswith("paid") and message.reconsume_times == 0:
        context.suspend_current_queue_s = 0.1
        return OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
    print(f"{message.queue} {message.queue_offset}: {step}", flush=True)
    return OrderlyStatus.SUCCESS


async def main(namesrv: str) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)

    options = PushOptions(orderly=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer("workflow", on_step, "Orders", namesrv=namesrv, options=options):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"))

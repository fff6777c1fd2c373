"""Send orders in every way there is.

Start a cluster first (`cometmq standalone`), then: python examples/send.py [127.0.0.1:9876]
"""

import asyncio
import json
import sys

from cometmq import Message, NoRouteError, Producer, select_by_hash


async def main(namesrv: str) -> None:
    async with Producer("shop", namesrv=namesrv) as producer:
        # One message; the result says where it is stored.
        order = Message(
            "Orders", b'{"id": 1}', tags="created", keys=("order-1",), properties={"region": "north"}
        )
        result = await producer.send(order)
        print(f"{result.status.value}: {result.msg_id} is number {result.queue_offset} of {result.queue}")

        # Many at once: they share one connection and a few system calls.
        orders = [Message("Orders", json.dumps({"id": number}).encode()) for number in range(2, 1002)]
        print(f"{len(await producer.send_many(orders))} sent side by side")

        # All messages of one customer in one queue, so that they stay in order.
        for step in (b"created", b"paid", b"shipped"):
            await producer.send(Message("Orders", step), selector=select_by_hash, argument="customer-7")

        # One request for several small messages; and one that nobody confirms.
        await producer.send_batch([Message("Orders", b"small %d" % number) for number in range(10)])
        await producer.send_oneway(Message("Orders", b"fire and forget"))

        # Delivered after a second (levels 1 to 18: 1 s to 2 h).
        await producer.send(Message("Orders", b"remind me", delay_level=1))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"))
    except NoRouteError as error:
        sys.exit(str(error))

"""Send and receive without asyncio, in a script that ends.

Start a cluster first (`cometmq standalone`), then: python examples/plain_script.py [127.0.0.1:9876]
"""

import sys
import threading

from cometmq import (
    CometError,
    ConsumeFromWhere,
    Message,
    MessageExt,
    PushOptions,
    SyncProducer,
    SyncPushConsumer,
)

COUNT = 10


def main(namesrv: str) -> None:
    with SyncProducer("script", namesrv=namesrv) as producer:
        for number in range(COUNT):
            result = producer.send(Message("Script", b"order %d" % number))
            print(f"{result.msg_id} is number {result.queue_offset} of queue {result.queue.queue_id}")

    received: list[str] = []
    all_came = threading.Event()

    def listener(messages: list[MessageExt]) -> None:  # called in threads; an exception is a retry
        received.extend(message.body.decode() for message in messages)
        if len(received) >= COUNT:
            all_came.set()

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPushConsumer("script", listener, "Script", namesrv=namesrv, options=options):
        if not all_came.wait(30):
            sys.exit(f"only {len(received)} of {COUNT} came")
    print("\n".join(sorted(received)))


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
    except CometError as error:
        sys.exit(str(error))

"""Read a topic from its beginning to its present end, at one's own pace and without a group's rebalance.

Start a cluster first (`cometmq standalone`), then: python examples/pull.py [127.0.0.1:9876 [topic]]
"""

import sys

from cometmq import NoRouteError, SyncPullConsumer


def main(namesrv: str, topic: str) -> None:
    with SyncPullConsumer("audit", namesrv=namesrv) as consumer:
        for queue in consumer.fetch_queues(topic):
            offset, end = consumer.min_offset(queue), consumer.max_offset(queue)
            size = count = 0
            while offset < end:
                result = consumer.pull(queue, offset)
                count += len(result.messages)
                size += sum(len(message.body) for message in result.messages)
                offset = result.next_begin_offset
            # The offset is the caller's to keep: here it goes to the broker, for the next run to begin at.
            consumer.update_offset(queue, offset)
            print(f"{queue}: {count} messages, {size} bytes")


if __name__ == "__main__":
    try:
        main(*(sys.argv[1:] + ["127.0.0.1:9876", "Orders"][len(sys.argv) - 1 :]))
    except NoRouteError as error:
        sys.exit(str(error))

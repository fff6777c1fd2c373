"""Fill a store without a broker, as fast as the store accepts messages.

``python -m benchmarks.fill '{"root": "…", …}'``: the store's background work runs as in a broker (flushes,
queues, checkpoint), so the files equal those of a broker.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from cometmq.protocol.batch import encode_batch
from cometmq.store import MessageStore, StoreConfig

HOST = b"\x7f\0\0\1\0\0\xc3\x50"
BATCH = 32


async def fill(
    root: str, *, settings: dict[str, str], topics: list[str], queues: int, size: int, until_bytes: int = 0,
    until_messages: int = 0,
) -> None:  # fmt: skip
    """Append batches until the log is `until_bytes` long or `until_messages` have been added.

    Batches of BATCH messages with bodies of `size` bytes go to the queues in turn.
    """
    config = StoreConfig.from_properties({**settings, "storePathRootDir": root})
    store = MessageStore.open(config)
    store.start()
    places = [(topic, number) for topic in topics for number in range(queues)]
    body = b"x" * size
    sent = 0

    def one() -> None:
        nonlocal sent
        topic, queue_id = places[sent // BATCH % len(places)]
        now = time.time_ns() // 1_000_000
        items = [
            (0, body, f"UNIQ_KEY\x017F000001{now:08X}18B4AAC2{sent + each:08X}".encode())
            for each in range(BATCH)
        ]
        store.appender.append_batch(
            topic, queue_id, encode_batch(items), b"", born_timestamp_ms=now, born_host=HOST
        )
        outcome = store.commit()
        if outcome.error is not None:
            raise outcome.error
        sent += BATCH

    while (until_bytes and store.log.end < until_bytes) or (until_messages and sent < until_messages):
        one()
        await asyncio.sleep(0)
    sys.stdout.write(json.dumps({"messages": sent, "bytes": store.log.end}) + "\n")
    sys.stdout.flush()
    await store.stop()


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(fill(arguments.pop("root"), **arguments))


if __name__ == "__main__":
    main()

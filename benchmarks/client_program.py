"""One Python client under load in a separate process.

`python -m benchmarks.client_program CLIENT WORK JSON`: CLIENT is `ours`, `blocking` (ours, called from
threads) or `cpp` (PyPI's `rocketmq` over the C++ core); WORK is `sync` (callers that wait for each response),
`async` (a fixed number of sends in flight) or `drain` (a push consumer reads a backlog). Prints a line of
JSON: messages, rate in messages per second, and cpu_us: the process's CPU per message in µs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

from cometmq import (
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    Producer,
    PushConsumer,
    PushOptions,
    SyncProducer,
)


class Clock:
    """A turn of fixed duration from its creation on, and its rate."""

    def __init__(self, seconds: float) -> None:
        self.begun, self._cpu_begun = time.perf_counter(), time.process_time()
        self.end = self.begun + seconds

    def open(self) -> bool:
        return time.perf_counter() < self.end

    def figures(self, messages: int) -> dict[str, float]:
        cpu_s = time.process_time() - self._cpu_begun
        return {
            "messages": messages,
            "rate": messages / (time.perf_counter() - self.begun),
            "cpu_us": cpu_s * 1e6 / messages,
        }


class Drained:
    """Messages of a backlog; the clock runs from the first message to the last."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._wanted, self._size = given["count"], given["size"]
        self._seen, self._clock = 0, Clock(0)

    def all_seen(self, body: bytes) -> bool:
        """Count a message; return True for the last one."""
        if not self._seen:
            self._clock = Clock(0)
        self._seen += len(body) == self._size
        if self._seen == self._wanted:
            self._figures = self._clock.figures(self._seen)
        return self._seen >= self._wanted

    def figures(self) -> dict[str, float]:
        return self._figures


# -- ours


async def ours_sync(given: dict[str, Any]) -> dict[str, float]:
    body = bytes(given["size"])
    async with Producer("bench", namesrv=given["namesrv"]) as producer:
        await producer.send(Message(given["topic"], body))
        clock = Clock(given["seconds"])

        async def caller() -> int:
            sent = 0
            while clock.open():
                await producer.send(Message(given["topic"], body))
                sent += 1
            return sent

        return clock.figures(sum(await asyncio.gather(*(caller() for _ in range(given["callers"])))))


async def ours_async(given: dict[str, Any]) -> dict[str, float]:
    body = bytes(given["size"])
    async with Producer("bench", namesrv=given["namesrv"]) as producer:
        await producer.send(Message(given["topic"], body))
        clock = Clock(given["seconds"])

        def messages() -> Iterator[Message]:
            for _ in repeat(None):
                if not clock.open():
                    return
                yield Message(given["topic"], body)

        return clock.figures(len(await producer.send_many(messages(), concurrency=given["callers"])))


async def ours_drain(given: dict[str, Any]) -> dict[str, float]:
    drained, all_seen = Drained(given), asyncio.Event()

    async def listen(messages: Sequence[MessageExt], _: ConsumeContext) -> ConsumeStatus:
        for message in messages:
            if drained.all_seen(message.body):
                all_seen.set()
        return ConsumeStatus.SUCCESS

    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_batch_max_size=given["batch"]
    )
    async with PushConsumer(
        given["group"], listen, given["topic"], namesrv=given["namesrv"], options=options
    ):
        await asyncio.wait_for(all_seen.wait(), 120)
    return drained.figures()


def blocking_sync(given: dict[str, Any]) -> dict[str, float]:
    body = bytes(given["size"])
    with SyncProducer("bench", namesrv=given["namesrv"]) as producer:
        return from_threads(given, lambda: bool(producer.send(Message(given["topic"], body))))


def from_threads(given: dict[str, Any], send: Callable[[], bool]) -> dict[str, float]:
    send()
    clock = Clock(given["seconds"])

    def caller(_: int) -> int:
        sent = 0
        while clock.open():
            sent += send()
        return sent

    with ThreadPoolExecutor(given["callers"]) as threads:
        return clock.figures(sum(threads.map(caller, range(given["callers"]))))


# -- the C++ core of PyPI's `rocketmq`


def cpp_producer(given: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    from rocketmq import client

    producer = client.Producer("bench")
    producer.set_namesrv_addr(given["namesrv"])
    producer.start()
    body = bytes(given["size"])

    def message() -> Any:
        made = client.Message(given["topic"])
        made.set_body(body.replace(b"\0", b"x"))  # C strings end at a zero byte
        return made

    return producer, message


def cpp_sync(given: dict[str, Any]) -> dict[str, float]:
    from rocketmq import exceptions

    producer, message = cpp_producer(given)

    def send() -> bool:
        try:
            producer.send_sync(message())
        except exceptions.ProducerSendSyncFailed:
            return False  # the client sometimes forgets the route, with either broker
        return True

    return from_threads(given, send)


def cpp_async(given: dict[str, Any]) -> dict[str, float]:
    producer, message = cpp_producer(given)
    room, done = threading.Semaphore(given["callers"]), 0

    def answered(_: Any) -> None:
        nonlocal done
        done += 1  # safe, since callbacks hold the interpreter's lock
        room.release()

    producer.send_sync(message())
    clock, sent = Clock(given["seconds"]), 0
    while clock.open():
        room.acquire()
        producer.send_async(message(), answered, answered)
        sent += 1
    while done < sent:
        time.sleep(0.001)
    return clock.figures(done)


def cpp_drain(given: dict[str, Any]) -> dict[str, float]:
    from rocketmq import client

    drained, all_seen = Drained(given), threading.Event()

    def listen(message: Any) -> None:
        if drained.all_seen(message.body):
            all_seen.set()

    consumer = client.PushConsumer(given["group"])
    consumer.set_namesrv_addr(given["namesrv"])
    consumer.set_message_batch_max_size(given["batch"])
    consumer.subscribe(given["topic"], listen)
    consumer.start()
    if not all_seen.wait(120):
        raise SystemExit("the backlog did not come")
    return drained.figures()


WORK: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ours sync": ours_sync,
    "ours async": ours_async,
    "ours drain": ours_drain,
    "blocking sync": blocking_sync,
    "cpp sync": cpp_sync,
    "cpp async": cpp_async,
    "cpp drain": cpp_drain,
}


def main() -> None:
    client, work, given = sys.argv[1:]
    found = WORK[f"{client} {work}"](json.loads(given))
    if asyncio.iscoroutine(found):
        found = asyncio.run(found)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

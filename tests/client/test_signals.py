"""SIGTERM: messages that the process has handled are not delivered again, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from cometmq import (
    ClientStateError,
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageStream,
    Producer,
    PushConsumer,
    PushOptions,
    SyncMessageStream,
    SyncProducer,
    SyncPushConsumer,
    stop_on_signal,
)
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.testing import LocalBroker

CHILD = Path(__file__).with_name("stopped_child.py")
KINDS = {"loop", "thread", "order", "stream", "pull"}
SENT = 600


async def test_a_process_that_is_told_to_end_leaves_no_duplicates(local: LocalBroker) -> None:
    """The first process is stopped while messages arrive; a second one continues."""
    handled: dict[str, Counter[str]] = defaultdict(Counter)

    async def run(until: int) -> int:
        """Run a child until each kind of consumer has handled `until` messages; return its exit code."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), local.namesrv, "Drained", stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        told = False
        async for line in child.stdout:
            kind, _, body = line.decode().strip().partition(" ")
            if kind in KINDS:
                handled[kind][body] += 1
            if not told and len(handled) == 5 and all(each.total() >= until for each in handled.values()):
                child.send_signal(signal.SIGTERM)
                told = True
        return await child.wait()

    async def send() -> None:
        async with Producer("p", namesrv=local.namesrv) as producer:
            for number in range(SENT):
                await producer.send(Message("Drained", b"%d" % number))
                await asyncio.sleep(0.002)

    async with asyncio.timeout(90):
        sending = asyncio.create_task(send())
        assert await run(100) == 0
        assert {kind for kind, bodies in handled.items() if bodies.total() >= SENT} < KINDS
        await sending
        assert await run(SENT) == 0
    expected = {str(number): 1 for number in range(SENT)}
    assert {kind: bodies for kind, bodies in handled.items() if bodies != expected} == {}


async def test_a_second_signal_does_what_it_did_before(local: LocalBroker) -> None:
    heard = []

    def before(number: int, frame: object) -> None:
        heard.append(number)

    old = signal.signal(signal.SIGTERM, before)
    try:
        stream = MessageStream("g-second", "Second", namesrv=local.namesrv)
        async with asyncio.timeout(30), stream, stop_on_signal(stream):
            os.kill(os.getpid(), signal.SIGTERM)
            await stream.wait_stopped()
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, old)


async def test_a_signal_that_comes_in_a_listener_is_waited_for(local: LocalBroker) -> None:
    ready, called = asyncio.Event(), asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        await ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        called.set()

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with Producer("p", namesrv=local.namesrv) as producer:
        await producer.send(Message("Told", b"x"))
    consumer = PushConsumer("g-told", listener, "Told", namesrv=local.namesrv, options=options)
    async with asyncio.timeout(30), consumer:
        async with stop_on_signal(consumer):
            ready.set()
            await called.wait()
        assert consumer.state == "stopped"


async def test_without_a_signal_nothing_is_stopped(local: LocalBroker) -> None:
    before = signal.getsignal(signal.SIGINT)
    async with PushConsumer("g-calm", lambda messages: None, "Calm", namesrv=local.namesrv) as consumer:
        async with stop_on_signal(consumer):
            assert signal.getsignal(signal.SIGINT) is not before
        assert consumer.state == "running"
    assert signal.getsignal(signal.SIGINT) is before
    await consumer.wait_stopped()


async def test_a_client_that_is_not_started_is_refused() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ClientStateError, match="one is not started"):
        async with stop_on_signal(Producer("p")):
            pass
    assert signal.getsignal(signal.SIGTERM) is before


class Stopping(LifeCycle):
    """A client whose stop is slow or fails."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__("client")
        self.fails = fails

    async def _begin(self) -> None: ...

    async def _end(self, *, drain: bool) -> None:
        if self.fails:
            raise OSError("no stop")
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_stop_that_fails_lets_the_others_end() -> None:
    clients = [Stopping(fails=True), Stopping(fails=False)]
    for client in clients:
        await client.start()

    async def run() -> None:
        async with asyncio.timeout(30), stop_on_signal(*clients):
            os.kill(os.getpid(), signal.SIGTERM)
            await clients[0].wait_stopped()

    with pytest.raises(OSError, match="no stop"):
        await run()
    assert [client.state for client in clients] == ["stopped", "stopped"]


async def test_signals_come_to_the_main_thread_only() -> None:
    async def elsewhere() -> None:
        async with stop_on_signal():
            pass

    with pytest.raises(ClientStateError, match="main thread"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    with pytest.raises(ClientStateError, match="is new"):
        await Producer("p").wait_stopped()


@pytest.mark.parametrize("kind", ["push", "stream"])
def test_a_signal_stops_the_blocking_classes(local: LocalBroker, kind: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        producer.send(Message(f"Blocking-{kind}", b"x"))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    handled: list[MessageExt] = []
    ready = threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        assert ready.wait(20)
        os.kill(os.getpid(), signal.SIGTERM)
        handled.extend(messages)

    if kind == "push":
        consumer = SyncPushConsumer(
            "g-b", listener, f"Blocking-{kind}", namesrv=local.namesrv, options=options
        )
        with consumer, stop_on_signal(consumer):
            ready.set()
            consumer.wait_stopped()
            assert consumer.state == "stopped"
    else:
        stream = SyncMessageStream("g-s", f"Blocking-{kind}", namesrv=local.namesrv, options=options)
        ready.set()
        with stream, stop_on_signal(stream):
            for message in stream:
                listener([message])
                stream.ack(message)
            assert stream.state in ("stopping", "stopped")
            stream.wait_stopped()
    assert len(handled) == 1
    assert signal.getsignal(signal.SIGTERM) is before


async def test_what_needs_async_with_says_so(local: LocalBroker) -> None:
    async with Producer("p", namesrv=local.namesrv) as producer:
        with pytest.raises(ClientStateError, match="async with"), stop_on_signal(producer):
            pass

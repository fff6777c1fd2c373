"""Asynchronous sends of blocking producers: futures, callbacks in threads, a bound, and the stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotYet

import pytest

from cometmq import (
    ClientStateError,
    Message,
    MessageIllegal,
    SendResult,
    SendStatus,
    SyncProducer,
    select_by_hash,
)
from cometmq.client.async_sends import AsyncSends
from cometmq.client.loop_thread import LoopThread
from cometmq.testing import LocalBroker

MESSAGE = Message("Async", b"x")


def test_every_way_to_send(local: LocalBroker) -> None:
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        one = producer.send_async(MESSAGE, selector=select_by_hash, argument="k").result(20)
        assert one.queue == producer.send(MESSAGE, selector=select_by_hash, argument="k").queue
        batch = producer.send_batch_async((MESSAGE for _ in range(3)), queue=one.queue, timeout_s=20).result(
            20
        )
        assert (batch.queue, len(batch.msg_id.split(","))) == (one.queue, 3)
        assert producer.send_oneway_async(MESSAGE, selector=select_by_hash, argument="k").result(20) is None
        many = [producer.send_async(MESSAGE) for _ in range(300)]
        assert {sent.result(20).status for sent in many} == {SendStatus.SEND_OK}
        with pytest.raises(MessageIllegal, match="body"):
            producer.send_async(Message("Async", b"")).result(20)
    with pytest.raises(ClientStateError, match="is stopped"):
        producer.send_async(MESSAGE)


def test_callbacks_run_in_threads_and_may_use_the_producer(
    local: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[SendResult] = []
    ended = threading.Semaphore(0)

    def send_another(sent: Future[SendResult]) -> None:
        results.append(sent.result())
        results.append(producer.send(MESSAGE))
        ended.release()
        raise SystemExit("a bug")

    refused: list[BaseException | None] = []
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        producer.send_async(MESSAGE, send_another)
        producer.send_batch_async([MESSAGE], send_another)
        producer.send_async(Message("Async", b""), lambda sent: refused.append(sent.exception()))
        assert ended.acquire(timeout=20)
        assert ended.acquire(timeout=20)
    assert [result.status for result in results] == [SendStatus.SEND_OK] * 4
    assert isinstance(refused[0], MessageIllegal)
    assert caplog.text.count("the callback of an asynchronous send failed") == 2


def test_the_stop_waits_for_sends_and_callbacks_and_a_callback_may_stop(local: LocalBroker) -> None:
    called: list[str] = []
    large = Message("Async", bytes(200_000))  # compressed in a thread, before it counts as under way
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        sent = [
            producer.send_async(large, lambda sent: called.append(sent.result().msg_id)) for _ in range(5)
        ]
    assert sorted(called) == sorted(future.result(0).msg_id for future in sent)
    producer = SyncProducer("p", namesrv=local.namesrv)
    producer.start()
    stopped = threading.Event()
    producer.send_async(MESSAGE, lambda sent: (producer.stop(), stopped.set()))
    assert stopped.wait(20)
    assert producer.state == "stopped"


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread.acquire()
    yield thread
    thread.release()


def test_so_many_are_under_way_and_more_wait(thread: LoopThread) -> None:
    sends, open_gate = AsyncSends(2), threading.Event()

    async def send() -> int:
        while not open_gate.is_set():
            await asyncio.sleep(0.001)
        return 1

    first = [sends.begin(thread, send, None) for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(sends.begin, thread, send, None)
        with pytest.raises(NotYet):
            third.result(0.05)
        open_gate.set()
        assert [future.result(20) for future in [*first, third.result(20)]] == [1, 1, 1]
    sends.finish()


def test_a_stop_on_the_loop_is_refused_while_sends_are_under_way(local: LocalBroker) -> None:
    outcome: Future[None] = Future()
    with SyncProducer("p", namesrv=local.namesrv) as producer:

        def stop(_sent: Future[SendResult]) -> None:
            try:
                producer.stop()
                outcome.set_result(None)
            except ClientStateError as error:
                outcome.set_exception(error)

        first = producer.send_async(MESSAGE)
        others = [producer.send_async(MESSAGE) for _ in range(50)]
        others[0].add_done_callback(stop)  # a future's own callbacks run on the loop
        with pytest.raises(ClientStateError, match="own loop"):
            outcome.result(20)
        assert {sent.result(20).status for sent in [first, *others]} == {SendStatus.SEND_OK}
        assert producer.state == "running"
    assert producer.state == "stopped"


def test_a_cancelled_future_cancels_its_send(thread: LoopThread) -> None:
    sends, ended, begun = AsyncSends(1), threading.Event(), threading.Event()

    async def send() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = sends.begin(thread, send, None)
    assert begun.wait(20)
    assert future.cancel()
    assert ended.wait(20)
    assert wait([future], 20).done
    with pytest.raises(CancelledError):
        future.result()
    sends.finish()

    async def on_loop() -> None:
        sends.begin(thread, send, None)

    with pytest.raises(ClientStateError, match="asyncio class"):
        thread.run(on_loop())

"""Asynchronous sends of blocking producers: futures, callbacks in threads, the limit, and the stop."""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotYet
from types import FrameType
from typing import Any

import pytest
from tests.kit.waiting import until

from cometmq import (
    ClientStateError,
    Message,
    MessageIllegal,
    SendResult,
    SendStatus,
    SyncProducer,
    TooManySends,
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
    large = Message("Async", bytes(200_000))  # a thread compresses it before it counts as pending
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
        await until(lambda: open_gate.is_set())
        return 1

    first = [sends.begin(thread, send, None) for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(sends.begin, thread, send, None)
        with pytest.raises(NotYet):
            third.result(0.05)
        open_gate.set()
        assert [future.result(20) for future in [*first, third.result(20)]] == [1, 1, 1]
    sends.finish()


async def one() -> int:
    return 1


def test_a_send_keeps_its_slot_until_its_callback_has_returned(thread: LoopThread) -> None:
    sends, called, may_return = AsyncSends(2), threading.Semaphore(0), threading.Semaphore(0)

    def callback(_sent: Future[int]) -> None:
        called.release()
        assert may_return.acquire(timeout=20)

    for _ in range(2):
        assert sends.begin(thread, one, callback).result(20) == 1
    assert called.acquire(timeout=20)
    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(sends.begin, thread, one, None)
        with pytest.raises(NotYet):
            third.result(0.1)
        may_return.release()
        assert third.result(20).result(20) == 1
    may_return.release()
    sends.finish()


def test_a_callback_sends_without_waiting_up_to_twice_the_limit(thread: LoopThread) -> None:
    sends, outcome = AsyncSends(2), Future[list[object]]()
    both = threading.Barrier(2)

    def callback(_sent: Future[int]) -> None:
        both.wait(20)  # callbacks alone have reached the limit
        begun: list[object] = []
        try:
            while len(begun) < 5:
                begun.append(sends.begin(thread, asyncio.Event().wait, None))
        except TooManySends as error:
            begun.append(error)
        if both.wait(20) == 0:
            outcome.set_result(begun)

    for _ in range(2):
        sends.begin(thread, one, callback)
    *_, error = outcome.result(20)
    assert isinstance(error, TooManySends)
    assert error.limit == 4
    with sends._changed:  # noqa: SLF001
        assert len(sends._sends) == 2  # noqa: SLF001
        waiting = list(sends._sends)  # noqa: SLF001
    for sent in waiting:
        sent.cancel()
    sends.finish()


@pytest.mark.filterwarnings("ignore:coroutine 'one' was never awaited")
def test_an_interrupt_at_any_line_leaves_no_slot_taken(thread: LoopThread) -> None:
    """A signal handler may raise an exception at any point of the main thread."""
    files = {AsyncSends.begin.__code__.co_filename, LoopThread.submit.__code__.co_filename}
    interrupted, lines = 0, 0
    while interrupted == lines:
        lines += 1
        sends, left = AsyncSends(1), lines

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            # The interpreter handles no signal between the end of a `with` block and the release of its lock.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            left -= event == "line" and not line.lstrip().startswith("with ")
            if left == 0:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            sends.begin(thread, one, lambda _sent: None)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(sends.begin, thread, one, None).result(20).result(20) == 1
            threads.submit(sends.finish).result(20)
    assert lines > 15


def test_a_send_during_the_stop_is_refused_or_completed_with_its_callback(thread: LoopThread) -> None:
    for number in range(100):
        sends, called, begun = AsyncSends(64), threading.Semaphore(0), []
        start = threading.Barrier(3)

        def send(
            sends: AsyncSends = sends, called: threading.Semaphore = called,
            begun: list[Future[int]] = begun, start: threading.Barrier = start,
        ) -> None:  # fmt: skip
            start.wait(20)
            try:
                while len(begun) < 200:
                    begun.append(sends.begin(thread, one, lambda _sent: called.release()))
            except ClientStateError:
                return

        senders = [threading.Thread(target=send) for _ in range(2)]
        for sender in senders:
            sender.start()
        start.wait(20)
        time.sleep(number % 10 / 10_000)
        sends.finish()
        for sender in senders:
            sender.join(20)
        assert [sent.result(20) for sent in begun] == [1] * len(begun)
        assert all(called.acquire(timeout=20) for _ in begun)
        assert not called.acquire(blocking=False)


def test_a_callback_that_no_thread_can_call_frees_its_slot(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_given: object) -> None:
        raise RuntimeError("can't start new thread")

    sends = AsyncSends(1)
    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", refuse)
        assert sends.begin(thread, one, lambda _sent: None).result(20) == 1
        assert sends.begin(thread, one, None).result(20) == 1
    sends.finish()
    assert "could not be called: can't start new thread" in caplog.text


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
        others[0].add_done_callback(stop)  # a future's own callbacks run on the event loop
        with pytest.raises(ClientStateError, match="own event loop"):
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

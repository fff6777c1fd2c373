"""Calls of user functions: an exception of any kind ends its own call and has no other effect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.client.scenarios import FROM_FIRST
from tests.kit.waiting import wait_until

from cometmq import (
    ClientOptions,
    ConfigError,
    Message,
    MessageExt,
    MessageQueue,
    ProducerOptions,
    PushOptions,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
    SyncTransactionProducer,
    TransactionState,
    reply_to,
)
from cometmq.client.cluster import hooks as cluster_hooks
from cometmq.client.cluster.workers import call_hook, call_on_loop, call_user_function
from cometmq.client.group.allocate import share_of
from cometmq.client.group.offsets import OffsetStorageError, OwnOffsets
from cometmq.client.pull import schedule
from cometmq.logs import LogLimiter
from cometmq.message import SendStatus
from cometmq.testing import LocalBroker

NOT_ERRORS = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
"""Exceptions that have a special meaning for the interpreter."""


class Failing:
    """A callable that raises each of these exceptions once."""

    def __init__(self) -> None:
        self.left = list(NOT_ERRORS)
        self.is_done = threading.Event()

    def __call__(self, *_: object) -> None:
        if self.left:
            raise self.left.pop(0)
        self.is_done.set()

    async def on_loop(self, *_: object) -> None:
        self()


@pytest.mark.parametrize("error", [*NOT_ERRORS[:3], asyncio.CancelledError, SystemExit, KeyboardInterrupt])
async def test_a_call_in_a_thread_fails_with_an_ordinary_error(error: type[BaseException]) -> None:
    def function() -> None:
        raise error

    with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match=error.__name__) as caught:
        async with asyncio.timeout(60):
            await call_user_function(threads, function)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("error", [*NOT_ERRORS[:3], asyncio.CancelledError])
async def test_a_call_on_the_loop_fails_with_an_ordinary_error(error: type[BaseException]) -> None:
    async def function() -> None:
        raise error

    with pytest.raises(RuntimeError, match=error.__name__):
        await call_on_loop(function)
    with pytest.raises(RuntimeError, match=error.__name__):
        call_hook(lambda: next(iter(())) if error is StopIteration else Failing.__call__(only(error)))


def only(error: type[BaseException]) -> Failing:
    failing = Failing()
    failing.left = [error]
    return failing


async def test_a_call_whose_task_is_cancelled_or_closed_ends_with_it() -> None:
    async def function() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(call_on_loop(function))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    call = call_on_loop(function)
    call.send(None)
    await asyncio.to_thread(call.close)  # raises RuntimeError if the GeneratorExit is swallowed


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("way", ["plain", "async"])
def test_a_listener_may_raise_anything(local: LocalBroker, orderly: bool, way: str) -> None:
    topic, failing = f"Any-{way}-{orderly}", Failing()
    listener = failing.on_loop if way == "async" else failing
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        for _ in range(len(NOT_ERRORS) + 1):
            producer.send(Message(topic, b"x"), queue=MessageQueue(topic, *first_queue(producer, topic)))
    options = PushOptions(
        orderly=orderly, suspend_current_queue_s=0.01, consume_from_where=FROM_FIRST.consume_from_where
    )
    with SyncPushConsumer(topic, listener, topic, namesrv=local.namesrv, options=options) as consumer:
        assert failing.is_done.wait(20)
        assert consumer.health().failed == len(NOT_ERRORS)


def first_queue(producer: SyncProducer, topic: str) -> tuple[str, int]:
    queue = producer.queues(topic)[0]
    return queue.broker_name, queue.queue_id


@pytest.mark.parametrize("way", ["plain", "async"])
def test_a_transaction_may_raise_anything(local: LocalBroker, way: str) -> None:
    class Plain:
        def __init__(self) -> None:
            self.local, self.checked = Failing(), Failing()

        def execute_local_transaction(self, message: MessageExt, argument: object) -> None:
            self.local()

        def check_local_transaction(self, message: MessageExt) -> TransactionState:
            self.checked()
            return TransactionState.COMMIT

    class Async(Plain):
        async def execute_local_transaction(self, message: MessageExt, argument: object) -> None:  # type: ignore[override]
            self.local()

        async def check_local_transaction(self, message: MessageExt) -> TransactionState:  # type: ignore[override]
            self.checked()
            return TransactionState.COMMIT

    listener = Plain() if way == "plain" else Async()
    with SyncTransactionProducer(f"any-{way}", listener, namesrv=local.namesrv) as producer:
        for error in NOT_ERRORS:
            sent = producer.send_in_transaction(Message("AnyTransaction", b"x"))
            assert sent.state is TransactionState.UNKNOWN
            assert error.__name__ in repr(sent.error)
        assert listener.checked.is_done.wait(20)


def test_a_scheduled_function_may_raise_anything(local: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_AFTER_FAILURE_S", 0.01)
    failing = Failing()
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        producer.send(Message("AnySchedule", b"x"))
    with SyncPullConsumer("any-schedule", namesrv=local.namesrv) as consumer:
        consumer.schedule("AnySchedule", failing.on_loop)
        assert failing.is_done.wait(20)


def test_a_listener_that_answers_requests_may_raise_anything(local: LocalBroker) -> None:
    failing = Failing()
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        for _ in NOT_ERRORS:
            producer.send(Message("AnyRequest", b"makes the topic"))

        def listener(messages: list[MessageExt]) -> None:
            failing()
            for message in messages:
                if message.body == b"question":
                    producer.send(reply_to(message, b"answer"))

        with SyncPushConsumer(
            "any-request", listener, "AnyRequest", namesrv=local.namesrv, options=FROM_FIRST
        ) as consumer:
            wait_until("the condition", lambda: consumer.health().failed == len(NOT_ERRORS))
            assert producer.request(Message("AnyRequest", b"question"), timeout_s=20).body == b"answer"


def test_hooks_may_raise_anything(local: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hooks fail while messages arrive, and no message is lost."""
    monkeypatch.setattr(cluster_hooks, "_log_limit", LogLimiter())  # other tests count their own log lines

    class Hook:
        def __init__(self, failing: Callable[..., None]) -> None:
            self.before_send = self.after_send = self.before_consume = self.after_consume = failing

    hooks = [Failing() for _ in range(5)]
    names: list[Any] = [Hook(hooks[0]), Hook(hooks[1])]
    bodies: list[bytes] = []
    complete = threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        bodies.extend(message.body for message in messages)
        if len(bodies) == 8:
            complete.set()

    with SyncProducer("p", namesrv=local.namesrv, options=ProducerOptions(send_hooks=[names[0]])) as producer:
        for number in range(8):
            assert producer.send(Message("AnyHook", b"%d" % number)).status is SendStatus.SEND_OK
    options = PushOptions(
        consume_from_where=FROM_FIRST.consume_from_where,
        consume_hooks=[names[1]],
        filter_hooks=[lambda message: hooks[2](message) or True],
        queue_listener=hooks[3],
    )
    with SyncPushConsumer(
        "any-hook", listener, "AnyHook", namesrv=local.namesrv, options=options
    ) as consumer:
        consumer.subscribe("AnyHook", "*")
        assert complete.wait(20)
        assert sorted(bodies) == [b"%d" % number for number in range(8)]
    assert not hooks[0].left and not hooks[1].left and not hooks[2].left  # noqa: PT018


def test_a_selector_and_a_check_fail_their_send_alone(local: LocalBroker) -> None:
    options = ProducerOptions(check_forbidden=[Failing()])
    selector: Any = Failing()
    message = Message("AnySelector", b"x")
    with (
        SyncProducer("p", namesrv=local.namesrv) as producer,
        SyncProducer("q", namesrv=local.namesrv, options=options) as checked,
    ):
        for error in NOT_ERRORS:
            with pytest.raises(RuntimeError, match=error.__name__):
                producer.send(message, selector=selector)
            with pytest.raises(RuntimeError, match=error.__name__):
                checked.send(message)
        assert checked.send(message).status is producer.send(message).status is SendStatus.SEND_OK


@pytest.mark.parametrize("error", NOT_ERRORS[:3])
async def test_an_offset_storage_may_raise_anything(error: type[BaseException]) -> None:
    class Storage:
        read = write = only(error).on_loop

    with pytest.raises(OffsetStorageError):
        await OwnOffsets(Storage()).read(MessageQueue("T", "a", 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", NOT_ERRORS[:3])
def test_a_strategy_of_the_users_own_may_raise_anything(error: type[BaseException]) -> None:
    class Strategy:
        name = "own"
        allocate = only(error)

    with pytest.raises(ConfigError, match=error.__name__):
        share_of(Strategy(), "me", [MessageQueue("T", "a", 0)], ["me"])  # type: ignore[arg-type]


@pytest.mark.parametrize("error", NOT_ERRORS[:3])
def test_what_watches_queues_may_raise_anything(local: LocalBroker, error: type[BaseException]) -> None:
    topic, failing = f"AnyWatch-{error.__name__}", only(error)
    quick = ClientOptions(route_interval_s=0.02)
    with (
        SyncPullConsumer(topic, namesrv=local.namesrv, client_options=quick) as consumer,
        SyncProducer("p", namesrv=local.namesrv) as producer,
    ):
        consumer.watch_queues(topic, failing)
        producer.send(Message(topic, b"makes the topic"))
        wait_until("the condition", lambda: not failing.left)
        producer.create_topic("TBW102", topic, 7)
        assert failing.is_done.wait(20)

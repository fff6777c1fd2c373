"""Blocking versions of the asyncio clients, for programs without an event loop.

    with SyncProducer("group", namesrv="127.0.0.1:9876") as producer:
        producer.send(Message("TopicTest", b"hello"))

Each class runs its asyncio class on one loop in a background thread that all clients of the process share.
All methods are thread-safe. Their arguments, results, errors and docstrings are those of the asyncio classes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar

from cometmq.client.async_sends import AsyncSends
from cometmq.client.cluster.life_cycle import not_running
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.consumer.listener import Listener, OrderlyListener
from cometmq.client.consumer.push import PushConsumer
from cometmq.client.consumer.stream import MessageStream
from cometmq.client.group.health import ConsumerHealth
from cometmq.client.group.options import PullOptions, PushOptions
from cometmq.client.group.subscription import Subscriptions
from cometmq.client.loop_thread import LoopThread
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.producer import Producer
from cometmq.client.producer.selectors import QueueSelector
from cometmq.client.producer.transaction import TransactionListener, TransactionProducer
from cometmq.client.pull.pull import PullConsumer
from cometmq.errors import ClientStateError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", Producer, TransactionProducer, PushConsumer, PullConsumer)


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking form of a coroutine method of the asyncio class."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        face: _BlockingClient[Any] = self
        return face._run(method(face._twin, *args, **kwargs))  # noqa: SLF001 - it is a method of the face

    functools.update_wrapper(call, method)
    return call


def _on_loop(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking form of a plain method that may only be called on the loop."""

    async def awaited(twin: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(twin, *args, **kwargs)

    functools.update_wrapper(awaited, method)
    return _blocking(awaited)


def _health(method: Callable[[Any], ConsumerHealth]) -> Callable[[Any], ConsumerHealth]:
    """Return the blocking form of health(), which can also be called before the start and after the stop."""
    on_loop = _on_loop(method)

    def health(self: Any, /) -> ConsumerHealth:
        face: _BlockingClient[Any] = self
        if face._thread is None:  # noqa: SLF001 - it is a method of the face
            return ConsumerHealth(state=face.state, group=face._twin.group)  # noqa: SLF001
        return on_loop(self)

    functools.update_wrapper(health, method)
    return health


class _Property(property, Generic[R]):
    """The blocking form of a property of the asyncio class."""

    def __init__(self, source: Any) -> None:
        super().__init__(_on_loop(source.fget))
        self.__doc__ = source.__doc__

    if TYPE_CHECKING:

        def __get__(self, face: Any, owner: type | None = None, /) -> R: ...  # type: ignore[override]

        def __set__(self, face: Any, value: Never, /) -> None: ...  # declares the property as read-only


class _BlockingClient(Generic[C]):
    """The base class of the blocking clients: start and stop on the background loop, and `with`."""

    _has_listener = False

    def __init__(self, twin: C) -> None:
        self._twin: C = twin
        self._name = f"{type(self).__name__} of group {twin.group}"
        self._thread: LoopThread | None = None
        self._stop_ended = threading.Event()
        """An event that is set when stop() has ended."""
        self._stop_for_listener: asyncio.Task[None] | None = None  # keeps a reference to the running task

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the client on the event loop of the background thread.

        Raises:
            ClientStateError: The client was started before.
            CometError: The start failed, as the start() of the asyncio class describes.
        """
        if self._thread is not None:
            raise ClientStateError(f"{self._name} is already started")
        thread = self._thread = LoopThread.acquire()  # from now on a listener may use the client and stop it
        try:
            thread.run(self._twin.start())
        except BaseException:
            mine, self._thread = self._thread, None
            if mine is not None:  # if a concurrent stop() has taken the thread, that stop releases it
                mine.release()
            raise

    def stop(self) -> None:
        """Stop the client and wait until it has stopped.

        The stop of a process's last client also ends the background thread. Does nothing before the start.

        Raises:
            ClientStateError: The call comes from the client's own loop or after a fork. The client keeps
                running.
        """
        if self._twin.state == "new":
            return
        if self._thread is not None:
            # Refuse a call on the event loop: it would block the loop, so sends in progress would never end.
            self._thread.check_caller()
        # Take the thread in one step, because another stop may run concurrently.
        thread, self._thread = self._thread, None
        if thread is None:
            return
        asked_by_listener = False

        async def stop() -> None:
            nonlocal asked_by_listener
            await self._twin.stop()
            if self._twin.state != "stopped":
                asked_by_listener = True
                self._stop_for_listener = asyncio.create_task(self._release_later(thread))

        try:
            self._finish_calls()
            thread.run(stop())
        finally:
            if not asked_by_listener:
                thread.release()
                self._stop_ended.set()

    def _finish_calls(self) -> None:
        """Wait until asynchronous work that earlier calls of this client have started is done."""

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        """Warn about a client that was dropped without `stop()`, and stop it.

        A client that calls a listener keeps running: a program need not hold a reference to it.
        """
        thread: LoopThread | None = getattr(self, "_thread", None)  # missing if __init__ has failed
        if thread is None:
            return
        asked = self.state in ("stopping", "stopped")
        if self._has_listener and not asked:
            if thread.pid == os.getpid():
                text = f"{self._name} was dropped without stop(), and keeps calling its listener"
                warn(text, ResourceWarning, source=self)
        elif thread.abandon(self._twin.stop) and not asked:
            warn(f"{self._name} was dropped without stop()", ResourceWarning, source=self)

    async def _release_later(self, thread: LoopThread) -> None:
        """Release the background thread once the client has stopped.

        Used if the listener has called stop(). The client stops only after the listener has returned, so
        stop() returns without waiting for the client.
        """
        try:
            await self._twin.wait_stopped()
        finally:
            thread.release()
            self._stop_ended.set()

    def stop_soon(self) -> Future[None]:
        """Begin a stop from any thread or from a signal handler, without waiting for it.

        Returns:
            A future that is done when the client is stopped. It holds the exception if the stop raised one.
        """
        return self._twin.stop_soon()

    def wait_stopped(self) -> None:
        """Wait until the client is stopped, whichever task, thread or signal handler stops it.

        Raises:
            ClientStateError: The client was not started.
        """
        if self._thread is None and self.state in ("running", "stopping"):
            self._stop_ended.wait()  # another thread or a listener stops the client and then sets this event
        elif self.state != "stopped":
            self._run(self._twin.wait_stopped())

    @property
    def state(self) -> str:
        """The state: `new`, `starting`, `running`, `stopping` or `stopped`. A stop is final."""
        return self._twin.state

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            thread = self._running_thread()
        except ClientStateError:
            work.close()
            raise
        return thread.run(work)

    def _running_thread(self) -> LoopThread:
        """Return the background thread of the event loop.

        Raises ClientStateError unless the client is running.
        """
        thread = self._thread
        if thread is None:
            state = self._twin.state
            raise not_running(self._name, "stopping" if state == "running" else state)
        return thread


class SyncProducer(_BlockingClient[Producer]):
    """A producer with blocking methods. `send_async` and the other `…_async` methods return futures.

    Args:
        group: The name of the producer group.
        namesrv: The name servers as a sequence of `host:port` or as text with `;` between them. Default: the
            environment variable NAMESRV_ADDR, otherwise 127.0.0.1:9876.
        options: The settings of the producer. Default: ProducerOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name, ConfigError for an invalid setting.
    """

    _twin: Producer

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._init(Producer(group, namesrv=namesrv, options=options, client_options=client_options))

    def _init(self, twin: Producer) -> None:
        _BlockingClient.__init__(self, twin)
        self._sends = AsyncSends(twin.options.max_in_flight)

    def _finish_calls(self) -> None:
        self._sends.finish()

    def send_async(
        self,
        message: Message,
        callback: Callable[[Future[SendResult]], object] | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> Future[SendResult]:
        """Send a message as `send` does, without waiting for the broker's answer.

        Blocks while `ProducerOptions.max_in_flight` asynchronous sends are in progress. A send is in progress
        until its callback has returned.

        Args:
            message: The message.
            callback: Called with the future once it is done, in a thread in which the callback may use this
                producer. An exception that the callback raises is logged.
            queue: The queue to send to. Default: the producer chooses one.
            selector: A function that chooses the queue.
            argument: The argument of the selector.
            timeout_s: The timeout of all tries together, in seconds. Default:
                `ProducerOptions.send_timeout_s`.

        Returns:
            A future with the result, or with the exception that `send` raises.

        Raises:
            ClientStateError: The producer is not running, or the call comes from the producer's own loop.
            TooManySends: A callback calls this, which never blocks there, while twice `max_in_flight` sends
                are in progress.
        """

        def send() -> Coroutine[Any, Any, SendResult]:
            return self._twin.send(
                message, queue=queue, selector=selector, argument=argument, timeout_s=timeout_s
            )

        return self._sends.begin(self._running_thread(), send, callback)

    def send_oneway_async(
        self,
        message: Message,
        callback: Callable[[Future[None]], object] | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
    ) -> Future[None]:
        """Send a message as `send_oneway` does, without waiting. Raises the errors of `send_async`.

        Args:
            message: The message.
            callback: Called with the future once the message is written to the connection, see `send_async`.
            queue: The queue to send to. Default: the producer chooses one.
            selector: A function that chooses the queue.
            argument: The argument of the selector.

        Returns:
            A future with None, or with the exception that `send_oneway` raises.
        """

        def send() -> Coroutine[Any, Any, None]:
            return self._twin.send_oneway(message, queue=queue, selector=selector, argument=argument)

        return self._sends.begin(self._running_thread(), send, callback)

    def send_batch_async(
        self,
        messages: Iterable[Message],
        callback: Callable[[Future[SendResult]], object] | None = None,
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> Future[SendResult]:
        """Send messages as `send_batch` does, without waiting. Raises the errors of `send_async`.

        Args:
            messages: The messages, of one topic.
            callback: Called with the future once it is done, see `send_async`.
            queue: The queue to send to. Default: the producer chooses one.
            timeout_s: The timeout of all tries together, in seconds. Default:
                `ProducerOptions.send_timeout_s`.

        Returns:
            A future with the result, or with the exception that `send_batch` raises.
        """
        batch = list(messages)

        def send() -> Coroutine[Any, Any, SendResult]:
            return self._twin.send_batch(batch, queue=queue, timeout_s=timeout_s)

        return self._sends.begin(self._running_thread(), send, callback)

    queues = _blocking(Producer.queues)
    send = _blocking(Producer.send)
    send_oneway = _blocking(Producer.send_oneway)
    send_batch = _blocking(Producer.send_batch)
    send_many = _blocking(Producer.send_many)
    request = _blocking(Producer.request)
    recall = _blocking(Producer.recall)
    view_message = _blocking(Producer.view_message)
    query_messages = _blocking(Producer.query_messages)
    min_offset = _blocking(Producer.min_offset)
    max_offset = _blocking(Producer.max_offset)
    offset_by_time = _blocking(Producer.offset_by_time)
    earliest_store_time = _blocking(Producer.earliest_store_time)
    create_topic = _blocking(Producer.create_topic)


class SyncTransactionProducer(SyncProducer):
    """A transaction producer with blocking methods.

    Args:
        group: The name of the producer group.
        listener: Runs and checks local transactions. Its plain methods run in threads, its async methods on
            the background loop.
        topics: The topics whose brokers may send transaction checks to this producer before its first send.
        namesrv: The name servers, as in SyncProducer.
        options: The settings of the producer. Default: ProducerOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name, ConfigError for an invalid setting.
    """

    def __init__(
        self,
        group: str,
        listener: TransactionListener,
        *,
        topics: Iterable[str] = (),
        namesrv: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._init(
            TransactionProducer(
                group,
                listener,
                topics=topics,
                namesrv=namesrv,
                options=options,
                client_options=client_options,
            ),
        )

    send_in_transaction = _blocking(TransactionProducer.send_in_transaction)


class SyncPushConsumer(_BlockingClient[PushConsumer]):
    """A push consumer with blocking methods.

    Args:
        group: The name of the consumer group.
        listener: The function that consumes messages. A plain function runs in threads, an async function on
            the background loop.
        subscriptions: A topic, several topics, or a mapping from topic to tags (`"TagA || TagB"`, `"*"`),
            `sql92(...)` or `filter_class(...)`.
        namesrv: The name servers, as in SyncProducer.
        options: The settings of the consumer. Default: PushOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name, ConfigError for an invalid setting.
    """

    _has_listener = True

    def __init__(
        self,
        group: str,
        listener: Listener | OrderlyListener,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PushOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(
            PushConsumer(
                group,
                listener,
                subscriptions,
                namesrv=namesrv,
                options=options,
                client_options=client_options,
            )
        )

    subscribe = _blocking(PushConsumer.subscribe)
    unsubscribe = _blocking(PushConsumer.unsubscribe)
    suspend = _on_loop(PushConsumer.suspend)
    resume = _on_loop(PushConsumer.resume)
    set_concurrency = _on_loop(PushConsumer.set_concurrency)
    rebalance = _blocking(PushConsumer.rebalance)
    persist_offsets = _blocking(PushConsumer.persist_offsets)
    send_message_back = _blocking(PushConsumer.send_message_back)
    view_message = _blocking(PushConsumer.view_message)
    query_messages = _blocking(PushConsumer.query_messages)
    min_offset = _blocking(PushConsumer.min_offset)
    max_offset = _blocking(PushConsumer.max_offset)
    offset_by_time = _blocking(PushConsumer.offset_by_time)
    earliest_store_time = _blocking(PushConsumer.earliest_store_time)
    create_topic = _blocking(PushConsumer.create_topic)
    assignment: _Property[tuple[MessageQueue, ...]] = _Property(PushConsumer.assignment)
    health = _health(PushConsumer.health)
    lag = _blocking(PushConsumer.lag)


class SyncMessageStream(SyncPushConsumer):
    """A message stream with blocking methods: `for` returns its messages, in one or several threads.

    Args:
        group: The name of the consumer group.
        subscriptions: The subscriptions, as in SyncPushConsumer.
        namesrv: The name servers, as in SyncProducer.
        options: The settings of the consumer. Default: PushOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name, ConfigError for an invalid setting.
    """

    _has_listener = False

    def __init__(
        self,
        group: str,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PushOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._stream = MessageStream(
            group, subscriptions, namesrv=namesrv, options=options, client_options=client_options
        )
        _BlockingClient.__init__(self, self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._thread is not None:
                self._thread.run(self._stream.__aexit__(kind, error, trace))
        finally:
            super().__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[MessageExt]:
        """Yield messages until the stream is stopped."""
        while True:
            try:
                yield self._run(self._stream.__anext__())
            except StopAsyncIteration:
                return
            except ClientStateError:
                if self.state == "stopped":
                    return
                raise

    ack = _blocking(MessageStream.ack)
    nack = _blocking(MessageStream.nack)


class SyncPullConsumer(_BlockingClient[PullConsumer]):
    """A pull consumer with blocking methods. Iterating it yields messages of the assigned queues without end.

    Args:
        group: The name of the consumer group.
        namesrv: The name servers, as in SyncProducer.
        options: The settings of the consumer. Default: PullOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name, ConfigError for an invalid setting.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PullOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(PullConsumer(group, namesrv=namesrv, options=options, client_options=client_options))

    fetch_queues = _blocking(PullConsumer.fetch_queues)
    pull = _blocking(PullConsumer.pull)
    pull_blocking = _blocking(PullConsumer.pull_blocking)
    min_offset = _blocking(PullConsumer.min_offset)
    max_offset = _blocking(PullConsumer.max_offset)
    offset_by_time = _blocking(PullConsumer.offset_by_time)
    watch_queues = _blocking(PullConsumer.watch_queues)
    assign = _blocking(PullConsumer.assign)
    assign_topic = _blocking(PullConsumer.assign_topic)
    subscribe = _blocking(PullConsumer.subscribe)
    schedule = _blocking(PullConsumer.schedule)
    unsubscribe = _blocking(PullConsumer.unsubscribe)
    rebalance = _blocking(PullConsumer.rebalance)
    seek = _blocking(PullConsumer.seek)
    seek_to_begin = _blocking(PullConsumer.seek_to_begin)
    seek_to_end = _blocking(PullConsumer.seek_to_end)
    seek_to_time = _blocking(PullConsumer.seek_to_time)
    health = _health(PullConsumer.health)
    lag = _blocking(PullConsumer.lag)
    send_message_back = _blocking(PullConsumer.send_message_back)
    view_message = _blocking(PullConsumer.view_message)
    query_messages = _blocking(PullConsumer.query_messages)
    earliest_store_time = _blocking(PullConsumer.earliest_store_time)
    create_topic = _blocking(PullConsumer.create_topic)
    assignment: _Property[tuple[MessageQueue, ...]] = _Property(PullConsumer.assignment)
    problems: _Property[dict[MessageQueue, str]] = _Property(PullConsumer.problems)
    pause = _on_loop(PullConsumer.pause)
    resume = _on_loop(PullConsumer.resume)
    poll = _blocking(PullConsumer.poll)
    committed = _blocking(PullConsumer.committed)
    commit = _blocking(PullConsumer.commit)
    update_offset = _on_loop(PullConsumer.update_offset)

    def __iter__(self) -> Iterator[MessageExt]:
        """Yield messages of the assigned queues without end.

        The messages of a batch count as consumed when the iteration asks for the next batch. If the caller
        leaves the iteration, all returned messages but the last one count as consumed.
        """
        return self._twin._iterate_in_thread(self._run)  # noqa: SLF001 - it is made for this

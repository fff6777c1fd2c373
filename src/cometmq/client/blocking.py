"""Blocking versions of the asyncio clients, for programs without an event loop.

    with SyncProducer("group", namesrv="127.0.0.1:9876") as producer:
        producer.send(Message("TopicTest", b"hello"))

Each class runs its asyncio class on one loop in a background thread that all clients of the process share.
All methods are thread-safe. Arguments, results, errors and docstrings of methods and constructors are those
of the asyncio classes. There is no argument `client`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from cometmq.client.async_sends import AsyncSends
from cometmq.client.blocking_client import (
    BlockingClient,
    BlockingProperty,
    blocking,
    blocking_health,
    on_loop,
)
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.consumer.listener import Listener, OrderlyListener
from cometmq.client.consumer.push import PushConsumer
from cometmq.client.consumer.stream import MessageStream
from cometmq.client.group.options import PullOptions, PushOptions, SimpleOptions
from cometmq.client.group.subscription import Subscriptions
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.producer import Producer
from cometmq.client.producer.selectors import QueueSelector
from cometmq.client.producer.transaction import TransactionListener, TransactionProducer
from cometmq.client.pull.pull import PullConsumer
from cometmq.client.simple.lite import LiteConsumer
from cometmq.client.simple.simple import LeasingConsumer, SimpleConsumer
from cometmq.errors import ClientStateError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult

L = TypeVar("L", bound=LeasingConsumer)


class SyncProducer(BlockingClient[Producer]):
    """A producer with blocking methods. `send_async` and the other `…_async` methods return futures.

    The arguments are those of Producer.
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
        BlockingClient.__init__(self, twin)
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

        Blocks while `ProducerOptions.max_in_flight` asynchronous sends are in progress, but never blocks
        when it is called by a callback. A send is in progress until its callback has returned.

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
            TooManySends: A callback calls this method while twice `max_in_flight` sends are in progress.
        """
        send = partial(
            self._twin.send, message, queue=queue, selector=selector, argument=argument, timeout_s=timeout_s
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

        Returns:
            A future that is done once the message is written to the connection, or that holds the exception
                that `send_oneway` raises.
        """
        send = partial(self._twin.send_oneway, message, queue=queue, selector=selector, argument=argument)
        return self._sends.begin(self._running_thread(), send, callback)

    def send_batch_async(
        self,
        messages: Iterable[Message],
        callback: Callable[[Future[SendResult]], object] | None = None,
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> Future[SendResult]:
        """Send messages of one topic as `send_batch` does, without waiting.

        The other arguments and the errors are those of `send_async`.

        Returns:
            A future with the result, or with the exception that `send_batch` raises.
        """
        send = partial(self._twin.send_batch, list(messages), queue=queue, timeout_s=timeout_s)
        return self._sends.begin(self._running_thread(), send, callback)

    queues = blocking(Producer.queues)
    send = blocking(Producer.send)
    send_oneway = blocking(Producer.send_oneway)
    send_batch = blocking(Producer.send_batch)
    send_many = blocking(Producer.send_many)
    request = blocking(Producer.request)
    recall = blocking(Producer.recall)


class SyncTransactionProducer(SyncProducer):
    """A transaction producer with blocking methods. The arguments are those of TransactionProducer.

    Plain methods of the listener run in threads, async methods on the background loop.
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
        twin = TransactionProducer(
            group, listener, topics=topics, namesrv=namesrv, options=options, client_options=client_options
        )
        self._init(twin)

    send_in_transaction = blocking(TransactionProducer.send_in_transaction)


class SyncPushConsumer(BlockingClient[PushConsumer]):
    """A push consumer with blocking methods. The arguments are those of PushConsumer.

    A plain listener runs in threads, an async listener on the background loop.
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
        twin = PushConsumer(
            group, listener, subscriptions, namesrv=namesrv, options=options, client_options=client_options
        )
        super().__init__(twin)

    subscribe = blocking(PushConsumer.subscribe)
    unsubscribe = blocking(PushConsumer.unsubscribe)
    suspend = on_loop(PushConsumer.suspend)
    resume = on_loop(PushConsumer.resume)
    set_concurrency = on_loop(PushConsumer.set_concurrency)
    rebalance = blocking(PushConsumer.rebalance)
    persist_offsets = blocking(PushConsumer.persist_offsets)
    send_message_back = blocking(PushConsumer.send_message_back)
    assignment: BlockingProperty[tuple[MessageQueue, ...]] = BlockingProperty(PushConsumer.assignment)
    health = blocking_health(PushConsumer.health)
    lag = blocking(PushConsumer.lag)


class SyncMessageStream(SyncPushConsumer):
    """A message stream with blocking methods: `for` returns its messages, in one or several threads.

    The arguments are those of MessageStream.
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
        BlockingClient.__init__(self, self._stream)

    def __exit__(self, *raised: object) -> None:
        try:
            if self._thread is not None:
                self._thread.run(self._stream.__aexit__(*raised))
        finally:
            super().__exit__(*raised)

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

    ack = blocking(MessageStream.ack)
    nack = blocking(MessageStream.nack)


class SyncPullConsumer(BlockingClient[PullConsumer]):
    """A pull consumer with blocking methods. Iterating it yields messages of the assigned queues without end.

    The arguments are those of PullConsumer.
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

    fetch_queues = blocking(PullConsumer.fetch_queues)
    pull = blocking(PullConsumer.pull)
    pull_blocking = blocking(PullConsumer.pull_blocking)
    watch_queues = blocking(PullConsumer.watch_queues)
    assign = blocking(PullConsumer.assign)
    assign_topic = blocking(PullConsumer.assign_topic)
    subscribe = blocking(PullConsumer.subscribe)
    schedule = blocking(PullConsumer.schedule)
    unsubscribe = blocking(PullConsumer.unsubscribe)
    rebalance = blocking(PullConsumer.rebalance)
    seek = blocking(PullConsumer.seek)
    seek_to_begin = blocking(PullConsumer.seek_to_begin)
    seek_to_end = blocking(PullConsumer.seek_to_end)
    seek_to_time = blocking(PullConsumer.seek_to_time)
    health = blocking_health(PullConsumer.health)
    lag = blocking(PullConsumer.lag)
    send_message_back = blocking(PullConsumer.send_message_back)
    assignment: BlockingProperty[tuple[MessageQueue, ...]] = BlockingProperty(PullConsumer.assignment)
    problems: BlockingProperty[dict[MessageQueue, str]] = BlockingProperty(PullConsumer.problems)
    pause = on_loop(PullConsumer.pause)
    resume = on_loop(PullConsumer.resume)
    poll = blocking(PullConsumer.poll)
    committed = blocking(PullConsumer.committed)
    commit = blocking(PullConsumer.commit)
    update_offset = on_loop(PullConsumer.update_offset)

    def __iter__(self) -> Iterator[MessageExt]:
        """Yield messages of the assigned queues without end.

        The messages of a batch count as consumed when the iteration asks for the next batch. If the caller
        leaves the iteration, all returned messages but the last one count as consumed.
        """
        return self._twin._iterate_in_thread(self._run)  # noqa: SLF001 - it is made for this


class _SyncLeasingConsumer(BlockingClient[L]):
    receive = blocking(LeasingConsumer.receive)
    ack = blocking(LeasingConsumer.ack)
    change_invisibility = blocking(LeasingConsumer.change_invisibility)
    dead_letter = blocking(LeasingConsumer.dead_letter)
    problems: BlockingProperty[dict[tuple[str, str], str]] = BlockingProperty(LeasingConsumer.problems)


class SyncSimpleConsumer(_SyncLeasingConsumer[SimpleConsumer]):
    """A simple consumer with blocking methods. The arguments are those of SimpleConsumer."""

    def __init__(
        self,
        group: str,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: SimpleOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        twin = SimpleConsumer(
            group, subscriptions, namesrv=namesrv, options=options, client_options=client_options
        )
        super().__init__(twin)

    subscribe = blocking(SimpleConsumer.subscribe)
    unsubscribe = blocking(SimpleConsumer.unsubscribe)


class SyncLiteConsumer(_SyncLeasingConsumer[LiteConsumer]):
    """A consumer of lite topics with blocking methods. The arguments are those of LiteConsumer."""

    def __init__(
        self,
        group: str,
        parent: str,
        lite_topics: Iterable[str] = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: SimpleOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        twin = LiteConsumer(
            group, parent, lite_topics, namesrv=namesrv, options=options, client_options=client_options
        )
        super().__init__(twin)

    lite_topics: BlockingProperty[frozenset[str]] = BlockingProperty(LiteConsumer.lite_topics)
    subscribe = blocking(LiteConsumer.subscribe)
    unsubscribe = blocking(LiteConsumer.unsubscribe)

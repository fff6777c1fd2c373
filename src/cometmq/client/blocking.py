"""Blocking versions of the asyncio clients, for programs without an event loop.

    with SyncProducer("group", namesrv="127.0.0.1:9876") as producer:
        producer.send(Message("TopicTest", b"hello"))

Each class runs its asyncio class on one loop in a background thread that all clients of the process share.
All methods are thread-safe. Their arguments, results, errors and docstrings are those of the asyncio classes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

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
from cometmq.client.group.options import PullOptions, PushOptions
from cometmq.client.group.subscription import Subscriptions
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.producer import Producer
from cometmq.client.producer.selectors import QueueSelector
from cometmq.client.producer.transaction import TransactionListener, TransactionProducer
from cometmq.client.pull.pull import PullConsumer
from cometmq.client.simple.lite import LiteConsumer
from cometmq.client.simple.options import SimpleOptions
from cometmq.client.simple.simple import SimpleConsumer
from cometmq.errors import ClientStateError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult


class SyncProducer(BlockingClient[Producer]):
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

    queues = blocking(Producer.queues)
    send = blocking(Producer.send)
    send_oneway = blocking(Producer.send_oneway)
    send_batch = blocking(Producer.send_batch)
    send_many = blocking(Producer.send_many)
    request = blocking(Producer.request)
    recall = blocking(Producer.recall)
    view_message = blocking(Producer.view_message)
    query_messages = blocking(Producer.query_messages)
    min_offset = blocking(Producer.min_offset)
    max_offset = blocking(Producer.max_offset)
    offset_by_time = blocking(Producer.offset_by_time)
    earliest_store_time = blocking(Producer.earliest_store_time)
    create_topic = blocking(Producer.create_topic)


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

    send_in_transaction = blocking(TransactionProducer.send_in_transaction)


class SyncPushConsumer(BlockingClient[PushConsumer]):
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

    subscribe = blocking(PushConsumer.subscribe)
    unsubscribe = blocking(PushConsumer.unsubscribe)
    suspend = on_loop(PushConsumer.suspend)
    resume = on_loop(PushConsumer.resume)
    set_concurrency = on_loop(PushConsumer.set_concurrency)
    rebalance = blocking(PushConsumer.rebalance)
    persist_offsets = blocking(PushConsumer.persist_offsets)
    send_message_back = blocking(PushConsumer.send_message_back)
    view_message = blocking(PushConsumer.view_message)
    query_messages = blocking(PushConsumer.query_messages)
    min_offset = blocking(PushConsumer.min_offset)
    max_offset = blocking(PushConsumer.max_offset)
    offset_by_time = blocking(PushConsumer.offset_by_time)
    earliest_store_time = blocking(PushConsumer.earliest_store_time)
    create_topic = blocking(PushConsumer.create_topic)
    assignment: BlockingProperty[tuple[MessageQueue, ...]] = BlockingProperty(PushConsumer.assignment)
    health = blocking_health(PushConsumer.health)
    lag = blocking(PushConsumer.lag)


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
        BlockingClient.__init__(self, self._stream)

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

    ack = blocking(MessageStream.ack)
    nack = blocking(MessageStream.nack)


class SyncPullConsumer(BlockingClient[PullConsumer]):
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

    fetch_queues = blocking(PullConsumer.fetch_queues)
    pull = blocking(PullConsumer.pull)
    pull_blocking = blocking(PullConsumer.pull_blocking)
    min_offset = blocking(PullConsumer.min_offset)
    max_offset = blocking(PullConsumer.max_offset)
    offset_by_time = blocking(PullConsumer.offset_by_time)
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
    view_message = blocking(PullConsumer.view_message)
    query_messages = blocking(PullConsumer.query_messages)
    earliest_store_time = blocking(PullConsumer.earliest_store_time)
    create_topic = blocking(PullConsumer.create_topic)
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


class SyncSimpleConsumer(BlockingClient[SimpleConsumer]):
    """A simple consumer with blocking methods.

    Args:
        group: The name of the consumer group.
        subscriptions: A topic, several topics, or a mapping from topic to tags (`"TagA || TagB"`, `"*"`) or
            `sql92(...)`.
        namesrv: The name servers, as in SyncProducer.
        options: The settings of the consumer. Default: SimpleOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name, ConfigError for an invalid setting.
    """

    def __init__(
        self,
        group: str,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: SimpleOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(
            SimpleConsumer(
                group, subscriptions, namesrv=namesrv, options=options, client_options=client_options
            )
        )

    subscribe = blocking(SimpleConsumer.subscribe)
    unsubscribe = blocking(SimpleConsumer.unsubscribe)
    receive = blocking(SimpleConsumer.receive)
    ack = blocking(SimpleConsumer.ack)
    change_invisibility = blocking(SimpleConsumer.change_invisibility)
    dead_letter = blocking(SimpleConsumer.dead_letter)
    problems: BlockingProperty[dict[tuple[str, str], str]] = BlockingProperty(SimpleConsumer.problems)
    view_message = blocking(SimpleConsumer.view_message)
    query_messages = blocking(SimpleConsumer.query_messages)
    min_offset = blocking(SimpleConsumer.min_offset)
    max_offset = blocking(SimpleConsumer.max_offset)
    offset_by_time = blocking(SimpleConsumer.offset_by_time)
    earliest_store_time = blocking(SimpleConsumer.earliest_store_time)
    create_topic = blocking(SimpleConsumer.create_topic)


class SyncLiteConsumer(BlockingClient[LiteConsumer]):
    """A consumer of lite topics with blocking methods.

    Args:
        group: The name of the consumer group.
        parent: The parent topic.
        lite_topics: The lite topics to which the consumer is subscribed from the start.
        namesrv: The name servers, as in SyncProducer.
        options: The settings of the consumer. Default: SimpleOptions().
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises MessageIllegal for an illegal name.
    """

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
        super().__init__(
            LiteConsumer(
                group, parent, lite_topics, namesrv=namesrv, options=options, client_options=client_options
            )
        )

    lite_topics: BlockingProperty[frozenset[str]] = BlockingProperty(LiteConsumer.lite_topics)
    subscribe = blocking(LiteConsumer.subscribe)
    unsubscribe = blocking(LiteConsumer.unsubscribe)
    receive = blocking(LiteConsumer.receive)
    ack = blocking(LiteConsumer.ack)
    change_invisibility = blocking(LiteConsumer.change_invisibility)
    dead_letter = blocking(LiteConsumer.dead_letter)
    problems: BlockingProperty[dict[tuple[str, str], str]] = BlockingProperty(LiteConsumer.problems)
    view_message = blocking(LiteConsumer.view_message)
    query_messages = blocking(LiteConsumer.query_messages)
    min_offset = blocking(LiteConsumer.min_offset)
    max_offset = blocking(LiteConsumer.max_offset)
    offset_by_time = blocking(LiteConsumer.offset_by_time)
    earliest_store_time = blocking(LiteConsumer.earliest_store_time)
    create_topic = blocking(LiteConsumer.create_topic)

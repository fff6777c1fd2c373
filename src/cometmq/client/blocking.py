"""Blocking faces of the asyncio clients, for programs without an event loop.

    with SyncProducer("group", namesrv="127.0.0.1:9876") as producer:
        producer.send(Message("TopicTest", b"hello"))

They run the asyncio classes on one loop in a background thread, shared by all of a process, and may be used
from many threads at once. Arguments, results and errors are those of the asyncio classes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from cometmq.client.background import LoopThread
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.state import not_running
from cometmq.client.consumer.health import ConsumerHealth
from cometmq.client.consumer.listener import Listener
from cometmq.client.consumer.options import PullOptions, PushOptions
from cometmq.client.consumer.pull import PullConsumer
from cometmq.client.consumer.push import PushConsumer
from cometmq.client.consumer.subscription import Subscriptions, sql92
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.producer import Producer
from cometmq.client.producer.selectors import QueueSelector
from cometmq.errors import ClientStateError
from cometmq.message import Message, MessageExt, MessageQueue, PullResult, SendResult

__all__ = ["SyncProducer", "SyncPullConsumer", "SyncPushConsumer"]

T = TypeVar("T")


class _Face:
    """Start and stop on the background loop; `with` as `async with`."""

    def __init__(self, twin: Producer | PushConsumer | PullConsumer) -> None:
        self._twin = twin
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """As the asyncio class starts, with a loop in a background thread."""
        if self._thread is not None:
            raise ClientStateError(f"{self._who} is started already")
        thread = LoopThread.acquire()
        try:
            thread.run(self._twin.start())
        except BaseException:
            thread.release()
            raise
        self._thread = thread

    def stop(self) -> None:
        """As the asyncio class stops; the last one of a process ends the background thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.run(self._twin.stop())
        finally:
            thread.release()

    @property
    def state(self) -> str:
        """`new`, `starting`, `running`, `stopping` or `stopped`; a stop is final."""
        return self._twin.state

    @property
    def _who(self) -> str:
        return f"{type(self).__name__} of group {self._twin.group}"

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            work.close()
            raise not_running(self._who, self._twin.state)
        return self._thread.run(work)

    def _call(self, work: Callable[[], T]) -> T:
        """Run a plain function where the twin lives."""

        async def on_loop() -> T:
            return work()

        return self._run(on_loop())


class SyncProducer(_Face):
    """Blocking face of Producer."""

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._producer = Producer(group, namesrv=namesrv, options=options, client_options=client_options)
        super().__init__(self._producer)

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues that may be written. For a topic that does not exist: those it would be made with."""
        return self._run(self._producer.queues(topic))

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send and wait for the answer; `timeout_s` is the budget of all tries. See Producer.send."""
        return self._run(
            self._producer.send(
                message, queue=queue, selector=selector, argument=argument, timeout_s=timeout_s
            )
        )

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
    ) -> None:
        """Send without an answer: a message may be lost and nobody will say so."""
        self._run(self._producer.send_oneway(message, queue=queue, selector=selector, argument=argument))

    def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send messages of one topic as one request, stored together. See Producer.send_batch."""
        return self._run(self._producer.send_batch(messages, queue=queue, timeout_s=timeout_s))

    def send_many(self, messages: Iterable[Message], *, concurrency: int = 256) -> list[SendResult]:
        """Send each message, up to `concurrency` at once; results in the order of the messages."""
        return self._run(self._producer.send_many(messages, concurrency=concurrency))


class SyncPushConsumer(_Face):
    """Blocking face of PushConsumer: plain listeners run in threads, async ones on the background loop."""

    def __init__(
        self,
        group: str,
        listener: Listener,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PushOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._consumer = PushConsumer(
            group, listener, subscriptions, namesrv=namesrv, options=options, client_options=client_options
        )
        super().__init__(self._consumer)

    def subscribe(self, topic: str, expression: str | sql92 | None = "*") -> None:
        """Add or change a subscription, also while running."""
        self._run(self._consumer.subscribe(topic, expression))

    def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic up, also while running."""
        self._run(self._consumer.unsubscribe(topic))

    def suspend(self) -> None:
        """Pull no more until resume(); what is held already is still handed to the listener."""
        self._call(self._consumer.suspend)

    def resume(self) -> None:
        """Pull again after suspend()."""
        self._call(self._consumer.resume)

    def rebalance(self) -> None:
        """Share out the queues now instead of at the next round or notice."""
        self._run(self._consumer.rebalance())

    def persist_offsets(self) -> None:
        """Store the offsets now. Raises what was said about the first that was not stored."""
        self._run(self._consumer.persist_offsets())

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues held now."""
        return self._call(lambda: self._consumer.assignment)

    def health(self) -> ConsumerHealth:
        """How far each queue is, and what keeps this consumer from its work, in whole sentences."""
        return self._call(self._consumer.health)


class SyncPullConsumer(_Face):
    """Blocking face of PullConsumer; iterating it gives messages of the assigned queues for ever."""

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PullOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._consumer = PullConsumer(group, namesrv=namesrv, options=options, client_options=client_options)
        super().__init__(self._consumer)

    def fetch_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic. Raises NoRouteError."""
        return self._run(self._consumer.fetch_queues(topic))

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int | None = None,
        expression: str | sql92 = "*",
        timeout_s: float | None = None,
    ) -> PullResult:
        """What is there from `offset` on, at most `max_count` messages; waits for nothing."""
        return self._run(
            self._consumer.pull(
                queue, offset, max_count=max_count, expression=expression, timeout_s=timeout_s
            )
        )

    def pull_blocking(
        self, queue: MessageQueue, offset: int, *, max_count: int | None = None, expression: str | sql92 = "*"
    ) -> PullResult:
        """As pull, but the broker waits for a message to come (`PullOptions.broker_suspend_s`)."""
        return self._run(
            self._consumer.pull_blocking(queue, offset, max_count=max_count, expression=expression)
        )

    def min_offset(self, queue: MessageQueue) -> int:
        """First offset that is still stored."""
        return self._run(self._consumer.min_offset(queue))

    def max_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return self._run(self._consumer.max_offset(queue))

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Offset by store time in ms. See PullConsumer.offset_by_time."""
        return self._run(self._consumer.offset_by_time(queue, timestamp_ms))

    def assign(self, queues: Iterable[MessageQueue], *, expression: str | sql92 = "*") -> None:
        """Read exactly these queues ahead from now on. See PullConsumer.assign."""
        self._run(self._consumer.assign(queues, expression=expression))

    def assign_topic(self, topic: str, *, expression: str | sql92 = "*") -> None:
        """Read all queues ahead that the topic has now."""
        self._run(self._consumer.assign_topic(topic, expression=expression))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on reading an assigned queue at `offset`. Raises ValueError outside [min, max]."""
        self._run(self._consumer.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on reading an assigned queue at its first stored message."""
        self._run(self._consumer.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on reading an assigned queue behind its last message."""
        self._run(self._consumer.seek_to_end(queue))

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues that are read ahead."""
        return self._call(lambda: self._consumer.assignment)

    @property
    def problems(self) -> dict[MessageQueue, str]:
        """Assigned queues whose last pull failed, and why; they are tried again by themselves."""
        return self._call(lambda: self._consumer.problems)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Read these assigned queues no further; what was read ahead is still given out."""
        self._call(lambda: self._consumer.pause(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Read paused queues again."""
        self._call(lambda: self._consumer.resume(queues))

    def poll(self, timeout_s: float | None = 5.0) -> list[MessageExt]:
        """The next messages of one assigned queue; says that those of the last poll were consumed."""
        return self._run(self._consumer.poll(timeout_s))

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset; None: never stored."""
        return self._run(self._consumer.committed(queue))

    def commit(self) -> None:
        """Store the offsets now, the messages of the last poll included."""
        self._run(self._consumer.commit())

    def update_offset(self, queue: MessageQueue, offset: int) -> None:
        """Set the group's offset (also backwards); stored every few seconds, by commit() and by stop()."""
        self._call(lambda: self._consumer.update_offset(queue, offset))

    def __iter__(self) -> Iterator[MessageExt]:
        while True:
            yield from self.poll()

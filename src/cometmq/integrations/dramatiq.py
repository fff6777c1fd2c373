"""CometMQ as the broker of Dramatiq.

    dramatiq.set_broker(CometMQBroker("127.0.0.1:9876"))

Each queue of Dramatiq has a topic. Its messages have Dramatiq's message ids as their keys. Workers lease
messages (POP) and renew the leases until the messages are acknowledged. The servers hold delayed messages,
so there are no delay queues. docs/dramatiq.md is the guide.
"""

from __future__ import annotations

import os
import queue as queues
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from dramatiq import Broker, Consumer, Message, MessageProxy, Middleware
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound

from cometmq import logs
from cometmq.client import ClientOptions
from cometmq.client.cluster.options import check_range
from cometmq.client.group.options import LEASE_RANGE_S
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import ConfigError, MessageIllegal, NoRouteError, RemotingError
from cometmq.integrations.inbox import Inbox
from cometmq.integrations.session import EARLY_MS, Session, Settlement, topic_name
from cometmq.message import Message as Sent
from cometmq.message import MessageExt

log = logs.logger(__name__)

T = TypeVar("T")
_PRIORITIES = (1, 16)
_CONNECT_S = 30.0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class CometMQBroker(Broker):
    """A broker of Dramatiq that keeps the messages of each queue in a topic.

    The broker connects at its first use. If it was created with `priorities`, messages of a queue with a
    higher value of the message option `broker_priority` are delivered first.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        middleware: list[Middleware] | None = None,
        lease_s: float = 60.0,
        priorities: int | None = None,
        cluster: str | None = None,
        topic_queues: int = 4,
        client_options: ClientOptions | None = None,
    ) -> None:
        """Create a broker.

        Args:
            namesrv: The name servers, `host:port` with `;` between them. None: the default of clients.
            middleware: Dramatiq's middleware. None: its default.
            lease_s: The duration of a lease, in seconds. Then messages of a dead worker are redelivered.
            priorities: The number of priorities of new topics, 1 to 16. `broker_priority` is from 0 to
                `priorities` - 1. None: topics without priorities.
            cluster: The cluster in which topics are created. None: all clusters.
            topic_queues: The number of queues, per broker, of a new topic without priorities.
            client_options: Accounts, TLS, namespace and other settings of clients.

        Raises:
            ConfigError: An argument is out of range.
        """
        super().__init__(middleware)
        check_range("lease_s", lease_s, *LEASE_RANGE_S)
        if priorities is not None:
            check_range("priorities", priorities, *_PRIORITIES)
        self.queues: dict[str, str] = {}
        """The topic of each declared queue."""
        self._namesrv = namesrv
        self._lease_s = lease_s
        self._priorities = priorities
        self._cluster = cluster
        self._topic_queues = topic_queues
        self._client_options = client_options
        self._opening = threading.Lock()
        self._open: tuple[LoopThread, Session] | None = None
        self._due_ms: dict[str, int] = {}
        """The latest due time of the messages that this process has sent, by queue."""

    # -- queues

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. Its topic is created at its first use."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = topic_name(queue_name)
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Send a message, which is delivered after `delay` ms.

        Raises:
            QueueNotFound: The queue was not declared.
            ConfigError: The option `broker_priority` is not in its range.
            ConnectionClosed: No broker could be reached. The message may be stored nevertheless.
            CometError: The message was refused.
        """
        queue = message.queue_name
        topic = self._topic(queue)
        if delay is not None:
            message = message.copy(options={"eta": _now_ms() + delay})
            self._due_ms[queue] = max(self._due_ms.get(queue, 0), message.options["eta"])
        self.emit_before("enqueue", message, delay)
        self.run(self.send(topic, message))
        self.emit_after("enqueue", message, delay)
        return message

    async def send(self, topic: str, message: Message[Any]) -> None:
        """Send a message to a topic. Its option `eta` is the delivery time, in ms since 1970."""
        priority = None
        if self._priorities is not None:
            priority = message.options.get("broker_priority", 0)
            if not isinstance(priority, int) or not 0 <= priority < self._priorities:
                expected = f"0 to {self._priorities - 1}"
                raise ConfigError(f"broker_priority of {message.actor_name}", repr(priority), expected)
        session = self._session
        await self._ensure(topic)
        sent = Sent(topic, message.encode(), keys=message.message_id.split())
        # A consumer sends a message again if its delay is longer than a broker allows.
        await session.send(sent, due_ms=message.options.get("eta") or 0, priority=priority)

    async def _ensure(self, topic: str) -> None:
        await self._session.ensure_topic(
            topic, queues=self._priorities or 0, priorities=self._priorities is not None
        )

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        """Return an iterator over the messages of a queue.

        Raises:
            QueueNotFound: The queue was not declared.
            ConnectionClosed: No broker could be reached.
        """
        return _LeasingConsumer(self, self._topic(queue_name), queue_name, prefetch, timeout)

    def flush(self, queue_name: str) -> None:
        """Drop the messages of a queue, except those that are leased or not due."""
        topic = self._topic(queue_name)

        async def purge() -> None:
            await self._ensure(topic)
            await self._session.purge(queue_name)

        self.run(purge())

    def flush_all(self) -> None:
        """Call `flush` for all declared queues."""
        for each in self.queues:
            self.flush(each)

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Wait until all messages of a queue are processed. Meant for tests.

        Delayed messages that other processes have sent are not waited for.

        Raises:
            QueueNotFound: The queue was not declared.
            QueueJoinTimeout: `timeout`, in ms, has passed.
        """
        topic = self._topic(queue_name)
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        # A delayed message may arrive a second late.
        while _now_ms() < self._due_ms.get(queue_name, 0) + EARLY_MS or self.run(self._size(topic)):
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)  # type: ignore[no-untyped-call]
            time.sleep(interval / 1000)

    async def _size(self, topic: str) -> int:
        return await self._session.size(topic)

    def _topic(self, queue_name: str) -> str:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)  # type: ignore[no-untyped-call]
        return self.queues[queue_name]

    # -- the connection

    def close(self) -> None:
        """Disconnect. The next use connects again."""
        with self._opening:
            found, self._open = self._open, None
        if found is not None:
            thread, session = found
            try:
                thread.run(session.close())
            finally:
                thread.release()

    @property
    def _session(self) -> Session:
        assert self._open is not None  # `run` has opened it
        return self._open[1]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the connection. Connect first if necessary."""
        try:
            thread = self.loop_thread()
        except BaseException:
            work.close()
            raise
        with _as_dramatiqs():
            return thread.run(work)

    def loop_thread(self) -> LoopThread:
        """Return the thread of the connection. Connect first if necessary. Raises ConnectionClosed."""
        with self._opening:
            if self._open is None or self._open[0].pid != os.getpid():  # a forked process lacks the thread
                opening = Session.open(
                    self._namesrv,
                    self._client_options if self._client_options is not None else ClientOptions(),
                    visibility_s=self._lease_s,
                    cluster=self._cluster,
                    topic_queues=self._topic_queues,
                )
                thread = LoopThread.acquire()
                try:
                    with _as_dramatiqs():
                        self._open = thread, thread.run(opening, _CONNECT_S)
                except BaseException:
                    thread.release()
                    raise
            return self._open[0]

    async def inbox(self, topic: str, queue: str, prefetch: int, arrived: _Arrived) -> Inbox:
        """Return an inbox that receives the messages of a queue."""
        await self._ensure(topic)
        inbox = Inbox(self._session, lambda _, tag, message: arrived.put((tag, message)))
        inbox.set_limit(prefetch)
        await inbox.consume(queue)
        return inbox


_Arrived = queues.SimpleQueue[tuple[str, MessageExt]]


@contextmanager
def _as_dramatiqs() -> Iterator[None]:
    """Raise ConnectionClosed instead of CometMQ's connection errors. Dramatiq's workers retry after it."""
    try:
        yield
    except (RemotingError, NoRouteError, TimeoutError) as error:
        text = str(error) or "a broker does not answer"
        raise ConnectionClosed(text) from error  # type: ignore[no-untyped-call]


def _decoded(body: bytes, queue: str) -> Message[Any]:
    """Return a message of a queue. Raises DecodeError.

    Dramatiq does not check types, and any client can send to the topic. A field of a wrong type would end a
    consumer's thread, and another queue's name would end a worker, which finds no consumer for it.
    """
    found: Message[Any] = Message.decode(body)
    texts, mappings = (found.actor_name, found.message_id), (found.kwargs, found.options)
    if not (
        found.queue_name == queue
        and all(isinstance(each, str) for each in texts)
        and all(isinstance(each, dict) for each in mappings)
        and isinstance(found.options.get("throws") or (), type | tuple)
    ):
        raise DecodeError("it is not a message of this queue", body, None)  # type: ignore[no-untyped-call]
    return found


class _LeasedMessage(MessageProxy):
    """A message with the delivery tag of its lease."""

    def __init__(self, message: Message[Any], tag: str) -> None:
        super().__init__(message)
        self.tag = tag


class _LeasingConsumer(Consumer):
    """A consumer of a queue. Its inbox settles the messages, and repeats requests that fail."""

    def __init__(self, broker: CometMQBroker, topic: str, queue: str, prefetch: int, timeout_ms: int) -> None:
        self._broker = broker
        self._topic, self._queue = topic, queue
        self._timeout_s = timeout_ms / 1000
        self._arrived: _Arrived = queues.SimpleQueue()
        self._thread = broker.loop_thread()
        self._inbox = broker.run(broker.inbox(topic, queue, prefetch, self._arrived))

    def __next__(self) -> MessageProxy | None:
        try:
            tag, leased = self._arrived.get(timeout=self._timeout_s)
        except queues.Empty:
            return None
        if not self._inbox.take(tag):
            return None
        try:
            message = _decoded(leased.body, self._queue)
        except DecodeError:
            log.error("topic %s: message %s is not from Dramatiq", self._topic, leased.msg_id)
            self._settle(tag, Settlement.DEAD)
            return None
        eta = message.options.pop("eta", None)
        if isinstance(eta, int) and eta > _now_ms() + EARLY_MS:  # the delay was longer than a broker allows
            again = message.copy(options={"eta": eta})
            how = Settlement.ACK
            try:
                self._broker.run(self._broker.send(self._topic, again))
            except (ConfigError, MessageIllegal) as error:  # an error raised here would end the consumer
                log.error("message %s of topic %s is refused: %s", leased.msg_id, self._topic, error)
                how = Settlement.DEAD
            self._settle(tag, how)
            return None
        return _LeasedMessage(message, tag)

    def _settle(self, tag: str, how: Settlement) -> None:
        self._thread.loop.call_soon_threadsafe(self._inbox.settle, tag, how)

    def ack(self, message: MessageProxy) -> None:
        """Acknowledge a message."""
        assert isinstance(message, _LeasedMessage)
        self._settle(message.tag, Settlement.ACK)

    def nack(self, message: MessageProxy) -> None:
        """Move a message to the dead-letter queue of the queue's group."""
        assert isinstance(message, _LeasedMessage)
        self._settle(message.tag, Settlement.DEAD)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Release messages that were not processed: they are delivered again."""
        for each in messages:
            assert isinstance(each, _LeasedMessage)
            self._settle(each.tag, Settlement.RELEASE)

    def close(self) -> None:
        """Send the pending settlements, and release the other messages."""
        with _as_dramatiqs():
            self._thread.run(self._inbox.close())

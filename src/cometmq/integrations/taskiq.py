"""CometMQ as the broker of Taskiq.

    broker = CometMQBroker("127.0.0.1:9876")

    @broker.task
    async def add(a: int, b: int) -> int: ...

A task is a message of the queue's topic, with the task id as its key. Workers lease tasks (POP) and renew the
leases until Taskiq acknowledges the tasks. docs/taskiq.md is the guide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from cometmq.client import ClientOptions
from cometmq.client.cluster.options import check_range
from cometmq.client.group.options import LEASE_RANGE_S
from cometmq.errors import ClientStateError, ConfigError
from cometmq.integrations.inbox import Inbox
from cometmq.integrations.session import MAX_DELAY_MS, Session, Settlement, topic_name
from cometmq.message import Message, MessageExt

_PRIORITIES = (1, 16)
"""The range of `priorities`."""


class CometMQBroker(AsyncBroker):
    """A broker of Taskiq that keeps tasks in a topic of CometMQ.

    Two labels of a task control its delivery. `delay` is in seconds. Of the waiting tasks, the one with the
    highest `priority` is delivered first.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        queue: str = "taskiq",
        lease_s: float = 60.0,
        prefetch: int = 100,
        priorities: int | None = None,
        cluster: str | None = None,
        topic_queues: int = 4,
        client_options: ClientOptions | None = None,
    ) -> None:
        """Create a broker. startup() connects it, and creates the topic if it does not exist.

        Args:
            namesrv: The name servers, `host:port` with `;` between them. None: the default of clients.
            queue: The name of the topic and of the workers' group.
            lease_s: The duration of a lease, in seconds. Then tasks of a dead worker are redelivered.
            prefetch: The maximum number of unacknowledged tasks of a worker, including running tasks.
            priorities: The number of priorities of a new topic, 1 to 16. The priority of a task is from 0 to
                `priorities` - 1. None: a topic without priorities.
            cluster: The cluster in which the topic is created. None: all clusters.
            topic_queues: The number of queues, per broker, of a new topic without priorities.
            client_options: Accounts, TLS, namespace and other settings of clients.

        Raises:
            ConfigError: An argument is out of range.
        """
        super().__init__()
        check_range("lease_s", lease_s, *LEASE_RANGE_S)
        check_range("prefetch", prefetch, 1, 100_000)
        if priorities is not None:
            check_range("priorities", priorities, *_PRIORITIES)
        self.topic = topic_name(queue)
        self._namesrv = namesrv
        self._queue = queue
        self._lease_s = lease_s
        self._prefetch = prefetch
        self._priorities = priorities
        self._cluster = cluster
        self._topic_queues = topic_queues
        self._client_options = client_options
        self._open: Session | None = None
        self._inbox: Inbox | None = None
        self._arrived: asyncio.Queue[tuple[str, MessageExt]] = asyncio.Queue()
        self._listening = 0
        """The number of open generators of listen()."""

    async def startup(self) -> None:
        """Connect to the cluster.

        Raises:
            CometError: No name server answers, or the topic cannot be created.
        """
        if self._open is not None:
            return
        session = await Session.open(
            self._namesrv,
            self._client_options if self._client_options is not None else ClientOptions(),
            visibility_s=self._lease_s,
            cluster=self._cluster,
            topic_queues=self._topic_queues,
        )
        try:
            await session.ensure_topic(
                self.topic, queues=self._priorities or 0, priorities=self._priorities is not None
            )
            await super().startup()
        except BaseException:
            await session.close()
            raise
        self._open = session

    async def shutdown(self) -> None:
        """Disconnect. Received tasks that are not acknowledged are delivered again at once."""
        try:
            await super().shutdown()
        finally:
            session, self._open = self._open, None
            inbox, self._inbox = self._inbox, None
            if inbox is not None:
                await inbox.close()
            if session is not None:
                await session.close()

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task.

        Raises:
            ConfigError: The label `delay` or `priority` is not a number in its range.
            CometError: The task could not be sent. It may be stored nevertheless.
        """
        sent = Message(self.topic, message.message, keys=message.task_id.split())
        delay_s = _number(message, "delay", MAX_DELAY_MS / 1000)
        priority = None
        if self._priorities is not None:
            priority = int(_number(message, "priority", self._priorities - 1))
        due_ms = round(time.time() * 1000 + delay_s * 1000) if delay_s else 0
        await self._session.send(sent, due_ms=due_ms, priority=priority)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Receive tasks until the generator is closed. Their leases are renewed until shutdown()."""
        session = self._session
        if self._inbox is None:
            self._inbox, self._arrived, self._listening = Inbox(session, self._deliver), asyncio.Queue(), 0
            self._inbox.set_limit(self._prefetch)
        inbox, arrived = self._inbox, self._arrived
        self._listening += 1
        try:
            await inbox.consume(self._queue)
            while True:
                tag, message = await arrived.get()
                if inbox.take(tag):
                    yield AckableMessage(data=message.body, ack=_Acknowledgement(inbox, tag))
        finally:
            if inbox is self._inbox:
                self._listening -= 1
                if not self._listening:
                    await inbox.cancel(self._queue)

    def _deliver(self, _queue: str, tag: str, message: MessageExt) -> None:
        self._arrived.put_nowait((tag, message))

    @property
    def _session(self) -> Session:
        if self._open is None:
            raise ClientStateError("the broker is not started: call startup() first")
        return self._open


class _Acknowledgement:
    """Acknowledges a task.

    Taskiq drops it without a call if a middleware fails, for example. The task then gives up its place among
    the unacknowledged ones, and is delivered again when its lease ends.
    """

    def __init__(self, inbox: Inbox, tag: str) -> None:
        self._inbox = inbox
        self._tag = tag
        self._loop = asyncio.get_running_loop()
        self._called = False

    async def __call__(self) -> None:
        """Acknowledge the task. If the broker cannot be reached, the inbox repeats the request."""
        self._called = True
        self._inbox.settle(self._tag, Settlement.ACK)
        await self._inbox.flush()

    def __del__(self) -> None:
        if not self._called:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._inbox.drop, self._tag)


def _number(message: BrokerMessage, label: str, maximum: float) -> float:
    """Return the number in a label of a task, or 0 without the label. Raises ConfigError."""
    text = message.labels.get(label, 0)
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= maximum:
        raise ConfigError(f"label {label} of task {message.task_name}", repr(text), f"0 to {maximum:g}")
    return value

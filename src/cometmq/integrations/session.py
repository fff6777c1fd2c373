"""The clients that a task framework needs: queues of leased messages, and broadcast topics.

A queue is a topic and a consumer group of the same name, whose members lease its messages (POP). Messages of
an exchange without such a queue go to the exchange's broadcast topic. Each process that consumes the topic
reads all messages that are sent after its start.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum

from cometmq import logs
from cometmq.client import (
    ClientInstance,
    ClientOptions,
    Producer,
    ProducerOptions,
    PullConsumer,
    SimpleConsumer,
    SimpleOptions,
)
from cometmq.client.cluster.lookups import Client
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.group.options import ConsumeFromWhere
from cometmq.errors import CometError, ConnectError, NoRouteError
from cometmq.message import Message, MessageExt, MessageQueue
from cometmq.protocol.codes import MASTER_ID, is_system_group, is_system_topic

log = logs.logger(__name__)

MAX_DELAY_MS = 2 * 86_400_000
"""The maximum delay of a message in one send. Brokers allow 3 days by default."""
_WAIT_S = 15.0
"""The maximum time, in seconds, for which one request waits for messages."""
PAUSE_S = 0.2
"""The interval between two polls of a state that another process changes, in seconds."""
RETRY_S = 1.0
"""The pause after a failed request, in seconds."""
_ROUTE_S = 10.0
"""The maximum time, in seconds, until the name servers have the route of a new topic."""
_MAX_KNOWN = 10_000
"""The maximum number of topics in the cache of existing topics."""
EARLY_MS = 1000
"""A message that is due within this time, in ms, is not delayed: timers have a precision of one second."""
SENDING = ProducerOptions(send_latency_fault_enable=True)
"""The options of producers. Sends avoid a broker that does not respond, if there are other brokers."""
_PLAIN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,58}")
_HASHED = re.compile(r".*-[0-9a-f]{16}")


def topic_name(name: str, kind: str = "queue") -> str:
    """Return the name of the topic, and consumer group, for a queue (or another `kind` of name).

    A queue's name of up to 59 letters, digits, `_` and `-` is kept, unless RocketMQ reserves it. Any other
    name is replaced by its legal characters and a hash, so that different names have different topics.
    """
    kept = kind == "queue" and _PLAIN.fullmatch(name) and not _HASHED.fullmatch(name)
    if kept and not (is_system_topic(name) or is_system_group(name)):
        return name
    digest = hashlib.sha256(f"{kind}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    legal = re.sub(r"[^a-zA-Z0-9_]+", "-", name)[: 41 - len(kind)].strip("-")
    return "-".join(filter(None, (kind, legal, digest)))


class Settlement(Enum):
    """The outcome of a lease.

    Attributes:
        ACK: The message is consumed.
        REQUEUE: The message is delivered again at once. This counts as a retry.
        RELEASE: The message was not processed. It is delivered again at once. This does not count as a retry.
        DEAD: The message is moved to the dead-letter queue of its group.
    """

    ACK = "ack"
    REQUEUE = "requeue"
    RELEASE = "release"
    DEAD = "dead"


class QueueConsumer(SimpleConsumer):
    """A member of the consumer group of a queue."""

    async def wait(self) -> bool:
        """Wait until the queue may have a message. Return False after 15 s without one."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        found = False
        with suppress(CometError):
            found = await self._running_session().receiver.wait(_WAIT_S)
        if not found and loop.time() - begun < RETRY_S:  # no broker answers
            await asyncio.sleep(RETRY_S)
        return found

    async def settle(self, how: Settlement, messages: Sequence[MessageExt]) -> None:
        """Settle messages of one broker: several for ACK and RELEASE, otherwise one. Raises CometError."""
        if how is Settlement.ACK:
            await self.ack(*messages)
        elif how is Settlement.RELEASE:
            await self._running_session().leases.give_back(messages)
        elif how is Settlement.DEAD:
            (message,) = messages
            await self.dead_letter(message)
        else:
            (message,) = messages
            await self.change_invisibility(message, 0)


class Clients:
    """The clients of one connection. They create missing topics.

    Topics are created in `cluster` (None: in all clusters), with `topic_queues` queues per broker.
    """

    def __init__(self, client: ClientInstance, cluster: str | None, topic_queues: int) -> None:
        self._client = client
        self._cluster = cluster
        self._topic_queues = topic_queues
        self.known: set[str] = set()
        """Cache of topics that exist."""

    async def _start(self, *clients: Client) -> None:
        """Start the clients. Raises CometError if no name server answers."""
        try:
            await self.masters()
            for each in clients:
                await each.start()
        except BaseException:
            await self._client.close()
            raise

    async def _stop(self, *clients: Client) -> None:
        for each in clients:
            with suppress(CometError):
                await each.stop()
        await self._client.close()

    async def exists(self, topic: str) -> bool:
        """Return whether the name servers have a route for a topic."""
        if topic not in self.known:
            try:
                await self._client.read_queues(topic)
            except NameServersUnreachable:
                raise
            except NoRouteError:
                return False
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            self.known.add(topic)
        return True

    async def ensure_topic(self, topic: str, *, queues: int = 0, priorities: bool = False) -> None:
        """Create a topic at all masters if it does not exist. `queues` 0 means `topic_queues` per broker.

        Raises NoRouteError if there is no master, or if the name servers do not receive the route in time.
        """
        if await self.exists(topic):
            return
        queues = queues or self._topic_queues
        masters = await self.masters()
        if not masters:
            where = "no cluster" if self._cluster is None else f"no cluster {self._cluster}"
            raise NoRouteError(
                topic, hint=f"the topic cannot be created: {where} with a master is registered"
            )
        for addr in masters:
            await self._client.brokers.create_topic(
                addr,
                topic,
                read_queue_nums=queues,
                write_queue_nums=queues,
                attributes="+message.type=PRIORITY" if priorities else None,
            )
        try:
            async with asyncio.timeout(_ROUTE_S):
                while not await self.exists(topic):  # noqa: ASYNC110 - another process changes the routes
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            hint = f"the topic was created, but not registered within {_ROUTE_S:g} s"
            raise NoRouteError(topic, hint=hint) from None

    async def reach_master(self) -> None:
        """Connect to any master. Raises ConnectError if there is none, or none that can be reached."""
        where = "any cluster" if self._cluster is None else f"cluster {self._cluster}"
        problem = ConnectError(where, "no master is registered")
        masters = await self.masters()
        for addr in random.sample(masters, len(masters)):
            try:
                await self._client.remoting.connect(addr)
                return
            except ConnectError as error:
                problem = error
        raise problem

    async def masters(self) -> list[str]:
        """Return the addresses of the cluster's masters. Raises CometError if no name server answers."""
        info = await self._client.namesrv.cluster_info()
        names: Iterable[str] = info.broker_addr_table
        if self._cluster is not None:
            names = info.cluster_addr_table.get(self._cluster, ())
        brokers = [info.broker_addr_table[name] for name in names if name in info.broker_addr_table]
        return [addr for broker in brokers if (addr := broker.broker_addrs.get(MASTER_ID))]


class Session(Clients):
    """The clients of one connection, for queues and broadcast topics.

    Its methods run on the event loop on which it was opened. Leases last `visibility_s` seconds.
    """

    def __init__(
        self, client: ClientInstance, visibility_s: float, cluster: str | None, topic_queues: int
    ) -> None:
        super().__init__(client, cluster, topic_queues)
        self.visibility_s = visibility_s
        self._producer = Producer("queues", client=client, options=SENDING)
        self._pulls = PullConsumer("broadcast", client=client)
        self._consumers: dict[str, QueueConsumer] = {}
        self._starting = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        namesrv: str | None,
        options: ClientOptions,
        *,
        visibility_s: float,
        cluster: str | None,
        topic_queues: int,
    ) -> Session:
        """Connect, and return the session. Raises CometError if no name server answers."""
        client = ClientInstance(namesrv, options)
        await client.start()
        session = cls(client, visibility_s, cluster, topic_queues)
        await session._start(session._producer, session._pulls)
        return session

    async def close(self) -> None:
        await self._stop(*self._consumers.values(), self._producer, self._pulls)

    async def consumer(self, queue: str) -> QueueConsumer:
        """Return the consumer of a queue. The first call for a queue starts its consumer."""
        async with self._starting:
            found = self._consumers.get(queue)
            if found is None:
                name = topic_name(queue)
                options = SimpleOptions(
                    consume_from_where=ConsumeFromWhere.FIRST_OFFSET, invisible_s=self.visibility_s
                )
                found = QueueConsumer(name, name, client=self._client, options=options)
                await found.start()
                self._consumers[queue] = found
            return found

    # -- broadcast topics and sizes

    async def ends(self, topic: str) -> dict[MessageQueue, int]:
        """Create a broadcast topic if it does not exist. Return the end offset of each of its queues."""
        await self.ensure_topic(topic, queues=1)
        queues = await self._client.read_queues(topic)
        return {queue: await self._pulls.max_offset(queue) for queue in queues}

    async def size(self, topic: str) -> int:
        """Return the number of messages that the group of a queue has not acknowledged."""
        if not await self.exists(topic):
            return 0
        size = 0
        for queue in await self._client.read_queues(topic):
            addr = await self._client.find_addr(queue)
            done = await self._client.brokers.consumer_offset(addr, topic, queue)
            first = await self._pulls.min_offset(queue) if done is None else done
            size += max(await self._pulls.max_offset(queue) - first, 0)
        return size

    async def purge(self, queue: str) -> int:
        """Acknowledge all visible messages of a queue, and return their number."""
        consumer = await self.consumer(queue)
        count = 0
        while found := await consumer.receive(wait_s=0):
            await consumer.ack(*found)
            count += len(found)
        return count

    # -- sending

    async def send(self, message: Message, *, due_ms: int = 0, priority: int | None = None) -> None:
        """Send a message, which is delivered at `due_ms` (in ms since 1970), but after at most 2 days.

        `priority` requires a topic of type PRIORITY, where it is the id of the message's queue.
        """
        now_ms = time.time_ns() // 1_000_000
        if due_ms - now_ms <= EARLY_MS:
            message.priority = priority
            await self._producer.send(message)
            return
        message.deliver_at_ms = min(due_ms, now_ms + MAX_DELAY_MS)
        # The broker drops the property PRIORITY of a delayed message, but keeps its queue.
        selector = None if priority is None else _queue_with_id
        await self._producer.send(message, selector=selector, argument=priority)

    # -- broadcast topics

    async def read(
        self,
        queue: MessageQueue,
        offsets: dict[MessageQueue, int],
        tag: str,
        accept: Callable[[MessageExt], bool],
    ) -> None:
        """Read a queue of a broadcast topic until cancelled. The next offset is kept in `offsets`.

        If `accept` returns False, it is called again later with the same message.
        """
        while True:
            try:
                result = await self._pulls.pull_blocking(queue, offsets[queue], expression=tag)
            except CometError as error:
                log.debug("%s cannot be read: %s", queue, error)
                await asyncio.sleep(RETRY_S)
                continue
            for message in result.messages:
                while not accept(message):  # noqa: ASYNC110 - another thread makes room
                    await asyncio.sleep(PAUSE_S)
            offsets[queue] = result.next_begin_offset

    async def next_message(self, offsets: dict[MessageQueue, int], tag: str) -> MessageExt | None:
        """Return the next message of a broadcast topic, or None without waiting. See `read`."""
        for queue in list(offsets):
            offset = -1
            while offset != offsets[queue]:
                offset = offsets[queue]
                result = await self._pulls.pull(queue, offset, max_count=1, expression=tag)
                if offsets[queue] == offset:  # no other reader has read the message
                    offsets[queue] = result.next_begin_offset
                if result.messages:
                    return result.messages[0]
        return None


def _queue_with_id(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """Return a queue with the id `argument`. If the topic has fewer queues, return the last one."""
    del message
    wanted = min(argument, max(queue.queue_id for queue in queues)) if isinstance(argument, int) else 0
    return random.choice([queue for queue in queues if queue.queue_id == wanted] or queues)

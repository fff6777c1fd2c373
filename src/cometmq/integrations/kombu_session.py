"""The asynchronous part of the kombu transport: the clients of a connection, and the messages it has leased.

Everything here runs on the event loop of the blocking clients' background thread. A queue of kombu is a topic
and a consumer group of the same name, whose members lease its messages (POP). Messages of an exchange without
such a queue go to the broadcast topic of the exchange, which each interested process reads from its end on.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from cometmq import logs
from cometmq.client import (
    ClientInstance,
    ClientOptions,
    Producer,
    PullConsumer,
    SimpleConsumer,
    SimpleOptions,
)
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.cluster.workers import for_each
from cometmq.client.group.options import ConsumeFromWhere
from cometmq.client.producer.retry import RETRY_RESPONSE_CODES
from cometmq.client.simple.options import MAX_MESSAGES
from cometmq.errors import BrokerError, CometError, NoRouteError, Transient
from cometmq.message import Message, MessageExt, MessageQueue
from cometmq.periodic import Tasks
from cometmq.protocol.codes import MASTER_ID, is_system_group, is_system_topic

log = logs.logger("cometmq.integrations.kombu")

MAX_UNSETTLED = 1000
"""The maximum number of leased messages of a channel without a prefetch count."""
_MAX_DELAY_MS = 2 * 86_400_000
"""The longest delay of a message. Brokers allow 3 days by default. Then the worker waits for the ETA."""
_WAIT_S = 15.0
"""The time for which one request waits for messages."""
_PAUSE_S = 0.2
"""The pause before queues are asked again although none of them had a message."""
_RETRY_S = 1.0
"""The pause after a request that failed."""
_CLOSE_S = 5.0
"""The maximum time that closing a channel waits for its acknowledgements."""
_ROUTE_S = 10.0
"""The maximum time until the name servers have the route of a new topic."""
_MAX_KNOWN = 10_000
"""The maximum number of topics that are remembered to exist."""
_EARLY_MS = 1000
"""A message that is due within this time is delivered at once: timers have a precision of one second."""
_AT_ONCE = 32
"""The maximum number of concurrent requests of one kind."""
_PLAIN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,58}")
_HASHED = re.compile(r".*-[0-9a-f]{16}")


def topic_name(name: str, kind: str = "queue") -> str:
    """Return the topic, and consumer group, that stands for a queue of kombu.

    A name of up to 59 letters, digits, `_` and `-` is kept, unless RocketMQ reserves it. Any other name is
    replaced by its legal characters and a hash, so that different names have different topics.

    Args:
        name: The name of the queue or exchange, any text.
        kind: `queue`, or another word for names that must not be equal to those of queues.
    """
    kept = kind == "queue" and _PLAIN.fullmatch(name) and not _HASHED.fullmatch(name)
    if kept and not (is_system_topic(name) or is_system_group(name)):
        return name
    digest = hashlib.sha256(f"{kind}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    legal = re.sub(r"[^a-zA-Z0-9_]+", "-", name)[: 41 - len(kind)].strip("-")
    return "-".join(filter(None, (kind, legal, digest)))


class Settlement(Enum):
    """What becomes of a leased message.

    Attributes:
        ACK: It is consumed.
        REQUEUE: It is delivered again now, which counts as a retry.
        RELEASE: It is delivered again now, because it was not processed. This does not count as a retry.
        DEAD: It goes to the dead-letter queue of its group.
    """

    ACK = "ack"
    REQUEUE = "requeue"
    RELEASE = "release"
    DEAD = "dead"


class QueueConsumer(SimpleConsumer):
    """A member of the consumer group that stands for a queue."""

    async def wait(self) -> bool:
        """Wait until the queue has a message, or may have one. Return False if there is none in time."""
        assert self._receiver is not None  # the consumer is running
        loop = asyncio.get_running_loop()
        begun = loop.time()
        found = False
        with suppress(CometError):
            found = await self._receiver.wait(_WAIT_S)
        if not found and loop.time() - begun < _RETRY_S:  # no broker could be asked
            await asyncio.sleep(_RETRY_S)
        return found

    async def settle(self, how: Settlement, messages: Sequence[MessageExt]) -> None:
        """Send the request that settles messages of one broker. Raises CometError.

        Args:
            how: What becomes of the messages.
            messages: The messages: a single one, if it is requeued or becomes a dead letter.
        """
        if how is Settlement.ACK:
            await self.ack(*messages)
        elif how is Settlement.RELEASE:
            await self._running_leases().give_back(messages)
        elif how is Settlement.DEAD:
            (message,) = messages
            await self.dead_letter(message)
        else:
            (message,) = messages
            await self.change_invisibility(message, 0)


@dataclass(slots=True, eq=False)
class Held:
    """A leased message that is not settled yet.

    Attributes:
        queue: The queue of kombu.
        consumer: The consumer that has received it.
        message: The message.
        until: The end of the lease on the loop's clock, in seconds.
        delivered: Whether kombu has received it.
    """

    queue: str
    consumer: QueueConsumer
    message: MessageExt
    until: float
    delivered: bool = False


Deliver = Callable[[str, str, MessageExt], None]
"""Receives queue, delivery tag ("" for a broadcast message) and message, on the event loop."""


class Session:
    """The clients of one kombu connection.

    Args:
        client: The client instance that all clients of the connection share.
        visibility_s: The length of a lease in seconds. Leases are renewed until messages are settled.
        cluster: The cluster in which topics are created. None: all clusters.
        topic_queues: The number of queues, per broker, of topics that are created.
    """

    def __init__(
        self, client: ClientInstance, visibility_s: float, cluster: str | None, topic_queues: int
    ) -> None:
        self.visibility_s = visibility_s
        self._client = client
        self._cluster = cluster
        self._topic_queues = topic_queues
        self._producer = Producer("kombu", client=client)
        self._pulls = PullConsumer("kombu-broadcast", client=client)
        self._consumers: dict[str, QueueConsumer] = {}
        self._starting = asyncio.Lock()
        self.known: set[str] = set()
        """Topics that exist."""

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
        try:
            await session._masters()
            await session._producer.start()
            await session._pulls.start()
        except BaseException:
            await client.close()
            raise
        return session

    async def close(self) -> None:
        for each in (*self._consumers.values(), self._producer, self._pulls):
            with suppress(CometError):
                await each.stop()
        await self._client.close()

    async def consumer(self, queue: str) -> QueueConsumer:
        """Return the consumer of a queue, which is started at its first use."""
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

    # -- topics

    async def exists(self, topic: str) -> bool:
        """Return whether the name servers have a topic."""
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
        """Create a topic at all masters if it does not exist.

        Args:
            topic: The topic.
            queues: The number of queues per broker. 0: that of the session.
            priorities: Whether the queues are the priorities of the messages.
        """
        if await self.exists(topic):
            return
        queues = queues or self._topic_queues
        for addr in await self._masters():
            await self._client.brokers.create_topic(
                addr,
                topic,
                read_queue_nums=queues,
                write_queue_nums=queues,
                attributes="+message.type=PRIORITY" if priorities else None,
            )
        async with asyncio.timeout(_ROUTE_S):
            while not await self.exists(topic):  # noqa: ASYNC110 - another process changes the routes
                await asyncio.sleep(_PAUSE_S)

    async def _masters(self) -> list[str]:
        info = await self._client.namesrv.cluster_info()
        names: Iterable[str] = info.broker_addr_table
        if self._cluster is not None:
            names = info.cluster_addr_table.get(self._cluster, ())
        brokers = [info.broker_addr_table[name] for name in names if name in info.broker_addr_table]
        return [addr for broker in brokers if (addr := broker.broker_addrs.get(MASTER_ID))]

    async def ends(self, topic: str) -> dict[MessageQueue, int]:
        """Return the end offset of each queue of a broadcast topic, which is created if it does not exist."""
        await self.ensure_topic(topic, queues=1)
        queues = await self._client.read_queues(topic)
        return {queue: await self._pulls.max_offset(queue) for queue in queues}

    async def size(self, topic: str) -> int:
        """Return the number of messages that a queue's group has not acknowledged."""
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
        """Acknowledge all messages of a queue that are not leased, and return their number."""
        consumer = await self.consumer(queue)
        count = 0
        while found := await consumer.receive(wait_s=0):
            await consumer.ack(*found)
            count += len(found)
        return count

    # -- sending

    async def send(self, message: Message, *, due_ms: int = 0, priority: int | None = None) -> None:
        """Send a message.

        Args:
            message: The message.
            due_ms: When it is due, in milliseconds since 1970. The broker keeps it until then, but for
                2 days at most.
            priority: Its priority in a topic of type PRIORITY: the id of its queue. None: the topic has no
                priorities.
        """
        now_ms = time.time_ns() // 1_000_000
        if due_ms - now_ms <= _EARLY_MS:
            message.priority = priority
            await self._producer.send(message)
            return
        message.deliver_at_ms = min(due_ms, now_ms + _MAX_DELAY_MS)
        # A delayed message loses its property PRIORITY, but not its queue.
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
        """Read a queue of a broadcast topic until this task is cancelled.

        Args:
            queue: The queue.
            offsets: The offset of the next message, which this method updates.
            tag: The tag of the wanted messages, or `*`.
            accept: Receives each message. False: it has no room, and receives the message again later.
        """
        while True:
            try:
                result = await self._pulls.pull_blocking(queue, offsets[queue], expression=tag)
            except CometError as error:
                log.debug("%s cannot be read: %s", queue, error)
                await asyncio.sleep(_RETRY_S)
                continue
            for message in result.messages:
                while not accept(message):  # noqa: ASYNC110 - another thread makes room
                    await asyncio.sleep(_PAUSE_S)
            offsets[queue] = result.next_begin_offset

    async def next_message(self, offsets: dict[MessageQueue, int], tag: str) -> MessageExt | None:
        """Return the next message of a broadcast topic, without waiting, or None. See `read`."""
        for queue in list(offsets):
            offset = -1
            while offset != offsets[queue]:
                offset = offsets[queue]
                result = await self._pulls.pull(queue, offset, max_count=1, expression=tag)
                if offsets[queue] == offset:  # no reader was faster
                    offsets[queue] = result.next_begin_offset
                if result.messages:
                    return result.messages[0]
        return None


def _queue_with_id(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """Return a queue with the id `argument`, or with the highest one."""
    del message
    wanted = min(argument, max(queue.queue_id for queue in queues)) if isinstance(argument, int) else 0
    return random.choice([queue for queue in queues if queue.queue_id == wanted] or queues)


class Inbox:
    """The leased messages of a channel. Receives as many as the prefetch count allows, renews their leases.

    Args:
        session: The clients of the connection.
        deliver: Receives the messages.
    """

    def __init__(self, session: Session, deliver: Deliver) -> None:
        self.limit = MAX_UNSETTLED
        self._session = session
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[str, QueueConsumer] = {}
        self._held: dict[str, Held] = {}
        self._settled: list[tuple[Settlement, Held]] = []
        """Settlements whose requests are not sent yet."""
        self._sending = 0
        """The number of messages of the requests in progress."""
        self._tags = itertools.count(1)
        self._turns = itertools.count()
        self._room, self._work = asyncio.Event(), asyncio.Event()
        self._turn = asyncio.Lock()
        """Held during requests about leases: a renewal invalidates the handle of an acknowledgement."""
        self._fetching = Tasks()
        self._readers: dict[str, Tasks] = {}
        self._keeper = self._loop.create_task(self._keep(), name="cometmq-kombu-leases")

    async def close(self) -> None:
        """Release all messages, and wait until all settlements are sent."""
        self._consumers.clear()
        for tasks in (self._fetching, *self._readers.values()):
            await tasks.finish(cancel=True)
        self.release()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while not await self.flush():  # noqa: ASYNC110 - it waits for brokers
                    await asyncio.sleep(_RETRY_S)
        self._keeper.cancel()

    # -- receiving

    async def consume(self, queue: str) -> None:
        """Receive the messages of a queue."""
        self._consumers[queue] = await self._session.consumer(queue)
        await self._restart()

    def read(
        self,
        queue: str,
        offsets: dict[MessageQueue, int],
        tag: str,
        has_room: Callable[[], bool],
    ) -> None:
        """Read messages of a broadcast topic, see `Session.read`, as messages of a queue."""

        def accept(message: MessageExt) -> bool:
            if has_room():
                self._deliver(queue, "", message)
                return True
            return False

        for each in offsets:
            self._readers.setdefault(queue, Tasks()).start(self._session.read(each, offsets, tag, accept))

    async def cancel(self, queue: str) -> None:
        """Receive no more messages of a queue, and make those visible again that kombu has not received."""
        await self._readers.pop(queue, Tasks()).finish(cancel=True)
        if self._consumers.pop(queue, None) is not None:
            await self._restart()
        for tag in [tag for tag, held in self._held.items() if held.queue == queue and not held.delivered]:
            self.settle(tag, Settlement.RELEASE)

    async def get(self, queue: str) -> tuple[str, MessageExt] | None:
        """Return one message of a queue with its delivery tag, or None if there is none."""
        consumer = await self._session.consumer(queue)
        for message in await consumer.receive(1, wait_s=0):
            tag = self._hold(queue, consumer, message)
            self._held[tag].delivered = True
            return tag, message
        return None

    def take(self, tag: str) -> bool:
        """Return whether kombu may have a message: False if it was made visible again."""
        held = self._held.get(tag)
        if held is None:
            return False
        held.delivered = True
        return True

    def set_limit(self, prefetch: int) -> None:
        """Set the maximum number of messages that are not settled. 0: MAX_UNSETTLED."""
        self.limit = prefetch if prefetch > 0 else MAX_UNSETTLED
        self._room.set()

    async def _restart(self) -> None:
        await self._fetching.finish(cancel=True)
        if self._consumers:
            self._fetching.start(self._fetch(dict(self._consumers)), name="cometmq-kombu-fetch")

    async def _fetch(self, consumers: dict[str, QueueConsumer]) -> None:
        while True:
            try:
                await self._fetch_on(consumers)
            except Exception:
                log.exception("messages cannot be received, trying again")
                await asyncio.sleep(_RETRY_S)

    async def _fetch_on(self, consumers: dict[str, QueueConsumer]) -> None:
        """Receive messages until something unexpected fails."""
        notified = False
        while True:
            unsettled = len(self._held) + len(self._settled) + self._sending
            count = min(self.limit - unsettled, MAX_MESSAGES)
            if count <= 0:
                self._room.clear()
                await self._room.wait()
            elif await self._receive(consumers, count):
                notified = False
            else:
                in_vain, notified = notified, await self._has_any(consumers.values())
                if in_vain:  # another member was faster
                    await asyncio.sleep(_PAUSE_S)

    async def _receive(self, consumers: dict[str, QueueConsumer], count: int) -> bool:
        """Receive messages of the first queue that has some, beginning with another queue each time.

        Return False if there were none. No request waits for messages, because it would lease messages after
        its consumer was cancelled, and those of one queue only.
        """
        names = list(consumers)
        first = next(self._turns) % len(names)
        for queue in names[first:] + names[:first]:
            try:
                found = await consumers[queue].receive(count, wait_s=0)
            except CometError as error:  # the consumer has logged a warning
                log.debug("queue %s cannot be received from: %s", queue, error)
                continue
            if found:
                for message in found:
                    self._deliver(queue, self._hold(queue, consumers[queue], message), message)
                return True
        return False

    async def _has_any(self, consumers: Iterable[QueueConsumer]) -> bool:
        waits = [asyncio.ensure_future(each.wait()) for each in consumers]
        try:
            for done in asyncio.as_completed(waits):
                if await done:
                    return True
            return False
        finally:
            for each in waits:
                each.cancel()

    def _hold(self, queue: str, consumer: QueueConsumer, message: MessageExt) -> str:
        tag = str(next(self._tags))
        self._held[tag] = Held(queue, consumer, message, self._loop.time() + self._session.visibility_s)
        return tag

    # -- settling

    def settle(self, tag: str, how: Settlement) -> None:
        """Settle a message soon. A message that is settled already is ignored."""
        held = self._held.pop(tag, None)
        if held is not None:
            self._settled.append((how, held))
            self._work.set()

    def release(self) -> None:
        """Make all messages that are not settled visible again, soon."""
        for tag in list(self._held):
            self.settle(tag, Settlement.RELEASE)

    async def flush(self) -> bool:
        """Send the requests of all settlements so far. Return False if some must be sent again."""
        async with self._turn:
            unsent, self._settled = dict.fromkeys(self._settled), []
            self._sending = len(unsent)

            async def send(part: tuple[Settlement, list[Held]]) -> None:
                how, some = part
                again = set(await self._send(how, some))
                for held in some:
                    if held not in again:
                        del unsent[how, held]
                self._sending = len(unsent)

            try:
                await for_each(_parts(unsent), send, _AT_ONCE)
            finally:
                self._sending = 0
                self._settled[:0] = unsent
                self._room.set()
            return not unsent

    async def _send(self, how: Settlement, some: Sequence[Held]) -> Sequence[Held]:
        """Settle messages, and return those whose leases last if the same request may succeed later."""
        try:
            await some[0].consumer.settle(how, [held.message for held in some])
            return ()
        except Exception as error:
            problem = error
            if isinstance(error, CometError):
                busy = isinstance(error, BrokerError) and error.code in RETRY_RESPONSE_CODES
                may_succeed = busy or isinstance(error, Transient)
            else:
                log.exception("%s of messages of queue %s failed", how.value, some[0].queue)
                may_succeed = True
        again = [held for held in some if may_succeed and held.until > self._loop.time()]
        if len(again) < len(some):
            log.warning("%s of messages of queue %s failed: %s", how.value, some[0].queue, problem)
        return again

    async def _keep(self) -> None:
        """Settle messages and renew leases."""
        interval_s = self._session.visibility_s / 4
        renewal = self._loop.time() + interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renewal):
                    await self._work.wait()
            self._work.clear()
            if not await self.flush():
                await asyncio.sleep(_RETRY_S)
                self._work.set()
            if self._loop.time() >= renewal:
                async with self._turn:
                    await for_each(list(self._held.values()), self._renew, _AT_ONCE)
                renewal = self._loop.time() + interval_s

    async def _renew(self, held: Held) -> None:
        session_s, now = self._session.visibility_s, self._loop.time()
        if held.until - now > 0.6 * session_s:
            return
        try:
            await held.consumer.change_invisibility(held.message, session_s)
        except Exception as error:
            if not isinstance(error, CometError):
                log.exception("a lease of queue %s is not renewed", held.queue)
            if now >= held.until:
                log.warning("a message of queue %s has lost its lease: %s", held.queue, error)
                held.until = float("inf")
        else:
            held.until = now + session_s


def _parts(settled: Iterable[tuple[Settlement, Held]]) -> list[tuple[Settlement, list[Held]]]:
    """Return the messages of each request: each fails or succeeds alone."""
    parts: dict[object, tuple[Settlement, list[Held]]] = {}
    for how, held in settled:
        shared = how in (Settlement.ACK, Settlement.RELEASE)
        key = (how, held.consumer, held.message.broker_name) if shared else held
        parts.setdefault(key, (how, []))[1].append(held)
    return list(parts.values())

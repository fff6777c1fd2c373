"""The producer.

    async with Producer("group", namesrv="127.0.0.1:9876") as producer:
        result = await producer.send(Message("TopicTest", b"hello"))

Budget of the hot path: at most 25 µs of CPU for a 1 KiB message when many sends are under way; requests
written in one loop tick leave in one system call, so many concurrent sends are cheap on one connection.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.namesrv_api import UNREACHABLE_HINT, NameServersUnreachable
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.routes import TopicRoute
from cometmq.client.cluster.state import check_loop, not_running, starts_once
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.outgoing import Outgoing, prepare, prepare_batch
from cometmq.client.producer.retry import SendAttempts
from cometmq.client.producer.selectors import QueueSelector, RoundRobin
from cometmq.client.producer.slots import Slots
from cometmq.errors import BrokerError, CometError, MessageIllegal, NoRouteError, RemotingError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, SendStatus
from cometmq.protocol.codes import check_group_name
from cometmq.text import seconds

__all__ = ["Producer", "select_by_random"]

_TRY_FAILURES = (RemotingError, BrokerError, NoRouteError)

_COMPRESS_HERE = 64 * 1024
"""Larger bodies are compressed in a thread: a megabyte takes some 10 ms, in which the loop would serve
nobody."""


def select_by_random(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """A queue selector without preference."""
    del message, argument
    return random.choice(queues)


def _check_kind(message: object) -> None:
    if not isinstance(message, Message):
        hint = "; send_again() of Admin sends a received one" if isinstance(message, MessageExt) else ""
        raise MessageIllegal(f"a Message is sent, not {type(message).__name__}{hint}", field="message")


class Producer:
    """`client`: an instance to share; else the producer has its own towards `namesrv` (its addresses, `;`
    between)."""

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        check_group_name(group)
        self.group = group
        self.options = options if options is not None else ProducerOptions()
        self._namesrv = namesrv
        self._shared_client = client
        self._client_options = client_options
        self._client: ClientInstance | None = client
        self._state = "new"
        self._robin = RoundRobin(random.getrandbits(31))
        self._slots = Slots(self.options.max_in_flight)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Make ready to send. Nothing is asked of any server before the first send."""
        if self._state != "new":
            raise starts_once(self._who, self._state)
        if self._client is None:
            self._client = ClientInstance(self._namesrv, self._client_options)
        await self._client.start()
        self._client.register_producer(self.group)
        self._state = "running"

    async def stop(self) -> None:
        """Let the sends under way end, say goodbye to the brokers, close the connections. May be called
        again."""
        if self._state != "running":
            return
        client = self._running()
        self._state = "stopping"
        try:
            await self._slots.drained()  # each send ends within its own budget
            await client.unregister_producer(self.group)
        finally:
            if client is not self._shared_client:
                await client.close()
            self._state = "stopped"

    @property
    def state(self) -> str:
        """`new`, `starting`, `running`, `stopping` or `stopped`; a stop is final."""
        return self._state

    @property
    def started(self) -> bool:
        """Whether start() was called, whatever happened since."""
        return self._state != "new"

    @property
    def client(self) -> ClientInstance:
        """The connections, routes and heartbeats it uses. Raises ClientStateError before the start."""
        if self._client is None:
            raise not_running(self._who, self._state)
        return self._client

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues that may be written. For a topic that does not exist: those it would be made with."""
        return (await self._route(topic)).write_queues

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send and wait for the broker's answer.

        Without `queue` and `selector` the queues take turns, and a failed try is followed by one on another
        broker; with either of them there is one try only, since the choice is the caller's. `timeout_s` is
        the budget of all tries together. Raises MessageIllegal, NoRouteError, BrokerError, ConnectError,
        SendFailed, RequestTimeout; after a SendFailed or RequestTimeout the broker may have the message.
        """
        client = self._running()
        _check_kind(message)
        if len(message.body) < _COMPRESS_HERE:
            outgoing = prepare(message, self.options, client.keys)
        else:
            outgoing = await asyncio.to_thread(prepare, message, self.options, client.keys)
        if selector is not None:
            queue = self._select(selector, (await self._route(message.topic)).write_queues, message, argument)
        return await self._send(outgoing, queue, timeout_s)

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
    ) -> None:
        """Send without an answer: a message may be lost and nobody will say so. Connects first if need be."""
        client = self._running()
        _check_kind(message)
        outgoing = prepare(message, self.options, client.keys)
        route = await self._route(message.topic)
        if selector is not None:
            queue = self._select(selector, route.write_queues, message, argument)
        chosen = queue if queue is not None else self._robin.select(route.write_queues)
        connection = await client.remoting.connect(self._master_of(chosen))
        connection.oneway(outgoing.frame(self.group, chosen, self.options))

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send messages of one topic as one request, stored together in one queue.

        They need the same `wait_store`, no delay and no retry topic; the bodies together must stay within
        `max_message_size`. The result's ids are joined by commas.
        """
        client = self._running()
        batch = list(messages)
        for message in batch:
            _check_kind(message)
        outgoing = prepare_batch(batch, self.options, client.keys)
        return await self._send(outgoing, queue, timeout_s)

    async def send_many(self, messages: Iterable[Message], *, concurrency: int = 256) -> list[SendResult]:
        """Send each message as `send` does, up to `concurrency` at once; results in the order of the
        messages.

        After a failure no new message is taken; the sends under way end, then the first failure is raised.
        """
        source = enumerate(messages)
        results: dict[int, SendResult] = {}
        failures: list[Exception] = []

        async def work() -> None:
            # The workers share the iterator: taking the next item is one step that no other task can
            # interrupt.
            for number, message in source:
                try:
                    results[number] = await self.send(message)
                except Exception as error:
                    failures.append(error)
                if failures:
                    return

        await asyncio.gather(*(work() for _ in range(concurrency)))
        if failures:
            raise failures[0]
        return [results[number] for number in range(len(results))]

    async def send_raw(self, outgoing: Outgoing) -> SendResult:
        """Send what is already prepared, system properties and reserved topics included (retries,
        replies)."""
        self._running()
        return await self._send(outgoing, None, None)

    async def _send(
        self, outgoing: Outgoing, queue: MessageQueue | None, timeout_s: float | None
    ) -> SendResult:
        slots = self._slots
        if slots.full:
            await slots.room()
        slots.take()
        try:
            options = self.options
            client = self.client
            budget_s = options.send_timeout_s if timeout_s is None else timeout_s
            begun = client.loop.time()
            attempts = None
            if queue is None and options.retry_times > 0:
                attempts = (begun, begun + budget_s)
            route = client.routes.get(outgoing.topic)
            if route is None or route.from_template or not route.write_queues:
                route = await self._route_within(outgoing.topic, budget_s)
                budget_s -= client.loop.time() - begun
            chosen = queue if queue is not None else self._robin.select(route.write_queues)
            if attempts is not None and options.try_timeout_s is not None:
                budget_s = min(budget_s, options.try_timeout_s)
            try:
                result = await self._try(outgoing, chosen, budget_s)
            except _TRY_FAILURES as error:
                if attempts is None:
                    raise
                return await self._send_again(outgoing, chosen, error, *attempts)
            if (
                result.status is SendStatus.SEND_OK
                or attempts is None
                or not options.retry_another_broker_when_not_store_ok
            ):
                return result
            return await self._send_again(outgoing, chosen, result, *attempts)
        finally:
            slots.give_back()

    async def _route_within(self, topic: str, budget_s: float) -> TopicRoute:
        """The route, asked for within a send's own budget."""
        try:
            async with asyncio.timeout(budget_s):
                return await self._route(topic)
        except TimeoutError:
            late = [(addr, f"nothing within {seconds(budget_s)}") for addr in self.client.namesrv.addrs]
            raise NameServersUnreachable(topic, late, UNREACHABLE_HINT) from None

    def _master_of(self, queue: MessageQueue) -> str:
        client = self.client
        try:
            return client.master_addr(queue.broker_name, queue.topic)
        except NoRouteError:
            client.refresh_soon(queue.topic)  # its route still names queues there
            raise

    async def _try(self, outgoing: Outgoing, queue: MessageQueue, timeout_s: float) -> SendResult:
        client = self.client
        addr = self._master_of(queue)
        connection = client.remoting.connection(addr)
        frame = outgoing.frame(self.group, queue, self.options)
        if connection is None:
            answer = await client.remoting.call(addr, frame, timeout_s)
        else:
            answer = await connection.request(frame, timeout_s)
        return outgoing.result(answer, queue, addr)

    async def _send_again(
        self,
        outgoing: Outgoing,
        queue: MessageQueue,
        failure: CometError | SendResult,
        begun: float,
        deadline: float,
    ) -> SendResult:
        """The tries after the first. What a try stored without SEND_OK is the answer if no later try does
        better."""
        loop = self.client.loop
        options = self.options
        attempts = SendAttempts(
            deadline, 1 + options.retry_times, options.retry_response_codes, options.try_timeout_s
        )
        stored: SendResult | None = None
        while True:
            if isinstance(failure, SendResult):
                stored = failure
                again = attempts.stored_badly(queue.broker_name, loop.time())
            else:
                again = attempts.failed(queue.broker_name, failure, loop.time())
            if not again:
                break
            if isinstance(failure, RemotingError):
                self.client.refresh_soon(outgoing.topic)  # the broker may have moved
            try:
                route = await self._route_within(outgoing.topic, attempts.timeout_s(loop.time()))
                queue = self._robin.select(route.write_queues, avoid_broker=queue.broker_name)
                result = await self._try(outgoing, queue, attempts.timeout_s(loop.time()))
            except _TRY_FAILURES as error:
                failure = error
                continue
            if result.status is SendStatus.SEND_OK or not options.retry_another_broker_when_not_store_ok:
                return result
            failure = result
        if stored is not None:
            return stored
        assert isinstance(failure, CometError)
        failure.add_note(attempts.story(outgoing.topic, loop.time() - begun))
        raise failure

    async def _route(self, topic: str) -> TopicRoute:
        options = self.options
        return await self._running().publish_route(
            topic, options.create_topic_key, options.default_topic_queue_nums
        )

    def _select(
        self, selector: QueueSelector, queues: Sequence[MessageQueue], message: Message, argument: object
    ) -> MessageQueue:
        queue = selector(queues, message, argument)
        if queue is None or queue.topic != message.topic:
            raise ValueError(f"the selector gave {queue!r} for a message of topic {message.topic}")
        return queue

    def _running(self) -> ClientInstance:
        client = self._client
        if self._state != "running" or client is None:
            raise not_running(self._who, self._state)
        if client.loop is not asyncio.get_running_loop():
            check_loop(self._who, client.loop)
        return client

    @property
    def _who(self) -> str:
        return f"producer of group {self.group}"

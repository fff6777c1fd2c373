"""The producer.

    async with Producer("group", namesrv="127.0.0.1:9876") as producer:
        result = await producer.send(Message("TopicTest", b"hello"))

Budget of the hot path: at most 25 µs of CPU for a 1 KiB message when many sends are under way; requests
written in one loop tick leave in one system call, so many concurrent sends are cheap on one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable, Sequence

from cometmq.client.cluster.hooks import Sending, tell
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import LookingClient
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.ranges import check_range
from cometmq.client.cluster.requests import UNREACHABLE_HINT
from cometmq.client.cluster.routes import TopicRoute
from cometmq.client.cluster.telemetry import spanned
from cometmq.client.cluster.workers import call_hook, for_each
from cometmq.client.producer.latency import SlowBrokers
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.outgoing import Outgoing, prepare, prepare_batch
from cometmq.client.producer.request_reply import as_request
from cometmq.client.producer.retry import SendAttempts
from cometmq.client.producer.selectors import QueueSelector, RoundRobin
from cometmq.errors import (
    BrokerError,
    CometError,
    MessageIllegal,
    NoRouteError,
    RemotingError,
    ReplyTimeout,
    RequestNotSent,
    SendTries,
)
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, SendStatus
from cometmq.protocol.addresses import vip_address
from cometmq.protocol.codes import SysFlag, check_group_name
from cometmq.protocol.timers import RecallHandle
from cometmq.text import seconds

__all__ = ["Producer", "select_by_random"]

_TRY_FAILURES = (RemotingError, BrokerError, NoRouteError)

_PREPARED = int(SysFlag.TRANSACTION_PREPARED)
COMPRESS_HERE = 64 * 1024
"""Larger bodies are compressed in a thread: a megabyte would hold the loop for 10 ms."""


def select_by_random(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """A queue selector without preference."""
    del message, argument
    return random.choice(queues)


def check_kind(message: object) -> None:
    """Raise MessageIllegal for what is no Message."""
    if not isinstance(message, Message):
        hint = "; send_again() of Admin sends a received one" if isinstance(message, MessageExt) else ""
        raise MessageIllegal(f"a Message is sent, not {type(message).__name__}{hint}", field="message")


def _check_queue(queue: object, topic: str) -> None:
    """Raise MessageIllegal for what is no queue of the message's topic: the broker sees its number only."""
    if not isinstance(queue, MessageQueue) or queue.topic != topic:
        raise MessageIllegal(f"{queue!r} is no queue of topic {topic}", topic, "queue")


class Producer(LookingClient):
    """`client`: an instance to share; else the producer has its own towards `namesrv` (its addresses, `;`
    between).

    A start asks nothing of any server. A stop lets the sends under way end, says goodbye to the brokers and
    closes the connections.
    """

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
        super().__init__(f"producer of group {group}", namesrv, client, client_options)
        self.group = group
        self.options = options if options is not None else ProducerOptions()
        self._robin = RoundRobin(random.getrandbits(31))
        self._slow = SlowBrokers() if self.options.send_latency_fault_enable else None
        hooked = self.options.check_forbidden or self.options.send_hooks
        self._attempt = self._hooked_try if hooked else self._try
        self._room = asyncio.Semaphore(self.options.max_in_flight)
        self._requests = asyncio.Semaphore(self.options.max_requests)
        self._under_way = 0
        """Sends that were begun, those that wait for room included."""
        self._idle = asyncio.Event()

    async def _begin(self) -> None:
        (await self._start_client()).register_producer(self.group)

    async def _end(self, *, drain: bool) -> None:
        try:
            while drain and self._under_way:  # each send ends within its own budget
                self._idle.clear()
                await self._idle.wait()
        finally:
            try:
                if drain:
                    await self.client.unregister_producer(self.group)
            finally:
                await self._close_client()

    @property
    def started(self) -> bool:
        """Whether start() was called, whatever happened since."""
        return self._state != "new"

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues that may be written. For a topic that does not exist: those it would be made with."""
        return (await self._route(topic)).write_queues

    @spanned
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
        check_kind(message)
        if queue is not None:
            _check_queue(queue, message.topic)
        if len(message.body) < COMPRESS_HERE:
            outgoing = prepare(message, self.options, client.keys)
        else:
            outgoing = await asyncio.to_thread(prepare, message, self.options, client.keys)
        if selector is not None:
            timeout_s = self.options.send_timeout_s if timeout_s is None else timeout_s
            begun = client.loop.time()
            route = await self._route_within(message.topic, timeout_s)
            timeout_s -= client.loop.time() - begun
            queue = self._select(selector, route.write_queues, message, argument)
        return await self._send(outgoing, queue, timeout_s)

    @spanned
    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
    ) -> None:
        """Send without an answer: a message may be lost and nobody will say so. Connects first if need be;
        the route is asked for within `send_timeout_s`."""
        client = self._running()
        check_kind(message)
        outgoing = prepare(message, self.options, client.keys)
        if queue is not None:
            _check_queue(queue, message.topic)
        route = await self._route_within(message.topic, self.options.send_timeout_s)
        if selector is not None:
            queue = self._select(selector, route.write_queues, message, argument)
        chosen = queue if queue is not None else self._choose(route)
        sending = self._begin_sending(outgoing, chosen, oneway=True)
        try:
            connection = await client.remoting.connect(sending.broker_addr)
            connection.oneway(outgoing.frame(self.group, chosen, self.options))
        except BaseException as error:
            sending.error = error
            raise
        finally:
            tell(self.options.send_hooks, "after_send", sending)

    @spanned
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
            check_kind(message)
        outgoing = prepare_batch(batch, self.options, client.keys)
        if queue is not None:
            _check_queue(queue, outgoing.topic)
        return await self._send(outgoing, queue, timeout_s)

    async def send_many(self, messages: Iterable[Message], *, concurrency: int = 256) -> list[SendResult]:
        """Send each message as `send` does, up to `concurrency` at once; results in the order of the
        messages.

        After a failure no new message is taken; the sends under way end, then the first failure is raised.
        """
        check_range("concurrency", concurrency, 1)
        return await for_each(messages, self.send, concurrency)

    async def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        argument: object = None,
        timeout_s: float = 3.0,
    ) -> MessageExt:
        """Send a message as `send` does and wait for the reply of a consumer that sends `reply_to(message,
        body)`. Many may wait at once.

        `timeout_s` is the time for waiting for a place, for sending and for the reply. Raises what `send`
        raises, RequestNotSent: the time was over before it could be sent, and ReplyTimeout: the message was
        sent, and no reply came.
        """
        client = self._running()
        check_kind(message)
        end = client.loop.time() + timeout_s
        self._under_way += 1  # a stop waits for it
        correlation_id, has_place = "", False
        try:
            try:
                async with asyncio.timeout_at(end):
                    has_place = await self._requests.acquire()
            except TimeoutError:
                raise RequestNotSent(message.topic, timeout_s) from None
            route = await self._route_within(message.topic, max(end - client.loop.time(), 0.0))
            await client.introduce(route, end)
            left_s = end - client.loop.time()
            if left_s <= 0:
                raise RequestNotSent(message.topic, timeout_s)
            correlation_id, asking = as_request(message, client.client_id, timeout_s)
            reply = client.replies.expect(correlation_id)
            try:
                sent = await self.send(
                    asking, queue=queue, selector=selector, argument=argument, timeout_s=left_s
                )
            except CometError:
                if reply.done():  # so the message got there
                    return reply.result()
                raise
            try:
                async with asyncio.timeout_at(end):
                    return await reply
            except TimeoutError:
                pass  # its frames hold the task, which must not hold what is raised from them
            raise ReplyTimeout(message.topic, sent.msg_id, correlation_id, timeout_s)
        finally:
            if has_place:
                self._requests.release()
            client.replies.forget(correlation_id)
            self._ended()

    async def recall(self, recall_handle: str) -> str:
        """Take back a message that waits for its time, by the handle of its SendResult; returns its id.

        The broker does not say whether the message was still there. Raises BadHandle, NoRouteError,
        BrokerError.
        """
        client = self._running()
        handle = RecallHandle.decode(recall_handle)
        await self._route(client.namespace.unwrap(handle.topic))
        addr = client.master_addr(handle.broker_name, handle.topic)
        return await client.brokers.recall(addr, self.group, handle.topic, recall_handle)

    async def send_raw(self, outgoing: Outgoing) -> SendResult:
        """Send what is prepared already, system properties and reserved topics included."""
        self._running()
        return await self._send(outgoing, None, None)

    async def _send(
        self, outgoing: Outgoing, queue: MessageQueue | None, timeout_s: float | None
    ) -> SendResult:
        """What a try stored without SEND_OK is the answer if no later try does better."""
        self._under_way += 1
        has_room = False
        try:
            has_room = await self._room.acquire()
            options = self.options
            client = self.client
            loop = client.loop
            topic = outgoing.topic
            begun = loop.time()
            budget_s = options.send_timeout_s if timeout_s is None else timeout_s
            tries = 1 if queue is not None else 1 + options.retry_times
            attempts = SendAttempts(
                begun + budget_s, tries, options.retry_response_codes, options.try_timeout_s
            )
            left_s = attempts.timeout_s(begun)
            route = client.routes.get(topic)
            if route is None or route.from_template or not route.write_queues:
                route = await self._route_within(topic, budget_s)
                left_s = attempts.timeout_s(loop.time())
            chosen = queue if queue is not None else self._choose(route)
            stored: SendResult | None = None
            pause_s = 0.0
            while True:
                try:
                    if attempts.outcomes:
                        route = await self._route_within(topic, attempts.timeout_s(loop.time()))
                        failed = chosen.broker_name
                        chosen = self._choose(route, failed)
                        if pause_s and chosen.broker_name == failed:
                            await self._pause(topic, pause_s)
                        left_s = attempts.timeout_s(loop.time())
                    result = await self._attempt(outgoing, chosen, left_s)
                except _TRY_FAILURES as error:
                    failure = error
                    if not attempts.failed(chosen.broker_name, error, loop.time()):
                        break
                    pause_s = attempts.pause_s(error, loop.time())
                    if isinstance(error, RemotingError):
                        client.refresh_soon(topic)  # the broker may have moved
                else:
                    if (
                        result.status is SendStatus.SEND_OK
                        or tries == 1
                        or not options.retry_another_broker_when_not_store_ok
                    ):
                        return result
                    stored, pause_s = result, 0.0
                    if not attempts.stored_badly(chosen.broker_name, loop.time()):
                        break
            if stored is not None:
                return stored
            told = SendTries(topic, loop.time() - begun, tuple(attempts.outcomes))
            failure.tries = told  # type: ignore[misc] # of this error alone
            if len(told.outcomes) > 1:
                failure.add_note(str(told))
            try:
                raise failure
            finally:
                del failure  # it holds this frame
        finally:
            if has_room:
                self._room.release()
            self._ended()

    async def _pause(self, topic: str, pause_s: float) -> None:
        """Wait before another try at the same broker, and read the route: a new leader has a new address."""
        await asyncio.sleep(pause_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.client.refresh_routes([topic])

    def _ended(self) -> None:
        """A send is no longer under way."""
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def _route_within(self, topic: str, budget_s: float) -> TopicRoute:
        """The route, asked for within a send's own budget."""
        route = self.client.routes.get(topic)
        if route is not None and route.write_queues and not route.from_template:
            return route
        try:
            async with asyncio.timeout(budget_s):
                return await self._route(topic)
        except TimeoutError:
            late = [(addr, f"nothing within {seconds(budget_s)}") for addr in self.client.namesrv.addrs]
            raise NameServersUnreachable(topic, late, UNREACHABLE_HINT) from None

    def _choose(self, route: TopicRoute, failed: str | None = None) -> MessageQueue:
        slow = () if self._slow is None else self._slow.avoided(self.client.loop.time())
        return self._robin.select(route.write_queues, failed, slow)

    def _master_of(self, queue: MessageQueue) -> str:
        client = self.client
        try:
            addr = client.master_addr(queue.broker_name, queue.topic)
            return vip_address(addr) if client.options.vip_channel else addr
        except NoRouteError:
            client.refresh_soon(queue.topic)  # its route still names queues there
            raise

    async def _try(self, outgoing: Outgoing, queue: MessageQueue, timeout_s: float) -> SendResult:
        client = self.client
        addr = self._master_of(queue)
        connection = client.remoting.connection(addr)
        frame = outgoing.frame(self.group, queue, self.options)
        begun_s = time.monotonic()
        try:
            if connection is None:
                answer = await client.remoting.call(addr, frame, timeout_s)
            else:
                answer = await connection.request(frame, timeout_s)
            result = outgoing.result(answer, queue, addr)
        except (RemotingError, BrokerError):
            if self._slow is not None:
                self._slow.note(queue.broker_name, 0.0, client.loop.time(), failed=True)
            raise
        if self._slow is not None:
            self._slow.note(queue.broker_name, time.monotonic() - begun_s, client.loop.time())
        if client.traces is not None and outgoing.messages:
            half = bool(outgoing.sys_flag & _PREPARED)
            client.traces.sent(self.group, outgoing.messages, result, addr, begun_s, half=half)
        return result

    async def _hooked_try(self, outgoing: Outgoing, queue: MessageQueue, timeout_s: float) -> SendResult:
        sending = self._begin_sending(outgoing, queue)
        try:
            sending.result = await self._try(outgoing, queue, timeout_s)
            return sending.result
        except BaseException as error:
            sending.error = error
            raise
        finally:
            tell(self.options.send_hooks, "after_send", sending)

    def _begin_sending(self, outgoing: Outgoing, queue: MessageQueue, *, oneway: bool = False) -> Sending:
        """Ask the checks, and tell the hooks. Raises what a check raises."""
        sending = Sending(self.group, outgoing.messages, queue, self._master_of(queue), oneway)
        for check in self.options.check_forbidden:
            call_hook(check, sending)
        tell(self.options.send_hooks, "before_send", sending)
        return sending

    async def _route(self, topic: str) -> TopicRoute:
        options = self.options
        return await self._running().publish_route(
            topic, options.create_topic_key, options.default_topic_queue_nums
        )

    def _select(
        self, selector: QueueSelector, queues: Sequence[MessageQueue], message: Message, argument: object
    ) -> MessageQueue:
        queue = call_hook(selector, queues, message, argument)
        if queue is None or queue.topic != message.topic:
            raise ValueError(f"the selector gave {queue!r} for a message of topic {message.topic}")
        return queue

    def _running(self) -> ClientInstance:
        if self._state != "running" or self._loop is not asyncio.get_running_loop():
            self._check_running()  # which says what is wrong; asked for each message, so not called for it
        return self.client

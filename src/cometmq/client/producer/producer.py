"""The producer.

    async with Producer("group", namesrv="127.0.0.1:9876") as producer:
        result = await producer.send(Message("TopicTest", b"hello"))

A send of a 1 KiB message must take at most 25 µs of CPU when many sends are in progress. Requests that are
written in one event-loop iteration leave in one system call, so concurrent sends on a connection are cheap.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable, Sequence

from cometmq.client.cluster.hooks import Sending, notify_hooks
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import QueryClient
from cometmq.client.cluster.options import ClientOptions, check_range
from cometmq.client.cluster.requests import UNREACHABLE_HINT, NameServersUnreachable
from cometmq.client.cluster.routes import TopicRoute
from cometmq.client.cluster.telemetry import spanned
from cometmq.client.cluster.workers import call_hook, for_each
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.outgoing import Outgoing, as_request, prepare, prepare_batch
from cometmq.client.producer.retry import SendAttempts
from cometmq.client.producer.selectors import QueueSelector, RoundRobin, SlowBrokers
from cometmq.errors import (
    BrokerError,
    CometError,
    MessageIllegal,
    NoRouteError,
    RemotingError,
    ReplyTimeout,
    RequestNotSent,
)
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, SendStatus
from cometmq.protocol.addresses import vip_address
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.timers import RecallHandle
from cometmq.text import seconds

_TRY_FAILURES = (RemotingError, BrokerError, NoRouteError)

_PREPARED = int(SysFlag.TRANSACTION_PREPARED)
COMPRESS_HERE = 64 * 1024
"""Minimum size in bytes of a body that a thread compresses, because 1 MiB would block the loop for 10 ms."""


def select_by_random(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """Select a random queue. This is a queue selector for `Producer.send`.

    Args:
        queues: The writable queues of the topic.
        message: The message to send. It is not used.
        argument: The argument of `send`. It is not used.
    """
    del message, argument
    return random.choice(queues)


def check_kind(message: object) -> None:
    """Raise MessageIllegal unless the object is a Message."""
    if not isinstance(message, Message):
        hint = "; send_again() of Admin sends a received one" if isinstance(message, MessageExt) else ""
        raise MessageIllegal(f"expected a Message, not {type(message).__name__}{hint}", field="message")


def _check_queue(queue: object, topic: str) -> None:
    """Raise MessageIllegal unless `queue` is a queue of the topic. Brokers cannot check that."""
    if not isinstance(queue, MessageQueue) or queue.topic != topic:
        raise MessageIllegal(f"{queue!r} is not a queue of topic {topic}", topic, "queue")


class Producer(QueryClient):
    """A producer, which sends messages to the brokers of a cluster.

    Use it with `async with`, or call start() and stop(). start() sends no request to any server. stop() waits
    for the sends in progress, unregisters the producer at the brokers and closes the connections. A producer
    belongs to the event loop in which it was started.

    Args:
        group: The name of the producer group.
        namesrv: The name servers as a sequence of `host:port` or as text with `;` between them. Default: the
            environment variable COMETMQ_NAMESRV or NAMESRV_ADDR, otherwise 127.0.0.1:9876.
        options: The settings of the producer. Default: ProducerOptions().
        client: A client instance that several producers and consumers share. Default: the producer creates
            its own from `namesrv` and `client_options`.
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises:
        MessageIllegal: The group name is illegal.
        ConfigError: A name server's address or a setting is invalid.
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
        super().__init__("producer", group, namesrv, client, client_options)
        self.options = options if options is not None else ProducerOptions()
        self._round_robin = RoundRobin(random.getrandbits(31))
        self._slow = SlowBrokers() if self.options.send_latency_fault_enable else None
        hooked = self.options.check_forbidden or self.options.send_hooks
        self._attempt = self._hooked_try if hooked else self._try
        self._room = asyncio.Semaphore(self.options.max_in_flight)
        self._requests = asyncio.Semaphore(self.options.max_requests)
        self._under_way = 0
        """The number of sends in progress, including those that wait because of `max_in_flight`."""
        self._idle = asyncio.Event()

    async def _begin(self) -> None:
        (await self._start_client()).register_producer(self.group)

    async def _end(self, *, drain: bool) -> None:
        try:
            while drain and self._under_way:  # each send has a timeout, so this loop ends
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
        """Whether start() was called. The value stays True after a stop."""
        return self._state != "new"

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the writable queues of a topic.

        Args:
            topic: The topic. If it does not exist, the result is the queues that a first send would create.

        Raises:
            NoRouteError: The name servers have no route of the topic, or no name server can be reached.
        """
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
        """Send a message and wait for the broker's answer.

        Without `queue` and `selector`, the producer uses the topic's queues in turn and retries a failed try
        on another broker. With either, there is a single try, because the caller has chosen the queue.

        Args:
            message: The message.
            queue: The queue to send to.
            selector: A function that chooses the queue from the writable queues, see `select_by_hash`.
            argument: The argument of the selector.
            timeout_s: The timeout of all tries together, in seconds. Default:
                `ProducerOptions.send_timeout_s`.

        Returns:
            The message ids, the queue, the offset and the status. If the brokers flush or replicate
                synchronously, check `status`: it tells whether the broker confirmed the flush and the
                replication in time.

        Raises:
            MessageIllegal: The message or the queue is invalid.
            NoRouteError: The topic has no route with writable queues.
            BrokerError: The broker refused the message.
            ConnectError: The broker cannot be reached.
            SendFailed: The connection failed during the send. The broker may have stored the message.
            RequestTimeout: No answer in time. The broker may have stored the message.
            ClientStateError: The producer is not running.
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
        """Send a message in a request that the broker does not answer.

        The loss of the message is not reported.

        If necessary, the producer first requests the route, for at most `ProducerOptions.send_timeout_s`
        seconds, and connects to the broker. While more than 16 MiB of requests to the broker are unsent, the
        call waits, for as long at most.

        Args:
            message: The message.
            queue: The queue to send to. Default: the producer uses the queues in turn.
            selector: A function that chooses the queue from the writable queues.
            argument: The argument of the selector.

        Raises:
            MessageIllegal: The message or the queue is invalid.
            NoRouteError: The topic has no route with writable queues.
            ConnectError: The broker cannot be reached.
            SendFailed: The connection failed. The message was not sent.
            RequestTimeout: The broker did not receive enough of the earlier requests in time. The message was
                not sent.
            ClientStateError: The producer is not running.
        """
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
            frame = outgoing.frame(self.group, chosen, self.options)
            if connection.full:
                await connection.room(frame.code, self.options.send_timeout_s)
            connection.oneway(frame)
        except BaseException as error:
            sending.error = error
            raise
        finally:
            notify_hooks(self.options.send_hooks, "after_send", sending)

    @spanned
    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send messages of one topic in one request. The broker stores them together in one queue.

        Args:
            messages: The messages. They need the same topic and `wait_store`, no delay and no retry topic.
                Their encoded size must not exceed `ProducerOptions.max_message_size`, see `split_batches`.
            queue: The queue to send to. Default: the producer uses the queues in turn and retries a failed
                try.
            timeout_s: The timeout of all tries together, in seconds. Default:
                `ProducerOptions.send_timeout_s`.

        Returns:
            The result. Its `msg_id` and `offset_msg_id` hold the ids of all messages, joined by commas.

        Raises:
            MessageIllegal: A message, their combination or the queue is invalid.
            CometError: The send failed. The error is one of those that `send` raises.
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
        """Send each message as `send` does, several of them concurrently.

        After a failure no further message is sent. When the sends in progress have ended, the first failure
        is raised.

        Args:
            messages: The messages.
            concurrency: The maximum number of concurrent sends.

        Returns:
            The results, in the order of the messages.

        Raises:
            ConfigError: `concurrency` is less than 1.
            CometError: A send failed. The error is one of those that `send` raises.
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
        """Send a message and wait for the reply, which a consumer sends with `reply_to(message, body)`.

        Up to `ProducerOptions.max_requests` requests may wait for their replies at the same time.

        Args:
            message: The message.
            queue: The queue to send to. Default: the producer uses the queues in turn and retries a failed
                try.
            selector: A function that chooses the queue from the writable queues.
            argument: The argument of the selector.
            timeout_s: The timeout in seconds. It includes the wait until fewer than `max_requests` requests
                are in progress, the send, and the wait for the reply.

        Raises:
            RequestNotSent: The timeout passed before the message was sent.
            ReplyTimeout: The message was sent, but no reply arrived in time.
            CometError: The send failed. The error is one of those that `send` raises.
        """
        client = self._running()
        check_kind(message)
        end = client.loop.time() + timeout_s
        self._under_way += 1  # `stop` waits until no request is under way
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
                if reply.done():  # the reply proves that the request has arrived although the send failed
                    return reply.result()
                raise
            try:
                async with asyncio.timeout_at(end):
                    return await reply
            except TimeoutError:
                pass  # raise ReplyTimeout outside of this block, so that it does not refer to TimeoutError
            raise ReplyTimeout(message.topic, sent.msg_id, correlation_id, timeout_s)
        finally:
            if has_place:
                self._requests.release()
            client.replies.forget(correlation_id)
            self._ended()

    async def recall(self, recall_handle: str) -> str:
        """Cancel the delivery of a timer message whose delivery time has not come.

        The broker's answer does not tell whether the message was still waiting for delivery.

        Args:
            recall_handle: The `recall_handle` of the message's SendResult.

        Returns:
            The id of the message.

        Raises:
            BadHandle: The text is no recall handle.
            NoRouteError: The topic of the message has no route.
            BrokerError: The broker refused the request.
        """
        client = self._running()
        handle = RecallHandle.decode(recall_handle)
        await self._route(client.namespace.unwrap(handle.topic))
        addr = client.master_addr(handle.broker_name, handle.topic)
        return await client.brokers.recall(addr, self.group, handle.topic, recall_handle)

    async def send_raw(self, outgoing: Outgoing) -> SendResult:
        """Send a message whose properties are encoded already.

        Unlike other messages, it may have system properties and a reserved topic.
        """
        self._running()
        return await self._send(outgoing, None, None)

    async def _send(
        self, outgoing: Outgoing, queue: MessageQueue | None, timeout_s: float | None
    ) -> SendResult:
        """Send with retries. SendAttempts decides on each retry and on the final result or error."""
        options, client, topic = self.options, self.client, outgoing.topic
        tries = 1 if queue is not None else 1 + options.retry_times
        has_room = False
        self._under_way += 1
        try:
            has_room = await self._room.acquire()
            loop = client.loop
            begun = loop.time()
            budget_s = options.send_timeout_s if timeout_s is None else timeout_s
            attempts = SendAttempts(
                begun + budget_s, tries, options.retry_response_codes, options.try_timeout_s
            )
            left_s = attempts.timeout_s(begun)
            route = client.routes.get(topic)
            if route is None or route.from_template or not route.write_queues:
                route = await self._route_within(topic, budget_s)
                left_s = attempts.timeout_s(loop.time())
            chosen = queue if queue is not None else self._choose(route)
            while True:
                try:
                    if attempts.outcomes:
                        chosen = await self._next_queue(topic, chosen.broker_name, attempts)
                        left_s = attempts.timeout_s(loop.time())
                    result = await self._attempt(outgoing, chosen, left_s)
                except _TRY_FAILURES as error:
                    if not attempts.failed(chosen.broker_name, error, loop.time()):
                        break
                    attempts.pause_s(error, loop.time())
                    if isinstance(error, RemotingError):
                        client.refresh_soon(topic)  # the broker may have a new address
                else:
                    is_final = tries == 1 or not options.retry_another_broker_when_not_store_ok
                    if is_final or result.status is SendStatus.SEND_OK:
                        return result
                    if not attempts.stored_without_ok(chosen.broker_name, result, loop.time()):
                        break
            return attempts.outcome(topic, loop.time() - begun)
        finally:
            if has_room:
                self._room.release()
            self._ended()

    async def _next_queue(self, topic: str, failed: str, attempts: SendAttempts) -> MessageQueue:
        """Return the queue of the next try, after a pause if the last broker's refusal was temporary."""
        await asyncio.sleep(attempts.route_pause_s)
        route = await self._route_within(topic, attempts.timeout_s(self.client.loop.time()))
        chosen = self._choose(route, failed)
        pause_s = attempts.broker_pause_s
        if pause_s and chosen.broker_name == failed:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.client.refresh_routes([topic])  # the broker may have a new raft leader
        return chosen

    def _ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def _route_within(self, topic: str, budget_s: float) -> TopicRoute:
        """Return the route of a topic. If it must be requested, within `budget_s` seconds."""
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
        return self._round_robin.select(route.write_queues, failed, slow)

    def _master_of(self, queue: MessageQueue) -> str:
        client = self.client
        try:
            addr = client.master_addr(queue.broker_name, queue.topic)
            return vip_address(addr) if client.options.vip_channel else addr
        except NoRouteError:
            client.refresh_soon(queue.topic)  # the cached route lists a broker that has no master
            raise

    async def _try(self, outgoing: Outgoing, queue: MessageQueue, timeout_s: float) -> SendResult:
        client = self.client
        addr = self._master_of(queue)
        connection = client.remoting.connection(addr)
        frame = outgoing.frame(self.group, queue, self.options)
        begun_s = time.monotonic()
        try:
            if connection is None or connection.full:
                answer = await client.remoting.call(addr, frame, timeout_s, wait_for_room=True)
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
            notify_hooks(self.options.send_hooks, "after_send", sending)

    def _begin_sending(self, outgoing: Outgoing, queue: MessageQueue, *, oneway: bool = False) -> Sending:
        """Run the `check_forbidden` functions (their exceptions end the send), then `before_send` hooks."""
        sending = Sending(self.group, outgoing.messages, queue, self._master_of(queue), oneway)
        for check in self.options.check_forbidden:
            call_hook(check, sending)
        notify_hooks(self.options.send_hooks, "before_send", sending)
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
            raise ValueError(f"the selector must return a queue of topic {message.topic}, not {queue!r}")
        return queue

    def _running(self) -> ClientInstance:
        if self._state != "running" or self._loop is not asyncio.get_running_loop():
            self._check_running()  # raises ClientStateError with the reason why the producer cannot send
        return self.client

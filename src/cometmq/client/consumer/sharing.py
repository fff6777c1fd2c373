"""The consume mode of a group whose members share messages: each message is leased to one member (POP).

A member leases only a few more messages than its listener handles at a time, and renews the leases until the
listener has returned. Then each message is acknowledged, or returned to the broker with a delay. Topics whose
queues the group divides (PushOptions.share) are pulled, as in the mode Concurrent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cometmq import logs
from cometmq.client.cluster.hooks import kept
from cometmq.client.cluster.workers import again_if_cancelled, all_of, for_each
from cometmq.client.consumer.concurrent import OVERDUE_LEVEL, Concurrent, failed_messages
from cometmq.client.consumer.consume_mode import ModeUser
from cometmq.client.consumer.listener import ConsumeContext, OrderlyContext, OrderlyStatus
from cometmq.client.consumer.orderly_queue import suspension_s
from cometmq.client.group.group import ConsumerGroup, Group
from cometmq.client.group.offsets import start_offset
from cometmq.client.group.options import MAX_MESSAGES, ConsumeFromWhere
from cometmq.client.group.process_queue import Batch, LeasedQueue, ProcessQueue
from cometmq.client.group.subscription import Subscription
from cometmq.client.simple.leases import Leases
from cometmq.client.simple.receiving import Receiver
from cometmq.errors import BodyTooLarge, BrokerError, CometError, ConfigError
from cometmq.message import MessageExt, MessageQueue
from cometmq.periodic import Periodic, Tasks
from cometmq.protocol.bodies import (
    RETRY_MAX_TIMES,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SubscriptionGroupConfig,
)
from cometmq.protocol.bodies.retry_policy import DEFAULT, DELAY_LEVELS_S, RetryPolicy, policy_of
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import GetSubscriptionGroupConfigRequestHeader
from cometmq.protocol.record.layout import COMPRESSED

log = logs.logger("cometmq.client.consumer")

_RENEWALS_PER_LEASE = 3
_AT_ONCE = 32
"""The maximum number of concurrent requests about leases or topics."""
_WAIT_S = 15.0
"""The maximum time, in seconds, for which one call of the receiver waits for messages."""


class Retries(NamedTuple):
    """The retry delays of failed messages. After `max_times` retries a message becomes a dead letter."""

    max_times: int = RETRY_MAX_TIMES
    policy: RetryPolicy = DEFAULT


async def read_retries(group: Group, topic: str, known: Retries) -> Retries:
    """Return the retries of a group from a broker of the topic, `known` if it does not report them."""
    instance = group.instance
    header = GetSubscriptionGroupConfigRequestHeader(group=group.name)
    code = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG
    for addr in instance.routes.readers_of(topic)[:1]:
        try:
            config = await instance.brokers.fetch(addr, code, SubscriptionGroupConfig, header)
        except CometError as error:
            log.debug("the retry policy of group %s cannot be read: %s", group.name, error)
        else:
            return Retries(config.retry_max_times, policy_of(config))
    return known


async def is_popped(group: Group, topic: str, known: bool) -> bool:
    """Return whether a group's consume mode for a topic is POP, `known` if no broker reports it."""
    instance = group.instance
    # To a member that broadcasts, a broker reports all queues, even if it does not know the member yet.
    body = QueryAssignmentRequestBody(
        topic=instance.namespace.wrap(topic),
        consumer_group=instance.namespace.wrap(group.name),
        client_id=instance.client_id,
        strategy_name="AVG",
        message_model="BROADCASTING",
    ).encode()
    for addr in instance.routes.readers_of(topic)[:1]:
        try:
            answer = await instance.brokers.call(addr, RequestCode.QUERY_ASSIGNMENT, body=body, topic=topic)
            found = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
        except CometError as error:
            log.debug("the consume mode of group %s for %s cannot be read: %s", group.name, topic, error)
        else:
            return found[0].mode == "POP" if found else known
    return known


class Sharing(Concurrent):
    """The consume mode of a group whose members share messages."""

    success: Any
    later: Any
    handled: Any

    def __init__(self, group: ConsumerGroup, user: ModeUser) -> None:
        super().__init__(group, user)
        options = group.options
        if options.orderly:
            self.success, self.later = OrderlyStatus.SUCCESS, OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
            self.handled = (OrderlyStatus.SUCCESS, OrderlyStatus.COMMIT)
        at_end = options.consume_from_where is ConsumeFromWhere.LAST_OFFSET
        self._leases = Leases(
            group, orderly=options.orderly, init_mode=int(at_end), max_body=options.max_body
        )
        self._shared: dict[str, Subscription] = {}
        """The topics from which messages are leased."""
        self._next: dict[str, Subscription] = {}
        """The value of `_shared` after the present rebalance."""
        self._receiver = Receiver(group, self._leases, self._shared, parks=False)
        self._retries = Retries()
        self._held: dict[Batch, asyncio.Lock] = {}
        """The leased batches. The lock is held while requests change or end the leases of the messages."""
        self._held_count = 0
        """The number of messages in the batches of `_held`."""
        self._room = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None
        self._suspended = False
        self._acks: dict[str, list[tuple[Sequence[MessageExt], asyncio.Future[None] | None]]] = {}
        """Messages to acknowledge with the next request, and the waiting calls, by broker.

        A broker with a request has an entry.
        """
        self._tasks = Tasks()
        self._renewals = Periodic(
            asyncio.get_running_loop(),
            options.invisible_s / _RENEWALS_PER_LEASE,
            lambda: for_each(list(self._held.items()), self._renew, _AT_ONCE),
            name=f"leases of group {group.name}",
        )

    # -- topics

    async def pulled_topics(self) -> Collection[str]:
        group = self._group
        subscriptions = dict(group.subscriptions)
        subscriptions.pop(group.retry_topic, None)
        shares = await for_each(list(subscriptions.values()), self._shares_messages, _AT_ONCE)
        for topic in list(subscriptions)[:1]:
            self._retries = await read_retries(group, topic, self._retries)
        self._next = {
            each.topic: each for each, shared in zip(subscriptions.values(), shares, strict=True) if shared
        }
        return [topic for topic in group.subscriptions if topic not in self._next]

    async def _shares_messages(self, subscription: Subscription) -> bool:
        if self._group.options.share == "messages":
            return True
        topic = subscription.topic
        return subscription.source is None and await is_popped(self._group, topic, topic in self._next)

    async def finish_rebalance(self, held: Collection[MessageQueue]) -> None:
        """Lease messages of the topics whose queues the rebalance has not divided."""
        await super().finish_rebalance(held)
        if self._shared != self._next:
            self._shared.clear()
            self._shared.update(self._next)
            self._restart()

    def start(self) -> None:
        super().start()
        self._renewals.start()

    def suspend(self) -> None:
        """Lease no messages until resume(). Messages of a request in progress are given back."""
        self._suspended = True
        self._restart()

    def resume(self) -> None:
        self._suspended = False
        self._restart()

    def _restart(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        if self._shared and not self._suspended:
            task = self._tasks.start(self._receive(), name=f"cometmq-lease-{self._group.name}")
            self._receiving = task
            again_if_cancelled(task, lambda: self._cancelled(task))

    def _cancelled(self, task: asyncio.Task[None]) -> None:
        """Receive again if other code has cancelled the task."""
        if task is self._receiving:
            self._restart()

    async def close(self) -> None:
        """Give all leased messages back, whether or not their listener call has begun."""
        self.suspend()
        await self._renewals.stop()
        await self._tasks.finish()
        await self._receiver.drain()
        await self._leases.give_back([message for batch in self._held for message in batch.messages])
        self._held.clear()
        await self._receiver.close()
        await super().close()

    # -- receiving

    def _wanted(self) -> int:
        """Return the number of messages to lease now. It is 0 until a request is worthwhile."""
        options, calls = self._group.options, self._user.concurrency
        if options.orderly:  # a second message of the response could be of the same queue as the first
            return int(self._held_count < (options.topic_max_count or calls))
        limit = options.topic_max_count or 2 * calls * options.consume_batch_max_size
        free = limit - self._held_count
        return min(free, MAX_MESSAGES) if free >= min(MAX_MESSAGES, (limit + 1) // 2) else 0

    async def _receive(self) -> None:
        options, loop = self._group.options, asyncio.get_running_loop()
        while True:
            count = self._wanted()
            if not count:
                self._room.clear()
                await self._room.wait()
                continue
            began = loop.time()
            try:
                self._take(await self._receiver.receive(count, options.invisible_s, _WAIT_S), began)
            except CometError:  # the receiver has logged it, and health() reports it
                await asyncio.sleep(options.pull_error_delay_s)
            except Exception:
                log.exception("group %s could not lease messages", self._group.name)
                await asyncio.sleep(options.pull_error_delay_s)

    def _take(self, found: list[MessageExt], began: float) -> None:
        """Divide the messages of a response into batches of one queue; `began` is the request's time."""
        options, now = self._group.options, asyncio.get_running_loop().time()
        wanted = kept(options.filter_hooks, found)
        if len(wanted) < len(found):
            chosen = {id(message) for message in wanted}
            rejected = [message for message in found if id(message) not in chosen]
            self._tasks.start(self._reject(rejected))
        batches: list[Batch] = []
        for (queue, refused), same in groupby(wanted, lambda each: (each.queue, each.sys_flag & COMPRESSED)):
            messages = list(same)
            leased = LeasedQueue(queue, 0, now, stats=self._group.stats.of(queue.topic))
            leased.stats.pulled(len(messages), now - began)
            size = 1 if refused else options.consume_batch_max_size
            for at in range(0, len(messages), size):
                batch = Batch(leased, messages[at : at + size], 0)
                if refused:
                    what = f"body of message {messages[at].msg_id}"
                    batch.refusal = BodyTooLarge(what, options.max_body, "PushOptions.max_body")
                batches.append(batch)
        self._held.update((batch, asyncio.Lock()) for batch in batches)
        self._held_count += len(wanted)
        self._user.consume(batches)

    async def _reject(self, messages: list[MessageExt]) -> None:
        """Acknowledge messages that the user's filter hooks have rejected."""
        try:
            await self._leases.acknowledge(messages)
        except CometError as error:
            log.warning("rejected messages of group %s are delivered again: %s", self._group.name, error)

    @property
    def problems(self) -> list[str]:
        """A sentence about each broker from which no messages can be leased."""
        found = sorted(self._receiver.problems.items())
        return [f"{topic}@{broker}: {text}" for (topic, broker), text in found if topic in self._shared]

    # -- queues

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues of the topics from which messages are leased. All members share them."""
        routes = map(self._group.instance.routes.get, self._shared)
        return [queue for route in routes if route is not None for queue in route.read_queues]

    async def done_offset(self, queue: MessageQueue) -> int:
        """Return the offset below which the group has consumed all messages of a shared queue."""
        group = self._group
        stored = await group.offsets.stored(queue)
        return await start_offset(group.instance, queue, stored, group.options.consume_from_where, 0)

    # -- leased batches

    def begin(self, batch: Batch) -> Any:
        if not isinstance(batch.queue, LeasedQueue):
            return super().begin(batch)
        if batch not in self._held:
            return None
        context = OrderlyContext if self._group.options.orderly else ConsumeContext
        return context(batch.queue.message_queue)

    async def acknowledge(self, batch: Batch, status: Any, context: Any) -> None:
        """Acknowledge the messages of a batch, or give them back. Raises CometError if a request fails.

        The message is then delivered again when its lease ends.
        """
        if not isinstance(batch.queue, LeasedQueue):
            await super().acknowledge(batch, status, context)
            return
        if batch.queue.dropped or batch not in self._held:
            return  # close() gives the batch back, or the batch was overdue and has been given back
        options = self._group.options
        if not options.orderly:
            failed, level = failed_messages(batch.messages, status, context)
            await self._settle(batch, failed, level)
            return
        failed = [] if status in self.handled else batch.messages
        pause_s = suspension_s(context.suspend_current_queue_s, options.suspend_current_queue_s)
        try:
            await self._settle(batch, failed, delay_s=pause_s)
        finally:  # brokers do not announce that a queue has become free
            asyncio.get_running_loop().call_later(pause_s if failed else 0.0, self._receiver.nudge)

    def acknowledge_soon(self, batch: Batch, status: Any, context: Any) -> bool:
        """Let the next request acknowledge a batch, so that the worker can call the listener meanwhile."""
        lock = self._held.get(batch)
        # A worker waits for its request if the leases of the batch are being renewed, if some messages have
        # failed, or if as many batches as a member leases wait for the next request.
        if self._group.options.orderly or batch.queue.dropped or lock is None or lock.locked():
            return False
        if failed_messages(batch.messages, status, context)[0]:
            return False
        messages = batch.messages
        if len(self._acks.get(messages[0].broker_name, ())) >= 2 * self._user.concurrency:
            return False
        self._let_go(batch)
        self._enqueue(messages, None)
        return True

    async def _settle(
        self, batch: Batch, failed: Sequence[MessageExt], level: int = 0, *, delay_s: float | None = None
    ) -> None:
        """Return the last messages of a batch, which have `failed`, to the broker. Acknowledge the others."""
        lock = self._let_go(batch)
        done = batch.messages[: len(batch.messages) - len(failed)]
        async with lock:
            if failed:
                again = (self._again(message, level, delay_s) for message in failed)
                await all_of(self._acknowledge(done), *again)
            else:
                await self._acknowledge(done)

    async def _acknowledge(self, messages: Sequence[MessageExt]) -> None:
        """Acknowledge messages of one broker, in one request with those of other calls if there are any."""
        if not messages:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enqueue(messages, done)
        await done

    def _enqueue(self, messages: Sequence[MessageExt], done: asyncio.Future[None] | None) -> None:
        broker = messages[0].broker_name
        if broker not in self._acks:
            self._acks[broker] = []
            self._tasks.start(self._send_acks(broker), name=f"cometmq-ack-{broker}")
        self._acks[broker].append((messages, done))

    async def _send_acks(self, broker: str) -> None:
        while waiting := self._acks[broker]:
            self._acks[broker] = []
            outcome: Exception | None = None
            try:
                await self._leases.acknowledge([each for messages, _ in waiting for each in messages])
            except Exception as error:
                outcome = error
            for messages, done in waiting:
                if done is None:
                    if outcome is not None:
                        queue = messages[0].queue
                        log.warning(
                            "could not acknowledge messages of %s; they are delivered again: %s",
                            queue, outcome,
                        )  # fmt: skip
                elif not done.done():
                    done.set_result(None) if outcome is None else done.set_exception(outcome)
        del self._acks[broker]

    async def _again(self, message: MessageExt, level: int, delay_s: float | None) -> None:
        """Request a redelivery of a message after a delay, or move it to the dead-letter queue."""
        most = self._group.options.max_reconsume_times
        times = message.reconsume_times
        if level < 0 or times >= (self._retries.max_times if most is None else most):
            await self._leases.dead_letter(message)
            return
        if delay_s is None:
            last, policy = len(DELAY_LEVELS_S), self._retries.policy
            delay_s = DELAY_LEVELS_S[min(level, last) - 1] if level else policy.delay_ms(times) / 1000
        await self._leases.change(message, delay_s)

    def _let_go(self, batch: Batch) -> asyncio.Lock:
        batch.done = True
        lock = self._held.pop(batch)
        self._held_count -= len(batch.messages)
        self._room.set()
        return lock

    async def _renew(self, held: tuple[Batch, asyncio.Lock]) -> None:
        batch, lock = held
        async with lock:
            for message in batch.messages:
                if batch not in self._held:
                    return
                try:
                    await self._leases.change(message, self._group.options.invisible_s)
                except CometError as error:
                    log.warning("the lease of message %s cannot be renewed: %s", message.msg_id, error)
                    ended = isinstance(error, BrokerError) and error.code == ResponseCode.NO_MESSAGE
                    if ended and not batch.started_at and batch in self._held:
                        self._let_go(batch)

    async def handle_overdue(self, queues: Iterable[ProcessQueue], timeout_s: float) -> None:
        """Give back messages whose call exceeds `timeout_s`. In an ordered group the queue waits instead."""
        await super().handle_overdue(queues, timeout_s)
        before = asyncio.get_running_loop().time() - timeout_s
        for batch in [each for each in self._held if 0 < each.started_at < before]:
            if batch not in self._held:
                continue  # its call has ended meanwhile
            log.warning(
                "listener call for %s from offset %d has run for more than %g s",
                batch.queue.message_queue, batch.first_offset, timeout_s,
            )  # fmt: skip
            if not self._group.options.orderly:
                try:
                    await self._settle(batch, batch.messages, OVERDUE_LEVEL)
                except CometError as error:
                    log.warning("its messages are delivered again when their leases end: %s", error)

    def postpone(self, context: Any, delay_level: int) -> Any:
        if not self._group.options.orderly:
            return super().postpone(context, delay_level)
        if delay_level:
            raise ConfigError("delay_level", str(delay_level), "0 in an orderly stream, whose queue waits")
        return self.later

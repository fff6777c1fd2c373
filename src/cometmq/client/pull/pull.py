"""The pull consumer: the caller decides which messages are pulled and when an offset counts as consumed.

    async with PullConsumer("group") as consumer:
        for queue in await consumer.fetch_queues("TopicTest"):
            result = await consumer.pull(queue, await consumer.min_offset(queue))

or, with messages pulled in advance and stored offsets:

        await consumer.assign_topic("TopicTest")
        async for message in consumer:
            ...

or, sharing the queues with the other members of the group:

        await consumer.subscribe("TopicTest", "TagA || TagB")
        messages = await consumer.poll()
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.cluster.workers import is_async
from cometmq.client.consumer.retry_topic import RetryTopic, SendsBack
from cometmq.client.group.group import Group, instance_options
from cometmq.client.group.health import ConsumerHealth, problems_of
from cometmq.client.group.offsets import OffsetStore
from cometmq.client.group.options import PullOptions
from cometmq.client.group.subscription import Expression, Subscription, as_subscription
from cometmq.client.group.watching import QueuesChanged, QueueWatch, Watchdog, lag_of
from cometmq.client.pull.polling import Polling, PullSession
from cometmq.client.pull.schedule import NEXT_DELAY_S, Schedule
from cometmq.client.pull.single_pulls import SinglePulls
from cometmq.errors import ClientStateError, ConfigError, shown
from cometmq.message import MessageExt, MessageQueue, PullResult, check_topic_name
from cometmq.periodic import Periodic

_CALLING: ContextVar[PullConsumer | None] = ContextVar("_CALLING", default=None)
"""The pull consumer that called the async user function in which this code runs, or its tasks."""


@dataclass(slots=True)
class PullTurn:
    """The second argument of a scheduled function.

    Attributes:
        consumer: The pull consumer.
        next_delay_s: The delay between this call and the next one in seconds, 0 or more. Any other value
            counts as a failure of the call.
    """

    consumer: PullConsumer
    next_delay_s: float = NEXT_DELAY_S


PullTask = Callable[[MessageQueue, PullTurn], Awaitable[None]]
"""An async function that is called repeatedly, after an exception a second later."""


@dataclass(slots=True)
class _Parts:
    """The parts of a pull consumer that was started."""

    group: Group
    polling: Polling
    retry_topic: RetryTopic
    queue_watch: QueueWatch
    watchdog: Watchdog
    jobs: tuple[Periodic, Periodic]


class PullConsumer(SinglePulls, SendsBack):
    """A pull consumer: single pulls, polling of assigned queues, or membership of a group.

    Until it subscribes, the consumer does not join the group: the caller chooses the queues, no queues are
    revoked from other consumers, and brokers do not list the consumer as a member.

    Use it with `async with`, or call start() and stop(). start() sends no request to any server. A consumer
    belongs to the event loop in which it was started.

    Args:
        group: The name of the consumer group.
        namesrv: The name servers, as in Producer.
        options: The settings of the consumer. Default: PullOptions().
        client: A client instance to share. Default: the consumer creates its own.
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
        options: PullOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self.options = options if options is not None else PullOptions()
        own_options = instance_options(self.options, client_options)
        super().__init__("pull consumer", group, namesrv, client, own_options)
        self._expressions: dict[MessageQueue, Subscription] = {}
        """The filter expressions of the queues that the caller has assigned."""
        self._parts: _Parts | None = None
        self._session: PullSession | None = None
        self._stop_for_call: asyncio.Task[None] | None = None

    # -- life

    async def stop(self) -> None:
        """Stop pulling, store the offsets of consumed messages and leave the group.

        Repeated calls are allowed. A scheduled function, or an async function that was passed to
        `watch_queues`, may also call stop(): the call then returns immediately. The consumer waits until the
        scheduled function has returned, but cancels the function of `watch_queues` at its next await.
        """
        if _CALLING.get() is not self:
            await super().stop()
        elif self._stop_for_call is None:
            self._stop_for_call = asyncio.create_task(super().stop())

    async def _begin(self) -> None:
        client, options, loop = await self._start_client(), self.options, asyncio.get_running_loop()
        group = Group(self.group, client, options)
        schedule, commits = Schedule(group.offsets, self._new_turn), options.auto_commit
        polling = Polling(group, schedule, self._pull_assigned, self._not_running, auto_commit=commits)
        retry_topic = RetryTopic(client, self.group, options.max_reconsume_times)
        watchdog = Watchdog(self._name, options.stall_after_s, lambda _: polling.health())
        name = f"offsets of group {self.group}"
        persisting = Periodic(loop, options.persist_interval_s, group.offsets.try_persist, name=name)
        jobs, queue_watch = (persisting, watchdog.periodic()), QueueWatch(client, self._name)
        self._parts = _Parts(group, polling, retry_topic, queue_watch, watchdog, jobs)
        for job in jobs:
            job.start()

    def _new_turn(self) -> PullTurn:
        _CALLING.set(self)
        return PullTurn(self)

    async def _end(self, *, drain: bool) -> None:
        parts = self._parts
        try:
            if parts is not None:
                for job in parts.jobs:
                    await job.stop(cancel=True)
                await parts.queue_watch.stop()
                if self._session is not None:
                    await self._session.rebalance.stop()
                await parts.polling.close()
            if drain:
                await self._store.try_persist()
                await self.client.unregister_consumer(self.group)
        finally:
            if parts is not None:
                await parts.retry_topic.close()
                parts.group.close()
            await self._close_client()

    def _running_parts(self) -> _Parts:
        self._running()
        assert self._parts is not None
        return self._parts

    @property
    def _group(self) -> Group:
        return self._running_parts().group

    @property
    def _polling(self) -> Polling:
        return self._running_parts().polling

    @property
    def _store(self) -> OffsetStore:
        return self._group.offsets

    # -- queues

    async def watch_queues(self, topic: str, function: QueuesChanged | None) -> None:
        """Call a function when the queues of a topic have changed, for use with `assign`.

        The routes are refreshed every `ClientOptions.route_interval_s` seconds. A topic without a route
        causes no call.

        Args:
            topic: The topic. It has at most one function.
            function: Called with the topic and its queues. An async function runs on the event loop, a plain
                one in a thread. An exception that the function raises is logged. None: stop watching the
                topic.

        Raises:
            MessageIllegal: The name of the topic is illegal.
        """
        watch = self._running_parts().queue_watch
        check_topic_name(topic)
        if function is None:
            watch.remove(topic)
        elif is_async(function):
            await watch.add(topic, self._calling(function))
        else:
            await watch.add(topic, function)

    def _calling(self, function: QueuesChanged) -> QueuesChanged:
        async def call(topic: str, queues: tuple[MessageQueue, ...]) -> None:
            _CALLING.set(self)
            await function(topic, queues)  # type: ignore[misc] # a coroutine

        return call

    # -- reading ahead

    async def assign(self, queues: Iterable[MessageQueue], *, expression: Expression = "*") -> None:
        """Replace the set of assigned queues, from which `poll` and iteration return messages.

        A new queue starts at its committed offset, or at `PullOptions.consume_from_where` if the group has
        none.

        Args:
            queues: All queues to read. If it is empty, the consumer may subscribe afterwards.
            expression: The filter of these queues: tags, `sql92(...)` or `filter_class(...)`.

        Raises:
            ClientStateError: The consumer has subscribed to a topic.
            BrokerError: A broker refused an SQL92 expression. The assignment is unchanged.
        """
        polling = self._polling
        if self._session is not None:
            raise ClientStateError(
                f"{self._name} has a subscription, so its queues are assigned by the rebalance"
            )
        wanted = set(queues)
        for queue in sorted(wanted):
            await self._group.check_expression_at(queue, as_subscription(queue.topic, expression))
        await polling.revoke([queue for queue in polling.queues if queue not in wanted])
        self._expressions = {queue: as_subscription(queue.topic, expression) for queue in wanted}
        for queue in sorted(wanted.difference(polling.queues)):
            await polling.assign(queue)

    async def assign_topic(self, topic: str, *, expression: Expression = "*") -> None:
        """Assign all current queues of a topic, as `assign` does.

        Args:
            topic: The topic.
            expression: The filter of the queues: tags, `sql92(...)` or `filter_class(...)`.

        Raises:
            NoRouteError: The name servers have no route of the topic, or no name server can be reached.
            CometError: The assignment failed. The error is one of those that `assign` raises.
        """
        await self.assign(await self.fetch_queues(topic), expression=expression)

    async def subscribe(self, topic: str, expression: Expression | None = "*") -> None:
        """Join the group, whose members share the queues of its topics, and read this member's queues.

        Further calls add a topic or change an expression. A topic without a route is not an error: its queues
        are assigned once it exists.

        Args:
            topic: The topic.
            expression: Tags (`"TagA || TagB"`), `sql92(...)` or `filter_class(...)`. `"*"` and None: all
                messages.

        Raises:
            ClientStateError: Queues are assigned with `assign`.
            NameServersUnreachable: No name server answers. This is a NoRouteError.
            BrokerError: A broker refused an SQL92 expression. The subscriptions are unchanged.
        """
        group = self._group
        if self._expressions:
            raise ClientStateError(f"{self._name} has manually assigned queues and cannot subscribe")
        subscription = as_subscription(topic, expression)
        failure = (await group.instance.refresh_routes([topic])).get(topic)
        if isinstance(failure, NameServersUnreachable):
            raise failure
        await group.check_expression(subscription)
        if self._session is None:
            self._session = PullSession(group, self._polling)
        group.subscriptions[topic] = subscription.after(group.subscriptions.get(topic))
        await self._session.join()

    async def schedule(self, topic: str, function: PullTask, expression: Expression | None = "*") -> None:
        """Join the group for a topic and call an async function for each assigned queue, again and again.

        The function itself pulls messages and updates the offset. At most 20 calls run concurrently, at most
        one of them per queue.

        Args:
            topic: The topic.
            function: Called with the queue and a PullTurn. The next call follows `turn.next_delay_s` seconds
                (0.2 by default) after the end of a call, or one second after an exception.
            expression: Tags (`"TagA || TagB"`), `sql92(...)` or `filter_class(...)`.

        Raises:
            ConfigError: The function is not async.
            ClientStateError: The topic is subscribed with `subscribe`, or queues are assigned with `assign`.
            CometError: The subscription failed. The error is one of those that `subscribe` raises.
        """
        if not is_async(function):
            raise ConfigError("function", shown(function), "an async function of (queue, turn)")
        functions = self._polling.schedule.functions
        if topic in self._group.subscriptions and topic not in functions:
            raise ClientStateError(f"{self._name} has subscribed to {topic} and prefetches its messages")
        before = functions.get(topic)
        functions[topic] = function
        try:
            await self.subscribe(topic, expression)
        except BaseException:
            if before is None and topic not in self._group.subscriptions:
                del functions[topic]
            raise

    async def unsubscribe(self, topic: str) -> None:
        """Remove a topic's subscription or scheduled function, and release the topic's queues."""
        self._group.subscriptions.pop(topic, None)
        if self._session is not None:
            await self._session.join()
        self._polling.schedule.functions.pop(topic, None)

    async def rebalance(self) -> None:
        """Rebalance the queues now instead of at the next interval. Does nothing without a subscription."""
        self._running()
        if self._session is not None:
            await self._session.rebalance.run()

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues that this consumer reads now, sorted. `assign` or the rebalance has assigned them."""
        return tuple(sorted(self._parts.polling.queues)) if self._parts is not None else ()

    def health(self) -> ConsumerHealth:
        """Return the progress of each queue and the problems of this consumer, each as a sentence.

        Returns:
            The health. It can also be read before the start and after a stop.
        """
        if self._parts is None or self._state != "running":
            return ConsumerHealth(state=self._state, group=self.group)
        queues, session = self._parts.polling.health(), self._session
        shares = session.rebalance.problems if session is not None else {}
        problems = (
            *problems_of(shares, queues, self.client.heartbeat_problems),
            *(session.subscription_problems if session is not None else ()),
        )
        return ConsumerHealth(
            state=self._state,
            group=self.group,
            client_id=self.client.client_id,
            queues=queues,
            problems=(*problems, *self._parts.watchdog.sentences()),
        )

    async def lag(self) -> dict[MessageQueue, int]:
        """Return the lag of each assigned queue: the number of messages that are not consumed yet.

        The count begins at the committed offset or, without a committed offset, at the offset at which
        reading began. It includes the messages of the last poll and, without `auto_commit`, all messages that
        were not committed.

        Returns:
            The number of messages, by queue.

        Raises:
            CometError: A broker cannot be reached or refused the request.
        """
        self._running()
        done = {each.queue: each.done_offset for each in self.health().queues}
        return await lag_of(done, self.max_offset, self._done_offset)

    async def _done_offset(self, queue: MessageQueue) -> int:
        committed = await self.committed(queue)
        return await self.min_offset(queue) if committed is None else committed

    @property
    def problems(self) -> dict[MessageQueue, str]:
        """The error of the last pull or scheduled call, by assigned queue. Both are repeated."""
        return self._parts.polling.problems if self._parts is not None else {}

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue reading an assigned queue at an offset.

        Args:
            queue: The queue.
            offset: The offset of the next message, from min_offset to max_offset of the queue.

        Raises:
            ClientStateError: The queue is not assigned.
            ValueError: The offset is out of range.
            CometError: The broker cannot be reached or refused the request.
        """
        if queue not in self._polling.queues:
            raise ClientStateError(f"{queue} is not assigned")
        low, high = await self.min_offset(queue), await self.max_offset(queue)
        if not low <= offset <= high:
            raise ValueError(f"offset {offset} of {queue} is outside {low} to {high}")
        if queue not in self._polling.queues:
            raise ClientStateError(f"{queue} is no longer assigned")
        await self._polling.move(queue, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue reading an assigned queue at its first stored message. Raises the errors of `seek`."""
        await self.seek(queue, await self.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue reading an assigned queue after its last message. Raises the errors of `seek`."""
        await self.seek(queue, await self.max_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, timestamp_ms: int) -> None:
        """Continue reading an assigned queue at a store time, see `offset_by_time`.

        Raises the errors of `seek`.

        Args:
            queue: The queue.
            timestamp_ms: The store time in milliseconds since 1970.
        """
        await self.seek(queue, await self.offset_by_time(queue, timestamp_ms))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop pulling from assigned queues until `resume`.

        Messages that were pulled before are still returned.

        Args:
            queues: The queues. Queues that are not assigned are ignored.
        """
        for queue in queues:
            self._polling.pause(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Start pulling from paused queues again.

        Args:
            queues: The queues. Queues that are not assigned are ignored.
        """
        for queue in queues:
            self._polling.resume(queue)

    async def poll(self, timeout_s: float | None = 5.0) -> list[MessageExt]:
        """Return the next messages of one assigned queue.

        With `PullOptions.auto_commit`, this call makes the messages of the previous poll count as consumed.
        The offset after them is stored at the end of the current `persist_interval_s`.

        Args:
            timeout_s: The maximum wait for messages, in seconds. None: no limit.

        Returns:
            The messages, or an empty list if none arrived in time.

        Raises:
            ClientStateError: The consumer is not running.
        """
        return await self._polling.poll(timeout_s)

    def __aiter__(self) -> AsyncIterator[MessageExt]:
        """Yield messages without end. Each counts as consumed when the caller requests the next one."""
        return self._polling.each()

    def _iterate_in_thread(
        self, run: Callable[[Coroutine[Any, Any, list[MessageExt]]], list[MessageExt]]
    ) -> Iterator[MessageExt]:
        """Return the iterator over messages for SyncPullConsumer, see Polling.each_in_thread."""

        def later(function: Callable[[], None]) -> None:
            if self._state == "running" and self._loop is not None:
                self._loop.call_soon_threadsafe(function)

        def poll() -> Coroutine[Any, Any, list[MessageExt]]:
            return self.poll()

        if self._parts is None:
            run(poll())  # this call raises ClientStateError, because the consumer was not started
        assert self._parts is not None
        return self._parts.polling.each_in_thread(poll, run, later)

    async def _pull_assigned(self, queue: MessageQueue, offset: int) -> PullResult:
        options = self.options
        subscription = self._expressions.get(queue) or self._group.subscriptions.get(queue.topic)
        if subscription is None:
            raise ClientStateError(f"{queue} is no longer subscribed")
        return await self._pull(
            queue, offset, None, subscription, options.broker_suspend_s, options.suspend_timeout_s
        )

    # -- offsets of the group

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the consumer offset of the group for a queue.

        Returns:
            The offset that this consumer has set, even if it is not stored yet. Otherwise the offset that the
                broker has stored, None if it has stored none.

        Raises:
            CometError: The broker cannot be reached or refused the request.
        """
        return await self._store.committed(queue)

    def update_offset(self, queue: MessageQueue, offset: int) -> None:
        """Set the consumer offset of the group for a queue.

        The new offset may be lower than the present offset.

        The offset is stored every `PullOptions.persist_interval_s` seconds, by commit() and by stop().

        Args:
            queue: The queue.
            offset: The offset of the next message to consume.

        Raises:
            ValueError: The offset is not a whole number of 0 or more.
        """
        _check_offsets({queue: offset})
        self._store.update(queue, offset, increase_only=False)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store consumer offsets now.

        Args:
            offsets: The offset of the next message to consume, by queue. None: the offsets after all messages
                that were returned, including those of the last poll.

        Raises:
            ValueError: An offset is not a whole number of 0 or more. No offset is stored.
            CometError: An offset was not stored.
        """
        _check_offsets(offsets or {})
        await self._polling.commit(offsets)

    def _retries(self) -> RetryTopic:
        return self._running_parts().retry_topic


def _check_offsets(offsets: Mapping[MessageQueue, int]) -> None:
    for queue, offset in offsets.items():
        if not isinstance(offset, int) or not 0 <= offset < 2**63:
            raise ValueError(
                f"{offset!r} is not a valid offset of {queue}: it must be a whole number, 0 or more"
            )

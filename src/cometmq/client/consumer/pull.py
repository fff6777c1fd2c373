"""The pull consumer: the caller decides what is read, from where, and when an offset counts as consumed.

    async with PullConsumer("group") as consumer:
        for queue in await consumer.fetch_queues("TopicTest"):
            result = await consumer.pull(queue, await consumer.min_offset(queue))

or, reading ahead and keeping offsets:

        await consumer.assign_topic("TopicTest")
        async for message in consumer:
            ...

or, sharing the queues with the other members of the group:

        await consumer.subscribe("TopicTest", "TagA || TagB")
        messages = await consumer.poll()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import LookingClient
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.requests import pull_request
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.cluster.workers import is_async
from cometmq.client.consumer.polling import Polling
from cometmq.client.consumer.pull_session import PullSession
from cometmq.client.consumer.retry_topic import RetryTopic, check_delay_level
from cometmq.client.consumer.schedule import PullTask, PullTurn, Schedule
from cometmq.client.consumer.watching import QueuesChanged, QueueWatch, Watchdog, lag_of
from cometmq.client.group.group import Group, instance_options
from cometmq.client.group.health import ConsumerHealth, QueueHealth, problems_of
from cometmq.client.group.offsets import OffsetStore
from cometmq.client.group.options import PullOptions
from cometmq.client.group.subscription import Expression, Subscription, as_subscription, sql92
from cometmq.errors import ClientStateError, ConfigError, shown
from cometmq.message import MessageExt, MessageQueue, PullResult
from cometmq.periodic import Periodic
from cometmq.protocol.codes import check_group_name, check_topic_name
from cometmq.protocol.frame import Frame

__all__ = ["PullConsumer"]

_MOST_CHECKED = 1_000
_CALLING: ContextVar[PullConsumer | None] = ContextVar("_CALLING", default=None)
"""Whose async function runs in this task, or began it."""


class PullConsumer(LookingClient):
    """Reads as `group`. `client`: an instance to share; else the consumer has its own towards `namesrv`.

    Until it subscribes it does not join the group: whoever calls chooses the queues, none are taken from
    other consumers, and brokers do not list it.

    A start asks nothing of any server. A stop ends the reading ahead and stores the offsets of what was
    consumed.
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
        check_group_name(group)
        self.options = options if options is not None else PullOptions()
        super().__init__(
            f"pull consumer of group {group}", namesrv, client, instance_options(self.options, client_options)
        )
        self.group = group
        self._expressions: dict[MessageQueue, Subscription] = {}
        """Of the queues that the caller has assigned."""
        self._checked: set[tuple[str, str, str]] = set()
        """Broker, topic and expression of the SQL92 filters that brokers have compiled."""
        self._member: Group | None = None
        self._polled: Polling | None = None
        self._session: PullSession | None = None
        self._retry_topic: RetryTopic | None = None
        self._persisting: Periodic | None = None
        self._watchdog: Watchdog | None = None
        self._watching: Periodic | None = None
        self._queue_watch: QueueWatch | None = None
        self._stop_for_call: asyncio.Task[None] | None = None

    # -- life

    async def stop(self) -> None:
        """End the reading, store the offsets, leave the group. May be called again.

        Called by a scheduled function, or an async one that watches queues, it returns at once, and the
        consumer stops when the function has returned (one that watches is cancelled where it waits).
        """
        if _CALLING.get() is not self:
            await super().stop()
        elif self._stop_for_call is None:
            self._stop_for_call = asyncio.create_task(super().stop())

    async def _begin(self) -> None:
        client = await self._start_client()
        self._member = group = Group(self.group, client, self.options)
        schedule, commits = Schedule(group.offsets, self._new_turn), self.options.auto_commit
        self._polled = Polling(group, schedule, self._pull_assigned, self._not_running, auto_commit=commits)
        self._retry_topic = RetryTopic(client, self.group, self.options.max_reconsume_times)
        self._persisting = Periodic(
            asyncio.get_running_loop(),
            self.options.persist_interval_s,
            group.offsets.try_persist,
            name=f"offsets of group {self.group}",
        )
        self._persisting.start()
        self._watchdog = watchdog = Watchdog(self._name, self.options.stall_after_s, self._queue_health)
        self._queue_watch = QueueWatch(client, self._name)
        self._watching = watchdog.periodic()
        self._watching.start()

    def _new_turn(self) -> PullTurn:
        _CALLING.set(self)
        return PullTurn(self)

    def _queue_health(self, now: float) -> Iterable[QueueHealth]:
        del now
        return () if self._polled is None else self._polled.health()

    async def _end(self, *, drain: bool) -> None:
        try:
            for job in (self._persisting, self._watching):
                if job is not None:
                    job.cancel()
                    await job.stop()
            if self._queue_watch is not None:
                await self._queue_watch.stop()
            if self._session is not None:
                await self._session.leave()
            if self._polled is not None:
                await self._polled.close()
            if drain:
                await self._store.try_persist()
                await self.client.unregister_consumer(self.group)
        finally:
            if self._retry_topic is not None:
                await self._retry_topic.close()
            if self._member is not None:
                self._member.close()
            await self._close_client()

    @property
    def _group(self) -> Group:
        self._running()
        assert self._member is not None
        return self._member

    @property
    def _polling(self) -> Polling:
        self._running()
        assert self._polled is not None
        return self._polled

    @property
    def _store(self) -> OffsetStore:
        return self._group.offsets

    # -- queues

    async def fetch_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic. Raises NoRouteError."""
        return list(await self._running().read_queues(topic))

    async def watch_queues(self, topic: str, function: QueuesChanged | None) -> None:
        """Have a function called with a topic and its queues when these have changed, for a consumer that
        assigns queues by hand; one function for a topic, None for none any more.

        Routes are asked for every `ClientOptions.route_interval_s`. A function may be async, else it runs in
        a thread; what it raises is logged. A topic that nobody knows (any more) changes nothing.
        """
        self._running()
        assert self._queue_watch is not None
        check_topic_name(topic)
        if function is None:
            self._queue_watch.remove(topic)
        elif is_async(function):
            await self._queue_watch.add(topic, self._calling(function))
        else:
            await self._queue_watch.add(topic, function)

    def _calling(self, function: QueuesChanged) -> QueuesChanged:
        async def call(topic: str, queues: tuple[MessageQueue, ...]) -> None:
            _CALLING.set(self)
            await function(topic, queues)  # type: ignore[misc] # a coroutine

        return call

    # -- single pulls

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int | None = None,
        expression: Expression = "*",
        timeout_s: float | None = None,
    ) -> PullResult:
        """At most `max_count` messages (brokers give 32) from `offset` on; waits for nothing."""
        subscription = as_subscription(queue.topic, expression)
        limit = self.options.pull_timeout_s if timeout_s is None else timeout_s
        return await self._pull(queue, offset, max_count, subscription, 0.0, limit)

    async def pull_blocking(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int | None = None,
        expression: Expression = "*",
    ) -> PullResult:
        """As pull, but the broker waits up to `broker_suspend_s` for a message to come."""
        subscription = as_subscription(queue.topic, expression)
        options = self.options
        return await self._pull(
            queue, offset, max_count, subscription, options.broker_suspend_s, options.suspend_timeout_s
        )

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int | None,
        subscription: Subscription,
        suspend_s: float,
        timeout_s: float,
    ) -> PullResult:
        if offset < 0 or (max_count is not None and max_count <= 0):
            raise ValueError(
                f"offset {offset} and max_count {max_count}: the one must be 0 or more, the other positive"
            )

        async def request(target: ReadTarget) -> Frame:
            await self._check(target.addr, subscription)
            return pull_request(
                self.group,
                queue,
                offset,
                self.options.pull_batch_size if max_count is None else max_count,
                subscription.expression,
                expression_type=subscription.expression_type,
                sub_version=subscription.version,
                suspend_s=suspend_s,
                class_filter=subscription.source is not None,
            )

        self._running()
        result = await self._group.pulls.pull(queue, subscription, request, timeout_s, self.options.max_body)
        if not subscription.tags:
            return result
        return msgspec.structs.replace(result, messages=subscription.filter(result.messages))

    async def _check(self, addr: str, subscription: Subscription) -> None:
        """Ask a broker once about each SQL92 expression: Apache's gives every message to a pull with one that
        it cannot compile. Raises BrokerError with its words."""
        asked = addr, subscription.topic, subscription.expression
        if subscription.expression_type == "TAG" or asked in self._checked:
            return
        client = self._running()
        await client.brokers.check_client_config(addr, client.client_id, self.group, subscription.data())
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(asked)

    async def _check_at(self, queue: MessageQueue, subscription: Subscription) -> None:
        """Check an expression at the broker that serves reads of a queue."""
        if subscription.expression_type != "TAG":
            reads = self._running().reads
            await reads.run(queue, lambda target: self._check(target.addr, subscription))

    # -- reading ahead

    async def assign(self, queues: Iterable[MessageQueue], *, expression: Expression = "*") -> None:
        """Read exactly these queues from now on; a new one starts at its committed offset or as
        `consume_from_where` says. Without any the consumer may subscribe again. Raises BrokerError when a
        broker refuses an SQL92 expression; then nothing has changed."""
        polling = self._polling
        if self._session is not None:
            raise ClientStateError(f"{self._name} has subscribed: the rebalance assigns its queues")
        wanted = set(queues)
        for queue in sorted(wanted) if isinstance(expression, sql92) else ():
            await self._check_at(queue, as_subscription(queue.topic, expression))
        await polling.release([queue for queue in polling.queues if queue not in wanted])
        self._expressions = {queue: as_subscription(queue.topic, expression) for queue in wanted}
        for queue in sorted(wanted.difference(polling.queues)):
            await polling.take_up(queue)

    async def assign_topic(self, topic: str, *, expression: Expression = "*") -> None:
        """Read all queues that the topic has now."""
        await self.assign(await self.fetch_queues(topic), expression=expression)

    async def subscribe(self, topic: str, expression: Expression | None = "*") -> None:
        """Join the group, whose members share the queues of its topics, and read those that fall to this one.

        May be called again, for another topic or another expression. A topic without a route is taken up when
        it appears. Raises ClientStateError after assign(), NameServersUnreachable (a NoRouteError) when no
        name server answers, BrokerError when a broker refuses an SQL92 expression; then nothing has changed.
        """
        group = self._group
        if self._expressions:
            raise ClientStateError(f"{self._name} has queues assigned by hand: it cannot subscribe too")
        subscription = as_subscription(topic, expression)
        failure = (await group.instance.refresh_routes([topic])).get(topic)
        if isinstance(failure, NameServersUnreachable):
            raise failure
        route = group.instance.routes.get(topic)
        for queue in route.one_of_each_broker() if route is not None else ():
            await self._check_at(queue, subscription)
        if self._session is None:
            self._session = PullSession(group, self._polling)
        group.subscriptions[topic] = subscription.after(group.subscriptions.get(topic))
        await self._session.join()

    async def schedule(self, topic: str, function: PullTask, expression: Expression | None = "*") -> None:
        """Join the group for a topic, and call an async function for each queue that falls to this consumer,
        again and again, instead of reading ahead: it pulls and updates the offset by itself.

        At most 20 calls run at once, and one for each queue; `turn.next_delay_s` (0.2) is the wait to the
        next, after an exception a second. Raises as subscribe, and ClientStateError for a topic that is
        subscribed.
        """
        if not is_async(function):
            raise ConfigError("function", shown(function), "an async function of (queue, turn)")
        functions = self._polling.schedule.functions
        if topic in self._group.subscriptions and topic not in functions:
            raise ClientStateError(f"{self._name} has subscribed {topic}, which it reads ahead")
        before = functions.get(topic)
        functions[topic] = function
        try:
            await self.subscribe(topic, expression)
        except BaseException:
            if before is None and topic not in self._group.subscriptions:
                del functions[topic]
            raise

    async def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic up."""
        self._group.subscriptions.pop(topic, None)
        if self._session is not None:
            await self._session.join()
        self._polling.schedule.functions.pop(topic, None)

    async def rebalance(self) -> None:
        """Share out the queues now instead of at the next round or notice."""
        self._running()
        if self._session is not None:
            await self._session.rounds.run()

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues that are read: assigned by the caller, or by the rebalance of what is subscribed."""
        return tuple(sorted(self._polled.queues)) if self._polled is not None else ()

    def health(self) -> ConsumerHealth:
        """How far each queue is, and what keeps this consumer from its work, in whole sentences."""
        if self._polled is None or self._state != "running":
            return ConsumerHealth(state=self._state, group=self.group)
        queues, session = self._polled.health(), self._session
        shares = session.rounds.problems if session is not None else {}
        problems = (
            *problems_of(shares, queues, self.client.heartbeat_problems),
            *(session.agreement.problems if session is not None else ()),
        )
        return ConsumerHealth(
            state=self._state,
            group=self.group,
            client_id=self.client.client_id,
            queues=queues,
            problems=(*problems, *(() if self._watchdog is None else self._watchdog.sentences())),
        )

    async def lag(self) -> dict[MessageQueue, int]:
        """How many messages of each assigned queue are not consumed yet, as their brokers say now: from the
        offset on that committed() gives, else from where reading began. What the last poll gave out is not
        consumed, nor, without `auto_commit`, what was not committed. Raises what the first that does not
        answer says."""
        self._running()
        return await lag_of(self.health().queues, self.max_offset, self._done_offset)

    async def _done_offset(self, queue: MessageQueue) -> int:
        committed = await self.committed(queue)
        return await self.min_offset(queue) if committed is None else committed

    @property
    def problems(self) -> dict[MessageQueue, str]:
        """Assigned queues whose last pull or scheduled call failed, and why; they are tried again by
        themselves."""
        return self._polled.problems if self._polled is not None else {}

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on reading an assigned queue at `offset`. Raises ValueError outside [min, max]."""
        if queue not in self._polling.queues:
            raise ClientStateError(f"{queue} is not assigned")
        low, high = await self.min_offset(queue), await self.max_offset(queue)
        if not low <= offset <= high:
            raise ValueError(f"offset {offset} of {queue} is outside {low} to {high}")
        if queue not in self._polling.queues:
            raise ClientStateError(f"{queue} is not assigned any more")
        await self._polling.move(queue, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on reading an assigned queue at its first stored message."""
        await self.seek(queue, await self.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on reading an assigned queue behind its last message."""
        await self.seek(queue, await self.max_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, timestamp_ms: int) -> None:
        """Go on reading an assigned queue at a store time in ms (offset_by_time)."""
        await self.seek(queue, await self.offset_by_time(queue, timestamp_ms))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Read these assigned queues no further; what was read ahead is still given out. Queues that are not
        assigned are ignored, here and in `resume`."""
        for queue in queues:
            self._polling.pause(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Read paused queues again."""
        for queue in queues:
            self._polling.resume(queue)

    async def poll(self, timeout_s: float | None = 5.0) -> list[MessageExt]:
        """The next messages of one assigned queue, an empty list when none come in time (None: wait for
        ever).

        The call says that the messages of the poll before were consumed: their offset is stored with the next
        persist.
        """
        return await self._polling.poll(timeout_s)

    def __aiter__(self) -> AsyncIterator[MessageExt]:
        """Messages of the assigned queues for ever; each counts as consumed when the next is asked for."""
        return self._polling.each()

    def _iterate_in_thread(
        self, run: Callable[[Coroutine[Any, Any, list[MessageExt]]], list[MessageExt]]
    ) -> Iterator[MessageExt]:
        """The iteration of the blocking face (Polling.each_in_thread)."""

        def later(function: Callable[[], None]) -> None:
            if self._state == "running" and self._loop is not None:
                self._loop.call_soon_threadsafe(function)

        def poll() -> Coroutine[Any, Any, list[MessageExt]]:
            return self.poll()

        if self._polled is None:
            run(poll())  # raises
        assert self._polled is not None
        return self._polled.each_in_thread(poll, run, later)

    async def _pull_assigned(self, queue: MessageQueue, offset: int) -> PullResult:
        options = self.options
        subscription = self._expressions.get(queue) or self._group.subscriptions.get(queue.topic)
        if subscription is None:
            raise ClientStateError(f"{queue} is not subscribed any more")
        return await self._pull(
            queue, offset, None, subscription, options.broker_suspend_s, options.suspend_timeout_s
        )

    # -- offsets of the group

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset: as updated here, else as the broker has it; None: never stored."""
        return await self._store.committed(queue)

    def update_offset(self, queue: MessageQueue, offset: int) -> None:
        """Set the group's offset (also backwards); stored every few seconds, by commit() and by stop().
        Raises ValueError for what is no offset."""
        _check_offsets({queue: offset})
        self._store.update(queue, offset, increase_only=False)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store offsets now: these, or those of all that was consumed, the last poll's included. Raises if
        one could not be stored, and ValueError for what is no offset; then nothing is stored."""
        _check_offsets(offsets or {})
        await self._polling.commit(offsets)

    async def send_message_back(self, message: MessageExt, delay_level: int = 0) -> None:
        """Have the group's push consumers get a message again later: level 0 lets the broker choose by the
        number of tries, 1 to 18 is a delay level, -1 means dead letter at once. Raises CometError when it is
        not taken."""
        self._running()
        assert self._retry_topic is not None
        check_delay_level(delay_level)
        await self._retry_topic.send_back(message, delay_level)


def _check_offsets(offsets: Mapping[MessageQueue, int]) -> None:
    for queue, offset in offsets.items():
        if not isinstance(offset, int) or not 0 <= offset < 2**63:
            raise ValueError(f"{offset!r} is no offset of {queue}: a whole number, 0 or more")

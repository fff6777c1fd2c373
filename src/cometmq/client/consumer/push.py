"""The push consumer: a member of a group that calls a listener with the messages of its queues.

    async def on_messages(messages):
        for message in messages:
            print(message.body)

    async with PushConsumer("group", on_messages, {"TopicTest": "TagA || TagB"}):
        ...

Delivery is at least once: an offset is stored only after every message below it was consumed or sent back for
retry.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.consumer.listener import Listener, OrderlyListener, check_listener, name_of
from cometmq.client.consumer.push_session import PushSession
from cometmq.client.consumer.retry_topic import RetryTopic, SendsBack
from cometmq.client.group.group import instance_options
from cometmq.client.group.health import ConsumerHealth, problems_of
from cometmq.client.group.options import MessageModel, PushOptions
from cometmq.client.group.subscription import (
    Expression,
    Subscription,
    Subscriptions,
    as_subscription,
    as_subscriptions,
    refuse_filter_class,
)
from cometmq.client.group.watching import lag_of
from cometmq.errors import ClientStateError
from cometmq.message import MessageQueue
from cometmq.text import printable


class PushConsumer(SendsBack):
    """A push consumer: a member of a consumer group that calls a listener with messages.

    Use it with `async with`, or call start() and stop(). A consumer belongs to the event loop in which it was
    started.

    Args:
        group: The name of the consumer group.
        listener: The function that consumes messages, see `Listener`; with `PushOptions(orderly=True)` an
            `OrderlyListener`. An async function runs on the event loop, a plain function in threads.
        subscriptions: A topic, several topics, or a mapping from topic to tags (`"TagA || TagB"`, `"*"`),
            `sql92(...)` or `filter_class(...)`.
        namesrv: The name servers, as in Producer.
        options: The settings of the consumer. Default: PushOptions().
        client: A client instance to share. Default: the consumer creates its own.
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises:
        MessageIllegal: The name of the group or of a topic is illegal.
        ConfigError: The listener or a setting is invalid.
    """

    _kind = "push consumer"

    def __init__(
        self,
        group: str,
        listener: Listener | OrderlyListener,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PushOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        check_listener(listener)
        self._options = options if options is not None else PushOptions()
        own_options = instance_options(self._options, client_options)
        super().__init__(self._kind, group, namesrv, client, own_options)
        self._listener = listener
        self._subscriptions = as_subscriptions(subscriptions)
        for subscription in self._subscriptions.values():
            self._check_subscription(subscription)
        self._session: PushSession | None = None
        self._stop_for_listener: asyncio.Task[None] | None = None  # this reference keeps the task alive

    async def start(self) -> None:
        """Join the group. Returns after the first heartbeats and the first rebalance.

        A topic without a route is not an error: health() reports the topic until it exists, and then the
        consumer starts to consume it.

        Raises:
            ClientStateError: The consumer has no subscription or was started before.
            NameServersUnreachable: No name server answers. This is a NoRouteError.
            BrokerError: A broker refused an SQL92 expression.
        """
        if not self._subscriptions and self._state == "new":
            raise ClientStateError(f"{self._name} has no subscription")
        await super().start()

    async def _begin(self) -> None:
        client = await self._start_client()
        session = self._new_session(client)
        client.register_consumer(self.group, session)
        self._session = session
        failures = await client.refresh_routes(session.group.subscriptions)
        unreachable = [error for error in failures.values() if isinstance(error, NameServersUnreachable)]
        if len(unreachable) == len(session.group.subscriptions):
            raise failures[next(iter(self._subscriptions))]  # not the error of the group's retry topic
        for subscription in self._subscriptions.values():
            await session.group.check_expression(subscription)
        await session.join()
        await session.start()

    def _new_session(self, client: ClientInstance) -> PushSession:
        return PushSession(self.group, self._listener, self._subscriptions, self._options, client)

    async def stop(self) -> None:
        """Stop pulling, wait for running listeners, store the offsets and leave the group.

        The wait for listeners lasts `PushOptions.drain_timeout_s` seconds at most. Messages that were pulled
        but not consumed go to other members. Repeated calls are allowed. If an async listener calls stop(),
        the call returns immediately, and the consumer stops when the listener has returned.
        """
        session = self._session
        if session is None or not session.in_listener():
            await super().stop()
        elif self._stop_for_listener is None:
            self._stop_for_listener = asyncio.create_task(super().stop())

    async def _end(self, *, drain: bool) -> None:
        session = self._session
        try:
            if session is not None and drain:
                await session.drain(self._options.drain_timeout_s)
        finally:
            self._session = None
            try:
                if session is not None:
                    await session.close()
                    await self.client.unregister_consumer(self.group)
            finally:
                await self._close_client()

    async def subscribe(self, topic: str, expression: Expression | None = "*") -> None:
        """Add or change a subscription. This is also possible while the consumer is running.

        Args:
            topic: The topic.
            expression: Tags (`"TagA || TagB"`), `sql92(...)` or `filter_class(...)`. `"*"` and None: all
                messages.

        Raises:
            MessageIllegal: The name of the topic is illegal.
            BrokerError: A broker refused an SQL92 expression. The subscription is unchanged.
        """
        subscription = as_subscription(topic, expression)
        self._check_subscription(subscription)
        session = self._session
        if session is not None and subscription.expression_type != "TAG":
            await session.group.instance.refresh_routes([topic])
            await session.group.check_expression(subscription)
        subscription = subscription.after(self._subscriptions.get(topic))
        self._subscriptions[topic] = subscription
        await self._subscriptions_changed(topic, subscription)

    def _check_subscription(self, subscription: Subscription) -> None:
        if self._options.share == "messages":
            refuse_filter_class(subscription)

    async def unsubscribe(self, topic: str) -> None:
        """Remove a subscription and release its queues, also while the consumer is running."""
        self._subscriptions.pop(topic, None)
        await self._subscriptions_changed(topic, None)

    async def _subscriptions_changed(self, topic: str, subscription: Subscription | None) -> None:
        session = self._session
        if session is None:
            return
        if subscription is None:
            session.group.subscriptions.pop(topic, None)
        else:
            session.group.subscriptions[topic] = subscription
        await session.group.instance.send_heartbeats()
        session.members.rebalance.wake()

    def _retries(self) -> RetryTopic:
        return self._running_session().retry_topic

    def suspend(self) -> None:
        """Stop pulling until resume(). The listener still receives the messages that were pulled before."""
        self._running_session().suspend()

    def resume(self) -> None:
        """Start pulling again after suspend()."""
        self._running_session().resume()

    def set_concurrency(self, concurrency: int) -> None:
        """Change the maximum number of concurrent listener calls. Running calls are not interrupted.

        Args:
            concurrency: The new maximum, 1 to 1000.

        Raises:
            ConfigError: The number is out of range.
        """
        self._options = dataclasses.replace(self._options, consume_concurrency=concurrency)
        if self._session is not None:
            self._running_session().consuming.set_concurrency(concurrency)

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues that are assigned to this consumer now, sorted.

        In a group that shares messages, they include the queues that all members share.
        """
        session = self._session
        if session is None:
            return ()
        return tuple(sorted({*session.members.held, *(session.sharing.queues if session.sharing else ())}))

    async def rebalance(self) -> None:
        """Rebalance the queues now instead of at the next interval.

        Raises:
            ClientStateError: The consumer is not running.
        """
        await self._running_session().members.rebalance.run()

    async def persist_offsets(self) -> None:
        """Store the offsets now instead of at the next interval.

        Raises:
            CometError: An offset was not stored. The first failure is raised.
        """
        await self._running_session().group.offsets.persist()

    def health(self) -> ConsumerHealth:
        """Return the progress of each queue, and a sentence for each problem of this consumer.

        Returns:
            The health. It can also be read before the start and after a stop.
        """
        session = self._session
        if session is None:
            return ConsumerHealth(state=self._state, group=self.group)
        client = session.group.instance
        queues = session.queue_health(asyncio.get_running_loop().time())
        problems = [
            *problems_of(session.members.rebalance.problems, queues, client.heartbeat_problems),
            *session.subscription_problems,
            *session.watchdog.sentences(),
            *(session.sharing.problems if session.sharing is not None else ()),
        ]
        failing = session.consuming.problem()
        if failing is not None:
            problems.append(f"listener {printable(name_of(self._listener))} {failing}")
        error = session.consuming.last_error
        return ConsumerHealth(
            state=self._state,
            group=self.group,
            client_id=client.client_id,
            queues=queues,
            running_listeners=session.consuming.running,
            waiting_batches=session.consuming.waiting,
            consumed=session.consuming.consumed,
            failed=session.consuming.failed,
            last_error=None if error is None else repr(error),
            problems=tuple(problems),
        )

    async def lag(self) -> dict[MessageQueue, int]:
        """Return the lag of each assigned queue: the number of messages that are not consumed yet.

        The max offset of each queue is requested from its broker. In queues that all members share, the lag
        is that of the group: messages that are leased and not acknowledged are included, and those that wait
        in a retry topic are not.

        Returns:
            The number of messages, by queue.

        Raises:
            CometError: A broker cannot be reached or refused the request.
        """
        session = self._running_session()
        done = {each.queue: each.done_offset for each in self.health().queues}
        lags = await lag_of(done, self.max_offset, self.min_offset)
        if session.sharing is not None:
            shared = dict.fromkeys(session.sharing.queues)
            lags |= await lag_of(shared, self.max_offset, session.sharing.done_offset)
        return lags

    @property
    def message_model(self) -> MessageModel:
        """CLUSTERING if the members share the queues, BROADCASTING if each member consumes all of them."""
        return self._options.message_model

    def _running_session(self) -> PushSession:
        if self._session is None:
            raise self._not_running()
        self._check_loop()
        return self._session

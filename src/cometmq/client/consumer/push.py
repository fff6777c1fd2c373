"""The push consumer: a group's member that calls a listener with the messages of the queues it holds.

    async def on_messages(messages):
        for message in messages:
            print(message.body)

    async with PushConsumer("group", on_messages, {"TopicTest": "TagA || TagB"}):
        ...

Delivery is at least once: an offset is stored only when every message below it was handled or sent back for
retry.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import LookingClient
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.consumer.listener import Listener, OrderlyListener, check_listener, name_of
from cometmq.client.consumer.push_session import PushSession
from cometmq.client.consumer.retry_topic import check_delay_level
from cometmq.client.consumer.watching import lag_of
from cometmq.client.group.group import instance_options
from cometmq.client.group.health import ConsumerHealth, problems_of
from cometmq.client.group.options import MessageModel, PushOptions
from cometmq.client.group.subscription import (
    Expression,
    Subscription,
    Subscriptions,
    as_subscription,
    as_subscriptions,
)
from cometmq.errors import ClientStateError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.codes import check_group_name
from cometmq.text import printable

__all__ = ["PushConsumer"]


class PushConsumer(LookingClient):
    """A member of `group`. `client`: an instance to share; else the consumer has its own towards `namesrv`.

    `subscriptions`: a topic, several, or a mapping from topic to tags (`"TagA || TagB"`, `"*"`),
    sql92(...) or filter_class(...).
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
        check_group_name(group)
        check_listener(listener)
        self._options = options if options is not None else PushOptions()
        super().__init__(
            f"{self._kind} of group {group}",
            namesrv,
            client,
            instance_options(self._options, client_options),
        )
        self.group = group
        self._listener = listener
        self._subscriptions = as_subscriptions(subscriptions)
        self._session: PushSession | None = None
        self._stop_for_listener: asyncio.Task[None] | None = None  # kept, so that it is not collected

    async def start(self) -> None:
        """Join the group. Returns when the subscriptions are announced and the first rebalance was tried.

        A topic without a route is no error here: it is taken up when it appears, and health() names it until
        then. Raises NameServersUnreachable (a NoRouteError) when no name server answers at all, BrokerError
        when an SQL92 expression is refused.
        """
        if not self._subscriptions and self._state == "new":
            raise ClientStateError(f"{self._name} subscribes to nothing")
        await super().start()

    async def _begin(self) -> None:
        client = await self._start_client()
        session = self._new_session(client)
        client.register_consumer(self.group, session)
        self._session = session
        failures = await client.refresh_routes(session.group.subscriptions)
        unreachable = [error for error in failures.values() if isinstance(error, NameServersUnreachable)]
        if len(unreachable) == len(session.group.subscriptions):
            raise failures[next(iter(self._subscriptions))]  # and not of a topic that is ours inside
        await self._check_expressions(session, self._subscriptions.values())
        await session.agreement.look()
        await client.send_heartbeats()
        await session.start()

    def _new_session(self, client: ClientInstance) -> PushSession:
        return PushSession(self.group, self._listener, self._subscriptions, self._options, client)

    async def stop(self) -> None:
        """Stop pulling, let running listeners end, store the offsets, leave the group. May be called again.

        Messages that were pulled and not begun are left to the other members. Called by the (async) listener
        it returns at once, and the consumer stops when the listener has returned.
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

    async def _check_expressions(self, session: PushSession, subscriptions: Iterable[Subscription]) -> None:
        """Brokers compile SQL92 when asked to. Raises BrokerError with their words for a bad expression."""
        client = session.group.instance
        for subscription in subscriptions:
            if subscription.expression_type == "TAG":
                continue
            data = subscription.data()

            async def check(target: ReadTarget, data: SubscriptionData = data) -> None:
                await client.brokers.check_client_config(target.addr, client.client_id, self.group, data)

            route = client.routes.get(subscription.topic)
            for queue in route.one_of_each_broker() if route is not None else ():
                await client.reads.run(queue, check)

    async def subscribe(self, topic: str, expression: Expression | None = "*") -> None:
        """Add or change a subscription, also while running. Raises BrokerError when a running consumer's
        broker refuses an SQL92 expression; then nothing has changed."""
        subscription = as_subscription(topic, expression)
        session = self._session
        if session is not None and subscription.expression_type != "TAG":
            await session.group.instance.refresh_routes([topic])
            await self._check_expressions(session, [subscription])
        subscription = subscription.after(self._subscriptions.get(topic))
        self._subscriptions[topic] = subscription
        await self._subscriptions_changed(topic, subscription)

    async def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic up, also while running."""
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
        session.members.rounds.wake()

    async def send_message_back(self, message: MessageExt, delay_level: int = 0) -> None:
        """Have the group consume a message again later: level 0 lets the broker choose by the number of
        tries, 1 to 18 is a delay level, -1 means dead letter at once. Raises CometError when it is not
        taken."""
        check_delay_level(delay_level)
        await self._running_session().send_back(message, delay_level)

    def suspend(self) -> None:
        """Pull no more until resume(); what is held already is still handed to the listener."""
        self._running_session().members.suspend()

    def resume(self) -> None:
        """Pull again after suspend()."""
        self._running_session().members.resume()

    def set_concurrency(self, concurrency: int) -> None:
        """How many listener calls run at once from now on, 1 to 1000; calls that are too many end first."""
        self._options = dataclasses.replace(self._options, consume_concurrency=concurrency)
        if self._session is not None:
            self._running_session().consuming.set_concurrency(concurrency)

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues held now."""
        return tuple(sorted(self._session.members.held)) if self._session is not None else ()

    async def rebalance(self) -> None:
        """Share out the queues now instead of at the next round or notice."""
        await self._running_session().members.rounds.run()

    async def persist_offsets(self) -> None:
        """Store the offsets now. Raises what was said about the first that was not stored."""
        await self._running_session().group.offsets.persist()

    def health(self) -> ConsumerHealth:
        """How far each queue is, and what keeps this consumer from its work, in whole sentences."""
        session = self._session
        if session is None:
            return ConsumerHealth(state=self._state, group=self.group)
        client = session.group.instance
        queues = session.queue_health(asyncio.get_running_loop().time())
        problems = [
            *problems_of(session.members.rounds.problems, queues, client.heartbeat_problems),
            *session.agreement.problems,
            *session.watchdog.sentences(),
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
        """How many messages of each held queue are not done yet, as their brokers say now. Raises what the
        first that does not answer says."""
        self._running_session()
        return await lag_of(self.health().queues, self.max_offset, self.min_offset)

    @property
    def message_model(self) -> MessageModel:
        """Whether the members share the queues or each reads all of them."""
        return self._options.message_model

    def _running_session(self) -> PushSession:
        if self._session is None:
            raise self._not_running()
        self._check_loop()
        return self._session

"""The simple consumer: leases messages, which the caller acknowledges one by one.

    async with SimpleConsumer("billing", {"orders": "new || paid"}) as consumer:
        for message in await consumer.receive():
            ...
            await consumer.ack(message)

The members of the group share all queues: their number is not limited by the number of queues. Brokers of
RocketMQ 5 and CometMQ support this kind of consumption (POP).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import QueryClient
from cometmq.client.cluster.options import ClientOptions, check_range
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.group.group import Group
from cometmq.client.group.member import Member
from cometmq.client.group.options import (
    CHANGE_RANGE_S,
    LEASE_RANGE_S,
    MAX_MESSAGES,
    WAIT_RANGE_S,
    ConsumeFromWhere,
    MemberOptions,
    SimpleOptions,
)
from cometmq.client.group.subscription import (
    Expression,
    Subscription,
    Subscriptions,
    as_subscription,
    as_subscriptions,
    refuse_filter_class,
)
from cometmq.client.simple.leases import Leases
from cometmq.client.simple.receiving import Receiver
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import ConsumerRunningInfo


class SimpleSession(Member):
    """The group membership of a simple consumer, without queues and offsets (ConsumerPeer)."""

    consume_type = "CONSUME_POP"
    kind = "simple consumer"

    def __init__(self, group: Group, leases: Leases) -> None:
        super().__init__(group)
        self.leases = leases
        self.receiver = Receiver(group, leases, group.subscriptions)

    def wake_rebalance(self) -> None:
        """Do nothing: members share all queues."""

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Do nothing: the broker has reset its own offsets."""

    def running_info(self) -> ConsumerRunningInfo:
        return self.info_of({})


class LeasingConsumer(QueryClient):
    """The common part of consumers that lease messages: each is acknowledged, or it becomes visible again."""

    def __init__(
        self,
        kind: str,
        group: str,
        subscriptions: dict[str, Subscription],
        namesrv: str | Sequence[str] | None,
        options: SimpleOptions | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        self.options = options if options is not None else SimpleOptions()
        super().__init__(kind, group, namesrv, client, client_options)
        self._subscriptions = subscriptions
        self._session: SimpleSession | None = None

    def _new_session(self, group: Group) -> SimpleSession:
        at_end = self.options.consume_from_where is ConsumeFromWhere.LAST_OFFSET
        return SimpleSession(group, Leases(group, orderly=self.options.orderly, init_mode=int(at_end)))

    # -- life

    async def start(self) -> None:
        """Join the group. Returns after the first heartbeats.

        A topic without a route is not an error: its messages are received once it exists.

        Raises:
            ClientStateError: The consumer was started before.
            NameServersUnreachable: No name server answers. This is a NoRouteError.
            BrokerError: A broker refused an SQL92 expression.
        """
        await super().start()

    async def _begin(self) -> None:
        client = await self._start_client()
        options = MemberOptions(consume_from_where=self.options.consume_from_where)
        group = Group(self.group, client, options, self._subscriptions)
        session = self._new_session(group)
        client.register_consumer(self.group, session)
        self._session = session
        failures = await client.refresh_routes(group.subscriptions)
        unreachable = [each for each in failures.values() if isinstance(each, NameServersUnreachable)]
        if unreachable and len(unreachable) == len(group.subscriptions):
            raise unreachable[0]
        for subscription in group.subscriptions.values():
            await group.check_expression(subscription)
        await session.join()

    async def stop(self) -> None:
        """Leave the group. Repeated calls are allowed.

        Calls of receive() that are still waiting raise ClientStateError. Messages that are not acknowledged
        become visible again when their leases end.
        """
        await super().stop()

    async def _end(self, *, drain: bool) -> None:
        del drain
        try:
            if self._session is not None:
                await self._session.receiver.close()
                await self.client.unregister_consumer(self.group)
                self._session.group.close()
        finally:
            await self._close_client()

    # -- messages

    async def receive(
        self,
        max_messages: int = MAX_MESSAGES,
        *,
        invisible_s: float | None = None,
        wait_s: float | None = None,
    ) -> list[MessageExt]:
        """Lease messages. Returns as soon as a broker has some, else after `wait_s` seconds with none.

        A message from this call is not delivered to any member until its lease ends. Its `reconsume_times` is
        the number of earlier deliveries that were not acknowledged. If the call is cancelled, messages that
        arrive later are made visible again.

        Args:
            max_messages: The maximum number of messages, 1 to 32.
            invisible_s: The length of the leases, 1 s to 12 hours. Default:
                `SimpleOptions.invisible_s`.
            wait_s: How long to wait for messages, 0 to 300 s. Default: `SimpleOptions.wait_s`.

        Returns:
            The messages, an empty list if there were none.

        Raises:
            ConfigError: An argument is out of range.
            ClientStateError: The consumer is not running, or has no subscription.
            NoRouteError: No topic has a route.
            BrokerError: All brokers refused the request.
            RemotingError: No broker can be reached or answered in time.
        """
        invisible_s = self.options.invisible_s if invisible_s is None else invisible_s
        wait_s = self.options.wait_s if wait_s is None else wait_s
        check_range("max_messages", max_messages, 1, MAX_MESSAGES)
        check_range("invisible_s", invisible_s, *LEASE_RANGE_S)
        check_range("wait_s", wait_s, *WAIT_RANGE_S)
        receiver = self._running_session().receiver
        begun_ns, telemetry = time.time_ns(), self.client.options.telemetry
        found = await receiver.receive(max_messages, invisible_s, wait_s)
        if found and telemetry is not None:
            telemetry.received(self.group, found, begun_ns)
        return found

    async def ack(self, *messages: MessageExt) -> None:
        """Acknowledge messages as consumed. Several messages of a broker share a request.

        A message whose lease has ended is delivered again, whether or not it is acknowledged then. CometMQ's
        brokers refuse such an acknowledgement with NO_MESSAGE unless it shares a request with others, and a
        repeated one, too. Apache's brokers accept both.

        Args:
            messages: Messages that receive() returned.

        Raises:
            MessageIllegal: A message has no receipt handle.
            BrokerError: A broker refused the acknowledgement.
            RemotingError: A broker cannot be reached or did not answer in time. The call may be repeated.
        """
        await self._running_session().leases.acknowledge(messages)

    async def change_invisibility(self, message: MessageExt, seconds: float) -> None:
        """Let the lease of a message end at another time. The message gets a new receipt handle.

        Args:
            message: A message that receive() returned.
            seconds: When the lease ends, in seconds from now, up to 12 hours. 0: the message becomes visible
                again immediately.

        Raises:
            ConfigError: `seconds` is out of range.
            MessageIllegal: The message has no receipt handle.
            BrokerError: The broker refused the request.
            RemotingError: The broker cannot be reached or did not answer in time.
        """
        check_range("seconds", seconds, *CHANGE_RANGE_S)
        await self._running_session().leases.change(message, seconds)

    async def dead_letter(self, message: MessageExt) -> None:
        """Move a message to the group's dead-letter queue.

        CometMQ's brokers do so themselves when a message was delivered again as often as the group's
        `retryMaxTimes` allows, but not in an ordered group. Apache's brokers deliver it without end.

        Args:
            message: A message that receive() returned.

        Raises:
            MessageIllegal: The message has no receipt handle.
            BrokerError: The broker refused the move.
            RemotingError: The broker cannot be reached or did not answer in time. The dead-letter queue may
                have the message nevertheless.
        """
        await self._running_session().leases.dead_letter(message)

    @property
    def problems(self) -> dict[tuple[str, str], str]:
        """The brokers that cannot be received from: topic and broker name, with the last error of each."""
        return dict(self._session.receiver.problems) if self._session is not None else {}

    def _running_session(self) -> SimpleSession:
        self._running()
        assert self._session is not None
        return self._session


class SimpleConsumer(LeasingConsumer):
    """A consumer that leases messages: each message is acknowledged, or it becomes visible again.

    The members of a group share all queues of a topic, and each message is leased to one of them. A message
    that is not acknowledged before its lease ends is delivered again, with `reconsume_times` increased. The
    broker must support POP consumption, as CometMQ and RocketMQ 5 do.

    Use it with `async with`, or call start() and stop(). Methods may be called concurrently. A consumer
    belongs to the event loop in which it was started.

    Args:
        group: The name of the consumer group.
        subscriptions: A topic, several topics, or a mapping from topic to tags (`"TagA || TagB"`, `"*"`) or
            `sql92(...)`. subscribe() adds more.
        namesrv: The name servers, as in Producer.
        options: The settings of the consumer. Default: SimpleOptions().
        client: A client instance to share. Default: the consumer creates its own.
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises:
        MessageIllegal: The name of the group or of a topic is illegal.
        ConfigError: An expression or a setting is invalid.
    """

    def __init__(
        self,
        group: str,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: SimpleOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        wanted = as_subscriptions(subscriptions)
        super().__init__("simple consumer", group, wanted, namesrv, options, client, client_options)
        for subscription in self._subscriptions.values():
            refuse_filter_class(subscription)

    async def subscribe(self, topic: str, expression: Expression | None = "*") -> None:
        """Add or change a subscription. A topic without a route is not an error.

        Args:
            topic: The topic.
            expression: Tags (`"TagA || TagB"`) or `sql92(...)`. `"*"` and None: all messages.

        Raises:
            MessageIllegal: The name of the topic is illegal.
            ConfigError: The expression is invalid.
            BrokerError: A broker refused an SQL92 expression. The subscription is unchanged.
        """
        subscription = as_subscription(topic, expression)
        refuse_filter_class(subscription)
        session = self._running_session()
        await session.group.instance.refresh_routes([topic])
        await session.group.check_expression(subscription)
        self._subscriptions[topic] = subscription.after(self._subscriptions.get(topic))
        await session.join()

    async def unsubscribe(self, topic: str) -> None:
        """Remove a subscription. Messages that were received before can still be acknowledged."""
        session = self._running_session()
        self._subscriptions.pop(topic, None)
        await session.join()

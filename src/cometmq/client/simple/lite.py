"""The consumer of lite topics, which are cheap topics below a parent topic, such as one for each session.

    async with LiteConsumer("agents", "Sessions", ["session-1"]) as consumer:
        await consumer.subscribe("session-2")
        for message in await consumer.receive():
            ...
            await consumer.ack(message)

The parent topic must have the attribute `message.type=LITE`, and the group `lite.bind.topic`. CometMQ and
RocketMQ 5.5 have lite topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable, Sequence

import msgspec

from cometmq import logs
from cometmq.client.cluster.decoding import decode_pulled
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.requests import succeeded
from cometmq.client.group.group import Group
from cometmq.client.group.options import ConsumeFromWhere, SimpleOptions
from cometmq.client.group.subscription import as_subscriptions
from cometmq.client.simple.leases import ALL_QUEUES, EMPTY, Leases, Target
from cometmq.client.simple.simple import LeasingConsumer, SimpleSession
from cometmq.errors import CometError, ConfigError, MessageIllegal
from cometmq.message import MessageExt, MessageQueue
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import (
    ConsumerData,
    LiteSubscription,
    LiteSubscriptionCtlRequestBody,
    OffsetOption,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PopLiteMessageRequestHeader, PopMessageResponseHeader
from cometmq.protocol.lite import LITE_TOPIC, QUEUE_OFFSET, is_lite_topic
from cometmq.protocol.pop import ReceiptHandle, TopicKind
from cometmq.protocol.properties.values import POP_CK

log = logs.logger("cometmq.client.consumer")

REPEAT_S = 30.0
"""The interval, in seconds, at which the subscriptions are repeated. Brokers remove them after 3 minutes."""
_POLL_S = 0.2
"""The interval, in seconds, at which several brokers are asked for messages in turn."""
_OFFSETS = {ConsumeFromWhere.FIRST_OFFSET: 1, ConsumeFromWhere.LAST_OFFSET: 2}


class LiteSession(SimpleSession):
    """The group membership of a consumer of lite topics."""

    leases: LiteLeases

    def heartbeat(self) -> ConsumerData:
        return msgspec.structs.replace(super().heartbeat(), message_model="LITE_SELECTIVE")

    def lite_unsubscribed(self, lite_topic: str) -> None:
        log.info("group %s: another member has taken over lite topic %s", self.group.name, lite_topic)
        self.leases.names.discard(lite_topic)


class LiteLeases(Leases):
    """The requests of a consumer of lite topics, and the `names` to which it is subscribed."""

    def __init__(self, group: Group, parent: str, names: Iterable[str]) -> None:
        super().__init__(group, orderly=False, init_mode=0)
        self._parent = parent
        self.names = set(names)
        self._current: set[str] = set()  # The brokers that have all subscriptions

    async def lease(
        self, target: Target, count: int, invisible_s: float, wait_s: float, attempt_id: str
    ) -> list[MessageExt]:
        name = target.broker_name
        if name not in self._current:
            await self._complete(name)
        header = PopLiteMessageRequestHeader(
            client_id=self._instance.client_id,
            consumer_group=self._group.name,
            topic=self._parent,
            max_msg_num=count,
            invisible_time=int(invisible_s * 1000),
            poll_time=int(wait_s * 1000),
            born_time=int(time.time() * 1000),
            attempt_id=attempt_id,
        )
        request = Frame.request(RequestCode.POP_LITE_MESSAGE, header)
        addr, answer = await self._ask(target.queue, request, wait_s)
        if answer.code in EMPTY:
            return []
        succeeded(answer, addr, self._parent)
        found = decode_pulled(answer.body, name, self._max_body).messages
        _attach_receipts(found, answer.header(PopMessageResponseHeader), name)
        return found

    async def wait(self, target: Target, wait_s: float) -> bool:  # noqa: ARG002
        """Wait for a moment. Brokers do not notify consumers of messages in lite topics."""
        await asyncio.sleep(_POLL_S)
        return True

    async def _acknowledge(self, leased: list[tuple[MessageExt, ReceiptHandle]]) -> None:
        for message, _ in leased:  # Brokers refuse batches
            await self._acknowledge_one(message)

    def _lite_topic(self, message: MessageExt) -> str | None:
        return message.properties.get(LITE_TOPIC.decode())

    # -- subscriptions

    async def subscribe(self, names: Iterable[str], offset: OffsetOption | None) -> None:
        """Add subscriptions at all brokers of the parent topic."""
        names = list(names)
        for broker_name in await self._brokers():
            await self._control(broker_name, "PARTIAL_ADD", names, offset)
        self.names.update(names)

    async def unsubscribe(self, names: Iterable[str]) -> None:
        """Remove subscriptions at all brokers of the parent topic."""
        names = list(names)
        self.names.difference_update(names)
        for broker_name in await self._brokers():
            await self._control(broker_name, "PARTIAL_REMOVE", names)

    async def repeat(self) -> None:
        """Send all subscriptions to all brokers. A broker that fails gets them before its next pop."""
        for broker_name in await self._brokers():
            try:
                await self._complete(broker_name)
            except CometError as error:
                self._current.discard(broker_name)
                log.warning("the subscriptions of group %s were not repeated: %s", self._group.name, error)

    async def leave(self) -> None:
        """Remove all subscriptions. Failures are ignored: brokers remove them after a while."""
        for broker_name in self._current:
            with contextlib.suppress(CometError):
                await self._control(broker_name, "COMPLETE_REMOVE", [])

    async def _brokers(self) -> list[str]:
        return sorted({queue.broker_name for queue in await self._instance.read_queues(self._parent)})

    async def _complete(self, broker_name: str) -> None:
        await self._control(broker_name, "COMPLETE_ADD", sorted(self.names))
        self._current.add(broker_name)

    async def _control(
        self, broker_name: str, action: str, names: list[str], offset: OffsetOption | None = None
    ) -> None:
        wrap = self._instance.namespace.wrap
        change = LiteSubscription(
            action=action,
            client_id=self._instance.client_id,
            group=wrap(self._group.name),
            topic=wrap(self._parent),
            lite_topic_set=names,
            offset_option=offset,
        )
        body = LiteSubscriptionCtlRequestBody(subscription_set=[change]).encode()
        queue = MessageQueue(self._parent, broker_name, ALL_QUEUES)
        addr, answer = await self._ask(queue, Frame.request(RequestCode.LITE_SUBSCRIPTION_CTL, body=body))
        succeeded(answer, addr, self._parent)


def _attach_receipts(
    messages: Sequence[MessageExt], header: PopMessageResponseHeader, broker_name: str
) -> None:
    """Add the receipt handle to each message of a response, and the number of its earlier deliveries."""
    counts = (header.order_count_info or "").split(";")
    for message, count in zip(messages, itertools.chain(counts, itertools.repeat("")), strict=False):
        offset = message.properties.get(QUEUE_OFFSET.decode(), "")
        if offset.isdigit():
            handle = ReceiptHandle(
                int(offset),
                header.pop_time,
                header.invisible_time,
                header.revive_qid,
                TopicKind.NORMAL,
                broker_name,
                0,
                int(offset),
            )
            message.properties[POP_CK] = handle.encode()
        if count.isdigit():
            message.reconsume_times = int(count)


class LiteConsumer(LeasingConsumer):
    """A consumer that leases messages of lite topics, to which it subscribes while it runs.

    Each lite topic is ordered: while a message is leased, the group receives no other of that lite topic. A
    message that is not acknowledged before its lease ends is delivered again, with `reconsume_times`
    increased. The members of a group share the lite topics to which several of them subscribe.

    Use it with `async with`, or call start() and stop(). Methods may be called concurrently. A consumer
    belongs to the event loop in which it was started.

    Args:
        group: The name of the consumer group, whose attribute `lite.bind.topic` is the parent topic.
        parent: The parent topic.
        lite_topics: The lite topics to which the consumer is subscribed from the start. None are needed for a
            group with the attribute `lite.sub.wildcard`, which receives from all.
        namesrv: The name servers, as in Producer.
        options: The settings of the consumer, of which `invisible_s` and `wait_s` are used.
        client: A client instance to share. Default: the consumer creates its own.
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises:
        MessageIllegal: The name of the group, of the parent or of a lite topic is illegal.
    """

    def __init__(
        self,
        group: str,
        parent: str,
        lite_topics: Iterable[str] = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: SimpleOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(
            "lite consumer", group, as_subscriptions(parent), namesrv, options, client, client_options
        )
        self._parent = parent
        self._first = _checked(parent, lite_topics)
        self._repeats: Periodic | None = None

    def _new_session(self, group: Group) -> LiteSession:
        return LiteSession(group, LiteLeases(group, self._parent, self._first))

    async def _begin(self) -> None:
        await super()._begin()
        self._repeats = Periodic(
            asyncio.get_running_loop(), REPEAT_S, self._lite().repeat, name="repetition of subscriptions"
        )
        self._repeats.start()

    async def _end(self, *, drain: bool) -> None:
        if self._repeats is not None:
            self._repeats.cancel()
            await self._lite().leave()
        await super()._end(drain=drain)

    def _lite(self) -> LiteLeases:
        assert isinstance(self._session, LiteSession)
        return self._session.leases

    @property
    def lite_topics(self) -> frozenset[str]:
        """The lite topics to which the consumer is subscribed.

        Those that another member of an exclusive group has taken over are not among them.
        """
        return frozenset(self._first if self._session is None else self._lite().names)

    async def subscribe(self, *lite_topics: str, start: ConsumeFromWhere | None = None) -> None:
        """Add subscriptions at all brokers of the parent topic.

        Args:
            lite_topics: The lite topics. They need not exist yet.
            start: Set the group's offset to the first message (FIRST_OFFSET) or to the end (LAST_OFFSET).
                Default: the group continues at its offset, or starts at the first message.

        Raises:
            MessageIllegal: A name is illegal.
            ConfigError: `start` has another value.
            BrokerError: A broker refused the subscriptions, for instance because of a quota.
            RemotingError: A broker cannot be reached or did not answer in time. The call may be repeated.
        """
        if start is not None and start not in _OFFSETS:
            raise ConfigError("start", start.name, "FIRST_OFFSET or LAST_OFFSET")
        names = _checked(self._parent, lite_topics)
        self._running()
        await self._lite().subscribe(names, OffsetOption("POLICY", _OFFSETS[start]) if start else None)

    async def unsubscribe(self, *lite_topics: str) -> None:
        """Remove subscriptions. Messages that were received before can still be acknowledged.

        Raises:
            BrokerError, RemotingError: A broker has not removed them. It does so within 30 s.
        """
        self._running()
        await self._lite().unsubscribe(lite_topics)


def _checked(parent: str, lite_topics: Iterable[str]) -> list[str]:
    """Return the names of lite topics. Raises MessageIllegal."""
    names = [lite_topics] if isinstance(lite_topics, str) else list(lite_topics)
    for name in names:
        if not is_lite_topic(name):
            problem = f"lite topic {name!r}: 1 to 64 letters, digits, - and _ are allowed"
            raise MessageIllegal(problem, parent, "lite_topic")
    return names

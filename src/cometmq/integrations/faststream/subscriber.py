"""Subscribers, which receive messages as members of consumer groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from faststream._internal.configs import SubscriberSpecificationConfig, SubscriberUsecaseConfig
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber import SubscriberSpecification
from faststream._internal.endpoint.subscriber.mixins import TasksMixin
from faststream._internal.endpoint.utils import process_msg
from faststream.exceptions import IncorrectState
from faststream.middlewares import AckPolicy
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSpec
from faststream.specification.schema import Operation, SubscriberSpec

from cometmq import logs
from cometmq.client import MessageStream, PushOptions, sql92
from cometmq.client.cluster.options import check_range
from cometmq.client.group.options import MAX_CONCURRENCY
from cometmq.client.group.subscription import as_subscription
from cometmq.errors import CometError
from cometmq.integrations.faststream.config import CometMQBrokerConfig
from cometmq.integrations.faststream.message import CometMQMessage, CometMQParser
from cometmq.integrations.faststream.producer import ReplyPublisher
from cometmq.message import MessageExt
from cometmq.text import printable

if TYPE_CHECKING:
    from faststream._internal.endpoint.publisher import PublisherProto
    from faststream._internal.endpoint.subscriber.call_item import CallsCollection
    from faststream.message import StreamMessage

log = logs.logger(__name__)


@dataclass(kw_only=True)
class SubscriberConfig(SubscriberUsecaseConfig):
    """The arguments of `CometMQBroker.subscriber`. Raises CometError if one is invalid."""

    group: str
    expression: str | sql92
    options: PushOptions
    max_workers: int

    def __post_init__(self) -> None:
        check_range("max_workers", self.max_workers, 1, MAX_CONCURRENCY)
        parser = CometMQParser(orderly=self.options.orderly)
        self.messages = parser
        self.parser, self.decoder = parser.parse_message, parser.decode_message

    @property
    def ack_policy(self) -> AckPolicy:
        """The policy of the subscriber, else of its router or broker, else NACK_ON_ERROR."""
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class SubscriberDescription(SubscriberSpecificationConfig):
    """The arguments of a subscriber that the AsyncAPI document shows."""

    topic: str


class CometMQSubscriberSpecification(SubscriberSpecification[CometMQBrokerConfig, SubscriberDescription]):
    """The AsyncAPI description of a subscriber."""

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def channel_labels(self) -> list[str]:
        """The labels that metrics and spans use for the channel: the topic."""
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the description by channel name."""
        payload = resolve_payloads(self.get_payloads())
        return {
            self.name: SubscriberSpec(
                address=self.topic,
                description=self.description,
                operation=Operation(
                    message=MessageSpec(title=f"{self.name}:Message", payload=payload), bindings=None
                ),
                bindings=None,
            )
        }


class CometMQSubscriber(TasksMixin):
    """A member of a consumer group that calls handlers with the messages of a topic."""

    _outer_config: CometMQBrokerConfig

    def __init__(
        self,
        config: SubscriberConfig,
        specification: CometMQSubscriberSpecification,
        calls: CallsCollection[MessageExt],
    ) -> None:
        as_subscription(specification.topic, config.expression)
        super().__init__(config, specification, calls)
        self._config = config
        self._described = specification
        self._stream: MessageStream | None = None

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of its routers."""
        return self._described.topic

    @property
    def group(self) -> str:
        """The consumer group: by default it has the name of the topic."""
        return self._config.group or self.topic

    @property
    def expression(self) -> str | sql92:
        """The filter of the subscription."""
        return self._config.expression

    async def start(self) -> None:
        """Join the group and begin to receive messages. Raises CometError."""
        await super().start()
        options = replace(
            self._config.options,
            consume_concurrency=self._config.max_workers,
            drain_timeout_s=self._outer_config.graceful_timeout or 0.0,
        )
        stream = await self._outer_config.connection.join(self.group, self.topic, self.expression, options)
        self._stream = self._config.messages.stream = stream
        if self.calls:
            for _ in range(self._config.max_workers):
                self.add_task(self._work, (stream,))
        self._post_start()

    async def stop(self) -> None:
        """Stop receiving, wait until the received messages are settled, and leave the group.

        The wait lasts at most `graceful_timeout` seconds. Messages that are not settled are delivered again.
        """
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                await stream.stop()
            except CometError as error:
                log.warning("group %s: the subscriber stopped with an error: %s", self.group, error)
        await super().stop()

    async def _work(self, stream: MessageStream) -> None:
        async for message in stream:
            try:
                await self.consume(message)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The handler has awaited a cancelled task. FastStream then leaves the message unsettled.
                if self.ack_policy is not AckPolicy.MANUAL:
                    with contextlib.suppress(CometError):  # the message is settled, or it was held too long
                        await stream.nack(message)

    def _started(self) -> MessageStream:
        if self.calls:
            raise IncorrectState("The subscriber has handlers, which receive its messages.")
        if self._stream is None:
            raise IncorrectState("The subscriber is not started: call start() first.")
        return self._stream

    async def get_one(self, *, timeout: float = 5.0) -> CometMQMessage | None:  # noqa: ASYNC109
        """Return the next message, or None if none arrives within `timeout` seconds.

        The caller settles the message with ack(), nack() or reject(), unless the policy is ACK_FIRST.

        Raises:
            IncorrectState: The subscriber has handlers, or is not started.
        """
        stream = self._started()
        try:
            async with asyncio.timeout(timeout):
                message = await anext(stream)
        except (TimeoutError, StopAsyncIteration):
            return None
        return await self._parsed(message)

    async def __aiter__(self) -> AsyncIterator[CometMQMessage]:
        """Yield messages. The caller settles them as described in `get_one`."""
        async for message in self._started():
            yield await self._parsed(message)

    async def _parsed(self, message: MessageExt) -> CometMQMessage:
        parser, decoder = self._get_parser_and_decoder()
        context = self._outer_config.context
        parsed: Any = await process_msg(
            msg=message,
            middlewares=(m(message, context=context) for m in self._broker_middlewares),
            parser=parser,
            decoder=decoder,
        )
        if self.ack_policy is AckPolicy.ACK_FIRST:
            await parsed.ack()
        return parsed  # type: ignore[no-any-return]

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Sequence[PublisherProto]:
        return (ReplyPublisher(self._outer_config.producer, message),)

    def get_log_context(self, message: StreamMessage[Any] | None) -> dict[str, str]:
        """Return the fields of log lines about a message."""
        return {
            "topic": self.topic,
            "group": self.group,
            "message_id": "" if message is None else printable(message.message_id),
        }

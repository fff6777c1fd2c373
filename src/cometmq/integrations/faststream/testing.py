"""A test broker without a server, whose messages go to its own subscribers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from uuid import uuid4

from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound
from faststream.response import PublishType

from cometmq.client import PushOptions, sql92
from cometmq.client.group.subscription import as_subscription
from cometmq.integrations.faststream.broker import CometMQBroker
from cometmq.integrations.faststream.command import CometMQPublishCommand
from cometmq.integrations.faststream.producer import CometMQProducer, CometMQPublisher
from cometmq.integrations.faststream.subscriber import CometMQSubscriber
from cometmq.message import MessageExt
from cometmq.protocol.properties.values import UNIQ_KEY
from cometmq.protocol.sql import compile_sql


class TestCometMQBroker(TestBroker[CometMQBroker, EnterType], broker=CometMQBroker):
    """Delivers the messages of brokers to their own subscribers, at once and in this process.

    Tags and SQL92 expressions filter as on a server. Delays, retries and broadcasting have no effect. With
    `with_real=True`, the brokers use their servers.
    """

    def create_publisher_fake_subscriber(
        self, broker: CometMQBroker, publisher: CometMQPublisher
    ) -> tuple[CometMQSubscriber, bool]:
        """Return a subscriber of the publisher's topic, and whether it belongs to the application."""
        for each in _subscribers(self.brokers):
            if each.topic == publisher.topic:
                return each, True
        # The subscriber has its own group, so that it takes no messages from the application's groups.
        fake = broker.subscriber(
            publisher.topic,
            group=f"{publisher.topic}-test",
            options=PushOptions(start_strictly=True),
            persistent=False,
        )
        return fake, False

    @contextmanager
    def _patch_producer(self, broker: CometMQBroker) -> Iterator[None]:
        config: Any = broker.config.broker_config
        with change_producer(config, _InMemoryProducer(broker, self.brokers)):
            config.opened = _InMemoryConnection()
            try:
                yield
            finally:
                config.opened = None

    async def _fake_connect(self, broker: CometMQBroker, *args: Any, **kwargs: Any) -> None:
        del broker, args, kwargs


class _InMemoryProducer(CometMQProducer):
    """Calls the subscribers of the topic instead of sending a message."""

    def __init__(self, broker: CometMQBroker, brokers: Sequence[CometMQBroker]) -> None:
        config = broker.config.broker_config
        super().__init__(config.broker_parser, config.broker_decoder)
        self.connect(config)
        self._brokers = brokers

    async def publish(self, cmd: CometMQPublishCommand) -> None:
        message = await self._received(cmd)
        for each in _subscribers(self._brokers):
            if _receives(each, message):
                await each.process_message(message)

    async def request(self, cmd: CometMQPublishCommand) -> MessageExt:
        message = await self._received(cmd)
        for each in _subscribers(self._brokers):
            if _receives(each, message):
                async with asyncio.timeout(cmd.timeout_s):
                    result = await each.process_message(message)
                return await self._received(
                    CometMQPublishCommand(
                        result.body,
                        destination=cmd.destination,
                        headers=result.headers,
                        correlation_id=result.correlation_id,
                        _publish_type=PublishType.REPLY,
                    )
                )
        raise SubscriberNotFound(f"no subscriber of topic {cmd.destination} receives the request")

    async def _received(self, cmd: CometMQPublishCommand) -> MessageExt:
        """Return a command's message in the form in which a subscriber receives it."""
        sent = await self.message_of(cmd)
        now = int(time.time() * 1000)
        return MessageExt(
            sent.topic,
            sent.body,
            properties={UNIQ_KEY: uuid4().hex.upper(), **sent.wire_properties()},
            born_timestamp_ms=now,
            store_timestamp_ms=now,
        )


class _InMemoryConnection:
    """A connection without a server, whose streams never receive messages."""

    async def join(self, *_arguments: object) -> _NoMessages:
        return _NoMessages()


class _NoMessages:
    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    async def stop(self) -> None:
        self._stopped.set()

    def __aiter__(self) -> _NoMessages:
        return self

    async def __anext__(self) -> MessageExt:
        await self._stopped.wait()
        raise StopAsyncIteration


def _subscribers(brokers: Sequence[CometMQBroker]) -> Iterator[CometMQSubscriber]:
    for broker in brokers:
        for each in broker.subscribers:
            assert isinstance(each, CometMQSubscriber)
            yield each


def _receives(subscriber: CometMQSubscriber, message: MessageExt) -> bool:
    if subscriber.topic != message.topic:
        return False
    expression = subscriber.expression
    if isinstance(expression, sql92):
        return _compiled(expression.expression).matches(message.properties.get)
    return bool(as_subscription(message.topic, expression).filter([message]))


_compiled = cache(compile_sql)

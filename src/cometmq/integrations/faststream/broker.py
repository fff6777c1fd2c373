"""A broker of FastStream, and routers that a broker can include."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from fast_depends import Provider, dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.configs import PublisherUsecaseConfig
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.response import PublishType
from faststream.specification.schema import BrokerSpec

from cometmq.client import ClientOptions, PushOptions, sql92
from cometmq.client.cluster.options import namesrv_addresses
from cometmq.errors import CometError
from cometmq.integrations.faststream.command import CometMQPublishCommand, SendOptions
from cometmq.integrations.faststream.config import CometMQBrokerConfig, Connection, make_logger, secured
from cometmq.integrations.faststream.message import CometMQMessage
from cometmq.integrations.faststream.producer import (
    CometMQProducer,
    CometMQPublisherSpecification,
    PublisherDescription,
)
from cometmq.integrations.faststream.producer import CometMQPublisher as Publisher
from cometmq.integrations.faststream.subscriber import (
    CometMQSubscriber,
    CometMQSubscriberSpecification,
    SubscriberConfig,
    SubscriberDescription,
)
from cometmq.message import MessageExt, SendResult

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.basic_types import LoggerProto, SendableMessage
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import BrokerMiddleware, CustomCallable
    from faststream.security import BaseSecurity
    from faststream.specification.schema.extra import Tag, TagDict


class CometMQRegistrator(Registrator[MessageExt, CometMQBrokerConfig]):
    """A broker or a router, to which subscribers and publishers are added."""

    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        *,
        group: str = "",
        expression: str | sql92 = "*",
        options: PushOptions | None = None,
        max_workers: int = 1,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Dependant] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> CometMQSubscriber:
        """Add a subscriber: a member of a consumer group that calls a handler with the messages of a topic.

        Args:
            topic: The topic. It is created if it does not exist.
            group: The consumer group, unique among the broker's subscribers. Default: the name of the topic.
            expression: The filter of the subscription: tags (`"TagA || TagB"`) or `sql92(...)`.
            options: The settings of the member, such as orderly, broadcasting, the start of a new group, and
                the maximum number of retries. Default: PushOptions().
            max_workers: The maximum number of concurrent calls of the handler, 1 to 1000.
            ack_policy: When messages are settled. Default: the policy of the router or broker, otherwise
                NACK_ON_ERROR: a message whose handler fails is delivered again, up to 16 times.
            no_reply: Whether results are not sent to senders that wait for a reply.
            dependencies: Dependencies of all handlers.
            parser: A function that replaces or extends the parser of messages.
            decoder: A function that replaces or extends the decoder of bodies.
            codec: The codec of bodies.
            persistent: Whether the broker keeps the subscriber as long as it exists.
            title: The title in the AsyncAPI document.
            description: The description in the AsyncAPI document.
            include_in_schema: Whether the AsyncAPI document shows the subscriber.

        Raises:
            MessageIllegal: The name of the topic is illegal.
            ConfigError: The expression or max_workers is invalid.
        """
        calls = CallsCollection[MessageExt]()
        shared = self._shared_config()
        subscriber = CometMQSubscriber(
            SubscriberConfig(
                group=group,
                expression=expression,
                options=options if options is not None else PushOptions(),
                max_workers=max_workers,
                no_reply=no_reply,
                _ack_policy=ack_policy,
                _outer_config=shared,
            ),
            CometMQSubscriberSpecification(
                shared,
                SubscriberDescription(
                    topic=topic,
                    title_=title,
                    description_=description,
                    include_in_schema=include_in_schema,
                ),
                calls,
            ),
            calls,
        )
        super().subscriber(subscriber, persistent=persistent)
        return subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: dict[str, Any] | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
        **options: Unpack[SendOptions],
    ) -> Publisher:
        """Add a publisher. As a decorator of a handler, it sends the results. It can also be called directly.

        Args:
            topic: The topic.
            headers: The headers of each message.
            persistent: Whether the broker keeps the publisher as long as it exists.
            title: The title in the AsyncAPI document.
            description: The description in the AsyncAPI document.
            schema: The type of the messages in the AsyncAPI document.
            include_in_schema: Whether the AsyncAPI document shows the publisher.
            options: The options of each message, see `SendOptions`.
        """
        shared = self._shared_config()
        described = PublisherDescription(
            topic=topic,
            title_=title,
            description_=description,
            schema_=schema,
            include_in_schema=include_in_schema,
        )
        publisher = Publisher(
            PublisherUsecaseConfig(_outer_config=shared),
            CometMQPublisherSpecification(shared, described),
            headers or {},
            options,
        )
        super().publisher(publisher, persistent=persistent)
        return publisher

    def _shared_config(self) -> CometMQBrokerConfig:
        """Return the configuration, which combines those of the broker and its routers."""
        config: Any = self.config
        return config  # type: ignore[no-any-return]

    def include_router(self, router: Registrator[Any, Any], **options: Any) -> None:
        """Add the subscribers and publishers of a router. Raises TypeError for routers of other brokers.

        Args:
            router: The router.
            options: `prefix`, `dependencies`, `middlewares` and `include_in_schema`, as in FastStream.
        """
        if not isinstance(router, CometMQRegistrator):
            raise TypeError(f"router must be a CometMQRouter, not {type(router).__name__}")
        super().include_router(router, **options)


class CometMQBroker(CometMQRegistrator, BrokerUsecase[MessageExt, Connection, CometMQBrokerConfig]):
    """A FastStream broker that uses a CometMQ or RocketMQ cluster."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        cluster: str | None = None,
        topic_queues: int = 4,
        client_options: ClientOptions | None = None,
        security: BaseSecurity | None = None,
        graceful_timeout: float | None = 15.0,
        ack_policy: AckPolicy = EMPTY,
        decoder: CustomCallable | None = None,
        parser: CustomCallable | None = None,
        codec: CodecProto | None = None,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        routers: Iterable[Registrator[Any, Any]] = (),
        id_generator: Callable[[], str] = gen_cor_id,
        specification_url: str | Iterable[str] | None = None,
        protocol: str | None = None,
        protocol_version: str | None = None,
        description: str | None = None,
        tags: Iterable[Tag | TagDict] = (),
        logger: LoggerProto | None = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: SerializerProto | None = EMPTY,
        provider: Provider | None = None,
        context: ContextRepo | None = None,
    ) -> None:
        """Create a broker. start() connects it and starts its subscribers.

        Args:
            namesrv: The name servers, `host:port` with `;` between them. None: the default of clients.
            cluster: The cluster in which topics are created. None: all clusters.
            topic_queues: The number of queues, per broker, of a topic that a subscriber creates.
            client_options: Namespace, timeouts and other settings of clients.
            security: `SASLPlaintext(access_key, secret_key)` for an account; `ssl_context` or `use_ssl` for
                TLS.
            graceful_timeout: How long stop() waits for running handlers, in seconds.
            ack_policy: The default policy of subscribers.
            decoder: A function that replaces or extends the decoder of bodies.
            parser: A function that replaces or extends the parser of messages.
            codec: The codec of bodies.
            dependencies: Dependencies of all handlers.
            middlewares: Middlewares of all subscribers and publishers.
            routers: Routers to include.
            id_generator: A function that returns the correlation id of a message without one.
            specification_url: The server in the AsyncAPI document. Default: the name servers.
            protocol: The protocol in the AsyncAPI document. Default: rocketmq, or rocketmq-secure.
            protocol_version: The version of the protocol in the AsyncAPI document.
            description: The description of the server in the AsyncAPI document.
            tags: The tags of the server in the AsyncAPI document.
            logger: The logger. Default: a logger that adds topic, group and message id to each line.
            log_level: The level of log lines about messages.
            apply_types: Whether arguments of handlers are validated and converted by their types.
            serializer: The library that validates arguments.
            provider: The provider of dependencies, which can override them.
            context: The context of the application.

        Raises:
            ConfigError: An address, an option or the kind of security is invalid.
        """
        own = client_options if client_options is not None else ClientOptions()
        addresses = namesrv_addresses(namesrv, own.namesrv_domain)
        if specification_url is None:
            specification_url = addresses or [str(own.namesrv_domain)]
        secure = security is not None and security.use_ssl
        super().__init__(
            routers=routers,
            config=CometMQBrokerConfig(
                producer=CometMQProducer(parser, decoder),
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=make_logger(logger=logger, log_level=log_level),
                fd_config=FastDependsConfig(
                    use_fastdepends=apply_types,
                    serializer=serializer,
                    provider=provider or dependency_provider,
                    context=context or ContextRepo(),
                ),
                broker_dependencies=dependencies,
                graceful_timeout=graceful_timeout,
                ack_policy=ack_policy,
                id_generator=id_generator,
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                description=description,
                url=[specification_url] if isinstance(specification_url, str) else list(specification_url),
                protocol=protocol or ("rocketmq-secure" if secure else "rocketmq"),
                protocol_version=protocol_version,
                tags=tags,
                security=security,
            ),
            namesrv=namesrv,
            options=secured(own, security),
            cluster=cluster,
            topic_queues=topic_queues,
        )
        self._changing = asyncio.Lock()
        """Held while the broker connects, starts or stops."""

    async def connect(self) -> Connection:
        """Connect to the cluster, unless connected. Raises CometError if no name server answers."""
        if self._connection is not None:
            return self._connection
        async with self._changing:
            return await super().connect()

    async def _connect(self) -> Connection:
        connection = await Connection.open(**self._connection_kwargs)
        config = self.config.broker_config
        config.opened = connection
        config.producer.connect(config)  # type: ignore[attr-defined]
        return connection

    async def start(self) -> None:
        """Connect, and start the subscribers.

        Raises:
            CometError: No name server answers, a topic cannot be created, or a subscription is refused.
        """
        async with self._changing:
            await super().connect()
            await super().start()

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop the subscribers, wait for running handlers up to `graceful_timeout`, and disconnect.

        A start() that is in progress is completed first.
        """
        async with self._changing:
            try:
                await super().stop(exc_type, exc_val, exc_tb)
            finally:
                connection, self._connection = self._connection, None
                self.config.broker_config.opened = None
                if connection is not None:
                    await connection.close()

    async def ping(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        """Return whether a name server answers within `timeout` seconds (default: 5)."""
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(timeout or 5.0):
                await self._connection.masters()
        except (CometError, TimeoutError):
            return False
        return True

    async def publish(
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        **options: Unpack[SendOptions],
    ) -> SendResult:
        """Send a message and wait until the broker has stored it.

        Args:
            message: The body, encoded as FastStream does.
            topic: The topic.
            headers: The headers. Their values become user properties of the message, as strings.
            correlation_id: The correlation id. Default: a new one.
            reply_to: A topic to which the results of handlers are published.
            options: The options of the message, see `SendOptions`.

        Raises:
            TypeError: An option does not exist.
            MessageIllegal: A header or an option is invalid.
            ConfigError: `delay_s` is out of range.
            CometError: The message could not be sent. It may be stored nevertheless.
        """
        cmd = CometMQPublishCommand(
            message,
            destination=topic,
            reply_to=reply_to,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            options=options,
            _publish_type=PublishType.PUBLISH,
        )
        sent: SendResult = await self._basic_publish(cmd, producer=self._producer)
        return sent

    async def request(  # type: ignore[override]
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        timeout: float = 3.0,  # noqa: ASYNC109 - FastStream's name
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **options: Unpack[SendOptions],
    ) -> CometMQMessage:
        """Send a message and wait for the result of a handler.

        Args:
            message: The body, encoded as FastStream does.
            topic: The topic.
            timeout: The maximum wait in seconds.
            headers: The headers of the message.
            correlation_id: The correlation id. Default: a new one.
            options: The options of the message, see `SendOptions`.

        Raises:
            ReplyTimeout: The message was sent, but no reply arrived in time.
            CometError: The message could not be sent, as in `publish`.
        """
        cmd = CometMQPublishCommand(
            message,
            destination=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            options=options,
            timeout_s=timeout,
            _publish_type=PublishType.REQUEST,
        )
        reply: CometMQMessage = await self._basic_request(cmd, producer=self._producer)
        return reply


class CometMQPublisher(ArgsContainer):
    """The arguments of a publisher, those of `CometMQBroker.publisher`, for a `CometMQRoute`."""


class CometMQRoute(SubscriberRoute):
    """A handler of a router. The arguments are those of `CometMQBroker.subscriber`, and `publishers`."""


class CometMQRouter(CometMQRegistrator, BrokerRouter[MessageExt, CometMQBrokerConfig]):
    """Subscribers and publishers that a broker includes, under a common prefix of topics."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[CometMQRoute] = (),
        *,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        routers: Iterable[Registrator[Any, Any]] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        include_in_schema: bool | None = None,
        ack_policy: AckPolicy = EMPTY,
    ) -> None:
        """Create a router. The arguments mean the same as in `CometMQBroker`."""
        super().__init__(
            handlers=handlers,
            config=CometMQBrokerConfig(
                prefix=prefix,
                ack_policy=ack_policy,
                broker_dependencies=dependencies,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                include_in_schema=include_in_schema,
            ),
            routers=routers,
        )

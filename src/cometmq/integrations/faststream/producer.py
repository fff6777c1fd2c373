"""The producer of a broker, publishers, and the publisher of replies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from faststream._internal.configs import PublisherSpecificationConfig, PublisherUsecaseConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import StreamMessage
from faststream.response import PublishCommand, PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSpec
from faststream.specification.schema import Operation, PublisherSpec

from cometmq import logs
from cometmq.client import select_by_hash
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.errors import BrokerError, CometError, MessageIllegal, NoRouteError
from cometmq.integrations.faststream.command import CometMQPublishCommand, SendOptions, check_names
from cometmq.integrations.faststream.config import CometMQBrokerConfig
from cometmq.integrations.faststream.message import CometMQMessage, CometMQParser, is_request
from cometmq.message import Message, MessageExt, SendResult
from cometmq.protocol.codes import ResponseCode
from cometmq.text import printable

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.basic_types import SendableMessage
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import AsyncCallable, CustomCallable, PublisherMiddleware

log = logs.logger(__name__)


class CometMQProducer(ProducerProto[CometMQPublishCommand]):
    """Encodes the messages of a broker and sends them."""

    def __init__(self, parser: CustomCallable | None, decoder: CustomCallable | None) -> None:
        replies = CometMQParser()
        self._parser: AsyncCallable = ParserComposition(parser, replies.parse_message)
        self._decoder: AsyncCallable = ParserComposition(decoder, replies.decode_message)
        self.codec: CodecProto = DefaultCodec()
        self.serializer: SerializerProto | None = None
        self.config = CometMQBrokerConfig()

    def connect(self, config: CometMQBrokerConfig) -> None:
        """Set the connection, serializer and codec of the broker."""
        self.config = config
        self.serializer = config.fd_config._serializer  # noqa: SLF001 - as FastStream's own producers
        self.codec = config.broker_codec or DefaultCodec()

    async def message_of(self, cmd: CometMQPublishCommand) -> Message:
        """Return the message of a command, with its body encoded."""
        return cmd.as_message(*await self.codec.encode(cmd.body, self.serializer))

    async def publish(self, cmd: CometMQPublishCommand) -> SendResult | None:
        """Send a message. Return None if it is a reply that is empty or cannot be delivered."""
        sharding_key = cmd.options.get("sharding_key")
        selector = select_by_hash if sharding_key is not None and cmd.request is None else None
        is_reply = cmd.publish_type is PublishType.REPLY
        try:
            message = await self.message_of(cmd)
            if is_reply and not message.body:  # The handler has no result. Brokers refuse empty messages
                return None
            return await self.config.connection.producer.send(
                message, selector=selector, argument=sharding_key
            )
        except CometError as error:
            if not is_reply or not _is_of_destination(error, to_requester=cmd.request is not None):
                raise
            # The handler has succeeded, and must not run again because of what its sender asked for.
            log.warning(
                "a reply to %s was not delivered: %s", printable(cmd.destination), printable(str(error))
            )
            return None

    async def request(self, cmd: CometMQPublishCommand) -> MessageExt:
        """Send a message and return its reply."""
        sharding_key = cmd.options.get("sharding_key")
        return await self.config.connection.producer.request(
            await self.message_of(cmd),
            selector=None if sharding_key is None else select_by_hash,
            argument=sharding_key,
            timeout_s=cmd.timeout_s,
        )

    async def publish_batch(self, cmd: CometMQPublishCommand) -> None:
        """Raise FeatureNotSupportedException: CometMQ's broker publishes single messages."""
        del cmd
        raise FeatureNotSupportedException("CometMQBroker does not publish batches: publish single messages.")


def _is_of_destination(error: CometError, *, to_requester: bool) -> bool:
    """Return whether a reply failed because its requester is offline or its topic is unusable."""
    if isinstance(error, BrokerError):
        return to_requester or error.code in (ResponseCode.NO_PERMISSION, ResponseCode.TOPIC_NOT_EXIST)
    if isinstance(error, MessageIllegal):
        return error.field == "topic"
    return isinstance(error, NoRouteError) and not isinstance(error, NameServersUnreachable)


class ReplyPublisher(FakePublisher):
    """Publishes a handler's result to the sender of the message, or to the topic in its `reply_to`."""

    def __init__(self, producer: ProducerProto[Any], message: StreamMessage[MessageExt]) -> None:
        super().__init__(producer=producer)
        self._message = message

    def patch_command(self, cmd: PublishCommand) -> CometMQPublishCommand:
        """Return the command with the destination of the reply."""
        patched = CometMQPublishCommand.from_cmd(super().patch_command(cmd))
        if is_request(self._message.raw_message):
            patched.request = self._message.raw_message
        patched.destination = self._message.reply_to
        return patched


@dataclass(kw_only=True)
class PublisherDescription(PublisherSpecificationConfig):
    """The arguments of a publisher that the AsyncAPI document shows."""

    topic: str


class CometMQPublisherSpecification(PublisherSpecification[CometMQBrokerConfig, PublisherDescription]):
    """The AsyncAPI description of a publisher."""

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        """The name of the channel."""
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the description by channel name."""
        payload = resolve_payloads(self.get_payloads(), "Publisher")
        return {
            self.name: PublisherSpec(
                address=self.topic,
                description=self.config.description_,
                operation=Operation(
                    message=MessageSpec(title=f"{self.name}:Message", payload=payload), bindings=None
                ),
                bindings=None,
            )
        }


class CometMQPublisher(PublisherUsecase):
    """A publisher of one topic. It sends messages, or the results of a handler that it decorates."""

    def __init__(
        self,
        config: PublisherUsecaseConfig,
        specification: CometMQPublisherSpecification,
        headers: dict[str, Any],
        options: SendOptions,
    ) -> None:
        super().__init__(config, specification)  # type: ignore[arg-type]
        check_names(options)
        self._described = specification
        self.headers = headers
        self.options = options

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of its routers."""
        return self._described.topic

    async def publish(
        self,
        message: SendableMessage,
        topic: str = "",
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        **options: Unpack[SendOptions],
    ) -> SendResult | None:
        """Send a message. The arguments, as in `CometMQBroker.publish`, override the publisher's."""
        cmd = self._command(PublishType.PUBLISH, message, topic, headers, correlation_id, options)
        cmd.reply_to = reply_to
        sent: SendResult | None = await self._basic_publish(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return sent

    async def request(
        self,
        message: SendableMessage,
        topic: str = "",
        *,
        timeout: float = 3.0,  # noqa: ASYNC109 - FastStream's name
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **options: Unpack[SendOptions],
    ) -> CometMQMessage:
        """Send a message and return its reply. The arguments are those of `CometMQBroker.request`."""
        cmd = self._command(PublishType.REQUEST, message, topic, headers, correlation_id, options)
        cmd.timeout_s = timeout
        reply: CometMQMessage = await self._basic_request(cmd, producer=self._outer_config.producer)
        return reply

    def _command(
        self,
        kind: PublishType,
        message: SendableMessage,
        topic: str,
        headers: dict[str, Any] | None,
        correlation_id: str | None,
        options: SendOptions,
    ) -> CometMQPublishCommand:
        return CometMQPublishCommand(
            message,
            destination=topic or self.topic,
            headers=self.headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            options={**self.options, **options},
            _publish_type=kind,
        )

    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: Iterable[PublisherMiddleware]
    ) -> None:
        """Send the result of a handler."""
        own = CometMQPublishCommand.from_cmd(cmd)
        own.destination = own.destination or self.topic
        own.add_headers(self.headers, override=False)
        own.options = {**self.options, **own.options}
        await self._basic_publish(
            own, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares
        )

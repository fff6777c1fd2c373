"""OpenTelemetry spans and metrics of published and received messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faststream.message import StreamMessage
from faststream.opentelemetry import TelemetryMiddleware, TelemetrySettingsProvider
from faststream.opentelemetry.consts import MESSAGING_DESTINATION_PUBLISH_NAME
from opentelemetry.semconv.trace import SpanAttributes

from cometmq.integrations.faststream.command import CometMQPublishCommand
from cometmq.message import MessageExt

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import TracerProvider


class _Settings(TelemetrySettingsProvider[MessageExt, CometMQPublishCommand]):
    """The attributes of spans, read from messages and commands."""

    def __init__(self) -> None:
        self.messaging_system = "rocketmq"

    def get_consume_attrs_from_message(self, msg: StreamMessage[MessageExt]) -> dict[str, Any]:
        raw = msg.raw_message
        found: dict[str, Any] = {
            SpanAttributes.MESSAGING_SYSTEM: self.messaging_system,
            SpanAttributes.MESSAGING_MESSAGE_ID: msg.message_id,
            SpanAttributes.MESSAGING_MESSAGE_CONVERSATION_ID: msg.correlation_id,
            SpanAttributes.MESSAGING_MESSAGE_PAYLOAD_SIZE_BYTES: len(msg.body),
            MESSAGING_DESTINATION_PUBLISH_NAME: raw.topic,
        }
        if raw.tags:
            found[SpanAttributes.MESSAGING_ROCKETMQ_MESSAGE_TAG] = raw.tags
        if raw.keys:
            found[SpanAttributes.MESSAGING_ROCKETMQ_MESSAGE_KEYS] = raw.keys
        return found

    def get_consume_destination_name(self, msg: StreamMessage[MessageExt]) -> str:
        return msg.raw_message.topic

    def get_publish_attrs_from_cmd(self, cmd: CometMQPublishCommand) -> dict[str, Any]:
        return {
            SpanAttributes.MESSAGING_SYSTEM: self.messaging_system,
            SpanAttributes.MESSAGING_DESTINATION_NAME: cmd.destination,
            SpanAttributes.MESSAGING_MESSAGE_CONVERSATION_ID: cmd.correlation_id,
        }

    def get_publish_destination_name(self, cmd: CometMQPublishCommand) -> str:
        return cmd.destination


class CometMQTelemetryMiddleware(TelemetryMiddleware[CometMQPublishCommand]):
    """Spans of published and received messages, and their metrics."""

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        meter: Meter | None = None,
        include_messages_counters: bool = True,
    ) -> None:
        """Create the middleware. The arguments are those of FastStream's other brokers."""
        super().__init__(
            settings_provider_factory=lambda _: _Settings(),
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
            meter=meter,
            include_messages_counters=include_messages_counters,
        )

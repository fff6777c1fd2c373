"""Metrics of published and received messages for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from faststream._internal.constants import EMPTY
from faststream.message import StreamMessage
from faststream.prometheus import ConsumeAttrs, MetricsSettingsProvider, PrometheusMiddleware

from cometmq.integrations.faststream.command import CometMQPublishCommand
from cometmq.message import MessageExt

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class _Settings(MetricsSettingsProvider[MessageExt, CometMQPublishCommand]):
    """The values of the labels, read from messages and commands."""

    def __init__(self) -> None:
        self.messaging_system = "rocketmq"

    def get_consume_attrs_from_message(self, msg: StreamMessage[MessageExt]) -> ConsumeAttrs:
        return {
            "destination_name": msg.raw_message.topic,
            "message_size": len(msg.body),
            "messages_count": 1,
        }

    def get_publish_destination_name_from_cmd(self, cmd: CometMQPublishCommand) -> str:
        return cmd.destination


class CometMQPrometheusMiddleware(PrometheusMiddleware[MessageExt, CometMQPublishCommand]):
    """Counts and measures published and received messages."""

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        app_name: str = EMPTY,
        metrics_prefix: str = "faststream",
        received_messages_size_buckets: Sequence[float] | None = None,
        custom_labels: dict[str, str | Callable[[Any], str]] | None = None,
    ) -> None:
        """Create the middleware. The arguments are those of FastStream's other brokers."""
        super().__init__(
            settings_provider_factory=lambda _: _Settings(),
            registry=registry,
            app_name=app_name,
            metrics_prefix=metrics_prefix,
            received_messages_size_buckets=received_messages_size_buckets,
            custom_labels=custom_labels,
        )

"""Messages to be published: their options, responses of handlers, and FastStream's commands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from faststream.response import PublishCommand, PublishType, Response

from cometmq.client import reply_to
from cometmq.client.cluster.options import check_range
from cometmq.errors import MessageIllegal
from cometmq.integrations.faststream.message import CONTENT_TYPE, CORRELATION_ID, REPLY_TO
from cometmq.message import Message, MessageExt
from cometmq.protocol.properties.values import SHARDING_KEY, is_reserved

_MAX_DELAY_S = 1e9
"""The maximum `delay_s`. Brokers have a lower limit, 3 days by default."""


class SendOptions(TypedDict, total=False):
    """The options of a message that RocketMQ defines.

    Attributes:
        tag: The tag, by which subscribers filter.
        keys: The keys by which the message can be searched, a list or tuple.
        sharding_key: The key that selects the queue. Messages with the same key go to the same queue, where
            an orderly subscriber consumes them in order.
        delay_s: The delay of the delivery in seconds.
        deliver_at: The time of the delivery, instead of `delay_s`.
        priority: The priority, in a topic of type PRIORITY.
    """

    tag: str | None
    keys: Sequence[str]
    sharding_key: str | None
    delay_s: float
    deliver_at: datetime | None
    priority: int | None


def check_names(options: SendOptions) -> None:
    """Raise TypeError for an option that does not exist."""
    for name in options.keys() - SendOptions.__annotations__.keys():
        raise TypeError(f"unknown option {name!r}, not one of {', '.join(SendOptions.__annotations__)}")


class CometMQResponse(Response):
    """The result of a handler, with headers and options of the message that is published."""

    def __init__(
        self,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Create a response; `options` are those of `SendOptions`."""
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        check_names(options)
        self.options = options

    def as_publish_command(self) -> CometMQPublishCommand:
        """Return the command that publishes the response."""
        return CometMQPublishCommand(
            self.body,
            headers=self.headers,
            correlation_id=self.correlation_id,
            options=self.options,
            _publish_type=PublishType.PUBLISH,
        )

    def get_publish_key(self) -> str | None:
        """Return the sharding key."""
        return self.options.get("sharding_key")


class CometMQPublishCommand(PublishCommand):
    """A message to be published, before its body is encoded.

    Attributes:
        options: The options of the message.
        timeout_s: How long a request waits for its reply, in seconds.
        request: The message that this command replies to; None for any other message.
    """

    def __init__(
        self,
        body: Any,
        *,
        _publish_type: PublishType,
        destination: str = "",
        reply_to: str = "",
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        options: SendOptions | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        super().__init__(
            body,
            _publish_type=_publish_type,
            destination=destination,
            reply_to=reply_to,
            headers=headers,
            correlation_id=correlation_id,
        )
        self.options: SendOptions = options if options is not None else {}
        check_names(self.options)
        self.timeout_s = timeout_s
        self.request: MessageExt | None = None

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> CometMQPublishCommand:
        """Return the command. Convert it if it comes from another broker's response."""
        if isinstance(cmd, CometMQPublishCommand):
            return cmd
        return cls(
            cmd.body,
            destination=cmd.destination,
            reply_to=cmd.reply_to,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            _publish_type=cmd.publish_type,
        )

    def as_message(self, body: bytes, content_type: str | None) -> Message:
        """Return the message to send, whose user properties are the headers. Raises MessageIllegal."""
        options = self.options
        tag, keys = options.get("tag"), options.get("keys", ())
        own = {CONTENT_TYPE: content_type, CORRELATION_ID: self.correlation_id, REPLY_TO: self.reply_to}
        headers = self.headers | {name: value for name, value in own.items() if value}
        properties = {name: str(value) for name, value in headers.items()}
        for name in filter(is_reserved, properties):
            raise MessageIllegal(f"a header cannot be named {name}: RocketMQ uses it", self.destination, name)
        if self.request is not None:
            return reply_to(self.request, body, tags=tag, keys=keys, properties=properties)
        if (sharding_key := options.get("sharding_key")) is not None:
            properties[SHARDING_KEY] = sharding_key
        delay_s, deliver_at = options.get("delay_s", 0.0), options.get("deliver_at")
        check_range("delay_s", delay_s, 0.0, _MAX_DELAY_S)
        return Message(
            self.destination,
            body,
            tag,
            keys,
            delay_ms=round(delay_s * 1000),
            deliver_at_ms=0 if deliver_at is None else round(deliver_at.timestamp() * 1000),
            priority=options.get("priority"),
            properties=properties,
        )

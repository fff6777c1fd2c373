"""Received messages of FastStream, and their parser."""

from __future__ import annotations

from typing import Any

from faststream.message import StreamMessage, decode_message

from cometmq.client import MessageStream
from cometmq.message import MessageExt
from cometmq.protocol.properties import values as names

CONTENT_TYPE, CORRELATION_ID, REPLY_TO = "content-type", "correlation_id", "reply_to"
"""The user properties that carry FastStream's own headers, as in its Kafka messages."""
_REQUEST = (names.CLUSTER, names.CORRELATION_ID, names.REPLY_TO_CLIENT, names.TTL)
"""The properties of a message whose sender waits for a reply."""


class CometMQMessage(StreamMessage[MessageExt]):
    """A received message. `raw_message` is the message of CometMQ's client.

    The first call of ack(), nack() or reject() settles the message. Later calls have no effect.
    """

    def __init__(
        self, *args: Any, stream: MessageStream | None = None, orderly: bool = False, **kwargs: Any
    ) -> None:
        """Create a message of `stream`. None for a reply to a request, which is not settled."""
        super().__init__(*args, **kwargs)
        self._stream = stream
        self._orderly = orderly

    async def ack(self) -> None:
        """Acknowledge the message as consumed.

        Raises:
            ClientStateError: The message was held too long, or its queue is now assigned to another member.
                The message is delivered again.
        """
        if self.committed is None and self._stream is not None:
            await self._stream.ack(self.raw_message)
        await super().ack()

    async def nack(self, delay_level: int = 0) -> None:
        """Request a later redelivery. After too many retries the message goes to the dead-letter queue.

        Args:
            delay_level: The delay, one of the broker's levels from 1 (1 s) to 18 (2 h). 0: the delay grows
                with the number of retries. For an orderly subscriber, only 0 is valid: its queue waits.

        Raises:
            ClientStateError: The message cannot be settled any more, as in `ack`.
            ConfigError: The delay level is invalid.
        """
        if self.committed is None and self._stream is not None:
            await self._stream.nack(self.raw_message, delay_level)
        await super().nack()

    async def reject(self) -> None:
        """Move the message to the dead-letter queue of the group.

        Raises:
            CometError: The message cannot be settled any more, as in `ack`, or no broker accepts it.
        """
        stream = self._stream
        if self.committed is None and stream is not None:
            if self._orderly:
                await stream.send_message_back(self.raw_message, -1)
                await stream.ack(self.raw_message)
            else:
                await stream.nack(self.raw_message, -1)
        await super().reject()


def is_request(message: MessageExt) -> bool:
    """Return whether the sender of a message waits for a reply (`Producer.request`)."""
    return all(message.properties.get(name) for name in _REQUEST)


class CometMQParser:
    """The parser of a subscriber's messages, or of replies."""

    def __init__(self, *, orderly: bool = False) -> None:
        self.stream: MessageStream | None = None
        """The stream on which messages are settled. A subscriber sets it when it starts."""
        self._orderly = orderly

    async def parse_message(self, message: MessageExt) -> CometMQMessage:
        """Return a received message as FastStream's message, whose headers are the user properties."""
        headers = message.user_properties
        asked = message.properties[names.REPLY_TO_CLIENT] if is_request(message) else ""
        return CometMQMessage(
            raw_message=message,
            body=message.body,
            headers=headers,
            reply_to=asked or headers.get(REPLY_TO, ""),
            content_type=headers.get(CONTENT_TYPE),
            correlation_id=headers.get(CORRELATION_ID) or message.properties.get(names.CORRELATION_ID),
            message_id=message.msg_id,
            stream=self.stream,
            orderly=self._orderly,
        )

    async def decode_message(self, message: StreamMessage[Any]) -> Any:
        """Decode a body by its content type: JSON, text, or otherwise bytes."""
        return decode_message(message)

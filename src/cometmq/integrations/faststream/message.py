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
    """A received message. The message as the client received it is `raw_message`.

    Each message is settled once; later calls of ack(), nack() and reject() have no effect.
    """

    def __init__(
        self, *args: Any, stream: MessageStream | None = None, orderly: bool = False, **kwargs: Any
    ) -> None:
        """Create a message of `stream`. None: settling it has no effect, as with the reply to a request."""
        super().__init__(*args, **kwargs)
        self._stream = stream
        self._orderly = orderly

    async def ack(self) -> None:
        """Acknowledge the message as consumed.

        Raises:
            ClientStateError: The message was held too long, or its queue belongs to another member now. It is
                delivered again.
        """
        if self.committed is None and self._stream is not None:
            await self._stream.ack(self.raw_message)
        await super().ack()

    async def nack(self, delay_level: int = 0) -> None:
        """Have the message delivered again later, or moved to the dead-letter queue after too many retries.

        Args:
            delay_level: The delay, one of the broker's levels from 1 (1 s) to 18 (2 h). 0: the broker chooses
                it by the number of retries. An orderly subscriber accepts 0 only: its queue waits.

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
    """Return whether the sender of a message waits for a reply, as Producer.request does."""
    return all(message.properties.get(name) for name in _REQUEST)


class CometMQParser:
    """The parser of a subscriber's messages, or of replies."""

    def __init__(self, *, orderly: bool = False) -> None:
        self.stream: MessageStream | None = None
        """The stream on which messages are settled. A subscriber sets it when it starts."""
        self._orderly = orderly

    async def parse_message(self, message: MessageExt) -> CometMQMessage:
        """Return FastStream's form of a received message. Its headers are the user properties."""
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
        """Return the body of a message: JSON or text if its content type says so, otherwise bytes."""
        return decode_message(message)

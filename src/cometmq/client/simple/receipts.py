"""Receipt handles of leased messages, kept in the message's property POP_CK."""

from __future__ import annotations

from collections.abc import Iterable

from cometmq.errors import MessageIllegal
from cometmq.message import MessageExt
from cometmq.protocol.headers import PopMessageResponseHeader
from cometmq.protocol.pop import PopFormatError, ReceiptHandle, Receipts
from cometmq.protocol.properties.values import FIRST_POP_TIME, POP_CK


def attach_receipts(
    messages: Iterable[MessageExt], header: PopMessageResponseHeader, topic: str, broker_name: str
) -> None:
    """Add the receipt handle to each message of a response, and restore its topic.

    Args:
        messages: The messages of the response.
        header: The header of the response.
        topic: The topic of the request, which replaces the retry topic in a message.
        broker_name: The broker that sent the response.

    Raises:
        PopFormatError: A field of the header is invalid.
    """
    receipts = Receipts(header, topic, broker_name)
    for message in messages:
        handle, deliveries = receipts.of(message)
        message.properties[POP_CK] = handle.encode()
        message.properties.setdefault(FIRST_POP_TIME, str(header.pop_time))
        message.topic = topic
        message.reconsume_times = deliveries


def receipt_of(message: MessageExt) -> ReceiptHandle:
    """Return the receipt handle of a received message.

    Raises:
        MessageIllegal: The message has no valid handle, because it was not returned by receive().
    """
    text = message.properties.get(POP_CK)
    try:
        if text is not None and (handle := ReceiptHandle.decode(text)).offset is not None:
            return handle
    except PopFormatError:
        pass
    problem = f"message {message.msg_id} has no receipt handle: receive() of a simple consumer returns one"
    raise MessageIllegal(problem, message.topic, POP_CK)

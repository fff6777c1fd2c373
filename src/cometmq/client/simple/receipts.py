"""Receipt handles of leased messages, kept in the message's property POP_CK.

The client builds the handle of a message from the response that delivered it. Only for a message from a retry
topic, whose record the broker rewrites, the broker puts the handle into the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cometmq.errors import MessageIllegal
from cometmq.message import MessageExt
from cometmq.protocol.headers import PopMessageResponseHeader
from cometmq.protocol.pop import (
    CountKey,
    PopFormatError,
    QueueKey,
    ReceiptHandle,
    TopicKind,
    decode_order_counts,
    decode_start_offsets,
    rewritten_handle,
)
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
    starts = decode_start_offsets(header.start_offset_info)
    counts = decode_order_counts(header.order_count_info)
    for message in messages:
        text, place = message.properties.get(POP_CK, ""), (message.queue_id, message.queue_offset)
        handle = rewritten_handle(text, header.pop_time, broker_name, *place)
        handle = handle or _built(message, header, starts, broker_name)
        message.properties[POP_CK] = handle.encode()
        message.properties.setdefault(FIRST_POP_TIME, str(header.pop_time))
        message.topic = topic
        message.reconsume_times = _deliveries(counts, handle) or message.reconsume_times


def _built(
    message: MessageExt,
    header: PopMessageResponseHeader,
    starts: Mapping[QueueKey, int],
    broker_name: str,
) -> ReceiptHandle:
    kind = TopicKind.of(message.topic)
    return ReceiptHandle(
        starts.get((kind, message.queue_id), message.queue_offset),
        header.pop_time,
        header.invisible_time,
        header.revive_qid,
        kind,
        broker_name,
        message.queue_id,
        message.queue_offset,
    )


def _deliveries(counts: Mapping[CountKey, int], handle: ReceiptHandle) -> int:
    """Return how often a message of ordered consumption was delivered before, 0 if that is unknown."""
    of_queue = counts.get((handle.kind, handle.queue_id, None), 0)
    return counts.get((handle.kind, handle.queue_id, handle.offset), of_queue)


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

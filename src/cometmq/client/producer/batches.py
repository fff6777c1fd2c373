"""Division of messages into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cometmq.client.cluster.telemetry import context_room
from cometmq.message import Message
from cometmq.protocol.batch import MIN_ITEM
from cometmq.protocol.properties.values import encode_properties

__all__ = ["split_batches"]

_UNIQUE_KEY = len("\x02UNIQ_KEY\x01") + 56
"""Bytes that a send adds to the properties, for a client with an IPv6 address."""


def split_batches(messages: Iterable[Message], max_bytes: int = 4 * 1024 * 1024) -> Iterator[list[Message]]:
    """Yield batches for `Producer.send_batch` with the messages in their order.

    A message that cannot share a batch with its predecessor (another topic or another wait_store) begins a
    new one. Messages are consumed from the iterable as needed. With OpenTelemetry, each batch leaves room for
    the context that a send in the current span adds.

    Args:
        messages: The messages.
        max_bytes: The maximum size of the messages of a batch with their properties in bytes, as
            ProducerOptions.max_message_size. A larger message is in a batch of its own, which a send refuses.
    """
    added = MIN_ITEM + _UNIQUE_KEY + context_room()
    batch: list[Message] = []
    size = 0
    for message in messages:
        more = added + len(message.body) + len(encode_properties(message.wire_properties()))
        if batch and (
            size + more > max_bytes
            or message.topic != batch[0].topic
            or message.wait_store != batch[0].wait_store
        ):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += more
    if batch:
        yield batch

"""Cutting many messages into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cometmq.client.cluster.telemetry import context_room
from cometmq.message import Message
from cometmq.protocol.batch import MIN_ITEM
from cometmq.protocol.properties.values import encode_properties

__all__ = ["split_batches"]

_UNIQUE_KEY = len("\x02UNIQ_KEY\x01") + 56
"""Bytes of what a send adds to the properties, on a client with an IPv6 address."""


def split_batches(messages: Iterable[Message], max_bytes: int = 4 * 1024 * 1024) -> Iterator[list[Message]]:
    """Batches for `Producer.send_batch`, one after another, with the messages in their order.

    max_bytes: of the messages of a batch with their properties, as ProducerOptions.max_message_size; a larger
    message has a batch of its own, which a send refuses. A message that cannot share the batch before it
    (another topic, or another wait_store) begins a new one. Messages are taken as they are needed. With
    OpenTelemetry there is room for the context that a send in the current span adds.
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

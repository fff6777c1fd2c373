"""Records as pops deliver them.

A message of a retry topic is delivered under the name of the topic that the consumer has subscribed to, and
with its receipt handle as a property, as Apache's broker does it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.protocol.properties.values import put
from cometmq.protocol.record.layout import LENGTH, MAX_PROPERTIES, START
from cometmq.protocol.record.one import (
    queue_offset_of,
    record_parts,
    record_starts,
    topic_part,
)
from cometmq.store import Buffer

POP_CK = b"POP_CK"


def renamed(record: Buffer, topic: str, handle: bytes) -> bytes:
    """Return a record with another topic and with a receipt handle as its property POP_CK.

    If its properties would become too long, the record is returned unchanged; the client then computes the
    handle from the response and the name of the retry topic.

    Raises:
        RecordError: The record is damaged.
    """
    _, _, body_end, _, topic_end = record_parts(record, 0)
    properties = put(bytes(record[topic_end + 2 :]), POP_CK, handle)
    if len(properties) > MAX_PROPERTIES:
        return bytes(record)
    name, magic = topic_part(topic)
    rest = b"".join((record[START.size : body_end], name, LENGTH.pack(len(properties)), properties))
    return START.pack(START.size + len(rest), magic) + rest


def split(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return each record by itself."""
    found: list[Buffer] = []
    for buffer in buffers:
        starts, end = record_starts(buffer)
        found += [buffer[begin:stop] for begin, stop in zip(starts, [*starts[1:], end], strict=True)]
    return found


def offsets_of(records: Sequence[Buffer]) -> list[int]:
    """Return the queue offset of each record."""
    return [queue_offset_of(record, 0) for record in records]

"""Records of retry topics whose name several groups share.

If groups pop, `%RETRY%a_b_c` is the retry topic of group `a` for topic `b_c` and of group `a_b` for topic
`c`. If group `a_b_c` pulls, it is the retry topic of this group, for all topics. A retry of a pop has the
property ORIGIN_GROUP (at Apache's brokers since 5.4). A message that was sent back has the property
RETRY_TOPIC, its original topic.
"""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import RecordError
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.one import properties_of
from cometmq.store import Buffer, Unit

ORIGIN_GROUP, RETRY_TOPIC = b"ORIGIN_GROUP", b"RETRY_TOPIC"


def is_retry_of(record: Buffer, group: str, topic: str) -> bool:
    """Return whether a record of a retry topic is a retry of a group that pops a topic."""
    properties = properties_of(record)
    origin = value_of(properties, ORIGIN_GROUP)
    if origin:
        return origin == group.encode()
    return value_of(properties, RETRY_TOPIC) in (b"", topic.encode())


def find_sent_back(
    group: bytes,
    data: bytes | bytearray,
    start: int,
    units: Sequence[Unit],
    first: int,
    stop: int,
) -> tuple[int, bool | None]:
    """Search for the next record that a group that pulls its retry topic may read (see `RecordFilter`).

    Retries of other groups' pops are left out, because they are messages of other topics.
    """
    for index in range(first, stop):
        position, size, _ = units[index]
        at = position - start
        if at < 0 or at + size > len(data):
            return index, False
        try:
            properties = properties_of(data, at)
        except RecordError:
            return index, True
        if value_of(properties, ORIGIN_GROUP) in (b"", group) or value_of(properties, RETRY_TOPIC):
            return index, True
    return stop, False

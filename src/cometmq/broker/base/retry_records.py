"""Records of retry topics whose name several groups share.

If groups pop, `%RETRY%a_b_c` is the retry topic of group `a` for topic `b_c` and of group `a_b` for topic
`c`. If group `a_b_c` pulls, it is the retry topic of this group, for all topics. A retry of a pop has the
property ORIGIN_GROUP (at Apache's brokers since 5.4). A message that was sent back has the property
RETRY_TOPIC, its original topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cometmq.errors import RecordError
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.one import properties_of
from cometmq.store import Buffer, RecordFilter, Unit

ORIGIN_GROUP, RETRY_TOPIC = b"ORIGIN_GROUP", b"RETRY_TOPIC"


def is_retry_of(record: Buffer, group: str, topic: str) -> bool:
    """Return whether a record of a retry topic is a retry of a group that pops a topic."""
    properties = properties_of(record)
    origin = value_of(properties, ORIGIN_GROUP)
    if origin:
        return origin == group.encode()
    return value_of(properties, RETRY_TOPIC) in (b"", topic.encode())


def sent_back_only(topic: str, wanted: RecordFilter) -> RecordFilter:
    """Return a filter of the records that readers of a topic may have, and that `wanted` accepts.

    It is `wanted` itself, unless the name of the topic may be that of a retry topic of pops.
    """
    group = _sharing_group(topic)
    if not group:
        return wanted
    find = partial(find_sent_back, group)
    if wanted is None:
        return find

    def find_both(
        data: bytes | bytearray, start: int, units: Sequence[Unit], first: int, stop: int
    ) -> tuple[int, bool | None]:
        while first < stop:
            index, passes = find(data, start, units, first, stop)
            if not passes:
                return index, passes
            first, passes = wanted(data, start, units, index, index + 1)
            if passes is not False or first == index:
                return first, passes
        return first, False

    return find_both


def _sharing_group(topic: str) -> bytes:
    """Return the group that pulls a retry topic whose name groups that pop may share, or b""."""
    group = topic.removeprefix(RETRY_PREFIX)
    return group.encode() if group != topic and ("_" in group or "+" in group) else b""


def may_read(topic: str, record: Buffer) -> bool:
    """Return whether readers of a topic may have this record of it. Raises RecordError."""
    group = _sharing_group(topic)
    return not group or _is_sent_back(group, properties_of(record))


def _is_sent_back(group: bytes, properties: bytes) -> bool:
    return value_of(properties, ORIGIN_GROUP) in (b"", group) or bool(value_of(properties, RETRY_TOPIC))


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
        if _is_sent_back(group, properties):
            return index, True
    return stop, False

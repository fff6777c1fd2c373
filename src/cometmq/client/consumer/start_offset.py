"""Where a consumer starts on a queue that it newly holds."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.client.consumer.options import ConsumeFromWhere
from cometmq.protocol.codes import RETRY_PREFIX

__all__ = ["Start", "StartAt", "StartAtMax", "StartAtTime", "start_of"]


@dataclass(frozen=True, slots=True)
class StartAt:
    offset: int


@dataclass(frozen=True, slots=True)
class StartAtMax:
    """Ask the broker for the queue's end."""


@dataclass(frozen=True, slots=True)
class StartAtTime:
    """Ask the broker for the offset of a store time."""

    timestamp_ms: int


Start = StartAt | StartAtMax | StartAtTime


def start_of(where: ConsumeFromWhere, stored: int | None, topic: str, timestamp_ms: int) -> Start:
    """`stored` is the group's offset as the offset store has it, None when it has none.

    A broker that still holds the first message of a queue answers 0 for an unknown group, so a new group on a
    young topic starts at 0 even with LAST_OFFSET. A store that cannot be read is an error of the caller,
    never None: taking it for "none" would skip messages.
    """
    if stored is not None:
        return StartAt(stored)
    is_retry = topic.startswith(RETRY_PREFIX)
    if where is ConsumeFromWhere.FIRST_OFFSET:
        return StartAt(0)
    if where is ConsumeFromWhere.TIMESTAMP:
        return StartAtMax() if is_retry else StartAtTime(timestamp_ms)
    return StartAt(0) if is_retry else StartAtMax()

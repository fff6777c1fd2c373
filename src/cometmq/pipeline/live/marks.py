"""Marks of records, which show that a queue has been replaced since it was read.

A mark is the log position and the store time of a record. If a topic is deleted and created again, or a
broker loses its newest records, the same offsets are assigned a second time. Once the queue has grown past
the old offset, the offsets no longer show the replacement. The mark of the last record read shows it, because
two records never have the same log position and the same store time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cometmq import logs
from cometmq.errors import ConfigError, RecordError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.base.offsets import MARKS_KEY, Offsets, Tree, to_tree
from cometmq.pipeline.base.plan import Bounds, shrunk
from cometmq.protocol.record.one import place_of, record_starts

log = logs.logger(__name__)

CLOCKS_MS = 60_000
"""Maximum difference, in ms, between the clocks of a broker and of the broker that replaced it."""


class Mark(NamedTuple):
    """The position of a record in the broker's log, and its store time (ms since 1970)."""

    position: int
    stored_ms: int


Marks = dict[MessageQueue, Mark]


def mark_of(record: bytes) -> tuple[int, Mark]:
    """Return the queue offset and the mark of the record at the start of the bytes. Raises RecordError."""
    place = place_of(record) if record_starts(record, most=1)[0] else None
    if place is None:
        raise RecordError(0, "length", "no record of that length and magic number")
    return place.queue_offset, Mark(place.physical_offset, place.store_timestamp_ms)


def mark_at(offset: int, record: bytes) -> Mark | None:
    """Return the mark of the record at the start of the bytes, or None unless its offset is `offset`."""
    with suppress(RecordError):
        at, mark = mark_of(record)
        if at == offset:
            return mark
    return None


def with_marks(tree: Tree, marks: Marks) -> Tree:
    """Return a logged position with the marks of the records just before the offsets in it."""
    return (
        {MARKS_KEY: to_tree({queue: list(mark) for queue, mark in marks.items()}), **tree} if marks else tree
    )


def marks_in(tree: Mapping[str, Any]) -> Marks:
    """Return the marks in a logged position. Old versions of CometMQ logged none."""
    try:
        return {
            MessageQueue(topic, broker_name, int(queue)): Mark(int(position), int(stored_ms))
            for topic, brokers in tree.get(MARKS_KEY, {}).items()
            for broker_name, queues in brokers.items()
            for queue, (position, stored_ms) in queues.items()
        }
    except (AttributeError, TypeError, ValueError):
        expected = '{"topic": {"broker-name": {"queue number": [log position, store time]}}}'
        raise ConfigError(MARKS_KEY, json.dumps(tree.get(MARKS_KEY)), expected) from None


def replaced(
    read: Offsets, kept: Marks, found: Marks, bounds: Mapping[MessageQueue, Bounds]
) -> dict[MessageQueue, DataLossError]:
    """Return the queues of `bounds` that were replaced since they were read, each with an error.

    A queue counts as replaced if it now ends before the offset in `read` up to which it was read, or if the
    mark of the last record that was read (`kept`) differs from that of the record there now (`found`).
    """
    problems = dict.fromkeys(shrunk(read, bounds), "the queue is shorter than what was read from it")
    for queue, mark in found.items():
        before = kept.get(queue)
        if before is not None and queue in bounds and mark != before:
            problems[queue] = (
                f"offset {read[queue] - 1} was at log position {before.position}, stored at "
                f"{before.stored_ms}, and is at log position {mark.position}, stored at {mark.stored_ms} now "
                "(the topic was made anew, or its broker lost records)"
            )
    return {
        queue: DataLossError(
            queue, read[queue], read[queue], bounds[queue].minimum, bounds[queue].maximum, problem
        )
        for queue, problem in problems.items()
    }


def resume(
    read: Offsets,
    kept: Marks,
    found: Marks,
    bounds: Mapping[MessageQueue, Bounds],
    *,
    fail: bool,
    offset_at: Callable[[MessageQueue, Bounds, int], int],
) -> Offsets:
    """Return the offset at which reading continues in each replaced queue, and log a warning for each.

    Reading continues at the first record that was stored at or after a time: CLOCKS_MS before the store time
    of the last record read, as its mark in `kept` states. So some records may be read twice. If `kept` lacks
    the queue, reading continues at the queue's first offset. `offset_at` is `Cluster.offset_at`; the other
    parameters are those of `replaced`. With `fail`, the error of the first replaced queue is raised instead.
    """
    positions: Offsets = {}
    for queue, error in replaced(read, kept, found, bounds).items():
        if fail:
            raise error
        positions[queue] = bounds[queue].minimum
        if queue in kept:
            positions[queue] = offset_at(queue, bounds[queue], kept[queue].stored_ms - CLOCKS_MS)
        log.warning(
            "%s: %s; the broker has offsets %d to %d, reading continues at offset %d",
            queue, error.problem, error.minimum, error.maximum, positions[queue],
        )  # fmt: skip
    return positions

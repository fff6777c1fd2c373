"""Positions in queues, in the form of Spark's checkpoints, users' options and manifests.

In JSON an offset map is `{"topic": {"broker-name": {"queue": next_offset}}}`. Spark compares positions as
TEXT, so equal maps must produce equal text: keys are written in sorted order (queues by number).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cometmq.errors import ConfigError
from cometmq.message import MessageQueue

LATEST = -1
EARLIEST = -2
MAX_QUEUE_ID, MAX_OFFSET = 2**31 - 1, 2**63 - 1  # limits of the fields in a broker request

_SECONDS = range(10**9, 10**10)
"""Numbers that are probably seconds (2001 to 2286): in ms they would be before RocketMQ existed."""
_CLOCKS_MS, _END_MS = 60_000, 86_400_000  # how far a read's start and end may be in the future, in ms

Offsets = dict[MessageQueue, int]
Tree = dict[str, Any]

START_KEY = "@start"
"""Key in the position that Spark logs as the end of a batch. Its value is the start of the same batch.

The key is no topic, because no topic name contains `@`. It is present for the first batch of a query, and for
a batch that does not begin at the end of the previous batch because a queue was replaced (marks.py).

Spark's log contains the end of each batch but not the start of the first batch. After a crash in batch 0,
Spark requests the start from the source again. If the start is "latest", it would by then be a later
position, and the records in between would be lost. A start that is logged with the end does not change when
the batch is planned again.
"""

MARKS_KEY = "@last"
"""Key in a stream's position. Its value has one mark per queue: the log position and the store time of the
record before the queue's offset (marks.py, `Mark`)."""


def to_tree(offsets: Mapping[MessageQueue, Any]) -> Tree:
    """Convert values by queue to nested mappings (topic → broker name → queue number), with sorted keys."""
    tree: Tree = {}
    for queue in sorted(offsets):
        brokers = tree.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = offsets[queue]
    return tree


def from_tree(tree: Mapping[str, Any], option: str = "offsets") -> Offsets:
    """Convert the nested mappings of `to_tree` to offsets by queue. Raises ConfigError for another form."""
    return dict(_walk(tree, option))


def _walk(tree: Mapping[str, Any], option: str) -> Iterator[tuple[MessageQueue, int]]:
    for topic, brokers in tree.items():
        if topic in (START_KEY, MARKS_KEY):
            continue
        for broker_name, queues in _mapping(brokers, option, tree).items():
            for queue, offset in _mapping(queues, option, tree).items():
                if not str(queue).isdecimal() or isinstance(offset, bool) or not isinstance(offset, int):
                    raise _bad_shape(option, tree)
                if len(str(queue)) > 10 or int(queue) > MAX_QUEUE_ID or offset > MAX_OFFSET:
                    raise ConfigError(
                        option, f"{queue}: {offset}", "queue numbers of 31 bits and offsets of 63 bits"
                    )
                yield MessageQueue(topic, broker_name, int(queue)), offset


def _mapping(value: Any, option: str, tree: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _bad_shape(option, tree)
    return value


def _bad_shape(option: str, tree: Any) -> ConfigError:
    return ConfigError(option, json.dumps(tree), '{"topic": {"broker-name": {"queue number": offset}}}')


def parse_offsets(text: str, option: str) -> Offsets:
    """Parse an option's JSON text of offsets. An offset may be -1 (latest) or -2 (earliest)."""
    expected = 'earliest, latest, or {"topic": {"broker-name": {"queue number": offset}}}'
    offsets = _parsed(text, option, expected)
    if min(offsets.values(), default=0) < EARLIEST:
        raise ConfigError(option, text, "offsets of 0 or more, -1 (latest) or -2 (earliest)")
    return offsets


def parse_times(text: str, option: str) -> Offsets:
    """Parse an option's JSON text that gives a store time for each queue, in ms since 1970."""
    times = _parsed(text, option, '{"topic": {"broker-name": {"queue number": milliseconds}}}')
    if min(times.values(), default=0) < 0:
        raise ConfigError(option, text, "times of 0 ms or more")
    for time_ms in times.values():
        check_time(option, time_ms, end=option.startswith("ending"))
    return times


def check_time(option: str, time_ms: int, *, end: bool) -> None:
    """Raise ConfigError for a time that seems to be in seconds, or that is too far in the future.

    The end of a time range (`end`) may be up to a day in the future, such as the end of today. Any other
    time may only be ahead of this machine's clock by a small difference between clocks.
    """
    if time_ms in _SECONDS:
        raise ConfigError(option, str(time_ms), f"ms since 1970; if these are seconds: {time_ms * 1000}")
    if time_ms > time.time() * 1000 + (_END_MS if end else _CLOCKS_MS):
        expected = "at most a day ahead" if end else "not in the future"
        raise ConfigError(option, str(time_ms), f"ms since 1970, {expected}")


def _parsed(text: str, option: str, expected: str) -> Offsets:
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(option, text, expected)
    return from_tree(tree, option)


def with_start(end: Mapping[MessageQueue, int], start: Mapping[MessageQueue, int]) -> Tree:
    """Return a logged position with the start of a batch that does not begin where the previous ended."""
    return {START_KEY: to_tree(start), **to_tree(end)}


def batch_range(start: Tree, end: Tree) -> tuple[Offsets, Offsets]:
    """Return the start and end offsets of a batch from the two positions that Spark passes for it."""
    logged = end.get(START_KEY)
    return from_tree(start if logged is None else logged), from_tree(end)

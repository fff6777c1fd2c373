"""What to read, decided without I/O: where ranges begin and end, how limits are shared, what each task reads.

All ends are exclusive. Offsets of a queue are dense, so a range may be cut anywhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.base.offsets import Offsets

_LEAST_TASK_RECORDS = 20_000  # about what is read in the 0.1 s that a Python task costs anyway


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a queue holds now: offsets `minimum` <= o < `maximum`.

    replica: a replica says so. Its master may hold more, so what is missing here is not lost.
    """

    minimum: int
    maximum: int
    replica: bool = False


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Offsets `start` <= o < `end` of one queue; `lost` were planned before but are gone from the broker."""

    queue: MessageQueue
    start: int
    end: int
    lost: int = 0

    @property
    def count(self) -> int:
        return self.end - self.start


def limit_ends(start: Mapping[MessageQueue, int], latest: Mapping[MessageQueue, int], limit: int) -> Offsets:
    """Ends that take about `limit` records, shared in proportion to each queue's backlog (a queue without a
    start has none).

    A share below one record is rounded up so that a small queue beside big ones is never starved; hence the
    sum may exceed `limit` by less than the number of such queues.
    """
    backlog = {queue: max(0, end - start.get(queue, end)) for queue, end in latest.items()}
    total = sum(backlog.values())
    if total <= limit:
        return {queue: max(end, start.get(queue, end)) for queue, end in latest.items()}
    ends: Offsets = {}
    for queue, waiting in backlog.items():
        share = limit * waiting / total
        first = start.get(queue, latest[queue])
        ends[queue] = first + min(waiting, math.ceil(share) if share < 1 else math.floor(share))
    return ends


def waiting_in(start: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]) -> Offsets:
    """How many records each range has; queues without a start or without records are left out."""
    return {queue: end - start[queue] for queue, end in ends.items() if end > start.get(queue, end)}


def limit_bytes(
    start: Mapping[MessageQueue, int],
    ends: Offsets,
    sizes: Mapping[MessageQueue, float],
    limit: int,
) -> Offsets:
    """Ends not behind `ends` that take about `limit` bytes, by the mean sizes of the queues' records, and at
    least one record. A queue without a size has the mean of the others."""
    waiting = waiting_in(start, ends)
    known = sum(waiting[queue] for queue in waiting.keys() & sizes.keys())
    total = sum(waiting[queue] * sizes[queue] for queue in waiting.keys() & sizes.keys())
    records = sum(waiting.values())
    if not known or total * records / known <= limit:
        return ends
    return limit_ends(start, ends, max(1, math.floor(limit * known / total)))


def spread(
    start: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int], count: int
) -> list[tuple[MessageQueue, int]]:
    """About `count` (queue, offset) in the ranges, in proportion to their lengths, at least one in each."""
    waiting = waiting_in(start, ends)
    total = sum(waiting.values())
    found = []
    for queue, length in sorted(waiting.items()):
        parts = min(length, max(1, count * length // total))
        found += [(queue, start[queue] + length * (2 * part + 1) // (2 * parts)) for part in range(parts)]
    return found


def queue_ranges(
    start: Mapping[MessageQueue, int],
    end: Mapping[MessageQueue, int],
    bounds: Mapping[MessageQueue, Bounds],
    *,
    fail_on_data_loss: bool,
) -> list[QueueRange]:
    """The non-empty ranges to read, sorted by queue, after a look at what the brokers still hold.

    A queue without a start is new: it begins at its minimum. A queue that `bounds` does not know is taken as
    planned (its broker may be away for a moment; the task that reads it will find out). Raises DataLossError
    when records of the range are gone, unless `fail_on_data_loss` is False: then the range shrinks and counts
    them in `lost`.
    """
    ranges = []
    for queue in sorted(end):
        held = bounds.get(queue, Bounds(0, end[queue]))
        first = start.get(queue)
        if held.replica and first is not None:
            held = Bounds(min(first, held.minimum), max(end[queue], held.maximum))
        begin, stop = held.minimum if first is None else first, end[queue]
        if first is not None and first > stop:
            _lost(fail_on_data_loss, queue, first, stop, held, "the range ends before it starts")
            continue
        if stop > held.maximum:
            _lost(fail_on_data_loss, queue, begin, stop, held, "the queue is shorter than it was")
        if first is not None and begin < held.minimum and begin < stop:
            _lost(fail_on_data_loss, queue, begin, stop, held, "records were deleted before they were read")
        kept_begin, kept_stop = max(begin, held.minimum), min(stop, held.maximum)
        if kept_begin < kept_stop:
            ranges.append(QueueRange(queue, kept_begin, kept_stop, (stop - begin) - (kept_stop - kept_begin)))
        elif begin < stop:
            ranges.append(QueueRange(queue, stop, stop, stop - begin))
    return ranges


def shrunk(read: Mapping[MessageQueue, int], bounds: Mapping[MessageQueue, Bounds]) -> list[MessageQueue]:
    """The queues that are shorter than what was read from them."""
    return [q for q, held in bounds.items() if held.maximum < read.get(q, 0) and not held.replica]


def _lost(fail: bool, queue: MessageQueue, start: int, end: int, held: Bounds, problem: str) -> None:
    if fail:
        raise DataLossError(queue, start, end, held.minimum, held.maximum, problem)


def default_tasks(records: int, slots: int) -> int:
    """How many tasks to cut `records` into: two for each slot, fewer where one is not worth its start."""
    return max(1, min(2 * max(1, slots), math.ceil(records / _LEAST_TASK_RECORDS)))


def pack(ranges: Sequence[QueueRange], tasks: int, max_records: int | None = None) -> list[list[QueueRange]]:
    """Cut and group ranges into about `tasks` lists of equal weight, none over `max_records` records.

    Fewer, larger lists are better: a Python task costs 60-100 ms of its slot before it reads anything. Within
    a list the ranges are sorted and touching ones are one again.
    """
    total = sum(item.count for item in ranges)
    if not total:
        return []
    target = max(1, math.ceil(total / max(1, tasks)))
    if max_records is not None:
        target = min(target, max_records)
    pieces = sorted(_cut(ranges, target), key=lambda piece: (-piece.count, piece.queue, piece.start))
    bins: list[tuple[int, int]] = [(0, index) for index in range(math.ceil(total / target))]
    packed: list[list[QueueRange]] = [[] for _ in bins]
    for piece in pieces:
        weight, index = bins[0]
        if max_records is not None and weight and weight + piece.count > max_records:
            packed.append([])
            weight, index = 0, len(packed) - 1
            heapq.heappush(bins, (piece.count, index))
        else:
            heapq.heapreplace(bins, (weight + piece.count, index))
        packed[index].append(piece)
    return [_joined(group) for group in packed if group]


def _cut(ranges: Iterable[QueueRange], target: int) -> Iterable[QueueRange]:
    for item in ranges:
        parts = max(1, math.ceil(item.count / target))
        edges = [item.start + item.count * part // parts for part in range(parts + 1)]
        for index in range(parts):
            if edges[index] < edges[index + 1]:
                yield QueueRange(item.queue, edges[index], edges[index + 1])


def _joined(group: list[QueueRange]) -> list[QueueRange]:
    joined: list[QueueRange] = []
    for item in sorted(group, key=lambda piece: (piece.queue, piece.start)):
        last = joined[-1] if joined else None
        if last is not None and last.queue == item.queue and last.end == item.start:
            joined[-1] = replace(last, end=item.end)
        else:
            joined.append(item)
    return joined

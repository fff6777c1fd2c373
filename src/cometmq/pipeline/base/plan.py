"""Planning of reads, without I/O: the start and end of ranges, the limits of batches, the ranges of tasks.

All ends are exclusive. The offsets of a queue have no gaps, so a range may be divided at any offset.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.base.offsets import Offsets

# A task of this many records reads for about 0.1 s, as long as the start of a Python task takes.
_LEAST_TASK_RECORDS = 20_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The current offsets of a queue: from `minimum` to `maximum` - 1.

    `replica`: whether the bounds come from a replica. Its master may hold more, so offsets outside these
    bounds are not reported as lost.
    """

    minimum: int
    maximum: int
    replica: bool = False


@dataclass(frozen=True, slots=True)
class QueueRange:
    """The offsets from `start` to `end` - 1 of a queue. `lost` counts planned offsets that are gone."""

    queue: MessageQueue
    start: int
    end: int
    lost: int = 0

    @property
    def count(self) -> int:
        return self.end - self.start


def limit_ends(start: Mapping[MessageQueue, int], latest: Mapping[MessageQueue, int], limit: int) -> Offsets:
    """Return the end offset for reading each queue, so that about `limit` records are read in total.

    The records are divided among the queues in proportion to their backlogs. A queue without a start offset
    has no backlog. A share below one record is rounded up to one, so that a queue with a small backlog is
    read, too; the sum may therefore exceed `limit` by up to one record for each such queue.
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
    """Return the number of records from start to end for each queue that has a start and records."""
    return {queue: end - start[queue] for queue, end in ends.items() if end > start.get(queue, end)}


def limit_bytes(
    start: Mapping[MessageQueue, int], ends: Offsets, sizes: Mapping[MessageQueue, float], limit: int
) -> Offsets:
    """Return the end offset for reading each queue, so that about `limit` bytes are read in total.

    No result is greater than the queue's offset in `ends`. `sizes` holds the mean record size of each queue.
    For a queue without a size, the mean size of the other queues is assumed. At least one record of each
    queue with a backlog is read, even if the records exceed the limit.
    """
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
    """Return about `count` pairs (queue, offset), spread evenly over the ranges, at least one per range."""
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
    """Return the non-empty ranges to read, sorted by queue, limited to offsets that the brokers still hold.

    A queue without a start is new and begins at its minimum. A queue that is missing in `bounds` is read as
    planned, as its broker may be away for now; the task will check it. If records of a range are gone, raises
    DataLossError, or without `fail_on_data_loss` counts them in `lost` of the reduced range.
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
    """Return the queues whose maximum offset is now below the offset up to which they were read."""
    return [q for q, held in bounds.items() if held.maximum < read.get(q, 0) and not held.replica]


def _lost(fail: bool, queue: MessageQueue, start: int, end: int, held: Bounds, problem: str) -> None:
    if fail:
        raise DataLossError(queue, start, end, held.minimum, held.maximum, problem)


def default_tasks(records: int, slots: int) -> int:
    """Return the number of tasks for `records`: two per slot, fewer if tasks would have too few records."""
    return max(1, min(2 * max(1, slots), math.ceil(records / _LEAST_TASK_RECORDS)))


def pack(ranges: Sequence[QueueRange], tasks: int, max_records: int | None = None) -> list[list[QueueRange]]:
    """Divide ranges into about `tasks` lists with similar numbers of records, at most `max_records` per list.

    Fewer and larger lists are better, because a Python task occupies its slot for 60-100 ms before it reads
    anything. Within a list the ranges are sorted, and adjacent ranges are merged.
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

"""Determines, after a restart, which messages of the delay levels have been delivered.

A level delivers its messages in the order of its queue. After a kill, the offset in delayOffset.json may be
seconds old. But each delivered copy in the log contains the position of the original record (links.py), so
the level continues with its first message that has no copy. Later messages may have copies, if a power
failure has destroyed one copy but not the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.codes import SCHEDULE_TOPIC
from cometmq.store import FILLER_SIZE, UNIT_DTYPE, ConsumeQueue, MessageStore, Reads, links

_UNITS_AT_ONCE = 4096


def goes_on(cursor: int, first: int, units: NDArray[Any], linked: NDArray[np.int64]) -> tuple[int, list[int]]:
    """Return where a delay level continues, and which messages after that have already been delivered.

    Args:
        cursor: The level's offset so far.
        first: The queue offset of the first unit in `units`.
        units: Consecutive consume-queue units of the level's queue.
        linked: The log positions of all messages that have copies, ascending.
    """
    positions, real = units["position"].astype(np.int64), units["size"] != FILLER_SIZE
    done = among(positions, linked) & real
    open_ = np.flatnonzero(~done & real)
    passed = 0
    if cursor == first:
        passed = int(open_[0]) if len(open_) else len(units)
    return cursor + passed, positions[passed:][done[passed:]].tolist()


async def delivered(
    store: MessageStore, begun: Mapping[int, int], log_position: int
) -> tuple[dict[int, int], set[int]]:
    """Return where each delay level continues, and which messages after that have already been delivered.

    Raises OSError.

    Args:
        begun: The offset of each delay level from delayOffset.json, limited to the range of its queue.
        log_position: The offsets in delayOffset.json include all deliveries stored before this log position.
    """
    executor = store.executor
    found, others, waiting, first = dict(begun), set[int](), {}, store.log.end
    for level, offset in begun.items():
        queue = store.queues.find_queue(SCHEDULE_TOPIC, level - 1)
        if queue is not None and offset < queue.max_offset:
            waiting[level] = queue
            unit = await executor.query(partial(queue.unit, offset))
            first = min(first, unit[0] if unit is not None else 0)
    linked = await linked_positions(store, max(log_position, first), store.log.end)
    if not len(linked):
        return found, others
    for level, queue in waiting.items():
        offset, last = begun[level], int(linked[-1])
        end = await executor.query(partial(queue.search, offset, queue.max_offset, last + 1))
        while offset < end:
            data = await executor.query(partial(read_units, queue, offset, min(end - offset, _UNITS_AT_ONCE)))
            if not data:
                offset = queue.next_file_offset(offset)
                continue
            units = np.frombuffer(data, UNIT_DTYPE)
            found[level], more = goes_on(found[level], offset, units, linked)
            others.update(more)
            offset += len(units)
            await executor.pause(0)
    return found, others


def units_behind(
    queue: ConsumeQueue, low: int, after: tuple[int, int], most: int, reads: Reads
) -> list[tuple[int, int]]:
    """Return up to `most` consume-queue units of a delay level, from the queue offset `low` on.

    Each unit is returned as a pair of its delivery time (ms) and its log position. The result is sorted, as
    the units of a delay level are, and begins after the pair `after`. Raises NotInMemory or OSError.
    """
    high = end = queue.max_offset
    while low < high:
        middle = (low + high) // 2
        units = chain(queue.units(middle, middle + 1, reads), queue.units(middle + 1, high, reads))
        found = next((unit for unit in units if unit[2] != FILLER_SIZE), None)
        if found is None or (found[3], found[1]) > after:
            high = middle
        else:
            low = found[0] + 1
    listed = queue.units(low, min(end, low + most), reads)
    return [(due_ms, position) for _, position, size, due_ms in listed if size != FILLER_SIZE]


def read_units(queue: ConsumeQueue, first: int, count: int, reads: Reads) -> bytes:
    """Return up to `count` consume-queue units, or none if their file is missing."""
    return bytes(queue.read(first, count, reads) or b"")


def among(positions: NDArray[np.int64], ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return, for each position, whether the ascending array contains it."""
    if not len(ascending):
        return np.zeros(len(positions), bool)
    at = np.searchsorted(ascending, positions)
    found: NDArray[np.bool_] = ascending[np.minimum(at, len(ascending) - 1)] == positions
    return found


async def linked_positions(store: MessageStore, start: int, end: int) -> NDArray[np.int64]:
    """Return the log positions, ascending, of the messages whose copies are in a part of the log."""
    found = [piece async for piece in links(store.log, store.disk, store.executor, start, end)]
    return await store.executor.run(np.unique, np.concatenate(found)) if found else np.empty(0, np.int64)

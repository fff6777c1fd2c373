"""What the queues of the delay levels tell: how far the last run has delivered, whatever ended it, and what
waits.

A level delivers in the order of its queue. The offset in delayOffset.json is seconds old after a kill, but
each copy in the log names the record that it came from (links.py): the level goes on with the first that has
none. Others behind that may have theirs, where a power failure took a copy and not the next one.
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
    """Where a level goes on that stands at `cursor`, by its units from queue offset `first` on: in front of
    the first that is not linked; and the positions of linked ones behind that. linked: ascending, not
    empty."""
    positions = units["position"].astype(np.int64)
    at = np.minimum(np.searchsorted(linked, positions), len(linked) - 1)
    done = (linked[at] == positions) & (units["size"] != FILLER_SIZE)
    open_ = np.flatnonzero(~done & (units["size"] != FILLER_SIZE))
    passed = 0
    if cursor == first:
        passed = int(open_[0]) if len(open_) else len(units)
    return cursor + passed, positions[passed:][done[passed:]].tolist()


async def delivered(
    store: MessageStore, begun: Mapping[int, int], log_position: int
) -> tuple[dict[int, int], set[int]]:
    """Level -> the next offset to deliver, and log positions of delivered ones behind these. begun: the
    offsets as the file knows them, within the queues; log_position: before it the log names nothing that the
    file does not know. Raises OSError."""
    off_loop = store.off_loop
    found, others, waiting, first = dict(begun), set[int](), {}, store.log.end
    for level, offset in begun.items():
        queue = store.queues.find(SCHEDULE_TOPIC, level - 1)
        if queue is not None and offset < queue.max_offset:
            waiting[level] = queue
            unit = await off_loop.ask(partial(queue.unit, offset))
            first = min(first, unit[0] if unit is not None else 0)
    start = max(log_position, first)
    pieces = [piece async for piece in links(store.log, store.disk, off_loop, start)]
    if not pieces:
        return found, others
    linked = await off_loop.run(np.unique, np.concatenate(pieces))
    for level, queue in waiting.items():
        offset, last = begun[level], int(linked[-1])
        end = await off_loop.ask(partial(queue.search, offset, queue.max_offset, last + 1))
        while offset < end:
            data = await off_loop.ask(partial(_units, queue, offset, min(end - offset, _UNITS_AT_ONCE)))
            if not data:
                offset = queue.next_file_offset(offset)
                continue
            units = np.frombuffer(data, UNIT_DTYPE)
            found[level], more = goes_on(found[level], offset, units, linked)
            others.update(more)
            offset += len(units)
            await off_loop.pause(0)
    return found, others


def units_behind(
    queue: ConsumeQueue, low: int, after: tuple[int, int], most: int, reads: Reads
) -> list[tuple[int, int]]:
    """(when it will come in ms, log position) of the first `most` units behind such a place, from queue
    offset `low` on; a level's units are in this order. Raises NotInMemory, OSError."""
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


def _units(queue: ConsumeQueue, first: int, count: int, reads: Reads) -> bytes:
    return bytes(queue.read(first, count, reads) or b"")

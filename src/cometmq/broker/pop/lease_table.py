"""The file popLeases.json, which keeps leases through a kill of the broker (CometMQ's own).

After a kill, a group's offset in a queue is that of its first message that was not acked. Without this file,
all messages after it would be delivered again, even those that were acked or are leased. The file is written
every few seconds, so only what happened after the last write is repeated. A clean stop leaves its leases in
the revive log instead.

An entry belongs to a group and a queue: its floor, its head, and each pop with leases (pop time, start, time
of visibility, whether the delivery counts, offsets). The offsets are a text of pairs "first count". All other
messages between floor and head were done when the entry was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cometmq import logs
from cometmq.broker.base.turns import slices
from cometmq.broker.pop.leases import LeasedQueue, Leases, Pop, QueueKey
from cometmq.broker.tables.consumer_offsets import SEPARATOR, ConsumerOffsets, split_key

log = logs.logger(__name__)

PER_TURN = 1_024
"""The number of leases after which other tasks of the event loop run. They take about 0.5 ms."""


async def to_table(leases: Leases, now_ms: int, wall_ms: int) -> dict[str, Any]:
    """Return the content of the file. Other tasks of the event loop run in between.

    The entry of a queue is that of one moment, except for the leases that are renewed meanwhile. `now_ms` and
    `wall_ms` are the present times of the monotonic clock and of the wall clock.
    """
    table: dict[str, Any] = {}
    left = PER_TURN
    for queue in leases:
        left -= 1 + len(queue.leases)
        if left <= 0:
            left = PER_TURN
            await asyncio.sleep(0)
        if leases.find(queue.key) is queue and queue.leases and not queue.ordered:
            group, topic, queue_id = queue.key
            entry: dict[str, Any] = {"floor": queue.floor, "head": queue.head}
            entry["pops"] = await _pops(queue, wall_ms - now_ms)
            table.setdefault(topic + SEPARATOR + group, {})[str(queue_id)] = entry
    return {"leaseTable": table, "writtenAt": wall_ms}


async def _pops(queue: LeasedQueue, ahead_ms: int) -> list[list[Any]]:
    groups: dict[
        tuple[int, int, int, bool], list[int]
    ] = {}  # Pairs of a first offset and a number of offsets
    async for part in slices(list(queue.leases.values()), PER_TURN):
        for lease in part:
            visible_ms, offset = lease.deadline_ms + ahead_ms, lease.offset
            runs = groups.setdefault((lease.pop.pop_ms, lease.pop.start, visible_ms, lease.counts), [])
            if runs and runs[-2] + runs[-1] == offset:
                runs[-1] += 1
            else:
                runs += (offset, 1)
    return [[*pop, " ".join(map(str, runs))] for pop, runs in groups.items()]


def restore(
    table: Mapping[str, Any],
    leases: Leases,
    offsets: ConsumerOffsets,
    end_of: Callable[[str, int], int],
    now_ms: int,
    wall_ms: int,
) -> None:
    """Restore leases from the content of the file.

    An entry is ignored if the stored offset is not that of one of its leases. Either the queue has no leases
    before its head any more, or the offset was set elsewhere, for instance by an administrator.

    Args:
        table: The content.
        leases: The leases, without any of the file.
        offsets: The stored consumer offsets.
        end_of: Returns the end of the queue with this topic and queue id. A crash may have removed messages.
        now_ms: The present time of the monotonic clock.
        wall_ms: The present time of the wall clock.
    """
    written_ms = table.get("writtenAt")
    if isinstance(written_ms, int):
        wall_ms = max(wall_ms, written_ms)  # If the clock was set back, no lease lasts longer
    for name, queues in (table.get("leaseTable") or {}).items():
        topic, group = split_key(str(name))
        for queue_id, entry in queues.items():
            try:
                key: QueueKey = (group, topic, int(queue_id))
                stored, end = offsets.query(*key), end_of(topic, key[2])
                pops = _restored(entry["pops"], stored, end, wall_ms - now_ms)
                if pops and pops[0][0] == stored:
                    leases.restore(key, min(int(entry["head"]), end), pops)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("the entry of %s in popLeases.json is ignored: %r", name, error)


def _restored(plain: Any, stored: int, end: int, ahead_ms: int) -> list[tuple[int, Pop, int, bool]]:
    """Return offset, pop, deadline and `counts` of each lease, in the order of the offsets."""
    found = [
        (offset, Pop(int(pop_ms), int(start), 0), int(visible_ms) - ahead_ms, bool(counts))
        for pop_ms, start, visible_ms, counts, runs in plain
        for first, count in _pairs(runs)
        for offset in range(max(first, stored), min(first + count, end))
    ]
    return sorted(found, key=lambda lease: lease[0])


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    numbers = [int(word) for word in text.split()]
    return zip(numbers[::2], numbers[1::2], strict=True)

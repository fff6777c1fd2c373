"""The files of leases.

**popLeases.json** (CometMQ's own) keeps leases through a kill of the broker. After a kill, a group's offset
in a queue is that of its first message that was not acked. Without this file, all messages after it would be
delivered again, even those that were acked or are leased. The file is written every few seconds, so only what
happened after the last write is repeated. A clean stop leaves its leases in the revive log instead. An entry
belongs to a group and a queue: its floor, its head, and each pop with leases (pop time, start, time of
visibility, whether the delivery counts, offsets). The offsets are a text of pairs "first count". All other
messages between floor and head were done when the entry was written.

**consumerOrderInfo.json** has, in the format of Apache's broker, the messages of ordered pops that were not
acked when a broker stopped. An entry belongs to a group and a queue, and holds the last pop: its messages
(`o`: the first offset, then distances from it), which of them are acked (`cm`: a bit for each), the
visibility times of messages whose leases were changed (`ot`), and the numbers of earlier deliveries (`oc`).

In all functions, `now_ms` and `wall_ms` are the present times of the monotonic clock and of the wall clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from cometmq import logs
from cometmq.broker.base.turns import slices
from cometmq.broker.pop.leases import LeasedQueue, Leases, Pop, QueueKey
from cometmq.broker.tables.consumer_offsets import SEPARATOR, ConsumerOffsets, split_key

log = logs.logger(__name__)

LEASES = "popLeases.json"
ORDER_INFO = "consumerOrderInfo.json"
PER_TURN = 1_024
"""The number of leases after which other tasks of the event loop run. They take about 0.5 ms."""
MAX_OFFSETS = 63
"""The maximum number of messages of an entry of ordered pops, as `cm` is a signed 64-bit number."""


async def leases_table(leases: Leases, now_ms: int, wall_ms: int) -> dict[str, Any]:
    """Return the content of popLeases.json. Other tasks of the event loop run in between.

    The entry of a queue is that of one moment, except for the leases that are renewed meanwhile.
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
    # Pairs of a first offset and a number of offsets
    groups: dict[tuple[int, int, int, bool], list[int]] = {}
    async for part in slices(list(queue.leases.values()), PER_TURN):
        for lease in part:
            visible_ms, offset = lease.deadline_ms + ahead_ms, lease.offset
            runs = groups.setdefault((lease.pop.pop_ms, lease.pop.start, visible_ms, lease.counts), [])
            if runs and runs[-2] + runs[-1] == offset:
                runs[-1] += 1
            else:
                runs += (offset, 1)
    return [[*pop, " ".join(map(str, runs))] for pop, runs in groups.items()]


def restore_leases(
    table: Mapping[str, Any],
    leases: Leases,
    offsets: ConsumerOffsets,
    end_of: Callable[[str, int], int],
    now_ms: int,
    wall_ms: int,
) -> None:
    """Restore leases from the content of popLeases.json.

    An entry is ignored if the stored offset is not that of one of its leases. Either the queue has no leases
    before its head any more, or the offset was set elsewhere, for instance by an administrator. `end_of`
    returns the end of the queue with a topic and queue id. A crash may have removed messages.
    """
    written_ms = table.get("writtenAt")
    if isinstance(written_ms, int):
        wall_ms = max(wall_ms, written_ms)  # If the clock was set back, no lease lasts longer

    def restore(key: QueueKey, entry: Any) -> None:
        stored, end = offsets.query(*key), end_of(*key[1:])
        pops = _restored(entry["pops"], stored, end, wall_ms - now_ms)
        if pops and pops[0][0] == stored:
            leases.restore(key, min(int(entry["head"]), end), pops)

    _restore_each(LEASES, table.get("leaseTable"), restore)


def _restore_each(file: str, table: Any, restore: Callable[[QueueKey, Any], None]) -> None:
    for name, queues in (table if isinstance(table, dict) else {}).items():
        topic, group = split_key(str(name))
        for queue_id, entry in (queues if isinstance(queues, dict) else {"": queues}).items():
            try:
                restore((group, topic, int(queue_id)), entry)
            except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
                log.warning("the entry of %s in %s is ignored: %r", name, file, error)


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


def ordered_table(leases: Leases, now_ms: int, wall_ms: int) -> dict[str, Any]:
    """Return the content of consumerOrderInfo.json: all queues with ordered pops."""
    table: dict[str, Any] = {}
    for queue in leases:
        if queue.ordered or (queue.deliveries and not queue.leases):
            group, topic, queue_id = queue.key
            entries = table.setdefault(topic + SEPARATOR + group, {})
            entries[queue_id] = _entry(queue, now_ms, wall_ms)
    return {"table": table}


def _entry(queue: LeasedQueue, now_ms: int, wall_ms: int) -> dict[str, Any]:
    offsets = sorted(queue.deliveries.keys() | queue.leases.keys() | queue.acked)[:MAX_OFFSETS]
    pop = queue.first_pop or Pop(queue.pop_ms, offsets[0], 1)
    acked = sum(1 << bit for bit, offset in enumerate(offsets) if offset in queue.acked)
    visible = {offset: wall_ms + lease.deadline_ms - now_ms for offset, lease in queue.leases.items()}
    counts = {offset: times - 1 for offset, times in queue.deliveries.items() if times > 1}
    if not queue.leases:  # The messages are visible, so the next pop will count their last delivery
        visible = dict.fromkeys(queue.deliveries, min(queue.pop_ms, wall_ms))
    return {
        "popTime": pop.pop_ms,
        "i": pop.invisible_ms,
        "o": [offsets[0], *(offset - offsets[0] for offset in offsets[1:])],
        "ot": visible,
        "oc": counts,
        "l": wall_ms,
        "cm": acked,
        "a": pop.attempt_id or None,
    }


def restore_ordered(
    table: Mapping[str, Any], leases: Leases, offsets: ConsumerOffsets, now_ms: int, wall_ms: int
) -> None:
    """Restore the leases of ordered pops from the content of consumerOrderInfo.json.

    An entry is ignored if its first message that is not acked is not the stored offset: then the offset was
    changed after the entry was written.
    """
    restore = partial(_restore_ordered, leases, offsets, now_ms, wall_ms)
    _restore_each(ORDER_INFO, table.get("table"), restore)


def _restore_ordered(
    leases: Leases, offsets: ConsumerOffsets, now_ms: int, wall_ms: int, key: QueueKey, entry: Any
) -> None:
    first, *steps = map(int, entry["o"])
    listed = [first, *(first + step for step in steps)]
    acked = int(entry.get("cm") or 0)
    waiting = [offset for bit, offset in enumerate(listed) if not acked >> bit & 1]
    if not waiting or offsets.query(*key) != waiting[0]:
        return
    pop_ms, invisible_ms = int(entry["popTime"]), int(entry.get("i") or 0)
    pop = Pop(pop_ms, first, invisible_ms, True, str(entry.get("a") or ""))
    wall_ms = max(wall_ms, int(entry.get("l") or 0))  # If the clock was set back, no lease lasts longer
    visible = {int(offset): int(at_ms) for offset, at_ms in (entry.get("ot") or {}).items()}
    counts = {int(offset): int(times) for offset, times in (entry.get("oc") or {}).items()}
    leases.restore(
        key,
        listed[-1] + 1,
        [(each, pop, now_ms + visible.get(each, pop_ms + invisible_ms) - wall_ms, True) for each in waiting],
        acked=set(listed) - set(waiting),
        deliveries={offset: counts.get(offset, 0) + 1 for offset in waiting},
    )

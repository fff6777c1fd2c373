"""The file consumerOrderInfo.json: the messages of ordered pops that were not acked when a broker stopped.

The format is that of Apache's broker. An entry belongs to a group and a queue, and holds the last pop: its
messages (`o`: the first offset, then distances from it), which of them are acked (`cm`: a bit for each), the
visibility times of messages whose leases were changed (`ot`), and the numbers of earlier deliveries (`oc`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cometmq import logs
from cometmq.broker.pop.leases import LeasedQueue, Leases, Pop, QueueKey
from cometmq.broker.tables.consumer_offsets import SEPARATOR, ConsumerOffsets, split_key

log = logs.logger(__name__)

MAX_OFFSETS = 63
"""The maximum number of messages of an entry, as `cm` is a signed 64-bit number."""


def to_table(leases: Leases, now_ms: int, wall_ms: int) -> dict[str, Any]:
    """Return the content of the file for all queues with ordered pops.

    `now_ms` and `wall_ms` are the present times of the monotonic clock and of the wall clock.
    """
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


def restore(
    table: Mapping[str, Any], leases: Leases, offsets: ConsumerOffsets, now_ms: int, wall_ms: int
) -> None:
    """Restore the leases of ordered pops from the content of the file.

    An entry is ignored if its first message that is not acked is not the stored offset: then the offset was
    changed after the entry was written.
    """
    for key, entry in _entries(table):
        try:
            _restore_one(key, entry, leases, offsets, now_ms, wall_ms)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            log.warning("the entry of %s in consumerOrderInfo.json is ignored: %r", key, error)


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[QueueKey, Any]]:
    for key, queues in (table.get("table") or {}).items():
        topic, group = split_key(str(key))
        for queue_id, entry in queues.items():
            yield (group, topic, int(queue_id)), entry


def _restore_one(
    key: QueueKey,
    entry: Any,
    leases: Leases,
    offsets: ConsumerOffsets,
    now_ms: int,
    wall_ms: int,
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

"""The file popLeases.json, which keeps leases through a kill of the broker (CometMQ's own).

After a kill, a group's offset in a queue is that of its first message that was not acked. Without this file,
all messages after it would be delivered again, even those that were acked or are leased. The file is written
every few seconds, so only what happened after the last write is repeated. A clean stop leaves its leases in
the revive log instead.

An entry belongs to a group and a queue: its floor, its head, and each pop with leases (pop time, start, time
of visibility, whether the delivery counts, offsets). All other messages between floor and head were done when
the entry was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cometmq import logs
from cometmq.broker.pop.leases import LeasedQueue, Leases, Pop, QueueKey
from cometmq.broker.tables.consumer_offsets import SEPARATOR, ConsumerOffsets, split_key

log = logs.logger(__name__)


def to_table(leases: Leases, now_ms: int, wall_ms: int) -> dict[str, Any]:
    """Return the content of the file.

    `now_ms` and `wall_ms` are the present times of the monotonic clock and of the wall clock.
    """
    table: dict[str, Any] = {}
    for queue in leases:
        if queue.leases and not queue.ordered:
            group, topic, queue_id = queue.key
            pops = _pops(queue, wall_ms - now_ms)
            entries = table.setdefault(topic + SEPARATOR + group, {})
            entries[str(queue_id)] = {"floor": queue.floor, "head": queue.head, "pops": pops}
    return {"leaseTable": table}


def _pops(queue: LeasedQueue, ahead_ms: int) -> list[list[Any]]:
    groups: dict[tuple[int, int, int, bool], list[int]] = {}
    for lease in queue.leases.values():
        visible_ms = lease.deadline_ms + ahead_ms
        groups.setdefault((lease.pop.pop_ms, lease.pop.start, visible_ms, lease.counts), []).append(
            lease.offset
        )
    return [[*pop, offsets] for pop, offsets in groups.items()]


def restore(
    table: Mapping[str, Any],
    leases: Leases,
    offsets: ConsumerOffsets,
    end_of: Callable[[str, int], int],
    now_ms: int,
    wall_ms: int,
) -> None:
    """Restore leases from the content of the file.

    An entry is ignored if the stored offset is less than its floor: then the offset was set back.

    Args:
        table: The content.
        leases: The leases, without any of the file.
        offsets: The stored consumer offsets.
        end_of: Returns the end of the queue with this topic and queue id. A crash may have removed messages.
        now_ms: The present time of the monotonic clock.
        wall_ms: The present time of the wall clock.
    """
    for name, queues in (table.get("leaseTable") or {}).items():
        topic, group = split_key(str(name))
        for queue_id, entry in queues.items():
            try:
                key: QueueKey = (group, topic, int(queue_id))
                stored, end = offsets.query(*key), end_of(topic, key[2])
                if stored >= int(entry["floor"]):
                    pops = _restored(entry["pops"], stored, end, wall_ms - now_ms)
                    leases.restore_pops(key, min(int(entry["head"]), end), pops)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("the entry of %s in popLeases.json is ignored: %r", name, error)


def _restored(plain: Any, stored: int, end: int, ahead_ms: int) -> list[tuple[int, Pop, int, bool]]:
    """Return offset, pop, deadline and `counts` of each lease, in the order of the offsets."""
    found = [
        (int(offset), Pop(int(pop_ms), int(start), 0), int(visible_ms) - ahead_ms, bool(counts))
        for pop_ms, start, visible_ms, counts, listed in plain
        for offset in listed
        if stored <= offset < end
    ]
    return sorted(found, key=lambda lease: lease[0])

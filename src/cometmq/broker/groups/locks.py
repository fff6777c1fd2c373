"""Queue locks. A lock gives one client of a group the exclusive right to consume a queue.

Orderly consumers need queue locks. CometMQ's other consumers use queue locks for the handoff of a queue from
one consumer to another (client/consumer/handoff.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cometmq.message import MessageQueue
from cometmq.protocol.codes import HANDOFF_PREFIX

# Time in ms after which a lock expires unless it is renewed. Clients renew their locks every 20 s and rely on
# them for only 30 s after a renewal (client/consumer/orderly_queue.py). So no client relies on a lock that
# has expired at the broker.
LOCK_LIVE_MS = 60_000
# The maximum number of locks of a broker: enough for a hundred groups with two thousand queues each. They
# take 70 MB. At most half of them may be locks with which CometMQ's consumers hand queues over to each other.
MAX_LOCKS = 200_000


class LockEntry(msgspec.Struct):
    """The lock of one queue: its owner, and the time of its last renewal in ms."""

    client_id: str
    renewed_ms: int

    def is_over(self, now_ms: int) -> bool:
        """Return whether the lock has expired."""
        return now_ms - self.renewed_ms > LOCK_LIVE_MS


class QueueLocks:
    """The locks of all groups. As in Apache's broker, a client need not be a member of the group to get one.

    Times are in ms of a monotonic clock that also counts the time of a suspended machine.
    """

    def __init__(self) -> None:
        self.groups: dict[str, dict[MessageQueue, LockEntry]] = {}
        self._count = self._handing_over = 0

    def __len__(self) -> int:
        return self._count

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Acquire or renew a client's locks. Return the queues that it now holds, in the order of `queues`.

        Queues beyond the limit MAX_LOCKS are not locked.
        """
        held = self.groups.get(group, {})
        hands_over = group.startswith(HANDOFF_PREFIX)
        got = []
        for queue in queues:
            entry = held.get(queue)
            if entry is None:
                if self._count >= MAX_LOCKS or (hands_over and self._handing_over >= MAX_LOCKS // 2):
                    continue
                held[queue] = LockEntry(client_id, now_ms)
                self._count += 1
                self._handing_over += hands_over
            elif entry.client_id == client_id or entry.is_over(now_ms):
                entry.client_id = client_id
                entry.renewed_ms = now_ms
            else:
                continue
            got.append(queue)
        if held:
            self.groups[group] = held
        return got

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release a client's locks of the given queues. Other clients' locks are not changed."""
        held = self.groups.get(group, {})
        mine = [queue for queue in dict.fromkeys(queues) if queue in held]
        self._drop(group, [queue for queue in mine if held[queue].client_id == client_id])

    def any_held(self, group: str, now_ms: int) -> bool:
        """Return whether any client holds a lock of the group that has not expired."""
        return any(not entry.is_over(now_ms) for entry in self.groups.get(group, {}).values())

    def expire(self, now_ms: int) -> None:
        """Remove expired locks: if their queues are never locked again, nothing else removes them."""
        for group, held in list(self.groups.items()):
            self._drop(group, [queue for queue, entry in held.items() if entry.is_over(now_ms)])

    def _drop(self, group: str, queues: Sequence[MessageQueue]) -> None:
        held = self.groups.get(group, {})
        for queue in queues:
            del held[queue]
        self._count -= len(queues)
        if group.startswith(HANDOFF_PREFIX):
            self._handing_over -= len(queues)
        if not held:
            self.groups.pop(group, None)

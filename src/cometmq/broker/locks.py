"""Queue locks of orderly consumers: which client of a group may consume which queue (codes 41 and 42)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cometmq.message import MessageQueue

# A lock that is not renewed for so long is free again (the client renews every 20 s).
LOCK_LIVE_MS = 60_000


class LockEntry(msgspec.Struct):
    """One held queue."""

    client_id: str
    renewed_ms: int


class QueueLocks:
    """group -> queue -> holder. As in Apache's broker, nobody asks whether the caller is in the group."""

    def __init__(self, live_ms: int = LOCK_LIVE_MS) -> None:
        self._live_ms = live_ms
        self._groups: dict[str, dict[MessageQueue, LockEntry]] = {}

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Take or renew; returns the queues that `client_id` holds now, in the order asked."""
        held = self._groups.setdefault(group, {})
        got = []
        for queue in queues:
            entry = held.get(queue)
            if entry is None:
                held[queue] = LockEntry(client_id, now_ms)
            elif entry.client_id == client_id or now_ms - entry.renewed_ms > self._live_ms:
                entry.client_id = client_id
                entry.renewed_ms = now_ms
            else:
                continue
            got.append(queue)
        return got

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give up those of `queues` that `client_id` holds; others' locks stay."""
        held = self._groups.get(group)
        if held is None:
            return
        for queue in queues:
            entry = held.get(queue)
            if entry is not None and entry.client_id == client_id:
                del held[queue]
        if not held:
            del self._groups[group]

    def holder(self, group: str, queue: MessageQueue, now_ms: int) -> str | None:
        """Client id that holds the queue, None if it is free or the lock has run out."""
        entry = self._groups.get(group, {}).get(queue)
        if entry is None or now_ms - entry.renewed_ms > self._live_ms:
            return None
        return entry.client_id

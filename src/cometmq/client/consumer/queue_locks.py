"""The locks of an orderly consumer at its brokers (docs/reference/client.md, Orderly consumption).

The lock of a queue is acquired before the queue is pulled, renewed while the queue is assigned, and released
when the queue's last listener call has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import groupby
from operator import attrgetter

from cometmq import logs
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.consumer.orderly_queue import LockTable
from cometmq.clock import boottime
from cometmq.errors import CometError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic
from cometmq.remoting import Connection

log = logs.logger("cometmq.client.consumer.queue_locks")

RENEW_INTERVAL_S = 20.0
RETRY_INTERVAL_S = 1.0
"""Seconds between a failed renewal of queue locks and the next attempt."""


class QueueLocks:
    """The queue locks of a member. `lost` is called with queues whose lock has expired or was lost."""

    def __init__(
        self, client: ClientInstance, group: str, lost: Callable[[Collection[MessageQueue]], None]
    ) -> None:
        self._client = client
        self._group = group
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self.table = LockTable()
        self._connections: dict[MessageQueue, Connection | None] = {}
        """The connection on which each lock was last confirmed."""
        # Serializes requests: if a broker handled a renewal after an unlock, the queue would stay locked.
        self._request_lock = asyncio.Lock()
        self._failing = self._soon = False
        self._renewals = Periodic(
            self._loop,
            lambda: RETRY_INTERVAL_S if self._failing else RENEW_INTERVAL_S,
            self._renew,
            name=f"renewal of the locks of group {group}",
        )

    def start(self) -> None:
        self._soon = False
        self._renewals.start()

    def renew_soon(self) -> None:
        """Renew the locks soon, because the brokers may have lost them."""
        if not self._soon:
            self._soon = True
            self._renewals.soon()

    def holds(self, queue: MessageQueue) -> bool:
        """Return whether this member certainly holds the lock of the queue. Then no other member owns it.

        A broker may have restarted without its locks, so it must have confirmed the lock on the present
        connection.
        """
        connection = self._connections.get(queue)
        return connection is not None and not connection.closed and self.table.holds(queue, boottime())

    async def acquire(self, queues: Collection[MessageQueue]) -> set[MessageQueue]:
        """Request locks of queues and return the queues that this member holds now."""
        ours: set[MessageQueue] = set()

        async def lock(addr: str, some: list[MessageQueue]) -> None:
            requested_at = boottime()
            got = await self._lock(addr, some)
            self.table.taken(got, requested_at)
            ours.update(got)

        async with self._request_lock:
            await self._at_brokers(queues, "lock", lock)
        return ours

    async def _lock(self, addr: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        """Request locks from one broker and return the queues whose locks were granted."""
        got = await self._client.brokers.lock_queues(addr, self._group, self._client.client_id, queues)
        ours = got.intersection(queues)
        self._connections.update(dict.fromkeys(ours, self._client.remoting.connection(addr)))
        return ours

    async def unlock(self, queues: Collection[MessageQueue]) -> None:
        """Unlock queues. If the request is lost, the broker drops the locks after 60 s."""

        async def unlock(addr: str, some: list[MessageQueue]) -> None:
            await self._client.brokers.unlock_queues(addr, self._group, self._client.client_id, some)

        async with self._request_lock:
            self.table.forget(queues)
            for queue in queues:
                self._connections.pop(queue, None)
            await self._at_brokers(queues, "unlock", unlock)

    def drop_expired(self) -> None:
        """Drop the queues whose locks have expired."""
        self._report(self.table.expired(boottime()))

    async def close(self) -> None:
        """Stop renewing locks."""
        await self._renewals.stop(cancel=True)

    async def _renew(self) -> None:
        self._soon = False
        self.drop_expired()

        async def renew(addr: str, some: list[MessageQueue]) -> None:
            requested_at = boottime()
            got = await self._lock(addr, some)
            self._report(self.table.renewed(some, got, requested_at, boottime()))

        async with self._request_lock:
            self._failing = not await self._at_brokers(self.table.queues, "renew", renew)

    def _report(self, lost: list[MessageQueue]) -> None:
        if lost:
            for queue in lost:
                self._connections.pop(queue, None)
            self._lost(lost)

    async def _at_brokers(
        self,
        queues: Iterable[MessageQueue],
        what: str,
        ask: Callable[[str, list[MessageQueue]], Awaitable[None]],
    ) -> bool:
        """Send one request to the master of each broker, and return whether all masters answered."""

        async def one(name: str, some: list[MessageQueue]) -> bool:
            try:
                await ask(await self._client.find_master(some[0]), some)
            except CometError as error:
                log.info("broker %s did not %s %d queues: %s", name, what, len(some), error)
                return False
            return True

        name_of = attrgetter("broker_name")
        by_broker = groupby(sorted(queues, key=name_of), key=name_of)
        return all(await asyncio.gather(*[one(name, list(some)) for name, some in by_broker]))

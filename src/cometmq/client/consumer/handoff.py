"""The handoff of a queue between two members of a group, without consuming messages twice.

Members that consume concurrently lock their queues, as orderly members do, but under a separate group name:
brokers of 5.x treat a group with locks as an orderly group and send its retries to the dead-letter queue. The
previous member waits for running calls, stores the offset, and unlocks the queue. The next member waits for
the unlock for a limited time, because the previous member may have been killed. Java's members do not take
part: they do not wait, and no member waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from cometmq import logs
from cometmq.client.consumer.queue_locks import QueueLocks
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import ProcessQueue
from cometmq.message import MessageQueue
from cometmq.periodic import Tasks
from cometmq.protocol.codes import HANDOFF_PREFIX

log = logs.logger("cometmq.client.consumer.handoff")

_GRACE_S = 1.0
"""Additional seconds of waiting for a lock, in which a disconnected member can rejoin the group."""


class Handoff:
    """The queue locks of a member, and the queues that the member is releasing."""

    def __init__(self, group: ConsumerGroup) -> None:
        self._group = group
        self._loop = asyncio.get_running_loop()
        self.locks = QueueLocks(group.instance, HANDOFF_PREFIX + group.name, self._lost)
        self._leaving: dict[MessageQueue, ProcessQueue] = {}
        self._timers: dict[MessageQueue, asyncio.TimerHandle] = {}
        """Timers that limit the wait for the running calls of each revoked queue."""
        self._tasks = Tasks()
        self._waiting: dict[MessageQueue, float] = {}
        """The time at which the first lock request for a queue was refused."""
        self._refused: set[MessageQueue] = set()
        """The queues for which a lock request was refused in this rebalance."""
        self._has_begun = False
        """Whether this member ever held a queue or saw another member. Before, it needs no locks."""

    def _lost(self, queues: Collection[MessageQueue]) -> None:
        log.debug("group %s: %d locks lost; the next rebalance requests them", self._group.name, len(queues))

    async def take(self, queues: Iterable[MessageQueue], *, alone: bool) -> list[MessageQueue]:
        """Lock queues, and return those to pull now: the locked ones, and those awaited for long enough.

        Args:
            alone: Whether the group has no other member. Then any member that still owns a lock must have
                been killed or disconnected. If this member is alone and has never held a queue, for example
                after a restart, it does not wait for locks.
        """
        wanted = [queue for queue in queues if queue not in self._leaving]
        refused = set(wanted) - await self.locks.acquire(wanted)
        self._has_begun |= not alone
        if not self._has_begun:
            return wanted
        self._refused |= refused
        now = self._loop.time()
        long_ago = now - _GRACE_S - (0.0 if alone else self._group.options.handover_timeout_s)
        overdue = [queue for queue in sorted(refused) if self._waiting.setdefault(queue, now) <= long_ago]
        if overdue:
            log.warning(
                "group %s: %d queues (the first is %s) were assigned before another member released "
                "them or their broker confirmed the assignment: some messages may be consumed twice",
                self._group.name, len(overdue), overdue[0],
            )  # fmt: skip
        refused.difference_update(overdue)
        return [queue for queue in wanted if queue not in refused]

    async def finish_rebalance(self, held: Collection[MessageQueue]) -> None:
        """Complete a rebalance: unlock queues that are not assigned, and request the missing locks.

        A lock is missing if another member did not release it in time, or if the broker lost it.
        """
        self._waiting = {q: at for q, at in self._waiting.items() if q in self._refused and q not in held}
        self._refused.clear()
        self._has_begun |= bool(held)
        locked = set(self.locks.table.queues)
        await self.locks.unlock(locked.difference(held, self._leaving))
        await self.locks.acquire(set(held) - locked)

    def leave(self, queues: Iterable[ProcessQueue]) -> None:
        """Release queues: no further call starts, but the results of running calls still count."""
        idle = []
        for queue in queues:
            queue.leaving = True
            self._leaving[queue.message_queue] = queue
            if not queue.calls:
                idle.append(queue)
                continue
            limit_s = self._group.options.handover_timeout_s
            self._timers[queue.message_queue] = self._loop.call_later(limit_s, self._give_up, queue)
        if idle:
            self._tasks.start(self._release_queues(idle))

    def ended(self, queue: ProcessQueue) -> None:
        """Release the lock of a revoked queue whose last listener call has ended."""
        timer = self._timers.pop(queue.message_queue, None)
        if timer is not None:
            timer.cancel()
            self._tasks.start(self._release_queues([queue]))

    def _give_up(self, queue: ProcessQueue) -> None:
        del self._timers[queue.message_queue]
        log.warning(
            "%s was reassigned to another member during %d listener calls: their messages are "
            "consumed again",
            queue.message_queue, queue.calls,
        )  # fmt: skip
        self._tasks.start(self._release_queues([queue]))

    async def _release_queues(self, queues: list[ProcessQueue]) -> None:
        names = [queue.message_queue for queue in queues]
        for queue in queues:
            queue.dropped = True
        try:
            await self._group.offsets.release(names)
            await self.locks.unlock(names)
        finally:
            for name in names:
                del self._leaving[name]

    async def close(self) -> None:
        """Release all locks."""
        for timer in self._timers.values():
            timer.cancel()
        await self.locks.close()
        await self._tasks.finish()
        await self.locks.unlock(self.locks.table.queues)

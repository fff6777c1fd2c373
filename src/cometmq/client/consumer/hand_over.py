"""A queue goes from one member of a group to another, and nothing that was handled is handled again.

Members that consume concurrently lock what they hold, as orderly ones do, but under a group name of their
own: brokers 5.x take a group with locks for an orderly one, and make its retries dead letters. Who gives a
queue up lets running calls end, stores the offset, and unlocks. Who takes one up waits for that, but not for
ever: the other may be dead. Java's members know nothing of this; they are neither kept out nor waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable

from cometmq import logs
from cometmq.client.consumer.queue_locks import QueueLocks
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import ProcessQueue
from cometmq.message import MessageQueue
from cometmq.protocol.codes import HANDOFF_PREFIX

__all__ = ["HandOver"]

log = logs.logger("cometmq.client.consumer.hand_over")

_GRACE_S = 1.0
"""The next member waits so much longer than this one lets calls run. So long a member whose connection was
cut may take to be in the group again."""


class HandOver:
    """The locks of a member, and the queues that it is giving up."""

    def __init__(self, group: ConsumerGroup) -> None:
        self._group = group
        self._loop = asyncio.get_running_loop()
        self.locks = QueueLocks(group.instance, HANDOFF_PREFIX + group.name, self._lost)
        self._leaving: dict[MessageQueue, ProcessQueue] = {}
        self._timers: dict[MessageQueue, asyncio.TimerHandle] = {}
        """Of those that have calls under way."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[MessageQueue, float] = {}
        """Queues whose lock we have not got, and since when we want it."""
        self._refused: set[MessageQueue] = set()
        """Those of this round."""
        self._has_begun = False
        """It has had queues, or has seen another member."""

    def _lost(self, queues: Collection[MessageQueue]) -> None:
        log.debug("group %s: %d locks were lost; the next round asks for them", self._group.name, len(queues))

    async def take(self, queues: Iterable[MessageQueue], *, alone: bool) -> list[MessageQueue]:
        """Those that may be pulled now: we have their lock, or have waited for it long enough.

        alone: the group has no other member, so one that has a lock died, or its connection was cut. We do
        not wait then before we have begun, when the only member of a group is started again.
        """
        wanted = [queue for queue in queues if queue not in self._leaving]
        refused = set(wanted) - await self.locks.take(wanted)
        self._has_begun |= not alone
        if not self._has_begun:
            return wanted
        self._refused |= refused
        now = self._loop.time()
        long_ago = now - _GRACE_S - (0.0 if alone else self._group.options.handover_timeout_s)
        overdue = [queue for queue in sorted(refused) if self._waiting.setdefault(queue, now) <= long_ago]
        if overdue:
            log.warning(
                "group %s: %d queues are taken up, first %s, although another member has not let go of them, "
                "or their broker has not said so: it died, or is slow, and some messages may come again",
                self._group.name, len(overdue), overdue[0],
            )  # fmt: skip
        refused.difference_update(overdue)
        return [queue for queue in wanted if queue not in refused]

    async def settle(self, held: Collection[MessageQueue]) -> None:
        """After a round: give back what was locked and could not be taken up, and lock what is held without
        a lock, because it was another member's, or the broker forgot it."""
        self._waiting = {q: at for q, at in self._waiting.items() if q in self._refused and q not in held}
        self._refused.clear()
        self._has_begun |= bool(held)
        locked = set(self.locks.table.queues)
        await self.locks.give_back(locked.difference(held, self._leaving))
        await self.locks.take(set(held) - locked)

    def leave(self, queues: Iterable[ProcessQueue]) -> None:
        """Give queues up: no further call begins, and those under way count."""
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
            self._start(self._hand_over(idle))

    def ended(self, queue: ProcessQueue) -> None:
        """The last call of a queue that is given up has ended."""
        timer = self._timers.pop(queue.message_queue, None)
        if timer is not None:
            timer.cancel()
            self._start(self._hand_over([queue]))

    def _give_up(self, queue: ProcessQueue) -> None:
        del self._timers[queue.message_queue]
        log.warning(
            "%s goes to another member while %d calls still run: their messages come again",
            queue.message_queue, queue.calls,
        )  # fmt: skip
        self._start(self._hand_over([queue]))

    async def _hand_over(self, queues: list[ProcessQueue]) -> None:
        names = [queue.message_queue for queue in queues]
        for queue in queues:
            queue.dropped = True
        try:
            await self._group.offsets.release(names)
            await self.locks.give_back(names)
        finally:
            for name in names:
                del self._leaving[name]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give back all locks."""
        for timer in self._timers.values():
            timer.cancel()
        await self.locks.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.locks.give_back(self.locks.table.queues)

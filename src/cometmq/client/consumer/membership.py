"""The queues that are assigned to a push consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cometmq import logs
from cometmq.client.cluster.workers import again_if_cancelled
from cometmq.client.consumer.consume_mode import ConsumeMode
from cometmq.client.consumer.queue_puller import QueuePuller
from cometmq.client.consumer.rebalance import Rebalance
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import FlowLimits, ProcessQueue
from cometmq.errors import CometError
from cometmq.message import MessageQueue

log = logs.logger("cometmq.client.consumer.membership")

_CORRECTED_AGAIN_S = 5.0
"""Seconds for which a queue pauses if its offset is corrected twice within this time."""


@dataclass(frozen=True, slots=True)
class AssignedQueue:
    """An assigned queue with its puller and the task of the puller."""

    puller: QueuePuller
    task: asyncio.Task[None]

    @property
    def queue(self) -> ProcessQueue:
        return self.puller.queue


class Membership:
    """The assigned queues of a push consumer, which rebalances change."""

    def __init__(self, group: ConsumerGroup, mode: ConsumeMode[Any, Any]) -> None:
        self._group = group
        self._mode = mode
        self.held: dict[MessageQueue, AssignedQueue] = {}
        self.rebalance = Rebalance(group, self, mode.pulled_topics)
        self._suspended = False
        self._ended = False
        self._limits = group.options.flow_limits
        self._corrected: dict[MessageQueue, float] = {}
        """The time at which a broker last corrected the offset of each queue, on the loop's clock."""

    def made_room(self, queue: ProcessQueue) -> None:
        held = self.held.get(queue.message_queue)
        if held is not None and held.queue is queue:
            held.puller.made_room()

    def suspend(self) -> None:
        self._suspended = True
        for held in self.held.values():
            held.puller.suspend()

    def resume(self) -> None:
        self._suspended = False
        for held in self.held.values():
            held.puller.resume()

    async def stop_pulling(self) -> None:
        """Stop rebalances and pulls. Messages that were pulled before may still be acknowledged."""
        self._ended = True
        tasks = [held.task for held in self.held.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.rebalance.stop(), return_exceptions=True)

    def drop_all(self) -> None:
        for held in self.held.values():
            held.queue.dropped = True
        self.held.clear()

    # -- requests of the rebalance (Holder)

    @property
    def queues(self) -> Collection[MessageQueue]:
        return self.held

    def expired(self, queue: MessageQueue) -> bool:
        """Return whether the answer to a queue's pull is overdue and must have been lost."""
        lost = self.held[queue].puller.lost(asyncio.get_running_loop().time())
        if lost:
            log.warning("a pull from %s did not return; the queue is revoked and assigned again", queue)
        return lost

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        return await self._mode.claim(queues, alone=alone)

    async def finish_rebalance(self) -> None:
        await self._mode.finish_rebalance(self.held)
        self._share_limits()

    async def assign(self, queue: MessageQueue) -> bool:
        """Start pulling a queue, if possible. Raises CometError if the start offset cannot be determined."""
        group = self._group
        group.offsets.forget(queue)
        offset = await group.start_offset(queue, await group.offsets.stored(queue))
        if self._ended:  # the consumer was stopped during the rebalance
            return False
        loop = asyncio.get_running_loop()
        process_queue = self._mode.new_queue(queue, offset, loop.time())
        if process_queue is None:
            return False
        process_queue.stats = group.stats.of(queue.topic)
        puller = QueuePuller(
            group, process_queue, self._mode.submit, lambda: self._limits, self._offset_illegal
        )
        if self._suspended:
            puller.suspend()
        task = loop.create_task(
            puller.run(), name=f"cometmq-pull-{queue.topic}-{queue.broker_name}-{queue.queue_id}"
        )
        self.held[queue] = AssignedQueue(puller, task)
        task.add_done_callback(lambda done: self._pull_ended(process_queue, done))
        again_if_cancelled(task, lambda: self._pull_cancelled(process_queue))
        return True

    def _pull_ended(self, queue: ProcessQueue, task: asyncio.Task[None]) -> None:
        """Assign the queue again if its pull loop ended with an error before the queue was dropped."""
        if task.cancelled() or task.exception() is None:
            return
        log.error("pulling from queue %s failed", queue.message_queue, exc_info=task.exception())
        self._reassign(queue)

    def _pull_cancelled(self, queue: ProcessQueue) -> None:
        if self._reassign(queue):
            self.rebalance.wake()

    def _reassign(self, queue: ProcessQueue) -> bool:
        """Assign a queue again. Return False if the queue was revoked or the consumer was stopped."""
        held = self.held.get(queue.message_queue)
        if held is None or held.queue is not queue or self._ended:
            return False
        del self.held[queue.message_queue]
        self._mode.drop(queue)
        return True

    def lost(self, queues: Iterable[MessageQueue]) -> None:
        """Drop queues that may already belong to another member."""
        for queue in queues:
            held = self.held.pop(queue, None)
            if held is not None:
                held.task.cancel()
                self._mode.drop(held.queue)
        self.rebalance.wake()

    async def revoke(self, queues: Iterable[MessageQueue]) -> None:
        gone = [self.held.pop(queue) for queue in queues if queue in self.held]
        for held in gone:
            held.task.cancel()
        await self._mode.revoke([held.queue for held in gone])

    async def _offset_illegal(self, queue: ProcessQueue, corrected: int) -> None:
        """Drop a queue and assign it again at the offset that the broker returned.

        The queue gets a new ProcessQueue: a listener call of the old one must not restore the old offset.
        """
        message_queue = queue.message_queue
        if self.held.get(message_queue) is None or self.held[message_queue].queue is not queue:
            return
        queue.dropped = True
        del self.held[message_queue]
        await self._store_now({message_queue: corrected})
        self._group.offsets.forget(message_queue)
        self._mode.drop(queue)
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._corrected = {q: at for q, at in self._corrected.items() if now - at < _CORRECTED_AGAIN_S}
        if message_queue in self._corrected:
            # The broker has corrected this offset twice within a short time, so the queue is assigned again
            # only after a pause.
            loop.call_later(_CORRECTED_AGAIN_S, self.rebalance.wake)
        else:
            self.rebalance.wake()
        self._corrected[message_queue] = now

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Apply an administrator's reset: drop the pulled messages and start at the given offsets.

        Offsets of other members' queues are not stored: those members may have consumed more since the reset.
        """
        async with self.rebalance.lock:
            ours = {queue: offset for queue, offset in table.items() if queue in self.held}
            dropped = [self.held.pop(queue) for queue in ours]
            for held in dropped:
                held.queue.dropped = True
                held.task.cancel()
            await self._store_now(ours)
            for held in dropped:
                self._group.offsets.forget(held.queue.message_queue)
                self._mode.drop(held.queue)
        self.rebalance.wake()

    async def _store_now(self, table: Mapping[MessageQueue, int]) -> None:
        for queue, offset in table.items():
            self._group.offsets.update(queue, offset, increase_only=False)
        try:
            await self._group.offsets.persist(table)
        except CometError as error:
            log.warning("corrected offsets of group %s could not be stored: %s", self._group.name, error)

    def _share_limits(self) -> None:
        """Set the flow limits of one queue: an equal share of the limits for all assigned queues together."""
        options = self._group.options
        of_queue = options.flow_limits

        def share(of_topic: int | None, alone: int) -> int:
            return alone if of_topic is None else max(1, of_topic // max(1, len(self.held)))

        self._limits = FlowLimits(
            max_count=share(options.topic_max_count, of_queue.max_count),
            max_mib=share(options.topic_max_mib, of_queue.max_mib),
            max_span=of_queue.max_span,
        )

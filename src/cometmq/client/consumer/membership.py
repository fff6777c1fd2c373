"""The queues that a push consumer holds: taking them up and giving them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cometmq import logs
from cometmq.client.cluster.workers import again_if_cancelled
from cometmq.client.consumer.hand_over import HandOver
from cometmq.client.consumer.orderly import Orderly
from cometmq.client.consumer.orderly_queue import OrderlyQueue
from cometmq.client.consumer.queue_puller import QueuePuller
from cometmq.client.consumer.rebalance import Rebalance
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch, FlowLimits, ProcessQueue
from cometmq.errors import CometError
from cometmq.message import MessageQueue

__all__ = ["Held", "Membership"]

log = logs.logger("cometmq.client.consumer.membership")

_CORRECTED_AGAIN_S = 5.0
"""A queue whose offset its broker corrects again so soon is taken up again after as long."""


@dataclass(frozen=True, slots=True)
class Held:
    """A held queue: who pulls it, and the task in which that is done."""

    puller: QueuePuller
    task: asyncio.Task[None]

    @property
    def queue(self) -> ProcessQueue:
        return self.puller.queue


class Membership:
    """The queues that a push consumer holds, and the rounds that change them.

    submit: takes the batches of what was pulled; locking: what a queue is taken up and given up with, None
    where each member has all queues, or hands them over without a word.
    """

    def __init__(
        self,
        group: ConsumerGroup,
        submit: Callable[[list[Batch]], None],
        locking: Orderly | HandOver | None = None,
    ) -> None:
        self._group = group
        self._submit = submit
        self._locking = locking
        self._order = locking if isinstance(locking, Orderly) else None
        self.held: dict[MessageQueue, Held] = {}
        self.rounds = Rebalance(group, self)
        self._suspended = False
        self._ended = False
        self._limits = group.options.flow_limits
        self._corrected: dict[MessageQueue, float] = {}
        """When brokers did not have the offsets of queues, of late (monotonic seconds)."""

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
        """No more rebalance and no more pulls; held messages may still be acknowledged."""
        self._ended = True
        self.rounds.cancel()
        tasks = [held.task for held in self.held.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.rounds.stop(), return_exceptions=True)

    def drop_all(self) -> None:
        for held in self.held.values():
            held.queue.dropped = True
        self.held.clear()

    # -- what rounds ask for (Holder)

    @property
    def queues(self) -> Collection[MessageQueue]:
        return self.held

    def expired(self, queue: MessageQueue) -> bool:
        """Whether its pull is under way for so long that it is lost."""
        lost = self.held[queue].puller.lost(asyncio.get_running_loop().time())
        if lost:
            log.warning("a pull of %s has not come back; the queue is given up and taken up anew", queue)
        return lost

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        if isinstance(self._locking, HandOver):
            return await self._locking.take(queues, alone=alone)
        return queues if self._locking is None else await self._locking.take(queues)

    async def settle(self) -> None:
        if self._locking is not None:
            await self._locking.settle(self.held)
        self._share_limits()

    async def take_up(self, queue: MessageQueue) -> bool:
        """Begin to pull a queue; whether that was possible. Raises CometError if its offset is not known."""
        group, order = self._group, self._order
        group.offsets.forget(queue)
        offset = await group.start_offset(queue, await group.offsets.stored(queue))
        if self._ended:  # while a rebalance that somebody had asked for was under way
            return False
        if order is not None and not order.locks.holds(queue):
            return False
        loop = asyncio.get_running_loop()
        process_queue = (ProcessQueue if order is None else OrderlyQueue)(queue, offset, loop.time())
        process_queue.stats = group.stats.of(queue.topic)
        puller = QueuePuller(group, process_queue, self._submit, lambda: self._limits, self._offset_illegal)
        if self._suspended:
            puller.suspend()
        task = loop.create_task(
            puller.run(), name=f"cometmq-pull-{queue.topic}-{queue.broker_name}-{queue.queue_id}"
        )
        self.held[queue] = Held(puller, task)
        task.add_done_callback(lambda done: self._pull_ended(process_queue, done))
        again_if_cancelled(task, lambda: self._pull_cancelled(process_queue))
        return True

    def _pull_ended(self, queue: ProcessQueue, task: asyncio.Task[None]) -> None:
        """A pull loop ends with its queue only; after a bug of ours the queue is taken up anew."""
        if task.cancelled() or task.exception() is None:
            return
        log.error("pulling %s failed", queue.message_queue, exc_info=task.exception())
        self._take_anew(queue)

    def _pull_cancelled(self, queue: ProcessQueue) -> None:
        if self._take_anew(queue):
            self.rounds.wake()

    def _take_anew(self, queue: ProcessQueue) -> bool:
        """False if it was given up, or all is over."""
        held = self.held.get(queue.message_queue)
        if held is None or held.queue is not queue or self._ended:
            return False
        del self.held[queue.message_queue]
        self._drop(queue)
        return True

    def _drop(self, queue: ProcessQueue) -> None:
        """What comes later of a queue that was given up changes nothing."""
        queue.dropped = True
        if isinstance(queue, OrderlyQueue) and self._order is not None:
            self._order.leave(queue)

    def lost(self, queues: Iterable[MessageQueue]) -> None:
        """Somebody else may have these by now."""
        for queue in queues:
            held = self.held.pop(queue, None)
            if held is not None:
                held.task.cancel()
                self._drop(held.queue)
        self.rounds.wake()

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        gone = [self.held.pop(queue) for queue in queues if queue in self.held]
        for held in gone:
            held.task.cancel()
        if isinstance(self._locking, HandOver):
            self._locking.leave(held.queue for held in gone)
        elif self._order is not None:
            for held in gone:
                assert isinstance(held.queue, OrderlyQueue)
                self._order.leave(held.queue)
        else:
            for held in gone:
                held.queue.dropped = True
            await self._group.offsets.release(held.queue.message_queue for held in gone)

    async def _offset_illegal(self, queue: ProcessQueue, corrected: int) -> None:
        """Start anew at the offset the broker names. Late results must not bring the old one back."""
        message_queue = queue.message_queue
        if self.held.get(message_queue) is None or self.held[message_queue].queue is not queue:
            return
        queue.dropped = True
        del self.held[message_queue]
        await self._store_now({message_queue: corrected})
        self._group.offsets.forget(message_queue)
        self._drop(queue)
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._corrected = {q: at for q, at in self._corrected.items() if now - at < _CORRECTED_AGAIN_S}
        if message_queue in self._corrected:
            loop.call_later(_CORRECTED_AGAIN_S, self.rounds.wake)  # unless something else wakes them
        else:
            self.rounds.wake()
        self._corrected[message_queue] = now

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """An administrator moved the group: drop what is held of these queues and start at the given
        offsets. Queues that others hold are theirs to store: what they have done since would be undone."""
        async with self.rounds.between_rounds:
            ours = {queue: offset for queue, offset in table.items() if queue in self.held}
            dropped = [self.held.pop(queue) for queue in ours]
            for held in dropped:
                held.queue.dropped = True
                held.task.cancel()
            await self._store_now(ours)
            for held in dropped:
                self._group.offsets.forget(held.queue.message_queue)
                self._drop(held.queue)
        self.rounds.wake()

    async def _store_now(self, table: Mapping[MessageQueue, int]) -> None:
        for queue, offset in table.items():
            self._group.offsets.update(queue, offset, increase_only=False)
        try:
            await self._group.offsets.persist(table)
        except CometError as error:
            log.warning("corrected offsets of group %s were not stored: %s", self._group.name, error)

    def _share_limits(self) -> None:
        """Limits over all queues together are shared out evenly among those that are held."""
        options = self._group.options
        of_queue = options.flow_limits

        def share(of_topic: int | None, alone: int) -> int:
            return alone if of_topic is None else max(1, of_topic // max(1, len(self.held)))

        self._limits = FlowLimits(
            max_count=share(options.topic_max_count, of_queue.max_count),
            max_mib=share(options.topic_max_mib, of_queue.max_mib),
            max_span=of_queue.max_span,
        )

"""Which queues a push consumer holds: rebalance, taking queues up and giving them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cometmq import logs
from cometmq.client.cluster.workers import for_each
from cometmq.client.consumer.orderly import Orderly
from cometmq.client.consumer.orderly_queue import OrderlyQueue
from cometmq.client.consumer.queue_puller import QueuePuller
from cometmq.client.group.allocate import share_of
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.offsets import start_offset
from cometmq.client.group.process_queue import Batch, FlowLimits, ProcessQueue
from cometmq.errors import CometError, NoRouteError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic

__all__ = ["Held", "Membership"]

_TAKEN_UP_AT_ONCE = 32
"""A member may hold thousands of queues, and each needs a question or two to its broker."""
_RETRY_TOPIC_PATIENCE = 10
"""Quick rounds that wait for the retry topic; a broker may be forbidden to create it."""

log = logs.logger("cometmq.client.consumer.membership")

_UNBALANCED_INTERVAL_S = 1.0
"""Between rounds while something is missing (a route, the member list, a start offset); 5.x does the same."""


@dataclass(frozen=True, slots=True)
class Held:
    """A held queue: who pulls it, and the task in which that is done."""

    puller: QueuePuller
    task: asyncio.Task[None]

    @property
    def queue(self) -> ProcessQueue:
        return self.puller.queue


class Membership:
    """The queues that a push consumer holds, and the rebalance that changes them.

    submit: takes the batches of what was pulled; order: given where queues are consumed in order, which needs
    a lock to take one up, and waits for the listener to give one up.
    """

    def __init__(
        self, group: ConsumerGroup, submit: Callable[[list[Batch]], None], order: Orderly | None = None
    ) -> None:
        self._group = group
        self._submit = submit
        self._order = order
        self.held: dict[MessageQueue, Held] = {}
        self.problems: dict[str, str] = {}
        """topic -> why its queues could not be shared out."""
        self._round = asyncio.Lock()
        self._balanced = False
        self._rounds = Periodic(
            asyncio.get_running_loop(),
            self._interval_s,
            self.rebalance,
            name=f"rebalance of group {group.name}",
        )
        self._suspended = False
        self._ended = False
        self._unlisted: set[str] = set()
        """Topics whose broker did not know us in the last round."""
        self._retry_topic_misses = 0
        self._limits = group.options.flow_limits

    def start(self) -> None:
        self._rounds.start()
        self._rounds.soon()  # by now brokers may know us, and the retry topic

    def wake(self) -> None:
        """Rebalance now: members or subscriptions changed."""
        self._rounds.soon()

    def _interval_s(self) -> float:
        interval_s = self._group.options.rebalance_interval_s
        return interval_s if self._balanced else min(interval_s, _UNBALANCED_INTERVAL_S)

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
        self._rounds.cancel()
        tasks = [held.task for held in self.held.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._rounds.stop(), return_exceptions=True)

    def drop_all(self) -> None:
        for held in self.held.values():
            held.queue.dropped = True
        self.held.clear()

    async def rebalance(self) -> None:
        """One round. The next comes soon unless every topic is shared out and every queue of ours is held."""
        async with self._round:
            self._balanced = False
            group = self._group
            topics = list(group.subscriptions)
            before = set(self.held)
            results = [await self._rebalance_topic(topic) for topic in topics]
            gone = [queue for queue in self.held if queue.topic not in group.subscriptions]
            await self._release_all(gone)
            if self._order is not None:
                await self._order.unlock_strays(self.held)
            for topic in set(self.problems).difference(topics):
                del self.problems[topic]
            if before != set(self.held):
                self._share_limits()
                log.info("group %s holds %d queues", group.name, len(self.held))
            self._balanced = all(results)

    async def _rebalance_topic(self, topic: str) -> bool:
        group = self._group
        try:
            queues = await group.instance.read_queues(topic)
            if group.clustering:
                members = await group.instance.consumer_ids(topic, group.name)
                mine = share_of(group.options.allocate_strategy, group.instance.client_id, queues, members)
            else:
                members = []
                mine = sorted(queues)
        except CometError as error:
            # Nothing is known that would justify giving up what we hold.
            return self._note_problem(topic, error)
        if group.clustering and group.instance.client_id not in members:
            self.problems[topic] = f"the broker does not list this client in group {group.name} yet"
            group.instance.heartbeat_soon()
            if topic not in self._unlisted:
                # A broker that was restarted, or whose connection was lost, knows us again after the next
                # heartbeat. Until then we keep what we hold: giving it up and taking it up anew would repeat
                # messages.
                self._unlisted.add(topic)
                return False
        else:
            self._unlisted.discard(topic)
        held = {queue for queue in self.held if queue.topic == topic}
        kept = held.intersection(mine).difference(self._expired(held))
        # First those that go: a queue is never pulled twice by one client.
        await self._release_all(sorted(held - kept))
        new = sorted(set(mine) - kept)
        free = new if self._order is None else await self._order.take(new)
        taken_up = all(await for_each(free, self._take_up, _TAKEN_UP_AT_ONCE))
        if topic in self._unlisted:
            return False
        if len(free) < len(new):
            missing = len(new) - len(free)
            self.problems[topic] = (
                f"no lock yet for {missing} queues: another member has them, or died just now"
            )
            return False
        if taken_up:
            self.problems.pop(topic, None)
        return taken_up

    def _expired(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Those whose pull is under way for so long that it is lost."""
        now = asyncio.get_running_loop().time()
        expired = [queue for queue in queues if self.held[queue].puller.lost(now)]
        for queue in expired:
            log.warning("a pull of %s has not come back; the queue is given up and taken up anew", queue)
        return expired

    def _note_problem(self, topic: str, error: CometError) -> bool:
        """Keep it for health(); True if it is none that has to be looked after soon."""
        text = str(error)
        if isinstance(error, NoRouteError) and topic == self._group.retry_topic:
            # The first heartbeat creates it; until then there is nothing to retry either.
            self.problems.pop(topic, None)
            self._retry_topic_misses += 1
            return self._retry_topic_misses > _RETRY_TOPIC_PATIENCE
        if self.problems.get(topic) != text:
            log.warning("group %s cannot share out %s: %s", self._group.name, topic, text)
        self.problems[topic] = text
        return False

    async def _take_up(self, queue: MessageQueue) -> bool:
        """Begin to pull a queue; whether that was possible."""
        group, order = self._group, self._order
        group.offsets.forget(queue)
        try:
            stored = await group.offsets.stored(queue)
            where = group.options.consume_from_where
            offset = await start_offset(group.instance, queue, stored, where, group.start_timestamp_ms)
        except CometError as error:
            self._note_problem(queue.topic, error)
            return False
        if self._ended:  # while a rebalance that somebody had asked for was under way
            return False
        if order is not None and not order.locks.holds(queue):
            return False
        loop = asyncio.get_running_loop()
        process_queue = (ProcessQueue if order is None else OrderlyQueue)(queue, offset, loop.time())
        puller = QueuePuller(group, process_queue, self._submit, lambda: self._limits, self._offset_illegal)
        if self._suspended:
            puller.suspend()
        task = loop.create_task(
            puller.run(), name=f"cometmq-pull-{queue.topic}-{queue.broker_name}-{queue.queue_id}"
        )
        self.held[queue] = Held(puller, task)
        task.add_done_callback(lambda done: self._pull_ended(process_queue, done))
        return True

    def _pull_ended(self, queue: ProcessQueue, task: asyncio.Task[None]) -> None:
        """A pull loop ends with its queue only; after a bug of ours the queue is taken up anew."""
        if task.cancelled() or task.exception() is None:
            return
        log.error("pulling %s failed", queue.message_queue, exc_info=task.exception())
        held = self.held.get(queue.message_queue)
        if held is not None and held.queue is queue:
            del self.held[queue.message_queue]
            self._drop(queue)

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
        self.wake()

    async def _release_all(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            held = self.held.pop(queue, None)
            if held is None:
                continue
            held.task.cancel()
            if isinstance(held.queue, OrderlyQueue) and self._order is not None:
                self._order.leave(held.queue)
                continue
            held.queue.dropped = True
            await self._group.offsets.release(queue)

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
        self.wake()

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """An administrator moved the group: drop what is held of these queues and start at the given
        offsets. Queues that others hold are theirs to store: what they have done since would be undone."""
        async with self._round:
            ours = {queue: offset for queue, offset in table.items() if queue in self.held}
            dropped = [self.held.pop(queue) for queue in ours]
            for held in dropped:
                held.queue.dropped = True
                held.task.cancel()
            await self._store_now(ours)
            for held in dropped:
                self._group.offsets.forget(held.queue.message_queue)
                self._drop(held.queue)
        self.wake()

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

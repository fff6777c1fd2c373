"""The consume mode of a listener that receives the messages of each queue in their order.

At most one batch of a queue is in progress: from the time when it is submitted to a worker until it is
acknowledged. The queue belongs to this member while this member holds its lock. A release happens in this
order: the running call ends, its offset is stored, the lock is released. So the next member continues where
this member ended, and never consumes the queue concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from cometmq import logs
from cometmq.client.consumer.consume_mode import ConsumeMode, ModeUser
from cometmq.client.consumer.listener import OrderlyContext, OrderlyStatus
from cometmq.client.consumer.orderly_queue import OrderlyQueue, suspension_s
from cometmq.client.consumer.queue_locks import RETRY_INTERVAL_S, QueueLocks
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.errors import CometError, ConfigError
from cometmq.message import MessageExt, MessageQueue
from cometmq.periodic import Tasks

log = logs.logger("cometmq.client.consumer.orderly")


class Orderly(ConsumeMode[OrderlyContext, OrderlyStatus]):
    """The consume mode of an orderly listener."""

    success = OrderlyStatus.SUCCESS
    later = OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
    handled = (OrderlyStatus.SUCCESS, OrderlyStatus.COMMIT)
    repeats = True

    def __init__(self, group: ConsumerGroup, user: ModeUser) -> None:
        super().__init__(group, user)
        self.locks = QueueLocks(group.instance, group.name, self._locks_lost)
        self._leaving: dict[MessageQueue, OrderlyQueue] = {}
        self._called: set[MessageQueue] = set()
        """The queues whose messages a listener call is processing."""
        self._tasks = Tasks()

    # -- assignment and release of queues

    def start(self) -> None:
        self.locks.start()

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        """Lock queues and return those that may be pulled now: locked and not used by a listener call."""
        del alone
        free = [queue for queue in queues if queue not in self._leaving and queue not in self._called]
        ours = await self.locks.acquire(free)
        return [queue for queue in free if queue in ours]

    async def finish_rebalance(self, held: Collection[MessageQueue]) -> None:
        """Unlock queues that were locked but not assigned."""
        await self.locks.unlock(set(self.locks.table.queues).difference(held, self._leaving, self._called))

    def new_queue(self, queue: MessageQueue, offset: int, now: float) -> ProcessQueue | None:
        return OrderlyQueue(queue, offset, now) if self.locks.holds(queue) else None

    def drop(self, queue: ProcessQueue) -> None:
        super().drop(queue)
        self._leave(queue)

    async def revoke(self, queues: Sequence[ProcessQueue]) -> None:
        for queue in queues:
            self._leave(queue)

    def _leave(self, queue: ProcessQueue) -> None:
        """Store a revoked queue's offset and release its lock, once no listener call is using the queue."""
        assert isinstance(queue, OrderlyQueue)
        queue.leaving = True
        self._leaving[queue.message_queue] = queue
        if not queue.called:
            self._tasks.start(self._release_queue(queue))

    async def _release_queue(self, queue: OrderlyQueue) -> None:
        try:
            if not queue.dropped:
                queue.dropped = True
                await self._group.offsets.release([queue.message_queue])
            await self.locks.unlock([queue.message_queue])
        finally:
            del self._leaving[queue.message_queue]

    def _locks_lost(self, queues: Collection[MessageQueue]) -> None:
        first = next(iter(queues))
        log.warning(
            "group %s lost the locks of %d queues; the first is %s", self._group.name, len(queues), first
        )
        for queue in queues:
            # Do not store the offset any more, because the queue may already belong to another member.
            self._group.offsets.forget(queue)
            if queue in self._leaving:
                self._leaving[queue].dropped = True
        self._user.lost(queues)

    async def close(self) -> None:
        """Release the locks of all queues without a running listener call. The other locks expire later."""
        await self._pauses.finish(cancel=True)
        await self.locks.close()
        await self._tasks.finish()
        if self._called:
            log.warning(
                "%d queues stay locked for up to 60 s, because their listener calls are still running",
                len(self._called),
            )
        await self.locks.unlock(set(self.locks.table.queues) - self._called)
        await self.retry_topic.close()

    def locked_at(self, queue: MessageQueue) -> float | None:
        return self.locks.table.last_confirmed(queue)

    def holds(self, queue: MessageQueue) -> bool:
        return self.locks.holds(queue)

    def drop_expired(self) -> None:
        self.locks.drop_expired()

    def wake(self) -> None:
        self.locks.renew_soon()

    # -- one batch after another

    def submit(self, batches: list[Batch]) -> None:
        """Start consuming a queue that has new batches."""
        if batches:
            self._enqueue_batch(batches[0].queue)

    def _enqueue_batch(self, queue: ProcessQueue) -> None:
        assert isinstance(queue, OrderlyQueue)
        batch = queue.take()
        if batch is not None:
            self._user.consume([batch])

    def begin(self, batch: Batch) -> OrderlyContext | None:
        """Return the context of a batch's listener call, or None while the queue may not be consumed."""
        queue = batch.queue
        assert isinstance(queue, OrderlyQueue)
        if not queue.begin():
            return None
        if not self.locks.holds(queue.message_queue):
            queue.put_back()
            self.locks.renew_soon()
            # Submit the batch again later, because a successful renewal of the lock does not submit it. If
            # the renewal fails, this member drops the queue and the batch with it.
            self._pauses.start(self._enqueue_batch_later(queue, RETRY_INTERVAL_S))
            return None
        self._called.add(queue.message_queue)
        return OrderlyContext(queue.message_queue)

    async def acknowledge(self, batch: Batch, status: OrderlyStatus, context: OrderlyContext) -> None:
        """Commit the offset after a success. Otherwise consume the same messages again after a pause."""
        queue = batch.queue
        assert isinstance(queue, OrderlyQueue)
        again = True
        if not self.locks.holds(queue.message_queue):
            # The lock expired while the listener call was running, so the result of the call does not count.
            self.locks.drop_expired()
        try:
            if not queue.dropped:
                again = await self._settle(queue, status, context.auto_commit)
        finally:
            if queue.under_way is not None:
                queue.put_back()
            self._called.discard(queue.message_queue)
            if queue.leaving:
                self._tasks.start(self._release_queue(queue))
            self._user.made_room(queue)
            if again:
                usual_s = self._group.options.suspend_current_queue_s
                pause_s = suspension_s(context.suspend_current_queue_s, usual_s)
                self._pauses.start(self._enqueue_batch_later(queue, pause_s))
            else:
                self._enqueue_batch(queue)

    async def _settle(self, queue: OrderlyQueue, status: OrderlyStatus, auto_commit: bool) -> bool:
        """Apply the status that the listener returned. Return whether the queue must pause."""
        rest = False
        if status is OrderlyStatus.ROLLBACK and auto_commit:
            log.warning(
                "%s: ROLLBACK is invalid with auto_commit and is treated as SUSPEND", queue.message_queue
            )
            status = self.later
        if status is self.later:
            hopeless = queue.count_failure(self._group.options.most_reconsume_times)
            buried = [message for message in hopeless if await self._send_to_dead_letters(message)]
            if queue.dropped:
                return True
            rest = queue.remove_messages(buried)
        elif status is OrderlyStatus.ROLLBACK:
            queue.roll_back()
            rest = True
        elif auto_commit or status is OrderlyStatus.COMMIT:
            queue.commit()
        else:
            queue.mark_consumed()
        offset = queue.commit_offset()
        if offset is not None:
            self._group.offsets.update(queue.message_queue, offset, increase_only=False)
        return rest

    def postpone(self, context: OrderlyContext, delay_level: int) -> OrderlyStatus:
        del context
        if delay_level:
            raise ConfigError("delay_level", str(delay_level), "0 in an orderly stream, whose queue waits")
        return self.later

    async def handle_overdue(self, queues: Iterable[ProcessQueue], timeout_s: float) -> None:
        """Log overdue calls of a plain listener.

        Their threads cannot be ended, and no later message of the queue may be consumed before their end.
        """
        before = asyncio.get_running_loop().time() - timeout_s
        for queue in queues:
            batch = queue.oldest_started_before(before)
            if batch is not None:
                log.warning(
                    "group %s: listener call for %s from offset %d has run for more than %g s; the "
                    "queue waits for it",
                    self._group.name, queue.message_queue, batch.first_offset, timeout_s,
                )  # fmt: skip

    async def _send_to_dead_letters(self, message: MessageExt) -> bool:
        """Send a message to the dead-letter queue. Return False if that failed: it is consumed again."""
        try:
            await self.retry_topic.send(message)
        except CometError as error:
            log.warning("message %s could not be sent to the dead-letter queue: %s", message.msg_id, error)
            message.reconsume_times += 1
            return False
        log.warning(
            "message %s failed %d times and was sent to the dead-letter queue",
            message.msg_id,
            message.reconsume_times,
        )
        return True

    async def _enqueue_batch_later(self, queue: OrderlyQueue, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._enqueue_batch(queue)

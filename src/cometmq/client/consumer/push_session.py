"""The running parts of a push consumer, and its answers to requests of brokers and the client instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from enum import Enum
from typing import Any

from cometmq import logs
from cometmq.client.cluster.hooks import with_consume_hooks
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.traces import traced
from cometmq.client.cluster.workers import is_async
from cometmq.client.consumer.concurrent import Concurrent
from cometmq.client.consumer.consume_mode import ConsumeMode
from cometmq.client.consumer.consuming import Consuming
from cometmq.client.consumer.delivery import Delivery
from cometmq.client.consumer.listener import (
    BoundListener,
    ConsumeContext,
    ConsumeStatus,
    Listener,
    OrderlyContext,
    OrderlyListener,
    OrderlyStatus,
    bind_listener,
    cancelled_after,
)
from cometmq.client.consumer.membership import AssignedQueue, Membership
from cometmq.client.consumer.orderly import Orderly
from cometmq.client.consumer.retry_topic import RetryTopic
from cometmq.client.consumer.sharing import Sharing
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.health import QueueHealth
from cometmq.client.group.member import Member
from cometmq.client.group.options import MAX_CONCURRENCY, PushOptions
from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.client.group.statistics import SAMPLE_S
from cometmq.client.group.subscription import Subscription
from cometmq.client.group.watching import Watchdog
from cometmq.clock import boottime
from cometmq.message import MessageExt, MessageQueue
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo, ProcessQueueInfo

log = logs.logger("cometmq.client.consumer")

_MIB = 1024 * 1024
_LISTENING: ContextVar[PushSession | None] = ContextVar("_LISTENING", default=None)
"""The push consumer whose listener is called in this task or in the task that created this task."""
_DIRECT_RESULTS: dict[Enum, str] = {
    ConsumeStatus.SUCCESS: "CR_SUCCESS",
    ConsumeStatus.RECONSUME_LATER: "CR_LATER",
    OrderlyStatus.SUCCESS: "CR_SUCCESS",
    OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT: "CR_LATER",
    OrderlyStatus.COMMIT: "CR_COMMIT",
    OrderlyStatus.ROLLBACK: "CR_ROLLBACK",
}


class PushSession(Member):
    """The running consumer behind PushConsumer and MessageStream (ConsumerPeer, ModeUser).

    With `delivers`, for MessageStream, the user receives the messages one by one from a Delivery, and the
    listener is only called for administrators' requests.
    """

    consume_type = "CONSUME_PASSIVELY"
    group: ConsumerGroup

    def __init__(
        self,
        name: str,
        listener: Listener | OrderlyListener,
        subscriptions: Mapping[str, Subscription],
        options: PushOptions,
        client: ClientInstance,
        *,
        delivers: bool = False,
    ) -> None:
        group = ConsumerGroup(name, client, options, dict(subscriptions))
        super().__init__(group)
        if group.clustering and not (options.orderly and options.share == "messages"):
            group.subscriptions[group.retry_topic] = Subscription(group.retry_topic, "*")
        self._executor = (
            None if is_async(listener) else ThreadPoolExecutor(MAX_CONCURRENCY, f"cometmq-{name}")
        )
        self.sharing = Sharing(group, self) if options.share != "queues" else None
        self._mode: ConsumeMode[Any, Any]
        self._mode = self.sharing or (Orderly if options.orderly else Concurrent)(group, self)
        statuses = type(self._mode.later)
        self._bound: BoundListener[Any, Enum]
        self._bound = bind_listener(listener, self._executor, statuses, options.none_means)
        self.consuming: Consuming[Any, Any] | Delivery[Any, Any]
        if delivers:
            self.consuming = Delivery(self._mode, group)
        else:
            listen = self._bound
            if options.orderly and is_async(listener):
                listen = cancelled_after(options.consume_timeout_s, listen)
            listen = with_consume_hooks(listen, options.consume_hooks, name)
            listen = traced(listen, client.traces, name, options.consume_timeout_s)
            if client.options.telemetry is not None:
                listen = client.options.telemetry.processing(listen, name)
            self.consuming = Consuming(listen, options.consume_concurrency, self._mode, self._enter)
        self.members = Membership(group, self._mode)
        self.watchdog = Watchdog(f"group {name}", options.stall_after_s, self.queue_health)
        loop = asyncio.get_running_loop()
        self._jobs = [
            Periodic(loop, options.persist_interval_s, self._persist, name=f"offsets of group {name}"),
            Periodic(loop, options.consume_timeout_s, self.handle_overdue, name=f"time-outs of group {name}"),
            self.watchdog.periodic(),
            Periodic(loop, SAMPLE_S, group.stats.sample, name=f"statistics of group {name}"),
        ]

    # -- events of the mode (ModeUser)

    @property
    def concurrency(self) -> int:
        return self.consuming.concurrency

    def made_room(self, queue: ProcessQueue) -> None:
        self.members.made_room(queue)

    def consume(self, batches: list[Batch]) -> None:
        self.consuming.submit(batches)

    def lost(self, queues: Collection[MessageQueue]) -> None:
        self.members.lost(queues)

    # -- life

    def _enter(self) -> Token[PushSession | None]:
        return _LISTENING.set(self)

    def in_listener(self) -> bool:
        """Return whether the caller runs within an async listener of this consumer."""
        return _LISTENING.get() is self

    async def start(self) -> None:
        self.consuming.start()
        self._mode.start()
        await self.members.rebalance.run()
        self.members.rebalance.start()
        for job in self._jobs:
            job.start()

    def suspend(self) -> None:
        self.members.suspend()
        if self.sharing is not None:
            self.sharing.suspend()

    def resume(self) -> None:
        self.members.resume()
        if self.sharing is not None:
            self.sharing.resume()

    async def drain(self, timeout_s: float) -> None:
        """Stop pulling, wait for running listener calls, and store the offsets."""
        if self.sharing is not None:
            self.sharing.suspend()
        await self.members.stop_pulling()
        overrun = await self.consuming.stop(timeout_s)
        if overrun:
            log.warning(
                "group %s: %d listener calls did not end within %g s; their messages are delivered again",
                self.group.name,
                overrun,
                timeout_s,
            )
        await self.group.offsets.persist_last()

    async def close(self) -> None:
        await asyncio.gather(*(job.stop(cancel=True) for job in self._jobs), return_exceptions=True)
        await self.members.stop_pulling()
        self.members.drop_all()
        await self.consuming.stop(0)
        await self._mode.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self.group.close()

    @property
    def retry_topic(self) -> RetryTopic:
        return self._mode.retry_topic

    def queue_health(self, now: float) -> tuple[QueueHealth, ...]:
        return tuple(
            QueueHealth(
                queue=queue,
                next_offset=held.queue.next_offset,
                committed_offset=self.group.offsets.memory(queue),
                done_offset=held.queue.done_offset,
                held_count=held.queue.count,
                held_bytes=held.queue.body_bytes,
                since_pull_s=now - held.queue.last_pull_at,
                since_consume_s=now - held.queue.last_consume_at,
                waiting=held.puller.waiting,
                problem=held.puller.problem(now),
            )
            for queue, held in sorted(self.members.held.items())
        )

    async def _persist(self) -> None:
        self._mode.drop_expired()  # drop queues that may already belong to another member
        await self.consuming.drop_lost()
        await self.group.offsets.try_persist()

    async def handle_overdue(self) -> None:
        queues = [held.queue for held in self.members.held.values()]
        await self._mode.handle_overdue(queues, self.group.options.consume_timeout_s)
        await self.consuming.drop_lost()

    # -- requests of brokers and the client instance (ConsumerPeer)

    def wake_rebalance(self) -> None:
        self.members.rebalance.wake()
        self._mode.wake()  # a restarted broker, which has lost all locks, sends this notice

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        await self.members.reset_offsets(table)

    def running_info(self) -> ConsumerRunningInfo:
        options = self.group.options
        more = {
            "PROP_THREADPOOL_CORE_SIZE": str(self.consuming.concurrency),
            "PROP_CONSUMEORDERLY": str(options.orderly).lower(),
            "consumeMessageBatchMaxSize": str(options.consume_batch_max_size),
            "maxReconsumeTimes": str(options.most_reconsume_times),
        }
        return self.info_of(
            {queue: self._queue_info(held) for queue, held in self.members.held.items()}, more
        )

    def _queue_info(self, held: AssignedQueue) -> ProcessQueueInfo:
        queue = held.queue
        # The brokers' tools expect wall-clock milliseconds, while the client uses monotonic seconds.
        wall_s = time.time()
        shift, lock_shift = wall_s - asyncio.get_running_loop().time(), wall_s - boottime()
        bounds = queue.bounds()
        taken = queue.taken
        locked_at = self._mode.locked_at(queue.message_queue)
        return ProcessQueueInfo(
            commit_offset=self.group.offsets.memory(queue.message_queue) or 0,
            cached_msg_min_offset=bounds[0],
            cached_msg_max_offset=bounds[1],
            cached_msg_count=queue.count,
            cached_msg_size_in_mib=queue.body_bytes // _MIB,
            transaction_msg_min_offset=taken[0],
            transaction_msg_max_offset=taken[1],
            transaction_msg_count=taken[2],
            locked=self._mode.holds(queue.message_queue),
            last_lock_timestamp=0 if locked_at is None else int((locked_at + lock_shift) * 1000),
            droped=queue.dropped,
            last_pull_timestamp=int((queue.last_pull_at + shift) * 1000),
            last_consume_timestamp=int((queue.last_consume_at + shift) * 1000),
        )

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        """Call the listener once with a message that an administrator has chosen. No offset is committed."""
        begun = time.monotonic()
        remark: str | None = None
        orderly = OrderlyContext(message.queue)
        context = orderly if self.group.options.orderly else ConsumeContext(message.queue)
        self.group.restore_topic(message)
        token = self._enter()
        try:
            result = _DIRECT_RESULTS[await self._bound([message], context)]
        except Exception as error:
            # The administrator requested this call as a test. Its failure must not affect the consumer, so
            # the error is reported to the administrator only.
            result, remark = "CR_THROW_EXCEPTION", repr(error)
        finally:
            _LISTENING.reset(token)
        return ConsumeMessageDirectlyResult(
            order=self.group.options.orderly,
            auto_commit=orderly.auto_commit,
            consume_result=result,
            remark=remark,
            spent_time_mills=int((time.monotonic() - begun) * 1000),
        )

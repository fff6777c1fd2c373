"""The running parts of a push consumer, and its answers to brokers and the client instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from enum import Enum
from functools import partial
from typing import Any

from cometmq import logs
from cometmq.client.cluster.hooks import called_between
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.workers import is_async
from cometmq.client.consumer.acknowledging import Acknowledger
from cometmq.client.consumer.consuming import Consuming
from cometmq.client.consumer.delivery import Delivery
from cometmq.client.consumer.handoff import Handoff
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
from cometmq.client.consumer.membership import Held, Membership
from cometmq.client.consumer.orderly import Orderly
from cometmq.client.consumer.orderly_queue import OrderlyQueue
from cometmq.client.consumer.watching import Watchdog
from cometmq.client.group.agreement import Agreement
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.health import QueueHealth
from cometmq.client.group.options import MAX_CONCURRENCY, PushOptions
from cometmq.client.group.process_queue import ProcessQueue
from cometmq.client.group.statistics import SAMPLE_S
from cometmq.client.group.subscription import Subscription
from cometmq.client.group.traces import traced
from cometmq.clock import boottime
from cometmq.message import MessageExt, MessageQueue
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerRunningInfo,
    ProcessQueueInfo,
)
from cometmq.protocol.codes import VERSION_4_9_7, version_name

__all__ = ["PushSession"]

log = logs.logger("cometmq.client.consumer")

_OVERDUE_PER_ROUND = 16
_MIB = 1024 * 1024
_LISTENING: ContextVar[PushSession | None] = ContextVar("_LISTENING", default=None)
"""The session whose listener runs in this task or created it."""
_DIRECT_RESULTS: dict[Enum, str] = {
    ConsumeStatus.SUCCESS: "CR_SUCCESS",
    ConsumeStatus.RECONSUME_LATER: "CR_LATER",
    OrderlyStatus.SUCCESS: "CR_SUCCESS",
    OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT: "CR_LATER",
    OrderlyStatus.COMMIT: "CR_COMMIT",
    OrderlyStatus.ROLLBACK: "CR_ROLLBACK",
}


class PushSession:
    """The running consumer, a ConsumerPeer. Create it inside the event loop of a started client instance."""

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
        """Create the parts.

        delivers: deliver messages one by one (Delivery); the listener is for administrators only.
        """
        self.started_at_ms = int(time.time() * 1000)
        self.group = group = ConsumerGroup(name, client, options, dict(subscriptions))
        if group.clustering:
            group.subscriptions[group.retry_topic] = Subscription(group.retry_topic, "*")
        self.agreement = Agreement(group)
        self._executor = (
            None if is_async(listener) else ThreadPoolExecutor(MAX_CONCURRENCY, f"cometmq-{name}")
        )
        loop = asyncio.get_running_loop()
        self._jobs = [
            Periodic(loop, options.persist_interval_s, self._persist, name=f"offsets of group {name}")
        ]
        self.members: Membership
        self._mode: Acknowledger | Orderly
        self._order: Orderly | None = None
        self._handoff: Handoff | None = None
        hooks = (lambda queue: self.members.made_room(queue), lambda batches: self.consuming.submit(batches))
        overdue: Callable[[], object]
        if options.orderly:
            self._mode = self._order = Orderly(group, *hooks, lambda queues: self.members.lost(queues))
            overdue = self._report_overdue
        else:
            if group.clustering and options.handover_timeout_s > 0:
                self._handoff = Handoff(group)
            self._mode = acknowledger = Acknowledger(group, *hooks, self._left)
            overdue = partial(self.send_back_overdue, acknowledger)
        self._jobs.append(
            Periodic(loop, options.consume_timeout_s, overdue, name=f"time-outs of group {name}")
        )
        self._bound: BoundListener[Any, Enum]
        self._bound = bind_listener(listener, self._executor, type(self._mode.later), options.none_means)
        self.consuming: Consuming[Any, Any] | Delivery[Any, Any]
        if delivers:
            self.consuming = Delivery(self._mode, group)
        else:
            listen = self._bound
            if options.orderly and is_async(listener):
                listen = cancelled_after(options.consume_timeout_s, listen)
            listen = called_between(listen, options.consume_hooks, name)
            listen = traced(listen, client.traces, name, options.consume_timeout_s)
            if client.options.telemetry is not None:
                listen = client.options.telemetry.processing(listen, name)
            self.consuming = Consuming(listen, options.consume_concurrency, self._mode, self._enter)
        submit = self.consuming.submit if self._order is None else self._order.submit
        self.members = Membership(group, submit, self._order or self._handoff)
        self.watchdog = Watchdog(f"group {name}", options.stall_after_s, self.queue_health)
        self._jobs.append(self.watchdog.periodic())
        self._jobs.append(Periodic(loop, SAMPLE_S, group.stats.sample, name=f"statistics of group {name}"))

    def _left(self, queue: ProcessQueue) -> None:
        if self._handoff is not None:
            self._handoff.ended(queue)

    def _enter(self) -> Token[PushSession | None]:
        return _LISTENING.set(self)

    def in_listener(self) -> bool:
        """Return whether the caller is an async listener of this session."""
        return _LISTENING.get() is self

    async def start(self) -> None:
        self.consuming.start()
        locking = self._order or self._handoff
        if locking is not None:
            locking.locks.start()
        await self.members.rebalance.run()
        self.members.rebalance.start()
        for job in self._jobs:
            job.start()

    async def drain(self, timeout_s: float) -> None:
        """Stop pulling, wait for running listener calls, and store the offsets."""
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
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*(job.stop() for job in self._jobs), return_exceptions=True)
        await self.members.stop_pulling()
        self.members.drop_all()
        await self.consuming.stop(0)
        if self._handoff is not None:
            await self._handoff.close()
        await self._mode.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self.group.close()

    async def send_back(self, message: MessageExt, delay_level: int) -> None:
        await self._mode.retry_topic.send_back(message, delay_level)

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
        if self._order is not None:
            self._order.locks.let_go()  # the offsets of those queues may belong to another member by now
        await self._let_go()
        await self.group.offsets.try_persist()

    async def send_back_overdue(self, acknowledger: Acknowledger) -> None:
        """Send back messages of overdue listener calls. One of them would block its queue's offset."""
        timeout_s = self.group.options.consume_timeout_s
        before = asyncio.get_running_loop().time() - timeout_s
        for held in list(self.members.held.values()):
            for _ in range(_OVERDUE_PER_ROUND):
                batch = held.queue.oldest_started_before(before)
                if batch is None or held.queue.dropped:
                    break
                log.warning(
                    "listener call for %s from offset %d takes more than %g s; its messages are sent back",
                    held.queue.message_queue,
                    batch.first_offset,
                    timeout_s,
                )
                await acknowledger.overdue(batch)
                if not batch.done:
                    break
        await self._let_go()

    def _report_overdue(self) -> None:
        """Log overdue calls of a plain orderly listener.

        A thread cannot be ended, and no later message may be consumed before.
        """
        timeout_s = self.group.options.consume_timeout_s
        before = asyncio.get_running_loop().time() - timeout_s
        for queue, held in self.members.held.items():
            batch = held.queue.oldest_started_before(before)
            if batch is not None:
                log.warning(
                    "group %s: listener call for %s from offset %d takes more than %g s; the queue waits",
                    self.group.name, queue, batch.first_offset, timeout_s,
                )  # fmt: skip

    async def _let_go(self) -> None:
        """Drop the messages of a stream that can no longer be acknowledged."""
        if self._order is None and isinstance(self.consuming, Delivery):
            await self.consuming.let_go()

    # -- requests of brokers and the client instance (ConsumerPeer)

    def topics(self) -> Collection[str]:
        return self.group.subscriptions.keys()

    def heartbeat(self) -> ConsumerData:
        group = self.group
        return ConsumerData(
            group_name=group.name,
            consume_type="CONSUME_PASSIVELY",
            message_model=group.options.message_model.value,
            consume_from_where=group.options.consume_from_where.value,
            subscription_data_set=[each.data() for each in group.subscriptions.values()],
            unit_mode=False,
        )

    async def look_at_group(self) -> None:
        await self.agreement.look()

    def wake_rebalance(self) -> None:
        self.members.rebalance.wake()
        if self._order is not None:
            self._order.locks.renew_soon()  # a restarted broker sends this notice, and has lost its locks

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        await self.members.reset_offsets(table)

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        return {
            queue: offset for queue, offset in self.group.offsets.snapshot().items() if queue.topic == topic
        }

    def running_info(self) -> ConsumerRunningInfo:
        group = self.group
        options = group.options
        properties = {
            "PROP_NAMESERVER_ADDR": ";".join(group.instance.namesrv.addrs),
            "PROP_THREADPOOL_CORE_SIZE": str(self.consuming.concurrency),
            "PROP_CONSUMEORDERLY": str(options.orderly).lower(),
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CLIENT_VERSION": version_name(VERSION_4_9_7),
            "PROP_CONSUMER_START_TIMESTAMP": str(self.started_at_ms),
            "consumerGroup": group.name,
            "messageModel": options.message_model.value,
            "consumeFromWhere": options.consume_from_where.value,
            "pullBatchSize": str(options.pull_batch_size),
            "consumeMessageBatchMaxSize": str(options.consume_batch_max_size),
            "maxReconsumeTimes": str(options.most_reconsume_times),
        }
        return ConsumerRunningInfo(
            properties=properties,
            subscription_set=[each.data() for each in group.subscriptions.values()],
            mq_table={queue: self._queue_info(held) for queue, held in self.members.held.items()},
            status_table=dict(group.stats.table()),
        )

    def _queue_info(self, held: Held) -> ProcessQueueInfo:
        queue = held.queue
        # The brokers' tools expect wall-clock milliseconds, while the client uses monotonic seconds.
        wall_s = time.time()
        shift, lock_shift = wall_s - asyncio.get_running_loop().time(), wall_s - boottime()
        bounds = queue.bounds()
        taken = queue.taken if isinstance(queue, OrderlyQueue) else (0, 0, 0)
        locked_at = (
            None if self._order is None else self._order.locks.table.last_confirmed(queue.message_queue)
        )
        return ProcessQueueInfo(
            commit_offset=self.group.offsets.memory(queue.message_queue) or 0,
            cached_msg_min_offset=bounds[0],
            cached_msg_max_offset=bounds[1],
            cached_msg_count=queue.count,
            cached_msg_size_in_mib=queue.body_bytes // _MIB,
            transaction_msg_min_offset=taken[0],
            transaction_msg_max_offset=taken[1],
            transaction_msg_count=taken[2],
            locked=self._order is not None and self._order.locks.holds(queue.message_queue),
            last_lock_timestamp=0 if locked_at is None else int((locked_at + lock_shift) * 1000),
            droped=queue.dropped,
            last_pull_timestamp=int((queue.last_pull_at + shift) * 1000),
            last_consume_timestamp=int((queue.last_consume_at + shift) * 1000),
        )

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        """Call the listener once with an administrator's message. No offset is committed."""
        begun = time.monotonic()
        remark: str | None = None
        orderly = OrderlyContext(message.queue)
        context = ConsumeContext(message.queue) if self._order is None else orderly
        self.group.restore_topic(message)
        token = self._enter()
        try:
            result = _DIRECT_RESULTS[await self._bound([message], context)]
        except Exception as error:
            # The error is reported to the administrator only.
            result, remark = "CR_THROW_EXCEPTION", repr(error)
        finally:
            _LISTENING.reset(token)
        return ConsumeMessageDirectlyResult(
            order=self._order is not None,
            auto_commit=orderly.auto_commit,
            consume_result=result,
            remark=remark,
            spent_time_mills=int((time.monotonic() - begun) * 1000),
        )

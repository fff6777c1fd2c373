"""The running parts of a push consumer, made whole when it starts and taken apart when it stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor

from cometmq import logs
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.consumer.consumer_offsets import OffsetStore
from cometmq.client.consumer.consuming import ConcurrentConsuming
from cometmq.client.consumer.group import ConsumerGroup
from cometmq.client.consumer.health import QueueHealth
from cometmq.client.consumer.listener import ConsumeContext, ConsumeStatus, Listener, bind_listener, is_async
from cometmq.client.consumer.membership import Membership
from cometmq.client.consumer.offset_files import LocalOffsets
from cometmq.client.consumer.options import PushOptions
from cometmq.client.consumer.process_queue import ProcessQueue
from cometmq.client.consumer.remote_offsets import RemoteOffsets
from cometmq.client.consumer.send_back import SendBack
from cometmq.client.consumer.settle import Settler
from cometmq.client.consumer.subscription import Subscription
from cometmq.client.producer.producer import Producer
from cometmq.errors import CometError
from cometmq.message import MessageExt
from cometmq.protocol.codes import CLIENT_INNER_PRODUCER_GROUP

__all__ = ["PushSession"]

log = logs.logger("cometmq.client.consumer")

_HALF_HOUR_MS = 30 * 60 * 1000
_OVERDUE_PER_ROUND = 16


class PushSession:
    """To be made inside the running loop, on a started client instance."""

    def __init__(
        self,
        name: str,
        listener: Listener,
        subscriptions: Mapping[str, Subscription],
        options: PushOptions,
        client: ClientInstance,
    ) -> None:
        self.started_at_ms = int(time.time() * 1000)
        timestamp = options.consume_timestamp_ms
        self.group = group = ConsumerGroup(
            name,
            client,
            options,
            _offset_store(name, options, client),
            dict(subscriptions),
            timestamp if timestamp is not None else self.started_at_ms - _HALF_HOUR_MS,
        )
        if group.clustering:
            group.subscriptions[group.retry_topic] = Subscription(group.retry_topic, "*")
        self._executor = (
            None if is_async(listener) else ThreadPoolExecutor(options.consume_concurrency, f"cometmq-{name}")
        )
        self.listener = bind_listener(listener, self._executor)
        self._inner_producer = Producer(CLIENT_INNER_PRODUCER_GROUP, client=client)
        self._settler = Settler(group, SendBack(group, self._inner_producer), self._made_room)
        self.consuming = ConcurrentConsuming(self.listener, options.consume_concurrency, self._settler.settle)
        self._settler.feeds(self.consuming)
        self.members = Membership(group, self.consuming)
        self._tasks: list[asyncio.Task[None]] = []

    def _made_room(self, queue: ProcessQueue) -> None:
        self.members.made_room(queue)

    async def start(self) -> None:
        self.consuming.start()
        await self.members.rebalance()
        self.members.start()
        self._start_job(self._persist_job(), "persist")
        self._start_job(self._overdue_job(), "overdue")

    def _start_job(self, job: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(job, name=f"cometmq-{name}-{self.group.name}")
        self._tasks.append(task)

    async def drain(self, timeout_s: float) -> None:
        """Stop pulling, let running listeners end, store the offsets."""
        await self.members.stop_pulling()
        overrun = await self.consuming.stop(timeout_s)
        if overrun:
            log.warning(
                "group %s: %d listeners did not end within %g s; their messages come again",
                self.group.name,
                overrun,
                timeout_s,
            )
        try:
            await self.group.offsets.persist_last()
        except CometError:
            pass  # logged by the store; what is not stored is consumed again, as at-least-once allows

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.members.stop_pulling()
        self.members.drop_all()
        await self.consuming.stop(0)
        self._settler.close()
        await self._inner_producer.stop()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def consume_directly(self, message: MessageExt) -> tuple[ConsumeStatus, ConsumeContext]:
        """Run the listener once on a message that an administrator chose; nothing is committed."""
        context = ConsumeContext(message.queue)
        self.group.restore_topic(message)
        return await self.listener([message], context), context

    def queue_health(self, now: float) -> tuple[QueueHealth, ...]:
        return tuple(
            QueueHealth(
                queue=queue,
                next_offset=held.queue.next_offset,
                committed_offset=self.group.offsets.memory(queue),
                held_count=held.queue.count,
                held_bytes=held.queue.body_bytes,
                since_pull_s=now - held.queue.last_pull_at,
                since_consume_s=now - held.queue.last_consume_at,
                waiting=held.puller.waiting,
                problem=held.puller.problem(now),
            )
            for queue, held in sorted(self.members.held.items())
        )

    async def _persist_job(self) -> None:
        while True:
            await asyncio.sleep(self.group.options.persist_interval_s)
            try:
                await self.group.offsets.persist()
            except CometError:
                pass  # logged by the store, due again next time

    async def _overdue_job(self) -> None:
        """Messages whose listener hangs are sent back, so that one message cannot hold a queue's offset for
        ever."""
        timeout_s = self.group.options.consume_timeout_s
        while True:
            await asyncio.sleep(timeout_s)
            before = asyncio.get_running_loop().time() - timeout_s
            for held in list(self.members.held.values()):
                for _ in range(_OVERDUE_PER_ROUND):
                    batch = held.queue.oldest_started_before(before)
                    if batch is None or held.queue.dropped:
                        break
                    log.warning(
                        "a listener has held %s from offset %d for over %g s; sending it back",
                        held.queue.message_queue,
                        batch.first_offset,
                        timeout_s,
                    )
                    await self._settler.overdue(batch)
                    if not batch.done:
                        break


def _offset_store(group: str, options: PushOptions, client: ClientInstance) -> OffsetStore:
    if options.message_model.value == "BROADCASTING":
        local = LocalOffsets(options.offset_dir, client.client_id, group)
        return OffsetStore(local.read, local.write)
    remote = RemoteOffsets(client, group)
    return OffsetStore(remote.read, remote.write)

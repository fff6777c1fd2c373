"""The group membership of a pull consumer that has subscribed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Protocol

from cometmq.client.consumer.rebalance import Holder, Rebalance
from cometmq.client.group.agreement import Agreement
from cometmq.client.group.group import Group
from cometmq.errors import CommandError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerRunningInfo,
    ProcessQueueInfo,
)
from cometmq.protocol.codes import VERSION_4_9_7, ResponseCode, version_name

__all__ = ["PullHolder", "PullSession"]

_TYPE = "CONSUME_ACTIVELY"


class PullHolder(Holder, Protocol):
    """A holder whose queues can continue at another offset."""

    async def move(self, queue: MessageQueue, offset: int) -> None:
        """Continue an assigned queue at an offset."""


class PullSession:
    """The group membership of a pull consumer, and its answers to brokers (ConsumerPeer)."""

    def __init__(self, group: Group, holder: PullHolder) -> None:
        self._group = group
        self._holder = holder
        self.rebalance = Rebalance(group, holder)
        self._started_at_ms = int(time.time() * 1000)
        self.agreement = Agreement(group)
        group.instance.register_consumer(group.name, self)

    async def join(self) -> None:
        """Announce the subscriptions and rebalance."""
        group = self._group
        await group.instance.refresh_routes(group.subscriptions)
        await self.agreement.look()
        await group.instance.send_heartbeats()
        await self.rebalance.run()
        self.rebalance.start()

    async def leave(self) -> None:
        """Stop rebalancing. The holder then releases its queues before the consumer is unregistered."""
        self.rebalance.cancel()
        await asyncio.gather(self.rebalance.stop(), return_exceptions=True)

    # -- requests of brokers and the client instance

    def topics(self) -> Collection[str]:
        return self._group.subscriptions.keys()

    def heartbeat(self) -> ConsumerData:
        group = self._group
        return ConsumerData(
            group_name=group.name,
            consume_type=_TYPE,
            message_model=group.options.message_model.value,
            consume_from_where=group.options.consume_from_where.value,
            subscription_data_set=[each.data() for each in group.subscriptions.values()],
            unit_mode=False,
        )

    async def look_at_group(self) -> None:
        await self.agreement.look()

    def wake_rebalance(self) -> None:
        self.rebalance.wake()

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Apply an administrator's reset to assigned queues. Other members apply it to theirs."""
        async with self.rebalance.lock:
            for queue in set(table).intersection(self._holder.queues):
                await self._holder.move(queue, table[queue])
            await self._group.offsets.try_persist(table)

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        known = self._group.offsets.snapshot()
        return {queue: offset for queue, offset in known.items() if queue.topic == topic}

    def running_info(self) -> ConsumerRunningInfo:
        group = self._group
        memory = group.offsets.memory
        return ConsumerRunningInfo(
            properties={
                "PROP_NAMESERVER_ADDR": ";".join(group.instance.namesrv.addrs),
                "PROP_CONSUME_TYPE": _TYPE,
                "PROP_CLIENT_VERSION": version_name(VERSION_4_9_7),
                "PROP_CONSUMER_START_TIMESTAMP": str(self._started_at_ms),
                "consumerGroup": group.name,
                "messageModel": group.options.message_model.value,
                "consumeFromWhere": group.options.consume_from_where.value,
                "pullBatchSize": str(group.options.pull_batch_size),
            },
            subscription_set=[each.data() for each in group.subscriptions.values()],
            mq_table={
                queue: ProcessQueueInfo(commit_offset=memory(queue) or 0) for queue in self._holder.queues
            },
        )

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        """Refuse to consume a message, because there is no listener."""
        raise CommandError(ResponseCode.SYSTEM_ERROR, f"{message.msg_id}: a pull consumer has no listener")

"""The group membership of a pull consumer that has subscribed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cometmq.client.consumer.rebalance import Holder, Rebalance
from cometmq.client.group.group import Group
from cometmq.client.group.member import Member
from cometmq.errors import CommandError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo, ProcessQueueInfo
from cometmq.protocol.codes import ResponseCode


class PullHolder(Holder, Protocol):
    """The owner of a pull consumer's assigned queues, which can continue a queue at another offset."""

    async def move(self, queue: MessageQueue, offset: int) -> None:
        """Continue reading an assigned queue at an offset."""


class PullSession(Member):
    """The group membership of a pull consumer. Implements ConsumerPeer."""

    consume_type = "CONSUME_ACTIVELY"

    def __init__(self, group: Group, holder: PullHolder) -> None:
        super().__init__(group)
        self._holder = holder
        self.rebalance = Rebalance(group, holder)
        group.instance.register_consumer(group.name, self)

    async def join(self) -> None:
        """Announce the subscriptions in heartbeats, then rebalance the queues."""
        await self.group.instance.refresh_routes(self.group.subscriptions)
        await super().join()
        await self.rebalance.run()
        self.rebalance.start()

    async def leave(self) -> None:
        """Stop rebalancing.

        The caller must then release the assigned queues, and only afterwards unregister the consumer.
        """
        await self.rebalance.stop()

    # -- requests of brokers and the client instance

    def wake_rebalance(self) -> None:
        self.rebalance.wake()

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Apply an administrator's offset reset to the queues assigned to this member."""
        async with self.rebalance.lock:
            for queue in set(table).intersection(self._holder.queues):
                await self._holder.move(queue, table[queue])
            await self.group.offsets.try_persist(table)

    def running_info(self) -> ConsumerRunningInfo:
        memory = self.group.offsets.memory
        queues = self._holder.queues
        return self.info_of({queue: ProcessQueueInfo(commit_offset=memory(queue) or 0) for queue in queues})

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        """Refuse an administrator's request to consume a message, because a pull consumer has no listener."""
        raise CommandError(ResponseCode.SYSTEM_ERROR, f"{message.msg_id}: a pull consumer has no listener")

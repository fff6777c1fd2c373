"""The group membership of a simple consumer: heartbeats, and answers to requests of brokers."""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.client.group.member import Member
from cometmq.errors import CommandError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from cometmq.protocol.codes import ResponseCode


class SimpleSession(Member):
    """The group membership of a simple consumer (ConsumerPeer).

    No queue is assigned to a member, and brokers alone store the group's offsets.
    """

    consume_type = "CONSUME_POP"

    def wake_rebalance(self) -> None:
        """Do nothing: members share all queues."""

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Do nothing: the broker has reset its own offsets."""

    def running_info(self) -> ConsumerRunningInfo:
        return self.info_of({})

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        """Refuse an administrator's request to consume a message, because there is no listener."""
        raise CommandError(ResponseCode.SYSTEM_ERROR, f"{message.msg_id}: a simple consumer has no listener")

"""The requests of brokers to a client, received on its own connections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from cometmq import logs
from cometmq.client.cluster.decoding import decode_one
from cometmq.client.cluster.namespaces import Namespace
from cometmq.client.cluster.replies import Replies, pushed_reply
from cometmq.client.cluster.stacks import stacks
from cometmq.errors import CommandError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ResetOffsetBody,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    CheckTransactionStateRequestHeader,
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    NotifyConsumerIdsChangedRequestHeader,
    ResetOffsetRequestHeader,
)
from cometmq.protocol.properties.values import PGROUP
from cometmq.remoting import Connection, Handler

__all__ = ["ConsumerPeer", "ServerRequests", "TransactionPeer"]

log = logs.logger("cometmq.client")


class ConsumerPeer(Protocol):
    """The interface of a consumer for its client instance and for brokers."""

    def topics(self) -> Collection[str]: ...

    def heartbeat(self) -> ConsumerData: ...

    async def look_at_group(self) -> None: ...

    def wake_rebalance(self) -> None: ...

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None: ...

    def offsets(self, topic: str) -> dict[MessageQueue, int]: ...

    def running_info(self) -> ConsumerRunningInfo: ...

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult: ...


class TransactionPeer(Protocol):
    """The interface of a transaction producer for its client instance and for brokers."""

    def topics(self) -> Collection[str]: ...

    def check(
        self, connection: Connection, asked: CheckTransactionStateRequestHeader, message: MessageExt
    ) -> None: ...


class ServerRequests:
    """The handlers of the brokers' requests.

    Attributes:
        consumers: The client instance's table of consumers by group.
        transactions: The client instance's table of transaction producers by group.
        replies: The requests that wait for a reply.
    """

    def __init__(
        self,
        consumers: Mapping[str, ConsumerPeer],
        transactions: Mapping[str, TransactionPeer],
        replies: Replies,
        namespace: Namespace,
    ) -> None:
        self._namespace = namespace
        self._consumers = consumers
        self._transactions = transactions
        self._replies = replies

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self.ids_changed,
            RequestCode.CHECK_TRANSACTION_STATE: self.check_transaction_state,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self.reset_offset,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self.consumer_status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self.push_reply,
        }

    def _consumer(self, group: str) -> ConsumerPeer:
        consumer = self._consumers.get(self._namespace.unwrap(group))
        if consumer is None:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"The Consumer Group <{group}> not exist in this consumer"
            )
        return consumer

    def ids_changed(self, connection: Connection, frame: Frame) -> None:
        """Handle code 40: a member has joined or left a group."""
        del connection
        group = frame.header(NotifyConsumerIdsChangedRequestHeader).consumer_group
        consumer = self._consumers.get(self._namespace.unwrap(group))
        if consumer is not None:
            consumer.wake_rebalance()

    def check_transaction_state(self, connection: Connection, frame: Frame) -> None:
        """Handle code 39: a transaction check for this producer's group."""
        header = frame.header(CheckTransactionStateRequestHeader)
        message = decode_one(frame.body, header.bname or "")
        self._namespace.unwrap_messages([message])
        group = self._namespace.unwrap(message.properties.get(PGROUP, ""))
        producer = self._transactions.get(group)
        if producer is None:
            log.debug("%s checks a transaction of group %s without a producer here", connection.peer, group)
            return
        producer.check(connection, header, message)

    async def reset_offset(self, connection: Connection, frame: Frame) -> Frame:
        """Handle code 220: an administrator has reset the group's offsets."""
        header = frame.header(ResetOffsetRequestHeader)
        body = ResetOffsetBody.decode(frame.body)
        table = {self._namespace.unwrap_queue(queue): offset for queue, offset in body.offset_table.items()}
        log.info(
            "%s resets group %s on %s: %d queues",
            connection.peer,
            header.group,
            header.topic,
            len(table),
        )
        await self._consumer(header.group).reset_offsets(table)
        return frame.response(ResponseCode.SUCCESS)

    def consumer_status(self, connection: Connection, frame: Frame) -> Frame:
        """Handle code 221: return this member's offsets of a topic."""
        del connection
        header = frame.header(GetConsumerStatusRequestHeader)
        offsets = self._consumer(header.group).offsets(self._namespace.unwrap(header.topic))
        table = {self._namespace.wrap_queue(queue): offset for queue, offset in offsets.items()}
        body = GetConsumerStatusBody(message_queue_table=table).encode()
        return frame.response(ResponseCode.SUCCESS, body=body)

    def running_info(self, connection: Connection, frame: Frame) -> Frame:
        """Handle code 307: return all information about a consumer."""
        del connection
        header = frame.header(GetConsumerRunningInfoRequestHeader)
        info = self._namespace.wrap_running_info(self._consumer(header.consumer_group).running_info())
        if header.jstack_enable:
            info.jstack = stacks()
        return frame.response(ResponseCode.SUCCESS, body=info.encode())

    async def consume_directly(self, connection: Connection, frame: Frame) -> Frame:
        """Handle code 309: call the listener with one message and return its result."""
        del connection
        header = frame.header(ConsumeMessageDirectlyRequestHeader)
        consumer = self._consumer(header.consumer_group)
        message = decode_one(frame.body, header.broker_name or "", refuse_large=True)
        self._namespace.unwrap_messages([message])
        return frame.response(ResponseCode.SUCCESS, body=(await consumer.consume_directly(message)).encode())

    def push_reply(self, connection: Connection, frame: Frame) -> Frame:
        """Handle code 326: the reply to a request of this client."""
        del connection
        self._replies.arrived(pushed_reply(frame))
        return frame.response(ResponseCode.SUCCESS)

"""The requests that brokers send to a client on the connections that the client has opened."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, Protocol

from cometmq import logs
from cometmq.client.cluster.decoding import MAX_BODY, decode_one
from cometmq.client.cluster.namespaces import Namespace
from cometmq.errors import CommandError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ResetOffsetBody,
)
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.compression import decompress
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    CheckTransactionStateRequestHeader,
    ConsumeMessageDirectlyRequestHeader,
    ConsumerGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GroupTopicRequestHeader,
    NotifyUnsubscribeLiteRequestHeader,
    PushReplyMessageRequestHeader,
    ResetOffsetRequestHeader,
)
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import PGROUP, decode_properties
from cometmq.protocol.record.layout import COMPRESSED
from cometmq.remoting import Connection
from cometmq.text import printable

log = logs.logger("cometmq.client")


class Replies:
    """The client's requests that wait for a reply, by correlation id. max_requests limits them."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[MessageExt]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, correlation_id: str) -> asyncio.Future[MessageExt]:
        """Return a future that receives the reply to a request. The caller must call `forget` in the end."""
        reply: asyncio.Future[MessageExt] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = reply
        return reply

    def forget(self, correlation_id: str) -> None:
        """Remove a request that no longer waits for its reply."""
        self._waiting.pop(correlation_id, None)

    def arrived(self, message: MessageExt) -> None:
        """Deliver a reply to its request. Late and repeated replies are dropped."""
        correlation_id = message.properties.get(names.CORRELATION_ID, "")
        reply = self._waiting.get(correlation_id)
        if reply is None or reply.done():
            log.info("reply %s arrived late or belongs to no request", printable(correlation_id, 100))
        else:
            reply.set_result(message)


def pushed_reply(frame: Frame) -> MessageExt:
    """Return the reply that a broker delivers in a request (code 326). Raises HeaderError or BodyError."""
    header = frame.header(PushReplyMessageRequestHeader)
    properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
    properties[names.ARRIVE_TIME] = str(int(time.time() * 1000))
    return MessageExt(
        header.topic,
        decompress(header.sys_flag, bytes(frame.body), MAX_BODY),
        header.flag,
        properties,
        queue_id=header.queue_id,
        sys_flag=header.sys_flag & ~COMPRESSED,
        born_timestamp_ms=header.born_timestamp,
        born_host=header.born_host.rpartition("/")[2],  # Java writes addresses as `/ip:port`
        store_timestamp_ms=header.store_timestamp,
        store_host=header.store_host.rpartition("/")[2],
        reconsume_times=header.reconsume_times or 0,
    )


class ConsumerPeer(Protocol):
    """The methods of a consumer that its client instance calls, some for a request of a broker."""

    def topics(self) -> Collection[str]: ...

    def heartbeat(self) -> ConsumerData: ...

    async def compare_subscriptions(self) -> None: ...

    def wake_rebalance(self) -> None: ...

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None: ...

    def offsets(self, topic: str) -> dict[MessageQueue, int]: ...

    def running_info(self) -> ConsumerRunningInfo: ...

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult: ...

    def lite_unsubscribed(self, lite_topic: str) -> None: ...


class TransactionPeer(Protocol):
    """The methods of a transaction producer that its client instance calls."""

    def topics(self) -> Collection[str]: ...

    def check(
        self, connection: Connection, asked: CheckTransactionStateRequestHeader, message: MessageExt
    ) -> None: ...


class ServerRequests:
    """The handlers of the brokers' requests, with the client instance's tables of consumers and producers."""

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

    def _consumer(self, group: str) -> ConsumerPeer:
        consumer = self._consumers.get(self._namespace.unwrap(group))
        if consumer is None:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"The Consumer Group <{group}> not exist in this consumer"
            )
        return consumer

    @handles(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    def ids_changed(self, _connection: Connection, frame: Frame) -> None:
        """Handle code 40: a member has joined or left a group."""
        group = frame.header(ConsumerGroupRequestHeader).consumer_group
        consumer = self._consumers.get(self._namespace.unwrap(group))
        if consumer is not None:
            consumer.wake_rebalance()

    @handles(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)
    def notify_unsubscribe_lite(self, _connection: Connection, frame: Frame) -> None:
        """Handle code 200073: another member of an exclusive group has subscribed to a lite topic."""
        header = frame.header(NotifyUnsubscribeLiteRequestHeader)
        self._consumer(header.consumer_group).lite_unsubscribed(header.lite_topic)

    @handles(RequestCode.CHECK_TRANSACTION_STATE)
    def check_transaction_state(self, connection: Connection, frame: Frame) -> None:
        """Handle code 39: a transaction check for a producer group of this client."""
        header = frame.header(CheckTransactionStateRequestHeader)
        message = decode_one(frame.body, header.bname or "")
        self._namespace.unwrap_messages([message])
        group = self._namespace.unwrap(message.properties.get(PGROUP, ""))
        producer = self._transactions.get(group)
        if producer is None:
            log.debug("%s checks a transaction of group %s without a producer here", connection.peer, group)
            return
        producer.check(connection, header, message)

    @handles(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    async def reset_offset(self, connection: Connection, frame: Frame) -> Frame:
        """Handle code 220: an administrator has reset the group's offsets."""
        header = frame.header(ResetOffsetRequestHeader)
        body = ResetOffsetBody.decode(frame.body)
        table = {self._namespace.unwrap_queue(queue): offset for queue, offset in body.offset_table.items()}
        log.info(
            "%s resets group %s on %s: %d queues", connection.peer, header.group, header.topic, len(table)
        )
        await self._consumer(header.group).reset_offsets(table)
        return frame.response(ResponseCode.SUCCESS)

    @handles(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
    def consumer_status(self, _connection: Connection, frame: Frame) -> Frame:
        """Handle code 221: return this member's offsets of a topic."""
        header = frame.header(GroupTopicRequestHeader)
        offsets = self._consumer(header.group).offsets(self._namespace.unwrap(header.topic))
        table = {self._namespace.wrap_queue(queue): offset for queue, offset in offsets.items()}
        body = GetConsumerStatusBody(message_queue_table=table).encode()
        return frame.response(ResponseCode.SUCCESS, body=body)

    @handles(RequestCode.GET_CONSUMER_RUNNING_INFO)
    def running_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Handle code 307: return all information about a consumer."""
        header = frame.header(GetConsumerRunningInfoRequestHeader)
        info = self._namespace.wrap_running_info(self._consumer(header.consumer_group).running_info())
        if header.jstack_enable:
            info.jstack = stacks()
        return frame.response(ResponseCode.SUCCESS, body=info.encode())

    @handles(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    async def consume_directly(self, _connection: Connection, frame: Frame) -> Frame:
        """Handle code 309: call the listener with one message and return its result."""
        header = frame.header(ConsumeMessageDirectlyRequestHeader)
        consumer = self._consumer(header.consumer_group)
        message = decode_one(frame.body, header.broker_name or "", refuse_large=True)
        self._namespace.unwrap_messages([message])
        return frame.response(ResponseCode.SUCCESS, body=(await consumer.consume_directly(message)).encode())

    @handles(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    def push_reply(self, _connection: Connection, frame: Frame) -> Frame:
        """Handle code 326: the reply to a request of this client."""
        self._replies.arrived(pushed_reply(frame))
        return frame.response(ResponseCode.SUCCESS)


_TASKS, _DEPTH = 500, 50
"""Maximum number of tasks in a dump of stacks and of calls per stack: a few MB in all."""


def stacks() -> str:
    """Return the stacks of all tasks and threads, innermost call first, without values of variables."""
    return "\n".join(itertools.chain(_threads(), _tasks()))


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001 - documented, and there is no other way
    for ident, frame in frames.items():
        yield f'"{names.get(ident, ident)}"'
        yield from _lines(_called(frame))
        yield ""


def _tasks() -> Iterator[str]:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    for task in tasks[:_TASKS]:
        yield f'task "{task.get_name()}"'
        yield from _lines(reversed(list(_awaited(task.get_coro()))))
        yield ""
    if len(tasks) > _TASKS:
        yield f"and {len(tasks) - _TASKS} more tasks"


def _called(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _awaited(waiting: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and line of each nested call of a suspended coroutine, outermost call first."""
    while waiting is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(waiting, f"{kind}_frame")), None)
        frame = None if kind is None else getattr(waiting, f"{kind}_frame")
        if frame is None:
            return  # `waiting` is a future or a coroutine that has ended: it has no nested call
        yield frame.f_code, frame.f_lineno
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _lines(calls: Iterator[tuple[CodeType, int]]) -> Iterator[str]:
    for code, line in itertools.islice(calls, _DEPTH):
        yield f"    at {code.co_qualname} ({code.co_filename}:{line})"

"""The requests of a consumer about leases: lease messages, wait for messages, acknowledge, change a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cometmq.client.cluster.decoding import MAX_BODY, decode_pulled
from cometmq.client.cluster.requests import succeeded
from cometmq.client.cluster.workers import all_of
from cometmq.client.group.group import Group
from cometmq.client.group.subscription import Subscription
from cometmq.errors import MessageIllegal
from cometmq.message import MessageExt, MessageQueue, add_properties
from cometmq.protocol.bodies import BatchAckMessageRequestBody
from cometmq.protocol.bodies.pop import pack_acks
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationRequestHeader,
    NotificationResponseHeader,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
)
from cometmq.protocol.pop import PopFormatError, ReceiptHandle, Receipts, property_of
from cometmq.protocol.properties.values import FIRST_POP_TIME, POP_CK, UNIQ_KEY

ALL_QUEUES = -1
"""The queue id that stands for all queues of a broker."""
EMPTY = (ResponseCode.POLLING_FULL, ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND)
"""The codes of responses without messages."""
_ANSWER_S = 10.0
"""How long, in seconds, a response may take beyond the time for which the broker holds the request."""
_MAX_ACKS = 1000
"""The maximum number of messages that one request acknowledges."""


class Target(NamedTuple):
    """A broker of a subscribed topic."""

    subscription: Subscription
    broker_name: str

    @property
    def queue(self) -> MessageQueue:
        """All queues of the topic at this broker."""
        return MessageQueue(self.subscription.topic, self.broker_name, ALL_QUEUES)


class Leases:
    """The requests of one consumer. Each method raises BrokerError, RemotingError or NoRouteError.

    `init_mode` tells where a new group starts: 0 at the first message, 1 at the end. Bodies that are larger
    than `max_body` after decompression stay compressed.
    """

    def __init__(self, group: Group, *, orderly: bool, init_mode: int, max_body: int = MAX_BODY) -> None:
        self._group = group
        self._instance = group.instance
        self._orderly = orderly
        self._init_mode = init_mode
        self._max_body = max_body

    # -- receiving

    async def lease(
        self, target: Target, count: int, invisible_s: float, wait_s: float, attempt_id: str
    ) -> list[MessageExt]:
        """Lease up to `count` (at most 32) messages, and return them with their receipt handles.

        Messages whose tags only have the same hash as a subscribed tag are acknowledged and omitted. The
        broker waits up to `wait_s` seconds for a message. If a response is lost, a request with the same
        attempt id returns the same messages, for ordered consumption.
        """
        subscription = target.subscription
        header = PopMessageRequestHeader(
            consumer_group=self._group.name,
            topic=subscription.topic,
            queue_id=ALL_QUEUES,
            max_msg_nums=count,
            invisible_time=int(invisible_s * 1000),
            poll_time=int(wait_s * 1000),
            init_mode=self._init_mode,
            exp_type=subscription.expression_type,
            exp=subscription.expression,
            order=self._orderly,
            attempt_id=attempt_id if self._orderly else None,
            bname=target.broker_name,
        )
        addr, answer = await self._ask(target.queue, Frame.request(RequestCode.POP_MESSAGE, header), wait_s)
        if answer.code in EMPTY:
            return []
        succeeded(answer, addr, subscription.topic)
        found = decode_pulled(answer.body, target.broker_name, self._max_body).messages
        attach_receipts(
            found, answer.header(PopMessageResponseHeader), subscription.topic, target.broker_name
        )
        wanted = subscription.filter(found)
        if len(wanted) < len(found):
            await self.acknowledge([each for each in found if each.tags not in subscription.tags])
        return wanted

    async def wait(self, target: Target, wait_s: float) -> bool:
        """Wait until a broker has a message for the group. Return False if there is none in time."""
        subscription = target.subscription
        header = NotificationRequestHeader(
            consumer_group=self._group.name,
            topic=subscription.topic,
            queue_id=ALL_QUEUES,
            poll_time=int(wait_s * 1000),
            order=self._orderly,
            exp_type=subscription.expression_type,
            exp=subscription.expression,
            bname=target.broker_name,
        )
        addr, answer = await self._ask(target.queue, Frame.request(RequestCode.NOTIFICATION, header), wait_s)
        return succeeded(answer, addr, subscription.topic).header(NotificationResponseHeader).has_msg

    # -- leased messages

    async def acknowledge(self, messages: Sequence[MessageExt]) -> None:
        """Acknowledge messages, those of a broker in one request. Then raise the first failure."""
        by_broker: dict[tuple[str, str], list[tuple[MessageExt, ReceiptHandle]]] = {}
        unknown: MessageIllegal | None = None
        for message in messages:
            try:
                handle = receipt_of(message)
            except MessageIllegal as error:  # of one message whose listener has changed its properties
                unknown = error
                continue
            by_broker.setdefault((handle.broker_name, message.topic), []).append((message, handle))
        parts = [
            some[at : at + _MAX_ACKS] for some in by_broker.values() for at in range(0, len(some), _MAX_ACKS)
        ]
        await all_of(*map(self._acknowledge, parts))
        if unknown is not None:
            raise unknown

    async def _acknowledge(self, leased: list[tuple[MessageExt, ReceiptHandle]]) -> None:
        """Acknowledge messages of one topic and broker."""
        message, first = leased[0]
        if len(leased) == 1:
            await self._acknowledge_one(message)
            return
        wrap, broker_name, topic = self._instance.namespace.wrap, first.broker_name, message.topic
        acks = pack_acks(wrap(self._group.name), wrap(topic), [handle for _, handle in leased])
        body = BatchAckMessageRequestBody(broker_name=broker_name, acks=acks).encode()
        queue = MessageQueue(topic, broker_name, ALL_QUEUES)
        addr, answer = await self._ask(queue, Frame.request(RequestCode.BATCH_ACK_MESSAGE, body=body))
        if answer.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            succeeded(answer, addr, topic)
            return
        for message, _ in leased:  # the broker is older than 5.1
            await self._acknowledge_one(message)

    async def _acknowledge_one(self, message: MessageExt) -> None:
        handle = receipt_of(message)
        header = AckMessageRequestHeader(
            consumer_group=self._group.name,
            topic=self._real_topic(message, handle),
            queue_id=handle.queue_id,
            extra_info=handle.encode(),
            offset=_offset(handle),
            bname=handle.broker_name,
            lite_topic=self._lite_topic(message),
        )
        await self._confirm(message, handle, Frame.request(RequestCode.ACK_MESSAGE, header))

    async def change(self, message: MessageExt, invisible_s: float, *, suspend: bool | None = None) -> None:
        """Let the lease of a message end `invisible_s` seconds from now. The message gets the new handle.

        `suspend` gives the message back without counting a redelivery. Brokers before 5.5 ignore it.
        """
        handle = receipt_of(message)
        topic = self._real_topic(message, handle)
        header = ChangeInvisibleTimeRequestHeader(
            consumer_group=self._group.name,
            topic=topic,
            queue_id=handle.queue_id,
            extra_info=handle.encode(),
            offset=_offset(handle),
            invisible_time=int(invisible_s * 1000),
            suspend=suspend,
            bname=handle.broker_name,
            lite_topic=self._lite_topic(message),
        )
        request = Frame.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        answer = await self._confirm(message, handle, request)
        changed = answer.header(ChangeInvisibleTimeResponseHeader)
        message.properties[POP_CK] = handle._replace(
            start_offset=_offset(handle),
            pop_time_ms=changed.pop_time,
            invisible_ms=changed.invisible_time,
            revive_queue_id=changed.revive_qid,
        ).encode()

    async def dead_letter(self, message: MessageExt) -> None:
        """Copy a message to the group's dead-letter queue at its broker, then acknowledge it."""
        queue = MessageQueue(message.topic, receipt_of(message).broker_name, ALL_QUEUES)
        addr = await self._instance.find_master(queue)
        await self._instance.brokers.send_message_back(
            addr, message, self._group.name, delay_level=-1, max_reconsume_times=0
        )
        await self._acknowledge_one(message)

    async def give_back(self, messages: Iterable[MessageExt]) -> None:
        """Make leased messages visible again now. Failures are ignored: the leases expire."""
        changes = (self.change(message, 0.0, suspend=True) for message in messages)
        await asyncio.gather(*changes, return_exceptions=True)

    def _lite_topic(self, _message: MessageExt) -> str | None:
        """Return the lite topic from which a message was received, or None if it was not from one."""
        return None

    def _real_topic(self, message: MessageExt, handle: ReceiptHandle) -> str:
        """Return the topic in which a message was found, with the namespace: itself or a retry topic."""
        wrap = self._instance.namespace.wrap
        return handle.kind.topic(wrap(message.topic), wrap(self._group.name))

    async def _confirm(self, message: MessageExt, handle: ReceiptHandle, request: Frame) -> Frame:
        """Send a request about a leased message and return its successful answer."""
        queue = MessageQueue(message.topic, handle.broker_name, handle.queue_id)
        addr, answer = await self._ask(queue, request)
        return succeeded(answer, addr, message.topic, message.properties.get(UNIQ_KEY, ""))

    async def _ask(self, queue: MessageQueue, request: Frame, wait_s: float = 0.0) -> tuple[str, Frame]:
        """Return the address of the queue's broker and its answer, for which it may wait `wait_s` seconds."""
        addr = await self._instance.find_addr(queue)
        brokers = self._instance.brokers
        return addr, await brokers.ask(addr, request, wait_s + max(brokers.timeout_s, _ANSWER_S))


def attach_receipts(
    messages: Iterable[MessageExt], header: PopMessageResponseHeader, topic: str, broker_name: str
) -> None:
    """Add the receipt handle to each message of a response, and replace a retry topic by the `topic`.

    Raises PopFormatError if a field of the header is invalid.
    """
    receipts, popped = Receipts(header, topic, broker_name), str(header.pop_time)
    for message in messages:
        handle, deliveries = receipts.of(message)
        text = handle.encode()
        handle.remember(text)
        added = {POP_CK: text}
        if property_of(message, FIRST_POP_TIME) is None:
            added[FIRST_POP_TIME] = popped
        add_properties([message], added)
        message.topic = topic
        message.reconsume_times = deliveries


def receipt_of(message: MessageExt) -> ReceiptHandle:
    """Return the receipt handle of a received message. Raises MessageIllegal for one not from receive()."""
    text = property_of(message, POP_CK)
    try:
        if text is not None and (handle := ReceiptHandle.decode(text)).offset is not None:
            return handle
    except PopFormatError:
        pass
    problem = f"message {message.msg_id} has no receipt handle: receive() of a simple consumer returns one"
    raise MessageIllegal(problem, message.topic, POP_CK)


def _offset(handle: ReceiptHandle) -> int:
    assert handle.offset is not None  # receipt_of() has checked it
    return handle.offset

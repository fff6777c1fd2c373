"""From a stored record to the message that a 5.x consumer receives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from cometmq import logs
from cometmq.errors import RecordError
from cometmq.grpc.rpc.enums import DigestType, Encoding, MessageType
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.service.sent import OWN_PROPERTIES, TRACE_CONTEXT
from cometmq.message import MessageExt
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PopMessageResponseHeader
from cometmq.protocol.pop import ReceiptHandle, Receipts, TopicKind
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import is_reserved
from cometmq.protocol.record.one import Buffer, decode_record, iter_records, record_starts

log = logs.logger(__name__)

MAX_TIME_MS = 253_402_300_799_999
"""The end of the year 9999, the last time that a protobuf timestamp can hold. Producers may send any time."""
MAX_INT32 = 2**31 - 1
# Numbers, because protobuf accepts members of enums more slowly.
_MD5, _IDENTITY, _GZIP = int(DigestType.MD5), int(Encoding.IDENTITY), int(Encoding.GZIP)
_COMPRESSED = int(SysFlag.COMPRESSED)


class Popped(NamedTuple):
    """A message of a pop's response: its lease, the number of earlier deliveries, its lite topic or ""."""

    message: MessageExt
    handle: ReceiptHandle
    deliveries: int
    lite_topic: str = ""


def popped_messages(response: Frame, topic: str, broker_name: str) -> Iterator[Popped]:
    """Yield the messages of a pop's response, except damaged ones. `topic` is the topic of the request.

    Raises PopFormatError if the header of the response is invalid.
    """
    header = response.header(PopMessageResponseHeader)
    if header.start_offset_info is None:
        yield from _popped_from_lite_topics(response, header, broker_name)
        return
    receipts = Receipts(header, topic, broker_name)
    for message in filter(None, _records(response.body)):
        handle, deliveries = receipts.of(message)
        yield Popped(message, ReceiptHandle(*handle[:8], message.physical_offset), deliveries)


def _records(body: Buffer) -> list[MessageExt | None]:
    """Decode the records of a response, with None for each damaged one.

    The records behind one whose length is damaged cannot be found. The leases of all messages that are left
    out expire, and the broker then reads each of them by itself.
    """
    try:
        return list(iter_records(body))
    except RecordError:
        starts, end = record_starts(body)
    if end < len(body):
        log.error("the last %d bytes of a receive are damaged and not delivered", len(body) - end)
    found: list[MessageExt | None] = []
    for start in starts:
        try:
            found.append(decode_record(body, start))
        except RecordError as error:
            log.error("a damaged message is not delivered: %s", error)
            found.append(None)
    return found


def _popped_from_lite_topics(
    response: Frame, header: PopMessageResponseHeader, broker_name: str
) -> Iterator[Popped]:
    """Yield the messages of lite topics. Their handles contain the offsets in the queues of these topics."""
    counts = (header.order_count_info or "").split(";")
    for message, count in zip(_records(response.body), counts, strict=False):
        if message is None:
            continue
        try:
            lite_topic = message.properties[names.LITE_TOPIC]
            offset = int(message.properties[names.INNER_MULTI_QUEUE_OFFSET])
        except (KeyError, ValueError):
            log.error("the properties of message %s are damaged, it is not delivered", message.msg_id)
            continue
        handle = ReceiptHandle(
            offset, header.pop_time, header.invisible_time, header.revive_qid, TopicKind.NORMAL, broker_name,
            0, offset, message.physical_offset,
        )  # fmt: skip
        yield Popped(message, handle, int(count or 0), lite_topic)


def fill_message(message: Any, popped: Popped, topic: str, invisible_ms: int) -> None:
    """Fill an empty `Message` of a response (a separate one would be copied) for a subscriber of `topic`."""
    stored = popped.message
    properties, body = stored.properties, stored.body
    message.topic.name = topic
    message.body = body
    system = message.system_properties
    for name, value in properties.items():
        if not is_reserved(name) and name not in OWN_PROPERTIES:
            message.user_properties[name] = value
    if stored.tags:
        system.tag = stored.tags
    if stored.keys:
        system.keys.extend(stored.keys)
    system.message_id = stored.msg_id
    digest = system.body_digest
    digest.type = _MD5
    digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.body_encoding = _GZIP if stored.sys_flag & _COMPRESSED else _IDENTITY
    system.message_type = _type_of(properties)
    _set_ms(system.born_timestamp, max(0, min(stored.born_timestamp_ms, MAX_TIME_MS)))
    system.born_host = stored.born_host
    _set_ms(system.store_timestamp, max(0, min(stored.store_timestamp_ms, MAX_TIME_MS)))
    system.store_host = stored.store_host
    system.receipt_handle = popped.handle.encode()
    system.queue_id = stored.queue_id
    system.queue_offset = stored.queue_offset
    _set_ms(system.invisible_duration, invisible_ms)
    system.delivery_attempt = max(1, min(popped.deliveries + 1, MAX_INT32))
    _set_optional(system, properties)


def _set_ms(time: Any, value_ms: int) -> None:
    """Set a `Timestamp` or a `Duration`, which is not negative. This costs half of its own method."""
    seconds, rest = divmod(value_ms, 1000)
    time.seconds = seconds
    time.nanos = rest * 1_000_000


def unleased_message(stored: MessageExt) -> Any:
    """Return the `Message` for a client that receives it in a command, without a lease."""
    handle = ReceiptHandle(0, 0, 0, 0, TopicKind.NORMAL, "-", stored.queue_id, stored.queue_offset)
    message = messages().Message()
    fill_message(message, Popped(stored, handle, 0), stored.topic, 0)
    message.system_properties.ClearField("receipt_handle")
    return message


def _set_optional(system: Any, properties: dict[str, str]) -> None:
    """Set the fields of `SystemProperties` that come from optional properties."""
    if group := properties.get(names.SHARDING_KEY):
        system.message_group = group
    if context := properties.get(TRACE_CONTEXT):
        system.trace_context = context
    if lite_topic := properties.get(names.LITE_TOPIC):
        system.lite_topic = lite_topic
    priority = properties.get(names.PRIORITY, "")
    if priority.isascii() and priority.isdigit() and len(priority) < 10:
        system.priority = int(priority)
    if (origin := properties.get(names.DLQ_ORIGIN_TOPIC)) is not None:
        system.dead_letter_queue.topic = origin
        system.dead_letter_queue.message_id = properties.get(names.DLQ_ORIGIN_MESSAGE_ID, "")
    for name in (names.TIMER_DELIVER_MS, names.TIMER_OUT_MS):
        moment = properties.get(name, "")
        if moment.isascii() and moment.isdigit() and len(moment) < 15:
            system.delivery_timestamp.FromMilliseconds(int(moment))
            break


def _type_of(properties: dict[str, str]) -> MessageType:
    if properties.get(names.TRAN_MSG) == "true":
        return MessageType.TRANSACTION
    if any(properties.get(name) for name in (names.DELAY, names.TIMER_DELIVER_MS, names.TIMER_OUT_MS)):
        return MessageType.DELAY
    if properties.get(names.SHARDING_KEY):
        return MessageType.FIFO
    if properties.get(names.PRIORITY):
        return MessageType.PRIORITY
    return MessageType.LITE if properties.get(names.LITE_TOPIC) else MessageType.NORMAL

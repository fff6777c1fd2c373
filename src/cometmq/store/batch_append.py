"""From the body of a batch send to the records of its messages in the tick buffer, all of them or none."""

from __future__ import annotations

import struct

from cometmq.errors import BodyError
from cometmq.protocol.batch import ITEM_HEAD, MIN_ITEM, iter_batch
from cometmq.protocol.checksum import crc32
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record import BLANK_SIZE, head_of
from cometmq.store.appender import (
    PROPERTIES_MAX,
    Appended,
    Appender,
    Pending,
    illegal_number,
    no_segment,
)
from cometmq.store.clock import Clock
from cometmq.store.commit_log import CommitLog
from cometmq.store.keys import code_and_key
from cometmq.store.queue_table import QueueTable
from cometmq.store.refusal import StoreRefused

_length = struct.Struct(">H").pack
_length_at = struct.Struct(">h").unpack_from
_item_at = ITEM_HEAD.unpack_from

Item = tuple[int, bytes, bytes]
"""A message of a batch: flag, body, properties."""


class BatchAppender:
    """The appender's sibling for batches: same buffer, same tick. Loop thread only."""

    __slots__ = ("_appender", "_log", "_queues", "_time_ms")

    def __init__(self, appender: Appender, commit_log: CommitLog, queues: QueueTable, clock: Clock) -> None:
        self._appender = appender
        self._log = commit_log
        self._queues = queues
        self._time_ms = clock.time_ms

    def append(
        self, topic: str, queue_id: int, body: bytes | bytearray | memoryview, properties: bytes,
        sys_flag: int, born_ms: int, born_host: bytes, reconsume_times: int, store_host: bytes | None,
    ) -> list[Appended]:  # fmt: skip
        """See MessageStore.append_batch."""
        appender = self._appender
        appender.refuse_if_closed()
        if len(body) > appender.largest_body:
            appender.refuse_size(len(body), 0, 0)
        items = batch_items(body, properties)
        queue = self._queues.get(topic, queue_id)
        topic_bytes, magic = queue.record_tail or appender.tail_of(queue)
        host = appender.store_host if store_host is None else store_host
        head, sys_flag = head_of(born_host, host, sys_flag)
        fixed = head.size + len(topic_bytes) + 2
        total = 0
        for _, item_body, item_properties in items:
            size = fixed + len(item_body) + len(item_properties)
            if len(item_properties) > PROPERTIES_MAX or size > appender.largest_record:
                appender.refuse_size(len(item_body), len(item_properties), size)
            total += size
        if total + BLANK_SIZE > self._log.segment_size:
            appender.refuse_size(len(body), 0, total)
        log = self._log
        try:
            place = log.claim(total)
        except OSError as failure:
            raise no_segment(failure) from failure
        now = self._time_ms()
        position = log.next
        offset = queue.next_offset
        pack = head.pack
        parts: list[bytes] = []
        appended: list[Appended] = []
        pending: list[Pending] = []
        try:
            for flag, item_body, item_properties in items:
                length = len(item_body)
                properties_length = len(item_properties)
                size = fixed + length + properties_length
                parts += (
                    pack(
                        size, magic, crc32(item_body) & 0x7FFFFFFF, queue_id, flag, offset, position,
                        sys_flag, born_ms, born_host, now, host, reconsume_times, 0, length,
                    ),
                    item_body,
                    topic_bytes,
                    _length(properties_length),
                    item_properties,
                )  # fmt: skip
                tags, key = code_and_key(item_properties)
                pending.append((queue, topic, offset, position, size, tags, now, item_properties, key, True))
                appended.append(Appended(position, offset, size, now))
                position += size
                offset += 1
        except struct.error as problem:
            raise illegal_number(problem) from None
        log.buffer[place : place + total] = b"".join(parts)
        log.used += total
        log.next = position
        appender.add(pending)
        queue.next_offset = offset
        return appended


def batch_items(body: bytes | bytearray | memoryview, extra: bytes) -> list[Item]:
    """The items of a batch send, the request's properties added to each.

    Raises StoreRefused(MESSAGE_ILLEGAL) unless the items fill the body exactly.
    """
    data = bytes(body)  # whose slices are bytes, and cost half of a view's
    items: list[Item] = []
    after_a_pair = b"\x02" + extra
    pos = 0
    total = len(data)
    while pos < total:
        if total - pos < MIN_ITEM:
            raise _bad_batch(data)
        size, _, _, flag, length = _item_at(data, pos)
        end = pos + size
        properties_at = pos + MIN_ITEM + length
        if length < 0 or properties_at > end or end > total:
            raise _bad_batch(data)
        properties = data[properties_at:end]
        if len(properties) != _length_at(data, properties_at - 2)[0]:
            raise _bad_batch(data)
        if extra:
            properties += extra if not properties or properties[-1] == 2 else after_a_pair
        items.append((flag, data[properties_at - 2 - length : properties_at - 2], properties))
        pos = end
    if not items:
        raise StoreRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
    return items


def _bad_batch(data: bytes) -> StoreRefused:
    """What the careful reader says is wrong with it."""
    try:
        for _ in iter_batch(data):
            pass
    except BodyError as problem:
        return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, str(problem))
    return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch cannot be read")

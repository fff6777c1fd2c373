"""From the body of a batch send to the records of its messages in the tick buffer, all of them or none.

The messages of a batch go through here in columns (all bodies, all sizes, all positions), each made by one
call of something that loops in C.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat

from cometmq.errors import BodyError
from cometmq.protocol.batch import ITEM_HEAD, MIN_ITEM, iter_batch
from cometmq.protocol.checksum import crc32
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record import BLANK_SIZE, HEADS, SYS_FLAG_AT, head_of
from cometmq.store.appender import PROPERTIES_MAX, Appender, BatchRecords, illegal_number, no_segment
from cometmq.store.clock import Clock
from cometmq.store.commit_log import CommitLog
from cometmq.store.keys import codes_and_keys
from cometmq.store.queue_table import QueueTable
from cometmq.store.refusal import StoreRefused

_length = struct.Struct(">H").pack
_length_at = struct.Struct(">h").unpack_from
_item_at = ITEM_HEAD.unpack_from
# The head of a record by its length, everything between physical offset and body length as one field: it is
# the same for all messages of a batch.
_SHORT_HEADS = {
    head.size: struct.Struct(f">iiiiiqq{head.size - SYS_FLAG_AT - 4}si") for head in HEADS.values()
}

Columns = tuple[Sequence[int], Sequence[bytes], Sequence[bytes]]
"""The messages of a batch: flags, bodies, properties."""


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
    ) -> BatchRecords:  # fmt: skip
        """See MessageStore.append_batch."""
        appender = self._appender
        appender.refuse_if_shut()
        if len(body) > appender.largest_body:
            appender.refuse_size(len(body), 0, 0)
        flags, bodies, texts = batch_columns(body, properties)
        queue = self._queues.get(topic, queue_id)
        topic_bytes = queue.record_topic or appender.record_topic(queue)
        host = appender.store_host if store_host is None else store_host
        head, sys_flag = head_of(born_host, host, sys_flag)
        body_lengths = list(map(len, bodies))
        text_lengths = list(map(len, texts))
        fixed = head.size + len(topic_bytes) + 2
        sizes = [fixed + length + more for length, more in zip(body_lengths, text_lengths, strict=True)]
        total = sum(sizes)
        if max(sizes) > appender.largest_record or max(text_lengths) > PROPERTIES_MAX:
            self._refuse_member(body_lengths, text_lengths, sizes)
        log = self._log
        if total + BLANK_SIZE > log.segment_size:
            appender.refuse_size(len(body), 0, total)
        try:
            place = log.claim(total)
        except OSError as failure:
            raise no_segment(failure) from failure
        now = self._time_ms()
        offset = queue.next_offset
        count = len(sizes)
        positions = list(accumulate(sizes, initial=log.next))
        after = positions.pop()
        checksums = [crc32(each) & 0x7FFFFFFF for each in bodies]
        try:
            common = head.pack(
                0, 0, 0, 0, 0, 0, 0, sys_flag, born_ms, born_host, now, host, reconsume_times, 0, 0
            )[SYS_FLAG_AT:-4]
            heads = map(
                _SHORT_HEADS[head.size].pack, sizes, repeat(queue.magic), checksums, repeat(queue_id), flags,
                range(offset, offset + count), positions, repeat(common), body_lengths,
            )  # fmt: skip
            tails = {length: topic_bytes + _length(length) for length in set(text_lengths)}
            records = zip(heads, bodies, map(tails.__getitem__, text_lengths), texts, strict=True)
            log.view[place : place + total] = b"".join(chain.from_iterable(records))
        except struct.error as problem:
            raise illegal_number(problem) from None
        log.used += total
        log.next = after
        queue.next_offset = offset + count
        codes, keys = codes_and_keys(texts)
        appended = BatchRecords(queue, queue.key_prefix, offset, positions, sizes, codes, now, texts, keys)
        appender.add(appended)
        return appended

    def _refuse_member(self, bodies: list[int], properties: list[int], records: list[int]) -> None:
        """Name the first message that is too large."""
        for body, text, record in zip(bodies, properties, records, strict=True):
            if text > PROPERTIES_MAX or record > self._appender.largest_record:
                self._appender.refuse_size(body, text, record)


def batch_columns(body: bytes | bytearray | memoryview, extra: bytes) -> Columns:
    """The messages of a batch send, the request's properties added to those of each.

    Raises StoreRefused(MESSAGE_ILLEGAL) unless they fill the body exactly.
    """
    data = bytes(body)  # whose slices are bytes, and cost half of a view's
    if not data:
        raise StoreRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
    flags, bodies, texts = _equal_items(data) or _items(data)
    if extra:
        after_a_pair = b"\x02" + extra
        texts = [text + (after_a_pair if text and text[-1] != 2 else extra) for text in texts]
    return flags, bodies, texts


def _equal_items(data: bytes) -> Columns | None:
    """The messages of a batch if all are of one form, lengths of body and properties included, as those of
    machines often are: one call cuts them all, 0.1 µs each where `_items` needs 0.3 µs. Else None."""
    if len(data) < MIN_ITEM:
        return None
    size, _, _, _, length = _item_at(data, 0)
    text_length = size - MIN_ITEM - length
    if length < 0 or text_length < 0 or len(data) % size or data[-size : 4 - size] != data[:4]:
        return None
    items = _item_of(length, text_length).iter_unpack(data)
    sizes, flags, lengths, bodies, text_lengths, texts = zip(*items, strict=True)
    count = len(sizes)
    if sizes.count(size) == lengths.count(length) == text_lengths.count(text_length) == count:
        return flags, bodies, texts
    return None


@lru_cache(256)
def _item_of(length: int, text_length: int) -> struct.Struct:
    """A whole item of a batch: size, flag, body length, body, properties length, properties."""
    return struct.Struct(f">i8xii{length}sh{text_length}s")


def _items(data: bytes) -> Columns:
    """The messages of a batch, whatever their forms."""
    flags: list[int] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
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
        text = data[properties_at:end]
        if len(text) != _length_at(data, properties_at - 2)[0]:
            raise _bad_batch(data)
        flags.append(flag)
        bodies.append(data[properties_at - 2 - length : properties_at - 2])
        texts.append(text)
        pos = end
    return flags, bodies, texts


def _bad_batch(data: bytes) -> StoreRefused:
    """What the careful reader says is wrong with it."""
    try:
        for _ in iter_batch(data):
            pass
    except BodyError as problem:
        return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, str(problem))
    return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch cannot be read")

"""From the body of a batch send to the records of its messages in the tick buffer, all of them or none."""

from __future__ import annotations

import struct
from itertools import accumulate

from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.layout import BLANK_SIZE
from cometmq.protocol.record.one import head_of
from cometmq.store.base.clock import Clock
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.writing.appender import PROPERTIES_MAX, Appender, BatchRecords, illegal_number, no_segment
from cometmq.store.writing.batch_items import Common, Items, batch_items


class BatchAppender:
    """The appender's sibling for batches: same buffer, same tick. Loop thread only."""

    __slots__ = ("_appender", "_log", "_queues", "_time_ms")

    def __init__(self, appender: Appender, commit_log: CommitLog, queues: QueueTable, clock: Clock) -> None:
        self._appender = appender
        self._log = commit_log
        self._queues = queues
        self._time_ms = clock.time_ms

    def append(
        self,
        topic: str,
        queue_id: int,
        body: bytes | bytearray | memoryview,
        properties: bytes,
        *,
        sys_flag: int = 0,
        born_timestamp_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        store_host: bytes | None = None,
    ) -> BatchRecords:
        """Take a batch body (items of the batch send) into this tick, all of it into one segment or nothing.

        `properties` of the request are added to those of every item, as 4.9 does. Raises StoreRefused.
        """
        appender = self._appender
        appender.encode_pending()
        appender.refuse_if_shut()
        if len(body) > appender.largest_body:
            appender.refuse_size(len(body), 0, 0)
        items = batch_items(body, properties)
        if items.stray_separator:
            raise StoreRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                "a name or value in the properties of a message holds a separator (0x01 or 0x02)",
            )
        queue = self._queues.get(topic, queue_id)
        topic_bytes = queue.record_topic or appender.record_topic(queue)
        host = appender.store_host if store_host is None else store_host
        head, sys_flag = head_of(born_host, host, sys_flag)
        sizes = items.sizes(head.size + len(topic_bytes) + 2)
        total = sum(sizes)
        if max(sizes) > appender.largest_record or items.longest_properties > PROPERTIES_MAX:
            self._refuse_member(items, sizes)
        log = self._log
        if total + BLANK_SIZE > log.segment_size:
            appender.refuse_size(len(body), 0, total)
        try:
            log.claim(total)
        except OSError as failure:
            raise no_segment(failure) from failure
        now = self._time_ms()
        offset = queue.next_offset
        positions = list(accumulate(sizes[:-1], initial=log.next))
        rest = (sys_flag, born_timestamp_ms, born_host, now, host, reconsume_times, 0)
        common = Common(head, queue.magic, queue_id, offset, rest, topic_bytes)
        try:
            records = items.records(common, sizes, positions)
        except struct.error as problem:
            raise illegal_number(problem) from None
        log.put(records)
        queue.next_offset = offset + len(sizes)
        codes, keys = items.codes_and_keys()
        appended = BatchRecords(
            queue, queue.key_prefix, offset, positions, sizes, codes, now, items.properties(), keys
        )
        appender.add(appended)
        return appended

    def _refuse_member(self, items: Items, records: list[int]) -> None:
        """Name the first message that is too large."""
        for body, text, record in zip(items.bodies, items.properties()(), records, strict=True):
            if len(text) > PROPERTIES_MAX or record > self._appender.largest_record:
                self._appender.refuse_size(len(body), len(text), record)

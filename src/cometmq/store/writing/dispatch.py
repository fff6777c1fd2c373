"""The dispatch makes written records visible: it adds units to the consume queues and keys to the index."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from itertools import repeat

import numpy as np

from cometmq import logs
from cometmq.protocol.record.many import RecordGroup
from cometmq.store.base.config import StoreConfig
from cometmq.store.derived.consume_queue import UNIT_STRUCT
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.appender import BatchRecords, EncodedGroup, TickMessage
from cometmq.store.writing.record_dispatch import (
    ALL,
    MAX_REPORTED_REJECTIONS,
    NONE,
    Arrivals,
    RecordDispatch,
    Watched,
)

log = logs.logger(__name__)

WrittenGroup = EncodedGroup | RecordGroup
"""Consecutive records of the log, either encoded by this broker or received from a master."""

_pack = UNIT_STRUCT.pack


def count_of(group: EncodedGroup) -> int:
    """Return the number of records in a group."""
    return len(group.sizes if type(group) is BatchRecords else group)


def last_of(groups: Sequence[WrittenGroup]) -> tuple[int, int, int]:
    """Return begin, end and store time (ms) of the last record in `groups`."""
    group = groups[-1]
    if type(group) is RecordGroup:
        return int(group.position[-1]), group.end, int(group.store_ms[-1])
    if type(group) is BatchRecords:
        position = group.physical_offsets[-1]
        return position, position + group.sizes[-1], group.store_timestamp_ms
    last = group[-1]
    return last.physical_offset, last.physical_offset + last.size, last.store_timestamp_ms


def split_at(groups: Sequence[WrittenGroup], end: int) -> tuple[list[WrittenGroup], list[WrittenGroup]]:
    """Divide records at log position `end`, where a record must end."""
    front: list[WrittenGroup] = []
    rest: list[WrittenGroup] = []
    for group in groups:
        if type(group) is RecordGroup:
            count = int(np.count_nonzero(group.position < end))
            parts: tuple[WrittenGroup, WrittenGroup]
            total = len(group.properties)
            parts = group.first_ones(count), group.last_ones(total - count)
        elif type(group) is BatchRecords:
            count, total = bisect_left(group.physical_offsets, end), len(group.sizes)
            parts = group.part(0, count), group.part(count, total)
        else:
            count, total = bisect_left(group, end, key=lambda message: message.physical_offset), len(group)
            parts = group[:count], group[count:]
        if count:
            front.append(parts[0])
        if count < total:
            rest.append(parts[1])
    return front, rest


@dataclass(eq=False)
class Dispatcher:
    """Makes written records visible in the order of the log: immediately, or after their flush."""

    queues: QueueTable
    index: IndexService
    deleted: InitVar[DeletedTopics]
    config: InitVar[StoreConfig]
    dispatched: Callable[[int, int, int, int], None]
    """Called after each dispatch with the number of records, and with `last_of` them."""

    def __post_init__(self, deleted: DeletedTopics, config: StoreConfig) -> None:
        self.received = RecordDispatch(self.queues, self.index, deleted, config, {}, self._record_not_served)
        self._not_served = 0
        self._unflushed: deque[tuple[int, Sequence[WrittenGroup]]] = deque()
        self.watched: Watched = None
        """The queues (topic, queue id) for which `dispatch` returns the new messages; None for all queues."""
        self.on_visible: Callable[[int, Arrivals], None] = lambda _count, _arrivals: None
        """Called with the messages that became visible because of a flush."""
        self.on_received: Callable[[RecordGroup], None] = lambda _group: None
        """Called with records that were received from a master or a raft leader and have become visible."""

    @property
    def waits(self) -> bool:
        """Whether records wait for their flush. Later records must then wait, too, to keep the order."""
        return bool(self._unflushed)

    @property
    def own_wait(self) -> bool:
        """Whether records encoded by this broker are waiting for their flush."""
        return any(type(group) is not RecordGroup for _, groups in self._unflushed for group in groups)

    def dispatch(self, groups: Sequence[WrittenGroup]) -> tuple[int, Arrivals]:
        """Make records visible. Return their number, and those of them that are in `watched` queues."""
        arrivals: Arrivals = []
        count = 0
        for group in groups:
            if type(group) is BatchRecords:
                self._dispatch_batch(group, arrivals)
                count += len(group.sizes)
            elif type(group) is RecordGroup:
                self._dispatch_received(group, arrivals)
                self.on_received(group)
                count += len(group.properties)
            else:
                self._dispatch_messages(group, arrivals)
                count += len(group)
        self.dispatched(count, *last_of(groups))
        return count, arrivals

    def _dispatch_messages(self, messages: list[TickMessage], arrivals: Arrivals) -> None:
        add_dirty, watched, index = self.queues.add_dirty, self.watched, self.index
        for message in messages:
            if not message.in_queue:
                continue
            queue, offset, tags_code = message.queue, message.queue_offset, message.tags_code
            if offset == queue.max_offset:  # `ConsumeQueue.push`, inlined for speed
                queue.window += _pack(message.physical_offset, message.size, tags_code)
                queue.max_offset = offset + 1
            else:
                queue.push(message.physical_offset, message.size, tags_code, offset)
            if not queue.dirty:
                add_dirty(queue)
            if watched is None or (queue.topic, queue.queue_id) in watched:
                stored_ms = message.store_timestamp_ms
                arrivals.append((queue.topic, queue.queue_id, offset + 1, tags_code, stored_ms))
        if index.enabled:
            index.add(
                [message.queue.key_prefix for message in messages],
                [message.physical_offset for message in messages],
                [message.store_timestamp_ms for message in messages],
                [message.properties for message in messages],
                [message.keys for message in messages],
            )

    def _dispatch_batch(self, records: BatchRecords, arrivals: Arrivals) -> None:
        """Make the records of a batch send visible. This takes 0.2 µs per record, as its loops run in C."""
        watched, index = self.watched, self.index
        queue, prefix, offset, positions, sizes, codes, store_ms, properties, keys = records
        count = len(sizes)
        behind = offset + count
        if offset == queue.max_offset:
            queue.window += b"".join(map(_pack, positions, sizes, codes))
            queue.max_offset = behind
        else:
            for place, unit in enumerate(zip(positions, sizes, codes, strict=True), offset):
                queue.push(*unit, place)
        if not queue.dirty:
            self.queues.add_dirty(queue)
        topic, queue_id = queue.topic, queue.queue_id
        if watched is None or (topic, queue_id) in watched:
            ends = range(offset + 1, behind + 1)
            arrivals += zip(repeat(topic), repeat(queue_id), ends, codes, repeat(store_ms))
        if index.enabled:
            prefixes, times = repeat(prefix, count), repeat(store_ms, count)
            if keys is None:
                index.add(prefixes, positions, times, properties(), repeat(None, count))
            else:
                index.add(prefixes, positions, times, repeat(b"", count), keys)

    def _dispatch_received(self, group: RecordGroup, arrivals: Arrivals) -> None:
        received = self.received
        received.watched, received.arrivals = self.watched, arrivals
        touched = received.add(group, indexed=ALL if self.index.enabled else NONE)
        # `finish` adds the records that wait for the next record of their queue. No record may stay waiting
        # and so invisible, because the next one may arrive much later.
        for queue in touched | received.finish():
            queue.next_offset = queue.max_offset
            if not queue.dirty:
                self.queues.add_dirty(queue)

    def _record_not_served(self, note: str) -> None:
        self._not_served += 1
        if self._not_served <= MAX_REPORTED_REJECTIONS:
            log.warning("%s, not served", note)

    def dispatch_flushed(self, end: int, groups: Sequence[WrittenGroup]) -> None:
        """Make records visible later, once the log has been flushed up to `end`."""
        self._unflushed.append((end, groups))

    def flushed(self, end: int) -> None:
        """Make the records before log position `end` visible, because they are synced to disk."""
        waiting = self._unflushed
        groups: list[WrittenGroup] = []
        while waiting and waiting[0][0] <= end:
            groups += waiting.popleft()[1]
        if groups:
            self.on_visible(*self.dispatch(groups))

    def committed(self, end: int) -> None:
        """Make the entries before `end`, the end of an entry that the raft group has committed, visible."""
        waiting = self._unflushed
        behind = next((number for number, (tick_end, _) in enumerate(waiting) if tick_end > end), None)
        if behind is not None:
            tick_end, groups = waiting[behind]
            front, rest = split_at(groups, end)
            if front:
                waiting[behind] = (tick_end, rest)
                waiting.insert(behind, (end, front))
        self.flushed(end)

    def forget_waiting(self) -> None:
        """Drop the records that wait for their flush, because the log now ends before them."""
        self._unflushed.clear()

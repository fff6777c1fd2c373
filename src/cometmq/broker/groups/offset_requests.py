"""Handlers of requests for consumer offsets, and for the offsets and store times of queues."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

import msgspec

from cometmq.broker.base import compat
from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.tables.consumer_offsets import SEPARATOR, ConsumerOffsets
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.protocol import headers
from cometmq.protocol.bodies import ConsumerOffsetTable
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection
from cometmq.store import MessageStore, Reads


class OffsetProcessor(msgspec.Struct, eq=False):
    """Handles requests of consumers and tools about offsets."""

    store: MessageStore
    tables: DurableTables
    consumers: ConsumerTable

    @handles(RequestCode.QUERY_CONSUMER_OFFSET)
    def query_consumer_offset(self, _connection: Connection, frame: Frame) -> Frame | Awaitable[Frame]:
        """Return a group's stored offset in a queue.

        If none is stored, return 0 for a young queue: one that begins at offset 0 and whose first message is
        still in memory (see `is_on_disk`). For other queues, return code 22, and never another error code: a
        4.9.8 consumer takes every error for "no offset stored" and starts at the end of the queue
        (docs/reference/remoting.md, Consumer offsets).
        """
        header = frame.header(headers.QueryConsumerOffsetRequestHeader)
        offset = self.tables.offsets.query(header.consumer_group, header.topic, header.queue_id)
        if offset < 0:
            return self._first_offset(header, frame)
        return offset_answer(frame, offset)

    async def _first_offset(self, header: headers.QueryConsumerOffsetRequestHeader, frame: Frame) -> Frame:
        """Return the offset 0 for a group without a stored offset, if the queue's first message is in memory.

        Otherwise, or if the request excludes 0, raise CommandError with code 22.
        """
        store, topic, queue_id = self.store, header.topic, header.queue_id
        known = topic in self.tables.topics.table
        young = store.min_offset(topic, queue_id) <= 0 and not await store.executor.query(
            partial(is_on_disk, store, topic, queue_id, 0)
        )
        zero = young and header.set_zero_if_not_found is not False
        if not zero or (compat.is_5x(frame.version) and not known):
            raise CommandError(
                ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first", ext={}
            )
        return offset_answer(frame, 0)

    @handles(RequestCode.UPDATE_CONSUMER_OFFSET)
    def update_consumer_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Store a group's offset in a queue. Most clients send this request one-way."""
        header = frame.header(headers.UpdateConsumerOffsetRequestHeader)
        if not (header.topic and header.consumer_group):  # `names_checked` does not check empty names
            check_topic(header.topic, frame.version)
            check_group(header.consumer_group, frame.version)
        if compat.is_5x(frame.version):
            self._check_update(header)
        place = header.consumer_group, header.topic, header.queue_id
        store_offset(self.tables.offsets, *place, header.commit_offset)
        return frame.response()

    def _check_update(self, header: headers.UpdateConsumerOffsetRequestHeader) -> None:
        """Raise CommandError for an update that 5.x refuses, although 4.9 would store it."""
        group, topic = header.consumer_group, header.topic
        if self.tables.groups.find(group) is None:
            raise CommandError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if topic not in self.tables.topics.table:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        for name, number in (("queueId", header.queue_id), ("offset", header.commit_offset)):
            if number < 0:
                problem = f"{name} is invalid, {name}={number}"
                raise CommandError(ResponseCode.INVALID_PARAMETER, problem)

    @handles(RequestCode.GET_ALL_CONSUMER_OFFSET)
    async def get_all_consumer_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Return all stored offsets, for a slave that copies them and for tools that list groups."""
        offsets = self.tables.offsets
        table: dict[str, dict[int, int]] = {}
        entries = 0
        turns = Turns()
        for group in offsets.groups():
            async for topic in turns.each(offsets.topics_of(group)):
                queues = table[topic + SEPARATOR + group] = offsets.queues(group, topic)
                entries += len(queues)
        floors = {topic: [*queues.items()] for topic, queues in self.store.min_offsets.by_topic.items()}
        body = ConsumerOffsetTable(
            offset_table=table,
            data_version=self.tables.offsets_version(),
            min_offsets=floors or None,
            online_groups=sorted(self.consumers.groups) or None,
        )
        return frame.response(body=await encoded(body, entries))

    @handles(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    async def search_offset_by_timestamp(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the offset in a queue that corresponds to a point in time."""
        header = frame.header(headers.SearchOffsetRequestHeader)
        mode = compat.search_mode(frame.version, header.boundary_type)
        store = self.store
        queue = store.queues.find_queue(header.topic, header.queue_id)
        offset = await store.lookups.offset_by_time(queue, header.timestamp, mode)
        return offset_answer(frame, max(offset, 0))

    @handles(RequestCode.GET_MAX_OFFSET)
    def get_max_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the maximum offset of a queue, which is the offset that its next message will have."""
        header = frame.header(headers.QueueRequestHeader)
        return offset_answer(frame, self.store.max_offset(header.topic, header.queue_id))

    @handles(RequestCode.GET_MIN_OFFSET)
    def get_min_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the minimum offset of a queue, which is the offset of its first readable message."""
        header = frame.header(headers.QueueRequestHeader)
        return offset_answer(frame, self.store.min_offset(header.topic, header.queue_id))

    @handles(RequestCode.GET_EARLIEST_MSG_STORETIME)
    async def get_earliest_msg_storetime(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the store time, in ms, of the first readable message of a queue, or -1 if it has none."""
        header = frame.header(headers.QueueRequestHeader)
        store = self.store
        topic, queue_id = header.topic, header.queue_id
        first = store.min_offset(topic, queue_id)
        queue = store.queues.find_queue(topic, queue_id)
        when = await store.executor.query(partial(store.lookups.store_time_of, queue, first))
        return frame.response(ext={"timestamp": str(when)})


def offset_answer(frame: Frame, offset: int) -> Frame:
    """Return a success response that contains an offset."""
    return frame.response(ext={"offset": str(offset)})


def store_offset(offsets: ConsumerOffsets, group: str, topic: str, queue_id: int, offset: int) -> None:
    """Store a group's offset in a queue. Raises CommandError if there are too many offsets."""
    if not offsets.commit(group, topic, queue_id, offset):
        raise CommandError.failed(
            f"the offset of {group} in {topic} queue {queue_id} is not stored, because the limit of "
            f"{len(offsets)} offsets is reached"
        )


def is_on_disk(store: MessageStore, topic: str, queue_id: int, offset: int, reads: Reads) -> bool:
    """Return whether a message counts as being on the disk only, and no longer in memory.

    The result is True if the message's distance from the end of the log exceeds the share of memory that
    `accessMessageInMemoryMaxRatio` sets. The result is False if the message does not exist.
    """
    queue = store.queues.find_queue(topic, queue_id)
    if queue is None or not queue.min_offset <= offset < queue.max_offset:
        return False
    unit = queue.unit(offset, reads)
    return unit is not None and store.log.end - unit[0] > store.reader.memory_window

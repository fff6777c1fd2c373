"""Consumer offsets (14, 15, 43) and queue bounds (29 to 32)."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

from cometmq.broker.base import compat
from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.store_views import is_on_disk
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.context import BrokerContext
from cometmq.broker.tables.consumer_offsets import SEPARATOR
from cometmq.errors import CommandError
from cometmq.protocol.bodies import ConsumerOffsetTable
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    GetEarliestMsgStoretimeRequestHeader,
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.remoting import Connection, Handler


class OffsetProcessor:
    """Handles what consumers and tools ask about offsets."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update,
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.all_offsets,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.maximum,
            RequestCode.GET_MIN_OFFSET: self.minimum,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest,
        }

    def query(self, _connection: Connection, frame: Frame) -> Frame | Awaitable[Frame]:
        """14: the stored offset; 0 for a group that is new to a young queue; else 22
        (docs/reference/remoting.md, Consumer offsets).

        Never any other code: a 4.9.8 consumer takes every error for "no offset stored" and jumps to the end.
        """
        header = frame.header(QueryConsumerOffsetRequestHeader)
        offset = self._context.offsets.query(header.consumer_group, header.topic, header.queue_id)
        if offset < 0:
            return self._first_offset(header, frame)
        return frame.response(ResponseCode.SUCCESS, ext={"offset": str(offset)})

    async def _first_offset(self, header: QueryConsumerOffsetRequestHeader, frame: Frame) -> Frame:
        """14 for a group that has no offset in this queue yet."""
        context, topic, queue_id = self._context, header.topic, header.queue_id
        store = context.store
        known = topic in context.topics.table
        young = store.min_offset(topic, queue_id) <= 0 and not await store.off_loop.ask(
            partial(is_on_disk, store, topic, queue_id, 0)
        )
        if compat.is_5x(frame.version):
            zero = known and young and header.set_zero_if_not_found is not False
        else:
            zero = young
        if not zero:
            raise CommandError(
                ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first", ext={}
            )
        return frame.response(ResponseCode.SUCCESS, ext={"offset": "0"})

    def update(self, _connection: Connection, frame: Frame) -> Frame:
        """15: store an offset; mostly oneway."""
        header = frame.header(UpdateConsumerOffsetRequestHeader)
        context = self._context
        if not (header.topic and header.consumer_group):  # what else they may be is checked already
            check_topic(header.topic, frame.version)
            check_group(header.consumer_group, frame.version)
        if compat.is_5x(frame.version):
            self._check_update(header)
        group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        if not context.offsets.commit(group, topic, queue_id, header.commit_offset):
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"the offset of {group} in {topic} queue {queue_id} is not stored: there are "
                f"{len(context.offsets)} offsets, and no more are taken",
            )
        return frame.response(ResponseCode.SUCCESS)

    def _check_update(self, header: UpdateConsumerOffsetRequestHeader) -> None:
        """What 5.x refuses and 4.9 stores."""
        context = self._context
        if context.groups.find(header.consumer_group) is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {header.consumer_group} not exist!"
            )
        if header.topic not in context.topics.table:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} not exist!")
        if header.queue_id < 0:
            raise CommandError(
                ResponseCode.INVALID_PARAMETER, f"queueId is invalid, queueId={header.queue_id}"
            )
        if header.commit_offset < 0:
            raise CommandError(
                ResponseCode.INVALID_PARAMETER, f"offset is invalid, offset={header.commit_offset}"
            )

    async def all_offsets(self, _connection: Connection, frame: Frame) -> Frame:
        """43: every stored offset, for a slave."""
        offsets = self._context.offsets
        table: dict[str, dict[int, int]] = {}
        entries = 0
        turns = Turns()
        for group in offsets.groups():
            for topic in offsets.topics_of(group):
                await turns.queue()
                queues = table[topic + SEPARATOR + group] = offsets.queues(group, topic)
                entries += len(queues)
        body = await encoded(ConsumerOffsetTable(offset_table=table), entries)
        return frame.response(ResponseCode.SUCCESS, body=body)

    async def search(self, _connection: Connection, frame: Frame) -> Frame:
        """29: the offset of a point in time."""
        header = frame.header(SearchOffsetRequestHeader)
        mode = compat.search_mode(frame.version, header.boundary_type)
        store = self._context.store
        queue = store.queues.find(header.topic, header.queue_id)
        offset = await store.lookups.offset_by_time(queue, header.timestamp, mode)
        return frame.response(ResponseCode.SUCCESS, ext={"offset": str(max(offset, 0))})

    def maximum(self, _connection: Connection, frame: Frame) -> Frame:
        """30: the offset that the next message will get."""
        header = frame.header(GetMaxOffsetRequestHeader)
        offset = self._context.store.max_offset(header.topic, header.queue_id)
        return frame.response(ResponseCode.SUCCESS, ext={"offset": str(offset)})

    def minimum(self, _connection: Connection, frame: Frame) -> Frame:
        """31: the first offset that can be read."""
        header = frame.header(GetMinOffsetRequestHeader)
        offset = self._context.store.min_offset(header.topic, header.queue_id)
        return frame.response(ResponseCode.SUCCESS, ext={"offset": str(offset)})

    async def earliest(self, _connection: Connection, frame: Frame) -> Frame:
        """32: when the first message that can be read was stored (ms), -1 without one."""
        header = frame.header(GetEarliestMsgStoretimeRequestHeader)
        store = self._context.store
        topic, queue_id = header.topic, header.queue_id
        first = store.min_offset(topic, queue_id)
        queue = store.queues.find(topic, queue_id)
        when = await store.off_loop.ask(partial(store.lookups.store_time_of, queue, first))
        return frame.response(ResponseCode.SUCCESS, ext={"timestamp": str(when)})

"""Single messages: by key or unique key (12), by offset id (33)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from cometmq.broker.base.store_views import index_position
from cometmq.broker.context import BrokerContext
from cometmq.errors import CommandError
from cometmq.protocol.codes import MAX_FRAME_LENGTH, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import QueryMessageRequestHeader, ViewMessageRequestHeader
from cometmq.remoting import Connection, Handler

# As so many bytes of a body a query counts among the requests that its connection has under way: four by key
# and fifteen by id have their answers in memory together.
_HELD_BY_KEY, _HELD_BY_ID = 4 << 20, 1 << 20
_MOST_BYTES = MAX_FRAME_LENGTH - (64 << 10)  # of an answer's records: what one frame holds beside its header


class QueryProcessor:
    """Handles look-ups; what is not in memory is read by a thread."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.QUERY_MESSAGE: _holding(self.by_key, _HELD_BY_KEY),
            RequestCode.VIEW_MESSAGE_BY_ID: _holding(self.by_id, _HELD_BY_ID),
        }

    async def by_key(self, frame: Frame) -> Frame:
        """12: records whose index entry has the key's hash, stored between two times, the newest that one
        frame holds; the client compares the key.
        """
        header = frame.header(QueryMessageRequestHeader)
        store = self._context.store
        maximum = store.config.default_query_max_num if header.unique_key_query else header.max_num
        span = header.begin_timestamp, header.end_timestamp
        records = await store.lookups.by_key(header.topic, header.key, maximum, *span, _MOST_BYTES)
        newest_ms, newest_position = index_position(store)
        answer = {
            "indexLastUpdateTimestamp": str(newest_ms),
            "indexLastUpdatePhyoffset": str(newest_position),
        }
        if not records:
            raise CommandError(
                ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", ext=answer
            )
        return frame.response(ResponseCode.SUCCESS, ext=answer, body=b"".join(records))

    async def by_id(self, frame: Frame) -> Frame:
        """33: the record at a commit-log offset."""
        offset = frame.header(ViewMessageRequestHeader).offset
        store = self._context.store
        record = await store.off_loop.ask(partial(store.lookups.record_at, offset))
        if record is None:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return frame.response(ResponseCode.SUCCESS, body=bytes(record))


def _holding(answer: Callable[[Frame], Awaitable[Frame]], size: int) -> Handler:
    """A handler whose requests count for so many bytes from the read on that brings them."""

    async def finish(connection: Connection, frame: Frame) -> Frame:
        try:
            return await answer(frame)
        finally:
            connection.release(size)

    def handle(connection: Connection, frame: Frame) -> Awaitable[Frame]:
        connection.hold(size)
        return finish(connection, frame)

    return handle

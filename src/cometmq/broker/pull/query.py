"""Handlers of queries for single messages, by key, unique key or message id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from cometmq.broker.access.security import CheckTopic
from cometmq.broker.base.retry_records import may_read
from cometmq.errors import CommandError, RecordError
from cometmq.protocol.codes import MAX_FRAME_LENGTH, RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import QueryMessageRequestHeader, ViewMessageRequestHeader
from cometmq.protocol.record.one import decode_record
from cometmq.remoting import Connection
from cometmq.store import Buffer, MessageStore

# The requests in progress on one connection may total a limited number of bytes. For this limit, a query
# counts with this many bytes. So at most four queries by key, or fifteen by id, are in progress on one
# connection, each with a response in memory.
_HELD_BY_KEY, _HELD_BY_ID = 4 << 20, 1 << 20
_MAX_BYTES = MAX_FRAME_LENGTH - (64 << 10)  # Maximum size of the records in one response, in bytes


class QueryProcessor(msgspec.Struct, eq=False):
    """Answers queries for single messages. If the data is not in memory, a thread reads it.

    Only administrators receive all records of a retry topic whose name groups share (base/retry_records.py).
    """

    store: MessageStore
    check_read: CheckTopic | None
    is_admin: Callable[[Connection, Frame], bool]

    @handles(RequestCode.QUERY_MESSAGE)
    def query_message(self, connection: Connection, frame: Frame) -> Awaitable[Frame]:
        """Return the newest messages of a time range that may have a key, as many as fit into one frame.

        The index contains only hashes of keys, so the client must compare the keys.
        """
        return _holding(connection, _HELD_BY_KEY, self._by_key(connection, frame))

    @handles(RequestCode.VIEW_MESSAGE_BY_ID)
    def view_message_by_id(self, connection: Connection, frame: Frame) -> Awaitable[Frame]:
        """Return the record at the commit log position that the request contains.

        The client takes the position from a message id.
        """
        return _holding(connection, _HELD_BY_ID, self._by_id(connection, frame))

    async def _by_key(self, connection: Connection, frame: Frame) -> Frame:
        header = frame.header(QueryMessageRequestHeader)
        store = self.store
        maximum = store.config.default_query_max_num if header.unique_key_query else header.max_num
        span = header.begin_timestamp, header.end_timestamp
        records = await store.lookups.by_key(header.topic, header.key, maximum, *span, _MAX_BYTES)
        if not self.is_admin(connection, frame):
            records = [record for record in records if _may_read(header.topic, record)]
        files = store.index.files
        answer = {
            "indexLastUpdateTimestamp": str(files[-1].end_ms if files else 0),
            "indexLastUpdatePhyoffset": str(files[-1].end_position if files else 0),
        }
        if not records:
            raise CommandError(
                ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", ext=answer
            )
        return frame.response(ext=answer, body=b"".join(records))

    async def _by_id(self, connection: Connection, frame: Frame) -> Frame:
        offset = frame.header(ViewMessageRequestHeader).offset
        store, raft_log, found = self.store, self.store.raft_log, None
        if raft_log is None or offset < raft_log.shown:  # Later log entries are not committed
            found = await store.executor.query(partial(store.lookups.named_record, offset))
        if found is None:
            raise CommandError.failed(f"can not find message by the offset, {offset}")
        record, is_certain = found
        if self.check_read is not None:
            topic = decode_record(record, 0).topic
            self.check_read(connection, frame, topic if is_certain and _may_read(topic, record) else None)
        return frame.response(body=record)


def _may_read(topic: str, record: Buffer) -> bool:
    try:
        return may_read(topic, record)
    except RecordError:
        return True  # As for pulls, the client sees the damage


def _holding(connection: Connection, size: int, answer: Awaitable[Frame]) -> Awaitable[Frame]:
    """Await a response. Until then, count `size` bytes as requests in progress on the connection."""

    async def finish() -> Frame:
        try:
            return await answer
        finally:
            connection.release(size)

    connection.hold(size)
    return finish()

"""Handlers of the requests by which slaves copy offsets in lite topics, and tools show lite topics."""

from __future__ import annotations

import asyncio

import msgspec

from cometmq.broker.lite.service import LiteService
from cometmq.protocol.bodies import LiteOffsetTable
from cometmq.protocol.codes import RequestCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import GetLiteOffsetsHeader
from cometmq.remoting import Connection

OFFSETS_PER_PAGE = 2_000


class LiteAdmin(msgspec.Struct, eq=False, kw_only=True):
    """Answers requests about lite topics."""

    service: LiteService

    @handles(RequestCode.GET_LITE_OFFSETS)
    async def get_lite_offsets(self, _connection: Connection, frame: Frame) -> Frame:
        """Return consumer offsets that have changed after a change, or the first ones of all offsets."""
        header, service = frame.header(GetLiteOffsetsHeader), self.service
        queues, body = service.queues, LiteOffsetTable()
        if service.is_open:
            since = header.since if header.epoch == queues.epoch else 0
            queues.flush()
            body.epoch = queues.epoch
            body.changes = await asyncio.to_thread(queues.changed_offsets, since, OFFSETS_PER_PAGE)
            body.more = len(body.changes) == OFFSETS_PER_PAGE
            body.log_end = service.store.visible_end
        return frame.response(body=body.encode())

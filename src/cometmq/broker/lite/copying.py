"""A replica's copy of the consumer offsets in lite topics: it requests the changes since its last request.

The queues themselves are not copied, because the replica derives them from its log.
"""

from __future__ import annotations

from cometmq.broker.lite.service import LiteService
from cometmq.protocol.bodies import LiteOffsetTable
from cometmq.protocol.headers.admin import GetLiteOffsetsHeader
from cometmq.protocol.lite import parent_of


class LiteOffsetCopy:
    """The state of the copy."""

    def __init__(self, service: LiteService) -> None:
        self._service = service
        self._epoch = ""
        self._since = 0

    def request(self) -> GetLiteOffsetsHeader | None:
        """Return the request for the next changes, or None if this broker has no lite topics."""
        return GetLiteOffsetsHeader(self._epoch, self._since) if self._service.is_open else None

    def take(self, table: LiteOffsetTable) -> bool:
        """Apply the changes in a response. Return whether the master has more of them.

        The changes are requested again later if messages of this broker's log are still being read.
        """
        queues = self._service.queues
        parents = {parent_of(lmq) for _, lmq, _, _ in table.changes}
        if not self._service.is_open or not self._service.parent_queues.are_ready(parents):
            return False
        for _, lmq, group, offset in table.changes:
            if queues.query(group, lmq, 0) != offset:
                queues.commit(group, lmq, 0, offset)
        if table.epoch != self._epoch:
            self._epoch, self._since = table.epoch, 0
        if table.changes:
            self._since = table.changes[-1][0]
        return table.more

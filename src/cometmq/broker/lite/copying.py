"""A replica's copy of consumer offsets in lite topics, and of subscriptions to them.

It requests the changes since its last request. The queues themselves are not copied, because the replica
derives them from its log.
"""

from __future__ import annotations

from cometmq.broker.lite.service import LiteService
from cometmq.protocol.bodies import LiteState
from cometmq.protocol.headers.admin import GetLiteStateHeader
from cometmq.protocol.lite import parent_of


class LiteStateCopy:
    """The state of the copy."""

    def __init__(self, service: LiteService) -> None:
        self._service = service
        self._epoch = ""
        self._since = 0
        self._subscriptions = 0

    def request(self) -> GetLiteStateHeader | None:
        """Return the request for the next changes, or None if this broker has no lite topics."""
        if not self._service.is_open:
            return None
        return GetLiteStateHeader(self._epoch, self._since, self._subscriptions)

    def take(self, table: LiteState) -> bool:
        """Apply the changes in a response. Return whether the master has more of them.

        The changes are requested again later if messages of this broker's log are still being read.
        """
        if not self._service.is_open:
            return False
        queues = self._service.queues
        if table.subscriptions is not None:
            queues.replace_subscriptions(table.subscriptions)
            self._subscriptions = table.subscription_change
        parents = {parent_of(lmq) for _, lmq, _, _ in table.changes}
        if not self._service.parent_queues.are_ready(parents):
            return False
        for _, lmq, group, offset in table.changes:
            if queues.query(group, lmq, 0) != offset:
                queues.commit(group, lmq, 0, offset)
        if table.epoch != self._epoch:
            self._epoch, self._since = table.epoch, 0
        if table.changes:
            self._since = table.changes[-1][0]
        return table.more

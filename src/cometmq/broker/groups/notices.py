"""What a broker says to clients on its own: oneway requests on the client's connection
(docs/reference/remoting.md, Requests to clients)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.errors import RemotingError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import NotifyConsumerIdsChangedRequestHeader
from cometmq.remoting import Connection

log = logs.logger(__name__)

# A group is told of a change at once, and of further changes at most once in this many seconds.
REST_S = 0.2


@dataclass(eq=False)
class GroupNotices:
    """Tells the members of a group that its membership changed (NOTIFY_CONSUMER_IDS_CHANGED), in the next
    iteration of the loop: once, however often it did.

    A client that comes and goes, or subscribes this and that in turn, must not keep a group of thousands
    busy with rebalancing.
    """

    config: BrokerConfig
    groups: SubscriptionGroups
    consumers: ConsumerTable

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: dict[str, bool] = {}  # of groups that rest or are about to be told

    def changed(self, group: str) -> None:
        """Tell the group."""
        if group not in self._changed:
            self._loop.call_soon(self._next, group)
        self._changed[group] = True

    def _next(self, group: str) -> None:
        if self._changed[group]:
            self._changed[group] = False
            self._loop.call_later(REST_S, self._next, group)
            self._tell(group)
        else:
            del self._changed[group]

    def _tell(self, group: str) -> None:
        settings = self.groups.table.get(group)
        if not self.config.notify_consumer_ids_changed_enable or (
            settings is not None and not settings.notify_consumer_ids_changed_enable
        ):
            return
        header = NotifyConsumerIdsChangedRequestHeader(consumer_group=group)
        for client in self.consumers.online(group):
            send_oneway(client.channel, Frame.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header))


def send_oneway(channel: Connection, frame: Frame) -> None:
    """Send, unless the connection is gone, whose close tells the tables."""
    if channel.closed:
        return
    try:
        channel.oneway(frame)
    except RemotingError as error:
        log.debug("oneway %d to %s not sent: %s", frame.code, channel.peer, error)

"""One-way requests to clients (docs/reference/remoting.md, Requests to clients)."""

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
from cometmq.protocol.headers import ConsumerGroupRequestHeader
from cometmq.remoting import Connection

log = logs.logger(__name__)

# Minimum interval, in seconds, between two notifications of the same group. If the group has not been
# notified within this interval, a change is reported in the next iteration of the event loop.
REST_S = 0.2


@dataclass(eq=False)
class GroupNotices:
    """Notifies the members of a group when its membership changes (NOTIFY_CONSUMER_IDS_CHANGED).

    All changes within one iteration of the event loop cause one notification. Between two notifications of a
    group there is a minimum interval. Otherwise a client that repeatedly joins and leaves, or changes its
    subscriptions, could keep a group of thousands of members busy with rebalancing.
    """

    config: BrokerConfig
    groups: SubscriptionGroups
    consumers: ConsumerTable

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: dict[str, bool] = {}  # Whether each group has changed since its last notification

    def changed(self, group: str) -> None:
        """Notify the members of a changed group.

        The notification is sent in the next iteration of the event loop, or once the minimum interval since
        the group's last notification has passed.
        """
        if group not in self._changed:
            self._loop.call_soon(self._next, group)
        self._changed[group] = True

    def _next(self, group: str) -> None:
        if self._changed[group]:
            self._changed[group] = False
            self._loop.call_later(REST_S, self._next, group)
            self._send_notice(group)
        else:
            del self._changed[group]

    def _send_notice(self, group: str) -> None:
        settings = self.groups.table.get(group)
        if not self.config.notify_consumer_ids_changed_enable or (
            settings is not None and not settings.notify_consumer_ids_changed_enable
        ):
            return
        header = ConsumerGroupRequestHeader(consumer_group=group)
        for client in self.consumers.online(group):
            send_oneway(client.channel, Frame.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header))


def send_oneway(channel: Connection, frame: Frame) -> None:
    """Send a one-way request. If the connection is closed, do nothing: another handler handles the close."""
    if channel.closed:
        return
    try:
        channel.oneway(frame)
    except RemotingError as error:
        log.debug("oneway %d to %s not sent: %s", frame.code, channel.peer, error)

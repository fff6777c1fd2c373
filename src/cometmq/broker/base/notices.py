"""What a broker says to clients on its own: oneway requests on the client's connection
(docs/reference/remoting.md, Requests to clients)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cometmq import logs
from cometmq.errors import RemotingError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import NotifyConsumerIdsChangedRequestHeader
from cometmq.remoting import Connection

log = logs.logger(__name__)

# A group hears of a change at once, of those that follow once in so many seconds.
REST_S = 0.2


class GroupNotices:
    """Tells groups that they changed, in the next iteration of the loop: once, however often they did.

    A client that comes and goes, or subscribes this and that in turn, must not keep a group of thousands
    busy with rebalancing.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
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


def notify_consumer_ids_changed(channel: Connection, group: str) -> None:
    """40: the membership of a consumer group changed, rebalance now."""
    header = NotifyConsumerIdsChangedRequestHeader(consumer_group=group)
    send_oneway(channel, Frame.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header))


def send_oneway(channel: Connection, frame: Frame) -> bool:
    """Send; False if the connection is gone, whose close tells the tables."""
    if channel.closed:
        return False
    try:
        channel.oneway(frame)
    except RemotingError as error:
        log.debug("oneway %d to %s not sent: %s", frame.code, channel.peer, error)
        return False
    return True

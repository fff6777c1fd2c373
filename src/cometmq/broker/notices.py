"""What a broker says to clients on its own: oneway requests on the client's connection (remoting.md 4)."""

from __future__ import annotations

from cometmq import logs
from cometmq.errors import RemotingError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import NotifyConsumerIdsChangedRequestHeader
from cometmq.remoting import Connection

log = logs.logger(__name__)


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

"""Leases that the server renews: those of push consumers, which set `auto_renew` and no duration.

The receipt handle stays the same for the life of a lease, so a client that keeps its first handle can always
acknowledge with it. If the client's connection closes, its messages become visible to others after GONE_MS.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.errors import SendFailed
from cometmq.grpc.service.clients import Client, Clients
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ChangeInvisibleTimeRequestHeader
from cometmq.protocol.pop import ReceiptHandle

RENEWED_MS = 60_000
"""How long a renewed lease lasts."""
RENEW_S = 15.0
"""The interval between two renewals of a lease, in seconds."""
LONGEST_S = 3 * 3600.0
"""The time after which a lease is no longer renewed: its consumer hangs, as Apache's proxy assumes, too."""
GONE_MS = 1_000
MAX_RENEWED = 20_000
"""The maximum number of leases that are renewed for one client. Those of further messages expire."""
CHANGE_S = 3.0
ENDED = frozenset({ResponseCode.NO_MESSAGE, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.TOPIC_NOT_EXIST})
"""The responses to a renewal which mean that the lease has ended."""


class Renewed(NamedTuple):
    """A lease that is renewed.

    Attributes:
        group: The consumer group.
        topic: The topic to which the consumer has subscribed.
        handle: The receipt handle.
        since: The time of the event loop at which the message was delivered.
    """

    group: str
    topic: str
    handle: ReceiptHandle
    since: float


def change_frame(client: Client, lease: Renewed, invisible_ms: int, suspend: bool = False) -> Frame:
    """Return the request that changes when a lease expires."""
    handle = lease.handle
    header = ChangeInvisibleTimeRequestHeader(
        consumer_group=lease.group,
        topic=handle.kind.topic(lease.topic, lease.group),
        queue_id=handle.queue_id,
        extra_info=handle.encode(),
        offset=handle.offset or 0,
        invisible_time=invisible_ms,
        suspend=suspend or None,
    )
    return client.frame(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)


def keep(client: Client, lease: Renewed) -> None:
    """Renew a lease from now on, until `forget` or until the client is gone."""
    if len(client.leased) < MAX_RENEWED:
        client.leased[lease.handle.encode()] = lease


def forget(client: Client, handle: str) -> None:
    """Renew a lease no longer, because its message was acknowledged or given back."""
    client.leased.pop(handle, None)


def renew_all(clients: Clients, now: float) -> None:
    """Renew the leases of all clients. Called every RENEW_S seconds."""
    for client in clients.connected:
        for key, lease in list(client.leased.items()):
            if now - lease.since > LONGEST_S:
                del client.leased[key]
            else:
                _change(client, lease, RENEWED_MS)


def give_back_all(client: Client) -> None:
    """Let the leases of a client that is gone expire."""
    for lease in client.leased.values():
        _change(client, lease, GONE_MS)
    client.leased.clear()


def _change(client: Client, lease: Renewed, invisible_ms: int) -> None:
    try:
        outcome = client.request(change_frame(client, lease, invisible_ms), CHANGE_S)
    except SendFailed:
        return  # The broker is stopping; the lease expires by itself
    # After a time-out or another failure, the next renewal tries again. The exception is retrieved, so that
    # asyncio does not log it.
    key = lease.handle.encode()

    def done(_outcome: object) -> None:
        if not outcome.cancelled() and outcome.exception() is None and outcome.result().code in ENDED:
            client.leased.pop(key, None)

    outcome.add_done_callback(done)

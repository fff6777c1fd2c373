"""Leases that the server renews: those of push consumers, which set `auto_renew` and no duration.

The receipt handle stays the same for the life of a lease, so a client that keeps its first handle can always
acknowledge with it. If the client ends, its messages become visible to others after GONE_MS. If it only falls
silent, for instance because its host has lost power, its leases expire by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cometmq.broker.base.turns import Turns
from cometmq.broker.lite.service import LiteService
from cometmq.broker.pop.pops import Pops
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.grpc.service.clients import Client, Clients
from cometmq.periodic import Tasks
from cometmq.protocol.bodies.retry_policy import policy_of
from cometmq.protocol.lite import lmq_name
from cometmq.protocol.pop import ReceiptHandle

RENEWED_MS = 60_000
"""How long a renewed lease lasts."""
RENEW_S = 15.0
"""The interval between two renewals of a lease, in seconds."""
SILENT_S = 40.0
"""The leases of a client from which no call has arrived for this time, in seconds, are not renewed. Clients
send a heartbeat every 10 or 30 s."""
LONGEST_S = 3 * 3600.0
"""The time after which a lease is no longer renewed: its consumer hangs, as Apache's proxy assumes, too."""
GONE_MS = 500
"""How long the leases of a client that is gone last. It may be back at once, and acknowledge its messages.
Others are to receive them within a second, of which the expiry of 10,000 leases takes half."""
MAX_RENEWED = 20_000
"""The maximum number of leases that are renewed for one client. Those of further messages expire."""


class Renewed(NamedTuple):
    """A lease that is renewed.

    Attributes:
        topic: The topic to which the consumer has subscribed.
        since: The time of the event loop at which the message was delivered.
        deliveries: The number of earlier deliveries.
        lite_topic: The lite topic of the message, or "".
    """

    group: str
    topic: str
    handle: ReceiptHandle
    since: float
    deliveries: int = 0
    lite_topic: str = ""

    @property
    def place(self) -> tuple[str, str, int]:
        """The group, the topic in which the message was found or the name of the lite queue, the queue id."""
        if self.lite_topic:
            return self.group, lmq_name(self.topic, self.lite_topic), 0
        return self.group, self.handle.kind.topic(self.topic, self.group), self.handle.queue_id


def keep(client: Client, lease: Renewed) -> None:
    """Renew a lease from now on, until `forget` or until the client is gone."""
    if len(client.leased) < MAX_RENEWED:
        client.leased[lease.handle.encode()] = lease


def forget(client: Client, handle: str) -> bool:
    """Renew a lease no longer, because its message has an outcome. Return whether it was renewed before."""
    return client.leased.pop(handle, None) is not None


@dataclass(eq=False)
class Renewals:
    """Renews the leases of all clients. While it does so, other tasks run after every few leases.

    Attributes:
        groups: The groups of the broker. They are only read: the broker creates a group after it has checked
            the client's rights.
    """

    clients: Clients
    groups: SubscriptionGroups
    leases: Pops
    lite_leases: LiteService
    _tasks: Tasks = field(default_factory=Tasks)

    async def renew_all(self, now: float) -> None:
        """Renew the leases of all clients. Called every RENEW_S seconds, with the time of the event loop.

        The message of a consumer that hangs comes again after the delay of the group's retry policy.
        """
        turns = Turns()
        for client in list(self.clients.connected):
            silence = now - client.seen
            if silence > SILENT_S + RENEWED_MS / 1000:
                client.leased.clear()  # They have expired
            elif silence <= SILENT_S:
                async for key in turns.each(list(client.leased)):
                    lease = client.leased.get(key)  # None if it has ended since the last turn
                    if lease is None:
                        continue
                    hangs, duration_ms = now - lease.since > LONGEST_S, RENEWED_MS
                    if hangs:
                        policy = policy_of(self.groups.table.get(lease.group))
                        duration_ms = policy.delay_ms(lease.deliveries)
                    if not self.change(lease, duration_ms) or hangs:
                        client.leased.pop(key, None)

    def give_back_all(self, client: Client) -> None:
        """Let the leases of a client that is gone expire."""
        leases = list(client.leased.values())
        client.leased.clear()
        if leases:
            self._tasks.start(self._give_back(leases))

    async def _give_back(self, leases: Iterable[Renewed]) -> None:
        async for lease in Turns().each(leases):
            self.change(lease, GONE_MS)

    def change(self, lease: Renewed, invisible_ms: int, counts: bool = True) -> bool:
        """Let a lease expire `invisible_ms` from now. Return False if it has ended.

        With `counts=False`, the delivery does not count as one of the group's retries.
        """
        handle = lease.handle
        table, offset = self._table(lease), handle.offset or 0
        return table.renew(lease.place, offset, handle.pop_time_ms, invisible_ms, counts=counts)

    def ack(self, lease: Renewed) -> None:
        """Mark a leased message as consumed that is not delivered to its client."""
        handle = lease.handle
        self._table(lease).ack(lease.place, handle.offset or 0, handle.pop_time_ms)

    def _table(self, lease: Renewed) -> Pops | LiteService:
        return self.lite_leases if lease.lite_topic else self.leases

    async def stop(self) -> None:
        """Give back the leases of the clients that are gone."""
        await self._tasks.finish()

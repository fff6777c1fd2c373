"""The subscriptions of clients to lite topics. This module does no I/O and reads no clock.

A client of a group subscribes to lite topics of the group's parent topic, by single changes or by sending all
its lite topics. Clients repeat the latter every 30 s. A client of a wildcard group has a single subscription,
to all lite topics of the parent. A subscription belongs to the client's id, not to its
connection, so it outlives a lost connection and a restart of the broker; it ends EXPIRE_MS after the client's
last request.

Quotas count the net growth of a request: removals and repetitions always pass, and a request that exceeds a
quota changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from cometmq.errors import CommandError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.lite import all_of, all_with

MAX_SUBSCRIPTIONS = 100_000
"""The maximum number of subscriptions of all clients, as in Apache's broker (maxLiteSubscriptionCount)."""
MAX_CLIENTS = 10_000
EXPIRE_MS = 180_000


@dataclass(slots=True, eq=False)
class Subscriber:
    """A client with subscriptions to lite topics.

    Attributes:
        lmqs: The queue names of its lite topics.
        ready: Those that may have messages for its group, in the order in which they are read.
        seen_ms: The time of its last request, by the monotonic clock.
        attempt: The attempt id of its last pop that found messages, and the queues of these messages.
        checked: Whether `ready` contains all queues that had messages when the client subscribed.
        cursor: In a wildcard group, the queue after which the search for queues with messages goes on.
        missed: Whether queues were left out of `ready`, because it was full, since the search began.
    """

    client_id: str
    group: str
    parent: str
    seen_ms: int
    lmqs: set[str] = field(default_factory=set)
    ready: dict[str, None] = field(default_factory=dict)
    attempt: tuple[str, list[str]] = ("", [])
    checked: bool = True
    cursor: str = ""
    missed: bool = False

    @property
    def wildcard(self) -> bool:
        """Whether the client subscribes to all lite topics of the parent."""
        return all_of(self.parent) in self.lmqs


class LiteSubscriptions:
    """All subscriptions of a broker."""

    def __init__(self) -> None:
        self._subscribers: dict[tuple[str, str], Subscriber] = {}  # By client id and group
        self._by_lmq: dict[str, dict[Subscriber, None]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(list(self._subscribers.values()))

    def __len__(self) -> int:
        return len(self._subscribers)

    def find(self, client_id: str, group: str) -> Subscriber | None:
        """Return a client of a group, or None if it has no subscriptions."""
        return self._subscribers.get((client_id, group))

    def of(self, lmq: str, group: str | None = None) -> list[Subscriber]:
        """Return the clients that subscribe to a lite topic, in `group` or, if it is None, in all groups."""
        return [
            each
            for name in dict.fromkeys((lmq, all_with(lmq)))
            for each in self._by_lmq.get(name, ())
            if group is None or each.group == group
        ]

    def enter(self, client_id: str, group: str, parent: str, now_ms: int) -> Subscriber:
        """Return a client, created without subscriptions if it is unknown, and note its request.

        Raises CommandError if there are too many clients.
        """
        found = self._subscribers.get((client_id, group))
        if found is None or found.parent != parent:
            if found is not None:
                self.remove(found, list(found.lmqs))
            if len(self._subscribers) >= MAX_CLIENTS:
                raise _exceeded(f"{MAX_CLIENTS} clients have subscriptions already")
            found = self._subscribers[client_id, group] = Subscriber(client_id, group, parent, now_ms)
        found.seen_ms = now_ms
        return found

    def check_quota(self, subscriber: Subscriber, after: Collection[str], quota: int) -> None:
        """Raise CommandError if a client may not have the subscriptions `after`."""
        growth = len(after) - len(subscriber.lmqs)
        if growth <= 0:
            return
        if len(after) > quota:
            raise _exceeded(f"{len(after)} lite topics, the quota of the client is {quota}")
        if self.count + growth > MAX_SUBSCRIPTIONS:
            raise _exceeded(f"the broker has {self.count} subscriptions, at most {MAX_SUBSCRIPTIONS}")

    def add(self, subscriber: Subscriber, lmqs: Collection[str]) -> list[str]:
        """Add subscriptions, without a check of quotas. Return those that are new."""
        added = [lmq for lmq in lmqs if lmq not in subscriber.lmqs]
        for lmq in added:
            self._by_lmq.setdefault(lmq, {})[subscriber] = None
        subscriber.lmqs.update(added)
        self.count += len(added)
        return added

    def remove(self, subscriber: Subscriber, lmqs: Collection[str]) -> list[str]:
        """Remove subscriptions. Return those that existed."""
        removed = [lmq for lmq in lmqs if lmq in subscriber.lmqs]
        for lmq in removed:
            of_lmq = self._by_lmq[lmq]
            del of_lmq[subscriber]
            if not of_lmq:
                del self._by_lmq[lmq]
            subscriber.ready.pop(lmq, None)
        subscriber.lmqs.difference_update(removed)
        self.count -= len(removed)
        if not subscriber.lmqs:
            self._subscribers.pop((subscriber.client_id, subscriber.group), None)
        return removed

    def silent(self, now_ms: int) -> list[Subscriber]:
        """Return the clients whose last request is more than EXPIRE_MS ago."""
        return [each for each in self._subscribers.values() if now_ms - each.seen_ms > EXPIRE_MS]


def _exceeded(what: str) -> CommandError:
    return CommandError(
        ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED, f"lite subscription quota exceeded: {what}"
    )

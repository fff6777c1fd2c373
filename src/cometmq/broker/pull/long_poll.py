"""The tables of parked pulls. This module uses no sockets and no clock.

A pull that found no new message is parked on its queue (topic, queue id). A new message wakes the pulls whose
filter matches it; a deadline wakes the others. In addition, every 5 s all pulls whose queue has grown are
woken, whatever their tags, so that a consumer's offset advances over messages that its filter rejects
(docs/reference/storage.md, Long polling).

The pulls of a queue are grouped by filter, so a new message is compared with each filter only once. The
number of pulls per connection and per queue, and of filters per queue, is limited (`has_room`). A pull beyond
a limit can be put aside: then only its deadline wakes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from cometmq.store import tag_matches

# Deadlines are rounded up to a multiple of DEADLINE_GRAIN_MS, so a response may be late by this time. The
# responses of Apache's broker may be 5 s late.
DEADLINE_GRAIN_MS = 50
# The interval, in ms, at which pulls whose queue has grown are woken, whatever their tags.
RECHECK_MS = 5_000
# The maximum time, in ms, for which a pull is parked, even if the client requests more.
MAX_HOLD_MS = 300_000
# The maximum number of different filters on one queue. Each new message is compared with all of them, which
# takes 25 µs for 256.
MAX_FILTERS = 256

Key = tuple[str, int]  # Topic and queue id of the queue on which a pull is parked
Codes = frozenset[int] | None
K = TypeVar("K")
V = TypeVar("V")


class Parked(Protocol):
    """A parked request of a connection (`owner`). `bucket` is the table's entry for its deadline."""

    @property
    def owner(self) -> object: ...

    bucket: int


P = TypeVar("P", bound=Parked)


class ParkedTable(Generic[P]):
    """Parked requests, by deadline and by connection."""

    def __init__(self, max_hold_ms: int) -> None:
        """Create an empty table. No request is parked for more than `max_hold_ms`."""
        self._max_hold_ms = max_hold_ms
        self._buckets: dict[int, dict[P, None]] = {}
        self._owners: dict[object, dict[P, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _enter(self, parked: P, now_ms: int, hold_ms: int) -> int:
        """Add a request. Return the time in ms at which `expire` must be called for it."""
        bucket = (now_ms + min(max(hold_ms, 0), self._max_hold_ms)) // DEADLINE_GRAIN_MS + 1
        parked.bucket = bucket
        self._buckets.setdefault(bucket, {})[parked] = None
        self._owners.setdefault(parked.owner, {})[parked] = None
        self._count += 1
        return bucket * DEADLINE_GRAIN_MS

    def _unpark(self, found: list[P]) -> list[P]:
        """Remove the given requests from the tables, and return them."""
        self._count -= len(found)
        buckets, owners = self._buckets, self._owners
        for parked in found:
            due, of_owner = buckets[parked.bucket], owners[parked.owner]
            del due[parked], of_owner[parked]
            if not due:
                del buckets[parked.bucket]
            if not of_owner:
                del owners[parked.owner]
        return found

    def expire(self, now_ms: int) -> list[P]:
        """Remove and return the requests whose deadline has passed."""
        grain = now_ms // DEADLINE_GRAIN_MS
        over = sorted(bucket for bucket in self._buckets if bucket <= grain)
        return self._unpark([parked for bucket in over for parked in self._buckets[bucket]])

    def next_deadline(self) -> int | None:
        """Return the time in ms at which `expire` must be called next, or None if nothing is parked."""
        return min(self._buckets) * DEADLINE_GRAIN_MS if self._buckets else None

    def drop(self, owner: object) -> None:
        """Remove the requests of a closed connection (`owner`)."""
        self._unpark(list(self._owners.get(owner, ())))

    def wake_all(self) -> list[P]:
        """Remove and return all parked requests, because the broker is stopping."""
        return self._unpark([parked for bucket in self._buckets.values() for parked in bucket])


@dataclass(slots=True, eq=False)
class ParkedPull:
    """One parked pull. `request` is the data that the pull processor needs to serve it.

    The number of parked pulls of a connection (`owner`) is limited, and this pull counts as `weight` pulls.
    The weight is greater than 1 if the pull contains a long subscription.
    """

    owner: object
    request: Any
    pull_from: int
    codes: Codes
    weight: int = 1
    # The pull's position in the tables, by which the pull can be removed from them.
    bucket: int = 0
    key: Key = ("", 0)
    on_queue: OnQueue | None = None


class OnQueue:
    """The pulls that are parked on one queue, grouped by filter."""

    __slots__ = ("count", "filters")

    def __init__(self) -> None:
        self.filters: dict[Codes, dict[ParkedPull, None]] = {}
        self.count = 0


class LongPoll(ParkedTable[ParkedPull]):
    """All parked pulls of a broker."""

    def __init__(self) -> None:
        super().__init__(MAX_HOLD_MS)
        # The store reports new messages only of these queues: those with parked pulls, and those passed to
        # `watch`. Other modules must not change this table.
        self.queues: dict[Key, OnQueue] = {}
        self._watched: Counter[Key] = Counter()  # The number of parts of the broker that watch each queue
        self._weights: dict[object, int] = {}  # The total weight of the parked pulls of each connection

    def watch(self, topic: str, queue_id: int) -> None:
        """Keep a queue in `queues` even if no pull is parked on it, so that its new messages are reported."""
        self._watched[topic, queue_id] += 1
        self.queues.setdefault((topic, queue_id), OnQueue())

    def unwatch(self, topic: str, queue_id: int) -> None:
        """End the effect of one `watch`."""
        key = topic, queue_id
        self._watched[key] -= 1
        if self._watched[key] > 0:
            return
        del self._watched[key]
        here = self.queues.get(key)
        if here is not None and not here.count:
            del self.queues[key]

    def has_room(self, topic: str, queue_id: int, pull: ParkedPull, max_of_owner: int, max_here: int) -> bool:
        """Return whether `pull` can be parked on a queue without exceeding a limit."""
        if pull.weight + self._weights.get(pull.owner, 0) > max_of_owner:
            return False
        here = self.queues.get((topic, queue_id))
        if here is None:
            return max_here > 0
        return here.count < max_here and (len(here.filters) < MAX_FILTERS or pull.codes in here.filters)

    def park(self, topic: str, queue_id: int, pull: ParkedPull, now_ms: int, hold_ms: int) -> int:
        """Park `pull` for `hold_ms`. Return the time in ms at which `expire` must be called for it."""
        key = pull.key = (topic, queue_id)
        here = self.queues.get(key)
        if here is None:
            here = self.queues[key] = OnQueue()
        pull.on_queue = here
        here.count += 1
        here.filters.setdefault(pull.codes, {})[pull] = None
        return self.put_aside(pull, now_ms, hold_ms)

    def put_aside(self, pull: ParkedPull, now_ms: int, hold_ms: int) -> int:
        """Park `pull` so that only its deadline wakes it. Return the time in ms at which to call `expire`."""
        self._weights[pull.owner] = self._weights.get(pull.owner, 0) + pull.weight
        return self._enter(pull, now_ms, hold_ms)

    def arrived(self, topic: str, queue_id: int, next_offset: int, tags_code: int) -> list[ParkedPull]:
        """Remove and return the pulls that a new message with this tag hash wakes."""
        here = self.queues.get((topic, queue_id))
        if here is None:
            return []
        woken: list[ParkedPull] = []
        for codes, pulls in here.filters.items():
            if codes is not None and tags_code not in codes and not tag_matches(codes, tags_code):
                continue
            woken += [pull for pull in pulls if next_offset > pull.pull_from]
        return self._unpark(woken)

    def recheck(self, max_offset: Callable[[str, int], int]) -> list[ParkedPull]:
        """Remove and return all pulls whose queue has newer messages, whatever their tags."""
        woken: list[ParkedPull] = []
        for (topic, queue_id), here in self.queues.items():
            newest = max_offset(topic, queue_id)
            for pulls in here.filters.values():
                woken += [pull for pull in pulls if newest > pull.pull_from]
        return self._unpark(woken)

    def wake_topic(self, topic: str) -> list[ParkedPull]:
        """Remove and return all pulls that are parked on a topic's queues, for instance a deleted topic's."""
        here = [on_queue for key, on_queue in self.queues.items() if key[0] == topic]
        return self._unpark([pull for each in here for pulls in each.filters.values() for pull in pulls])

    def _unpark(self, found: list[ParkedPull]) -> list[ParkedPull]:
        weights = self._weights
        for pull in found:
            here, owner = pull.on_queue, pull.owner
            if here is not None:
                remove(here.filters, pull.codes, pull)
                here.count -= 1
                if not here.count and pull.key not in self._watched:
                    del self.queues[pull.key]
            left = weights[owner] = weights[owner] - pull.weight
            if not left:
                del weights[owner]
        return super()._unpark(found)


def remove(table: dict[K, dict[V, None]], key: K, value: V) -> None:
    """Remove a value from the set that `table` has under `key`, and the key if the set becomes empty."""
    values = table[key]
    del values[value]
    if not values:
        del table[key]

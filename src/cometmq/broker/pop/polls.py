"""The table of parked pops, which wait for messages. This module uses no sockets and no clock.

A pop that found nothing is parked under its group, topic and queue id (-1 for all queues). A new message in
the topic, or in the group's retry topic, wakes the pop of each group that has waited longest. After a pop has
been served, and if there is more to read, its caller wakes the next one. So no more pops wake than needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from cometmq.broker.pull.checks import Wanted
from cometmq.store import Arrivals, tag_matches

MAX_PER_KEY = 1_024
"""The maximum number of pops that are parked under one group, topic and queue id."""
MAX_PARKED = 100_000
"""The maximum number of parked pops of a broker."""
DEADLINE_GRAIN_MS = 50
"""Deadlines are rounded up to a multiple of this time, so a response may be late by it."""
MAX_HOLD_MS = 60_000
"""The maximum time, in ms, for which a pop is parked."""
TAGS_PER_POP = 16
"""A pop counts as one more pop towards MAX_PARKED for each TAGS_PER_POP tags of its filter."""
K = TypeVar("K")
_MAX_FILTERS_TRIED = 4  # Number of parked pops of one group whose filters are compared with a new message


class PollKey(NamedTuple):
    """What a parked pop waits for: messages for a group in a topic's queue, or in any queue (-1)."""

    group: str
    topic: str
    queue_id: int


class ParkedPop:
    """One parked pop. `request` is what the pop processor needs to serve it."""

    __slots__ = ("bucket", "key", "opaque", "owner", "request", "topics", "wanted", "weight")

    def __init__(
        self,
        owner: object,
        opaque: int,
        key: PollKey,
        topics: tuple[str, ...],
        wanted: Wanted,
        request: Any,
    ) -> None:
        self.owner = owner
        self.opaque = opaque
        """The number of the request, by which the owner can withdraw the pop."""
        self.key = key
        self.topics = topics
        """The topics whose messages wake the pop: the topic itself and the group's retry topics."""
        self.wanted = wanted
        self.request = request
        self.bucket = 0
        self.weight = 1 + (len(wanted) // TAGS_PER_POP if isinstance(wanted, frozenset) else 0)
        """The number of pops as which this one counts towards MAX_PARKED."""


class Polls:
    """All parked pops of a broker."""

    def __init__(self, watch: Callable[[str, str], None]) -> None:
        """Create an empty table.

        `watch` is called with each topic whose messages must be reported, and with the topic of the pop. The
        two differ if the first one is a retry topic.
        """
        self._watch = watch
        self._keys: dict[PollKey, dict[ParkedPop, None]] = {}
        self._by_topic: dict[str, dict[PollKey, None]] = {}
        self._buckets: dict[int, dict[ParkedPop, None]] = {}
        self._owners: dict[object, dict[ParkedPop, None]] = {}
        self._numbered: dict[tuple[object, int], ParkedPop] = {}  # By owner and number of the request
        self._count = self._weight = 0

    def __len__(self) -> int:
        return self._count

    def count(self, key: PollKey) -> int:
        """Return the number of pops that are parked under a key."""
        return len(self._keys.get(key, ()))

    def waits_for(self, topic: str) -> bool:
        """Return whether any parked pop waits for messages of a topic."""
        return topic in self._by_topic

    def has_room(self, key: PollKey) -> bool:
        """Return whether one more pop can be parked under a key."""
        return self._weight < MAX_PARKED and self.count(key) < MAX_PER_KEY

    def park(self, pop: ParkedPop, now_ms: int, hold_ms: int) -> int:
        """Park a pop for `hold_ms`. Return the time in ms at which `expire` must be called for it."""
        bucket = (now_ms + min(max(hold_ms, 0), MAX_HOLD_MS)) // DEADLINE_GRAIN_MS + 1
        pop.bucket = bucket
        for topic in pop.topics:
            self._by_topic.setdefault(topic, {})[pop.key] = None
            self._watch(topic, pop.key.topic)
        self._keys.setdefault(pop.key, {})[pop] = None
        self._buckets.setdefault(bucket, {})[pop] = None
        self._owners.setdefault(pop.owner, {})[pop] = None
        self._numbered[pop.owner, pop.opaque] = pop
        self._count += 1
        self._weight += pop.weight
        return bucket * DEADLINE_GRAIN_MS

    def arrived(self, arrivals: Arrivals) -> list[ParkedPop]:
        """Remove and return the pops that new messages wake: at most one of each key."""
        woken: dict[PollKey, ParkedPop] = {}
        for topic, queue_id, _, tags_code, _ in arrivals:
            for key in self._by_topic.get(topic, ()):
                if key in woken or (key.queue_id not in (-1, queue_id) and topic == key.topic):
                    continue
                for tried, pop in enumerate(self._keys[key]):
                    wanted = pop.wanted
                    if not isinstance(wanted, frozenset) or tag_matches(wanted, tags_code):
                        woken[key] = pop
                        break
                    if tried == _MAX_FILTERS_TRIED:
                        break
        return self._unpark(woken.values())

    def wake_group(self, group: str, topic: str, queue_id: int) -> list[ParkedPop]:
        """Remove and return one pop of each key of a group that waits for a queue or, with -1, for any."""
        found = []
        for each in dict.fromkeys((-1, queue_id)):
            parked = self._keys.get(PollKey(group, topic, each))
            if parked:
                found.append(next(iter(parked)))
        return self._unpark(found)

    def wake_topic(self, topic: str) -> list[ParkedPop]:
        """Remove and return all pops that wait for a topic, for instance a deleted one."""
        return self._unpark([pop for key in self._by_topic.get(topic, ()) for pop in self._keys[key]])

    def expire(self, now_ms: int) -> list[ParkedPop]:
        """Remove and return the pops whose deadline has passed."""
        grain = now_ms // DEADLINE_GRAIN_MS
        return self._unpark(
            [pop for bucket in sorted(self._buckets) if bucket <= grain for pop in self._buckets[bucket]]
        )

    def next_deadline(self) -> int | None:
        """Return the time in ms at which `expire` must be called next, or None if no pop is parked."""
        return min(self._buckets) * DEADLINE_GRAIN_MS if self._buckets else None

    def drop(self, owner: object) -> None:
        """Remove the pops of a closed connection (`owner`)."""
        self._unpark(list(self._owners.get(owner, ())))

    def withdraw(self, owner: object, opaque: int) -> list[ParkedPop]:
        """Remove and return the pop with this owner and request number, if there is one."""
        pop = self._numbered.get((owner, opaque))
        return self._unpark([] if pop is None else [pop])

    def wake_all(self) -> list[ParkedPop]:
        """Remove and return all parked pops, because the broker is stopping."""
        return self._unpark([pop for parked in self._keys.values() for pop in parked])

    def _unpark(self, pops: Iterable[ParkedPop]) -> list[ParkedPop]:
        """Remove the given pops from the tables, and return them."""
        found = list(pops)
        for pop in found:
            self._count -= 1
            self._weight -= pop.weight
            key = pop.key
            _remove(self._buckets, pop.bucket, pop)
            _remove(self._owners, pop.owner, pop)
            _remove(self._keys, key, pop)
            if self._numbered.get((pop.owner, pop.opaque)) is pop:
                del self._numbered[pop.owner, pop.opaque]
            if key in self._keys:
                continue
            for topic in pop.topics:
                keys = self._by_topic[topic]
                del keys[key]
                if not keys:
                    del self._by_topic[topic]
        return found


def _remove(table: dict[K, dict[ParkedPop, None]], name: K, pop: ParkedPop) -> None:
    del table[name][pop]
    if not table[name]:
        del table[name]

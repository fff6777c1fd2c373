"""Held pulls: who waits for which queue, since when and until when. No sockets and no clock in here.

A pull that found nothing new is parked under (topic, queue id). An arrival wakes those whose filter takes the
new message; a deadline wakes the rest. Every 5 s each queue is compared with what it holds, without looking
at tags, so that an offset advances over messages that a filter refuses (storage.md 6.6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cometmq.store.reading import tag_matches

# Deadlines are grouped by this grain: an answer may come so much late, where Apache's comes up to 5 s late.
DEADLINE_GRAIN_MS = 50
# The recheck that does not know the tag.
RECHECK_MS = 5_000
# A client may not park a pull longer than this, whatever it asks for.
MAX_HOLD_MS = 300_000


K = TypeVar("K")


class HeldPull:
    """One parked request. `request` is whatever the pull processor needs to run it again."""

    __slots__ = ("bucket", "codes", "key", "matches", "owner", "pull_from", "request", "woken")

    def __init__(
        self,
        owner: object,
        request: Any,
        pull_from: int,
        codes: frozenset[int] | None,
        matches: Callable[[int, bytes], bool] | None = None,
    ) -> None:
        self.owner = owner
        self.request = request
        self.pull_from = pull_from
        self.codes = codes
        self.matches = matches
        self.bucket = 0
        self.key: tuple[str, int] = ("", 0)
        self.woken = False


class LongPoll:
    """The parked pulls of a broker."""

    def __init__(self) -> None:
        # Read only, for others: every queue that somebody waits for, and those that are watched for good.
        self.queues: dict[tuple[str, int], dict[HeldPull, None]] = {}
        self._watched: set[tuple[str, int]] = set()
        self._buckets: dict[int, dict[HeldPull, None]] = {}
        self._owners: dict[object, dict[HeldPull, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def watch(self, topic: str, queue_id: int) -> None:
        """Keep a queue among `queues`, whether pulls wait for it or not."""
        self._watched.add((topic, queue_id))
        self.queues.setdefault((topic, queue_id), {})

    def park(self, topic: str, queue_id: int, pull: HeldPull, now_ms: int, hold_ms: int) -> int:
        """Hold `pull` for `hold_ms`; returns the time (ms) at which `expire` must run for it."""
        key = (topic, queue_id)
        bucket = (now_ms + min(max(hold_ms, 0), MAX_HOLD_MS)) // DEADLINE_GRAIN_MS + 1
        pull.key = key
        pull.bucket = bucket
        add(self.queues, key, pull)
        add(self._buckets, bucket, pull)
        add(self._owners, pull.owner, pull)
        self._count += 1
        return bucket * DEADLINE_GRAIN_MS

    def arrived(
        self, topic: str, queue_id: int, next_offset: int, tags_code: int, properties: bytes = b""
    ) -> list[HeldPull]:
        """A message with this tag code has become readable; returns the pulls it wakes, removed from the
        tables.
        """
        pulls = self.queues.get((topic, queue_id))
        if pulls is None:
            return []
        woken = []
        for pull in pulls:
            if next_offset <= pull.pull_from:
                continue
            codes = pull.codes
            if codes is not None and tags_code not in codes and not tag_matches(codes, tags_code):
                continue
            if pull.matches is not None and not pull.matches(tags_code, properties):
                continue
            woken.append(pull)
        for pull in woken:
            self._forget(pull)
        return woken

    def recheck(self, max_offset: Callable[[str, int], int]) -> list[HeldPull]:
        """Wake every pull whose queue has something newer, whatever its tag."""
        woken = []
        for (topic, queue_id), pulls in self.queues.items():
            newest = max_offset(topic, queue_id)
            woken += [pull for pull in pulls if newest > pull.pull_from]
        for pull in woken:
            self._forget(pull)
        return woken

    def expire(self, now_ms: int) -> list[HeldPull]:
        """Wake the pulls whose time is over."""
        grain = now_ms // DEADLINE_GRAIN_MS
        over = [
            pull
            for bucket in sorted(b for b in self._buckets if b <= grain)
            for pull in self._buckets[bucket]
        ]
        for pull in over:
            self._forget(pull)
        return over

    def next_deadline(self) -> int | None:
        """When `expire` has something to do (ms), None if nothing is parked."""
        return min(self._buckets) * DEADLINE_GRAIN_MS if self._buckets else None

    def drop(self, owner: object) -> None:
        """The connection of these pulls is gone."""
        for pull in list(self._owners.get(owner, ())):
            self._forget(pull)

    def take_queue(self, topic: str) -> list[HeldPull]:
        """Wake everything parked on a topic (it is deleted, for instance)."""
        woken = [pull for key, pulls in self.queues.items() if key[0] == topic for pull in pulls]
        for pull in woken:
            self._forget(pull)
        return woken

    def take_all(self) -> list[HeldPull]:
        """Wake everything: the broker stops."""
        woken = [pull for pulls in self.queues.values() for pull in pulls]
        for pull in woken:
            self._forget(pull)
        return woken

    def _forget(self, pull: HeldPull) -> None:
        pull.woken = True
        self._count -= 1
        remove(self.queues, pull.key, pull)
        if pull.key in self._watched:
            self.queues.setdefault(pull.key, {})
        remove(self._buckets, pull.bucket, pull)
        remove(self._owners, pull.owner, pull)


def add(table: dict[K, dict[HeldPull, None]], key: K, pull: HeldPull) -> None:
    """Put a pull under a key of one of the tables."""
    pulls = table.get(key)
    if pulls is None:
        table[key] = {pull: None}
    else:
        pulls[pull] = None


def remove(table: dict[K, dict[HeldPull, None]], key: K, pull: HeldPull) -> None:
    """Take it out again; a key without pulls goes too."""
    pulls = table[key]
    del pulls[pull]
    if not pulls:
        del table[key]

"""The counters of a broker, and the rates in GET_BROKER_RUNTIME_INFO and GET_CONSUME_STATS.

Callers pass monotonic times (`mono_ms`) for rates, and wall-clock times (`now_ms`) for days.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

# The periods, in seconds, over which rates are reported.
SPANS_S = (10, 60, 600)
DAY_MS = 86_400_000
MAX_GROUP_TOTALS = 100_000
"""The maximum number of counters in `group_totals`. Beyond this number, all of them restart at 0."""


K = TypeVar("K")
SPAN_MS = 10_000
# For each level (last minute, hour, day): the length of an interval in ms, and the number of intervals that
# are added up.
LEVELS = ((SPAN_MS, 6), (600_000, 6), (3_600_000, 24))


class Counted(NamedTuple):
    """A number of events, and the length in ms of the period in which they occurred."""

    sum: int
    elapsed_ms: int

    @property
    def per_second(self) -> float:
        return self.sum * 1000 / self.elapsed_ms if self.elapsed_ms > 0 else 0.0


class SpanCounts(Generic[K]):
    """The number of events of the last minute, hour and day, for each key that had events in the last day."""

    def __init__(self, mono_ms: int) -> None:
        # For each entry of LEVELS, its intervals. Each interval has a start time and the number of events per
        # key. The last interval is the current one.
        self._levels: list[deque[tuple[int, dict[K, int]]]] = [
            deque([(mono_ms, {})], maxlen=count + 1) for _, count in LEVELS
        ]

    def add(self, counts: Mapping[K, int], mono_ms: int) -> None:
        """Add to each key's count the number of its events since the last call, which was about 10 s ago."""
        for spans, (length_ms, _) in zip(self._levels, LEVELS, strict=True):
            began_ms, present = spans[-1]
            for key, count in counts.items():
                present[key] = present.get(key, 0) + count
            if mono_ms - began_ms >= length_ms:
                spans.append((mono_ms, {}))

    def of(self, key: K, mono_ms: int, since: int = 0) -> list[Counted]:
        """Return a key's events of the last minute, hour and day. `since` counts those after `add`."""
        return [
            Counted(since + sum(counts.get(key, 0) for _, counts in spans), mono_ms - spans[0][0])
            for spans in self._levels
        ]

    def __len__(self) -> int:
        return len({key for spans in self._levels for _, counts in spans for key in counts})


class Totals(msgspec.Struct, frozen=True):
    """The counters at the time `at_ms`. `transferred` is the number of messages sent to consumers."""

    at_ms: int
    put: int = 0
    get: int = 0
    found: int = 0
    miss: int = 0
    transferred: int = 0


class Stats:
    """The broker's counters. The hot path increments them directly; `sample` is called once per second."""

    def __init__(self, now_ms: int, mono_ms: int) -> None:
        self.boot_ms = now_ms
        self.boot_mono_ms = mono_ms
        self.boot_log_end = 0  # End offset of the commit log at the broker's start
        self.put = 0
        self.put_failed = 0
        self.get = 0
        self.found = 0
        self.miss = 0
        self.transferred = 0
        # The number of messages sent to consumers in the current interval, by group and topic
        self.group_get: dict[tuple[str, str], int] = {}
        self._interval_began_ms = mono_ms
        self._samples: deque[Totals] = deque([Totals(mono_ms)], maxlen=max(SPANS_S) + 1)
        self.group_counts: SpanCounts[tuple[str, str]] = SpanCounts(mono_ms)
        self.topic_counts: SpanCounts[str] = SpanCounts(mono_ms)
        self.broker_counts: SpanCounts[str] = SpanCounts(mono_ms)
        self._counted = {"put": 0, "transferred": 0}  # Counter values at the last update of `broker_counts`
        self.group_totals: dict[tuple[str, str], int] = {}  # Messages sent before the current interval
        self._topic_totals: Mapping[str, int] | None = None
        self._day = now_ms // DAY_MS
        self.put_this_morning = self.put_yesterday_morning = 0
        self.get_this_morning = self.get_yesterday_morning = 0

    def sample(self, now_ms: int, mono_ms: int) -> None:
        """Save the current counters for the calculation of rates.

        After SPAN_MS, begin a new interval. On the first call of a day (UTC), save the counters from
        which the numbers of messages of today and yesterday are calculated.
        """
        self._samples.append(Totals(mono_ms, self.put, self.get, self.found, self.miss, self.transferred))
        if mono_ms - self._interval_began_ms >= SPAN_MS:
            self._interval_began_ms = mono_ms
            self.group_counts.add(self.group_get, mono_ms)
            self.broker_counts.add({name: self._since(name) for name in self._counted}, mono_ms)
            self._counted = {name: getattr(self, name) for name in self._counted}
            if len(self.group_totals) > MAX_GROUP_TOTALS:
                self.group_totals.clear()
            for key, count in self.group_get.items():
                self.group_totals[key] = self.group_totals.get(key, 0) + count
            self.group_get = {}
        day = now_ms // DAY_MS
        if day != self._day:
            self._day = day
            self.put_yesterday_morning, self.put_this_morning = self.put_this_morning, self.put
            self.get_yesterday_morning, self.get_this_morning = self.get_this_morning, self.transferred

    def rates(self, name: str) -> str:
        """Return the increase of a field of `Totals` per second, over 10 s, 1 min and 10 min, as text."""
        newest = self._samples[-1]
        return " ".join(self._rate(newest, name, span) for span in SPANS_S)

    def _rate(self, newest: Totals, name: str, span_s: int) -> str:
        since = newest.at_ms - span_s * 1000
        oldest = next((sample for sample in self._samples if sample.at_ms >= since), newest)
        elapsed_ms = newest.at_ms - oldest.at_ms
        if elapsed_ms <= 0:
            return "0.0"
        return str((getattr(newest, name) - getattr(oldest, name)) * 1000 / elapsed_ms)

    def group_rate(self, group: str, topic: str, mono_ms: int) -> float:
        """Return the messages per second that a group received from a topic in the last minute."""
        return self.group_got(group, topic, mono_ms)[0].per_second

    def group_total(self, group: str, topic: str) -> int:
        """Return the number of messages that a group has received from a topic since the start."""
        key = (group, topic)
        return self.group_totals.get(key, 0) + self.group_get.get(key, 0)

    def count_topics(self, totals: Mapping[str, int], mono_ms: int) -> None:
        """Count each topic's messages since the previous call, about 10 s ago. The first call counts none."""
        before = self._topic_totals
        if before is not None:
            new = {topic: total - before.get(topic, 0) for topic, total in totals.items()}
            self.topic_counts.add({topic: count for topic, count in new.items() if count > 0}, mono_ms)
        self._topic_totals = totals

    def topic_put(self, topic: str, total: int, mono_ms: int) -> list[Counted]:
        """Return a topic's messages stored in the last minute, hour and day, given their `total` so far."""
        before = self._topic_totals
        since = max(total - before.get(topic, 0), 0) if before is not None else 0
        return self.topic_counts.of(topic, mono_ms, since)

    def _since(self, name: str) -> int:
        """Return by how much a counter has increased since the last update of `broker_counts`."""
        return int(getattr(self, name)) - self._counted[name]

    def of_broker(self, name: str, mono_ms: int) -> list[Counted]:
        """Return the messages stored ("put") or consumed ("transferred") in the last minute, hour and day."""
        return self.broker_counts.of(name, mono_ms, self._since(name))

    def group_got(self, group: str, topic: str, mono_ms: int) -> list[Counted]:
        """Return how many messages a group received from a topic in the last minute, hour and day."""
        return self.group_counts.of((group, topic), mono_ms, self.group_get.get((group, topic), 0))


class Rate(msgspec.Struct):
    """A byte rate for status output: the number of bytes in the previous second. Times are in seconds."""

    _second: int = 0
    _bytes: int = 0
    _before: int = 0

    def add(self, now: float, size: int) -> None:
        """Count `size` bytes that were transferred at the time `now`."""
        self._begin(int(now))
        self._bytes += size

    def bytes_a_second(self, now: float) -> int:
        """Return the number of bytes transferred in the second before the current one."""
        self._begin(int(now))
        return self._before

    def _begin(self, second: int) -> None:
        if second != self._second:
            self._before = self._bytes if second == self._second + 1 else 0
            self._second, self._bytes = second, 0

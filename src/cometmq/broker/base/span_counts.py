"""Counts of the last minute, hour and day, by key. Callers pass the time as `mono_ms`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
SPAN_MS = 10_000
# The length of a span and the number of spans summed: a minute, an hour, a day.
LEVELS = ((SPAN_MS, 6), (600_000, 6), (3_600_000, 24))


class Counted(NamedTuple):
    """A count and its period in ms."""

    sum: int
    elapsed_ms: int

    @property
    def per_second(self) -> float:
        return self.sum * 1000 / self.elapsed_ms if self.elapsed_ms > 0 else 0.0


class SpanCounts(Generic[K]):
    """The counts of keys that were counted within the last day."""

    def __init__(self, mono_ms: int) -> None:
        # For each level the start times of its spans with their counts; the current span is the last one.
        self._levels: list[deque[tuple[int, dict[K, int]]]] = [
            deque([(mono_ms, {})], maxlen=count + 1) for _, count in LEVELS
        ]

    def add(self, counts: Mapping[K, int], mono_ms: int) -> None:
        """Add the counts of the last 10 s."""
        for spans, (length_ms, _) in zip(self._levels, LEVELS, strict=True):
            began_ms, present = spans[-1]
            for key, count in counts.items():
                present[key] = present.get(key, 0) + count
            if mono_ms - began_ms >= length_ms:
                spans.append((mono_ms, {}))

    def of(self, key: K, mono_ms: int, since: int = 0) -> list[Counted]:
        """Return a key's counts of the last minute, hour and day, plus those `since` the last `add`."""
        return [
            Counted(since + sum(counts.get(key, 0) for _, counts in spans), mono_ms - spans[0][0])
            for spans in self._levels
        ]

    def __len__(self) -> int:
        """Return the number of keys."""
        return len({key for spans in self._levels for _, counts in spans for key in counts})

"""Counts of the last minute, hour and day, by key. No clock in here: times are `mono_ms`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
SPAN_MS = 10_000
# Length of a span, and how many are summed: a minute, an hour, a day.
LEVELS = ((SPAN_MS, 6), (600_000, 6), (3_600_000, 24))


class Counted(NamedTuple):
    """What was counted, and in how many ms."""

    sum: int
    elapsed_ms: int

    @property
    def per_second(self) -> float:
        return self.sum * 1000 / self.elapsed_ms if self.elapsed_ms > 0 else 0.0


class SpanCounts(Generic[K]):
    """Keeps keys that were counted in the last day, and no others."""

    def __init__(self, mono_ms: int) -> None:
        # Of each level the beginnings of its spans with their counts, the present one at the end.
        self._levels: list[deque[tuple[int, dict[K, int]]]] = [
            deque([(mono_ms, {})], maxlen=count + 1) for _, count in LEVELS
        ]

    def add(self, counts: Mapping[K, int], mono_ms: int) -> None:
        """What was counted in the 10 s until now."""
        for spans, (length_ms, _) in zip(self._levels, LEVELS, strict=True):
            began_ms, present = spans[-1]
            for key, count in counts.items():
                present[key] = present.get(key, 0) + count
            if mono_ms - began_ms >= length_ms:
                spans.append((mono_ms, {}))

    def of(self, key: K, mono_ms: int, since: int = 0) -> list[Counted]:
        """A key's counts of the last minute, hour and day, with those `since` the last `add`."""
        return [
            Counted(since + sum(counts.get(key, 0) for _, counts in spans), mono_ms - spans[0][0])
            for spans in self._levels
        ]

    def __len__(self) -> int:
        """How many keys are kept."""
        return len({key for spans in self._levels for _, counts in spans for key in counts})

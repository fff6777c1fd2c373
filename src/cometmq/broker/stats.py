"""Counters of a broker and the rates that GET_BROKER_RUNTIME_INFO and GET_CONSUME_STATS show. No clock in
here.
"""

from __future__ import annotations

from collections import deque

import msgspec

# Rates are shown over these spans.
SPANS_S = (10, 60, 600)
DAY_MS = 86_400_000


class Totals(msgspec.Struct, frozen=True):
    """The counters at one moment. `transferred` is messages handed to consumers."""

    at_ms: int
    put: int = 0
    get: int = 0
    found: int = 0
    miss: int = 0
    transferred: int = 0


class Stats:
    """Plain counters, incremented by the hot path; `sample` is called once a second."""

    def __init__(self, now_ms: int) -> None:
        self.boot_ms = now_ms
        self.put = 0
        self.put_bytes = 0
        self.put_failed = 0
        self.get = 0
        self.found = 0
        self.miss = 0
        self.transferred = 0
        self.transferred_bytes = 0
        # (group, topic) -> messages handed out
        self.group_get: dict[tuple[str, str], int] = {}
        self._samples: deque[Totals] = deque([Totals(now_ms)], maxlen=max(SPANS_S) + 1)
        self._group_samples: deque[tuple[int, dict[tuple[str, str], int]]] = deque([(now_ms, {})], maxlen=7)
        self._day = now_ms // DAY_MS
        self.put_this_morning = self.put_yesterday_morning = 0
        self.get_this_morning = self.get_yesterday_morning = 0

    def sample(self, now_ms: int) -> None:
        """Keep the counters of this second."""
        self._samples.append(Totals(now_ms, self.put, self.get, self.found, self.miss, self.transferred))
        if now_ms - self._group_samples[-1][0] >= 10_000:
            self._group_samples.append((now_ms, dict(self.group_get)))
        day = now_ms // DAY_MS
        if day != self._day:
            self._day = day
            self.put_yesterday_morning, self.put_this_morning = self.put_this_morning, self.put
            self.get_yesterday_morning, self.get_this_morning = self.get_this_morning, self.transferred

    def rates(self, name: str) -> str:
        """Events per second of a `Totals` field over 10 s, 1 min and 10 min, as Apache's tools expect: three
        numbers
        with a blank between them."""
        newest = self._samples[-1]
        return " ".join(self._rate(newest, name, span) for span in SPANS_S)

    def _rate(self, newest: Totals, name: str, span_s: int) -> str:
        since = newest.at_ms - span_s * 1000
        oldest = next((sample for sample in self._samples if sample.at_ms >= since), newest)
        elapsed_ms = newest.at_ms - oldest.at_ms
        if elapsed_ms <= 0:
            return "0.0"
        return str((getattr(newest, name) - getattr(oldest, name)) * 1000 / elapsed_ms)

    def group_rate(self, group: str, topic: str, now_ms: int) -> float:
        """Messages per second that a group took of a topic over the last minute."""
        at_ms, counts = self._group_samples[0]
        elapsed_ms = now_ms - at_ms
        taken = self.group_get.get((group, topic), 0) - counts.get((group, topic), 0)
        return taken * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0

"""Counters of a broker and the rates that GET_BROKER_RUNTIME_INFO and GET_CONSUME_STATS show. No clock in
here. Rates go by a clock that is never set (`mono_ms`), days by the wall clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from cometmq.broker.base.span_counts import Counted, SpanCounts

# Rates are shown over these spans.
SPANS_S = (10, 60, 600)
DAY_MS = 86_400_000
GROUP_SPAN_MS = 10_000  # what groups took is counted anew so often
GROUP_SPANS = 7
GROUP_TOTALS_MAX = 100_000
"""Groups with topics whose totals are kept; beyond, all begin anew, as after a start."""


class Totals(msgspec.Struct, frozen=True):
    """The counters at one moment of `mono_ms`. `transferred` is messages handed to consumers."""

    at_ms: int
    put: int = 0
    get: int = 0
    found: int = 0
    miss: int = 0
    transferred: int = 0


class Stats:
    """Plain counters, incremented by the hot path; `sample` is called once a second."""

    def __init__(self, now_ms: int, mono_ms: int) -> None:
        self.boot_ms = now_ms
        self.boot_mono_ms = mono_ms
        self.boot_log_end = 0  # where the log ended when this broker opened it
        self.put = 0
        self.put_failed = 0
        self.get = 0
        self.found = 0
        self.miss = 0
        self.transferred = 0
        # (group, topic) -> messages handed out in the present span. Groups that take nothing are gone after a
        # minute.
        self.group_get: dict[tuple[str, str], int] = {}
        self._samples: deque[Totals] = deque([Totals(mono_ms)], maxlen=max(SPANS_S) + 1)
        # The last spans with their beginnings, the present one at the end.
        self.group_spans = deque([(mono_ms, self.group_get)], maxlen=GROUP_SPANS)
        self.group_counts: SpanCounts[tuple[str, str]] = SpanCounts(mono_ms)
        self.topic_counts: SpanCounts[str] = SpanCounts(mono_ms)
        self.broker_counts: SpanCounts[str] = SpanCounts(mono_ms)
        self._counted = {"put": 0, "transferred": 0}  # in all of `broker_counts`
        self.group_totals: dict[tuple[str, str], int] = {}  # since the start, but for the present span
        self._topic_totals: Mapping[str, int] | None = None
        self._day = now_ms // DAY_MS
        self.put_this_morning = self.put_yesterday_morning = 0
        self.get_this_morning = self.get_yesterday_morning = 0

    def sample(self, now_ms: int, mono_ms: int) -> None:
        """Keep the counters of this second."""
        self._samples.append(Totals(mono_ms, self.put, self.get, self.found, self.miss, self.transferred))
        if mono_ms - self.group_spans[-1][0] >= GROUP_SPAN_MS:
            self.group_counts.add(self.group_get, mono_ms)
            self.broker_counts.add({name: self._since(name) for name in self._counted}, mono_ms)
            self._counted = {name: getattr(self, name) for name in self._counted}
            if len(self.group_totals) > GROUP_TOTALS_MAX:
                self.group_totals.clear()
            for key, count in self.group_get.items():
                self.group_totals[key] = self.group_totals.get(key, 0) + count
            self.group_get = {}
            self.group_spans.append((mono_ms, self.group_get))
        day = now_ms // DAY_MS
        if day != self._day:
            self._day = day
            self.put_yesterday_morning, self.put_this_morning = self.put_this_morning, self.put
            self.get_yesterday_morning, self.get_this_morning = self.get_this_morning, self.transferred

    def rates(self, name: str) -> str:
        """Events per second of a `Totals` field over 10 s, 1 min and 10 min, as Apache's tools expect: three
        numbers with a blank between them."""
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
        """Messages per second that a group took of a topic over the last minute."""
        elapsed_ms = mono_ms - self.group_spans[0][0]
        taken = sum(counts.get((group, topic), 0) for _, counts in self.group_spans)
        return taken * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0

    def group_total(self, group: str, topic: str) -> int:
        """Messages that a group took of a topic since the start."""
        key = (group, topic)
        return self.group_totals.get(key, 0) + self.group_get.get(key, 0)

    def count_topics(self, totals: Mapping[str, int], mono_ms: int) -> None:
        """How many messages each topic has had so far, about every 10 s; the first call only notes it."""
        before = self._topic_totals
        if before is not None:
            new = {topic: total - before.get(topic, 0) for topic, total in totals.items()}
            self.topic_counts.add({topic: count for topic, count in new.items() if count > 0}, mono_ms)
        self._topic_totals = totals

    def topic_put(self, topic: str, total: int, mono_ms: int) -> list[Counted]:
        """Messages stored in a topic in the last minute, hour and day; total: that it has had so far."""
        before = self._topic_totals
        since = max(total - before.get(topic, 0), 0) if before is not None else 0
        return self.topic_counts.of(topic, mono_ms, since)

    def _since(self, name: str) -> int:
        """Events that `broker_counts` does not have yet."""
        return int(getattr(self, name)) - self._counted[name]

    def of_broker(self, name: str, mono_ms: int) -> list[Counted]:
        """All messages stored ("put") or handed out ("transferred") in the last minute, hour and day."""
        return self.broker_counts.of(name, mono_ms, self._since(name))

    def group_got(self, group: str, topic: str, mono_ms: int) -> list[Counted]:
        """Messages that a group took of a topic in the last minute, hour and day."""
        return self.group_counts.of((group, topic), mono_ms, self.group_get.get((group, topic), 0))

"""The rates of a consumer by topic (request 307; docs/reference/client.md, Statistics of clients)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cometmq.protocol.bodies import ConsumeStatus

SAMPLE_S = 10.0
_OF_A_MINUTE = 6
_OF_AN_HOUR = 360


@dataclass(slots=True)
class Totals:
    """Numbers and summed durations of pulls and listener calls, and of their messages, since the start."""

    pulls: int = 0
    pull_s: float = 0.0
    pulled: int = 0
    calls: int = 0
    call_s: float = 0.0
    done: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class TopicStats:
    """The totals of a topic, and samples of these totals, taken every 10 s during the last hour."""

    totals: Totals = field(default_factory=Totals)
    _samples: deque[Totals] = field(default_factory=lambda: deque([Totals()], _OF_AN_HOUR + 1))

    def pulled(self, messages: int, took_s: float) -> None:
        """Count the messages that a pull returned."""
        totals = self.totals
        totals.pulls += 1
        totals.pull_s += took_s
        totals.pulled += messages

    def handled(self, messages: int, took_s: float, *, done: bool) -> None:
        """Count the messages of a listener call."""
        totals = self.totals
        totals.calls += 1
        totals.call_s += took_s
        if done:
            totals.done += messages
        else:
            totals.failed += messages

    def sample(self) -> None:
        """Store a sample of the totals. Called every SAMPLE_S."""
        self._samples.append(replace(self.totals))

    def status(self) -> ConsumeStatus:
        """Return rates and durations of the last minute, and failures of the last hour.

        If no listener call ended in the last minute, the duration of calls is that of the last hour.
        """
        samples = self._samples
        newest, oldest = samples[-1], samples[0]
        back = min(_OF_A_MINUTE, len(samples) - 1)
        minute, seconds = samples[-1 - back], max(back, 1) * SAMPLE_S
        since = minute if newest.calls > minute.calls else oldest
        return ConsumeStatus(
            pull_rt=_mean_ms(newest.pull_s - minute.pull_s, newest.pulls - minute.pulls),
            pull_tps=(newest.pulled - minute.pulled) / seconds,
            consume_rt=_mean_ms(newest.call_s - since.call_s, newest.calls - since.calls),
            consume_ok_tps=(newest.done - minute.done) / seconds,
            consume_failed_tps=(newest.failed - minute.failed) / seconds,
            consume_failed_msgs=newest.failed - oldest.failed,
        )


class Statistics:
    """The statistics of a consumer's topics."""

    def __init__(self) -> None:
        self._topics: dict[str, TopicStats] = {}

    def of(self, topic: str) -> TopicStats:
        """Return the statistics of a topic, creating them if necessary."""
        return self._topics.setdefault(topic, TopicStats())

    def sample(self) -> None:
        """Store a sample of the totals of all topics. Called every SAMPLE_S."""
        for stats in self._topics.values():
            stats.sample()

    def table(self) -> Mapping[str, ConsumeStatus]:
        """Return the pull and consume statistics of each topic."""
        return {topic: stats.status() for topic, stats in self._topics.items()}


def _mean_ms(seconds: float, times: int) -> float:
    return seconds * 1000 / times if times else 0.0

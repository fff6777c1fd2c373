"""Lags and rates of all groups and topics, from the offsets that brokers report for all their groups."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cometmq.admin.values import BrokerStatus, GroupQueueProgress

DISK_KEYS = ("commitLogDiskRatio", "consumeQueueDiskRatio")


def disk_of(broker: BrokerStatus) -> float | None:
    """Return the used share of a broker's fullest disk, or None if the broker does not report it."""
    shares = [broker.first_number(key) for key in DISK_KEYS]
    return max((share for share in shares if share is not None), default=None)


def fullest_disk(brokers: Iterable[BrokerStatus]) -> float | None:
    """Return the used share of the fullest disk among all brokers that report theirs."""
    return max((disk for each in brokers if (disk := disk_of(each)) is not None), default=None)


def put_rate(broker: BrokerStatus) -> float | None:
    """Return how many messages per second producers sent, or None if the broker does not report it."""
    return broker.first_number("putTps")


def get_rate(broker: BrokerStatus) -> float | None:
    """Return how many messages per second consumers received, or None if the broker does not report it.

    Both keys of this metric are tried, because brokers of 4.9 and of 5.x spell the key differently.
    """
    rate = broker.first_number("getTransferredTps")
    return broker.first_number("getTransferedTps") if rate is None else rate


class Rate:
    """The growth of counters, per second, between two observations."""

    def __init__(self) -> None:
        self._before: dict[Hashable, int] = {}
        self._at_s = 0.0

    def observe(self, at_s: float, counters: dict[Hashable, int]) -> dict[Hashable, float]:
        """Return the growth per second by key. A key that is observed for the first time is omitted.

        The growth of a counter that has become smaller, because it was reset, is 0.
        """
        span = at_s - self._at_s
        before, self._before, self._at_s = self._before, counters, at_s
        if not before or span <= 0:
            return {}
        return {key: max(0, count - before[key]) / span for key, count in counters.items() if key in before}


@dataclass
class Lag:
    """The lag of a group over several queues.

    `behind` counts the messages that are not consumed yet. `last_ms` is the store time of the last consumed
    message, in ms.
    """

    behind: int = 0
    queues: int = 0
    last_ms: int = 0

    def add(self, broker_offset: int, consumer_offset: int, last_ms: int) -> None:
        """Add the lag in one queue to the totals."""
        self.behind += max(0, broker_offset - consumer_offset)
        self.queues += 1
        self.last_ms = max(self.last_ms, last_ms)


@dataclass(frozen=True)
class Lags:
    """Lags and rates of all groups.

    Attributes:
        pairs: Lag by (group, topic).
        groups: Lag by group, over all topics of the group.
        group_rates: Messages per second that each group consumed since the previous value. Empty in the first
            value.
        topic_rates: Messages per second sent to each topic that has a consumer group. Empty in the first
            value.
    """

    pairs: dict[tuple[str, str], Lag]
    groups: dict[str, Lag]
    group_rates: dict[str, float]
    topic_rates: dict[str, float]

    @property
    def behind(self) -> int:
        return sum(each.behind for each in self.groups.values())


class LagRates:
    """The lags and rates of all groups, each value since the one before it."""

    def __init__(self) -> None:
        self._group_rate = Rate()
        self._topic_rate = Rate()

    async def observe(self, answers: Mapping[str, list[GroupQueueProgress]]) -> Lags:
        """Return the lags and rates. `answers` has the offsets of all groups by broker name."""
        # A large cluster has hundreds of thousands of rows, so a thread adds them up while the event loop
        # serves others.
        sums = await asyncio.to_thread(_sum_up, answers)
        now = time.time()
        return Lags(
            pairs=sums.pairs,
            groups=sums.groups,
            group_rates=_sum_by_first(self._group_rate.observe(now, sums.consumed)),
            topic_rates=_sum_by_first(self._topic_rate.observe(now, sums.stored)),
        )


@dataclass(frozen=True)
class _Sums:
    """Sums over the queues of all brokers.

    `consumed` and `stored` are counters from which rates are computed: the sums of consumer offsets and of
    broker offsets, by (name, broker, ..., number of queues). The number of queues is part of the key so that
    an added queue begins a new counter, because its offsets would look like a sudden growth.
    """

    pairs: dict[tuple[str, str], Lag]
    groups: dict[str, Lag]
    consumed: dict[Hashable, int]
    stored: dict[Hashable, int]


def _sum_up(answers: Mapping[str, list[GroupQueueProgress]]) -> _Sums:
    """Return the lags and the sums of offsets of all groups on all brokers. Called in a thread."""
    pairs: defaultdict[tuple[str, str], Lag] = defaultdict(Lag)
    groups: defaultdict[str, Lag] = defaultdict(Lag)
    consumed: dict[Hashable, int] = {}
    stored: dict[Hashable, int] = {}
    for broker, rows in answers.items():
        offsets: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        ends: defaultdict[str, dict[tuple[str, int], int]] = defaultdict(dict)
        for row in rows:
            queue = row.queue
            values = (queue.broker_offset, queue.consumer_offset, queue.last_timestamp)
            pairs[row.group, queue.topic].add(*values)
            groups[row.group].add(*values)
            offsets[row.group, queue.topic].append(queue.consumer_offset)
            ends[queue.topic][queue.broker_name, queue.queue_id] = queue.broker_offset
        consumed |= {(group, broker, topic, len(all_)): sum(all_) for (group, topic), all_ in offsets.items()}
        stored |= {(topic, broker, len(all_)): sum(all_.values()) for topic, all_ in ends.items()}
    return _Sums(dict(pairs), dict(groups), consumed, stored)


def _sum_by_first(rates: Mapping[Any, float]) -> dict[str, float]:
    """Return the sum of the rates by name. The first element of each key is the name of a group or topic."""
    sums: defaultdict[str, float] = defaultdict(float)
    for (name, *_), rate in rates.items():
        sums[name] += rate
    return dict(sums)

"""Values of the whole cluster that many pages share. Each value takes one request to each broker."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from cometmq.admin import Admin, BrokerStatus
from cometmq.admin.known_groups import group_names
from cometmq.admin.rates import LagRates, Lags, fullest_disk, get_rate, put_rate
from cometmq.admin.values import broker_places, known_sum, with_lags
from cometmq.console.base.fanout import Answers, Fanout
from cometmq.console.base.feeds import Feed, Feeds, Ring, Tops
from cometmq.protocol.bodies import ProducerInfo, SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.codes import (
    DLQ_PREFIX,
    MASTER_ID,
    RETRY_PREFIX,
    is_system_group,
    is_system_topic,
    topics_at_start,
)

T = TypeVar("T")

BROKERS_INTERVAL_S, TABLES_INTERVAL_S, LAGS_INTERVAL_S = 5.0, 15.0, 30.0
HISTORY_POINTS, HISTORY_STEP_S = 1440, 15.0
"""Each history contains HISTORY_POINTS values, one every HISTORY_STEP_S seconds: six hours in all."""
LOST_BROKER_SHOWN_S, MAX_LOST_BROKERS = 24 * 3600.0, 32
"""The limits for brokers that no name server lists any more.

LOST_BROKER_SHOWN_S is the time in seconds for which such a broker is shown, and MAX_LOST_BROKERS is the
maximum number of them.
"""
MESSAGE_TYPE = "message.type"


@dataclass(frozen=True)
class ClusterRows(Generic[T]):
    """The rows of a list, requested from all brokers of the cluster.

    Attributes:
        rows: The rows from the brokers that responded.
        missing: The error texts of the brokers that did not respond, by broker name.
    """

    rows: list[T]
    missing: dict[str, str]


@dataclass(frozen=True)
class TopicRow:
    """A topic of the whole cluster. `configs` has the topic's settings by broker name."""

    name: str
    kind: str
    configs: dict[str, TopicConfig]

    @property
    def read_queues(self) -> int:
        """Number of read queues, over all brokers."""
        return sum(each.read_queue_nums for each in self.configs.values())

    @property
    def write_queues(self) -> int:
        """Number of write queues, over all brokers."""
        return sum(each.write_queue_nums for each in self.configs.values())

    @property
    def perm(self) -> int:
        """The topic's permission bits that are set at all brokers that have the topic."""
        bits = -1
        for each in self.configs.values():
            bits &= each.perm
        return bits

    @property
    def message_type(self) -> str:
        types = {(each.attributes or {}).get(MESSAGE_TYPE, "") for each in self.configs.values()}
        return ", ".join(sorted(filter(None, types)))


@dataclass(frozen=True)
class GroupRow:
    """A consumer group of the whole cluster.

    `configs` has the group's settings by broker name. It is empty for a group that has only offsets or a
    retry topic.
    """

    name: str
    configs: dict[str, SubscriptionGroupConfig]

    @property
    def system(self) -> bool:
        return is_system_group(self.name)


@dataclass(frozen=True)
class ClusterLags(Lags):
    """Lags and rates of all groups, and the error texts of the brokers that did not respond, by name."""

    missing: dict[str, str]


@dataclass(frozen=True)
class ProducerRow:
    """A client of a producer group, and the names of the brokers to which it is connected."""

    group: str
    client: ProducerInfo
    brokers: tuple[str, ...]


def _ring() -> Ring:
    return Ring(HISTORY_POINTS, HISTORY_STEP_S)


def _tops() -> Tops:
    return Tops(HISTORY_POINTS, HISTORY_STEP_S)


@dataclass
class History:
    """The values of the last hours.

    `disk` is the used percentage of the fullest disk, `groups` has the largest lags, and `topics` has the
    highest rates in messages per second.
    """

    put: Ring = field(default_factory=_ring)
    get: Ring = field(default_factory=_ring)
    behind: Ring = field(default_factory=_ring)
    disk: Ring = field(default_factory=_ring)
    groups: Tops = field(default_factory=_tops)
    topics: Tops = field(default_factory=_tops)


@dataclass(frozen=True)
class LostBroker:
    """A broker that the name servers no longer list.

    `at_s` is the wall-clock time when it was last listed.
    """

    status: BrokerStatus
    at_s: float


def kind_of(topic: str) -> str:
    """Return the kind of a topic: `normal`, `retry`, `dead` (dead letters) or `system`."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DLQ_PREFIX):
        return "dead"
    return "system" if is_system_topic(topic) else "normal"


class ClusterFeeds:
    """Those feeds of a cluster that several pages share, and the history of some of their values."""

    def __init__(self, admin: Admin, feeds: Feeds) -> None:
        self.history = History()
        self._admin = admin
        self._feeds = feeds
        self._rates = LagRates()
        self._fanouts: dict[str, Fanout[Any]] = {}
        self._seen: dict[tuple[str, str, int], LostBroker] = {}
        self._lost: dict[tuple[str, str, int], LostBroker] = {}

    @property
    def lost(self) -> list[LostBroker]:
        """Brokers that the name servers stopped listing recently, the newest first."""
        since_s = time.time() - LOST_BROKER_SHOWN_S
        return [each for each in reversed(self._lost.values()) if each.at_s >= since_s]

    def brokers(self) -> Feed[list[BrokerStatus]]:
        """Return the feed of all brokers with their runtime metrics."""
        return self._feeds.feed("brokers", self._ask_brokers, BROKERS_INTERVAL_S)

    def topics(self) -> Feed[ClusterRows[TopicRow]]:
        """Return the feed of all topics."""
        return self._feeds.feed("topics", self._ask_topics, TABLES_INTERVAL_S)

    def groups(self) -> Feed[ClusterRows[GroupRow]]:
        """Return the feed of all consumer groups."""
        return self._feeds.feed("groups", self._ask_groups, TABLES_INTERVAL_S)

    def lags(self) -> Feed[ClusterLags]:
        """Return the feed of the lags of all groups in all topics. It is the most expensive feed."""
        return self._feeds.feed("lags", self._ask_lags, LAGS_INTERVAL_S)

    def producers(self) -> Feed[ClusterRows[ProducerRow]]:
        """Return the feed of all connected producers."""
        return self._feeds.feed("producers", self._ask_producers, TABLES_INTERVAL_S)

    # -- requests

    def _fanout(self, feed: str) -> Fanout[Any]:
        """Return the Fanout that sends the requests of a feed.

        When a request ends after the Fanout's timeout, the feed is refreshed.
        """
        return self._fanouts.setdefault(feed, Fanout(lambda: self._feeds.refresh(feed)))

    async def _ask_brokers(self) -> list[BrokerStatus]:
        places = broker_places(await self._admin.cluster_info())
        self._record_lost(places)
        addrs = {each.broker_addr: each.broker_addr for each in places}
        answers = await self._fanout("brokers").request(addrs, self._admin.runtime)
        brokers = with_lags(
            [
                each.with_runtime(answers.values[each.broker_addr])
                if each.broker_addr in answers.values
                else msgspec.structs.replace(each, problem=answers.problems[each.broker_addr])
                for each in places
            ]
        )
        masters = [each for each in brokers if each.broker_id == MASTER_ID]
        # Rates are recorded only if all masters responded: a sum without one of them would be too small.
        if masters and all(each.runtime for each in masters):
            now = time.time()
            for history, rate in (
                (self.history.put, known_sum(map(put_rate, masters))),
                (self.history.get, known_sum(map(get_rate, brokers))),
            ):
                if rate is not None:
                    history.add(now, rate)
            if (disk := fullest_disk(brokers)) is not None:
                self.history.disk.add(now, 100 * disk)
        return brokers

    def _record_lost(self, places: Iterable[BrokerStatus]) -> None:
        now = time.time()
        listed = {
            (each.cluster_name, each.broker_name, each.broker_id): LostBroker(each, now) for each in places
        }
        self._lost |= {key: lost for key, lost in self._seen.items() if key not in listed}
        self._seen = listed
        for key in listed.keys() & self._lost.keys():
            del self._lost[key]
        for key in list(self._lost)[:-MAX_LOST_BROKERS]:
            del self._lost[key]

    async def _ask_masters(self, feed: str, ask: Callable[[str], Awaitable[T]]) -> Answers[T]:
        """Return the response of each master, or of a slave if the broker has no master now.

        Raises the first error if no broker responds.
        """
        table = (await self._admin.cluster_info()).broker_addr_table
        addrs = {
            name: data.broker_addrs[min(data.broker_addrs)]
            for name, data in table.items()
            if data.broker_addrs
        }
        answers = await self._fanout(feed).request(addrs, ask)
        answers.raise_if_none()
        return answers

    async def _ask_topics(self) -> ClusterRows[TopicRow]:
        answers = await self._ask_masters("topics", self._admin.topic_configs)
        merged = _by_name((name, table.topic_config_table) for name, table in answers.values.items())
        brokers = (await self._admin.cluster_info()).broker_addr_table.items()
        own = set[str]().union(*(topics_at_start(data.cluster, name) for name, data in brokers))
        rows = [
            TopicRow(name, "system" if name in own else kind_of(name), merged[name])
            for name in sorted(merged)
        ]
        return ClusterRows(rows, answers.problems)

    async def _ask_groups(self) -> ClusterRows[GroupRow]:
        answers = await self._ask_masters("groups", self._admin.groups_at)
        merged = _by_name(
            (name, {group: config for group, config in table.items() if config is not None})
            for name, table in answers.values.items()
        )
        names = group_names(await self._admin.topics(), answers.values.values())
        rows = [GroupRow(name, merged.get(name, {})) for name in sorted({*names, *merged})]
        return ClusterRows(rows, answers.problems)

    async def _ask_lags(self) -> ClusterLags:
        answers = await self._ask_masters("lags", self._admin.broker_consume_stats)
        found = await self._rates.observe(answers.values)
        now = time.time()
        lags = ClusterLags(**vars(found), missing=answers.problems)
        # Lags are recorded only if all brokers responded: a sum without one of them would be too small.
        if not lags.missing:
            self.history.behind.add(now, lags.behind)
            behind = {name: lag.behind for name, lag in lags.groups.items() if not is_system_group(name)}
            self.history.groups.add(now, behind)
            if lags.topic_rates:
                rates = {name: rate for name, rate in lags.topic_rates.items() if kind_of(name) == "normal"}
                self.history.topics.add(now, rates)
        return lags

    async def _ask_producers(self) -> ClusterRows[ProducerRow]:
        answers = await self._ask_masters("producers", self._admin.producers)
        clients: dict[tuple[str, str], ProducerInfo] = {}
        brokers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name, table in answers.values.items():
            for group, infos in table.items():
                for info in infos:
                    clients[group, info.client_id] = info
                    brokers[group, info.client_id].append(name)
        rows = [ProducerRow(key[0], clients[key], tuple(brokers[key])) for key in sorted(clients)]
        return ClusterRows(rows, answers.problems)


def _by_name(tables: Iterable[tuple[str, dict[str, T]]]) -> dict[str, dict[str, T]]:
    """Return for each topic or group its settings by broker.

    `tables` contains, for each broker, the broker's name and its settings by topic or group.
    """
    merged: defaultdict[str, dict[str, T]] = defaultdict(dict)
    for broker, table in tables:
        for name, config in table.items():
            merged[name][broker] = config
    return merged

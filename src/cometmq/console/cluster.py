"""What many pages ask of the cluster: one request a broker for each of these questions, shared by all
pages."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from cometmq.admin import Admin, BrokerStatus, GroupQueueProgress
from cometmq.admin.known_groups import group_names
from cometmq.admin.values import broker_places, known_sum, with_lags
from cometmq.console.frame.live import Feed, Live, Rate, Ring, Tops
from cometmq.console.frame.patience import Answers, Patience
from cometmq.protocol.bodies import ProducerInfo, SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.codes import DLQ_PREFIX, MASTER_ID, RETRY_PREFIX, is_system_group, is_system_topic

T = TypeVar("T")

BROKERS_S, TABLES_S, PROGRESS_S = 5.0, 15.0, 30.0
DISK_KEYS = ("commitLogDiskRatio", "consumeQueueDiskRatio")
HISTORY_POINTS, HISTORY_STEP_S = 1440, 15.0
"""Six hours of what somebody looked at."""
LEFT_S, LEFT_MAX = 24 * 3600.0, 32
"""For so long it is said that a broker was there, of so many."""
MESSAGE_TYPE = "message.type"


@dataclass(frozen=True)
class Found(Generic[T]):
    """What the brokers that answered say. missing: broker name -> why it does not answer."""

    rows: list[T]
    missing: dict[str, str]


@dataclass(frozen=True)
class TopicRow:
    """A topic of the whole cluster. configs: broker name -> what this broker has of it; queues are those of
    all brokers together; perm: the bits that all brokers allow."""

    name: str
    kind: str
    configs: dict[str, TopicConfig]

    @property
    def read_queues(self) -> int:
        return sum(each.read_queue_nums for each in self.configs.values())

    @property
    def write_queues(self) -> int:
        return sum(each.write_queue_nums for each in self.configs.values())

    @property
    def perm(self) -> int:
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
    """A consumer group of the whole cluster. configs: broker name -> its settings there, none for a group
    that has only offsets or a retry topic."""

    name: str
    configs: dict[str, SubscriptionGroupConfig]

    @property
    def system(self) -> bool:
        return is_system_group(self.name)


@dataclass
class Lag:
    """How far groups are in topics, added up. behind: messages not consumed yet; last_ms: store time of the
    last one consumed."""

    behind: int = 0
    queues: int = 0
    last_ms: int = 0

    def add(self, broker_offset: int, consumer_offset: int, last_ms: int) -> None:
        """One more queue."""
        self.behind += max(0, broker_offset - consumer_offset)
        self.queues += 1
        self.last_ms = max(self.last_ms, last_ms)


@dataclass(frozen=True)
class Progress:
    """How far all groups are. pairs: (group, topic) -> Lag; groups: group -> Lag of all its topics; rates: of
    groups and of topics that groups consume, messages a second since the answer before, empty at first."""

    pairs: dict[tuple[str, str], Lag]
    groups: dict[str, Lag]
    group_rates: dict[str, float]
    topic_rates: dict[str, float]
    missing: dict[str, str]

    @property
    def behind(self) -> int:
        return sum(each.behind for each in self.groups.values())


@dataclass(frozen=True)
class ProducerRow:
    """A client of a producer group, and the brokers that it is connected to."""

    group: str
    client: ProducerInfo
    brokers: tuple[str, ...]


@dataclass
class History:
    """The last hours of what somebody looked at. disk: percent of the fullest that is used; groups: how far
    those furthest behind are; topics: messages a second of the busiest."""

    put: Ring = field(default_factory=lambda: Ring(HISTORY_POINTS, HISTORY_STEP_S))
    get: Ring = field(default_factory=lambda: Ring(HISTORY_POINTS, HISTORY_STEP_S))
    behind: Ring = field(default_factory=lambda: Ring(HISTORY_POINTS, HISTORY_STEP_S))
    disk: Ring = field(default_factory=lambda: Ring(HISTORY_POINTS, HISTORY_STEP_S))
    groups: Tops = field(default_factory=lambda: Tops(HISTORY_POINTS, HISTORY_STEP_S))
    topics: Tops = field(default_factory=lambda: Tops(HISTORY_POINTS, HISTORY_STEP_S))


@dataclass(frozen=True)
class Left:
    """A broker that the name servers no longer know. at_s: when it was last seen there, by the wall clock."""

    status: BrokerStatus
    at_s: float


def kind_of(topic: str) -> str:
    """`normal`, `retry`, `dead` (letters) or `system`."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DLQ_PREFIX):
        return "dead"
    return "system" if is_system_topic(topic) else "normal"


def disk_of(broker: BrokerStatus) -> float | None:
    """The share of its fullest disk that is used, None where it does not say."""
    found = [broker.first_number(key) for key in DISK_KEYS]
    return max((share for share in found if share is not None), default=None)


def fullest_disk(brokers: Iterable[BrokerStatus]) -> float | None:
    """The same of the fullest disk of all brokers that say."""
    return max((disk for each in brokers if (disk := disk_of(each)) is not None), default=None)


def put_rate(broker: BrokerStatus) -> float | None:
    """Return the messages per second that producers sent, None where the broker does not report it."""
    return broker.first_number("putTps")


def get_rate(broker: BrokerStatus) -> float | None:
    """As `put_rate`, of those that consumers received; 5.x spells its key otherwise."""
    rate = broker.first_number("getTransferredTps")
    return broker.first_number("getTransferedTps") if rate is None else rate


class Cluster:
    """The shared questions, as feeds."""

    def __init__(self, admin: Admin, live: Live) -> None:
        self._admin = admin
        self._live = live
        self._patience: dict[str, Patience[Any]] = {}
        self._group_rate = Rate()
        self._topic_rate = Rate()
        self.history = History()
        self._seen: dict[tuple[str, str, int], Left] = {}
        self._left: dict[tuple[str, str, int], Left] = {}

    @property
    def left(self) -> list[Left]:
        """Brokers that were there and are no longer, the last to go first, for LEFT_S."""
        since_s = time.time() - LEFT_S
        return [each for each in reversed(self._left.values()) if each.at_s >= since_s]

    def brokers(self) -> Feed[list[BrokerStatus]]:
        """Every broker with its runtime table."""
        return self._live.feed("brokers", self._ask_brokers, BROKERS_S)

    def topics(self) -> Feed[Found[TopicRow]]:
        """Every topic that a master has."""
        return self._live.feed("topics", self._ask_topics, TABLES_S)

    def groups(self) -> Feed[Found[GroupRow]]:
        """Every consumer group that a master has."""
        return self._live.feed("groups", self._ask_groups, TABLES_S)

    def progress(self) -> Feed[Progress]:
        """How far every group is in every topic: the dearest question."""
        return self._live.feed("progress", self._ask_progress, PROGRESS_S)

    def producers(self) -> Feed[Found[ProducerRow]]:
        """Every producer that is connected."""
        return self._live.feed("producers", self._ask_producers, TABLES_S)

    # -- asking

    def _patient(self, feed: str) -> Patience[Any]:
        """Of the question of a feed, which is asked again when a late answer has come."""
        return self._patience.setdefault(feed, Patience(lambda: self._live.refresh(feed)))

    async def _ask_brokers(self) -> list[BrokerStatus]:
        places = broker_places(await self._admin.cluster_info())
        self._note_left(places)
        addrs = {each.broker_addr: each.broker_addr for each in places}
        answers = await self._patient("brokers").ask(addrs, self._admin.runtime)
        found = with_lags(
            [
                each.with_runtime(answers.values[each.broker_addr])
                if each.broker_addr in answers.values
                else msgspec.structs.replace(each, problem=answers.problems[each.broker_addr])
                for each in places
            ]
        )
        masters = [each for each in found if each.broker_id == MASTER_ID]
        if masters and all(each.runtime for each in masters):  # else it would look as if fewer came
            now = time.time()
            for history, rate in (
                (self.history.put, known_sum(map(put_rate, masters))),
                (self.history.get, known_sum(map(get_rate, found))),
            ):
                if rate is not None:
                    history.add(now, rate)
            if (disk := fullest_disk(found)) is not None:
                self.history.disk.add(now, 100 * disk)
        return found

    def _note_left(self, places: Iterable[BrokerStatus]) -> None:
        now = time.time()
        here = {(each.cluster_name, each.broker_name, each.broker_id): Left(each, now) for each in places}
        self._left |= {key: left for key, left in self._seen.items() if key not in here}
        self._seen = here
        for key in here.keys() & self._left.keys():
            del self._left[key]
        for key in list(self._left)[:-LEFT_MAX]:
            del self._left[key]

    async def _each_master(self, feed: str, ask: Callable[[str], Awaitable[T]]) -> Answers[T]:
        """What each broker answers. One without its master is asked at the slave that stands in for it.
        Raises if none answers."""
        table = (await self._admin.cluster_info()).broker_addr_table
        addrs = {
            name: data.broker_addrs[min(data.broker_addrs)]
            for name, data in table.items()
            if data.broker_addrs
        }
        answers = await self._patient(feed).ask(addrs, ask)
        answers.check()
        return answers

    async def _ask_topics(self) -> Found[TopicRow]:
        answers = await self._each_master("topics", self._admin.topic_configs)
        merged = _by_name((name, table.topic_config_table) for name, table in answers.values.items())
        rows = [TopicRow(name, kind_of(name), merged[name]) for name in sorted(merged)]
        return Found(rows, answers.problems)

    async def _ask_groups(self) -> Found[GroupRow]:
        answers = await self._each_master("groups", self._admin.groups_at)
        merged = _by_name(
            (name, {group: config for group, config in table.items() if config is not None})
            for name, table in answers.values.items()
        )
        names = group_names(await self._admin.topics(), answers.values.values())
        rows = [GroupRow(name, merged.get(name, {})) for name in sorted({*names, *merged})]
        return Found(rows, answers.problems)

    async def _ask_progress(self) -> Progress:
        answers = await self._each_master("progress", self._admin.broker_consume_stats)
        # Hundreds of thousands of rows of a large cluster: pages go on meanwhile.
        summed = await asyncio.to_thread(_added_up, answers.values)
        now = time.time()
        found = Progress(
            pairs=summed.pairs,
            groups=summed.groups,
            group_rates=_by_first(self._group_rate.of(now, summed.went)),
            topic_rates=_by_first(self._topic_rate.of(now, summed.came)),
            missing=answers.problems,
        )
        if not found.missing:  # else it would look as if the backlog were smaller
            self.history.behind.add(now, found.behind)
            behind = {name: lag.behind for name, lag in found.groups.items() if not is_system_group(name)}
            self.history.groups.add(now, behind)
            if found.topic_rates:
                rates = {name: rate for name, rate in found.topic_rates.items() if kind_of(name) == "normal"}
                self.history.topics.add(now, rates)
        return found

    async def _ask_producers(self) -> Found[ProducerRow]:
        answers = await self._each_master("producers", self._admin.producers)
        clients: dict[tuple[str, str], ProducerInfo] = {}
        brokers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name, table in answers.values.items():
            for group, infos in table.items():
                for info in infos:
                    clients[group, info.client_id] = info
                    brokers[group, info.client_id].append(name)
        rows = [ProducerRow(key[0], clients[key], tuple(brokers[key])) for key in sorted(clients)]
        return Found(rows, answers.problems)


@dataclass(frozen=True)
class _Sums:
    """went and came: what lies before a group's offsets and before the end of a topic's queues, by (name,
    broker, ..., number of queues): with a queue more, or after a broker was away, a counter is a new one, and
    no rate is made of what did not happen just now."""

    pairs: dict[tuple[str, str], Lag]
    groups: dict[str, Lag]
    went: dict[Hashable, int]
    came: dict[Hashable, int]


def _added_up(answers: Mapping[str, list[GroupQueueProgress]]) -> _Sums:
    """What brokers say of all their groups; for a thread."""
    pairs: defaultdict[tuple[str, str], Lag] = defaultdict(Lag)
    groups: defaultdict[str, Lag] = defaultdict(Lag)
    went: dict[Hashable, int] = {}
    came: dict[Hashable, int] = {}
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
        went |= {(group, broker, topic, len(all_)): sum(all_) for (group, topic), all_ in offsets.items()}
        came |= {(topic, broker, len(all_)): sum(all_.values()) for topic, all_ in ends.items()}
    return _Sums(dict(pairs), dict(groups), went, came)


def _by_first(rates: Mapping[Any, float]) -> dict[str, float]:
    """Rates by the first part of their keys, added up."""
    found: defaultdict[str, float] = defaultdict(float)
    for (name, *_), rate in rates.items():
        found[name] += rate
    return dict(found)


def _by_name(tables: Iterable[tuple[str, dict[str, T]]]) -> dict[str, dict[str, T]]:
    """Name -> broker -> what it has of that name."""
    merged: defaultdict[str, dict[str, T]] = defaultdict(dict)
    for broker, table in tables:
        for name, config in table.items():
            merged[name][broker] = config
    return merged

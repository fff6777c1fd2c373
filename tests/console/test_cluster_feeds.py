"""Queries that all pages share: results are combined from the brokers that respond."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cometmq.admin import BrokerStatus, GroupQueueProgress, QueueProgress
from cometmq.admin.rates import disk_of
from cometmq.console.base.cluster_feeds import ClusterFeeds, kind_of
from cometmq.console.base.feeds import Feeds
from cometmq.console.pages.overview import largest
from cometmq.errors import ConnectError
from cometmq.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ProducerInfo,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicConfigTable,
)


class FakeAdmin:
    """Two masters and a broker with only a slave; brokers in `down` do not respond."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.silent: set[str] = set()
        self.asked: list[str] = []
        self.end = 100
        self.queues = 2
        self.gone: set[str] = set()

    async def cluster_info(self) -> ClusterInfo:
        addrs = {"a": {0: "a:1", 1: "a:2"}, "b": {0: "b:1"}, "c": {1: "c:2"}, "d": {}}
        addrs = {name: each for name, each in addrs.items() if name not in self.gone}
        table = {name: BrokerData("C", name, each) for name, each in addrs.items()}
        return ClusterInfo(broker_addr_table=table, cluster_addr_table={"C": sorted(addrs)})

    async def _check(self, addr: str) -> None:
        self.asked.append(addr)
        if addr in self.silent:
            await asyncio.Event().wait()
        if addr in self.down:
            raise ConnectError(addr, "refused")

    async def topic_configs(self, addr: str) -> TopicConfigTable:
        await self._check(addr)
        perm = 4 if addr == "b:1" else 6
        config = TopicConfig(topic_name="t", read_queue_nums=4, write_queue_nums=2, perm=perm)
        own = dict.fromkeys(("a", "C", "C_REPLY_TOPIC"), config)  # each broker creates such topics itself
        return TopicConfigTable(topic_config_table={"t": config, "%DLQ%g": config} | own)

    async def groups_at(self, addr: str) -> dict[str, SubscriptionGroupConfig | None]:
        await self._check(addr)
        return {"g": SubscriptionGroupConfig(group_name="g"), "pulled": None}

    async def topics(self) -> list[str]:
        return ["%RETRY%g", "%RETRY%retried", "t"]

    async def runtime(self, addr: str) -> dict[str, str]:
        await self._check(addr)
        return {"putTps": "1.0 1.0 1.0", "commitLogDiskRatio": "0.4" if addr == "b:1" else "0.2"}

    async def producers(self, addr: str) -> dict[str, list[ProducerInfo]]:
        await self._check(addr)
        return {"p": [ProducerInfo(client_id="1.2.3.4@1")]}

    async def broker_consume_stats(self, addr: str) -> list[GroupQueueProgress]:
        await self._check(addr)
        rows = [(queue_id, self.end, 40 + 100 * queue_id) for queue_id in range(self.queues)]
        return [
            GroupQueueProgress(
                group="g",
                queue=QueueProgress(
                    topic="t",
                    broker_name=addr[0],
                    queue_id=queue_id,
                    broker_offset=end,
                    consumer_offset=offset,
                    last_timestamp=queue_id,
                ),
            )
            for queue_id, end, offset in rows
        ]


def cluster(admin: Any) -> ClusterFeeds:
    return ClusterFeeds(admin, Feeds())


async def test_a_topic_is_what_all_its_brokers_have_of_it() -> None:
    admin = FakeAdmin()
    found = (await cluster(admin).topics().fresh()).value
    assert found is not None

    assert sorted(admin.asked) == ["a:1", "b:1", "c:2"]
    assert [(row.name, row.kind, row.read_queues, row.write_queues, row.perm) for row in found.rows] == [
        ("%DLQ%g", "dead", 12, 6, 4), ("C", "system", 12, 6, 4), ("C_REPLY_TOPIC", "system", 12, 6, 4),
        ("a", "system", 12, 6, 4), ("t", "normal", 12, 6, 4),
    ]  # fmt: skip


async def test_a_broker_that_does_not_answer_is_named() -> None:
    admin = FakeAdmin()
    admin.down = {"b:1"}
    found = (await cluster(admin).groups().fresh()).value
    assert found is not None

    assert list(found.missing) == ["b"]
    assert list(found.rows[0].configs) == ["a", "c"]


async def test_groups_are_those_that_every_command_knows() -> None:
    found = (await cluster(FakeAdmin()).groups().fresh()).value
    assert found is not None

    assert [(row.name, len(row.configs)) for row in found.rows] == [("g", 3), ("pulled", 0), ("retried", 0)]


async def test_no_answer_at_all_is_no_empty_list() -> None:
    admin = FakeAdmin()
    admin.down = {"a:1", "b:1", "c:2"}
    reading = await cluster(admin).producers().fresh()

    assert reading.value is None
    assert isinstance(reading.problem, ConnectError)


async def test_progress_is_added_up_and_negative_lags_hide_nothing() -> None:
    """After a topic was created again, a group may be ahead in a queue; its other lag must not shrink."""
    admin = FakeAdmin()
    asked = cluster(admin)
    found = (await asked.lags().fresh()).value
    assert found is not None

    assert (found.behind, found.groups["g"].queues, found.pairs["g", "t"].behind) == (180, 6, 180)
    assert found.topic_rates == {}
    admin.end += 50
    found = (await asked.lags().fresh()).value
    assert found is not None
    assert found.topic_rates["t"] > 0
    assert found.group_rates["g"] == 0
    assert len(asked.history.behind) >= 1


async def test_what_was_away_for_a_look_came_not_all_at_once() -> None:
    """Offsets of a broker that did not respond before, or of a new queue, do not count as new messages."""
    admin = FakeAdmin()
    asked = cluster(admin)
    await asked.lags().fresh()
    admin.down = {"b:1"}
    found = (await asked.lags().fresh()).value
    assert found is not None
    assert list(found.missing) == ["b"]
    assert len(asked.history.behind) == 1, "the backlog is not smaller, it is not known"
    admin.down = set()
    admin.queues += 1
    found = (await asked.lags().fresh()).value
    assert found is not None

    assert sum(found.group_rates.values()) == sum(found.topic_rates.values()) == 0


async def test_a_silent_broker_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.console.base.fanout.TIMEOUT_S", 0.05)
    admin = FakeAdmin()
    admin.silent = {"b:1"}
    asked = cluster(admin)
    async with asyncio.timeout(60):
        brokers = (await asked.brokers().fresh()).value
        progress = (await asked.lags().fresh()).value
    assert brokers is not None
    assert progress is not None

    assert [each.broker_addr for each in brokers if each.problem] == ["b:1"]
    assert (list(progress.missing), progress.groups["g"].queues) == (["b"], 4)
    assert len(asked.history.put) == 0, "how much came in all is not known"


async def test_a_broker_that_left_is_not_forgotten_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin()
    asked = cluster(admin)

    async def left() -> list[str]:
        await asked.brokers().fresh()
        return [each.status.broker_addr for each in asked.lost]

    assert await left() == []
    admin.gone = {"b"}
    assert await left() == await left() == ["b:1"]
    assert asked.lost[0].at_s <= time.time()
    admin.gone = {"a"}
    assert sorted(await left()) == ["a:1", "a:2"], "b is back"
    monkeypatch.setattr("cometmq.console.base.cluster_feeds.MAX_LOST_BROKERS", 1)
    assert len(await left()) == 1
    monkeypatch.setattr("cometmq.console.base.cluster_feeds.LOST_BROKER_SHOWN_S", -1.0)
    assert await left() == []


async def test_the_largest_have_their_last_hours() -> None:
    admin = FakeAdmin()
    asked = cluster(admin)
    await asked.lags().fresh()
    assert (list(asked.history.groups.largest), list(asked.history.topics.largest)) == (["g"], [])
    admin.end += 50
    await asked.lags().fresh()
    assert (list(asked.history.groups.largest), list(asked.history.topics.largest)) == (["g"], ["t"])
    admin.down = {"b:1"}
    await asked.lags().fresh()
    assert len(asked.history.groups.largest["g"]) == 2, "how far it is behind is not known"


async def test_a_producer_is_one_row_with_all_its_brokers() -> None:
    found = (await cluster(FakeAdmin()).producers().fresh()).value
    assert found is not None

    assert [(row.group, row.client.client_id, row.brokers) for row in found.rows] == [
        ("p", "1.2.3.4@1", ("a", "b", "c"))
    ]


@pytest.mark.parametrize(
    ("topic", "kind"),
    [("t", "normal"), ("%RETRY%g", "retry"), ("%DLQ%g", "dead"), ("SCHEDULE_TOPIC_XXXX", "system")],
)
def test_topics_have_kinds(topic: str, kind: str) -> None:
    assert kind_of(topic) == kind


@pytest.mark.parametrize(
    ("runtime", "disk"),
    [
        ({}, None),
        ({"commitLogDiskRatio": "0.5"}, 0.5),
        ({"commitLogDiskRatio": "0.5", "consumeQueueDiskRatio": "0.75"}, 0.75),
        ({"commitLogDiskRatio": "x"}, None),
    ],
)
def test_the_fullest_disk_counts(runtime: dict[str, str], disk: float | None) -> None:
    status = BrokerStatus(cluster_name="", broker_name="", broker_id=0, broker_addr="", runtime=runtime)

    assert disk_of(status) == disk


async def test_the_fullest_disk_has_its_last_hours() -> None:
    asked = cluster(FakeAdmin())
    await asked.brokers().fresh()

    assert [value for _, value in asked.history.disk.points(1.0)] == [40.0]


def test_the_largest_come_first_and_nothing_is_left_out_for_its_name() -> None:
    assert largest([("b", 1.0), ("a", 1.0), ("c", 5.0), ("d", 0.0)]) == [("c", 5.0), ("a", 1.0), ("b", 1.0)]
    assert len(largest((str(number), number + 1.0) for number in range(50))) == 10

"""Queries of the topic and group pages: missing brokers are shown, and unknown is neither 0 nor none."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cometmq.admin import (
    Admin,
    BrokerStatus,
    GroupProgress,
    GroupSubscriptions,
    MemberSubscriptions,
    QueueProgress,
    QueueStatus,
    UnknownNameError,
)
from cometmq.admin.values import known_sum
from cometmq.console.base.cluster_feeds import ClusterLags, GroupRow
from cometmq.console.base.fanout import Fanout
from cometmq.console.base.feeds import Reading
from cometmq.console.pages import group, topic
from cometmq.console.pages.groups import lines
from cometmq.console.pages.overview import got_today, put_today
from cometmq.console.widgets.charts import utc_offset_s
from cometmq.errors import ConnectError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import BrokerData, ClusterInfo, SubscriptionGroupConfig, TopicRouteData

ADDRS = {"a": {0: "a:1"}, "b": {1: "b:2"}}


class FakeAdmin:
    """Two brokers, the second without its master; brokers in `down` do not respond."""

    def __init__(self, *down: str) -> None:
        self.down = down

    async def route(self, _topic: str) -> TopicRouteData:
        datas = [BrokerData(broker_name=name, broker_addrs=addrs) for name, addrs in ADDRS.items()]
        return TopicRouteData(broker_datas=datas)

    async def cluster_info(self) -> ClusterInfo:
        return ClusterInfo(
            broker_addr_table={each.broker_name: each for each in (await self.route("")).broker_datas}
        )

    async def brokers_of(self, _group: str) -> dict[str, str]:
        return {"a": "a:1", "b": "b:2"}

    def _check(self, addr: str) -> None:
        if addr in self.down:
            raise ConnectError(addr, "refused")

    async def topic_status_at(self, addr: str, _topic: str) -> list[QueueStatus]:
        self._check(addr)
        return [
            QueueStatus(broker_name=addr[0], queue_id=0, min_offset=0, max_offset=5, last_update_timestamp=1)
        ]

    async def progress_at(self, addr: str, name: str) -> GroupProgress:
        self._check(addr)
        return GroupProgress(group=name, consume_tps=2.0, queues=[queue(addr[0])])


def queue(broker: str) -> QueueProgress:
    return QueueProgress(
        topic="t", broker_name=broker, queue_id=0, broker_offset=9, consumer_offset=4, last_timestamp=1
    )


def patience() -> Fanout[Any]:
    return Fanout(lambda: None)


async def test_a_topic_is_shown_without_a_broker_that_is_down() -> None:
    state = await topic.ask(FakeAdmin("b:2"), "t", patience())  # type: ignore[arg-type]
    assert state.queues is not None
    assert ([each.broker_name for each in state.queues], list(state.missing)) == (["a"], ["b"])

    nobody = await topic.ask(FakeAdmin("a:1", "b:2"), "t", patience())  # type: ignore[arg-type]
    assert nobody.queues is None
    assert len(nobody.route.broker_datas) == 2, "its route is known all the same"


async def test_a_group_is_shown_without_a_broker_that_is_down() -> None:
    state = await group.ask(FakeAdmin("b:2"), "g", patience())  # type: ignore[arg-type]
    assert ([each.broker_name for each in state.progress.queues], list(state.missing)) == (["a"], ["b"])
    assert state.progress.consume_tps == 2.0

    with pytest.raises(ConnectError):
        await group.ask(FakeAdmin("a:1", "b:2"), "g", patience())  # type: ignore[arg-type]


async def test_changes_go_to_masters_alone() -> None:
    admin: Any = FakeAdmin()

    assert await Admin.masters(admin, ["a"]) == {"a": "a:1"}
    with pytest.raises(UnknownNameError, match="master of broker named b"):
        await Admin.masters(admin, ["a", "b"])


def member(name: str, *queues: MessageQueue, known: bool = True) -> MemberSubscriptions:
    return MemberSubscriptions(
        client_id=name, client_addr="", version="", subscriptions={}, queues=list(queues) if known else None
    )


def test_who_holds_a_queue() -> None:
    held = MessageQueue("t", "a", 0)

    def owner(*members: MemberSubscriptions) -> str | None:
        found = GroupSubscriptions(group="g", members=list(members), differences={})
        return group.owner_of(queue("a"), found, "none")

    assert owner(member("m1", held), member("m2")) == "m1"
    assert owner(member("m1", held), member("m2", held)) == "m1, m2"
    assert owner(member("m1")) == "none"
    assert owner(member("m1"), member("m2", known=False)) is None
    assert group.owner_of(queue("a"), None, "none") is None


@pytest.mark.parametrize("missing", [{}, {"b": "silent"}])
def test_a_group_without_offsets_has_neither_lag_nor_rate(missing: dict[str, str]) -> None:
    row = GroupRow("fresh", {"a": SubscriptionGroupConfig(group_name="fresh")})
    known = ClusterLags(pairs={}, groups={}, group_rates={}, topic_rates={}, missing=missing)

    for reading in (Reading(known, 1.0), Reading[ClusterLags]()):
        (line,) = lines([row], reading, system=False)
        assert (line.lag, line.rate) == (None, None)


def test_nothing_is_known_where_nobody_answers() -> None:
    assert known_sum([]) is None
    assert known_sum([0.0, None]) == 0


def test_numbers_of_today_are_those_of_the_command_line() -> None:
    runtime = {
        "msgPutTotalTodayNow": "30", "msgPutTotalTodayMorning": "10",
        "msgGetTotalTodayNow": "25", "msgGetTotalTodayMorning": "20",
    }  # fmt: skip
    broker = BrokerStatus(cluster_name="", broker_name="", broker_id=0, broker_addr="", runtime=runtime)

    assert (put_today(broker), got_today(broker)) == (20, 5)


def test_charts_have_the_times_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        assert utc_offset_s(0.0) == 8 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()

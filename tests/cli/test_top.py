"""`cometmq top`: what it shows of a cluster, and how it is drawn."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections import Counter
from typing import Any, cast

import pytest
from tests.cli.conftest import BIN, Run
from tests.kit.terminal import Terminal
from tests.ports import closed_port

from cometmq import Message
from cometmq.admin import Admin, BrokerStatus, GroupQueueProgress, QueueProgress, QueueStatus
from cometmq.cli.top import MAX_SAMPLED_TOPICS, Report, Top
from cometmq.errors import NoRouteError
from cometmq.testing import LocalBroker


class FakeAdmin:
    """A cluster of one broker, or of two of which one is down, whose offsets a test sets."""

    def __init__(self) -> None:
        self.offsets: dict[tuple[str, str], tuple[int, int]] = {}
        """Broker offset and consumer offset by (group, topic)."""
        self.ends: dict[str, int] = {}
        """Broker offsets of topics without a group; negative if the topic was deleted."""
        self.asked: Counter[str] = Counter()
        self.problem = ""

    async def brokers(self, _cluster: str | None) -> list[BrokerStatus]:
        def status(name: str, broker_id: int, problem: str, **runtime: str) -> BrokerStatus:
            return BrokerStatus(
                cluster_name="C", broker_name=name, broker_id=broker_id, broker_addr=f"{name}-{broker_id}:1",
                runtime=runtime, role="" if problem else "MASTER", problem=problem,
            )  # fmt: skip

        found = [status("a", 0, "", putTps="12.5 1 1", getTransferedTps="4 1 1", commitLogDiskRatio="0.61")]
        return [*found, status("b", 0, self.problem), status("b", 1, "")] if self.problem else found

    async def broker_consume_stats(self, addr: str) -> list[GroupQueueProgress]:
        self.asked[addr] += 1
        if addr != "a-0:1":
            return []
        return [
            GroupQueueProgress(
                group=group,
                queue=QueueProgress(
                    topic=topic, broker_name="a", queue_id=0, broker_offset=end, consumer_offset=consumed,
                    last_timestamp=1,
                ),
            )
            for (group, topic), (end, consumed) in self.offsets.items()
        ]  # fmt: skip

    async def topics(self) -> list[str]:
        return [*self.ends, *(topic for _, topic in self.offsets), "%RETRY%g", "%DLQ%g", "TBW102"]

    async def topic_status(self, topic: str) -> list[QueueStatus]:
        self.asked[topic] += 1
        if self.ends[topic] < 0:
            raise NoRouteError(topic)
        return [
            QueueStatus(
                broker_name="a",
                queue_id=0,
                min_offset=0,
                max_offset=self.ends[topic],
                last_update_timestamp=0,
            )
        ]


class Clock:
    """The time of the module `top` and of the rates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.time", lambda: self.now)
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def view(admin: FakeAdmin, rows: int = 10, sort: str = "lag") -> Top:
    return Top(cast(Admin, admin), None, rows, sort)


class TestReport:
    async def test_rates_are_those_between_two_views(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, admin = Clock(monkeypatch), FakeAdmin()
        top = view(admin)
        admin.offsets = {("g", "t"): (100, 90), ("g", "%RETRY%g"): (5, 5), ("other", "t"): (100, 0)}
        own = {"a": 1, "C": 2, "C_REPLY_TOPIC": 3}  # the broker creates these itself
        admin.ends = {"alone": 7} | own
        first = await top.look()
        assert {row.rate for row in (*first.groups, *first.topics)} == {None}
        assert (first.in_rate, first.out_rate, first.lag) == (12.5, 4.0, 110)

        clock.now += 2
        admin.offsets |= {("g", "t"): (120, 100), ("other", "t"): (120, 0)}
        admin.ends = {"alone": 11} | own
        report = await top.look()
        assert [(row.name, row.topics, row.rate, row.lag) for row in report.groups] == [
            ("other", 1, 0.0, 120),
            ("g", 2, 5.0, 20),
        ]
        assert [(row.name, row.groups, row.rate, row.lag) for row in report.topics] == [
            ("t", 2, 10.0, 140),
            ("alone", 0, 2.0, 0),
        ]
        assert report.groups[0].delay_ms == 1_001_999

    async def test_topics_without_a_group_are_asked_in_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, admin = Clock(monkeypatch), FakeAdmin()
        top = view(admin)
        names = [f"topic-{number:04}" for number in range(3 * MAX_SAMPLED_TOPICS)]
        admin.ends = dict.fromkeys(names, 0) | {"topic-0001": -1}
        for turn in range(1, 8):
            clock.now += 1
            admin.ends["topic-0007"] += 5
            report = await top.look()
            assert sum(admin.asked[name] for name in names) == turn * MAX_SAMPLED_TOPICS
        rates = {row.name: row.rate for row in report.topics}
        assert report.topics[0].name == "topic-0007"
        assert admin.asked["topic-0007"] == 7  # the busiest topic in each view
        assert report.topic_count == len(names)
        assert rates["topic-0007"] == 5.0
        assert {admin.asked[name] for name in names} <= {1, 2, 3, 7}

        del admin.ends["topic-0000"]
        assert (await top.look()).topic_count == len(names) - 1

    async def test_a_broker_that_does_not_answer_is_shown_and_its_slave_is_asked(self) -> None:
        admin = FakeAdmin()
        admin.problem = "connection refused"
        report = await view(admin).look()
        assert [(row.name, row.id, row.problem) for row in report.brokers] == [
            ("a", 0, ""), ("b", 0, "connection refused"), ("b", 1, ""),
        ]  # fmt: skip
        assert report.problems == {"b-0:1": "connection refused"}
        assert admin.asked == {"a-0:1": 1, "b-1:1": 1}

    async def test_rows_are_sorted_and_limited(self) -> None:
        admin = FakeAdmin()
        admin.offsets = {(f"g{number:04}", f"t{number:04}"): (number % 7, 0) for number in range(5000)}
        top = view(admin, rows=3)
        report = await top.look()
        assert [row.lag for row in report.groups] == [6, 6, 6]
        assert (report.group_count, report.topic_count) == (5000, 5000)
        top.sort_next()
        top.sort_next()
        report = await top.look()
        assert [row.name for row in report.groups] == ["g0000", "g0001", "g0002"]
        assert admin.asked == {"a-0:1": 1}  # not after a change of the order


# -- the command


@pytest.fixture
def cluster(broker: LocalBroker, namesrv: None) -> LocalBroker:
    """A cluster with a message in a topic without a group."""

    async def fill() -> None:
        async with Admin(broker.namesrv) as admin:
            await admin.send(Message(topic="watched", body=b"x"))

    asyncio.run(fill())
    return broker


def test_once_shows_the_tables(cluster: LocalBroker, run: Run) -> None:
    done = run("cometmq", "top", "--once", "-i", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^(\w+) \(\d+ of \d+\) ", done.stdout, re.MULTILINE) == ["BROKER", "GROUP", "TOPIC"]
    assert cluster.broker_addr in done.stdout
    assert "watched" in done.stdout


def test_json_is_a_line_for_each_view(cluster: LocalBroker) -> None:
    words = [str(BIN / "cometmq"), "top", "-i", "0.5", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        views: list[dict[str, Any]] = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.terminate()
    assert [each["brokers"][0]["addr"] for each in views] == [cluster.broker_addr] * 2
    assert views[0].keys() == {
        *("atMs", "inRate", "outRate", "lag", "brokers", "groups", "topics", "problems"),
        *("brokerCount", "groupCount", "topicCount"),
    }
    assert len(views[0]) == len(Report.__struct_fields__)


def test_a_cluster_that_does_not_answer_is_an_error(run: Run) -> None:
    with closed_port() as port:
        done = run("cometmq", "top", "-n", f"127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cometmq: cannot connect to ")
    assert done.stderr.count("\n") == 1


def test_keys_on_a_terminal(cluster: LocalBroker) -> None:
    words = [str(BIN / "cometmq"), "top", "-i", "0.5"]
    with Terminal(words, {**os.environ, "TERM": "xterm"}, size=(40, 100)) as terminal:
        assert terminal.until("sorted by lag")
        terminal.type("s")
        assert terminal.until("sorted by rate")
        terminal.type("s")
        assert terminal.until("sorted by name")
        terminal.type("q")
        assert terminal.ends() == 0
        assert "watched" in terminal.raw.rpartition("\x1b[?1049l")[2]

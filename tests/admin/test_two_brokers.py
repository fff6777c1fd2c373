"""The commands on a cluster of two brokers in separate processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.admin.conftest import Shell, consume

from cometmq.admin import Admin, TopicSettings
from cometmq.client.cluster.broker_api import Calls
from cometmq.client.cluster.lookups import by_unique_key
from cometmq.errors import BrokerError, CometError, ConnectError, RequestTimeout
from cometmq.message import Message
from cometmq.pipeline.jobs.lag import sample
from cometmq.protocol.codes import ResponseCode
from cometmq.testing import LocalBroker, StandaloneProcess

NAMES = ["broker-a", "broker-b"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    with StandaloneProcess(tmp_path_factory.mktemp("two"), brokers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def broker(cluster: StandaloneProcess) -> LocalBroker:
    """Return the first of the two brokers, for the shell."""
    return LocalBroker(cluster.namesrv, cluster.brokers[NAMES[0]], NAMES[0], Path())


def test_a_topic_is_made_filled_found_read_and_deleted_on_both(mq: Shell, cluster: StandaloneProcess) -> None:
    made = mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "wide", "-r", "2", "-w", "2")
    assert {line.split()[3] for line in made.lines[:2]} == set(cluster.brokers.values())

    for number in range(8):
        queue = ("-b", NAMES[number % 2], "-i", str(number // 2 % 2))
        mq.ok("sendMessage", "-t", "wide", "-p", str(number), "-k", "key", *queue)

    status = mq.ok("topicStatus", "-t", "wide", "--json").json
    assert [(row["brokerName"], row["queueId"]) for row in status] == [(n, q) for n in NAMES for q in (0, 1)]
    assert [row["maxOffset"] for row in status] == [2, 2, 2, 2]

    found = mq.ok("queryMsgByKey", "-t", "wide", "-k", "key", "--json").json
    assert [message["body"] for message in found] == [str(number) for number in range(8)]
    for message in (found[0], found[-1]):
        (same,) = mq.ok("queryMsgById", "-i", message["offsetMsgId"], "--json").json
        assert same["body"] == message["body"]

    read = [json.loads(line) for line in mq.ok("consumeMessage", "-t", "wide", "--json").lines]
    assert sorted(message["body"] for message in read) == [str(number) for number in range(8)]
    only = [
        json.loads(line) for line in mq.ok("consumeMessage", "-t", "wide", "-b", NAMES[1], "--json").lines
    ]
    assert {message["brokerName"] for message in only} == {NAMES[1]}

    assert [row[1] for row in (line.split() for line in mq.ok("clusterList").lines[1:])] == NAMES
    assert mq.ok("topicRoute", "-t", "wide", "-l").lines[-1].split() == ["Total:", "2", "4", "4"]

    mq.ok("deleteTopic", "-t", "wide", "-c", "DefaultCluster")
    for addr in cluster.brokers.values():
        made_again = mq.ok("updateTopic", "-b", addr, "-t", "wide", "-r", "2", "-w", "2")
        assert made_again.lines[0] == f"create topic to {addr} success."
    assert sum(row["maxOffset"] for row in mq.ok("topicStatus", "-t", "wide", "--json").json) == 0


def test_a_group_is_moved_on_both(mq: Shell, cluster: StandaloneProcess) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "moved", "-r", "1", "-w", "1")
    for name in NAMES:
        mq.ok("sendMessage", "-t", "moved", "-p", name, "-b", name, "-i", "0")
    asyncio.run(consume(cluster.namesrv, "movers", "moved", 2))
    words = ("-g", "movers", "-t", "moved", "--json")

    back = mq.ok("resetOffsetByTime", *words, "-s", "0").json
    alone = mq.ok("resetOffsetByTime", *words, "-s", "now", "-b", cluster.brokers[NAMES[1]]).json

    assert [(each["brokerName"], each["consumerOffset"], each["seen"]) for each in back] == [
        (name, 1, 0) for name in NAMES
    ]
    assert [(each["brokerName"], each["seen"]) for each in alone] == [(NAMES[1], 1)]
    stats = mq.ok("statsAll", "-t", "moved", "--json").json
    assert [(each["consumerGroup"], each["accumulation"]) for each in stats] == [("movers", 1)]


def test_settings_and_permissions_of_both(mq: Shell, cluster: StandaloneProcess) -> None:
    changed = mq.ok("updateBrokerConfig", "-c", "DefaultCluster", "-k", "fileReservedTime", "-v", "24")
    found = mq.ok("getBrokerConfig", "-c", "DefaultCluster", "--json").json
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "half-wiped")
    mq.ok("wipeWritePerm", "-b", NAMES[0])
    wiped = mq.ok("topicRoute", "-t", "half-wiped").json["queueDatas"]
    mq.ok("addWritePerm", "-b", NAMES[0])

    assert {line.split()[-1] for line in changed.lines} == set(cluster.brokers.values())
    assert {found[addr]["fileReservedTime"] for addr in cluster.brokers.values()} == {"24"}
    assert {data["brokerName"]: data["perm"] for data in wiped} == {NAMES[0]: 4, NAMES[1]: 6}


async def test_a_question_by_key_leaves_those_of_brokers_that_answer(
    cluster: StandaloneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that accepts missing brokers gets partial results; otherwise a missing broker is an error.

    If no broker responds, it is always an error.
    """
    down: set[str] = set()
    async with Admin(cluster.namesrv) as admin:
        settings = TopicSettings(topic="keyed", read_queue_nums=1, write_queue_nums=1)
        for addr in cluster.brokers.values():
            async for _ in admin.create_topic(settings, broker_addr=addr):
                pass
        message = Message("keyed", b"x", keys=["k"])
        sent = [await admin.send(message, broker_name=name, queue_id=0) for name in NAMES]
        here, gone = (each.msg_id for each in sent)

        def refusing(own: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def called(addr: str, *given: Any, **more: Any) -> Any:
                if addr in down:
                    raise ConnectError(addr, "refused")
                return await own(addr, *given, **more)

            return called

        for name in ("query_message", "timers"):
            monkeypatch.setattr(admin.client.brokers, name, refusing(getattr(admin.client.brokers, name)))
        questions: list[Callable[..., Awaitable[Any]]] = [
            partial(admin.messages_by_key, "keyed", "k"),
            partial(admin.messages_by_unique_key, "keyed", here),
            partial(admin.traces, "nobody", "keyed"),
            partial(admin.timers_with_key, "k"),
        ]
        whole = [await question() for question in questions]
        down.add(cluster.brokers[NAMES[1]])
        for question in questions:
            missing: dict[str, CometError] = {}
            await question(missing=missing)
            assert list(missing) == [NAMES[1]]
            with pytest.raises(ConnectError):
                await question()
        missing = {}
        found = await questions[0](missing=missing)
        assert (len(whole[0]), [each.msg_id for each in found]) == (2, [here])
        assert (await by_unique_key(admin.client, here, None)) is not None
        with pytest.raises(ConnectError):
            await by_unique_key(admin.client, gone, None)
        down |= set(cluster.brokers.values())
        for question in questions:
            with pytest.raises(ConnectError):
                await question(missing={})


@pytest.fixture
def hanging(mq: Shell, cluster: StandaloneProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make broker-b not answer, and return its address.

    `offsets` has offsets and a lag of one message at each broker, `settings` only has settings at broker-b.
    """
    addr = cluster.brokers[NAMES[1]]
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "lagging", "-r", "1", "-w", "1")
    for name in NAMES:
        mq.ok("sendMessage", "-t", "lagging", "-p", name, "-b", name, "-i", "0")
    mq.ok("resetOffsetByTime", "-g", "offsets", "-t", "lagging", "-s", "0", "--force")
    mq.ok("updateSubGroup", "-b", addr, "-g", "settings")
    own = Calls.call

    async def call(self: Calls, to: str, code: Any, *given: Any, **more: Any) -> Any:
        if to == addr:
            raise RequestTimeout(addr, code, 5.0)
        return await own(self, to, code, *given, **more)

    monkeypatch.setattr(Calls, "call", call)
    return addr


def test_the_lag_of_a_group_is_no_number_while_a_broker_hangs(mq: Shell, hanging: str) -> None:
    table = mq.run("consumerProgress", "-g", "offsets", "-s", "true")
    as_json = mq.run("consumerProgress", "-g", "offsets", "--json")

    assert (table.code, as_json.code) == (1, 1)
    assert [line.split()[:2] for line in table.lines if line.startswith("lagging ")] == [
        ["lagging", NAMES[0]]
    ]
    assert table.lines[-2:] == ["Consume TPS: -", "Diff Total: -"]
    assert hanging in table.err
    assert [each["brokerName"] for each in as_json.json["queues"]] == [NAMES[0]]
    assert as_json.json["consumeTps"] is None
    error = json.loads(as_json.err)
    assert (error["error"], len(error["details"]["problems"])) == ("Incomplete", 1)
    assert hanging in error["message"]


def test_the_list_of_groups_names_a_broker_that_hangs(mq: Shell, hanging: str) -> None:
    table = mq.run("consumerProgress")
    as_json = mq.run("consumerProgress", "--json")

    assert (table.code, as_json.code) == (1, 1)
    (line,) = [each.split() for each in table.lines if each.startswith("offsets ")]
    assert line[1:] == ["-"] * 4  # count, version, rate and lag
    (row,) = [each for each in as_json.json if each["group"] == "offsets"]
    assert [row[name] for name in ("count", "version", "consumeTps", "diffTotal")] == [None] * 4
    for outcome in (table, as_json):
        assert "settings" not in outcome.out
        assert hanging in outcome.err


def test_monitoring_prints_no_backlog_while_a_broker_hangs(mq: Shell, hanging: str) -> None:
    found = mq.run("startMonitoring", "--rounds", "2", "--interval", "0.1")
    assert (found.code, found.out, found.err.count(hanging)) == (1, "", 2)
    found = mq.run("startMonitoring", "--rounds", "2", "--interval", "0.1", "--json")
    assert [json.loads(line)["error"] for line in found.err.splitlines()] == ["Incomplete"] * 2


@pytest.mark.parametrize("command", ["statsAll", "topicList -c"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_lists_of_topics_name_a_broker_that_hangs(
    mq: Shell, hanging: str, command: str, form: tuple[str, ...]
) -> None:
    found = mq.run(*command.split(), *form)
    assert (found.code, found.err.count(hanging)) == (1, 2 if form else 1)
    assert bool(found.out)


@pytest.mark.parametrize("command", ["statsAll", "topicList -c"])
def test_lists_of_topics_name_a_broker_that_refuses(
    mq: Shell, hanging: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_others = Calls.call

    async def call(self: Calls, to: str, code: Any, *given: Any, **more: Any) -> Any:
        if to == hanging:
            raise BrokerError(ResponseCode.NO_PERMISSION, remark="no", broker_addr=hanging)
        return await to_others(self, to, code, *given, **more)

    monkeypatch.setattr(Calls, "call", call)
    found = mq.run(*command.split())
    assert (found.code, hanging in found.err) == (1, True)


def test_a_group_is_not_called_unknown_while_a_broker_hangs(
    mq: Shell, hanging: str, cluster: StandaloneProcess
) -> None:
    deleted = mq.ok("deleteSubGroup", "-g", "settings", "-b", cluster.brokers[NAMES[0]])
    assert "no consumer group" not in deleted.err
    for command in ("consumerProgress", "resetOffsetByTime -t lagging -s 0"):
        failed = mq.run(*command.split(), "-g", "settings")
        assert (failed.code, hanging in failed.err) == (1, True)
        assert "no consumer group" not in failed.err


@pytest.mark.parametrize("groups", [[], ["offsets"]])
def test_a_lag_sample_reports_a_broker_that_hangs(
    groups: list[str], hanging: str, cluster: StandaloneProcess
) -> None:
    rows, problems = sample(cluster.namesrv, groups)
    assert [each.broker_name for each in rows if each.group == "offsets"] == [NAMES[0]]
    named = "group offsets:" if groups else f"broker {NAMES[1]}: its groups are missing:"
    assert [each for each in problems if each.startswith(named) and hanging in each]


async def test_without_a_place_for_errors_a_broker_that_hangs_is_an_error(
    hanging: str, cluster: StandaloneProcess
) -> None:
    async with Admin(cluster.namesrv) as admin:
        asks: list[Callable[[], Awaitable[Any]]] = [admin.groups, admin.group_names, admin.group_places]
        for ask in (*asks, admin.topic_uses, partial(admin.progress, "offsets")):
            with pytest.raises(RequestTimeout, match=hanging):
                await ask()
        with pytest.raises(RequestTimeout, match=hanging):
            _ = [each async for each in admin.undone()]

"""`mqadmin` commands for lite topics."""

from __future__ import annotations

import asyncio

import pytest
from tests.admin.conftest import Shell
from tests.broker.lite.conftest import GROUP, PARENT, LiteClient, set_up
from tests.kit.brokers import Peer

from cometmq.testing import LocalBroker

ON_PARENT = ("-p", PARENT)
ON_GROUP = (*ON_PARENT, "-g", GROUP)


async def consume(addr: str) -> None:
    """Let the client `c1` consume a part of the messages."""
    async with Peer(addr) as peer:
        await set_up(peer)
        client = LiteClient(peer)
        await client.send("behind", "1", "2", "3", "4")
        await client.send("near", "1", "2")
        await client.send("done", "1")
        await client.subscribe("near", "done")
        assert len(await client.take(2)) == 2
        await client.subscribe("behind")


@pytest.fixture(scope="module")
def consumed(broker: LocalBroker) -> None:
    asyncio.run(consume(broker.broker_addr))


@pytest.fixture
def used(mq: Shell, consumed: None) -> Shell:
    return mq


def rows(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_the_state_of_lite_topics(used: Shell) -> None:
    addr, name = used.broker.broker_addr, used.broker.broker_name
    _, row, topics, groups = used.ok("getBrokerLiteInfo", "-b", addr, "-d").lines
    assert row.split()[:5] == [addr, "default", "10000000", "3", "3"]
    assert (topics, groups) == ('Topic Meta: {"Sessions": -1}', 'Group Meta: {"Sessions": ["agents"]}')
    assert used.ok("getBrokerLiteInfo", "-c", "DefaultCluster", "--json").json[addr]["currentLmqNum"] == 3

    assert rows(used.ok("getParentTopicInfo", *ON_PARENT).lines)[-1] == [name, "-1", "3", "3", "[agents]"]

    shown = used.ok("getLiteTopicInfo", *ON_PARENT, "-l", "behind", "-s").lines
    assert shown[0] == "Lite Topic Info: [Sessions] [behind] [%LMQ%$Sessions$behind]"
    row = shown[2].split()
    assert (row[:3], row[-2:]) == ([name, "0", "4"], ["true", "1"])
    assert shown[3] == "[c1@agents]"

    shown = used.ok("getLiteClientInfo", *ON_GROUP, "-c", "c1", "-s").lines
    assert (shown[2].split()[:2], shown[2].split()[-1]) == ([name, "3"], "-")
    assert shown[3] == "Lite Topics: [%LMQ%$Sessions$behind, %LMQ%$Sessions$done, %LMQ%$Sessions$near]"
    assert rows(used.ok("getLiteClientInfo", *ON_GROUP, "-c", "other").lines)[2][1] == "N/A"


def test_the_progress_of_a_group(used: Shell) -> None:
    name = used.broker.broker_name
    shown = used.ok("getLiteGroupInfo", *ON_GROUP).lines
    assert shown[2] == "Total Lag Count: 5"
    assert [row[:3] for row in rows(shown[4:6])] == [["1", "behind", "4"], ["2", "near", "1"]]
    assert [row[1] for row in rows(shown[-2:])] == ["behind", "near"]  # By the time of the first message
    shown = used.ok("getLiteGroupInfo", *ON_GROUP, "-k", "1", "--json").json[name]
    assert [each["liteTopic"] for each in shown["lagCountTopK"]] == ["behind"]
    assert shown["earliestUnconsumedTimestamp"] > 0

    assert rows(used.ok("getLiteGroupInfo", *ON_GROUP, "-l", "near").lines)[2][:4] == [name, "2", "1", "1"]
    assert rows(used.ok("getLiteGroupInfo", *ON_GROUP, "-l", "behind").lines)[2] == [name, "-", "-", "-", "-"]
    missing = used.ok("getLiteGroupInfo", *ON_GROUP, "-l", "missing", "--json").json[name]
    assert missing["totalLagCount"] == -1


def test_a_dispatch_names_the_brokers(used: Shell) -> None:
    shown = used.ok("triggerLiteDispatch", *ON_GROUP, "-b", used.broker.broker_name, "-c", "c1").lines
    assert shown[-1].split() == [used.broker.broker_name, "dispatched"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("getParentTopicInfo -p TBW102", "message.type is not LITE"),
        ("getParentTopicInfo -p missing", "missing"),
        ("getLiteTopicInfo -p TBW102 -l s1", "message.type is not LITE"),
        ("getLiteTopicInfo -p Sessions -l a$b", "illegal characters"),
        ("getLiteGroupInfo -p Sessions -g missing", "subscription group[missing] not exist"),
        ("getLiteClientInfo -p Sessions -g unbound -c c1", "lite.bind.topic is not set"),
        ("triggerLiteDispatch -p Sessions -g unbound", "lite.bind.topic is not set"),
        ("triggerLiteDispatch -p Sessions -g agents -b other", "no broker of the topic named other"),
        ("getBrokerLiteInfo", "Give either"),
    ],
)
def test_problems(used: Shell, command: str, problem: str) -> None:
    used.ok("updateSubGroup", "-c", "DefaultCluster", "-g", "unbound")
    failed = used.run(*command.split())
    assert failed.code == 1
    assert problem in failed.err

"""Settings, members and progress of consumer groups on a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.admin.conftest import Outcome, Shell, consume

from cometmq.client import Producer, PushConsumer
from cometmq.message import Message, MessageExt


async def while_online(mq: Shell, group: str, topic: str, look: Callable[[], Any]) -> Any:
    """Return the result of `look` while a consumer and a producer of the group are online."""

    async def take(messages: list[MessageExt]) -> None:
        pass

    async with (
        PushConsumer(group, take, {topic: "a || b"}, namesrv=mq.broker.namesrv),
        Producer(f"{group}-producers", namesrv=mq.broker.namesrv) as producer,
    ):
        await producer.send(Message(topic, b"x", tags="c"))
        return await asyncio.to_thread(look)


def test_who_is_connected_is_shown(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "looked-at", "-p", "x")

    def look() -> list[Outcome]:
        return [
            mq.ok("consumerConnection", "-g", "looking"),
            mq.ok("consumerConnection", "-g", "looking", "-b", mq.broker.broker_addr, "--json"),
            mq.ok("producerConnection", "-g", "looking-producers", "-t", "looked-at"),
            mq.ok("producer", "-b", mq.broker.broker_addr),
            mq.ok("consumerStatus", "-g", "looking", "--json"),
        ]

    shown, as_json, senders, groups, status = asyncio.run(while_online(mq, "looking", "looked-at", look))

    assert shown.lines[0].split() == ["#ClientId", "#ClientAddr", "#Language", "#Version"]
    assert shown.lines[1].split()[2:] == ["PYTHON", "V4_9_7"]
    assert shown.lines[2:5] == ["", "Below is subscription:", "#Topic               #SubExpression"]
    assert "looked-at            a || b" in shown.lines
    assert shown.lines[-3:] == [
        "ConsumeType: CONSUME_PASSIVELY",
        "MessageModel: CLUSTERING",
        "ConsumeFromWhere: CONSUME_FROM_LAST_OFFSET",
    ]
    assert as_json.json["connectionSet"][0]["clientAddr"].startswith("127.0.0.1:")
    assert senders.lines[0].split()[0] == "0001"
    assert senders.lines[0].split()[3:] == ["PYTHON", "V4_9_7"]
    assert any(
        line.startswith("producer group (looking-producers) instance : clientId=") for line in groups.lines
    )
    assert status.json["members"][0]["clientId"] == as_json.json["connectionSet"][0]["clientId"]


def test_all_that_a_member_says_is_shown(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "asked", "-p", "x", "-b", mq.broker.broker_name, "-i", "0")

    def look() -> tuple[Outcome, Outcome]:
        members = mq.ok("consumerConnection", "-g", "asked-group", "--json").json["connectionSet"]
        words = ("consumerStatus", "-g", "asked-group", "-i", members[0]["clientId"])
        return mq.ok(*words), mq.ok(*words, "-b", mq.broker.broker_addr, "--json")

    shown, as_json = asyncio.run(while_online(mq, "asked-group", "asked", look))

    heads = [line for line in shown.lines if line.startswith("#Consumer ")]
    assert heads == [
        "#Consumer Properties#",
        "#Consumer Subscription#",
        "#Consumer Offset#",
        "#Consumer MQ Detail#",
        "#Consumer RT&TPS#",
    ]
    assert any("Topic: asked " in line and line.endswith("SubExpression: a || b") for line in shown.lines)
    assert as_json.json["subscriptionSet"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("consumerConnection", "-g", "nobody-there"), "no consumer group named nobody-there"),
        (("producerConnection", "-g", "nobody-there", "-t", "TBW102"), "not exist"),
        (("getConsumerConfig", "-g", "nobody-there"), "no consumer group named nobody-there"),
    ],
)
def test_a_group_that_is_not_there_is_an_error(mq: Shell, words: tuple[str, ...], code: str) -> None:
    failed = mq.run(*words)

    assert failed.code == 1
    assert code in failed.err


def test_a_group_pops_a_topic_once_its_mode_is_set(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "popped")
    addr = mq.broker.broker_addr

    made = mq.ok(
        "setConsumeMode", "-c", "DefaultCluster", "-t", "popped", "-g", "poppers", "-m", "pop", "-q", "2"
    )

    assert made.lines == [
        f"set consume mode to {addr} success.",
        "topic[popped] group[poppers] consume mode[POP] popShareQueueNum[2]",
    ]
    failed = mq.run("setConsumeMode", "-b", addr, "-t", "missing", "-g", "poppers", "-m", "POP")
    assert failed.code == 1
    assert "topic[missing] not exist" in failed.err


def test_the_life_of_a_groups_settings(mq: Shell) -> None:
    made = mq.ok("updateSubGroup", "-c", "DefaultCluster", "-g", "kept", "-r", "3", "-q", "2", "-d", "true")

    assert made.lines == [
        f"create subscription group to {mq.broker.broker_addr} success.",
        "SubscriptionGroupConfig [groupName=kept, consumeEnable=true, consumeFromMinEnable=false, "
        "consumeBroadcastEnable=true, retryQueueNums=2, retryMaxTimes=3, brokerId=0, "
        "whichBrokerWhenConsumeSlowly=1, notifyConsumerIdsChangedEnable=true]",
    ]
    shown = mq.ok("getConsumerConfig", "-g", "kept").lines
    assert shown[0] == f"{'=' * 29}DefaultCluster:{mq.broker.broker_name}{'=' * 29}"
    assert f"{'retryMaxTimes':<40}=  3" in shown
    config = mq.ok("getConsumerConfig", "-g", "kept", "--json").json[0]["config"]
    assert (config["groupName"], config["retryQueueNums"]) == ("kept", 2)

    would = mq.ok("deleteSubGroup", "-b", mq.broker.broker_addr, "-g", "kept", "-r", "true", "--dry-run")
    assert would.lines == [
        f"would delete group kept with its offsets at {mq.broker.broker_addr}",
        "Nothing was done: this was a dry run.",
    ]
    assert mq.run("getConsumerConfig", "-g", "kept").code == 0
    gone = mq.ok("deleteSubGroup", "-b", mq.broker.broker_addr, "-g", "kept")
    assert gone.lines == [f"delete subscription group [kept] from broker [{mq.broker.broker_addr}] success."]
    assert gone.err == f"will delete group kept at {mq.broker.broker_addr}\n"
    assert mq.run("getConsumerConfig", "-g", "kept").code == 1


def test_a_group_is_deleted_with_its_topics_from_a_cluster(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "left-over", "-p", "x")
    asyncio.run(consume(mq.broker.namesrv, "leavers", "left-over", 1))
    assert "%RETRY%leavers" in mq.ok("topicList").lines

    gone = mq.ok("deleteSubGroup", "-c", "DefaultCluster", "-g", "leavers", "-r", "true", "--json")

    assert gone.json == {
        "group": "leavers",
        "brokerAddrs": [mq.broker.broker_addr],
        "topics": ["%RETRY%leavers"],
    }
    assert gone.err == ""
    assert "%RETRY%leavers" not in mq.ok("topicList").lines


def test_how_far_all_groups_of_a_broker_are(mq: Shell) -> None:
    queue = ("-b", mq.broker.broker_name, "-i", "0")
    mq.ok("sendMessage", "-t", "behind", "-p", "x", *queue)
    asyncio.run(consume(mq.broker.namesrv, "behind-group", "behind", 1))
    mq.ok("sendMessage", "-t", "behind", "-p", "y", *queue)

    shown = mq.ok("brokerConsumeStats", "-b", mq.broker.broker_addr).lines
    level = mq.ok("brokerConsumeStats", "-b", mq.broker.broker_addr, "-l", "2", "--json").json

    assert shown[0].split()[:3] == ["#Topic", "#Group", "#Broker"]
    row = next(line.split() for line in shown if line.startswith("behind "))
    assert row[1:7] == ["behind-group", mq.broker.broker_name, "0", "2", "1", "1"]
    assert shown[-1].startswith("Diff Total: ")
    assert all(each["queue"]["topic"] != "behind" for each in level["queues"])
    only = mq.ok("consumerProgress", "-g", "behind-group", "-t", "behind", "--json").json["queues"]
    assert {each["topic"] for each in only} == {"behind"}


def test_monitoring_tells_what_groups_that_are_online_have_left(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "monitored", "-p", "x")

    def look() -> Outcome:
        return mq.ok("startMonitoring", "--rounds", "1", "--interval", "0.1")

    shown = asyncio.run(while_online(mq, "monitored-group", "monitored", look))

    wanted = "UndoneMsgs [consumerGroup=monitored-group, topic=monitored, undoneMsgsTotal="
    assert any(line.startswith(wanted) for line in shown.lines)

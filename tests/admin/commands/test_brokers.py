"""clusterList, brokerStatus, consumerProgress and consumerStatus on a real cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.admin.conftest import Shell, consume
from tests.kit.waiting import until

from cometmq.admin import Admin, RetryLimits
from cometmq.admin.groups import settings_of
from cometmq.client import ConsumeFromWhere, MessageModel, PushConsumer, PushOptions
from cometmq.message import MessageExt
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import RequestCode
from cometmq.testing import local_broker


def test_the_cluster_is_listed_with_its_broker(mq: Shell) -> None:
    lines = mq.ok("clusterList").lines
    brokers = mq.ok("clusterList", "--json").json

    assert lines[0].split()[:4] == ["#Cluster", "Name", "#Broker", "Name"]
    row = ["DefaultCluster", mq.broker.broker_name, "0", mq.broker.broker_addr, "V4_9_7"]
    assert lines[1].split()[:5] == row
    assert lines[1].split()[-2:] == ["ASYNC_MASTER", "-"]
    assert [(broker["role"], broker["lag"]) for broker in brokers] == [("ASYNC_MASTER", None)]
    assert [(broker["brokerName"], broker["brokerId"]) for broker in brokers] == [(mq.broker.broker_name, 0)]
    assert brokers[0]["runtime"]["brokerVersionDesc"] == "V4_9_7"


def test_more_stats_count_the_messages_of_the_day(mq: Shell) -> None:
    def today() -> int:
        return int(mq.ok("clusterList", "-m").lines[1].split()[4])

    before = today()
    for _ in range(3):
        mq.ok("sendMessage", "-t", "counted-today", "-p", "x")

    assert today() == before + 3


def test_the_status_of_a_broker_is_sorted_keys_and_values(mq: Shell) -> None:
    lines = mq.ok("brokerStatus", "-b", mq.broker.broker_addr).lines
    keys = [line.split(":")[0].strip() for line in lines]

    assert keys == sorted(keys)
    assert {"brokerVersionDesc", "putTps", "commitLogMaxOffset", "bootTimestamp"} <= set(keys)
    assert mq.ok("brokerStatus", "-b", mq.broker.broker_addr, "--json").json.keys() == set(keys)


def test_the_status_of_a_cluster_names_the_broker_on_each_line(mq: Shell) -> None:
    lines = mq.ok("brokerStatus", "-c", "DefaultCluster").lines

    assert {line.split()[0] for line in lines} == {mq.broker.broker_addr}


def test_a_groups_progress_shows_what_it_has_left(mq: Shell) -> None:
    queue = ("-b", mq.broker.broker_name, "-i", "0")
    for body in ("a", "b"):
        mq.ok("sendMessage", "-t", "followed", "-p", body, *queue)
    asyncio.run(consume(mq.broker.namesrv, "follower", "followed", 2))
    mq.ok("sendMessage", "-t", "followed", "-p", "c", *queue)

    lines = mq.ok("consumerProgress", "-g", "follower").lines
    progress = mq.ok("consumerProgress", "-g", "follower", "--json").json
    groups = mq.ok("consumerProgress", "--json").json

    assert lines[0].split()[:3] == ["#Topic", "#Broker", "Name"]
    row = next(line.split() for line in lines if line.startswith("followed") and line.split()[2] == "0")
    assert row[:6] == ["followed", mq.broker.broker_name, "0", "3", "2", "1"]
    assert lines[-1] == "Diff Total: 1"
    assert {(q["topic"], q["queueId"]): q["consumerOffset"] for q in progress["queues"]}[("followed", 0)] == 2
    summary = next(group for group in groups if group["group"] == "follower")
    assert (summary["count"], summary["version"], summary["diffTotal"]) == (0, "", 1)


def test_groups_without_members_are_listed_as_offline(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "listed", "-p", "x")
    asyncio.run(consume(mq.broker.namesrv, "listed-group", "listed", 1))

    lines = mq.ok("consumerProgress").lines

    assert lines[0].split()[:2] == ["#Group", "#Count"]
    row = next(line.split() for line in lines if line.startswith("listed-group"))
    assert row[1:3] == ["0", "OFFLINE"]


async def progress_while_online(namesrv: str, shell: Shell) -> tuple[list[str], dict[str, str]]:
    ready = asyncio.Event()

    async def take(messages: list[MessageExt]) -> None:
        ready.set()

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer("online", take, "watched", namesrv=namesrv, options=options) as consumer:
        await asyncio.wait_for(ready.wait(), 30)
        await consumer.persist_offsets()
        lines = await asyncio.to_thread(
            lambda: shell.ok("consumerProgress", "-g", "online", "-s", "true").lines
        )
        groups = await asyncio.to_thread(lambda: shell.ok("consumerProgress", "--json").json)
    return lines, next(group for group in groups if group["group"] == "online")


def test_a_member_is_counted_and_shown_beside_its_queues(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "watched", "-p", "x", "-b", mq.broker.broker_name, "-i", "0")

    lines, group = asyncio.run(progress_while_online(mq.broker.namesrv, mq))

    row = next(line.split() for line in lines if line.startswith("watched") and line.split()[2] == "0")
    assert row[5] == "127.0.0.1"
    assert (group["count"], group["consumeType"], group["messageModel"]) == (1, "PUSH", "CLUSTERING")


async def process_directly(
    namesrv: str, shell: Shell, arguments: tuple[str, ...]
) -> tuple[list[str], list[bytes]]:
    """Run a command while a group has one member.

    Returns:
        The printed lines, and the bodies that the listener received.
    """
    bodies: list[bytes] = []

    async def take(messages: list[MessageExt]) -> None:
        bodies.extend(bytes(message.body) for message in messages)

    options = PushOptions(consume_from_where=ConsumeFromWhere.LAST_OFFSET)
    async with PushConsumer("direct", take, "directed", namesrv=namesrv, options=options) as consumer:
        client_id = consumer.client.client_id
        outcome = await asyncio.to_thread(lambda: shell.ok(*arguments, "-g", "direct", "-d", client_id))
    return outcome.lines, bodies


@pytest.mark.parametrize("by", ["queryMsgById", "queryMsgByUniqueKey"])
def test_a_message_is_processed_by_the_member_that_was_named(mq: Shell, by: str) -> None:
    sent = mq.ok("sendMessage", "-t", "directed", "-p", by, "--json").json
    msg_id = sent["offsetMsgId"] if by == "queryMsgById" else sent["msgId"]
    topic = () if by == "queryMsgById" else ("-t", "directed")

    lines, bodies = asyncio.run(process_directly(mq.broker.namesrv, mq, (by, "-i", msg_id, *topic)))

    assert len(lines) == 1
    assert lines[0].startswith(
        "ConsumeMessageDirectlyResult [order=false, autoCommit=true, consumeResult=CR_SUCCESS, remark=null, "
    )
    assert by.encode() in bodies


@pytest.mark.parametrize("command", ["consumerProgress", "consumerStatus"])
def test_a_group_nobody_knows_is_an_error(mq: Shell, command: str) -> None:
    failed = mq.run(command, "-g", "strangers")

    assert failed.code == 1
    assert "no consumer group named strangers; known: " in failed.err
    assert "%RETRY%" not in failed.err


async def status_of_two(
    namesrv: str,
    shell: Shell,
    expressions: tuple[str, str],
    options: tuple[PushOptions | None, PushOptions | None] = (None, None),
) -> tuple[list[str], Any]:
    """Return consumerStatus of a group whose two members have these expressions and options."""

    async def take(messages: list[MessageExt]) -> None:
        pass

    one, two = (
        PushConsumer("pair", take, {"paired": text}, namesrv=namesrv, options=more)
        for text, more in zip(expressions, options, strict=True)
    )
    async with one, two:

        async def shared_out() -> Any:
            """Return the status as JSON once both members have queues and no queue changes its owner."""
            found = await asyncio.to_thread(lambda: shell.ok("consumerStatus", "-g", "pair", "--json").json)
            held = [{queue["topic"] for queue in each["queues"] or ()} for each in found["members"]]
            shared = len(held) == 2 and all("paired" in topics for topics in held)
            return found if shared and not found["unbalanced"] else None

        found = await until(shared_out)
        return await asyncio.to_thread(lambda: shell.ok("consumerStatus", "-g", "pair").lines), found


def test_members_that_subscribe_the_same_are_shown(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "paired", "-p", "x")

    lines, found = asyncio.run(status_of_two(mq.broker.namesrv, mq, ("x || y", "y||x")))

    assert lines[0].split() == ["#Index", "#ClientId", "#Version", "#Subscription"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert all(line.endswith(" paired x || y") for line in lines[1:3])
    assert lines[3:] == ["", "Same subscription in the same group of consumer", "", "Rebalance OK"]
    assert found["unbalanced"] == {}
    held = [
        {queue["queueId"] for queue in each["queues"] if queue["topic"] == "paired"}
        for each in found["members"]
    ]
    assert held[0] & held[1] == set()
    assert sorted(held[0] | held[1]) == list(range(4))
    assert [each["subscriptions"] for each in found["members"]] == [{"paired": "x || y"}] * 2
    assert found["differences"] == {}


def test_members_that_do_not_are_shown_with_the_difference(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "paired", "-p", "x")

    lines, found = asyncio.run(status_of_two(mq.broker.namesrv, mq, ("x", "*")))

    clients = {each["subscriptions"]["paired"]: each["clientId"] for each in found["members"]}
    assert found["differences"] == {"paired": {"x": [clients["x"]], "*": [clients["*"]]}}
    assert lines[4] == "WARN: Different subscription in the same group of consumer!!!"
    assert lines[5].split() == ["#Topic", "#Expression", "#Client", "IDs"]
    assert sorted(line.split() for line in lines[6:]) == sorted(
        ["paired", text, client] for text, client in clients.items()
    )


def test_members_that_have_set_different_things_are_shown_before_any_of_them_has_failed(
    mq: Shell, tmp_path: Path
) -> None:
    mq.ok("sendMessage", "-t", "paired", "-p", "x")
    broadcasting = PushOptions(
        message_model=MessageModel.BROADCASTING,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        offset_dir=str(tmp_path),
    )
    options = (PushOptions(max_reconsume_times=3, orderly=True), broadcasting)

    lines, found = asyncio.run(status_of_two(mq.broker.namesrv, mq, ("x", "x"), options))

    of = {each["settings"]["messageModel"]: each["clientId"] for each in found["members"]}
    one, two = of["CLUSTERING"], of["BROADCASTING"]
    assert (found["differences"], found["settingDifferences"]) == (
        {},
        {
            "messageModel": {"CLUSTERING": [one], "BROADCASTING": [two]},
            "consumeFromWhere": {
                "CONSUME_FROM_LAST_OFFSET": [one],
                "CONSUME_FROM_FIRST_OFFSET": [two],
            },
            "consumeOrderly": {"true": [one], "false": [two]},
            "maxReconsumeTimes": {"3": [one], "16": [two]},
        },
    )
    assert lines[4] == "WARN: Different settings in the same group of consumer!!!"
    assert lines[5].split() == ["#Setting", "#Value", "#Client", "IDs"]
    assert [line.split()[0] for line in lines[6::2]] == sorted(found["settingDifferences"])
    assert ["maxReconsumeTimes", "3", one] in [line.split() for line in lines]


async def give_retries(namesrv: str, addr: str, group: str, most: int) -> None:
    """Set a group's own retryMaxTimes."""
    body = SubscriptionGroupConfig(group_name=group, retry_max_times=most).encode()
    async with Admin(namesrv) as admin:
        await admin.client.brokers.call(addr, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)


def test_the_maximum_that_the_group_was_given_is_shown_beside_those_of_its_members(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "paired", "-p", "x")
    asyncio.run(give_retries(mq.broker.namesrv, mq.broker.broker_addr, "pair", 1))
    try:
        lines, found = asyncio.run(status_of_two(mq.broker.namesrv, mq, ("x", "x")))
    finally:
        asyncio.run(give_retries(mq.broker.namesrv, mq.broker.broker_addr, "pair", 16))

    clients = [each["clientId"] for each in found["members"]]
    assert found["settingDifferences"] == {"maxReconsumeTimes": {"16": clients, "1": [""]}}
    assert lines[-1].split(maxsplit=2) == ["maxReconsumeTimes", "1", "(retryMaxTimes of the group)"]


@pytest.mark.parametrize(
    ("said", "most"),
    [
        ({}, {}),
        ({"maxReconsumeTimes": "3"}, {"maxReconsumeTimes": "3"}),
        ({"maxReconsumeTimes": "-1"}, {"maxReconsumeTimes": "16"}),
        (
            {"maxReconsumeTimes": "-1", "PROP_CONSUMEORDERLY": "true"},
            {"maxReconsumeTimes": "2147483647", "consumeOrderly": "true"},
        ),
        ({"messageModel": "CLUSTERING", "pullBatchSize": "32"}, {"messageModel": "CLUSTERING"}),
    ],
)
def test_what_a_running_info_says_of_settings(said: dict[str, str], most: dict[str, str]) -> None:
    assert settings_of(said) == most


@pytest.mark.parametrize(
    ("group", "members", "differ"),
    [
        (16, [], False),
        (1, [], False),
        (16, [3, 3], False),
        (16, [3, 16], True),
        (1, [16], True),
        (1, [1, 1], False),
        (0, [1], True),
    ],
)
def test_when_limits_of_retries_differ(group: int, members: list[int], differ: bool) -> None:
    named = {f"c{number}": limit for number, limit in enumerate(members)}
    assert RetryLimits(group=group, members=named).differ is differ


def test_a_group_without_members_is_an_error(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "left", "-p", "x")
    asyncio.run(consume(mq.broker.namesrv, "left-group", "left", 1))

    failed = mq.run("consumerStatus", "-g", "left-group")

    assert failed.code == 1
    assert "not online" in failed.err


def test_settings_are_shown_and_changed(mq: Shell) -> None:
    at = ("-b", mq.broker.broker_addr)

    changed = mq.ok("updateBrokerConfig", *at, "-k", "slaveReadEnable", "-v", "true")
    later = mq.ok("updateBrokerConfig", "-c", "DefaultCluster", "-k", "messageIndexSafe", "-v", "true")
    unknown = mq.run("updateBrokerConfig", *at, "-k", "slaveReadEnabled", "-v", "true")
    refused = mq.run("updateBrokerConfig", *at, "-k", "storePathRootDir", "-v", "/")
    wrong = mq.run("updateBrokerConfig", *at, "-k", "fileReservedTime", "-v", "soon", "--json")

    assert (changed.lines, changed.err) == ([f"update broker config success, {mq.broker.broker_addr}"], "")
    assert later.err == f"{at[1]}: messageIndexSafe is written, and takes effect at the next start\n"
    assert (unknown.code, "slaveReadEnabled is unknown and was ignored" in unknown.err) == (1, True)
    assert (refused.code, "black list" in refused.err) == (1, True)
    assert (wrong.code, "fileReservedTime" in wrong.err) == (1, True)
    shown = mq.ok("getBrokerConfig", *at).lines
    assert shown[0] == f"============{mq.broker.broker_addr}============"
    assert f"{'slaveReadEnable':<50}=  true" in shown
    for key in ("transientStorePoolEnable", "enableCalcFilterBitMap", "enableBatchPush"):
        assert f"{key:<50}=  false  (no effect here)" in shown
        told = mq.ok("updateBrokerConfig", *at, "-k", key, "-v", "false").err
        assert f"{at[1]}: {key} is accepted but has no effect on this broker\n" in told
    of_cluster = mq.ok("getBrokerConfig", "-c", "DefaultCluster")
    assert of_cluster.lines[0] == f"============Master: {mq.broker.broker_addr}============"
    as_json = mq.ok("getBrokerConfig", "-c", "DefaultCluster", "--json").json
    assert as_json[mq.broker.broker_addr]["messageIndexSafe"] == "true"


def test_a_change_that_the_next_start_forgets_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_broker(tmp_path, {"brokerConfigPath": ""}) as broker:  # as for a broker without -c
        mq = Shell(broker, capsys, monkeypatch)
        words = ("updateBrokerConfig", "-b", broker.broker_addr, "-k", "messageIndexSafe", "-v", "true")
        told, as_json = mq.ok(*words), mq.ok(*words, "--json").json

    assert told.lines == [f"update broker config success, {broker.broker_addr}"]
    assert "no settings file (mqbroker -c FILE)" in told.err
    assert "is written" not in told.err
    assert as_json[0]["notWritten"] is True


@pytest.mark.parametrize("command", ["cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"])
@pytest.mark.parametrize("target", [(), ("-b", "{addr}"), ("-c", "DefaultCluster")])
def test_files_are_cleaned_up(mq: Shell, command: str, target: tuple[str, ...]) -> None:
    words = (command, *(word.format(addr=mq.broker.broker_addr) for word in target))

    assert mq.ok(*words, "--dry-run").lines[0].endswith(f" at {mq.broker.broker_addr}")
    assert mq.ok(*words).lines == ["success"]


def test_messages_in_and_out_are_counted(mq: Shell) -> None:
    for _ in range(2):
        mq.ok("sendMessage", "-t", "counted", "-p", "x")
    asyncio.run(consume(mq.broker.namesrv, "counters", "counted", 2))
    mq.ok("sendMessage", "-t", "counted", "-p", "y")
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "uncounted")

    lines = mq.ok("statsAll", "-t", "counted").lines
    (row,) = mq.ok("statsAll", "-t", "counted", "--json").json
    (idle,) = mq.ok("statsAll", "-t", "uncounted").lines[1:]

    assert lines[0].split()[:3] == ["#Topic", "#Consumer", "Group"]
    assert [lines[1].split()[at] for at in (0, 1, 2, 5, 6)] == ["counted", "counters", "1", "3", "2"]
    assert (row["accumulation"], row["inMsg24Hours"], row["outMsg24Hours"]) == (1, 3, 2)
    assert row["inTps"] > 0
    assert idle.split()[1:] == ["0", "-", "0", "NO_CONSUMER"]
    (unused,) = mq.ok("statsAll", "-t", "uncounted", "--json").json
    assert (unused["inTps"], unused["outTps"]) == (None, None)
    active = {each["topic"] for each in mq.ok("statsAll", "-a", "--json").json}
    assert "counted" in active
    assert "uncounted" not in active


def test_entries_of_a_queue_are_shown(mq: Shell) -> None:
    place = ("-b", mq.broker.broker_name, "-i", "0")
    sent = [
        mq.ok("sendMessage", "-t", "entries", "-p", "x", "-c", "T", *place, "--json").json for _ in range(3)
    ]
    words = ("queryCq", "-t", "entries", "-q", "0")

    lines = mq.ok(*words, "-i", "1", "-c", "1", "-g", "nobody").lines
    found = mq.ok(*words, "-i", "0", "--json").json

    assert "max: 3, min: 0" in lines
    assert "nobody@entries is not online!" in lines
    assert [line for line in lines if line.startswith("idx: ")] == ["idx: 1"]
    assert [each["tagsCode"] for each in found["queueData"]] == [ord("T")] * len(sent)
    beyond = mq.run(*words, "-i", "3")
    assert (beyond.code, "is not exist" in beyond.err) == (1, True)

"""Every command uses the same list of existing groups, and a mistyped name creates no group."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.admin.conftest import Shell

from cometmq import ConsumeFromWhere, MessageModel, PushConsumer, PushOptions, SyncPushConsumer
from cometmq.admin import Admin
from cometmq.admin.commands import mqadmin
from cometmq.admin.errors import MAX_LISTED_NAMES, UnknownNameError
from cometmq.errors import ConnectError, NoRouteError
from cometmq.protocol.bodies import ConsumerRunningInfo, TopicRouteData
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.frame import Frame

READS = (
    *("consumerProgress -g", "consumerStatus -g", "consumerConnection -g", "getConsumerConfig -g"),
    "consumeMessage -t known -c 1 -g",
)
CHANGES = (
    "resetOffsetByTime -t known -s 0 -g",
    "resetOffsetByTime -t known -s 0 -f false -g",
    "skipAccumulatedMessage -t known -g",
    "cloneGroupOffset -t known -s readers -d",
    "cloneGroupOffset -t known -d readers -s",
)
# Commands that create or delete the group, use a producer group, or only read or handle messages with it.
OTHERS = {
    *("updateSubGroup", "deleteSubGroup", "producerConnection", "queryCq"),
    *("queryMsgById", "queryMsgByUniqueKey", "exportMetadata", "setConsumeMode"),
    *("getLiteClientInfo", "getLiteGroupInfo", "triggerLiteDispatch"),
}


@pytest.fixture
def known(mq: Shell) -> Iterator[Shell]:
    """Create a topic `known` with a message, and a group `readers`."""
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "known", "-r", "1", "-w", "1")
    mq.ok("sendMessage", "-t", "known", "-p", "x")
    mq.ok("resetOffsetByTime", "-g", "readers", "-t", "known", "-s", "now", "-f", "true")
    yield mq
    assert "ghost" not in groups(mq)


def groups(mq: Shell) -> list[str]:
    return [each["group"] for each in mq.ok("consumerProgress", "--json").json]


def test_these_are_all_commands_that_take_a_group() -> None:
    taking = {
        name
        for name, command in mqadmin.commands.items()
        if any(each.name in {"group", "source", "target"} for each in command.params)
    }
    assert taking - OTHERS == {line.split()[0] for line in (*READS, *CHANGES)}


@pytest.mark.parametrize("line", [*READS, *CHANGES])
def test_an_unknown_group_is_named_and_not_made(known: Shell, line: str) -> None:
    failed = known.run(*line.split(), "ghost")

    assert failed.code == 1
    assert "no consumer group named ghost" in failed.err


def test_a_deletion_of_an_unknown_group_says_so_and_succeeds_as_apaches(known: Shell) -> None:
    done = known.ok("deleteSubGroup", "-b", known.broker.broker_addr, "-g", "ghost")
    assert "no consumer group named ghost" in done.err


def test_the_nearest_group_is_suggested(known: Shell) -> None:
    failed = known.run("resetOffsetByTime", "-t", "known", "-s", "0", "-g", "reader")
    assert "did you mean readers?" in failed.err
    assert "--force creates the offsets of an unknown group." in failed.err


@pytest.mark.parametrize(
    "line",
    [
        "resetOffsetByTime -s 0 --force -t known -g",
        "resetOffsetByTime -f true -s 0 -t known -g",
        "skipAccumulatedMessage --force -t known -g",
        "cloneGroupOffset -s readers --force -t known -d",
    ],
)
def test_with_force_it_is_done_and_the_group_is_known_from_then_on(known: Shell, line: str) -> None:
    group = f"forced{abs(hash(line))}"
    known.ok(*line.split(), group)

    assert group in groups(known)
    assert known.ok("consumerProgress", "-g", group, "--json").json["queues"]
    known.ok("resetOffsetByTime", "-g", group, "-t", "known", "-s", "0")


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ("-t known", 1, "require -g/--groupName"),
        ("-c DefaultCluster", 1, "require -g/--groupName"),
        ("-g readers -c nosuch", 1, "no cluster named nosuch"),
        ("-g readers -t knwn", 1, "no topic of the group named knwn; did you mean known?"),
        ("-g readers -t known -c DefaultCluster", 0, ""),
    ],
)
def test_a_filter_of_the_progress_is_applied_or_refused(
    known: Shell, words: str, code: int, problem: str
) -> None:
    outcome = known.run("consumerProgress", *words.split())
    assert (outcome.code, problem in outcome.err) == (code, True)
    assert bool(outcome.out) == (code == 0)


def test_an_unknown_name_lists_few_of_many_names() -> None:
    names = [f"group-{number}" for number in range(5_000)]
    error = pickle.loads(pickle.dumps(UnknownNameError("consumer group", "nothing", names)))
    assert (len(error.known), error.more) == (MAX_LISTED_NAMES, 5_000 - MAX_LISTED_NAMES)
    assert str(error).endswith(f"group-15 and {5_000 - MAX_LISTED_NAMES} more")
    assert str(UnknownNameError("consumer group", "group-4999x", names)).endswith("did you mean group-4999?")


@pytest.mark.parametrize("moment", ["-1", "now"])
def test_minus_one_is_the_end(known: Shell, moment: str) -> None:
    found = known.ok("resetOffsetByTime", "-g", "readers", "-t", "known", "-s", moment, "--json").json
    assert [each["rollbackOffset"] == each["brokerOffset"] > 0 for each in found] == [True]


def with_settings(mq: Shell, group: str) -> None:
    mq.ok("updateSubGroup", "-c", "DefaultCluster", "-g", group)


def with_retry_topic(mq: Shell, group: str) -> None:
    mq.ok("sendMessage", "-t", RETRY_PREFIX + group, "-p", "x")


def with_offsets(mq: Shell, group: str) -> None:
    mq.ok("skipAccumulatedMessage", "-t", "known", "-g", group, "--force")


def with_members(mq: Shell, group: str) -> None:
    async def join() -> None:
        options = PushOptions(consume_from_where=ConsumeFromWhere.LAST_OFFSET)
        async with PushConsumer(group, lambda _: None, "known", namesrv=mq.broker.namesrv, options=options):
            pass

    asyncio.run(join())


@pytest.mark.parametrize("make", [with_settings, with_retry_topic, with_offsets, with_members])
def test_every_command_has_the_same_answer(known: Shell, make: Callable[[Shell, str], None]) -> None:
    group = make.__name__
    make(known, group)

    assert group in groups(known)
    known.ok("consumerProgress", "-g", group)
    known.ok("resetOffsetByTime", "-g", group, "-t", "known", "-s", "0")
    for line in READS:
        assert "no consumer group" not in known.run(*line.split(), group).err

    async def ask() -> list[str]:
        async with Admin(known.broker.namesrv) as admin:
            assert await admin.brokers_of(group)
            return await admin.group_names()

    assert group in asyncio.run(ask())


def test_a_group_that_only_has_members_is_known(known: Shell) -> None:
    settings = ("updateBrokerConfig", "-b", known.broker.broker_addr, "-k", "autoCreateSubscriptionGroup")
    known.ok(*settings, "-v", "false")
    try:
        with SyncPushConsumer("members", lambda _: None, "known", namesrv=known.broker.namesrv):
            assert "%RETRY%members" not in known.ok("topicList").lines
            assert "members" in groups(known)
            known.ok("consumerProgress", "-g", "members")
    finally:
        known.ok(*settings, "-v", "true")


def test_retry_topics_of_pops_are_no_groups_and_are_deleted_with_their_group(known: Shell) -> None:
    with_settings(known, "popping")
    with_settings(known, "popping_orders")
    for topic in ("orders", "popping_known", "popping_orders", "popping_other"):
        name = topic if topic == "orders" else RETRY_PREFIX + topic
        known.ok("updateTopic", "-c", "DefaultCluster", "-t", name, "-r", "1", "-w", "1")
    assert {"popping", "popping_orders", "popping_other"} <= set(groups(known))
    assert "popping_known" not in groups(known)
    known.ok("deleteSubGroup", "-c", "DefaultCluster", "-g", "popping")
    left = {each for each in known.ok("topicList").lines if "popping" in each}
    assert left == {RETRY_PREFIX + "popping_orders", RETRY_PREFIX + "popping_other"}


def test_a_group_without_settings_is_told_from_an_unknown_one(known: Shell) -> None:
    with_offsets(known, "unset")
    assert (
        "group unset exists, but no broker has settings of it"
        in known.run("getConsumerConfig", "-g", "unset").err
    )


def test_all_groups_of_a_broker_include_one_that_only_has_offsets(known: Shell) -> None:
    known.ok("resetOffsetByTime", "-s", "0", "--force", "-t", "known", "-g", "stored")
    rows = known.ok("brokerConsumeStats", "-b", known.broker.broker_addr, "--json").json["queues"]
    (row,) = [each["queue"] for each in rows if each["group"] == "stored"]
    assert row["brokerOffset"] - row["consumerOffset"] > 0


def test_a_group_whose_offsets_no_broker_stores_has_a_rate_and_no_lag(known: Shell, tmp_path: Path) -> None:
    seen = threading.Event()
    options = PushOptions(
        message_model=MessageModel.BROADCASTING,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        offset_dir=str(tmp_path),
    )
    with SyncPushConsumer(
        "casting", lambda _: seen.set(), "known", namesrv=known.broker.namesrv, options=options
    ):
        assert seen.wait(30)
        assert known.ok("consumerProgress", "-g", "casting", "--json").json["consumeTps"] > 0
        assert known.ok("consumerProgress", "-g", "casting").lines[-1] == "Diff Total: -"


def test_a_group_without_queues_has_neither_rate_nor_lag(known: Shell) -> None:
    with_settings(known, "resting")
    assert known.ok("consumerProgress", "-g", "resting").lines[-2:] == ["Consume TPS: -", "Diff Total: -"]
    assert known.ok("consumerProgress", "-g", "resting", "--json").json["consumeTps"] is None
    (line,) = [each.split() for each in known.ok("consumerProgress").lines if each.startswith("resting ")]
    assert line[-2:] == ["-", "-"]


def test_a_retry_topic_that_is_created_between_two_requests_has_its_brokers(
    known: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_retry_topic(known, "readers")
    failures = [NoRouteError(RETRY_PREFIX + "readers")]

    async def brokers() -> list[str]:
        async with Admin(known.broker.namesrv) as admin:
            find = admin.client.namesrv.route

            async def route(topic: str) -> TopicRouteData:
                if failures:
                    raise failures.pop()
                return await find(topic)

            monkeypatch.setattr(admin.client.namesrv, "route", route)
            return list((await admin.brokers_of("readers")).values())

    assert asyncio.run(brokers()) == [known.broker.broker_addr]
    assert not failures


@pytest.mark.parametrize("jstack", [False, True])
async def test_the_running_info_of_a_member_comes_from_the_first_broker_that_reaches_it(
    monkeypatch: pytest.MonkeyPatch, jstack: bool
) -> None:
    asked: list[str] = []

    async def call(addr: str, *_request: object, **_more: object) -> Frame:
        asked.append(addr)
        if addr == "a:1":
            raise ConnectError(addr)
        return Frame(code=0, body=ConsumerRunningInfo(jstack="stacks").encode())

    async def brokers_of(_group: str) -> dict[str, str]:
        return {"a": "a:1", "b": "b:1"}

    async with Admin("127.0.0.1:1") as admin:
        monkeypatch.setattr(admin, "brokers_of", brokers_of)
        monkeypatch.setattr(admin.client.brokers, "call", call)
        info = await admin.running_info("G", "client", jstack=jstack)

    assert (asked, info.jstack) == (["a:1", "b:1"], "stacks")

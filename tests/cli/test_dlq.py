"""`cometmq dlq` as a user runs it, with a real cluster."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.cli.conftest import Run

from cometmq import (
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    PushConsumer,
    PushOptions,
)
from cometmq.admin import Admin
from cometmq.testing import LocalBroker

pytestmark = pytest.mark.usefixtures("namesrv")
Die = Callable[..., None]


@pytest.fixture
def die(run: Run, broker: LocalBroker) -> Die:
    """Send messages to a topic. The group of the same name turns them into dead letters immediately."""

    async def give_up(topic: str, count: int) -> None:
        async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
            context.delay_level = -1
            return ConsumeStatus.RECONSUME_LATER

        options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        consumer = PushConsumer(topic, listener, topic, namesrv=broker.namesrv, options=options)
        async with asyncio.timeout(30), Admin(broker.namesrv) as admin, consumer:
            while (topic, count) not in [(e.group, e.count) for e in await admin.dead_letter_counts()]:
                await asyncio.sleep(0.01)

    def dying(topic: str, *bodies: str) -> None:
        for body in bodies:
            assert run("cometmq", "send", topic, body, "-k", f"key-{body}", "-t", "T").returncode == 0
        asyncio.run(give_up(topic, len(bodies)))

    return dying


def rows(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow("runs many commands")
@pytest.mark.representative
def test_from_the_list_to_a_second_run(run: Run, die: Die) -> None:
    die("bills", "a", "b")

    counts = json.loads(run("cometmq", "dlq", "list", "--json").stdout)
    assert ("bills", 2, "") in [(each["group"], each["count"], each["problem"]) for each in counts]
    table = run("cometmq", "dlq", "list", "bills").stdout.splitlines()
    assert table[0].split() == ["#Message", "ID", "#Topic", "#Tries", "#Resent", "#Died", "#Tag", "#Keys"]
    assert sorted(line.split()[-1] for line in table[1:]) == ["key-a", "key-b"]
    letter, _ = rows(run("cometmq", "dlq", "list", "bills", "--json").stdout)
    shown = run("cometmq", "dlq", "show", "bills", letter["msgId"]).stdout
    facts = dict(line.split(":", 1) for line in shown.splitlines() if line)
    assert (facts["Original Topic"].strip(), facts["Body"].strip()) == ("bills", letter["body"])
    assert (facts["Tries"].strip(), facts["Resent since"].strip()) == ("1", "no")

    watched = run("cometmq", "tail", "%DLQ%bills", "--from", "first", "-c", "2").stdout
    assert sum(" tries=1  " in line for line in watched.splitlines()) == 2

    planned = run("cometmq", "dlq", "resend", "bills", "--all", "--dry-run")
    assert (planned.returncode, planned.stderr) == (0, "2 messages would be sent again\n")
    one = run("cometmq", "dlq", "resend", "bills", "--key", "key-b", "--json")
    (result,) = rows(one.stdout)
    assert (result["state"], result["target"], result["keys"]) == ("RESENT", "%RETRY%bills", ["key-b"])
    rest = run("cometmq", "dlq", "resend", "bills", "--all")
    assert (rest.returncode, rest.stderr) == (0, "1 message sent again, 1 skipped\n")
    assert sorted(line.split("  ")[1] for line in rest.stdout.splitlines()) == [
        "sent to %RETRY%bills",
        "skipped: it was resent before",
    ]
    taken = run("cometmq", "consume", "bills", "-g", "bills", "-c", "2", "--timeout", "30", "--json")
    assert sorted(each["body"] for each in rows(taken.stdout)) == ["a", "b"]


@pytest.mark.slow("runs many commands, and sends one message per second")
@pytest.mark.representative
def test_they_are_chosen_by_sql_id_and_time(run: Run, die: Die) -> None:
    die("chosen", "a", "b", "c")
    between = str(time.time_ns() // 1_000_000 + 1)
    time.sleep(0.005)  # the next message is stored in a later millisecond
    some = ("--sql", "TAGS = 'T' AND KEYS <> 'key-a'")
    first = ("--sql", "KEYS = 'key-a'")
    began = time.monotonic()
    paced = run("cometmq", "dlq", "resend", "chosen", *some, "--rate", "1", "--to", "topic", "--json")
    sent = sorted((each["keys"], each["state"]) for each in rows(paced.stdout))
    assert sent == [(["key-b"], "RESENT"), (["key-c"], "RESENT")]
    assert time.monotonic() - began >= 1  # between the first and the second message
    (letter,) = rows(run("cometmq", "dlq", "list", "chosen", "--json", *first, "--end", between).stdout)
    none = run("cometmq", "dlq", "list", "chosen", "--begin", between)
    assert (none.returncode, none.stdout, none.stderr) == (0, "", "group chosen has no such dead letters\n")
    more = ("--again", "--to", "topic", "--json")
    again = run("cometmq", "dlq", "resend", "chosen", letter["offsetMsgId"], *more)
    assert [(each["state"], each["target"]) for each in rows(again.stdout)] == [("RESENT", "chosen")]


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["list", "nobodys"], 1, "no consumer group named nobodys"),
        (["show", "wrong", "0" * 32], 1, "group wrong has no dead letter with this id"),
        (["list", "--key", "k"], 2, "These options select messages of a GROUP"),
        (["resend", "wrong"], 2, "or --all"),
        (["resend", "wrong", "--all", "--key", "k"], 2, "or --all"),
        (["resend", "wrong", "--begin", "soon"], 2, "10m (s, m, h, d ago)"),
        (["resend", "wrong", "--begin", "2", "--end", "1"], 1, "a time after the begin"),
        (["resend", "wrong", "--sql", "a >"], 1, "column"),
        (["resend", "wrong", "--all", "--rate", "0"], 2, "--rate"),
    ],
)
def test_what_is_wrong_is_said(run: Run, die: Die, words: list[str], code: int, problem: str) -> None:
    if words[0] == "show":
        die("wrong", "x")
    failed = run("cometmq", "dlq", *words)
    assert failed.returncode == code
    assert problem in failed.stderr


async def test_members_with_different_limits_are_named(run: Run, broker: LocalBroker) -> None:
    async def listener(messages: list[MessageExt]) -> ConsumeStatus:
        return ConsumeStatus.RECONSUME_LATER

    def member(limit: int) -> PushConsumer:
        options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, max_reconsume_times=limit)
        name = ClientOptions(instance_name=f"allows-{limit}")
        return PushConsumer(
            "differ", listener, "differ", namesrv=broker.namesrv, options=options, client_options=name
        )

    run("cometmq", "send", "differ", "makes the topic")
    async with asyncio.timeout(60), Admin(broker.namesrv) as admin, member(3) as three, member(20) as twenty:
        limits: dict[str, int] = {}
        while len(limits) < 2:  # until both runs have failed
            for body in range(4):
                await admin.send(Message("differ", b"%d" % body))
            limits = (await admin.retry_limits("differ")).members
        assert limits == {three.client.client_id: 3, twenty.client.client_id: 20}
        listed = await asyncio.to_thread(run, "cometmq", "dlq", "list", "differ")
    assert "decides, before the group's retryMaxTimes=16: " in listed.stderr
    assert f"{three.client.client_id} 3, {twenty.client.client_id} 20\n" in listed.stderr or (
        f"{twenty.client.client_id} 20, {three.client.client_id} 3\n" in listed.stderr
    )

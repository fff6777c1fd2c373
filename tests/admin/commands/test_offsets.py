"""resetOffsetByTime, skipAccumulatedMessage, cloneGroupOffset: for online and offline groups of each kind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.admin.conftest import Outcome, Shell, consume

from cometmq.admin import Admin
from cometmq.admin.offsets import BrokerReset, QueueReset, Reset
from cometmq.client import ConsumeFromWhere, MessageModel, PullConsumer, PushConsumer, PushOptions
from cometmq.message import MessageExt, MessageQueue

MESSAGES = 3


def fill(mq: Shell, topic: str, count: int = MESSAGES) -> None:
    """Send messages to queue 0 of a topic with two queues."""
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "2", "-w", "2")
    for number in range(count):
        mq.ok("sendMessage", "-t", topic, "-p", str(number), "-b", mq.broker.broker_name, "-i", "0")


def stored(mq: Shell, group: str, topic: str) -> dict[int, int]:
    """Return the offsets on the broker by queue id."""
    rows = mq.ok("consumerProgress", "-g", group, "-t", topic, "--json").json["queues"]
    return {row["queueId"]: row["consumerOffset"] for row in rows}


def test_a_stopped_group_begins_again(mq: Shell) -> None:
    fill(mq, "stopped")
    asyncio.run(consume(mq.broker.namesrv, "stopped-group", "stopped", MESSAGES))
    group = ("-g", "stopped-group", "-t", "stopped")

    would = mq.ok("resetOffsetByTime", *group, "-s", "0", "--dry-run")
    assert would.lines[0] == (
        f"would set stopped-group in stopped at {mq.broker.broker_name} queue 0 from 3 to 0, in the broker"
    )
    assert stored(mq, "stopped-group", "stopped")[0] == MESSAGES

    done = mq.ok("resetOffsetByTime", *group, "-s", "0")
    assert done.lines[0] == (
        "rollback consumer offset by specified group[stopped-group], topic[stopped], force[true], "
        "timestamp(string)[0], timestamp(long)[0]"
    )
    titles = [
        "#brokerName",
        "#queueId",
        "#brokerOffset",
        "#consumerOffset",
        "#timestampOffset",
        "#rollbackOffset",
    ]
    assert done.lines[1].split() == titles
    assert done.lines[2].split() == [mq.broker.broker_name, "0", "3", "3", "0", "0"]
    assert stored(mq, "stopped-group", "stopped")[0] == 0

    # Without force the offset does not move forward.
    mq.ok("skipAccumulatedMessage", *group, "-f", "false")
    assert stored(mq, "stopped-group", "stopped")[0] == 0
    skipped = mq.ok("skipAccumulatedMessage", *group, "--json").json
    assert [(each["queueId"], each["seen"], each["problem"]) for each in skipped] == [(0, 3, ""), (1, 0, "")]
    assert stored(mq, "stopped-group", "stopped")[0] == MESSAGES


def test_a_group_that_never_consumed_can_be_given_a_place(mq: Shell) -> None:
    fill(mq, "unborn")

    words = ("-g", "unborn-group", "-t", "unborn", "--force", "-s", "now")
    would = mq.ok("resetOffsetByTime", *words, "--dry-run").lines
    place = f"unborn-group in unborn at {mq.broker.broker_name} queue"
    assert would[:2] == [
        f"would set {place} {queue_id} from 0 (or no offset) to {offset}, in the broker"
        for queue_id, offset in ((0, 3), (1, 0))
    ]
    found = mq.ok("resetOffsetByTime", *words, "--json").json

    assert [(each["consumerOffset"], each["seen"]) for each in found] == [(0, 3), (0, 0)]


def test_one_queue_is_set_to_an_offset(mq: Shell) -> None:
    fill(mq, "single")
    asyncio.run(consume(mq.broker.namesrv, "single-group", "single", MESSAGES))
    group = ("-g", "single-group", "-t", "single", "-s", "0", "-b", mq.broker.broker_addr)

    mq.ok("resetOffsetByTime", *group, "-q", "0", "-o", "2")

    assert stored(mq, "single-group", "single")[0] == 2
    failed = mq.run("resetOffsetByTime", *group, "-q", "7")
    assert (failed.code, "no queue named 7" in failed.err) == (1, True)
    stranger = mq.run("resetOffsetByTime", *group[:-1], "127.0.0.1:1")
    assert (stranger.code, "no broker named 127.0.0.1:1" in stranger.err) == (1, True)


async def reset_while_online(
    mq: Shell, topic: str, words: tuple[str, ...], options: PushOptions
) -> tuple[Outcome, list[str]]:
    """Reset a group after its member has consumed all messages.

    Returns:
        The outcome of the command, and the bodies consumed until all messages had arrived twice.
    """
    bodies: list[str] = []
    twice = asyncio.Event()

    async def take(messages: list[MessageExt]) -> None:
        bodies.extend(bytes(message.body).decode() for message in messages)
        if len(bodies) >= MESSAGES:
            once.set()
        if len(bodies) >= 2 * MESSAGES:
            twice.set()

    once = asyncio.Event()
    async with PushConsumer(
        f"{topic}-group", take, topic, namesrv=mq.broker.namesrv, options=options
    ) as consumer:
        await asyncio.wait_for(once.wait(), 30)
        await consumer.persist_offsets()
        said = await asyncio.to_thread(lambda: mq.ok(*words, "-g", f"{topic}-group", "-t", topic))
        await asyncio.wait_for(twice.wait(), 30)
    return said, bodies


@pytest.mark.parametrize(
    ("model", "orderly"),
    [
        (MessageModel.CLUSTERING, False),
        (MessageModel.CLUSTERING, True),
        (MessageModel.BROADCASTING, False),
    ],
)
def test_a_running_group_consumes_again(
    mq: Shell, tmp_path: Path, model: MessageModel, orderly: bool
) -> None:
    topic = f"running-{model.name.lower()}-{orderly}"
    fill(mq, topic)
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        message_model=model,
        orderly=orderly,
        offset_dir=str(tmp_path),
    )

    said, bodies = asyncio.run(reset_while_online(mq, topic, ("resetOffsetByTime", "-s", "0"), options))

    assert sorted(bodies) == sorted(["0", "1", "2"] * 2)
    assert said.lines[1].split() == ["#brokerName", "#queueId", "#offset"]
    assert said.lines[2].split() == [mq.broker.broker_name, "0", "0"]
    assert f"set {topic}-group in {topic} at {mq.broker.broker_name} queue 0 from 3 to 0, " in said.err


@pytest.mark.parametrize("model", MessageModel)
def test_members_that_have_consumed_it_all_again_already_are_no_problem(
    mq: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: MessageModel
) -> None:
    """When the members or the broker are queried, they may be at their old offsets again."""
    seen = BrokerReset.seen

    async def late(self: BrokerReset, members_s: float, kept_s: float) -> list[QueueReset]:
        await asyncio.sleep(1.0)
        return await seen(self, members_s, kept_s)

    topic = f"at-once-{model.name.lower()}"
    fill(mq, topic)
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        message_model=model,
        offset_dir=str(tmp_path),
        persist_interval_s=0.1,
    )
    monkeypatch.setattr(BrokerReset, "seen", late)

    _, bodies = asyncio.run(reset_while_online(mq, topic, ("resetOffsetByTime", "-s", "0"), options))

    assert sorted(bodies) == sorted(["0", "1", "2"] * 2)


async def reset_while_pulled(mq: Shell, *, overwrites: bool) -> QueueReset:
    """Reset queue 0 of a group whose member pulls.

    With `overwrites` the member stores an offset during the reset.
    """
    queue, addr = MessageQueue("pulled", mq.broker.broker_name, 0), mq.broker.broker_addr
    async with (
        PullConsumer("pulled-group", namesrv=mq.broker.namesrv) as consumer,
        Admin(mq.broker.namesrv) as admin,
    ):
        await consumer.subscribe("pulled")
        await admin.client.brokers.update_consumer_offset(addr, "pulled-group", queue, 3)
        wanted = Reset(group="pulled-group", topic="pulled", at_ms=0)
        reset = asyncio.create_task(admin.reset_offset(wanted, kept_s=2.0))
        await asyncio.sleep(1.0)
        if overwrites:
            await admin.client.brokers.update_consumer_offset(addr, "pulled-group", queue, 3)
        return (await reset)[0]


@pytest.mark.parametrize(
    ("overwrites", "seen", "problem"),
    [(False, 0, ""), (True, 3, "a pull consumer has stored 3 since: stop the group first")],
)
def test_offsets_that_members_store_over_the_new_ones_are_told(
    mq: Shell, overwrites: bool, seen: int, problem: str
) -> None:
    fill(mq, "pulled")

    found = asyncio.run(reset_while_pulled(mq, overwrites=overwrites))

    assert (found.way, found.rollback_offset, found.seen, found.problem) == ("STORED", 0, seen, problem)


def test_a_group_gets_the_offsets_of_another(mq: Shell) -> None:
    fill(mq, "cloned")
    asyncio.run(consume(mq.broker.namesrv, "source", "cloned", MESSAGES))
    mq.ok("updateSubGroup", "-c", "DefaultCluster", "-g", "copy")
    words = ("cloneGroupOffset", "-s", "source", "-d", "copy", "-t", "cloned")

    would = mq.ok(*words, "--dry-run")
    done = mq.ok(*words)

    assert would.lines[0] == f"would set copy at {mq.broker.broker_name} queue 0 to 3"
    assert done.lines == ["clone group offset success. srcGroup[source], destGroup=[copy], topic[cloned]"]
    rows = mq.ok("brokerConsumeStats", "-b", mq.broker.broker_addr, "--json").json["queues"]
    offsets = {
        row["queue"]["queueId"]: row["queue"]["consumerOffset"] for row in rows if row["group"] == "copy"
    }
    assert offsets[0] == MESSAGES
    failed = mq.run("cloneGroupOffset", "-s", "source", "-d", "copy", "-t", "TBW102")
    assert (failed.code, "no topic of the group named TBW102; known: " in failed.err) == (1, True)

"""Masters and slaves of both implementations on the HA port: our slave with Apache's master, and the reverse.

See docs/reference/storage.md, HA port, Slave metadata sync.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.interop import store_input, wire
from tests.interop.driver import Driver, body_of, message
from tests.interop.processes import side_by_side
from tests.interop.replicas import (
    ALONE,
    COPIED_WITHIN_S,
    DELAYS,
    GROUPS,
    OFFSETS,
    OK,
    OURS,
    REFUSE_READS,
    SLAVE_NOT_AVAILABLE,
    TOPICS,
    Replicas,
    of_slave_queue,
    same,
)
from tests.interop.stores import loads
from tests.interop.test_store_commands import run
from tests.kit.waiting import wait_until
from tests.long_form import long_form

from cometmq import (
    ConsumeFromWhere,
    MessageExt,
    MessageQueue,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
)
from cometmq.errors import RemotingError

UPDATE_GROUP = 200
DELETE_TOPIC = 215
PURGE_TOPIC = 21001  # CometMQ's own request
APACHES = ("4.9.7", "5.5.0")
QUEUES = [("Alpha", each) for each in range(4)] + [("Beta", 1), ("Gamma", 0)]
Both = Callable[[str], list[Replicas]]


@pytest.fixture
def both(tmp_path: Path, names: str) -> Iterator[Both]:
    """Yield our slave with a master of that version of Apache's, and the reverse."""
    made = []

    def pairs(version: str) -> list[Replicas]:
        for master, slave in ((version, OURS), (OURS, version)):
            name = f"under-{master.replace('.', '-')}"
            made.append(Replicas(tmp_path / name, names, name, {"master": master, "slave": slave}))
        return made

    yield pairs
    for pair in made:
        pair.kill()


def prepared(pair: Replicas) -> None:
    """Create the pair's topics and groups before a slave copies them."""
    with wire.Connection(pair.port("master")) as connection:
        feeder = store_input.Feeder(connection)
        for topic in ("Alpha", "Beta", "Gamma"):
            feeder.update_topic(topic, 4)
        for group in (store_input.GROUP, store_input.PROBE):  # 5.5's slave does not create groups on demand
            update_group(feeder, group, 16)


@pytest.mark.slow("waits for Apache's slave")
def test_a_slave_serves_what_its_master_had(both: Both) -> None:
    side_by_side(serve, [(pair,) for pair in both("4.9.7")])


def serve(pair: Replicas) -> None:
    pair.start("master")
    prepared(pair)
    assert set(pair.send(40, size=50_000)) == {SLAVE_NOT_AVAILABLE}
    pair.start("slave")
    pair.in_step()
    store_input.feed(pair.port("master"))
    pair.equal()
    same(pair, QUEUES)
    # Apache's master sends only its last segment to an empty slave.
    assert (min(pair.log("slave")) == 0) == (pair.makes["master"] == OURS)
    if pair.makes["slave"] == OURS:  # Apache's slave keeps its old queues and omits messages
        made_anew(pair)
    pair.brokers["master"].kill()
    assert len(store_input.served(pair.port("slave"), "Beta", 1)) == 8


@pytest.mark.slow("a master is paused, killed and started again")
@pytest.mark.parametrize("slave", [OURS, "4.9.7"])
def test_consumers_read_a_slave_while_their_master_is_paused_or_killed(
    tmp_path: Path, names: str, slave: str
) -> None:
    name = f"read-{slave.replace('.', '-')}"
    pair = Replicas(tmp_path, names, name, {"master": OURS, "slave": slave})
    try:
        pair.start("master")
        prepared(pair)
        pair.start("slave")
        pair.in_step()
        assert set(pair.send(8)) == {OK}
        pair.equal()
        of_slave_queue(pair, "Alpha", 0)
        asyncio.run(read_on(pair, names))
    finally:
        pair.kill()


async def read_on(pair: Replicas, names: str) -> None:
    """Read by pull and by push while the master is paused, resumed, killed and restarted."""
    waits = {"broker_suspend_s": 0.5, "suspend_timeout_s": 2.0}
    first = ConsumeFromWhere.FIRST_OFFSET
    pushed: list[bytes] = []
    name = pair.name

    async def listener(messages: list[MessageExt]) -> None:
        pushed.extend(message.body for message in messages)

    async def until(what: str, check: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_until, what, check, COPIED_WITHIN_S, 0.1)

    push = PushOptions(consume_from_where=first, **waits)
    pull = PullOptions(consume_from_where=first, **waits)
    async with (
        PushConsumer(f"push-{name}", listener, "Alpha", namesrv=names, options=push),
        PullConsumer(f"pull-{name}", namesrv=names, options=pull) as consumer,
    ):
        queues = [queue for queue in await consumer.fetch_queues("Alpha") if queue.broker_name == name]
        ends = {queue: await consumer.max_offset(queue) for queue in queues}

        async def read_again() -> None:
            """Read everything again, from the broker that serves it now."""
            for queue in queues:
                await everything(consumer, queue, ends[queue])

        await read_again()
        await until("all is pushed", lambda: len(pushed) == sum(ends.values()))
        master = pair.brokers["master"].pid
        os.kill(master, signal.SIGSTOP)
        try:
            await read_again()
        finally:
            os.kill(master, signal.SIGCONT)
        assert set(await asyncio.to_thread(pair.send, 4)) <= {OK, SLAVE_NOT_AVAILABLE}
        await until("more is pushed", lambda: len(pushed) >= sum(ends.values()) + 4)
        pair.brokers["master"].kill()
        await read_again()
        await asyncio.to_thread(pair.start, "master")
        await until("the slave is back", lambda: pair.send() == [OK])
        await until("the new ones are pushed", lambda: len(pushed) >= sum(ends.values()) + 5)


async def everything(consumer: PullConsumer, queue: MessageQueue, end: int) -> None:
    offset = 0
    async with asyncio.timeout(60):
        while offset < end:
            try:
                result = await consumer.pull(queue, offset, timeout_s=2.0)
            except RemotingError:
                continue
            assert [message.queue_offset for message in result.messages] == list(
                range(offset, result.next_begin_offset)
            )
            offset = result.next_begin_offset


def made_anew(pair: Replicas) -> None:
    """Delete a topic at the master and create it again."""
    with wire.Connection(pair.port("master")) as connection:
        feeder = store_input.Feeder(connection)
        feeder.ask(DELETE_TOPIC, {"topic": "Gamma"})
        feeder.update_topic("Gamma", 4)
    assert pair.send(20, topic="Gamma") == [OK] * 20
    pair.equal()
    same(pair, [("Gamma", queue) for queue in range(4)])


@long_form("a minute and a half: a slave of Apache's first reports after 5 s")
@pytest.mark.parametrize("version", APACHES)
def test_either_side_stops_dies_and_comes_back(both: Both, version: str) -> None:
    side_by_side(come_back, [(pair,) for pair in both(version)])


def come_back(pair: Replicas) -> None:
    pair.start("master")
    prepared(pair)
    alone = ALONE[pair.makes["master"]]
    assert pair.send() == [alone]
    pair.start("slave")
    pair.in_step()
    # The slave copies under load, across several segments.
    store_input.feed(pair.port("master"))
    pair.equal()
    same(pair, QUEUES)
    # The slave is stopped and killed, and restarts behind its master.
    for end in ("stop", "kill"):
        getattr(pair.brokers["slave"], end)()
        pair.alone()
        behind = 40 if alone == SLAVE_NOT_AVAILABLE else 1  # 5.x waits for each message
        assert set(pair.send(behind, size=50_000)) == {alone}
        pair.start("slave")
        pair.in_step()
        same(pair, QUEUES)
    # The master is stopped and killed and restarts, while reads continue.
    for end in ("stop", "kill"):
        getattr(pair.brokers["master"], end)()
        if pair.makes["slave"] in REFUSE_READS:
            with pytest.raises(AssertionError, match="'code': 2,"):
                store_input.served(pair.port("slave"), "Beta", 1)
        else:
            assert len(store_input.served(pair.port("slave"), "Beta", 1)) == 8
        pair.start("master")
        pair.in_step()
    same(pair, QUEUES)


@long_form("a minute: brokers of Apache's take ten seconds to stop")
@pytest.mark.parametrize("version", APACHES)
def test_a_slave_that_is_ahead_makes_no_wait_pass_and_is_cut(both: Both, version: str) -> None:
    side_by_side(ahead, [(pair,) for pair in both(version)])


def ahead(pair: Replicas) -> None:
    alone = ALONE[pair.makes["master"]]
    pair.start("master")
    prepared(pair)
    pair.start("slave")
    pair.in_step()
    store_input.feed(pair.port("master"))
    pair.equal()
    known = pair.end("master")  # may include delivered copies of delayed messages
    # The master loses its newest messages, as after a power failure.
    pair.brokers["slave"].stop()
    pair.brokers["master"].stop()
    earlier = pair.directory / "earlier"
    shutil.copytree(pair.store("master"), earlier)
    pair.start("master")
    pair.start("slave")
    pair.in_step()
    assert set(pair.send(20, size=10_000)) == {OK}
    pair.equal()
    had = pair.end("slave")
    pair.kill()
    shutil.rmtree(pair.store("master"))
    shutil.copytree(earlier, pair.store("master"))
    pair.start("master")
    pair.start("slave")
    ours = pair.brokers["slave" if pair.makes["slave"] == OURS else "master"]
    wait_until("what is wrong is said", lambda: f"{had}, ahead of" in ours.process.log_tail(20_000))
    assert pair.send() == [alone]
    if pair.makes["slave"] == OURS:
        assert wire.runtime_info(pair.port("slave"))["haState"] == "stopped"
        # The master's log grows past the slave's end, with other messages.
        pair.send(40, size=10_000, wait=False)
        pair.brokers["slave"].stop()
        pair.start("slave")
        wait_until("another record is seen", lambda: differs(pair))
        assert pair.send() == [alone]
    pair.brokers["slave"].stop()
    run("truncate", pair.store("slave"), "--to", str(known))
    pair.start("slave")
    pair.in_step()
    same(pair, QUEUES)


def differs(pair: Replicas) -> bool:
    said = wire.runtime_info(pair.port("slave"))["haProblem"]
    return "where the master has none" in said or "is not the master's" in said


@long_form("three minutes: a slave of 5.5 copies tables once a minute")
@pytest.mark.parametrize("version", APACHES)
def test_tables_of_the_master_are_the_slaves(both: Both, version: str) -> None:
    side_by_side(copied, [(pair,) for pair in both(version)])


def copied(pair: Replicas) -> None:
    pair.start("master")
    prepared(pair)
    pair.start("slave")
    pair.in_step()
    with wire.Connection(pair.port("master"), timeout_s=20) as connection:
        feeder = store_input.Feeder(connection)
        feeder.update_topic("Meta", 3)
        for number in range(20):
            feeder.send("Alpha", number % 4, b"x", [("DELAY", "1")])
        update_group(feeder, "readers", 5)
        commit(feeder, "Alpha", 3)
    tables_equal(pair)
    with wire.Connection(pair.port("master")) as connection:
        feeder = store_input.Feeder(connection)
        if pair.makes["master"] == OURS:  # its responses have fields that Apache's slave does not know
            feeder.ask(DELETE_TOPIC, {"topic": "Gamma"})
            feeder.ask(PURGE_TOPIC, {"topic": "Alpha", "queueId": "1", "execute": "true"})
            assert "Gamma" in pair.table("master", TOPICS)["deletedTopics"]
            assert pair.table("master", OFFSETS)["minOffsets"]["Alpha"]
        feeder.update_topic("Meta", 7)
        update_group(feeder, "readers", 9)
        commit(feeder, "Alpha", 1)  # a reset offset is smaller
    tables_equal(pair)
    topics = on_disk(pair, "topics", "topicConfigTable")
    assert topics["Meta"]["readQueueNums"] == 7
    assert ("Gamma" in topics) == (pair.makes["master"] != OURS)
    assert on_disk(pair, "subscriptionGroup", "subscriptionGroupTable")["readers"]["retryMaxTimes"] == 9
    assert on_disk(pair, "consumerOffset", "offsetTable")["Alpha@readers"] == {"0": 1}


def update_group(feeder: store_input.Feeder, group: str, tries: int) -> None:
    enabled = ("consumeEnable", "consumeFromMinEnable", "consumeBroadcastEnable")
    settings = {
        "groupName": group, "retryQueueNums": 1, "retryMaxTimes": tries, "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1, **dict.fromkeys(enabled, True),
    }  # fmt: skip
    feeder.ask(UPDATE_GROUP, {}, json.dumps(settings).encode())


def commit(feeder: store_input.Feeder, topic: str, offset: int, group: str = "readers") -> None:
    fields = {"consumerGroup": group, "topic": topic, "queueId": "0", "commitOffset": str(offset)}
    feeder.ask(store_input.UPDATE_OFFSET, fields)


def on_disk(pair: Replicas, file: str, key: str) -> dict[str, Any]:
    path = pair.store("slave") / "config" / f"{file}.json"
    found: dict[str, Any] = loads(path.read_text())[key] if path.exists() else {}
    return found


TABLES = {
    "topics": (TOPICS, "topicConfigTable", ("readQueueNums", "writeQueueNums", "perm", "topicSysFlag")),
    "subscriptionGroup": (GROUPS, "subscriptionGroupTable", ("retryMaxTimes", "consumeEnable")),
    "consumerOffset": (OFFSETS, "offsetTable", ()),
    "delayOffset": (DELAYS, "offsetTable", ()),
}
"""For each file: its request, the key of its entries, and the compared fields (none: all)."""


def tables_equal(pair: Replicas) -> None:
    """Wait until the tables on the slave's disk equal the master's responses."""
    for file in TABLES:
        wait_until(f"the slave's copy of {file}", partial(equal_table, pair, file), COPIED_WITHIN_S, 0.5)


def equal_table(pair: Replicas, file: str) -> bool:
    code, key, fields = TABLES[file]
    master, slave = (
        {name: [entry[each] for each in fields] if fields else entry for name, entry in table.items()}
        for table in (pair.table("master", code)[key], on_disk(pair, file, key))
    )
    return bool(master) and master == slave


@long_form("half a minute: tables are copied every 10 s; a slave of 5.5 copies them once a minute")
@pytest.mark.parametrize("version", APACHES)
def test_consumers_go_on_at_the_slave_and_offsets_come_back(
    both: Both, java_clients: Callable[[str], Driver], version: str
) -> None:
    java = java_clients("4.9.8")
    pairs = both(version)
    if version == "5.5.0":
        del pairs[1]  # a 5.5 slave of our master delivered all messages to a consumer again
    for pair in pairs:
        pair.settings["slaveReadEnable"] = "true"
    side_by_side(go_on, [(pair, java) for pair in pairs])


def go_on(pair: Replicas, java: Driver) -> None:
    topic, name = f"Away-{pair.name}", f"away-{pair.name}"
    where = {"name": name, "namesrv": pair.names}
    group = {"group": name, "topics": {topic: "*"}}
    pair.start("master")
    with wire.Connection(pair.port("master")) as connection:
        feeder = store_input.Feeder(connection)
        feeder.update_topic(topic, 4)
        update_group(feeder, "gone", 16)  # 5.5 accepts offsets only of known groups
    pair.start("slave")
    pair.in_step()
    java.call("producer_start", **where)
    first, second = ([b"%d" % number for number in range(low, low + 100)] for low in (0, 100))
    java.send(name, [message(topic, body) for body in first])
    java.call("push_start", **where, **group)
    java.wait_delivered(name, 100)
    java.call("push_stop", name=name)
    java.send(name, [message(topic, body) for body in second])
    pair.equal()
    tables_equal_of(pair, name)
    # Only the slave runs, also for a consumer that starts now.
    pair.brokers["master"].kill()
    java.call("push_start", **where, **group)
    java.wait_delivered(name, 200)
    assert sorted(map(body_of, java.delivered(name)[100:])) == sorted(second)
    tells = pair.makes["slave"] == OURS  # Apache's slave sends its master no offsets
    if tells:
        with wire.Connection(pair.port("slave")) as connection:
            commit(store_input.Feeder(connection), topic, 7, group="gone")
    pair.start("master")
    pair.in_step()
    ends = {queue: store_input.max_offset(pair.port("master"), topic, queue) for queue in range(4)}

    def returned() -> bool:
        return ends == {
            queue: store_input.consumer_offset(pair.port("master"), name, topic, queue) for queue in ends
        }

    wait_until("the offsets are at the master", returned, every_s=0.5)
    if tells:

        def told() -> bool:
            return store_input.consumer_offset(pair.port("master"), "gone", topic, 0) == 7

        wait_until("what a slave was told", told, every_s=0.5)
    for kind in ("push", "producer"):
        java.call(f"{kind}_stop", name=name)


def tables_equal_of(pair: Replicas, group: str) -> None:
    key = f"Away-{pair.name}@{group}"

    def equal() -> bool:
        wanted = pair.table("master", OFFSETS)["offsetTable"].get(key)
        return bool(wanted) and on_disk(pair, "consumerOffset", "offsetTable").get(key) == wanted

    wait_until("the slave's copy of the offsets", equal, COPIED_WITHIN_S, 0.5)

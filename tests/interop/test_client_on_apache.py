"""Our client with Apache's servers: the same scenarios as in tests/client."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from tests.client.every_scenario import EVERY_SCENARIO, SINCE_5
from tests.client.scenarios import FROM_FIRST, Ledger, Scenario, bodies, fill, read_all
from tests.interop.apache import ApacheCluster
from tests.interop.driver import Driver, body_of
from tests.interop.driver import message as java_message
from tests.interop.jars import SERVER_VERSIONS
from tests.interop.space import Space
from tests.kit.waiting import until
from tests.long_form import LONG

from cometmq import Message, Producer, ProducerOptions, PushConsumer
from cometmq.cli.app import cometmq


@pytest.fixture(params=SERVER_VERSIONS)
def apache(request: pytest.FixtureRequest, apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    """Apache's name server and broker in each of the versions."""
    return apache_clusters(request.param)


def on(version: str) -> list[Scenario]:
    """Return the scenarios for this version; in the short form each runs with one of the two."""
    old = [each for each in EVERY_SCENARIO if each not in SINCE_5]
    if not LONG:
        old = old[::2]
    if version == "4.9.7":
        return old
    return [each for each in EVERY_SCENARIO if LONG or each not in old]


@pytest.fixture(scope="module")
def outcome(
    apache_clusters: Callable[[str], ApacheCluster],
) -> Callable[[str, Scenario], BaseException | None]:
    """Return the outcome of a scenario.

    All scenarios of a version run concurrently, since they mostly wait.
    """
    found: dict[tuple[str, Scenario], BaseException | None] = {}

    async def run(version: str) -> None:
        namesrv, few = apache_clusters(version).namesrv, asyncio.Semaphore(8)

        async def one(scenario: Scenario) -> None:
            async with few:
                await scenario(namesrv)

        scenarios = on(version)
        ends = [
            # A broker that has just started is slow for its first scenario.
            *await asyncio.gather(one(scenarios[0]), return_exceptions=True),
            *await asyncio.gather(*map(one, scenarios[1:]), return_exceptions=True),
        ]
        found.update({(version, each): end for each, end in zip(scenarios, ends, strict=True)})

    def ended(version: str, scenario: Scenario) -> BaseException | None:
        if (version, scenario) not in found:
            asyncio.run(run(version))
        return found[version, scenario]

    return ended


@pytest.mark.slow("waits for intervals of Apache's broker")
@pytest.mark.parametrize(
    ("version", "scenario"),
    [
        pytest.param(version, scenario, id=f"{version}-{scenario.__name__}")
        for version in SERVER_VERSIONS
        for scenario in on(version)
    ],
)
def test_scenario(
    version: str, scenario: Scenario, outcome: Callable[[str, Scenario], BaseException | None]
) -> None:
    failure = outcome(version, scenario)
    if failure is not None:
        raise failure


async def test_our_consumer_and_javas_share_a_group(
    apache: ApacheCluster, java_clients: Callable[[str], Driver]
) -> None:
    """Both clients must compute the same assignment, or queues have two owners or none."""
    space = Space(java_clients("4.9.8"), apache)
    ledger = Ledger()
    await fill(apache.namesrv, space.topic, [b"makes the topic"])
    try:
        async with PushConsumer(
            space.group, ledger.listener, space.topic, namesrv=apache.namesrv, options=FROM_FIRST
        ) as ours:
            await ledger.has_all([b"makes the topic"])
            theirs = await asyncio.to_thread(space.push)

            async def shared() -> bool:
                return len([queue for queue in ours.assignment if queue.topic == space.topic]) == 2

            await until(shared, "the queues shared evenly")
            sent = bodies(200, "mixed")
            await fill(apache.namesrv, space.topic, sent)
            mine_at_least = 2 * len(sent) // 4
            await ledger.wait_until(lambda ledger: len(ledger.messages) > mine_at_least, "our half consumed")
            # Java's consumer may get the first message, too, whose offset was not committed when its queue
            # was reassigned.
            half = len(sent) - mine_at_least
            received = await asyncio.to_thread(
                space.java.wait_delivered,
                theirs,
                lambda got: sum(body_of(each) in set(sent) for each in got) >= half,
            )
    finally:
        await asyncio.to_thread(space.close)
    every = [message.body for message in ledger.messages] + [body_of(each) for each in received]
    assert Counter(body for body in every if body in set(sent)) == Counter(sent)


async def test_what_java_sends_is_read_whole_and_the_other_way_round(
    apache: ApacheCluster, java_clients: Callable[[str], Driver]
) -> None:
    space = Space(java_clients("5.5.0"), apache)
    text = {"note": "Größe 訂單 🚀", "b": "2"}
    large = b"compressed " * 2000
    try:
        producer = await asyncio.to_thread(space.producer)
        messages = [
            java_message(space.topic, b"small", tags="A", keys="k1 k2", flag=5, properties=text),
            java_message(space.topic, large),
        ]
        await asyncio.to_thread(space.java.send, producer, messages)
        found = {message.body: message for message in await read_all(apache.namesrv, space.topic)}
        assert set(found) == {b"small", large}
        small = found[b"small"]
        assert (small.tags, small.keys, small.flag, small.user_properties) == ("A", ("k1", "k2"), 5, text)

        async with Producer("p", namesrv=apache.namesrv) as ours:
            sent = Message(space.topic, b"ours", tags="B", keys=("k3",), flag=6, properties=text)
            result = await ours.send(sent)
            await ours.send(Message(space.topic, large + b"!"))
        for kind in ("LZ4", "ZSTD"):
            packing = ProducerOptions(compress_type=kind)
            async with Producer("p", namesrv=apache.namesrv, options=packing) as ours:
                await ours.send(Message(space.topic, large + kind.encode()))
        puller = await asyncio.to_thread(space.pull)
        received = {body_of(each): each for each in await asyncio.to_thread(space.pull_topic, puller)}
        packed = {large + b"!", large + b"LZ4", large + b"ZSTD"}
        assert set(received) == {b"small", large, b"ours", *packed}
        assert all(received[body]["storeSize"] < 2000 for body in packed)
        seen = received[b"ours"]
        assert seen["msgId"] == result.msg_id
        assert (seen["flag"], seen["properties"]["TAGS"], seen["properties"]["KEYS"]) == (6, "B", "k3")
        assert {name: seen["properties"][name] for name in text} == text
    finally:
        await asyncio.to_thread(space.close)


def test_bench_measures_apaches_brokers(apache: ApacheCluster) -> None:
    topic = f"Benched{apache.version.replace('.', '')}"

    def figures(*arguments: str) -> dict[str, float]:
        words = ["bench", *arguments, "-n", apache.namesrv, "--json"]
        result = CliRunner().invoke(cometmq, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, float] = json.loads(result.stdout)
        return found

    sent = figures("send", topic, "--seconds", "0.3", "--in-flight", "4")
    assert (sent["failed"], sent["lost"]) == (0, 0)
    assert figures("consume", topic, "--seconds", "120")["messages"] == sent["messages"] + 1
    assert figures("latency", topic, "--seconds", "0.3", "--rate", "50")["messages"] == 15

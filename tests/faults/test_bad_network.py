"""Clients on a bad network: many short scenarios run concurrently on one broker, each with fault proxies.

Each has a producer, two consumers and a checked history. COMETMQ_NETWORK_SCENARIOS sets the number of
scenarios, COMETMQ_NETWORK_SEED repeats a run, and COMETMQ_NETWORK_MINUTES is the duration of the load in the
last test.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import psutil
import pytest
from tests.client.network_scenarios import API_S, CLIENT, CONSUMER, PRODUCER, SEND_S, BadNetwork, in_time
from tests.kit.waiting import until
from tests.long_form import LONG

from cometmq import CometError, Message, MessageExt, Producer, PushConsumer
from cometmq.testing import ClusterProxy, random_faults
from cometmq.testing import StandaloneProcess as Cluster

SCENARIOS = int(os.environ.get("COMETMQ_NETWORK_SCENARIOS", "2000" if LONG else "32"))
SEED = int(os.environ.get("COMETMQ_NETWORK_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
MINUTES = float(os.environ.get("COMETMQ_NETWORK_MINUTES", "4" if LONG else "0.05"))
AT_ONCE = 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hide the clients' warnings, which are expected and would count as memory if captured."""
    caplog.set_level(logging.CRITICAL, "cometmq")


async def through(namesrv: str, seeds: range) -> Counter[str]:
    """Run scenarios concurrently and add up their results."""
    limit, total = asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def one(seed: int) -> None:
        async with limit:
            try:
                scenario = BadNetwork(namesrv, seed)
                report = (await scenario.run()).verify()
            except BaseException as error:
                error.add_note(f"scenario {seed}")
                raise
            counts = {"sent": report.sent, "unknown": report.unknown, "duplicates": report.duplicates}
            total.update({**counts, "scenarios": 1, "faults": scenario.proxy.happened.total()})

    async with asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(one(seed))
    return total


def resident_mib() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def ours() -> Counter[str]:
    """Count the live objects of the client and of the proxies."""
    gc.collect()
    rooms = ("cometmq.client.", "cometmq.remoting.", "cometmq.testing.")
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith(rooms))


@pytest.mark.slow("32 scenarios on a bad network")
@pytest.mark.timeout(600 + SCENARIOS)
async def test_nothing_is_lost_or_invented_and_nobody_waits_for_ever(cluster: Cluster) -> None:
    print(f"COMETMQ_NETWORK_SEED={SEED}")
    before = asyncio.all_tasks()
    first = min(SCENARIOS // 4, 200)
    await through(cluster.namesrv, range(SEED, SEED + first))  # creates everything that is created only once
    objects, files = ours(), psutil.Process().num_fds()
    memory, blocks = resident_mib(), sys.getallocatedblocks()
    began = time.monotonic()
    total = await through(cluster.namesrv, range(SEED + first, SEED + SCENARIOS))
    took = time.monotonic() - began
    grown, more = resident_mib() - memory, sys.getallocatedblocks() - blocks
    print(f"{dict(total)} in {took:.0f} s; memory {memory:.0f} MiB and {grown:+.1f}, {more:+d} blocks")
    assert total["sent"] > 20 * total["scenarios"] // 5  # half of them and more on a quiet machine
    assert total["faults"] > 2 * total["scenarios"]
    assert total["unknown"] + total["duplicates"] > 0, "the faults did nothing"
    assert asyncio.all_tasks() == before
    assert psutil.Process().num_fds() <= files + 2
    async with asyncio.timeout(30):  # a stop may leave a timer of a second, and others in this process count
        while left := (ours() - objects).keys() - {"Totals", "TopicStats"}:
            print("still there:", *sorted(left))
            await asyncio.sleep(0.5)
    assert more < 20_000 + 5 * SCENARIOS
    assert grown < 64  # the allocator keeps pages in which one block is in use


class Load:
    """Numbered messages, of which only those in flight are kept in memory."""

    def __init__(self) -> None:
        self.sent = self.handled = self.refused = 0
        self.waiting: set[int] = set()
        self.early: set[int] = set()
        """Messages handled before their send was confirmed, or handled more than once."""

    async def send(self, producer: Producer, topic: str, enough: Callable[[], bool]) -> None:
        numbers = itertools.count()
        while not enough():
            batch = list(itertools.islice(numbers, 16))
            await asyncio.gather(*(self._one(producer, topic, number) for number in batch))
            self.early = {number for number in self.early if number > batch[0] - 10_000}

    async def _one(self, producer: Producer, topic: str, number: int) -> None:
        try:
            await in_time(lambda: producer.send(Message(topic, b"%d" % number)), SEND_S + 2 * API_S)
        except CometError:
            self.refused += 1
            return
        self.sent += 1
        if number not in self.early:
            self.waiting.add(number)

    async def listener(self, messages: list[MessageExt]) -> None:
        number = int(messages[0].body)
        self.handled += 1
        self.early.add(number)
        self.waiting.discard(number)


@pytest.mark.timeout(600 + MINUTES * 60)
async def test_memory_stays_flat_under_load_and_faults(cluster: Cluster) -> None:
    """Run a producer and two consumers for COMETMQ_NETWORK_MINUTES, through proxies with constant faults."""
    dice, load, topic = random.Random(SEED), Load(), f"load-{SEED}"
    samples: list[float] = []
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(ClusterProxy(cluster.namesrv))
        clients = {"namesrv": proxy.namesrv, "client_options": CLIENT}
        producer = Producer("p-load", options=PRODUCER, **clients)
        await stack.enter_async_context(producer)
        for _ in range(2):
            member = PushConsumer("g-load", load.listener, topic, options=CONSUMER, **clients)
            await stack.enter_async_context(member)
        end = time.monotonic() + MINUTES * 60

        def enough() -> bool:
            # Faults strike only while messages are sent, and on a busy machine they may strike late.
            return time.monotonic() >= end and len(samples) >= 3 and proxy.happened.total() > 0

        sending = asyncio.create_task(load.send(producer, topic, enough))
        for number in itertools.count():
            if sending.done():
                break
            await asyncio.sleep(min(0.5, MINUTES * 2))
            for fault in random_faults(dice.randrange(1 << 30), share=0.7, seconds=0.3)(number):
                proxy.inflict(fault)
            if number % 8 == 7:  # delays and splits would last forever
                for each in proxy.proxies:
                    each.heal()
            samples.append(resident_mib())
        await sending
        proxy.heal()

        async def all_handled() -> bool:
            return not load.waiting

        await until(all_handled, "all that was acknowledged handled")
    third = len(samples) // 3
    early, late = statistics.median(samples[third : 2 * third]), statistics.median(samples[2 * third :])
    print(f"{load.sent} sent, {load.refused} refused, {load.handled} handled; {early:.1f} to {late:.1f} MiB")
    assert proxy.happened.total() > 0
    assert asyncio.all_tasks() == before
    assert load.sent > 100 * MINUTES
    # Some are sent again, because an answer was lost. If a fault moves a queue, the other member handles
    # again what came since the last stored offset, at this rate up to all messages of the queue.
    assert load.handled < 2 * (load.sent + load.refused) + 200
    assert late - early < 4

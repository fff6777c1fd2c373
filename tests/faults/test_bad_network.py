"""Clients through a bad network: many short scenarios at once over one broker, each with fault proxies, a
producer and two consumers of its own, and a history that is checked.

COMETMQ_NETWORK_SCENARIOS sets how many, COMETMQ_NETWORK_SEED repeats a run, COMETMQ_NETWORK_MINUTES says how
long the load of the last test runs.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import psutil
import pytest
from tests.client.scenarios import until

from cometmq import (
    ClientOptions,
    CometError,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushOptions,
)
from cometmq.testing import ClusterProxy, Expected, History, Report, check_history, random_faults
from cometmq.testing import StandaloneProcess as Cluster

T = TypeVar("T")

SCENARIOS = int(os.environ.get("COMETMQ_NETWORK_SCENARIOS", "100"))
SEED = int(os.environ.get("COMETMQ_NETWORK_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
MINUTES = float(os.environ.get("COMETMQ_NETWORK_MINUTES", "0.1"))
AT_ONCE = 24
MESSAGES = 20
SEND_S, API_S = 2.0, 1.0
LATE_S = 5.0
"""How much longer than its own limits a call may take on a busy machine."""
CLIENT = ClientOptions(api_timeout_s=API_S, route_interval_s=1.0, heartbeat_interval_s=1.0)
PRODUCER = ProducerOptions(send_timeout_s=SEND_S, retry_times=3)
CONSUMER = PushOptions(
    consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
    rebalance_interval_s=1.0,
    broker_suspend_s=1.0,
    suspend_timeout_s=2.0,
    pull_error_delay_s=0.05,
    persist_interval_s=0.5,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What clients warn of is wanted here, and kept lines would count as memory."""
    caplog.set_level(logging.CRITICAL, "cometmq")


class Scenario:
    """One seed: its proxies, clients and history."""

    def __init__(self, namesrv: str, seed: int) -> None:
        self.dice = random.Random(seed)
        # Now and then a stall that outlasts the client's time-outs.
        longest = 3.0 if self.dice.random() < 0.1 else 0.2
        script = random_faults(seed, share=0.7, within=8 * 1024, seconds=longest)
        self.proxy = ClusterProxy(namesrv, script)
        self.topic, self.group = f"net-{seed}", f"g-net-{seed}"
        self.history = History()
        self.sure: set[str] = set()
        self.handled: set[str] = set()
        self.refused = 0

    async def listener(self, messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        (message,) = messages
        body = message.body.split()[0].decode()
        place: dict[str, Any] = {}
        if message.reconsume_times == 0:  # later ones lie in the group's retry topic
            place = {
                "topic": self.topic, "queue": str(message.queue_id), "offset": message.queue_offset,
            }  # fmt: skip
        call = self.history.begin("handle", group=self.group, message=body, **place)
        await asyncio.sleep(0)
        fails = message.reconsume_times == 0 and body.endswith("7")
        (self.history.fail if fails else self.history.ok)(call)
        if fails:
            context.delay_level = 1
            return ConsumeStatus.RECONSUME_LATER
        self.handled.add(body)
        return ConsumeStatus.SUCCESS

    async def run(self) -> Report:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.proxy)
            namesrv = self.proxy.namesrv
            producer = Producer(self.group, namesrv=namesrv, options=PRODUCER, client_options=CLIENT)
            await stack.enter_async_context(producer)
            for _ in range(2):
                consumer = await self._consumer()
                stack.push_async_callback(in_time, consumer.stop, CONSUMER.drain_timeout_s)
            for begin in range(0, MESSAGES, 5):
                await asyncio.gather(*(self._send(producer, begin + number) for number in range(5)))
                await asyncio.sleep(self.dice.uniform(0, 0.05))
            self.proxy.heal()
            for number in range(MESSAGES, MESSAGES + 2):
                await self._send(producer, number)  # when all is well again, so is the producer

            async def all_handled() -> bool:
                return self.sure <= self.handled

            await until(all_handled, f"{self.topic}: all that was acknowledged handled")
        return check_history(self.history.lines(), Expected())

    async def _consumer(self) -> PushConsumer:
        """As a program does that must have its consumer: again, until it starts."""
        while True:
            consumer = PushConsumer(
                self.group, self.listener, self.topic, namesrv=self.proxy.namesrv, options=CONSUMER,
                client_options=CLIENT,
            )  # fmt: skip
            try:
                await in_time(consumer.start, 10 * API_S)
                return consumer
            except CometError:
                self.refused += 1

    async def _send(self, producer: Producer, number: int) -> None:
        body = f"{number}"
        size = self.dice.choice((10, 10, 1000, 20_000))
        message = Message(self.topic, body.encode() + b" " + self.dice.randbytes(size).hex().encode())
        sending = self.history.begin("send", message=body, topic=self.topic)
        try:
            result = await in_time(lambda: producer.send(message), SEND_S + 2 * API_S)
        except CometError:
            self.history.unknown(sending)
            self.refused += 1
        else:
            self.history.ok(sending, queue=str(result.queue.queue_id), offset=result.queue_offset)
            self.sure.add(body)


async def in_time(work: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """A caller's answer or typed error, within its limit. A busy machine may be late itself."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(work(), limit_s + 30)
    finally:
        took = time.monotonic() - began
        assert took < limit_s + LATE_S, f"{took:.1f} s instead of {limit_s:g}"


async def through(namesrv: str, seeds: range) -> Counter[str]:
    """Run scenarios side by side; what came of all together."""
    limit, total = asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def one(seed: int) -> None:
        async with limit:
            try:
                report = (await Scenario(namesrv, seed).run()).verify()
            except BaseException as error:
                error.add_note(f"scenario {seed}")
                raise
            counts = {"sent": report.sent, "unknown": report.unknown, "duplicates": report.duplicates}
            total.update({**counts, "scenarios": 1})

    async with asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(one(seed))
    return total


def resident_mib() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def ours() -> Counter[str]:
    """Objects of the client and the proxies that are alive."""
    gc.collect()
    rooms = ("cometmq.client.", "cometmq.remoting.", "cometmq.testing.")
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if kind.__module__.startswith(rooms))


@pytest.mark.timeout(600 + SCENARIOS)
async def test_nothing_is_lost_or_invented_and_nobody_waits_for_ever(cluster: Cluster) -> None:
    print(f"COMETMQ_NETWORK_SEED={SEED}")
    before = asyncio.all_tasks()
    first = min(SCENARIOS // 4, 200)
    await through(cluster.namesrv, range(SEED, SEED + first))  # what is made once is there now
    memory, files, objects = resident_mib(), psutil.Process().num_fds(), ours()
    began = time.monotonic()
    total = await through(cluster.namesrv, range(SEED + first, SEED + SCENARIOS))
    took = time.monotonic() - began
    grown = resident_mib() - memory
    print(f"{dict(total)} in {took:.0f} s; memory {memory:.0f} MiB and {grown:+.1f}")
    assert total["sent"] > MESSAGES * total["scenarios"] // 2
    assert total["unknown"] + total["duplicates"] > 0, "the proxies did nothing"
    assert asyncio.all_tasks() == before
    assert psutil.Process().num_fds() <= files + 2
    assert ours() == objects
    assert grown < 8 + 0.004 * SCENARIOS


class Load:
    """Numbered messages, of which only those are kept in mind that are on their way."""

    def __init__(self) -> None:
        self.sent = self.handled = self.refused = self.duplicates = 0
        self.waiting: set[int] = set()
        self.early: set[int] = set()
        """Handled before their sender knew that they were sent, or more often than once."""

    async def send(self, producer: Producer, topic: str, until_: float) -> None:
        numbers = itertools.count()
        while time.monotonic() < until_:
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
    """A producer and two consumers for COMETMQ_NETWORK_MINUTES, through proxies that never rest."""
    dice, load, topic = random.Random(SEED), Load(), f"load-{SEED}"
    end = time.monotonic() + MINUTES * 60
    samples: list[float] = []
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(ClusterProxy(cluster.namesrv))
        clients = {"namesrv": proxy.namesrv, "client_options": CLIENT}
        producer = Producer("p-load", options=PRODUCER, **clients)
        await stack.enter_async_context(producer)
        for _ in range(2):
            member = PushConsumer("g-load", load.listener, topic, options=CONSUMER, **clients)
            await stack.enter_async_context(member)
        sending = asyncio.create_task(load.send(producer, topic, end))
        for number in itertools.count():
            if sending.done():
                break
            await asyncio.sleep(min(0.5, MINUTES * 2))
            for fault in random_faults(dice.randrange(1 << 30), share=0.3, seconds=0.3)(number):
                proxy.inflict(fault)
            if number % 8 == 7:  # delays and splits would stay for ever
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
    assert load.sent > 100 * MINUTES
    assert late - early < 4

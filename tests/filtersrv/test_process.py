"""Real processes: a broker, its filter servers, their workers, and consumers that use them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.filtersrv.conftest import EVEN, matching
from tests.kit.brokers import Peer
from tests.kit.waiting import until

from cometmq import ConsumeFromWhere, Message, Producer, PullConsumer, PushConsumer, PushOptions, filter_class
from cometmq.broker import filter_servers
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import GetRouteInfoRequestHeader
from cometmq.standalone import Standalone
from cometmq.testing.process import StandaloneProcess

OPTIONS = PushOptions(
    consume_from_where=ConsumeFromWhere.FIRST_OFFSET, pull_error_delay_s=0.05, broker_suspend_s=2.0
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(filter_servers, "SCAN_S", 0.2)


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Standalone]:
    async with Standalone(tmp_path, 0, 0, settings={"filterServerNums": "2"}) as running:
        yield running


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def processes_of(cluster: Standalone) -> list[int]:
    assert cluster.broker is not None
    return [process.pid for process in cluster.broker.parts.filter_servers.processes]


def workers_of(cluster: Standalone) -> list[int]:
    return [worker for server in processes_of(cluster) for worker in children(server)]


async def registered(cluster: Standalone, topic: str = "T") -> list[str]:
    """Return the filter servers in the route of a topic."""
    async with Peer(cluster.namesrv_addr) as peer:
        answer = await peer.call(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic), version=407
        )
    table = TopicRouteData.decode(answer.body).filter_server_table if answer.code == 0 else {}
    return [addr for addrs in table.values() for addr in addrs]


async def until_registered(cluster: Standalone, count: int, without: set[str] = frozenset()) -> set[str]:
    async with asyncio.timeout(60):
        while len(found := set(await registered(cluster)) - without) < count:
            await asyncio.sleep(0.02)
    return found


async def send(cluster: Standalone, numbers: range) -> None:
    async with Producer("p", namesrv=cluster.namesrv_addr) as producer:
        for number in numbers:
            await producer.send(Message("T", b"%d" % number))


@contextlib.asynccontextmanager
async def consuming(cluster: Standalone, source: str = EVEN) -> AsyncIterator[tuple[set[int], PushConsumer]]:
    got: set[int] = set()

    async def listener(messages) -> None:
        got.update(int(message.body) for message in messages)

    wanted = {"T": filter_class("Wanted", source)}
    async with PushConsumer("g", listener, wanted, namesrv=cluster.namesrv_addr, options=OPTIONS) as member:
        yield got, member


async def test_a_consumer_gets_what_its_class_takes(cluster):
    await send(cluster, range(40))
    assert len(await until_registered(cluster, 2)) == 2
    async with consuming(cluster) as (got, _):
        await until(lambda: got >= set(range(0, 40, 2)), 20)
        await send(cluster, range(40, 80))
        await until(lambda: got >= set(range(0, 80, 2)), 20)
        assert len(workers_of(cluster)) == 2  # the queues are distributed to both
    assert got == set(range(0, 80, 2))


async def test_offsets_go_on_behind_what_no_class_takes(cluster):
    await send(cluster, range(40))
    await until_registered(cluster, 2)
    async with consuming(cluster, matching("False")) as (got, member):
        await until(
            lambda: (
                sum(queue.next_offset for queue in member.health().queues if queue.queue.topic == "T") == 40
            ),
            20,
        )
    async with consuming(cluster, matching("True")) as (again, _):
        await send(cluster, range(40, 42))
        await until(lambda: {40, 41} <= again, 20)
    assert (got, again) == (set(), {40, 41})


async def test_a_pull_consumer_chooses_a_class_for_each_pull(cluster):
    await send(cluster, range(8))
    await until_registered(cluster, 2)
    async with PullConsumer("g", namesrv=cluster.namesrv_addr) as consumer:
        queues = await consumer.fetch_queues("T")
        found = {}
        for condition in ("int(message.body) < 4", "int(message.body) > 4"):
            wanted = filter_class("Wanted", matching(condition))
            results = [await consumer.pull(queue, 0, expression=wanted) for queue in queues]
            found[condition[-3]] = sorted(int(m.body) for result in results for m in result.messages)
    assert found == {"<": [0, 1, 2, 3], ">": [5, 6, 7]}


async def test_a_class_that_fails_is_told_by_the_consumers_health_until_it_is_put_right(cluster):
    await send(cluster, range(8))
    await until_registered(cluster, 2)
    async with consuming(cluster, matching("int(message.properties['no'])")) as (got, member):
        await until(lambda: any("KeyError: 'no'" in problem for problem in member.health().problems), 20)
        assert got == set()
        await member.subscribe("T", filter_class("Wanted", EVEN))
        await until(lambda: got == {0, 2, 4, 6})
        await until(lambda: member.health().problems == ())


async def test_kills_of_workers_and_filter_servers_lose_nothing(cluster):
    await send(cluster, range(20))
    before = await until_registered(cluster, 2)
    async with consuming(cluster) as (got, _):
        await until(lambda: got >= set(range(0, 20, 2)) and len(workers_of(cluster)) == 2, 20)
        for worker in workers_of(cluster):
            os.kill(worker, signal.SIGKILL)
        await send(cluster, range(20, 40))
        await until(lambda: got >= set(range(0, 40, 2)), 20)
        workers = workers_of(cluster)
        for server in processes_of(cluster):
            os.kill(server, signal.SIGKILL)
        await send(cluster, range(40, 60))
        await until(lambda: got >= set(range(0, 60, 2)), 20)
        await until(lambda: not any(map(command_of, workers)), 20)  # workers end with their filter server
        assert await until_registered(cluster, 2, before)
        assert not before & set(await registered(cluster))
    assert got == set(range(0, 60, 2))


async def test_a_class_that_never_ends_dies_with_a_filter_server_that_is_killed(cluster):
    await send(cluster, range(40))
    await until_registered(cluster, 2)
    async with consuming(cluster, matching("any(None for _ in iter(int, 1))")):
        await until(lambda: len(workers_of(cluster)) == 2, 20)
        server, _ = processes_of(cluster)
        (worker,) = map(psutil.Process, children(server))
        # The worker is confined once it has loaded all slow modules; CPU time after that is the class's.
        await until(lambda: "\nSeccomp:\t2\n" in Path(f"/proc/{worker.pid}/status").read_text(), 20)
        begun = worker.cpu_times().user
        await until(lambda: worker.cpu_times().user - begun > 0.2, 20)
        os.kill(server, signal.SIGKILL)
        await until(lambda: not command_of(worker.pid), 20)


async def test_a_broker_that_stops_leaves_no_process_and_starts_with_others(tmp_path):
    async with Standalone(tmp_path, 0, 0, settings={"filterServerNums": "1"}) as cluster:
        await send(cluster, range(4))
        await until_registered(cluster, 1)
        async with consuming(cluster) as (got, _):
            await until(lambda: got == {0, 2})
            left = [*processes_of(cluster), *workers_of(cluster)]
    assert len(left) == 2
    await until(lambda: not any(map(command_of, left)), 20)
    async with Standalone(tmp_path, 0, 0, settings={"filterServerNums": "1"}) as cluster:
        await send(cluster, range(4, 8))
        async with consuming(cluster) as (got, _):
            await until(lambda: got >= {4, 6})


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_outlives_a_brokers_process_not_even_a_class_that_never_ends(tmp_path, signum):
    conf = Path(Standalone(tmp_path, 0, 0).prepare(0)[1])
    conf.write_text(conf.read_text() + "filterServerNums=1\n")

    def start() -> StandaloneProcess:
        return StandaloneProcess(tmp_path).__enter__()

    process = await asyncio.to_thread(start)
    try:
        async with Producer("p", namesrv=process.namesrv) as producer:
            await producer.send(Message("T", b"0"))
        (server,) = [pid for pid in children(process.pid) if "filtersrv" in command_of(pid)]
        cluster = Standalone(tmp_path)
        cluster.namesrv_addr = process.namesrv
        await until_registered(cluster, 1)
        async with consuming(cluster, matching("any(None for _ in iter(int, 1))")):
            await until(lambda: children(server), 20)
            (worker,) = children(server)
            await asyncio.to_thread(process.process.send_signal, signum)
            await asyncio.to_thread(process.wait)
            await until(lambda: not command_of(server) and not command_of(worker), 20)
    finally:
        process.kill()

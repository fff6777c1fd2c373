"""`TestBroker`: the real broker without sockets, used with the ordinary client classes."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest
from tests.client.scenarios import FROM_FIRST, Ledger, bodies
from tests.kit.waiting import until

from cometmq import (
    Admin,
    ConsumeStatus,
    Message,
    MessageExt,
    NoRouteError,
    Producer,
    PullConsumer,
    PushConsumer,
    TransactionProducer,
    TransactionState,
)
from cometmq.client import SyncProducer, SyncPushConsumer
from cometmq.errors import ClientStateError, CometError, ConfigError
from cometmq.remoting.memory import FIRST_FREE_PORT, LAST_PORT, MemoryNetwork
from cometmq.testing import ClusterProxy, FaultProxy, TestBroker


def open_sockets() -> list[str]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing
        if link.startswith("socket:"):
            links.append(link)
    return links


async def test_the_ordinary_classes_run_against_it_without_a_socket() -> None:
    before, ledger, sent = open_sockets(), Ledger(), bodies(500)
    async with TestBroker() as broker:
        async with (
            Producer("p", namesrv=broker.namesrv) as producer,
            PushConsumer("g", ledger.listener, "T", namesrv=broker.namesrv, options=FROM_FIRST),
        ):
            await producer.send_many([Message("T", body) for body in sent])
            await ledger.has_all(sent)
            assert open_sockets() == before
        assert sorted(each.body for each in broker.messages("T")) == sorted(sent)


async def test_messages_larger_than_any_buffer_pass_both_ways() -> None:
    body = os.urandom(3_000_000)
    async with (
        TestBroker() as broker,
        Producer("p", namesrv=broker.namesrv) as producer,
        PullConsumer("g", namesrv=broker.namesrv) as consumer,
    ):
        results = await asyncio.gather(*(producer.send(Message("Large", body)) for _ in range(8)))
        for result in results:
            pulled = await consumer.pull(result.queue, result.queue_offset, max_count=1)
            assert [each.body for each in pulled.messages] == [body]


class Commits:
    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        return TransactionState.COMMIT

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


async def test_retries_transactions_and_admin_are_the_brokers_own() -> None:
    tries: list[int] = []

    async def fails_once(messages: list[MessageExt]) -> ConsumeStatus:
        tries.append(messages[0].reconsume_times)
        return ConsumeStatus.SUCCESS if tries[-1] else ConsumeStatus.RECONSUME_LATER

    settings = {"messageDelayLevel": "1s 1s 1s 1s"}
    async with TestBroker(settings) as broker, Admin(broker.namesrv) as admin:
        async with TransactionProducer("tp", Commits(), namesrv=broker.namesrv) as producer:
            await producer.send_in_transaction(Message("T", b"x"))
        async with PushConsumer("g", fails_once, "T", namesrv=broker.namesrv, options=FROM_FIRST):

            async def again() -> bool:
                return tries == [0, 1]

            await until(again, "the second try")
        assert "T" in await admin.topics()


def test_blocking_classes_run_against_it_in_a_thread() -> None:
    got: list[bytes] = []
    with TestBroker() as broker, SyncProducer("p", namesrv=broker.namesrv) as producer:
        producer.send(Message("T", b"x"))
        with SyncPushConsumer(
            "g", lambda messages: got.extend(m.body for m in messages), "T", namesrv=broker.namesrv,
            options=FROM_FIRST,
        ):  # fmt: skip
            deadline = time.monotonic() + 30
            while not got and time.monotonic() < deadline:
                time.sleep(0.01)
        assert got == [message.body for message in broker.messages("T")] == [b"x"]


async def test_two_of_them_know_nothing_of_each_other() -> None:
    async with TestBroker() as one, TestBroker({"autoCreateTopicEnable": "false"}) as other:
        async with Producer("p", namesrv=one.namesrv) as producer:
            await producer.send(Message("T", b"x"))
        async with Producer("p", namesrv=other.namesrv) as producer:
            with pytest.raises(CometError, match="T"):
                await producer.send(Message("T", b"x"))
        assert (len(one.messages("T")), other.messages("T")) == (1, [])


async def test_a_client_outlives_it_with_a_typed_error(tmp_path: Path) -> None:
    async with TestBroker() as broker:
        producer = Producer("p", namesrv=broker.namesrv)
        await producer.start()
        await producer.send(Message("T", b"x"))
    with pytest.raises(CometError):
        await producer.send(Message("T", b"y"))
    await producer.stop()
    async with Producer("p", namesrv=broker.namesrv) as late:
        with pytest.raises(NoRouteError, match="cannot connect"):
            await late.send(Message("U", b"x"))
    with pytest.raises(ClientStateError):
        broker.messages("T")


async def test_it_starts_in_milliseconds_and_leaves_nothing() -> None:
    async def once() -> float:
        began = time.perf_counter()
        async with TestBroker() as broker:
            took = time.perf_counter() - began
            async with Producer("p", namesrv=broker.namesrv) as producer:
                await producer.send(Message("T", b"x"))
        return took

    await once()
    gc.collect()
    tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    took = [await once() for _ in range(5)]
    gc.collect()
    assert min(took) < 0.25  # about 15 ms on an idle machine
    assert len(asyncio.all_tasks()) == tasks
    assert len(os.listdir("/proc/self/fd")) < files + 5  # other code in this process may open some


@pytest.mark.parametrize("kind", [FaultProxy, ClusterProxy])
async def test_a_fault_proxy_before_it_is_refused(kind: type[FaultProxy | ClusterProxy]) -> None:
    async with TestBroker() as broker:
        with pytest.raises(ConfigError, match="not a TestBroker"):
            await kind(broker.namesrv).start()


async def test_ports_in_memory_are_ports() -> None:
    network = MemoryNetwork("127.54.9.9")
    first, _ = network.listen(asyncio.BufferedProtocol, 0)
    ports = set()
    for _ in range(LAST_PORT - FIRST_FREE_PORT + 10):
        port, end = network.listen(asyncio.BufferedProtocol, 0)
        ports.add(port)
        end()
    assert first == FIRST_FREE_PORT
    assert (min(ports), max(ports)) == (FIRST_FREE_PORT + 1, LAST_PORT)
    for wrong in (-1, LAST_PORT + 1):
        with pytest.raises(OSError, match=f"port {wrong} is not one of 0 to 65535"):
            network.listen(asyncio.BufferedProtocol, wrong)

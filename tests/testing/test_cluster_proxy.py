"""A cluster behind fault proxies: clients of its name server reach brokers only through proxies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.scenarios import FROM_FIRST, Ledger, bodies

from cometmq import Admin, Message, NoRouteError, Producer, ProducerOptions, PushConsumer
from cometmq.client import SyncProducer
from cometmq.testing import ClusterProxy, Direction, Fault, Kind, LocalBroker, local_broker


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with local_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


async def test_producers_and_consumers_work_through_it(local: LocalBroker) -> None:
    ledger, sent = Ledger(), bodies(100)
    async with ClusterProxy(local.namesrv) as faulty:
        async with (
            Producer("p", namesrv=faulty.namesrv) as producer,
            PushConsumer("g", ledger.listener, "Through", namesrv=faulty.namesrv, options=FROM_FIRST),
        ):
            await producer.send_many([Message("Through", body) for body in sent])
            await ledger.has_all(sent)
        (proxy,) = faulty.brokers.values()
        assert list(faulty.brokers) == [local.broker_addr]
        assert proxy.accepted == 2
        assert faulty.name_server.accepted == 2


async def test_admin_is_told_the_proxies_too(local: LocalBroker) -> None:
    async with ClusterProxy(local.namesrv) as faulty, Admin(faulty.namesrv) as admin:
        cluster = await admin.cluster_info()
        (broker,) = cluster.broker_addr_table.values()
        assert list(broker.broker_addrs.values()) == [faulty.brokers[local.broker_addr].addr]


async def test_a_cut_behind_the_request_is_sent_again(local: LocalBroker) -> None:
    """The broker has stored the message, which the producer cannot know, so the message is stored twice."""
    ledger, again = Ledger(), ProducerOptions(retry_times=3)
    async with ClusterProxy(local.namesrv) as faulty:
        async with Producer("p", namesrv=faulty.namesrv, options=again) as producer:
            await producer.send(Message("Twice", b"before"))
            faulty.inflict(Fault(kind=Kind.CUT, directions=(Direction.TO_CLIENT,), after=1))
            await producer.send(Message("Twice", b"x"))
        async with PushConsumer("g2", ledger.listener, "Twice", namesrv=faulty.namesrv, options=FROM_FIRST):
            await ledger.wait_until(lambda ledger: ledger.bodies == {b"before": 1, b"x": 2}, "both copies")


async def test_a_dead_name_server_is_an_answer(tmp_path: Path) -> None:
    async with ClusterProxy("127.0.0.1:1") as faulty, Producer("p", namesrv=faulty.namesrv) as producer:
        with pytest.raises(NoRouteError, match=r"127\.0\.0\.1:1: Connection refused"):
            await producer.send(Message("T", b"x"))


def test_it_runs_in_a_thread_for_blocking_code(local: LocalBroker) -> None:
    with (
        ClusterProxy(local.namesrv).run_in_thread() as faulty,
        SyncProducer("p", namesrv=faulty.namesrv, options=ProducerOptions(retry_times=9)) as producer,
    ):
        producer.send(Message("InThread", b"x"))
        faulty.inflict(Fault(kind=Kind.CUT))
        producer.send(Message("InThread", b"y"))
        faulty.heal()
        producer.send(Message("InThread", b"z"))

"""Pops of Apache's clients; a store with popped messages goes from our broker to Apache's 5.5.0, and back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker.pop.conftest import PopClient
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.driver import Driver, Json, body_of, message
from tests.interop.space import Cluster, Space
from tests.kit.brokers import Peer, create
from tests.kit.waiting import until, wait_until
from tests.long_form import long_form

from cometmq.protocol.bodies import SetMessageRequestModeRequestBody
from cometmq.protocol.codes import RequestCode

INVISIBLE_MS = 60_000
"""The duration of the leases at the first broker. The second one must be ready before they end."""
Broker = ApacheBroker | CometBroker


def start(kind: str, directory: Path, names: str) -> Broker:
    if kind == "apache":
        return ApacheBroker("5.5.0", directory, names, settings=store_input.TINY)
    return CometBroker(directory, names, settings=store_input.TINY)


@pytest.mark.slow("Apache's broker starts and stops, and leases must expire")
@pytest.mark.parametrize(
    ("first", "second"),
    [("ours", "apache"), pytest.param("apache", "ours", marks=long_form("leases must expire twice more"))],
)
async def test_leases_go_with_the_store(first: str, second: str, names: str, tmp_path: Path) -> None:
    """Each message is delivered once more if its lease expires, and never if it was acked at any broker."""
    brokers = [await asyncio.to_thread(start, first, tmp_path, names)]
    try:
        async with Peer(f"127.0.0.1:{brokers[0].port}") as peer:
            consumer = PopClient(peer)
            assert (
                await create(peer, topic_filter_type="SINGLE_TAG", topic_sys_flag=0, order=False)
            ).code == 0
            await peer.send_numbers(10)
            port = brokers[0].port
            await until(lambda: store_input.max_offset(port, "Orders", 0) == 10)
            found = await consumer.pop(6, invisible_ms=INVISIBLE_MS)
            assert found.bodies == ["0", "1", "2", "3", "4", "5"]
            for number in (1, 3):
                assert await consumer.ack(found.handles[number]) == 0
        await asyncio.to_thread(brokers[0].stop)
        brokers.append(await asyncio.to_thread(start, second, tmp_path, names))
        async with Peer(f"127.0.0.1:{brokers[1].port}") as peer:
            consumer = PopClient(peer)
            rest: list[str] = []
            async with asyncio.timeout(60):
                while len(rest) < 4:  # Apache's broker may answer in parts
                    rest += (await consumer.pop(invisible_ms=600_000)).bodies
            assert rest == ["6", "7", "8", "9"]
            assert await consumer.ack(found.handles[0]) == 0
            again: list[str] = []
            async with asyncio.timeout(300):
                while len(again) < 3:
                    more = await consumer.pop(invisible_ms=600_000, hold_ms=5_000)
                    again += more.bodies
                    assert all(message.reconsume_times == 1 for message in more.messages)
            assert sorted(again) == ["2", "4", "5"]
            assert (await consumer.pop(hold_ms=3_000)).bodies == []
    finally:
        for broker in brokers:
            if broker.process.running:
                await asyncio.to_thread(broker.kill)


@pytest.mark.slow("a JVM, and a failed message comes again after 10 s")
def test_push_consumers_pop_once_the_broker_says_so(
    java_clients: Callable[[str], Driver], cluster: Cluster
) -> None:
    """Two members of a group share all queues. A message that fails is delivered once more."""
    java = java_clients("5.5.0")
    space = Space(java, cluster)
    try:
        producer = space.producer()
        java.send(producer, [message(space.topic, b"first")])
        mode = SetMessageRequestModeRequestBody(space.topic, space.group, "POP", 0)
        wire.call(space.broker_port, RequestCode.SET_MESSAGE_REQUEST_MODE, {}, mode.encode())
        members = [space.push(brokerRebalance=True) for _ in range(2)]
        sent = [b"m-%d" % number for number in range(60)]
        java.send(producer, [message(space.topic, body) for body in sent])
        java.send(producer, [message(space.topic, b"fails", properties={"fails": "1"})])
        got: list[Json] = []

        def all_came() -> bool:
            got[:] = [each for member in members for each in java.delivered(member)]
            return len(got) >= 63

        wait_until("all messages", all_came)
        assert Counter(map(body_of, got)) == Counter([b"first", *sent, b"fails", b"fails"])
        assert sorted(each["reconsumeTimes"] for each in got)[-2:] == [0, 1]
        ends = [store_input.max_offset(space.broker_port, space.topic, each) for each in range(4)]

        def acked() -> bool:
            return ends == [
                store_input.consumer_offset(space.broker_port, space.group, space.topic, each)
                for each in range(4)
            ]

        wait_until("all acks", acked)
    finally:
        space.close()

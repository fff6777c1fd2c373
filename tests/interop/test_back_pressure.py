"""Apache's clients with a busy broker, and with groups whose members have different subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tests.interop.apache import ApacheCluster
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver, JavaError, message
from tests.interop.processes import HERE
from tests.interop.space import Cluster

from cometmq.admin import Admin
from cometmq.client import PushConsumer
from cometmq.message import Message, MessageExt


@pytest.fixture(scope="module")
def busy_and_free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a name server with two brokers, broker-a with a blocked event loop; return the address."""
    servers = CometNamesrv(tmp_path_factory.mktemp("namesrv"))
    namesrv = f"127.0.0.1:{servers.port}"
    held_up = [str(HERE / "held_up.py")]
    busy = CometBroker(tmp_path_factory.mktemp("busy"), namesrv, launcher=held_up)
    free = CometBroker(tmp_path_factory.mktemp("free"), namesrv, name="broker-b")
    yield namesrv
    for server in (busy, free, servers):
        server.stop()


@pytest.mark.parametrize("version", ["4.9.8", "5.5.0"])
def test_only_clients_of_5x_try_another_broker(
    java_clients: Callable[[str], Driver], busy_and_free: str, version: str
) -> None:
    java = java_clients(version)
    name = f"busy-{version}"
    java.call("producer_start", name=name, namesrv=busy_and_free)
    try:
        # The producer begins at a random one of 2 x 1,024 queues, which are ordered by broker.
        asked = [message("BenchmarkTest", b"%d" % number) for number in range(1025)]
        if version == "5.5.0":
            results = java.send(name, asked)
            assert {(each["status"], each["brokerName"]) for each in results} == {("SEND_OK", "broker-b")}
            return
        with pytest.raises(JavaError) as caught:
            java.send(name, asked)
        assert caught.value.code == 2
        assert "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while" in caught.value.message
        assert "reason: loop lag" in caught.value.message
    finally:
        java.call("producer_stop", name=name)


async def differing(cluster: Cluster) -> tuple[dict[str, dict[str, list[str]]], dict[str, str]]:
    """Return the differences found between two members with different tags, and each member's client id."""

    async def take(messages: list[MessageExt]) -> None:
        pass

    async with Admin(cluster.namesrv) as admin:
        await admin.send(Message("Differing", b"x"))
        members = {
            tags: PushConsumer("differing", take, {"Differing": tags}, namesrv=cluster.namesrv)
            for tags in ("a", "b || c")
        }
        async with members["a"], members["b || c"]:
            async with asyncio.timeout(60):  # Apache's brokers register a new retry topic with a delay
                while True:
                    found = await admin.subscriptions("differing")
                    if len(found.members) == 2:
                        break
            return found.differences, {tags: each.client.client_id for tags, each in members.items()}


def test_members_of_a_group_at_apaches_broker_are_asked_for_what_they_subscribe(
    apache_4: ApacheCluster,
) -> None:
    differences, members = asyncio.run(differing(apache_4))
    assert differences == {"Differing": {tags: [client] for tags, client in members.items()}}

"""Lite topics with Apache's Python client, unmodified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from tests.interop.driver import JavaError, RemoteClient, body_of
from tests.interop.grpc_clients import AWAIT_S, GrpcServers, Program, has, start_client
from tests.kit.waiting import wait_until

from cometmq.admin import Admin, TopicSettings
from cometmq.protocol.bodies.route import SubscriptionGroupConfig

pytestmark = pytest.mark.foreign("Apache's Python client of 5.x")
CLIENT = "python-5.1.2"
RESTART_BOUND_S = 60.0


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteClient]:
    directory = tmp_path_factory.mktemp("python")
    running = start_client(CLIENT, directory, directory)  # without TLS, it needs no certificate
    yield running
    running.stop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServers]:
    running = GrpcServers(tmp_path_factory.mktemp("lite"))
    yield running
    running.stop()


@pytest.fixture
def program(remote: RemoteClient, servers: GrpcServers) -> Iterator[Program]:
    found = Program(CLIENT, remote, servers)
    set_up(found)
    yield found
    found.close()


def set_up(program: Program, quota: int = 100) -> None:
    """Create the parent topic, and the group that is bound to it."""

    async def create() -> None:
        async with Admin(program.servers.namesrv) as admin:
            addr = program.servers.broker_addr
            settings = TopicSettings(topic=program.topic, attributes="+message.type=LITE")
            created = admin.create_topic(settings, broker_addr=addr)
            assert [each async for each in created]
            attributes = {"lite.bind.topic": program.topic, "lite.sub.client.quota": str(quota)}
            config = SubscriptionGroupConfig(group_name=program.group, attributes=attributes)
            changed = admin.update_group(config, broker_addr=addr)
            assert [each async for each in changed]

    asyncio.run(create())


def lite_push(program: Program, *lite_topics: str, failing: tuple[bytes, ...] = ()) -> str:
    consumer = program.push(failing, kind="lite_push")
    for each in lite_topics:
        program.remote.call("subscribe_lite", name=consumer, lite=each)
    return consumer


def test_a_lite_push_consumer_receives_its_lite_topics_in_order(program: Program) -> None:
    producer = program.producer()
    consumer = lite_push(program, "s1", "s2", failing=(b"s1-3",))
    for number in range(10):
        for lite in ("s1", "s2", "s3"):
            program.send(producer, b"%s-%d" % (lite.encode(), number), lite=lite)
    got = program.remote.wait_delivered(consumer, 21)
    for lite in ("s1", "s2"):
        expected = [b"%s-%d" % (lite.encode(), number) for number in range(10)]
        if lite == "s1":
            expected.insert(4, b"s1-3")
        assert [body_of(each) for each in got if each["lite"] == lite] == expected
    assert {each["lite"] for each in got} == {"s1", "s2"}
    program.remote.call("subscribe_lite", name=consumer, lite="s3")
    assert len(program.remote.wait_delivered(consumer, 31)) == 31


def test_a_lite_simple_consumer_receives_and_acks(program: Program) -> None:
    producer = program.producer()
    options = {"group": program.group, "topic": program.topic, "await_s": AWAIT_S}
    consumer = program.start("lite_simple", **options)

    def subscribed() -> bool:
        try:
            program.remote.call("subscribe_lite", name=consumer, lite="s1")
        except JavaError as error:
            if "quota: 0" not in str(error):
                raise
            # The start of this client does not wait for its settings.
            return False
        return True

    wait_until("the settings", subscribed)
    for body in (b"1", b"2"):
        program.send(producer, body, lite="s1")
    got = program.receive_until(consumer, has(b"1", b"2"))
    assert [(body_of(each), each["lite"]) for each in got] == [(b"1", "s1"), (b"2", "s1")]


def test_the_quota_is_enforced(program: Program) -> None:
    set_up(program, quota=2)
    consumer = lite_push(program, "s1", "s2")
    with pytest.raises(JavaError, match="quota"):
        program.remote.call("subscribe_lite", name=consumer, lite="s3")
    program.remote.call("unsubscribe_lite", name=consumer, lite="s1")
    program.remote.call("subscribe_lite", name=consumer, lite="s3")


def test_a_lite_push_consumer_survives_a_kill_of_the_broker(
    remote: RemoteClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    servers = GrpcServers(tmp_path_factory.mktemp("killed"))
    program = Program(CLIENT, remote, servers)
    try:
        set_up(program)
        producer, consumer = program.producer(), lite_push(program, "s1")
        program.send(producer, b"before", lite="s1")
        remote.wait_delivered(consumer, lambda got: has(b"before")(got))
        servers.broker.kill()
        servers.start()
        began = time.monotonic()

        def sent() -> bool:
            try:
                program.send(producer, b"after", lite="s1")
            except JavaError:
                return False
            return True

        wait_until("a send after the restart", sent, RESTART_BOUND_S)
        remote.wait_delivered(consumer, lambda got: has(b"after")(got), RESTART_BOUND_S)
        print(f"consumed {time.monotonic() - began:.1f} s after the restart")
    finally:
        program.close()
        servers.stop()

"""Apache's own clients of 5.x, which speak gRPC, with our broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
from tests.broker.access.test_files import write
from tests.interop.driver import JavaError, Json, RemoteClient, body_of
from tests.interop.grpc_clients import CLIENTS, INVISIBLE_S, GrpcServers, Program, has, start_client
from tests.kit.waiting import wait_until

from cometmq.admin import Admin
from cometmq.protocol.bodies.route import SubscriptionGroupConfig

RESTART_BOUND_S = 60.0
ACL = """
accounts:
- {accessKey: adminer, secretKey: secret-of-adminer, admin: true}
- accessKey: program
  secretKey: secret-of-program
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms: [Orders=PUB|SUB, Closed=DENY]
  groupPerms: [billing=SUB]
"""
ACCOUNT = {"key": "program", "secret": "secret-of-program"}
NEWER_CLIENTS = ("python-5.1.2", "java-5.2.0")
"""The clients that can recall messages and send messages with a priority."""
pytestmark = pytest.mark.foreign("Apache's Java clients of 5.x")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RemoteClient]]:
    """``processes("java-5.2.0")``: the process of that client, started at first use."""
    running: dict[str, RemoteClient] = {}

    def process(client: str) -> RemoteClient:
        if client not in running:
            running[client] = start_client(client, tmp_path_factory.mktemp(client))
        return running[client]

    yield process
    for each in running.values():
        each.stop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServers]:
    running = GrpcServers(tmp_path_factory.mktemp("grpc"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServers]:
    """Run a broker with accounts."""
    directory = tmp_path_factory.mktemp("guarded")
    write(directory / "conf" / "plain_acl.yml", ACL)
    running = GrpcServers(directory, aclEnable="true", rocketmqHome=str(directory))
    yield running
    running.stop()


@pytest.fixture(params=CLIENTS)
def remote(request: pytest.FixtureRequest, processes: Callable[[str], RemoteClient]) -> RemoteClient:
    return processes(request.param)


@pytest.fixture
def program(remote: RemoteClient, servers: GrpcServers) -> Iterator[Program]:
    found = Program(remote, servers)
    yield found
    found.close()


def bodies(found: list[Json]) -> list[bytes]:
    return [body_of(each) for each in found]


@pytest.mark.representative("python-5.1.2")
def test_a_simple_consumer_receives_what_was_sent(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    receipt = program.send(producer, "grüße".encode(), tag="A", key="k1", properties={"color": "red"})
    (got,) = program.receive_until(consumer, has("grüße".encode()))
    assert (got["id"], got["topic"], got["tag"], got["keys"]) == (receipt["id"], program.topic, "A", ["k1"])
    assert got["properties"] == {"color": "red"}
    assert got["attempt"] == 1
    large = bytes(range(256)) * 8192  # 2 MiB: many frames of HTTP/2
    program.send(producer, large)
    program.receive_until(consumer, has(large))


def test_leases_expire_and_can_be_changed(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    for body in (b"acked", b"left", b"changed"):
        program.send(producer, body)
    first = program.receive_until(consumer, has(b"acked", b"left", b"changed"), ack=False, invisible_s=20)
    began = time.monotonic()
    by_body = {body_of(each): each for each in first}
    program.ack(consumer, by_body[b"acked"])
    program.change(consumer, by_body[b"changed"], 1)
    again = program.receive_until(consumer, has(b"changed", b"left"), invisible_s=INVISIBLE_S)
    assert time.monotonic() - began > 5  # a lease of 20 s has expired
    assert bodies(again) == [b"changed", b"left"]
    assert [each["attempt"] for each in again] == [2, 2]


@pytest.mark.representative("python-5.1.2")
def test_a_push_consumer_gets_a_failed_message_again(program: Program) -> None:
    producer = program.producer()
    program.send(producer, b"first")
    consumer = program.push(failing=[b"fails"])
    for body in (b"fails", b"works"):
        program.send(producer, body)
    got = program.remote.wait_delivered(consumer, 4)
    assert sorted((body_of(each), each["attempt"], each["failed"]) for each in got) == [
        (b"fails", 1, True),
        (b"fails", 2, False),
        (b"first", 1, False),
        (b"works", 1, False),
    ]


def test_messages_of_a_group_keep_their_order(program: Program) -> None:
    async def order() -> None:
        async with Admin(program.servers.namesrv) as admin:
            config = SubscriptionGroupConfig(group_name=program.group, consume_message_orderly=True)
            changed = admin.update_group(config, broker_addr=program.servers.broker_addr)
            assert [each async for each in changed]

    asyncio.run(order())
    producer = program.producer()
    sent = [(group, b"%s-%d" % (group.encode(), number)) for number in range(10) for group in ("a", "b")]
    for group, body in sent:
        program.send(producer, body, group=group)
    consumer = program.push(failing=[b"a-3"])
    got = program.remote.wait_delivered(consumer, len(sent) + 1)
    for group in ("a", "b"):
        expected = [body for each, body in sent if each == group]
        if group == "a":
            expected.insert(4, b"a-3")
        assert [body_of(each) for each in got if each["group"] == group] == expected


def test_a_message_is_delivered_at_its_time(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    due = time.time() + 4
    program.send(producer, b"later", deliver_at_ms=int(due * 1000))
    program.send(producer, b"now")
    got = program.receive_until(consumer, has(b"now", b"later"))
    assert bodies(got) == [b"now", b"later"]
    assert time.time() >= due - 1  # the Python client rounds to seconds


@pytest.mark.parametrize("remote", NEWER_CLIENTS, indirect=True)
def test_a_recalled_message_is_not_delivered(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    due_ms = int((time.time() + 6) * 1000)
    recalled = program.send(producer, b"recalled", recallable=True, deliver_at_ms=due_ms)
    program.send(producer, b"kept", deliver_at_ms=due_ms + 2000)
    program.remote.call("recall", name=producer, topic=program.topic, handle=recalled["recall"])
    assert bodies(program.receive_until(consumer, has(b"kept"))) == [b"kept"]


def test_a_transaction_is_committed_rolled_back_or_checked(program: Program) -> None:
    producer, consumer = program.producer(checked="COMMIT"), program.simple()
    for body, end in ((b"rolled back", "ROLLBACK"), (b"orphaned", ""), (b"committed", "COMMIT")):
        program.remote.call("transaction", name=producer, message=program.message(body), end=end)
    got = program.receive_until(consumer, has(b"committed", b"orphaned"))
    assert sorted(bodies(got)) == [b"committed", b"orphaned"]


def test_an_orphaned_transaction_is_rolled_back_by_its_check(program: Program) -> None:
    producer, consumer = program.producer(checked="ROLLBACK"), program.simple()
    program.remote.call("transaction", name=producer, message=program.message(b"orphaned"), end="")
    program.send(producer, b"marker", deliver_at_ms=int((time.time() + 8) * 1000))
    assert bodies(program.receive_until(consumer, has(b"marker"))) == [b"marker"]


@pytest.mark.parametrize("remote", NEWER_CLIENTS, indirect=True)
def test_a_message_may_have_a_priority(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    program.send(producer, b"urgent", priority=3)
    assert bodies(program.receive_until(consumer, has(b"urgent"))) == [b"urgent"]


@pytest.mark.parametrize("kind", ["simple", "push"])
@pytest.mark.parametrize(
    "expression", [{"expression": "A||B"}, {"expression": "size > 5 AND color = 'red'", "sql": True}], ids=str
)
def test_filters_select_messages(program: Program, kind: str, expression: Json) -> None:
    producer = program.producer()
    program.send(producer, b"none", tag="C", properties={"size": "9", "color": "blue"})
    consumer = program.simple(**expression) if kind == "simple" else program.push(**expression)
    program.send(producer, b"small", tag="D", properties={"size": "3", "color": "red"})
    program.send(producer, b"good", tag="A", properties={"size": "7", "color": "red"})
    program.send(producer, b"last", tag="B", properties={"size": "8", "color": "red"})
    if kind == "simple":
        got = program.receive_until(consumer, has(b"good", b"last"))
    else:
        got = program.remote.wait_delivered(consumer, 2)
    assert sorted(bodies(got)) == [b"good", b"last"]


def test_accounts_are_checked(remote: RemoteClient, guarded: GrpcServers) -> None:
    program = Program(remote, guarded)
    program.topic, program.group = "Orders", "billing"
    try:
        producer, consumer = program.producer(**ACCOUNT), program.simple(**ACCOUNT)
        program.send(producer, b"signed")
        program.receive_until(consumer, has(b"signed"))
        with pytest.raises(JavaError):
            program.send(program.producer(**{**ACCOUNT, "secret": "wrong-secret"}), b"forged")
        program.topic = "Closed"
        with pytest.raises(JavaError) as forbidden:
            program.send(program.producer(**ACCOUNT), b"forbidden")
        assert "Closed" in forbidden.value.message or "permission" in forbidden.value.message, forbidden.value
    finally:
        program.close()


def test_a_push_consumer_survives_a_kill_of_the_broker(
    remote: RemoteClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    servers = GrpcServers(tmp_path_factory.mktemp("killed"))
    program = Program(remote, servers)
    try:
        producer, consumer = program.producer(), program.push()
        program.send(producer, b"before")
        remote.wait_delivered(consumer, lambda got: has(b"before")(got))
        servers.broker.kill()
        servers.start()
        began = time.monotonic()
        wait_until("a send after the restart", lambda: sent(program, producer, b"after"), RESTART_BOUND_S)
        sent_s = time.monotonic() - began
        remote.wait_delivered(consumer, lambda got: has(b"after")(got), RESTART_BOUND_S)
        consumed_s = time.monotonic() - began
        print(f"{remote.process.name}: sent after {sent_s:.1f} s, consumed after {consumed_s:.1f} s")
        assert consumed_s < RESTART_BOUND_S, f"sent after {sent_s:.1f} s, consumed after {consumed_s:.1f} s"
    finally:
        program.close()
        servers.stop()


def sent(program: Program, producer: str, body: bytes) -> bool:
    """Send a message; return False if the client reports an error."""
    try:
        program.send(producer, body)
    except JavaError:
        return False
    return True

"""Apache's own clients of 5.x, which speak gRPC, with our broker.

All cases of a client run side by side in one process: they mostly wait for leases and delivery times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
from tests.broker.access.test_files import write
from tests.certificates import Certificates
from tests.interop.driver import JavaError, Json, body_of
from tests.interop.grpc_clients import (
    FEATURES,
    GrpcServers,
    Program,
    has,
    selected_cases,
    start_client,
)
from tests.kit.waiting import PATIENCE_S, wait_until

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
  topicPerms: [Orders=PUB|SUB, Bills=PUB|SUB, Closed=DENY]
  groupPerms: [billing=SUB, audit=SUB]
"""
ACCOUNT = {"key": "program", "secret": "secret-of-program"}
pytestmark = pytest.mark.foreign("Apache's clients of 5.x")


def bodies(found: list[Json]) -> list[bytes]:
    return [body_of(each) for each in found]


def managed(program: Program, work: Callable[[Admin], Coroutine[Any, Any, Any]]) -> Any:
    async def manage() -> Any:
        async with Admin(program.servers.namesrv) as admin:
            return await work(admin)

    return asyncio.run(manage())


def set_group(program: Program, **config: Any) -> None:
    async def update(admin: Admin) -> None:
        wanted = SubscriptionGroupConfig(group_name=program.group, **config)
        assert [each async for each in admin.update_group(wanted, broker_addr=program.servers.broker_addr)]

    managed(program, update)


def a_simple_consumer_receives_what_was_sent(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    receipt = program.send(producer, "grüße".encode(), tag="A", key="k1", properties={"color": "red"})
    (got,) = program.receive_until(consumer, has("grüße".encode()))
    assert (got["id"], got["topic"], got["tag"], got["keys"]) == (receipt["id"], program.topic, "A", ["k1"])
    assert got["properties"] == {"color": "red"}
    assert got["attempt"] == 1
    large = bytes(range(256)) * 8192  # 2 MiB: many frames of HTTP/2
    program.send(producer, large)
    program.receive_until(consumer, has(large))


def a_lease_expires(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    for body in (b"acked", b"left"):
        program.send(producer, body)
    first = program.receive_until(consumer, has(b"acked", b"left"), ack=False, invisible_s=10)
    program.ack(consumer, next(each for each in first if body_of(each) == b"acked"))
    again = program.receive_until(consumer, has(b"left"))
    assert [(body_of(each), each["attempt"]) for each in again] == [(b"left", 2)]


def a_lease_can_be_changed(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    program.send(producer, b"changed")
    (first,) = program.receive_until(consumer, has(b"changed"), ack=False, invisible_s=600)
    program.change(consumer, first, 1)
    (again,) = program.receive_until(consumer, has(b"changed"))
    assert again["attempt"] == 2


def a_push_consumer_gets_a_failed_message_again(program: Program) -> None:
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


def wait_for_traces(program: Program, msg_id: str, wanted: list[tuple[str, bool]]) -> None:
    """Wait until the server has stored exactly these trace records of a message: kind and success."""

    def stored() -> bool:
        views = managed(program, lambda admin: admin.traces(msg_id))
        found = [(type(view.trace).__name__, getattr(view.trace, "success", True)) for view in views]
        return sorted(found) == sorted(wanted)

    wait_until(f"the traces {wanted} of {msg_id}", stored, PATIENCE_S)


def the_server_writes_the_traces_of_a_simple_consumer(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    receipt = program.send(producer, b"traced", key="k1")
    program.receive_until(consumer, has(b"traced"))
    wait_for_traces(program, receipt["id"], [("Pub", True), ("SubBefore", True), ("SubAfter", True)])


def the_server_writes_the_traces_of_a_push_consumer(program: Program) -> None:
    receipt = program.send(program.producer(), b"fails")
    consumer = program.push(failing=[b"fails"])
    program.remote.wait_delivered(consumer, 2)
    wanted = [("Pub", True), ("SubAfter", False), ("SubAfter", True), *2 * [("SubBefore", True)]]
    wait_for_traces(program, receipt["id"], wanted)


def messages_of_a_group_keep_their_order(program: Program) -> None:
    set_group(program, consume_message_orderly=True)
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


def a_message_is_delivered_at_its_time(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    due = time.time() + 4
    program.send(producer, b"later", deliver_at_ms=int(due * 1000))
    program.send(producer, b"now")
    got = program.receive_until(consumer, has(b"now", b"later"))
    assert bodies(got) == [b"now", b"later"]
    assert time.time() >= due - 1  # the Python client rounds to seconds


def a_recalled_message_is_not_delivered(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    due_ms = int((time.time() + 10) * 1000)
    recalled = program.send(producer, b"recalled", recallable=True, deliver_at_ms=due_ms)
    program.send(producer, b"kept", deliver_at_ms=due_ms + 2000)
    program.remote.call("recall", name=producer, topic=program.topic, handle=recalled["recall"])
    assert bodies(program.receive_until(consumer, has(b"kept"))) == [b"kept"]


def a_transaction_is_committed_rolled_back_or_checked(program: Program) -> None:
    producer, consumer = program.producer(checked="COMMIT"), program.simple()
    for body, end in ((b"rolled back", "ROLLBACK"), (b"orphaned", ""), (b"committed", "COMMIT")):
        program.remote.call("transaction", name=producer, message=program.message(body), end=end)
    got = program.receive_until(consumer, has(b"committed", b"orphaned"))
    assert sorted(bodies(got)) == [b"committed", b"orphaned"]


def an_orphaned_transaction_is_rolled_back_by_its_check(program: Program) -> None:
    producer, consumer = program.producer(checked="ROLLBACK"), program.simple()
    program.remote.call("transaction", name=producer, message=program.message(b"orphaned"), end="")
    program.send(producer, b"marker", deliver_at_ms=int((time.time() + 8) * 1000))
    assert bodies(program.receive_until(consumer, has(b"marker"))) == [b"marker"]


def a_message_may_have_a_priority(program: Program) -> None:
    producer, consumer = program.producer(), program.simple()
    program.send(producer, b"urgent", priority=3)
    assert bodies(program.receive_until(consumer, has(b"urgent"))) == [b"urgent"]


def filtered(program: Program, kind: str, **expression: Any) -> None:
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


def tags_filter_a_simple_consumer(program: Program) -> None:
    filtered(program, "simple", expression="A||B")


def tags_filter_a_push_consumer(program: Program) -> None:
    filtered(program, "push", expression="A||B")


def sql_filters_a_simple_consumer(program: Program) -> None:
    filtered(program, "simple", expression="size > 5 AND color = 'red'", sql=True)


def sql_filters_a_push_consumer(program: Program) -> None:
    filtered(program, "push", expression="size > 5 AND color = 'red'", sql=True)


def dead_letters(program: Program) -> int:
    (found,) = managed(program, lambda admin: admin.dead_letter_counts([program.group]))
    return int(found.count)


def a_message_that_fails_too_often_becomes_a_dead_letter(program: Program) -> None:
    set_group(program, retry_max_times=0)
    producer, consumer = program.producer(), program.push(failing=[b"fails"])
    for body in (b"fails", b"works"):
        program.send(producer, body)
    wait_until("a dead letter", lambda: dead_letters(program) == 1)
    assert sorted(bodies(program.remote.wait_delivered(consumer, 2))) == [b"fails", b"works"]


def an_ordered_message_that_fails_too_often_becomes_a_dead_letter(program: Program) -> None:
    set_group(program, retry_max_times=0, consume_message_orderly=True)
    producer = program.producer()
    for body in (b"fails", b"follows"):
        program.send(producer, body, group="a")
    consumer = program.push(failing=[b"fails"])
    assert bodies(program.remote.wait_delivered(consumer, 2)) == [b"fails", b"follows"]
    wait_until("a dead letter", lambda: dead_letters(program) == 1)


def accounts_are_checked(program: Program) -> None:
    program.topic, program.group = "Orders", "billing"
    producer, consumer = program.producer(**ACCOUNT), program.simple(**ACCOUNT)
    program.send(producer, b"signed")
    program.receive_until(consumer, has(b"signed"))
    with pytest.raises(JavaError):
        program.send(program.producer(**{**ACCOUNT, "secret": "wrong-secret"}), b"forged")
    program.topic = "Closed"
    with pytest.raises(JavaError) as forbidden:
        program.send(program.producer(**ACCOUNT), b"forbidden")
    assert "Closed" in forbidden.value.message or "permission" in forbidden.value.message, forbidden.value


def a_certificate_is_verified(program: Program) -> None:
    program.topic, program.group = "Bills", "audit"
    producer, consumer = program.producer(tls=True, **ACCOUNT), program.simple(tls=True, **ACCOUNT)
    program.send(producer, b"encrypted")
    program.receive_until(consumer, has(b"encrypted"))


def a_push_consumer_survives_a_kill_of_the_broker(program: Program) -> None:
    consumer = program.push()
    survive(program, lambda body: program.remote.wait_delivered(consumer, has(body), RESTART_BOUND_S))


def a_simple_consumer_survives_a_kill_of_the_broker(program: Program) -> None:
    consumer = program.simple()

    def received(body: bytes) -> bool:
        try:
            return has(body)(program.receive(consumer))
        except JavaError:
            return False

    survive(program, lambda body: wait_until("a message", lambda: received(body), RESTART_BOUND_S))


def survive(program: Program, consume: Callable[[bytes], object]) -> None:
    producer = program.producer()
    program.send(producer, b"before")
    consume(b"before")
    program.servers.broker.kill()
    program.servers.start()
    began = time.monotonic()
    wait_until("a send after the restart", lambda: sent(program, producer, b"after"), RESTART_BOUND_S)
    consume(b"after")
    consumed_s = time.monotonic() - began
    assert consumed_s < RESTART_BOUND_S, f"consumed after {consumed_s:.1f} s"


def sent(program: Program, producer: str, body: bytes) -> bool:
    """Send a message; return False if the client reports an error."""
    try:
        program.send(producer, body)
    except JavaError:
        return False
    return True


class Case(NamedTuple):
    """A thing that clients can do, with the feature that it needs, and its servers: open, guarded or own."""

    check: Callable[[Program], None]
    needs: str = ""
    servers: str = "open"


CASES = (
    Case(a_simple_consumer_receives_what_was_sent),
    Case(a_lease_expires),
    Case(a_lease_can_be_changed, "change"),
    Case(a_push_consumer_gets_a_failed_message_again, "push"),
    Case(the_server_writes_the_traces_of_a_simple_consumer),
    Case(the_server_writes_the_traces_of_a_push_consumer, "push"),
    Case(messages_of_a_group_keep_their_order, "push"),
    Case(a_message_is_delivered_at_its_time),
    Case(a_recalled_message_is_not_delivered, "recall"),
    Case(a_transaction_is_committed_rolled_back_or_checked),
    Case(an_orphaned_transaction_is_rolled_back_by_its_check),
    Case(a_message_may_have_a_priority, "priority"),
    Case(tags_filter_a_simple_consumer),
    Case(tags_filter_a_push_consumer, "push"),
    Case(sql_filters_a_simple_consumer),
    Case(sql_filters_a_push_consumer, "push"),
    Case(a_message_that_fails_too_often_becomes_a_dead_letter, "push"),
    Case(an_ordered_message_that_fails_too_often_becomes_a_dead_letter, "push"),
    Case(accounts_are_checked, servers="guarded"),
    Case(a_certificate_is_verified, "verification", "guarded"),
    Case(a_push_consumer_survives_a_kill_of_the_broker, "push", "own"),
    Case(a_simple_consumer_survives_a_kill_of_the_broker, servers="own"),
)
ROWS = [
    pytest.param(client, case, id=f"{client}-{case.check.__name__}")
    for client, features in FEATURES.items()
    for case in CASES
    if not case.needs or case.needs in features
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServers]:
    running = GrpcServers(tmp_path_factory.mktemp("grpc"), grpcTraceEnable="true")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[GrpcServers]:
    """Run a broker with accounts and a certificate."""
    directory = tmp_path_factory.mktemp("guarded")
    write(directory / "conf" / "plain_acl.yml", ACL)
    settings = {"rocketmqHome": str(directory), "tls.config.file": str(certificates.file)}
    running = GrpcServers(directory, aclEnable="true", **settings)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    servers: GrpcServers,
    guarded: GrpcServers,
    certificates: Certificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], dict[Case, Future[None]]]]:
    """``outcomes(client)``: those of its selected cases, which all start at the first use."""
    wanted = selected_cases(request.session.items)

    @contextmanager
    def running(client: str) -> Iterator[dict[Case, Future[None]]]:
        directory = tmp_path_factory.mktemp(client)
        remote = start_client(client, directory, certificates.ca)

        def run(case: Case) -> None:
            with ExitStack() as cleanup:
                if case.servers == "own":
                    chosen = GrpcServers(directory / case.check.__name__)
                    cleanup.callback(chosen.stop)
                else:
                    chosen = {"open": servers, "guarded": guarded}[case.servers]
                program = Program(client, remote, chosen)
                if case.servers != "own":  # the end of a Java client may hang after a kill of its broker
                    cleanup.callback(program.close)
                case.check(program)

        try:
            with ThreadPoolExecutor(len(wanted[client])) as threads:
                yield {case: threads.submit(run, case) for case in wanted[client]}
        finally:
            remote.stop()

    found: dict[str, dict[Case, Future[None]]] = {}
    with ExitStack() as stack:

        def of(client: str) -> dict[Case, Future[None]]:
            if client not in found:
                stack.close()  # the previous client ends
                found[client] = stack.enter_context(running(client))
            return found[client]

        yield of


@pytest.mark.slow("leases and delivery times")
@pytest.mark.representative("python-5.1.2-a_simple_consumer_receives_what_was_sent")
@pytest.mark.parametrize(("client", "case"), ROWS)
def test_a_client(outcomes: Callable[[str], dict[Case, Future[None]]], client: str, case: Case) -> None:
    outcomes(client)[case].result()

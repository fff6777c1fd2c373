"""The kombu transport with a real broker. The connections of a test share nothing with other tests."""

from __future__ import annotations

import contextlib
import json
import os
import queue as queues
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection, Consumer, Exchange, Queue
from kombu.asynchronous import Hub
from kombu.exceptions import ChannelError, OperationalError
from kombu.message import Message as Received
from kombu.pidbox import Mailbox
from tests.integrations.conftest import Connect
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.ports import closed_port, free_port

from cometmq import SyncProducer
from cometmq.client import ClientOptions, SyncPullConsumer
from cometmq.errors import ConfigError, NoRouteError
from cometmq.integrations import kombu, session
from cometmq.integrations.session import Session, topic_name
from cometmq.message import Message, MessageExt, check_group_name, check_topic_name
from cometmq.protocol.codes import DLQ_PREFIX, is_system_topic
from cometmq.testing import LocalBroker


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A queue for one test. Its name is illegal as a topic."""
    return f"{request.node.name}: ☃ 100 %"


def publish(connection: Connection, queue: str, *bodies: object, **properties: object) -> None:
    with connection.Producer() as producer:
        for body in bodies:
            producer.publish(body, routing_key=queue, declare=[Queue(queue)], **properties)


def received(connection: Connection, queue: str, count: int, **options: object) -> list[Received]:
    """Receive messages without acknowledging them."""
    found: list[Received] = []
    with consuming(connection, queue, found, **options):
        while len(found) < count:
            connection.drain_events(timeout=PATIENCE_S)
    return found


@contextlib.contextmanager
def consuming(
    connection: Connection, queue: str, found: list[Received], **options: object
) -> Iterator[Consumer]:
    with connection.Consumer([Queue(queue)], on_message=found.append, **options) as consumer:
        yield consumer


def drained(connection: Connection, seconds: float = 0.15) -> None:
    """Deliver the messages that are available or arrive soon."""
    with contextlib.suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=seconds)


def bodies(messages: list[Received]) -> list[object]:
    return sorted(message.payload for message in messages)


def size(connection: Connection, queue: str) -> int:
    return int(connection.default_channel.queue_declare(queue, passive=True).message_count)


class TestNames:
    @given(st.text(), st.sampled_from(["queue", "broadcast"]))
    def test_any_name_has_a_legal_topic_and_group(self, name: str, kind: str) -> None:
        found = topic_name(name, kind)

        check_topic_name(found)
        check_group_name(found)
        assert len(found) <= 59
        assert not is_system_topic(found)

    @pytest.mark.parametrize("name", ["celery", "a_b-C9", "x" * 59])
    def test_plain_names_are_kept(self, name: str) -> None:
        assert topic_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", "TBW102", "rmq_sys_x", "%RETRY%g", "CID_RMQ_SYS_x", "../x", "x" * 60, "a\ud800"]
    )
    def test_others_are_replaced(self, name: str) -> None:
        assert topic_name(name) != name

    def test_different_names_have_different_topics(self) -> None:
        names = ["a.b", "a-b", "a b", "a.b ", "A.b", *(topic_name(each) for each in ("a.b", "a b"))]

        assert len({topic_name(each) for each in names}) == len(names)
        assert topic_name("a.b", "broadcast") != topic_name("a.b")


INFO = b'"delivery_info": {"exchange": "", "routing_key": ""}'
BAD_BODY = b'{"body": "x", "properties": {"body_encoding": "x", %b}}' % INFO


class TestQueues:
    def test_messages_are_acknowledged_one_by_one(self, connect: Connect, name: str) -> None:
        publish(connect(), name, "a", "b", "c")
        first = connect()
        found = received(first, name, 3)
        [each.ack() for each in found if each.payload != "b"]
        first.close()

        again = received(connect(), name, 1)
        assert bodies(found) == ["a", "b", "c"]
        assert [each.payload for each in again] == ["b"]
        assert again[0].delivery_info["redelivered"] is False  # released, not failed

    def test_a_message_that_ends_its_reader_counts_as_a_retry_so_that_it_ends_in_the_dead_letter_queue(
        self, connect: Connect, name: str
    ) -> None:
        def fail(_body: object, _message: Received) -> None:
            raise ZeroDivisionError

        publish(connect(), name, "x")
        first = connect()
        with first.Consumer([Queue(name)], callbacks=[fail]), pytest.raises(ZeroDivisionError):
            first.drain_events(timeout=PATIENCE_S)
        first.close()

        (again,) = received(connect(), name, 1)
        assert again.delivery_info["redelivered"] is True

    @pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
    def test_bodies_of_any_kind_arrive(self, connect: Connect, name: str, serializer: str) -> None:
        body = {"text": "☃", "none": None, "list": [1, 2.5]}
        publish(connect(), name, body, serializer=serializer, compression="gzip", headers={"k": "v"})

        (found,) = received(connect(), name, 1, accept=["json", "pickle", "yaml"], no_ack=True)
        assert (found.payload, found.headers["k"]) == (body, "v")

    def test_a_rejected_message_comes_again_or_is_a_dead_letter(
        self, connect: Connect, broker: LocalBroker, name: str
    ) -> None:
        publish(connect(), name, "x")
        reader = connect()
        received(reader, name, 1)[0].reject(requeue=True)
        (again,) = received(reader, name, 1)
        assert again.delivery_info["redelivered"] is True
        again.reject()

        assert "x" in dead_letter(broker, name)

    @pytest.mark.parametrize("body", [b"[]", b"{}", b"\xff", b'{"properties": 7}', BAD_BODY, b"[" * 100_000])
    def test_messages_of_others_are_dead_letters(
        self, connect: Connect, broker: LocalBroker, name: str, body: bytes
    ) -> None:
        reader = connect()
        Queue(name)(reader.default_channel).declare()
        with SyncProducer("others", namesrv=broker.namesrv) as producer:
            producer.send(Message(topic_name(name), body))
        publish(connect(), name, "good")

        found: list[Received] = []
        with consuming(reader, name, found):
            wait_until("it is a dead letter", lambda: drained(reader, 0.05) or dead_letters(broker, name))
        assert bodies(found) == ["good"]

    def test_the_prefetch_count_holds_for_all_queues_of_a_channel(self, connect: Connect, name: str) -> None:
        publish(connect(), name, *"abcd")
        publish(connect(), f"{name} 2", *"efgh")
        reader, other = connect(), connect()
        found: list[Received] = []
        with reader.Consumer([Queue(name), Queue(f"{name} 2")], on_message=found.append, prefetch_count=2):
            drained(reader)
            assert len(found) == 2
            others = received(other, name, 2) + received(other, f"{name} 2", 2)
            found[0].ack()
            drained(reader)
            assert len(found) == 3
        assert len({each.payload for each in found + others}) == 7

    def test_a_cancelled_consumer_gives_back_what_it_has_not_delivered(
        self, connect: Connect, name: str
    ) -> None:
        publish(connect(), name, *"abc")
        reader = connect()
        with consuming(reader, name, []):
            wait_until("they are received", lambda: reader.transport._ready.qsize() == 3)  # noqa: SLF001
        assert bodies(received(connect(), name, 3)) == ["a", "b", "c"]

    def test_a_recovering_channel_returns_its_messages(self, connect: Connect, name: str) -> None:
        publish(connect(), name, "a", "b")
        reader = connect()
        found: list[Received] = []
        with consuming(reader, name, found) as consumer:
            wait_until("both are received", lambda: drained(reader, 0.05) or len(found) == 2)
            consumer.recover(requeue=True)
            wait_until("both are received again", lambda: drained(reader, 0.05) or len(found) == 4)
        assert bodies(found) == ["a", "a", "b", "b"]

    def test_messages_are_counted_and_purged(self, connect: Connect, name: str) -> None:
        connection = connect()
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            size(connection, name)
        publish(connection, name, *"abc")
        assert size(connection, name) == 3
        assert Queue(name)(connection.default_channel).purge() == 3
        assert wait_until("none is left", lambda: size(connection, name) == 0)
        assert Queue(name)(connection.default_channel).get() is None

    def test_a_queue_that_is_not_empty_keeps_its_bindings(self, connect: Connect, name: str) -> None:
        connection, exchange = connect(), Exchange("bound")
        queue = Queue(name, exchange, routing_key="k")
        with connection.Producer() as producer:
            producer.publish("a", exchange=exchange, routing_key="k", declare=[queue])
            queue(connection.default_channel).delete(if_empty=True)
            producer.publish("b", exchange=exchange, routing_key="k")
        assert size(connection, name) == 2
        queue(connection.default_channel).delete()
        assert wait_until("it is empty", lambda: size(connection, name) == 0)

    def test_unwanted_messages_do_not_prolong_a_wait(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection = connect()
        transport, channel = connection.transport, connection.default_channel
        now = 0.0
        waits: list[float] = []

        def get(timeout: float) -> object:
            nonlocal now
            assert len(waits) < 5
            waits.append(timeout)
            now += 1
            return channel, "unknown", "", MessageExt("t", b"")

        def get_nowait() -> object:
            raise queues.Empty

        monkeypatch.setattr(kombu, "time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(transport, "_ready", SimpleNamespace(get=get, get_nowait=get_nowait))
        with pytest.raises(TimeoutError):
            transport.drain_events(connection, timeout=2.5)
        assert waits == [2.5, 1.5, 0.5]

    def test_single_messages_can_be_asked_for(self, connect: Connect, name: str) -> None:
        with contextlib.closing(connect().SimpleQueue(name)) as simple:
            simple.put("x")
            message = simple.get(timeout=PATIENCE_S)
            message.ack()
        publish(connect(), name, "y")
        with contextlib.closing(connect().SimpleQueue(name)) as simple:
            assert simple.get_nowait().payload == "y"

    def test_higher_priorities_come_first(self, connect: Connect, name: str) -> None:
        declared = Queue(name, max_priority=5)
        connection = connect()
        soon = (datetime.now(UTC) + timedelta(seconds=0.2)).isoformat()
        with connection.Producer() as producer:
            for priority in (0, 4, 2, 9, None):
                producer.publish(f"p{priority}", routing_key=name, declare=[declared], priority=priority)
            producer.publish("late", routing_key=name, priority=3, headers={"eta": soon})
        wait_until("all are there", lambda: size(connection, name) == 6)

        found = received(connect(), name, 6)
        assert [each.payload for each in found[:4]] == ["p9", "p4", "late", "p2"]

    def test_a_kombu_hub_receives_and_acknowledges(self, connect: Connect, name: str) -> None:
        reader, hub = connect(), Hub()
        publish(connect(), name, *"abc")
        found: list[object] = []

        def handle(message: Received) -> None:
            found.append(message.payload)
            message.ack()
            if message.payload == "bad":
                raise ValueError(message)

        with reader.Consumer([Queue(name)], on_message=handle, prefetch_count=1):
            reader.register_with_event_loop(hub)
            wait_until("three are received", lambda: hub.run_once() or len(found) == 3)
            publish(connect(), name, "bad", "d")
            with contextlib.suppress(ValueError):
                wait_until("all are received", lambda: hub.run_once() or len(found) == 5)
            wait_until("all are received after an error", lambda: hub.run_once() or len(found) == 5)
        reader.close()
        hub.close()
        assert size(connect(), name) == 0


def dead_letters(broker: LocalBroker, queue: str) -> list[bytes]:
    with SyncPullConsumer("reader", namesrv=broker.namesrv) as consumer:
        try:
            (found,) = consumer.fetch_queues(DLQ_PREFIX + topic_name(queue))
        except NoRouteError:
            return []
        return [each.body for each in consumer.pull(found, 0).messages]


def dead_letter(broker: LocalBroker, queue: str) -> str:
    (found,) = wait_until("it is a dead letter", lambda: dead_letters(broker, queue))
    return found.decode()


class TestLeases:
    @pytest.mark.slow("a lease must pass")
    def test_a_long_task_keeps_its_message(self, connect: Connect, name: str) -> None:
        publish(connect(), name, "x")
        reader, other = connect(visibility_timeout=1.0), connect(visibility_timeout=1.0)
        (held,) = received(reader, name, 1)
        time.sleep(1.8)
        assert Queue(name)(other.default_channel).get() is None
        held.ack()
        assert wait_until("it is acknowledged", lambda: size(other, name) == 0)

    @pytest.mark.slow("a lease must pass")
    def test_a_message_comes_again_after_its_consumer_has_died(self, connect: Connect, name: str) -> None:
        publish(connect(), name, "x")
        pid = os.fork()
        if pid == 0:
            received(connect(visibility_timeout=1.0), name, 1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        (again,) = received(connect(), name, 1)
        assert again.delivery_info["redelivered"] is True

    def test_a_forked_child_needs_a_connection_of_its_own(
        self, connect: Connect, broker: LocalBroker, name: str
    ) -> None:
        parent = connect()
        publish(parent, name, "parent")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert not parent.connected
                parent.close()
                publish(Connection(f"cometmq://{broker.namesrv}"), name, "child")
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        publish(parent, name, "parent again")
        assert bodies(received(parent, name, 3)) == ["child", "parent", "parent again"]


class TestDelays:
    @pytest.mark.slow("a delay must pass")
    def test_a_message_is_not_delivered_before_its_eta(self, connect: Connect, name: str) -> None:
        eta = datetime.now(UTC) + timedelta(seconds=1.3)
        publish(connect(), name, "late", headers={"eta": eta.isoformat()})
        publish(connect(), name, "soon", headers={"eta": "no time"})
        reader = connect()
        assert [each.payload for each in received(reader, name, 1)] == ["soon"]
        received(reader, name, 1)
        assert datetime.now(UTC) >= eta

    def test_without_native_delays_the_worker_receives_it_at_once(self, connect: Connect, name: str) -> None:
        eta = datetime.now(UTC) + timedelta(hours=1)
        publish(connect(native_delayed_delivery=False), name, "x", headers={"eta": eta.isoformat()})
        received(connect(), name, 1)[0].ack()

    def test_a_worker_receives_a_message_before_an_eta_that_no_broker_accepts(
        self, connect: Connect, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session, "MAX_DELAY_MS", 10)
        eta = datetime.now(UTC) + timedelta(days=1000)
        publish(connect(), name, "x", headers={"eta": eta.isoformat()})
        received(connect(), name, 1)[0].ack()


class TestBroadcast:
    @pytest.mark.parametrize("exchange", [Exchange("news", "fanout"), Exchange("events", "topic")], ids=str)
    def test_every_live_queue_receives_what_is_published_after_its_start(
        self, connect: Connect, exchange: Exchange
    ) -> None:
        readers = [connect(), connect()]
        sender = connect().Producer()
        sender.publish("early", exchange=exchange, routing_key="a.b", declare=[exchange])
        found: list[list[object]] = [[], []]
        with contextlib.ExitStack() as stack:
            for number, reader in enumerate(readers):
                queue = Queue(f"live {number}", exchange, routing_key="a.#", auto_delete=True)
                consumer = Consumer(reader, [queue], no_ack=True, on_message=found[number].append)
                stack.enter_context(consumer)
            sender.publish("x", exchange=exchange, routing_key="c" if exchange.type == "topic" else "")
            for body in "yz":
                sender.publish(body, exchange=exchange, routing_key="a.b")
            for reader in readers:
                drained(reader)
        expected = ["y", "z"] if exchange.type == "topic" else ["x", "y", "z"]
        assert [bodies(each) for each in found] == [expected, expected]  # type: ignore[arg-type]

    def test_a_reply_reaches_the_live_queue_that_it_names(self, connect: Connect) -> None:
        asker, answerer = connect(), connect()
        found: list[Received] = []
        with asker.Consumer([Queue("reply me", auto_delete=True)], no_ack=True, on_message=found.append):
            with answerer.Producer() as producer:
                producer.publish("other", routing_key="reply others")
                producer.publish("answer", routing_key="reply me")
            drained(asker)
        assert bodies(found) == ["answer"]

    def test_a_live_queue_exists_from_its_declaration_for_all_connections_of_its_process(
        self, connect: Connect
    ) -> None:
        queue = Queue("declared", auto_delete=True)
        queue(connect().default_channel).declare()
        with connect().Producer() as producer:
            producer.publish("early", routing_key="declared")
        reader = connect()
        found: list[Received] = []
        with reader.Consumer([queue], no_ack=True, on_message=found.append):
            drained(reader)
        assert bodies(found) == ["early"]
        queue(reader.default_channel).delete()
        with reader.Consumer([queue], no_ack=True, on_message=found.append):
            drained(reader)
        assert bodies(found) == ["early"]

    @pytest.mark.parametrize("names", [([1], "reply"), ("x", 5)], ids=str)
    def test_messages_of_others_are_skipped(
        self, connect: Connect, broker: LocalBroker, names: tuple[object, object]
    ) -> None:
        info = dict(zip(("exchange", "routing_key"), names, strict=True))
        body = json.dumps({"body": "x", "properties": {"body_encoding": "utf-8", "delivery_info": info}})
        reader = connect()
        Queue("bound", Exchange("x", "topic"), "#", auto_delete=True)(reader.default_channel).declare()
        found: list[Received] = []
        with reader.Consumer([Queue("hostile", auto_delete=True)], no_ack=True, on_message=found.append):
            with SyncProducer("others", namesrv=broker.namesrv) as producer:
                topic = topic_name("", kombu.BROADCAST)
                producer.send(Message(topic, body.encode(), tags=topic_name("hostile")))
            with connect().Producer() as sender:
                sender.publish("good", routing_key="hostile")
            wait_until("it is received", lambda: drained(reader, 0.05) or found)
        assert bodies(found) == ["good"]

    def test_a_live_queue_can_be_asked_for_single_messages(self, connect: Connect) -> None:
        queue, reader, sender = Queue("single", auto_delete=True), connect(), connect().Producer()
        bound = queue(reader.default_channel)
        bound.declare()
        assert bound.get() is None
        for key, body in [("single", "a"), ("others", "b"), ("single", "c")]:
            sender.publish(body, routing_key=key)

        assert [bound.get().payload for _ in range(2)] == ["a", "c"]
        assert bound.get() is None
        assert not reader.transport.session._consumers  # noqa: SLF001

    def test_the_offsets_of_few_queues_are_kept(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kombu, "_MAX_QUEUES", 2)
        monkeypatch.setattr(kombu, "_offsets", {})
        connection = connect()
        for name in ("one", "two", "one", "three"):
            Queue(name, auto_delete=True)(connection.default_channel).declare()
        assert list(connection.transport.offsets) == ["one", "three"]

    def test_other_name_servers_have_other_offsets(self) -> None:
        first, other, again = (
            Connection("cometmq://", transport_options={"namesrv": namesrv}).transport.offsets
            for namesrv in ("a:1", "b:1", "a:1")
        )
        assert first is not other
        assert first is again

    def test_a_mailbox_calls_the_nodes_of_other_connections(self, connect: Connect) -> None:
        mailbox = Mailbox("test", type="fanout")
        with ThreadPoolExecutor() as threads:
            for number in range(2):
                connection = connect()
                node = mailbox(connection).Node(f"node{number}", channel=connection.default_channel)
                node.handler(ping)
                node.listen()
                threads.submit(connection.drain_events, timeout=PATIENCE_S)
            replies = mailbox(connect()).multi_call("ping", timeout=PATIENCE_S, limit=2)
        assert sorted(map(str, replies)) == ["{'node0': 'pong'}", "{'node1': 'pong'}"]


def ping(state: object, **_: object) -> str:
    return "pong"


class TestConnections:
    def test_an_unreachable_name_server_is_a_connection_error(self) -> None:
        with pytest.raises(OperationalError):
            Connection(f"cometmq://127.0.0.1:{free_port()}").ensure_connection(
                max_retries=1, interval_start=0
            )

    @pytest.mark.parametrize("ports", [0, 1])
    def test_without_a_master_there_is_no_connection(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch, ports: int
    ) -> None:
        """Otherwise kombu connects to the name server and publishes in a loop without pauses."""
        with contextlib.ExitStack() as stack:
            found = [f"127.0.0.1:{stack.enter_context(closed_port())}" for _ in range(ports)]

            async def masters(_session: Session) -> list[str]:
                return found

            monkeypatch.setattr(Session, "masters", masters)
            with pytest.raises(OperationalError, match="refused" if ports else "no master is registered"):
                connect().ensure_connection(max_retries=1, interval_start=0)

    def test_a_pool_without_threads_is_refused(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kombu, "green_environment", lambda: "gevent")
        with pytest.raises(ConfigError, match="prefork, threads or solo"):
            connect().connect()

    def test_the_next_alternative_is_used(self, connect: Connect, broker: LocalBroker, name: str) -> None:
        connection = connect(f"cometmq://127.0.0.1:{free_port()};cometmq://{broker.namesrv}")
        connection.ensure_connection(max_retries=3, interval_start=0)
        publish(connection, name, "x")

    def test_a_connection_whose_session_cannot_close_releases_its_thread(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def close(session: Session) -> None:
            await closing(session)
            raise ValueError("unexpected")

        closing = Session.close
        connection = connect()
        connection.connect()
        transport, hub = connection.transport, Hub()
        transport.register_with_event_loop(connection, hub)
        monkeypatch.setattr(Session, "close", close)
        with pytest.raises(ValueError, match="unexpected"):
            transport.close_connection(transport)
        assert (transport._thread, transport._bell) == (None, None)  # noqa: SLF001
        hub.close()

    def test_the_path_of_the_transport_serves_too(self, broker: LocalBroker, name: str) -> None:
        path = "cometmq.integrations.kombu:Transport"
        with Connection(f"any://{broker.namesrv}", transport=path) as connection:
            publish(connection, name, "x")

    def test_a_url_names_account_and_namespace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options: list[ClientOptions] = []

        async def opened(namesrv: str, given: ClientOptions, **_: object) -> None:
            options.append(given)
            raise ConfigError("stop", namesrv, "nothing else")

        monkeypatch.setattr(Session, "open", opened)
        with pytest.raises(ConfigError, match=r"\[::1\]:7"):
            Connection("cometmq://key:a%2Fb@[::1]:7/space", ssl=True).connect()
        (found,) = options
        assert (found.access_key, found.secret_key, found.namespace, found.tls) == (
            "key",
            "a/b",
            "space",
            True,
        )

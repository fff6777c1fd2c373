"""The sink's sender against servers that say what a test wants: where rows go, and when it asks again."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from cometmq.client.selectors import select_by_hash
from cometmq.errors import BrokerError, ConnectError, NoRouteError
from cometmq.message import Message, MessageQueue
from cometmq.pipeline import sending
from cometmq.pipeline.options import WriteOptions
from cometmq.pipeline.rows import Outgoing
from cometmq.pipeline.sending import Sender
from cometmq.protocol.batch import iter_batch
from cometmq.protocol.bodies import BrokerData, QueueData, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame, decode_frame, encode_frame
from cometmq.protocol.headers import SendMessageRequestHeaderV2

TOPIC = "Placed"


@contextmanager
def serving(answer: Callable[[Frame], Frame]) -> Iterator[str]:
    """A server on a free port; its address. In the end its connections are closed too."""
    connections: list[socket.socket] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            connections.append(self.connection)
            while size := self.rfile.read(4):
                frame = decode_frame(self.rfile.read(int.from_bytes(size, "big")))
                self.wfile.write(encode_frame(answer(frame)))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Broker:
    """Keeps the bodies it is sent by queue, or answers with `refusal`."""

    def __init__(self, refusal: int = 0) -> None:
        self.refusal, self.asked = refusal, 0
        self.queues: dict[int, list[bytes]] = {}

    def answer(self, request: Frame) -> Frame:
        self.asked += 1
        if self.refusal:
            return request.response(self.refusal, "as the test says")
        queue = self.queues.setdefault(request.header(SendMessageRequestHeaderV2).queue_id, [])
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            queue += [bytes(item.body) for item in iter_batch(bytes(request.body))]
        else:
            queue.append(bytes(request.body))
        return request.response()

    @property
    def bodies(self) -> list[bytes]:
        return [body for queue in self.queues.values() for body in queue]


class NameServer:
    """Knows one topic, on brokers by name."""

    def __init__(self, queues: int = 4) -> None:
        self.brokers: dict[str, str] = {}
        self.queues, self.looks = queues, 0

    def answer(self, request: Frame) -> Frame:
        self.looks += 1
        route = TopicRouteData(
            queue_datas=[
                QueueData(broker_name=name, read_queue_nums=4, write_queue_nums=self.queues, perm=6)
                for name in self.brokers
            ],
            broker_datas=[
                BrokerData(cluster="c", broker_name=name, broker_addrs={0: address})
                for name, address in self.brokers.items()
            ],
        )
        return request.response(body=route.encode())


def options(namesrv: str, **changed: int) -> WriteOptions:
    given = {"batch_bytes": 1 << 18, "batch_records": 4, "timeout_ms": 5000, "retries": 3, **changed}
    return WriteOptions(
        namesrv=(namesrv,),
        topic=TOPIC,
        producer_group="g",
        write_id=None,
        **given,
    )


def row(number: int, key: str | None = None) -> Outgoing:
    return Outgoing(TOPIC, b"%d" % number, b"", 0, 0, key)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_PAUSE_S", 0.0)


def test_rows_of_a_key_go_where_producers_send_that_key() -> None:
    keys = ["", "a", "order-1", "TagA", "aaaaaaa", "äöü", "polygenelubricants", *map(str, range(20))]
    broker, names = Broker(), NameServer(queues=7)
    with serving(broker.answer) as address, serving(names.answer) as namesrv:
        names.brokers = {"a": address}
        with Sender(options(namesrv)) as sender:
            for number, key in enumerate(keys):
                sender.send(row(number, key))
            sender.flush()
    found = {int(body): queue_id for queue_id, bodies in broker.queues.items() for body in bodies}
    queues = [MessageQueue(TOPIC, "a", queue_id) for queue_id in range(7)]
    assert found == {
        number: select_by_hash(queues, Message(TOPIC, b""), key).queue_id for number, key in enumerate(keys)
    }


@pytest.mark.parametrize("key", [None, "k"], ids=["any queue", "keyed"])
@pytest.mark.parametrize(
    "refusal",
    [
        ResponseCode.SERVICE_NOT_AVAILABLE,  # what a master that became a slave says
        ResponseCode.NO_PERMISSION,
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        ResponseCode.TOPIC_NOT_EXIST,
        None,  # it is gone
    ],
)
def test_a_master_that_moved_is_found(key: str | None, refusal: int | None) -> None:
    old, new, names = Broker(), Broker(), NameServer()
    with serving(new.answer) as address, serving(names.answer) as namesrv, ExitStack() as first:
        names.brokers = {"a": first.enter_context(serving(old.answer))}
        with Sender(options(namesrv)) as sender:
            sender.send(row(0, key))
            sender.flush()
            names.brokers = {"a": address}
            if refusal is None:
                first.close()
            else:
                old.refusal = refusal
            for number in range(1, 20):
                sender.send(row(number, key))
            sender.flush()
            assert sender.messages == 20
    assert old.bodies == [b"0"]
    assert sorted(new.bodies, key=int) == [b"%d" % number for number in range(1, 20)]
    if key is not None:
        assert new.queues.keys() == old.queues.keys()
        assert new.bodies == sorted(new.bodies, key=int)


def test_rows_without_a_key_go_round_a_broker_that_left_the_route() -> None:
    left, stays, names = Broker(), Broker(), NameServer()
    with serving(stays.answer) as address, serving(names.answer) as namesrv, ExitStack() as first:
        names.brokers = {"a": first.enter_context(serving(left.answer)), "b": address}
        with Sender(options(namesrv)) as sender:
            sender.send(row(0))
            sender.flush()
            names.brokers = {"b": address}
            first.close()
            for number in range(1, 100):
                sender.send(row(number))
            sender.flush()
    assert sorted(left.bodies + stays.bodies, key=int) == [b"%d" % number for number in range(100)]
    assert names.looks <= 1 + 4, "after the first refusal no batch is tried at the broker that left"


@pytest.mark.parametrize("refusal", [ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY])
def test_a_master_that_is_nowhere_ends_the_task_after_its_retries(refusal: int) -> None:
    broker, names = Broker(refusal), NameServer()
    with serving(broker.answer) as address, serving(names.answer) as namesrv:
        names.brokers = {"a": address}
        with Sender(options(namesrv, retries=3)) as sender:
            sender.send(row(0, "k"))
            with pytest.raises(BrokerError) as caught:
                sender.flush()
    assert caught.value.code == refusal
    assert broker.asked == 4
    assert names.looks == (1 if refusal == ResponseCode.SYSTEM_BUSY else 4), "a busy broker has not moved"


def test_name_servers_that_are_away_too_do_not_hide_what_failed() -> None:
    broker, names = Broker(), NameServer()
    with ExitStack() as servers:
        names.brokers = {"a": servers.enter_context(serving(broker.answer))}
        namesrv = servers.enter_context(serving(names.answer))
        with Sender(options(namesrv, timeout_ms=600_000)) as sender:
            sender.send(row(0, "k"))
            sender.flush()
            servers.close()
            sender.send(row(1, "k"))
            with pytest.raises(ConnectError, match=names.brokers["a"]):
                sender.flush()


def test_a_topic_without_a_queue_to_write_to_is_named() -> None:
    names = NameServer(queues=0)
    with serving(names.answer) as namesrv, Sender(options(namesrv)) as sender:
        names.brokers = {"a": "127.0.0.1:1"}
        with pytest.raises(NoRouteError, match=TOPIC):
            sender.send(row(0))

"""The sink's sender against fake servers: the destinations of rows, and requests for new routes."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import Mock

import pyarrow as pa
import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv, serving
from tests.pipeline.fake_servers import TakingBroker

from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.producer.selectors import select_by_hash
from cometmq.errors import BodyError, BrokerError, ConnectError, NoRouteError
from cometmq.message import Message, MessageQueue
from cometmq.pipeline.base.options import Topics, WriteOptions
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.sink import sending
from cometmq.pipeline.sink.encoded import encode_rows
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.sink.sending import Sender
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import GetKVConfigResponseHeader

TOPIC = "Placed"


def options(namesrv: str, **changed: int) -> WriteOptions:
    given = {"batch_bytes": 1 << 18, "batch_records": 4, "timeout_ms": 5000, "retries": 3, **changed}
    return WriteOptions(namesrv=(namesrv,), topic=TOPIC, producer_group="g", write_id=None, **given)


def row(number: int, key: str | None = None) -> RowMessage:
    return RowMessage(TOPIC, b"%d" % number, b"", 0, 0, key)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_PAUSE_S", 0.0)


def test_rows_of_a_key_go_where_producers_send_that_key() -> None:
    keys = ["", "a", "order-1", "TagA", "aaaaaaa", "äöü", "polygenelubricants", *map(str, range(20))]
    broker, names = TakingBroker(), FakeNamesrv()
    with serving(broker), serving(names) as namesrv:
        names.serve(TOPIC, broker, queues=7)
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
        ResponseCode.SERVICE_NOT_AVAILABLE,  # the response of a master that became a slave
        ResponseCode.NO_PERMISSION,
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        ResponseCode.TOPIC_NOT_EXIST,
        None,  # the broker is gone
    ],
)
def test_a_master_that_moved_is_found(key: str | None, refusal: int | None) -> None:
    old, new, names = TakingBroker(), TakingBroker(), FakeNamesrv()
    with serving(new), serving(names) as namesrv, ExitStack() as first:
        first.enter_context(serving(old))
        names.serve(TOPIC, old, queues=4)
        with Sender(options(namesrv)) as sender:
            sender.send(row(0, key))
            sender.flush()
            names.serve(TOPIC, new, queues=4)
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
    left, stays, names = TakingBroker(), TakingBroker(name="b"), FakeNamesrv()
    with serving(stays), serving(names) as namesrv, ExitStack() as first:
        first.enter_context(serving(left))
        names.serve(TOPIC, left, stays, queues=4)
        with Sender(options(namesrv)) as sender:
            sender.send(row(0))
            sender.flush()
            names.serve(TOPIC, stays, queues=4)
            first.close()
            for number in range(1, 100):
                sender.send(row(number))
            sender.flush()
    assert sorted(left.bodies + stays.bodies, key=int) == [b"%d" % number for number in range(100)]
    assert len(names.asked) <= 1 + 4, "after the first refusal no batch is tried at the broker that left"


@pytest.mark.parametrize("refusal", [ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY])
def test_a_master_that_is_nowhere_ends_the_task_after_its_retries(refusal: int) -> None:
    broker, names = TakingBroker(refusal), FakeNamesrv()
    with serving(broker), serving(names) as namesrv:
        names.serve(TOPIC, broker, queues=4)
        with Sender(options(namesrv, retries=3)) as sender:
            sender.send(row(0, "k"))
            with pytest.raises(BrokerError) as caught:
                sender.flush()
    assert caught.value.code == refusal
    assert len(broker.requests) == 4
    assert len(names.asked) == (1 if refusal == ResponseCode.SYSTEM_BUSY else 4), "a busy one has not moved"


def test_name_servers_that_are_away_too_do_not_hide_what_failed() -> None:
    broker, names = TakingBroker(), FakeNamesrv()
    with ExitStack() as servers:
        servers.enter_context(serving(broker))
        namesrv = servers.enter_context(serving(names))
        names.serve(TOPIC, broker)
        with Sender(options(namesrv, timeout_ms=600_000)) as sender:
            sender.send(row(0, "k"))
            sender.flush()
            servers.close()
            sender.send(row(1, "k"))
            with pytest.raises(ConnectError, match=broker.addr):
                sender.flush()


@pytest.mark.parametrize("key", [None, "k", "encoded"], ids=["any queue", "keyed", "encoded together"])
@pytest.mark.parametrize("illegal", [[0], [9], [3, 4], [1, 5, 6, 19], [*range(20)]])
def test_only_what_the_broker_never_takes_is_set_aside(illegal: list[int], key: str | None) -> None:
    broker, names = TakingBroker(illegal=frozenset(b"%d" % number for number in illegal)), FakeNamesrv()
    aside: list[tuple[bytes, int]] = []
    with serving(broker), serving(names) as namesrv:
        names.serve(TOPIC, broker, queues=4)
        refused = lambda message, refusal: aside.append((message.body, refusal.code))  # noqa: E731
        with Sender(options(namesrv, batch_records=10), 0, refused) as sender:
            if key == "encoded":
                bodies = pa.record_batch({"body": pa.array([b"%d" % number for number in range(20)])})
                rows = encode_rows(bodies, options(namesrv), 0, "0" * 22)
                assert rows is not None
                sender.send_rows(rows)
            else:
                for number in range(20):
                    sender.send(row(number, key))
            sender.flush()
            assert sender.messages == 20 - len(illegal)
    assert sorted(aside, key=lambda item: int(item[0])) == [
        (b"%d" % number, ResponseCode.MESSAGE_ILLEGAL) for number in illegal
    ]
    assert sorted(map(int, broker.bodies)) == [number for number in range(20) if number not in illegal]
    for queue in broker.queues.values():
        assert queue == sorted(queue, key=int), "what is left keeps its order"


def test_a_batch_that_is_too_large_is_halved_as_well() -> None:
    """The refusal is worded as in Apache's 5.5."""
    broker, names = TakingBroker(illegal=frozenset([b"2"])), FakeNamesrv()
    aside: list[bytes] = []

    def answer(request: Frame) -> Frame:
        answered = broker.answer(request)
        if answered.code == ResponseCode.MESSAGE_ILLEGAL:
            return request.response(ResponseCode.SYSTEM_ERROR, "RuntimeException: message body size exceeded")
        return answered

    broker.on(RequestCode.SEND_BATCH_MESSAGE, answer)
    with serving(broker), serving(names) as namesrv:
        names.serve(TOPIC, broker, queues=4)
        with Sender(options(namesrv), 0, lambda message, _: aside.append(message.body)) as sender:
            for number in range(4):
                sender.send(row(number))
            sender.flush()
    assert (aside, sorted(broker.bodies)) == ([b"2"], [b"0", b"1", b"3"])


def test_without_a_place_for_it_an_illegal_message_ends_the_task() -> None:
    broker, names = TakingBroker(illegal=frozenset([b"1"])), FakeNamesrv()
    with serving(broker), serving(names) as namesrv:
        names.serve(TOPIC, broker, queues=4)
        with Sender(options(namesrv)) as sender:
            for number in range(4):
                sender.send(row(number))
            with pytest.raises(BrokerError, match="as the test says"):
                sender.flush()


def test_a_broker_that_is_away_when_the_first_row_comes_is_waited_for() -> None:
    """The name server does not know the topic at first."""
    broker, names = TakingBroker(), FakeNamesrv()

    def late(request: Frame) -> Frame | None:
        if len(names.asked) == 4:
            names.serve(TOPIC, broker)
        return names.answer(request)

    names.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, late)
    with serving(broker), serving(names) as namesrv, Sender(options(namesrv)) as sender:
        sender.send(row(0))
        sender.flush()
    assert broker.bodies == [b"0"]


def test_a_topic_that_nobody_has_is_named_after_as_many_attempts_as_a_batch_gets() -> None:
    names = FakeNamesrv()
    with (
        serving(names) as namesrv,
        Sender(options(namesrv)) as sender,
        pytest.raises(NoRouteError, match=TOPIC),
    ):
        sender.send(row(0))
    assert len(names.asked) == 2 * 4, "the topic and the one after which it would be made"


def test_an_ordered_topic_whose_brokers_are_away_is_not_made_on_others() -> None:
    names, other = FakeNamesrv(), TakingBroker()
    conf = GetKVConfigResponseHeader(value="broker-b:4")
    names.on(RequestCode.GET_KV_CONFIG, lambda request: request.response(header=conf))
    with serving(other), serving(names) as namesrv, Sender(options(namesrv)) as sender:
        names.serve("TBW102", other)
        with pytest.raises(NoRouteError, match=r"ordered, and the brokers of its queues \(broker-b:4\)"):
            sender.send(row(0))


def test_an_order_configuration_that_one_name_server_lost_is_asked_of_the_others() -> None:
    replaced, names, other = FakeNamesrv(), FakeNamesrv(), TakingBroker()
    replaced.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.QUERY_NOT_FOUND)
    conf = GetKVConfigResponseHeader(value="broker-b:4")
    names.on(RequestCode.GET_KV_CONFIG, lambda request: request.response(header=conf))
    with serving(other), serving(replaced) as first, serving(names) as second:
        replaced.serve("TBW102", other)
        with Cluster((first, second), timeout_ms=5000) as cluster:
            with pytest.raises(NoRouteError, match=r"broker-b:4"):
                cluster.write_queues(TOPIC)
            names.refuse(RequestCode.GET_KV_CONFIG, ResponseCode.QUERY_NOT_FOUND)
            assert len(cluster.write_queues(TOPIC)) == 2


def test_name_servers_that_are_unreachable_are_asked_once() -> None:
    tries: list[None] = []

    def refuse() -> bool:
        tries.append(None)
        return False

    with serving(FakeNamesrv(), refuse) as namesrv, Cluster((namesrv,), timeout_ms=5000) as cluster:
        with pytest.raises(NameServersUnreachable):
            cluster.write_queues(TOPIC, wait=False)
        assert len(tries) == 1
        with pytest.raises(NameServersUnreachable):
            cluster.look(Topics(names=("A", "B", "C")), ())
        assert len(tries) == 2


def test_a_name_server_that_answers_nonsense_is_passed_over() -> None:
    broken, names, broker = FakeNamesrv(), FakeNamesrv(), TakingBroker()
    broken.routes[TOPIC] = Mock(encode=lambda: b"nonsense")
    with serving(broker), serving(broken) as first, serving(names) as second:
        names.serve(TOPIC, broker)
        with Cluster((first, second), timeout_ms=5000) as cluster:
            assert [len(cluster.route(TOPIC).write_queues) for _ in range(3)] == [2, 2, 2]
    assert len(broken.asked) == 1, "then the one that answered is asked first"
    with serving(broken) as first, Cluster((first,), timeout_ms=5000) as cluster, pytest.raises(BodyError):
        cluster.route(TOPIC)


def test_a_topic_without_a_queue_to_write_to_is_named() -> None:
    names = FakeNamesrv()
    names.serve(TOPIC, FakeBroker(), queues=0)
    with (
        serving(names) as namesrv,
        Sender(options(namesrv)) as sender,
        pytest.raises(NoRouteError, match=TOPIC),
    ):
        sender.send(row(0))

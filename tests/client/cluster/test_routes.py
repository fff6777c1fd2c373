"""Use of a route by producers and consumers, and the choice of the address for a request."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.fakes import ignore
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    ClientInstance,
    ClientOptions,
    Message,
    MessageExt,
    Producer,
    PushConsumer,
    TransactionProducer,
    TransactionState,
)
from cometmq.client.cluster.routes import MAX_IDLE_ROUTES, RouteTable, template_route, topic_route
from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import BrokerData, QueueData, TopicRouteData


def route_data(
    *queues: tuple[str, int, int, int], order: str | None = None, **brokers: dict[int, str]
) -> TopicRouteData:
    return TopicRouteData(
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=read, write_queue_nums=write, perm=perm)
            for name, read, write, perm in queues
        ],
        broker_datas=[BrokerData(broker_name=name, broker_addrs=addrs) for name, addrs in brokers.items()],
        order_topic_conf=order,
    )


def ids(queues: tuple[MessageQueue, ...]) -> str:
    return " ".join(f"{queue.broker_name}{queue.queue_id}" for queue in queues)


@pytest.mark.parametrize(
    ("data", "write", "read"),
    [
        (route_data(("b", 2, 1, 6), ("a", 1, 2, 6), a={0: "a:1"}, b={0: "b:1"}), "a0 a1 b0", "a0 b0 b1"),
        (route_data(("a", 1, 1, 4), a={0: "a:1"}), "", "a0"),
        (route_data(("a", 1, 1, 2), a={0: "a:1"}), "a0", ""),
        (route_data(("a", 1, 1, 6), a={1: "a:1"}), "", "a0"),
        (route_data(("a", 1, 1, 6)), "", "a0"),
        (route_data(("a", 2, 2, 6), order="z:1;a:2;nonsense", a={0: "a:1"}), "z0 a0 a1", "a0 a1"),
        (route_data(), "", ""),
    ],
    ids=["sorted", "read only", "write only", "no master", "no broker", "ordered", "empty"],
)
def test_queues_of_a_route(data: TopicRouteData, write: str, read: str) -> None:
    route = topic_route("T", data)
    assert (ids(route.write_queues), ids(route.read_queues)) == (write, read)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (route_data(("a", 1_000_000_000, 1, 6), a={0: "a:1"}), "readQueueNums"),
        (route_data(("a", 1, 2**31 - 1, 6), a={0: "a:1"}), "writeQueueNums"),
        (route_data(("a", 200_000, 1, 6), ("b", 200_000, 1, 6)), "readQueueNums"),
        (route_data(("a", 1, 1, 6), order="a:1;a:1000000000"), "orderTopicConf"),
        (route_data(("a", 1, 1, 6), order="a:" + "9" * 5000), "orderTopicConf"),
        (route_data(a={number: f"a:{number}" for number in range(1, 10_002)}), "brokerDatas"),
    ],
)
def test_a_route_too_large_to_work_with_is_refused(data: TopicRouteData, field: str) -> None:
    for make in (lambda: topic_route("T", data), lambda: template_route("T", data, 4)):
        with pytest.raises(BodyError, match="a client accepts") as caught:
            make()
        assert caught.value.field == field


def test_what_is_no_number_of_queues_gives_none() -> None:
    assert ids(topic_route("T", route_data(("a", -5, 1, 6), order="a:\u00b2;b:-1;c")).write_queues) == ""


@pytest.mark.parametrize("addr", ["..:1", "a\0b:1", "", "no port", "x" * 300 + ":1", "\ud800:1"])
def test_addresses_that_are_none_are_left_out(addr: str) -> None:
    data = route_data(("a", 1, 1, 6), ("b", 1, 1, 6), a={0: addr, 1: "a:2"}, b={0: "b:1"})
    route = topic_route("T", data)
    assert (ids(route.write_queues), ids(route.read_queues)) == ("b0", "a0 b0")
    assert route.unusable == (addr,)
    routes = RouteTable()
    routes.put(route)
    assert (routes.master("a"), routes.addresses(replicas=True)) == (None, {"a:2", "b:1"})
    assert not routes.put(topic_route("T", data))


def test_the_template_lends_its_brokers_but_not_all_its_queues() -> None:
    route = template_route("New", route_data(("a", 8, 8, 7), ("b", 2, 2, 7), a={0: "a:1"}, b={0: "b:1"}), 4)
    assert ids(route.write_queues) == "a0 a1 a2 a3 b0 b1"
    assert {queue.topic for queue in route.write_queues} == {"New"}
    assert route.read_queues == ()
    assert route.from_template


def table() -> RouteTable:
    routes = RouteTable()
    routes.put(topic_route("T", route_data(("a", 1, 1, 6), a={0: "a:1", 1: "a:2"}, b={2: "b:3"})))
    return routes


def test_addresses_by_role() -> None:
    routes = table()
    assert (routes.master("a"), routes.master("b"), routes.master("c")) == ("a:1", None, None)
    assert (routes.any("a"), routes.any("b"), routes.any("c")) == ("a:1", "b:3", None)
    assert routes.addresses(replicas=False) == {"a:1"}
    assert routes.addresses(replicas=True) == {"a:1", "a:2", "b:3"}


@pytest.mark.parametrize(
    ("broker_name", "broker_id", "expected"),
    [
        ("a", 0, [("a:1", False), ("a:2", True)]),
        ("a", 1, [("a:2", True), ("a:1", False)]),
        ("a", 7, [("a:1", False), ("a:2", True)]),
        ("b", 0, [("b:3", True)]),
        ("b", 1, [("b:3", True)]),
        ("c", 0, []),
    ],
)
def test_where_to_read(broker_name: str, broker_id: int, expected: list[tuple[str, bool]]) -> None:
    assert table().read_targets(broker_name, broker_id) == expected


def test_what_cannot_be_reached_is_read_last() -> None:
    routes = table()
    routes.unreachable.add("a:1")
    assert routes.read_targets("a") == [("a:2", True), ("a:1", False)]
    assert routes.readers_of("T") == ["a:2", "b:3", "a:1"]
    routes.unreachable.clear()
    assert (routes.readers_of("T"), routes.readers_of("U")) == (["a:1", "a:2", "b:3"], [])


def test_put_says_whether_anything_changed() -> None:
    routes = table()
    same = topic_route("T", route_data(("a", 1, 1, 6), a={0: "a:1", 1: "a:2"}, b={2: "b:3"}))
    assert not routes.put(same)
    assert routes.put(topic_route("T", route_data(("a", 2, 1, 6), a={0: "a:1"})))
    assert routes.put(template_route("T", route_data(("a", 2, 1, 6), a={0: "a:1"}), 4))


def test_brokers_that_no_route_names_are_forgotten() -> None:
    routes = table()
    routes.put(topic_route("T", route_data(("a", 1, 1, 6), a={0: "a:9"})))
    routes.forget_unrouted()
    assert (routes.master("a"), routes.any("b")) == ("a:9", None)


def test_routes_that_nobody_uses_are_forgotten_but_some() -> None:
    routes = RouteTable()
    topics = [f"T{number}" for number in range(MAX_IDLE_ROUTES + 5)]
    for topic in topics:
        routes.put(topic_route(topic, route_data(("a", 1, 1, 6), a={0: "a:1"})))
        routes.get(topic)
    assert routes.forget_unused(()) == []
    routes.get("T1")
    routes.use("T2")
    assert routes.forget_unused({"T3"}) == ["T0", "T4"]
    assert routes.topics == [*topics[1:4], *topics[5:]]
    assert routes.forget_unused(()) == ["T1", "T2", "T3"]
    assert routes.master("a") == "a:1"


@pytest.mark.parametrize("kind", ["producer", "consumer"])
async def test_slaves_hear_of_consumers_only(kind: str, broker: FakeBroker, namesrv: FakeNamesrv) -> None:
    async with FakeBroker("broker-a") as slave:
        namesrv.routes["T"].broker_datas[0].broker_addrs[1] = slave.addr
        async with ClientInstance(namesrv.addr) as client:
            made: Producer | PushConsumer
            if kind == "producer":
                made = Producer("p", client=client)
            else:
                made = PushConsumer("g", ignore, "T", client=client)
            async with made:
                if isinstance(made, Producer):
                    await made.send(Message("T", b"x"))
                await broker.wait_for(lambda: bool(broker.heartbeats))
                await client.send_heartbeats()
                told = bool(slave.heartbeats)
    assert told == (kind == "consumer")


class Orders:
    """A transaction listener."""

    async def execute_local_transaction(self, message: Message, order: object) -> TransactionState:
        return TransactionState.COMMIT

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


async def test_topics_that_were_sent_to_once_are_not_asked_about_for_ever(
    broker: FakeBroker, namesrv: FakeNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.client.cluster.routes.MAX_IDLE_ROUTES", 1)
    monkeypatch.setattr("cometmq.client.cluster.instance._USED_WITHIN_S", 0.0)
    for topic in ("A", "B", "C"):
        namesrv.serve(topic, broker)
    async with Producer("p", namesrv=namesrv.addr) as sender:
        for topic in ("A", "B", "C"):
            await sender.send(Message(topic, b"x"))
        rounds: list[list[str]] = []
        for used in ("ABC", "A", ""):
            for topic in used:
                await sender.send(Message(topic, b"x"))
            namesrv.asked.clear()
            await sender.client.refresh_routes()
            rounds.append(sorted(namesrv.asked))
        assert rounds == [["A", "B", "C"], ["A", "C"], ["C"]]
        await sender.send(Message("B", b"x"))  # requests the route again
    async with ClientInstance(namesrv.addr) as client:
        transactions = TransactionProducer("p-tx", Orders(), client=client)
        async with transactions, Producer("p", client=client) as sender:
            for topic in ("A", "B", "C"):
                await sender.send(Message(topic, b"x"))
            for _ in range(2):
                await client.refresh_routes()
            assert sorted(client.routes.topics) == ["A", "B", "C"]  # their brokers may check transactions


async def test_the_route_of_a_missing_topic_is_requested_again_soon(
    broker: FakeBroker, namesrv: FakeNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.client.cluster.instance._LOOK_AGAIN_S", 0.01)
    options = ClientOptions(route_interval_s=3600.0)
    async with TransactionProducer("p", Orders(), topics="New", namesrv=namesrv.addr, client_options=options):
        await namesrv.wait_for(lambda: "New" in namesrv.asked)
        namesrv.serve("New", broker)
        await broker.wait_for(lambda: broker.heartbeats)


async def test_a_topic_that_stays_missing_is_asked_for_at_the_usual_interval(
    namesrv: FakeNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.client.cluster.instance._LOOK_AGAIN_S", 0.01)
    options = ClientOptions(route_interval_s=0.04)

    def looks() -> list[asyncio.Task[object]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "cometmq-settle-New"]

    async with TransactionProducer(
        "p", Orders(), topics="New", namesrv=namesrv.addr, client_options=options
    ) as producer:
        await namesrv.wait_for(looks)
        await asyncio.gather(*looks())
        await producer.client.refresh_routes(["New"])
        assert looks() == []

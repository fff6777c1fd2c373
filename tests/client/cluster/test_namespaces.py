"""Names in a namespace: which are wrapped, in which requests, and what comes back."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    ClientInstance,
    ClientOptions,
    ConfigError,
    Message,
    MessageExt,
    MessageQueue,
    NoRouteError,
    Producer,
    TransactionProducer,
    TransactionState,
)
from cometmq.client.cluster.namespaces import Namespace, instance_of
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import GetKVConfigRequestHeader
from cometmq.testing import LocalBroker

SPACE = Namespace("ns", exempt=("Traces",))


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("T", "ns%T"),
        ("%RETRY%g", "%RETRY%ns%g"),
        ("%DLQ%g", "%DLQ%ns%g"),
        ("", ""),
        ("ns", "ns%ns"),
        ("nsT", "ns%nsT"),
        ("other%T", "ns%other%T"),
        *((name, name) for name in ("TBW102", "RMQ_SYS_TRACE_TOPIC", "rmq_sys_X", "C_REPLY_TOPIC", "Traces")),
        *((name, name) for name in ("CLIENT_INNER_PRODUCER", "_INNER_TRACE_PRODUCER")),
    ],
)
def test_which_names_are_wrapped(name: str, wrapped: str) -> None:
    assert SPACE.wrap(name) == SPACE.wrap(wrapped) == wrapped
    assert SPACE.unwrap(wrapped) == name
    assert SPACE.own([wrapped, "else%T"]) == [name]
    assert Namespace().wrap(name) == Namespace().unwrap(name) == name


@pytest.mark.parametrize(
    ("addrs", "name"),
    [
        (["MQ_INST_12_ab.mq.example:80", "x:1"], "MQ_INST_12_ab"),
        (["mq.example:80", "MQ_INST_12_ab.mq.example:80"], ""),
        (["MQ_INST_12:80"], ""),
        ([], ""),
    ],
)
def test_the_namespace_in_a_name_servers_name(addrs: list[str], name: str) -> None:
    assert instance_of(addrs) == name


async def test_the_options_come_before_the_name_servers_name() -> None:
    addr = "MQ_INST_12_ab.mq.example:80"
    assert ClientInstance(addr).namespace.name == "MQ_INST_12_ab"
    assert ClientInstance(addr, ClientOptions(namespace="own")).namespace.name == "own"
    assert not ClientInstance(addr, ClientOptions(namespace="")).namespace
    with pytest.raises(ConfigError, match="namespace"):
        ClientOptions(namespace="a%b")


def test_the_key_of_an_order_configuration_is_a_topic() -> None:
    header = GetKVConfigRequestHeader(namespace="ORDER_TOPIC_CONFIG", key="T")
    frame = Frame.request(RequestCode.GET_KV_CONFIG, header)
    for _ in range(2):
        SPACE.wrap_request(frame)
        assert frame.ext == {"namespace": "ORDER_TOPIC_CONFIG", "key": "ns%T"}


async def test_what_a_producer_sends(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    namesrv.serve("ns%T", broker)
    asked: list[dict[str, str] | None] = []
    broker.on(RequestCode.SEND_MESSAGE_V2, lambda frame: asked.append(frame.ext))  # type: ignore[func-returns-value]
    options = ClientOptions(namespace="ns", namespace_v2="v2")
    async with Producer("p", namesrv=namesrv.addr, client_options=options) as producer:
        await producer.send_oneway(Message("T", b"x"), queue=MessageQueue("T", "broker-a", 0))
        await producer.client.send_heartbeats()
    assert namesrv.asked == ["ns%T"]
    ((ext,), beat) = asked, broker.heartbeats[-1]
    assert ext is not None
    assert (ext["a"], ext["b"], ext["c"], ext["ns"], ext["nsd"]) == ("ns%p", "ns%T", "TBW102", "v2", "true")
    assert [each.group_name for each in beat.producer_data_set] == ["ns%p"]


async def test_without_a_namespace_requests_are_as_ever(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    async with Producer("p", namesrv=namesrv.addr) as producer:
        await producer.send(Message("T", b"x"))
    ((header, _),) = broker.sent
    assert (header.producer_group, header.topic) == ("p", "T")


async def test_a_broker_asks_about_transactions_of_a_namespace(local: LocalBroker) -> None:
    asked = asyncio.Event()

    class Unknown:
        async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
            return TransactionState.UNKNOWN

        async def check_local_transaction(self, message: MessageExt) -> TransactionState:
            assert (message.topic, message.body) == ("T", b"x")
            asked.set()
            return TransactionState.COMMIT

    options = ClientOptions(namespace="ns")
    async with (
        asyncio.timeout(20),
        TransactionProducer("p", Unknown(), namesrv=local.namesrv, client_options=options) as producer,
    ):
        await producer.send_in_transaction(Message("T", b"x"))
        await asked.wait()


async def test_an_id_is_looked_for_in_the_topics_of_the_namespace(local: LocalBroker) -> None:
    options = ClientOptions(namespace="ns")
    async with (
        Producer("p", namesrv=local.namesrv) as anybody,
        Producer("p", namesrv=local.namesrv, client_options=options) as producer,
    ):
        for topic in ("T", "other%T"):
            await anybody.send(Message(topic, b"not ours"))
        sent = await producer.send(Message("T", b"x"))
        found = await producer.view_message(sent.msg_id)
    assert (found.topic, found.body) == ("T", b"x")


async def test_a_topic_without_a_route_does_not_end_the_search(
    local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def topics() -> list[str]:
        return ["Gone", "T"]

    async with Producer("p", namesrv=local.namesrv) as producer:
        sent = await producer.send(Message("T", b"x"))
        monkeypatch.setattr(producer.client.namesrv, "topics", topics)
        assert (await producer.view_message(sent.msg_id)).body == b"x"
        with pytest.raises(NoRouteError):
            await producer.view_message(sent.msg_id, "Gone")

"""Names in a namespace: which names requests contain with the namespace, and how responses are unwrapped."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.fakes import ignore
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    Admin,
    ClientInstance,
    ClientOptions,
    ConfigError,
    Message,
    MessageExt,
    MessageQueue,
    NoRouteError,
    Producer,
    ProducerOptions,
    PullConsumer,
    PushConsumer,
    PushOptions,
    TransactionProducer,
    TransactionState,
)
from cometmq.client import AllocateByConsistentHash
from cometmq.client.cluster.namespaces import Namespace, instance_of
from cometmq.protocol.bodies import ConsumerRunningInfo
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import GetConsumerRunningInfoRequestHeader, GetKVConfigRequestHeader
from cometmq.testing import LocalBroker

SPACE = Namespace("ns", exempt={"Traces", "C_REPLY_TOPIC"})


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
        ("ORDER_REPLY_TOPIC", "ns%ORDER_REPLY_TOPIC"),
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


async def test_a_reply_topic_of_a_cluster_is_in_no_namespace_and_others_are(local: LocalBroker) -> None:
    options = ClientOptions(namespace="ns")
    async with Producer("p", namesrv=local.namesrv, client_options=options) as producer:
        (cluster,) = (await producer.client.namesrv.cluster_info()).cluster_addr_table
        await producer.send(Message("ORDER_REPLY_TOPIC", b"x"))
        await producer.queues(f"{cluster}_REPLY_TOPIC")
        topics: list[str] = []
        async with asyncio.timeout(60):  # the broker registers the topic concurrently with its response
            while not any(topic.endswith("ORDER_REPLY_TOPIC") for topic in topics):
                topics = await producer.client.namesrv.topics()
    assert f"{cluster}_REPLY_TOPIC" in topics
    assert [topic for topic in topics if topic.startswith("ns%")] == ["ns%ORDER_REPLY_TOPIC"]


async def test_a_template_topic_is_in_no_namespace(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    namesrv.serve("Template", broker)
    options = ProducerOptions(create_topic_key="Template")
    space = ClientOptions(namespace="ns")
    async with Producer("p", namesrv=namesrv.addr, options=options, client_options=space) as producer:
        await producer.send(Message("T", b"x"))
    ((header, _),) = broker.sent
    assert (header.topic, header.default_topic) == ("ns%T", "Template")


async def test_an_administrator_is_in_no_namespace() -> None:
    async with Admin("MQ_INST_12_ab.mq.example:80") as admin:
        assert not admin.client.namespace


async def test_a_member_answers_with_the_names_of_its_namespace(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.serve("ns%T", broker)
    broker.store("ns%T", 0, b"x")
    options = ClientOptions(namespace="ns")
    asked = GetConsumerRunningInfoRequestHeader(consumer_group="ns%g", client_id="")
    push = PushConsumer("g", ignore, "T", namesrv=namesrv.addr, client_options=options)
    async with push, PullConsumer("g", namesrv=namesrv.addr, client_options=options) as pull:
        await push.rebalance()
        for consumer, subscribed in ((push, {"ns%T", "%RETRY%ns%g"}), (pull, {"ns%T"})):
            if consumer is pull:
                await push.stop()
                await pull.subscribe("T")
            answer = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, asked)
            info = ConsumerRunningInfo.decode(answer.body)
            assert info.properties["consumerGroup"] == "ns%g"
            assert {each.topic for each in info.subscription_set} == subscribed
            assert {queue.topic for queue in info.mq_table} == {"ns%T"}


async def test_members_share_by_the_hash_of_the_names_of_their_namespace(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.serve("ns%T", broker, queues=16)
    options = PushOptions(allocate_strategy=AllocateByConsistentHash(), handover_timeout_s=0)
    space = ClientOptions(namespace="ns", instance_name="fixed", client_ip="10.0.0.1")
    consumer = PushConsumer("g", ignore, "T", namesrv=namesrv.addr, options=options, client_options=space)
    async with consumer:
        broker.members = sorted([*broker.members, "10.0.0.2@another"])
        await consumer.rebalance()
        queues = [MessageQueue("ns%T", "broker-a", number) for number in range(16)]
        javas = AllocateByConsistentHash().allocate(consumer.client.client_id, queues, broker.members)
        assert [queue.queue_id for queue in consumer.assignment] == [queue.queue_id for queue in javas]


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
        asyncio.timeout(60),
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

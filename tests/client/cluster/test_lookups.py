"""Hosts that are queried for a message id, and brokers on which a topic is created."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    Admin,
    BrokerError,
    ClientOptions,
    ConfigError,
    Message,
    MessageIllegal,
    MessageNotFound,
    NoRouteError,
    Producer,
    PullConsumer,
    PushConsumer,
    SyncProducer,
)
from cometmq.protocol.bodies import ClusterInfo
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CreateTopicRequestHeader
from cometmq.protocol.ids import offset_id_of
from cometmq.testing import LocalBroker, local_broker


async def test_the_message_of_an_offset_id_is_found_without_a_route(local: LocalBroker) -> None:
    async with Producer("p", namesrv=local.namesrv) as producer:
        sent = await producer.send(Message("Ids", b"x"))
    async with Producer("p", namesrv=local.namesrv) as fresh:
        assert (await fresh.view_message(sent.offset_msg_id)).body == b"x"


async def test_a_host_that_is_no_broker_of_the_cluster_is_not_asked(
    local: LocalBroker, broker: FakeBroker
) -> None:
    msg_id = offset_id_of(broker.addr, 900)
    async with Producer("p", namesrv=local.namesrv) as producer:
        await producer.queues("Ids")
        with pytest.raises(MessageNotFound, match=rf"{broker.addr}, .* is no broker of this cluster"):
            await producer.view_message(msg_id)
    assert broker.connections == []


async def test_a_broker_is_known_by_the_name_of_its_host_too(
    local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers a broker registers its host name, while its message ids contain the IP address."""
    async with Producer("p", namesrv=local.namesrv) as producer:
        sent = await producer.send(Message("Ids", b"x"))
    async with Producer("p", namesrv=local.namesrv) as fresh:
        info = await fresh.client.namesrv.cluster_info()
        (data,) = info.broker_addr_table.values()
        data.broker_addrs[0] = data.broker_addrs[0].replace("127.0.0.1", "localhost")

        async def cluster_info() -> ClusterInfo:
            return info

        monkeypatch.setattr(fresh.client.namesrv, "cluster_info", cluster_info)
        assert (await fresh.view_message(sent.offset_msg_id)).body == b"x"


async def test_what_a_broker_of_the_cluster_says_is_the_answer(local: LocalBroker) -> None:
    async with Producer("p", namesrv=local.namesrv) as producer:
        with pytest.raises(BrokerError):
            await producer.view_message(offset_id_of(local.broker_addr, 2**40))


async def test_producers_and_consumers_make_topics(local: LocalBroker) -> None:
    producer = Producer("p", namesrv=local.namesrv)
    clients = (
        producer,
        PushConsumer("g", lambda messages: None, "Any", namesrv=local.namesrv),
        PullConsumer("r", namesrv=local.namesrv),
    )
    for number, client in enumerate(clients):
        async with client:
            await client.create_topic("TBW102", f"Made{number}", 3 + number)
    async with Admin(local.namesrv) as admin:
        for number in range(3):
            (made,) = (await admin.route(f"Made{number}")).queue_datas
            assert (made.read_queue_nums, made.write_queue_nums, made.perm) == (3 + number, 3 + number, 6)


async def test_a_topic_that_is_made_is_sent_to_at_once(local: LocalBroker) -> None:
    async with Producer("p", namesrv=local.namesrv) as producer:
        assert len(await producer.queues("Grows")) == 4  # the queue count of the template topic
        await producer.create_topic("TBW102", "Grows", 7)
        assert len(await producer.queues("Grows")) == 7


async def test_a_topic_is_made_in_the_namespace(local: LocalBroker) -> None:
    options = ClientOptions(namespace="shop")
    async with Producer("p", namesrv=local.namesrv, client_options=options) as producer:
        await producer.create_topic("TBW102", "Own", 2)
        assert len(await producer.queues("Own")) == 2
    async with Admin(local.namesrv) as admin:
        assert {"shop%Own", "Own"} & set(await admin.topics()) == {"shop%Own"}


def test_a_blocking_client_makes_a_topic_where_another_one_lies(tmp_path: Path) -> None:
    settings = {"autoCreateTopicEnable": "false"}
    with local_broker(tmp_path, settings) as broker, SyncProducer("p", namesrv=broker.namesrv) as producer:
        with pytest.raises(NoRouteError, match="TBW102"):
            producer.create_topic("TBW102", "New")
        producer.create_topic("SELF_TEST_TOPIC", "New", 2)
        assert producer.send(Message("New", b"x")).queue.topic == "New"


async def test_a_topic_is_made_at_every_master_and_failures_are_raised(
    broker: FakeBroker, namesrv: FakeNamesrv
) -> None:
    async with FakeBroker("broker-b") as other, Producer("p", namesrv=namesrv.addr) as producer:
        namesrv.serve("key", broker, other)
        broker.refuse(RequestCode.UPDATE_AND_CREATE_TOPIC, ResponseCode.NO_PERMISSION, "not you")
        asked: list[str] = []

        def make(frame: Frame) -> Frame:
            asked.append(frame.header(CreateTopicRequestHeader).topic)
            return frame.response(0)

        other.on(RequestCode.UPDATE_AND_CREATE_TOPIC, make)
        with pytest.raises(BrokerError, match="not you"):
            await producer.create_topic("key", "New")
        assert asked == ["New"]
        with pytest.raises(MessageIllegal):
            await producer.create_topic("key", "no name")
        with pytest.raises(ConfigError, match="queue_nums"):
            await producer.create_topic("key", "New", 0)

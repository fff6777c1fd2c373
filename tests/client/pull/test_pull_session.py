"""Tests of a subscribing pull consumer: assigned and revoked queues, and the requests that brokers get."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv, offset_answer
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ConsumeFromWhere,
    MessageExt,
    MessageModel,
    MessageQueue,
    PullConsumer,
    PullOptions,
    sql92,
)
from cometmq.errors import BrokerError, ClientStateError, NoRouteError
from cometmq.protocol.bodies import (
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ResetOffsetBody,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumeMessageDirectlyRequestHeader,
    ConsumerGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GroupTopicRequestHeader,
    ResetOffsetRequestHeader,
)
from cometmq.protocol.record.one import encode_record

QUEUES = [MessageQueue("T", "broker-a", number) for number in range(4)]


def options(**given: object) -> PullOptions:
    first = {"consume_from_where": ConsumeFromWhere.FIRST_OFFSET, "pull_batch_size": 2}
    return PullOptions(**{**first, **given})  # type: ignore[arg-type]


@pytest.fixture
async def consumer(broker: FakeBroker, namesrv: FakeNamesrv) -> AsyncIterator[PullConsumer]:
    namesrv.serve("T", broker, queues=4)
    async with PullConsumer("g", namesrv=namesrv.addr, options=options()) as running:
        yield running


def texts(messages: list[MessageExt]) -> str:
    return " ".join(message.body.decode() for message in messages)


def joined_by(broker: FakeBroker, *others: str) -> None:
    """Add members to the group beside the tested consumer, from its next heartbeat on."""

    def beat(frame: Frame) -> Frame | None:
        answer = broker.answer(frame)
        broker.members = sorted([*broker.members, *others])
        return answer

    broker.on(RequestCode.HEART_BEAT, beat)


async def test_it_joins_reads_its_share_and_says_goodbye(consumer: PullConsumer, broker: FakeBroker) -> None:
    joined_by(broker, "~another")
    for queue_id in range(4):
        broker.store("T", queue_id, b"of %d" % queue_id)
    await consumer.subscribe("T", "a || b")
    assert list(consumer.assignment) == QUEUES[:2]
    (said,) = broker.heartbeats[-1].consumer_data_set
    assert (said.group_name, said.consume_type) == ("g", "CONSUME_ACTIVELY")
    assert [(each.topic, each.sub_string) for each in said.subscription_data_set] == [("T", "a || b")]
    broker.store("T", 0, b"tagged", b"TAGS\x01a")
    await consumer.seek_to_begin(QUEUES[0])
    assert texts(await consumer.poll()) == "tagged"
    assert await consumer.poll(0.01) == []
    await consumer.stop()
    assert broker.offsets.pop(("T", 0)) == 2
    assert broker.offsets in ({}, {("T", 1): 1})  # messages that the filter skips count as consumed
    assert broker.requests.index(RequestCode.UPDATE_CONSUMER_OFFSET) < broker.requests.index(
        RequestCode.UNREGISTER_CLIENT
    )


async def test_queues_come_and_go_with_the_members(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    told: list[tuple[str, int, list[int]]] = []

    def listener(topic: str, every: tuple[MessageQueue, ...], mine: tuple[MessageQueue, ...]) -> None:
        told.append((topic, len(every), [queue.queue_id for queue in mine]))
        if len(told) == 1:
            raise RuntimeError("a listener's bug changes nothing")

    namesrv.serve("T", broker, queues=4)
    for number in range(3):
        broker.store("T", 3, b"%d" % number)
    settings = options(queue_listener=listener)
    async with PullConsumer("g", namesrv=namesrv.addr, options=settings) as consumer:
        await consumer.subscribe("T")
        await consumer.rebalance()
        assert list(consumer.assignment) == QUEUES
        assert texts(await consumer.poll()) == "0 1"
        broker.members = sorted([*broker.members, "~another"])
        await consumer.rebalance()
        assert list(consumer.assignment) == QUEUES[:2]
        # The returned batch may not have been processed, so it is not committed: the next member gets it
        # again.
        assert broker.offsets == {}
        assert await consumer.poll(0.01) == []
        broker.members.remove("~another")
        await consumer.rebalance()
        assert texts(await consumer.poll()) == "0 1"
        await consumer.commit()
    assert told == [("T", 4, [0, 1, 2, 3]), ("T", 4, [0, 1]), ("T", 4, [0, 1, 2, 3])]
    assert broker.offsets == {("T", 3): 2}


async def test_a_notice_of_the_broker_is_followed_at_once(consumer: PullConsumer, broker: FakeBroker) -> None:
    await consumer.subscribe("T")
    broker.members = sorted([*broker.members, "~another"])
    header = ConsumerGroupRequestHeader(consumer_group="g")
    broker.connections[-1].oneway(Frame.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header))
    await until(lambda: list(consumer.assignment) == QUEUES[:2])


async def test_who_assigns_does_not_subscribe_and_the_other_way_round(
    namesrv: FakeNamesrv, broker: FakeBroker, consumer: PullConsumer
) -> None:
    await consumer.subscribe("T")
    with pytest.raises(ClientStateError, match="has a subscription"):
        await consumer.assign(QUEUES[:1])
    async with PullConsumer("g", namesrv=namesrv.addr, options=options()) as other:
        await other.assign(QUEUES[:1])
        with pytest.raises(ClientStateError, match="manually assigned"):
            await other.subscribe("T")
        assert len(broker.heartbeats) == 1
        await other.assign([])
        await other.subscribe("T")
        assert len(broker.heartbeats) == 2


async def test_a_group_has_one_consumer_on_a_client(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    namesrv.serve("T", broker, queues=1)
    async with (
        ClientInstance(namesrv.addr) as client,
        PullConsumer("g", client=client) as one,
        PullConsumer("g", client=client) as two,
    ):
        await one.subscribe("T")
        with pytest.raises(ClientStateError, match="already has a consumer of group g"):
            await two.subscribe("T")
        assert two.assignment == ()


async def test_a_topic_is_given_up_and_one_without_route_is_awaited(
    consumer: PullConsumer, namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    await consumer.subscribe("T")
    await consumer.subscribe("Later")
    assert list(consumer.assignment) == QUEUES
    assert "Later" in consumer.health().problems[0]
    namesrv.serve("Later", broker, queues=1)
    await consumer.client.refresh_routes(["Later"])
    await consumer.rebalance()
    await consumer.unsubscribe("T")
    assert consumer.assignment == (MessageQueue("Later", "broker-a", 0),)
    assert consumer.health().ok
    assert [each.topic for each in broker.heartbeats[-1].consumer_data_set[0].subscription_data_set] == [
        "Later"
    ]


async def test_what_a_broker_refuses_is_not_subscribed(consumer: PullConsumer, broker: FakeBroker) -> None:
    broker.refuse(RequestCode.CHECK_CLIENT_CONFIG, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "column 7")
    with pytest.raises(BrokerError, match="column 7"):
        await consumer.subscribe("T", sql92("a >> 1"))
    assert (consumer.assignment, broker.heartbeats) == ((), [])


async def test_a_subscription_without_any_name_server_fails() -> None:
    async with PullConsumer("g", namesrv="127.0.0.1:1") as consumer:
        with pytest.raises(NoRouteError, match=r"127\.0\.0\.1:1"):
            await consumer.subscribe("T")


async def test_without_auto_commit_only_a_commit_moves_offsets(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    for number in range(6):
        broker.store("T", 0, b"%d" % number)
    settings = options(auto_commit=False)
    async with PullConsumer("g", namesrv=namesrv.addr, options=settings) as consumer:
        await consumer.subscribe("T")
        assert texts(await consumer.poll()) == "0 1"
        assert texts(await consumer.poll()) == "2 3"
        assert await consumer.committed(QUEUES[0]) == 0
        await consumer.commit()
        assert broker.offsets == {("T", 0): 4}
        assert texts(await consumer.poll()) == "4 5"
        await consumer.commit({QUEUES[0]: 1})
        assert broker.offsets == {("T", 0): 1}
        await consumer.poll(0.01)
    assert broker.offsets == {("T", 0): 1}


async def test_seek_by_time(consumer: PullConsumer, broker: FakeBroker) -> None:
    for number in range(5):
        broker.store("T", 0, b"%d" % number)
    asked: list[str] = []

    def search(frame: Frame) -> Frame:
        asked.append((frame.ext or {})["timestamp"])
        return offset_answer(frame, 3)

    broker.on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search)
    await consumer.subscribe("T")
    await consumer.seek_to_time(QUEUES[0], 1234)
    assert texts(await consumer.poll()) == "3 4"
    assert asked == ["1234"]


async def test_broadcasting_reads_every_queue_and_keeps_offsets_here(
    namesrv: FakeNamesrv, broker: FakeBroker, tmp_path: object
) -> None:
    namesrv.serve("T", broker, queues=2)
    joined_by(broker, "~another")
    for number in range(3):
        broker.store("T", 0, b"%d" % number)
    settings = options(message_model=MessageModel.BROADCASTING, offset_dir=str(tmp_path))
    for expected in ("0 1", "2"):
        async with PullConsumer("g", namesrv=namesrv.addr, options=settings) as consumer:
            await consumer.subscribe("T")
            assert list(consumer.assignment) == QUEUES[:2]
            assert texts(await consumer.poll()) == expected
            await consumer.commit()
    assert RequestCode.UPDATE_CONSUMER_OFFSET not in broker.requests


async def test_brokers_are_told_what_they_ask(consumer: PullConsumer, broker: FakeBroker) -> None:
    for number in range(6):
        broker.store("T", 0, b"%d" % number)
    await consumer.subscribe("T")
    await consumer.poll()
    status = GroupTopicRequestHeader(topic="T", group="g")
    info = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id="c")
    reset = ResetOffsetRequestHeader(topic="T", group="g", timestamp=0, is_force=True)
    body = ResetOffsetBody(offset_table={QUEUES[0]: 5, MessageQueue("T", "elsewhere", 0): 7}).encode()
    assert (await broker.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset, body)).code == 0
    assert texts(await consumer.poll()) == "5"
    answer = await broker.ask(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, status)
    assert GetConsumerStatusBody.decode(answer.body).message_queue_table == {QUEUES[0]: 5}
    told = ConsumerRunningInfo.decode((await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, info)).body)
    assert told.properties["PROP_CONSUME_TYPE"] == "CONSUME_ACTIVELY"
    assert told.mq_table.keys() == set(QUEUES)
    assert told.mq_table[QUEUES[0]].commit_offset == 5
    direct = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id="c")
    record = encode_record("T", b"now")
    refused = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, direct, record)
    assert (refused.code, "no listener" in (refused.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)

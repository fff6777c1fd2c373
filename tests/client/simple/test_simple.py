"""Tests of simple consumers with fake brokers: the requests that brokers get, and the choice of brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.client.simple.pop_broker import POP_TIME_MS, PopBroker
from tests.kit.fakes import FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    ClientOptions,
    ConsumeFromWhere,
    MessageExt,
    SimpleConsumer,
    SimpleOptions,
    SyncSimpleConsumer,
    filter_class,
    sql92,
)
from cometmq.client.simple import receiving
from cometmq.errors import (
    BrokerError,
    ClientStateError,
    CometError,
    ConfigError,
    MessageIllegal,
    NoRouteError,
    RemotingError,
)
from cometmq.protocol.bodies import ConsumerRunningInfo
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    NotificationResponseHeader,
    ResetOffsetRequestHeader,
)
from cometmq.protocol.record.one import encode_record

NO_WAIT = SimpleOptions(wait_s=0)


@pytest.fixture
async def broker() -> AsyncIterator[PopBroker]:
    async with PopBroker() as one:
        yield one


@pytest.fixture
async def other() -> AsyncIterator[PopBroker]:
    async with PopBroker("broker-b") as one:
        yield one


@pytest.fixture
async def consumer(namesrv: FakeNamesrv) -> AsyncIterator[SimpleConsumer]:
    async with SimpleConsumer("g", "T", namesrv=namesrv.addr, options=NO_WAIT) as running:
        yield running


async def received(consumer: SimpleConsumer, broker: PopBroker, *offsets: int) -> list[MessageExt]:
    for offset in offsets:
        broker.offer(b"m%d" % offset, offset=offset)
    return await consumer.receive()


class TestRequests:
    async def test_it_joins_as_a_member_that_leases_and_leaves(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        async with SimpleConsumer("g", {"T": "b || a"}, namesrv=namesrv.addr):
            (group,) = broker.heartbeats[-1].consumer_data_set
            assert (group.group_name, group.consume_type) == ("g", "CONSUME_POP")
            assert (group.message_model, group.consume_from_where) == (
                "CLUSTERING",
                "CONSUME_FROM_LAST_OFFSET",
            )
            assert [(each.topic, each.tags_set) for each in group.subscription_data_set] == [
                ("T", ["a", "b"])
            ]
        assert broker.requests[-1] == RequestCode.UNREGISTER_CLIENT

    async def test_a_request_leases_messages_of_all_queues(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        options = SimpleOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, invisible_s=30)
        async with SimpleConsumer("g", {"T": "a"}, namesrv=namesrv.addr, options=options) as consumer:
            broker.offer(b"m", b"TAGS\x01a", offset=4)
            (message,) = await consumer.receive(8, wait_s=2.5)
            await consumer.subscribe("T", sql92("n > 1"))
            await consumer.receive(1, invisible_s=1.5, wait_s=0)
        assert (message.body, message.topic, message.reconsume_times) == (b"m", "T", 0)
        assert message.properties["POP_CK"] == f"0 {POP_TIME_MS} 30000 3 0 broker-a 0 4"
        first, second = broker.leases
        assert (first.consumer_group, first.topic, first.queue_id, first.init_mode) == ("g", "T", -1, 0)
        assert (first.max_msg_nums, first.invisible_time, first.order) == (8, 30_000, False)
        assert 2_000 < first.poll_time <= 2_500
        assert (first.exp_type, first.exp, first.born_time, first.attempt_id) == ("TAG", "a", None, None)
        assert (second.max_msg_nums, second.invisible_time, second.poll_time) == (1, 1_500, 0)
        assert (second.exp_type, second.exp) == ("SQL92", "n > 1")

    async def test_a_message_whose_tag_only_has_the_same_hash_is_acknowledged_and_omitted(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        broker.offer(b"yes", b"TAGS\x01AaAa", offset=1)
        broker.offer(b"no", b"TAGS\x01BBBB", offset=2)
        async with SimpleConsumer("g", {"T": "AaAa"}, namesrv=namesrv.addr, options=NO_WAIT) as consumer:
            assert [message.body for message in await consumer.receive()] == [b"yes"]
        assert [ack.offset for ack in broker.acks] == [2]

    async def test_acknowledgements_name_the_delivery(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        broker.offer(b"retried", topic="%RETRY%g_T", offset=8)
        (plain, retried) = await received(consumer, broker, 2), await received(consumer, broker, 3)
        broker.ready.clear()
        messages = {message.body: message for message in [*plain, *retried]}
        await consumer.ack(messages[b"retried"])
        await consumer.ack(messages[b"m2"])
        first, second = broker.acks
        handle = f"7 {POP_TIME_MS} 60000 3 1 broker-a 0 8"
        assert (first.topic, first.queue_id, first.offset, first.extra_info) == ("%RETRY%g_T", 0, 8, handle)
        handle = f"0 {POP_TIME_MS} 60000 3 0 broker-a 0 2"
        assert (second.topic, second.queue_id, second.offset, second.extra_info) == ("T", 0, 2, handle)

    async def test_several_messages_share_a_request(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        await consumer.ack(*await received(consumer, broker, 0, 9))
        ((ack,),) = (batch.acks for batch in broker.batches)
        assert (ack.consumer_group, ack.topic, ack.offsets()) == ("g", "T", [0, 9])
        assert broker.acks == []

    async def test_an_older_broker_gets_a_request_for_each_message(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        broker.refuse(RequestCode.BATCH_ACK_MESSAGE, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        await consumer.ack(*await received(consumer, broker, 0, 9))
        assert [ack.offset for ack in broker.acks] == [0, 9]

    async def test_a_changed_lease_gives_the_message_its_new_handle(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        (message,) = await received(consumer, broker, 5)
        await consumer.change_invisibility(message, 7.5)
        (change,) = broker.changes
        assert (change.topic, change.offset, change.invisible_time, change.suspend) == ("T", 5, 7_500, None)
        assert message.properties["POP_CK"] == f"5 {POP_TIME_MS + 5} 7500 4 0 broker-a 0 5"
        await consumer.ack(message)
        assert broker.acks[0].extra_info == message.properties["POP_CK"]

    async def test_a_dead_letter_is_copied_by_its_broker_and_acknowledged(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        (message,) = await received(consumer, broker, 5)
        await consumer.dead_letter(message)
        (copied,) = broker.sent_back
        assert (copied.group, copied.offset, copied.delay_level) == ("g", message.physical_offset, -1)
        assert [ack.offset for ack in broker.acks] == [5]
        broker.refuse(RequestCode.CONSUMER_SEND_MSG_BACK, ResponseCode.SYSTEM_BUSY)
        with pytest.raises(BrokerError, match="SYSTEM_BUSY"):
            await consumer.dead_letter(message)
        assert len(broker.acks) == 1

    async def test_names_get_the_namespace(self, namesrv: FakeNamesrv, broker: PopBroker) -> None:
        namesrv.serve("N%T", broker)
        broker.offer(b"retried", topic="%RETRY%N%g_N%T", offset=8)
        broker.offer(b"plain", topic="N%T", offset=1)
        broker.offer(b"plain", topic="N%T", offset=2)
        options = ClientOptions(namespace="N")
        async with SimpleConsumer("g", "T", namesrv=namesrv.addr, client_options=options) as consumer:
            retried, *plain = await consumer.receive()
            await consumer.ack(retried)
            await consumer.ack(*plain)
        assert {message.topic for message in (retried, *plain)} == {"T"}
        assert broker.leases[0].topic == "N%T"
        assert (broker.acks[0].consumer_group, broker.acks[0].topic) == ("N%g", "%RETRY%N%g_N%T")
        assert [(ack.consumer_group, ack.topic) for ack in broker.batches[0].acks] == [("N%g", "N%T")]


class TestErrors:
    async def test_a_refusal_is_raised_with_its_code(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        (message,) = await received(consumer, broker, 1)
        broker.refuse(RequestCode.ACK_MESSAGE, ResponseCode.MESSAGE_ILLEGAL)
        broker.refuse(RequestCode.BATCH_ACK_MESSAGE, ResponseCode.NO_PERMISSION)
        broker.refuse(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ResponseCode.NO_MESSAGE)
        broker.refuse(RequestCode.POP_MESSAGE, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)
        for call, code in (
            (consumer.ack(message), ResponseCode.MESSAGE_ILLEGAL),
            (consumer.ack(message, message), ResponseCode.NO_PERMISSION),
            (consumer.change_invisibility(message, 1), ResponseCode.NO_MESSAGE),
            (consumer.receive(), ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ):
            with pytest.raises(BrokerError) as caught:
                await call
            assert (caught.value.code, caught.value.topic) == (code, "T")

    async def test_a_message_from_elsewhere_is_refused(self, consumer: SimpleConsumer) -> None:
        stranger = MessageExt("T", b"")
        for call in (
            consumer.ack(stranger),
            consumer.change_invisibility(stranger, 1),
            consumer.dead_letter(stranger),
        ):
            with pytest.raises(MessageIllegal, match="has no receipt handle"):
                await call

    @pytest.mark.parametrize(
        ("arguments", "key"),
        [
            ({"max_messages": 0}, "max_messages"),
            ({"max_messages": 33}, "max_messages"),
            ({"invisible_s": 0.5}, "invisible_s"),
            ({"invisible_s": 43_201}, "invisible_s"),
            ({"wait_s": -1}, "wait_s"),
            ({"wait_s": 301}, "wait_s"),
        ],
    )
    async def test_arguments_have_ranges(
        self, consumer: SimpleConsumer, arguments: dict[str, float], key: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            await consumer.receive(**arguments)  # type: ignore[arg-type]
        assert caught.value.key == key

    async def test_settings_are_checked(self, consumer: SimpleConsumer) -> None:
        with pytest.raises(ConfigError, match="FIRST_OFFSET or LAST_OFFSET"):
            SimpleOptions(consume_from_where=ConsumeFromWhere.TIMESTAMP)
        with pytest.raises(ConfigError, match="filter servers do not lease messages"):
            SimpleConsumer("g", {"T": filter_class("A", "class A: ...")})
        with pytest.raises(ConfigError, match="filter servers do not lease messages"):
            await consumer.subscribe("U", filter_class("A", "class A: ..."))

    async def test_a_consumer_without_subscription_or_route_says_so(
        self, consumer: SimpleConsumer, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        await consumer.unsubscribe("T")
        with pytest.raises(ClientStateError, match="has no subscription"):
            await consumer.receive()
        await consumer.subscribe("Young")
        with pytest.raises(NoRouteError):
            await consumer.receive()
        namesrv.serve("Young", broker)
        broker.offer(b"first", topic="Young")
        assert [message.topic for message in await consumer.receive()] == ["Young"]

    async def test_a_call_that_waits_ends_with_the_consumer(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        broker.on(RequestCode.POP_MESSAGE, lambda _: None)
        consumer = SimpleConsumer("g", "T", namesrv=namesrv.addr)
        await consumer.start()
        waiting = asyncio.create_task(consumer.receive())
        await broker.wait_for(lambda: RequestCode.POP_MESSAGE in broker.requests)
        await consumer.stop()
        with pytest.raises(ClientStateError, match="was stopped"):
            await waiting
        with pytest.raises(ClientStateError, match="is stopped"):
            await consumer.receive()

    async def test_a_failed_start_leaves_nothing_registered(self, namesrv: FakeNamesrv) -> None:
        consumer = SimpleConsumer("g", "T", namesrv="127.0.0.1:1")
        with pytest.raises(NoRouteError):
            await consumer.start()
        assert (consumer.state, consumer.problems) == ("stopped", {})


class TestSeveralBrokers:
    async def test_brokers_are_asked_in_turn_until_one_has_messages(
        self, consumer: SimpleConsumer, namesrv: FakeNamesrv, broker: PopBroker, other: PopBroker
    ) -> None:
        namesrv.serve("T", broker, other)
        await consumer.subscribe("T")
        assert await consumer.receive() == []
        assert (len(broker.leases), len(other.leases)) == (1, 1)
        for number in range(4):
            broker.offer(b"a", offset=number)
            other.offer(b"b", offset=number)
        found = [(await consumer.receive(1))[0] for _ in range(4)]
        assert sorted(message.broker_name for message in found) == ["broker-a"] * 2 + ["broker-b"] * 2
        await consumer.ack(*found)
        assert (len(broker.batches), len(other.batches)) == (1, 1)

    async def test_a_message_at_any_broker_ends_the_wait(
        self, consumer: SimpleConsumer, namesrv: FakeNamesrv, broker: PopBroker, other: PopBroker
    ) -> None:
        namesrv.serve("T", broker, other)
        await consumer.subscribe("T")
        arrived = asyncio.Event()

        async def hold(frame: Frame) -> Frame:
            await arrived.wait()
            return frame.response(0, header=NotificationResponseHeader(has_msg=True))

        broker.on(RequestCode.NOTIFICATION, lambda _: None)
        other.on(RequestCode.NOTIFICATION, hold)  # type: ignore[arg-type] # the server awaits it
        waiting = asyncio.create_task(consumer.receive(wait_s=60))
        for each in (broker, other):
            await each.wait_for(lambda each=each: RequestCode.NOTIFICATION in each.requests)  # type: ignore[misc]
        other.offer(b"at last")
        arrived.set()
        assert [message.body for message in await waiting] == [b"at last"]
        assert {lease.poll_time for lease in [*broker.leases, *other.leases]} == {0}
        # The notification that is still held serves the next call, too.
        assert await consumer.receive(wait_s=0.3) == []
        assert broker.requests.count(RequestCode.NOTIFICATION) == 1

    async def test_a_broker_that_fails_does_not_stop_the_others(
        self, consumer: SimpleConsumer, namesrv: FakeNamesrv, broker: PopBroker, other: PopBroker
    ) -> None:
        namesrv.serve("T", broker, other)
        await consumer.subscribe("T")
        broker.refuse(RequestCode.POP_MESSAGE, ResponseCode.SYSTEM_BUSY, "wait")
        for number in range(2):
            other.offer(b"b", offset=number)
            assert len(await consumer.receive()) == 1
        assert list(consumer.problems) == [("T", "broker-a")]
        assert "SYSTEM_BUSY" in consumer.problems["T", "broker-a"]
        del broker.scripts[RequestCode.POP_MESSAGE]
        assert await consumer.receive() == []
        assert consumer.problems == {}
        await broker.__aexit__()
        await other.__aexit__()
        with pytest.raises(RemotingError):
            await consumer.receive()

    async def test_a_broker_that_hangs_is_not_asked_for_a_while_if_there_are_others(
        self,
        consumer: SimpleConsumer,
        namesrv: FakeNamesrv,
        broker: PopBroker,
        other: PopBroker,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(receiving, "_SLOW_S", 0.0)
        namesrv.serve("T", broker, other)
        await consumer.subscribe("T")
        broker.refuse(RequestCode.POP_MESSAGE, ResponseCode.SYSTEM_BUSY, "wait")
        for number in range(4):
            other.offer(b"b", offset=number)
            assert len(await consumer.receive()) == 1
        assert broker.requests.count(RequestCode.POP_MESSAGE) == 1
        other.refuse(RequestCode.POP_MESSAGE, ResponseCode.SYSTEM_BUSY, "wait")
        for _ in range(2):
            with pytest.raises(BrokerError):
                await consumer.receive()
        assert broker.requests.count(RequestCode.POP_MESSAGE) == 2  # no broker is better

    async def test_an_empty_answer_is_followed_by_a_pause(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        broker.refuse(RequestCode.POP_MESSAGE, ResponseCode.POLLING_FULL)
        async with SimpleConsumer("g", "T", namesrv=namesrv.addr) as consumer:
            assert await consumer.receive(wait_s=0.5) == []
        assert 2 <= broker.requests.count(RequestCode.POP_MESSAGE) <= 4


class TestLostResponses:
    async def test_an_orderly_attempt_is_repeated_with_its_id(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        options = SimpleOptions(orderly=True, wait_s=0)
        async with SimpleConsumer("g", "T", namesrv=namesrv.addr, options=options) as consumer:
            broker.order_counts = "0 qo0%1 2"
            (message,) = await received(consumer, broker, 1)
            assert message.reconsume_times == 2

            def lose(frame: Frame) -> None:
                broker.lease(frame)
                asyncio.get_running_loop().call_soon(broker.connections[-1].close)

            broker.on(RequestCode.POP_MESSAGE, lose)
            with pytest.raises(RemotingError):
                await consumer.receive()
            del broker.scripts[RequestCode.POP_MESSAGE]
            await consumer.receive()
            await consumer.receive()
        first, lost, repeated, last = (lease.attempt_id for lease in broker.leases)
        assert lost == repeated
        assert len({first, lost, last} - {None}) == 3
        assert all(lease.order for lease in broker.leases)

    async def test_messages_of_a_cancelled_call_are_given_back(
        self, consumer: SimpleConsumer, broker: PopBroker
    ) -> None:
        arrived = asyncio.Event()

        async def late(frame: Frame) -> Frame:
            await arrived.wait()
            broker.offer(b"late", offset=6)
            return broker.lease(frame)

        broker.on(RequestCode.POP_MESSAGE, late)  # type: ignore[arg-type] # the server awaits it
        waiting = asyncio.create_task(consumer.receive())
        await broker.wait_for(lambda: RequestCode.POP_MESSAGE in broker.requests)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        arrived.set()
        await until(lambda: broker.changes)
        (change,) = broker.changes
        assert (change.offset, change.invisible_time, change.suspend) == (6, 0, True)


async def test_requests_of_administrators(consumer: SimpleConsumer, broker: PopBroker) -> None:
    asked = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id=consumer.client.client_id)
    answer = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, asked)
    info = ConsumerRunningInfo.decode(answer.body)
    assert (info.properties["PROP_CONSUME_TYPE"], info.mq_table) == ("CONSUME_POP", {})
    reset = ResetOffsetRequestHeader(topic="T", group="g", timestamp=-1)
    answer = await broker.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset, b'{"offsetTable":{}}')
    assert answer.code == ResponseCode.SUCCESS
    direct = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id=consumer.client.client_id)
    answer = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, direct, encode_record("T", b"x"))
    assert "a simple consumer has no listener" in (answer.remark or "")


async def test_a_second_consumer_of_the_group_needs_its_own_client(
    consumer: SimpleConsumer, broker: PopBroker
) -> None:
    second = SimpleConsumer("g", "T", client=consumer.client)
    with pytest.raises(CometError, match="already has a consumer of group g"):
        await second.start()
    assert await received(consumer, broker, 1)


async def test_the_blocking_face(namesrv: FakeNamesrv, broker: PopBroker) -> None:
    def use() -> list[bytes]:
        with SyncSimpleConsumer("g", "T", namesrv=namesrv.addr, options=NO_WAIT) as consumer:
            consumer.subscribe("T", "a || b")
            broker.offer(b"m", b"TAGS\x01a", offset=1)
            (message,) = consumer.receive(1)
            consumer.change_invisibility(message, 30)
            consumer.ack(message)
            assert consumer.problems == {}
            return [message.body]

    assert await asyncio.to_thread(use) == [b"m"]
    assert [ack.offset for ack in broker.acks] == [1]

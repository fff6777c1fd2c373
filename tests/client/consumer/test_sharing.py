"""Push consumers whose group shares messages, with a fake broker that leases them."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.fakes import Box
from tests.client.simple.pop_broker import PopBroker
from tests.kit.brokers import Cluster, create
from tests.kit.fakes import FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageModel,
    MessageQueue,
    MessageStream,
    OrderlyContext,
    OrderlyStatus,
    Producer,
    PushConsumer,
    PushOptions,
    SyncPushConsumer,
    filter_class,
)
from cometmq.client.group.offset_files import FileOffsets
from cometmq.errors import BrokerError, ConfigError
from cometmq.protocol.bodies import (
    MessageQueueAssignment,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SubscriptionGroupConfig,
)
from cometmq.protocol.codes import RequestCode, ResponseCode, SysFlag
from cometmq.protocol.frame import Frame
from cometmq.protocol.record.one import encode_record
from cometmq.standalone import Standalone

POP, CHANGE = RequestCode.POP_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME


@pytest.fixture
async def broker() -> AsyncIterator[PopBroker]:
    async with PopBroker() as one:
        yield one


def sharing(namesrv: FakeNamesrv, listener: Any, **options: Any) -> PushConsumer:
    settings = PushOptions(**{"share": "messages", "pull_error_delay_s": 0.01, **options})
    return PushConsumer("g", listener, "T", namesrv=namesrv.addr, options=settings)


def offer(broker: PopBroker, count: int, **places: Any) -> None:
    for offset in range(count):
        broker.offer(b"%d" % offset, offset=offset, **places)


def acked(broker: PopBroker) -> list[int]:
    batches = [offset for batch in broker.batches for ack in batch.acks for offset in ack.offsets()]
    return sorted([*(ack.offset for ack in broker.acks), *batches])


def given_back(broker: PopBroker) -> list[tuple[int, int, bool | None]]:
    return [(change.offset, change.invisible_time, change.suspend) for change in broker.changes]


class TestResults:
    async def test_handled_messages_are_acknowledged(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 5)
        async with sharing(namesrv, box, consume_batch_max_size=3, invisible_s=30) as consumer:
            await until(lambda: len(acked(broker)) == 5)
            assert consumer.health().consumed == 5
            assert consumer.health().ok
            assert consumer.assignment == (MessageQueue("T", "broker-a", 0),)
        assert acked(broker) == [0, 1, 2, 3, 4]
        assert (broker.leases[0].topic, broker.leases[0].order) == ("T", False)
        assert (broker.leases[0].invisible_time, broker.leases[0].poll_time) == (30_000, 0)
        assert broker.pulls == []
        assert given_back(broker) == []

    async def test_calls_that_end_together_share_an_acknowledgement(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 10)
        box.open.clear()
        async with sharing(namesrv, box):
            await box.has(10)
            box.open.set()
            await until(lambda: len(acked(broker)) == 10)
        assert (len(broker.batches), broker.acks) == (1, [])

    async def test_a_listener_that_removes_properties_does_not_keep_other_messages_unacknowledged(
        self, namesrv: FakeNamesrv, broker: PopBroker, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def listener(messages: list[MessageExt]) -> None:
            if messages[0].body == b"1":
                messages[0].properties.clear()

        offer(broker, 4)
        async with sharing(namesrv, listener):
            await until(lambda: len(acked(broker)) == 3 and "has no receipt handle" in caplog.text)
        assert acked(broker) == [0, 2, 3]

    async def test_failed_messages_are_given_back_by_the_groups_policy(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        stored = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1, 2, 7000, 8000]}}
        config = SubscriptionGroupConfig("g", retry_max_times=3, group_retry_policy=stored).encode()
        broker.on(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, lambda frame: frame.response(body=config))
        for offset, times in enumerate((0, 1, 2, 3)):
            record = encode_record("T", b"m", b"", queue_offset=offset, reconsume_times=times)
            broker.ready.append(record)

        async def fails(messages: list[MessageExt]) -> None:
            raise ValueError

        async with sharing(namesrv, fails) as consumer:
            await until(lambda: len(broker.changes) == 3 and acked(broker))
            assert consumer.health().failed == 4
        assert sorted(given_back(broker)) == [(0, 7000, None), (1, 8000, None), (2, 8000, None)]
        assert [each.delay_level for each in broker.sent_back] == [-1]
        assert acked(broker) == [3]

    async def test_a_call_chooses_what_failed_and_when_it_comes_again(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
            assert context.queue == MessageQueue("T", "broker-a", 0)
            context.ack_index = 1
            context.delay_level = -1 if messages[0].body == b"0" else 4
            return ConsumeStatus.SUCCESS

        offer(broker, 6)
        async with sharing(namesrv, listener, consume_batch_max_size=3):
            await until(lambda: len(acked(broker)) == 5 and broker.changes)
        assert acked(broker) == [0, 1, 2, 3, 4]  # 2 is a dead letter
        assert len(broker.sent_back) == 1
        assert given_back(broker) == [(5, 30_000, None)]

    async def test_a_refused_acknowledgement_is_logged_and_the_rest_goes_on(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box, caplog: pytest.LogCaptureFixture
    ) -> None:
        broker.refuse(RequestCode.ACK_MESSAGE, ResponseCode.NO_MESSAGE)
        async with sharing(namesrv, box):
            offer(broker, 1)
            await until(lambda: "could not acknowledge messages" in caplog.text)
            del broker.scripts[RequestCode.ACK_MESSAGE]
            broker.offer(b"next", offset=9)
            await until(lambda: acked(broker) == [9])

    async def test_rejected_messages_count_as_consumed_and_large_bodies_as_failed(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 2)
        flag = int(SysFlag.COMPRESSED)
        broker.ready.append(
            encode_record("T", zlib.compress(bytes(5000)), b"", queue_offset=7, sys_flag=flag)
        )
        hooks = (lambda message: message.body != b"1",)
        async with sharing(namesrv, box, filter_hooks=hooks, max_body=1000) as consumer:
            await until(lambda: len(acked(broker)) == 2 and broker.changes)
            assert "PushOptions.max_body" in (consumer.health().last_error or "")
        assert box.bodies == [b"0"]
        assert given_back(broker) == [(7, 10_000, None)]


class TestLeases:
    async def test_a_member_leases_two_messages_for_each_call(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 50)
        box.open.clear()
        async with sharing(namesrv, box, consume_concurrency=3) as consumer:
            await box.has(3)
            await until(lambda: len(broker.ready) == 44)
            consumer.set_concurrency(5)
            await box.has(5)
            assert consumer.health().running_listeners == 5
            box.open.set()
            await until(lambda: len(acked(broker)) == 50)

    async def test_calls_begin_while_an_acknowledgement_is_under_way_up_to_a_limit(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        held: list[Frame] = []
        broker.on(RequestCode.ACK_MESSAGE, held.append)
        offer(broker, 1)
        async with sharing(namesrv, box, consume_concurrency=2) as consumer:
            await until(lambda: held)
            offer(broker, 20)
            # Four batches wait for the next request, and both workers for the result of theirs. Of the other
            # messages, the member leases two for each worker.
            await until(lambda: len(broker.ready) == 10)
            assert (len(box.messages), consumer.health().consumed) == (7, 7)
            broker.connections[-1].answer(held[0].response(0))
            await until(lambda: len(acked(broker)) == 20)
        assert len(box.messages) == 21

    async def test_leases_are_renewed_until_the_listener_returns(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 2)
        box.open.clear()
        async with sharing(namesrv, box, consume_concurrency=1, invisible_s=1.0):
            await until(lambda: len(broker.changes) >= 4)
            assert {(each.offset, each.invisible_time) for each in broker.changes} == {(0, 1000), (1, 1000)}
            box.open.set()
            await until(lambda: len(acked(broker)) == 2)
            (batch,) = broker.batches
            # the revive queue in the answers to the renewals
            assert {each.revive_queue_id for each in batch.acks} == {4}
            broker.offer(b"idle", offset=5)
            await until(lambda: len(acked(broker)) == 3)
            count = len(broker.changes)
            await until(lambda: broker.requests.count(POP) > 5)
            assert len(broker.changes) == count

    async def test_a_waiting_message_whose_lease_has_ended_is_not_handled(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        broker.refuse(CHANGE, ResponseCode.NO_MESSAGE)
        offer(broker, 2)
        box.open.clear()
        async with sharing(namesrv, box, consume_concurrency=1, invisible_s=1.0):
            await until(lambda: broker.requests.count(CHANGE) == 2)
            broker.offer(b"later", offset=8)  # there is room again
            await until(lambda: not broker.ready)
            box.open.set()
            await until(lambda: 8 in acked(broker))
        assert box.bodies == [b"0", b"later"]

    async def test_an_overdue_message_is_given_back(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 1)
        box.open.clear()
        async with sharing(namesrv, box, consume_timeout_s=0.2):
            await until(lambda: broker.changes)
            assert given_back(broker) == [(0, 10_000, None)]
            box.open.set()
        assert acked(broker) == []

    async def test_a_call_that_ends_while_an_overdue_message_is_given_back(
        self, namesrv: FakeNamesrv, broker: PopBroker, caplog: pytest.LogCaptureFixture
    ) -> None:
        ends = asyncio.Event()

        async def listener(messages: list[MessageExt]) -> None:
            await (ends if messages[0].queue_offset == 1 else asyncio.Event()).wait()

        async def change(frame: Frame) -> Frame | None:
            ends.set()
            await until(lambda: acked(broker) == [1])
            return broker.answer(frame)

        offer(broker, 2)
        broker.on(CHANGE, change)  # type: ignore[arg-type] # the server awaits it
        async with sharing(namesrv, listener, consume_timeout_s=0.1, drain_timeout_s=0.01):
            await until(lambda: broker.changes)
            broker.offer(b"2", offset=2)
            await until(lambda: len(broker.changes) == 2)
        assert [change.offset for change in broker.changes[:2]] == [0, 2]
        assert "failed, trying again" not in caplog.text

    async def test_a_stop_finishes_calls_and_gives_the_other_messages_back(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 2)
        box.open.clear()
        async with sharing(namesrv, box, consume_concurrency=1) as consumer:
            await box.has(1)
            stopping = asyncio.create_task(consumer.stop())
            await until(lambda: consumer.state == "stopping")
            broker.offer(b"for others", offset=5)
            box.open.set()
            await stopping
        assert acked(broker) == [0]
        assert given_back(broker) == [(1, 0, True)]
        assert len(broker.ready) == 1

    async def test_a_stop_gives_messages_back_whose_calls_do_not_end(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        offer(broker, 1)
        box.open.clear()
        async with sharing(namesrv, box, drain_timeout_s=0.01):
            await box.has(1)
        assert (acked(broker), given_back(broker)) == ([], [(0, 0, True)])

    async def test_messages_of_a_request_that_ends_after_the_stop_began_are_given_back(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        arrived = asyncio.Event()

        async def late(frame: Frame) -> Frame:
            await arrived.wait()
            return broker.lease(frame)

        broker.on(POP, late)  # type: ignore[arg-type] # the server awaits it
        consumer = sharing(namesrv, box)
        await consumer.start()
        await until(lambda: POP in broker.requests)
        stopping = asyncio.create_task(consumer.stop())
        await until(lambda: consumer.state == "stopping")
        offer(broker, 1)
        arrived.set()
        await stopping
        assert (box.bodies, given_back(broker)) == ([], [(0, 0, True)])

    async def test_a_suspended_consumer_leases_nothing(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        async with sharing(namesrv, box) as consumer:
            await until(lambda: POP in broker.requests)
            consumer.suspend()
            await asyncio.sleep(0)
            asked = broker.requests.count(POP)
            offer(broker, 1)
            await consumer.rebalance()
            assert broker.requests.count(POP) == asked
            consumer.resume()
            await box.has(1)

    async def test_other_code_that_cancels_all_tasks_does_not_end_it(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        async with sharing(namesrv, box):
            await until(lambda: POP in broker.requests)
            (receiving,) = [each for each in asyncio.all_tasks() if each.get_name() == "cometmq-lease-g"]
            receiving.cancel()
            offer(broker, 1)
            await box.has(1)

    async def test_health_names_a_broker_that_refuses(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        broker.refuse(POP, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "too old")
        async with sharing(namesrv, box) as consumer:
            await until(lambda: consumer.health().problems)
            (problem,) = consumer.health().problems
            assert "T@broker-a: " in problem
            assert "too old" in problem
            await consumer.unsubscribe("T")
            await until(lambda: not consumer.health().problems)


class TestOrder:
    async def test_a_request_leases_one_message_and_an_acknowledgement_is_followed_by_another(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        broker.on(RequestCode.NOTIFICATION, lambda _: None)  # nothing announces that a queue is free
        handled: list[bytes] = []

        async def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
            handled.append(messages[0].body)
            if handled == [b"0"]:
                context.suspend_current_queue_s = 0.05
                broker.offer(b"again", offset=0)
                return OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
            broker.offer(b"%d" % len(handled), offset=len(handled))
            return OrderlyStatus.SUCCESS

        offer(broker, 1)
        async with sharing(namesrv, listener, orderly=True):
            await until(lambda: len(handled) >= 4)
        assert handled[:4] == [b"0", b"again", b"2", b"3"]
        assert {(each.order, each.max_msg_nums) for each in broker.leases} == {(True, 1)}
        assert given_back(broker)[0] == (0, 50, None)
        assert {each.topic for each in broker.heartbeats[-1].consumer_data_set[0].subscription_data_set} == {
            "T"
        }

    async def test_an_overdue_call_in_a_thread_keeps_its_queue(
        self, namesrv: FakeNamesrv, broker: PopBroker, caplog: pytest.LogCaptureFixture
    ) -> None:
        done = threading.Event()

        def listener(messages: list[MessageExt]) -> None:
            assert done.wait(60)

        offer(broker, 1)
        async with sharing(namesrv, listener, orderly=True, consume_timeout_s=0.05):
            await until(lambda: "has run for more than 0.05 s" in caplog.text)
            assert broker.changes == []
            done.set()
            await until(lambda: acked(broker) == [0])


class TestChoiceOfTheOperator:
    async def test_a_topic_changes_between_queues_and_messages(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        mode = "PULL"
        asked: list[QueryAssignmentRequestBody] = []

        def answer(frame: Frame) -> Frame:
            asked.append(QueryAssignmentRequestBody.decode(frame.body))
            queues = [MessageQueueAssignment(MessageQueue("T", "broker-a", 0), mode)]
            return frame.response(body=QueryAssignmentResponseBody(queues).encode())

        broker.on(RequestCode.QUERY_ASSIGNMENT, answer)
        async with sharing(namesrv, box, share="broker") as consumer:
            assert len(consumer.health().queues) == 1
            assert POP not in broker.requests
            mode = "POP"
            await consumer.rebalance()
            assert len(consumer.health().queues) == 0
            offer(broker, 1)
            await until(lambda: acked(broker) == [0])
            broker.refuse(RequestCode.QUERY_ASSIGNMENT, ResponseCode.SYSTEM_BUSY)
            await consumer.rebalance()
            assert len(consumer.health().queues) == 0
            broker.on(RequestCode.QUERY_ASSIGNMENT, answer)
            broker.store("T", 0, b"pulled")
            mode = "PULL"
            await consumer.rebalance()
            assert len(consumer.health().queues) == 1
            await box.has(2)
        assert box.bodies == [b"0", b"pulled"]
        assert {(each.topic, each.consumer_group) for each in asked} == {("T", "g")}

    async def test_a_broker_that_knows_no_modes_divides_queues(
        self, namesrv: FakeNamesrv, broker: PopBroker, box: Box
    ) -> None:
        broker.refuse(RequestCode.QUERY_ASSIGNMENT, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        async with sharing(namesrv, box, share="broker") as consumer:
            assert len(consumer.health().queues) == 1


class TestLag:
    async def test_the_lag_of_shared_queues_is_that_of_the_group(self, tmp_path: Path, box: Box) -> None:
        async with Standalone(tmp_path, 0, 0) as standalone:
            cluster = Cluster(standalone)
            await create(cluster.peer(), "T", 2)
            box.open.clear()
            options = PushOptions(share="messages", consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
            async with (
                Producer("P", namesrv=cluster.namesrv_addr) as producer,
                PushConsumer("g", box, "T", namesrv=cluster.namesrv_addr, options=options) as one,
                PushConsumer("g", box, "T", namesrv=cluster.namesrv_addr, options=options) as other,
            ):
                queues = [MessageQueue("T", "broker-a", number) for number in range(2)]
                assert [each for each in one.assignment if each.topic == "T"] == queues
                for _ in range(5):
                    await producer.send(Message("T", b"x"))
                await box.has(5)  # leased
                for member in (one, other):
                    lags = await member.lag()
                    assert sum(lags[queue] for queue in queues) == 5
                box.open.set()
                while any((await one.lag()).values()):
                    await asyncio.sleep(0)
            await cluster.close_peers()


class TestOtherFaces:
    async def test_a_stream(self, namesrv: FakeNamesrv, broker: PopBroker) -> None:
        offer(broker, 4)
        options = PushOptions(share="messages", drain_timeout_s=0.01)
        async with MessageStream("g", "T", namesrv=namesrv.addr, options=options) as stream:
            messages = [await anext(stream) for _ in range(4)]
            await stream.ack(messages[3])
            await stream.nack(messages[1], 2)
            broker.refuse(RequestCode.ACK_MESSAGE, ResponseCode.NO_MESSAGE)
            with pytest.raises(BrokerError, match="NO_MESSAGE"):
                await stream.ack(messages[2])
        assert acked(broker) == [3]
        assert given_back(broker) == [(1, 5000, None), (0, 0, True)]

    async def test_an_orderly_stream_has_no_delay_levels(
        self, namesrv: FakeNamesrv, broker: PopBroker
    ) -> None:
        offer(broker, 1)
        options = PushOptions(share="messages", orderly=True, suspend_current_queue_s=2)
        async with MessageStream("g", "T", namesrv=namesrv.addr, options=options) as stream:
            message = await anext(stream)
            with pytest.raises(ConfigError, match="0 in an orderly stream"):
                await stream.nack(message, 1)
            await stream.nack(message)
        assert given_back(broker) == [(0, 2000, None)]

    async def test_the_blocking_face(self, namesrv: FakeNamesrv, broker: PopBroker) -> None:
        offer(broker, 3)
        found = threading.Semaphore(0)

        def use() -> None:
            options = PushOptions(share="messages")
            with SyncPushConsumer("g", lambda _: found.release(), "T", namesrv=namesrv.addr, options=options):
                for _ in range(3):
                    assert found.acquire(timeout=60)

        await asyncio.to_thread(use)
        assert acked(broker) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"share": "topics"}, "share"),
        ({"share": "messages", "message_model": MessageModel.BROADCASTING}, "message_model"),
        ({"share": "broker", "consume_from_where": ConsumeFromWhere.TIMESTAMP}, "share"),
        ({"share": "messages", "offset_storage": FileOffsets("x.json")}, "share"),
        ({"share": "broker", "orderly": True}, "share"),
        ({"share": "messages", "orderly": True, "consume_batch_max_size": 2}, "consume_batch_max_size"),
        ({"invisible_s": 0.5}, "invisible_s"),
        ({"invisible_s": 43_201}, "invisible_s"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PushOptions(**options)
    assert caught.value.key == key


async def test_filter_classes_are_refused(namesrv: FakeNamesrv, box: Box) -> None:
    wanted = filter_class("A", "class A: ...")
    with pytest.raises(ConfigError, match="filter servers do not lease messages"):
        PushConsumer("g", box, {"T": wanted}, options=PushOptions(share="messages"))
    consumer = sharing(namesrv, box)
    with pytest.raises(ConfigError, match="filter servers do not lease messages"):
        await consumer.subscribe("U", wanted)

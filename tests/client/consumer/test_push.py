"""Tests of the push consumer when brokers refuse requests, reset offsets, send requests, or disappear."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Sequence

import pytest
from tests.client.fakes import Box, ignore, push_consumer
from tests.kit.fakes import FakeBroker, FakeNamesrv, offset_answer, pull_answer
from tests.kit.waiting import until

from cometmq import (
    BrokerError,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    FlowLimits,
    MessageExt,
    MessageQueue,
    NoRouteError,
    PullOptions,
    PushConsumer,
    PushOptions,
    sql92,
)
from cometmq.client.consumer import concurrent
from cometmq.client.consumer.push_session import PushSession
from cometmq.errors import ClientStateError, ConfigError, MessageIllegal
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerList,
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
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.one import encode_record

QUEUE = MessageQueue("T", "broker-a", 0)


# -- joining and leaving


async def test_a_member_announces_what_it_wants_and_says_goodbye(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box
) -> None:
    subscriptions = {"T": "TagA || TagB", "U": "*"}
    namesrv.serve("U", broker, queues=1)
    async with PushConsumer("g", box, subscriptions, namesrv=namesrv.addr) as member:
        beat = broker.heartbeats[-1]
        (group,) = beat.consumer_data_set
        assert beat.client_id == member.client.client_id
        assert (group.group_name, group.consume_type) == ("g", "CONSUME_PASSIVELY")
        assert group.message_model == "CLUSTERING"
        by_topic = {subscription.topic: subscription for subscription in group.subscription_data_set}
        assert set(by_topic) == {"T", "U", "%RETRY%g"}
        assert (by_topic["T"].sub_string, by_topic["T"].tags_set) == ("TagA || TagB", ["TagA", "TagB"])
        assert by_topic["T"].code_set == [2598919, 2598920]
        assert (by_topic["U"].sub_string, by_topic["U"].tags_set, by_topic["U"].code_set) == ("*", [], [])
    assert broker.requests[-1] == RequestCode.UNREGISTER_CLIENT


async def test_a_consumer_starts_once_and_stops_as_often_as_you_like(box: Box) -> None:
    member = box.consumer()
    await member.start()
    with pytest.raises(ClientStateError):
        await member.start()
    await member.stop()
    await member.stop()
    assert member.health().state == "stopped"
    with pytest.raises(ClientStateError):
        await member.start()


async def test_a_listener_may_stop_its_own_consumer(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.store("T", 0, b"last")
    stopping = asyncio.Event()

    async def stops(_messages: list[MessageExt]) -> None:
        await member.stop()
        await asyncio.create_task(member.stop())
        stopping.set()

    member = PushConsumer("g", stops, "T", namesrv=namesrv.addr)
    async with asyncio.timeout(60), member:  # draining alone would take 30 s
        await stopping.wait()
    assert member.health().state == "stopped"
    assert broker.offsets["T", 0] == 1


def test_nonsense_is_refused_before_anything_starts() -> None:
    with pytest.raises(MessageIllegal):
        PushConsumer("bad group", ignore, "T")
    with pytest.raises(ConfigError, match="would match nothing"):
        PushConsumer("g", ignore, {"T": " || "})
    with pytest.raises(ConfigError, match="consume_concurrency"):
        PushOptions(consume_concurrency=0)
    for options in (PushOptions, PullOptions):
        with pytest.raises(ConfigError, match=r"max_reconsume_times = .-1"):
            options(max_reconsume_times=-1)
        with pytest.raises(ConfigError, match="pull_batch_size"):
            options(pull_batch_size=1025)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="handover_timeout_s"):
            PushOptions(handover_timeout_s=seconds)


async def test_topics_without_route_are_awaited(namesrv: FakeNamesrv, broker: FakeBroker, box: Box) -> None:
    del namesrv.routes["T"]
    async with box.consumer() as member:
        health = member.health()
        assert not health.ok
        assert any("T: no route to topic T" in problem for problem in health.problems)
        namesrv.serve("T", broker, queues=1)
        broker.store("T", 0, b"late")
        await member.rebalance()
        await box.has(1)
        assert member.health().ok


async def test_a_start_without_any_name_server_fails_and_says_so(box: Box) -> None:
    member = PushConsumer("g", box, ["T", "U"], namesrv="127.0.0.1:1")
    with pytest.raises(NoRouteError, match=r"topic \S+: cannot connect to 127\.0\.0\.1:1") as caught:
        await member.start()
    assert pickle.loads(pickle.dumps(caught.value)).asked == caught.value.asked
    assert member.health().state == "stopped"


async def test_an_expression_the_broker_cannot_compile_fails_the_start(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box
) -> None:
    broker.refuse(RequestCode.CHECK_CLIENT_CONFIG, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "column 7")
    member = PushConsumer("g", box, {"T": sql92("a >> 1")}, namesrv=namesrv.addr)
    with pytest.raises(BrokerError, match="column 7"):
        await member.start()
    assert member.health().state == "stopped"


async def test_an_expression_that_a_broker_refuses_leaves_a_running_consumer_as_it_was(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box
) -> None:
    def announced() -> dict[str, tuple[str, str]]:
        subscribed = broker.heartbeats[-1].consumer_data_set[0].subscription_data_set
        return {each.topic: (each.expression_type, each.sub_string) for each in subscribed}

    async with box.consumer() as member:
        broker.refuse(RequestCode.CHECK_CLIENT_CONFIG, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "column 7")
        with pytest.raises(BrokerError, match="column 7"):
            await member.subscribe("T", sql92("a >> 1"))
        await member.subscribe("U", "*")
        assert announced() == {"T": ("TAG", "*"), "U": ("TAG", "*"), "%RETRY%g": ("TAG", "*")}
        del broker.scripts[RequestCode.CHECK_CLIENT_CONFIG]
        await member.subscribe("T", sql92("a > 1"))
        assert announced()["T"] == ("SQL92", "a > 1")


# -- where a queue starts


async def test_an_offset_that_cannot_be_read_is_never_taken_for_none(broker: FakeBroker, box: Box) -> None:
    broker.store("T", 0, b"first")
    broker.refuse(RequestCode.QUERY_CONSUMER_OFFSET, ResponseCode.SYSTEM_ERROR, "busy")
    async with box.consumer(consume_from_where=ConsumeFromWhere.LAST_OFFSET) as member:
        assert member.assignment == ()
        assert any("busy" in problem for problem in member.health().problems)
        assert broker.pulls == []
        del broker.scripts[RequestCode.QUERY_CONSUMER_OFFSET]
        await box.has(1)
    assert box.bodies == [b"first"]


async def test_a_new_group_starts_at_the_end(broker: FakeBroker, box: Box) -> None:
    broker.store_numbers(5)
    broker.refuse(RequestCode.QUERY_CONSUMER_OFFSET, ResponseCode.QUERY_NOT_FOUND)
    broker.on(RequestCode.GET_MAX_OFFSET, lambda frame: offset_answer(frame, 3))
    async with box.consumer(consume_from_where=ConsumeFromWhere.LAST_OFFSET):
        await box.has(2)
    assert box.bodies == [b"3", b"4"]


async def test_an_offset_outside_the_queue_is_corrected_and_stored(broker: FakeBroker, box: Box) -> None:
    broker.store_numbers(6)
    broker.offsets["T", 0] = 100

    def pull(frame: Frame) -> Frame | None:
        answer = broker.pull(frame)
        moved = broker.pulls[-1].queue_offset == 100
        return pull_answer(frame, ResponseCode.PULL_OFFSET_MOVED, 4, 6) if moved else answer

    broker.on(RequestCode.PULL_MESSAGE, pull)
    async with box.consumer():
        await box.has(2)
    assert box.bodies == [b"4", b"5"]
    assert broker.offsets["T", 0] == 6


# -- failing listeners


async def test_a_failed_message_is_sent_back(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.store("T", 0, b"a", b"UNIQ_KEY\x01K1")
    broker.store("T", 0, b"b")

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        context.delay_level = 7
        return ConsumeStatus.RECONSUME_LATER if messages[0].body == b"a" else ConsumeStatus.SUCCESS

    async with push_consumer(namesrv, listener, max_reconsume_times=4):
        await broker.wait_for(lambda: bool(broker.sent_back))
    (header,) = broker.sent_back
    assert (header.offset, header.group, header.delay_level) == (0, "g", 7)
    assert (header.origin_msg_id, header.origin_topic, header.max_reconsume_times) == ("K1", "T", 4)
    assert broker.offsets["T", 0] == 2


@pytest.mark.parametrize(
    ("maximum", "told", "delay"),
    [
        (16, 16, "3"),
        (1, 2, "3"),  # one more retry, as with a send-back; 4.9 would make a dead letter for a maximum of 1
        (0, 0, None),  # a dead letter on 5.x and on 4.9, which would otherwise delay the message
    ],
)
async def test_a_refused_send_back_goes_to_the_retry_topic(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box, maximum: int, told: int, delay: str | None
) -> None:
    namesrv.serve("%RETRY%g", broker, queues=1)
    broker.store("T", 0, b"a", b"UNIQ_KEY\x01K1\x02TAGS\x01A\x02DELAY\x017")
    broker.refuse(RequestCode.CONSUMER_SEND_MSG_BACK, ResponseCode.SYSTEM_ERROR)
    box.status = ConsumeStatus.RECONSUME_LATER
    async with box.consumer(max_reconsume_times=maximum):
        await broker.wait_for(lambda: bool(broker.sent))
    ((header, body),) = broker.sent
    assert (header.topic, body, header.producer_group) == ("%RETRY%g", b"a", "CLIENT_INNER_PRODUCER")
    assert (header.reconsume_times, header.max_reconsume_times) == (1, told)
    properties = decode_properties((header.properties or "").encode())
    assert properties["RETRY_TOPIC"] == "T"
    assert properties["UNIQ_KEY"] == "K1"
    assert (properties.get("DELAY"), properties["TAGS"]) == (delay, "A")
    assert "RECONSUME_TIME" not in properties
    assert broker.offsets["T", 0] == 1


@pytest.mark.parametrize("wrong", [{"delay_level": "soon"}, {"ack_index": "0"}])
async def test_a_context_that_means_nothing_has_the_messages_come_again(
    namesrv: FakeNamesrv, broker: FakeBroker, wrong: dict[str, object]
) -> None:
    broker.store_numbers(2)

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> None:
        for name, value in wrong.items():
            setattr(context, name, value)

    async with push_consumer(namesrv, listener, consume_batch_max_size=2):
        await broker.wait_for(lambda: len(broker.sent_back) == 2)
    assert [header.delay_level for header in broker.sent_back] == [0, 0]
    assert broker.offsets["T", 0] == 2


@pytest.mark.parametrize(("level", "told", "delay"), [(5, 16, "5"), (-1, 0, None)])
async def test_the_retry_topic_is_told_the_delay_level_too(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box, level: int, told: int, delay: str | None
) -> None:
    namesrv.serve("%RETRY%g", broker, queues=1)
    broker.store_numbers(1)
    async with box.consumer() as member:
        await box.has(1)
        broker.refuse(RequestCode.CONSUMER_SEND_MSG_BACK, ResponseCode.SYSTEM_ERROR)
        await member.send_message_back(box.messages[0], level)
        with pytest.raises(ConfigError, match="delay_level"):
            await member.send_message_back(box.messages[0], 19)
    ((header, _),) = broker.sent
    assert (header.reconsume_times, header.max_reconsume_times) == (1, told)
    assert decode_properties((header.properties or "").encode()).get("DELAY") == delay


async def test_a_message_nobody_takes_back_is_consumed_again_here(
    broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrent, "_LOCAL_RETRY_DELAY_S", 0.05)
    broker.store("T", 0, b"a")
    broker.store("T", 0, b"b")
    broker.refuse(RequestCode.CONSUMER_SEND_MSG_BACK, ResponseCode.SYSTEM_ERROR)
    box.status = ConsumeStatus.RECONSUME_LATER
    async with box.consumer(consume_batch_max_size=2) as member:
        await box.has(2)
        box.status = ConsumeStatus.SUCCESS
        await box.has(4)
        assert member.health().queues[-1].committed_offset in (None, 2)
    assert box.bodies == [b"a", b"b", b"a", b"b"]
    assert [message.reconsume_times for message in box.messages[2:]] == [1, 1]
    assert broker.offsets["T", 0] == 2


async def test_a_hanging_listener_does_not_hold_the_queue(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    for body in (b"hangs", b"b", b"c"):
        broker.store("T", 0, body)
    release = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        if messages[0].body == b"hangs":
            await release.wait()

    async with push_consumer(namesrv, listener, consume_timeout_s=0.1, persist_interval_s=0.05):
        await broker.wait_for(lambda: broker.offsets.get(("T", 0)) == 3)
        release.set()
    assert [header.delay_level for header in broker.sent_back] == [3]
    assert broker.offsets["T", 0] == 3


async def test_a_round_sends_back_sixteen_of_a_queue(
    namesrv: FakeNamesrv, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.store_numbers(20)
    handle_overdue = PushSession.handle_overdue
    sent_by_rounds: list[int] = []
    release = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        await release.wait()

    async def one_round(session: PushSession) -> None:
        before = len(broker.sent_back)
        await handle_overdue(session)
        sent_by_rounds.append(len(broker.sent_back) - before)

    monkeypatch.setattr(PushSession, "handle_overdue", one_round)
    async with push_consumer(namesrv, listener, consume_timeout_s=0.3, consume_concurrency=20):
        await broker.wait_for(lambda: sum(sent_by_rounds) == 20)
        release.set()
    assert max(sent_by_rounds) <= 16


async def test_a_broken_body_is_given_out_as_it_is_stored(broker: FakeBroker, box: Box) -> None:
    broker.records["T", 0] = [encode_record("T", b"not zlib", queue_offset=0, sys_flag=0x301)]
    broker.store("T", 0, b"next")
    async with box.consumer():
        await box.has(2)
    assert box.bodies == [b"not zlib", b"next"]
    assert box.messages[0].sys_flag & 1


async def test_a_plain_function_runs_in_threads(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.store_numbers(20)
    seen: list[tuple[bytes, bool]] = []
    done = threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        seen.extend(
            (message.body, threading.current_thread() is threading.main_thread()) for message in messages
        )
        if len(seen) == 20:
            done.set()

    async with push_consumer(namesrv, listener):
        assert await asyncio.to_thread(done.wait, 20)
    assert sorted(seen) == sorted((b"%d" % number, False) for number in range(20))


async def test_concurrency_is_changed_while_threads_run(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.store_numbers(20)
    running, together = threading.Semaphore(0), threading.Barrier(6)

    def listener(messages: list[MessageExt]) -> None:
        running.release()
        together.wait(20)

    async with push_consumer(namesrv, listener, consume_concurrency=2, drain_timeout_s=0.1) as member:
        for _ in range(2):
            assert await asyncio.to_thread(running.acquire, timeout=20)
        for nonsense in (0, 1001):
            with pytest.raises(ConfigError, match="1 to 1000"):
                member.set_concurrency(nonsense)
        member.set_concurrency(6)
        for _ in range(4):
            assert await asyncio.to_thread(running.acquire, timeout=20)
        header = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id="c")
        answer = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        told = ConsumerRunningInfo.decode(answer.body).properties
        assert told["PROP_THREADPOOL_CORE_SIZE"] == "6"
        together.abort()


async def test_a_message_says_where_its_queue_was_and_when_its_call_began(
    broker: FakeBroker, box: Box
) -> None:
    broker.store_numbers(3)
    before = int(time.time() * 1000)
    async with box.consumer():
        await box.has(3)
    assert {(each.properties["MIN_OFFSET"], each.properties["MAX_OFFSET"]) for each in box.messages} == {
        ("0", "3")
    }
    for each in box.messages:
        assert before <= int(each.properties["CONSUME_START_TIME"]) <= time.time() * 1000
        assert not each.user_properties


async def test_a_strategy_that_fails_is_named_and_nothing_is_given_up(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    class Mine:
        name = "MINE"
        fails = False

        def allocate(
            self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
        ) -> list[MessageQueue]:
            if self.fails:
                raise RuntimeError("a bug")
            return list(queues[-1:])

    namesrv.serve("T", broker, queues=2)
    strategy = Mine()
    async with push_consumer(namesrv, ignore, allocate_strategy=strategy) as member:
        assert member.assignment == (MessageQueue("T", "broker-a", 1),)
        strategy.fails = True
        await member.rebalance()
        assert any("a bug" in problem for problem in member.health().problems)
        assert member.assignment == (MessageQueue("T", "broker-a", 1),)
        strategy.fails = False
        await member.rebalance()
        assert member.health().ok


# -- pace


async def test_a_slow_listener_stops_the_pulling(broker: FakeBroker, box: Box) -> None:
    broker.store_numbers(100)
    box.open.clear()
    limits = FlowLimits(max_count=20)
    async with box.consumer(pull_batch_size=10, flow_limits=limits, consume_concurrency=2) as member:
        await broker.wait_for(lambda: len(broker.pulls) == 3)
        await asyncio.sleep(0.05)
        assert len(broker.pulls) == 3
        (queue,) = member.health().queues
        assert queue.held_count == 30
        assert queue.waiting == "30 messages held, limit 20"
        assert member.health().ok
        box.open.set()
        await box.has(100)
    assert sorted(box.bodies, key=int) == [b"%d" % number for number in range(100)]


async def test_suspend_and_resume(broker: FakeBroker, box: Box) -> None:
    broker.store("T", 0, b"a")

    def moved(frame: Frame) -> Frame | None:
        # Respond immediately, like a broker whose long poll has ended.
        return broker.pull(frame) or pull_answer(frame, ResponseCode.PULL_NOT_FOUND, 1, 1)

    broker.on(RequestCode.PULL_MESSAGE, moved)
    async with box.consumer(pull_interval_s=0.01) as member:
        await box.has(1)
        member.suspend()
        await until(lambda: member.health().queues[0].waiting == "suspended")
        broker.store("T", 0, b"b")
        pulls = len(broker.pulls)
        await asyncio.sleep(0.05)
        assert len(broker.pulls) == pulls
        member.resume()
        await box.has(2)


# -- what brokers ask


async def test_a_new_member_is_noticed_at_once(namesrv: FakeNamesrv, broker: FakeBroker, box: Box) -> None:
    namesrv.serve("T", broker, queues=4)
    async with box.consumer() as member:
        assert len(member.assignment) == 4
        broker.members = sorted([member.client.client_id, "~another"])
        notice = ConsumerGroupRequestHeader(consumer_group="g")
        broker.connections[-1].oneway(Frame.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, notice))
        await until(lambda: len(member.assignment) == 2)
        assert [queue.queue_id for queue in member.assignment] == [0, 1]


async def test_an_administrator_moves_the_offsets(broker: FakeBroker, box: Box) -> None:
    broker.store_numbers(5)
    async with box.consumer():
        await box.has(5)
        header = ResetOffsetRequestHeader(topic="T", group="g", timestamp=0, is_force=True)
        body = ResetOffsetBody(offset_table={QUEUE: 3}).encode()
        assert (await broker.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, body)).code == 0
        await box.has(7)
    assert box.bodies == [b"0", b"1", b"2", b"3", b"4", b"3", b"4"]
    assert broker.offsets["T", 0] == 5


async def test_brokers_are_told_what_they_ask(broker: FakeBroker, box: Box) -> None:
    broker.store("T", 0, b"a")
    async with box.consumer() as member:
        await box.has(1)
        client_id = member.client.client_id
        info_header = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id=client_id)
        info = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, info_header)
        running = ConsumerRunningInfo.decode(info.body)
        assert running.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert running.mq_table[QUEUE].cached_msg_count == 0
        assert {subscription.topic for subscription in running.subscription_set} == {"T", "%RETRY%g"}

        status_header = GroupTopicRequestHeader(topic="T", group="g")
        status = await broker.ask(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, status_header)
        assert GetConsumerStatusBody.decode(status.body).message_queue_table == {QUEUE: 1}

        direct_header = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id=client_id)
        record = encode_record("T", b"by hand")
        direct = await broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, direct_header, record)
        assert ConsumeMessageDirectlyResult.decode(direct.body).consume_result == "CR_SUCCESS"
        assert box.bodies == [b"a", b"by hand"]

        other = GetConsumerRunningInfoRequestHeader(consumer_group="other", client_id=client_id)
        refused = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, other)
        assert refused.code == ResponseCode.SYSTEM_ERROR


# -- connections


async def test_a_lost_connection_is_made_again_and_announced(broker: FakeBroker, box: Box) -> None:
    broker.store("T", 0, b"a")
    async with box.consumer():
        await box.has(1)
        beats = len(broker.heartbeats)
        broker.connections[-1].abort()
        broker.store("T", 0, b"b")
        await box.has(2)
        await broker.wait_for(lambda: len(broker.heartbeats) > beats)
    assert box.bodies == [b"a", b"b"]


async def test_a_broker_that_forgot_us_is_told_again_before_we_give_up(broker: FakeBroker, box: Box) -> None:
    async with box.consumer() as member:
        await broker.wait_for(lambda: bool(broker.pulls))
        beats = len(broker.heartbeats)
        broker.members = ["somebody-else"]
        await member.rebalance()
        assert not member.health().ok
        await broker.wait_for(lambda: len(broker.heartbeats) > beats)
        await member.rebalance()
        assert member.health().ok
        assert len(broker.pulls) == 1  # the pull of a revoked queue would be repeated


async def test_a_member_the_broker_refuses_to_list_gives_its_queues_up(broker: FakeBroker, box: Box) -> None:
    async with box.consumer() as member:
        broker.on(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            lambda frame: frame.response(0, body=ConsumerList(consumer_id_list=["other"]).encode()),
        )
        await member.rebalance()
        await member.rebalance()
        assert member.assignment == ()


async def test_subscriptions_change_while_running(namesrv: FakeNamesrv, broker: FakeBroker, box: Box) -> None:
    namesrv.serve("U", broker, queues=1)
    broker.store("U", 0, b"of U")
    async with box.consumer() as member:
        await member.subscribe("U", "*")
        await box.has(1)
        assert {queue.topic for queue in member.assignment} == {"T", "U"}
        topics = {s.topic for s in broker.heartbeats[-1].consumer_data_set[0].subscription_data_set}
        assert topics == {"T", "U", "%RETRY%g"}
        await member.unsubscribe("U")
        await member.rebalance()
        assert {queue.topic for queue in member.assignment} == {"T"}

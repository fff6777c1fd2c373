"""Tests of orderly consuming: one call per queue, the locks around it, and the effect of a lost lock."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.client.fakes import push_consumer
from tests.kit.fakes import FakeBroker, FakeNamesrv, pull_answer
from tests.kit.waiting import until

from cometmq import (
    MessageExt,
    MessageModel,
    MessageQueue,
    OrderlyContext,
    OrderlyStatus,
    PushConsumer,
    PushOptions,
)
from cometmq.client.consumer import orderly, orderly_queue, queue_locks
from cometmq.clock import boottime
from cometmq.errors import ConfigError
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerList,
    ConsumerRunningInfo,
    ResetOffsetBody,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumeMessageDirectlyRequestHeader,
    ConsumerGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    PullMessageRequestHeader,
    ResetOffsetRequestHeader,
)
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.one import encode_record

QUEUE = MessageQueue("T", "broker-a", 0)
OK, AGAIN = OrderlyStatus.SUCCESS, OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
COMMIT, ROLLBACK = OrderlyStatus.COMMIT, OrderlyStatus.ROLLBACK
CODE = RequestCode


class Desk:
    """An orderly listener that records its calls and returns scripted results."""

    def __init__(self, namesrv: FakeNamesrv) -> None:
        self.namesrv = namesrv
        self.calls: list[MessageExt] = []
        self.tries: list[int] = []
        self.ended = 0
        self.answers: list[OrderlyStatus | Exception] = []
        """Results of the first calls; every later call returns `answer`."""
        self.answer = OK
        self.auto_commit = True
        self.open = asyncio.Event()
        self.open.set()
        self._news = asyncio.Event()

    async def __call__(self, messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
        assert context.queue.queue_id == messages[0].queue_id
        self.calls += messages
        self.tries += [message.reconsume_times for message in messages]
        self._news.set()
        await self.open.wait()
        self.ended += 1
        self._news.set()
        context.auto_commit = self.auto_commit
        answer = self.answers.pop(0) if self.answers else self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def offsets(self) -> list[int]:
        return [message.queue_offset for message in self.calls]

    def member(self, **options: object) -> PushConsumer:
        settings = {"suspend_current_queue_s": 0.01, **options}
        return push_consumer(self.namesrv, self, orderly=True, **settings)

    async def has(self, count: int) -> None:
        await self.until(lambda: len(self.calls) >= count)

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not check():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def desk(namesrv: FakeNamesrv) -> Desk:
    return Desk(namesrv)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew locks every 20 ms and let them expire after 200 ms."""
    monkeypatch.setattr(queue_locks, "RENEW_INTERVAL_S", 0.02)
    monkeypatch.setattr(queue_locks, "RETRY_INTERVAL_S", 0.02)
    monkeypatch.setattr(orderly_queue, "LOCK_LIVE_S", 0.2)


def held_requests(broker: FakeBroker) -> list[int]:
    """Return the codes of the requests about locks, offsets and unregistration."""
    codes = (CODE.LOCK_BATCH_MQ, CODE.UPDATE_CONSUMER_OFFSET, CODE.UNLOCK_BATCH_MQ, CODE.UNREGISTER_CLIENT)
    return [code for code in broker.requests if code in codes]


@pytest.mark.parametrize("wrong", ["soon", math.nan])
async def test_a_suspension_that_is_no_time_is_the_usual_one(
    namesrv: FakeNamesrv, broker: FakeBroker, wrong: Any
) -> None:
    broker.store_numbers(1)
    calls = asyncio.Semaphore(0)

    async def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
        context.suspend_current_queue_s = wrong
        calls.release()
        return AGAIN

    async with (
        asyncio.timeout(60),
        push_consumer(namesrv, listener, orderly=True, suspend_current_queue_s=0.01),
    ):
        for _ in range(3):
            await calls.acquire()


# -- one after another


async def test_queues_are_consumed_side_by_side_and_each_in_order(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.serve("T", broker, queues=4)
    for number in range(80):
        broker.store("T", number % 4, b"x")
    busy: Counter[int] = Counter()
    most = 0
    came: list[tuple[int, int]] = []
    done = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        nonlocal most
        (message,) = messages
        busy[message.queue_id] += 1
        assert busy[message.queue_id] == 1
        most = max(most, busy.total())
        await asyncio.sleep(0.001)
        busy[message.queue_id] -= 1
        came.append((message.queue_id, message.queue_offset))
        if len(came) == 80:
            done.set()

    async with push_consumer(namesrv, listener, orderly=True, pull_batch_size=3), asyncio.timeout(60):
        await done.wait()
    assert most == 4
    for queue_id in range(4):
        assert [offset for queue, offset in came if queue == queue_id] == list(range(20))
    assert broker.offsets == {("T", queue_id): 20 for queue_id in range(4)}
    # An offset committed with a pull could arrive after the final offset that is stored when the queue is
    # released.
    assert all(pull.sys_flag & 1 == 0 for pull in broker.pulls)


def test_order_and_broadcasting_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="CLUSTERING with orderly=True") as caught:
        PushOptions(orderly=True, message_model=MessageModel.BROADCASTING)
    assert caught.value.key == "message_model"


@pytest.mark.parametrize("failure", [AGAIN, RuntimeError("not now"), ROLLBACK])
async def test_nothing_overtakes_a_failed_message(
    broker: FakeBroker, desk: Desk, failure: OrderlyStatus | Exception
) -> None:
    broker.store_numbers(3)
    desk.answers = [OK, failure, failure]
    async with desk.member() as member:
        await desk.until(lambda: desk.ended == 5)
        assert member.health().failed == 2
    assert desk.offsets == [0, 1, 1, 1, 2]
    assert broker.offsets["T", 0] == 3
    assert broker.sent_back == []


async def test_an_async_call_that_takes_too_long_is_cancelled(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(2)
    desk.open.clear()
    async with desk.member(consume_timeout_s=0.05) as member:
        await desk.has(2)
        desk.open.set()
        await desk.until(lambda: desk.ended == 2)
        assert "longer than 0.05 s" in str(member.health().last_error)
    assert desk.offsets == sorted(desk.offsets)
    assert desk.tries[:2] == [0, 1]


async def test_a_plain_call_that_takes_too_long_is_named_and_waited_for(
    namesrv: FakeNamesrv, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.store_numbers(2)
    go_on, offsets = threading.Event(), []

    def listener(messages: list[MessageExt]) -> None:
        offsets.append(messages[0].queue_offset)
        go_on.wait(30)

    member = push_consumer(namesrv, listener, orderly=True, consume_timeout_s=0.05, stall_after_s=0.05)
    async with asyncio.timeout(20), member:
        await until(lambda: "T@broker-a:0 from offset 0 has run for more than 0.05 s" in caplog.text)
        await until(lambda: not member.health().ok)
        assert any("no progress with 2 held messages" in problem for problem in member.health().problems)
        assert offsets == [0]
        go_on.set()
        await until(lambda: len(offsets) >= 2)
    assert offsets == [0, 1]


async def test_tries_are_counted_and_a_batch_stays_together(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(4)
    desk.answers = [AGAIN]
    async with desk.member(consume_batch_max_size=3):
        await desk.until(lambda: desk.ended == 3)
    assert desk.offsets == [0, 1, 2, 0, 1, 2, 3]
    assert desk.tries == [0, 0, 0, 1, 1, 1, 0]


async def test_the_context_says_how_long_the_queue_rests(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.store_numbers(1)
    times: list[float] = []
    done = asyncio.Event()

    async def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
        times.append(asyncio.get_running_loop().time())
        context.suspend_current_queue_s = 0.15 if len(times) == 1 else None
        if len(times) == 3:
            done.set()
        return AGAIN

    async with (
        push_consumer(namesrv, listener, orderly=True, suspend_current_queue_s=0.3),
        asyncio.timeout(60),
    ):
        await done.wait()
    assert 0.15 <= times[1] - times[0] < 0.3 <= times[2] - times[1]


async def test_a_listener_without_auto_commit_commits_and_rolls_back(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(6)
    desk.auto_commit = False
    desk.answers = [OK, COMMIT, OK, OK, ROLLBACK, OK, OK, COMMIT]
    async with desk.member() as member:
        await desk.until(lambda: desk.ended == 9)
        await member.persist_offsets()
        assert broker.offsets["T", 0] == 5
    assert desk.offsets == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert broker.offsets["T", 0] == 5  # the last message was not committed


async def test_a_message_that_failed_often_enough_becomes_a_dead_letter(
    namesrv: FakeNamesrv, broker: FakeBroker, desk: Desk
) -> None:
    namesrv.serve("%RETRY%g", broker, queues=1)
    broker.store("T", 0, b"bad", b"UNIQ_KEY\x01K1\x02TAGS\x01A\x02DELAY\x013")
    broker.store("T", 0, b"good")
    desk.answers = [AGAIN, AGAIN, AGAIN, AGAIN]
    refusals = [0]

    def refuse_once(frame: Frame) -> Frame | None:
        refusals[0] += 1
        return (
            frame.response(ResponseCode.MESSAGE_ILLEGAL, "no") if refusals[0] == 1 else broker.answer(frame)
        )

    broker.on(CODE.SEND_MESSAGE_V2, refuse_once)
    async with desk.member(max_reconsume_times=2):
        await desk.until(lambda: desk.ended == 5)
    assert [message.body for message in desk.calls] == [b"bad"] * 4 + [b"good"]
    ((header, body),) = broker.sent
    assert (header.topic, body, header.producer_group) == ("%RETRY%g", b"bad", "CLIENT_INNER_PRODUCER")
    # The count makes a dead letter of the message in 4.9 (count >= limit) and in 5.x (count > limit).
    assert (header.reconsume_times, header.max_reconsume_times) == (4, 2)
    properties = decode_properties((header.properties or "").encode())
    assert (properties["RETRY_TOPIC"], properties["UNIQ_KEY"], properties["TAGS"]) == ("T", "K1", "A")
    assert "DELAY" not in properties
    assert broker.offsets["T", 0] == 2


async def test_without_a_limit_a_message_is_tried_for_ever(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(2)
    desk.answer = AGAIN
    async with desk.member(consume_timeout_s=0.01):
        await desk.has(25)
        assert broker.sent == broker.sent_back == []
        desk.answer = OK
        await desk.until(lambda: desk.offsets[-1] == 1)
    assert desk.calls[0].reconsume_times >= 24


# -- locks


async def test_a_queue_is_pulled_only_when_it_is_locked(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(1)
    broker.not_ours = {QUEUE}
    async with desk.member() as member:
        assert QUEUE not in member.assignment
        assert "T: no lock yet for 1 queues" in member.health().problems[0]
        assert broker.pulls == []
        broker.not_ours = set()
        await member.rebalance()
        await desk.has(1)
        assert member.health().ok
        assert QUEUE in broker.locked
    assert broker.locked == set()


async def test_a_member_leaves_only_when_its_call_ended_and_its_offset_is_stored(
    broker: FakeBroker, desk: Desk
) -> None:
    broker.store_numbers(3)
    desk.open.clear()
    async with desk.member() as member:
        await desk.has(1)
        broker.requests.clear()
        broker.on(CODE.GET_CONSUMER_LIST_BY_GROUP, lambda frame: member_list(frame, "~0", "~1"))
        await member.rebalance()
        await member.rebalance()
        assert member.assignment == ()
        assert QUEUE in broker.locked  # the listener is running
        del broker.scripts[CODE.GET_CONSUMER_LIST_BY_GROUP]
        await member.rebalance()
        assert QUEUE not in member.assignment  # a dropped queue is not locked again by its former owner
        desk.open.set()
        await broker.wait_for(lambda: CODE.UNLOCK_BATCH_MQ in broker.requests)
        assert [code for code in held_requests(broker) if code != CODE.LOCK_BATCH_MQ] == [
            CODE.UPDATE_CONSUMER_OFFSET,
            CODE.UNLOCK_BATCH_MQ,
        ]
        assert broker.offsets["T", 0] == 1
        await member.rebalance()
        await desk.until(lambda: desk.ended == 3)
    assert desk.offsets == [0, 1, 2]


def member_list(frame: Frame, *ids: str) -> Frame:
    return frame.response(0, body=ConsumerList(consumer_id_list=list(ids)).encode())


async def test_a_stop_stores_then_unlocks_then_says_goodbye(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(1)
    async with desk.member():
        await desk.until(lambda: desk.ended == 1)
    requests = held_requests(broker)
    assert requests[-3:] == [CODE.UPDATE_CONSUMER_OFFSET, CODE.UNLOCK_BATCH_MQ, CODE.UNREGISTER_CLIENT]


async def test_a_call_that_outlasts_the_stop_keeps_its_queue_locked(
    namesrv: FakeNamesrv, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    namesrv.serve("T", broker, queues=2)
    broker.store("T", 0, b"x")
    begun, go_on = threading.Event(), threading.Event()

    def in_a_thread(messages: list[MessageExt]) -> None:
        begun.set()
        go_on.wait(20)

    async with push_consumer(namesrv, in_a_thread, orderly=True, drain_timeout_s=0.01):
        assert await asyncio.to_thread(begun.wait, 20)
    assert broker.locked == {QUEUE}
    assert "1 queues stay locked" in caplog.text
    go_on.set()


@pytest.mark.usefixtures("quick")
async def test_a_lost_lock_ends_the_queue_and_what_its_call_says_later(
    broker: FakeBroker, desk: Desk
) -> None:
    broker.store_numbers(3)
    desk.open.clear()
    async with desk.member() as member:
        await desk.has(1)
        broker.offsets["T", 0] = 2  # as if another member had consumed them
        broker.not_ours = {QUEUE}
        await until(lambda: QUEUE not in member.assignment)
        broker.not_ours = set()
        desk.open.set()
        async with asyncio.timeout(60):
            while QUEUE not in member.assignment:
                await asyncio.sleep(0.01)
                await member.rebalance()
        await desk.until(lambda: desk.ended == 2)
    assert desk.offsets == [0, 2]
    assert broker.offsets["T", 0] == 3


@pytest.mark.usefixtures("quick")
async def test_a_lock_that_cannot_be_renewed_runs_out(broker: FakeBroker, desk: Desk) -> None:
    broker.store_numbers(40)
    desk.answer = AGAIN
    async with desk.member() as member:
        await desk.has(3)
        broker.refuse(CODE.LOCK_BATCH_MQ, ResponseCode.SYSTEM_ERROR, "out of order")
        await until(lambda: QUEUE not in member.assignment)
        calls = len(desk.calls)
        await member.rebalance()
        await asyncio.sleep(0.1)
        assert len(desk.calls) == calls
        del broker.scripts[CODE.LOCK_BATCH_MQ]
        await member.rebalance()
        await desk.has(calls + 1)


@pytest.mark.parametrize("asleep_in", ["a call", "the pause after one", "idleness"])
async def test_what_slept_through_its_lock_begins_nothing_and_stores_nothing(
    broker: FakeBroker, desk: Desk, monkeypatch: pytest.MonkeyPatch, asleep_in: str
) -> None:
    """The event loop's clock stops during the sleep, and another member owns the queue afterwards."""
    slept_s = [0.0]
    monkeypatch.setattr(queue_locks, "boottime", lambda: boottime() + slept_s[0])
    broker.store_numbers(1)
    if asleep_in == "a call":
        desk.open.clear()
    if asleep_in == "the pause after one":
        desk.answers = [AGAIN]
    persist_s = 0.1 if asleep_in == "idleness" else 60.0
    async with desk.member(suspend_current_queue_s=0.05, persist_interval_s=persist_s) as member:
        await desk.has(1)
        broker.offsets["T", 0] = 2  # the other member has consumed two messages
        broker.not_ours = {QUEUE}
        slept_s[0] = 31.0
        desk.open.set()
        await desk.until(lambda: desk.ended == 1)
        if asleep_in == "a call":
            await member.persist_offsets()
        await until(lambda: QUEUE not in member.assignment)
        await member.persist_offsets()
        assert (desk.offsets, broker.offsets["T", 0]) == ([0], 2)
        broker.not_ours = set()
        broker.store_numbers(2)
        async with asyncio.timeout(60):
            while QUEUE not in member.assignment:
                await member.rebalance()
                await asyncio.sleep(0.01)
        await desk.has(2)
    assert desk.offsets == [0, 2]


@pytest.mark.usefixtures("quick")
async def test_locks_are_renewed_while_a_listener_runs_and_after_a_notice(
    broker: FakeBroker, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orderly_queue, "LOCK_LIVE_S", 60.0)
    broker.store_numbers(2)
    desk.open.clear()
    async with desk.member() as member:
        await desk.has(1)
        before = broker.requests.count(CODE.LOCK_BATCH_MQ)
        await broker.wait_for(lambda: broker.requests.count(CODE.LOCK_BATCH_MQ) > before + 15)
        monkeypatch.setattr(queue_locks, "RENEW_INTERVAL_S", 60.0)
        await asyncio.sleep(0.05)
        seen = broker.requests.count(CODE.LOCK_BATCH_MQ)
        header = ConsumerGroupRequestHeader(consumer_group="g")
        broker.connections[-1].oneway(Frame.request(CODE.NOTIFY_CONSUMER_IDS_CHANGED, header))
        await broker.wait_for(lambda: broker.requests.count(CODE.LOCK_BATCH_MQ) > seen)
        desk.open.set()
        await desk.until(lambda: desk.ended == 2)
        assert QUEUE in member.assignment
    assert desk.offsets == [0, 1]


async def test_after_a_lost_connection_nothing_begins_before_the_broker_has_confirmed_the_locks(
    broker: FakeBroker, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted broker has lost its lock table."""
    monkeypatch.setattr(orderly, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(queue_locks, "RETRY_INTERVAL_S", 0.01)
    broker.store_numbers(3)
    desk.open.clear()
    async with desk.member() as member:
        await desk.has(1)
        broker.refuse(CODE.LOCK_BATCH_MQ, ResponseCode.SYSTEM_BUSY)
        before = len(broker.connections)
        broker.connections[-1].close()
        await broker.wait_for(lambda: len(broker.connections) > before)
        desk.open.set()
        seen = broker.requests.count(CODE.LOCK_BATCH_MQ)
        await broker.wait_for(lambda: broker.requests.count(CODE.LOCK_BATCH_MQ) > seen + 3)
        assert desk.offsets == [0]
        del broker.scripts[CODE.LOCK_BATCH_MQ]
        await desk.until(lambda: desk.ended == 3)
        assert QUEUE in member.assignment
    assert desk.offsets == [0, 1, 2]


async def test_a_lock_for_a_queue_that_cannot_be_begun_is_given_back(broker: FakeBroker, desk: Desk) -> None:
    broker.refuse(CODE.QUERY_CONSUMER_OFFSET, ResponseCode.SYSTEM_ERROR, "busy")
    async with desk.member():
        await broker.wait_for(lambda: CODE.UNLOCK_BATCH_MQ in broker.requests)
        assert broker.locked == set()


# -- what administrators ask


async def test_a_reset_waits_for_the_running_call_and_forgets_its_answer(
    broker: FakeBroker, desk: Desk
) -> None:
    broker.store_numbers(9)
    desk.open.clear()
    async with desk.member() as member:
        await desk.has(1)
        header = ResetOffsetRequestHeader(topic="T", group="g", timestamp=0, is_force=True)
        body = ResetOffsetBody(offset_table={QUEUE: 7}).encode()
        assert (await broker.ask(CODE.RESET_CONSUMER_CLIENT_OFFSET, header, body)).code == 0
        await member.rebalance()
        assert desk.offsets == [0]
        desk.open.set()
        await desk.until(lambda: desk.ended == 3)
    assert desk.offsets == [0, 7, 8]
    assert broker.offsets["T", 0] == 9


async def test_an_offset_outside_the_queue_is_corrected_when_the_running_call_has_ended(
    broker: FakeBroker, desk: Desk
) -> None:
    """This happens when the topic is purged while the first message is being handled."""
    broker.store_numbers(9)

    def purged(frame: Frame) -> Frame | None:
        if frame.header(PullMessageRequestHeader).queue_offset == 1:
            return pull_answer(frame, ResponseCode.PULL_OFFSET_MOVED, 7, 9)
        return broker.pull(frame)

    broker.on(CODE.PULL_MESSAGE, purged)
    desk.open.clear()
    async with desk.member(pull_batch_size=1) as member:
        await desk.has(1)
        await broker.wait_for(lambda: broker.offsets.get(("T", 0)) == 7)
        await member.rebalance()
        assert desk.offsets == [0]
        desk.open.set()
        await desk.until(lambda: desk.ended == 3)
    assert desk.offsets == [0, 7, 8]
    assert broker.offsets["T", 0] == 9


@pytest.mark.parametrize(
    ("answer", "result"),
    [(OK, "CR_SUCCESS"), (COMMIT, "CR_COMMIT"), (ROLLBACK, "CR_ROLLBACK"), (AGAIN, "CR_LATER")],
)
async def test_a_message_is_consumed_on_request(
    broker: FakeBroker, desk: Desk, answer: OrderlyStatus, result: str
) -> None:
    desk.answer, desk.auto_commit = answer, answer is OK
    async with desk.member() as member:
        header = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id=member.client.client_id)
        told = await broker.ask(CODE.CONSUME_MESSAGE_DIRECTLY, header, encode_record("T", b"x", b""))
        said = ConsumeMessageDirectlyResult.decode(told.body)
    assert (said.order, said.auto_commit, said.consume_result) == (True, answer is OK, result)


async def test_running_info_shows_order_locks_and_what_waits_for_a_commit(
    broker: FakeBroker, desk: Desk
) -> None:
    broker.store_numbers(3)
    desk.auto_commit = False
    async with desk.member() as member:
        await desk.until(lambda: desk.ended == 3)
        header = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id=member.client.client_id)
        told = await broker.ask(CODE.GET_CONSUMER_RUNNING_INFO, header)
    info = ConsumerRunningInfo.decode(told.body)
    assert info.properties["PROP_CONSUMEORDERLY"] == "true"
    assert info.properties["maxReconsumeTimes"] == "2147483647"
    queue = info.mq_table[QUEUE]
    assert queue.locked
    assert queue.last_lock_timestamp > 1_700_000_000_000
    waiting = (
        queue.transaction_msg_min_offset,
        queue.transaction_msg_max_offset,
        queue.transaction_msg_count,
    )
    assert waiting == (0, 2, 3)

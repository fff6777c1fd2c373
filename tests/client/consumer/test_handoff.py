"""Tests of the handoff of a queue to another member: order of events, waiting, and time limits."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.coming_and_going import Call, check
from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import MessageQueue
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame

QUEUE = MessageQueue("T", "broker-a", 0)


GOOD = [Call(1, b"0", "a/0", 0, True), Call(2, b"1", "a/0", 1, True)]


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        (GOOD, None),
        ([*GOOD, Call(2, b"0", "a/0", 0, True)], "1 handled again, by members {'a/0/0': \\[1, 2\\]}"),
        (GOOD[:1], "1 lost"),
        ([GOOD[0], Call(2, b"1", "a/0", 1)], "1 calls never ended"),
    ],
)
def test_the_checker_finds_what_may_not_be(calls: list[Call], problem: str | None) -> None:
    if problem is None:
        check(calls, [b"0", b"1"])
    else:
        with pytest.raises(AssertionError, match=problem):
            check(calls, [b"0", b"1"])


async def lose_queue(box: Box, broker: FakeBroker) -> None:
    """Let another member join that is assigned the only queue."""
    broker.members = ["!another", *broker.members]


def with_another(broker: FakeBroker, name: str = "~another") -> None:
    """Add a member that holds the queue's lock but, since its name sorts last, is assigned no queue."""
    broker.not_ours.add(QUEUE)

    def beat(frame: Frame) -> Frame | None:
        answer = broker.answer(frame)
        broker.members = sorted([*broker.members, name])
        return answer

    broker.on(RequestCode.HEART_BEAT, beat)


async def test_running_calls_end_and_count_before_the_lock_goes(broker: FakeBroker, box: Box) -> None:
    broker.store_numbers(5)
    box.open.clear()
    async with box.consumer(consume_concurrency=2, rebalance_interval_s=60.0) as member:
        await box.has(2)
        await lose_queue(box, broker)
        await member.rebalance()
        assert member.assignment == ()
        assert QUEUE in broker.locked
        assert broker.offsets == {}
        box.open.set()
        await broker.wait_for(lambda: QUEUE not in broker.locked)
        assert broker.offsets == {("T", 0): 2}
        assert box.bodies == [b"0", b"1"]  # the remaining messages belong to the next member


async def test_a_call_that_takes_too_long_is_not_waited_for(
    broker: FakeBroker, box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    broker.store_numbers(3)
    box.open.clear()
    async with box.consumer(consume_concurrency=1, handover_timeout_s=0.05) as member:
        await box.has(1)
        await lose_queue(box, broker)
        await member.rebalance()
        await broker.wait_for(lambda: QUEUE not in broker.locked)
        assert "their messages are consumed again" in caplog.text
        box.open.set()
        await asyncio.sleep(0.05)
        assert broker.offsets == {}


async def test_the_next_member_waits_for_the_lock_but_not_for_ever(
    broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cometmq.client.consumer.handoff._GRACE_S", 0.1)
    with_another(broker)
    broker.store_numbers(1)
    async with box.consumer(handover_timeout_s=0.2) as member:
        assert member.assignment == ()
        assert any("another member has them" in problem for problem in member.health().problems)
        await box.has(1)
        assert "before another member released them" in caplog.text
        broker.not_ours.clear()
        await member.rebalance()
        assert QUEUE in broker.locked
    assert QUEUE not in broker.locked


async def test_a_lock_that_is_not_answered_is_waited_for(broker: FakeBroker, box: Box) -> None:
    """A refused lock request does not show that the queue is free: another member may still own it."""
    with_another(broker)
    broker.refuse(RequestCode.LOCK_BATCH_MQ, ResponseCode.SYSTEM_BUSY)
    async with box.consumer(handover_timeout_s=60.0) as member:
        assert member.assignment == ()
        broker.not_ours.clear()
        del broker.scripts[RequestCode.LOCK_BATCH_MQ]
        await member.rebalance()
        assert member.assignment == (QUEUE,)


async def test_a_member_whose_connection_was_cut_has_a_moment_to_come_back(
    broker: FakeBroker, namesrv: FakeNamesrv, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.client.consumer.handoff._GRACE_S", 0.3)
    namesrv.serve("T", broker, queues=2)
    with_another(broker)
    broker.not_ours = {other := MessageQueue("T", "broker-a", 1)}
    async with box.consumer(handover_timeout_s=60.0, rebalance_interval_s=60.0) as member:
        assert member.assignment == (QUEUE,)
        broker.members.remove("~another")
        await member.rebalance()
        assert member.assignment == (QUEUE,)
        broker.members.append("~another")
        await member.rebalance()
        assert member.assignment == (QUEUE,)
        broker.members.remove("~another")  # this time the member leaves for good
        broker.store("T", 1, b"left")
        await member.rebalance()
        await box.has(1)
        assert member.assignment == (QUEUE, other)


async def test_a_member_without_queues_waits_for_one_that_was_cut_off(broker: FakeBroker, box: Box) -> None:
    with_another(broker, "!another")
    async with box.consumer(handover_timeout_s=60.0, rebalance_interval_s=60.0) as member:
        assert member.assignment == ()
        broker.members.remove("!another")
        await member.rebalance()
        assert member.assignment == ()
        broker.not_ours.clear()
        await member.rebalance()
        assert member.assignment == (QUEUE,)


async def test_a_queue_that_is_free_is_taken_at_once(broker: FakeBroker, box: Box) -> None:
    with_another(broker)
    broker.store_numbers(1)
    async with box.consumer(handover_timeout_s=60.0) as member:
        assert member.assignment == ()
        broker.not_ours.clear()
        await member.rebalance()
        assert member.assignment == (QUEUE,)
        await box.has(1)


async def test_the_only_member_does_not_wait_at_its_start_for_one_that_died(
    broker: FakeBroker, namesrv: FakeNamesrv, box: Box
) -> None:
    namesrv.serve("%RETRY%g", broker, queues=1)
    broker.not_ours = {QUEUE, MessageQueue("%RETRY%g", "broker-a", 0)}
    broker.store_numbers(1)
    async with box.consumer(handover_timeout_s=60.0) as member:
        assert set(member.assignment) == broker.not_ours
        await box.has(1)


async def test_who_waits_for_nobody_locks_nothing(broker: FakeBroker, box: Box) -> None:
    broker.store_numbers(1)
    async with box.consumer(handover_timeout_s=0):
        await box.has(1)
    assert RequestCode.LOCK_BATCH_MQ not in broker.requests


async def test_a_queue_that_comes_back_while_it_is_given_up_is_taken_up_anew(
    broker: FakeBroker, box: Box, namesrv: FakeNamesrv
) -> None:
    broker.store_numbers(3)
    box.open.clear()
    async with box.consumer(consume_concurrency=1, handover_timeout_s=60.0) as member:
        await box.has(1)
        await lose_queue(box, broker)
        await member.rebalance()
        broker.members.remove("!another")
        await member.rebalance()
        assert member.assignment == ()
        box.open.set()
        await box.has(3)
    assert box.bodies == [b"0", b"1", b"2"]
    assert broker.offsets == {("T", 0): 3}

"""Statistics that a consumer reports: rates over the last minute, failures over the last hour."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import ConsumeFromWhere, MessageExt, MessageStream, PushConsumer, PushOptions
from cometmq.client.consumer import push_session
from cometmq.client.group.statistics import Statistics
from cometmq.protocol.bodies import ConsumerRunningInfo, ConsumeStatus
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import GetConsumerRunningInfoRequestHeader


@pytest.fixture
def stats() -> Statistics:
    return Statistics()


def work(stats: Statistics, done: int = 0, failed: int = 0) -> None:
    """Simulate ten seconds of work with a pull and a listener call of half a second each."""
    topic = stats.of("T")
    if done or failed:
        topic.pulled(done + failed, 0.5)
    for count, was_done in ((done, True), (failed, False)):
        if count:
            topic.handled(count, 0.5, done=was_done)
    stats.sample()


def test_before_the_first_sample_nothing_is_known(stats: Statistics) -> None:
    stats.of("T").pulled(5, 1.0)
    assert stats.table() == {"T": ConsumeStatus()}


def test_rates_are_those_of_the_last_minute(stats: Statistics) -> None:
    work(stats, done=1000)  # happened before the reported minute
    for _ in range(6):
        work(stats, done=40, failed=20)
    assert stats.table() == {
        "T": ConsumeStatus(
            pull_rt=500.0,
            pull_tps=6.0,
            consume_rt=500.0,
            consume_ok_tps=4.0,
            consume_failed_tps=2.0,
            consume_failed_msgs=120,
        )
    }


def test_a_young_consumer_counts_what_there_is(stats: Statistics) -> None:
    work(stats, done=40)
    work(stats)
    assert stats.of("T").status().consume_ok_tps == 2.0


def test_after_a_quiet_minute_times_and_failures_are_of_the_hour(stats: Statistics) -> None:
    work(stats, failed=7)
    for _ in range(359):
        work(stats)
    status = stats.of("T").status()
    assert (status.consume_rt, status.consume_failed_tps, status.consume_failed_msgs) == (500.0, 0.0, 7)
    work(stats)
    status = stats.of("T").status()
    assert (status.consume_rt, status.consume_failed_msgs) == (0.0, 0)


@pytest.mark.parametrize("kind", ["push", "stream"])
async def test_administrators_are_told_how_fast_topics_are_consumed(
    namesrv: FakeNamesrv, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(push_session, "SAMPLE_S", 0.01)
    broker.store_numbers(3)
    failing = [b"1"]

    async def listener(messages: list[MessageExt]) -> None:
        if messages[0].body in failing:
            raise ValueError("not this one")

    async def status(member: PushConsumer) -> ConsumeStatus:
        header = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id="c")
        answer = await broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        return ConsumerRunningInfo.decode(answer.body).status_table["T"]

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    consumer: PushConsumer = PushConsumer("g", listener, "T", namesrv=namesrv.addr, options=options)
    if kind == "stream":
        consumer = MessageStream("g", "T", namesrv=namesrv.addr, options=options)
    async with asyncio.timeout(60), consumer as member:
        if isinstance(member, MessageStream):
            for _ in range(3):
                message = await anext(member)
                await (member.nack if message.body in failing else member.ack)(message)
        while not (told := await status(member)).consume_failed_msgs or not told.consume_ok_tps:
            await asyncio.sleep(0.01)
    assert told.consume_failed_msgs == 1
    assert 0 < told.pull_rt < 20_000
    assert 0 < told.consume_rt < 20_000
    assert told.pull_tps > told.consume_failed_tps > 0

"""Tests of the pull consumer: reading ahead, consumed positions, and refusals by a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv, pull_answer
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    PullConsumer,
    PullOptions,
    sql92,
)
from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.consumer import queue_puller
from cometmq.client.pull import reading_ahead
from cometmq.errors import BrokerError, ClientStateError
from cometmq.message import PullResult
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.testing import LocalBroker

QUEUE = MessageQueue("T", "broker-a", 0)
OTHER = MessageQueue("T", "broker-a", 1)


@pytest.fixture
async def consumer(broker: FakeBroker, namesrv: FakeNamesrv) -> AsyncIterator[PullConsumer]:
    namesrv.serve("T", broker, queues=2)
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, pull_batch_size=4)
    async with PullConsumer("g", namesrv=namesrv.addr, options=options) as running:
        yield running


def store(broker: FakeBroker, *bodies: bytes, queue_id: int = 0, tags: str = "") -> None:
    for body in bodies:
        broker.store("T", queue_id, body, f"TAGS\x01{tags}".encode() if tags else b"")


def texts(messages: list[MessageExt]) -> str:
    return " ".join(message.body.decode() for message in messages)


async def take(consumer: PullConsumer, count: int) -> str:
    got: list[MessageExt] = []
    async for message in consumer:
        got.append(message)
        if len(got) == count:
            break
    return texts(got)


async def test_a_broker_is_asked_once_about_an_expression(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, b"0", b"1")
    for expression in (sql92("a > 1"), sql92("a > 1"), sql92("a > 2"), "tag"):
        await consumer.pull(QUEUE, 0, expression=expression)
    assert broker.requests.count(RequestCode.CHECK_CLIENT_CONFIG) == 2
    assert [(pull.expression_type, pull.subscription) for pull in broker.pulls] == [
        ("SQL92", "a > 1"), ("SQL92", "a > 1"), ("SQL92", "a > 2"), ("TAG", "tag"),
    ]  # fmt: skip


async def test_an_expression_that_a_broker_refuses_is_not_pulled_with(
    consumer: PullConsumer, broker: FakeBroker
) -> None:
    broker.refuse(RequestCode.CHECK_CLIENT_CONFIG, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "column 7")
    for _ in range(2):
        with pytest.raises(BrokerError, match="column 7"):
            await consumer.pull(QUEUE, 0, expression=sql92("a >> 1"))
        with pytest.raises(BrokerError, match="column 7"):
            await consumer.assign([QUEUE], expression=sql92("a >> 1"))
    assert (broker.pulls, consumer.assignment) == ([], ())


async def test_a_poll_says_the_one_before_was_consumed(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, b"0", b"1", b"2", b"3", b"4", b"5")
    await consumer.assign([QUEUE])
    assert texts(await consumer.poll()) == "0 1 2 3"
    assert await consumer.committed(QUEUE) == 0
    assert texts(await consumer.poll()) == "4 5"
    assert await consumer.committed(QUEUE) == 4
    assert await consumer.poll(0.01) == []
    await consumer.commit()
    assert broker.offsets["T", 0] == 6


async def test_an_iteration_counts_message_by_message(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, b"0", b"1", b"2", b"3", b"4", b"5")
    await consumer.assign([QUEUE])
    assert await take(consumer, 2) == "0 1"
    # The message that was returned last may not have been processed yet, so it is not committed.
    assert await consumer.committed(QUEUE) == 1
    assert await take(consumer, 1) == "2"
    assert texts(await consumer.poll()) == "3"
    assert texts(await consumer.poll()) == "4 5"


async def test_seek_forgets_what_was_read_ahead(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, *(b"%d" % number for number in range(10)))
    await consumer.assign([QUEUE])
    got = []
    async for message in consumer:
        got.append(int(message.body))
        if got == [0, 1]:
            await consumer.seek(QUEUE, 7)
        if len(got) == 5:
            break
    assert got == [0, 1, 7, 8, 9]
    await consumer.seek(QUEUE, 3)
    assert await consumer.committed(QUEUE) == 3
    assert texts(await consumer.poll()) == "3 4 5 6"


async def test_seek_stays_within_queue_and_assignment(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, b"0")
    await consumer.assign([QUEUE])
    with pytest.raises(ValueError, match="outside 0 to 1"):
        await consumer.seek(QUEUE, 2)
    with pytest.raises(ClientStateError, match="is not assigned"):
        await consumer.seek(OTHER, 0)


async def test_a_queue_that_goes_during_a_seek_is_not_read_again(
    consumer: PullConsumer, broker: FakeBroker
) -> None:
    store(broker, b"0")
    await consumer.assign([QUEUE])
    seeking = asyncio.create_task(consumer.seek(QUEUE, 0))
    await asyncio.sleep(0)
    await consumer.assign([])
    with pytest.raises(ClientStateError, match="no longer assigned"):
        await seeking
    assert consumer.assignment == ()


async def test_pause_and_resume_ignore_what_is_not_assigned(
    consumer: PullConsumer, broker: FakeBroker
) -> None:
    store(broker, b"0")
    await consumer.assign([QUEUE])
    consumer.pause([OTHER])
    consumer.resume([OTHER, QUEUE])
    assert texts(await consumer.poll()) == "0"


async def test_a_busy_queue_does_not_starve_the_others(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, *(b"busy" for _ in range(1000)))
    store(broker, b"quiet", queue_id=1)
    await consumer.assign([QUEUE, OTHER])
    polled = [texts((await consumer.poll())[:1]) for _ in range(6)]
    assert "quiet" in polled


async def test_a_paused_queue_is_not_read(consumer: PullConsumer, broker: FakeBroker) -> None:
    await consumer.assign([QUEUE, OTHER])
    await broker.wait_for(lambda: len(broker.pulls) == 2)
    consumer.pause([QUEUE])
    # A seek does not resume a paused queue.
    await consumer.seek(QUEUE, 0)
    store(broker, b"paused")
    assert await consumer.poll(0.05) == []
    consumer.resume([QUEUE])
    assert texts(await consumer.poll()) == "paused"


async def test_a_queue_no_longer_assigned_is_given_up(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, b"0", b"1")
    store(broker, b"other", queue_id=1)
    await consumer.assign([QUEUE])
    assert texts(await consumer.poll()) == "0 1"
    consumer.update_offset(QUEUE, 2)
    await consumer.assign([OTHER])
    assert broker.offsets["T", 0] == 2
    assert consumer.assignment == (OTHER,)
    assert texts(await consumer.poll()) == "other"


async def test_tags_are_compared_exactly(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, b"0", b"1", tags="AaAa")
    store(broker, b"2", tags="BBBB")
    result = await consumer.pull(QUEUE, 0, expression="AaAa || C")
    assert texts(result.messages) == "0 1"
    assert result.next_begin_offset == 3
    assert broker.pulls[-1].subscription == "AaAa || C"


@pytest.mark.parametrize("wanted", [0, 2])
@pytest.mark.parametrize("auto_commit", [True, False])
async def test_what_a_filter_leaves_out_is_no_lag(local: LocalBroker, wanted: int, auto_commit: bool) -> None:
    topic = f"Filtered-{wanted}-{auto_commit}"
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, auto_commit=auto_commit)
    async with (
        Producer("p", namesrv=local.namesrv) as producer,
        PullConsumer("filtering", namesrv=local.namesrv, options=options) as consumer,
    ):
        tags = ["a"] * wanted + ["b"] * 40
        queue = (await producer.send(Message(topic, b"0", tags="b"))).queue
        for tag in tags:
            await producer.send(Message(topic, b"x", tags=tag), queue=queue)
        await consumer.assign([queue], expression="a")
        assert len(await consumer.poll(1.0)) == wanted
        async with asyncio.timeout(60):
            while (await consumer.lag())[queue]:
                await consumer.commit()
        assert await consumer.committed(queue) == 41 + wanted
        for tag in ("b", "a"):
            await producer.send(Message(topic, b"x", tags=tag), queue=queue)
        assert len(await consumer.poll()) == 1
        assert await consumer.committed(queue) <= 42 + wanted  # excludes the message just returned


async def test_a_refused_pull_is_named_and_tried_again(
    consumer: PullConsumer, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_ahead, "_ERROR_DELAY_S", 0.01)
    store(broker, b"0")
    broker.refuse(RequestCode.PULL_MESSAGE, ResponseCode.NO_PERMISSION, "not you")
    await consumer.assign([QUEUE])
    await broker.wait_for(lambda: broker.requests.count(RequestCode.PULL_MESSAGE) >= 3)
    assert "not you" in consumer.problems[QUEUE]
    del broker.scripts[RequestCode.PULL_MESSAGE]
    assert texts(await consumer.poll()) == "0"
    assert consumer.problems == {}


async def test_a_pull_that_never_comes_back_is_named_and_begun_anew(
    consumer: PullConsumer, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = BrokerApi.pull
    lost = asyncio.Event()

    async def lossy(api: BrokerApi, *args: Any, **given: Any) -> PullResult:
        if not lost.is_set():
            lost.set()
            await asyncio.Event().wait()
        return await pull(api, *args, **given)

    monkeypatch.setattr(BrokerApi, "pull", lossy)
    monkeypatch.setattr(queue_puller, "PULL_MAX_IDLE_S", 0.2)
    monkeypatch.setattr(queue_puller, "_LATE_S", 0.1)
    monkeypatch.setattr(reading_ahead, "_ERROR_DELAY_S", 0.01)
    store(broker, b"0")
    await consumer.assign([QUEUE])
    await until(lambda: any("no answer to a pull" in problem for problem in consumer.health().problems))
    assert texts(await consumer.poll()) == "0"
    assert consumer.health().ok


async def test_health_says_how_far_each_queue_is(consumer: PullConsumer, broker: FakeBroker) -> None:
    assert consumer.health().queues == ()
    store(broker, *(b"%d" % number for number in range(20)))
    await consumer.assign([QUEUE, OTHER])
    await until(lambda: consumer.health().queues[0].waiting is not None)
    first, other = consumer.health().queues
    assert (first.waiting, first.next_offset, first.held_count) == ("2 batches are prefetched", 8, 8)
    assert (other.waiting, other.next_offset, other.held_count, other.problem) == (None, 0, 0, None)
    await consumer.poll()
    await consumer.poll()
    assert consumer.health().queues[0].committed_offset == 4
    consumer.pause([OTHER])
    assert consumer.health().queues[1].waiting == "paused"
    await consumer.stop()
    assert (consumer.health().state, consumer.health().ok) == ("stopped", False)


async def test_an_offset_outside_the_queue_is_corrected(consumer: PullConsumer, broker: FakeBroker) -> None:
    store(broker, *(b"%d" % number for number in range(4)))

    def pull(frame: Frame) -> Frame | None:
        answer = broker.pull(frame)
        moved = broker.pulls[-1].queue_offset == 9
        return pull_answer(frame, ResponseCode.PULL_OFFSET_MOVED, 2, 4) if moved else answer

    broker.on(RequestCode.PULL_MESSAGE, pull)
    broker.offsets["T", 0] = 9
    await consumer.assign([QUEUE])
    assert texts(await consumer.poll()) == "2 3"


async def test_a_cancelled_poll_loses_nothing(consumer: PullConsumer, broker: FakeBroker) -> None:
    await consumer.assign([QUEUE])
    polling = asyncio.create_task(consumer.poll(None))
    await broker.wait_for(lambda: bool(broker.pulls))
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling
    store(broker, b"0")
    await consumer.seek(QUEUE, 0)
    assert texts(await consumer.poll()) == "0"


@pytest.mark.parametrize(("offset", "max_count"), [(-1, 1), (0, 0)])
async def test_nonsense_is_refused(consumer: PullConsumer, offset: int, max_count: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        await consumer.pull(QUEUE, offset, max_count=max_count)


@pytest.mark.parametrize("offset", [-1, 2**63, 1.5, "7"])
async def test_what_is_no_offset_is_not_stored(
    consumer: PullConsumer, broker: FakeBroker, offset: Any
) -> None:
    await consumer.assign([QUEUE, OTHER])
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a valid offset of"):
            await consumer.commit({OTHER: 3, QUEUE: offset})
        with pytest.raises(ValueError, match="is not a valid offset of"):
            consumer.update_offset(QUEUE, offset)
    await consumer.commit()
    assert broker.offsets == {}


async def test_a_stopped_consumer_says_so(consumer: PullConsumer) -> None:
    await consumer.stop()
    await consumer.stop()
    with pytest.raises(ClientStateError):
        await consumer.start()


async def test_whoever_waits_for_a_message_hears_of_the_stop(
    consumer: PullConsumer, broker: FakeBroker
) -> None:
    async def iterate() -> None:
        async for _ in consumer:
            pass

    waiting = [asyncio.create_task(consumer.poll(None)), asyncio.create_task(iterate())]
    await asyncio.sleep(0.05)
    await consumer.stop()
    for task in waiting:
        with pytest.raises(ClientStateError, match="stop"):
            await asyncio.wait_for(task, 60)


async def test_an_assignment_beside_the_stop_leaves_no_reader(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    """A reader that the stop misses would pull forever on a shared client."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(frame: Frame) -> Frame:
        asked.set()
        await go_on.wait()
        return frame.response(ResponseCode.SUCCESS, ext={"offset": "0"})

    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, slowly)
    async with ClientInstance(namesrv.addr) as client:
        consumer = PullConsumer("g", client=client)
        await consumer.start()
        assigning = asyncio.create_task(consumer.assign([QUEUE]))
        await asked.wait()
        await consumer.stop()
        go_on.set()
        await asyncio.gather(assigning, return_exceptions=True)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("cometmq-fetch")]

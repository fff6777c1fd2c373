"""Streams: messages are read with `async for` and acknowledged one by one, in any order, by several tasks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.kit.waiting import until

from cometmq import (
    ClientOptions,
    ClientStateError,
    ConfigError,
    ConsumeFromWhere,
    Consuming,
    FlowLimits,
    Message,
    MessageExt,
    MessageQueue,
    MessageStream,
    Producer,
    PullConsumer,
    PushOptions,
    SyncMessageStream,
    SyncProducer,
)
from cometmq.testing import LocalBroker, local_broker


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that redelivers failed messages after one second."""
    quick = {"messageDelayLevel": " ".join(["1s"] * 18)}
    with local_broker(tmp_path_factory.mktemp("broker"), quick) as running:
        yield running


FIRST = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)


async def fill(local: LocalBroker, topic: str, count: int) -> MessageQueue:
    """Create a queue with the bodies 0, 1, ..."""
    async with Producer("p", namesrv=local.namesrv) as producer:
        queue = (await producer.queues(topic))[0]
        for number in range(count):
            await producer.send(Message(topic, b"%d" % number), queue=queue)
    return queue


def stream_of(local: LocalBroker, topic: str, options: PushOptions = FIRST) -> MessageStream:
    return MessageStream(f"g-{topic}", topic, namesrv=local.namesrv, options=options)


async def take(stream: MessageStream, count: int) -> list[MessageExt]:
    async with asyncio.timeout(60):
        return [await anext(stream) for _ in range(count)]


async def committed(local: LocalBroker, group: str, queue: MessageQueue) -> int | None:
    async with PullConsumer(group, namesrv=local.namesrv) as reader:
        return await reader.committed(queue)


def numbers(messages: list[MessageExt]) -> list[int]:
    return [int(message.body) for message in messages]


async def test_what_is_acknowledged_does_not_come_again(local: LocalBroker) -> None:
    queue = await fill(local, "Streamed", 10)
    got: list[int] = []
    for end in (4, 9):
        async with stream_of(local, "Streamed") as stream, asyncio.timeout(60):
            async for message in stream:
                await stream.ack(message)
                got.append(int(message.body))
                if got[-1] == end:
                    break
            assert stream.health().consumed == 5
    assert got == list(range(10))
    assert await committed(local, "g-Streamed", queue) == 10


async def test_the_offset_stays_behind_what_is_not_acknowledged(local: LocalBroker) -> None:
    queue = await fill(local, "Unordered", 4)
    async with stream_of(local, "Unordered") as stream:
        zero, one, two, three = await take(stream, 4)
        for message, offset in ((two, 0), (zero, 1), (one, 3), (three, 4)):
            await stream.ack(message)
            health = {each.queue: each for each in stream.health().queues}[queue]
            assert health.committed_offset == offset
        await stream.persist_offsets()
    assert await committed(local, "g-Unordered", queue) == 4


async def test_what_was_passed_by_at_the_end_comes_again_alone(local: LocalBroker) -> None:
    """Message 1 is sent back, because 3 was acknowledged; 4 and 5 were not delivered or not acknowledged."""
    queue = await fill(local, "PassedBy", 6)
    async with stream_of(local, "PassedBy") as stream:
        given = await take(stream, 5)
        for message in (given[0], given[2], given[3]):
            await stream.ack(message)
    assert await committed(local, "g-PassedBy", queue) == 4
    async with stream_of(local, "PassedBy") as stream:
        again = await take(stream, 3)
        for message in again:
            await stream.ack(message)
        tries = {int(message.body): message.reconsume_times for message in again}
    assert tries == {4: 0, 5: 0, 1: 1}


async def test_a_refused_message_comes_again_after_its_delay(local: LocalBroker) -> None:
    await fill(local, "Refused", 1)
    async with stream_of(local, "Refused") as stream:
        (message,) = await take(stream, 1)
        await stream.nack(message, delay_level=1)
        (again,) = await take(stream, 1)
        await stream.ack(again)
        assert (again.topic, again.msg_id, again.reconsume_times) == ("Refused", message.msg_id, 1)
        assert again.store_timestamp_ms - message.store_timestamp_ms >= 900
        assert (stream.health().failed, stream.health().consumed) == (1, 1)


async def test_who_does_not_acknowledge_is_pulled_no_further(local: LocalBroker) -> None:
    queue = await fill(local, "Slow", 200)
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        pull_batch_size=8,
        flow_limits=FlowLimits(max_count=10),
    )
    async with stream_of(local, "Slow", options) as stream:
        given = await take(stream, 16)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await anext(stream)
        health = {each.queue: each for each in stream.health().queues}[queue]
        assert (health.held_count, health.waiting) == (16, "16 messages held, limit 10")
        assert stream.health().running_listeners == 16
        for message in given:
            await stream.ack(message)
        assert numbers(await take(stream, 8)) == list(range(16, 24))


async def test_an_orderly_stream_gives_a_queue_one_message_at_a_time(local: LocalBroker) -> None:
    await fill(local, "InOrder", 5)
    options = PushOptions(
        orderly=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET, suspend_current_queue_s=0.01
    )
    got = []
    async with stream_of(local, "InOrder", options) as stream:
        for number in range(6):
            (message,) = await take(stream, 1)
            got.append((int(message.body), message.reconsume_times))
            if number == 2:
                with pytest.raises(ConfigError, match="whose queue waits"):
                    await stream.nack(message, delay_level=3)
                await stream.nack(message)
            else:
                await stream.ack(message)
    assert got == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0)]


async def test_an_orderly_stream_that_is_left_gives_its_queues_back(local: LocalBroker) -> None:
    """Without an unlock request the broker would keep the queues locked for a minute."""
    await fill(local, "GivenBack", 2)
    got = []
    options = PushOptions(orderly=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    for acknowledges in (False, True, True):
        async with stream_of(local, "GivenBack", options) as stream, asyncio.timeout(60):
            message = await anext(stream)
            assert message.reconsume_times == 0
            if acknowledges:
                await stream.ack(message)
                got.append(int(message.body))
    assert got == [0, 1]


async def test_a_stop_ends_the_iteration_and_waits_for_what_is_given_out(local: LocalBroker) -> None:
    queue = await fill(local, "Stopped", 8)
    stopping: asyncio.Task[None] | None = None
    got = []
    async with stream_of(local, "Stopped") as stream, asyncio.timeout(60):
        async for message in stream:
            got.append(int(message.body))
            if len(got) == 3:
                stopping = asyncio.create_task(stream.stop())
                while stream.state == "running":
                    await asyncio.sleep(0)
            await stream.ack(message)
        assert stopping is not None
        await stopping
    assert got == [0, 1, 2]
    assert await committed(local, "g-Stopped", queue) == 3


async def test_several_tasks_share_a_stream(local: LocalBroker) -> None:
    await fill(local, "Tasks", 100)
    got: Counter[bytes] = Counter()

    async def work(stream: MessageStream) -> None:
        async for message in stream:
            await asyncio.sleep(0)
            await stream.ack(message)
            got[message.body] += 1
            if len(got) == 100:
                await asyncio.create_task(stream.stop())

    async with stream_of(local, "Tasks") as stream, asyncio.timeout(60):
        await asyncio.gather(*(work(stream) for _ in range(5)))
    assert got == {b"%d" % number: 1 for number in range(100)}


async def test_what_was_held_too_long_is_not_given_out_any_more(local: LocalBroker) -> None:
    await fill(local, "Held", 1)
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_timeout_s=1.0)
    async with stream_of(local, "Held", options) as stream:
        (message,) = await take(stream, 1)
        (again,) = await take(stream, 1)
        assert again.reconsume_times == 1
        await until(lambda: stream.health().running_listeners <= 1)
        with pytest.raises(ClientStateError, match="held too long"):
            await stream.ack(message)
        await stream.ack(again)
        assert (stream.health().consumed, stream.health().failed) == (1, 1)


async def test_what_went_to_another_member_cannot_be_acknowledged(local: LocalBroker) -> None:
    """Another member is assigned two of the four queues after the handover timeout of running calls."""
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        rebalance_interval_s=1.0,
        handover_timeout_s=0.5,
        persist_interval_s=1.0,
    )
    async with Producer("p", namesrv=local.namesrv) as producer:
        for queue in await producer.queues("Gone"):
            await producer.send(Message("Gone", b"1"), queue=queue)
    async with stream_of(local, "Gone", options) as stream:
        given = await take(stream, 4)
        other = ClientOptions(instance_name="other")
        async with MessageStream(
            "g-Gone", "Gone", namesrv=local.namesrv, options=options, client_options=other
        ) as second:
            again = await take(second, 2)
            await until(lambda: stream.health().running_listeners <= 2)
            gone = {message.queue for message in again}
            for message in given:
                if message.queue in gone:
                    with pytest.raises(ClientStateError, match="its queue went to another member"):
                        await stream.ack(message)
                else:
                    await stream.ack(message)
            for message in again:
                await second.ack(message)


async def test_a_message_whose_refusal_is_cancelled_can_be_acknowledged(local: LocalBroker) -> None:
    queue = await fill(local, "Cancelled", 1)
    async with stream_of(local, "Cancelled") as stream:
        (message,) = await take(stream, 1)
        for level in (-2, 19):
            with pytest.raises(ConfigError, match="delay_level"):
                await stream.nack(message, level)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await stream.nack(message)
        await stream.ack(message)
        await stream.persist_offsets()
    assert await committed(local, "g-Cancelled", queue) == 1


async def test_only_what_is_given_out_can_be_acknowledged(local: LocalBroker) -> None:
    await fill(local, "Twice", 1)
    async with stream_of(local, "Twice") as stream:
        (message,) = await take(stream, 1)
        await stream.ack(message)
        for wrong in (message, MessageExt("Twice", b"0")):
            with pytest.raises(ClientStateError, match="acknowledged already"):
                await stream.ack(wrong)
            with pytest.raises(ClientStateError, match="acknowledged already"):
                await stream.nack(wrong)
        with pytest.raises(ClientStateError, match="no listener"):
            stream.set_concurrency(3)
    with pytest.raises(ClientStateError, match="is stopped"):
        await stream.ack(message)
    assert [message async for message in stream] == []


class Hook:
    def before_consume(self, consuming: Consuming) -> None:
        raise AssertionError

    after_consume = before_consume


async def test_a_stream_is_used_after_its_start_and_with_single_messages() -> None:
    with pytest.raises(ClientStateError, match="message stream of group g is new"):
        await anext(MessageStream("g", "T"))
    with pytest.raises(ConfigError, match="consume_batch_max_size"):
        MessageStream("g", "T", options=PushOptions(consume_batch_max_size=2))
    with pytest.raises(ConfigError, match="where no listener is called"):
        MessageStream("g", "T", options=PushOptions(consume_hooks=[Hook()]))


def test_threads_share_a_blocking_stream(local: LocalBroker) -> None:
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        for number in range(30):
            producer.send(Message("Threaded", b"%d" % number))
    got: Counter[bytes] = Counter()
    complete = threading.Event()

    def work(stream: SyncMessageStream) -> None:
        for message in stream:
            if message.body == b"7" and message.reconsume_times == 0:
                stream.nack(message, 1)
                continue
            stream.ack(message)
            got[message.body] += 1
            if len(got) == 30:
                complete.set()

    with SyncMessageStream("g-threaded", "Threaded", namesrv=local.namesrv, options=FIRST) as stream:
        threads = [threading.Thread(target=work, args=(stream,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert complete.wait(60)
        assert stream.health().consumed == 30
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert set(got.values()) == {1}
    with pytest.raises(ClientStateError, match="is stopped"):
        stream.ack(MessageExt("Threaded", b"0"))


async def test_an_orderly_queue_waits_for_its_message_and_says_so(local: LocalBroker) -> None:
    """No later message may overtake the pending one, so an orderly stream has no consume timeout."""
    async with Producer("p", namesrv=local.namesrv) as producer:
        queue = (await producer.queues("Unacknowledged"))[0]
        for body in (b"first", b"second"):
            await producer.send(Message("Unacknowledged", body), queue=queue)
    options = PushOptions(
        orderly=True, consume_timeout_s=0.05, stall_after_s=0.2, consume_from_where=FIRST.consume_from_where
    )
    async with (
        asyncio.timeout(60),
        MessageStream("g-waits", "Unacknowledged", namesrv=local.namesrv, options=options) as stream,
    ):
        first = await anext(stream)
        await until(
            lambda: any("no progress with 2 held messages" in each for each in stream.health().problems)
        )
        assert stream.health().failed == 0
        await stream.ack(first)
        assert (await anext(stream)).body == b"second"


async def test_a_stop_waits_for_a_refusal_that_is_under_way(local: LocalBroker) -> None:
    queue = await fill(local, "Refusing", 1)
    async with stream_of(local, "Refusing") as stream:
        (message,) = await take(stream, 1)
        refusing = asyncio.create_task(stream.nack(message))
        await asyncio.sleep(0)
    await refusing
    assert await committed(local, "g-Refusing", queue) == 1


async def test_a_message_that_nobody_gets_holds_its_queue_no_longer_than_it_must(local: LocalBroker) -> None:
    """The iterating task may be cancelled while the message is being sent back to the broker."""
    async with Producer("p", namesrv=local.namesrv) as producer:
        queue = (await producer.send(Message("Large", b"0" * 9_000))).queue
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, max_body=5_000)
    async with stream_of(local, "Large", options) as stream, asyncio.timeout(60):
        waiting = asyncio.create_task(anext(stream))
        while not stream.health().failed:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        waiting = asyncio.create_task(anext(stream))
        while stream.health().queues and await committed(local, "g-Large", queue) != 1:
            await stream.persist_offsets()
        waiting.cancel()

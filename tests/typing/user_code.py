"""A user's program that mypy checks and that is never run: valid code, and code that must not type-check.

Each line that must not type-check carries its expected error; mypy reports lines without that error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_type

from cometmq import (
    Admin,
    ClientInstance,
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumerHealth,
    ConsumeStatus,
    MemoryMarks,
    Message,
    MessageExt,
    MessageQueue,
    MessageStream,
    OrderlyContext,
    OrderlyStatus,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullResult,
    PullStatus,
    PushConsumer,
    PushOptions,
    RedisMarks,
    SendResult,
    SendStatus,
    SqliteMarks,
    SyncMessageStream,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
    Telemetry,
    TraceOptions,
    filter_class,
    idempotent,
    select_by_hash,
    sql92,
    stop_on_signal,
    tags,
)

QUEUE = MessageQueue("T", "broker-a", 0)
MESSAGE = Message("T", b"body", tags="TagA", keys=["k1"], properties={"note": "x"})


async def asyncio_producer() -> None:
    async with Producer("g", namesrv=["a:1", "b:1"], options=ProducerOptions(retry_times=1)) as producer:
        assert_type(producer, Producer)
        assert_type(producer.client, ClientInstance)
        result = await producer.send(MESSAGE, selector=select_by_hash, argument="order-1", timeout_s=1.5)
        assert_type(result, SendResult)
        assert_type(result.status, SendStatus)
        assert_type(await producer.send_many([MESSAGE]), list[SendResult])
        assert_type(await producer.queues("T"), tuple[MessageQueue, ...])
        await producer.send(b"body")  # type: ignore[arg-type]
        await producer.send(MESSAGE, queue="T-0")  # type: ignore[arg-type]
        await producer.send(MESSAGE, timeout=1)  # type: ignore[call-arg]
    Producer("g", options=PushOptions())  # type: ignore[arg-type]
    Producer("g", client_options=ClientOptions(trace=TraceOptions(topic="Traces", sampling=0.1)))
    ClientOptions(trace=True)  # type: ignore[arg-type]
    Producer(namesrv="a:1")  # type: ignore[call-arg]


def blocking_producer() -> None:
    with SyncProducer("g", namesrv="a:1;b:1", client_options=ClientOptions(client_ip="::1")) as producer:
        assert_type(producer, SyncProducer)
        assert_type(producer.state, str)
        assert_type(producer.send(MESSAGE, queue=QUEUE), SendResult)
        assert_type(producer.send_oneway(MESSAGE), None)
        assert_type(producer.send_batch([MESSAGE], timeout_s=None), SendResult)
        assert_type(producer.send_many(iter([MESSAGE]), concurrency=8), list[SendResult])
        assert_type(producer.queues("T"), tuple[MessageQueue, ...])
        producer.send("body")  # type: ignore[arg-type]
        producer.send(MESSAGE, QUEUE)  # type: ignore[call-arg]
        producer.send()  # type: ignore[call-arg]
        producer.send_many(MESSAGE)  # type: ignore[arg-type]
        print(producer.send_batch([MESSAGE]).msg_ids)  # type: ignore[attr-defined]
    SyncProducer("g", client=None)  # type: ignore[call-arg]


async def on_messages(messages: list[MessageExt]) -> None:
    for message in messages:
        assert_type(message.body, bytes)
        assert_type(message.tags, str | None)


def in_a_thread(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
    context.ack_index = len(messages) - 1
    return ConsumeStatus.SUCCESS


def wrong(messages: list[MessageExt]) -> int:
    return len(messages)


async def in_order(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
    assert_type(context.suspend_current_queue_s, float | None)
    context.auto_commit = 1  # type: ignore[assignment]
    return OrderlyStatus.COMMIT if context.queue.queue_id else OrderlyStatus.ROLLBACK


def both(messages: list[MessageExt], context: ConsumeContext) -> OrderlyStatus:
    return OrderlyStatus.SUCCESS


async def push_consumer() -> None:
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer(
        "g", on_messages, {"T": tags("a", "b"), "U": sql92("a > 1")}, options=options
    ) as member:
        assert_type(member.health(), ConsumerHealth)
        assert_type(member.assignment, tuple[MessageQueue, ...])
        await member.subscribe("V", 5)  # type: ignore[arg-type]
    PushConsumer("g", in_order, "T", options=PushOptions(orderly=True, max_reconsume_times=3))
    PushConsumer("g", wrong, "T")  # type: ignore[arg-type]
    PushConsumer("g", both, "T")  # type: ignore[arg-type]
    PushConsumer("g", on_messages, {"T": 5})  # type: ignore[dict-item]


def blocking_push_consumer() -> None:
    with SyncPushConsumer("g", in_a_thread, ["T", "U"]) as member:
        assert_type(member.health(), ConsumerHealth)
        assert_type(member.assignment, tuple[MessageQueue, ...])
        assert_type(member.subscribe("V", sql92("a = 1")), None)
        member.suspend()
        member.resume(1)  # type: ignore[call-arg]
        member.assignment = ()  # type: ignore[assignment]
    SyncPushConsumer("g", in_order, "T", options=PushOptions(orderly=True))


async def message_stream() -> None:
    async with MessageStream("g", {"T": "a"}, client_options=ClientOptions(telemetry=Telemetry())) as stream:
        async with stop_on_signal(stream):
            async for message in stream:
                assert_type(message, MessageExt)
                assert_type(await stream.ack(message), None)
                await stream.nack(message, delay_level=3)
                await stream.nack(message, delay_s=3)  # type: ignore[call-arg]
        assert_type(await stream.lag(), dict[MessageQueue, int])
        assert_type(stream.health(), ConsumerHealth)
        assert_type(await stream.wait_stopped(), None)
    MessageStream("g", on_messages, "T")  # type: ignore[call-arg, arg-type]


def blocking_message_stream() -> None:
    with SyncMessageStream("g", "T", options=PushOptions(orderly=True)) as stream:
        for message in stream:
            assert_type(message, MessageExt)
            assert_type(stream.ack(message), None)
        stream.nack(message, "later")  # type: ignore[arg-type]
        assert_type(stream.lag(), dict[MessageQueue, int])


def book(message: MessageExt, cursor: Any) -> None:
    cursor.execute("INSERT INTO bookings VALUES (?)", (message.body,))


async def note(message: MessageExt) -> None: ...


def idempotent_listeners(redis: RedisMarks) -> None:
    in_database = idempotent("g", book, SqliteMarks("x.db"), key=lambda message: message.keys[0])
    assert_type(in_database, Callable[[list[MessageExt]], None])
    on_loop = idempotent("g", note, MemoryMarks())
    assert_type(on_loop, Callable[[list[MessageExt]], Awaitable[None]])
    PushConsumer("g", in_database, "T")
    PushConsumer("g", on_loop, "T", options=PushOptions(orderly=True))
    idempotent("g", note, redis)
    idempotent("g", book, redis)  # type: ignore[arg-type]
    idempotent("g", note, SqliteMarks("x.db"), 7)  # type: ignore[call-overload]


async def pull_consumer() -> None:
    async with PullConsumer("g") as consumer:
        assert_type(await consumer.poll(None), list[MessageExt])
        async for message in consumer:
            assert_type(message, MessageExt)
        for _ in consumer:  # type: ignore[attr-defined]
            pass


def blocking_pull_consumer() -> None:
    with SyncPullConsumer("g") as consumer:
        consumer.pull(QUEUE, 0, expression=filter_class("Wanted", "class Wanted: ..."))
        result = consumer.pull(QUEUE, 0, max_count=8, expression=sql92("a > 1"))
        assert_type(result, PullResult)
        assert_type(result.status, PullStatus)
        assert_type(consumer.committed(QUEUE), int | None)
        assert_type(consumer.problems, dict[MessageQueue, str])
        assert_type(consumer.poll(), list[MessageExt])
        for message in consumer:
            assert_type(message, MessageExt)
        consumer.pause(QUEUE)  # type: ignore[arg-type]
        consumer.seek("T", 0)  # type: ignore[arg-type]
        consumer.nothing()  # type: ignore[attr-defined]


async def admin() -> None:
    async with Admin("a:1", timeout_s=1.0) as tool:
        assert_type(await tool.topics(), list[str])
        assert_type(await tool.message_by_id("7F00"), MessageExt)
        await tool.message_by_id(7)  # type: ignore[arg-type]


def choose(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    return queues[len(message.body) % len(queues)]


def choose_wrongly(queues: Sequence[MessageQueue]) -> MessageQueue:
    return queues[0]


async def selectors(producer: Producer) -> None:
    await producer.send(MESSAGE, selector=choose)
    await producer.send(MESSAGE, selector=choose_wrongly)  # type: ignore[arg-type]

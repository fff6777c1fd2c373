"""OpenTelemetry: the spans of sends, receives and listener calls, and their parents and links."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cometmq import (
    ClientOptions,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageIllegal,
    MessageStream,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    SimpleConsumer,
    SyncProducer,
    Telemetry,
    TransactionProducer,
    TransactionState,
)
from cometmq.errors import NoRouteError
from cometmq.testing import LocalBroker

FIRST = ConsumeFromWhere.FIRST_OFFSET


class Recording:
    """Client options that create spans, and the exported spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.options = ClientOptions(telemetry=Telemetry(self.provider))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def spans() -> Recording:
    return Recording()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.context
    assert context is not None
    return context.trace_id, context.span_id


async def test_the_work_of_a_listener_is_part_of_the_senders_trace(
    local: LocalBroker, spans: Recording
) -> None:
    """The listener may be a coroutine function or run in a thread."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    inside: list[tuple[int, int]] = []

    def listener(messages: list[MessageExt]) -> None:
        context = trace.get_current_span().get_span_context()
        inside.append((context.trace_id, context.span_id))
        loop.call_soon_threadsafe(done.set)

    options = PushOptions(consume_from_where=FIRST)
    tracer = spans.provider.get_tracer("program")
    async with (
        asyncio.timeout(60),
        Producer("p", namesrv=local.namesrv, client_options=spans.options) as producer,
        PushConsumer(
            "g-spans", listener, "Spans", namesrv=local.namesrv, options=options, client_options=spans.options
        ),
    ):
        with tracer.start_as_current_span("order"):
            message = Message("Spans", b"secret", tags="new", keys=["7"], properties={"clerk": "ada"})
            result = await producer.send(message)
        await done.wait()
    assert message.properties == {"clerk": "ada"}
    (order,), (sent,), (handled,) = map(spans.named, ("order", "send Spans", "process Spans"))
    assert sent.parent is not None
    assert (sent.parent.span_id, sent.kind) == (ids(order)[1], SpanKind.PRODUCER)
    assert handled.parent is not None
    assert (handled.parent.trace_id, handled.parent.span_id) == ids(sent)
    assert (handled.kind, inside) == (SpanKind.CONSUMER, [ids(handled)])
    assert [(link.context.trace_id, link.context.span_id) for link in handled.links] == [ids(sent)]
    common = {
        "messaging.system": "rocketmq",
        "messaging.destination.name": "Spans",
        "messaging.message.id": result.msg_id,
        "messaging.destination.partition.id": str(result.queue.queue_id),
        "messaging.message.body.size": 6,
        "messaging.rocketmq.message.tag": "new",
        "messaging.rocketmq.message.keys": ("7",),
    }
    assert attributes(sent) == {
        **common,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.rocketmq.client_group": "p",
    }
    host, _, port = local.broker_addr.rpartition(":")
    assert attributes(handled) == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "g-spans",
        "server.address": host,
        "server.port": int(port),
    }


class Failing(SpanProcessor):
    """A span processor that fails at the start or at the end of each span."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.calls = 0

    def on_start(self, span: object, parent_context: object = None) -> None:
        self._called("start")

    def on_end(self, span: object) -> None:
        self._called("end")

    def _called(self, at: str) -> None:
        if at == self.at:
            self.calls += 1
            raise RuntimeError(f"no {at}")


@pytest.mark.parametrize("at", ["start", "end"])
async def test_telemetry_that_fails_decides_nothing(local: LocalBroker, at: str) -> None:
    failing = Failing(at)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(failing)
    topic = f"Fails-{at}"
    common: dict[str, Any] = {
        "namesrv": local.namesrv,
        "client_options": ClientOptions(telemetry=Telemetry(provider)),
    }
    push = PushOptions(consume_from_where=FIRST)
    heard: list[bytes] = []
    done = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> None:
        heard.extend(message.body for message in messages)
        done.set()

    async with asyncio.timeout(60):
        async with Producer("p", **common) as producer:
            await producer.send(Message(topic, b"1"))
            with pytest.raises(MessageIllegal):
                await producer.send(Message(topic, b""))
        async with PullConsumer(
            f"g-poll-{at}", **common, options=PullOptions(consume_from_where=FIRST)
        ) as reader:
            await reader.assign_topic(topic)
            assert [message.body for message in await reader.poll(None)] == [b"1"]
        async with MessageStream(f"g-stream-{at}", topic, **common, options=push) as stream:
            message = await anext(stream)
            assert message.body == b"1"
            await stream.ack(message)
        async with PushConsumer(f"g-push-{at}", listener, topic, **common, options=push) as consumer:
            await done.wait()
        assert (heard, consumer.health().failed) == ([b"1"], 0)
    assert failing.calls == 5  # including the span of the failing send


async def test_each_way_to_send_carries_the_context(local: LocalBroker, spans: Recording) -> None:
    class Orders:
        async def execute_local_transaction(self, message: Message, order: object) -> TransactionState:
            return TransactionState.COMMIT

        async def check_local_transaction(self, message: MessageExt) -> TransactionState:
            return TransactionState.COMMIT

    at: Any = {"namesrv": local.namesrv, "client_options": spans.options}
    async with Producer("p", **at) as producer, TransactionProducer("p-tx", Orders(), **at) as transactions:
        await producer.send(message=Message("Ways", b"1"))
        await producer.send_batch(Message("Ways", b"2") for _ in range(2))
        await producer.send_many([Message("Ways", b"3")])
        await producer.send_oneway(Message("Ways", b"4"))
        await transactions.send_in_transaction(Message("Ways", b"5"))

    def blocking() -> None:
        with SyncProducer("p", **at) as face:
            face.send(Message("Ways", b"6"))

    await asyncio.to_thread(blocking)
    got: dict[bytes, set[tuple[str, ...]]] = {}
    options = PullOptions(consume_from_where=FIRST)
    async with asyncio.timeout(60), PullConsumer("g-ways", options=options, **at) as consumer:
        await consumer.assign_topic("Ways")
        count = 0
        while count < 7:
            for message in await consumer.poll():
                version, *parent, _flags = message.properties["traceparent"].split("-")
                assert version == "00"
                got.setdefault(message.body, set()).add(tuple(parent))
                count += 1
    sent = {
        (f"{trace_id:032x}", f"{span_id:016x}") for trace_id, span_id in map(ids, spans.named("send Ways"))
    }
    assert len(sent) == 6
    assert set().union(*got.values()) == sent
    assert {len(each) for each in got.values()} == {1}
    batches = [attributes(span).get("messaging.batch.message_count") for span in spans.named("send Ways")]
    assert sorted(batches, key=str) == [2, *[None] * 5]
    received = [link.context.span_id for span in spans.named("receive Ways") for link in span.links]
    assert len(received) == 7
    assert {span_id for _, span_id in map(ids, spans.named("send Ways"))} == set(received)


async def test_a_stream_gives_a_span_and_the_context_of_each_message(
    local: LocalBroker, spans: Recording
) -> None:
    at: Any = {"namesrv": local.namesrv, "client_options": spans.options}
    telemetry = spans.options.telemetry
    assert telemetry is not None
    options = PushOptions(consume_from_where=FIRST)
    async with (
        asyncio.timeout(60),
        Producer("p", namesrv=local.namesrv) as silent,
        Producer("p", **at) as producer,
        MessageStream("g-received", "Received", options=options, **at) as stream,
    ):
        for sender in (producer, silent):
            await sender.send(Message("Received", b"x"))
        parents = {}
        for _ in range(2):
            message = await anext(stream)
            await stream.ack(message)
            context = trace.get_current_span(telemetry.context_of(message)).get_span_context()
            parents[message.msg_id] = context.span_id
    (sent,) = spans.named("send Received")
    assert sorted(parents.values()) == [0, ids(sent)[1]]
    received = {attributes(span)["messaging.message.id"]: span for span in spans.named("receive Received")}
    assert received.keys() == parents.keys()
    assert {span.kind for span in received.values()} == {SpanKind.CLIENT}
    for msg_id, span in received.items():
        assert [link.context.span_id for link in span.links] == [parents[msg_id]] * bool(parents[msg_id])


async def test_members_that_share_messages_continue_the_senders_trace(
    local: LocalBroker, spans: Recording
) -> None:
    """A listener of leased messages (POP) has a process span, a simple consumer a receive span."""
    at: Any = {"namesrv": local.namesrv, "client_options": spans.options}
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listener(_: list[MessageExt]) -> None:
        loop.call_soon_threadsafe(done.set)

    options = PushOptions(consume_from_where=FIRST, share="messages")
    async with (
        asyncio.timeout(60),
        Producer("p", **at) as producer,
        PushConsumer("g-leased", listener, "Leased", options=options, **at),
        SimpleConsumer("g-simple", "Leased", **at) as simple,
    ):
        await producer.send(Message("Leased", b"x"))
        await done.wait()
        (message,) = await simple.receive()
        await simple.ack(message)
    (sent,), (handled,), (received,) = map(spans.named, ("send Leased", "process Leased", "receive Leased"))
    assert handled.parent is not None
    assert (handled.parent.trace_id, handled.parent.span_id) == ids(sent)
    for span, kind in ((handled, SpanKind.CONSUMER), (received, SpanKind.CLIENT)):
        assert span.kind is kind
        assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [ids(sent)]
    assert attributes(received)["messaging.consumer.group.name"] == "g-simple"
    assert attributes(received)["messaging.message.id"] == message.msg_id


async def test_failures_are_marked(local: LocalBroker, spans: Recording) -> None:
    answers: list[Any] = [ConsumeStatus.RECONSUME_LATER, LookupError("not yet"), ConsumeStatus.SUCCESS]
    done = asyncio.Event()

    async def listener(messages: list[MessageExt]) -> ConsumeStatus:
        answer = answers.pop(0)
        if not answers:
            done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    at: Any = {"namesrv": local.namesrv, "client_options": spans.options}
    options = PushOptions(consume_from_where=FIRST)
    async with (
        asyncio.timeout(60),
        Producer("p", **at) as producer,
        PushConsumer("g-failing", listener, "Failing", options=options, **at),
    ):
        for _ in range(3):
            await producer.send(Message("Failing", b"x"))
        await done.wait()
    found = [
        (attributes(span).get("error.type"), span.status.status_code)
        for span in spans.named("process Failing")
    ]
    assert sorted(found, key=str) == [
        ("LookupError", StatusCode.ERROR),
        ("RECONSUME_LATER", StatusCode.ERROR),
        (None, StatusCode.UNSET),
    ]
    nowhere = Producer(
        "p", namesrv="127.0.0.1:1", client_options=spans.options, options=ProducerOptions(send_timeout_s=1)
    )
    async with nowhere as producer:
        with pytest.raises(NoRouteError):
            await producer.send(Message("Nowhere", b"x"))
        with pytest.raises(MessageIllegal):
            await producer.send("no message")  # type: ignore[arg-type]
        with pytest.raises(MessageIllegal):
            await producer.send_batch([])
    (failed,) = spans.named("send Nowhere")
    assert attributes(failed)["error.type"] == "NameServersUnreachable"
    assert failed.status.status_code is StatusCode.ERROR

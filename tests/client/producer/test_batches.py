"""Tests of how a list of messages is split into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    ClientOptions,
    Message,
    MessageIllegal,
    Producer,
    ProducerOptions,
    Telemetry,
    split_batches,
)
from cometmq.protocol.batch import iter_batch


def sizes(messages: list[Message], max_bytes: int = 1000) -> list[int]:
    return [len(batch) for batch in split_batches(messages, max_bytes)]


def test_messages_keep_their_order() -> None:
    messages = [Message("T", b"x" * (number * 37 % 300 + 1)) for number in range(50)]
    batches = list(split_batches(messages, 1000))
    assert [message for batch in batches for message in batch] == messages
    assert 10 < len(batches) < 30


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([], []),
        ([Message("T", b"x")] * 3, [3]),
        ([Message("T", b"x" * 5000), Message("T", b"y")], [1, 1]),
        ([Message("T", b"x"), Message("U", b"x"), Message("U", b"x")], [1, 2]),
        ([Message("T", b"x"), Message("T", b"x", wait_store=False)], [1, 1]),
        ([Message("T", b"x", properties={"k": "v" * 880}), Message("T", b"x")], [1, 1]),
    ],
    ids=["none", "small", "too large", "topics", "wait_store", "properties"],
)
def test_where_a_batch_ends(messages: list[Message], wanted: list[int]) -> None:
    assert sizes(messages) == wanted


def test_messages_are_taken_as_they_are_needed() -> None:
    endless: Iterator[Message] = (Message("T", b"x" * 300) for _ in itertools.count())
    assert len(next(split_batches(endless, 1000))) == 2


@pytest.mark.parametrize("state", ["", "v" * 100])
async def test_a_batch_has_room_for_the_context_of_its_send(
    namesrv: FakeNamesrv, broker: FakeBroker, state: str
) -> None:
    options = ProducerOptions(max_message_size=2000)
    telemetry = ClientOptions(telemetry=Telemetry(TracerProvider(shutdown_on_exit=False)))
    traced = TraceState([("vendor", state)]) if state else None
    context = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(1), trace_state=traced)
    async with Producer("p", namesrv=namesrv.addr, options=options, client_options=telemetry) as producer:
        with trace.use_span(trace.NonRecordingSpan(context)):
            for batch in split_batches([Message("T", b"x")] * 100, options.max_message_size):
                await producer.send_batch(batch)
    sent = [bytes(item.properties) for _, body in broker.sent for item in iter_batch(body)]
    assert len(sent) == 100
    assert all(b"traceparent" in each and state.encode() in each for each in sent)


@pytest.mark.parametrize("batch", [False, True])
async def test_what_has_no_room_for_the_context_is_sent_without(
    namesrv: FakeNamesrv, broker: FakeBroker, batch: bool
) -> None:
    options = ProducerOptions(max_message_size=150)
    telemetry = ClientOptions(telemetry=Telemetry(TracerProvider(shutdown_on_exit=False)))
    async with Producer("p", namesrv=namesrv.addr, options=options, client_options=telemetry) as producer:
        if batch:
            await producer.send_batch([Message("T", b"x" * 50)])
        else:
            await producer.send(Message("T", b"x", properties={"k": "v" * (32767 - 80)}))
    ((header, body),) = broker.sent
    assert b"traceparent" not in body + (header.properties or "").encode()


async def test_each_batch_can_be_sent(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    options = ProducerOptions(max_message_size=2000)
    messages = [Message("T", b"x" * number, keys=["k"]) for number in range(1, 200)]
    async with Producer("p", namesrv=namesrv.addr, options=options) as producer:
        for batch in split_batches(messages, options.max_message_size):
            await producer.send_batch(batch)
        with pytest.raises(MessageIllegal, match="at most 2000"):
            await producer.send_batch(messages)
    sent = [bytes(item.body) for _, body in broker.sent for item in iter_batch(body)]
    assert sent == [message.body for message in messages]

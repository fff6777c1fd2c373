"""Where many messages are cut into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.client.fakes import FakeBroker, FakeNamesrv

from cometmq import Message, MessageIllegal, Producer, ProducerOptions, split_batches
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
    endless: Iterator[Message] = (Message("T", b"x" * 400) for _ in itertools.count())
    assert len(next(split_batches(endless, 1000))) == 2


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

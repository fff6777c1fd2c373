"""Small bodies that inflate to gigabytes: limited per body and per response, and nothing is lost."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import MessageQueue, PullConsumer, PullOptions
from cometmq.client.cluster import decoding
from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.decoding import decode_messages, decode_one, decode_pulled
from cometmq.client.pull import reading_ahead
from cometmq.errors import BodyTooLarge, RecordError
from cometmq.message import PullResult
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ConsumeMessageDirectlyRequestHeader
from cometmq.protocol.record.one import encode_record

QUEUE = MessageQueue("T", "broker-a", 0)
KIB = 1024


@pytest.fixture
def namesrv(namesrv: FakeNamesrv, broker: FakeBroker) -> FakeNamesrv:
    namesrv.serve("%RETRY%g", broker, queues=1)
    return namesrv


def packed(size: int, offset: int = 0) -> bytes:
    """Build a record whose body inflates to `size` bytes."""
    return encode_record("T", zlib.compress(bytes(size)), queue_offset=offset, sys_flag=0x301)


def plain(offset: int, body: bytes = b"plain") -> bytes:
    return encode_record("T", body, queue_offset=offset)


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PLAIN_BUDGET", 100 * KIB)


# -- decoding


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize(
    ("sizes", "lengths", "oversized", "left_at"),
    [
        ([40, 40], [40, 40], [], None),
        # A message beyond the limit, and all after it, are returned by the next pull.
        ([40, 40, 40, 1], [40, 40], [], 2),
        ([60, 1], [None, 1], [0], None),
        ([40, 60, 60, 1], [40, None], [1], 2),  # detecting a too large body costs as much as reading it
        ([60, 60, 60], [None, None], [0, 1], 2),
    ],
)
def test_bodies_of_one_answer_share_a_budget(
    sizes: list[int], lengths: list[int | None], oversized: list[int], left_at: int | None
) -> None:
    stored = [packed(size * KIB, offset) for offset, size in enumerate(sizes)]
    found = decode_pulled(b"".join(stored), "b", max_body=50 * KIB)
    inflated = [None if message.sys_flag & 1 else len(message.body) // KIB for message in found.messages]
    assert (inflated, found.oversized, found.left_at) == (lengths, oversized, left_at)


@pytest.mark.usefixtures("small_budget")
def test_the_first_body_may_be_as_large_as_its_own_limit() -> None:
    found = decode_pulled(packed(300 * KIB) + packed(1, 1), "b", max_body=300 * KIB)
    assert [len(message.body) for message in found.messages] == [300 * KIB]
    assert (found.oversized, found.left_at) == ([], 1)


@pytest.mark.usefixtures("small_budget")
def test_a_query_gives_what_is_too_large_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_BODY", 50 * KIB)
    messages = decode_messages(packed(40 * KIB) + packed(60 * KIB, 1) + packed(40 * KIB, 2), "b")
    assert [message.sys_flag & 1 for message in messages] == [0, 1, 1]
    assert zlib.decompress(messages[1].body) == bytes(60 * KIB)
    assert decode_one(packed(60 * KIB), "b").sys_flag & 1
    with pytest.raises(BodyTooLarge, match="larger than 51200 bytes"):
        decode_one(packed(60 * KIB), "b", refuse_large=True)
    with pytest.raises(RecordError, match="no record"):
        decode_one(b"", "b")


# -- push


async def test_a_too_large_message_is_sent_back_and_passed(broker: FakeBroker, box: Box) -> None:
    broker.records["T", 0] = [plain(0), packed(60 * KIB, 1), packed(3, 2), plain(3, b"last")]
    async with box.consumer(max_body=50 * KIB, consume_batch_max_size=10) as member:
        await box.has(3)
        await broker.wait_for(lambda: bool(broker.sent_back))
        error = member.health().last_error
    assert box.bodies == [b"plain", bytes(3), b"last"]
    assert [(header.offset, header.delay_level) for header in broker.sent_back] == [(0, 0)]
    assert "BodyTooLarge" in (error or "")
    assert "PushOptions.max_body" in (error or "")
    assert broker.offsets["T", 0] == 4


async def test_no_listener_is_blamed_for_what_it_never_got(broker: FakeBroker, box: Box) -> None:
    broker.records["T", 0] = [packed(60 * KIB, number) for number in range(4)]
    async with box.consumer(max_body=50 * KIB) as member:
        await broker.wait_for(lambda: len(broker.sent_back) == 4)
        assert member.health().failed == 4
        assert not [problem for problem in member.health().problems if "listener" in problem]


async def test_what_the_client_sends_back_stays_compressed(broker: FakeBroker, box: Box) -> None:
    broker.records["T", 0] = [packed(60 * KIB)]
    broker.refuse(RequestCode.CONSUMER_SEND_MSG_BACK, ResponseCode.SYSTEM_ERROR)
    async with box.consumer(max_body=50 * KIB):
        await broker.wait_for(lambda: bool(broker.sent))
    ((header, body),) = broker.sent
    assert (header.topic, header.sys_flag, zlib.decompress(body)) == ("%RETRY%g", 0x301, bytes(60 * KIB))


async def test_a_push_consumer_gets_all_of_an_answer_over_the_budget(
    broker: FakeBroker, box: Box, small_budget: None
) -> None:
    broker.records["T", 0] = [packed(40 * KIB, offset) for offset in range(9)]
    async with box.consumer(max_body=50 * KIB):
        await box.has(9)
    assert sorted(message.queue_offset for message in box.messages) == list(range(9))
    assert [pull.queue_offset for pull in broker.pulls if pull.topic == "T"] == [0, 2, 4, 6, 8, 9]
    assert broker.offsets["T", 0] == 9


async def test_a_listener_is_never_handed_one_on_request(
    broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MAX_BODY", 50 * KIB)
    async with box.consumer() as member:
        header = ConsumeMessageDirectlyRequestHeader(consumer_group="g", client_id=member.client.client_id)
        request = Frame.request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header, packed(60 * KIB))
        answer = await broker.connections[-1].call(request, 10)
    assert (answer.code, "larger than 51200" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
    assert box.messages == []


# -- pull


async def test_a_pull_names_what_is_too_large(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.records["T", 0] = [plain(0), packed(60 * KIB, 1)]
    async with PullConsumer("g", namesrv=namesrv.addr, options=PullOptions(max_body=50 * KIB)) as reader:
        result = await reader.pull(QUEUE, 0)
    assert (result.oversized, result.damaged, result.next_begin_offset) == ([1], [], 2)
    assert [message.sys_flag & 1 for message in result.messages] == [0, 1]


async def test_reading_ahead_goes_on_after_it_ran_out_of_memory(
    namesrv: FakeNamesrv, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = BrokerApi.pull
    failures = [MemoryError("no room")]

    async def fails_once(*args: Any, **kw: Any) -> PullResult:
        if failures:
            raise failures.pop()
        return await pull(*args, **kw)

    monkeypatch.setattr(BrokerApi, "pull", fails_once)
    monkeypatch.setattr(reading_ahead, "_ERROR_DELAY_S", 0.05)
    broker.store("T", 0, b"after all")
    async with PullConsumer("g", namesrv=namesrv.addr) as reader:
        await reader.assign([QUEUE])
        assert await reader.poll(0.01) == []
        assert reader.problems == {QUEUE: "MemoryError('no room')"}
        (message,) = await reader.poll(20)
    assert message.body == b"after all"

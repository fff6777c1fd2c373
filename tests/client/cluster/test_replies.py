"""Requests of a producer, and the valid, late and malformed replies that brokers push."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import NoReturn

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    BrokerError,
    Message,
    Producer,
    ProducerOptions,
    ReplyTimeout,
    RequestNotSent,
    RequestTimeout,
)
from cometmq.protocol.codes import RequestCode, ResponseCode, SysFlag
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PushReplyMessageRequestHeader, SendMessageRequestHeader
from cometmq.protocol.properties.values import decode_properties, encode_properties

PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
SEND = RequestCode.SEND_MESSAGE_V2
ZLIB = int(SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB)


@pytest.fixture
async def asker(namesrv: FakeNamesrv) -> AsyncIterator[Producer]:
    async with Producer("p", namesrv=namesrv.addr) as producer:
        yield producer


def pushed(correlation_id: str, **fields: object) -> PushReplyMessageRequestHeader:
    header = {
        "producer_group": "r", "topic": "C_REPLY_TOPIC", "default_topic": "TBW102",
        "default_topic_queue_nums": 4, "queue_id": 2, "sys_flag": 0, "born_timestamp": 5, "flag": 3,
        "born_host": "/10.0.0.1:1", "store_host": "10.0.0.2:10911", "store_timestamp": 6,
        "properties": encode_properties({"CORRELATION_ID": correlation_id, "UNIQ_KEY": "K"}).decode(),
    }  # fmt: skip
    return PushReplyMessageRequestHeader(**{**header, **fields})  # type: ignore[arg-type]


def asked(broker: FakeBroker, number: int = -1) -> dict[str, str]:
    """Return the properties of a request message that the broker received."""
    return decode_properties((broker.sent[number][0].properties or "").encode())


async def sent(broker: FakeBroker, count: int = 1) -> None:
    await broker.wait_for(lambda: len(broker.sent) == count)


async def test_a_reply_is_a_message(broker: FakeBroker, asker: Producer) -> None:
    waiting = asyncio.create_task(asker.request(Message("T", b"x", properties={"own": "1"})))
    await sent(broker)
    properties = asked(broker)
    assert broker.heartbeats  # the heartbeat was first, so the broker can route the reply
    assert properties["REPLY_TO_CLIENT"] == broker.heartbeats[-1].client_id == asker.client.client_id
    assert (properties["TTL"], properties["own"]) == ("3000", "1")
    header = pushed(properties["CORRELATION_ID"], sys_flag=ZLIB)
    assert (await broker.ask(PUSH, header, zlib.compress(b"yes"))).code == 0
    reply = await waiting
    assert (reply.topic, reply.body, reply.flag, reply.queue_id) == ("C_REPLY_TOPIC", b"yes", 3, 2)
    assert (reply.sys_flag & 1, reply.born_host, reply.store_host) == (0, "10.0.0.1:1", "10.0.0.2:10911")
    assert (reply.born_timestamp_ms, reply.store_timestamp_ms, reply.msg_id) == (5, 6, "K")
    assert int(reply.properties["ARRIVE_TIME"]) > 0


async def test_every_broker_that_takes_replies_knows_the_client_before_the_request(
    namesrv: FakeNamesrv, broker: FakeBroker, asker: Producer
) -> None:
    async with FakeBroker("broker-b") as other, FakeBroker("broker-gone") as gone:
        gone.addr = "127.0.0.1:1"
        namesrv.serve("C_REPLY_TOPIC", broker, other, gone)
        known: list[bool] = []
        broker.on(SEND, lambda frame: known.append(bool(broker.heartbeats and other.heartbeats)))  # type: ignore[func-returns-value]
        for _ in range(2):
            with pytest.raises(RequestTimeout):
                await asker.request(Message("T", b"x"), timeout_s=1.0)
        assert set(known) == {True}
        assert namesrv.asked.count("C_REPLY_TOPIC") == 1


@pytest.mark.parametrize(
    ("fields", "body", "code"),
    [
        ({}, b"x", ResponseCode.SUCCESS),  # no request waits for it
        ({"properties": None}, b"x", ResponseCode.SUCCESS),
        ({"sys_flag": ZLIB}, b"no zlib", ResponseCode.SYSTEM_ERROR),
        ({"sys_flag": ZLIB}, zlib.compress(bytes(40 << 20)), ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_odd_replies(
    broker: FakeBroker, asker: Producer, fields: dict[str, object], body: bytes, code: ResponseCode
) -> None:
    waiting = asyncio.create_task(asker.request(Message("T", b"x")))
    await sent(broker)
    assert (await broker.ask(PUSH, pushed("nobody's", **fields), body)).code == code
    assert (await broker.ask(PUSH, pushed(asked(broker)["CORRELATION_ID"]), b"good")).code == 0
    assert (await broker.ask(PUSH, pushed(asked(broker)["CORRELATION_ID"]), b"second")).code == 0
    assert (await waiting).body == b"good"
    assert len(asker.client.replies) == 0


async def test_a_reply_counts_though_the_send_was_never_answered(broker: FakeBroker, asker: Producer) -> None:
    requests: list[dict[str, str]] = []

    def swallow(frame: Frame) -> None:
        header = frame.header(SendMessageRequestHeader)
        requests.append(decode_properties((header.properties or "").encode()))

    broker.on(SEND, swallow)
    waiting = asyncio.create_task(asker.request(Message("T", b"x"), timeout_s=1.5))
    await broker.wait_for(lambda: len(requests) > 0)
    await broker.ask(PUSH, pushed(requests[0]["CORRELATION_ID"]), b"it is there")
    assert (await waiting).body == b"it is there"
    with pytest.raises(RequestTimeout):
        await asker.request(Message("T", b"x"), timeout_s=0.1)


async def test_what_a_send_raises_is_raised(broker: FakeBroker, asker: Producer) -> None:
    broker.refuse(SEND, ResponseCode.MESSAGE_ILLEGAL)
    with pytest.raises(BrokerError, check=lambda error: error.code == 13):
        await asker.request(Message("T", b"x"))
    assert len(asker.client.replies) == 0


async def test_only_so_many_wait_at_once(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    options = ProducerOptions(max_requests=2)
    async with Producer("p", namesrv=namesrv.addr, options=options) as asker:
        each = [asyncio.create_task(asker.request(Message("T", b"%d" % n), timeout_s=9)) for n in range(3)]
        await sent(broker, 2)
        assert len(asker.client.replies) == 2
        await broker.ask(PUSH, pushed(asked(broker, 0)["CORRELATION_ID"]), b"one")
        await sent(broker, 3)
        for number in (1, 2):
            await broker.ask(PUSH, pushed(asked(broker, number)["CORRELATION_ID"]), b"more")
        assert sorted(reply.body for reply in await asyncio.gather(*each)) == [b"more", b"more", b"one"]


async def test_a_stop_waits_for_the_reply_and_a_cancelled_request_leaves_nothing(
    broker: FakeBroker, asker: Producer
) -> None:
    waiting = asyncio.create_task(asker.request(Message("T", b"x"), timeout_s=9))
    gone = asyncio.create_task(asker.request(Message("T", b"y"), timeout_s=9))
    await sent(broker, 2)
    gone.cancel()
    stopping = asyncio.create_task(asker.stop())
    kept = next(number for number, (_, body) in enumerate(broker.sent) if body == b"x")
    await broker.ask(PUSH, pushed(asked(broker, kept)["CORRELATION_ID"]), b"in time")
    assert (await waiting).body == b"in time"
    await stopping
    assert gone.cancelled()
    assert len(asker.client.replies) == 0


async def test_a_broker_that_lost_the_connection_hears_of_the_client_again(
    broker: FakeBroker, asker: Producer
) -> None:
    waiting = asyncio.create_task(asker.request(Message("T", b"x"), timeout_s=9))
    await sent(broker)
    before = len(broker.heartbeats)
    broker.connections[-1].abort()
    await broker.wait_for(lambda: len(broker.heartbeats) > before)
    await broker.ask(PUSH, pushed(asked(broker)["CORRELATION_ID"]), b"found again")
    assert (await waiting).body == b"found again"


async def test_the_time_for_all(broker: FakeBroker, asker: Producer) -> None:
    with pytest.raises(ReplyTimeout) as caught:
        await asker.request(Message("T", b"x"), timeout_s=0.2)
    assert (caught.value.topic, caught.value.timeout_s) == ("T", 0.2)
    assert caught.value.msg_id == asked(broker)["UNIQ_KEY"]


async def test_the_time_begins_with_the_call(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    options = ProducerOptions(max_requests=1)
    async with Producer("p", namesrv=namesrv.addr, options=options) as asker:
        first = asyncio.create_task(asker.request(Message("T", b"1"), timeout_s=9))
        await sent(broker)
        with pytest.raises(RequestNotSent, match=r"topic T could not be sent within 0\.1 s"):
            await asker.request(Message("T", b"2"), timeout_s=0.1)
        await broker.ask(PUSH, pushed(asked(broker)["CORRELATION_ID"]), b"one")
        assert (await first).body == b"one"
    assert len(broker.sent) == 1


async def test_name_servers_that_hang_take_no_more_than_the_time(
    namesrv: FakeNamesrv, broker: FakeBroker, asker: Producer
) -> None:
    await asker.queues("T")
    namesrv.hangs = True
    async with asyncio.timeout(10):
        with pytest.raises(RequestNotSent):
            await asker.request(Message("T", b"x"), timeout_s=0.1)
    assert not broker.sent


async def test_a_reply_topic_that_was_not_found_is_asked_for_again(
    namesrv: FakeNamesrv, asker: Producer
) -> None:
    for _ in range(2):
        with pytest.raises(ReplyTimeout):
            await asker.request(Message("T", b"x"), timeout_s=0.2)
    assert [topic.endswith("_REPLY_TOPIC") for topic in namesrv.asked].count(True) == 2


async def test_what_a_selector_raises_is_raised(asker: Producer) -> None:
    def late(*_: object) -> NoReturn:
        raise TimeoutError("of the selector")

    with pytest.raises(TimeoutError, match="of the selector"):
        await asker.request(Message("T", b"x"), selector=late)

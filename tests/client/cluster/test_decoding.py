"""A body that was corrupted after it was stored never reaches a consumer, and is always reported."""

from __future__ import annotations

import zlib

import pytest
from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import PullConsumer
from cometmq.client.cluster.decoding import decode_messages
from cometmq.errors import RecordError
from cometmq.message import MessageQueue
from cometmq.protocol.record.one import encode_record


def record(body: bytes, offset: int, *, flip: int | None = None, sys_flag: int = 0) -> bytes:
    """Build a stored record. `flip` is the index of a body byte in which one bit is inverted."""
    data = bytearray(encode_record("T", body, queue_id=2, queue_offset=offset, sys_flag=sys_flag))
    if flip is not None:
        data[data.index(body) + flip] ^= 0x10
    return bytes(data)


def test_a_damaged_message_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    data = record(b"first", 7) + record(b"second", 8, flip=3) + record(b"", 9) + record(b"last", 10)
    damaged: list[int] = []
    messages = decode_messages(data, "broker-a", damaged)
    found = [(message.queue_offset, message.body) for message in messages]
    assert found == [(7, b"first"), (9, b""), (10, b"last")]
    assert damaged == [8]
    assert "T/2 at offset 8 on broker-a" in caplog.text
    assert "damaged and skipped" in caplog.text


def test_whoever_asks_for_one_damaged_message_gets_an_error() -> None:
    with pytest.raises(RecordError, match="body CRC"):
        decode_messages(record(b"alone", 3, flip=0), "broker-a")


def test_a_compressed_body_is_checked_as_it_is_stored() -> None:
    stored = zlib.compress(b"x" * 1000)
    damaged: list[int] = []
    assert decode_messages(record(stored, 1, sys_flag=1), "b", damaged)[0].body == b"x" * 1000
    assert decode_messages(record(stored, 1, sys_flag=1, flip=5), "b", damaged) == []
    assert damaged == [1]


def test_what_is_no_record_is_an_error_all_the_same() -> None:
    with pytest.raises(RecordError, match="size"):
        decode_messages(record(b"first", 7) + b"\1" * 200, "b", [])


async def test_push_consumers_go_on_behind_damaged_messages(broker: FakeBroker, box: Box) -> None:
    good, bad, after = (bytearray(encode_record("T", b"body%d" % n, queue_offset=n)) for n in range(3))
    bad[bad.index(b"body1")] ^= 1
    broker.records["T", 0] = [bytes(good), bytes(bad), bytes(after)]
    async with box.consumer():
        await box.has(2)
    assert box.bodies == [b"body0", b"body2"]
    assert broker.offsets["T", 0] == 3


async def test_a_pull_says_which_offsets_are_damaged(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.records["T", 0] = [record(b"body0", 0), record(b"body1", 1, flip=0)]
    async with PullConsumer("g", namesrv=namesrv.addr) as consumer:
        result = await consumer.pull(MessageQueue("T", "broker-a", 0), 0)
    assert [message.body for message in result.messages] == [b"body0"]
    assert (result.damaged, result.next_begin_offset) == ([1], 2)

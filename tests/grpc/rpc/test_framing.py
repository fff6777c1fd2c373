"""The messages inside the data of a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.grpc.rpc.framing import MessageReader, frame_message
from cometmq.grpc.rpc.status import GrpcStatus, RpcError


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 100)))
def test_messages_may_be_split_anywhere(messages: list[bytes], sizes: list[int]) -> None:
    data = b"".join(map(frame_message, messages))
    reader = MessageReader(1000)

    found = []
    for size in [*sizes, len(data)]:
        found += reader.read(data[:size])
        data = data[size:]

    assert found == messages
    assert reader.buffered == 0


def test_an_incomplete_message_is_kept_and_counted() -> None:
    reader = MessageReader(1000)

    assert reader.read(frame_message(b"one") + frame_message(b"second")[:7]) == [b"one"]
    assert reader.buffered == 7
    assert reader.read(b"cond") == [b"second"]


@pytest.mark.parametrize(
    ("prefix", "status", "problem"),
    [
        (b"\1\0\0\0\1x", GrpcStatus.UNIMPLEMENTED, "a message is compressed"),
        (b"\7\0\0\0\1x", GrpcStatus.INTERNAL, "the flag byte of a message is 7"),
        (b"\0\0\0\3\xe9", GrpcStatus.RESOURCE_EXHAUSTED, "a message of 1001 bytes is larger than the limit"),
        (b"\0\xff\xff\xff\xff", GrpcStatus.RESOURCE_EXHAUSTED, "a message of 4294967295 bytes"),
    ],
)
def test_a_wrong_prefix_is_refused_before_the_message_arrives(
    prefix: bytes, status: GrpcStatus, problem: str
) -> None:
    reader = MessageReader(1000)

    with pytest.raises(RpcError, match=problem) as caught:
        reader.read(frame_message(b"good") + prefix)

    assert caught.value.status is status

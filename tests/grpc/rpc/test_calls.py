"""The messages inside the data of a call, its trailers, and timeouts as text."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.grpc.rpc.calls import MessageReader, frame_message
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.status import GrpcStatus, RpcError, ServiceError, timeout_s, trailers


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


def test_a_text_is_printable_ascii_in_the_trailers() -> None:
    text = "topic 'Bestellungen für €' is unknown: 100 %\r\n"

    status, message = trailers(GrpcStatus.NOT_FOUND, text)

    assert status == (b"grpc-status", b"5")
    assert message[1] == b"topic 'Bestellungen f%C3%BCr %E2%82%AC' is unknown: 100 %25%0D%0A"
    assert unquote(message[1].decode()) == text


def test_a_long_text_is_shortened() -> None:
    message = dict(trailers(GrpcStatus.INTERNAL, "\N{GRINNING FACE}" * 100_000))[b"grpc-message"]

    assert len(message) < 8000
    assert message.endswith(b"(100000 characters)")


def test_success_has_no_text() -> None:
    assert trailers(GrpcStatus.OK, "fine") == ((b"grpc-status", b"0"),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"2H", 7200), (b"3M", 180), (b"99999999S", 99_999_999), (b"20m", 0.02), (b"5u", 5e-6), (b"1n", 1e-9)],
)
def test_timeouts_are_read_in_all_units(value: bytes, expected: float) -> None:
    assert timeout_s(value) == pytest.approx(expected)


@pytest.mark.parametrize("value", [b"", b"S", b"5", b"5x", b"-5S", b"1.5S", b"123456789S", "٣S".encode()])
def test_other_timeouts_are_refused(value: bytes) -> None:
    with pytest.raises(RpcError, match="grpc-timeout"):
        timeout_s(value)


def test_errors_show_status_and_problem() -> None:
    assert str(RpcError(GrpcStatus.NOT_FOUND, "none")) == "NOT_FOUND: none"
    assert str(ServiceError(Code.TOPIC_NOT_FOUND, "none")) == "TOPIC_NOT_FOUND: none"

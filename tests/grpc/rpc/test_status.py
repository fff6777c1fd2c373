"""The trailers of calls, and timeouts as text."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.status import GrpcStatus, RpcError, ServiceError, timeout_s, trailers


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

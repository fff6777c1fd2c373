"""The PROXY header at the beginning of a connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import FrameError
from cometmq.remoting.proxy_header import MAX_HEADER, NO_HEADER, ProxyHeader, read_proxy_header

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
IPV4 = bytes([10, 0, 0, 1, 10, 0, 0, 2]) + (4711).to_bytes(2, "big") + (8081).to_bytes(2, "big")
IPV6 = bytes(15) + b"\1" + bytes(15) + b"\2" + (4711).to_bytes(2, "big") + (8081).to_bytes(2, "big")


def v2(command: int, family: int, addresses: bytes) -> bytes:
    return SIGNATURE + bytes([command, family]) + len(addresses).to_bytes(2, "big") + addresses


GOOD = [
    (b"PROXY TCP4 10.0.0.1 10.0.0.2 4711 8081\r\n", ("10.0.0.1", 4711)),
    (b"PROXY TCP6 2001:db8::1 2001:db8::2 4711 8081\r\n", ("2001:db8::1", 4711)),
    (b"PROXY UNKNOWN\r\n", None),
    (b"PROXY UNKNOWN anything else\r\n", None),
    (v2(0x21, 0x11, IPV4), ("10.0.0.1", 4711)),
    (v2(0x21, 0x11, IPV4 + b"\x03\0\4CRCC"), ("10.0.0.1", 4711)),
    (v2(0x21, 0x21, IPV6), ("::1", 4711)),
    (v2(0x21, 0x31, bytes(216)), None),
    (v2(0x20, 0x00, b""), None),
]


@pytest.mark.parametrize(("header", "client"), GOOD)
def test_a_header_names_the_client(header: bytes, client: tuple[str, int] | None) -> None:
    assert read_proxy_header(header + b"PRI * HTTP/2.0") == ProxyHeader(len(header), client)


@pytest.mark.parametrize("header", [header for header, _ in GOOD])
def test_the_beginning_of_a_header_waits_for_the_rest(header: bytes) -> None:
    assert [read_proxy_header(header[:end]) for end in range(1, len(header))] == [None] * (len(header) - 1)


@pytest.mark.parametrize("data", [b"PRI * HTTP/2.0\r\n", b"\x16\3\1", b"\r\n\r\nX", b"PROXYING"])
def test_other_bytes_are_no_header(data: bytes) -> None:
    assert read_proxy_header(data) == NO_HEADER


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 4711\r\n", "a PROXY line is invalid"),
        (b"PROXY TCP6 10.0.0.1 10.0.0.2 4711 1\r\n", "a PROXY line is invalid"),
        (b"PROXY TCP4 10.0.0.300 10.0.0.2 4711 1\r\n", "a PROXY line is invalid"),
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 65536 1\r\n", "a PROXY line is invalid"),
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 -1 1\r\n", "a PROXY line is invalid"),
        (b"PROXY \r\n", "a PROXY line is invalid"),
        (b"PROXY TCP4 " + b"1" * 200, "has no end within 107 bytes"),
        (v2(0x31, 0x11, IPV4), "command 0x31"),
        (v2(0x22, 0x11, IPV4), "command 0x22"),
        (v2(0x21, 0x11, IPV4[:-1]), "take 11 bytes"),
        (v2(0x21, 0x11, bytes(MAX_HEADER)), "4112 bytes"),
    ],
)
def test_a_wrong_header_is_refused(header: bytes, problem: str) -> None:
    with pytest.raises(FrameError, match=problem):
        read_proxy_header(header)


@given(st.sampled_from([b"PROXY ", b"PROXY TCP4 ", SIGNATURE, SIGNATURE + b"\x21\x11\0\x0c"]), st.binary())
def test_any_bytes_are_a_header_or_refused(begin: bytes, rest: bytes) -> None:
    try:
        header = read_proxy_header(begin + rest)
    except FrameError:
        return
    assert header is None or 0 <= header.size <= len(begin + rest)

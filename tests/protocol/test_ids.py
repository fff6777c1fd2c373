"""Hosts and message ids: the reference's examples, and round trips."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.unique_keys import decode_unique_key

from cometmq.protocol.ids import (
    IdError,
    UniqueKeys,
    decode_offset_id,
    encode_offset_id,
    offset_id_of,
    pack_host,
    unpack_host,
)


@given(st.ip_addresses(), st.integers(0, 2**31 - 1))
def test_hosts(address: object, port: int) -> None:
    text = f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"
    data = pack_host(text)

    assert len(data) in (8, 20)
    assert unpack_host(data) == text
    assert unpack_host(memoryview(data)) == text


@pytest.mark.parametrize(
    "text", ["", "1.2.3.4", "host:1", "1.2.3.4:x", "1.2.3.4:-1", "1.2.3.4:4294967296", "::1"]
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        pack_host(text)


@pytest.mark.parametrize(
    ("text", "host", "offset"),
    [
        ("7F000001000051AF00000000000002CF", "127.0.0.1:20911", 719),
        ("C0A8000A00002A9F00000000400000B0", "192.168.0.10:10911", 1073742000),
        ("FD00000000000000000000000000000200002A9F0000000000000001", "[fd00::2]:10911", 1),
    ],
)
def test_offset_ids(text: str, host: str, offset: int) -> None:
    assert offset_id_of(host, offset) == text
    assert encode_offset_id(pack_host(host), offset) == text
    for written in (text, text.lower()):
        found = decode_offset_id(written)
        assert (found.host, found.physical_offset) == (host, offset)


def test_a_unique_key_seen_on_the_wire() -> None:
    key = decode_unique_key("FD00000000000000000000000000000269E95FFD2B27641B65E70000")

    assert (key.address, key.pid, key.since_month_ms, key.counter) == ("fd00::2", 27113, 1679517159, 0)


@pytest.mark.parametrize("address", ["192.168.0.10", "fd00::2"])
def test_unique_keys_count_and_say_when_they_were_made(address: str) -> None:
    month = 1_793_491_200_000
    keys = UniqueKeys(ip_address(address).packed, 70_000, 0xDEADBEEF, month, month + 10**9, counter=0xFFFF)

    texts = [keys.make(month + 123_456), keys.make(month + 123_457)]

    parts = [decode_unique_key(text) for text in texts]
    assert [part.counter for part in parts] == [0xFFFF, 0]
    assert [part.since_month_ms for part in parts] == [123_456, 123_457]
    assert {part.address for part in parts} == {address}
    assert {(part.pid, part.process_constant) for part in parts} == {(70_000 & 0xFFFF, 0xDEADBEEF)}
    assert {len(text) for text in texts} == {32 if "." in address else 56}
    assert all(text == text.upper() for text in texts)
    keys.roll(month + 10**9, month + 2 * 10**9)
    assert decode_unique_key(keys.make(month + 10**9 + 7)).since_month_ms == 7


@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("decode", [decode_offset_id, decode_unique_key])
def test_what_is_no_id(length: int, decode: object) -> None:
    assert callable(decode)
    good = "7F" * (length + 12)
    for text in ("", good[:-1], good + "0", "G" + good[1:], "é" + good[1:], " " + good[1:]):
        with pytest.raises(IdError, match="message id"):
            decode(text)


def test_a_negative_offset_is_no_offset_id() -> None:
    with pytest.raises(IdError, match="negative"):
        decode_offset_id("7F000001000051AFFFFFFFFFFFFFFFFF")

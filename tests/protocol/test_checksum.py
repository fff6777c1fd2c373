"""Whoever computes the CRC-32, it is zlib's."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.checksum import crc32


@given(st.binary(max_size=5_000), st.integers(0, 64))
def test_checksums_are_those_of_zlib_in_every_kind_of_buffer(data: bytes, skip: int):
    wanted = zlib.crc32(data[skip:])
    assert crc32(data[skip:]) == wanted
    assert crc32(bytearray(data)[skip:]) == wanted
    assert crc32(memoryview(data)[skip:]) == wanted

"""Compressed bodies in all three formats."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.cutting import mutations, never_escapes, truncations

from cometmq.errors import BodyError, BodyTooLarge, ConfigError
from cometmq.protocol.compression import Compression, compress, decompress

KINDS = list(Compression)


@settings(max_examples=40)
@given(st.binary(max_size=2000), st.sampled_from(KINDS), st.integers(0, 0xFF))
def test_bodies_survive(body: bytes, how: Compression, other_bits: int) -> None:
    assert decompress(how.sys_flag | other_bits, compress(body, how)) == body
    assert decompress(other_bits & ~1, body) == body


def test_type_zero_is_zlib_or_the_gzip_of_5_x_clients() -> None:
    assert decompress(1, zlib.compress(b"abc")) == b"abc"
    assert decompress(1, gzip.compress(b"abc")) == b"abc"
    assert Compression.ZLIB.sys_flag == 769


@pytest.mark.parametrize("how", KINDS)
def test_cut_and_changed_bodies_are_refused(how: Compression) -> None:
    data = compress(b"hello" * 200, how)

    assert never_escapes(lambda cut: decompress(how.sys_flag, cut), truncations(data)) == (0, len(data))
    never_escapes(lambda changed: decompress(how.sys_flag, changed), mutations(data))


@pytest.mark.parametrize("how", KINDS)
def test_a_body_that_was_never_compressed(how: Compression) -> None:
    with pytest.raises(BodyError, match="compressed body"):
        decompress(how.sys_flag, b"plain text")


def zstd_of_unknown_size(body: bytes) -> bytes:
    """Compress a body without its size in the frame, like Java's streaming encoder."""
    encoder = zstandard.ZstdCompressor().compressobj()
    return bytes(encoder.compress(body) + encoder.flush())


BOMBS = [
    *((how.sys_flag, partial(compress, how=how)) for how in KINDS),
    (Compression.ZSTD.sys_flag, zstd_of_unknown_size),
]


@pytest.mark.parametrize(("sys_flag", "make"), BOMBS)
def test_bombs_stop_at_the_limit(sys_flag: int, make: Callable[[bytes], bytes]) -> None:
    data = make(bytes(5 << 20))

    assert len(decompress(sys_flag, data, limit=5 << 20)) == 5 << 20
    with pytest.raises(BodyTooLarge, match="larger than 5242879") as caught:
        decompress(sys_flag, data, limit=(5 << 20) - 1)
    assert caught.value.limit == (5 << 20) - 1


@pytest.mark.parametrize(("sys_flag", "make"), BOMBS)
def test_little_more_than_the_limit_is_allocated(sys_flag: int, make: Callable[[bytes], bytes]) -> None:
    data = make(bytes(128 << 20))
    within = make(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decompress(sys_flag, data, limit=64 << 20)
        assert len(decompress(sys_flag, within, limit=64 << 20)) == 64 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 96 << 20


def test_unknown_types_and_names() -> None:
    with pytest.raises(BodyError, match="type 5"):
        decompress(0x501, b"x")
    assert Compression.of(" zstd ") is Compression.ZSTD
    with pytest.raises(ConfigError, match="ZLIB, LZ4 or ZSTD"):
        Compression.of("snappy")


@pytest.mark.parametrize("how", [Compression.LZ4, Compression.ZSTD])
def test_a_missing_package_names_the_extra(how: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    data = compress(b"x", how)

    def refuse(name: str, *args: object) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(BodyError, match=r"cometmq\[zstd\]"):
        decompress(how.sys_flag, data)

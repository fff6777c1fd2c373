"""Compressed message bodies, by the bits of sysFlag (remoting.md 9.2).

Bit 1 says that a body is compressed, bits 0x700 how: 0 and 3 zlib (RFC 1950), 1 LZ4 in its frame format, 2
Zstandard. LZ4 and Zstandard need packages that only the extra `zstd` installs.
"""

from __future__ import annotations

import importlib
import zlib
from enum import IntEnum
from typing import Any

from cometmq.errors import BodyError, ConfigError

COMPRESSED = 0x1
TYPE_MASK = 0x700
TYPE_SHIFT = 8

MAX_PLAIN = 256 << 20
"""Largest body in bytes that decompression makes: 64 times the largest message, and no more than memory
stands."""
_ZSTD_STEP = 1024
"""Bytes fed at a time: three of them can make 128 KiB, so that a step makes at most 44 MiB."""


class Compression(IntEnum):
    """How a body is compressed; the value stands in sysFlag's bits 8 to 10."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @property
    def sys_flag(self) -> int:
        """What to add to sysFlag."""
        return COMPRESSED | self.value << TYPE_SHIFT

    @classmethod
    def of(cls, name: str) -> Compression:
        """By name, in any case. Raises ConfigError."""
        try:
            return cls[name.strip().upper()]
        except KeyError:
            raise ConfigError("compressType", name, "ZLIB, LZ4 or ZSTD") from None


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        problem = f"{package} is not installed; install cometmq[zstd]"
        raise BodyError("compressed body", problem) from None


def compress(body: bytes, how: Compression = Compression.ZLIB, level: int = 5) -> bytes:
    """The compressed body. Add `how.sys_flag` to the message's sysFlag. level: as RocketMQ's producers, 5."""
    if how is Compression.ZLIB:
        return zlib.compress(body, level)
    if how is Compression.LZ4:
        return bytes(_module("lz4.frame", "lz4").compress(body))
    return bytes(_module("zstandard", "zstandard").ZstdCompressor(level=level).compress(body))


def decompress(sys_flag: int, body: bytes, max_plain: int = MAX_PLAIN) -> bytes:
    """The plain body; the body itself if sysFlag does not say that it is compressed. Raises BodyError.

    max_plain: the most bytes that may come out.
    """
    if not sys_flag & COMPRESSED:
        return body
    kind = (sys_flag & TYPE_MASK) >> TYPE_SHIFT
    if kind in (0, Compression.ZLIB):
        return _inflate(body, max_plain)
    if kind == Compression.LZ4:
        return _unlz4(body, max_plain)
    if kind == Compression.ZSTD:
        return _unzstd(body, max_plain)
    raise BodyError("compressed body", f"compression type {kind} is unknown", "sysFlag")


def _too_large(max_plain: int) -> BodyError:
    return BodyError("compressed body", f"it is larger than {max_plain} bytes when decompressed")


def _inflate(body: bytes, max_plain: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(body, max_plain)
    except zlib.error as error:
        raise BodyError("compressed body", f"zlib: {error}") from None
    if not inflater.eof:
        if len(plain) >= max_plain:
            raise _too_large(max_plain)
        raise BodyError("compressed body", "zlib: the stream is cut off")
    return plain


def _unlz4(body: bytes, max_plain: int) -> bytes:
    lz4 = _module("lz4.frame", "lz4")
    decompressor = lz4.LZ4FrameDecompressor()
    try:
        plain = bytes(decompressor.decompress(body, max_plain))
    except (RuntimeError, EOFError, ValueError) as error:
        raise BodyError("compressed body", f"LZ4: {error}") from None
    if not decompressor.eof:
        if len(plain) >= max_plain:
            raise _too_large(max_plain)
        raise BodyError("compressed body", "LZ4: the frame is cut off")
    return plain


def _unzstd(body: bytes, max_plain: int) -> bytes:
    zstandard = _module("zstandard", "zstandard")
    # Frames of streaming encoders (Java's) do not say how large they are, so the size is watched on the way.
    inflater = zstandard.ZstdDecompressor().decompressobj()
    pieces = []
    size = 0
    try:
        for at in range(0, len(body), _ZSTD_STEP):
            piece = inflater.decompress(body[at : at + _ZSTD_STEP])
            pieces.append(piece)
            size += len(piece)
            if size > max_plain:
                raise _too_large(max_plain)
            if inflater.eof:
                return b"".join(pieces)
    except zstandard.ZstdError as error:
        raise BodyError("compressed body", f"Zstandard: {error}") from None
    raise BodyError("compressed body", "Zstandard: the frame is cut off")

"""Compressed message bodies and their bits in sysFlag (docs/reference/remoting.md, System flag).

Bit 0x1 marks a compressed body. Bits 0x700 hold the method: 0 and 3 are zlib (RFC 1950), or gzip (RFC 1952)
in messages of gRPC clients; 1 is LZ4 in its frame format, 2 is Zstandard. LZ4 and Zstandard need the packages
of the extra `zstd`.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterator
from enum import IntEnum
from io import BytesIO
from typing import Any

from cometmq.errors import BodyError, BodyTooLarge, ConfigError
from cometmq.protocol.record.layout import COMPRESSED

TYPE_MASK = 0x700
TYPE_SHIFT = 8

MAX_PLAIN = 64 << 20
"""The default maximum size of a decompressed body: 16 times the largest message of a broker's defaults.

It is also the default of the pipeline's `maxPlainBytes`.
"""
_STEP = 1 << 20
"""The number of bytes that are decompressed per step: a refused body exceeds the limit by at most as many."""
_ZSTD_STEP = 256
"""The number of compressed bytes per step of a Zstandard frame whose header does not state its plain size.

Three compressed bytes can expand to 128 KiB, so a step creates at most 11 MiB.
"""


class Compression(IntEnum):
    """The compression method of a body. The value is stored in bits 8 to 10 of sysFlag."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @property
    def sys_flag(self) -> int:
        """The bits that mark a body compressed by this method in sysFlag."""
        return COMPRESSED | self.value << TYPE_SHIFT

    @property
    def installed(self) -> bool:
        """Whether the Python package for this compression method is installed."""
        package = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard"}.get(self, "zlib")
        return importlib.util.find_spec(package) is not None

    @property
    def levels(self) -> tuple[int, int]:
        """The lowest and the highest compression level. LZ4 ignores the level, as in Java's client."""
        return {Compression.ZLIB: (0, 9), Compression.ZSTD: (1, 22)}.get(self, (0, 22))

    @classmethod
    def of(cls, name: str) -> Compression:
        """Return the method with this name; the case does not matter. Raises ConfigError."""
        try:
            return cls[name.strip().upper()]
        except KeyError:
            raise ConfigError("compress_type", name, "ZLIB, LZ4 or ZSTD") from None


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        problem = f"{package} is not installed; install cometmq[zstd]"
        raise BodyError("compressed body", problem) from None


def compress(body: bytes, how: Compression = Compression.ZLIB, level: int = 5) -> bytes:
    """Return the compressed body. The caller adds `how.sys_flag`. Java's producers use the level 5, too."""
    if how is Compression.ZLIB:
        return zlib.compress(body, level)
    if how is Compression.LZ4:
        return bytes(_module("lz4.frame", "lz4").compress(body))
    return bytes(_module("zstandard", "zstandard").ZstdCompressor(level=level).compress(body))


def decompress(sys_flag: int, body: bytes, limit: int = MAX_PLAIN) -> bytes:
    """Return the plain body, or `body` itself if sysFlag does not mark it as compressed.

    Raises BodyTooLarge above `limit` bytes, without ever occupying much more memory, and BodyError for a body
    that is not compressed by the method in sysFlag.
    """
    if not sys_flag & COMPRESSED:
        return body
    kind = (sys_flag & TYPE_MASK) >> TYPE_SHIFT
    if kind in (0, Compression.ZLIB):
        pieces = _inflate(body)
    elif kind == Compression.LZ4:
        pieces = _unlz4(body)
    elif kind == Compression.ZSTD:
        pieces = _unzstd(body, limit)
    else:
        raise BodyError("compressed body", f"compression type {kind} is unknown", "sysFlag")
    plain = BytesIO()  # A BytesIO grows in place, while joining a list of pieces needs twice the memory
    for piece in pieces:
        if plain.tell() + len(piece) > limit:
            raise BodyTooLarge("compressed body", limit)
        if plain.tell():
            plain.write(piece)
        else:
            plain = BytesIO(piece)  # Most bodies consist of one piece, which BytesIO uses without a copy
            plain.seek(len(piece))
    return plain.getvalue()


def _inflate(body: bytes) -> Iterator[bytes]:
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: zlib or gzip, by the first bytes
    while not inflater.eof:
        try:
            piece = inflater.decompress(body, _STEP)
        except zlib.error as error:
            raise BodyError("compressed body", f"zlib: {error}") from None
        if not piece and not inflater.eof:
            raise BodyError("compressed body", "zlib: the stream is cut off")
        body = inflater.unconsumed_tail
        yield piece


def _unlz4(body: bytes) -> Iterator[bytes]:
    decompressor = _module("lz4.frame", "lz4").LZ4FrameDecompressor()
    while not decompressor.eof:
        try:
            piece = bytes(decompressor.decompress(body, _STEP))
        except (RuntimeError, EOFError, ValueError) as error:
            raise BodyError("compressed body", f"LZ4: {error}") from None
        if decompressor.needs_input and not decompressor.eof:
            raise BodyError("compressed body", "LZ4: the frame is cut off")
        body = b""  # The decompressor keeps the input that it has not used yet, so pass the input only once
        yield piece


def _unzstd(body: bytes, limit: int) -> Iterator[bytes]:
    zstandard = _module("zstandard", "zstandard")
    try:
        size = zstandard.frame_content_size(body)
        if size > limit:
            raise BodyTooLarge("compressed body", limit)
        if size >= 0:
            yield zstandard.ZstdDecompressor().decompress(body)
            return
        # Streaming encoders, such as Java's, write Zstandard frames whose header does not state the plain
        # size. The plain size is therefore checked after each step of the decompression.
        inflater = zstandard.ZstdDecompressor().decompressobj()
        for at in range(0, len(body), _ZSTD_STEP):
            yield inflater.decompress(body[at : at + _ZSTD_STEP])
            if inflater.eof:
                return
    except zstandard.ZstdError as error:
        raise BodyError("compressed body", f"Zstandard: {error}") from None
    raise BodyError("compressed body", "Zstandard: the frame is cut off")

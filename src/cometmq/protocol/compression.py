"""Compressed message bodies, by the bits of sysFlag (docs/reference/remoting.md, System flag).

Bit 1 says that a body is compressed, bits 0x700 how: 0 and 3 zlib (RFC 1950), 1 LZ4 in its frame format, 2
Zstandard. LZ4 and Zstandard need packages that only the extra `zstd` installs.
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

MAX_PLAIN = 256 << 20
"""Largest body in bytes that decompression makes where nobody says less: 64 times the largest message, and no
more than memory stands."""
_STEP = 1 << 20
"""Plain bytes made at a time: that much more than the limit is what a refused body costs."""
_ZSTD_STEP = 256
"""Bytes of a frame of unknown size fed at a time. Three of them can make 128 KiB, so that a step makes at
most 11 MiB."""


class Compression(IntEnum):
    """How a body is compressed; the value stands in sysFlag's bits 8 to 10."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @property
    def sys_flag(self) -> int:
        """What to add to sysFlag."""
        return COMPRESSED | self.value << TYPE_SHIFT

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        package = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard"}.get(self, "zlib")
        return importlib.util.find_spec(package) is not None

    @property
    def levels(self) -> tuple[int, int]:
        """The lowest and the highest level. LZ4 is given none, whatever is asked for, as in Java's client."""
        return {Compression.ZLIB: (0, 9), Compression.ZSTD: (1, 22)}.get(self, (0, 22))

    @classmethod
    def of(cls, name: str) -> Compression:
        """By name, in any case. Raises ConfigError."""
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
    """The compressed body. Add `how.sys_flag` to the message's sysFlag. level: as RocketMQ's producers, 5."""
    if how is Compression.ZLIB:
        return zlib.compress(body, level)
    if how is Compression.LZ4:
        return bytes(_module("lz4.frame", "lz4").compress(body))
    return bytes(_module("zstandard", "zstandard").ZstdCompressor(level=level).compress(body))


def decompress(sys_flag: int, body: bytes, limit: int = MAX_PLAIN) -> bytes:
    """The plain body; the body itself if sysFlag does not say that it is compressed.

    limit: the most bytes that may come out; little more than that is ever allocated, whatever the body says.
    Raises BodyTooLarge (a BodyError) beyond it, BodyError for what is no compressed body.
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
    plain = BytesIO()  # grows in place; joining pieces would need the size twice
    for piece in pieces:
        if plain.tell() + len(piece) > limit:
            raise BodyTooLarge("compressed body", limit)
        if plain.tell():
            plain.write(piece)
        else:
            plain = BytesIO(piece)  # not copied, and most bodies are one piece
            plain.seek(len(piece))
    return plain.getvalue()


def _inflate(body: bytes) -> Iterator[bytes]:
    inflater = zlib.decompressobj()
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
        body = b""  # it keeps what it has not used
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
        # Frames of streaming encoders (Java's) do not say how large they are, so the size is watched on the
        # way.
        inflater = zstandard.ZstdDecompressor().decompressobj()
        for at in range(0, len(body), _ZSTD_STEP):
            yield inflater.decompress(body[at : at + _ZSTD_STEP])
            if inflater.eof:
                return
    except zstandard.ZstdError as error:
        raise BodyError("compressed body", f"Zstandard: {error}") from None
    raise BodyError("compressed body", "Zstandard: the frame is cut off")

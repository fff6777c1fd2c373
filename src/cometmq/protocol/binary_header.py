"""The binary header of a frame, serialisation type 1 (docs/reference/remoting.md, Binary header).

The layout is: i2 code, i1 language, i2 version, i4 opaque, i4 flag, i4 remark length, remark, i4 length of
the ext block, and the ext block. This block holds entries of i2 key length, key, i4 value length, value.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from cometmq.errors import FrameError
from cometmq.protocol.codes import LANGUAGE_ORDINALS, language_name

_FIXED = struct.Struct(">hBhiii")
_I32 = struct.Struct(">i")
MIN_LENGTH = _FIXED.size + _I32.size
MAX_FIELDS = 256


def decode(header: bytes) -> tuple[int, str, int, int, int, str | None, dict[str, str] | None]:
    """Return code, language, version, opaque, flag, remark and ext fields. Raises FrameError."""
    if len(header) < MIN_LENGTH:
        raise FrameError(f"binary header has {len(header)} bytes, at least {MIN_LENGTH} are needed")
    code, language, version, opaque, flag, remark_length = _FIXED.unpack_from(header)
    pos = _FIXED.size
    remark = None
    if remark_length:
        remark, pos = _text(header, pos, remark_length, len(header) - _I32.size, "remark")
    (ext_length,) = _I32.unpack_from(header, pos)
    pos += _I32.size
    if ext_length < 0 or ext_length > len(header) - pos:
        raise FrameError(f"binary header: {ext_length} bytes of extFields, but {len(header) - pos} are left")
    ext = _decode_ext(header, pos, pos + ext_length) if ext_length else None
    return code, language_name(language), version, opaque, flag, remark, ext


def _decode_ext(header: bytes, pos: int, end: int) -> dict[str, str]:
    ext: dict[str, str] = {}
    while pos < end:
        if end - pos < 2:
            raise FrameError("extFields of a binary header end within the length of a key")
        key_length = int.from_bytes(header[pos : pos + 2], "big", signed=True)
        key, pos = _text(header, pos + 2, key_length, end, "key of extFields")
        if end - pos < 4:
            raise FrameError("extFields of a binary header end within the length of a value")
        (value_length,) = _I32.unpack_from(header, pos)
        ext[key], pos = _text(header, pos + 4, value_length, end, "value of extFields")
        if len(ext) > MAX_FIELDS:
            raise FrameError(f"more than {MAX_FIELDS} ext fields")
    return ext


def _text(header: bytes, pos: int, length: int, end: int, what: str) -> tuple[str, int]:
    if length < 0 or length > end - pos:
        raise FrameError(f"binary header: {length} bytes of {what}, but {max(end - pos, 0)} are left")
    return header[pos : pos + length].decode("utf-8", "replace"), pos + length


def encode(
    code: int,
    language: str,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    ext: Mapping[str, str] | None,
) -> bytes:
    """Return the encoded header. Raises FrameError for codes above 32767, which the format cannot hold."""
    remark_bytes = (remark or "").encode("utf-8", "replace")
    parts = []
    for key, value in (ext or {}).items():
        key_bytes, value_bytes = key.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if len(key_bytes) > 0x7FFF:
            raise FrameError(f"ext field name of {len(key_bytes)} bytes does not fit a binary header")
        parts.append(
            len(key_bytes).to_bytes(2, "big") + key_bytes + len(value_bytes).to_bytes(4, "big") + value_bytes
        )
    block = b"".join(parts)
    ordinal = LANGUAGE_ORDINALS.get(language, LANGUAGE_ORDINALS["OTHER"])
    try:
        fixed = _FIXED.pack(code, ordinal, version, opaque, flag, len(remark_bytes))
    except struct.error as error:
        raise FrameError(
            f"binary header cannot hold code {code}, version {version}, opaque {opaque}: {error}"
        ) from None
    return fixed + remark_bytes + _I32.pack(len(block)) + block

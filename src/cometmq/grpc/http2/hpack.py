"""HPACK, the compression of header blocks (RFC 7541).

The decoder supports the whole RFC. The encoder writes literals without Huffman code and uses no dynamic
table: the headers of gRPC's responses are few and constant, so their encoded form is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from cometmq.grpc.http2 import huffman
from cometmq.grpc.http2.errors import ErrorCode, Http2Error

Header: TypeAlias = tuple[bytes, bytes]

ENTRY_OVERHEAD = 32
"""The bytes that a header counts beside its name and value, in the dynamic table and in a header list."""
TABLE_SIZE = 4096
"""The maximum size of the decoder's dynamic table: the initial value of SETTINGS_HEADER_TABLE_SIZE."""
NO_TABLE = b"\x20"
"""The start of an encoder's first header block: it sets the size of its dynamic table to 0.

The encoder then complies with every SETTINGS_HEADER_TABLE_SIZE of the peer, at any time.
"""
_MAX_INTEGER = (1 << 31) - 1

# Appendix A. Most entries have no value.
_STATIC: tuple[Header, ...] = (
    (b"", b""),  # index 0 is not used
    *((b":authority", b""), (b":method", b"GET"), (b":method", b"POST"), (b":path", b"/")),
    *((b":path", b"/index.html"), (b":scheme", b"http"), (b":scheme", b"https")),
    *((b":status", status) for status in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    *((b"accept-charset", b""), (b"accept-encoding", b"gzip, deflate")),
    *(
        (name, b"")
        for name in (
            *(b"accept-language", b"accept-ranges", b"accept", b"access-control-allow-origin", b"age"),
            *(b"allow", b"authorization", b"cache-control", b"content-disposition", b"content-encoding"),
            *(b"content-language", b"content-length", b"content-location", b"content-range", b"content-type"),
            *(b"cookie", b"date", b"etag", b"expect", b"expires", b"from", b"host", b"if-match"),
            *(b"if-modified-since", b"if-none-match", b"if-range", b"if-unmodified-since", b"last-modified"),
            *(b"link", b"location", b"max-forwards", b"proxy-authenticate", b"proxy-authorization", b"range"),
            *(b"referer", b"refresh", b"retry-after", b"server", b"set-cookie"),
            *(b"strict-transport-security", b"transfer-encoding", b"user-agent", b"vary", b"via"),
            b"www-authenticate",
        )
    ),
)
_FIRST_DYNAMIC = len(_STATIC)
_STATIC_INDEX = {header: index for index, header in enumerate(_STATIC) if index}
_STATIC_NAME_INDEX = {header[0]: index for header, index in _STATIC_INDEX.items()}


def _error(reason: str) -> Http2Error:
    return Http2Error(ErrorCode.COMPRESSION_ERROR, reason)


class Decoder:
    """The decoder of one connection's header blocks. An error leaves it unusable."""

    __slots__ = ("_entries", "_max_size", "_size")

    def __init__(self) -> None:
        self._entries: list[Header] = []  # the dynamic table, newest last
        self._size = 0
        self._max_size = TABLE_SIZE

    def is_independent(self, block: bytes) -> bool:
        """Return whether a block neither depends on earlier ones nor changes the meaning of later ones."""
        return self._max_size == 0 and not 0x20 <= block[0] < 0x40 if block else False

    def decode(self, block: bytes) -> list[Header]:
        """Return the headers of a block. Raises Http2Error.

        The result may be much larger than the block, because one byte can stand for a header of TABLE_SIZE
        bytes, but all copies of a header are the same object.
        """
        headers: list[Header] = []
        try:
            self._decode_into(headers, block)
        except IndexError:
            raise _error(
                "a header block ends within a header, or uses an index that does not exist"
            ) from None
        return headers

    def _decode_into(self, headers: list[Header], block: bytes) -> None:
        entries = self._entries
        append = headers.append
        pos = 0
        end = len(block)
        while pos < end:
            byte = block[pos]
            pos += 1
            if byte > 0x80:
                index = byte & 0x7F
                if index == 0x7F:
                    index, pos = _integer(block, pos, 0x7F)
                append(_STATIC[index] if index < _FIRST_DYNAMIC else entries[_FIRST_DYNAMIC - 1 - index])
            elif 0x40 <= byte < 0x80:
                header, pos = self._literal(block, pos, byte & 0x3F, 0x3F)
                append(header)
                entries.append(header)
                self._size += len(header[0]) + len(header[1]) + ENTRY_OVERHEAD
                if self._size > self._max_size:
                    self._evict()
            elif byte < 0x20:
                header, pos = self._literal(block, pos, byte & 0x0F, 0x0F)
                append(header)
            elif byte < 0x40 and not headers:
                size, pos = _integer(block, pos, 0x1F) if byte == 0x3F else (byte & 0x1F, pos)
                self._resize(size)
            else:
                raise _error("a header block uses index 0, or changes the table's size after a header")

    def _literal(self, block: bytes, pos: int, index: int, prefix: int) -> tuple[Header, int]:
        """Return the literal header whose name has an index, or follows if that is 0, and its end."""
        if index == 0:
            name, pos = _string(block, pos)
        else:
            if index == prefix:
                index, pos = _integer(block, pos, prefix)
            entry = _STATIC[index] if index < _FIRST_DYNAMIC else self._entries[_FIRST_DYNAMIC - 1 - index]
            name = entry[0]
        # Most values are short and have no Huffman code.
        end = pos + 1 + block[pos]
        if block[pos] < 0x7F and end <= len(block):
            return (name, block[pos + 1 : end]), end
        value, pos = _string(block, pos)
        return (name, value), pos

    def _resize(self, size: int) -> None:
        if size > TABLE_SIZE:
            raise _error(f"the dynamic table is to have {size} bytes, at most {TABLE_SIZE} are allowed")
        self._max_size = size
        self._evict()

    def _evict(self) -> None:
        count = 0
        for name, value in self._entries:
            if self._size <= self._max_size:
                break
            self._size -= len(name) + len(value) + ENTRY_OVERHEAD
            count += 1
        del self._entries[:count]


def _integer(block: bytes, pos: int, prefix: int) -> tuple[int, int]:
    """Return the integer whose first byte was full (its value is `prefix`), and its end."""
    number = prefix
    shift = 0
    while True:
        byte = block[pos]
        pos += 1
        number += (byte & 0x7F) << shift
        if number > _MAX_INTEGER or shift > 28:
            raise _error(f"an integer is larger than {_MAX_INTEGER}")
        if byte < 0x80:
            return number, pos
        shift += 7


def _string(block: bytes, pos: int) -> tuple[bytes, int]:
    byte = block[pos]
    pos += 1
    length = byte & 0x7F
    if length == 0x7F:
        length, pos = _integer(block, pos, 0x7F)
    end = pos + length
    if end > len(block):
        raise _error("a string ends after its header block")
    text = block[pos:end]
    return (huffman.decode(text) if byte >= 0x80 else text), end


def encode(headers: Sequence[Header]) -> bytes:
    """Return a header block that leaves the peer's dynamic table unchanged."""
    return b"".join([_encode_header(header) for header in headers])


@lru_cache(maxsize=256)
def _encode_header(header: Header) -> bytes:
    index = _STATIC_INDEX.get(header)
    if index is not None:
        return _encode_integer(index, 0x80, 0x7F)
    name, value = header
    index = _STATIC_NAME_INDEX.get(name)
    start = b"\x00" + encode_string(name) if index is None else _encode_integer(index, 0, 0x0F)
    return start + encode_string(value)


def encode_string(text: bytes) -> bytes:
    """Return a string literal without Huffman's code."""
    return _encode_integer(len(text), 0, 0x7F) + text


def _encode_integer(number: int, flags: int, prefix: int) -> bytes:
    """Return an integer that begins in the low bits (`prefix` is their mask) of a byte with `flags`."""
    if number < prefix:
        return bytes((flags | number,))
    encoded = bytearray((flags | prefix,))
    number -= prefix
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

"""Message ids: the broker's offset id and the producer's unique key.

Both kinds are 16 bytes (IPv4) or 28 bytes (IPv6) in upper-case hex, so their length does not distinguish them
(docs/reference/remoting.md, Message ids). The unique keys of 5.x's gRPC clients are 17 bytes.
"""

from __future__ import annotations

import binascii
import re
import struct
from functools import lru_cache
from ipaddress import ip_address

import msgspec

from cometmq.errors import ProtocolError, shown

_TAIL = struct.Struct(">iq")  # Fields of an offset id after the host address: port, physical offset
# The last two fields of a unique key: ms since the month began, and a counter. Together they differ in each
# key of a process.
_moving = struct.Struct(">IH").pack
_LENGTHS = (32, 56)
_ID_OF_5X = re.compile("01[0-9A-Fa-f]{32}")


class IdError(ProtocolError):
    """The text is not a message id."""

    text: str
    problem: str

    def __str__(self) -> str:
        return f"message id {shown(self.text)}: {self.problem}"


# -- hosts


@lru_cache(maxsize=4096)  # Cached, because packing a host takes 10 µs and stored messages come from few hosts
def pack_host(host: str) -> bytes:
    """Convert "ip:port" or "[ip]:port" to a host in a record: address and 4-byte port. Raises ValueError."""
    address, colon, port = host.rpartition(":")
    if not colon:
        raise ValueError(f"{host!r} is not ip:port")
    number = int(port)
    if not 0 <= number < 1 << 31:
        raise ValueError(f"port {port} of {host!r} is out of range")
    return ip_address(address.strip("[]").partition("%")[0]).packed + number.to_bytes(4, "big")


def unpack_host(data: bytes | memoryview) -> str:
    """Convert the 8 or 20 bytes of a host in a record to "ip:port"; an IPv6 address is in brackets."""
    port = int.from_bytes(data[-4:], "big", signed=True)
    if len(data) == 8:
        return f"{data[0]}.{data[1]}.{data[2]}.{data[3]}:{port}"
    return f"[{ip_address(bytes(data[:16]))}]:{port}"


# -- offset id


class OffsetId(msgspec.Struct, frozen=True):
    """The position of a stored message: the broker's "ip:port" and the byte position in its commit log."""

    host: str
    physical_offset: int


def encode_offset_id(store_host: bytes, physical_offset: int) -> str:
    """Return the offset id for a position in a host's log. `store_host` is as in records, 8 or 20 bytes."""
    return (store_host + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def offset_id_of(store_host: str, physical_offset: int) -> str:
    """Return the offset id for a position in the log of the broker at "ip:port"."""
    return encode_offset_id(pack_host(store_host), physical_offset)


def decode_offset_id(text: str) -> OffsetId:
    """Decode an offset id in upper or lower case. Raises IdError."""
    data = id_bytes(text)
    _, physical_offset = _TAIL.unpack_from(data, len(data) - 12)
    if physical_offset < 0:
        raise IdError(text, "the physical offset in the id is negative")
    return OffsetId(unpack_host(data[:-8]), physical_offset)


def id_bytes(text: str) -> bytes:
    """Return the bytes of an offset id or a unique key in upper or lower case. Raises IdError."""
    if len(text) not in _LENGTHS:
        raise IdError(text, f"the id has {len(text)} characters instead of 32 or 56")
    try:
        return binascii.unhexlify(text.encode("ascii"))
    except (binascii.Error, UnicodeEncodeError):
        raise IdError(text, "the id contains characters that are not hex digits") from None


# -- unique key


class UniqueKeys:
    """The generator of one process's unique keys, for a host's address of 4 or 16 bytes.

    Keys contain the time since the start of a month. The caller must call `roll` when the clock passes
    `next_month_ms` (epoch ms), so that a key needs no calendar computation. `process_constant` is a 32-bit
    number that distinguishes processes with the same id (RocketMQ uses a hash).
    """

    __slots__ = ("_at_ms", "_counter", "_first", "_fixed", "_month_start_ms", "next_month_ms")

    def __init__(
        self,
        address: bytes,
        pid: int,
        process_constant: int,
        month_start_ms: int,
        next_month_ms: int,
        counter: int = 0,
    ) -> None:
        if len(address) not in (4, 16):
            raise ValueError(f"an address has 4 or 16 bytes, not {len(address)}")
        head = (
            address + (pid & 0xFFFF).to_bytes(2, "big") + (process_constant & 0xFFFFFFFF).to_bytes(4, "big")
        )
        self._fixed = head.hex().upper()
        self._month_start_ms = month_start_ms
        self.next_month_ms = next_month_ms
        self._counter = counter & 0xFFFF
        self._at_ms = 0
        self._first = self._counter
        """The counter of the first key that was made with the time `_at_ms`."""

    def roll(self, month_start_ms: int, next_month_ms: int) -> None:
        """Begin a new month. Both arguments are in epoch ms."""
        self._month_start_ms = month_start_ms
        self.next_month_ms = next_month_ms

    def make(self, now_ms: int) -> str:
        """Return the next unique key: 32 characters with IPv4, 56 with IPv6.

        If the clock is set back, keys contain the latest time that was used, until the clock reaches it
        again. Otherwise a pair of time and counter could repeat.
        """
        counter = self._counter
        if now_ms > self._at_ms:
            self._at_ms, self._first = now_ms, counter
        elif counter == self._first:
            self._at_ms += 1  # All 65,536 counters are used, so continue with the next millisecond
        self._counter = (counter + 1) & 0xFFFF
        since_ms = (self._at_ms - self._month_start_ms) & 0xFFFFFFFF
        return self._fixed + _moving(since_ms, counter).hex().upper()


def is_id_of_5x(text: str) -> bool:
    """Return whether a text looks like a unique key of a 5.x gRPC client: 01 and 32 further hex digits."""
    return _ID_OF_5X.fullmatch(text) is not None

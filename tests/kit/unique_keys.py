"""The parts of unique keys."""

from __future__ import annotations

import struct
from ipaddress import ip_address
from typing import NamedTuple

from cometmq.protocol.ids import id_bytes


class UniqueKey(NamedTuple):
    """The parts of a unique key. `since_month_ms` is the time since the month began, modulo 2 ** 32 ms."""

    address: str
    pid: int
    process_constant: int
    since_month_ms: int
    counter: int


def decode_unique_key(text: str) -> UniqueKey:
    data = id_bytes(text)
    return UniqueKey(str(ip_address(data[:-12])), *struct.unpack_from(">HIIH", data, len(data) - 12))

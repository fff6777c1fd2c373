"""Inputs for every decoder of bytes: truncated at each position, and with trailing bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cometmq.errors import ProtocolError


def truncations(data: bytes) -> Iterator[bytes]:
    """Yield the data truncated at every position, including 0."""
    for length in range(len(data)):
        yield data[:length]


def mutations(data: bytes, step: int = 1) -> Iterator[bytes]:
    """Yield the data with one byte changed at each position, to the values that most often cause errors."""
    for at in range(0, len(data), step):
        for byte in (0x00, 0x7F, 0xFF, data[at] ^ 0x01, data[at] ^ 0x80):
            yield data[:at] + bytes((byte,)) + data[at + 1 :]


def never_escapes(decode: Callable[[bytes], Any], inputs: Iterator[bytes]) -> tuple[int, int]:
    """Decode every input; each succeeds or raises a ProtocolError with a reason.

    Returns (decoded, refused).
    """
    read = refused = 0
    for data in inputs:
        try:
            decode(data)
        except ProtocolError as error:
            if not str(error):
                raise AssertionError(f"no reason given for {data!r}") from error
            refused += 1
        else:
            read += 1
    return read, refused

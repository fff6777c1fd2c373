"""The body of a batch send (request code 320): a sequence of items (docs/reference/storage.md, Batch body).

An item is: i4 size of the item, i4 magic, i4 body CRC (clients send 0, brokers ignore it), i4 flag, i4 body
length, body, i2 properties length, properties.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cometmq.errors import BodyError, MessageIllegal
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES

ITEM_HEAD = struct.Struct(">iiiii")
"""The layout of the first fields of a message in a batch: size, magic, CRC, flag, body length."""
MIN_ITEM = ITEM_HEAD.size + 2
_LENGTH = struct.Struct(">h")
_SIZE = struct.Struct(">i")

Buffer = bytes | bytearray | memoryview


class BatchItem(NamedTuple):
    """One message of a batch. Body and properties are slices of it: views if the batch is a memoryview."""

    flag: int
    body: Buffer
    properties: Buffer


def encode_batch(items: Iterable[tuple[int, Buffer, Buffer]]) -> bytes:
    """Return a batch of messages: flag, body, property string. Raises MessageIllegal if one does not fit."""
    parts: list[Buffer] = []
    for flag, body, properties in items:
        if len(properties) > MAX_PROPERTIES_BYTES:
            problem = (
                f"the properties have {len(properties)} bytes, at most {MAX_PROPERTIES_BYTES} are possible"
            )
            raise MessageIllegal(problem, field="properties")
        size = MIN_ITEM + len(body) + len(properties)
        try:
            parts.append(ITEM_HEAD.pack(size, 0, 0, flag, len(body)))
        except struct.error as error:
            raise MessageIllegal(f"a number is out of range for a message of a batch: {error}") from None
        parts += (body, _LENGTH.pack(len(properties)), properties)
    return b"".join(parts)


def count_items(data: Buffer) -> int:
    """Return the number of messages of a batch body by their sizes alone: a guess if one is invalid."""
    number = position = 0
    while position + 4 <= len(data):
        number += 1
        position += max(_SIZE.unpack_from(data, position)[0], MIN_ITEM)
    return max(number, 1)


def iter_batch(data: Buffer) -> Iterator[BatchItem]:
    """Yield the messages of a batch body. Raises BodyError at the first invalid message."""
    pos = number = 0
    total = len(data)
    while pos < total:
        if total - pos < MIN_ITEM:
            raise BodyError(
                "batch body", f"{total - pos} bytes are left, an item needs {MIN_ITEM}", f"item {number}"
            )
        size, _, _, flag, body_length = ITEM_HEAD.unpack_from(data, pos)
        end = pos + size
        if not MIN_ITEM <= size <= total - pos:
            raise BodyError("batch body", f"size {size}, {total - pos} bytes are left", f"item {number}")
        body_at = pos + ITEM_HEAD.size
        length_at = body_at + body_length
        if body_length < 0 or length_at + 2 > end:
            raise BodyError(
                "batch body", f"body length {body_length} of an item of {size} bytes", f"item {number}"
            )
        properties_at = length_at + 2
        properties_length: int = _LENGTH.unpack_from(data, length_at)[0]
        if properties_length < 0 or properties_at + properties_length != end:
            left = end - properties_at
            raise BodyError(
                "batch body", f"properties length {properties_length}, {left} bytes left", f"item {number}"
            )
        yield BatchItem(flag, data[body_at:length_at], data[properties_at:end])
        pos = end
        number += 1

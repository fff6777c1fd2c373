"""Converts the messages of a batch send from the request's body to records of the log.

They are processed by column (all bodies, all keys, all records), each with one call that loops in C. In most
batches, messages differ only in bodies and unique keys, which have equal lengths. These batches become
`Alike`, at 0.4 of the cost of `Mixed`, which accepts any batch.

Budget: in batches of 32 messages of 128 B, 0.5 µs per message that becomes `Alike`, and 1.3 µs per message
that becomes `Mixed`. All of the broker takes 2.8 µs of CPU per message of such a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple

from cometmq.errors import BodyError
from cometmq.protocol.batch import ITEM_HEAD, MIN_ITEM, iter_batch
from cometmq.protocol.checksum import crc32
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.template import Template, codes_and_keys, template_of
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES, has_stray_separator
from cometmq.protocol.record.layout import BODY_CRC_AT, HEADS, QUEUE_ID_AT, QUEUE_OFFSET_AT, SYS_FLAG_AT
from cometmq.store.base.refusal import StoreRefused

_length = struct.Struct(">H").pack
_length_at = struct.Struct(">h").unpack_from
_item_at = ITEM_HEAD.unpack_from
_has_stray_separator = lru_cache(64)(has_stray_separator)
_LENGTH_SIZE = 2
_MAX_SHARED_BYTES = 16 << 20
"""The maximum total size, in bytes, of the copies of a request's properties in the messages of its batch.

The request's properties are copied to each message, and a frame of 4 MiB can contain 190,000 empty messages,
so a limit is needed. 16 MiB is enough for Apache's clients, whose batch requests have less than 80 bytes of
properties.
"""
MAX_CACHED_MESSAGES = 256  # Maximum number of messages for which a struct is cached: it then takes 74 KB
# Struct formats of a record's header; the key is the header's length in bytes. Everything between physical
# offset and body length is one field, because all messages of a batch have the same bytes there.
_SHORT_HEADS = {
    head.size: struct.Struct(f">iiiiiqq{head.size - SYS_FLAG_AT - 4}si") for head in HEADS.values()
}


class Common(NamedTuple):
    """The values that the records of a batch share, in the order of a record."""

    head: struct.Struct
    magic: int
    queue_id: int
    queue_offset: int
    """The queue offset of the first record in the batch."""
    behind_position: tuple[int | bytes, ...]
    """The fields of the record between physical offset and body length."""
    topic: bytes
    """The encoded topic: its length, then its name."""


class Alike(NamedTuple):
    """Messages that differ only in body and unique key. All bodies have one length, and all keys have one."""

    flag: int
    bodies: Sequence[bytes]
    keys: Sequence[bytes]
    template: Template
    """The properties that each record gets from its message and from the request, without the unique key."""
    longest_properties: int
    """The length of each message's properties, in bytes."""

    def sizes(self, fixed: int) -> list[int]:
        """Return the sizes of the records. `fixed` is the size of a record without body and properties."""
        return [fixed + len(self.bodies[0]) + self.longest_properties] * len(self.bodies)

    def properties(self) -> Callable[[], Sequence[bytes]]:
        """Return a function that creates the properties of each message, and does not keep the bodies."""
        before, keys, behind = self.template.before, self.keys, self.template.behind
        return lambda: [before + key + behind for key in keys]

    @property
    def stray_separator(self) -> bool:
        return _has_stray_separator(self.template.before + self.template.behind)

    def codes_and_keys(self) -> tuple[Sequence[int], Sequence[bytes] | None]:
        """Return tags codes and unique keys. The second is None if a message has further keys."""
        return [self.template.tags_code] * len(self.keys), self.keys

    def records(self, common: Common, sizes: Sequence[int], positions: Sequence[int]) -> bytes:
        """Return the records of all messages, joined. A number out of range raises struct.error."""
        count, body_length = len(sizes), len(self.bodies[0])
        head = common.head.pack(
            sizes[0], common.magic, 0, common.queue_id, self.flag, 0, 0, *common.behind_position, body_length
        )
        to_checksum, to_body = head[:BODY_CRC_AT], head[SYS_FLAG_AT:]
        to_offset = head[QUEUE_ID_AT:QUEUE_OFFSET_AT]
        behind = self.template.behind
        middle = common.topic + _length(self.longest_properties) + self.template.before
        fields: list[Any] = [0, to_offset, 0, 0, to_body, b"", middle, b"", behind + to_checksum] * count
        fields[0::9] = checksums(self.bodies)
        fields[2::9] = range(common.queue_offset, common.queue_offset + count)
        fields[3::9] = positions
        fields[5::9] = self.bodies
        fields[7::9] = self.keys
        lengths = len(to_body), body_length, len(middle), len(self.keys[0]), len(behind)
        return _struct_of(_records_format, count, *lengths).pack(to_checksum, *fields)


class Mixed(NamedTuple):
    """Messages of a batch that may differ in all parts."""

    flags: Sequence[int]
    bodies: Sequence[bytes]
    texts: Sequence[bytes]
    """The properties of each message, together with the properties of the request."""
    text_lengths: Sequence[int]

    @property
    def longest_properties(self) -> int:
        return max(self.text_lengths)

    def sizes(self, fixed: int) -> list[int]:
        lengths = zip(map(len, self.bodies), self.text_lengths, strict=True)
        return [fixed + body + properties for body, properties in lengths]

    def properties(self) -> Callable[[], Sequence[bytes]]:
        texts = self.texts
        return lambda: texts

    @property
    def stray_separator(self) -> bool:
        return has_stray_separator(b"\x02".join(self.texts))

    def codes_and_keys(self) -> tuple[Sequence[int], Sequence[bytes] | None]:
        return codes_and_keys(self.texts)

    def records(self, common: Common, sizes: Sequence[int], positions: Sequence[int]) -> bytes:
        head, offset = common.head, common.queue_offset
        rest = head.pack(0, 0, 0, 0, 0, 0, 0, *common.behind_position, 0)[SYS_FLAG_AT:-4]
        heads = map(
            _SHORT_HEADS[head.size].pack, sizes, repeat(common.magic), checksums(self.bodies),
            repeat(common.queue_id), self.flags, range(offset, offset + len(sizes)), positions, repeat(rest),
            map(len, self.bodies),
        )  # fmt: skip
        tails = {length: common.topic + _length(length) for length in set(self.text_lengths)}
        middles = map(tails.__getitem__, self.text_lengths)
        return b"".join(chain.from_iterable(zip(heads, self.bodies, middles, self.texts, strict=True)))


Items = Alike | Mixed


def batch_items(body: bytes | bytearray | memoryview, extra: bytes) -> Items:
    """Return the messages in the body of a batch send, each with the properties of the request (`extra`).

    Raises StoreRefused if `body` is empty or does not consist of complete messages, or `extra` is too long.
    """
    if len(extra) > MAX_PROPERTIES_BYTES:
        raise _too_much_shared(len(extra), 1)
    data = bytes(body)  # Slicing bytes costs half as much as slicing a memoryview
    if not data:
        raise StoreRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
    return _alike(data, extra) or _mixed(data, extra)


def checksums(bodies: Sequence[bytes]) -> list[int]:
    return [crc32(each) & 0x7FFFFFFF for each in bodies]


def _alike(data: bytes, extra: bytes) -> Alike | None:
    """Return the messages if they differ only in body and unique key and the first is valid, else None."""
    if len(data) < MIN_ITEM:
        return None
    size, _, _, flag, length = _item_at(data, 0)
    text_at = MIN_ITEM + length
    if length < 0 or size <= text_at or len(data) % size or data[-size : 4 - size] != data[:4]:
        return None
    text = data[text_at:size]
    if _length_at(data, text_at - _LENGTH_SIZE)[0] != len(text):
        return None
    properties = _joined([text], extra)[0]
    template, key = template_of(properties)
    key_at = len(template.before)
    key_end = key_at + len(key)
    # `Alike` requires that the unique key is the only key of a message, and that the message's own properties
    # contain it, not those of the request.
    if not template.only_key or key_end > len(text):
        return None
    count = len(data) // size
    before, behind = data[text_at - _LENGTH_SIZE : text_at + key_at], text[key_end:]
    _, *fields = _struct_of(_items_format, count, length, len(before), len(key), len(behind)).unpack(data)
    bodies, keys = fields[0::4], fields[2::4]
    if count * len(extra) > _MAX_SHARED_BYTES:
        raise _too_much_shared(len(extra), count)
    joined_keys = b"".join(keys)
    if (
        fields[1::4].count(before) == count
        and fields[3:-1:4].count(behind + data[: ITEM_HEAD.size]) == count - 1
        and fields[-1] == behind
        # A key that contains a separator of properties is shorter than assumed here.
        and not (b"\x01" in joined_keys or b"\x02" in joined_keys)
    ):
        return Alike(flag, bodies, keys, template, len(properties))
    return None


def _items_format(count: int, body: int, before: int, key: int, behind: int) -> str:
    """Return the format of a batch of alike messages.

    Its fields are the first header and, for each message, the body, the properties before the key, the key,
    and the properties behind it together with the next header.
    """
    head, item = ITEM_HEAD.size, f"{body}s{before}s{key}s"
    return f"{head}s" + f"{item}{behind + head}s" * (count - 1) + f"{item}{behind}s"


def _records_format(count: int, to_body: int, body: int, middle: int, key: int, behind: int) -> str:
    """Return the format of the records of alike messages.

    Its fields are the bytes before the first checksum and, for each record, the checksum, the bytes before
    the queue offset, the queue offset, the position, the bytes before the body, the body, the bytes before
    the unique key, the key, and the bytes behind it together with those before the next checksum.
    """
    to_checksum, to_offset = BODY_CRC_AT, QUEUE_OFFSET_AT - QUEUE_ID_AT
    record = f"i{to_offset}sqq{to_body}s{body}s{middle}s{key}s"
    return f">{to_checksum}s" + f"{record}{behind + to_checksum}s" * (count - 1) + f"{record}{behind}s"


def _struct_of(make_format: Callable[..., str], count: int, *lengths: int) -> struct.Struct:
    """Return the struct of a format. It is cached unless it describes very many messages."""
    make = cached_struct if count <= MAX_CACHED_MESSAGES else cached_struct.__wrapped__
    return make(make_format, count, *lengths)


@lru_cache(64)
def cached_struct(make_format: Callable[..., str], *numbers: int) -> struct.Struct:
    return struct.Struct(make_format(*numbers))


def _mixed(data: bytes, extra: bytes) -> Mixed:
    flags: list[int] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
    pos = 0
    total = len(data)
    while pos < total:
        if total - pos < MIN_ITEM:
            raise _bad_batch(data)
        size, _, _, flag, length = _item_at(data, pos)
        end = pos + size
        properties_at = pos + MIN_ITEM + length
        if length < 0 or properties_at > end or end > total:
            raise _bad_batch(data)
        text = data[properties_at:end]
        if len(text) != _length_at(data, properties_at - _LENGTH_SIZE)[0]:
            raise _bad_batch(data)
        flags.append(flag)
        bodies.append(data[properties_at - _LENGTH_SIZE - length : properties_at - _LENGTH_SIZE])
        texts.append(text)
        pos = end
    if len(texts) * len(extra) > _MAX_SHARED_BYTES:
        raise _too_much_shared(len(extra), len(texts))
    texts = _joined(texts, extra)
    return Mixed(flags, bodies, texts, list(map(len, texts)))


def _joined(texts: list[bytes], extra: bytes) -> list[bytes]:
    """Append the properties of the request to the properties of each message."""
    if not extra:
        return texts
    behind_a_pair = b"\x02" + extra
    return [text + (behind_a_pair if text and text[-1] != 2 else extra) for text in texts]


def _too_much_shared(extra: int, count: int) -> StoreRefused:
    return StoreRefused(
        ResponseCode.MESSAGE_ILLEGAL,
        f"the batch's own properties have {extra}B and go to each of {count} messages: at most "
        f"{MAX_PROPERTIES_BYTES}B are allowed, and {_MAX_SHARED_BYTES}B for all together",
    )


def _bad_batch(data: bytes) -> StoreRefused:
    """Return the error for an invalid batch. The error names the first invalid message."""
    try:
        for _ in iter_batch(data):
            pass
    except BodyError as problem:
        return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, str(problem))
    return StoreRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch cannot be read")

"""Protobuf bodies: one message of a type that a FileDescriptorSet describes.

`protoc --include_imports --descriptor_set_out=FILE` creates the descriptor set. Fields that the descriptor
set does not contain, at any depth, go to `body_rest`, as an encoded message that has only those fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cometmq.errors import ConfigError
from cometmq.pipeline.table.bodies import MOST_VALUES, Parsed, check_names, too_many_values, value_width

_Read = Callable[[Any], Any]
_F = FieldDescriptor
_PLAIN = {
    _F.CPPTYPE_INT32: pa.int64(),
    _F.CPPTYPE_UINT32: pa.int64(),
    _F.CPPTYPE_INT64: pa.int64(),
    _F.CPPTYPE_UINT64: pa.decimal128(20, 0),  # A decimal, because Spark has no unsigned integers
    _F.CPPTYPE_FLOAT: pa.float64(),
    _F.CPPTYPE_DOUBLE: pa.float64(),
    _F.CPPTYPE_BOOL: pa.bool_(),
    _F.CPPTYPE_STRING: pa.string(),
}


class ProtobufParser:
    """A parser of bodies that are Protobuf messages of one type."""

    def __init__(self, descriptors: bytes, name: str) -> None:
        descriptor = _descriptor(descriptors, name)
        self._message = message_factory.GetMessageClass(descriptor)
        self._room = _Room()
        self._read = _record(descriptor, (), self._room)[1]

    def parse(self, body: bytes) -> Parsed:
        try:
            message = self._message.FromString(body)
            self._room.left = MOST_VALUES
            value = self._read(message)
            size = message.ByteSize()
            message.DiscardUnknownFields()
            rest = None
            if message.ByteSize() != size:
                _keep_unknown(unknown := self._message.FromString(body))
                rest = unknown.SerializePartialToString()
        except (DecodeError, ValueError, RecursionError, MemoryError) as error:
            return Parsed(None, error=f"{type(error).__name__}: {error}")
        return Parsed(value, rest)


def fields_of(descriptors: bytes, name: str) -> pa.StructType:
    """Return the columns of a message type.

    Integers of 32 bits become bigint and float becomes double, so that writers may widen these fields later.
    uint64 becomes decimal(20,0), and an enum becomes the name of its value. Raises ConfigError for a
    recursive message.
    """
    kind, _ = _record(_descriptor(descriptors, name), (), _Room())
    return check_names(kind)


def _descriptor(descriptors: bytes, name: str) -> Descriptor:
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.Add(file)
    except (DecodeError, TypeError) as error:
        raise ConfigError(
            "body_schema", "the descriptor set", f"one with all its imports ({error})"
        ) from None
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError:
        known = ", ".join(
            f"{file.package}.{kind.name}".lstrip(".") for file in files for kind in file.message_type
        )
        raise ConfigError(
            "body_schema", name, f"a message of the descriptor set: {known or 'it has none'}"
        ) from None


class _Room:
    """The number of values that the arrays and maps of a body may still hold."""

    left = 0

    def for_all(self, items: Any, width: int) -> Any:
        """Return the items. Raises ValueError for too many, before each becomes an object."""
        self.left -= len(items) * width
        if self.left < 0:
            raise ValueError(too_many_values())
        return items


def _record(descriptor: Descriptor, outer: tuple[str, ...], room: _Room) -> tuple[pa.DataType, _Read]:
    """Return a message's type and reader. A message without fields is a boolean: whether it is set."""
    path = (*outer, descriptor.full_name)
    if descriptor.full_name in outer:
        raise ConfigError("body_schema", " → ".join(path), "a message that does not hold itself")
    if not descriptor.fields:
        return (pa.struct([]), lambda _: {}) if not outer else (pa.bool_(), lambda _: True)
    fields = [(field.name, *_field(field, path, room)) for field in descriptor.fields]
    readers = [(name, read) for name, _, read in fields]
    kind = check_names(pa.struct([(name, kind) for name, kind, _ in fields]), f"{descriptor.full_name}.")
    return kind, lambda message: {name: read(message) for name, read in readers}


def _field(field: FieldDescriptor, path: tuple[str, ...], room: _Room) -> tuple[pa.DataType, _Read]:
    name, kind = field.name, field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key_type, key = _single(kind.fields_by_name["key"], path, room)
        item_type, item = _single(kind.fields_by_name["value"], path, room)
        width = value_width(item_type)

        def read_map(message: Any) -> list[tuple[Any, Any]]:
            held = room.for_all(getattr(message, name), width)
            return [(key(each), item(held[each])) for each in held]

        return pa.map_(key_type, item_type), read_map
    one_type, one = _single(field, path, room)
    if field.is_repeated:
        width = value_width(one_type)
        return pa.list_(one_type), lambda message: [
            one(item) for item in room.for_all(getattr(message, name), width)
        ]
    if not field.has_presence:
        return one_type, lambda message: one(getattr(message, name))
    return one_type, lambda message: one(getattr(message, name)) if message.HasField(name) else None


def _single(field: FieldDescriptor, path: tuple[str, ...], room: _Room) -> tuple[pa.DataType, _Read]:
    """Return the Arrow type of a field's single value, and a function that converts Protobuf's value."""
    if field.message_type is not None:
        return _record(field.message_type, path, room)
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return pa.string(), lambda number: names.get(number) or str(number)
    if field.type == _F.TYPE_BYTES:
        return pa.binary(), bytes
    return _PLAIN[field.cpp_type], lambda value: value


def _keep_unknown(message: Message) -> None:
    """Clear all fields that the descriptor contains, so that only unknown fields remain."""
    for field, value in message.ListFields():
        left = 0
        for item in _messages(field, value):
            _keep_unknown(item)
            left += item.ByteSize()
        if not left:
            message.ClearField(field.name)


def _messages(field: FieldDescriptor, value: Any) -> Iterable[Message]:
    """Return the Protobuf messages that the value of a field contains."""
    kind = field.message_type
    if kind is None:
        return []
    if kind.GetOptions().map_entry:
        return value.values() if kind.fields_by_name["value"].message_type is not None else []
    return value if field.is_repeated else [value]

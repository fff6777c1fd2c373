"""Descriptors of protobuf files as plain values, so that two sources of them can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto


def described(files: Iterable[FileDescriptor]) -> dict[str, Any]:
    """Return the messages and enums of some files, by their full names.

    A message is {field: [number, type, type name, label, oneof, whether it is optional]}, and an enum is
    {value: number}. An entry of a map is a message, too.
    """
    values: dict[str, Any] = {}
    for file in files:
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            add_message(values, f"{proto.package}.{message.name}", message)
        for enum in proto.enum_type:
            values[f"{proto.package}.{enum.name}"] = {value.name: value.number for value in enum.value}
    return values


def add_message(values: dict[str, Any], name: str, message: DescriptorProto) -> None:
    values[name] = {
        field.name: [
            field.number,
            field.type,
            field.type_name,
            field.label,
            message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
            field.proto3_optional,
        ]
        for field in message.field
    }
    for nested in message.nested_type:
        add_message(values, f"{name}.{nested.name}", nested)
    for enum in message.enum_type:
        values[f"{name}.{enum.name}"] = {value.name: value.number for value in enum.value}

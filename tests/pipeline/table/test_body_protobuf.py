"""Protobuf bodies: a single message each, decoded by a descriptor set; unknown fields are kept."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tests.pipeline.table.body_parsing import is_refused, never_fails

from cometmq.errors import ConfigError
from cometmq.pipeline.table.body_protobuf import ProtobufParser, fields_of

F = descriptor_pb2.FieldDescriptorProto


def add(kind: Any, name: str, number: int, what: int, named: str = "", *, many: bool = False) -> Any:
    label = F.LABEL_REPEATED if many else F.LABEL_OPTIONAL
    return kind.field.add(name=name, number=number, type=what, type_name=named or None, label=label)


def described(*, newer: bool = False) -> bytes:
    """Return the descriptor set of shop.Order; a newer version has more fields, also in its item."""
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    state = file.enum_type.add(name="State")
    state.value.add(name="NEW", number=0)
    state.value.add(name="DONE", number=1)
    file.message_type.add(name="Nothing")
    item = file.message_type.add(name="Item")
    add(item, "sku", 1, F.TYPE_STRING)
    order = file.message_type.add(name="Order")
    by = order.nested_type.add(name="ByEntry")
    by.options.map_entry = True
    add(by, "key", 1, F.TYPE_STRING)
    add(by, "value", 2, F.TYPE_MESSAGE, ".shop.Item")
    plain = [
        ("id", F.TYPE_INT64), ("count", F.TYPE_UINT32), ("big", F.TYPE_UINT64), ("rate", F.TYPE_FLOAT),
        ("ok", F.TYPE_BOOL), ("name", F.TYPE_STRING), ("raw", F.TYPE_BYTES),
    ]  # fmt: skip
    for number, (name, kind) in enumerate(plain, 1):
        add(order, name, number, kind)
    add(order, "state", 8, F.TYPE_ENUM, ".shop.State")
    add(order, "item", 9, F.TYPE_MESSAGE, ".shop.Item")
    add(order, "items", 10, F.TYPE_MESSAGE, ".shop.Item", many=True)
    add(order, "tags", 11, F.TYPE_STRING, many=True)
    add(order, "by", 12, F.TYPE_MESSAGE, ".shop.Order.ByEntry", many=True)
    add(order, "none", 13, F.TYPE_MESSAGE, ".shop.Nothing")
    order.oneof_decl.add(name="_maybe")
    maybe = add(order, "maybe", 14, F.TYPE_INT32)
    maybe.oneof_index, maybe.proto3_optional = 0, True
    if newer:
        add(order, "added", 20, F.TYPE_STRING)
        add(item, "colour", 2, F.TYPE_STRING)
    add(file.message_type.add(name="Tree"), "left", 1, F.TYPE_MESSAGE, ".shop.Tree")
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def message(*, newer: bool = False) -> Any:
    """Return the message class of shop.Order."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described(newer=newer)).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


PARSER = ProtobufParser(described(), "shop.Order")
EMPTY = {
    "id": 0, "count": 0, "big": Decimal(0), "rate": 0.0, "ok": False, "name": "", "raw": b"", "state": "NEW",
    "item": None, "items": [], "tags": [], "by": [], "none": None, "maybe": None,
}  # fmt: skip


def columns(body: bytes) -> tuple[Any, bytes | None]:
    parsed = PARSER.parse(body)
    assert parsed.error is None
    return pa.array([parsed.value], fields_of(described(), "shop.Order"))[0].as_py(), parsed.rest


def test_a_message_becomes_columns() -> None:
    order = message()(
        id=-5, count=2**32 - 1, big=2**64 - 1, rate=0.5, ok=True, name="ü", raw=b"\xff", state=1, maybe=0,
        tags=["a"],
        item={"sku": "s"}, items=[{"sku": "1"}, {}], by={"k": {"sku": "v"}}, none={},
    )  # fmt: skip
    value, rest = columns(order.SerializeToString())
    assert rest is None
    assert value == {
        "id": -5, "count": 2**32 - 1, "big": Decimal(2**64 - 1), "rate": 0.5, "ok": True, "name": "ü",
        "raw": b"\xff", "state": "DONE", "item": {"sku": "s"}, "items": [{"sku": "1"}, {"sku": ""}],
        "tags": ["a"], "by": [("k", {"sku": "v"})], "none": True, "maybe": 0,
    }  # fmt: skip
    assert columns(b"") == (EMPTY, None)
    assert columns(message()(state=7).SerializeToString())[0]["state"] == "7"


@pytest.mark.parametrize(
    "fields",
    [
        {"added": "x"},
        {"item": {"colour": "red"}},
        {"items": [{"sku": "1"}, {"sku": "2", "colour": "red"}]},
        {"by": {"k": {"sku": "v", "colour": "red"}}},
    ],
)
def test_fields_that_the_descriptor_does_not_know_are_kept(fields: dict[str, Any]) -> None:
    newer = message(newer=True)
    value, rest = columns(newer(**{"id": 5, "name": "n", "item": {"sku": "s"}} | fields).SerializeToString())
    assert value["id"] == 5
    assert rest is not None
    unknown = newer.FromString(rest)
    assert (unknown.id, unknown.name, unknown.item.sku) == (0, "", "")
    assert "x" in str(unknown) or "red" in str(unknown)


@pytest.mark.parametrize(
    "body",
    [b"\x08", b"\xff", b"\x32\x01\xff", b"\x32\x7f", b"\x4a\xff\xff\xff\xff\x0f", b"\x0b" * 200],
)  # fmt: skip
def test_what_is_no_message_is_an_error(body: bytes) -> None:
    is_refused(PARSER, body)


def test_no_bytes_make_it_fail() -> None:
    never_fails(PARSER)


@pytest.mark.parametrize(
    "body",
    [
        b"\x52\x00" * (512 * 1024),  # empty items
        b"\x5a\x00" * (512 * 1024),  # empty tags
        b"".join(b"\x62\x07\x0a\x03%03x\x12\x00" % n for n in range(4096)) * 14 + b"\x52\x00" * 250_000,
    ],
)
def test_a_body_of_hundreds_of_thousands_of_items_is_refused(body: bytes) -> None:
    assert is_refused(PARSER, body).endswith("more than 250000 values in its arrays and maps")


@pytest.mark.parametrize(
    ("content", "name", "problem"),
    [
        (b"\xff", "shop.Order", "descriptor set"),
        (b"", "shop.Order", "it has none"),
        (described(), "shop.Other", r"shop\.Order"),
        (described(), "shop.Tree", "does not hold itself"),
        (described(), "shop.Nothing", "at least one field"),
    ],
)
def test_descriptors_that_have_no_columns(content: bytes, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        fields_of(content, name)

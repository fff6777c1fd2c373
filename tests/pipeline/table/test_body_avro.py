"""Avro bodies: one datum each, by the writers' schema."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import ConfigError
from cometmq.pipeline.table.body_avro import AvroParser, fields_of

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "count", "type": ["null", "int"], "default": None},
        {"name": "rate", "type": "float"},
        {"name": "name", "type": "string"},
        {"name": "raw", "type": "bytes"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "DONE"]}},
        {"name": "before", "type": ["null", "State"]},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "uuid", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "by", "type": {"type": "map", "values": "double"}},
        {"name": "item", "type": {
            "type": "record", "name": "Item", "fields": [{"name": "sku", "type": "string"}]
        }},
    ],
}  # fmt: skip
VALUE = {
    "id": 2**40, "count": None, "rate": 0.5, "name": "ü", "raw": b"\0\xff", "state": "NEW", "before": "DONE",
    "hash": b"ab", "price": Decimal("12.30"), "day": date(2026, 11, 23),
    "at": datetime(2026, 11, 23, 7, tzinfo=UTC),
    "clock": 1000, "uuid": "no uuid", "tags": ["a", "b"], "by": {"x": 1.5}, "item": {"sku": "s"},
}  # fmt: skip
PARSER = AvroParser(json.dumps(SCHEMA))


def datum(value: dict[str, Any]) -> bytes:
    plain = json.loads(json.dumps(SCHEMA))
    for field in plain["fields"]:
        if field["name"] in ("clock", "uuid"):
            field["type"].pop("logicalType")
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(plain), value)
    return stream.getvalue()


def test_a_datum_becomes_columns() -> None:
    parsed = PARSER.parse(datum(VALUE))
    assert (parsed.rest, parsed.error) == (None, None)
    fields = fields_of(json.dumps(SCHEMA))
    made = pa.array([parsed.value], fields)[0].as_py()
    assert made == {**VALUE, "by": [("x", 1.5)]}
    assert [fields.field(name).type for name in ("count", "rate", "clock", "state")] == [
        pa.int64(), pa.float64(), pa.int64(), pa.string()
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"", datum(VALUE)[:-1], datum(VALUE) + b"\0", b"\xff" * 20, b"\x02" + b"\x03" * 30,
        datum(VALUE | {"name": "x"}).replace(b"\x02x", b"\x02\xff"),
    ],
)  # fmt: skip
def test_what_is_no_datum_of_the_schema_is_an_error(body: bytes) -> None:
    parsed = PARSER.parse(body)
    assert parsed.value is None
    assert parsed.error


@given(st.binary(max_size=100))
def test_no_bytes_make_it_fail(body: bytes) -> None:
    parsed = PARSER.parse(body)
    assert (parsed.value is None) == (parsed.error is not None)


def record(kind: Any) -> str:
    return json.dumps({"type": "record", "name": "R", "fields": [{"name": "f", "type": kind}]})


@pytest.mark.parametrize(
    "schema",
    [
        "no JSON", "5", '"string"', '{"type": "record"}', record("unknown"), record("null"),
        record({"type": "array", "items": "null"}), record(["null", "int", "string"]), record(["null", "R"]),
        record({"type": "fixed", "name": "F", "size": 0}), record({"type": "array", "items": "R"}),
        record({"type": "record", "name": "E", "fields": []}),
        record("int").replace("]", ', {"name": "F", "type": "int"}]'),
    ],
)  # fmt: skip
def test_schemas_that_have_no_columns(schema: str) -> None:
    with pytest.raises(ConfigError, match="body_schema"):
        fields_of(schema)

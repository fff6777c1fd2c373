"""Avro bodies: a single datum each, decoded by the writers' schema."""

from __future__ import annotations

import json
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from tests.pipeline.table.body_parsing import columns, is_refused, never_fails

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
    is_refused(PARSER, body)


def test_no_bytes_make_it_fail() -> None:
    never_fails(PARSER)


def written(schema: str, value: Any) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(schema)), value)
    return stream.getvalue()


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
FIXED = {"type": "fixed", "name": "F", "size": 20, "logicalType": "decimal", "precision": 38, "scale": 38}


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (DECIMAL, (9999999999).to_bytes(5, "big", signed=True), Decimal("99999999.99")),
        (DECIMAL, (-9999999999).to_bytes(5, "big", signed=True), Decimal("-99999999.99")),
        (DECIMAL, (5).to_bytes(1000, "big"), Decimal("0.05")),
        (DECIMAL, b"", Decimal(0)),
        (["null", DECIMAL], b"\xff", Decimal("-0.01")),
        (FIXED, (10**38 - 1).to_bytes(20, "big"), Decimal("0." + "9" * 38)),
        (DECIMAL, (10**10).to_bytes(5, "big", signed=True), None),
        (DECIMAL, (12345678901).to_bytes(5, "big", signed=True), None),
        (FIXED, (10**38).to_bytes(20, "big"), None),
    ],
)
def test_decimals_are_exact_or_an_error(kind: Any, raw: bytes, value: Decimal | None) -> None:
    plain = json.loads(record(kind).replace("logicalType", "other"))
    body = written(json.dumps(plain), {"f": raw})
    (found,) = columns(AvroParser(record(kind)), fields_of(record(kind)), body)
    assert (found["value"] and found["value"]["f"]) == value
    assert (found["body_error"] is None) == (value is not None)


LARGE = 1024 * 1024 - 10
TOO_MANY = "more than 250000 values"


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (DECIMAL, b"x" * LARGE, "a decimal of more than 10 digits"),
        ({"type": "array", "items": ["null", "int"]}, [None] * LARGE, TOO_MANY),
        ({"type": "array", "items": "long"}, [2**60] * 100_000, TOO_MANY),
        ("bytes", b"x" * LARGE, None),
        ({"type": "array", "items": "string"}, ["ab"] * 200_000, None),
    ],
)  # fmt: skip
def test_a_large_body_costs_little(kind: Any, value: Any, problem: str | None) -> None:
    body = written(json.dumps(json.loads(record(kind).replace("logicalType", "other"))), {"f": value})
    began = time.process_time()
    (found,) = columns(AvroParser(record(kind)), fields_of(record(kind)), body)
    assert time.process_time() - began < 5
    assert problem in found["body_error"] if problem else found["value"]["f"] == value


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

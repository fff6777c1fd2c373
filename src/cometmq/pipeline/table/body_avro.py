"""Avro bodies: one datum in Avro's binary encoding, written with the schema of the archive's settings.

The body has no header and no schema id of a registry. A datum that was written with another schema is
therefore detected only if it cannot be read or if bytes remain after it.
"""

from __future__ import annotations

import json
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException, UnknownType

from cometmq.errors import ConfigError
from cometmq.pipeline.table.bodies import MOST_VALUES, Parsed, check_names, too_many_values

_PLAIN = {
    "boolean": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_LOGICAL = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
}
_DECIMAL = "cometmq-decimal"
_MOST_READS = 2 * MOST_VALUES
"""Maximum number of reads that fastavro may make in one body.

fastavro reads each byte of a number and each text with a separate call. The limit admits every body with a
permitted number of values; bodies.py counts the values exactly afterwards.
"""

_BAD = (EOFError, ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError, MemoryError)


class AvroParser:
    """A parser of bodies by an Avro schema in JSON."""

    def __init__(self, schema: str) -> None:
        self._schema = fastavro.parse_schema(_with_decimals(_without_other_logical_types(json.loads(schema))))

    def parse(self, body: bytes) -> Parsed:
        stream = BytesIO(body) if len(body) <= _MOST_READS else _FewReads(body)
        try:
            value = fastavro.schemaless_reader(stream, self._schema, None)
        except _BAD as error:
            return Parsed(None, error=f"{type(error).__name__}: {error}")
        if left := len(body) - stream.tell():
            return Parsed(None, error=f"{left} bytes are left after the datum")
        return Parsed(value)  # type: ignore[arg-type]


class _FewReads(BytesIO):
    """The bytes of a body. Raises ValueError after too many reads, before all values become objects."""

    _left = _MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(too_many_values())
        return super().read(size)


def _decimal(data: bytes, writer_schema: Any = None, _: Any = None) -> Decimal:
    """Return an exact decimal. fastavro rounds too many digits, and needs minutes for 1 MiB of them."""
    number = int.from_bytes(data, "big", signed=True)
    if abs(number) >= 10 ** writer_schema["precision"]:
        raise ValueError(f"a decimal of more than {writer_schema['precision']} digits")
    sign, digits = ("-", str(-number)) if number < 0 else ("", str(number))
    return Decimal(f"{sign}{digits}E-{writer_schema.get('scale', 0)}")


fastavro.read.LOGICAL_READERS.update({f"{kind}-{_DECIMAL}": _decimal for kind in ("bytes", "fixed")})


def _with_decimals(schema: Any) -> Any:
    """Return the schema with decimal types renamed, so that fastavro uses this module's reader for them."""
    if isinstance(schema, list):
        return [_with_decimals(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: _with_decimals(item) for name, item in schema.items()}
    return kept | {"logicalType": _DECIMAL} if kept.get("logicalType") == "decimal" else kept


def fields_of(schema: str) -> pa.StructType:
    """Return the columns of an Avro schema.

    The type int becomes bigint and float becomes double, so that writers may widen these fields later. Raises
    ConfigError for types without a column: unions of several types, recursive records, and null alone.
    """
    try:
        parsed = fastavro.parse_schema(_without_other_logical_types(json.loads(schema)))
    except (ValueError, SchemaParseException, UnknownType, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("body_schema", schema[:80], f"an Avro schema ({error})") from None
    kind = _arrow(parsed, {}, "body")
    if not pa.types.is_struct(kind):
        raise ConfigError("body_schema", str(kind), "an Avro schema of a record")
    return kind


def _without_other_logical_types(schema: Any) -> Any:
    """Return the schema without logical types that have no column: their base types are read."""
    if isinstance(schema, list):
        return [_without_other_logical_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: _without_other_logical_types(item) for name, item in schema.items() if name != "default"}
    logical = kept.get("logicalType")
    precision = kept.get("precision")
    if logical not in _LOGICAL and not (
        logical == "decimal" and isinstance(precision, int) and precision <= 38
    ):
        kept.pop("logicalType", None)
    return kept


def _arrow(schema: Any, named: dict[str, pa.DataType | None], path: str) -> pa.DataType:
    if isinstance(schema, list):
        kinds = [kind for kind in schema if kind != "null"]
        if len(kinds) != 1:
            raise ConfigError("body_schema", path, "a union of null and one type")
        return _arrow(kinds[0], named, path)
    if isinstance(schema, str):
        kind = _PLAIN.get(schema) or named.get(schema)
        if kind is None:  # The type is null, or a record that contains itself; neither can be a column
            raise ConfigError(
                "body_schema", f"{path} {schema}", "a type other than null, and no record within itself"
            )
        return kind
    what = schema["type"]
    logical = schema.get("logicalType")
    if logical == "decimal":
        kind = pa.decimal128(schema["precision"], schema.get("scale", 0))
    elif logical in _LOGICAL:
        return _LOGICAL[logical]
    elif what == "array":
        return pa.list_(_arrow(schema["items"], named, f"{path}[]"))
    elif what == "map":
        return pa.map_(pa.string(), _arrow(schema["values"], named, f"{path}{{}}"))
    elif what == "enum":
        kind = pa.string()
    elif what == "fixed":
        if not schema["size"]:
            raise ConfigError("body_schema", path, "a fixed type of at least one byte")
        kind = pa.binary()
    elif what in ("record", "error"):
        named[schema["name"]] = None
        inner = [
            (field["name"], _arrow(field["type"], named, f"{path}.{field['name']}"))
            for field in schema["fields"]
        ]
        kind = check_names(pa.struct(inner), f"{path}.")
    else:
        return _arrow(what, named, path)
    if "name" in schema:
        named[schema["name"]] = kind
    return kind

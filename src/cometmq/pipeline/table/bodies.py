"""Bodies as columns: the task that reads a body also parses it, and its fields become columns.

    value         struct: the fields of the schema; null if the body could not be parsed
    body_rest     binary: content that no field of the schema holds; null if there is none
    body_error    string: why the body could not be parsed; null if it could

A body that cannot be parsed becomes a row like any other row, with its `body`, so no content is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.errors import ConfigError

MOST_BYTES = 1024 * 1024
"""Maximum bytes of a parsed body, because objects of a malicious one have some hundred times its size."""

MOST_VALUES = 250_000
"""Maximum number of values in the arrays and maps of one body.

Values are counted as they take space in columns: a struct in an array counts as all of its fields, even
fields without a value, because two bytes of Protobuf can encode a struct with hundreds of fields.
"""

# Maximum size of the bodies that exist as Python objects at one time, in bytes.
_SLICE_BYTES = 4 * 1024 * 1024
_ERROR_CHARS = 300
_WIDER = [[pa.int32(), pa.int64()], [pa.float32(), pa.float64()]]


class Parsed(NamedTuple):
    """A parsed body: its fields by name, the remaining content, and an error if it could not be parsed."""

    value: dict[str, Any] | None
    rest: bytes | None = None
    error: str | None = None


class Parser(Protocol):
    """The interface of the parser for one body format."""

    def parse(self, body: bytes) -> Parsed:
        """Parse a body. This method never raises an error, even for an invalid body."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """The settings that tasks need to parse bodies.

    Attributes:
        schema: The parser's input: an Avro schema, or a descriptor set and a message's name. JSON is parsed
            by `fields`.
        fields: The type of the parser's results.
        column: The type of the column `value`, which also has the fields of earlier runs.
        keep: Whether `body` is kept if it could be parsed.
    """

    format: str
    schema: tuple[bytes, str]
    fields: pa.StructType
    column: pa.StructType
    keep: bool


def body_columns(column: pa.StructType) -> list[pa.Field]:
    """Return the columns that hold parsed bodies, without the message's own columns."""
    return [
        pa.field("value", column),
        pa.field("body_rest", pa.binary()),
        pa.field("body_error", pa.string()),
    ]


def with_columns(batch: pa.RecordBatch, bodies: Bodies, parser: Parser) -> pa.RecordBatch:
    """Return the rows with additional columns for their parsed bodies."""
    values: list[pa.Array] = []
    rests: list[bytes | None] = []
    errors: list[str | None] = []
    for parsed in _parsed(parser, batch.column("body"), bodies.column):
        values += _arrow(parsed, 0, len(parsed), bodies.column)
        rests += [rest for _, rest, _ in parsed]
        errors += [error and error[:_ERROR_CHARS] for _, _, error in parsed]
    value = pa.concat_arrays(values) if values else pa.array([], bodies.column)
    columns = [value, pa.array(rests, pa.binary()), pa.array(errors, pa.string())]
    if not bodies.keep:
        at = batch.schema.get_field_index("body")
        body = pc.if_else(value.is_valid(), pa.scalar(None, pa.binary()), batch.column(at))
        batch = batch.set_column(at, batch.schema.field(at), body)
    fields = [*batch.schema, *body_columns(bodies.column)]
    return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=pa.schema(fields))


def _parsed(parser: Parser, bodies: pa.Array, column: pa.StructType) -> Iterator[list[Parsed]]:
    """Yield the parsed bodies in order, in groups whose Python objects fit into memory."""
    count, too_long = _counter(column), Parsed(None, error=f"longer than {MOST_BYTES} bytes")
    for start, stop in _slices(bodies):
        group: list[Parsed] = []
        held = 0
        for body in bodies[start:stop].to_pylist():
            one = parser.parse(body or b"") if len(body or b"") <= MOST_BYTES else too_long
            values = 0 if count is None or one.value is None else count(one.value)
            if values > MOST_VALUES:
                one, values = Parsed(None, error=too_many_values()), 0
            if held + values > MOST_VALUES:
                yield group
                group, held = [], 0
            group.append(one)
            held += values
        yield group


def too_many_values() -> str:
    return f"more than {MOST_VALUES} values in its arrays and maps"


def _counter(kind: pa.DataType) -> Callable[[Any], int] | None:
    """Return a function that counts items for MOST_VALUES, or None for a type without arrays and maps."""
    if pa.types.is_struct(kind):
        parts = [(field.name, count) for field in kind if (count := _counter(field.type))]

        def of_struct(value: dict[str, Any]) -> int:
            return sum(count(inner) for name, count in parts if (inner := value.get(name)) is not None)

        return of_struct if parts else None
    if not pa.types.is_list(kind) and not pa.types.is_map(kind):
        return None
    items = kind.value_type if pa.types.is_list(kind) else kind.item_type
    width, inside = value_width(items), _counter(items)

    def of_list(value: Any) -> int:
        total = len(value) * width
        if inside is None or total > MOST_VALUES:
            return total
        if pa.types.is_map(kind):
            value = value.values() if isinstance(value, dict) else [item for _, item in value]
        return total + sum(inside(item) for item in value if item is not None)

    return of_list


def value_width(kind: pa.DataType) -> int:
    """Return the number of columns that a value takes: a struct takes those of all its fields."""
    return sum(value_width(field.type) for field in kind) if pa.types.is_struct(kind) else 1


def _slices(bodies: pa.Array) -> Iterator[tuple[int, int]]:
    """Yield (first row, last row + 1) of ranges with about `_SLICE_BYTES` of bodies."""
    sizes = pc.fill_null(pc.binary_length(bodies), 0).to_numpy(zero_copy_only=False)
    numbers = np.cumsum(sizes, dtype=np.int64) // _SLICE_BYTES
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(bodies)] if len(bodies) else []
    yield from pairwise(edges)


def _arrow(parsed: list[Parsed], start: int, stop: int, column: pa.StructType) -> list[pa.Array]:
    """Return rows as arrays. Values that Arrow cannot hold are found by bisection and become errors."""
    try:
        return [pa.array([item.value for item in parsed[start:stop]], column)]
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if stop - start == 1:
            parsed[start] = Parsed(None, error=str(error))
            return [pa.nulls(1, column)]
    middle = (start + stop) // 2
    return _arrow(parsed, start, middle, column) + _arrow(parsed, middle, stop, column)


def merged(old: pa.DataType, new: pa.DataType, *, widen: bool, path: str = "value") -> pa.DataType:
    """Return a type that holds the values of both types: the fields of both, and the wider of two numbers.

    Fields that `new` lacks are kept. `widen` permits a number column of the table to become wider. Raises
    ConfigError if the types do not fit together.
    """
    if old == new:
        return old
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        fields = {field.name: field.type for field in old}
        for field in new:
            known = fields.get(field.name)
            fields[field.name] = field.type if known is None else merged(
                known, field.type, widen=widen, path=f"{path}.{field.name}"
            )  # fmt: skip
        return check_names(pa.struct(list(fields.items())))
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(merged(old.value_type, new.value_type, widen=widen, path=f"{path}[]"))
    if pa.types.is_map(old) and pa.types.is_map(new) and old.key_type == new.key_type:
        return pa.map_(old.key_type, merged(old.item_type, new.item_type, widen=widen, path=f"{path}{{}}"))
    wide = _wider(old, new)
    if wide is None or (wide != old and not widen):
        expected = f"{path} to be {old} as in the table" + (" (Delta keeps a column's type)" if wide else "")
        raise ConfigError("body_schema", str(new), expected)
    return wide


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    for chain in _WIDER:
        if one in chain and other in chain:
            return chain[-1]
    if pa.types.is_decimal128(one) and pa.types.is_decimal128(other) and one.scale == other.scale:
        return one if one.precision >= other.precision else other
    return None


def check_names(fields: pa.StructType, path: str = "") -> pa.StructType:
    """Return `fields`. Raises ConfigError if there are none, or if Spark regards two names as equal."""
    if not fields.num_fields:
        raise ConfigError("body_schema", path or "no fields", "a record with at least one field")
    seen: dict[str, str] = {}
    for field in fields:
        if (other := seen.setdefault(field.name.lower(), field.name)) != field.name or (
            fields.get_field_index(field.name) < 0
        ):
            expected = f"names that differ in more than case ({path}{other})"
            raise ConfigError("body_schema", f"{path}{field.name}", expected)
    return fields

"""Bodies as columns in any format: no row is lost, and no part of a body."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.pipeline.table import body_parsing

from cometmq.errors import ConfigError
from cometmq.pipeline.table.bodies import MOST_BYTES, MOST_VALUES, Parsed, merged

INT, LONG, FLOAT, DOUBLE, TEXT = pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string()


def struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct(list(fields.items()))


class Fixed:
    """A parser with scripted results for each body."""

    def __init__(self, parsed: dict[bytes, Parsed]) -> None:
        self.parsed = parsed

    def parse(self, body: bytes) -> Parsed:
        return self.parsed[body]


def columns(parsed: dict[bytes, Parsed], column: pa.StructType, *, keep: bool = True) -> list[dict[str, Any]]:
    return body_parsing.columns(Fixed(parsed), column, *parsed, keep=keep)


def test_each_body_becomes_columns() -> None:
    parsed = {
        b"good": Parsed({"id": 1}),
        b"more": Parsed({"id": 2}, b"rest"),
        b"bad": Parsed(None, None, "no good"),
        b"": Parsed(None, None, "empty"),
    }
    rows = columns(parsed, struct(id=LONG))
    assert [(row["body"], row["value"], row["body_rest"], row["body_error"]) for row in rows] == [
        (b"good", {"id": 1}, None, None),
        (b"more", {"id": 2}, b"rest", None),
        (b"bad", None, None, "no good"),
        (b"", None, None, "empty"),
    ]
    rows = columns(parsed, struct(id=LONG), keep=False)
    assert [row["body"] for row in rows] == [None, None, b"bad", b""]


def test_a_value_that_arrow_cannot_hold_is_an_error_of_its_row_alone() -> None:
    parsed = {b"%d" % number: Parsed({"price": Decimal(number)}) for number in range(20)}
    parsed[b"wrong"] = Parsed({"price": Decimal("1e30")}, b"rest")
    parsed[b"huge"] = Parsed({"price": 10**400})
    rows = columns(parsed, struct(price=pa.decimal128(10, 2)), keep=False)
    assert [row["body"] for row in rows if row["body_error"]] == [b"wrong", b"huge"]
    assert [row["value"]["price"] for row in rows[:20]] == list(range(20))
    assert rows[20]["body_rest"] is None, "the body is there as a whole"


def test_bodies_that_are_too_long_are_not_parsed() -> None:
    long = b"x" * (MOST_BYTES + 1)
    (row,) = columns({long: Parsed({"id": 1})}, struct(id=LONG), keep=False)
    assert (row["body"], row["value"]) == (long, None)
    assert row["body_error"] == f"longer than {MOST_BYTES} bytes"


def test_many_large_bodies_and_none() -> None:
    bodies = {bytes([number]) * MOST_BYTES: Parsed({"id": number}) for number in range(10)}
    assert [row["value"]["id"] for row in columns(bodies, struct(id=LONG))] == list(range(10))
    assert columns({}, struct(id=LONG)) == []


WIDE = struct(**{f"f{number}": LONG for number in range(1000)})


@pytest.mark.parametrize(
    ("kind", "few", "many"),
    [
        (pa.list_(LONG), [1] * MOST_VALUES, [1] * (MOST_VALUES + 1)),
        (pa.list_(WIDE), [{}] * 250, [{}] * 251),
        (pa.map_(TEXT, WIDE), {str(n): None for n in range(250)}, [(str(n), None) for n in range(251)]),
        (pa.list_(struct(a=pa.list_(WIDE))), [{"a": [{}]}] * 249, [{"a": [{}]}, None] * 250),
        (struct(a=pa.list_(pa.list_(LONG))), {"a": [[1] * 10, None]}, {"a": [[1] * 1000] * 250}),
    ],
)
def test_a_body_whose_arrays_hold_too_much_is_an_error(kind: pa.DataType, few: Any, many: Any) -> None:
    rows = columns({b"few": Parsed({"x": few}), b"many": Parsed({"x": many})}, struct(x=kind), keep=False)
    assert [row["body"] for row in rows] == [None, b"many"]
    assert rows[1]["body_error"] == "more than 250000 values in its arrays and maps"


def test_many_bodies_that_hold_much_are_rows_in_order() -> None:
    parsed = {b"%d" % n: Parsed({"id": n, "x": [n] * (MOST_VALUES // 3)}) for n in range(10)}
    rows = columns(parsed, struct(id=LONG, x=pa.list_(LONG)))
    assert [row["value"]["id"] for row in rows] == list(range(10))
    assert all(len(row["value"]["x"]) == MOST_VALUES // 3 for row in rows)


def test_an_error_text_is_bounded() -> None:
    (row,) = columns({b"": Parsed(None, None, "x" * 10_000)}, struct(id=LONG))
    assert len(row["body_error"]) == 300


ITEMS = pa.list_(struct(n=INT))


@pytest.mark.parametrize(
    ("old", "new", "both"),
    [
        (struct(a=LONG), struct(a=LONG), struct(a=LONG)),
        (struct(a=LONG), struct(b=TEXT), struct(a=LONG, b=TEXT)),
        (struct(a=INT), struct(a=LONG), struct(a=LONG)),
        (struct(a=LONG), struct(a=INT), struct(a=LONG)),
        (struct(a=FLOAT), struct(a=DOUBLE), struct(a=DOUBLE)),
        (struct(a=pa.decimal128(5, 2)), struct(a=pa.decimal128(9, 2)), struct(a=pa.decimal128(9, 2))),
        (struct(a=ITEMS), struct(a=pa.list_(struct(m=TEXT))), struct(a=pa.list_(struct(n=INT, m=TEXT)))),
        (struct(a=pa.map_(TEXT, INT)), struct(a=pa.map_(TEXT, LONG)), struct(a=pa.map_(TEXT, LONG))),
    ],
)  # fmt: skip
def test_what_a_table_becomes_when_bodies_change(
    old: pa.StructType, new: pa.StructType, both: pa.StructType
) -> None:
    assert merged(old, new, widen=True) == both


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (struct(a=LONG), struct(a=TEXT), r"value\.a to be int64"),
        (struct(a=LONG), struct(a=DOUBLE), r"value\.a to be int64"),
        (struct(a=pa.decimal128(5, 2)), struct(a=pa.decimal128(9, 3)), r"value\.a to be decimal"),
        (struct(a=ITEMS), struct(a=pa.list_(struct(n=TEXT))), r"value\.a\[\]\.n to be int32"),
        (struct(a=struct(b=LONG)), struct(a=LONG), r"value\.a to be struct"),
        (struct(a=LONG), struct(A=LONG), "differ in more than case"),
    ],
)
def test_changes_that_a_table_does_not_take(old: pa.StructType, new: pa.StructType, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        merged(old, new, widen=True)


def test_delta_takes_no_wider_numbers() -> None:
    with pytest.raises(ConfigError, match="Delta keeps a column's type"):
        merged(struct(a=INT), struct(a=LONG), widen=False)
    assert merged(struct(a=LONG), struct(a=INT, b=INT), widen=False) == struct(a=LONG, b=INT)

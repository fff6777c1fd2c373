"""JSON bodies: converted exactly to columns or kept whole in `body_rest`; hostile bodies do no harm."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pipeline.table.body_parsing import columns, never_fails

from cometmq.errors import ConfigError
from cometmq.pipeline.table.body_json import JsonParser, inferred

FIELDS = pa.struct(
    [
        ("id", pa.int64()),
        ("small", pa.int32()),
        ("price", pa.decimal128(10, 2)),
        ("rate", pa.float64()),
        ("name", pa.string()),
        ("ok", pa.bool_()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
        ("by key", pa.map_(pa.string(), pa.int64())),
        ("item", pa.struct([("sku", pa.string()), ("class", pa.int64())])),
    ]
)
PARSER = JsonParser(FIELDS)


def row(body: bytes, fields: pa.StructType = FIELDS) -> dict[str, Any]:
    """Return the columns of a body, converted through Arrow."""
    (made,) = columns(JsonParser(fields), fields, body)
    return made


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ('{"id": 9223372036854775807}', "id", 2**63 - 1),
        ('{"id": null}', "id", None),
        ("{}", "id", None),
        ('{"price": 12.30}', "price", Decimal("12.30")),
        ('{"price": "12.3"}', "price", Decimal("12.30")),
        ('{"rate": 1}', "rate", 1.0),
        ('{"name": "a\\"b\\u00fc\\u0000"}', "name", 'a"bü\0'),
        ('{"ok": true}', "ok", True),
        ('{"raw": "aGk="}', "raw", b"hi"),
        ('{"day": "2026-11-23"}', "day", date(2026, 11, 23)),
        ('{"at": "2026-11-23T08:00:00+01:00"}', "at", datetime(2026, 11, 23, 7, tzinfo=UTC)),
        ('{"tags": ["a", null]}', "tags", ["a", None]),
        ('{"by key": {"x": 1}}', "by key", [("x", 1)]),
        ('{"item": {"sku": "s", "class": 3}}', "item", {"sku": "s", "class": 3}),
        (' {"id": 5} \n', "id", 5),
    ],
)
def test_what_fits(text: str, name: str, value: Any) -> None:
    found = row(text.encode())
    assert (found["value"][name], found["body_rest"], found["body_error"]) == (value, None, None)


@pytest.mark.parametrize(
    "text",
    [
        '{"other":[1,{"a":2}]}',
        '{"id":9223372036854775808}',
        '{"id":1.0}',
        '{"id":"1"}',
        '{"id":true}',
        '{"small":3000000000}',
        '{"rate":1e999}',
        '{"name":5}',
        '{"at":"2026-11-23T08:00:00"}',
        '{"tags":["a",5]}',
        '{"item":{"sku":"s","colour":1}}',
        '{"other":' + "9" * 10_000 + "}",
    ],
)
def test_what_does_not_fit_is_kept_as_it_was_written(text: str) -> None:
    found = row(text[:-1].encode() + b',"ok":true}')
    assert found["body_rest"] == text.encode()
    assert found["value"] == dict.fromkeys(FIELDS.names) | {"ok": True}
    assert found["body_error"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"5", b"[]", b'"text"', b"{", b'{"id":1', b'{"id":1}{"id":2}', b'{"id":01}',
        b"{'id':1}", b'{"id":1,"id":2}', b'{"name":"\\u0061","name":"b"}', b'{"x":{"y":1,"y":2}}',
        b'{"item":{"sku":"a","sku":"b"}}', b'{"rate":NaN}', b'{"name":"\xff"}', b'{"x":"\xff"}',
        b'{"name":"\\ud800"}', b'\xef\xbb\xbf{"id":1}', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"tags":' + b"[" * 100_000, b'{"x":' * 100_000, b'{"price":1e400}', b'{"price":1.234}',
    ],
)  # fmt: skip
def test_what_is_no_object_or_is_hostile_is_an_error(body: bytes) -> None:
    found = row(body)
    assert found["value"] is None
    assert found["body_error"]
    assert found["body"] == body


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["id", "rate", "name", "ok", "tags", "x"]), values, max_size=6))
def test_nothing_is_lost(document: dict[str, Any]) -> None:
    found = PARSER.parse(json.dumps(document).encode())
    assert found.error is None
    assert found.value is not None
    rest = json.loads(found.rest or b"{}")
    assert {**{name: item for name, item in found.value.items() if item is not None}, **rest} == {
        name: item for name, item in document.items() if item is not None or name == "x"
    }


def test_no_bytes_make_it_fail() -> None:
    never_fails(PARSER)


NUMBERS = pa.struct(
    [
        ("long", pa.int64()),
        ("double", pa.float64()),
        ("float", pa.float32()),
        ("doubles", pa.list_(pa.float64())),
        ("floats", pa.map_(pa.string(), pa.float32())),
        ("item", pa.struct([("d", pa.float64()), ("f", pa.list_(pa.struct([("f", pa.float32())])))])),
    ]
)
number = st.from_regex(r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
numbers = st.floats(allow_nan=False, allow_infinity=False).map(repr) | number | st.just("null")
bodies_of_numbers = st.fixed_dictionaries(
    {},
    optional={
        "long": numbers,
        "double": numbers,
        "float": numbers
        | st.floats(width=32, allow_nan=False, allow_infinity=False).map(np.float32).map(str),
        "doubles": st.lists(numbers, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        "floats": numbers.map('{{"k": {}}}'.format),
        "item": st.tuples(numbers, numbers).map(lambda two: f'{{"d": {two[0]}, "f": [{{"f": {two[1]}}}]}}'),
    },
)


def said(kind: pa.DataType, value: Any) -> Any:
    """Return a column's value, with floats as the shortest decimal that identifies them."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: said(field.type, value[field.name]) for field in kind}
    if pa.types.is_list(kind):
        return [said(kind.value_type, item) for item in value]
    if pa.types.is_map(kind):
        return {key: said(kind.item_type, item) for key, item in value}
    return Decimal(str(np.float32(value)) if kind == pa.float32() else repr(value))


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@given(bodies_of_numbers)
@example({"double": "9007199254740993"})
@example({"float": "16777217"})
@example({"float": "1e39", "double": "1e-400"})
@example({"doubles": "[0.1, 0.1000000000000000055511151231257827]"})
@example({"double": "1e" + "9" * 30})
def test_columns_and_rest_say_the_numbers_that_were_sent(fields: dict[str, str]) -> None:
    body = "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
    found = row(body.encode(), NUMBERS)
    assert found["body_error"] is None
    rest = json.loads(found["body_rest"] or "{}", parse_int=str, parse_float=str)
    assert {name: json.loads(fields[name], parse_int=str, parse_float=str) for name in rest} == rest
    sent = {name: text for name, text in fields.items() if name not in rest}
    exact = {name: json.loads(text, parse_int=Decimal, parse_float=Decimal) for name, text in sent.items()}
    held = {field.name: found["value"][field.name] for field in NUMBERS}
    column = {name: said(NUMBERS.field(name).type, value) for name, value in held.items()}
    assert without_nulls(column) == without_nulls(exact)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("0.1", True), ("1e22", True), ("12345678.125", True), ("9007199254740992", True), ("-0.0", True),
        ("9007199254740993", False), ("0.10000000000000001", False), ("1e-400", False),
    ],
)  # fmt: skip
def test_a_double_holds_what_its_shortest_text_says(text: str, fits: bool) -> None:
    assert row(b'{"rate":%s}' % text.encode())["body_rest"] == (
        None if fits else b'{"rate":%s}' % text.encode()
    )


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("2026-11-23T08:00:00.123456Z", True), ("2026-11-23T08:00:00.123456000+01:00", True),
        ("2026-11-23T08:00:00.1234567Z", False), ("2026-11-23T08:00:00.9999999Z", False),
        (r"2026-11-23T08:00:00\u002e000000001Z", False), ("0001-01-01T00:00:00+00:01", False),
        ("9999-12-31T23:59:59Z", True), ("9999-12-31T23:59:59-00:01", False),
    ],
)  # fmt: skip
def test_a_time_finer_than_a_microsecond_is_kept_as_it_was_written(text: str, fits: bool) -> None:
    found = row(b'{"id":1,"at":"%s"}' % text.encode())
    assert (found["value"]["at"] is not None) == fits
    assert found["body_rest"] == (None if fits else b'{"at":"%s"}' % text.encode())


@pytest.mark.parametrize(
    "text", ["1e-999999999", '"1e-999999999"', '"\uff11e-999999999"', '"NaN"', "0e999999999"]
)
def test_a_decimal_far_from_any_column_is_kept_as_it_was_written(text: str) -> None:
    found = row(b'{"price":%s,"id":1}' % text.encode())
    assert (found["body_rest"], found["value"]["id"]) == (b'{"price":%s}' % text.encode(), 1)


@pytest.mark.parametrize("text", ["aGl=", "aB==", r"aGl\u003d"])
def test_base64_with_bits_to_spare_is_kept_as_it_was_written(text: str) -> None:
    assert row(b'{"raw":"%s"}' % text.encode())["body_rest"] == b'{"raw":"%s"}' % text.encode()


def test_fields_are_found_in_bodies() -> None:
    bodies = [
        b'{"id":1,"price":2,"n":null,"tags":["a"],"item":{"sku":"s","empty":{}},"mixed":1,"big":99999999999999999999}',
        b'{"id":2,"price":2.5,"n":null,"tags":[],"item":{"count":1},"mixed":"x","ID":7,"flag":true}',
        b"no JSON", b"[1]", b'{"list":[1,"x"],"unknown":[]}',
    ]  # fmt: skip
    assert inferred(bodies) == pa.struct(
        [
            ("id", pa.int64()),
            ("price", pa.float64()),
            ("tags", pa.list_(pa.string())),
            ("item", pa.struct([("sku", pa.string()), ("count", pa.int64())])),
            ("flag", pa.bool_()),
        ]
    )


@pytest.mark.parametrize("bodies", [[], [b"x"], [b"{}"], [b'{"a":null}'], [b"[" * 100_000]])
def test_no_fields_are_found(bodies: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="body_schema"):
        inferred(bodies)


def test_empty_objects_in_an_array_cost_little() -> None:
    wide = pa.struct([(f"f{number}", pa.float64()) for number in range(100)])
    fields = pa.struct([("items", pa.list_(wide)), ("one", wide)])
    tracemalloc.start()
    found = row(b'{"items":[' + b"{}," * 300_000 + b"{}]}", fields)
    assert tracemalloc.get_traced_memory()[1] < 20 * 1024 * 1024
    tracemalloc.stop()
    assert found["body_error"] == "more than 250000 values in its arrays and maps"
    assert row(b'{"items":[{"f0":1}' + b",{}" * 2000 + b"]}", fields)["value"]["items"][0]["f0"] == 1


def leaves(kind: pa.DataType) -> int:
    return sum(leaves(field.type) for field in kind) if pa.types.is_struct(kind) else 1


@pytest.mark.parametrize(
    "hostile",
    [
        {f"n{number}": 1 for number in range(5000)},
        {f"n{number}": {f"m{inner}": {"x": 1, "y": 1} for inner in range(40)} for number in range(40)},
        {f"n{number}": {f"m{inner}": 1 for inner in range(200)} for number in range(200)},
    ],
)
def test_the_rarest_of_too_many_fields_get_no_columns(
    hostile: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    usual = b'{"id":1,"item":{"sku":"s"}}'
    found = inferred([usual, json.dumps(hostile).encode(), usual])
    assert leaves(found) == 1000
    assert found.field("id").type == pa.int64()
    assert "more than 1000 fields" in caplog.text


def test_names_that_cannot_be_columns_stay_in_the_rest() -> None:
    names = ["", "n" * 129, "a\nb", "\u202e", "fine"]
    assert inferred([json.dumps(dict.fromkeys(names, 1)).encode()]).names == ["fine"]


def test_few_bodies_and_bytes_are_looked_at() -> None:
    looked = 0

    def endless(body: bytes) -> Iterator[bytes]:
        nonlocal looked
        while True:
            looked += 1
            yield body

    inferred(endless(b'{"id":1}'))
    assert looked == 10_000
    large = json.dumps({"text": "x" * 1_000_000, "list": [1] * 10}).encode()
    small = b'{"id":1}'
    assert inferred([large] * 50 + [small]).names == ["text", "list", "id"]
    with pytest.raises(ConfigError, match="first 4 bodies"):
        inferred([b"x" * 1_000_000] * 50)


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.timestamp("us"), pa.map_(pa.int64(), pa.string()), pa.list_(pa.int16())]
)
def test_types_that_json_does_not_have(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match=r"body\.odd"):
        JsonParser(pa.struct([("odd", kind)]))

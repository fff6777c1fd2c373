"""JSON bodies: exactly into columns or wholly into `body_rest`, and hostile ones do no harm."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import ConfigError
from cometmq.pipeline.table.bodies import Bodies, with_columns
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
    """The columns of a body, through Arrow."""
    batch = pa.record_batch({"body": pa.array([body], pa.binary())})
    found = with_columns(batch, Bodies("json", (b"", ""), fields, fields, True), JsonParser(fields))
    (made,) = found.to_pylist()
    return dict(made)


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


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(body: bytes) -> None:
    found = PARSER.parse(body)
    assert (found.value is None) == (found.error is not None)


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


def test_a_body_with_thousands_of_names_gives_no_thousands_of_columns() -> None:
    body = json.dumps({f"n{number}": 1 for number in range(5000)}).encode()
    assert inferred([body]).num_fields == 500


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.timestamp("us"), pa.map_(pa.int64(), pa.string()), pa.list_(pa.int16())]
)
def test_types_that_json_does_not_have(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match=r"body\.odd"):
        JsonParser(pa.struct([("odd", kind)]))

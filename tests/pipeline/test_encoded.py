"""Rows encoded together become the same messages as one by one, or are left to the general encoder."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext
from pyspark.sql.types import ArrayType, IntegerType, MapType, StringType, StructField, StructType

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import SinkRowError
from cometmq.pipeline.base.options import WriteOptions, write_options
from cometmq.pipeline.sink import encoded, sink
from cometmq.pipeline.sink.bad_rows import SCHEMA
from cometmq.pipeline.sink.encoded import EncodedRows, encode_rows
from cometmq.pipeline.sink.rows import RowMessage, check_columns, messages_of
from cometmq.pipeline.sink.sink import CometWriter, MessageIds
from cometmq.protocol.batch import encode_batch

IDS = MessageIds("query", "0", 3)
TEXT = st.one_of(st.none(), st.text(max_size=9), st.sampled_from(["", "a b", "TagA", "äöü"]))


def options(**given: str) -> WriteOptions:
    return write_options({"namesrv": "127.0.0.1:1", "topic": "t", **given})


def batch_of(rows: list[dict[str, Any]], **types: pa.DataType) -> pa.RecordBatch:
    schema = pa.schema({"body": pa.binary(), "keys": pa.string(), "tags": pa.string()} | types)
    return pa.RecordBatch.from_pylist(rows, schema)


@given(
    rows=st.lists(
        st.fixed_dictionaries({"body": st.binary(min_size=1, max_size=40), "keys": TEXT, "tags": TEXT}),
        min_size=1,
    ),
    first=st.integers(0, 2**40 - 100),
    skipped=st.integers(0, 3),
    most=st.integers(1, 9),
)
def test_they_are_what_they_are_one_by_one(
    rows: list[dict[str, Any]], first: int, skipped: int, most: int
) -> None:
    batch = batch_of(rows).slice(min(skipped, len(rows) - 1))
    encoded = encode_rows(batch, options(), first, IDS.prefix)
    if encoded is None:
        assert any(
            mark in (row[name] or "") for row in rows for name in ("keys", "tags") for mark in "\x01\x02"
        )
        return
    messages = list(messages_of(batch, options(), first, IDS))
    assert list(encoded) == messages
    parts = list(encoded.parts(most, 150))
    assert [message for part in parts for message in part] == messages
    for part in parts:
        assert 1 <= len(part) <= most
        assert len(part.body) <= 150 or len(part) == 1
        assert part.body == encode_batch((each.flag, each.body, each.properties) for each in part)
        assert part.body_bytes == sum(len(each.body) for each in part)


@pytest.mark.parametrize(
    ("row", "types"),
    [
        ({"body": None}, {}),
        ({"body": b""}, {}),
        ({"body": b"b", "keys": "a\x01b"}, {}),
        ({"body": b"b", "tags": "a\x02b"}, {}),
        ({"body": b"b", "keys": "k" * 40_000}, {}),
        ({"body": b"b", "flag": 7}, {"flag": pa.int32()}),
        ({"body": b"b", "delay_level": 1}, {"delay_level": pa.int32()}),
        ({"body": b"b", "sharding_key": "k"}, {"sharding_key": pa.string()}),
        ({"body": b"b", "msg_id": "id"}, {"msg_id": pa.string()}),
        ({"body": b"b", "properties": [("a", "b")]}, {"properties": pa.map_(pa.string(), pa.string())}),
    ],
)
def test_a_row_of_another_kind_leaves_its_batch_to_be_looked_at(
    row: dict[str, Any], types: dict[str, pa.DataType]
) -> None:
    assert encode_rows(batch_of([{"body": b"plain"}, row], **types), options(), 0, IDS.prefix) is None
    assert encode_rows(batch_of([{"body": b"plain"}], **types), options(), 0, IDS.prefix) is not None


@pytest.mark.parametrize("field", ["keys", "tags", "sharding_key", "msg_id", "topic", "properties"])
def test_a_text_that_is_not_utf8_is_a_bad_row(field: str) -> None:
    """Spark's strings may hold any bytes; the source would report a record with such a property as bad."""
    broken = pa.array([b"a\xff"]).view(pa.string())
    array = broken
    if field == "properties":
        array = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["name"]), broken)
    batch = pa.record_batch({"body": pa.array([b"b"]), field: array})
    to = write_options({"namesrv": "127.0.0.1:1"} | ({} if field == "topic" else {"topic": "t"}))
    assert encode_rows(batch, to, 0, IDS.prefix) is None
    with pytest.raises(SinkRowError, match=f"{field}: is not UTF-8"):
        list(messages_of(batch, to, 0, IDS))
    bad: list[dict[str, Any]] = []
    assert list(messages_of(batch, to, 0, IDS, bad.append)) == []
    (row,) = pa.Table.from_pylist(bad, SCHEMA).to_pylist()
    assert row[field] == ([("name", "a\\xff")] if field == "properties" else "a\\xff")


def test_a_body_is_bytes_of_any_kind_and_a_column_that_does_not_count_may_hold_anything() -> None:
    broken = pa.array([b"a\xff"]).view(pa.string())
    batch = pa.record_batch({"value": broken, "topic": broken, "flag": pa.array([1])})
    (message,) = messages_of(batch, options(), 0, IDS)
    assert (message.topic, message.body) == ("t", b"a\xff")


class SentRows:
    """A sender that keeps the messages, and the size of each `EncodedRows`."""

    messages = bytes = 0

    def __init__(self) -> None:
        self.sent: list[RowMessage] = []
        self.sizes: list[int] = []

    def send_rows(self, rows: EncodedRows) -> None:
        self.sent.extend(rows)
        self.sizes.append(rows.body_bytes)

    def flush(self) -> None: ...
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_large_batch_is_encoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's arrays of binary values hold less than 2 GiB, but Spark's batches may have more."""
    sender = SentRows()
    monkeypatch.setattr(encoded, "MAX_SLICE_BYTES", 1000)
    monkeypatch.setattr(sink, "Sender", lambda *_: sender)
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(partitionId=lambda: 3))
    rows = [{"body": b"b" * (3000 if row == 20 else 100), "keys": f"k{row}"} for row in range(45)]
    writer = CometWriter(StructType([StructField("body", StringType())]), options(writeId="query"))
    writer.write(iter([batch_of(rows, body=pa.large_binary()), batch_of(rows[:3])]))
    expected = messages_of(batch_of(rows + rows[:3]), options(), 0, IDS)
    assert sender.sent == list(expected)
    assert max(sender.sizes) == 3000
    assert sorted(sender.sizes)[-2] <= 1000


def test_the_end_of_a_large_array_is_encoded() -> None:
    data = np.zeros(2**31 + 8, np.uint8)  # Memory is used only for the pages that are written
    data[-8:] = np.frombuffer(b"abcdefgh", np.uint8)
    offsets = pa.py_buffer(np.array([0, 2**31, 2**31 + 3, 2**31 + 8]))
    bodies = pa.Array.from_buffers(pa.large_binary(), 3, [None, offsets, pa.py_buffer(data)])
    rows = encode_rows(pa.record_batch({"body": bodies}).slice(1), options(), 0, IDS.prefix)
    assert rows is not None
    assert [message.body for message in rows] == [b"abc", b"defgh"]


def test_a_separator_outside_of_a_slice_does_not_count() -> None:
    batch = batch_of([{"body": b"b", "keys": "a\x01b"}, {"body": b"b", "keys": "k"}])
    assert encode_rows(batch, options(), 0, IDS.prefix) is None
    assert encode_rows(batch.slice(1), options(), 0, IDS.prefix) is not None


@pytest.mark.parametrize("topic", ["%RETRY%g", "SCHEDULE_TOPIC_XXXX", "a b"])
def test_topics_that_take_no_batches_or_none_of_ours_are_looked_at(topic: str) -> None:
    assert encode_rows(batch_of([{"body": b"b"}]), options(topic=topic), 0, IDS.prefix) is None


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"body": b""}, "body", "is empty"),  # as `Message` refuses it
        ({"body": None}, "body", "is null"),
        ({"properties": [("colour", None)]}, "properties", "the value of colour is null"),
        ({"properties": [("size", "1"), ("colour", "")]}, "properties", "the value of colour is empty"),
        ({"properties": [("", "red")]}, "properties", "a name is empty"),
        ({"delay_level": -1}, "delay_level", "-1 is negative"),  # as `Message` refuses it
        ({"tags": "a\x02b"}, "tags", "the name or value of 'TAGS' contains the character"),
        ({"keys": "a\x01b"}, "keys", "the name or value of 'KEYS' contains the character"),
        ({"properties": [("a\x01", "b")]}, "properties", r"the name or value of 'a\\x01' contains"),
    ],
)
def test_a_row_that_would_lose_something_is_bad(row: dict[str, Any], field: str, problem: str) -> None:
    types = {"properties": pa.map_(pa.string(), pa.string()), "delay_level": pa.int32()}
    batch = batch_of([{"body": b"b"} | row], **types)
    with pytest.raises(SinkRowError, match=f"{field}: {problem}"):
        list(messages_of(batch, options(), 0, IDS))
    bad: list[dict[str, Any]] = []
    assert list(messages_of(batch, options(), 0, IDS, bad.append)) == []
    (only,) = bad
    assert (only["field"], bool(re.match(problem, only["problem"]))) == (field, True)


def test_what_was_read_can_be_written_again() -> None:
    """A property that the broker sets is omitted, whatever its value."""
    properties = [("TRACE_ON", ""), ("colour", "red")]
    batch = batch_of([{"body": b"b", "properties": properties}], properties=pa.map_(pa.string(), pa.string()))
    (message,) = messages_of(batch, options(), 0, IDS)
    assert b"colour\x01red" in message.properties


@pytest.mark.parametrize("names", [("body", "value"), ("body", "tags", "tags")])
def test_two_columns_of_one_meaning_are_refused(names: tuple[str, ...]) -> None:
    schema = StructType([StructField(name, StringType()) for name in names])
    with pytest.raises(ConfigError, match=r"one of the two|each name once"):
        check_columns(schema, options())


@pytest.mark.parametrize(
    "kind", [MapType(StringType(), IntegerType()), MapType(StringType(), ArrayType(StringType()))]
)
def test_properties_are_texts(kind: MapType) -> None:
    """The number 0 would count as an empty value, and a list would be sent in Python's notation."""
    schema = StructType([StructField("body", StringType()), StructField("properties", kind)])
    with pytest.raises(ConfigError, match=r"properties map<.*expected properties map<string,string>"):
        check_columns(schema, options())


def test_a_blank_topic_is_none() -> None:
    with pytest.raises(ConfigError, match="a topic: the option, or a column"):
        check_columns(StructType([StructField("body", StringType())]), options(topic=" "))


def test_bodies_may_be_text_and_be_called_value() -> None:
    batch = pa.record_batch({"value": pa.array(["äöü", "b"])})
    encoded = encode_rows(batch, options(), 0, IDS.prefix)
    assert encoded is not None
    assert [message.body for message in encoded] == ["äöü".encode(), b"b"]

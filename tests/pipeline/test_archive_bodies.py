"""Bodies as columns of an archive: parsed fields, preserved rests, and columns that change between runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from deltalake import DeltaTable
from google.protobuf import descriptor_pb2
from pyspark.sql import Row, SparkSession
from tests.pipeline.feeding import Topic

from cometmq.errors import ConfigError
from cometmq.pipeline.base.options import write_options
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import archived, completeness
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.sink.sending import Sender

Run = Callable[..., list[Row]]
FORMATS = ["parquet", "delta", "iceberg"]


def send(topic: Topic, *bodies: bytes) -> None:
    with Sender(write_options({"namesrv": topic.namesrv, "topic": topic.name})) as sender:
        for body in bodies:
            sender.send(RowMessage(topic.name, body, b"", 0, 0, None))
        sender.flush()


@pytest.fixture
def run(spark: SparkSession, topic: Topic, output: str) -> Run:
    """Archive the topic's messages and return all rows by queue and offset."""

    def run(**options: Any) -> list[Row]:
        summary = archive(spark, topic.namesrv, [topic.name], output, **options)
        assert summary.complete
        rows = archived(spark, output).orderBy("store_timestamp", "queue_id", "queue_offset")
        return rows.collect()

    return run


@pytest.mark.parametrize("table_format", FORMATS)
def test_json_by_a_schema(
    spark: SparkSession, run: Run, topic: Topic, output: str, table_format: str
) -> None:
    send(topic, b'{"id":1,"items":[{"n":2}]}', b'{"id":2,"more":true}', b"no JSON", b'{"id":"x"}')
    schema = "id bigint, items array<struct<n: int>>"
    rows = run(table_format=table_format, body_format="json", body_schema=schema, keep_body=False)
    found = {(row.value and row.value.id, row.body_rest, row.body, bool(row.body_error)) for row in rows}
    assert found == {
        (1, None, None, False),
        (2, b'{"more":true}', None, False),
        (None, None, b"no JSON", True),
        (None, b'{"id":"x"}', None, False),
    }
    query = archived(spark, output).selectExpr("explode(value.items) AS item")
    assert [row.item.n for row in query.collect()] == [2]
    assert sum(row.records for row in completeness(spark, output).collect()) == 4


@pytest.mark.parametrize("table_format", FORMATS)
def test_columns_come_and_go_between_runs(run: Run, topic: Topic, table_format: str) -> None:
    send(topic, b"before")
    run(table_format=table_format)
    send(topic, b'{"id":1,"old":"a"}')
    run(table_format=table_format, body_format="json")  # the fields are inferred
    send(topic, b'{"id":2,"old":"b","new":{"deep":5}}')
    run(table_format=table_format, body_format="json")  # the columns stay, and new fields go to `body_rest`
    send(topic, b'{"id":3,"new":{"deep":6}}')
    run(table_format=table_format, body_format="json", body_schema="id bigint, new struct<deep: bigint>")
    send(topic, b"after")
    rows = run(table_format=table_format)
    values = {
        bytes(row.body): (row.value and row.value.asDict(recursive=True), row.body_rest) for row in rows
    }
    assert values == {
        b"before": (None, None),
        b'{"id":1,"old":"a"}': ({"id": 1, "old": "a", "new": None}, None),
        b'{"id":2,"old":"b","new":{"deep":5}}': ({"id": 2, "old": "b", "new": None}, b'{"new":{"deep":5}}'),
        b'{"id":3,"new":{"deep":6}}': ({"id": 3, "old": None, "new": {"deep": 6}}, None),
        b"after": (None, None),
    }
    send(topic, b"{}")
    with pytest.raises(ConfigError, match=r"value\.id to be int64"):
        run(table_format=table_format, body_format="json", body_schema="id string")


@pytest.mark.parametrize("table_format", ["parquet", "iceberg"])
def test_numbers_get_wider(run: Run, topic: Topic, table_format: str) -> None:
    how = {"table_format": table_format, "body_format": "json"}
    send(topic, b'{"n":1,"in":{"n":0.5}}')
    run(**how, body_schema="n int, in struct<n: float>")
    send(topic, b'{"n":3000000000,"in":{"n":0.1}}')
    rows = run(**how, body_schema="n bigint, in struct<n: double>")
    assert [(row.value.n, row.value["in"].n) for row in rows] == [(1, 0.5), (3_000_000_000, 0.1)]


def test_numbers_of_delta_do_not(run: Run, topic: Topic) -> None:
    send(topic, b'{"n":1}')
    run(table_format="delta", body_format="json", body_schema="n int")
    send(topic, b'{"n":1}')
    with pytest.raises(ConfigError, match="Delta keeps a column's type"):
        run(table_format="delta", body_format="json", body_schema="n bigint")


def test_avro(run: Run, topic: Topic, tmp_path: Path) -> None:
    fields = [{"name": "id", "type": "int"}, {"name": "name", "type": ["null", "string"]}]
    schema = {"type": "record", "name": "Order", "fields": fields}
    (tmp_path / "order.avsc").write_text(json.dumps(schema))
    datum = BytesIO()
    fastavro.schemaless_writer(datum, fastavro.parse_schema(schema), {"id": 7, "name": "n"})
    send(topic, datum.getvalue(), b"\xff")
    rows = run(body_format="avro", body_schema=str(tmp_path / "order.avsc"))
    assert {(row.value and str(row.value.asDict()), bool(row.body_error)) for row in rows} == {
        ("{'id': 7, 'name': 'n'}", False), (None, True)
    }  # fmt: skip


def test_protobuf(run: Run, topic: Topic, tmp_path: Path) -> None:
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", syntax="proto3")
    order = file.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_INT32)
    (tmp_path / "order.desc").write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    send(topic, b"\x08\x07", b"\x08\x07\x10\x01", b"\xff")
    rows = run(body_format="protobuf", body_schema=f"{tmp_path}/order.desc:Order")
    assert {(row.value and row.value.id, row.body_rest, bool(row.body_error)) for row in rows} == {
        (7, None, False), (7, b"\x10\x01", False), (None, None, True)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"body_format": "xml"}, "body_format"),
        ({"body_schema": "id bigint"}, "body_schema"),
        ({"keep_body": False}, "keep_body"),
        ({"body_format": "json", "body_schema": "id bigint,"}, "body_schema"),
        ({"body_format": "json", "body_schema": "id smallint"}, "body_schema"),
        ({"body_format": "json", "body_schema": "a int, A int"}, "body_schema"),
        ({"body_format": "json", "body_schema": "m map<int, string>"}, "body_schema"),
        ({"body_format": "avro"}, "body_schema"),
        ({"body_format": "avro", "body_schema": "/nowhere.avsc"}, "body_schema"),
        ({"body_format": "protobuf", "body_schema": "/nowhere.desc"}, "body_schema"),
        ({"body_format": "protobuf", "body_schema": "/nowhere.desc:Order"}, "body_schema"),
    ],
)
def test_settings_that_mean_nothing(run: Run, output: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(**options)
    assert caught.value.key == key
    assert not Path(output).exists(), "it was refused before anything was done"


def test_no_fields_to_be_found(run: Run, topic: Topic) -> None:
    send(topic, b"no JSON")
    with pytest.raises(ConfigError, match="body_schema"):
        run(body_format="json")


def test_other_readers_see_the_columns(run: Run, topic: Topic, output: str) -> None:
    send(topic, b'{"id":1}')
    run(table_format="delta", body_format="json")
    (row,) = DeltaTable(output).to_pyarrow_table().to_pylist()
    assert row["value"] == {"id": 1}

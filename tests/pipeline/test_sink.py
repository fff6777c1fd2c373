"""The sink: each row becomes a message, and a retry uses the same message id."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType
from tests.pipeline.feeding import Topic

from cometmq.pipeline.base.options import write_options
from cometmq.pipeline.sink import sink
from cometmq.pipeline.sink.sink import CometStreamWriter

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def orders(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).select(
        F.concat(F.lit("order "), "id").alias("value"),
        F.concat(F.lit("tag"), F.col("id") % 3).alias("tags"),
        F.concat(F.lit("o"), "id", F.lit(" k")).alias("keys"),
        F.create_map(F.lit("clerk"), F.concat(F.lit("c"), F.col("id") % 5)).alias("properties"),
        (F.col("id") % 4).cast("int").alias("flag"),
    )


@pytest.fixture(autouse=True)
def active(spark: SparkSession) -> None:
    """Make the session active in the JVM's thread.

    Spark looks for a writer's format only in the active session, which threads of other tests can change.
    Creating a frame from Python sets it.
    """
    spark.createDataFrame([], "nothing int")


def read(spark: SparkSession, topic: Topic) -> DataFrame:
    return spark.read.format("cometmq").options(**topic.options).load()


def write(frame: DataFrame, topic: Topic, **options: str) -> None:
    frame.write.format("cometmq").options(namesrv=topic.namesrv, topic=topic.name, **options).mode(
        "append"
    ).save()


@pytest.mark.slow("Spark writes and reads")
@pytest.mark.representative
def test_a_batch_with_everything_a_message_has(spark: SparkSession, topic: Topic) -> None:
    write(orders(spark, 1000), topic)
    rows = sorted(read(spark, topic).collect(), key=lambda row: int(bytes(row.body).decode().split()[1]))
    assert len(rows) == 1000
    for number, row in enumerate(rows):
        assert bytes(row.body).decode() == f"order {number}"
        assert (row.tags, row["keys"], row.flag) == (f"tag{number % 3}", f"o{number} k", number % 4)
        assert row.properties["clerk"] == f"c{number % 5}"
    assert len({row.msg_id for row in rows}) == 1000
    assert all(len(row.msg_id) == 32 for row in rows)
    assert len({row.queue_id for row in rows}) > 1


@pytest.mark.slow("a dozen Spark jobs")
def test_a_column_says_where_to(spark: SparkSession, topic: Topic) -> None:
    second = Topic(f"{topic.name}b", topic.namesrv)
    frame = spark.createDataFrame(
        [(topic.name, "one"), (second.name, "two"), (topic.name, "three")], "topic string, body string"
    )
    frame.write.format("cometmq").option("namesrv", topic.namesrv).mode("append").save()
    assert sorted(bytes(row.body) for row in read(spark, topic).collect()) == [b"one", b"three"]
    assert [bytes(row.body) for row in read(spark, second).collect()] == [b"two"]


def test_rows_of_one_key_keep_their_order_in_one_queue(spark: SparkSession, topic: Topic) -> None:
    frame = spark.range(0, 600, 1, 1).select(
        F.col("id").cast("string").alias("body"),
        F.concat(F.lit("key"), F.col("id") % 5).alias("sharding_key"),
    )
    write(frame, topic, batchRecords="8")
    rows = read(spark, topic).orderBy("queue_id", "queue_offset").collect()
    for key in range(5):
        own = [row for row in rows if int(row.body.decode()) % 5 == key]
        assert len({row.queue_id for row in own}) == 1
        assert [int(row.body.decode()) for row in own] == list(range(key, 600, 5))


def test_what_was_read_can_be_written_again(spark: SparkSession, topic: Topic) -> None:
    topic.send(50)
    copy = Topic(f"{topic.name}c", topic.namesrv)
    write(read(spark, topic), copy)
    first = {row["keys"]: row for row in read(spark, topic).collect()}
    second = {row["keys"]: row for row in read(spark, copy).collect()}
    assert first.keys() == second.keys()
    for key, row in second.items():
        assert (row.body, row.tags, row.properties["parity"]) == (
            first[key].body, first[key].tags, first[key].properties["parity"]
        )  # fmt: skip
        assert row.msg_id == first[key].msg_id  # the column msg_id preserves ids


def test_a_write_with_an_id_repeats_its_message_ids(spark: SparkSession, topic: Topic) -> None:
    write(orders(spark, 100), topic, writeId="load-2026-11-21")
    write(orders(spark, 100), topic, writeId="load-2026-11-21")
    rows = read(spark, topic).collect()
    ids: dict[str, set[bytes]] = {}
    for row in rows:
        ids.setdefault(row.msg_id, set()).add(bytes(row.body))
    assert (len(rows), len(ids)) == (200, 100)
    assert all(len(bodies) == 1 for bodies in ids.values())
    write(orders(spark, 100), topic)
    assert read(spark, topic).select("msg_id").distinct().count() == 200


@pytest.mark.slow("a stream that starts three times")
def test_a_stream_from_topic_to_topic_repeats_ids_when_a_batch_is_replayed(
    spark: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    topic.send(90)
    copy = Topic(f"{topic.name}d", topic.namesrv)

    def run() -> None:
        source = (
            spark.readStream.format("cometmq").options(**topic.options, startingOffsets="earliest").load()
        )
        query = (
            source.select("body", "tags").writeStream.format("cometmq")
            .options(namesrv=topic.namesrv, topic=copy.name, checkpointLocation=str(tmp_path / "cp"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(90)

    run()
    assert read(spark, copy).count() == 90
    last = max(int(path.name) for path in (tmp_path / "cp" / "commits").iterdir() if path.name.isdigit())
    (tmp_path / "cp" / "commits" / str(last)).unlink()
    (tmp_path / "cp" / "commits" / f".{last}.crc").unlink(missing_ok=True)
    run()
    rows = read(spark, copy).collect()
    counts = Counter((row.msg_id, bytes(row.body)) for row in rows)
    assert len(counts) == 90  # at least once, and duplicates are recognizable
    assert set(counts.values()) == {2}
    assert len({msg_id for msg_id, _ in counts}) == 90


@pytest.mark.parametrize(
    ("known", "write_id", "repeats"),
    [
        ({"sql.streaming.queryId": "q", "streaming.sql.batchId": "7"}, None, True),
        ({"streaming.sql.batchId": "7"}, "mine", True),
        ({"streaming.sql.batchId": "7"}, None, False),
        ({"sql.streaming.queryId": "", "streaming.sql.batchId": "7"}, None, False),
        ({"sql.streaming.queryId": "q"}, None, False),
        ({}, "mine", False),
    ],
)
def test_ids_of_a_stream_never_collide_where_spark_does_not_tell_query_and_batch(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, str], write_id: str | None, repeats: bool
) -> None:
    class Context:
        getLocalProperty = staticmethod(known.get)  # noqa: N815

    monkeypatch.setattr(TaskContext, "get", Context)
    monkeypatch.setattr(sink, "_write", lambda rows, options, query, batch: (query, batch))
    options = {"namesrv": "127.0.0.1:1", "topic": "t"} | ({"writeId": write_id} if write_id else {})
    writer = CometStreamWriter(StructType([StructField("body", StringType())]), write_options(options))
    first, second = writer.write(iter([])), writer.write(iter([]))
    assert (first == second) is repeats


def test_the_example_of_the_page_writes_rows_with_a_number_as_id(spark: SparkSession, topic: Topic) -> None:
    (example,) = re.findall(r"```python\n(df\..*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    df = spark.createDataFrame([(7, "new"), (8, "paid")], "id bigint, status string")
    exec(example.replace("127.0.0.1:9876", topic.namesrv).replace('"orders"', repr(topic.name)), {"df": df})
    rows = {(row["keys"], row.tags, row.body.decode()) for row in read(spark, topic).collect()}
    assert rows == {("7", "new", '{"id":7,"status":"new"}'), ("8", "paid", '{"id":8,"status":"paid"}')}


GOOD = {"topic": None, "body": b"good", "properties": {}, "flag": 0, "msg_id": None}
LONG = "x" * 40_000
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"body": None}, "body", "is null"),
    ({"topic": ""}, "topic", "is null"),
    ({"topic": "two words"}, "topic", "characters other than"),
    ({"topic": "T" * 128}, "topic", "128 characters"),
    ({"topic": "SCHEDULE_TOPIC_XXXX"}, "topic", "belongs to the brokers"),
    ({"properties": {"a": "b\x01c"}}, "properties", "character"),
    ({"properties": {"a": LONG}}, "properties", "32767"),
    ({"msg_id": "a\x02b"}, "msg_id", "character"),
    ({"flag": 2**31}, "flag", "32 bits"),
    ({"body": bytes(5 << 20)}, "message", "MESSAGE_ILLEGAL"),  # exceeds the broker's maxMessageSize
    ({"body": bytes(17 << 20)}, "body", "more than a request can carry"),
]


def test_rows_that_cannot_be_sent_go_to_a_table_with_the_reason(
    spark: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    ddl = "topic string, body binary, properties map<string,string>, flag bigint, msg_id string"
    rows = [GOOD | {"topic": topic.name} | change for change, _, _ in [({}, "", "")] * 20 + BAD]
    frame = spark.createDataFrame([tuple(row.values()) for row in rows], ddl).coalesce(1)
    path = tmp_path / "bad"

    def send() -> None:
        options = {"namesrv": topic.namesrv, "badRecordsPath": str(path), "writeId": "once"}
        frame.write.format("cometmq").options(**options).mode("append").save()

    send()
    assert [bytes(row.body) for row in read(spark, topic).collect()] == [b"good"] * 20
    table = spark.read.parquet(str(path))
    found = [(row.field, row.problem) for row in table.select("field", "problem").collect()]
    assert len(found) == len(BAD)
    for _, field, words in BAD:
        assert any(in_field == field and words in problem for in_field, problem in found), (field, words)
    (large,) = table.filter("field = 'message'").collect()
    assert (large.topic, len(large.body), large.flag, len(large.msg_id)) == (topic.name, 5 << 20, 0, 32)
    send()
    assert spark.read.parquet(str(path)).count() == len(BAD), "a repetition writes the same files"
    assert not list(path.glob("_*"))


def test_what_a_retry_doubled_can_be_told_by_an_id_of_the_rows_own(spark: SparkSession, topic: Topic) -> None:
    frame = orders(spark, 50).withColumn("msg_id", F.concat(F.lit("order-"), "keys"))
    write(frame, topic)
    write(frame.filter("keys LIKE 'o1%'"), topic)
    rows = read(spark, topic)
    assert rows.count() == 61
    assert rows.dropDuplicates(["msg_id"]).count() == 50


def test_keys_that_are_repartitioned_and_sorted_keep_their_order(spark: SparkSession, topic: Topic) -> None:
    frame = spark.range(0, 300, 1, 3).select(
        F.col("id").cast("string").alias("body"), (F.col("id") % 7).cast("string").alias("sharding_key"), "id"
    )
    ordered = frame.repartition(2, "sharding_key").sortWithinPartitions("sharding_key", "id").drop("id")
    write(ordered, topic, batchRecords="8")
    rows = read(spark, topic).orderBy("queue_id", "queue_offset").collect()
    for key in range(7):
        own = [int(row.body.decode()) for row in rows if int(row.body.decode()) % 7 == key]
        assert own == list(range(key, 300, 7))


def test_the_path_of_save_is_the_topic(spark: SparkSession, topic: Topic) -> None:
    orders(spark, 3).write.format("cometmq").option("namesrv", topic.namesrv).mode("append").save(topic.name)
    assert read(spark, topic).count() == 3


def test_delayed_rows_go_alone(spark: SparkSession, topic: Topic) -> None:
    frame = spark.createDataFrame([("now", None), ("later", 1)], "body string, delay_level int")
    write(frame, topic)
    assert "now" in {row.body.decode() for row in read(spark, topic).collect()}


@pytest.mark.parametrize(
    ("ddl", "rows", "words"),
    [
        ("text string", [("x",)], "a column body"),
        ("body int", [(1,)], "body binary or string"),
        ("body string, tag string", [("x", "y")], "did you mean tags"),
        ("body string", [(None,)], "is null"),
        ("body string, properties map<string,string>", [("x", {"a": "b\x01c"})], "character"),
        ("body string, properties map<string,string>", [("x", {"a": "b" * 40_000})], "32767"),
    ],
)
def test_rows_that_cannot_be_messages(
    spark: SparkSession, topic: Topic, ddl: str, rows: list[Any], words: str
) -> None:
    with pytest.raises((AnalysisException, PythonException, Exception), match=words):
        write(spark.createDataFrame(rows, ddl), topic)


def test_overwriting_is_refused(spark: SparkSession, topic: Topic) -> None:
    with pytest.raises((AnalysisException, PythonException), match="append"):
        orders(spark, 1).write.format("cometmq").options(namesrv=topic.namesrv, topic=topic.name).mode(
            "overwrite"
        ).save()


def test_no_topic_is_said_before_anything_is_sent(spark: SparkSession, topic: Topic) -> None:
    with pytest.raises((AnalysisException, PythonException), match="topic"):
        orders(spark, 1).write.format("cometmq").options(namesrv=topic.namesrv).mode("append").save()

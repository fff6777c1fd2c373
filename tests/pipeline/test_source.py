"""The data source against a real broker and a real Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.pipeline.feeding import Topic

from cometmq.message import MessageQueue
from cometmq.protocol.record.arrow import COLUMNS


def load(spark: SparkSession, topic: Topic, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("cometmq").options(**topic.options, **options)
    return (reader.schema(schema) if schema else reader).load()


def bodies(frame: DataFrame) -> list[str]:
    return sorted(
        (bytes(row.body).decode() for row in frame.select("body").collect()),
        key=lambda b: int(b.split(":")[0]),
    )


@pytest.mark.representative
def test_all_columns_of_what_was_sent(spark: SparkSession, topic: Topic) -> None:
    before = datetime.now(UTC).replace(tzinfo=None)
    topic.send(500)
    frame = load(spark, topic)
    assert frame.columns == list(COLUMNS)
    rows = sorted(frame.collect(), key=lambda row: int(row["keys"][1:]))
    assert [bytes(row.body).decode() for row in rows] == topic.sent
    for number, row in enumerate(rows):
        assert (row.topic, row.broker_name, row.flag) == (topic.name, "broker-a", number % 7)
        assert (row.tags, row.msg_id) == ("ABC"[number % 3], f"{number:032X}")
        assert row.properties["parity"] == str(number % 2)
        assert row.properties["KEYS"] == f"k{number}"
    assert len({(row.queue_id, row.queue_offset) for row in rows}) == 500
    assert all(row.store_timestamp >= before.replace(microsecond=0) for row in rows)
    assert len({row.physical_offset for row in rows}) == 500


def test_a_schema_is_the_projection_in_any_spelling(spark: SparkSession, topic: Topic) -> None:
    topic.send(100)
    frame = load(spark, topic, "queueOffset bigint, tags string, queueId int")
    assert frame.columns == ["queueOffset", "tags", "queueId"]
    assert frame.filter("tags = 'A'").count() == 34
    assert {row.queueId for row in frame.collect()} == {
        queue.queue_id for queue, held in topic.bounds().items() if held.maximum
    }


def test_one_load_is_one_snapshot_and_filters_do_not_leak(spark: SparkSession, topic: Topic) -> None:
    topic.send(60)
    frame = load(spark, topic)
    assert frame.filter("tags = 'A'").count() == 20
    assert frame.count() == 60
    topic.send(10)
    assert frame.count() == 60  # the read was planned when the frame was loaded
    assert load(spark, topic).count() == 70
    assert frame.filter("tags = 'B'").union(frame).count() == 80


def test_an_empty_topic(spark: SparkSession, topic: Topic) -> None:
    topic.send(1)
    assert load(spark, topic, startingOffsets="latest").count() == 0
    assert load(spark, topic, startingOffsets="latest").collect() == []


def test_offsets_select_ranges(spark: SparkSession, topic: Topic) -> None:
    topic.send(400)
    bounds = topic.bounds()
    start = {str(queue.queue_id): held.maximum // 4 for queue, held in bounds.items()}
    end = {str(queue.queue_id): held.maximum // 2 for queue, held in bounds.items()}
    rows = load(
        spark,
        topic,
        "queue_id int, queue_offset bigint",
        startingOffsets=json.dumps({topic.name: {"broker-a": start}}),
        endingOffsets=json.dumps({topic.name: {"broker-a": end}}),
    ).collect()
    expected = [(int(q), offset) for q in start for offset in range(start[q], end[q])]
    assert sorted((row.queue_id, row.queue_offset) for row in rows) == sorted(expected)
    assert expected


def test_single_queues_can_be_assigned(spark: SparkSession, topic: Topic) -> None:
    topic.send(200)
    options = {"namesrv": topic.namesrv, "assign": json.dumps({topic.name: {"broker-a": [1]}})}
    frame = spark.read.format("cometmq").options(**options).schema("queue_id int").load()
    expected = topic.bounds()[MessageQueue(topic.name, "broker-a", 1)].maximum
    assert [row.queue_id for row in frame.collect()] == [1] * expected


@pytest.mark.representative
def test_time_stamps_select_ranges(spark: SparkSession, topic: Topic) -> None:
    topic.send(300)
    times = sorted(row.t for row in load(spark, topic, "store_timestamp timestamp").select(
        F.unix_millis("store_timestamp").alias("t")).collect())  # fmt: skip
    middle = times[150]
    count = load(spark, topic, startingTimestamp=str(middle)).count()
    assert count == sum(time >= middle for time in times)
    count = load(spark, topic, endingTimestamp=str(middle)).count()
    assert count == sum(time < middle for time in times)
    assert load(spark, topic, startingTimestamp=str(times[-1] + 1)).count() == 0


def test_tags_are_filtered_by_the_broker_and_again_by_text(spark: SparkSession, topic: Topic) -> None:
    topic.send(90)
    assert load(spark, topic, tags="A || C").count() == 60
    assert {row.tags for row in load(spark, topic, "tags string", tags="A||C").collect()} == {"A", "C"}
    assert bodies(load(spark, topic, tags="B")) == [body for n, body in enumerate(topic.sent) if n % 3 == 1]


def test_tags_whose_hashes_collide_are_told_apart(spark: SparkSession, topic: Topic) -> None:
    topic.send(30, tags=("Aa", "BB"))  # tags with equal hashes
    assert {row.tags for row in load(spark, topic, "tags string", tags="Aa").collect()} == {"Aa"}


def test_tasks_by_partition_options(spark: SparkSession, topic: Topic) -> None:
    topic.send(1000)
    assert load(spark, topic).rdd.getNumPartitions() == 1
    assert load(spark, topic, minPartitions="7").rdd.getNumPartitions() == 7
    limited = load(spark, topic, maxRecordsPerPartition="100")
    assert max(limited.rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()) <= 100
    assert limited.count() == 1000


def test_small_batches_and_large_bodies(spark: SparkSession, topic: Topic) -> None:
    sent = topic.send(300, body_size=20_000)
    assert bodies(load(spark, topic, batchBytes="100000")) == sent
    assert load(spark, topic, "queue_offset bigint", batchRecords="7").count() == 300


def test_an_endless_read_may_stop_early(spark: SparkSession, topic: Topic) -> None:
    topic.send(2000)
    assert len(load(spark, topic, batchRecords="10").limit(5).collect()) == 5
    assert load(spark, topic).count() == 2000  # the worker's connection still works


def test_sql(spark: SparkSession, topic: Topic) -> None:
    topic.send(40)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW messages USING cometmq "
        f"OPTIONS (namesrv '{topic.namesrv}', topic '{topic.name}')"
    )
    (row,) = spark.sql("SELECT count(*) AS n, count(DISTINCT msg_id) AS ids FROM messages").collect()
    assert (row.n, row.ids) == (40, 40)


def test_a_topic_pattern(spark: SparkSession, topic: Topic) -> None:
    topic.send(5)
    frame = (
        spark.read.format("cometmq").options(namesrv=topic.namesrv, subscribePattern=f"{topic.name}.*").load()
    )
    assert frame.select("topic").distinct().collect()[0].topic == topic.name


@pytest.mark.parametrize(
    ("options", "schema", "words"),
    [
        ({"startingOfsets": "earliest"}, None, "did you mean startingOffsets"),
        ({"minPartitions": "none"}, None, "a whole number"),
        ({}, "colour string", "colour"),
        ({}, "queue_id bigint", "queue_id"),
        ({"subscribe": "NoSuchTopic"}, None, "NoSuchTopic"),
        ({"startingOffsets": '{"Typo": {"broker-a": {"0": 1}}}'}, None, "Typo@broker-a:0"),
    ],
)
def test_errors_say_what_is_wrong(
    spark: SparkSession, topic: Topic, options: dict[str, Any], schema: str | None, words: str
) -> None:
    topic.send(1)

    def read() -> None:
        reader = spark.read.format("cometmq").options(**{**topic.options, **options})
        (reader.schema(schema) if schema else reader).load().count()

    with pytest.raises((AnalysisException, PythonException), match=words):
        read()


def test_offsets_that_the_broker_lacks_are_loud_or_left_out(spark: SparkSession, topic: Topic) -> None:
    topic.send(40)
    held = topic.bounds()
    end = json.dumps({topic.name: {"broker-a": {str(q.queue_id): b.maximum + 5 for q, b in held.items()}}})
    with pytest.raises((AnalysisException, PythonException), match="failOnDataLoss"):
        load(spark, topic, endingOffsets=end).count()
    assert load(spark, topic, endingOffsets=end, failOnDataLoss="false").count() == 40


def test_a_failed_task_is_repeated_with_the_same_rows(
    spark: SparkSession, topic: Topic, tmp_path: Any
) -> None:
    topic.send(300)
    marker = str(tmp_path / "failed")

    def fail_once(rows: Any) -> Any:
        import os

        for number, row in enumerate(rows):
            if number == 50 and not os.path.exists(marker):
                open(marker, "w").close()
                raise RuntimeError("once")
            yield row.queue_id, row.queue_offset

    frame = load(spark, topic, "queue_id int, queue_offset bigint", minPartitions="2", batchRecords="20")
    found = frame.rdd.mapPartitions(fail_once).collect()
    assert len(found) == len(set(found)) == 300

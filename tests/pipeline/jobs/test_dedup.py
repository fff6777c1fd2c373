"""Messages that survive the deduplication, in the batch job and in the stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.errors import ConfigError
from cometmq.pipeline.jobs.dedup import Removed, dedup, deduplicated

Source = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Write a store whose bodies are topic and number.

    Key `a` occurs at 0, 1 and 100 s in T and once in U, key `b` once, and two messages have no key.
    """
    files = StoreFiles(segment=65536)

    def add(body: str, key: str | None, at_s: int, topic: str = "T", queue_id: int = 0) -> None:
        properties = b"" if key is None else f"KEYS\x01{key}\x02".encode()
        at_ms = START_MS + at_s * 1000
        files.add(body.encode(), topic, queue_id, properties=properties, store_timestamp_ms=at_ms)

    add("T1", "a", 0)
    add("T0", "a", 0, queue_id=1)
    add("T2", "a", 1)
    add("T3", "b", 2)
    add("T4", "a", 100)
    add("T5", None, 3)
    add("T6", " ", 3, queue_id=1)
    add("U1", "a", 1, topic="U")
    return f"store:{files.write(tmp_path / 'store')}"


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        ({}, ["T0", "T2", "T4"]),  # at equal times the lower queue id is first
        ({"keep": "last"}, ["T0", "T1", "T2"]),
        ({"window_s": 50}, ["T0", "T2"]),
        ({"window_s": 0.5, "keep": "last"}, ["T1"]),
        ({"key": "msg_id"}, []),
        ({"key": "substring(decode(body, 'utf-8'), 1, 1)"}, ["T0", "T2", "T3", "T4", "T5", "T6"]),
        ({"topics": ["U"]}, []),
    ],
)
def test_one_message_of_each_key_survives(
    options: dict[str, Any], removed: list[str], source: str, spark: SparkSession, output: str
) -> None:
    summary = dedup(spark, source, output, **options)

    written = spark.read.parquet(f"{output}/messages")
    rows = [(row.state, row.body.decode()) for row in written.select("state", "body").collect()]
    assert sorted(body for state, body in rows if state == "removed") == removed
    assert (summary.messages, summary.removed) == (len(rows), len(removed))
    assert summary.kept == sum(state == "kept" for state, _ in rows)


def test_counts_samples_and_a_second_run(source: str, spark: SparkSession, output: str) -> None:
    first = dedup(spark, source, output)
    again = dedup(spark, source, output)

    assert (first.messages, first.removed, first.without_key) == (8, 3, 2)
    assert [(topic.topic, topic.messages, topic.removed) for topic in first.topics] == [
        ("T", 7, 3),
        ("U", 1, 0),
    ]
    name = first.samples[0].broker_name
    assert first.samples[1] == Removed("T", "a", name, 0, 1, START_MS + 1000, name, 0, 0)
    assert (again.messages, again.samples) == (first.messages, first.samples)
    assert spark.read.parquet(f"{output}/messages").count() == 8


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"key": "no_such_column"}, "key"),
        ({"key": "keys +"}, "key"),
        ({"keep": "some"}, "keep"),
        ({"window_s": -1}, "window_s"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    options: dict[str, Any], field: str, source: str, spark: SparkSession, output: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        dedup(spark, source, output, **options)
    assert raised.value.key == field
    assert not Path(output).exists()


@pytest.mark.slow("a sink, an archive and a job")
def test_what_a_sink_sends_again_is_removed(topic: Topic, spark: SparkSession, output: str) -> None:
    rows = spark.createDataFrame([(f"body {number}",) for number in range(20)], "body string").coalesce(1)
    for _ in range(2):  # as if the response to the first send were lost
        options = {"namesrv": topic.namesrv, "topic": topic.name, "writeId": "load-1"}
        rows.write.format("cometmq").options(**options).mode("append").save()

    summary = dedup(spark, f"live:{topic.namesrv}", output, key="msg_id", topics=[topic.name])

    assert (summary.messages, summary.removed) == (40, 20)
    kept = spark.read.parquet(f"{output}/messages").filter("state = 'kept'").select("body").collect()
    assert sorted(bytes(row.body).decode() for row in kept) == sorted(
        f"body {number}" for number in range(20)
    )


@pytest.mark.slow("a stream with state")
def test_a_stream_passes_one_message_of_each_key_on(
    topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    topic.send(4)
    stream = spark.readStream.format("cometmq").options(**topic.options)
    frame = deduplicated(stream.option("startingOffsets", "earliest").load(), "tags", 3600)
    passed: list[str] = []
    for more in (0, 2):  # the second run continues with the first one's state
        topic.send(more)
        query = (
            frame.writeStream.foreachBatch(
                lambda batch, _: passed.extend(row.tags for row in batch.collect())
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
    assert sorted(passed) == ["A", "B", "C"]


def test_a_topic_that_is_not_there_is_named(spark: SparkSession, source: str, tmp_path: Path) -> None:
    summary = dedup(spark, source, str(tmp_path / "table"), ["nosuch", "U"])
    assert (summary.messages, summary.absent, summary.complete) == (1, ["nosuch"], False)

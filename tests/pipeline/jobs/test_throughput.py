"""Counts of the throughput job for a store with known times."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.errors import ConfigError
from cometmq.pipeline.jobs.throughput import throughput

TEN_S = START_MS - START_MS % 10_000


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Write ten seconds with 20 messages in two queues of `A`, then one of `A`, one of `B`."""
    files = StoreFiles(segment=65536)
    for number in range(20):
        files.add(b"x", "A", number % 2, store_timestamp_ms=TEN_S + number * 500)
    files.add(b"x", "A", store_timestamp_ms=TEN_S + 10_000)
    files.add(b"x" * 5000, "B", store_timestamp_ms=TEN_S + 19_000)
    return f"store:{files.write(tmp_path / 'store')}"


def test_sums_peaks_and_top_topics(source: str, spark: SparkSession) -> None:
    summary = throughput(spark, source, window_s=10)

    assert (summary.messages, summary.topic_count) == (22, 2)
    assert (summary.first_ms, summary.last_ms) == (TEN_S, TEN_S + 19_000)
    assert summary.messages_per_s == pytest.approx(22 / 19)
    large, small = summary.topics
    assert (large.topic, large.messages, large.peak_ms) == ("B", 1, TEN_S + 10_000)
    assert (small.topic, small.queues, small.peak_messages_per_s, small.peak_ms) == ("A", 2, 2.0, TEN_S)
    assert summary.bytes == large.bytes + small.bytes
    assert summary.bytes_per_s == pytest.approx(summary.bytes / 19)


def test_the_tables_hold_windows_of_queues_and_topics(
    source: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = str(tmp_path / "report")
    summary = throughput(spark, source, ["A"], end_ms=TEN_S + 10_000, window_s=10, top=1, output=output)

    assert summary.messages == 20
    queues = spark.read.parquet(f"{output}/queues").orderBy("queue_id").collect()
    assert [(row.queue_id, row.messages, row.messages_per_s) for row in queues] == [
        (0, 10, 1.0),
        (1, 10, 1.0),
    ]
    (topic,) = spark.read.parquet(f"{output}/topics").collect()
    assert (topic.queues, topic.bytes, topic.window.timestamp()) == (2, summary.bytes, TEN_S / 1000)


def test_live_topics_and_a_time_without_messages(topic: Topic, spark: SparkSession) -> None:
    topic.send(30)

    found = throughput(spark, f"live:{topic.namesrv}", pattern=topic.name)
    assert (found.messages, found.topics[0].topic) == (30, topic.name)
    none = throughput(spark, f"live:{topic.namesrv}", [topic.name], end_ms=1)
    assert (found.complete, none.complete, none.absent) == (True, False, [topic.name])
    assert (none.messages, none.first_ms, none.topics, none.messages_per_s) == (0, None, [], 0.0)


@pytest.mark.parametrize("given", [{"window_s": 0}, {"window_s": -60}, {"top": -1}])
def test_numbers_that_cannot_be_are_named(given: dict[str, int], spark: SparkSession) -> None:
    (key,) = given
    with pytest.raises(ConfigError, match=key):
        throughput(spark, "store:/nowhere", **given)  # type: ignore[arg-type]

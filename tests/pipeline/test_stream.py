"""Streaming reads: limits, restarts, and a start position that survives a crash in the first batch."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic

from cometmq.pipeline.base.options import read_options
from cometmq.pipeline.live.source import CometStreamReader, full_schema


class Job:
    """A query from a topic to Parquet files, with its checkpoint."""

    def __init__(self, spark: SparkSession, topic: Topic, home: Path, **options: str) -> None:
        self.spark, self.topic, self.home, self.options = spark, topic, home, options
        self.table, self.checkpoint = str(home / "table"), home / "checkpoint"

    def source(self) -> DataFrame:
        return (
            self.spark.readStream.format("cometmq").options(**self.topic.options, **self.options)
            .schema("queue_id int, queue_offset bigint, body binary").load()
        )  # fmt: skip

    def start(self, **trigger: Any) -> StreamingQuery:
        writer = (
            self.source().writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint))
        )
        return writer.trigger(**trigger).start(self.table)

    def run(self) -> StreamingQuery:
        """Process the available messages and stop."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(90)
        return query

    def rows(self) -> list[str]:
        return [
            bytes(row.body).decode() for row in self.spark.read.parquet(self.table).select("body").collect()
        ]

    def check(self, expected: list[str]) -> None:
        assert Counter(self.rows()) == Counter(expected)

    def end_offsets(self, batch: int) -> dict[str, Any]:
        """Return the end of a batch from Spark's log."""
        tree: dict[str, Any] = json.loads(
            (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]
        )
        return tree

    def forget(self, log: str, batch: int) -> None:
        """Delete a log entry, as if the process had died before it was written."""
        for path in (self.checkpoint / log).glob(f"*{batch}*"):
            if path.name in (str(batch), f".{batch}.crc"):
                path.unlink()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.slow("four streaming queries")
@pytest.mark.representative
def test_available_now_in_limited_batches_and_again(spark: SparkSession, topic: Topic, home: Path) -> None:
    job = Job(spark, topic, home, startingOffsets="earliest", maxOffsetsPerTrigger="100")
    topic.send(250)
    query = job.run()
    assert sorted(p.numInputRows for p in query.recentProgress if p.numInputRows) == pytest.approx(
        [50, 100, 100], abs=8
    )
    job.check(topic.sent)
    topic.send(30)
    job.run()
    job.run()  # nothing new: no rows and no error
    job.check(topic.sent)


def test_a_batch_killed_before_its_commit_is_replayed_exactly(
    spark: SparkSession, topic: Topic, home: Path
) -> None:
    job = Job(spark, topic, home, startingOffsets="earliest", maxOffsetsPerTrigger="60")
    topic.send(150)
    job.run()
    last = max(int(path.name) for path in (job.checkpoint / "commits").iterdir() if path.name.isdigit())
    job.forget("commits", last)
    topic.send(20)
    job.run()
    job.check(topic.sent)


def test_latest_stays_after_a_crash_in_the_first_batch(spark: SparkSession, topic: Topic, home: Path) -> None:
    """Spark does not log the start of batch 0 and requests it again after a restart: nothing may be lost."""
    topic.send(40)
    job = Job(spark, topic, home, startingOffsets="latest")
    query = job.start(processingTime="100 milliseconds")
    wait_until("the first batch, empty as it is, is logged", lambda: bool(query.recentProgress))
    query.stop()
    assert "@start" in job.end_offsets(0)
    job.forget("commits", 0)  # as after a crash in batch 0
    wanted = topic.send(25)  # these arrive while the query is stopped
    job.run()
    job.check(wanted)


def test_a_first_batch_with_records_replays_from_its_logged_start(
    spark: SparkSession, topic: Topic, home: Path
) -> None:
    topic.send(10)
    job = Job(spark, topic, home, startingOffsets="latest")
    query = job.start(processingTime="100 milliseconds")
    wait_until("the query is up", lambda: bool(query.recentProgress))
    wanted = topic.send(15)
    query.processAllAvailable()
    query.stop()
    # This state is that of a process that died while it wrote batch 1, before batch 0 was known to be
    # complete.
    job.forget("commits", 1)
    shutil.rmtree(job.table)
    for log in ("offsets", "commits"):
        for batch in (1, 0)[: 1 if log == "offsets" else 2]:
            job.forget(log, batch)
    tree = job.end_offsets(0)
    assert tree["@start"] == {topic.name: tree[topic.name]}
    wanted += topic.send(5)
    job.run()
    job.check(wanted)


def test_positions_are_plain_json_in_one_order(spark: SparkSession, topic: Topic, home: Path) -> None:
    topic.send(30)
    job = Job(spark, topic, home, startingOffsets="earliest")
    job.run()
    topic.send(30)
    job.run()
    tree = job.end_offsets(1)
    held = {str(queue.queue_id): bounds.maximum for queue, bounds in topic.bounds().items()}
    assert tree.pop("@last")[topic.name]["broker-a"].keys() == {q for q in held if held[q]}
    assert tree == {topic.name: {"broker-a": held}}
    assert list(tree[topic.name]["broker-a"]) == sorted(held, key=int)


def test_idle_queries_make_no_batches(spark: SparkSession, topic: Topic, home: Path) -> None:
    topic.send(10)
    job = Job(spark, topic, home, startingOffsets="earliest")
    query = job.start(processingTime="50 milliseconds")
    try:
        query.processAllAvailable()
        wait_until("the query is idle", lambda: not query.status["isDataAvailable"])
        batches = len(list((job.checkpoint / "offsets").glob("[0-9]*")))
        topic.send(1)
        query.processAllAvailable()
        assert len(list((job.checkpoint / "offsets").glob("[0-9]*"))) == batches + 1
    finally:
        query.stop()
    job.check(topic.sent)


def test_a_new_queue_is_read_from_its_beginning(spark: SparkSession, topic: Topic, home: Path) -> None:
    topic.send(20)
    other = Topic(f"{topic.name}x", topic.namesrv)
    options = {"namesrv": topic.namesrv, "subscribePattern": f"{topic.name}x?"}
    job = Job(spark, topic, home)

    def run() -> None:
        frame = spark.readStream.format("cometmq").options(**options, startingOffsets="latest").load()
        writer = (
            frame.select("body")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(job.checkpoint))
        )
        assert writer.trigger(availableNow=True).start(job.table).awaitTermination(90)

    run()
    wanted = topic.send(5) + other.send(7)
    run()
    job.check(wanted)


def test_progress_is_published_to_a_group(spark: SparkSession, topic: Topic, home: Path) -> None:
    job = Job(
        spark,
        topic,
        home,
        startingOffsets="earliest",
        maxOffsetsPerTrigger="40",
        consumerGroup="spark_readers",
    )
    topic.send(120)
    query = job.run()
    assert query.recentProgress[-1].sources[0].latestOffset is not None
    # Spark confirms a batch to the source when it builds the next one, so the last batch is not committed
    # yet.
    assert 60 <= sum(topic.committed("spark_readers").values()) <= 120


def test_a_topic_made_anew_is_data_loss(spark: SparkSession, topic: Topic, home: Path) -> None:
    topic.send(40)
    job = Job(spark, topic, home, startingOffsets="earliest")
    job.run()
    path = job.checkpoint / "offsets" / "0"
    lines = path.read_text().splitlines()
    tree = json.loads(lines[-1])
    for queue in tree[topic.name]["broker-a"]:
        tree[topic.name]["broker-a"][queue] += 1000
    path.write_text("\n".join([*lines[:-1], json.dumps(tree)]))
    (path.parent / ".0.crc").unlink(missing_ok=True)
    query = job.start(availableNow=True)
    with pytest.raises(StreamingQueryException, match="shorter than what was read"):
        query.awaitTermination(60)


def test_messages_that_come_while_it_starts_are_no_false_alarm(topic: Topic) -> None:
    """Spark requests the batch's end before its start, so a start at "latest" may be past that end."""
    topic.send(10)
    reader = CometStreamReader(full_schema(), read_options({**topic.options}, streaming=True))
    reader.prepareForTriggerAvailableNow()
    topic.send(7)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert reader.partitions(start, end) == []
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    reader.stop()


@pytest.fixture(autouse=True)
def no_query_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()

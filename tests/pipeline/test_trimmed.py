"""Messages that retention deleted before they were read: an error by default, counted if configured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic

from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import completeness
from cometmq.standalone import Standalone

FORGETFUL = {
    "mappedFileSizeCommitLog": str(256 * 1024),
    "fileReservedTime": "0",
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),
    "cleanResourceInterval": "100",
    "deleteCommitLogFilesInterval": "0",
}


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker that deletes each segment of its log as soon as it is full."""
    root = tmp_path_factory.mktemp("forgetful")
    with Standalone(root, namesrv_port=0, broker_port=0, settings=FORGETFUL).run_in_thread() as standalone:
        yield standalone


@pytest.fixture
def trimmed(forgetful: Standalone, request: pytest.FixtureRequest) -> Topic:
    topic = Topic(f"Trimmed_{abs(hash(request.node.name))}", forgetful.namesrv_addr)
    topic.send(40)
    return topic


def let_it_forget(topic: Topic) -> None:
    """Send until the earlier messages are deleted and one second (ten retention passes) brings no change."""
    topic.send(900, body_size=1000)
    last, since = topic.bounds(), time.monotonic()

    def settled() -> bool:
        nonlocal last, since
        held = topic.bounds()
        if held != last:
            last, since = held, time.monotonic()
        forgotten = sum(bounds.minimum for bounds in held.values()) >= 40
        return forgotten and time.monotonic() - since > 1

    wait_until("old segments were deleted", settled)


def held_now(topic: Topic) -> int:
    return sum(held.maximum - held.minimum for held in topic.bounds().values())


def test_a_batch_from_explicit_offsets(spark: SparkSession, trimmed: Topic) -> None:
    let_it_forget(trimmed)
    start = json.dumps({trimmed.name: {"broker-a": {str(queue.queue_id): 0 for queue in trimmed.bounds()}}})
    reader = spark.read.format("cometmq").options(**trimmed.options)
    with pytest.raises((AnalysisException, PythonException), match="deleted before they were read"):
        reader.option("startingOffsets", start).load().count()
    assert reader.options(startingOffsets=start, failOnDataLoss="false").load().count() == held_now(trimmed)
    assert spark.read.format("cometmq").options(**trimmed.options).load().count() == held_now(trimmed)


@pytest.mark.slow("waits until segments are deleted")
def test_a_stream_that_was_away_too_long(spark: SparkSession, trimmed: Topic, tmp_path: Path) -> None:
    def run(**options: str) -> int:
        limits = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "20", **options}
        source = spark.readStream.format("cometmq").options(**trimmed.options, **limits)
        writer = source.load().select("body").writeStream.format("parquet")
        query = (
            writer.option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True).start(table)
        )
        query.awaitTermination(90)
        return spark.read.parquet(table).count()

    table = str(tmp_path / "table")
    assert run() == 40
    trimmed.send(8)
    let_it_forget(trimmed)
    with pytest.raises(StreamingQueryException, match="deleted before they were read"):
        run()
    assert run(failOnDataLoss="false", maxOffsetsPerTrigger="100000") == 40 + held_now(trimmed)


def test_an_archive_counts_what_it_came_late_for(spark: SparkSession, trimmed: Topic, output: str) -> None:
    assert archive(spark, trimmed.namesrv, [trimmed.name], output).records == 40
    let_it_forget(trimmed)
    with pytest.raises(DataLossError):
        archive(spark, trimmed.namesrv, [trimmed.name], output)
    summary = archive(spark, trimmed.namesrv, [trimmed.name], output, fail_on_data_loss=False)
    assert (summary.records, summary.lost) == (held_now(trimmed), 900 - held_now(trimmed))
    rows = completeness(spark, output).collect()
    assert sum(row.records for row in rows) == 40 + held_now(trimmed)
    assert sum(row.missing for row in rows) == summary.lost > 0
    assert not any(row.gaps or row.overlaps for row in rows)

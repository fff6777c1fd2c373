"""Prometheus metrics of streams and of the archive job, on a port and in a file, limited in number."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic

from cometmq.errors import ConfigError
from cometmq.pipeline import metrics as module
from cometmq.pipeline.jobs.archive import ArchiveProgress, archive
from cometmq.pipeline.metrics import PipelineMetrics


def served(metrics: PipelineMetrics) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def value(metrics: PipelineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"cometmq_pipeline_{name}", labels)


def test_a_stream_reports_rows_positions_and_lag(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(100)
    stream = spark.readStream.format("cometmq").options(**topic.options, startingOffsets="earliest")
    rows = stream.option("maxOffsetsPerTrigger", 60).schema("queue_id int").load()
    with PipelineMetrics("0") as metrics:
        spark.streams.addListener(metrics.listener)
        try:
            writer = rows.writeStream.queryName("orders").format("parquet").trigger(availableNow=True)
            query = writer.option("checkpointLocation", f"{tmp_path}/cp").start(f"{tmp_path}/out")
            query.awaitTermination()
            wait_until("the end is reported", lambda: value(metrics, "running", query="orders") == 0)
        finally:
            spark.streams.removeListener(metrics.listener)
        page = served(metrics)

        assert value(metrics, "rows_total", query="orders") == 100
        assert value(metrics, "batches_total", query="orders") == 2
        assert value(metrics, "lag", query="orders") == 0
        assert value(metrics, "failures_total", query="orders") == 0
        assert (value(metrics, "batch_seconds", query="orders", phase="addBatch") or 0) > 0
        for queue, bounds in topic.bounds().items():
            place = {"topic": topic.name, "broker": queue.broker_name, "queue": str(queue.queue_id)}
            assert value(metrics, "queue_offset", query="orders", **place) == bounds.maximum
            assert value(metrics, "queue_lag", query="orders", **place) == 0
        assert 'cometmq_pipeline_rows_total{query="orders"} 100.0' in page


def test_the_archive_job_reports_to_a_file(
    spark: SparkSession, topic: Topic, output: str, tmp_path: Path
) -> None:
    topic.send(30)
    file = tmp_path / "cometmq.prom"
    with PipelineMetrics(str(file)) as metrics:
        done = archive(spark, topic.namesrv, [topic.name], output, on_progress=metrics.archived)

    assert done.records == 30
    text = file.read_text()
    assert 'cometmq_pipeline_rows_total{query="archive"} 30.0' in text
    assert 'cometmq_pipeline_lag{query="archive"} 0.0' in text


def test_each_run_of_the_archive_job_counts_from_nothing() -> None:
    with PipelineMetrics("0") as metrics:
        for run, records in (("a", 10), ("a", 30), ("b", 20), ("a", 31), ("b", 50)):
            metrics.archived(ArchiveProgress(run, 0, records, 50, 10 * records, 1.0))

        assert value(metrics, "rows_total", query="archive") == 31 + 50
        assert value(metrics, "bytes_total", query="archive") == 310 + 500


@pytest.mark.parametrize("where", ["99999999", "/nowhere/x.prom"])
def test_a_place_that_cannot_be_used_is_an_error_at_once(where: str) -> None:
    with pytest.raises(ConfigError, match="metrics = "):
        PipelineMetrics(where)


def test_a_port_that_is_taken_is_an_error() -> None:
    with PipelineMetrics("0") as metrics, pytest.raises(ConfigError, match="in use"):
        PipelineMetrics(str(metrics.port))


class Progress:
    """The fields of Spark's batch progress that the metrics use."""

    def __init__(self, end: str, latest: str | None, query: str = "q") -> None:
        self.id, self.numInputRows, self.inputRowsPerSecond, self.processedRowsPerSecond = query, 1, 1.0, 1.0
        self.timestamp, self.durationMs = "2026-11-23T05:00:00.000Z", {"addBatch": 500}
        self.endOffset, self.latestOffset, self.sources = end, latest, [self]


def test_lag_is_what_is_held_beyond_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUES_MAX", 2)
    with PipelineMetrics("0") as metrics:
        metrics.started("q", None)
        end, latest = '{"T": {"b": {"0": 5, "1": 7, "2": 1}}, "@last": 3}', '{"T": {"b": {"0": 15, "2": 4}}}'
        metrics.progressed(Progress(end, latest))  # type: ignore[arg-type]

        assert value(metrics, "lag", query="q") == 13
        assert value(metrics, "queue_lag", query="q", topic="T", broker="b", queue="0") == 10
        assert value(metrics, "queue_lag", query="q", topic="T", broker="b", queue="2") is None
        assert value(metrics, "queues_left_out") == 1


@pytest.mark.parametrize("text", ["{", "[1]", '{"logOffset": 3}', '{"T": {"b": {"0": "x"}}}', "7", "null"])
def test_positions_of_other_sources_are_left_out(text: str) -> None:
    with PipelineMetrics("0") as metrics:
        metrics.started("q", "name")
        metrics.progressed(Progress(text, text))  # type: ignore[arg-type]

        assert value(metrics, "lag", query="name") == 0
        assert value(metrics, "rows_total", query="name") == 1


def test_too_many_queries_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES_MAX", 2)
    with PipelineMetrics("0") as metrics:
        for number in range(4):
            metrics.started(str(number), f"name\n{number}")
            metrics.progressed(Progress("{}", None, str(number)))  # type: ignore[arg-type]
        for number in range(4):
            metrics.ended(str(number), "failed")
        page = served(metrics)

    assert 'cometmq_pipeline_rows_total{query="others"} 2.0' in page
    assert 'cometmq_pipeline_failures_total{query="name\\\\n0"} 1.0' in page


def test_numbers_of_queries_that_ended_long_ago_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_MAX", 2)
    monkeypatch.setattr(module, "QUEUES_MAX", 3)
    position = '{"T": {"b": {"0": 5, "1": 7}}}'
    with PipelineMetrics("0") as metrics:
        for number in [*range(5), 3]:  # 3 is added again as a new name
            metrics.started(f"id{number}", f"n{number}")
            metrics.progressed(Progress(position, position, f"id{number}"))  # type: ignore[arg-type]
            metrics.ended(f"id{number}", None)
        page = served(metrics)

    assert {f"n{number}" for number in range(5) if f'"n{number}"' in page} == {"n3", "n4"}
    assert 'cometmq_pipeline_rows_total{query="n3"} 2.0' in page
    assert 'cometmq_pipeline_running{query="n4"} 0.0' in page
    assert page.count("cometmq_pipeline_queue_lag{") == 3  # the metrics of n2 were dropped, which made room
    assert "cometmq_pipeline_queues_left_out 1.0" in page


def test_a_queue_that_gets_room_is_no_longer_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_MAX", 0)
    monkeypatch.setattr(module, "QUEUES_MAX", 1)
    position = '{"T": {"b": {"0": 5}}}'
    with PipelineMetrics("0") as metrics:
        for name in ("first", "second"):
            metrics.started(name, name)
            metrics.progressed(Progress(position, position, name))  # type: ignore[arg-type]
        assert value(metrics, "queues_left_out") == 1
        metrics.ended("first", None)
        metrics.progressed(Progress(position, position, "second"))  # type: ignore[arg-type]

        assert value(metrics, "queue_offset", query="second", topic="T", broker="b", queue="0") == 5
        assert value(metrics, "queues_left_out") == 0


def test_labels_from_outside_are_bounded() -> None:
    long = "x" * 100_000
    with PipelineMetrics("0") as metrics:
        for name in (None, long):
            progress = Progress(f'{{"{long}": {{"b": {{"0": 5}}}}}}', None, long)
            progress.durationMs = {f"{number}{long}": 1 for number in range(1000)}
            metrics.started(long, name)
            metrics.progressed(progress)  # type: ignore[arg-type]
        page = served(metrics)

    assert len(page) < 200_000
    assert 0 < page.count("cometmq_pipeline_batch_seconds{") <= 30

"""Reports of jobs contain their summaries, and plots over time if the job wrote tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.base.test_report import Page
from tests.pipeline.feeding import Topic

from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.lag import GroupLag, LagSummary, QueueLag, Samples
from cometmq.pipeline.jobs.reports import audit_report, lag_report, throughput_report, trace_report
from cometmq.pipeline.jobs.throughput import throughput
from cometmq.pipeline.jobs.trace import ConsumeLatency, SendLatency, TraceSummary


@pytest.mark.slow("draws plots")
@pytest.mark.parametrize(("with_tables", "plots"), [(True, 5), (False, 1)])
def test_an_audit(spark: SparkSession, topic: Topic, tmp_path: Path, with_tables: bool, plots: int) -> None:
    topic.send(30)
    output = str(tmp_path / "audit") if with_tables else None
    summary = audit(spark, f"live:{topic.namesrv}", topics=[topic.name], delay_s=0, output=output)
    page = Page(audit_report(spark, summary).html())

    assert f"Audit of live:{topic.namesrv}" in page.text
    assert len(page.images) == plots


def test_throughput(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(30)
    output = str(tmp_path / "throughput")
    summary = throughput(spark, f"live:{topic.namesrv}", topics=[topic.name], window_s=1, output=output)
    page = Page(throughput_report(spark, summary).html())

    assert len(page.images) == 4
    assert "30" in page.text
    assert all(topic.name in image for image in page.images[:2])


def test_lag(spark: SparkSession, tmp_path: Path) -> None:
    samples = Samples(str(tmp_path / "lag"), 1.0)
    for second in (1, 2):
        place = ("g", "T", "b", 0)
        samples.append([QueueLag(second * 1000, *place, 0, 100, 10 * second, 90, 0, 5000)], second * 1000)
    groups = [GroupLag("g", 60, 1, 2, 80, 90, 0, 5000, 10.0, 0.0, None)]
    page = Page(lag_report(spark, LagSummary(samples.output, 2, 1, groups)).html())

    assert len(page.images) == 3
    assert "expires in s" in page.text


def test_traces(spark: SparkSession, tmp_path: Path) -> None:
    latencies = "1 AS cost_p99, 2 AS delay_p99, 'T' AS topic, 'g\\u001b' AS group"
    rows = spark.sql(f"SELECT timestamp_seconds(id * 60) AS window, {latencies} FROM range(3)")
    for table in ("sends", "consumptions"):
        rows.write.parquet(f"{tmp_path}/{table}")
    spans = (1, 2, 3, 4)
    summary = TraceSummary("live:", str(tmp_path), {"Pub": 3})
    summary.sends = [SendLatency("T", "producers", 2, 2, 1, *spans)]
    summary.groups = [ConsumeLatency("T", "g", 4, 1, 0, 0, 2, None, None, None, None, *spans)]
    page = Page(trace_report(spark, summary).html())

    assert len(page.images) == 5
    assert {"Pub: 3", "producers"} <= set(page.text)
    assert "\x1b" not in "".join(page.images)


def test_windows_that_forged_records_put_into_the_future_are_not_drawn(
    spark: SparkSession, tmp_path: Path
) -> None:
    values = "1 AS cost_p99, 2 AS delay_p99, 'T' AS topic"
    rows = spark.sql(
        f"SELECT timestamp_seconds(60) AS window, {values}, group FROM VALUES ('one'), ('two') AS t(group) "
        "UNION ALL "
        f"SELECT timestamp_millis(253370764799999) AS window, {values}, 'forged' AS group"
    )
    for table in ("sends", "consumptions"):
        rows.write.parquet(f"{tmp_path}/{table}")
    page = Page(trace_report(spark, TraceSummary("live:", str(tmp_path))).html())

    assert [("T one" in image, "T forged" in image) for image in page.images] == [(True, False)] * 3

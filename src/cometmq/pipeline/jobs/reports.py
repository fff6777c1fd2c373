"""Reports of the archive, audit, trace, lag and throughput jobs: a summary, and plots over time.

The data of the plots come from the archive's log, or from the job's tables. A job without `output` writes no
tables, so its report has no plots over time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.pipeline.base.report import LINES_MAX, POINTS_MAX, ROWS_MAX, Report
from cometmq.pipeline.jobs.archive import ArchiveSummary
from cometmq.pipeline.jobs.archive_query import batches, completeness, files
from cometmq.pipeline.jobs.audit import AuditSummary
from cometmq.pipeline.jobs.lag import LagSummary, SampleFiles
from cometmq.pipeline.jobs.throughput import ThroughputSummary
from cometmq.pipeline.jobs.trace import TraceSummary

_AHEAD_S = 86_400
_FOUND = ("missing", "doubled", "out_of_order", "late", "anew", "lost", "group_lost")


def archive_report(spark: SparkSession, summary: ArchiveSummary) -> Report:
    """Return a report of the run and of the archive's contents according to its log. No message is read."""
    report = Report(f"Archive {summary.output}")
    report.summary(summary)
    counted = bool(summary.records and summary.seconds)
    report.fact("messages per second", summary.records / summary.seconds if counted else None)
    by_topic = Counter[str]()
    for queue in summary.queues:
        by_topic[queue.topic] += queue.records
    report.bars("Messages of this run by topic", dict(by_topic.most_common()), "messages")
    if summary.batches or summary.resumed_behind_batch is not None:
        held = completeness(spark, summary.output)
        report.table("Is the archive complete?", held.columns, held.limit(ROWS_MAX + 1).collect())
        hour = F.expr("timestamp_seconds(unix_timestamp(to_timestamp(dt)) + hour * 3600)").alias("window")
        hours = files(spark, summary.output).groupBy("topic", hour).agg(F.sum("rows").alias("rows"))
        report.lines(
            "Messages by hour of store time", _over_time(hours, ["topic"], "rows"), "messages", times=True
        )
        newest = batches(spark, summary.output).orderBy(F.desc("batch")).limit(POINTS_MAX).collect()[::-1]
        rates = {
            "messages a second": [(row.epoch_s, row.records / max(row.seconds, 1e-3)) for row in newest],
            "KB a second": [(row.epoch_s, row.bytes / 1000 / max(row.seconds, 1e-3)) for row in newest],
        }
        report.lines("Rate of each batch", rates, times=True)
    return report


def audit_report(spark: SparkSession, summary: AuditSummary) -> Report:
    """Return a report of the findings by kind, by topic and over time."""
    report = Report(f"Audit of {summary.source}")
    report.bars(
        "Found", {name.replace("_", " "): float(getattr(summary, name)) for name in _FOUND}, "messages"
    )
    if summary.output is not None:
        topics = spark.read.parquet(f"{summary.output}/topics")
        for name in ("messages", "missing", "doubled", "late"):
            report.lines(f"{name.capitalize()} by window", _over_time(topics, ["topic"], name), times=True)
    report.summary(summary)
    return report


def trace_report(spark: SparkSession, summary: TraceSummary) -> Report:
    """Return a report of the latencies of sends and of consumer groups, in ms."""
    report = Report(f"Traces of {summary.source}")
    sends = {f"{row.topic} {row.group}": float(row.cost_p99) for row in summary.sends}
    report.bars("Slowest sends, p99", sends, "ms")
    groups = {f"{row.topic} {row.group}": float(row.delay_p99 or 0) for row in summary.groups}
    report.bars("Delay to the first delivery, p99", groups, "ms")
    if summary.output is not None:
        for table, value, words in (
            ("sends", "cost_p99", "Cost of sends, p99"),
            ("consumptions", "delay_p99", "Delay, p99"),
            ("consumptions", "cost_p99", "Cost of listeners, p99"),
        ):
            rows = spark.read.parquet(f"{summary.output}/{table}")
            report.lines(words, _over_time(rows, ["topic", "group"], value), "ms", times=True)
    report.summary(summary)
    return report


def lag_report(spark: SparkSession, summary: LagSummary, output: str | None = None) -> Report:
    """Return a report of the lag job: the current lag of groups, and the lag over time from stored samples.

    `output` is the output directory of the job. If it is None, the directory in the summary is used, whose
    URI has no keys or options.
    """
    report = Report("Lag of consumer groups")
    report.bars("Lag", {row.group: float(row.lag) for row in reversed(summary.groups)}, "messages")
    output = output or summary.output
    taken = None if output is None else SampleFiles(output).evenly(spark, POINTS_MAX)
    if taken is not None:
        groups = taken.groupBy("sampled_ms", "group").agg(
            F.sum("lag").alias("lag"), (F.max("time_lag_ms") / 1000).alias("time_lag_s")
        )
        timed = groups.withColumn("window", F.timestamp_millis("sampled_ms")).persist()
        report.lines("Lag by sample", _over_time(timed, ["group"], "lag"), "messages", times=True)
        report.lines("Time lag by sample", _over_time(timed, ["group"], "time_lag_s"), "s", times=True)
        timed.unpersist()
    report.summary(summary)
    return report


def throughput_report(spark: SparkSession, summary: ThroughputSummary) -> Report:
    """Return a report of messages and bytes by topic and over time."""
    report = Report(f"Throughput of {summary.source}")
    report.bars("Messages by topic", {row.topic: float(row.messages) for row in summary.topics}, "messages")
    report.bars("MB by topic", {row.topic: row.bytes / 1e6 for row in summary.topics}, "MB")
    if summary.output is not None:
        topics = spark.read.parquet(f"{summary.output}/topics")
        for name in ("messages_per_s", "bytes_per_s"):
            words = name.replace("_per_s", " a second").capitalize()
            report.lines(words, _over_time(topics, ["topic"], name), times=True)
    report.summary(summary)
    return report


def _over_time(rows: DataFrame, names: Sequence[str], value: str) -> Mapping[str, list[tuple[float, float]]]:
    """Return the lines of a plot over the column `window`, for the names with the largest values.

    The lines have the newest points, without points in the future: a client whose clock is ahead would
    otherwise displace all other points.
    """
    named = rows.select(
        F.col("window").cast("double").alias("at"),
        F.concat_ws(" ", *names).alias("name"),
        F.col(value).alias("value"),
    ).filter(F.col("value").isNotNull() & F.col("at").between(0, time.time() + _AHEAD_S))
    largest = (
        named.groupBy("name").agg(F.sum("value").alias("all")).orderBy(F.desc("all"), "name").limit(LINES_MAX)
    )
    newest = named.join(largest.select("name"), "name").orderBy(F.desc("at")).limit(LINES_MAX * POINTS_MAX)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in reversed(newest.collect()):
        lines.setdefault(row["name"], []).append((row["at"], float(row["value"])))
    return lines


REPORTS: dict[str, Callable[[SparkSession, Any, str | None], Report]] = {
    "audit": lambda spark, summary, _output: audit_report(spark, summary),
    "lag": lag_report,
    "throughput": lambda spark, summary, _output: throughput_report(spark, summary),
    "trace": lambda spark, summary, _output: trace_report(spark, summary),
}

"""The report of the archive job: one run, and the table as a whole."""

from __future__ import annotations

from collections import Counter

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.pipeline.base.report import LINES_MAX, POINTS_MAX, ROWS_MAX, Report
from cometmq.pipeline.jobs.archive import ArchiveSummary
from cometmq.pipeline.jobs.archive_query import batches, completeness, files


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
        _of_the_table(report, spark, summary.output)
    return report


def _of_the_table(report: Report, spark: SparkSession, output: str) -> None:
    held = completeness(spark, output)
    report.table("Is the archive complete?", held.columns, held.limit(ROWS_MAX + 1).collect())
    report.lines("Messages by hour of store time", _by_hour(files(spark, output)), "messages", times=True)
    newest = batches(spark, output).orderBy(F.desc("batch")).limit(POINTS_MAX).collect()[::-1]
    rates = {
        "messages a second": [(row.epoch_s, row.records / max(row.seconds, 1e-3)) for row in newest],
        "KB a second": [(row.epoch_s, row.bytes / 1000 / max(row.seconds, 1e-3)) for row in newest],
    }
    report.lines("Rate of each batch", rates, times=True)


def _by_hour(files: DataFrame) -> dict[str, list[tuple[float, float]]]:
    """Return the number of messages in each of the newest hours, for the topics with the most messages."""
    largest = files.groupBy("topic").agg(F.sum("rows").alias("rows")).orderBy(F.desc("rows")).limit(LINES_MAX)
    hour = F.expr("unix_timestamp(to_timestamp(dt)) + hour * 3600").alias("epoch_s")
    counted = (
        files.join(largest.select("topic"), "topic")
        .groupBy("topic", hour)
        .agg(F.sum("rows").alias("rows"))
        .orderBy(F.desc("epoch_s"))
        .limit(LINES_MAX * POINTS_MAX)
    )
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in reversed(counted.collect()):
        lines.setdefault(row.topic, []).append((row.epoch_s, row.rows))
    return lines

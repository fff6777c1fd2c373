"""The trace job: latencies of sends, deliveries and listeners, and failures, from message traces.

The job reads the records that clients write to a trace topic (docs/reference/client.md, Traces). A message's
delay is the time from when it was stored to its first delivery. For a delay, the job joins the Pub record
and the SubBefore record that have the same message id. No record contains the time when the message was
stored, so, as in Java's tools, the middle of the send is used. The delay compares clocks of different
machines; `negative_delays` counts the deliveries that seem to precede the store time.
"""

from __future__ import annotations

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.job_options import TraceOptions
from cometmq.pipeline.jobs.inputs import messages, unreadable
from cometmq.pipeline.jobs.results import report_on, spark_directory, structs, window
from cometmq.pipeline.jobs.trace_records import COLUMNS, PLACE, SCHEMA, decoded
from cometmq.pipeline.live.unreadable import UnreadableQueue
from cometmq.pipeline.table.objects import shown
from cometmq.protocol.codes import TRACE_TOPIC

_ACCURACY = 10_000  # Accuracy of `percentile_approx`: a rank is off by at most 1/10,000
_MOST = 20  # Maximum number of rows of each list in the summary
_SAMPLES = 5
_RAW = 200  # Maximum length of the raw text of a sampled record, in characters
_JOB = "trace"


class SendLatency(msgspec.Struct):
    """Latencies of a producer group's sends to a topic, in ms. Sends without SEND_OK are failures."""

    topic: str
    group: str
    sends: int
    messages: int
    failures: int
    cost_p50: int
    cost_p95: int
    cost_p99: int
    cost_max: int


class ConsumeLatency(msgspec.Struct):
    """Latencies of a topic's deliveries to a group, in ms, or None. `topic` is "" without a Pub record."""

    topic: str
    group: str
    deliveries: int
    redeliveries: int
    failures: int
    unfinished: int
    negative_delays: int
    delay_p50: int | None
    delay_p95: int | None
    delay_p99: int | None
    delay_max: int | None
    cost_p50: int | None
    cost_p95: int | None
    cost_p99: int | None
    cost_max: int | None


class BadTrace(msgspec.Struct):
    """A trace record that could not be read, with the position of its message in the trace topic."""

    broker_name: str
    queue_id: int
    queue_offset: int
    problem: str
    raw: str


class TraceSummary(msgspec.Struct):
    """The result of a trace run. `sends` and `groups` have the 20 entries with the highest p99 cost."""

    source: str
    output: str | None = None
    records: dict[str, int] = {}
    """Number of rows by kind. A record has one row for each message that it names."""
    bad: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    sends: list[SendLatency] = []
    groups: list[ConsumeLatency] = []
    bad_samples: list[BadTrace] = []
    unreadable: list[UnreadableQueue] = []
    """Queues whose messages, also those of other times, the brokers refuse to return (live/unreadable.py)."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all queues of the trace topic were readable."""
        return not self.unreadable


def traces(
    spark: SparkSession,
    source: str,
    topic: str = TRACE_TOPIC,
    begin_ms: int | None = None,
    end_ms: int | None = None,
) -> DataFrame:
    """Return the records of a trace topic, one row for each message that a record names.

    Args:
        spark: The Spark session.
        source: An archive, store directories or live topics; `messages` describes the forms.
        topic: Name of the trace topic.
        begin_ms: First store time of the records, in ms since 1970. None: no limit.
        end_ms: Store time, in ms since 1970, before which records are read. None: no limit.

    Returns:
        A DataFrame with the columns of trace_records.SCHEMA. Records that could not be read are rows of kind
            `bad`, with the reason and the raw text.

    Raises:
        ConfigError: An argument is invalid.
    """
    found = messages(spark, source, [topic], begin_ms, end_ms, COLUMNS, lenient=True)
    return found.mapInArrow(decoded, from_arrow_schema(SCHEMA))


def sends(rows: DataFrame, window_s: int | None = None) -> DataFrame:
    """Return the latencies of sends by topic and producer group.

    Args:
        rows: The result of `traces`.
        window_s: Length of a window, in seconds. None: one row for the whole time.

    Returns:
        A DataFrame with the columns of SendLatency. If `window_s` is set, the column `window` holds the start
            of each window.
    """
    # Duplicates are dropped because a client that received no response may have sent a trace message twice.
    once = rows.filter("kind = 'Pub'").dropDuplicates(["msg_id", "part", "timestamp_ms"])
    first = F.col("part") == 0
    return once.groupBy(*_keys(window_s)).agg(
        F.sum(first.cast("int")).alias("sends"),
        F.count("*").alias("messages"),
        F.sum((first & ~F.col("success")).cast("int")).alias("failures"),
        *_latency("cost", F.when(first, F.col("cost_ms"))),
    )


def calls(rows: DataFrame) -> DataFrame:
    """Return a row for each call of a listener with a message. Values that no record has are NULL."""
    begun, ended = F.col("kind") == "SubBefore", F.col("kind") == "SubAfter"
    read = rows.filter(begun | ended)
    return read.groupBy("request_id", "msg_id").agg(
        F.min(F.when(begun, F.col("timestamp_ms"))).alias("begun_ms"),
        F.min(F.when(begun, F.col("group"))).alias("group"),
        F.max("retries").alias("retries"),
        F.min(F.when(ended, F.col("timestamp_ms"))).alias("ended_ms"),
        F.min(F.when(ended, F.col("group"))).alias("ended_group"),
        F.max("cost_ms").alias("cost_ms"),
        F.min("success").alias("success"),
    )


def consumptions(rows: DataFrame, window_s: int | None = None) -> DataFrame:
    """Return the latencies of deliveries by topic and consumer group.

    Args:
        rows: The result of `traces`.
        window_s: Length of a window, in seconds. None: one row for the whole time. A delivery belongs to the
            window in which it began.

    Returns:
        A DataFrame with the columns of ConsumeLatency. If `window_s` is set, the column `window` holds the
            start of each window.
    """
    stored = (
        rows.filter("kind = 'Pub'")
        .groupBy("msg_id")
        .agg(F.min(F.expr("timestamp_ms + cost_ms div 2")).alias("sent_ms"), F.min("topic").alias("topic"))
    )
    joined = calls(rows).join(stored, "msg_id", "left")
    delay = F.when(F.coalesce("retries", F.lit(0)) == 0, F.col("begun_ms") - F.col("sent_ms"))
    deliveries = joined.select(
        F.coalesce("begun_ms", F.col("ended_ms") - F.col("cost_ms")).alias("timestamp_ms"),
        F.coalesce("group", "ended_group").alias("group"),
        *("topic", "begun_ms", "ended_ms", "retries", "cost_ms", "success"),
        delay.alias("delay_ms"),
    )
    return deliveries.groupBy(*_keys(window_s)).agg(
        F.count("*").alias("deliveries"),
        F.count(F.when(F.col("retries") > 0, 1)).alias("redeliveries"),
        F.count(F.when(~F.col("success"), 1)).alias("failures"),
        F.count(F.when(F.col("ended_ms").isNull(), 1)).alias("unfinished"),
        F.count(F.when(F.col("delay_ms") < 0, 1)).alias("negative_delays"),
        *_latency("delay", F.col("delay_ms")),
        *_latency("cost", F.col("cost_ms")),
    )


def _keys(window_s: int | None) -> list[Column]:
    keys = [F.coalesce(name, F.lit("")).alias(name) for name in ("topic", "group")]
    return keys if window_s is None else [window("timestamp_ms", window_s), *keys]


def _latency(name: str, value: Column) -> list[Column]:
    """Return columns for the p50, p95, p99 and maximum of a duration in ms."""
    parts = [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)]
    found = [F.percentile_approx(value, share, _ACCURACY).alias(f"{name}_{part}") for part, share in parts]
    return [*found, F.max(value).alias(f"{name}_max")]


@job(TraceOptions)
def trace(spark: SparkSession, given: TraceOptions) -> TraceSummary:
    """Report the latencies of sends and deliveries from the records of a trace topic.

    Returns:
        The slowest producer and consumer groups, and samples of unreadable records.

    Raises:
        ConfigError: An argument is invalid.
        JobFailed: A Spark job failed.
        JobStopped: `stop` was set.
    """
    source, topic, window_s = given.source, given.topic, given.window_s
    output = None if given.output is None else spark_directory(spark, given.output, _JOB)
    summary = TraceSummary(shown(source), output)
    rows = traces(spark, source, topic, given.begin_ms, given.end_ms)

    def tables() -> dict[str, DataFrame]:
        bad = rows.filter("kind = 'bad'").select("stored_ms", *PLACE, "problem", "raw")
        return {"sends": sends(rows, window_s), "consumptions": consumptions(rows, window_s), "bad": bad}

    def work() -> None:
        _sum_up(rows, summary)
        summary.unreadable = unreadable(source, [topic])

    report_on(_JOB, output, [rows], work, tables, given)
    return summary


def _sum_up(rows: DataFrame, summary: TraceSummary) -> None:
    ends = [F.min("timestamp_ms").alias("first"), F.max("timestamp_ms").alias("last")]
    for kind in rows.groupBy("kind").agg(F.count("*").alias("rows"), *ends).collect():
        if kind["kind"] == "bad":
            summary.bad = kind["rows"]
            continue
        summary.records[kind["kind"]] = kind["rows"]
        summary.first_ms = min(kind["first"], summary.first_ms or kind["first"])
        summary.last_ms = max(kind["last"], summary.last_ms or kind["last"])
    slowest = [F.desc_nulls_last("cost_p99"), F.col("topic"), F.col("group")]
    summary.sends = structs(SendLatency, sends(rows).orderBy(*slowest).limit(_MOST))
    summary.groups = structs(ConsumeLatency, consumptions(rows).orderBy(*slowest).limit(_MOST))
    if summary.bad:
        bad = rows.filter("kind = 'bad'").select(*PLACE, "problem", F.substring("raw", 1, _RAW).alias("raw"))
        summary.bad_samples = structs(BadTrace, bad.orderBy(*PLACE).limit(_SAMPLES))

"""The throughput job: messages and bytes of topics and queues in windows of store time."""

from __future__ import annotations

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.job_options import ThroughputOptions
from cometmq.pipeline.jobs.inputs import messages, unreadable
from cometmq.pipeline.jobs.results import absent, report_on, spark_directory, structs, sums, window
from cometmq.pipeline.live.unreadable import UnreadableQueue
from cometmq.pipeline.table.objects import shown

_JOB = "throughput"
_COLUMNS = ("topic", "broker_name", "queue_id", "store_timestamp", "store_size")


class TopicRate(msgspec.Struct):
    """The totals of a topic over the whole time range.

    Bytes are sizes of records in the broker's store. Each peak is the rate of the window in which this rate
    was highest; the peaks of messages and of bytes may belong to different windows. `peak_ms` is the start of
    the window with the most messages.
    """

    topic: str
    queues: int
    messages: int
    bytes: int
    peak_messages_per_s: float
    peak_bytes_per_s: float
    peak_ms: int


class ThroughputSummary(msgspec.Struct):
    """The result of a throughput run. `topics` has the topics with the most bytes."""

    source: str
    output: str | None = None
    window_s: int = 60
    messages: int = 0
    bytes: int = 0
    topic_count: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    topics: list[TopicRate] = []
    absent: list[str] = []
    """Requested topics without messages in the requested time range."""
    unreadable: list[UnreadableQueue] = []
    """Queues whose messages, also those of other times, the brokers refuse to return (live/unreadable.py)."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every requested topic has messages, and all queues were readable."""
        return not (self.absent or self.unreadable)

    @property
    def messages_per_s(self) -> float:
        """Messages per second between the first and the last store time (at least one second)."""
        return self.messages / self._span_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second between the first and the last store time (at least one second)."""
        return self.bytes / self._span_s

    @property
    def _span_s(self) -> float:
        return max((self.last_ms or 0) - (self.first_ms or 0), 1000) / 1000


def queue_rates(found: DataFrame, window_s: int) -> DataFrame:
    """Return a row for each queue and window with messages: totals, rates per second, first and last ms."""
    at_ms = F.unix_millis("store_timestamp")
    counted = found.groupBy(window(at_ms, window_s), "topic", "broker_name", "queue_id").agg(
        F.count("*").alias("messages"),
        F.sum(F.col("store_size").cast("bigint")).alias("bytes"),
        F.min(at_ms).alias("first_ms"),
        F.max(at_ms).alias("last_ms"),
    )
    return _with_rates(counted, window_s)


def topic_rates(queues: DataFrame, window_s: int) -> DataFrame:
    """Return the totals of `queue_rates` by window and topic, with the number of queues in `queues`."""
    counted = queues.groupBy("window", "topic").agg(F.count("*").alias("queues"), *_totals())
    return _with_rates(counted, window_s)


def _totals() -> list[Column]:
    span = [F.min("first_ms").alias("first_ms"), F.max("last_ms").alias("last_ms")]
    return [*sums("messages", "bytes"), *span]


def _with_rates(counted: DataFrame, window_s: int) -> DataFrame:
    return counted.withColumn("messages_per_s", F.col("messages") / window_s).withColumn(
        "bytes_per_s", F.col("bytes") / window_s
    )


@job(ThroughputOptions)
def throughput(spark: SparkSession, given: ThroughputOptions) -> ThroughputSummary:
    """Count the messages and bytes of topics in windows of store time.

    Returns:
        The totals, and the topics with the most bytes.

    Raises:
        ConfigError: An argument is invalid.
        JobFailed: A Spark job failed.
        JobStopped: `stop` was set.
    """
    source, topics, window_s = given.source, given.topics, given.window_s
    output = None if given.output is None else spark_directory(spark, given.output, _JOB)
    summary = ThroughputSummary(shown(source), output, window_s)
    found = messages(
        spark, source, topics, given.begin_ms, given.end_ms, _COLUMNS, pattern=given.pattern, lenient=True
    )
    queues = queue_rates(found, window_s)

    def work() -> None:
        _sum_up(queues, summary, given.top)
        summary.absent = absent(topics, queues)
        summary.unreadable = unreadable(source, topics, pattern=given.pattern)

    def tables() -> dict[str, DataFrame]:
        return {"queues": queues, "topics": topic_rates(queues, window_s)}

    report_on(_JOB, output, [queues], work, tables, given)
    return summary


def _sum_up(queues: DataFrame, summary: ThroughputSummary, top: int) -> None:
    windows = topic_rates(queues, summary.window_s)
    peak = F.max(F.struct("messages", -F.unix_millis("window")))
    by_topic = windows.groupBy("topic").agg(
        F.max("queues").cast("int").alias("queues"),
        *sums("messages", "bytes"),
        F.max("messages_per_s").alias("peak_messages_per_s"),
        F.max("bytes_per_s").alias("peak_bytes_per_s"),
        (-peak["col2"]).alias("peak_ms"),
    )
    total = queues.agg(F.countDistinct("topic").alias("topics"), *_totals()).collect()[0]
    summary.messages, summary.bytes = total["messages"] or 0, total["bytes"] or 0
    summary.topic_count = total["topics"]
    summary.first_ms, summary.last_ms = total["first_ms"], total["last_ms"]
    summary.topics = structs(TopicRate, by_topic.orderBy(F.desc("bytes"), "topic").limit(top))

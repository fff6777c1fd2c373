"""The throughput job: messages and bytes of topics and queues in windows of store time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.pipeline.jobs.inputs import messages, unreadable
from cometmq.pipeline.jobs.results import absent, at_least, report_on, spark_directory, window
from cometmq.pipeline.live.unreadable import UnreadableQueue
from cometmq.pipeline.table.objects import shown

_JOB = "throughput"
_COLUMNS = ("topic", "broker_name", "queue_id", "store_timestamp", "store_size")


class TopicRate(msgspec.Struct):
    """A topic in the whole time. Bytes are those of records as the broker stores them. The peaks are means of
    single windows; peak_ms is when the one with most messages begins."""

    topic: str
    queues: int
    messages: int
    bytes: int
    peak_messages_per_s: float
    peak_bytes_per_s: float
    peak_ms: int


class ThroughputSummary(msgspec.Struct):
    """What was stored in the time asked for. topics: those with most bytes."""

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
    """Topics that were named, and have no messages in that time."""
    unreadable: list[UnreadableQueue] = []
    """Live queues with messages that could not be read (live/unreadable.py); some may be outside the span."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether each topic that was named is there, and all queues could be read."""
        return not (self.absent or self.unreadable)

    @property
    def messages_per_s(self) -> float:
        """From the first message's store time to the last one's, at least a second."""
        return self.messages / self._span_s

    @property
    def bytes_per_s(self) -> float:
        """As `messages_per_s`."""
        return self.bytes / self._span_s

    @property
    def _span_s(self) -> float:
        return max((self.last_ms or 0) - (self.first_ms or 0), 1000) / 1000


def queue_rates(found: DataFrame, window_s: int) -> DataFrame:
    """One row for each window of `window_s` seconds and queue with messages in it: messages, bytes, both a
    second, and the times of the first and the last message in ms.

    found: rows with topic, broker_name, queue_id, store_timestamp and store_size."""
    at_ms = F.unix_millis("store_timestamp")
    counted = found.groupBy(window(at_ms, window_s), "topic", "broker_name", "queue_id").agg(
        F.count("*").alias("messages"),
        F.sum(F.col("store_size").cast("bigint")).alias("bytes"),
        F.min(at_ms).alias("first_ms"),
        F.max(at_ms).alias("last_ms"),
    )
    return _with_rates(counted, window_s)


def topic_rates(queues: DataFrame, window_s: int) -> DataFrame:
    """The rows of `queue_rates` added up to one for each window and topic; `queues` counts those with
    messages."""
    counted = queues.groupBy("window", "topic").agg(
        F.count("*").alias("queues"),
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.min("first_ms").alias("first_ms"),
        F.max("last_ms").alias("last_ms"),
    )
    return _with_rates(counted, window_s)


def _with_rates(counted: DataFrame, window_s: int) -> DataFrame:
    return counted.withColumn("messages_per_s", F.col("messages") / window_s).withColumn(
        "bytes_per_s", F.col("bytes") / window_s
    )


def throughput(
    spark: SparkSession,
    source: str,
    topics: Sequence[str] = (),
    *,
    pattern: str | None = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    window_s: int = 60,
    top: int = 20,
    output: str | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
    stop: threading.Event | None = None,
) -> ThroughputSummary:
    """Count the messages of `topics`, or of those that match `pattern`, that were stored at `begin_ms` or
    later and before `end_ms`.

    source: live topics, stores or an archive (inputs.py). output: a directory for the tables `queues` and
    `topics` with a row for each window of `window_s` seconds; an earlier run's tables are replaced. top: how
    many topics the summary names.

    Raises ConfigError, JobFailed, JobStopped.
    """
    at_least(1, window_s=window_s, top=top)
    output = None if output is None else spark_directory(spark, output, _JOB)
    summary = ThroughputSummary(shown(source), output, window_s)
    found = messages(spark, source, topics, begin_ms, end_ms, _COLUMNS, pattern=pattern, lenient=True)
    queues = queue_rates(found, window_s)

    def work() -> None:
        _sum_up(queues, summary, top)
        summary.absent = absent(topics, queues)
        summary.unreadable = unreadable(source, topics, pattern=pattern)

    report_on(
        _JOB,
        summary,
        [queues],
        work,
        lambda: {"queues": queues, "topics": topic_rates(queues, window_s)},
        on_progress=on_progress,
        stop=stop,
    )
    return summary


def _sum_up(queues: DataFrame, summary: ThroughputSummary, top: int) -> None:
    windows = topic_rates(queues, summary.window_s)
    peak = F.max(F.struct("messages", -F.unix_millis("window")))
    by_topic = windows.groupBy("topic").agg(
        F.max("queues").cast("int").alias("queues"),
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.max("messages_per_s").alias("peak_messages_per_s"),
        F.max("bytes_per_s").alias("peak_bytes_per_s"),
        (-peak["col2"]).alias("peak_ms"),
    )
    total = queues.agg(
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.countDistinct("topic").alias("topics"),
        F.min("first_ms").alias("first_ms"),
        F.max("last_ms").alias("last_ms"),
    ).collect()[0]
    summary.messages, summary.bytes = total["messages"] or 0, total["bytes"] or 0
    summary.topic_count = total["topics"]
    summary.first_ms, summary.last_ms = total["first_ms"], total["last_ms"]
    largest = by_topic.orderBy(F.desc("bytes"), "topic").limit(top).collect()
    summary.topics = [TopicRate(**row.asDict()) for row in largest]

"""The dedup job: keep one of the messages with the same business key.

The batch form orders the messages of a topic with the same key by store time, broker, queue and offset, so
the result does not depend on how Spark divides the work. With a window, a message is a duplicate only if it
was stored within the window's length after the previous message with its key. `deduplicated` is the streaming
form, which uses Spark's own operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.window import Window

from cometmq.errors import ConfigError
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.engine import run_action
from cometmq.pipeline.base.job_options import DedupOptions
from cometmq.pipeline.jobs.inputs import messages
from cometmq.pipeline.jobs.results import absent, spark_directory, structs, sums
from cometmq.pipeline.table.objects import shown

_JOB = "dedup"
_SAMPLES = 20
_KEY = 200  # maximum characters of a key in a sample
_PLACE = ("broker_name", "queue_id", "queue_offset")
_ORDER = ("store_timestamp", *_PLACE, "physical_offset")


class Removed(msgspec.Struct):
    """A duplicate, and the message kept instead: the first or last message with the same key (see `keep`)."""

    topic: str
    key: str
    broker_name: str
    queue_id: int
    queue_offset: int
    stored_ms: int
    kept_broker_name: str
    kept_queue_id: int
    kept_queue_offset: int


class TopicCount(msgspec.Struct):
    """Counts of one topic: messages, messages without a key (all of them kept), and removed duplicates."""

    topic: str
    messages: int
    without_key: int
    removed: int


class DedupSummary(msgspec.Struct):
    """The result of a run. `topics` has up to 50 topics with the most duplicates, `samples` up to 20."""

    source: str
    output: str
    key: str
    keep: str
    messages: int = 0
    without_key: int = 0
    removed: int = 0
    topics: list[TopicCount] = []
    samples: list[Removed] = []
    absent: list[str] = []
    """Requested topics without messages in the requested time range."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every requested topic has messages."""
        return not self.absent

    @property
    def kept(self) -> int:
        """Number of messages that are not duplicates."""
        return self.messages - self.removed


def marked(
    found: DataFrame, key: str, *, keep: Literal["first", "last"] = "first", window_s: float | None = None
) -> DataFrame:
    """Add the columns `dedup_key`, `state` (kept or removed) and `kept` to messages.

    `kept` is the position of the message that is kept among the messages with the same key. `key` is the word
    `keys`, the word `msg_id` (the sink's idempotency key), or an SQL expression over the source's columns. A
    message whose key is empty or NULL is kept, and its column `kept` is NULL. Each topic is handled
    separately. Raises ConfigError for an expression that cannot be evaluated.
    """
    try:
        with_key = found.withColumn("dedup_key", _key(key))
        with_key.schema  # noqa: B018 - Spark Connect looks at the expression only now
    except PySparkException as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError("key", key, f"keys, msg_id or an expression in SQL ({problem})") from error
    # Each message without a key gets a unique replacement key, so that these messages are spread over all
    # tasks.
    by_key: list[str | Column] = ["topic", F.coalesce("dedup_key", _alone())]
    one_key = Window.partitionBy(*by_key)
    if window_s is not None:
        at = F.unix_millis("store_timestamp")
        before = F.lag(at).over(one_key.orderBy(*_ORDER))
        begins = F.when(at - before <= int(window_s * 1000), 0).otherwise(1)
        runs = F.sum(begins).over(one_key.orderBy(*_ORDER).rowsBetween(Window.unboundedPreceding, 0))
        with_key = with_key.withColumn("dedup_run", runs)
        by_key.append("dedup_run")
    order = [F.asc(name) if keep == "first" else F.desc(name) for name in _ORDER]
    same = Window.partitionBy(*by_key).orderBy(*order)
    number = F.when(F.col("dedup_key").isNull(), 1).otherwise(F.row_number().over(same))
    kept = F.when(F.col("dedup_key").isNotNull(), F.first(F.struct(*_PLACE)).over(same))
    return (
        with_key.withColumn("state", F.when(number == 1, "kept").otherwise("removed"))
        .withColumn("kept", kept)
        .drop("dedup_run")
    )


def _key(key: str) -> Column:
    text = F.expr(key).cast("string")
    return F.when(F.length(F.trim(text)) > 0, text)


def _alone() -> Column:
    """Return a unique replacement for the missing key of a message."""
    return F.concat_ws("/", F.lit("\0"), *_PLACE)


def deduplicated(stream: DataFrame, key: str, within_s: float) -> DataFrame:
    """Remove duplicates from a stream of the `cometmq` source.

    Of messages of a topic that have the same key and were stored at most `within_s` seconds apart, the first
    to arrive is kept. If a message arrives after a message that was stored more than `within_s` seconds
    later, Spark drops it as late and counts it in numRowsDroppedByWatermark. Therefore `within_s` must exceed
    the time difference between queues. Spark's state grows with the number of keys within `within_s`.

    Args:
        stream: A streaming DataFrame of the source.
        key: `keys`, `msg_id`, or an SQL expression over the columns. Messages whose key is empty or NULL have
            no duplicates.
        within_s: Maximum difference between the store times of duplicates, in seconds.

    Returns:
        The stream without duplicates.

    Raises:
        ConfigError: `key` cannot be evaluated.
    """
    with_key = stream.withColumn("dedup_key", F.coalesce(_key(key), _alone()))
    late = with_key.withWatermark("store_timestamp", f"{int(within_s * 1000)} milliseconds")
    return late.dropDuplicatesWithinWatermark(["topic", "dedup_key"]).drop("dedup_key")


@job(DedupOptions)
def dedup(spark: SparkSession, given: DedupOptions) -> DedupSummary:
    """Write messages to a Parquet table, with duplicates in a partition of their own.

    Messages that are kept go to the partition `state=kept`, duplicates to `state=removed`. Nothing is
    discarded. A later run replaces the table; if the source has not changed, the new table has the same rows.

    Returns:
        The counts by topic, and samples of duplicates.

    Raises:
        ConfigError: An argument is invalid.
        JobFailed: A Spark job failed, or a message could not be decoded.
        JobStopped: `stop` was set.
    """
    found = messages(spark, given.source, given.topics, given.begin_ms, given.end_ms, pattern=given.pattern)
    rows = marked(found, given.key, keep=given.keep, window_s=given.window_s)
    output = spark_directory(spark, given.output, _JOB)
    summary = DedupSummary(shown(given.source), output, given.key, given.keep)
    table = f"{output}/messages"
    write = partial(rows.write.mode("overwrite").partitionBy("state").parquet, table)
    for work in (write, lambda: _sum_up(spark, table, summary, given.topics)):
        run_action(spark, _JOB, work, on_progress=given.show, stop=given.stop)
    return summary


def _sum_up(spark: SparkSession, table: str, summary: DedupSummary, topics: Sequence[str]) -> None:
    written = spark.read.schema(_SUMMED).parquet(table)
    counted = written.groupBy("topic").agg(
        F.count("*").alias("messages"),
        F.count(F.when(F.col("dedup_key").isNull(), 1)).alias("without_key"),
        F.count(F.when(F.col("state") == "removed", 1)).alias("removed"),
    )
    totals = counted.agg(*sums("messages", "without_key", "removed")).collect()[0]
    summary.messages, summary.without_key, summary.removed = (total or 0 for total in totals)
    summary.absent = absent(topics, counted)
    summary.topics = structs(TopicCount, counted.orderBy(F.desc("removed"), "topic").limit(50))
    gone = written.filter("state = 'removed'").orderBy("topic", *_ORDER).limit(_SAMPLES)
    samples = gone.select(
        "topic",
        F.substring("dedup_key", 1, _KEY).alias("key"),
        *_PLACE,
        F.unix_millis("store_timestamp").alias("stored_ms"),
        *(F.col(f"kept.{name}").alias(f"kept_{name}") for name in _PLACE),
    )
    summary.samples = structs(Removed, samples)


_SUMMED = (
    "topic string, dedup_key string, state string, broker_name string, queue_id int, queue_offset bigint, "
    "physical_offset bigint, store_timestamp timestamp, "
    "kept struct<broker_name string, queue_id int, queue_offset bigint>"
)

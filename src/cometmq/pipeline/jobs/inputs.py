"""The sources from which jobs read messages: an archive, store directories or live topics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.errors import ConfigError
from cometmq.pipeline.base.declare import check_pattern
from cometmq.pipeline.base.offsets import check_time
from cometmq.pipeline.base.options import Topics, parse_addresses
from cometmq.pipeline.base.wire import Access
from cometmq.pipeline.jobs.archive_query import archived
from cometmq.pipeline.jobs.lag import SampleFiles
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.source import full_schema
from cometmq.pipeline.live.unreadable import UnreadableQueue, UnreadableQueues
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.groups import GroupLog
from cometmq.pipeline.table.objects import shown
from cometmq.protocol.codes import SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS, UNSENDABLE_TOPICS
from cometmq.protocol.record.arrow import MAX_MS

STORE = "store:"
LIVE = "live:"
_TIMEOUT_MS = 30_000
OF_USERS = rf"(?!%|{SYSTEM_TOPIC_PREFIX}|(?:{'|'.join(sorted(SYSTEM_TOPICS | UNSENDABLE_TOPICS))})$).+"
"""Pattern for topics of users. It excludes brokers' topics and topics of a group (retries, dead letters)."""


def messages(
    spark: SparkSession,
    source: str,
    topics: Sequence[str] = (),
    begin_ms: int | None = None,
    end_ms: int | None = None,
    columns: Sequence[str] = (),
    *,
    pattern: str | None = None,
    lenient: bool = False,
) -> DataFrame:
    """Return the messages of a source that were stored in a time range, in no particular order.

    Args:
        spark: The Spark session.
        source: An archive's directory or URI, "store:DIR" (store directories or patterns, separated by
            commas), or "live:HOST:PORT" (name servers, separated by semicolons).
        topics: Names of the topics. Empty: all topics that match `pattern`.
        begin_ms: First store time, in ms since 1970 by the brokers' clocks. None: no limit.
        end_ms: Store time, in ms since 1970, before which messages are read. None: no limit.
        columns: Names of the columns (docs/pipeline.md, Columns). Empty: all; an archive has no
            offset_msg_id. Fewer columns are read much faster.
        pattern: A regular expression for names of topics, instead of `topics`. None without `topics`: all
            topics, which live sources do not permit.
        lenient: Whether undecodable records, lost messages and unreadable queues are skipped with a warning.
            By default, they end the read with an error.

    Returns:
        A DataFrame with one row for each message. An archive may have rows both of a deleted queue and of its
            replacement.

    Raises:
        ConfigError: An argument is invalid.
    """
    if not source or source in (STORE, LIVE):
        raise ConfigError("source", source, "an archive's directory, store:DIR or live:HOST:PORT")
    if topics and pattern is not None:
        raise ConfigError("topics", ", ".join(topics), "topic names or a pattern, not both")
    if pattern is not None:
        check_pattern("pattern", pattern)
    check_span(begin_ms, end_ms)
    schema = full_schema()
    archive = not source.startswith((STORE, LIVE))
    names = columns or [name for name in schema.names if not (archive and name == "offset_msg_id")]
    unknown = [name for name in names if name not in schema.names or (archive and name == "offset_msg_id")]
    if unknown or len(set(names)) < len(names):
        expected = f"columns of: {', '.join(schema.names)}" if unknown else "each column once"
        raise ConfigError("columns", ", ".join(unknown or names), expected)
    if archive:
        return _of_archive(spark, source, topics, pattern, begin_ms, end_ms).select(*names)
    if source.startswith(LIVE):
        if not topics and pattern is None:
            raise ConfigError("topics", "", "the names of live topics, or a pattern")
        reader = spark.read.format("cometmq").option("namesrv", source.removeprefix(LIVE))
    else:
        reader = spark.read.format("cometmq-store").option("path", source.removeprefix(STORE))
    if lenient:
        reader = reader.options(onBadRecord="skip", failOnDataLoss="false")
    if topics:
        reader = reader.option("subscribe", ",".join(topics))
    if pattern is not None:
        reader = reader.option("subscribePattern", pattern)
    # An end in the future, which the source may refuse, excludes no existing message.
    past_ms = None if end_ms is not None and end_ms > time.time() * 1000 else end_ms
    for option, time_ms in (("startingTimestamp", begin_ms), ("endingTimestamp", past_ms)):
        if time_ms is not None:
            reader = reader.option(option, str(time_ms))
    wanted = [schema[name] for name in names]
    return reader.schema(", ".join(f"{one.name} {one.dataType.simpleString()}" for one in wanted)).load()


def unreadable(
    source: str, topics: Sequence[str] = (), *, pattern: str | None = None
) -> list[UnreadableQueue]:
    """Return the queues of a live source with messages that cannot be read. Network errors are raised."""
    if not source.startswith(LIVE):
        return []
    namesrv, wanted = parse_addresses(source.removeprefix(LIVE)), Topics(tuple(topics), pattern)
    with Cluster(namesrv, timeout_ms=_TIMEOUT_MS, access=Access.of_environment()) as cluster:
        cluster.names(wanted, wait=True)
        return UnreadableQueues(cluster, wanted).find({})


def check_span(begin_ms: int | None, end_ms: int | None) -> None:
    """Raise ConfigError for an invalid time, or for a start that is not before the end."""
    for key, time_ms in (("begin", begin_ms), ("end", end_ms)):
        if time_ms is not None and not 0 <= time_ms <= MAX_MS:
            raise ConfigError(key, str(time_ms), "a time of the years 1970 to 9998, in ms")
    if begin_ms is not None:
        check_time("begin", begin_ms, end=False)
    if end_ms is not None:
        # Here any end in the future is valid, but `check_time` refuses an end more than a day ahead. So for
        # an end in the future, the current time is checked instead.
        check_time("end", min(end_ms, int(time.time() * 1000)), end=True)
    if begin_ms is not None and end_ms is not None and begin_ms >= end_ms:
        raise ConfigError("end", str(end_ms), f"a time after the begin, {begin_ms}")


def _of_archive(
    spark: SparkSession,
    output: str,
    topics: Sequence[str],
    pattern: str | None,
    begin_ms: int | None,
    end_ms: int | None,
) -> DataFrame:
    output = output if "://" in output else open_filesystem(output)[1]
    try:
        rows = archived(spark, output)
    except (FileNotFoundError, AnalysisException):
        raise ConfigError(
            "source", shown(output), "an archive with messages, store:DIR or live:HOST:PORT"
        ) from None
    if topics:
        rows = rows.filter(F.col("topic").isin(*topics))
    if pattern is not None:
        rows = rows.filter(F.col("topic").rlike(f"^(?:{pattern})$"))
    at = F.col("store_timestamp")
    hour = F.concat_ws(" ", F.col("dt").cast("string"), F.lpad(F.col("hour").cast("string"), 2, "0"))
    divided = {"dt", "hour"} <= set(rows.columns)
    if begin_ms is not None:
        rows = rows.filter(at >= F.timestamp_millis(F.lit(begin_ms)))
        rows = rows.filter(hour >= _hour(begin_ms)) if divided else rows
    if end_ms is not None:
        rows = rows.filter(at < F.timestamp_millis(F.lit(end_ms)))
        rows = rows.filter(hour <= _hour(end_ms)) if divided else rows
    return rows


def group_offsets(spark: SparkSession, path: str) -> DataFrame:
    """Return the offsets of groups, with the columns group, topic, broker_name, queue_id and offset.

    `offset` is the next offset to consume. If the path is an archive, the rows come from its newest snapshot;
    if it is the lag job's table, they come from the samples of the newest hour.
    """
    newest = GroupLog(*open_filesystem(path)).newest()
    if newest.num_rows:
        return spark.createDataFrame(newest.drop_columns(["batch", "time"]))
    rows = SampleFiles(path).newest(spark)
    if rows is None:
        expected = "an archive that keeps positions of groups (--groups), or the lag job's table"
        raise ConfigError("positions", shown(path), expected)
    offset = F.max_by("group_offset", "sampled_ms").alias("offset")
    return rows.groupBy("group", "topic", "broker_name", "queue_id").agg(offset)


def _hour(time_ms: int) -> str:
    """Return the name of an archive's directory for an hour, by which Spark can skip other hours."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H")

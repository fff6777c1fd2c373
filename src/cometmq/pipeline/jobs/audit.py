"""The audit job: lost, duplicate, misordered and late messages by topic, group and time window.

The job compares up to three inputs: the messages of a source, the records that clients wrote to a trace
topic, and the offsets of groups. docs/jobs.md, audit, explains the conclusions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.window import Window

from cometmq.errors import ConfigError
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.job_options import AuditOptions
from cometmq.pipeline.jobs.inputs import LIVE, OF_USERS, check_span, group_offsets, messages, unreadable
from cometmq.pipeline.jobs.results import absent, report_on, spark_directory, structs, sums, window
from cometmq.pipeline.jobs.trace import calls
from cometmq.pipeline.jobs.trace import traces as trace_rows
from cometmq.pipeline.live.unreadable import UnreadableQueue
from cometmq.pipeline.table.objects import shown
from cometmq.protocol.record.arrow import MAX_MS
from cometmq.protocol.traces import MessageType

COLUMNS = (
    "topic", "broker_name", "queue_id", "queue_offset", "physical_offset", "msg_id", "born_timestamp",
    "born_host", "store_timestamp",
)  # fmt: skip
"""Columns that the audit reads from each message."""
_QUEUE = ("topic", "broker_name", "queue_id")
_FOUND = ("missing", "doubled", "out_of_order", "late", "anew")
_SAMPLES = 10  # maximum samples of each kind
_MOST = 50  # maximum rows of a list in the summary
GROUPS_MAX = 1000  # maximum examined groups per topic, because the result has a row per message and group
_GAP_MAX = 1 << 40  # maximum offsets counted as missing before one message; sums must fit into 64 bits
_JOB = "audit"


class TopicAudit(msgspec.Struct):
    """The totals of a topic over all closed windows. Without traces, `sent` and `lost` are None."""

    topic: str
    messages: int
    missing: int
    doubled: int
    out_of_order: int
    late: int
    anew: int
    sent: int | None
    lost: int | None


class GroupAudit(msgspec.Struct):
    """The totals of a consumer group for one topic. They add up the closed windows of the table `groups`."""

    topic: str
    group: str
    messages: int
    acknowledged: int | None
    consumed: int | None
    again: int | None
    unconsumed: int | None
    lost: int | None
    late: int | None


class Finding(msgspec.Struct):
    """One finding of the audit. The unit of `value` depends on the kind of finding: messages or ms."""

    kind: str
    window_ms: int
    topic: str
    group: str | None
    broker_name: str | None
    queue_id: int | None
    queue_offset: int | None
    msg_id: str | None
    value: int


class AuditSummary(msgspec.Struct):
    """The totals of all closed windows, the topics and groups with the most findings, and samples."""

    source: str
    output: str | None = None
    messages: int = 0
    bad_traces: int = 0
    """Trace records that could not be read. The trace job lists them."""
    left_out: int = 0
    """Number of groups that were not examined. At most 1000 groups are examined per topic."""
    windows: int = 0
    open_windows: int = 0
    closed_to_ms: int | None = None
    """Time in ms since 1970. Windows that ended at or before this time are closed."""
    missing: int = 0
    doubled: int = 0
    out_of_order: int = 0
    late: int = 0
    anew: int = 0
    lost: int = 0
    """Messages, in all topics, that a producer's trace reports as sent but that the topic does not hold."""
    group_lost: int = 0
    """Messages, over all groups, that were acknowledged but never consumed."""
    topics: list[TopicAudit] = []
    groups: list[GroupAudit] = []
    samples: list[Finding] = []
    absent: list[str] = []
    """Requested topics without messages and without traces."""
    unreadable: list[UnreadableQueue] = []
    """Queues whose messages, also those of other times, the brokers refuse to return (live/unreadable.py)."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether no loss was found, all queues were readable and every requested topic exists.

        Duplicate messages do not make an audit incomplete, because RocketMQ permits them.
        """
        return not (self.missing or self.lost or self.group_lost or self.absent or self.unreadable)


def _wider(given: AuditOptions) -> tuple[int | None, int | None]:
    """Return the time range to read, which includes messages related to audited ones."""
    delay_ms = given.delay_s * 1000
    begin = None if given.begin_ms is None else max(0, given.begin_ms - delay_ms)
    return begin, None if given.end_ms is None else min(given.end_ms + delay_ms, MAX_MS)


def closed_to(given: AuditOptions, newest_ms: int | None, now_ms: int) -> int | None:
    """Return a time at or before which all closed windows end. Return None if no window is closed.

    A window is closed if no more of its messages are expected. `newest_ms` is the time up to which every
    input of the audit has rows, or None if an input has no rows.
    """
    if given.end_ms is not None and given.end_ms + given.delay_s * 1000 <= now_ms:
        return given.end_ms
    # The newest store time may be in the future, because a broker's clock may have been ahead temporarily.
    return None if newest_ms is None else min(newest_ms, now_ms) - given.delay_s * 1000


def _open(given: AuditOptions, closed_to_ms: int | None) -> Column:
    """Return a condition that is true for rows whose window may still receive messages."""
    if closed_to_ms is None:
        return F.lit(True)
    end = F.unix_millis("window") + given.window_s * 1000
    return (end if given.end_ms is None else F.least(end, F.lit(given.end_ms))) > closed_to_ms


def _inside(given: AuditOptions, at_ms: Column) -> Column:
    inside = F.lit(True) if given.begin_ms is None else at_ms >= given.begin_ms
    return inside if given.end_ms is None else inside & (at_ms < given.end_ms)


def checked(rows: DataFrame, given: AuditOptions) -> DataFrame:
    """Return a row for each message with its time window (`window`) and its faults.

    Copies of one stored record count as one message. `missing` is the number of missing offsets just before
    the message. The other faults are 1 or 0: `doubled` marks a message whose id an earlier message has,
    `out_of_order` and `late` mark messages that exceed `disorder_ms` or `late_ms`, and `anew` marks a second
    message at the same offset. `rows` has the columns COLUMNS.
    """
    born, stored = F.unix_millis("born_timestamp"), F.unix_millis("store_timestamp")
    order = ("queue_offset", "physical_offset")
    queue = Window.partitionBy(*_QUEUE).orderBy(*order)
    before, place = F.lag("queue_offset").over(queue), F.lag("physical_offset").over(queue)
    client = Window.partitionBy(*_QUEUE, "born_host").orderBy(*order)
    in_front = client.rowsBetween(Window.unboundedPreceding, -1)
    copies = Window.partitionBy("topic", "msg_id").orderBy("stored_ms", "broker_name", "queue_id", *order)
    same = F.coalesce(F.col("queue_offset") == before, F.lit(False))
    gap = F.try_subtract(F.col("queue_offset"), before) - 1
    found = (
        rows.withColumns({"born_ms": born, "stored_ms": stored})
        .drop("born_timestamp", "store_timestamp")
        .withColumns(
            {
                "copy": same & (F.col("physical_offset") == place),
                "anew": same & (F.col("physical_offset") != place),
                "missing": F.least(F.greatest(gap, F.lit(0)), F.lit(_GAP_MAX)),
            }
        )
        .filter("NOT copy")
        .withColumn("early_ms", F.max("born_ms").over(in_front) - F.col("born_ms"))
        .withColumn("doubled", F.row_number().over(copies) > 1)
        .withColumn("late_ms", F.col("stored_ms") - F.col("born_ms"))
    )
    return found.select(
        window("stored_ms", given.window_s),
        *(*_QUEUE, "queue_offset", "msg_id", "born_ms", "stored_ms", "early_ms", "late_ms"),
        F.coalesce("missing", F.lit(0)).alias("missing"),
        F.col("doubled").cast("int").alias("doubled"),
        F.coalesce(F.col("early_ms") > given.disorder_ms, F.lit(False)).cast("int").alias("out_of_order"),
        (F.col("late_ms") > int(given.late_s * 1000)).cast("int").alias("late"),
        F.col("anew").cast("int").alias("anew"),
    )


def sent(rows: DataFrame, given: AuditOptions) -> DataFrame:
    """Return the messages that traces (`trace.traces`) report as stored, but no delayed or half ones."""
    plain = [MessageType.NORMAL.value, MessageType.ORDER.value]
    stored = rows.filter((F.col("kind") == "Pub") & F.col("success") & F.col("code").isin(*plain))
    closed = rows.filter("kind = 'EndTransaction' AND state LIKE 'COMMIT%'")
    once = stored.union(closed).groupBy("topic", "msg_id").agg(F.min("timestamp_ms").alias("at_ms"))
    return once.filter(_inside(given, F.col("at_ms"))).select(
        window("at_ms", given.window_s), "topic", "msg_id", "at_ms"
    )


def consumed(rows: DataFrame) -> DataFrame:
    """Return how often, and when first, a listener of each group processed each message successfully."""
    done = (
        calls(rows)
        .filter("success")
        .select(
            F.coalesce("ended_group", "group", F.lit("")).alias("group"),
            "msg_id",
            F.coalesce("ended_ms", "begun_ms").alias("at_ms"),
        )
    )
    return done.groupBy("group", "msg_id").agg(F.count("*").alias("times"), F.min("at_ms").alias("first_ms"))


def groups_of(found: DataFrame, done: DataFrame | None, positions: DataFrame | None) -> DataFrame | None:
    """Return the groups of each topic, with the columns topic, group, `place` and `traced`.

    `place` is the rank of the group within its topic. Groups with offsets rank first, because any client can
    write group names to the trace topic; the other groups rank by the number of messages that they consumed.
    `traced` is 0 if the group writes traces, else NULL. The parameters have the same meaning as those of
    `in_groups`.
    """
    pairs = []
    if positions is not None:
        pairs.append(positions.select("topic", "group", F.lit(True).alias("placed"), F.lit(0).alias("times")))
    if done is not None:
        read = found.filter("doubled = 0").join(done, "msg_id")
        pairs.append(read.select("topic", "group", F.lit(False).alias("placed"), F.lit(1).alias("times")))
    if not pairs:
        return None
    both = reduce(DataFrame.union, pairs).groupBy("topic", "group")
    first = Window.partitionBy("topic").orderBy(F.desc("placed"), F.desc("times"), "group")
    found_in = both.agg(F.max("placed").alias("placed"), F.sum("times").alias("times"))
    rows = found_in.select("topic", "group", F.row_number().over(first).alias("place"))
    if done is None:
        return rows.withColumn("traced", F.lit(None).cast("bigint"))
    return rows.join(done.select("group", F.lit(0).alias("traced")).distinct(), "group", "left")


def in_groups(
    found: DataFrame,
    groups: DataFrame,
    done: DataFrame | None,
    positions: DataFrame | None,
    given: AuditOptions,
) -> DataFrame:
    """Return a row for each message and each group of its topic.

    The columns show whether the group acknowledged the message, how often the group consumed the message, and
    whether the message was lost or late. Unknown values are NULL. `found`, `groups` and `done` are results of
    the functions `checked`, `groups_of` and `consumed`. `positions` has the columns group, topic,
    broker_name, queue_id and offset.
    """
    some = groups.filter(F.col("place") <= GROUPS_MAX).drop("place")
    rows = found.filter("doubled = 0").join(F.broadcast(some), "topic")
    nothing = F.lit(None).cast("bigint")
    if done is None:
        rows = rows.withColumns({"times": nothing, "first_ms": nothing})
    else:
        rows = rows.join(done, ["group", "msg_id"], "left")
        # A message without a trace counts as consumed 0 times only if the group writes traces; otherwise the
        # number is unknown.
        rows = rows.withColumn("times", F.coalesce("times", "traced"))
    if positions is None:
        rows = rows.withColumn("offset", nothing)
    else:
        rows = rows.join(F.broadcast(positions), ["group", *_QUEUE], "left")
    known = F.col("times").isNotNull() & F.col("offset").isNotNull()
    return rows.select(
        *("window", *_QUEUE, "queue_offset", "msg_id", "group", "times", "stored_ms"),
        (F.col("queue_offset") < F.col("offset")).alias("acknowledged"),
        (F.col("first_ms") - F.col("born_ms")).alias("waited_ms"),
        F.when(known, (F.col("queue_offset") < F.col("offset")) & (F.col("times") == 0)).alias("lost"),
        (F.col("first_ms") - F.col("born_ms") > int(given.late_s * 1000)).alias("late"),
    )


def _many(condition: Column) -> Column:
    """Return the number of rows for which the condition is true, or NULL if it is NULL in every row."""
    return F.sum(condition.cast("int"))


def topic_windows(found: DataFrame, gone: DataFrame | None) -> DataFrame:
    """Return the table `topics` from `checked` and from `sent` with `there` (1: the source holds it)."""
    counts = found.groupBy("window", "topic").agg(F.count("*").alias("messages"), *sums(*_FOUND))
    if gone is None:
        nothing = F.lit(None).cast("bigint")
        return counts.withColumns({"sent": nothing, "lost": nothing})
    traced = gone.groupBy("window", "topic").agg(
        F.count("*").alias("sent"), _many(F.col("there").isNull()).alias("lost")
    )
    return counts.join(traced, ["window", "topic"], "full").fillna(0)


def group_windows(rows: DataFrame) -> DataFrame:
    """Return the table `groups`, with a row for each window, topic and group, from `in_groups`."""
    times = F.col("times")
    return rows.groupBy("window", "topic", "group").agg(
        F.count("*").alias("messages"),
        _many(F.col("acknowledged")).alias("acknowledged"),
        _many(times > 0).alias("consumed"),
        F.sum(F.when(times > 1, times - 1).when(times.isNotNull(), 0)).alias("again"),
        _many(times == 0).alias("unconsumed"),
        _many(F.col("lost")).alias("lost"),
        _many(F.col("late")).alias("late"),
    )


def findings(found: DataFrame, gone: DataFrame | None, groups: DataFrame | None) -> DataFrame:
    """Return the table `findings`: a row for each finding, with the columns of Finding."""
    nothing = {name: F.lit(None) for name in ("group", "broker_name", "queue_id", "queue_offset", "msg_id")}

    def as_finding(rows: DataFrame, kind: str, value: Column) -> DataFrame:
        empty = {name: column for name, column in nothing.items() if name not in rows.columns}
        return rows.withColumns({**empty, "kind": F.lit(kind), "value": value.cast("bigint")}).select(
            *("kind", "window", "topic"),
            *(F.col(name).cast("string") for name in ("group", "broker_name")),
            F.col("queue_id").cast("int"),
            F.col("queue_offset").cast("bigint"),
            *("msg_id", "value"),
        )

    one = F.lit(1)
    values = (F.col("missing"), one, F.col("early_ms"), F.col("late_ms"), one)
    kinds = [
        as_finding(found.filter(F.col(name) > 0), name, value)
        for name, value in zip(_FOUND, values, strict=True)
    ]
    if gone is not None:
        kinds.append(as_finding(gone.filter("there IS NULL"), "lost", one))
    if groups is not None:
        kinds.append(as_finding(groups.filter("lost"), "lost_in_group", one))
        kinds.append(as_finding(groups.filter("late"), "late_in_group", F.col("waited_ms")))
    return reduce(DataFrame.union, kinds)


@job(AuditOptions)
def audit(spark: SparkSession, given: AuditOptions) -> AuditSummary:
    """Find lost, duplicate, misordered and late messages of a source.

    The messages stored in the time range are compared with each other, with clients' trace records and with
    the offsets of groups.

    Returns:
        The totals of closed windows and samples of the findings.

    Raises:
        ConfigError: An argument is invalid.
        JobFailed: A Spark job failed.
        JobStopped: `stop` was set.
    """
    check_span(given.begin_ms, given.end_ms)
    source, topics, pattern, traces = given.source, given.topics, given.pattern, given.traces
    output = None if given.output is None else spark_directory(spark, given.output, _JOB)
    summary = AuditSummary(shown(source), output)
    span = _wider(given)
    chosen = pattern if topics or pattern is not None or source.startswith(LIVE) else OF_USERS
    every = checked(messages(spark, source, topics, *span, COLUMNS, pattern=chosen, lenient=True), given)
    kept = [every]
    said = done = None
    if traces is not None:
        records = trace_rows(spark, traces, given.trace_topic, span[0])
        said, done = _of_topics(sent(records, given), topics, pattern, every), consumed(records)
        kept.append(records)
    held = _held(spark, given.positions)
    found = every.filter(_inside(given, F.col("stored_ms")))
    groups = groups_of(found, done, held)
    grouped = None if groups is None else in_groups(found, groups, done, held, given)
    gone = None
    if said is not None:
        there = every.select("topic", "msg_id").distinct().withColumn("there", F.lit(1))
        gone = said.join(there, ["topic", "msg_id"], "left")
    tables = {"topics": topic_windows(found, gone), "findings": findings(found, gone, grouped)}
    if grouped is not None:
        tables["groups"] = group_windows(grouped)

    def work() -> None:
        summary.bad_traces = sum(records.filter("kind = 'bad'").count() for records in kept[1:])
        if groups is not None:
            summary.left_out = groups.filter(F.col("place") > GROUPS_MAX).count()
        summary.closed_to_ms = closed_to(given, _newest_ms(kept), time.time_ns() // 1_000_000)
        for name, table in tables.items():
            tables[name] = table.withColumn("open", _open(given, summary.closed_to_ms))
        _sum_up(summary, tables)
        summary.absent = absent(topics, *(frame for frame in (found, said) if frame is not None))
        summary.unreadable = unreadable(source, topics, pattern=chosen)
        if traces is not None:
            summary.unreadable += unreadable(traces, [given.trace_topic])

    report_on(_JOB, output, kept, work, lambda: tables, given)
    return summary


def _held(spark: SparkSession, positions: str | DataFrame | None) -> DataFrame | None:
    held = group_offsets(spark, positions) if isinstance(positions, str) else positions
    if held is not None and not {"group", *_QUEUE, "offset"} <= set(held.columns):
        expected = f"a frame of group, {', '.join(_QUEUE)}, offset"
        raise ConfigError("positions", ", ".join(held.columns), expected)
    return held


def _of_topics(rows: DataFrame, topics: Sequence[str], pattern: str | None, every: DataFrame) -> DataFrame:
    """Return the rows of `topics`, or those that match `pattern`, or else those that occur in `every`."""
    if topics:
        return rows.filter(F.col("topic").isin(*topics))
    if pattern is not None:
        return rows.filter(F.col("topic").rlike(f"^(?:{pattern})$"))
    return rows.join(F.broadcast(every.select("topic").distinct()), "topic", "left_semi")


def _newest_ms(frames: list[DataFrame]) -> int | None:
    """Return the newest store time of the DataFrame that ends earliest. Return None if one has no rows."""
    newest = [frame.agg(F.max("stored_ms").alias("at")).collect()[0]["at"] for frame in frames]
    return None if None in newest else min(newest)


def _sum_up(summary: AuditSummary, tables: dict[str, DataFrame]) -> None:
    windows = tables["topics"].groupBy("window", "open").count().groupBy("open").count().collect()
    summary.windows = sum(row["count"] for row in windows)
    summary.open_windows = sum(row["count"] for row in windows if row["open"])
    closed = {name: table.filter("NOT open") for name, table in tables.items()}
    totals = sums("messages", *_FOUND, "sent", "lost")
    for name, count in closed["topics"].agg(*totals).collect()[0].asDict().items():
        if name != "sent":
            setattr(summary, name, count or 0)
    worst = F.expr("missing + coalesce(lost, 0) + doubled + out_of_order + late").desc()
    rows = closed["topics"].groupBy("topic").agg(*totals).orderBy(worst, "topic").limit(_MOST)
    summary.topics = structs(TopicAudit, rows)
    if "groups" in tables:
        rows = closed["groups"].groupBy("topic", "group").agg(*sums(*GroupAudit.__struct_fields__[2:]))
        summary.group_lost = rows.agg(F.sum("lost").alias("lost")).collect()[0]["lost"] or 0
        worst = F.expr("coalesce(lost, 0) + coalesce(late, 0)").desc()
        summary.groups = structs(GroupAudit, rows.orderBy(worst, "topic", "group").limit(_MOST))
    order = Window.partitionBy("kind").orderBy("window", "topic", "broker_name", "queue_id", "queue_offset")
    some = closed["findings"].withColumn("number", F.row_number().over(order)).filter(f"number <= {_SAMPLES}")
    taken = some.withColumn("window_ms", F.unix_millis("window")).select(*Finding.__struct_fields__)
    summary.samples = structs(Finding, taken.orderBy("kind", "window_ms"))

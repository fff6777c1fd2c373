"""The jobs on dead letters: count them by group, topic, reason and hour, and send selected ones again.

A redrive uses the code of `cometmq dlq resend` (dlq_task.py). Each dead letter is sent again only once, even
over several runs. Dead letters that have been resent too often or cannot be sent go to a quarantine table for
inspection.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from functools import partial

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from cometmq.admin.dead_letters import RESEND_TIMES, Resend, Resending
from cometmq.errors import ConfigError
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.engine import run_action, slots
from cometmq.pipeline.base.job_options import DlqOptions, RedriveOptions
from cometmq.pipeline.base.options import parse_addresses
from cometmq.pipeline.base.wire import Access
from cometmq.pipeline.jobs.dlq_task import LEFT, SCHEMA, RedriveTask, in_task
from cometmq.pipeline.jobs.inputs import messages, unreadable
from cometmq.pipeline.jobs.results import report_on, spark_directory, structs
from cometmq.pipeline.jobs.trace import traces as trace_rows
from cometmq.pipeline.live.unreadable import UnreadableQueue
from cometmq.pipeline.table.objects import shown
from cometmq.protocol.codes import DLQ_PREFIX, TRACE_TOPIC
from cometmq.protocol.traces import ConsumeCode

COLUMNS = (
    "topic", "broker_name", "queue_id", "queue_offset", "physical_offset", "msg_id", "tags", "keys", "body",
    "properties", "flag", "sys_flag", "born_timestamp", "born_host", "store_timestamp", "store_host",
    "reconsume_times", "body_crc",
)  # fmt: skip
"""Columns of the dead letters that the jobs read."""
GROUPS_MAX = 100_000
_PLACE = ("topic", "broker_name", "queue_id", "queue_offset", "physical_offset")
_MOST = 50  # maximum rows of a list in the summary
_REASON = 200  # maximum characters of a dead letter's reason
_NO_BODY = "its body is not in the source, an archive without bodies"
_JOB = "dlq"


class DeadLetters(msgspec.Struct):
    """Counts of the dead letters of a group, original topic, reason and hour, and the most resends of one."""

    group: str
    topic: str | None
    reason: str | None
    hour_ms: int
    messages: int
    first_ms: int
    last_ms: int
    most_resends: int
    sample_msg_id: str


class DlqSummary(msgspec.Struct):
    """The result of a run of the `dlq` job. `counts` has the rows with the most messages."""

    source: str
    output: str | None = None
    messages: int = 0
    kinds: int = 0
    """Number of combinations of group, topic, reason and hour."""
    counts: list[DeadLetters] = []
    unreadable: list[UnreadableQueue] = []
    """Queues whose messages, also those of other times, the brokers refuse to return (live/unreadable.py)."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all queues were readable."""
        return not self.unreadable


class RedriveSummary(msgspec.Struct):
    """The result of a redrive: the numbers of selected dead letters by outcome."""

    source: str
    output: str | None = None
    run: str = ""
    dry_run: bool = False
    chosen: int = 0
    resent: int = 0
    planned: int = 0
    """Number of dead letters that a dry run would send."""
    skipped: int = 0
    """Number of dead letters that an earlier run had sent again."""
    failed: int = 0
    refused: int = 0
    """Dead letters resent too often, which are in the table `quarantine`, like those that failed."""
    without_body: int = 0
    """Number of dead letters that cannot be sent, because the source is an archive without bodies."""
    left: int = 0
    """Number of dead letters that were not tried because an earlier one of their group was not sent."""
    problems: list[str] = []
    unreadable: list[UnreadableQueue] = []
    """Queues whose messages, also those of other times, the brokers refuse to return (live/unreadable.py)."""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether each dead letter that was not refused has been sent again, and all queues were readable."""
        return not (self.failed or self.left or self.without_body or self.unreadable)


def letters(
    spark: SparkSession,
    source: str,
    groups: Sequence[str] = (),
    begin_ms: int | None = None,
    end_ms: int | None = None,
    *,
    where: str | None = None,
    reason: str | None = None,
    traces: str | None = None,
) -> DataFrame:
    """Return the dead letters of consumer groups.

    Args:
        spark: The Spark session.
        source: An archive, store directories or live topics; `messages` describes the forms.
        groups: Names of the consumer groups. Empty: all groups.
        begin_ms: First store time of the dead letters, in ms since 1970. None: no limit.
        end_ms: Store time, in ms since 1970, before which dead letters are read. None: no limit.
        where: A Spark SQL condition over the columns of the result. None: all dead letters.
        reason: A Spark SQL expression over the other columns for the column `reason`. None: the failure, else
            the number of tries.
        traces: The source of a trace topic. It provides `failure`, the outcome of the last traced call in
            which a listener of the group received the message: EXCEPTION, TIME_OUT, RETURNED_NULL or FAILED.
            None: `failure` is NULL.

    Returns:
        A DataFrame with the source's columns that the job reads, and group, original_topic, origin_msg_id,
            resend_times, failure and reason.

    Raises:
        ConfigError: An argument is invalid, or an expression cannot be evaluated.
    """
    found = messages(spark, source, (), begin_ms, end_ms, COLUMNS, pattern=_pattern(groups), lenient=True)
    found = found.dropDuplicates(list(_PLACE)).withColumns(
        {
            "group": F.substring("topic", len(DLQ_PREFIX) + 1, 1000),
            "original_topic": _first("RETRY_TOPIC", "DLQ_ORIGIN_TOPIC"),
            "origin_msg_id": _first("ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_MESSAGE_ID"),
            "resend_times": F.expr(f"coalesce(try_cast(properties['{RESEND_TIMES}'] AS int), 0)"),
        }
    )
    if traces is None:
        found = found.withColumn("failure", F.lit(None).cast("string"))
    else:
        found = found.join(_failures(spark, traces, begin_ms), ["group", "msg_id"], "left")
    default = "coalesce(failure, concat('after ', reconsume_times, ' tries'))"
    found = _with(found, "reason", reason or default)
    return found if where is None else _with(found, "where", where).filter("`where`").drop("where")


def _pattern(groups: Sequence[str]) -> str:
    return DLQ_PREFIX + (f"(?:{'|'.join(map(re.escape, groups))})" if groups else ".+")


def _letters(spark: SparkSession, given: DlqOptions | RedriveOptions) -> DataFrame:
    return letters(
        spark, given.source, given.groups, given.begin_ms, given.end_ms,
        where=given.where, reason=given.reason, traces=given.traces,
    )  # fmt: skip


def _unreadable(given: DlqOptions | RedriveOptions) -> list[UnreadableQueue]:
    found = unreadable(given.source, pattern=_pattern(given.groups))
    return found + (unreadable(given.traces, [TRACE_TOPIC]) if given.traces is not None else [])


def _first(*names: str) -> Column:
    return F.coalesce(*(F.expr(f"nullif(trim(properties['{name}']), '')") for name in names))


def _failures(spark: SparkSession, source: str, begin_ms: int | None) -> DataFrame:
    rows = trace_rows(spark, source, TRACE_TOPIC, begin_ms).filter("kind = 'SubAfter' AND NOT success")
    last = rows.groupBy("group", "msg_id").agg(F.max_by("code", "stored_ms").alias("code"))
    named = [F.when(F.col("code") == code.value, code.name) for code in ConsumeCode]
    return last.select("group", "msg_id", F.coalesce(*named).alias("failure"))


def _with(rows: DataFrame, key: str, expression: str) -> DataFrame:
    """Add a column named `key`. Raises ConfigError if the expression cannot be evaluated over the columns."""
    kind = "boolean" if key == "where" else "string"
    try:
        column = F.expr(expression).cast(kind)
        found = rows.withColumn(key, column if key == "where" else F.substring(column, 1, _REASON))
        found.schema  # noqa: B018 - Spark Connect looks at the expression only then
    except (AnalysisException, ParseException) as error:
        problem = str(error).partition("\n")[0]
        expected = f"a Spark SQL expression over {', '.join(rows.columns)} ({problem})"
        raise ConfigError(key, expression, expected) from None
    return found


def triage(rows: DataFrame) -> DataFrame:
    """Return the table `triage`, with the columns of DeadLetters, of dead letters (`letters`)."""
    died = F.unix_millis("store_timestamp")
    hour = F.unix_millis(F.date_trunc("hour", F.col("store_timestamp"))).alias("hour_ms")
    return rows.groupBy("group", F.col("original_topic").alias("topic"), "reason", hour).agg(
        F.count("*").alias("messages"),
        F.min(died).alias("first_ms"),
        F.max(died).alias("last_ms"),
        F.max("resend_times").alias("most_resends"),
        F.min("msg_id").alias("sample_msg_id"),
    )


@job(DlqOptions)
def dlq(spark: SparkSession, given: DlqOptions) -> DlqSummary:
    """Count dead letters by group, original topic, reason and hour.

    Returns:
        The total, and the counts with the most messages.

    Raises:
        ConfigError: An argument is invalid.
        JobFailed: A Spark job failed.
        JobStopped: `stop` was set.
    """
    path = None if given.output is None else spark_directory(spark, given.output, _JOB)
    summary = DlqSummary(shown(given.source), path)
    table = triage(_letters(spark, given))

    def work() -> None:
        sums = table.agg(F.count("*").alias("kinds"), F.sum("messages").alias("messages")).collect()[0]
        summary.kinds, summary.messages = sums.kinds, sums.messages or 0
        most = table.orderBy(F.desc("messages"), "group", "topic", "reason", "hour_ms").limit(_MOST)
        summary.counts = structs(DeadLetters, most)
        summary.unreadable = _unreadable(given)

    report_on(_JOB, path, [table], work, lambda: {"triage": table}, given)
    return summary


@job(RedriveOptions)
def redrive(spark: SparkSession, given: RedriveOptions) -> RedriveSummary:
    """Send selected dead letters again.

    Each dead letter is sent once per run, even if Spark repeats a task, because the brokers' index identifies
    the messages that the run has sent. A later run skips what earlier runs sent, so an interrupted run is
    continued by calling `redrive` again. Dead letters without a body in the source are not sent.

    Returns:
        The number of dead letters by result.

    Raises:
        ConfigError: An argument is invalid.
        JobFailed: A Spark job failed.
        JobStopped: `stop` was set.
    """
    dry_run = given.dry_run
    if given.output is None and not dry_run:
        raise ConfigError("output", "", "a directory for the tables redriven and quarantine")
    parse_addresses(given.namesrv)
    found = _letters(spark, given)
    summary = RedriveSummary(shown(given.source), run=uuid.uuid4().hex[:12], dry_run=dry_run)
    path = None
    if given.output is not None and not dry_run:
        path = summary.output = spark_directory(spark, given.output, _JOB)
    found = found.withColumn("refusal", _refusal(given.max_resends))

    def work() -> None:
        summary.unreadable = _unreadable(given)
        sizes = _sizes(summary, found)
        run = "" if dry_run else summary.run
        how = Resending(to_topic=given.to_topic, again=given.again, dry_run=dry_run, rate=given.rate, run=run)
        task = RedriveTask(given.namesrv, how, Access.of_environment())
        tried = _tried(spark, found.filter("refusal IS NULL"), sizes, task) if sizes else None
        if path is not None and tried is not None:
            tried.write.parquet(f"{path}/redriven/run={summary.run}")
            tried = spark.read.parquet(f"{path}/redriven/run={summary.run}")
        if tried is not None:
            _count(summary, tried)
        if path is not None and (summary.refused or summary.without_body or summary.failed):
            _quarantine(found, tried).write.parquet(f"{path}/quarantine/run={summary.run}")

    run_action(spark, "redrive", work, on_progress=given.show, stop=given.stop)
    return summary


def _refusal(max_resends: int) -> Column:
    """Return an expression for the reason why a dead letter is not sent again. NULL: it is sent."""
    often = F.concat(F.lit("it was sent again "), "resend_times", F.lit(" times and died each time"))
    return F.when(F.col("resend_times") >= max_resends, often).when(F.col("body").isNull(), _NO_BODY)


def _sizes(summary: RedriveSummary, found: DataFrame) -> dict[str, int]:
    """Return the number of dead letters to send by group, and count selected and refused ones."""
    without_body = F.col("refusal") == _NO_BODY
    columns = (
        F.count("*").alias("chosen"),
        F.count_if(F.col("refusal").isNotNull() & ~without_body).alias("refused"),
        F.count_if(without_body).alias("without_body"),
    )
    counts = found.groupBy("group").agg(*columns).limit(GROUPS_MAX + 1).collect()
    if len(counts) > GROUPS_MAX:
        raise ConfigError("groups", "", f"at most {GROUPS_MAX} groups; name some")
    for row in counts:
        summary.chosen += row.chosen
        summary.refused += row.refused
        summary.without_body += row.without_body
        if row.without_body and len(summary.problems) < _MOST:
            summary.problems.append(f"{row.group}: {_NO_BODY}")
    left = {row.group: row.chosen - row.refused - row.without_body for row in counts}
    return {group: count for group, count in left.items() if count}


def _tried(spark: SparkSession, rows: DataFrame, sizes: dict[str, int], task: RedriveTask) -> DataFrame:
    """Send the dead letters again, each group's in one task from the oldest on. Return each result."""
    tasks = min(slots(spark), len(sizes))
    if task.how.rate is not None:
        how = msgspec.structs.replace(task.how, rate=task.how.rate / tasks)
        task = RedriveTask(task.namesrv, how, task.access)
    largest = sorted(sizes, key=lambda group: (-sizes[group], group))
    places = spark.createDataFrame(
        [(group, number % tasks) for number, group in enumerate(largest)], "group string, task int"
    )
    ordered = (
        rows.select(*COLUMNS, "group")
        .join(F.broadcast(places), "group")
        .repartitionById(tasks, "task")
        .sortWithinPartitions("topic", "store_timestamp", *_PLACE[1:])
    )
    return ordered.mapInArrow(partial(in_task, task), from_arrow_schema(SCHEMA))


def _count(summary: RedriveSummary, tried: DataFrame) -> None:
    first = F.min(F.nullif("problem", F.lit(""))).alias("problem")
    for row in tried.groupBy("group", "state").agg(F.count("*").alias("messages"), first).collect():
        name = {Resend.RESENT.value: "resent", Resend.PLANNED.value: "planned",
                Resend.SKIPPED.value: "skipped", LEFT: "left"}.get(row.state, "failed")  # fmt: skip
        setattr(summary, name, getattr(summary, name) + row.messages)
        if row.problem and len(summary.problems) < _MOST:
            summary.problems.append(f"{row.group}: {row.problem}")


def _quarantine(found: DataFrame, tried: DataFrame | None) -> DataFrame:
    """Return the rows of the dead letters that were refused or could not be sent, with the problem."""
    refused = found.filter("refusal IS NOT NULL").withColumnRenamed("refusal", "problem")
    if tried is None:
        return refused
    failed = tried.filter(F.col("state") == Resend.FAILED.value).select(*_PLACE, "problem")
    return refused.unionByName(found.drop("refusal").join(failed, list(_PLACE)))

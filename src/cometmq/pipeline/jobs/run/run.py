"""`cometmq pipeline run FILE.yml`: from sources through SQL to sinks, as a batch or as streams.

The whole file is checked before anything is written: first its form (file.py), then its tables. Every
source is opened, Spark analyses every query against the sources, and each sink is checked against the columns
that it would receive. Error messages name the file and the line.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import DataFrame, Observation, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import ArrayType, BinaryType, MapType, NullType, StructType

from cometmq.errors import CometError, ConfigError
from cometmq.pipeline.base.engine import cause, slots
from cometmq.pipeline.base.errors import JobFailed
from cometmq.pipeline.base.offsets import Offsets, from_tree
from cometmq.pipeline.base.options import check_package, read_options, write_options
from cometmq.pipeline.jobs.archive_query import archived
from cometmq.pipeline.jobs.replay.replay import same_cluster
from cometmq.pipeline.jobs.run.file import (
    NOW,
    PATHS,
    Pipeline,
    Sink,
    Source,
    Step,
    Table,
    Text,
    load_pipeline,
)
from cometmq.pipeline.jobs.run.places import local_path, scheme_of
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.source import check_schema
from cometmq.pipeline.live.unreadable import UnreadableQueue, UnreadableQueues
from cometmq.pipeline.sink.rows import check_columns
from cometmq.text import printable

CONSOLE_ROWS = 20
_TASKS_PER_SLOT = 4  # number of Spark tasks that read a Delta table, per task slot of the cluster
_POLL_S = 0.5
_WRITTEN = "cometmq_written"
_PLACE = re.compile(r"[;,(]?\s*\(?line (\d+),? pos \d+.*", re.DOTALL)


class SinkSummary(msgspec.Struct):
    """The result of writing one sink of a pipeline file."""

    name: str
    format: str
    to: str
    rows: int = 0
    batches: int = 0
    complete: bool = False


class RunSummary(msgspec.Struct):
    """The result of a run.

    `complete` is False if a batch run was stopped before it had written all sinks, or if live queues with
    messages were unreadable.
    """

    file: str
    mode: str
    sinks: list[SinkSummary] = []
    seconds: float = 0.0
    complete: bool = False
    unreadable: list[UnreadableQueue] = []
    """Queues of the sources that were unreadable at the end of the run (live/unreadable.py)."""


@dataclass(slots=True)
class _Run:
    spark: SparkSession
    pipeline: Pipeline
    show: Callable[[str], object]
    on_progress: Callable[[int, int | None], None]
    stop: threading.Event
    summary: RunSummary
    tables: dict[str, DataFrame] = field(default_factory=dict)
    # The offsets that the streams have reached in their sources, or None if they are unknown.
    read: Offsets | None = field(default_factory=dict)


def run(
    spark: SparkSession,
    file: str,
    *,
    check_only: bool = False,
    show: Callable[[str], object] = sys.stdout.write,
    on_progress: Callable[[int, int | None], None] | None = None,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Check a pipeline file, then run it until its end or until `stop` is set.

    The tables of the file become temporary views of the session, under their names.

    Args:
        spark: The Spark session that runs the pipeline.
        file: Path of the pipeline file.
        check_only: Whether to return after the checks.
        show: Called with each line that a sink of format `console` prints.
        on_progress: Called with the number of rows written and None (no total) after each change.
        stop: Ends the run after the current batches when it is set.

    Returns:
        The result of each sink, and the unreadable queues.

    Raises:
        PipelineFileError: The file is invalid. The error names the file and the line.
        JobFailed: A Spark job failed. The error names the sink.
        OSError: The file cannot be read.
    """
    began = time.monotonic()
    pipeline = load_pipeline(file)
    summary = RunSummary(file, "stream" if pipeline.streaming else "batch")
    given = _Run(
        spark, pipeline, show, on_progress or (lambda _done, _total: None), stop or threading.Event(), summary
    )
    _prepare(given)
    for sink in pipeline.sinks:
        to = sink.path or sink.options.get("topic")
        summary.sinks.append(SinkSummary(sink.name, sink.format, to.shown if to else ""))
    if not check_only:
        (_streams if pipeline.streaming else _batches)(given)
        summary.unreadable = _unreadable(given)
        summary.complete = all(sink.complete for sink in summary.sinks) and not summary.unreadable
    summary.seconds = time.monotonic() - began
    return summary


def _unreadable(run: _Run) -> list[UnreadableQueue]:
    """Return the unreadable queues, which a batch skipped or for which streams are waiting.

    The result omits queues of clusters that are unreachable at the end of the run, and queues of streams that
    had nothing to read. Warnings of the source name the omitted queues.
    """
    found: set[UnreadableQueue] = set()
    for source in run.pipeline.sources:
        if source.format != "cometmq" or run.read is None:
            continue
        wanted = read_options(source.plain(), streaming=run.pipeline.streaming)
        with suppress(CometError), Cluster.of(wanted) as cluster:
            cluster.queues(wanted.topics)
            found.update(UnreadableQueues(cluster, wanted.topics, lenient=True).find(run.read))
    return sorted(found)


# -- checks


def _prepare(run: _Run) -> None:
    """Create the tables of all sources and steps, and check each sink. Raises PipelineFileError."""
    pipeline = run.pipeline
    for source in pipeline.sources:
        _enter(run, source, source.line, partial(_opened, run, source))
    for step in pipeline.steps:
        # Between parentheses, Spark accepts a query but no command. So if the file contains a command in
        # place of a query, this check refuses the command and does not execute it.
        _enter(run, step, step.sql_line, partial(run.spark.sql, f"SELECT * FROM ({step.sql}\n)"))
    for sink in pipeline.sinks:
        try:
            _check_sink(run, sink, run.tables[sink.table.value.lower()])
        except ConfigError as error:
            raise pipeline.wrong(sink.line, f"sink {sink.name}: {error}") from None
        for text in (sink.path, sink.checkpoint):
            if text is not None:
                _check_scheme(run, text)
        if pipeline.streaming and sink.format == "cometmq":
            _check_loop(pipeline, sink)


def _check_scheme(run: _Run, text: Text) -> None:
    """Raise an error for a scheme unknown to this session. Spark Connect tells only when the run starts."""
    scheme = scheme_of(text.value)
    if scheme is None or not isinstance(run.spark, SparkSession):
        return
    jvm: Any = run.spark._jvm  # noqa: SLF001 - no public way
    configuration = run.spark._jsc.hadoopConfiguration()  # noqa: SLF001
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, configuration)
    except Py4JError:
        problem = f"{text.shown}: this Spark knows no {scheme}: its jars or settings are missing"
        raise run.pipeline.wrong(text.line, problem) from None


def _check_loop(pipeline: Pipeline, sink: Sink) -> None:
    """Raise an error for a stream that would read the messages that it sends, in an endless loop."""
    wanted = write_options(sink.plain())
    if wanted.topic is None:
        return
    line = next((text.line for key, text in sink.options.items() if key.lower() == "topic"), sink.line)
    for source in pipeline.sources:
        if source.format != "cometmq":
            continue
        given = read_options(source.plain(), streaming=True)
        if not given.topics.names_topic(wanted.topic):
            continue
        try:
            same = same_cluster(given.namesrv, wanted.namesrv, wanted.topic, wanted.timeout_ms)
        except CometError as error:
            raise pipeline.wrong(line, f"sink {sink.name}: {error}") from None
        if same:
            problem = f"sink {sink.name}: source {source.name} reads the topic {wanted.topic}, without end"
            raise pipeline.wrong(line, problem)


def _enter(run: _Run, table: Table, line: int, make: Callable[[], DataFrame]) -> None:
    """Create the view of a source or step. Raises PipelineFileError, with the line, if that fails."""
    try:
        frame = make()
        if table.watermark is not None:
            line = table.watermark.line
            frame = frame.withWatermark(table.watermark.column, table.watermark.delay)
        _ = frame.schema  # Only reading `schema` makes Spark Connect analyse the query
    except (PySparkException, Py4JError, CometError, OSError, ValueError) as error:
        deep = "StackOverflowError" in str(error)
        text = "nested too deep for Spark" if deep else cause(error).lstrip("\n")
        place = _PLACE.search(str(error))
        if (
            isinstance(table, Source)
            and table.columns
            and isinstance(error, ParseException | ConfigError | Py4JError)
        ):
            line = table.columns.line
        if isinstance(table, Step) and place and line == table.sql_line:
            line = table.line_of(int(place[1]))
        raise run.pipeline.wrong(line, f"{table.name}: {_PLACE.sub('', text)}") from None
    frame.createOrReplaceTempView(table.name)
    run.tables[table.name.lower()] = frame


def _opened(run: _Run, source: Source) -> DataFrame:
    spark, options = run.spark, source.plain()
    path = source.path.value if source.path else None
    if path and source.format in ("archive", "delta"):
        place = local_path(path) or path
        return archived(spark, place) if source.format == "archive" else _of_delta(spark, place)
    streaming = run.pipeline.streaming and source.format == "cometmq"
    if source.format == "cometmq":
        # This check finds unreachable brokers and missing topics, which Spark would report only when it
        # reads.
        wanted = read_options(options, streaming=streaming)
        with Cluster.of(wanted) as cluster:
            cluster.queues(wanted.topics)
    reader: Any = spark.readStream if streaming else spark.read
    reader = reader.format(source.format).options(**options)
    if source.columns:
        reader = reader.schema(source.columns.value)
    frame: DataFrame = reader.load(path) if path else reader.load()
    if source.columns and source.format in ("cometmq", "cometmq-store"):
        check_schema(frame.schema)
    return frame


def _of_delta(spark: SparkSession, place: str) -> DataFrame:
    """Return the latest version of a Delta table, which workers read with delta-rs, without a package."""
    check_package("format", "delta", "deltalake", "delta")
    from cometmq.pipeline.table import delta

    version, files, columns = delta.newest(place)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = (number for batch in batches for number in batch.column("id").to_pylist())
        return delta.rows_of_files(place, version, numbers)

    tasks = max(1, min(files, _TASKS_PER_SLOT * slots(spark)))
    return spark.range(0, files, 1, tasks).mapInArrow(read, from_arrow_schema(columns))


def _check_sink(run: _Run, sink: Sink, frame: DataFrame) -> None:
    """Raise ConfigError if the sink cannot accept the columns of the table."""
    names = [name.lower() for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("columns", ", ".join(twice), "each name once")
    if sink.format == "cometmq":
        check_columns(frame.schema, write_options(sink.plain()))
    for column in sink.partition_by:
        if column.value.lower() not in names:
            raise ConfigError("partition_by", column.value, f"one of {', '.join(frame.columns)}")
    not_text = (ArrayType, MapType, StructType, BinaryType, NullType)
    refused = {"csv": not_text}.get(sink.format, (NullType,) if sink.format in PATHS else ())
    for item in frame.schema.fields:
        if isinstance(item.dataType, refused):
            kind = item.dataType.simpleString()
            raise ConfigError("columns", f"{item.name} {kind}", f"a type that {sink.format} can hold")
    place = local_path(sink.path.value) if sink.path else None
    if sink.path and place and sink.save == "error" and not run.pipeline.streaming and os.path.exists(place):
        raise ConfigError("path", sink.path.shown, "a new directory (or save: append, or overwrite)")
    if run.pipeline.streaming:
        _check_output(run.spark, sink, frame)


def _check_output(spark: SparkSession, sink: Sink, frame: DataFrame) -> None:
    """Check a stream's output mode before any query starts.

    Spark itself checks the mode only when the query starts, and other queries may run by then. Spark Connect
    does not offer the check, so there the error appears only at the start of the query.
    """
    if not frame.isStreaming:
        raise ConfigError("from", sink.table.value, "a table that comes from a source of format cometmq")
    if not isinstance(spark, SparkSession):
        if sink.format == "console":
            raise ConfigError(
                "format", "console", "another one: through Spark Connect a stream prints nowhere"
            )
        return
    jvm, plan = spark._jvm, frame._jdf.queryExecution().analyzed()  # noqa: SLF001 - no public way
    assert jvm is not None
    mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, sink.output.capitalize())()
    try:
        jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(plan, mode)
    except PySparkException as error:
        raise ConfigError(
            "output", sink.output, f"another output mode ({cause(error).partition(';')[0]})"
        ) from None


# -- batch


def _batches(run: _Run) -> None:
    """Write the sinks one after the other."""
    for sink, summary in zip(run.pipeline.sinks, run.summary.sinks, strict=True):
        if run.stop.is_set():
            return
        frame = run.tables[sink.table.value.lower()]
        with _failing(run, sink):
            if sink.format == "console":
                summary.rows = _print(run.show, sink.name, frame, 0)
            else:
                written = Observation(_WRITTEN)
                counted = frame.observe(written, F.count(F.lit(1)).alias("rows"))
                _written(counted, sink)
                summary.rows = int(written.get["rows"])
        summary.batches, summary.complete = 1, True
        run.on_progress(sum(item.rows for item in run.summary.sinks), None)


def _written(frame: DataFrame, sink: Sink) -> None:
    writer = frame.write.format(sink.format).options(**sink.plain()).mode(sink.save)
    if sink.partition_by:
        writer = writer.partitionBy(*(column.value for column in sink.partition_by))
    writer.save(sink.path.value if sink.path else None)


def _print(show: Callable[[str], object], name: str, frame: DataFrame, batch: int) -> int:
    """Print the first rows as lines of JSON. Return the number of rows."""
    rows = frame.select(F.to_json(F.struct("*")).alias("line")).limit(CONSOLE_ROWS + 1).collect()
    for row in rows[:CONSOLE_ROWS]:
        show(f"{name} {batch}: {printable(row.line, 1000)}\n")
    if len(rows) > CONSOLE_ROWS:
        show(f"{name} {batch}: ... (more rows are not shown)\n")
    return min(len(rows), CONSOLE_ROWS)


# -- streams


def _streams(run: _Run) -> None:
    """Start all sinks and wait for them. If one fails, the others end after their current batches."""
    queries: list[tuple[Sink, SinkSummary, StreamingQuery]] = []
    newest: dict[str, int] = {}  # number of the newest counted batch, by sink name
    try:
        for sink, summary in zip(run.pipeline.sinks, run.summary.sinks, strict=True):
            with _failing(run, sink):
                queries.append((sink, summary, _started(run, sink)))
        while any(query.isActive for _, _, query in queries) and not run.stop.wait(_POLL_S):
            _count(run, queries, newest)
        for sink, summary, query in queries:
            _finish(query)
            with _failing(run, sink):
                if (error := query.exception()) is not None:
                    raise error
            summary.complete = True
        run.read = _positions([query for _, _, query in queries])
    finally:
        for _, _, query in queries:
            query.stop()
        _count(run, queries, newest, may_fail=False)


def _started(run: _Run, sink: Sink) -> StreamingQuery:
    frame = run.tables[sink.table.value.lower()].observe(_WRITTEN, F.count(F.lit(1)).alias("rows"))
    writer = frame.writeStream.queryName(sink.name).outputMode(sink.output).options(**sink.plain())
    writer = (
        writer.trigger(availableNow=True)
        if sink.trigger == NOW
        else writer.trigger(processingTime=sink.trigger)
    )
    if sink.checkpoint:
        writer = writer.option("checkpointLocation", sink.checkpoint.value)
    if sink.partition_by:
        writer = writer.partitionBy(*(column.value for column in sink.partition_by))
    if sink.format == "console":

        def show(frame: DataFrame, batch: int) -> None:
            _print(run.show, sink.name, frame, batch)

        return writer.foreachBatch(show).start()
    return writer.format(sink.format).start(sink.path.value if sink.path else None)


def _finish(query: StreamingQuery) -> None:
    """Stop a query between two batches. This waits for the current batch, however long it lasts."""
    before = _last_batch(query)
    while query.isActive and query.status["isTriggerActive"] and _last_batch(query) == before:
        time.sleep(0.05)
    query.stop()


def _positions(queries: Sequence[StreamingQuery]) -> Offsets | None:
    """Return the offset up to which all queries have read each queue. None: one has not read yet."""
    least: Offsets = {}
    for query in queries:
        if query.lastProgress is None:
            return None
        for source in query.lastProgress.sources:
            for queue, offset in from_tree(json.loads(source.endOffset or "{}") or {}).items():
                least[queue] = min(offset, least.get(queue, offset))
    return least


def _last_batch(query: StreamingQuery) -> int:
    return query.lastProgress.batchId if query.lastProgress else -1


def _count(
    run: _Run,
    queries: list[tuple[Sink, SinkSummary, StreamingQuery]],
    newest: dict[str, int],
    may_fail: bool = True,
) -> None:
    """Add the rows written since the last call to the summaries. If a query has failed, end all."""
    for _, summary, query in queries:
        for progress in query.recentProgress:  # `recentProgress` holds the last 100 batches, the oldest first
            rows = _rows(progress.observedMetrics)
            if rows and progress.batchId > newest.get(summary.name, -1):
                newest[summary.name] = progress.batchId
                summary.rows, summary.batches = summary.rows + rows, summary.batches + 1
        if may_fail and query.exception() is not None:
            run.stop.set()
    run.on_progress(sum(summary.rows for _, summary, _ in queries), None)


def _rows(observed: Mapping[str, Row]) -> int:
    """Return the number of rows of a batch, which Spark reports in the observed metrics of the batch.

    Spark Connect reports the metrics in the form {"values": [...], "schema": ...}.
    """
    named: dict[str, Any] = observed[_WRITTEN].asDict() if _WRITTEN in observed else {"rows": 0}
    return int(named["rows"] if "rows" in named else named["values"][0])


@contextmanager
def _failing(run: _Run, sink: Sink) -> Iterator[None]:
    """Convert Spark's errors in the body to a one-line error that names the sink."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        problem = run.pipeline.hide(cause(error))
        raise JobFailed(f"{run.pipeline.file}:{sink.line}: sink {sink.name}", problem) from None

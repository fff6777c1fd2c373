"""Questions to an archive, answered from its log: what is in it, and is anything missing.

The log is read by this process, the same way on disks and object stores; the answers are tables of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.window import Window

from cometmq.pipeline.base.engine import slots
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.body_schema import columns_in
from cometmq.pipeline.table.directory import NULL, ArchiveTable, open_filesystem
from cometmq.pipeline.table.formats import open_lake
from cometmq.pipeline.table.groups import GroupLog
from cometmq.pipeline.table.lake import LakeTable, with_directories
from cometmq.pipeline.table.log import Log

_QUEUE = ("topic", "broker_name", "queue_id")
_BATCH_ROWS = 10_000
_TASKS_PER_SLOT = 4
_PARTITION = [("topic", pa.string()), ("dt", pa.date32()), ("hour", pa.int32())]


def _log(output: str) -> Log:
    table = ArchiveTable(output)
    if not table.exists():
        raise FileNotFoundError(f"{table.output} is no archive")
    return table.log()


def manifest(spark: SparkSession, output: str) -> DataFrame:
    """One row for each committed range: offsets `start` <= o < `end` of a queue, and how many became rows
    (records), were set aside (bad) or were gone from the broker (lost). Old ranges that follow each other
    are one, with the number and time of the newest of their batches.

    An empty range with `replaces` says that the queue began anew, and up to which offset the old one had been
    read. `life` counts these: offsets of different lives are different messages."""
    so_far = Window.partitionBy(*_QUEUE).orderBy("batch")
    ranges = spark.createDataFrame(_log(output).ranges.drop_columns("seconds"))
    return ranges.withColumn("life", F.count("replaces").over(so_far))


def files(spark: SparkSession, output: str) -> DataFrame:
    """One row for each file of the table; `path` is relative to the archive, `batch` the newest whose
    messages are in the file."""
    return spark.createDataFrame(_log(output).files)


def batches(spark: SparkSession, output: str) -> DataFrame:
    """One row for each batch that added messages, of the newest ones (the log sums old ones up): when it was
    committed (s since 1970), how long it took, how many records and bytes (as the brokers store them) it
    brought."""
    return (
        spark.createDataFrame(_log(output).ranges)
        .groupBy("batch", F.to_timestamp("time").cast("double").alias("epoch_s"), "seconds")
        .agg(F.sum("records").alias("records"), F.sum("bytes").alias("bytes"))
        .filter("records > 0 AND seconds IS NOT NULL")
        .orderBy("batch")
    )


def completeness(spark: SparkSession, output: str) -> DataFrame:
    """One row for each life of a queue (manifest): its range, its records, and what is wrong with it.

    gaps, overlaps: places where a range does not begin where the one before it ended; missing: offsets of the
    ranges that are no rows of the table. All three are 0 when each message is in the table once.
    """
    queue = [*_QUEUE, "life"]
    before = F.lag("end").over(Window.partitionBy(*queue).orderBy("start", "end"))
    ranges = manifest(spark, output).filter("start < end").withColumn("before", before)
    return (
        ranges.groupBy(*queue)
        .agg(
            F.min("start").alias("start"),
            F.max("end").alias("end"),
            F.sum("records").alias("records"),
            F.sum((F.col("start") > F.col("before")).cast("int")).alias("gap_count"),
            F.sum((F.col("start") < F.col("before")).cast("int")).alias("overlap_count"),
            F.sum(F.col("end") - F.col("start") - F.col("records")).alias("missing"),
        )
        .select(
            *queue,
            "start",
            "end",
            "records",
            F.coalesce("gap_count", F.lit(0)).alias("gaps"),
            F.coalesce("overlap_count", F.lit(0)).alias("overlaps"),
            "missing",
        )
        .orderBy(*queue)
    )


def archived(spark: SparkSession, output: str, *, read_as: str | None = None) -> DataFrame:
    """The table as of the last commit: exactly its files, whatever a running job moves around. Of a Delta or
    Iceberg table, its newest snapshot, without any jar.

    Files on an object store are read by pyarrow in Spark's Python workers, because Spark from PyPI cannot
    read there itself. read_as: what the archive is called by a Spark that can, such as s3a://bucket/archive;
    its own reader is faster and reads only the columns that are asked for.
    """
    lake = open_lake(output)
    if lake is not None:
        return _snapshot(spark, lake, read_as)
    table, live = ArchiveTable(output), _log(output).files
    if not live.num_rows:
        raise FileNotFoundError(f"{table.output} holds no archived messages yet")
    # Given, because Spark would take a topic named 007 for a number, and one file's columns for those of all.
    columns = columns_in(table.last_commit())
    if table.direct and read_as is None:
        return by_workers(spark, table.uri, live.to_pylist(), _divided(columns))
    base = (read_as or output).rstrip("/")
    reader = _plain(spark).option("basePath", base).schema(from_arrow_schema(with_directories(columns)))
    return reader.parquet(*(f"{base}/{path}" for path in live["path"].to_pylist()))


def _plain(spark: SparkSession) -> DataFrameReader:
    """A reader for which `*`, `[` and `{` in paths stand for themselves. The option is what Spark's streaming
    sources set for that."""
    return spark.read.option("__globPaths__", "false")


def _snapshot(spark: SparkSession, lake: LakeTable, read_as: str | None) -> DataFrame:
    with closing(lake):
        live, columns = lake.files()
    if not live:
        raise FileNotFoundError(f"{lake.output} holds no archived messages yet")
    base = (read_as or lake.root).rstrip("/")
    paths = [f"{base}/{file['path']}" for file in live]
    reader = _plain(spark).schema(from_arrow_schema(columns))
    elsewhere = lake.uri != lake.root and read_as is None
    if lake.topic_in_files:
        # All is in the files, wherever they are, but for what other archives have as directories (UTC).
        reader = reader.option("recursiveFileLookup", "true")
        rows = by_workers(spark, lake.uri, live, columns) if elsewhere else reader.parquet(*paths)
        day, hour = (
            "unix_micros(store_timestamp) div 86400000000",
            "unix_micros(store_timestamp) div 3600000000",
        )
        return rows.selectExpr(
            "*", f"date_from_unix_date(CAST({day} AS INT)) AS dt", f"CAST({hour} % 24 AS INT) AS hour"
        )
    # Directories that the format's own tools make do not escape the name that Spark takes for null.
    if elsewhere or any(file["path"].startswith(f"topic={NULL}/") for file in live):
        return by_workers(spark, lake.uri, live, _divided(columns))
    return reader.option("basePath", base).parquet(*paths)


def group_positions(spark: SparkSession, output: str) -> DataFrame:
    """Where consumer groups stood (`archive(groups=…)`): batch, time, group, topic, broker_name, queue_id
    and offset, the next one to consume. Rows of one batch are one picture; the newest is that of the
    largest batch. The newest hundred pictures are there, and of older ones the last of each of a hundred
    days, up to a million rows together. No position is beyond the end of the archive as of its batch."""
    return spark.createDataFrame(GroupLog(*open_filesystem(output)).read())


def by_workers(spark: SparkSession, uri: str, live: list[dict[str, Any]], columns: pa.Schema) -> DataFrame:
    """The rows of these files. columns: their own, and behind them what their directories name."""
    tasks = min(len(live), _TASKS_PER_SLOT * slots(spark))
    reader = _reader(uri, live, columns)
    return spark.range(0, len(live), 1, tasks).mapInArrow(reader, from_arrow_schema(columns))


def _divided(columns: pa.Schema) -> pa.Schema:
    """The columns with those at their end that directories name."""
    names = [name for name, _ in _PARTITION]
    return pa.schema([*(field for field in columns if field.name not in names), *_PARTITION])


def _reader(
    uri: str, live: list[dict[str, Any]], schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: from numbers of files to their rows."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filesystem, root = open_filesystem(uri)
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            file = live[number]
            named = "topic" in file
            values = (file["topic"], date.fromisoformat(str(file["dt"])), file["hour"]) if named else ()
            with _opened(filesystem, root, file["path"]) as stream:
                for rows in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS):
                    table = pa.Table.from_batches([rows]).replace_schema_metadata()
                    for (name, kind), value in zip(_PARTITION, values, strict=False):
                        table = table.append_column(name, pa.repeat(pa.scalar(value, kind), rows.num_rows))
                    whole = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
                    yield from whole.select(schema.names).to_batches()

    return read


def _opened(filesystem: fs.FileSystem, root: str, path: str) -> pa.NativeFile:
    try:
        return filesystem.open_input_file(f"{root}/{path}")
    except FileNotFoundError:
        problem = f"{path} is gone: a compaction has replaced it since this query began. Read again"
        raise ArchiveError(root, problem) from None

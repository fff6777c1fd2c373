"""Queries that the log of an archive answers: contents, files, batches and completeness.

The log is read in this process, without Spark, and in the same way on disks and on object stores. The results
are Spark DataFrames.
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
        raise FileNotFoundError(f"{table.output} is not an archive")
    return table.log()


def manifest(spark: SparkSession, output: str) -> DataFrame:
    """Return one row for each committed range of an archive.

    A row has the offsets from `start` to `end` - 1 of a queue and the number of records that became rows
    (`records`), were set aside as undecodable (`bad`) or were missing on the broker (`lost`). Old adjacent
    ranges are merged into one row, which has the number and time of their newest batch.

    An empty range with `replaces` marks a queue that was deleted and created again; `replaces` is the offset
    up to which the old queue had been read. `life` counts the replacements: equal offsets of different lives
    are different messages.
    """
    so_far = Window.partitionBy(*_QUEUE).orderBy("batch")
    ranges = spark.createDataFrame(_log(output).ranges.drop_columns("seconds"))
    return ranges.withColumn("life", F.count("replaces").over(so_far))


def files(spark: SparkSession, output: str) -> DataFrame:
    """Return one row for each file: its `path` in the archive, and the newest batch that is in it."""
    return spark.createDataFrame(_log(output).files)


def batches(spark: SparkSession, output: str) -> DataFrame:
    """Return one row for each of the newest batches, until the log merges them, that added messages.

    Columns are the commit time (s since 1970), seconds, records, and their bytes in the brokers' format.
    """
    return (
        spark.createDataFrame(_log(output).ranges)
        .groupBy("batch", F.to_timestamp("time").cast("double").alias("epoch_s"), "seconds")
        .agg(F.sum("records").alias("records"), F.sum("bytes").alias("bytes"))
        .filter("records > 0 AND seconds IS NOT NULL")
        .orderBy("batch")
    )


def completeness(spark: SparkSession, output: str) -> DataFrame:
    """Return one row for each queue of an archive, with its numbers of gaps, overlaps and missing messages.

    A queue that was deleted and created again has one row for the deleted queue and one for its replacement;
    `life` numbers them, as in `manifest`. `gaps` and `overlaps` count the ranges that begin after or before
    the end of the previous range. `missing` counts the offsets of the ranges that have no row in the table.
    All three are 0 if each message is in the table exactly once.
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
            F.count_if(F.col("start") > F.col("before")).alias("gaps"),
            F.count_if(F.col("start") < F.col("before")).alias("overlaps"),
            F.sum(F.col("end") - F.col("start") - F.col("records")).alias("missing"),
        )
        .orderBy(*queue)
    )


def archived(spark: SparkSession, output: str, *, read_as: str | None = None) -> DataFrame:
    """Return the archive's table as of its last commit.

    The result consists of exactly the files of that commit, whatever files a running job adds or removes. For
    a Delta or Iceberg table the result is the newest snapshot; no jar is required. Files on an object store
    are read by pyarrow in Spark's Python workers, because Spark from PyPI cannot read object stores.

    Args:
        spark: The Spark session.
        output: The archive's directory: a path or a URI.
        read_as: URI of the archive for a Spark session that can read the object store itself, such as
            s3a://bucket/archive. Spark's own reader is faster and reads only the selected columns. None: read
            by pyarrow.

    Returns:
        A DataFrame with one row for each message.

    Raises:
        ArchiveError: The directory holds no archive.
    """
    lake = open_lake(output)
    if lake is not None:
        return _snapshot(spark, lake, read_as)
    table, live = ArchiveTable(output), _log(output).files
    if not live.num_rows:
        raise FileNotFoundError(f"{table.output} contains no archived messages yet")
    # The schema is explicit because Spark would infer a number from a directory of a topic named 007, and
    # would apply one file's columns to all files.
    columns = columns_in(table.last_commit())
    if table.direct and read_as is None:
        return by_workers(spark, table.uri, live.to_pylist(), _divided(columns))
    base = (read_as or output).rstrip("/")
    reader = _plain(spark).option("basePath", base).schema(from_arrow_schema(with_directories(columns)))
    return reader.parquet(*(f"{base}/{path}" for path in live["path"].to_pylist()))


def _plain(spark: SparkSession) -> DataFrameReader:
    """Return a reader for which `*`, `[` and `{` in paths are plain, by an option of Spark's own streams."""
    return spark.read.option("__globPaths__", "false")


def _snapshot(spark: SparkSession, lake: LakeTable, read_as: str | None) -> DataFrame:
    with closing(lake):
        live, columns = lake.files()
    if not live:
        raise FileNotFoundError(f"{lake.output} contains no archived messages yet")
    base = (read_as or lake.root).rstrip("/")
    paths = [f"{base}/{file['path']}" for file in live]
    reader = _plain(spark).schema(from_arrow_schema(columns))
    elsewhere = lake.uri != lake.root and read_as is None
    if lake.topic_in_files:
        # The files hold the topic, and the date and hour are computed from the store time. So no column has
        # to be parsed from directory names.
        reader = reader.option("recursiveFileLookup", "true")
        rows = by_workers(spark, lake.uri, live, columns) if elsewhere else reader.parquet(*paths)
        day, hour = (
            "unix_micros(store_timestamp) div 86400000000",
            "unix_micros(store_timestamp) div 3600000000",
        )
        return rows.selectExpr(
            "*", f"date_from_unix_date(CAST({day} AS INT)) AS dt", f"CAST({hour} % 24 AS INT) AS hour"
        )
    # Spark reads the directory name `topic=` + NULL as the topic null. But a topic may really have this name,
    # because the table format's tools do not escape it. Then Python workers read the files instead of Spark.
    if elsewhere or any(file["path"].startswith(f"topic={NULL}/") for file in live):
        return by_workers(spark, lake.uri, live, _divided(columns))
    return reader.option("basePath", base).parquet(*paths)


def group_positions(spark: SparkSession, output: str) -> DataFrame:
    """Return the recorded offsets of consumer groups (`archive(groups=…)`).

    Columns are batch, time, group, topic, broker_name, queue_id and offset, the next offset to consume. The
    rows of one batch form one snapshot; the snapshot with the largest batch number is the newest. The newest
    100 snapshots are kept, and for 100 earlier days the last snapshot of the day, with at most a million rows
    in total. No offset exceeds the end of the archive as of its batch.
    """
    return spark.createDataFrame(GroupLog(*open_filesystem(output)).read())


def by_workers(spark: SparkSession, uri: str, live: list[dict[str, Any]], columns: pa.Schema) -> DataFrame:
    """Return the rows of the files in `live`, read by workers. Columns of directory names come last."""
    tasks = min(len(live), _TASKS_PER_SLOT * slots(spark))
    reader = _reader(uri, live, columns)
    return spark.range(0, len(live), 1, tasks).mapInArrow(reader, from_arrow_schema(columns))


def _divided(columns: pa.Schema) -> pa.Schema:
    """Return the schema with the columns that come from directory names moved to the end."""
    names = [name for name, _ in _PARTITION]
    return pa.schema([*(field for field in columns if field.name not in names), *_PARTITION])


def _reader(
    uri: str, live: list[dict[str, Any]], schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that maps indexes in `live` to the rows of these data files."""

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

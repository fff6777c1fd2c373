"""Functions for time windows, summaries and tables of results that several pipeline jobs use."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TypeVar

from py4j.protocol import Py4JError
from pyarrow import fs
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.errors import ConfigError
from cometmq.pipeline.base.engine import cause, run_action
from cometmq.pipeline.base.job_options import Cancelled
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.objects import shown
from cometmq.pipeline.table.small_files import create_file, replace_file

_MARK = "_cometmq_job.json"
T = TypeVar("T")
_HALF = re.compile(r"_.*\.tmp")  # a marker file that a killed run left incomplete


def window(at_ms: str | Column, window_s: int) -> Column:
    """Return the column `window`, which holds the start of the window that contains a time."""
    at = F.col(at_ms) if isinstance(at_ms, str) else at_ms
    return F.timestamp_millis(at - F.pmod(at, F.lit(window_s * 1000))).alias("window")


def absent(topics: Sequence[str], *frames: DataFrame) -> list[str]:
    """Return the names in `topics` that occur in no row of the DataFrames."""
    if not topics:
        return []
    found = reduce(DataFrame.union, [frame.select("topic") for frame in frames])
    rows = found.filter(F.col("topic").isin(*topics)).distinct().collect()
    return sorted(set(topics) - {row.topic for row in rows})


def structs(kind: type[T], rows: DataFrame) -> list[T]:
    """Return a struct for each row, whose columns are the fields of the struct."""
    return [kind(**row.asDict()) for row in rows.collect()]


def sums(*names: str) -> list[Column]:
    """Return the sum of each column, under the name of the column."""
    return [F.sum(name).alias(name) for name in names]


def report_on(
    job: str,
    output: str | None,
    frames: Sequence[DataFrame],
    sum_up: Callable[[], None],
    tables: Callable[[], Mapping[str, DataFrame]],
    given: Cancelled,
) -> None:
    """Compute a job's summary, and its tables if it has an output, from `frames`, which Spark caches."""
    for frame in frames:
        frame.persist()
    try:
        run_action(frames[0].sparkSession, job, sum_up, on_progress=given.show, stop=given.stop)
        if output is not None:
            write_tables(output, job, tables(), on_progress=given.show, stop=given.stop)
    finally:
        for frame in frames:
            frame.unpersist()


def own_directory(output: str, job: str) -> str:
    """Create the job's directory, and return its path or URI. Raises ConfigError if others use it."""
    filesystem, root = open_filesystem(output)
    mark = f"{root}/{_MARK}"
    if filesystem.get_file_info(mark).type != fs.FileType.File:
        found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        if any(not _HALF.fullmatch(info.base_name) for info in found):
            raise ConfigError("output", shown(output), f"a new directory, or one of the job {job}")
        filesystem.create_dir(root, recursive=True)
        create = create_file if isinstance(filesystem, fs.LocalFileSystem) else replace_file
        create(filesystem, mark, json.dumps({"job": job}).encode())
    with filesystem.open_input_stream(mark) as stream:
        content = stream.read(4096)
    if _job_in(content) != job:
        raise ConfigError("output", shown(output), f"a new directory, or one of the job {job}")
    return output.rstrip("/") if "://" in output else root


def spark_directory(spark: SparkSession, output: str, job: str) -> str:
    """Create the job's output directory, and return its path or URI in the form that Spark uses.

    The URI has no key, secret or options, because Spark has them in its own configuration. Raises ConfigError
    if Spark cannot access the directory.
    """
    place = shown(own_directory(output, job))
    if "://" in place:
        try:
            # Only reading `schema` makes Spark Connect access the directory.
            _ = spark.read.text(place).schema
        except (PySparkException, Py4JError) as error:
            raise ConfigError("output", place, f"a place that Spark can write to ({cause(error)})") from None
    return place


def _job_in(content: bytes) -> object:
    try:
        return json.loads(content)["job"]
    except (ValueError, TypeError, KeyError):
        return None


def write_tables(
    output: str,
    job: str,
    tables: Mapping[str, DataFrame],
    *,
    on_progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Write each table to `output/NAME`, replacing an older one. Without `_SUCCESS` it is incomplete."""
    for name, table in tables.items():
        write = partial(table.write.mode("overwrite").parquet, f"{output}/{name}")
        run_action(table.sparkSession, f"{job}: {name}", write, on_progress=on_progress, stop=stop)

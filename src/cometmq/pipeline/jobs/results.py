"""What jobs that report have in common: windows of time, and tables in a directory of the job's own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from pyarrow import fs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from cometmq.errors import ConfigError
from cometmq.pipeline.base.engine import run_action
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.objects import shown

_MARK = "_cometmq_job.json"


class Summary(Protocol):
    """What `report_on` needs of a job's summary."""

    output: str | None
    seconds: float


def at_least(least: int, **numbers: float) -> None:
    """Raises ConfigError for an argument that is less, no number, or too large for sums of times in ms."""
    for key, value in numbers.items():
        if not least <= value < 2**31:
            raise ConfigError(key, str(value), f"{least} or more, less than 2^31")


def window(at_ms: str | Column, window_s: int) -> Column:
    """The column `window`: when the window of a time begins."""
    at = F.col(at_ms) if isinstance(at_ms, str) else at_ms
    return F.timestamp_millis(at - F.pmod(at, F.lit(window_s * 1000))).alias("window")


def report_on(
    job: str,
    summary: Summary,
    frames: Sequence[DataFrame],
    sum_up: Callable[[], None],
    tables: Callable[[], Mapping[str, DataFrame]],
    *,
    on_progress: Callable[[int, int | None], None] | None,
    stop: threading.Event | None,
) -> None:
    """Fill a summary, and write the tables if it has an output; meanwhile Spark keeps the `frames` that both
    are made of. Raises JobFailed, JobStopped."""
    began = time.monotonic()
    show = None if on_progress is None else lambda done: on_progress(done, None)
    for frame in frames:
        frame.persist()
    try:
        run_action(frames[0].sparkSession, job, sum_up, on_progress=show, stop=stop)
        if summary.output is not None:
            write_tables(summary.output, job, tables(), on_progress=show, stop=stop)
    finally:
        for frame in frames:
            frame.unpersist()
    summary.seconds = time.monotonic() - began


def own_directory(output: str, job: str) -> str:
    """The directory's absolute path or URI; it is made if there is none. Raises ConfigError for one with
    files that this job did not write."""
    filesystem, root = open_filesystem(output)
    mark = f"{root}/{_MARK}"
    if filesystem.get_file_info(mark).type == fs.FileType.File:
        with filesystem.open_input_stream(mark) as stream:
            content = stream.read(4096)
        if _job_in(content) != job:
            raise ConfigError("output", shown(output), f"a new directory, or one of the job {job}")
    else:
        if filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
            raise ConfigError("output", shown(output), f"a new directory, or one of the job {job}")
        filesystem.create_dir(root, recursive=True)
        with filesystem.open_output_stream(mark) as stream:
            stream.write(json.dumps({"job": job}).encode())
    return output.rstrip("/") if "://" in output else root


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
    """Write each table to `output/NAME`, in place of what an earlier run wrote there. A table without the
    file `_SUCCESS` is not whole. Raises ConfigError, JobFailed, JobStopped."""
    root = own_directory(output, job)
    for name, table in tables.items():
        write = partial(table.write.mode("overwrite").parquet, f"{root}/{name}")
        run_action(table.sparkSession, f"{job}: {name}", write, on_progress=on_progress, stop=stop)

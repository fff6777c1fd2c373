"""The tables that a job leaves, in a directory of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial

from pyarrow import fs
from pyspark.sql import DataFrame

from cometmq.errors import ConfigError
from cometmq.pipeline.base.engine import run_action
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.objects import shown

_MARK = "_cometmq_job.json"


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

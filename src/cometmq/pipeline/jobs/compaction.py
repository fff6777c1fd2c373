"""Compaction of an archive: merge small files into large files, in separate commits.

Only files of hours that ended long enough ago are merged, because an archive job may still add rows to newer
hours.

A compaction's commit names the files that it removes and the files that it adds, but no ranges: the set of
messages in the table does not change. A compaction that is killed before its commit changes nothing. If a
compaction is killed after its commit, the next run completes the remaining work.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from cometmq import logs
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.engine import run_units
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.base.job_options import CompactOptions
from cometmq.pipeline.table.directory import ArchiveTable, carried
from cometmq.pipeline.table.formats import open_lake
from cometmq.pipeline.table.lake import LakeTable
from cometmq.pipeline.table.log import Log, listing
from cometmq.pipeline.table.merging import Merge, merge

log = logs.logger(__name__)

_MERGES = 64  # maximum merges per commit, because a killed run loses uncommitted merges
_FILES = 1000  # maximum files per merge

File = dict[str, Any]


class CompactSummary(msgspec.Struct):
    """The result of a compaction."""

    output: str
    table_format: str = "parquet"
    """Format of the table. Delta and Iceberg tables are not merged."""
    commits: int = 0
    rows: int = 0
    """Number of rows that were rewritten."""
    files_before: int = 0
    """Number of files that were merged."""
    files_after: int = 0
    """Number of files that resulted from the merges."""
    bytes_before: int = 0
    bytes_after: int = 0
    deleted: int = 0
    """Files deleted from a store, Delta or Iceberg table: replaced earlier, or left by a killed job."""
    seconds: float = 0.0
    checkpoint_problem: str | None = None
    """Reason why the newest checkpoint of the archive's log could not be written. All other work is done."""


@job(CompactOptions)
def compact(spark: SparkSession, given: CompactOptions) -> CompactSummary:
    """Merge the small files of each topic and hour of an archive into larger files.

    Files smaller than half of `target_bytes` count as small. In Delta and Iceberg tables no files are merged,
    because the formats' own tools do this; only files that belong to no commit are deleted. Such files are
    kept for at least a day, because a running job may still be writing them.

    Returns:
        The numbers of merged, new and deleted files.

    Raises:
        ConfigError: An argument is invalid.
        ArchiveError: The directory holds no archive, or another job is using it.
        JobFailed: A Spark job failed.
    """
    retention_s, target_bytes = given.retention_s, given.target_bytes
    lake = open_lake(given.output)
    if lake is not None:
        return _cleaned_up(lake, timedelta(seconds=retention_s))
    table = ArchiveTable(given.output)
    stop = given.stop or threading.Event()
    summary = CompactSummary(table.output)
    try:
        last = table.prepare() if table.exists() else None
        if last is None:
            raise ArchiveError(table.output, "contains no archived messages yet")
        summary.deleted = table.vacuum(timedelta(seconds=retention_s))
        closed = datetime.now(UTC) - timedelta(seconds=given.older_than_s)
        chosen = list(plan(table, table.log(), closed, target_bytes))
        report, done = given.on_progress or (lambda *_: None), 0
        groups = iter(chosen)
        while not stop.is_set() and (files := list(islice(groups, _MERGES))):
            _one_commit(spark, table, last, files, target_bytes, summary)
            done += len(files)
            report(done, len(chosen))
    finally:
        table.close()
    summary.checkpoint_problem = table.checkpoints.problem
    return summary


def _cleaned_up(lake: LakeTable, age: timedelta) -> CompactSummary:
    """Delete the files that were left in a Delta or Iceberg table by jobs that were killed."""
    with closing(lake):
        if lake.prepare() is None:
            raise ArchiveError(lake.output, "contains no archived messages yet")
        deleted = lake.vacuum(age)
    return CompactSummary(lake.output, lake.kind, deleted=deleted)


def plan(table: ArchiveTable, now: Log, closed: datetime, target_bytes: int) -> Iterator[list[File]]:
    """Yield the files of each merge, of hours before `closed`, without deleted and single files."""
    small = now.files.filter(pc.less(now.files["bytes"], (target_bytes + 1) // 2))
    begun = _begun_anew(now)
    partitions: dict[tuple[str, ...], list[File]] = defaultdict(list)
    for file in small.to_pylist():
        ends = datetime.fromisoformat(file["dt"]).replace(tzinfo=UTC) + timedelta(hours=file["hour"] + 1)
        if ends <= closed:
            life = bisect_right(begun[file["topic"]], file["batch"])
            partitions[file["path"].rpartition("/")[0], str(life)].append(file)
    for (directory, _), files in sorted(partitions.items()):
        if len(files) < 2:
            continue
        there = {info.base_name for info in listing(table.filesystem, f"{table.root}/{directory}")}
        files = [file for file in files if file["path"].rpartition("/")[2] in there]
        yield from _cut(sorted(files, key=lambda file: file["batch"]), target_bytes)


def _begun_anew(now: Log) -> dict[str, list[int]]:
    """Return, for each topic, the archive batches in which a replaced queue of the topic was first read.

    Only the batch numbers of files distinguish the rows of the deleted queue and of its replacement, so a
    file of an earlier batch must not be merged with one of such a batch or of a later one.
    """
    begun: dict[str, list[int]] = defaultdict(list)
    anew = now.ranges.filter(pc.is_valid(now.ranges["replaces"]))
    for row in anew.select(["topic", "batch"]).sort_by("batch").to_pylist():
        begun[row["topic"]].append(row["batch"])
    return begun


def _cut(files: Sequence[File], target_bytes: int) -> Iterator[list[File]]:
    """Yield groups of two or more consecutive files to merge, each of at most `target_bytes` in total."""
    chosen: list[File] = []
    size = 0
    for file in files:
        if chosen and (size + file["bytes"] > target_bytes or len(chosen) >= _FILES):
            if len(chosen) > 1:
                yield chosen
            chosen, size = [], 0
        chosen.append(file)
        size += file["bytes"]
    if len(chosen) > 1:
        yield chosen


def _one_commit(
    spark: SparkSession,
    table: ArchiveTable,
    last: dict[str, Any],
    chosen: list[list[File]],
    target_bytes: int,
    summary: CompactSummary,
) -> None:
    """Merge the chosen files in one Spark job and commit the result. `last` is changed to the new commit."""
    began, number = time.monotonic(), last["batch"] + 1
    staging = table.staging(number)
    units = [
        Merge(table.uri, staging, files[0]["topic"], tuple(file["path"] for file in files), target_bytes)
        for files in chosen
    ]
    results = run_units(spark, f"compaction {number}", merge, units)
    removed: list[File] = []
    added: list[File] = []
    for files, merged in zip(chosen, results, strict=True):
        if not merged:
            where = files[0]["path"].rpartition("/")[0]
            log.warning(
                "%s: the files of %s have different columns and are not compacted", table.output, where
            )
            continue
        before, after = sum(file["rows"] for file in files), sum(file["rows"] for file in merged)
        if before != after:
            problem = f"{after} rows of {before} were merged of {files[0]['path']} and others: not committed"
            raise ArchiveError(table.output, problem)
        removed += files
        added += [file | {"batch": files[-1]["batch"]} for file in merged]
        summary.rows += after
    if not removed:
        return
    commit = {
        **table.described(number, time.monotonic() - began),
        **carried(last),
        "ranges": [],
        "files": added,
        "quarantine": [],
        "removes": [file["path"] for file in removed],
    }
    table.commit(commit)
    last.clear()
    last.update(commit)
    summary.commits += 1
    summary.files_before += len(removed)
    summary.files_after += len(added)
    summary.bytes_before += sum(file["bytes"] for file in removed)
    summary.bytes_after += sum(file["bytes"] for file in added)

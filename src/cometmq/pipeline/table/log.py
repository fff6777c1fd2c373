"""The archive's log for readers: the files of the table, and the offsets in them.

The log consists of the commit files in the order of their numbers. A commit adds `files` and `ranges`, and
the commit of a compaction also `removes` files. The live files are those that were added and not removed. A
checkpoint contains all commits up to its number, merged into one, so that a log of 100,000 commits can be
opened with about a hundred reads. Commits that a checkpoint covers are kept for a day and then deleted. If a
checkpoint cannot be read, the previous checkpoint is used, and the commits after it still exist.

Old adjacent ranges are merged, so that the size of the log depends on the number of queues and gaps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from cometmq import logs
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.base.job_options import MAX_RETENTION_S

log = logs.logger(__name__)

COMMITS = "_cometmq/commits"
CHECKPOINTS = "_cometmq/checkpoints"
CHECKPOINT_EVERY = 100
"""Number of commits between two checkpoints."""
KEEP = timedelta(days=1)
"""Time for which a commit file is kept after a checkpoint covers it.

A second job may wrongly assume that no other job is running. The file with the number of that job's next
commit must then still exist, so that the commit fails.
"""
REMEMBERED = timedelta(seconds=MAX_RETENTION_S)
"""Time for which checkpoints list a removed file: the longest retention that can be set."""
DETAILED = 10_000
"""Number of ranges of offsets, counted from the newest, that a checkpoint does not merge."""

WRONG_TYPES = (pa.ArrowException, LookupError, TypeError, ValueError, OverflowError)
"""Errors that occur when JSON with unexpected types is converted to a table."""

_LISTS = ("files", "quarantine")  # Names of the lists that each commit contains
_IS_COMMIT = re.compile(r"([0-9]{20})\.json")
_IS_CHECKPOINT = re.compile(r"([0-9]{20})\.parquet")
_MAX_INT64 = (1 << 63) - 1
_SUM, _NO_SUM = b"cometmq.sha256", b"0" * 64
_QUEUE = ("topic", "broker_name", "queue_id")
_TRIES = 5
_READS = 16  # Maximum number of files that are read concurrently

_RANGES = pa.schema(
    [
        ("batch", pa.int64()),
        ("run", pa.string()),
        ("time", pa.string()),
        ("seconds", pa.float64()),
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        *((name, pa.int64()) for name in ("start", "end", "records", "bad", "lost", "bytes")),
        *((name, pa.int64()) for name in ("first_store_ms", "last_store_ms", "replaces")),
    ]
)
_TEXTS = [(name, pa.string()) for name in ("path", "topic", "dt")]
_FILES = pa.schema(
    [("batch", pa.int64()), *_TEXTS, ("hour", pa.int32()), ("rows", pa.int64()), ("bytes", pa.int64())]
)
_REMOVED = pa.schema([("path", pa.string()), ("time", pa.timestamp("ms", "UTC"))])


@dataclass(frozen=True, slots=True)
class Log:
    """All commits up to number `last`, merged. `last` is None if there is no commit."""

    last: int | None
    ranges: pa.Table
    files: pa.Table  # Files in the table; `batch` is the newest batch with messages in the file
    quarantine: pa.Table  # Files of undecodable records, which belong to no topic
    removed: pa.Table  # Files that a compaction has replaced, with the time of their removal
    missing: int = 0  # Number of commits that are missing in the log
    first_missing: int = -1
    checkpoint: int = -1  # Number of the checkpoint that was read, or -1


def empty_log() -> Log:
    return Log(None, *(schema.empty_table() for schema in (_RANGES, _FILES, _FILES, _REMOVED)))


def read_log(filesystem: fs.FileSystem, root: str, upto: int | None = None) -> Log:
    """Return the current log, or the log as of commit `upto`.

    If the newest checkpoint covers commits after `upto`, these are included. Raises ArchiveError for an
    unreadable commit. Missing commits are counted in the log's `missing`.
    """
    for _ in range(_TRIES):
        newest = last_checkpoint(filesystem, root)
        try:
            found = _read_from(filesystem, root, newest, upto)
        except FileNotFoundError:
            continue
        # Commits are deleted only after a new checkpoint. There is no new checkpoint, so no commit was
        # deleted while the log was read.
        if newest == last_checkpoint(filesystem, root):
            if found.missing:
                what = "%s: %d commits are missing, the first is %d: their files are not seen"
                log.warning(what, root, found.missing, found.first_missing)
            return found
    raise ArchiveError(root, "the log changes faster than it can be read")


def _read_from(filesystem: fs.FileSystem, root: str, newest: int, upto: int | None) -> Log:
    before = _newest_readable(filesystem, root) if newest >= 0 else empty_log()
    checkpoint = -1 if before.last is None else before.last
    numbers = sorted(
        number
        for number in _numbers(filesystem, f"{root}/{COMMITS}", _IS_COMMIT)
        if number > checkpoint and (upto is None or number <= upto)
    )
    # Only the numbers of existing files are visited, and not all numbers up to the last, because a stray
    # file's name may contain a huge number.
    last = numbers[-1] if numbers else checkpoint
    missing = last - checkpoint - len(numbers)
    gaps = (number for number, found in enumerate(numbers, checkpoint + 1) if number != found)
    if checkpoint < newest and (missing or last < newest):
        problem = f"{checkpoint_path(newest)} cannot be read, and commits before it are gone"
        raise ArchiveError(root, f"{problem}. If it is damaged, restore it from a backup")

    def read(number: int) -> dict[str, Any]:
        return read_commit(filesystem, root, number)

    with ThreadPoolExecutor(_READS) as threads:
        commits = list(threads.map(read, numbers))
    try:
        now = _after(before, commits)
    except WRONG_TYPES:
        for number, commit in zip(numbers, commits, strict=True):
            try:
                _after(empty_log(), [commit])
            except WRONG_TYPES:
                raise _damaged(root, number) from None
        raise
    return replace(now, missing=missing, first_missing=next(gaps, -1), checkpoint=checkpoint)


def _newest_readable(filesystem: fs.FileSystem, root: str) -> Log:
    """Return the newest readable checkpoint, or the empty log if there is none."""
    for number in sorted(_numbers(filesystem, f"{root}/{CHECKPOINTS}", _IS_CHECKPOINT), reverse=True):
        try:
            return _read_checkpoint(filesystem, f"{root}/{checkpoint_path(number)}", number)
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            problem = str(error).partition("\n")[0]
            log.warning("%s: %s cannot be read: %s", root, checkpoint_path(number), problem)
    return empty_log()


def read_commit(filesystem: fs.FileSystem, root: str, number: int) -> dict[str, Any]:
    """Return the content of one commit file. Raises ArchiveError for invalid content."""
    with filesystem.open_input_stream(f"{root}/{commit_path(number)}") as stream:
        content = stream.read()
    try:
        commit: dict[str, Any] = json.loads(content)
        whole = type(commit["batch"]) is int and commit["batch"] == number
        whole = whole and all(isinstance(commit[key], list) for key in _LISTS)
        names = [file["path"] for key in _LISTS for file in commit[key]]
        names += [file.get("staged", "") for key in _LISTS for file in commit[key]]
        whole = whole and all(isinstance(name, str) for name in (*names, *commit.get("removes", ())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise _damaged(root, number)
    return commit


def _damaged(root: str, number: int) -> ArchiveError:
    return ArchiveError(root, f"{commit_path(number)} is damaged: restore it from a backup")


def last_checkpoint(filesystem: fs.FileSystem, root: str) -> int:
    """Return the number of the newest checkpoint, or -1 if there is none."""
    return max(_numbers(filesystem, f"{root}/{CHECKPOINTS}", _IS_CHECKPOINT), default=-1)


def last_number(filesystem: fs.FileSystem, root: str) -> int | None:
    """Return the number of the newest commit."""
    return max(_numbers(filesystem, f"{root}/{COMMITS}", _IS_COMMIT), default=None)


def commit_path(number: int) -> str:
    return f"{COMMITS}/{number:020d}.json"


def checkpoint_path(number: int) -> str:
    return f"{CHECKPOINTS}/{number:020d}.parquet"


def _numbers(filesystem: fs.FileSystem, directory: str, form: re.Pattern[str]) -> list[int]:
    """Return the numbers in the names of the files. Other names, such as temporary files, are ignored."""
    names = (info.base_name for info in listing(filesystem, directory))
    return [int(found[1]) for name in names if (found := form.fullmatch(name))]


def listing(filesystem: fs.FileSystem, path: str, *, recursive: bool = False) -> list[fs.FileInfo]:
    """Return the entries of a directory, or none if the directory does not exist."""
    selector = fs.FileSelector(path, allow_not_found=True, recursive=recursive)
    infos: list[fs.FileInfo] = filesystem.get_file_info(selector)
    return infos


def _after(before: Log, commits: Sequence[dict[str, Any]]) -> Log:
    """Return the log with these commits appended."""
    if not commits:
        return before
    ranges = [
        {name: commit.get(name) for name in ("batch", "run", "time", "seconds")} | row
        for commit in commits
        for row in commit.get("ranges", ())
    ]
    removed = [
        {"path": path, "time": datetime.fromisoformat(commit["time"])}
        for commit in commits
        for path in commit.get("removes", ())
    ]
    gone = pa.array([row["path"] for row in removed], pa.string())

    def live(then: pa.Table, key: str) -> pa.Table:
        rows = [{"batch": commit["batch"]} | file for commit in commits for file in commit[key]]
        both = pa.concat_tables([then, pa.Table.from_pylist(rows, _FILES)])
        return both.filter(pc.invert(pc.is_in(both["path"], gone))) if removed else both

    return Log(
        commits[-1]["batch"],
        _folded(pa.concat_tables([before.ranges, pa.Table.from_pylist(ranges, _RANGES)])),
        live(before.files, "files"),
        live(before.quarantine, "quarantine"),
        pa.concat_tables([before.removed, pa.Table.from_pylist(removed, _REMOVED)]),
    )


def _folded(ranges: pa.Table) -> pa.Table:
    """Merge adjacent ranges of a queue, except for the newest ranges.

    A merged range has the highest batch number and the summed counts of its parts, without `seconds`. Ranges
    with lost records are merged only with each other, and the first after a replacement is not merged.
    """
    if ranges.num_rows <= DETAILED:
        return ranges
    newest = np.sort(ranges["batch"].to_numpy())[-DETAILED]
    is_old = pc.less(ranges["batch"], int(newest))
    old = ranges.filter(is_old).sort_by([(name, "ascending") for name in (*_QUEUE, "batch", "start")])
    if not old.num_rows:
        return ranges
    lost, anew = pc.greater(old["lost"].fill_null(0), 0).to_numpy(), old["replaces"].is_valid().to_numpy()
    begins = np.ones(old.num_rows, bool)
    begins[1:] = (old["start"].to_numpy()[1:] != old["end"].to_numpy()[:-1]) | (lost[1:] != lost[:-1])
    begins[1:] |= anew[1:] | anew[:-1]
    for name in _QUEUE:
        codes = old[name].combine_chunks().dictionary_encode().indices.to_numpy()
        begins[1:] |= codes[1:] != codes[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], old.num_rows) - 1
    columns = {name: old[name].take(pa.array(last)) for name in old.schema.names}
    columns["start"] = old["start"].take(pa.array(first))
    columns["seconds"] = pa.nulls(len(first), pa.float64())
    for name in ("records", "bad", "lost", "bytes"):
        columns[name] = pa.array(np.add.reduceat(old[name].fill_null(0).to_numpy(), first))
    for name, reduce, none in (
        ("first_store_ms", np.minimum, _MAX_INT64),
        ("last_store_ms", np.maximum, -_MAX_INT64),
    ):
        times = reduce.reduceat(old[name].fill_null(none).to_numpy(), first)
        columns[name] = pa.array(times, mask=times == none)
    folded = pa.table(columns, _RANGES).sort_by([("batch", "ascending"), *((n, "ascending") for n in _QUEUE)])
    return pa.concat_tables([folded, ranges.filter(pc.invert(is_old))])


def checkpoint_content(now: Log, time: datetime) -> bytes:
    """Return a Parquet file with one row, whose columns are lists of the log's rows.

    The metadata contains the SHA-256 of the file, computed with zeros in the place of the hash. Without the
    hash, a flipped bit could change the list of files unnoticed.
    """
    remembered = pc.greater(now.removed["time"], pa.scalar(time - REMEMBERED, pa.timestamp("ms", "UTC")))
    tables = {
        "ranges": now.ranges,
        "files": now.files,
        "quarantine": now.quarantine,
        "removed": now.removed.filter(remembered),
    }
    lists = []
    for table in tables.values():
        rows = pa.concat_arrays(
            table.to_struct_array().chunks or [pa.array([], pa.struct(list(table.schema)))]
        )
        lists.append(pa.ListArray.from_arrays(pa.array([0, len(rows)], pa.int32()), rows))
    sink, row = pa.BufferOutputStream(), pa.table(lists, names=list(tables))
    with pq.ParquetWriter(sink, row.schema, compression="zstd") as writer:
        writer.write_table(row)
        writer.add_key_value_metadata({_SUM: _NO_SUM})
    content: bytes = sink.getvalue().to_pybytes()
    before, _, behind = content.rpartition(_NO_SUM)
    return before + _sum_of(content) + behind


def _sum_of(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _read_checkpoint(filesystem: fs.FileSystem, path: str, number: int) -> Log:
    with filesystem.open_input_stream(path) as stream:
        content = stream.read()
    file = pq.ParquetFile(pa.BufferReader(content))
    given = (file.metadata.metadata or {}).get(_SUM)  # None if the file was written before checksums existed
    if given is not None and (
        len(given) != len(_NO_SUM) or _sum_of(content.replace(given, _NO_SUM)) != given
    ):
        raise ValueError("the checksum of the file does not match")
    row = file.read()

    def rows(name: str, schema: pa.Schema) -> pa.Table:
        return pa.Table.from_struct_array(row[name].combine_chunks().flatten()).cast(schema)

    return Log(
        number,
        rows("ranges", _RANGES),
        rows("files", _FILES),
        rows("quarantine", _FILES),
        rows("removed", _REMOVED),
    )


class Checkpoints:
    """A writer of checkpoints, one after every CHECKPOINT_EVERY commits.

    If one cannot be written, `problem` has the reason, but no error is raised, because the commit has
    succeeded. The next is due after CHECKPOINT_EVERY further commits, or the first commit of the next run.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self._last = -1

    def begin(self, filesystem: fs.FileSystem, root: str) -> None:
        """Look up the newest existing checkpoint."""
        self._last = last_checkpoint(filesystem, root)

    def after(
        self, number: int, filesystem: fs.FileSystem, root: str, create: Callable[[str, bytes], object]
    ) -> None:
        """Write a checkpoint if one is due. `create` must create a complete file or none."""
        if number < self._last + CHECKPOINT_EVERY:
            return
        self._last, self.problem = number, None
        try:
            _sum_up(filesystem, root, create)
        except (OSError, ArchiveError, pa.ArrowException) as error:
            problem = error.problem if isinstance(error, ArchiveError) else str(error).partition("\n")[0]
            self.problem = f"the log has no checkpoint of batch {number}: {problem}"
            log.warning("%s: %s", root, self.problem)


def _sum_up(filesystem: fs.FileSystem, root: str, create: Callable[[str, bytes], object]) -> None:
    """Write a checkpoint, and delete the files that it makes unnecessary."""
    now = read_log(filesystem, root)
    if now.missing:
        raise ArchiveError(root, f"{commit_path(now.first_missing)} is missing")
    if now.last is None:
        return
    create(f"{root}/{checkpoint_path(now.last)}", checkpoint_content(now, now_utc()))
    for path in _covered(filesystem, root, now.checkpoint):
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{root}/{path}")


def _covered(filesystem: fs.FileSystem, root: str, before: int) -> list[str]:
    """Return the paths to delete after a checkpoint: those before `before`, and commits a day old."""
    written = {
        int(found[1]): info.mtime
        for info in listing(filesystem, f"{root}/{CHECKPOINTS}")
        if (found := _IS_CHECKPOINT.fullmatch(info.base_name))
    }
    if before < 0 or not written:
        return []
    now = written[max(written)]
    old = [checkpoint_path(number) for number in written if number < before]
    for info in listing(filesystem, f"{root}/{COMMITS}"):
        found = _IS_COMMIT.fullmatch(info.base_name)
        if found and int(found[1]) <= before and now and info.mtime and info.mtime < now - KEEP:
            old.append(commit_path(int(found[1])))
    return old


def now_utc() -> datetime:
    return datetime.now(UTC)

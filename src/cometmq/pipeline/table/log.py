"""The archive's log as readers need it: which files are the table, and which offsets are in them.

The log is the commit files, in order of their numbers. A commit adds `files` and `ranges`, and one of a
compaction also `removes` files. The live files are those added and not removed. A checkpoint holds what all
commits up to its number come to, so that a log of 100,000 commits is opened with about a hundred reads. The
commits of a day stay when a checkpoint covers them; older ones are deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from cometmq.pipeline.base.errors import ArchiveError

COMMITS = "_cometmq/commits"
CHECKPOINTS = "_cometmq/checkpoints"
CHECKPOINT_EVERY = 100
"""Commits from one checkpoint to the next."""
KEEP = timedelta(days=1)
"""How long a commit file stays that a checkpoint covers: a job that believes itself the only one must find
the number of its next commit taken."""
REMEMBERED = timedelta(days=30)
"""How long a checkpoint names removed files; the longest retention of these."""

_IS_COMMIT = re.compile(r"([0-9]{20})\.json")
_IS_CHECKPOINT = re.compile(r"([0-9]{20})\.parquet")
_TRIES = 5
_READS = 16  # at once

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
_FILES = pa.schema(
    [
        ("batch", pa.int64()),
        ("path", pa.string()),
        ("topic", pa.string()),
        ("dt", pa.string()),
        ("hour", pa.int32()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
_REMOVED = pa.schema([("path", pa.string()), ("time", pa.timestamp("ms", "UTC"))])


@dataclass(frozen=True, slots=True)
class Log:
    """What the commits up to number `last` come to (None: there is none)."""

    last: int | None
    ranges: pa.Table
    files: pa.Table  # live ones; `batch` is the newest of the batches whose messages are in the file
    quarantine: pa.Table  # the same for files of bad records, which have no topic
    removed: pa.Table  # files that a compaction has replaced, and when


def empty_log() -> Log:
    return Log(None, *(schema.empty_table() for schema in (_RANGES, _FILES, _FILES, _REMOVED)))


def read_log(filesystem: fs.FileSystem, root: str, upto: int | None = None) -> Log:
    """The log as it is now, or as it was after commit `upto`, which no checkpoint may cover."""
    for _ in range(_TRIES):
        newest = last_checkpoint(filesystem, root)
        try:
            log = _read_from(filesystem, root, newest, upto)
        except FileNotFoundError:
            continue
        # Commits are deleted behind a new checkpoint only, so this one's were all there.
        if newest == last_checkpoint(filesystem, root):
            return log
    raise ArchiveError(root, "the log changes faster than it can be read")


def _read_from(filesystem: fs.FileSystem, root: str, checkpoint: int, upto: int | None) -> Log:
    log = empty_log()
    if checkpoint >= 0:
        log = _read_checkpoint(filesystem, f"{root}/{checkpoint_path(checkpoint)}", checkpoint)
    numbers = sorted(
        number
        for number in _numbers(filesystem, f"{root}/{COMMITS}", _IS_COMMIT)
        if number > checkpoint and (upto is None or number <= upto)
    )

    def read(number: int) -> dict[str, Any]:
        return read_commit(filesystem, root, number)

    with ThreadPoolExecutor(_READS) as threads:
        return _after(log, list(threads.map(read, numbers)))


def read_commit(filesystem: fs.FileSystem, root: str, number: int) -> dict[str, Any]:
    """The content of one commit file."""
    with filesystem.open_input_stream(f"{root}/{commit_path(number)}") as stream:
        content: dict[str, Any] = json.loads(stream.read())
    return content


def last_checkpoint(filesystem: fs.FileSystem, root: str) -> int:
    """The number of the newest checkpoint, -1 if there is none."""
    return max(_numbers(filesystem, f"{root}/{CHECKPOINTS}", _IS_CHECKPOINT), default=-1)


def last_number(filesystem: fs.FileSystem, root: str) -> int | None:
    """The number of the newest commit."""
    return max(_numbers(filesystem, f"{root}/{COMMITS}", _IS_COMMIT), default=None)


def commit_path(number: int) -> str:
    return f"{COMMITS}/{number:020d}.json"


def checkpoint_path(number: int) -> str:
    return f"{CHECKPOINTS}/{number:020d}.parquet"


def _numbers(filesystem: fs.FileSystem, directory: str, form: re.Pattern[str]) -> list[int]:
    """A killed job may have left files of other names there: they are not read."""
    names = (info.base_name for info in listing(filesystem, directory))
    return [int(found[1]) for name in names if (found := form.fullmatch(name))]


def listing(filesystem: fs.FileSystem, path: str, *, recursive: bool = False) -> list[fs.FileInfo]:
    """What is in a directory; nothing if there is no such directory."""
    selector = fs.FileSelector(path, allow_not_found=True, recursive=recursive)
    infos: list[fs.FileInfo] = filesystem.get_file_info(selector)
    return infos


def _after(log: Log, commits: Sequence[dict[str, Any]]) -> Log:
    """The log with these commits behind it."""
    if not commits:
        return log
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

    def live(before: pa.Table, key: str) -> pa.Table:
        rows = [{"batch": commit["batch"]} | file for commit in commits for file in commit[key]]
        both = pa.concat_tables([before, pa.Table.from_pylist(rows, _FILES)])
        return both.filter(pc.invert(pc.is_in(both["path"], gone))) if removed else both

    return Log(
        commits[-1]["batch"],
        pa.concat_tables([log.ranges, pa.Table.from_pylist(ranges, _RANGES)]),
        live(log.files, "files"),
        live(log.quarantine, "quarantine"),
        pa.concat_tables([log.removed, pa.Table.from_pylist(removed, _REMOVED)]),
    )


def checkpoint_content(log: Log, now: datetime) -> bytes:
    """A Parquet file with one row, whose columns are lists of the log's rows."""
    remembered = pc.greater(log.removed["time"], pa.scalar(now - REMEMBERED, pa.timestamp("ms", "UTC")))
    tables = {
        "ranges": log.ranges,
        "files": log.files,
        "quarantine": log.quarantine,
        "removed": log.removed.filter(remembered),
    }
    lists = []
    for table in tables.values():
        rows = pa.concat_arrays(table.to_struct_array().chunks or [_no_rows(table.schema)])
        lists.append(pa.ListArray.from_arrays(pa.array([0, len(rows)], pa.int32()), rows))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(lists, names=list(tables)), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _no_rows(schema: pa.Schema) -> pa.Array:
    return pa.array([], pa.struct(list(schema)))


def _read_checkpoint(filesystem: fs.FileSystem, path: str, number: int) -> Log:
    with filesystem.open_input_file(path) as stream:
        row = pq.read_table(stream)

    def rows(name: str, schema: pa.Schema) -> pa.Table:
        return pa.Table.from_struct_array(row[name].combine_chunks().flatten()).cast(schema)

    return Log(
        number,
        rows("ranges", _RANGES),
        rows("files", _FILES),
        rows("quarantine", _FILES),
        rows("removed", _REMOVED),
    )


def covered(filesystem: fs.FileSystem, root: str, now: datetime) -> list[str]:
    """Paths that may be deleted after a checkpoint was written: commits of more than a day ago that the one
    before it covers too, and checkpoints before that."""
    numbers = sorted(_numbers(filesystem, f"{root}/{CHECKPOINTS}", _IS_CHECKPOINT))
    if len(numbers) < 2:
        return []
    before = numbers[-2]
    old = [checkpoint_path(number) for number in numbers[:-2]]
    for info in listing(filesystem, f"{root}/{COMMITS}"):
        found = _IS_COMMIT.fullmatch(info.base_name)
        if found and int(found[1]) <= before and info.mtime and info.mtime < now - KEEP:
            old.append(commit_path(int(found[1])))
    return old


def now_utc() -> datetime:
    return datetime.now(UTC)

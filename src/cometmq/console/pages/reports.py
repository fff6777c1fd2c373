"""Results of pipeline jobs in and below a directory: reports, summaries, tables.

The console only reads files, and only below the directory: no part of a path may be a symbolic link.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import msgspec

from cometmq.errors import CometError

MAX_ENTRIES, MAX_ROWS, MAX_DEPTH = 20_000, 2_000, 5
MAX_FILE_BYTES = 8 << 20
"""Maximum size of a file that is shown, in bytes."""
MAX_SUMMARY_BYTES = 1 << 20
HEAD_BYTES = 4096
JOB_FILE = "_cometmq_job.json"
"""Name of the file, in the directory of a job's tables, that contains the job's name."""
ARCHIVE_LOG = "_cometmq"
"""Name of the directory with commit records. Each archive that a pipeline job writes contains it."""
KINDS = {".html": "report", ".json": "summary"}
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TITLE = re.compile(r"<title>([^<]{1,500})</title>", re.IGNORECASE)


class ReportError(CometError):
    """A path below the directory of reports cannot be shown."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path or 'the directory of reports'}: {self.problem}"


@dataclass(frozen=True)
class JobResult:
    """A result of a job.

    Attributes:
        path: Path relative to the directory of reports, separated by "/".
        kind: `report` (HTML), `summary` (JSON) or `tables`.
        name: Name of the job, or title of the report.
        complete: Whether the job's result is complete; None if that is unknown.
        size: Size of a file in bytes; None for tables.
        at_ms: Time of the last change, in ms since 1970.
    """

    path: str
    kind: str
    name: str
    complete: bool | None
    size: int | None
    at_ms: int


class _Summary(msgspec.Struct):
    """A job's JSON summary. All fields except `complete` are ignored."""

    complete: bool | None = None


@dataclass(frozen=True)
class JobResults:
    """The results in and below a directory. `truncated` is True if there are more results."""

    rows: list[JobResult]
    truncated: bool = False


class Scanner:
    """A scanner of the directory of job results. One scan runs at a time, and reads only changed files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: _Known = {}

    def scan(self) -> JobResults:
        """Return the results of jobs. Call it in a thread. Raises ReportError."""
        search = _Search(self._known)
        with _opened(self._root, "") as descriptor:
            rows = search.below(descriptor, "", MAX_DEPTH)
        self._known = search.seen
        return JobResults(rows, search.left <= 0 or len(rows) > MAX_ROWS)


def read(root: Path, path: str) -> tuple[JobResult, bytes]:
    """Return the report or summary at a path, and the content of its file. It blocks: call it in a thread.

    Raises ReportError if there is no report or summary at the path.
    """
    parent, _, name = path.rpartition("/")
    kind = KINDS.get(os.path.splitext(name)[1])
    if kind is None:
        raise ReportError(path, "not a report")
    with _opened(root, parent) as directory:
        try:
            descriptor = os.open(_checked(name, path), _FILE, dir_fd=directory)
        except OSError as error:
            raise ReportError(path, error.strerror or "cannot be read") from None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ReportError(path, "not a file")
            if status.st_size > MAX_FILE_BYTES:
                raise ReportError(path, f"{status.st_size} bytes exceed the limit of {MAX_FILE_BYTES}")
            data = file.read(MAX_FILE_BYTES)
    return _result(path, kind, data, status), data


_Known = dict[str, tuple[tuple[int, ...], JobResult]]
"""For each file, by path: the file's identity when it was last read, and the result that it contained."""


class _Search:
    def __init__(self, known: _Known) -> None:
        self.left = MAX_ENTRIES
        self.seen: _Known = {}
        self._known = known

    def below(self, directory: int, path: str, depth: int) -> list[JobResult]:
        """Return the results in a directory and below it. Results that cannot be read are omitted."""
        rows: list[JobResult] = []
        names = []
        for entry in _entries(directory):
            self.left -= 1
            if self.left <= 0:
                break
            if not entry.name.startswith(".") and not entry.is_symlink():
                names.append((entry.name, entry.is_dir(follow_symlinks=False)))
        known = {name for name, _ in names}
        if JOB_FILE in known or ARCHIVE_LOG in known:
            rows.append(_tables(directory, path, names))
        for name, is_directory in sorted(names):
            if self.left <= 0 or len(rows) > MAX_ROWS:
                break
            where = f"{path}/{name}" if path else name
            kind = KINDS.get(os.path.splitext(name)[1])
            if is_directory and depth and not name.startswith("_") and "=" not in name:
                with suppress(OSError), _opened_at(directory, name) as inner:
                    rows += self.below(inner, where, depth - 1)
            elif kind is not None and not is_directory and name != JOB_FILE:
                with suppress(OSError):
                    rows.append(self._file(directory, name, where, kind))
        return rows

    def _file(self, directory: int, name: str, path: str, kind: str) -> JobResult:
        """Return the job result that a file describes. An unchanged file is not read again.

        Raises OSError.
        """
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        identity = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
        before = self._known.get(path)
        if before is None or before[0] != identity:
            before = identity, _peek(directory, name, path, kind)
        self.seen[path] = before
        return before[1]


def _peek(directory: int, name: str, path: str, kind: str) -> JobResult:
    """Read the beginning of a file and return the job result that it describes. Raises OSError."""
    with os.fdopen(os.open(name, _FILE, dir_fd=directory), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a file")
        length = HEAD_BYTES if kind == "report" else min(status.st_size, MAX_SUMMARY_BYTES)
        return _result(path, kind, file.read(length), status)


def _result(path: str, kind: str, data: bytes, status: os.stat_result) -> JobResult:
    name, complete = os.path.basename(path), None
    if kind == "report":
        if title := _TITLE.search(data[:HEAD_BYTES].decode("utf-8", "replace")):
            name = unescape(title[1])
    else:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            complete = msgspec.json.decode(data, type=_Summary).complete
    return JobResult(path, kind, name, complete, status.st_size, status.st_mtime_ns // 1_000_000)


def _tables(directory: int, path: str, names: list[tuple[str, bool]]) -> JobResult:
    """Return a result for the tables of a job. It is complete if Spark has finished every table."""
    job = "archive"
    with suppress(OSError, msgspec.MsgspecError):
        descriptor = os.open(JOB_FILE, _FILE, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as file:
            job = str(msgspec.json.decode(file.read(HEAD_BYTES), type=dict[str, object]).get("job", ""))[:100]
    latest, states = os.fstat(directory).st_mtime_ns, []
    for name, is_directory in names:
        if not is_directory:
            continue
        with suppress(OSError), _opened_at(directory, name) as inner:
            latest = max(latest, os.fstat(inner).st_mtime_ns)
            if _exists(inner, "_SUCCESS"):
                states.append(True)
            elif _exists(inner, "_temporary"):
                states.append(False)
    return JobResult(path or ".", "tables", job, all(states) if states else None, None, latest // 1_000_000)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _entries(directory: int) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except OSError:
        return


@contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    """Open a directory below the root, refusing symbolic links in its path. Raises ReportError."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in path.split("/") if path else ():
                inner = os.open(_checked(part, path), _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ReportError(path, error.strerror or "cannot be read") from None


@contextmanager
def _opened_at(directory: int, name: str) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _checked(name: str, path: str) -> str:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ReportError(path, "no such report")
    return name

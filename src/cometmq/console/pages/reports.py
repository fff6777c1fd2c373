"""What jobs of the pipeline have left below a directory: reports, summaries, tables. They are only read, and
nothing outside of it: no part of a path may be a link.
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

ENTRIES_MAX, ROWS_MAX, DEPTH_MAX = 20_000, 2_000, 5
FILE_MAX = 8 << 20
"""Bytes of a file that is shown."""
HEAD = 4096
MARK = "_cometmq_job.json"
"""In the directory of a job's tables: its name."""
ARCHIVE = "_cometmq"
"""In the directory of an archive: its log."""
KINDS = {".html": "report", ".json": "summary"}
_TITLE = re.compile(r"<title>([^<]{1,500})</title>", re.IGNORECASE)


class ReportError(CometError):
    """Something below the directory of reports that cannot be shown."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path or 'the directory of reports'}: {self.problem}"


@dataclass(frozen=True)
class Work:
    """What a job has left. path: below the directory, with /; kind: report (HTML), summary (JSON) or tables;
    name: of the job, or a report's title; whole: None where that cannot be told; size: bytes of a file, None
    of tables; at_ms: when it was last written."""

    path: str
    kind: str
    name: str
    whole: bool | None
    size: int | None
    at_ms: int


class _Summary(msgspec.Struct):
    """What is read of the JSON of a job. Nothing is made of its other values, however many they are."""

    complete: bool | None = None


@dataclass(frozen=True)
class Works:
    """All that was found; partly: there is more."""

    rows: list[Work]
    partly: bool = False


class Finder:
    """Looks below a directory again and again, one look at a time. A file that has not changed since the look
    before is not read again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: _Known = {}

    def find(self) -> Works:
        """What jobs have left there; for a thread. Raises ReportError."""
        search = _Search(self._known)
        with _opened(self._root, "") as descriptor:
            rows = search.below(descriptor, "", DEPTH_MAX)
        self._known = search.seen
        return Works(rows, search.left <= 0 or len(rows) > ROWS_MAX)


def read(root: Path, path: str) -> tuple[Work, bytes]:
    """A report or summary with its content; for a thread. Raises ReportError for what is none, or lies
    elsewhere."""
    parent, _, name = path.rpartition("/")
    kind = KINDS.get(os.path.splitext(name)[1])
    if kind is None:
        raise ReportError(path, "this is no report")
    with _opened(root, parent) as directory:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(_checked(name, path), flags, dir_fd=directory)
        except OSError as error:
            raise ReportError(path, error.strerror or "it cannot be read") from None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ReportError(path, "this is no file")
            if status.st_size > FILE_MAX:
                raise ReportError(path, f"{status.st_size} bytes are more than can be shown ({FILE_MAX})")
            data = file.read(FILE_MAX)
    return _work(path, kind, data, status), data


_Known = dict[str, tuple[tuple[int, ...], Work]]
"""Path -> what told its state when it was read, and what it was."""


class _Search:
    def __init__(self, known: _Known) -> None:
        self.left = ENTRIES_MAX
        self.seen: _Known = {}
        self._known = known

    def below(self, directory: int, path: str, depth: int) -> list[Work]:
        """What lies in a directory and below it. What cannot be read is left out."""
        rows: list[Work] = []
        names = []
        for entry in _entries(directory):
            self.left -= 1
            if self.left <= 0:
                break
            if not entry.name.startswith(".") and not entry.is_symlink():
                names.append((entry.name, entry.is_dir(follow_symlinks=False)))
        known = {name for name, _ in names}
        if MARK in known or ARCHIVE in known:
            rows.append(_tables(directory, path, names))
        for name, is_directory in sorted(names):
            if self.left <= 0 or len(rows) > ROWS_MAX:
                break
            where = f"{path}/{name}" if path else name
            kind = KINDS.get(os.path.splitext(name)[1])
            if is_directory and depth and not name.startswith("_") and "=" not in name:
                with suppress(OSError), _opened_at(directory, name) as inner:
                    rows += self.below(inner, where, depth - 1)
            elif kind is not None and not is_directory and name != MARK:
                with suppress(OSError):
                    rows.append(self._file(directory, name, where, kind))
        return rows

    def _file(self, directory: int, name: str, path: str, kind: str) -> Work:
        """Raises OSError."""
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        mark = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
        before = self._known.get(path)
        if before is None or before[0] != mark:
            before = mark, _peek(directory, name, path, kind)
        self.seen[path] = before
        return before[1]


def _peek(directory: int, name: str, path: str, kind: str) -> Work:
    """A file by its beginning. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("no file")
        return _work(
            path, kind, file.read(HEAD if kind == "report" else min(status.st_size, 1 << 20)), status
        )


def _work(path: str, kind: str, data: bytes, status: os.stat_result) -> Work:
    name, whole = os.path.basename(path), None
    if kind == "report":
        if title := _TITLE.search(data[:HEAD].decode("utf-8", "replace")):
            name = unescape(title[1])
    else:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            whole = msgspec.json.decode(data, type=_Summary).complete
    return Work(path, kind, name, whole, status.st_size, status.st_mtime_ns // 1_000_000)


def _tables(directory: int, path: str, names: list[tuple[str, bool]]) -> Work:
    """A job's directory of tables: whole, as Spark says it of each that it writes."""
    job = "archive"
    with suppress(OSError, msgspec.MsgspecError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(os.open(MARK, flags, dir_fd=directory), "rb") as file:
            job = str(msgspec.json.decode(file.read(HEAD), type=dict[str, object]).get("job", ""))[:100]
    latest, states = os.fstat(directory).st_mtime_ns, []
    for name, is_directory in names:
        if not is_directory:
            continue
        with suppress(OSError), _opened_at(directory, name) as inner:
            latest = max(latest, os.fstat(inner).st_mtime_ns)
            if _is_there(inner, "_SUCCESS"):
                states.append(True)
            elif _is_there(inner, "_temporary"):
                states.append(False)
    return Work(path or ".", "tables", job, all(states) if states else None, None, latest // 1_000_000)


def _is_there(directory: int, name: str) -> bool:
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
    """A directory below the root, part by part, none of them a link. Raises ReportError."""
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
        raise ReportError(path, error.strerror or "it cannot be read") from None


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def _opened_at(directory: int, name: str) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _checked(name: str, path: str) -> str:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ReportError(path, "there is no such report")
    return name

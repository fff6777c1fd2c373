"""The archive's directory: standard Parquet files, and a log of commits that defines the table exactly.

    output/topic=orders/dt=2026-11-21/hour=11/<name>.parquet      the table
    output/_cometmq/archive.json                                  the kind of this directory
    output/_cometmq/commits/00000000000000000000.json             one line of JSON per batch, in order
    output/_cometmq/checkpoints/00000000000000000099.parquet      all commits up to this one, merged
    output/_cometmq/published                                     the last batch with all files in the table
    output/_cometmq/staging/<run>/…                               files of batches that are not committed yet
    output/_cometmq/quarantine/<name>.parquet                     records that could not be decoded

Spark, Hive and pyarrow ignore names that begin with `_` when they read the directory. A batch becomes part of
the table in one step, the creation of its commit file. Then its files are renamed from staging into the
table, and `published` records that all of them are there. If the job fails or dies in between, its staging
directory remains and the next run completes the renames, so each file is in the table exactly once. Files
without a commit are never renamed, and the next run deletes them.

Object stores cannot rename. There, tasks write files under their final names, the commit file is created by a
conditional put (objects.py), and nothing is published: readers use only the log. A compaction deletes files
without a commit when they are too old to belong to a running job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table import log as table_log
from cometmq.pipeline.table.log import Checkpoints, Log, commit_path, listing, read_commit, read_log
from cometmq.pipeline.table.objects import conditional_put, shown
from cometmq.pipeline.table.small_files import UncertainWrite, create_file, read_json

log = logs.logger(__name__)

FORMAT = 1
_WRITTEN = re.compile(r"(part|bad)-[0-9a-f]{32}\.parquet")
_OF_ONE_BATCH = {"batch", "run", "by", "time", "seconds", "ranges", "files", "quarantine", "removes"}
_STALE_S = 24 * 3600.0
UNNAMED_FOR = timedelta(days=1)
"""Time for which files without a commit are kept. No batch may take longer than this."""
_HOME = "_cometmq"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""Error numbers of file systems that do not support locks: NFS without a lock daemon, Lustre, FUSE, 9p …"""


class Table(ABC):
    """A table to which an archive job commits its batches: a directory with the archive's own files.

    `output` is a path, or a URI that pyarrow supports (file, hdfs, s3, gs …).
    """

    kind: str
    """Name of the table format, such as "delta"."""
    topic_in_files: bool
    """Whether the files hold the column `topic`. Otherwise the topic is only in their paths."""

    def __init__(self, output: str) -> None:
        self.filesystem, self.root = open_filesystem(output)
        # The path is made absolute, because workers may have another working directory.
        self.uri = output if "://" in output else self.root
        self.output = shown(self.uri)
        """The table's location, for display."""
        self.run_id = uuid.uuid4().hex[:12]
        self.checkpoints = Checkpoints()

    @abstractmethod
    def prepare(self) -> dict[str, Any] | None:
        """Create the table, or check an existing one. Return the last commit, or None if there is none."""

    def staging(self, _batch: int) -> str:
        """Return the new directory of a batch's files, relative to the output. "": their final places."""
        return ""

    @abstractmethod
    def commit(self, commit: dict[str, Any]) -> None:
        """Make a batch part of the table in one step. Raises ArchiveError if another job took its number."""

    @abstractmethod
    def vacuum(self, retention: timedelta) -> int:
        """Delete files that no commit names and that are no longer needed. Return their number."""

    def close(self) -> None:
        """Release the resources of the table, such as its lock."""
        return

    def described(self, batch: int, seconds: float) -> dict[str, Any]:
        """Return the facts about a batch with which its commit begins."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        by = {"run": self.run_id, "by": this_process(), "time": now}
        return {"batch": batch, **by, "seconds": round(seconds, 3)}

    def _make_directory(self, relative: str) -> None:
        """Create a directory of the archive. Raises ConfigError if that is impossible."""
        try:
            self.filesystem.create_dir(self._at(relative), recursive=True)
        except (FileExistsError, NotADirectoryError) as error:
            expected = f"a directory ({error.strerror or error})"
            raise ConfigError("output", self.output, expected) from None

    def _check_unused(self) -> None:
        """Raise ArchiveError if the directory, which holds no archive, holds other files."""
        names = [info.base_name for info in listing(self.filesystem, self.root)]
        others = [name for name in names if not name.startswith(("_", "."))]
        if others:
            problem = f"the directory contains files that no archive job wrote ({others[0]} …)"
            raise ArchiveError(self.output, problem)

    def _check_files(self, commit: dict[str, Any]) -> None:
        for file in _files(commit):
            where = file.get("staged", file["path"])
            if not self._has(self._at(where)):
                raise ArchiveError(self.output, f"{where} was removed before its batch was committed")

    def _unnamed(self) -> tuple[dict[str, datetime], Log]:
        """Return the files that tasks wrote under final names but no commit names, and the log.

        The files have their modification times. Raises ArchiveError if the log lacks a commit: its files
        would look as if no batch had committed them, and would be deleted.
        """
        # The files are listed before the log is read. Otherwise a file that is committed in between would be
        # listed but not named by the log, as if no commit had added it.
        tops = [
            info.path for info in listing(self.filesystem, self.root) if info.base_name.startswith("topic=")
        ]
        found = {
            info.path: info.mtime or datetime.max.replace(tzinfo=UTC)
            for top in (*tops, self._at(_HOME, "quarantine"))
            for info in listing(self.filesystem, top, recursive=True)
            if _WRITTEN.fullmatch(info.base_name)
        }
        log = read_log(self.filesystem, self.root)
        if log.missing:
            problem = f"{commit_path(log.first_missing)} is missing: the files of the archive are unknown"
            raise ArchiveError(self.output, f"{problem}, so none is deleted")
        for path in (*log.files["path"].to_pylist(), *log.quarantine["path"].to_pylist()):
            found.pop(self._at(path), None)
        return found, log

    def _store_now(self) -> datetime:
        """Return the time by the clock of the archive's store, which sets the times of files."""
        path = self._at(_HOME, "clock")
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(b"-")
        return self.filesystem.get_file_info(path).mtime or table_log.now_utc()

    def _delete_files(self, paths: Collection[str]) -> int:
        for path in paths:
            try:
                self.filesystem.delete_file(path)
            except OSError:  # HDFS, for one, does not tell that there is no such file
                if self._has(path):
                    raise
        return len(paths)

    def _has(self, path: str) -> bool:
        return bool(self.filesystem.get_file_info(path).type != fs.FileType.NotFound)

    def _at(self, *parts: str) -> str:
        return "/".join((self.root, *parts))


class ArchiveTable(Table):
    """An archive directory of Parquet files."""

    kind, topic_in_files = "parquet", False

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self._put = conditional_put(output, self.filesystem)
        self._lock_file: int | None = None
        self._committing = False  # Whether a commit may exist whose files are not all in the table

    @property
    def direct(self) -> bool:
        """Whether tasks write files under their final names, as on object stores."""
        return self._put is not None

    def exists(self) -> bool:
        """Return whether the directory holds an archive."""
        return self._has(self._at(_HOME, "archive.json"))

    def prepare(self) -> dict[str, Any] | None:
        """Create or check the directory, complete the work of a failed run, and return the last commit.

        The result is None if there is no batch yet. Raises ArchiveError if another job is using the
        directory, or if a committed file is missing; the lock is then released.
        """
        try:
            return self._prepared()
        except BaseException:
            self.abandon()
            raise

    def _prepared(self) -> dict[str, Any] | None:
        if not self.direct:
            for directory in (table_log.COMMITS, table_log.CHECKPOINTS):
                self._make_directory(directory)
            self._lock()
        self._check_kind()
        last = self.last_commit()
        if not self.direct:
            # Files of published batches are not checked, because they belong to the archive's owner, who may
            # delete old days.
            if last is not None and self._published() < last["batch"]:
                self.publish(last)
            self._delete_stale_staging()
        self.checkpoints.begin(self.filesystem, self.root)
        return last

    def _lock(self) -> None:
        """Acquire the lock that excludes other jobs on a local disk.

        The kernel releases the lock when the process ends. On a file system without locks, the second job
        fails at its commit instead, as on remote stores.
        """
        if not isinstance(self.filesystem, fs.LocalFileSystem):
            return
        self._lock_file = os.open(self._at(_HOME, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_file, 300, 0).decode(errors="replace")
            self.abandon()
            problem = f"another archive job is running on this directory: {holder or 'its name is not known'}"
            raise ArchiveError(self.output, problem) from None
        except OSError as error:
            self.abandon()
            if error.errno not in _NO_LOCKS:
                raise ArchiveError(
                    self.output, f"the directory cannot be locked: {error.strerror}"
                ) from error
            problem = "%s is on a file system without locks (%s): run one archive job at a time there"
            log.warning(problem, self.output, error.strerror)
        else:
            os.truncate(self._lock_file, 0)
            os.pwrite(self._lock_file, this_process().encode(), 0)

    def abandon(self) -> None:
        """Release the lock and leave all files as they are, as if the process had been killed."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _check_kind(self) -> None:
        path = self._at(_HOME, "archive.json")
        if not self.exists():
            self._check_unused()
            # If two jobs create an archive at the same time, only one of them succeeds in creating this file.
            self._create(path, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode())
        found = (read_json(self.filesystem, path) or {}).get("format")
        if found != FORMAT:
            problem = f"an archive of format {found}: name it (--format {found}, or table_format)"
            if isinstance(found, int):
                problem = f"an archive of format {found}; this program knows format {FORMAT}"
            raise ArchiveError(self.output, problem)
        if self._put is not None:
            self._try_put(path)

    def _try_put(self, path: str) -> None:
        """Test that the conditional put refuses an existing file: some stores ignore the condition."""
        assert self._put is not None
        with self.filesystem.open_input_stream(path) as stream:
            content = stream.read()
        try:
            ignored = self._put(path, content)
        except OSError as error:
            raise ArchiveError(self.output, f"the object store rejects a conditional put: {error}") from None
        if ignored:
            problem = "the object store ignores If-None-Match, so two jobs could commit the same batch"
            raise ArchiveError(self.output, problem)

    def last_commit(self) -> dict[str, Any] | None:
        """Return the newest commit, or None if there is none."""
        number = table_log.last_number(self.filesystem, self.root)
        return None if number is None else read_commit(self.filesystem, self.root, number)

    def log(self) -> Log:
        """Return the log as readers see it, without commits whose files are not all renamed yet."""
        upto = None if self.direct else self._published()
        return read_log(self.filesystem, self.root, upto if upto != -1 else None)

    def staging(self, batch: int) -> str:
        if self.direct:
            return ""
        relative = f"{_HOME}/staging/{self.run_id}/{batch}"
        self.filesystem.create_dir(self._at(relative), recursive=True)
        return relative

    def commit(self, commit: dict[str, Any]) -> None:
        """Make a batch part of the table.

        On object stores, a compaction and an archive job may run concurrently: the job that commits second
        uses the next number and writes it into `commit`.
        """
        self._check_files(commit)
        self._committing = True
        while not self._create(self._at(commit_path(commit["batch"])), json.dumps(commit).encode() + b"\n"):
            self._let_pass(commit)
        if not self.direct:
            self.publish(commit)
            self._delete(self._at(_HOME, "staging", self.run_id, str(commit["batch"])))
        self._committing = False
        self.checkpoints.after(commit["batch"], self.filesystem, self.root, self._create)

    def _let_pass(self, commit: dict[str, Any]) -> None:
        """Take the next number, as another job took this one. Raises ArchiveError if the two conflict."""
        path = commit_path(commit["batch"])
        other = read_commit(self.filesystem, self.root, commit["batch"])
        merges, merged = set(commit.get("removes", ())), set(other.get("removes", ()))
        if not self.direct or not (merges or merged) or merges & merged:
            problem = f"{path} exists: another job writes to this archive ({author(other)})"
            raise ArchiveError(self.output, problem)
        commit["batch"] += 1
        if merges:
            commit.update(carried(other))

    def publish(self, commit: dict[str, Any]) -> None:
        """Move a commit's files from staging to their final paths, unless they are there.

        In each directory, the files that the commit removes are deleted first: a reader that does not use the
        log may miss rows for a moment, but never reads rows twice.
        """
        batch = commit["batch"]
        steps = [(os.path.dirname(path), path, "") for path in commit.get("removes", ())]
        steps += [(os.path.dirname(file["path"]), file["path"], file["staged"]) for file in _files(commit)]
        for _, path, staged in sorted(steps, key=lambda step: (step[0], bool(step[2]))):
            if staged:
                self.move(staged, path, batch)
            else:
                self._delete_files([self._at(path)])
        # The batch number is written over the previous one in place. A reader that finds only the first
        # digits of the number takes them for a lower number. In the worst case, the files of some batches
        # are therefore checked a second time.
        with self.filesystem.open_output_stream(self._at(_HOME, "published")) as stream:
            stream.write(str(batch).encode())

    def move(self, staged: str, path: str, batch: int) -> None:
        """Move a file of a batch into the table, unless it has already been moved."""
        source, target = self._at(staged), self._at(path)
        self.filesystem.create_dir(os.path.dirname(target), recursive=True)
        try:
            self.filesystem.move(source, target)
        except OSError:
            if self._has(source):
                raise
            if not self._has(target):
                raise ArchiveError(
                    self.output,
                    f"a file of batch {batch} is committed, but neither {path} nor {staged} exists. "
                    f"If the file was removed on purpose, write {batch} to {_HOME}/published",
                ) from None

    def _published(self) -> int:
        """Return the last batch whose files have all been moved into the table, or -1 if it is unknown."""
        try:
            with self.filesystem.open_input_stream(self._at(_HOME, "published")) as stream:
                return int(stream.read())
        except (FileNotFoundError, ValueError):
            return -1

    def _delete_stale_staging(self) -> None:
        """Remove staging directories of dead runs: without a lock, only the old ones."""
        oldest = 0.0 if self._lock_file is not None else _STALE_S
        for info in listing(self.filesystem, self._at(_HOME, "staging")):
            if time.time() - (info.mtime.timestamp() if info.mtime else 0.0) >= oldest:
                self._delete(info.path)

    def close(self) -> None:
        """Remove this run's staging directory unless a commit may need it, and release the lock."""
        try:
            if not self._committing and not self.direct:
                self._delete(self._at(_HOME, "staging", self.run_id))
        finally:
            self.abandon()

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.filesystem.delete_dir(path)

    def vacuum(self, retention: timedelta, unnamed: timedelta = UNNAMED_FOR) -> int:
        """Delete files of an object store that are no longer needed, and return their number.

        These are files that were removed from the table more than `retention` ago, and files that no commit
        names and that are older than both `retention` and `unnamed`: the jobs that wrote them failed or died.
        """
        if not self.direct:
            return 0
        found, log = self._unnamed()
        removed = {self._at(row["path"]): row["time"] for row in log.removed.to_pylist()}
        # A job's clock set the time at which a file was removed, so that limit is computed with this
        # machine's clock. The store's clock set the time at which a file was written, so that limit is
        # computed with the store's clock.
        replaced, left = table_log.now_utc() - retention, self._store_now() - max(retention, unnamed)
        old = [
            path
            for path, written in found.items()
            if (removed[path] <= replaced if path in removed else written <= left)
        ]
        return self._delete_files(old)

    def _create(self, path: str, content: bytes) -> bool:
        try:
            return create_file(self.filesystem, path, content, self._put)
        except UncertainWrite as error:
            raise ArchiveError(self.output, str(error)) from None


def open_filesystem(output: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a local path or a URI, and the path on that file system."""
    if "://" not in output:
        return fs.LocalFileSystem(), os.path.abspath(output)
    try:
        filesystem, path = fs.FileSystem.from_uri(output)
    except pa.ArrowInvalid as error:  # The error's text may contain a key and a secret
        problem = str(error).replace(output, shown(output))
        for secret in filter(None, (urlsplit(output).username, urlsplit(output).password)):
            problem = problem.replace(secret, "…")
        raise ConfigError("output", shown(output), f"a URI that pyarrow knows ({problem})") from None
    return filesystem, path.rstrip("/")


def carried(commit: dict[str, Any]) -> dict[str, Any]:
    """Return what a compaction copies from a commit, because the archive job reads the newest commit."""
    return {key: value for key, value in commit.items() if key not in _OF_ONE_BATCH}


def this_process() -> str:
    """Return a name by which other users of the directory can identify this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def author(commit: Mapping[str, Any]) -> str:
    """Return the job and time of a commit as text. Commits of older versions lack some fields."""
    by = f"{commit['by']}, " if "by" in commit else ""
    at = f" at {commit['time']}" if "time" in commit else ""
    return f"{by}run {commit.get('run', '?')}, batch {commit['batch']}{at}"


def _files(commit: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a commit's files, with their final `path` and, if they have one, the path in `staged`."""
    return [*commit["files"], *commit["quarantine"]]


_ESCAPED = set("\"#%'*/:=?\\\x7f{[]^") | {chr(code) for code in range(32)}


NULL = "__HIVE_DEFAULT_PARTITION__"
"""Directory name for a partition value that is null."""
LONGEST_VALUE = 255 - len("topic=")
"""Maximum bytes of a partition's value in a directory's name."""


def partition_value(text: str) -> str:
    """Escape a value for a directory's name as Hive and Spark do (`%RETRY%g` becomes `%25RETRY%25g`).

    The name that stands for null is also a valid topic name, so a topic of that name is escaped, too.
    """
    if text == NULL:
        return f"%{ord(text[0]):02X}{text[1:]}"
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)

"""The archive's directory: Parquet files that every reader understands, and a log of commits that makes it
exact.

    output/topic=orders/dt=2026-11-21/hour=11/<name>.parquet      the table
    output/_cometmq/archive.json                                  what this directory is
    output/_cometmq/commits/00000000000000000000.json             one line of JSON a batch, in order
    output/_cometmq/published                                     up to which batch all files are in the table
    output/_cometmq/staging/<run>/…                               files of batches that are not committed yet
    output/_cometmq/quarantine/<name>.parquet                     records that could not be decoded

Names that begin with `_` are invisible to Spark, Hive, DuckDB and pyarrow when they read the directory. A
batch becomes part of the table in one step, the creation of its commit file; then its files are renamed from
staging into the table, and `published` says so. If the job fails or dies in between, its staging directory is
left in place and the next run finishes the renames, so each file is in the table exactly once. Files
without a commit are never renamed, and deleted by the next run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
import uuid
from typing import Any

from pyarrow import fs

from cometmq import logs
from cometmq.pipeline.base.errors import ArchiveError

log = logs.logger(__name__)

FORMAT = 1
COMMIT_NAME = "[0-9]" * 20 + ".json"
"""What commit files are called, as a glob of Hadoop's. Nothing else in their directory is read: a killed job
may have left a temporary file there."""

_IS_COMMIT = re.compile(COMMIT_NAME.replace(".", r"\."))
_STALE_S = 24 * 3600.0
_HOME = "_cometmq"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""Answers of file systems without locks: NFS without a lock daemon, Lustre, FUSE, 9p …"""


class ArchiveTable:
    """One archive directory; `output` is a path, or a URI that pyarrow knows (file, hdfs, s3, gs …)."""

    def __init__(self, output: str) -> None:
        self.filesystem, self.root = open_filesystem(output)
        # Workers may have another working directory: they are given the absolute path.
        self.output = output if "://" in output else self.root
        self.run_id = uuid.uuid4().hex[:12]
        self._lock_file: int | None = None
        self._committing = False  # a commit file may exist whose files are not all published

    def prepare(self) -> dict[str, Any] | None:
        """Create or check the directory, finish what a failed or killed run left, and return the last commit
        (None: no batch yet).

        Raises ArchiveError if another job has the directory, or if a committed file is nowhere to be found.
        """
        self.filesystem.create_dir(self._at(_HOME, "commits"), recursive=True)
        self._lock()
        self._check_kind()
        last = self.last_commit()
        # Once published, files are their owner's, who may compact them or drop old days.
        if last is not None and self._published() < last["batch"]:
            self.publish(last)
        self._delete_stale_staging()
        return last

    def _lock(self) -> None:
        """Let one job work at a time on a local disk; the kernel drops the lock however the process ends.
        Where the disk has no locks, the second job fails when it commits, as on stores that are not local."""
        if not isinstance(self.filesystem, fs.LocalFileSystem):
            return
        self._lock_file = os.open(self._at(_HOME, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.abandon()
            raise ArchiveError(self.output, "another archive job is running on this directory") from None
        except OSError as error:
            self.abandon()
            if error.errno not in _NO_LOCKS:
                raise ArchiveError(self.output, f"cannot be locked: {error.strerror}") from error
            problem = "%s is on a file system without locks (%s): run one archive job at a time there"
            log.warning(problem, self.output, error.strerror)

    def abandon(self) -> None:
        """Release the lock and leave all files as they are, as a killed process does."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _check_kind(self) -> None:
        path = self._at(_HOME, "archive.json")
        if self._exists(path):
            kind = self._read_json("archive.json")
            if kind.get("format") != FORMAT:
                raise ArchiveError(
                    self.output, f"an archive of format {kind.get('format')}; this is format {FORMAT}"
                )
            return
        others = [
            info.base_name for info in self._listing(self.root) if not info.base_name.startswith(("_", "."))
        ]
        if others:
            raise ArchiveError(self.output, f"holds files that no archive job wrote ({others[0]} …)")
        self._write_new(path, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode())

    def last_commit(self) -> dict[str, Any] | None:
        """The newest commit, or None."""
        names = (info.base_name for info in self._listing(self._at(_HOME, "commits")))
        name = max(filter(_IS_COMMIT.fullmatch, names), default=None)
        return None if name is None else self._read_json("commits", name)

    def _read_json(self, *parts: str) -> dict[str, Any]:
        with self.filesystem.open_input_stream(self._at(_HOME, *parts)) as stream:
            content: dict[str, Any] = json.loads(stream.read())
        return content

    def staging(self, batch: int) -> str:
        """A new directory for the files of this batch, relative to the output directory."""
        relative = f"{_HOME}/staging/{self.run_id}/{batch}"
        self.filesystem.create_dir(self._at(relative), recursive=True)
        return relative

    def commit(self, commit: dict[str, Any]) -> None:
        """Make a batch part of the table. Raises ArchiveError if another job committed its number first."""
        for file in _files(commit):
            if not self._exists(self._at(file["staged"])):
                raise ArchiveError(self.output, f"{file['staged']} is gone before its batch was committed")
        name = f"{commit['batch']:020d}.json"
        self._committing = True
        self._write_new(self._at(_HOME, "commits", name), json.dumps(commit).encode() + b"\n")
        self.publish(commit)
        self._delete(self._at(_HOME, "staging", self.run_id, str(commit["batch"])))
        self._committing = False

    def publish(self, commit: dict[str, Any]) -> None:
        """Move a commit's files from staging to their places; what lies there already is left."""
        for file in _files(commit):
            self.move(file["staged"], file["path"], commit["batch"])
        # Written over what was there: half a number is a lower one, and files are looked for once more.
        with self.filesystem.open_output_stream(self._at(_HOME, "published")) as stream:
            stream.write(str(commit["batch"]).encode())

    def move(self, staged: str, path: str, batch: int) -> None:
        """Move a file of a batch into the table, if that was not done before."""
        source, target = self._at(staged), self._at(path)
        self.filesystem.create_dir(os.path.dirname(target), recursive=True)
        try:
            self.filesystem.move(source, target)
        except OSError:
            if self._exists(source):
                raise
            if not self._exists(target):
                raise ArchiveError(
                    self.output,
                    f"{path} of batch {batch} is committed, but neither there nor at {staged}. "
                    f"If it was removed on purpose, write {batch} to {_HOME}/published",
                ) from None

    def _published(self) -> int:
        """The last batch of which all files were moved, -1 if that is not known."""
        try:
            with self.filesystem.open_input_stream(self._at(_HOME, "published")) as stream:
                return int(stream.read())
        except (FileNotFoundError, ValueError):
            return -1

    def _delete_stale_staging(self) -> None:
        """Remove what dead runs staged: with the lock all others are dead, without it those of yesterday."""
        oldest = 0.0 if self._lock_file is not None else _STALE_S
        for info in self._listing(self._at(_HOME, "staging")):
            if time.time() - (info.mtime.timestamp() if info.mtime else 0.0) >= oldest:
                self._delete(info.path)

    def close(self) -> None:
        """Remove this run's staging directory, unless files of a commit may be in it, and release the
        lock."""
        try:
            if not self._committing:
                self._delete(self._at(_HOME, "staging", self.run_id))
        finally:
            self.abandon()

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(path)

    def _write_new(self, path: str, content: bytes) -> None:
        """Create a whole file or none: on a local disk exclusively and durably, else as the store allows."""
        if isinstance(self.filesystem, fs.LocalFileSystem):
            _write_new_local(path, content, self.output)
            return
        if self._exists(path):
            raise ArchiveError(self.output, f"{path} exists: another job writes to this archive")
        temporary = f"{path}.{self.run_id}.tmp"
        with self.filesystem.open_output_stream(temporary) as stream:
            stream.write(content)
        self.filesystem.move(temporary, path)

    def _listing(self, path: str) -> list[fs.FileInfo]:
        infos: list[fs.FileInfo] = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return infos

    def _exists(self, path: str) -> bool:
        return bool(self.filesystem.get_file_info(path).type != fs.FileType.NotFound)

    def _at(self, *parts: str) -> str:
        return "/".join((self.root, *parts))


def open_filesystem(output: str) -> tuple[fs.FileSystem, str]:
    """(file system, path on it) of a local path or a URI."""
    if "://" in output:
        filesystem, path = fs.FileSystem.from_uri(output)
        return filesystem, path.rstrip("/")
    return fs.LocalFileSystem(), os.path.abspath(output)


def _write_new_local(path: str, content: bytes, output: str) -> None:
    temporary = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)  # fails if the name is taken, unlike a rename
    except FileExistsError:
        raise ArchiveError(output, f"{path} exists: another job writes to this archive") from None
    finally:
        os.unlink(temporary)
    sync_local(os.path.dirname(path))


def sync_local(path: str) -> None:
    """Make a local file, or the names in a local directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(commit: dict[str, Any]) -> list[dict[str, Any]]:
    """Each with `staged`, where a task wrote it, and `path`, where it belongs, both below the output."""
    return [*commit["files"], *commit["quarantine"]]


_ESCAPED = set("\"#%'*/:=?\\\x7f{[]^") | {chr(code) for code in range(32)}


def partition_value(text: str) -> str:
    """A value in a directory's name, escaped as Hive and Spark do it (`%RETRY%g` becomes `%25RETRY%25g`)."""
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)

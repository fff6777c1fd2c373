"""The archive's directory: Parquet files that every reader understands, and a log of commits that makes it
exact.

    output/topic=orders/dt=2026-11-21/hour=11/<name>.parquet      the table
    output/_cometmq/archive.json                                  what this directory is
    output/_cometmq/commits/00000000000000000000.json             one line of JSON a batch, in order
    output/_cometmq/staging/<run>/…                               files of batches that are not committed yet
    output/_cometmq/quarantine/<name>.parquet                     records that could not be decoded

Names that begin with `_` are invisible to Spark, Hive, DuckDB and pyarrow when they read the directory. A
batch becomes part of the table in one step, the creation of its commit file; then its files are renamed from
staging into the table. If the job dies in between, the next run finishes the renames, so each file is in the
table exactly once. Files without a commit are never renamed, and deleted by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from cometmq.pipeline.errors import ArchiveError

FORMAT = 1
_STALE_S = 24 * 3600.0
_HOME = "_cometmq"


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that a task wrote: where it lies now and where it belongs, both relative to the output
    directory.
    """

    staged: str
    path: str


class ArchiveTable:
    """One archive directory; `output` is a path or a URI that pyarrow's file systems know (file, hdfs, s3, gs
    …).
    """

    def __init__(self, output: str) -> None:
        self.filesystem, self.root = open_filesystem(output)
        # Workers may have another working directory: they are given the absolute path.
        self.output = output if "://" in output else self.root
        self.run_id = uuid.uuid4().hex[:12]
        self._lock_file: int | None = None

    def prepare(self) -> dict[str, Any] | None:
        """Create or check the directory, finish what a killed run left, and return the last commit (None: no
        batch yet).
        """
        self.filesystem.create_dir(self._at(_HOME, "commits"), recursive=True)
        self._lock()
        self._check_kind()
        last = self.last_commit()
        if last is not None:
            # A file that is neither here nor there was moved on by its owner (compaction, retention of old
            # days).
            self.publish([file for file in _staged_files(last) if self._exists(self._at(file.staged))])
        self._delete_stale_staging()
        return last

    def _lock(self) -> None:
        """One job at a time on a local disk; the kernel drops the lock when the process ends, however it
        ends.
        """
        if not isinstance(self.filesystem, fs.LocalFileSystem):
            return
        self._lock_file = os.open(self._at(_HOME, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.abandon()
            raise ArchiveError(self.output, "another archive job is running on this directory") from None

    def abandon(self) -> None:
        """Let others in and leave everything as it lies, as a killed process does."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _check_kind(self) -> None:
        path = self._at(_HOME, "archive.json")
        if self._exists(path):
            with self.filesystem.open_input_stream(path) as stream:
                kind = json.loads(stream.read())
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
        numbers = sorted(
            info.base_name for info in self._listing(self._at(_HOME, "commits")) if _is_commit(info)
        )
        return self._read_commit(numbers[-1]) if numbers else None

    def commits(self) -> Iterator[dict[str, Any]]:
        """All commits in order."""
        for info in sorted(self._listing(self._at(_HOME, "commits")), key=lambda item: item.base_name):
            if _is_commit(info):
                yield self._read_commit(info.base_name)

    def _read_commit(self, name: str) -> dict[str, Any]:
        with self.filesystem.open_input_stream(self._at(_HOME, "commits", name)) as stream:
            commit: dict[str, Any] = json.loads(stream.read())
        return commit

    def staging(self, batch: int) -> str:
        """A new directory for the files of this batch, relative to the output directory."""
        relative = f"{_HOME}/staging/{self.run_id}/{batch}"
        self.filesystem.create_dir(self._at(relative), recursive=True)
        return relative

    def commit(self, commit: dict[str, Any]) -> None:
        """Make a batch part of the table. Raises ArchiveError if another job committed this batch number
        first.
        """
        for file in _staged_files(commit):
            if not self._exists(self._at(file.staged)):
                raise ArchiveError(self.output, f"{file.staged} is gone before its batch was committed")
        name = f"{commit['batch']:020d}.json"
        self._write_new(self._at(_HOME, "commits", name), json.dumps(commit).encode() + b"\n")
        self.publish(_staged_files(commit))
        self._delete(self._at(_HOME, "staging", self.run_id, str(commit["batch"])))

    def publish(self, files: list[StagedFile]) -> None:
        """Move committed files from staging to their places."""
        for file in files:
            source, target = self._at(file.staged), self._at(file.path)
            self.filesystem.create_dir(os.path.dirname(target), recursive=True)
            self.filesystem.move(source, target)

    def _delete_stale_staging(self) -> None:
        """Remove what dead runs staged: all others where the lock says they are dead, else those of
        yesterday.
        """
        oldest = 0.0 if self._lock_file is not None else _STALE_S
        for info in self._listing(self._at(_HOME, "staging")):
            if time.time() - (info.mtime.timestamp() if info.mtime else 0.0) >= oldest:
                self._delete(info.path)

    def close(self) -> None:
        """Remove this run's staging directory and let others in."""
        self._delete(self._at(_HOME, "staging", self.run_id))
        self.abandon()

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(path)

    def _write_new(self, path: str, content: bytes) -> None:
        """Create a whole file or none. On a local disk exclusively and durably; elsewhere as well as the
        store allows.
        """
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
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _is_commit(info: fs.FileInfo) -> bool:
    return bool(info.base_name.endswith(".json") and info.base_name[:-5].isdecimal())


def _staged_files(commit: dict[str, Any]) -> list[StagedFile]:
    return [StagedFile(item["staged"], item["path"]) for item in (*commit["files"], *commit["quarantine"])]


_ESCAPED = set("\"#%'*/:=?\\\x7f{[]^") | {chr(code) for code in range(32)}


def partition_value(text: str) -> str:
    """A value in a directory's name, escaped as Hive and Spark do it (`%RETRY%g` becomes `%25RETRY%25g`)."""
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)

"""Archives as tables of a format with transactions of its own: the part that Delta and Iceberg share.

Tasks write Parquet files under new names directly into the table's directories. One transaction of the table
adds a batch's files together with the batch's number and the next offsets. So the table contains both a batch
and its position, or neither. Files of a batch that was never committed are in no snapshot; `vacuum` deletes
them. The directory has the form of directory.py, without `published` and `staging`.

A commit is the description of a batch; the batch's transaction contains it. The files in `commits` are copies
of these descriptions. They are needed because the formats lose the information of old transactions when their
logs are cleaned up. A copy is written after the transaction; if a run is killed in between, the next run
writes it. Copies are merged into checkpoints and read like the log of the Parquet form (log.py).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import fs

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.directory import UNNAMED_FOR, Table, author, open_filesystem
from cometmq.pipeline.table.log import COMMITS, commit_path, last_checkpoint, last_number
from cometmq.pipeline.table.small_files import read_json, replace_file, replace_json

PROPERTY = "cometmq.commit"
"""Name of the property in which a transaction stores the content of its batch as JSON."""

_HOME = "_cometmq"
_ATTEMPTS = 5


def with_directories(columns: pa.Schema) -> pa.Schema:
    """Return the columns in a table's rows, followed by those in its directory names (dt and hour)."""
    return pa.schema([*columns, ("dt", pa.date32()), ("hour", pa.int32())])


class Overtaken(Exception):
    """Another transaction has changed the table, which the caller reloads to find out."""


class LakeTable(Table):
    """An archive as a table of a format with transactions. `output` is the table's directory."""

    schemes: tuple[str, ...] = ()
    """The URI schemes that the table format supports."""
    misread: str
    """Characters in paths that the format's library misinterprets."""

    def __init__(self, output: str) -> None:
        if output.startswith("file://"):
            output = open_filesystem(output)[1]
        scheme = output.partition("://")[0] if "://" in output else ""
        if scheme and scheme not in self.schemes:
            places = " or ".join(["a path", *(f"{one}://…" for one in self.schemes)])
            expected = f"{places}, as archives of format {self.kind} need"
            # The error shows only the scheme of the URI, because the rest may contain a secret.
            raise ConfigError("output", f"{scheme}://…", expected)
        super().__init__(output)
        if found := set(self.misread).intersection(self.root):
            raise ConfigError("output", self.output, f"a path without {min(found)}, as {self.kind} needs")
        self.facts: dict[str, str] = {}  # What `archive.json` contains besides the format

    def prepare(self) -> dict[str, Any] | None:
        """Create or open the table. Return the last commit, or None if there is no batch yet.

        Raises ArchiveError if the directory holds other data or no position, or copies of batches that the
        table lacks: it was lost or restored, and a new table would archive all messages a second time.
        """
        if isinstance(self.filesystem, fs.LocalFileSystem):
            self._make_directory(COMMITS)
        self._check_kind()
        # The copies of the commits are read before the table. A batch's copy is written after the batch's
        # transaction, so the table, which is read later, must contain every batch that has a copy.
        known = self._copied()
        if known < 0:
            self._create()
        last = self.last_commit() if known < 0 or self._exists() else None
        if known > (-1 if last is None else last["batch"]):
            stands = "none" if last is None else f"only {last['batch']}"
            raise ArchiveError(
                self.output,
                f"_cometmq/commits contains batch {known}, but the table {stands}: restore the table from a "
                "backup, or remove the later files of _cometmq/commits and _cometmq/checkpoints to continue "
                "from the table's present state",
            )
        if last is not None:
            self._keep(last)
        self.checkpoints.begin(self.filesystem, self.root)
        return last

    def commit(self, commit: dict[str, Any]) -> None:
        self._check_files(commit)
        problem = "not committed"
        for _ in range(_ATTEMPTS):
            last = self.last_commit()
            stands = -1 if last is None else last["batch"]
            if last is not None and stands == commit["batch"] and last["run"] == self.run_id:
                break  # The previous attempt to commit succeeded, although it raised an error
            if stands != commit["batch"] - 1:
                other = "none is there" if last is None else author(last)
                problem = (
                    f"another job writes here ({other}): batch {commit['batch']} does not follow {stands}"
                )
                raise ArchiveError(self.output, problem)
            try:
                self._transact(commit)
                break
            except Overtaken as error:
                problem = f"batch {commit['batch']} is not committed: {error}"
        else:
            raise ArchiveError(self.output, problem)
        self._keep(commit)
        create = partial(replace_file, self.filesystem)
        self.checkpoints.after(commit["batch"], self.filesystem, self.root, create)

    def vacuum(self, age: timedelta) -> int:
        """Delete old data files of dead jobs, which no commit or snapshot has. Return their number."""
        found, _ = self._unnamed()
        # Reload the table after the files are listed, so that it includes all their commits.
        self.last_commit()
        named = self.referenced()
        then = self._store_now() - max(age, UNNAMED_FOR)
        old = [path for path, at in found.items() if at <= then and os.path.basename(path) not in named]
        return self._delete_files(old)

    @abstractmethod
    def last_commit(self) -> dict[str, Any] | None:
        """Reload the table. Return the newest commit of an archive job, or None."""

    @abstractmethod
    def _exists(self) -> bool:
        """Return whether the table exists."""

    @abstractmethod
    def _create(self) -> None:
        """Create the table with the columns of messages (without parsed bodies) if it does not exist."""

    @abstractmethod
    def _transact(self, commit: dict[str, Any]) -> None:
        """Add files and commit. Raises Overtaken if the table has changed since `last_commit`."""

    @abstractmethod
    def files(self) -> tuple[list[dict[str, Any]], pa.Schema]:
        """Return the files of the newest snapshot, and the table's columns.

        Each entry has the file's `path`, relative to the output. If the file's rows lack the columns `topic`,
        `dt` and `hour`, the entry has their values, too.
        """

    @abstractmethod
    def referenced(self) -> set[str]:
        """Return the names, without directories, of the files in all snapshots of the table."""

    def _check_kind(self) -> None:
        path = self._at(_HOME, "archive.json")
        found = kind_of(self.filesystem, self.root)
        if found is None:
            self._check_unused()
            replace_json(self.filesystem, path, {"format": self.kind} | self.facts)
        elif found != self.kind:
            its = found if found in ("delta", "iceberg") else "parquet"
            problem = (
                f"an archive of format {its}, not {self.kind}: name it (--format {its}, or table_format)"
            )
            raise ArchiveError(self.output, problem)

    def _copied(self) -> int:
        """Return the newest batch in `commits` or in a checkpoint of `_cometmq`, or -1."""
        last = last_number(self.filesystem, self.root)
        return max(-1 if last is None else last, last_checkpoint(self.filesystem, self.root))

    def _keep(self, commit: dict[str, Any]) -> None:
        replace_json(self.filesystem, self._at(commit_path(commit["batch"])), commit)

    def _kept(self, batch: int) -> dict[str, Any] | None:
        return read_json(self.filesystem, self._at(commit_path(batch)))


def kind_of(filesystem: fs.FileSystem, root: str) -> str | None:
    """Return the format of the archive: delta, iceberg, or a number for Parquet. None: no archive."""
    kind = read_json(filesystem, f"{root}/{_HOME}/archive.json")
    return None if kind is None else str(kind.get("format"))

"""The archive as a Delta table. The library delta-rs writes it, so neither a JVM nor jars are needed.

A batch is one version of the table. It consists of files, a transaction identifier (`txn`, application
`cometmq`, version = batch number) and, in Delta's commitInfo, the batch's description with its offsets.
Checkpoints and the clean-up of Delta's log keep the identifier but may delete commitInfo. So the number of
the newest batch is read from the identifier, and its offsets from a second copy of the description, which is
stored in `_cometmq/commits`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction
from pyarrow import fs

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.body_schema import columns_in
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.lake import PROPERTY, LakeTable, Overtaken, with_directories
from cometmq.pipeline.table.objects import allows_http, s3_settings, shown
from cometmq.pipeline.table.task import ARCHIVE_SCHEMA

APPLICATION = "cometmq"
_BATCH_ROWS = 10_000
_BY = ["topic", "dt", "hour"]


class DeltaArchive(LakeTable):
    """A Delta table, partitioned by topic, dt and hour like the Parquet archive."""

    kind = "delta"
    topic_in_files = False
    schemes = ("s3",)
    misread = "%\\"

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self._options: dict[str, str] | None = None
        if self.uri != self.root:
            self._options = _storage(self.uri, self.filesystem) | {"conditional_put": "etag"}

    def _open(self) -> DeltaTable:
        return DeltaTable(self.output, storage_options=self._options)

    def _exists(self) -> bool:
        return DeltaTable.is_deltatable(self.output, self._options)

    def _create(self) -> None:
        try:
            self._open()
        except TableNotFoundError:
            try:
                schema = _schema(ARCHIVE_SCHEMA)
                DeltaTable.create(self.output, schema, partition_by=_BY, storage_options=self._options)
            except DeltaError:  # Another job may have created the table. If not, `_open` raises an error
                self._open()

    def last_commit(self) -> dict[str, Any] | None:
        self._table = self._open()
        batch = self._table.transaction_version(APPLICATION)
        if batch is None:
            return None
        # Delta's log is read first, because the copy in `_cometmq/commits` may be missing or belong to an
        # older table at this path.
        for info in self._table.history(1):
            if PROPERTY in info and (said := json.loads(info[PROPERTY]))["batch"] == batch:
                return dict(said)
        found = self._kept(batch)
        if found is None:  # The whole history is read only then: it may have thousands of files
            said = (json.loads(info[PROPERTY]) for info in self._table.history() if PROPERTY in info)
            found = next((commit for commit in said if commit["batch"] == batch), None)
        if found is None:
            problem = f"neither _cometmq/commits nor the log says where batch {batch} ended"
            raise ArchiveError(self.output, problem)
        return found

    def _transact(self, commit: dict[str, Any]) -> None:
        table = self._table
        schema = _schema(columns_in(commit))
        fields = table.schema().fields
        try:
            if missing := [field for field in schema.fields if field not in fields]:
                table.alter.add_columns(missing)
                raise Overtaken("columns were added to the table")
            table.create_write_transaction(
                [_added(file) for file in commit["files"]],
                "append",
                table.schema(),
                _BY,
                # Retries are disabled, because a retry would add the batch even if another job has committed
                # a transaction in the meantime.
                commit_properties=CommitProperties(
                    custom_metadata={PROPERTY: json.dumps(commit)},
                    max_commit_retries=0,
                    app_transactions=[Transaction(APPLICATION, commit["batch"])],
                ),
            )
        except CommitFailedError as error:
            raise Overtaken(str(error)) from error

    def referenced(self) -> set[str]:
        return {os.path.basename(uri) for uri in self._table.file_uris()}

    def files(self) -> tuple[list[dict[str, Any]], pa.Schema]:
        table = self._open()
        rows = pa.table(table.get_add_actions(flatten=True)).select(
            [f"partition.{name}" for name in _BY] + ["path"]
        )
        found = rows.rename_columns([*_BY, "path"]).to_pylist()
        # Paths in Delta's log are quoted like URIs.
        return [file | {"path": unquote(file["path"])} for file in found], pa.schema(table.schema())


def _storage(uri: str, filesystem: fs.FileSystem) -> dict[str, str]:
    settings = s3_settings(uri, filesystem)
    return settings | {"allow_http": str(allows_http(settings))}


def _schema(columns: pa.Schema) -> Schema:
    return Schema.from_arrow(with_directories(columns))


def _added(file: dict[str, Any]) -> AddAction:
    return AddAction(
        path=file["path"],
        size=file["bytes"],
        partition_values={"topic": file["topic"], "dt": file["dt"], "hour": str(file["hour"])},
        modification_time=0,
        data_change=True,
        stats=json.dumps({"numRecords": file["rows"]}),
    )


def _table(path: str, version: int | None = None) -> DeltaTable:
    """Return a Delta table. An s3:// URI may have keys and an endpoint, like an archive's URI."""
    if not path.startswith("s3://"):
        return DeltaTable(path, version=version)
    options = _storage(path, open_filesystem(path)[0])
    return DeltaTable(shown(path), version=version, storage_options=options)


def newest(path: str) -> tuple[int, int, pa.Schema]:
    """Return a table's version, number of files and columns. Raises ConfigError if it cannot be read."""
    try:
        table = _table(path)
        return table.version(), len(table.file_uris()), table.to_pyarrow_dataset().schema
    except (DeltaError, OSError, ValueError) as error:
        problem = str(error).partition("\n")[0].replace(path, shown(path))
        raise ConfigError("path", shown(path), f"a Delta table that can be read ({problem})") from None


def rows_of_files(path: str, version: int, numbers: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a version of a Delta table that are in the files with these numbers (from 0)."""
    dataset = _table(path, version).to_pyarrow_dataset()
    files = sorted(dataset.get_fragments(), key=lambda file: file.path)
    for number in numbers:
        yield from files[number].to_batches(schema=dataset.schema, batch_size=_BATCH_ROWS)

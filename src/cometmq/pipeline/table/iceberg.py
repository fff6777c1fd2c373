"""The archive as an Iceberg table. The library pyiceberg writes it, so neither a JVM nor jars are needed.

    SqlCatalog("cometmq", uri="sqlite:////data/archive/_cometmq/catalog.db").load_table("cometmq.archive")

The table is listed in an SQL catalogue, an SQLite file in the archive's directory. If the table is on an
object store, the file is on the local machine, and `_cometmq/archive.json` records its path.

A batch is one snapshot of the table. The snapshot's properties contain the batch number and the run's id. The
transaction that adds the snapshot also stores the whole commit as a property of the table. The commit is not
a property of the snapshot, because snapshots expire, and because each commit would rewrite the offsets of all
snapshots. The table is partitioned by `topic` and by the hour of `store_timestamp` (a hidden transform), so a
filter on these columns selects files. There are no columns dt and hour.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.transforms import HourTransform, IdentityTransform
from sqlalchemy.exc import SQLAlchemyError

from cometmq.errors import ConfigError
from cometmq.periodic import Backoff
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.body_schema import columns_in
from cometmq.pipeline.table.lake import PROPERTY, LakeTable, Overtaken
from cometmq.pipeline.table.objects import s3_settings
from cometmq.pipeline.table.small_files import read_json
from cometmq.pipeline.table.task import ARCHIVE_SCHEMA

CATALOGUE = "cometmq"
TABLE = ("cometmq", "archive")
_PROPERTIES = {
    # Old metadata is deleted, because each commit writes the table's whole metadata again.
    "write.metadata.delete-after-commit.enabled": "true",
    # The Parquet files have no statistics for these columns. If Iceberg's statistics of the columns were not
    # disabled, pyiceberg would log a warning for each column.
    **{
        f"write.metadata.metrics.column.{name}": "none"
        for name in ("body", "properties.key", "properties.value", "body_rest", "body_error")
    },
}
_ACCESS = {
    "endpoint": "s3.endpoint",
    "region": "s3.region",
    "access_key_id": "s3.access-key-id",
    "secret_access_key": "s3.secret-access-key",
    "virtual_hosted_style_request": "s3.force-virtual-addressing",
}
_RETRIES, _PAUSES_S = 6, (0.05, 1.6)
"""Attempts to create a table, and the first and longest pause between them, in seconds: 3 s in total."""
_CONFLICTS = (
    TableAlreadyExistsError, NamespaceAlreadyExistsError, NoSuchTableError, CommitFailedException,
    SQLAlchemyError,
)  # fmt: skip
"""Errors that a job may get when it creates the table while another job creates it, too."""
_ONCE = {"commit.retry.num-retries": "0"}


class IcebergArchive(LakeTable):
    """An Iceberg table below one directory. On an object store, its catalogue is a file of this machine."""

    kind = "iceberg"
    topic_in_files = True
    schemes = ("s3",)
    misread = "%#?"

    def __init__(self, output: str, catalogue: str | None = None) -> None:
        super().__init__(output)
        self._location = self.output if "://" in self.output else f"file://{self.root}"
        self._opened: SqlCatalog | None = None
        self._file = self._at("_cometmq", "catalog.db")
        if "://" in self.output:
            self._file = self._named(catalogue)
            self.facts = {"catalogue": self._file}
        elif catalogue is not None:
            raise ConfigError("catalogue", catalogue, "no value: on a disk the table contains its catalogue")

    def _named(self, catalogue: str | None) -> str:
        """Return the path of the catalogue's file, from the argument or from archive.json."""
        said = (read_json(self.filesystem, self._at("_cometmq", "archive.json")) or {}).get("catalogue")
        path = os.path.abspath(catalogue) if catalogue else said
        if path is None or not os.path.isdir(os.path.dirname(path)):
            expected = "a local file for the SQL catalogue of a table on an object store"
            raise ConfigError("catalogue", str(path), expected)
        if said not in (None, path):
            raise ConfigError("catalogue", path, f"the catalogue of the archive: {said}")
        return str(path)

    @property
    def _catalogue(self) -> SqlCatalog:
        if self._opened is None:
            if "://" in self.output and not os.path.exists(self._file) and self._copied() >= 0:
                raise ArchiveError(self.output, f"the catalogue {self._file} is not on this machine")
            given = s3_settings(self.uri, self.filesystem) if "://" in self.output else {}
            access = {name: given[key] for key, name in _ACCESS.items() if key in given}
            uri = f"sqlite:///{self._file}"
            self._opened = SqlCatalog(CATALOGUE, uri=uri, warehouse=self._location, **access)
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _exists(self) -> bool:
        try:
            return self._catalogue.table_exists(TABLE)
        except SQLAlchemyError as error:
            raise self._unreadable(error) from error

    def _create(self) -> None:
        """Create the table. Each try starts from its present state: another job may create it, too."""
        pauses = Backoff(*_PAUSES_S)
        while True:
            try:
                self._create_once()
                return
            except _CONFLICTS as error:
                if pauses.failures == _RETRIES:
                    problem = f"the table cannot be made, perhaps because another job makes it: {error}"
                    raise ArchiveError(self.output, problem) from error
                time.sleep(pauses.next_s())

    def _create_once(self) -> None:
        if self._catalogue.table_exists(TABLE):
            self._load()
            return
        self._catalogue.create_namespace_if_not_exists(TABLE[0])
        made = self._catalogue.create_table_transaction(
            TABLE, schema=ARCHIVE_SCHEMA, location=self._location, properties=_PROPERTIES
        )
        with made as transaction, transaction.update_spec() as spec:
            spec.add_field("topic", IdentityTransform(), "topic")
            spec.add_field("store_timestamp", HourTransform(), "store_hour")

    def _load(self) -> Table:
        try:
            table = self._catalogue.load_table(TABLE)
        except SQLAlchemyError as error:
            raise self._unreadable(error) from error
        if "://" in self.output and table.location() != self._location:
            problem = f"its catalogue {self._file} is that of {table.location()}"
            raise ArchiveError(self.output, problem)
        return table

    def _unreadable(self, error: Exception) -> ArchiveError:
        problem = str(error).partition("\n")[0]
        return ArchiveError(self.output, f"its catalogue {self._file} cannot be read: {problem}")

    def last_commit(self) -> dict[str, Any] | None:
        self._table = self._load()
        said = self._table.properties.get(PROPERTY)
        return None if said is None else dict(json.loads(said))

    def _transact(self, commit: dict[str, Any]) -> None:
        table = self._table
        # If another job has committed a transaction in the meantime, this one must fail, but a retry would
        # still add the batch. So retries are disabled here, in a copy of the table's properties that is
        # never saved.
        table.metadata.properties.update(_ONCE)
        summary = {"cometmq.batch": str(commit["batch"]), "cometmq.run": commit["run"]}
        paths = [f"{self._location}/{file['path']}" for file in commit["files"]]
        try:
            with table.transaction() as transaction:
                with transaction.update_schema() as schema:
                    schema.union_by_name(columns_in(commit))
                transaction.set_properties({PROPERTY: json.dumps(commit)})
                if paths:
                    transaction.add_files(paths, summary, check_duplicate_files=False)
                else:  # An empty snapshot is added, because it makes the commit of a concurrent job fail
                    with transaction.update_snapshot(summary).fast_append():
                        pass
        except (CommitFailedException, SQLAlchemyError) as error:
            raise Overtaken(str(error)) from error

    def referenced(self) -> set[str]:
        io = self._table.io
        manifests = {
            manifest.manifest_path: manifest
            for snapshot in self._table.metadata.snapshots
            for manifest in snapshot.manifests(io)
        }
        return {
            os.path.basename(entry.data_file.file_path)
            for manifest in manifests.values()
            for entry in manifest.fetch_manifest_entry(io, discard_deleted=False)
        }

    def files(self) -> tuple[list[dict[str, Any]], pa.Schema]:
        table = self._load()
        paths = [task.file.file_path.removeprefix(f"{self._location}/") for task in table.scan().plan_files()]
        return [{"path": path} for path in paths], table.schema().as_arrow()

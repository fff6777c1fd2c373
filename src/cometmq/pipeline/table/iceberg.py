"""The archive as an Iceberg table, by pyiceberg, in an SQL catalogue that is a file beside it: no JVM, no
jars.

    SqlCatalog("cometmq", uri="sqlite:////data/archive/_cometmq/catalog.db").load_table("cometmq.archive")

A batch is one snapshot. Its properties name batch and run. All that the batch says is a property of the
table, set by the same transaction: snapshots expire, and a list of offsets in each of them would be written
again with every commit. The table is partitioned by `topic` and by the hour of `store_timestamp` (a hidden
transform), so a filter on these finds its files; there are no columns dt and hour."""

from __future__ import annotations

import json
import os
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

from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.body_schema import columns_in
from cometmq.pipeline.table.lake import PROPERTY, LakeTable, Overtaken
from cometmq.pipeline.table.task import ARCHIVE_SCHEMA

CATALOGUE = "cometmq"
TABLE = ("cometmq", "archive")
_PROPERTIES = {
    # Each commit writes the table's metadata anew, with what it says.
    "write.metadata.delete-after-commit.enabled": "true",
    # Files have no statistics of these, and pyiceberg would warn of it each time.
    **{
        f"write.metadata.metrics.column.{name}": "none"
        for name in ("body", "properties.key", "properties.value", "body_rest", "body_error")
    },
}
_ONCE = {"commit.retry.num-retries": "0"}


class IcebergArchive(LakeTable):
    """An Iceberg table whose files, metadata and catalogue are below one local directory."""

    kind = "iceberg"
    topic_in_files = True
    misread = "%#?"

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self._opened: SqlCatalog | None = None

    @property
    def _catalogue(self) -> SqlCatalog:
        if self._opened is None:
            uri = f"sqlite:///{self._at('_cometmq', 'catalog.db')}"
            self._opened = SqlCatalog(CATALOGUE, uri=uri, warehouse=f"file://{self.root}")
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _create(self) -> None:
        try:
            if self._catalogue.table_exists(TABLE):
                return
            self._catalogue.create_namespace_if_not_exists(TABLE[0])
            made = self._catalogue.create_table_transaction(
                TABLE,
                schema=ARCHIVE_SCHEMA,
                location=f"file://{self.root}",
                properties=_PROPERTIES,
            )
            with made as transaction, transaction.update_spec() as spec:
                spec.add_field("topic", IdentityTransform(), "topic")
                spec.add_field("store_timestamp", HourTransform(), "store_hour")
        except (TableAlreadyExistsError, NamespaceAlreadyExistsError, CommitFailedException, SQLAlchemyError):
            try:
                self._load()  # another job made it meanwhile
            except (NoSuchTableError, SQLAlchemyError) as error:
                raise ArchiveError(self.output, f"the table cannot be made: {error}") from error

    def _load(self) -> Table:
        return self._catalogue.load_table(TABLE)

    def last_commit(self) -> dict[str, Any] | None:
        self._table = self._load()
        said = self._table.properties.get(PROPERTY)
        return None if said is None else dict(json.loads(said))

    def _transact(self, commit: dict[str, Any]) -> None:
        table = self._table
        # In this copy of the table only: a repetition would put the batch on top of whatever came between.
        table.metadata.properties.update(_ONCE)
        summary = {"cometmq.batch": str(commit["batch"]), "cometmq.run": commit["run"]}
        paths = [f"file://{self._at(file['path'])}" for file in commit["files"]]
        try:
            with table.transaction() as transaction:
                with transaction.update_schema() as schema:
                    schema.union_by_name(columns_in(commit))
                transaction.set_properties({PROPERTY: json.dumps(commit)})
                if paths:
                    transaction.add_files(paths, summary, check_duplicate_files=False)
                else:  # a snapshot all the same: it is what two jobs cannot both make
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
        paths = [
            task.file.file_path.removeprefix(f"file://{self.root}/") for task in table.scan().plan_files()
        ]
        return [{"path": path} for path in paths], table.schema().as_arrow()

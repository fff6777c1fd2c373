"""Which table formats an archive can have, and what the archive job asks of each."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

from pyarrow import fs

from cometmq.errors import ConfigError
from cometmq.pipeline.base.options import check_package
from cometmq.pipeline.table.directory import ArchiveTable, open_filesystem
from cometmq.pipeline.table.lake import LakeTable, kind_of
from cometmq.pipeline.table.log import Checkpoints

TableFormat = Literal["parquet", "delta", "iceberg"]
_PACKAGES = {"delta": "deltalake", "iceberg": "pyiceberg"}


class Table(Protocol):
    """Where an archive job commits its batches."""

    filesystem: fs.FileSystem
    root: str
    output: str
    """Where it is, for people."""
    uri: str
    run_id: str
    kind: str
    """The format's name."""
    checkpoints: Checkpoints
    topic_in_files: bool
    """Whether files hold the column `topic`, not only their path."""

    def prepare(self) -> dict[str, Any] | None:
        """Create or check the table; the last commit, None if there was none."""

    def staging(self, batch: int) -> str:
        """Where tasks write the files of this batch, relative to the output; "" is in their own places."""

    def commit(self, commit: dict[str, Any]) -> None:
        """Make a batch part of the table, in one step. Raises ArchiveError if another job was first."""

    def close(self) -> None:
        """End the use of the table."""


def open_table(output: str, table_format: str, catalogue: str | None = None) -> Table:
    """The archive at `output`. catalogue: of a new Iceberg table on an object store, a local file. Raises
    ConfigError for a format that is not known or lacks its package."""
    if catalogue is not None and table_format != "iceberg":
        raise ConfigError("catalogue", catalogue, "nothing: only Iceberg tables have one")
    if table_format == "parquet":
        return ArchiveTable(output)
    return _lake(output, table_format, catalogue)


def open_lake(output: str) -> LakeTable | None:
    """The archive at `output` if it has a format with transactions of its own, else None."""
    kind = kind_of(*open_filesystem(output))
    return _lake(output, kind) if kind in _PACKAGES else None


def _lake(output: str, table_format: str | None, catalogue: str | None = None) -> LakeTable:
    package = _PACKAGES.get(table_format or "")
    if package is None:
        raise ConfigError("table_format", str(table_format), ", ".join(get_args(TableFormat)))
    check_package("table_format", str(table_format), package, str(table_format))
    if table_format == "delta":
        from cometmq.pipeline.table.delta import DeltaArchive

        return DeltaArchive(output)
    from cometmq.pipeline.table.iceberg import IcebergArchive

    return IcebergArchive(output, catalogue)

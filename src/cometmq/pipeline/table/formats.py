"""The table formats of an archive, and the interface through which the archive job uses them."""

from __future__ import annotations

from typing import Any, Protocol, get_args

from pyarrow import fs

from cometmq.errors import ConfigError
from cometmq.pipeline.base.job_options import TableFormat
from cometmq.pipeline.base.options import check_package
from cometmq.pipeline.table.directory import ArchiveTable, open_filesystem
from cometmq.pipeline.table.lake import LakeTable, kind_of
from cometmq.pipeline.table.log import Checkpoints

_PACKAGES = {"delta": "deltalake", "iceberg": "pyiceberg"}


class Table(Protocol):
    """A table to which an archive job commits its batches."""

    filesystem: fs.FileSystem
    root: str
    output: str
    """The table's location, for display."""
    uri: str
    run_id: str
    kind: str
    """Name of the table format, such as "delta"."""
    checkpoints: Checkpoints
    topic_in_files: bool
    """Whether the files hold the column `topic`. Otherwise the topic is only in their paths."""

    def prepare(self) -> dict[str, Any] | None:
        """Create the table, or check an existing one. Return the last commit, or None if there is none."""

    def staging(self, batch: int) -> str:
        """Return the directory for the files of this batch, relative to the output.

        "" means that tasks write the files under their final paths.
        """

    def commit(self, commit: dict[str, Any]) -> None:
        """Make a batch part of the table in one step.

        Raises ArchiveError if another job has committed a batch of the same number.
        """

    def close(self) -> None:
        """Release the resources of the table, such as its lock."""


def open_table(output: str, table_format: str, catalogue: str | None = None) -> Table:
    """Return the archive at `output`.

    `catalogue` is a local file for a new Iceberg table on an object store. Raises ConfigError for an unknown
    format, or a format whose package is not installed.
    """
    if catalogue is not None and table_format != "iceberg":
        raise ConfigError("catalogue", catalogue, "no value: only Iceberg tables have a catalogue")
    if table_format == "parquet":
        return ArchiveTable(output)
    return _lake(output, table_format, catalogue)


def open_lake(output: str) -> LakeTable | None:
    """Return the archive at `output` if its format has transactions of its own, else None."""
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

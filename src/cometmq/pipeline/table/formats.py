"""The table formats of an archive."""

from __future__ import annotations

from typing import get_args

from cometmq.errors import ConfigError
from cometmq.pipeline.base.job_options import TableFormat
from cometmq.pipeline.base.options import check_package
from cometmq.pipeline.table.directory import ArchiveTable, Table, open_filesystem
from cometmq.pipeline.table.lake import LakeTable, kind_of

_PACKAGES = {"delta": "deltalake", "iceberg": "pyiceberg"}


def open_table(output: str, table_format: str, catalogue: str | None = None) -> Table:
    """Return the archive at `output`, with a `catalogue` file for Iceberg on S3. Raises ConfigError."""
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

"""Where Spark looks for the format `cometmq`.

Spark imports every module named `pyspark_*` and takes its `DefaultSource`. It does so for any format name it
does not know, and an exception here would hide other people's sources: nothing heavy is imported before the
format is used.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """`spark.read.format("cometmq")` and its streaming and writing sisters (docs/pipeline.md)."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        from cometmq.pipeline.source import CometDataSource

        self._source = CometDataSource(options)

    @classmethod
    def name(cls) -> str:
        return "cometmq"

    def schema(self) -> StructType | str:
        return self._source.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source.reader(schema=schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return self._source.streamReader(schema=schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return self._source.writer(schema=schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return self._source.streamWriter(schema=schema, overwrite=overwrite)

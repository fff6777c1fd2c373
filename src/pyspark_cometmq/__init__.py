"""Where Spark looks for the format `cometmq`.

Spark imports every module named `pyspark_*` and takes its `DefaultSource`. It does so for any format name it
does not know, and an exception here would hide other people's sources: nothing heavy is imported before the
format is used.
"""

from __future__ import annotations

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
    """`spark.read.format("cometmq")`, `readStream` and the writing sides of both (docs/pipeline.md)."""

    @classmethod
    def name(cls) -> str:
        return "cometmq"

    def schema(self) -> StructType:
        from cometmq.pipeline.live.source import full_schema

        return full_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        from cometmq.pipeline.base.options import read_options
        from cometmq.pipeline.live.source import CometReader

        return CometReader(schema, read_options(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from cometmq.pipeline.base.options import read_options
        from cometmq.pipeline.live.source import CometStreamReader

        return CometStreamReader(schema, read_options(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from cometmq.pipeline.base.options import write_options
        from cometmq.pipeline.sink.sink import CometWriter

        return CometWriter(schema, write_options(self.options), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from cometmq.pipeline.base.options import write_options
        from cometmq.pipeline.sink.sink import CometStreamWriter

        return CometStreamWriter(schema, write_options(self.options), overwrite)

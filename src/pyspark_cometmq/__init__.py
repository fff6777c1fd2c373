"""The module in which Spark finds the format `cometmq`.

If Spark does not know the name of a format, it imports every module named `pyspark_*` and registers its class
`DefaultSource`. An exception here would prevent the use of other packages' formats. So this module imports
the rest of CometMQ only when the format is used.
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
    """The Spark format `cometmq`, for batch and streaming reads and writes (docs/pipeline.md)."""

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

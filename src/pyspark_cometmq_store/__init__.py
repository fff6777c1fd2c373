"""The module in which Spark finds the format `cometmq-store`.

Like `pyspark_cometmq`, it imports the rest of CometMQ only when the format is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The Spark format `cometmq-store`, for batch reads (docs/pipeline.md, Reading store directories)."""

    @classmethod
    def name(cls) -> str:
        return "cometmq-store"

    def schema(self) -> StructType:
        from cometmq.pipeline.live.source import full_schema

        return full_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        from cometmq.pipeline.base.options import store_options
        from cometmq.pipeline.stored.source import StoreReader

        return StoreReader(schema, store_options(self.options))

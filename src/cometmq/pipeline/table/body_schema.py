"""The archive job's settings for parsing bodies, and the columns of the table that result from them.

This module runs on the driver. A table's commits record the type of the column `value`, in Spark's form, so
that a later run knows the fields of earlier runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import StructType

from cometmq.errors import ConfigError
from cometmq.pipeline.base.job_options import BodyFormat
from cometmq.pipeline.base.options import check_package
from cometmq.pipeline.table.bodies import Bodies, body_columns, check_names, merged
from cometmq.pipeline.table.body_json import JsonParser, inferred
from cometmq.pipeline.table.task import ARCHIVE_SCHEMA

_COLUMN = "value"  # Key under which a commit records the type of the column `value`


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """The settings for parsing bodies. `fields` is None if the fields of JSON bodies are to be inferred."""

    format: BodyFormat
    schema: tuple[bytes, str]
    fields: pa.StructType | None
    keep: bool

    def bodies(self, known: pa.StructType | None, sample: Iterable[bytes], *, widen: bool) -> Bodies:
        """Return the settings with which tasks parse bodies into the column `value` of a table.

        `known` is the present type of that column, or None if the table has no such column. `sample` has
        bodies, which are read only if the fields are to be inferred from them. Raises ConfigError for a field
        that does not fit the table.
        """
        fields = self.fields or known or inferred(sample)
        column = fields if known is None else merged(known, fields, widen=widen)
        return Bodies(self.format, self.schema, fields, column, self.keep)


def body_options(body_format: str | None, body_schema: str | None, keep: bool) -> BodyOptions | None:
    """Parse the settings: DDL, an Avro schema's path, or DESCRIPTORS:MESSAGE. Raises ConfigError."""
    if body_format is None:
        if body_schema is not None or not keep:
            key, value = ("body_schema", body_schema) if body_schema else ("keep_body", "false")
            raise ConfigError(key, str(value), "body_format beside it")
        return None
    if body_format == "json":
        fields = None if body_schema is None else _from_ddl(body_schema)
        return BodyOptions("json", (b"", ""), fields, keep)
    if body_schema is None:
        raise ConfigError("body_schema", "", f"a file: {body_format} bodies do not contain their schema")
    package = "fastavro" if body_format == "avro" else "google.protobuf"
    check_package("body_format", body_format, package, "bodies")
    if body_format == "avro":
        from cometmq.pipeline.table import body_avro

        schema = _read(body_schema, body_schema)
        return BodyOptions("avro", (schema, ""), body_avro.fields_of(schema.decode(errors="replace")), keep)
    from cometmq.pipeline.table import body_protobuf

    path, colon, name = body_schema.rpartition(":")
    if not colon:
        raise ConfigError(
            "body_schema", body_schema, "PATH:MESSAGE, a descriptor set and a message's full name"
        )
    content = _read(path, body_schema)
    return BodyOptions("protobuf", (content, name), body_protobuf.fields_of(content, name), keep)


def _read(path: str, setting: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise ConfigError("body_schema", setting, f"a file that can be read ({error.strerror})") from None


def _from_ddl(ddl: str) -> pa.StructType:
    try:
        parsed = StructType.fromDDL(ddl)
        fields = to_arrow_type(parsed, timezone="UTC")
    except PySparkException as error:
        problem = str(error).strip().splitlines()[0]
        raise ConfigError("body_schema", ddl, f"fields as in `id bigint, name string` ({problem})") from None
    JsonParser(check_names(fields))  # Raises ConfigError for types that JSON bodies cannot have
    return fields


def with_column(commit: dict[str, Any], column: pa.StructType | None) -> dict[str, Any]:
    """Return the commit with the type of the column `value` added, if the table has that column."""
    return commit if column is None else commit | {_COLUMN: from_arrow_type(column).jsonValue()}


def column_in(commit: dict[str, Any] | None) -> pa.StructType | None:
    """Return the type of the column `value` as of a commit, or None if the table has no such column."""
    if commit is None or _COLUMN not in commit:
        return None
    return to_arrow_type(StructType.fromJson(commit[_COLUMN]), timezone="UTC")


def columns_in(commit: dict[str, Any] | None) -> pa.Schema:
    """Return the columns of the table's rows as of a commit, including `topic`."""
    column = column_in(commit)
    return ARCHIVE_SCHEMA if column is None else pa.schema([*ARCHIVE_SCHEMA, *body_columns(column)])

"""A writer of record batches to Parquet files by topic, day and hour of store time (UTC), for archive tasks.

This module runs in Spark's Python workers. Rows keep their order (queue, offset). A row group is written when
about 64 MiB are buffered for its file, and a file is closed at about 256 MiB. When the buffers of all files
reach their limit, the files with the largest buffers are closed first.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cometmq.pipeline.table.directory import partition_value
from cometmq.private import sync_path

ROW_GROUP_BYTES = 64 * 1024 * 1024
FILE_BYTES = 256 * 1024 * 1024
BUFFER_BYTES = 96 * 1024 * 1024  # Maximum size of the rows buffered for all open files of a task, in bytes
MAX_OPEN_FILES = 64

_HOUR_US = 3_600_000_000
_DICTIONARY = ["topic", "broker_name", "tags", "born_host", "store_host", "properties.key_value.key"]
_NO_STATISTICS = {"body", "properties", "body_rest", "body_error", "value"}


class Partition(NamedTuple):
    """A directory of the table: the messages of one topic and hour."""

    topic: str
    hour: int  # Hours since 1970-01-01 00:00 UTC

    @property
    def directory(self) -> str:
        day = datetime.fromtimestamp(self.hour * 3600, UTC)
        return f"topic={partition_value(self.topic)}/dt={day.date()}/hour={day:%H}"


class StagedFile:
    """A new Parquet file for the archive's `directory`, which is first in `staging` unless that is ""."""

    def __init__(
        self, filesystem: fs.FileSystem, root: str, staging: str, directory: str, kind: str,
        schema: pa.Schema, **how: Any,
    ) -> None:  # fmt: skip
        self._filesystem, self._root = filesystem, root
        name = f"{kind}-{uuid.uuid4().hex}.parquet"
        self._path = f"{directory}/{name}"
        self._written = f"{staging}/{name}" if staging else self._path
        if not staging and isinstance(filesystem, fs.LocalFileSystem):
            filesystem.create_dir(f"{root}/{directory}", recursive=True)
        self._stream = filesystem.open_output_stream(f"{root}/{self._written}")
        self._writer = pq.ParquetWriter(self._stream, schema, **how)
        self._rows = 0

    def write(self, table: pa.Table) -> int:
        """Write the rows as one row group. Return the size of the file so far, in bytes."""
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._rows += table.num_rows
        return int(self._stream.tell())

    def close(self) -> dict[str, Any]:
        """Finish the file. Return its path and sizes, in the form that a commit needs."""
        self._writer.close()
        self._stream.close()
        where = f"{self._root}/{self._written}"
        if isinstance(self._filesystem, fs.LocalFileSystem):  # Remote stores make a file durable on close
            sync_path(where)
        size = self._filesystem.get_file_info(where).size
        staged = {} if self._written == self._path else {"staged": self._written}
        return {**staged, "path": self._path, "rows": self._rows, "bytes": size}


@dataclass(slots=True)
class _OpenFile:
    partition: Partition
    file: StagedFile
    written: int = 0  # Number of bytes written to the file so far
    batches: list[pa.RecordBatch] = field(default_factory=list)
    buffered: int = 0


class PartitionWriter:
    """A writer of batches to files, each with the rows of one topic and hour of `store_timestamp`.

    The files have the column `topic` only if `topic_in_files` is set: it is in their paths. After `close`,
    `files` describes all finished files, in the form that a commit needs.
    """

    def __init__(
        self, filesystem: fs.FileSystem, root: str, staging: str, *, compression: str, level: int | None,
        topic_in_files: bool = False, file_bytes: int = FILE_BYTES,
    ) -> None:  # fmt: skip
        self._topic_in_files = topic_in_files
        self._file_bytes = file_bytes
        self._place = (filesystem, root, staging)
        self._how: dict[str, Any] = {"compression": compression, "compression_level": level}
        self._open: dict[Partition, _OpenFile] = {}
        self._buffered = 0
        self.files: list[dict[str, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        rest = batch if self._topic_in_files else batch.drop_columns(["topic"])
        for partition, start, stop in partition_runs(batch):
            self._append(partition, rest.slice(start, stop - start))

    def _append(self, partition: Partition, part: pa.RecordBatch) -> None:
        file = self._open.get(partition)
        if file is None:
            while len(self._open) >= MAX_OPEN_FILES:
                self._close(max(self._open.values(), key=lambda item: item.buffered))
            file = self._open[partition] = self._create(partition, part.schema)
        size = part.nbytes
        file.batches.append(part)
        file.buffered += size
        self._buffered += size
        if file.buffered >= ROW_GROUP_BYTES:
            self._write_group(file)
        while self._buffered >= BUFFER_BYTES:
            self._write_group(max(self._open.values(), key=lambda item: item.buffered))
        if file.written >= self._file_bytes:
            self._close(file)

    def _create(self, partition: Partition, schema: pa.Schema) -> _OpenFile:
        columns = schema.names
        of_bodies = leaves("value", schema.field("value").type) if "value" in columns else []
        how = self._how | {
            "use_dictionary": [name for name in _DICTIONARY if name.split(".")[0] in columns] + of_bodies,
            "write_statistics": [name for name in columns if name not in _NO_STATISTICS] + of_bodies,
        }
        file = StagedFile(*self._place, partition.directory, "part", schema, **how)
        return _OpenFile(partition, file)

    def _write_group(self, file: _OpenFile) -> None:
        if file.batches:
            file.written = file.file.write(pa.Table.from_batches(file.batches))
            self._buffered -= file.buffered
            file.batches, file.buffered = [], 0

    def _close(self, file: _OpenFile) -> None:
        self._write_group(file)
        del self._open[file.partition]
        topic, hour = file.partition
        day = datetime.fromtimestamp(hour * 3600, UTC)
        facts = {"topic": topic, "dt": str(day.date()), "hour": day.hour}
        self.files.append(file.file.close() | facts)

    def close(self) -> None:
        """Finish all files. Not needed after an error: files without a commit are deleted."""
        for file in list(self._open.values()):
            self._close(file)


def leaves(path: str, kind: pa.DataType) -> list[str]:
    """Return the names of the Parquet columns into which the column `path` of this type is divided."""
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in leaves(f"{path}.{field.name}", field.type)]
    if pa.types.is_list(kind):
        return leaves(f"{path}.list.element", kind.value_type)
    if pa.types.is_map(kind):
        return [f"{path}.key_value.key", *leaves(f"{path}.key_value.value", kind.item_type)]
    return [path]


def partition_runs(batch: pa.RecordBatch) -> Iterator[tuple[Partition, int, int]]:
    """Yield (partition, first row, last row + 1) of consecutive rows with equal topic and hour."""
    if not batch.num_rows:
        return
    hours = batch.column("store_timestamp").cast(pa.int64()).to_numpy() // _HOUR_US
    topics = batch.column("topic").dictionary_encode()
    codes = topics.indices.to_numpy()
    for start, stop in runs(hours, codes):
        yield Partition(topics.dictionary[int(codes[start])].as_py(), int(hours[start])), start, stop


def runs(*columns: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield (first row, last row + 1) of consecutive rows that are equal in all `columns`."""
    count = len(columns[0])
    change = np.zeros(count, bool)
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    edges = [0, *np.flatnonzero(change).tolist(), count]
    for start, stop in pairwise(edges):
        if stop > start:
            yield start, stop

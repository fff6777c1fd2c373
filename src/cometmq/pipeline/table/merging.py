"""The part of a compaction that runs in Spark's workers: merge many small files of one hour.

Merged files are about as large as the target size. Their rows are ordered by queue and offset. In a small
file, consecutive rows of the same queue are a range. The merge sorts the ranges of all small files and copies
the rows range by range. Memory is limited because only some of the decoded row groups are cached. A row group
outside the cache is decoded again when it is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.partition_writer import PartitionWriter, runs
from cometmq.pipeline.table.task import full_disk_named

_KEPT_BYTES = 256 * 1024 * 1024  # Maximum size of the decoded row groups in the cache, in bytes
_BATCH_ROWS = 10_000
_ORDER = ["broker_name", "queue_id", "queue_offset"]


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one topic, day and hour that one task merges.

    `uri` is the archive's path or URI. `staging` is the directory for new files, relative to `uri`, or empty
    if they are written under their final paths.
    """

    uri: str
    staging: str
    topic: str
    paths: tuple[str, ...]
    target_bytes: int


class Stretch(NamedTuple):
    """Consecutive rows of one queue within one row group of a file."""

    broker_name: str
    queue_id: int
    first_offset: int
    path: str
    group: int
    start: int
    rows: int


def merge(unit: Merge) -> list[dict[str, Any]]:
    """Merge the files into new ones, and return their descriptions: none if types of columns differ."""
    with full_disk_named(unit.uri):
        return _merge(unit)


def _merge(unit: Merge) -> list[dict[str, Any]]:
    filesystem, root = open_filesystem(unit.uri)
    stretches: list[Stretch] = []
    schemas: list[pa.Schema] = []
    codec = "zstd"
    for path in unit.paths:
        with filesystem.open_input_file(f"{root}/{path}") as stream:
            file = pq.ParquetFile(stream)
            schemas.append(file.schema_arrow.remove_metadata())
            if file.num_row_groups:
                codec = file.metadata.row_group(0).column(0).compression
            stretches += _stretches(path, file)
    try:
        # Files that were written later may have additional fields in a column.
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return []
    writer = PartitionWriter(
        filesystem, root, unit.staging, compression="none" if codec == "UNCOMPRESSED" else codec, level=None,
        file_bytes=unit.target_bytes,
    )  # fmt: skip
    groups = _RowGroups(filesystem, root, schema, stretches)
    for stretch in sorted(stretches):
        for batch in groups.rows(stretch).to_batches(max_chunksize=_BATCH_ROWS):
            topic = pa.repeat(pa.scalar(unit.topic), batch.num_rows)
            writer.write(batch.append_column("topic", topic))
    writer.close()
    return writer.files


def _stretches(path: str, file: pq.ParquetFile) -> Iterator[Stretch]:
    for group in range(file.num_row_groups):
        order = file.read_row_group(group, columns=_ORDER).combine_chunks()
        brokers = order["broker_name"].combine_chunks().dictionary_encode()
        queues, offsets = order["queue_id"].to_numpy(), order["queue_offset"].to_numpy()
        # In a queue that was deleted and created again, lower offsets follow higher offsets. So each decrease
        # begins a new group of rows.
        lives = np.cumsum(np.diff(offsets, prepend=offsets[:1]) < 0)
        for start, stop in runs(brokers.indices.to_numpy(), queues, lives):
            broker_name = brokers.dictionary[int(brokers.indices[start].as_py())].as_py()
            yield Stretch(
                broker_name, int(queues[start]), int(offsets[start]), path, group, start, stop - start
            )


class _RowGroups:
    """A reader of row groups, with a cache of limited size for those that will be needed again.

    A full cache accepts no other row group. It does not evict the least recently used one: the merge passes
    through all files for each queue, so that row group will be needed next.
    """

    def __init__(
        self, filesystem: fs.FileSystem, root: str, schema: pa.Schema, stretches: Sequence[Stretch]
    ) -> None:
        self._filesystem, self._root, self._schema = filesystem, root, schema
        self._needed = Counter((stretch.path, stretch.group) for stretch in stretches)
        self._kept: dict[tuple[str, int], pa.Table] = {}
        self._bytes = 0

    def rows(self, stretch: Stretch) -> pa.Table:
        """Return the rows of a range, copied so that they do not keep the row group in memory."""
        key = (stretch.path, stretch.group)
        table = self._kept.get(key)
        if table is None:
            table = self._read(*key)
        self._needed[key] -= 1
        self._keep(key, table)
        if stretch.rows == table.num_rows:
            return table
        return table.take(pa.array(np.arange(stretch.start, stretch.start + stretch.rows)))

    def _keep(self, key: tuple[str, int], table: pa.Table) -> None:
        if not self._needed[key]:
            if self._kept.pop(key, None) is not None:
                self._bytes -= table.nbytes
        elif key not in self._kept and self._bytes + table.nbytes <= _KEPT_BYTES:
            self._kept[key] = table
            self._bytes += table.nbytes

    def _read(self, path: str, group: int) -> pa.Table:
        with self._filesystem.open_input_file(f"{self._root}/{path}") as stream:
            table = pq.ParquetFile(stream).read_row_group(group)
        return pa.concat_tables(
            [self._schema.empty_table(), table.replace_schema_metadata()], promote_options="permissive"
        )

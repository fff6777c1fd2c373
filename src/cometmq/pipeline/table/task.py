"""The part of the archive job that runs in Spark's workers: pull, decode and write Parquet, in one task.

The messages never pass through the JVM: the driver receives only a description of the written files. Spark's
own Parquet writer would cost 3 to 5 times as much (docs/pipeline.md).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import fs

from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.base.options import PullOptions
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.live.reading import read_parts
from cometmq.pipeline.table.bodies import Bodies, Parser, with_columns
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.objects import shown
from cometmq.pipeline.table.partition_writer import PartitionWriter, StagedFile, runs
from cometmq.protocol.record.arrow import COLUMNS, BadRecord, arrow_schema

ARCHIVE_SCHEMA = arrow_schema([name for name in COLUMNS if name != "offset_msg_id"])

_QUARANTINE_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("topic", "broker_name")),
        ("queue_id", pa.int32()),
        *((name, pa.int64()) for name in ("queue_offset", "physical_offset")),
        *((name, pa.string()) for name in ("stage", "problem")),
        ("raw", pa.binary()),
        ("batch", pa.int64()),
    ]
)
_BAD_FIELDS = ("queue_offset", "physical_offset", "stage", "problem", "raw")
_QUARANTINE_BYTES = 16 * 1024 * 1024  # Maximum size of the bad records that wait to be written, in bytes
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_ROW_BYTES = 1024  # Estimated maximum size of a bad record's row in bytes, without the raw record


@dataclass(frozen=True, slots=True)
class ArchiveTask:
    """The work of one task: `staging` is that of the table, `addresses` maps brokers' names to addresses."""

    batch: int
    ranges: list[QueueRange]
    addresses: dict[str, str]
    namesrv: tuple[str, ...]
    output: str
    staging: str
    compression: str
    compression_level: int | None
    pull: PullOptions
    topic_in_files: bool = False
    bodies: Bodies | None = None


@dataclass(slots=True)
class QueueCount:
    """The records and bytes (in the broker's store) read from a queue. Times are in ms, or None."""

    records: int = 0
    bad: int = 0
    lost: int = 0
    bytes: int = 0
    first_store_ms: int | None = None
    last_store_ms: int | None = None

    def add(self, other: QueueCount) -> None:
        self.records += other.records
        self.bad += other.bad
        self.lost += other.lost
        self.bytes += other.bytes
        times = [t for t in (self.first_store_ms, other.first_store_ms) if t is not None]
        self.first_store_ms = min(times, default=None)
        times = [t for t in (self.last_store_ms, other.last_store_ms) if t is not None]
        self.last_store_ms = max(times, default=None)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The files that a task wrote, and its counts by queue."""

    files: list[dict[str, Any]]
    quarantine: list[dict[str, Any]]
    queues: dict[MessageQueue, QueueCount]


def run_task(task: ArchiveTask) -> TaskResult:
    """Do a task's work. A full disk is an ArchiveError, for which Spark does not retry the task."""
    with full_disk_named(task.output):
        return _run(task)


@contextmanager
def full_disk_named(output: str) -> Iterator[None]:
    """Convert the error of a full disk to ArchiveError, so that Spark does not retry the task."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise ArchiveError(shown(output), f"not committed: {os.strerror(error.errno)}") from None


def _run(task: ArchiveTask) -> TaskResult:
    filesystem, root = open_filesystem(task.output)
    writer = PartitionWriter(
        filesystem, root, task.staging, compression=task.compression, level=task.compression_level,
        topic_in_files=task.topic_in_files,
    )  # fmt: skip
    bodies = task.bodies
    parser = None if bodies is None else _parser(bodies)
    queues = {item.queue: QueueCount() for item in task.ranges}
    quarantine = Quarantine(filesystem, root, task.staging, task.batch)
    for part in read_parts(task.namesrv, task.ranges, task.addresses, ARCHIVE_SCHEMA, task.pull):
        rows = part.batch if bodies is None or parser is None else with_columns(part.batch, bodies, parser)
        writer.write(rows)
        _count(part.batch, queues)
        for queue, lost in part.lost.items():
            queues[queue].lost += lost
        for source, record in part.bad:
            queues[source.queue].bad += 1
            quarantine.add(source.queue, record)
    writer.close()
    return TaskResult(writer.files, quarantine.close(), queues)


def _count(batch: pa.RecordBatch, queues: dict[MessageQueue, QueueCount]) -> None:
    """Add a batch to the counts of its queues. Raises KeyError for a queue that was not requested."""
    if not batch.num_rows:
        return
    broker_name = batch.column("broker_name")[0].as_py()
    topics = batch.column("topic").dictionary_encode()
    topic_codes = topics.indices.to_numpy()
    queue_ids = batch.column("queue_id").to_numpy()
    times = batch.column("store_timestamp").cast(pa.int64()).to_numpy() // 1000
    sizes = batch.column("store_size").to_numpy()
    for start, stop in runs(topic_codes, queue_ids):
        topic = topics.dictionary[int(topic_codes[start])].as_py()
        queues[MessageQueue(topic, broker_name, int(queue_ids[start]))].add(
            QueueCount(
                records=stop - start,
                bytes=int(np.sum(sizes[start:stop], dtype=np.int64)),
                first_store_ms=int(times[start:stop].min()),
                last_store_ms=int(times[start:stop].max()),
            )
        )


class Quarantine:
    """A writer of a task's bad records to one file. It holds few of them, because all may be bad."""

    def __init__(self, filesystem: fs.FileSystem, root: str, staging: str, batch: int) -> None:
        self._place = (filesystem, root, staging)
        self._batch = batch
        self._file: StagedFile | None = None
        self._rows: list[dict[str, Any]] = []
        self._held = 0

    def add(self, queue: MessageQueue, record: BadRecord) -> None:
        facts = {name: getattr(record, name) for name in _BAD_FIELDS}
        self._rows.append(msgspec.structs.asdict(queue) | facts | {"batch": self._batch})
        self._held += len(record.raw) + _ROW_BYTES
        if self._held >= _QUARANTINE_BYTES:
            self._write()

    def _write(self) -> None:
        if self._file is None:
            directory = "_cometmq/quarantine"
            self._file = StagedFile(*self._place, directory, "bad", _QUARANTINE_SCHEMA, compression="zstd")
        self._file.write(pa.Table.from_pylist(self._rows, _QUARANTINE_SCHEMA))
        self._rows, self._held = [], 0

    def close(self) -> list[dict[str, Any]]:
        """Finish the file of bad records, and return its description, or nothing without a file."""
        if self._rows:
            self._write()
        return [] if self._file is None else [self._file.close()]


def _parser(bodies: Bodies) -> Parser:
    if bodies.format == "json":
        from cometmq.pipeline.table.body_json import JsonParser

        return JsonParser(bodies.fields)
    if bodies.format == "avro":
        from cometmq.pipeline.table.body_avro import AvroParser

        return AvroParser(bodies.schema[0].decode())
    from cometmq.pipeline.table.body_protobuf import ProtobufParser

    return ProtobufParser(*bodies.schema)

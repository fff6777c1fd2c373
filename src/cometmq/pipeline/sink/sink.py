"""The writing side of the Spark data source `cometmq`: rows to messages, from batch jobs and streams.

Delivery is at least once: a repeated task or batch sends its rows again with the same message ids. The id
(UNIQ_KEY) of a row is derived from query, batch, partition and row number, so consumers and later jobs can
distinguish a repetition from a new message. This requires that a partition has its rows in the same order
when Spark computes it again.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from cometmq.errors import ConfigError
from cometmq.pipeline.base.options import WriteOptions
from cometmq.pipeline.sink.bad_rows import BadRows
from cometmq.pipeline.sink.encoded import encode_rows, slices
from cometmq.pipeline.sink.rows import check_columns, messages_of
from cometmq.pipeline.sink.sending import Sender


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The numbers of messages and bytes that one task sent."""

    partition: int
    messages: int
    bytes: int
    bad: int


class CometWriter(DataSourceArrowWriter):
    """The writer of a batch query.

    The option `writeId` sets the id of the write. Without the option, an id is generated when Spark plans the
    write. If a job is repeated with the same id and the same rows, its messages have the same message ids.
    """

    def __init__(self, schema: StructType, options: WriteOptions, overwrite: bool = False) -> None:
        if overwrite:
            raise ConfigError("mode", "overwrite", "append (messages cannot be overwritten)")
        check_columns(schema, options)
        self._options = options
        self._write_id = options.write_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write(iterator, self._options, self._write_id, "0")


class CometStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write.

    Message ids contain Spark's query and batch ids, so a batch that is repeated after a crash has the same
    message ids. If Spark does not provide these ids, each task generates an id of its own.
    """

    def __init__(self, schema: StructType, options: WriteOptions, overwrite: bool = False) -> None:
        if overwrite:
            raise ConfigError("outputMode", "complete", "append or update (messages cannot be overwritten)")
        check_columns(schema, options)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = self._options.write_id or context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            # Spark has not provided the query and batch ids, so random ids are used. A repeated task then
            # sends new message ids, which is better than ids that another query or batch uses, too.
            query, batch = uuid.uuid4().hex, ""
        return _write(iterator, self._options, query, batch)


def _write(iterator: Iterator[pa.RecordBatch], options: WriteOptions, query: str, batch: str) -> Written:
    context = TaskContext.get()
    assert context is not None
    partition = context.partitionId()
    ids = MessageIds(query, batch, partition)
    bad = BadRows(options.bad_records_path, ids.prefix) if options.bad_records_path else None
    on_bad, on_illegal = (bad.add, bad.refused) if bad else (None, None)
    with Sender(options, partition, on_illegal) as sender:
        row = 0
        for records in chain.from_iterable(map(slices, iterator)):
            encoded = encode_rows(records, options, row, ids.prefix)
            if encoded is not None:
                sender.send_rows(encoded)
            else:
                for message in messages_of(records, options, row, ids, on_bad):
                    sender.send(message)
            row += records.num_rows
        sender.flush()
        if bad is not None:
            bad.flush()
        return Written(partition, sender.messages, sender.bytes, bad.count if bad else 0)


class MessageIds:
    """Message ids of 32 upper-case hex digits, as clients generate: 22 for the partition, 10 for the row."""

    def __init__(self, query: str, batch: str, partition: int) -> None:
        digest = hashlib.sha256(f"{query}/{batch}/{partition}".encode()).hexdigest()
        self.prefix = digest[:22].upper()

    def __call__(self, row: int) -> str:
        return f"{self.prefix}{row & 0xFFFFFFFFFF:010X}"

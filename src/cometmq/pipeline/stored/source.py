"""The Spark data source `cometmq-store`: the messages in store directories as rows, without a broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from cometmq import logs
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import BadStoreRecordError, LogLossError
from cometmq.pipeline.base.options import StoreOptions
from cometmq.pipeline.live.reading import plain_body
from cometmq.pipeline.live.source import check_schema
from cometmq.pipeline.stored.log import Block, Damage
from cometmq.pipeline.stored.plan import Slice, plan_slices
from cometmq.protocol.record.arrow import ColumnDecoder
from cometmq.protocol.record.many import Rows

log = logs.logger(__name__)


class StoreReader(DataSourceReader):
    """The reader of a batch query on stores. Its slices are fixed when it is planned, and so its rows."""

    def __init__(self, schema: StructType, options: StoreOptions) -> None:
        self._arrow = check_schema(schema)
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return plan_slices(self._options)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark passes None if the plan has no slices.
        return read_slice(partition, self._arrow, self._options) if isinstance(partition, Slice) else iter(())


def read_slice(part: Slice, schema: pa.Schema, options: StoreOptions) -> Iterator[pa.RecordBatch]:
    """Return the requested records of a slice in log order, in batches with the columns of `schema`.

    If the options require it, a damaged record raises BadStoreRecordError, and a missing file raises
    LogLossError. Otherwise each of them is logged as a warning. Raises StoreCorrupt and OSError.
    """
    decoder = ColumnDecoder(
        schema,
        broker_name=part.broker_name,
        check_crc=False,
        decompress=partial(plain_body, options.max_plain_bytes) if options.decompress else None,
        plain_bytes=options.batch_bytes,
    )
    decoder.check_crc = options.check_crc and "body" in decoder.columns
    path = part.file.path
    try:
        reader = part.file.open()
    except FileNotFoundError:
        lost = LogLossError(path, part.start, part.stop, "the file was deleted after the read was planned")
        if options.fail_on_data_loss:
            raise lost from None
        log.warning("%s", lost)
        return
    with reader:
        for found in reader.walk(part.start, part.stop, options.batch_bytes):
            if isinstance(found, Damage):
                _bad(path, found.start, "layout", f"{found.problem}; nothing up to {found.stop}", options)
            else:
                yield from _batches(path, found, decoder, options)


def _batches(
    path: str, block: Block, decoder: ColumnDecoder, options: StoreOptions
) -> Iterator[pa.RecordBatch]:
    rows = _wanted(block, options)
    for first in range(0, len(rows.start), options.batch_records):
        some = rows.pick(slice(first, first + options.batch_records))
        for batch, bad in decoder.decode_rows(block.data, some):
            for item in bad:
                _bad(path, block.position + item.position, item.stage, item.problem, options)
            if batch.num_rows:
                yield batch


def _wanted(block: Block, options: StoreOptions) -> Rows:
    """Return the records within the requested times and topics. Only store time and topic are compared."""
    rows = block.rows
    if options.starting_ms is not None:
        rows = rows.pick(rows.field("store_timestamp") >= options.starting_ms)
    if options.ending_ms is not None:
        rows = rows.pick(rows.field("store_timestamp") < options.ending_ms)
    if options.topics is not None:
        ends = (rows.topic_start + rows.topic_length).tolist()
        names = [block.data[start:end] for start, end in zip(rows.topic_start.tolist(), ends, strict=True)]
        queues = {name: MessageQueue(name.decode("utf-8", "replace"), "", 0) for name in set(names)}
        wanted = {name for name, queue in queues.items() if options.topics.includes(queue)}
        rows = rows.pick(np.fromiter(map(wanted.__contains__, names), bool, len(names)))
    return rows


def _bad(path: str, position: int, stage: str, problem: str, options: StoreOptions) -> None:
    error = BadStoreRecordError(path, position, stage, problem)
    if options.on_bad_record == "fail":
        raise error
    log.warning("left out: %s", error)

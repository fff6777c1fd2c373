"""Bulk encoding: rows that need no individual treatment are converted to the items of batch sends.

Most writes consist of rows for one topic that have a body, and possibly keys and tags. Arrow joins the parts
of a whole batch of such rows, so that a row costs a fifth of the time that rows.py needs. A batch that
contains any other row, or a row that may be invalid, is left to rows.py, which reports the problem of each
row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.pipeline.base.options import WriteOptions
from cometmq.pipeline.sink.rows import MOST_BYTES, RowMessage, is_valid, topic_problem
from cometmq.protocol.batch import MIN_ITEM, iter_batch
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES

_ALONE = ("properties", "delay_level", "sharding_key", "msg_id", "flag")
"""Columns with which a row must be encoded on its own, instead of in bulk."""
_DIGITS = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS = np.arange(36, -1, -4)
_HEAD = np.dtype([("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body", ">i4")])
MAX_SLICE_BYTES = 64 * 1024 * 1024
"""Maximum number of bytes that are encoded together. Arrow's arrays of binary values hold less than 2 GiB."""
_RECORD_EXTRA = 32  # Size of a record's fixed part in bytes, which counts towards `batchBytes`


class EncodedRows(Sequence[RowMessage]):
    """Messages of one topic, encoded as adjacent items. A slice of the items can be the body of a request."""

    def __init__(self, topic: str, items: Any, bodies: Any, begin: int, end: int) -> None:
        """Initialize the messages `begin` to `end` - 1.

        Args:
            items: The start of each item and the end of the last item (a numpy array of n + 1), and the
                items' bytes (a memoryview).
            bodies: Cumulative body lengths (a numpy array of n + 1).
        """
        self._topic, self._items, self._bodies = topic, items, bodies
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    @overload
    def __getitem__(self, index: int) -> RowMessage: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedRows: ...
    def __getitem__(self, index: int | slice) -> RowMessage | EncodedRows:
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            begin, end = self._begin + begin, self._begin + end
            return EncodedRows(self._topic, self._items, self._bodies, begin, end)
        (item,) = iter_batch(self[range(len(self))[index] :][:1].body)
        return RowMessage(self._topic, bytes(item.body), bytes(item.properties), item.flag, 0, None)

    @property
    def topic(self) -> str:
        return self._topic

    @property
    def body(self) -> bytes:
        """Return the items of all these messages as the body of a batch send."""
        offsets, data = self._items
        return bytes(data[offsets[self._begin] : offsets[self._end]])

    @property
    def body_bytes(self) -> int:
        return int(self._bodies[self._end] - self._bodies[self._begin])

    def parts(self, most_records: int, most_bytes: int) -> Iterator[EncodedRows]:
        """Divide the rows into requests of limited size. A larger row is a request of its own."""
        sizes = self._items[0] + _RECORD_EXTRA * np.arange(len(self._items[0]))
        begin = self._begin
        while begin < self._end:
            fits = int(np.searchsorted(sizes, sizes[begin] + most_bytes, "right")) - 1
            end = min(max(fits, begin + 1), begin + most_records, self._end)
            yield EncodedRows(self._topic, self._items, self._bodies, begin, end)
            begin = end


def encode_rows(
    batch: pa.RecordBatch, options: WriteOptions, first_row: int, id_prefix: str
) -> EncodedRows | None:
    """Return a batch's messages with the ids of rows.py, or None if rows.py must look at each row."""
    topic = options.topic
    columns = {("body" if name == "value" else name): batch.column(name) for name in batch.schema.names}
    one_kind = not any(name in columns and columns[name].null_count < len(batch) for name in _ALONE)
    if not topic or topic_problem(topic) or topic.startswith(RETRY_PREFIX):
        return None
    if not one_kind or columns["body"].null_count or not len(batch):
        return None
    given = [(name, columns[column]) for name, column in _TEXTS if column in columns]
    texts = [(name, _binary(text)) for name, text in given]
    if any(_holds_separators(text) for _, text in texts) or not all(is_valid(text) for _, text in given):
        return None
    body = _binary(columns["body"])
    # Message ids end with the last ten hexadecimal digits of the row number.
    rows = np.arange(first_row, first_row + len(batch), dtype=np.int64)
    numbers = _DIGITS[(rows[:, None] >> _SHIFTS) & 15]
    parts = [b"UNIQ_KEY\x01" + id_prefix.encode(), _bytes_of(numbers), b"\x02WAIT\x01true"]
    for name, text in texts:
        present = pc.fill_null(pc.greater(pc.binary_length(text), 0), False)
        parts.append(pc.if_else(present, pc.binary_join_element_wise(name, text, b""), b""))
    properties = pc.binary_join_element_wise(*parts, b"")
    body_sizes, sizes = _lengths(body), _lengths(properties)
    if not body_sizes.all():
        return None
    if sizes.max() > MAX_PROPERTIES_BYTES or (sizes + body_sizes).max() > MOST_BYTES:
        return None
    head = np.zeros(len(batch), _HEAD)
    head["size"], head["body"] = sizes + body_sizes + MIN_ITEM, body_sizes
    items = pc.binary_join_element_wise(
        _bytes_of(head), body, _bytes_of(sizes.astype(">i2")), properties, b""
    )
    offsets = np.frombuffer(items.buffers()[1], np.int32)[: len(items) + 1].astype(np.int64)
    sums = np.concatenate(([0], np.cumsum(body_sizes, dtype=np.int64)))
    return EncodedRows(topic, (offsets, memoryview(items.buffers()[2])), sums, 0, len(items))


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide a batch into slices of at most MAX_SLICE_BYTES. A larger row is a slice of its own."""
    if batch.nbytes <= MAX_SLICE_BYTES or batch.num_rows < 2:
        yield batch
    else:
        middle = batch.num_rows // 2
        yield from slices(batch.slice(0, middle))
        yield from slices(batch.slice(middle))


_TEXTS = ((b"\x02KEYS\x01", "keys"), (b"\x02TAGS\x01", "tags"))


def _binary(values: pa.Array) -> pa.BinaryArray:
    """Return binary values or texts with offsets of 32 bits, which begin at 0 for a large type."""
    if pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type):
        values = pa.concat_arrays([values, values[:0]])  # A cast refuses offsets of 2 GiB, even of a slice
    return values.cast(pa.binary())


def _holds_separators(text: pa.BinaryArray) -> bool:
    """Return whether a value of the array may contain one of the bytes that separate properties."""
    _, offsets, data = text.buffers()
    if data is None:
        return False
    ends = np.frombuffer(offsets, np.int32)
    values = memoryview(data)[ends[text.offset] : ends[text.offset + len(text)]].tobytes()
    return b"\x01" in values or b"\x02" in values


def _bytes_of(rows: Any) -> pa.BinaryArray:
    """Return each row of a numpy array as one binary value."""
    width = rows.nbytes // len(rows)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(rows), [None, pa.py_buffer(rows.tobytes())]
    )
    return fixed.cast(pa.binary())


def _lengths(values: pa.BinaryArray) -> Any:
    return pc.binary_length(values).to_numpy().astype(np.int64)

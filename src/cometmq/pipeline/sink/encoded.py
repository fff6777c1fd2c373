"""Rows that need no decision one by one, encoded together as the items of batch sends.

Most writes are rows of a body, perhaps with keys and tags, for one topic. Arrow joins their parts for a whole
batch at once, so that a row costs a task a fifth of what it costs alone (rows.py). A batch with any
row that is different, or that could be wrong, is left to rows.py, which says what is wrong with which row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.pipeline.base.options import WriteOptions
from cometmq.pipeline.sink.rows import MOST_BYTES, RowMessage, topic_problem
from cometmq.protocol.batch import MIN_ITEM, iter_batch
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES

_ALONE = ("properties", "delay_level", "sharding_key", "msg_id", "flag")
"""Columns by which rows differ in more than their text."""
_DIGITS = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS = np.arange(36, -1, -4)
_HEAD = np.dtype([("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body", ">i4")])
_RECORD_EXTRA = 32  # of a record's fixed part, as it counts towards batchBytes


class EncodedRows(Sequence[RowMessage]):
    """Messages of one topic as items back to back, of which a slice is a request's body."""

    def __init__(self, topic: str, items: Any, bodies: Any, begin: int, end: int) -> None:
        """items: where each begins and where the last one ends, and their bytes; bodies: sums of body lengths
        before each and in all (numpy arrays of n + 1, and a memoryview)."""
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
        """The items of all these messages, as a batch send has them."""
        offsets, data = self._items
        return bytes(data[offsets[self._begin] : offsets[self._end]])

    @property
    def body_bytes(self) -> int:
        return int(self._bodies[self._end] - self._bodies[self._begin])

    def parts(self, most_records: int, most_bytes: int) -> Iterator[EncodedRows]:
        """These rows in requests of at most so many; one that is larger alone is alone."""
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
    """All messages of a batch whose first row is number `first_row` of its partition, or None if rows.py has
    to look at each. The message ids are those that rows.py gets from MessageIds."""
    topic = options.topic
    columns = {("body" if name == "value" else name): batch.column(name) for name in batch.schema.names}
    one_kind = not any(name in columns and columns[name].null_count < len(batch) for name in _ALONE)
    if not topic or topic_problem(topic) or topic.startswith(RETRY_PREFIX):
        return None
    if not one_kind or columns["body"].null_count or not len(batch):
        return None
    texts = [(name, columns[column].cast(pa.binary())) for name, column in _TEXTS if column in columns]
    if any(_holds_separators(text) for _, text in texts):
        return None
    body = columns["body"].cast(pa.binary())
    parts = [b"UNIQ_KEY\x01" + id_prefix.encode(), _row_numbers(first_row, len(batch)), b"\x02WAIT\x01true"]
    for name, text in texts:
        given = pc.fill_null(pc.greater(pc.binary_length(text), 0), False)
        parts.append(pc.if_else(given, pc.binary_join_element_wise(name, text, b""), b""))
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


_TEXTS = ((b"\x02KEYS\x01", "keys"), (b"\x02TAGS\x01", "tags"))


def _holds_separators(text: pa.BinaryArray) -> bool:
    """Whether a value may hold what separates properties. Neighbours of a slice count too."""
    data = text.buffers()[2]
    return data is not None and any(
        separator in memoryview(data).tobytes() for separator in (b"\x01", b"\x02")
    )


def _row_numbers(first: int, count: int) -> pa.BinaryArray:
    """The last ten hexadecimal digits of the numbers of rows."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    return _bytes_of(_DIGITS[(numbers[:, None] >> _SHIFTS) & 15])


def _bytes_of(rows: Any) -> pa.BinaryArray:
    """The bytes of each row of a numpy array."""
    width = rows.nbytes // len(rows)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(rows), [None, pa.py_buffer(rows.tobytes())]
    )
    return fixed.cast(pa.binary())


def _lengths(values: pa.BinaryArray) -> Any:
    return pc.binary_length(values).to_numpy().astype(np.int64)

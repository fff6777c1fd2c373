"""Records of the commit log, many at a time, to Arrow columns.

The input is what a pull reply or a commit-log file holds: records back to back (layout: record.py). The
output are `pyarrow.RecordBatch`es whose schema the caller chooses: columns that are not asked for cost
nothing. Everything here works on whole batches with numpy gathers and `pyarrow` takes; a Python loop runs
only over rare rows (compressed bodies, IPv6 hosts, property strings that break the grammar) and over the
bodies when their CRC is checked.

One bad record never spoils a batch: it is left out and reported as a `BadRecord`.

Costs on one core for 1.2 KiB records with all columns: about 0.6 µs a record, 0.3-0.9 µs more with the CRC
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.protocol.ids import encode_offset_id, unpack_host
from cometmq.protocol.properties.columns import PropertyColumns, is_utf8
from cometmq.protocol.record.layout import (
    BORN_V6,
    COMPRESSED,
    HOSTS_AT,
    STORE_V6,
    V6_EXTRA,
    BadRecord,
    Buffer,
    Bytes,
    Ints,
    Origin,
    Rows,
    crc_mismatches,
    gather,
    keep,
    layout,
    strangers,
)

MAX_BATCH = 0x7FFFFFFF  # bytes of a buffer, and of a batch's plain bodies: Arrow's offsets have 31 bits

_TIMESTAMP = pa.timestamp("us", tz="UTC")
PROPERTIES_TYPE = pa.map_(pa.string(), pa.string())

COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "broker_name": pa.string(),
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "physical_offset": pa.int64(),
    "msg_id": pa.string(),
    "tags": pa.string(),
    "keys": pa.string(),
    "body": pa.binary(),
    "properties": PROPERTIES_TYPE,
    "flag": pa.int32(),
    "sys_flag": pa.int32(),
    "born_timestamp": _TIMESTAMP,
    "born_host": pa.string(),
    "store_timestamp": _TIMESTAMP,
    "store_host": pa.string(),
    "reconsume_times": pa.int32(),
    "prepared_transaction_offset": pa.int64(),
    "body_crc": pa.int32(),
    "store_size": pa.int32(),
    "offset_msg_id": pa.string(),
}
"""Every column this decoder knows, with its Arrow type. `msg_id` is the client's UNIQ_KEY, or the offset id
without one; `keys` is the KEYS property as written (blank-separated); `body` is plain even if it was stored
compressed, while `sys_flag`, `body_crc` and `store_size` are as stored. Time stamps are milliseconds in the
record, microseconds in Arrow."""

_FROM_PROPERTIES = {"msg_id": b"UNIQ_KEY", "tags": b"TAGS", "keys": b"KEYS"}

_LEAST_MS, _MOST_MS = -62_104_060_800_000, 253_370_764_799_999  # years 2 to 9998
_NATIVE: dict[pa.DataType, npt.DTypeLike] = {pa.int32(): "i4", pa.int64(): "i8"}
_HEX = np.frombuffer(b"".join(b"%02X" % i for i in range(256)), dtype="V2")


class Decoded(NamedTuple):
    batch: pa.RecordBatch
    bad: list[BadRecord]


class UnknownColumnError(ValueError):
    """The schema asks for a column (or a type of one) that a record does not have."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(column, problem)
        self.column, self.problem = column, problem

    def __str__(self) -> str:
        return f"column {self.column!r}: {self.problem}"


def canonical_column(name: str) -> str | None:
    """The column meant by `name`: 'queueOffset', 'QUEUE_OFFSET' and 'queue_offset' are one. None if there is
    none.
    """
    return _CANONICAL.get(name.replace("_", "").lower())


_CANONICAL = {name.replace("_", ""): name for name in COLUMNS}


def arrow_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The Arrow schema of these columns (all of them by default), every field nullable."""
    return pa.schema([(name, COLUMNS[name]) for name in (COLUMNS if columns is None else columns)])


def batch_ends(sizes: Sequence[int], max_records: int, max_bytes: int) -> list[int]:
    """Where to cut a run of items so that no part is over a limit; an item over `max_bytes` alone gets its
    own part.
    """
    ends: list[int] = []
    count = total = 0
    for index, size in enumerate(sizes):
        if count and (count >= max_records or total + size > max_bytes):
            ends.append(index)
            count = total = 0
        count += 1
        total += size
    if count:
        ends.append(len(sizes))
    return ends


class ColumnDecoder:
    """Decodes buffers of records to batches of one schema. Holds no buffer between calls.

    `schema` names columns of `COLUMNS` in any spelling `canonical_column` takes and any order; the batches
    carry exactly this schema. `broker_name` fills the column that no record holds. `decompress` is called as
    (sys_flag, stored body). `plain_bytes`: a batch ends before a compressed body with which the plain ones of
    it would be more than this; one that is larger alone gets a batch that ends with it.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        broker_name: str = "",
        check_crc: bool = True,
        decompress: Callable[[int, bytes], bytes] | None = None,
        plain_bytes: int = MAX_BATCH,
    ) -> None:
        self.schema = schema
        self.broker_name = broker_name
        self.check_crc = check_crc
        self.plain_bytes = plain_bytes
        self.columns = [_checked_column(field) for field in schema]
        wanted = set(self.columns)
        self.decompress = decompress if "body" in wanted else None
        self._property_names = {c: p for c, p in _FROM_PROPERTIES.items() if c in wanted}
        self._needs_properties = bool(self._property_names) or "properties" in wanted

    def decode(
        self, buffer: Buffer, starts: Sequence[int] | Ints, origins: Sequence[Origin] = ()
    ) -> Iterator[Decoded]:
        """Decode the records that begin at `starts` (ascending, each within the buffer by its own length): at
        least one batch, in order, each with the bad records found until then.

        origins: where the records come from; one that says otherwise is bad. All positions must be covered.
        """
        if len(buffer) > MAX_BATCH:
            raise ValueError("a buffer of records must stay under 2 GiB: Arrow's offsets have 31 bits")
        data = np.frombuffer(buffer, dtype=np.uint8)
        rows, bad = layout(data, np.asarray(starts, dtype=np.int64))
        if self.check_crc:
            rows = keep(
                rows, bad, data, crc_mismatches(buffer, rows), "crc", "body does not match its CRC-32"
            )
        if origins:
            rows = keep(rows, bad, data, strangers(data, rows, origins), "queue", "is of another queue")
        arrow_data = pa.py_buffer(buffer)
        for run, plain in self._runs(data, rows, bad):
            while True:
                try:
                    batch = self._batch(arrow_data, data, run, plain)
                    break
                except _RowProblems as problem:
                    run = keep(run, bad, data, problem.rows, problem.stage, problem.text)
            yield Decoded(batch, bad.copy())
            bad.clear()  # the same list: `_runs` adds to it

    def _runs(self, data: Bytes, rows: Rows, bad: list[BadRecord]) -> Iterator[tuple[Rows, dict[int, bytes]]]:
        """Runs of rows whose plain bodies fit into one batch, with those that were compressed, by start."""
        plain: dict[int, bytes] = {}
        if self.decompress is None:
            yield rows, plain
            return
        first = size = 0
        good = np.ones(len(rows.start), dtype=bool)
        for row in np.flatnonzero(rows.sys_flag & COMPRESSED).tolist():
            begin = int(rows.body_start[row])
            stored = data[begin : begin + int(rows.body_length[row])].tobytes()
            try:
                body = self.decompress(int(rows.sys_flag[row]), stored)
            except MemoryError:
                raise  # no fault of the record
            except Exception as error:
                # Libraries of three codecs, each with its own exceptions; whatever it is, this record is bad.
                problem = f"cannot decompress: {type(error).__name__}: {error}"
                keep(rows.take(slice(row, row + 1)), bad, data, np.zeros(1, np.int64), "body", problem)
                good[row] = False
                continue
            if plain and size + len(body) > self.plain_bytes:
                yield rows.take(slice(first, row)).take(good[first:row]), plain
                first, size, plain = row, 0, {}
            plain[int(rows.start[row])] = body
            size += len(body)
        yield rows.take(slice(first, None)).take(good[first:]) if first or not good.all() else rows, plain

    def _batch(self, buffer: pa.Buffer, data: Bytes, rows: Rows, plain: dict[int, bytes]) -> pa.RecordBatch:
        properties = None
        if self._needs_properties:
            raw = _slices(buffer, rows.properties_start, rows.properties_length, pa.binary())
            properties = PropertyColumns(raw)
            if len(properties.invalid):
                raise _RowProblems(properties.invalid, "text", "properties are not UTF-8")
        arrays = [
            _bodies(buffer, rows, plain)
            if column == "body"
            else self._column(column, field.type, buffer, data, rows, properties)
            for column, field in zip(self.columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(
        self,
        column: str,
        kind: pa.DataType,
        buffer: pa.Buffer,
        data: Bytes,
        rows: Rows,
        properties: PropertyColumns | None,
    ) -> pa.Array:
        if column == "topic":
            return _text(_slices(buffer, rows.topic_start, rows.topic_length, pa.binary()), "topic")
        if column == "broker_name":
            return pa.repeat(pa.scalar(self.broker_name, pa.string()), len(rows.start))
        if column == "properties":
            assert properties is not None
            return properties.map(kind)
        if column in self._property_names:
            assert properties is not None
            values = properties.values_of(self._property_names[column])
            if column == "msg_id" and values.null_count:
                values = pc.coalesce(values, _offset_ids(data, rows))
            return values
        if column == "offset_msg_id":
            return _offset_ids(data, rows)
        if column in ("born_host", "store_host"):
            return _hosts(data, rows, column)
        field = rows.field(column)
        if pa.types.is_timestamp(kind):
            return _times(field.astype("i8"), column).view(kind)
        return pa.array(field.astype(_NATIVE[kind]))


class _RowProblems(Exception):
    """Rows that turned out bad while a column was built: they are taken out and the batch is built again."""

    def __init__(self, rows: Ints, stage: str, text: str) -> None:
        super().__init__(rows, stage, text)
        self.rows, self.stage, self.text = rows, stage, text


def _checked_column(field: pa.Field) -> str:
    column = canonical_column(field.name)
    if column is None:
        raise UnknownColumnError(field.name, f"not one of {', '.join(COLUMNS)}")
    wanted = COLUMNS[column]
    if column == "properties":
        same = (
            pa.types.is_map(field.type) and (field.type.key_type, field.type.item_type) == (pa.string(),) * 2
        )
    else:
        same = field.type == wanted
    if not same:
        raise UnknownColumnError(field.name, f"has the type {wanted}, not {field.type}")
    return column


def _bodies(buffer: pa.Buffer, rows: Rows, plain: dict[int, bytes]) -> pa.Array:
    """The bodies of all rows: as stored, but those whose start is in `plain`."""
    length = rows.body_length
    if not plain:
        return _slices(buffer, rows.body_start, length, pa.binary())
    at = np.flatnonzero(np.isin(rows.start, np.fromiter(plain, np.int64, len(plain))))
    length = length.copy()
    length[at] = 0
    stored = _slices(buffer, rows.body_start, length, pa.binary())
    order = np.arange(len(stored))
    order[at] = len(stored) + np.arange(len(at))
    bodies = pa.array([plain[start] for start in rows.start[at].tolist()], pa.binary())
    return pa.concat_arrays([stored, bodies]).take(pa.array(order))


def _times(ms: Ints, column: str) -> pa.Array:
    """Milliseconds to microseconds, with a check: what lies outside the years 1 to 9999 is no time to most
    readers (Python's dates, SQL), a year inside there is none in all time zones, and the greatest numbers
    would wrap."""
    wrong = np.flatnonzero((ms < _LEAST_MS) | (ms > _MOST_MS))
    if len(wrong):
        raise _RowProblems(wrong, "time", f"{column} {ms[wrong[0]]} is outside the years 2 to 9998")
    return pa.array(ms * 1000)


def _slices(buffer: pa.Buffer, start: Ints, length: Ints, kind: pa.DataType) -> pa.Array:
    """`buffer[start:start+length]` of each row as one binary array.

    The starts and ends are the offsets of an array over the whole buffer (nothing copied), of which every
    second element is wanted; `take` gathers those in C++.
    """
    offsets = np.empty(2 * len(start), dtype=np.int32)
    offsets[0::2] = start
    offsets[1::2] = start + length
    if not len(offsets):
        return pa.array([], kind)
    all_of_it = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), buffer])
    return all_of_it.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int32)))


def _text(values: pa.Array, what: str) -> pa.Array:
    """Binary to string, with a check; rows that are not UTF-8 are reported as bad."""
    text = pa.Array.from_buffers(pa.string(), len(values), values.buffers(), offset=values.offset)
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        wrong = [i for i, value in enumerate(values.to_pylist()) if not is_utf8(value)]
        raise _RowProblems(np.asarray(wrong), "text", f"{what} is not UTF-8") from None
    return text


def _offset_ids(data: Bytes, rows: Rows) -> pa.Array:
    """The id that names a record by where it lies: hex of store host, port and physical offset (32 or 56
    digits).
    """
    host = rows.start + 64 + np.where(rows.sys_flag & BORN_V6, V6_EXTRA, 0)
    sixteen = np.empty((len(host), 16), dtype=np.uint8)
    sixteen[:, :8] = gather(data, host, 8).view(np.uint8).reshape(-1, 8)
    sixteen[:, 8:] = rows.head["physical_offset"].astype(">i8").view(np.uint8).reshape(-1, 8)
    digits = _HEX[sixteen.reshape(-1)]
    offsets = np.arange(0, 32 * (len(host) + 1), 32, dtype=np.int32)
    ids = pa.Array.from_buffers(pa.string(), len(host), [None, pa.py_buffer(offsets), pa.py_buffer(digits)])
    long = np.flatnonzero(rows.sys_flag & STORE_V6)
    if not len(long):
        return ids
    texts = ids.to_pylist()
    for row in long.tolist():
        at = int(host[row])
        texts[row] = encode_offset_id(data[at : at + 20].tobytes(), int(rows.head["physical_offset"][row]))
    return pa.array(texts, pa.string())


def _hosts(data: Bytes, rows: Rows, column: str) -> pa.Array:
    """'address:port' of each row. There are few hosts in a batch: each is formatted once."""
    born = column == "born_host"
    flag = BORN_V6 if born else STORE_V6
    start = rows.start + HOSTS_AT
    if not born:
        start = start + 16 + np.where(rows.sys_flag & BORN_V6, V6_EXTRA, 0)
    long = (rows.sys_flag & flag) != 0
    raw = gather(data, start, 8).view(">u8").astype(np.uint64)
    raw[long] = 0
    distinct, which = np.unique(raw, return_inverse=True)
    names = [unpack_host(value.to_bytes(8, "big")) for value in distinct.tolist()]
    hosts = pa.array(names, pa.string()).take(pa.array(which.reshape(-1)))
    if not long.any():
        return hosts
    texts = hosts.to_pylist()
    for row in np.flatnonzero(long).tolist():
        at = int(start[row])
        texts[row] = unpack_host(data[at : at + 20].tobytes())
    return pa.array(texts, pa.string())

"""Records of the commit log, many at a time, to Arrow columns.

The input is what a pull reply or a commit-log file holds: records back to back (layout: record.py). The
output is a `pyarrow.RecordBatch` whose schema the caller chooses: columns that are not asked for cost
nothing. Everything here works on whole batches with numpy gathers and `pyarrow` takes; a Python loop runs
only over rare rows (compressed bodies, IPv6 hosts, property strings that break the grammar) and over the
bodies when their CRC is checked.

One bad record never spoils a batch: it is left out and reported as a `BadRecord`.

Costs on one core for 1.2 KiB records with all columns: about 0.6 µs a record, 0.3-0.9 µs more with the CRC
check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.protocol.checksum import crc32
from cometmq.protocol.columnar_properties import PropertyColumns, is_utf8
from cometmq.protocol.ids import encode_offset_id, unpack_host

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
MIN_RECORD = 91  # two IPv4 hosts; empty body, topic and properties
MAX_RAW_BYTES = 64 * 1024  # of a bad record that are kept

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

_HEAD = np.dtype(
    [
        ("store_size", ">i4"),
        ("magic", ">i4"),
        ("body_crc", ">i4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("physical_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_timestamp", ">i8"),
        ("born_host", "V8"),
        ("store_timestamp", ">i8"),
        ("store_host", "V8"),
        ("reconsume_times", ">i4"),
        ("prepared_transaction_offset", ">i8"),
        ("body_length", ">i4"),
    ]
)
assert _HEAD.itemsize == 88
_MIDDLE = 48  # bytes before the born host: the same in every record
_V6_EXTRA = 12  # an IPv6 host takes 16 + 4 bytes, not 4 + 4
_BORN_V6, _STORE_V6, _COMPRESSED = 0x10, 0x20, 0x1

_NATIVE: dict[pa.DataType, npt.DTypeLike] = {pa.int32(): "i4", pa.int64(): "i8"}
_HEX = np.frombuffer(b"".join(b"%02X" % i for i in range(256)), dtype="V2")

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was left out. The offsets are what its header claims, None if even that could not be
    read.
    """

    position: int  # in the buffer
    stage: str  # "layout", "crc", "body" or "text"
    problem: str
    queue_id: int | None
    queue_offset: int | None
    physical_offset: int | None
    raw: bytes  # the stored bytes, at most MAX_RAW_BYTES of them


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


_SIZE_MAGIC = Struct(">ii").unpack_from


def record_starts(buffer: Buffer, begin: int = 0, end: int | None = None) -> tuple[list[int], int]:
    """Follow the chain of record lengths: (start of each record, position where the chain stops).

    The chain stops at `end` when all is well; before it at a length or magic number that cannot be, or at a
    record whose rest is missing.
    """
    stop = len(buffer) if end is None else end
    starts: list[int] = []
    position = begin
    while position + MIN_RECORD <= stop:
        size, magic = _SIZE_MAGIC(buffer, position)
        if (magic != MAGIC_V1 and magic != MAGIC_V2) or size < MIN_RECORD or size > stop - position:
            break
        starts.append(position)
        position += size
    return starts, position


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
    (sys_flag, stored body).
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        broker_name: str = "",
        check_crc: bool = True,
        decompress: Callable[[int, bytes], bytes] | None = None,
    ) -> None:
        self.schema = schema
        self.broker_name = broker_name
        self.check_crc = check_crc
        self.decompress = decompress
        self.columns = [_checked_column(field) for field in schema]
        wanted = set(self.columns)
        self._property_names = {c: p for c, p in _FROM_PROPERTIES.items() if c in wanted}
        self._needs_properties = bool(self._property_names) or "properties" in wanted

    def decode(self, buffer: Buffer, starts: Sequence[int] | Ints) -> Decoded:
        """Decode the records that begin at `starts` (ascending, each within the buffer by its own length)."""
        if len(buffer) > 0x7FFFFFFF:
            raise ValueError("a buffer of records must stay under 2 GiB: Arrow's offsets have 31 bits")
        data = np.frombuffer(buffer, dtype=np.uint8)
        rows, bad = _layout(data, np.asarray(starts, dtype=np.int64))
        if self.check_crc:
            rows = _keep(
                rows, bad, data, _crc_mismatches(buffer, rows), "crc", "body does not match its CRC-32"
            )
        arrow_data = pa.py_buffer(buffer)
        while True:
            try:
                return Decoded(self._batch(arrow_data, data, rows), bad)
            except _RowProblems as problem:
                rows = _keep(rows, bad, data, problem.rows, problem.stage, problem.text)

    def _batch(self, buffer: pa.Buffer, data: Bytes, rows: _Rows) -> pa.RecordBatch:
        properties = None
        if self._needs_properties:
            raw = _slices(buffer, rows.properties_start, rows.properties_length, pa.binary())
            properties = PropertyColumns(raw)
            if len(properties.invalid):
                raise _RowProblems(properties.invalid, "text", "properties are not UTF-8")
        arrays = [
            self._column(column, field.type, buffer, data, rows, properties)
            for column, field in zip(self.columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(
        self,
        column: str,
        kind: pa.DataType,
        buffer: pa.Buffer,
        data: Bytes,
        rows: _Rows,
        properties: PropertyColumns | None,
    ) -> pa.Array:
        if column == "body":
            return self._bodies(buffer, rows)
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
            return pa.array(field.astype("i8") * 1000).view(kind)
        return pa.array(field.astype(_NATIVE[kind]))

    def _bodies(self, buffer: pa.Buffer, rows: _Rows) -> pa.Array:
        stored = _slices(buffer, rows.body_start, rows.body_length, pa.binary())
        compressed = np.flatnonzero(rows.sys_flag & _COMPRESSED)
        if self.decompress is None or not len(compressed):
            return stored
        plain: list[bytes] = []
        failed: list[int] = []
        problem = ""
        for row in compressed.tolist():
            try:
                plain.append(self.decompress(int(rows.sys_flag[row]), stored[row].as_py()))
            except Exception as error:
                # Libraries of three codecs, each with its own exceptions; whatever it is, this record is bad.
                failed.append(row)
                problem = f"cannot decompress: {type(error).__name__}: {error}"
        if failed:
            raise _RowProblems(np.asarray(failed), "body", problem)
        order = np.arange(len(stored))
        order[compressed] = len(stored) + np.arange(len(plain))
        return pa.concat_arrays([stored, pa.array(plain, pa.binary())]).take(pa.array(order))


class _RowProblems(Exception):
    """Rows that turned out bad while a column was built: they are taken out and the batch is built again."""

    def __init__(self, rows: Ints, stage: str, text: str) -> None:
        super().__init__(rows, stage, text)
        self.rows, self.stage, self.text = rows, stage, text


class _Rows:
    """The fixed fields of a run of records and where their variable parts lie."""

    __slots__ = (
        "body_length",
        "body_start",
        "head",
        "late",
        "properties_length",
        "properties_start",
        "start",
        "sys_flag",
        "topic_length",
        "topic_start",
    )

    def __init__(self, **parts: Any) -> None:
        for name, value in parts.items():
            setattr(self, name, value)

    start: Ints
    head: npt.NDArray[Any]  # _HEAD; fields behind the born host are wrong where a host is IPv6 …
    late: dict[str, npt.NDArray[Any]]  # … and right here, when any is
    sys_flag: npt.NDArray[np.int32]
    body_start: Ints
    body_length: Ints
    topic_start: Ints
    topic_length: Ints
    properties_start: Ints
    properties_length: Ints

    def field(self, name: str) -> npt.NDArray[Any]:
        return self.late[name] if name in self.late else self.head[name]

    def take(self, keep: npt.NDArray[Any]) -> _Rows:
        parts = {name: getattr(self, name)[keep] for name in self.__slots__ if name != "late"}
        return _Rows(late={name: values[keep] for name, values in self.late.items()}, **parts)


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


def _gather(data: Bytes, positions: Ints, width: int) -> npt.NDArray[Any]:
    """`width` bytes at each position, as one array of raw items (the fastest of the numpy ways by 2 to 6
    times).
    """
    if len(data) < width:
        return np.empty(0, dtype=f"V{width}")
    items: npt.NDArray[Any] = np.ndarray(
        shape=(len(data) - width + 1,), dtype=f"V{width}", buffer=data, strides=(1,)
    )
    return items[positions]


def _layout(data: Bytes, start: Ints) -> tuple[_Rows, list[BadRecord]]:
    """Read the fixed fields, find the variable parts, and set aside what does not add up."""
    bad: list[BadRecord] = []
    fits = (start >= 0) & (start + MIN_RECORD <= len(data))
    for position in start[~fits].tolist():
        raw = data[max(position, 0) :][:MAX_RAW_BYTES].tobytes()
        bad.append(BadRecord(position, "layout", "shorter than any record", None, None, None, raw))
    start = start[fits]
    head = _gather(data, start, 88).view(_HEAD)
    sys_flag = head["sys_flag"].astype(np.int32)
    end = start + head["store_size"]
    late: dict[str, npt.NDArray[Any]] = {}
    body_start = start + 88
    body_length = head["body_length"].astype(np.int64)
    if (sys_flag & (_BORN_V6 | _STORE_V6)).any():
        late, body_start = _read_behind_v6_hosts(data, start, sys_flag)
        body_length = late["body_length"].astype(np.int64)
    last = len(data) - 2
    long_topic = head["magic"] == MAGIC_V2
    topic_at = body_start + body_length
    good = (
        ((head["magic"] == MAGIC_V1) | long_topic)
        & (body_length >= 0)
        & (end <= len(data))
        & (topic_at < end)
    )
    at = np.clip(topic_at, 0, last)
    topic_length = data[at].astype(np.int64)
    topic_start = topic_at + 1
    if long_topic.any():
        topic_length = np.where(long_topic, (topic_length << 8) | data[at + 1], topic_length)
        topic_start = topic_start + long_topic
    properties_at = topic_start + topic_length
    good &= properties_at + 2 <= end
    at = np.clip(properties_at, 0, last)
    properties_length = (data[at].astype(np.int64) << 8) | data[at + 1]
    good &= properties_at + 2 + properties_length == end
    rows = _Rows(
        start=start,
        head=head,
        late=late,
        sys_flag=sys_flag,
        body_start=body_start,
        body_length=body_length,
        topic_start=topic_start,
        topic_length=topic_length,
        properties_start=properties_at + 2,
        properties_length=properties_length,
    )
    return _keep(rows, bad, data, np.flatnonzero(~good), "layout", "lengths do not add up"), bad


def _read_behind_v6_hosts(
    data: Bytes, start: Ints, sys_flag: npt.NDArray[np.int32]
) -> tuple[dict[str, npt.NDArray[Any]], Ints]:
    """(fields behind the born host, body starts) where some hosts are longer than commonly."""
    born = np.where(sys_flag & _BORN_V6, _V6_EXTRA, 0)
    both = born + np.where(sys_flag & _STORE_V6, _V6_EXTRA, 0)
    last = len(data)
    late: dict[str, npt.NDArray[Any]] = {}
    for name, shift in (
        ("store_timestamp", born),
        ("reconsume_times", both),
        ("prepared_transaction_offset", both),
        ("body_length", both),
    ):
        kind, offset = _HEAD.fields[name][:2]  # type: ignore[index]
        at = np.minimum(start + offset + shift, last - kind.itemsize)
        late[name] = _gather(data, at, kind.itemsize).view(kind).astype(kind.newbyteorder("="))
    return late, start + 88 + both


def _keep(rows: _Rows, bad: list[BadRecord], data: Bytes, drop: Ints, stage: str, problem: str) -> _Rows:
    """`rows` without those at the indices `drop`, which are added to `bad`."""
    if not len(drop):
        return rows
    for row in drop.tolist():
        head, position = rows.head[row], int(rows.start[row])
        raw = data[position : position + max(0, min(int(head["store_size"]), MAX_RAW_BYTES))].tobytes()
        ids = (int(head["queue_id"]), int(head["queue_offset"]), int(head["physical_offset"]))
        bad.append(BadRecord(position, stage, problem, *ids, raw))
    keep = np.ones(len(rows.start), dtype=bool)
    keep[drop] = False
    return rows.take(keep)


def _crc_mismatches(buffer: Buffer, rows: _Rows) -> Ints:
    view = memoryview(buffer)
    begins = rows.body_start.tolist()
    ends = (rows.body_start + rows.body_length).tolist()
    found = np.fromiter(
        (crc32(view[begin:end]) for begin, end in zip(begins, ends, strict=True)), np.int64, len(begins)
    )
    return np.flatnonzero((found & 0x7FFFFFFF) != rows.head["body_crc"])


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


def _offset_ids(data: Bytes, rows: _Rows) -> pa.Array:
    """The id that names a record by where it lies: hex of store host, port and physical offset (32 or 56
    digits).
    """
    host = rows.start + 64 + np.where(rows.sys_flag & _BORN_V6, _V6_EXTRA, 0)
    sixteen = np.empty((len(host), 16), dtype=np.uint8)
    sixteen[:, :8] = _gather(data, host, 8).view(np.uint8).reshape(-1, 8)
    sixteen[:, 8:] = rows.head["physical_offset"].astype(">i8").view(np.uint8).reshape(-1, 8)
    digits = _HEX[sixteen.reshape(-1)]
    offsets = np.arange(0, 32 * (len(host) + 1), 32, dtype=np.int32)
    ids = pa.Array.from_buffers(pa.string(), len(host), [None, pa.py_buffer(offsets), pa.py_buffer(digits)])
    long = np.flatnonzero(rows.sys_flag & _STORE_V6)
    if not len(long):
        return ids
    texts = ids.to_pylist()
    for row in long.tolist():
        at = int(host[row])
        texts[row] = encode_offset_id(data[at : at + 20].tobytes(), int(rows.head["physical_offset"][row]))
    return pa.array(texts, pa.string())


def _hosts(data: Bytes, rows: _Rows, column: str) -> pa.Array:
    """'address:port' of each row. There are few hosts in a batch: each is formatted once."""
    born = column == "born_host"
    flag = _BORN_V6 if born else _STORE_V6
    start = rows.start + _MIDDLE
    if not born:
        start = start + 16 + np.where(rows.sys_flag & _BORN_V6, _V6_EXTRA, 0)
    long = (rows.sys_flag & flag) != 0
    raw = _gather(data, start, 8).view(">u8").astype(np.uint64)
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

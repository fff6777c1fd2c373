"""The conversion of commit-log records to Arrow columns, many records at a time.

The input is the content of a pull response or of a commit-log file: consecutive records (see layout.py). The
output is `pyarrow.RecordBatch`es with the schema that the caller chooses; other columns are not built. All
work is done on whole batches by numpy and by `take` of `pyarrow`. A Python loop runs only over rare rows
(compressed bodies, IPv6 hosts, invalid property strings), and over the bodies if their CRC is checked.

A bad record does not affect the others: it is omitted and reported as a `BadRecord`.

On one core, a record of 1.2 KiB with all columns takes about 0.6 µs, and 0.3 to 0.9 µs more with the CRC
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.protocol.ids import encode_offset_id, unpack_host
from cometmq.protocol.properties.columns import PropertyColumns, is_utf8, slices
from cometmq.protocol.record.layout import BORN_V6, COMPRESSED, HOST_V4, HOST_V6, MIN_SIZE, STORE_V6
from cometmq.protocol.record.many import Bytes, Ints, Rows, bodies_match, items_at, read_rows
from cometmq.protocol.record.one import Buffer

MAX_RAW_BYTES = 64 * 1024  # Maximum number of bytes of a bad record that a `BadRecord` keeps
# Maximum size, in bytes, of a buffer of records, and also of all bodies of one batch. Arrow's offsets, which
# have 31 bits, cannot address more.
MAX_BATCH = 0x7FFFFFFF

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
"""All columns that the decoder supports, with their Arrow types.

`msg_id` is the client's UNIQ_KEY, or the offset id if there is none. `keys` is the property KEYS as written
(separated by blanks). `body` is the plain body, even if the record holds a compressed one, while `sys_flag`,
`body_crc` and `store_size` are as stored. Timestamps are converted from milliseconds to microseconds.
"""

_FROM_PROPERTIES = {"msg_id": b"UNIQ_KEY", "tags": b"TAGS", "keys": b"KEYS"}

# The start of year 2 and the end of year 9998, in ms since 1970.
MIN_MS, MAX_MS = -62_104_060_800_000, 253_370_764_799_999
_NATIVE: dict[pa.DataType, npt.DTypeLike] = {pa.int32(): "i4", pa.int64(): "i8"}
_HOST = np.dtype(f"V{HOST_V4}")
_HEX = np.frombuffer(b"".join(b"%02X" % i for i in range(256)), dtype="V2")


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was omitted. Its offsets are None if its header is not readable."""

    position: int  # Position of the record in the buffer
    stage: str  # Name of the failed check: "layout", "crc", "queue", "time", "body" or "text"
    problem: str
    queue_id: int | None
    queue_offset: int | None
    physical_offset: int | None
    raw: bytes  # The first bytes of the stored record, at most MAX_RAW_BYTES


class Origin(NamedTuple):
    """The queue of a part of a buffer, which ends before `end` and begins where the part before it ends."""

    end: int
    topic: str
    queue_id: int


class Decoded(NamedTuple):
    """Decoded records as columns, and the records that could not be decoded."""

    batch: pa.RecordBatch
    bad: list[BadRecord]


class UnknownColumnError(ValueError):
    """The schema contains a column, or a column type, that the decoder does not support."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(column, problem)
        self.column, self.problem = column, problem

    def __str__(self) -> str:
        return f"column {self.column!r}: {self.problem}"


def canonical_column(name: str) -> str | None:
    """Return the column with this name, or None. queueOffset and QUEUE_OFFSET also name queue_offset."""
    return _CANONICAL.get(name.replace("_", "").lower())


_CANONICAL = {name.replace("_", ""): name for name in COLUMNS}


def arrow_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of the given columns (default: all). Every field is nullable."""
    return pa.schema([(name, COLUMNS[name]) for name in (COLUMNS if columns is None else columns)])


class ColumnDecoder:
    """A decoder that converts buffers of records to record batches, which all have one schema.

    It keeps no buffer between calls.

    Args:
        schema: The schema of the batches. Its fields are columns of `COLUMNS`, in any order and in any
            spelling that `canonical_column` accepts.
        broker_name: The value of the column for the broker's name, which records do not contain.
        check_crc: Whether to check the CRC of the bodies. They are checked only if the schema has the column
            `body`.
        decompress: A function of sys_flag and the stored body that returns the plain body.
        plain_bytes: The maximum total size of the decompressed bodies in a batch. A body that is larger gets
            a batch of its own.
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
        self.plain_bytes = plain_bytes
        self.columns = [_checked_column(field) for field in schema]
        wanted = set(self.columns)
        self.check_crc = check_crc and "body" in wanted
        self.decompress = decompress if "body" in wanted else None
        self._property_names = {c: p for c, p in _FROM_PROPERTIES.items() if c in wanted}
        self._needs_properties = bool(self._property_names) or "properties" in wanted

    def decode(
        self, buffer: Buffer, starts: Sequence[int] | Ints, origins: Sequence[Origin] = ()
    ) -> Iterator[Decoded]:
        """Decode the records that begin at `starts`. Yield at least one batch, each with its bad records.

        Args:
            buffer: The records.
            starts: The positions of the records in ascending order. Each record ends within the buffer
                according to its own length field.
            origins: The queue from which each part of the buffer was read. A record whose header names a
                different queue is bad. If `origins` is empty, the queues are not checked.
        """
        if len(buffer) > MAX_BATCH:
            raise ValueError("a buffer of records must stay under 2 GiB: Arrow's offsets have 31 bits")
        data = np.frombuffer(buffer, dtype=np.uint8)
        bad: list[BadRecord] = []
        rows = _well_formed(data, np.asarray(starts, dtype=np.int64), bad)
        yield from self._decode(buffer, rows, bad, origins)

    def decode_rows(self, buffer: Buffer, rows: Rows) -> Iterator[Decoded]:
        """Decode the records of `rows`, like `decode` does, but do not check the lengths of the records."""
        return self._decode(buffer, rows, [], ())

    def _decode(
        self, buffer: Buffer, rows: Rows, bad: list[BadRecord], origins: Sequence[Origin]
    ) -> Iterator[Decoded]:
        if self.check_crc:
            wrong = np.flatnonzero(~bodies_match(buffer, rows))
            rows = _without(rows, bad, wrong, "crc", "body does not match its CRC-32")
        if origins:
            rows = _without(rows, bad, _strangers(rows, origins), "queue", "is of another queue")
        arrow_data = pa.py_buffer(buffer)
        for run, plain in self._runs(rows, bad):
            while True:
                try:
                    batch = self._batch(arrow_data, run, plain)
                    break
                except _RowProblems as problem:
                    run = _without(run, bad, problem.rows, problem.stage, problem.text)
            yield Decoded(batch, bad.copy())
            bad.clear()  # The list is cleared, not replaced, because the generator `_runs` appends to it

    def _runs(self, rows: Rows, bad: list[BadRecord]) -> Iterator[tuple[Rows, dict[int, bytes]]]:
        """Divide the rows into groups, so that the decompressed bodies of a group fit into one batch.

        Yield each group with a dict of its decompressed bodies. The key of a body is the position of its
        record in the buffer. Records that cannot be decompressed are omitted and appended to `bad`.
        """
        plain: dict[int, bytes] = {}
        if self.decompress is None:
            yield rows, plain
            return
        first = size = 0
        good = np.ones(len(rows.start), dtype=bool)
        for row in np.flatnonzero(rows.sys_flag & COMPRESSED).tolist():
            begin = int(rows.body_start[row])
            stored = rows.data[begin : begin + int(rows.body_length[row])].tobytes()
            try:
                body = self.decompress(int(rows.sys_flag[row]), stored)
            except MemoryError:
                raise  # Lack of memory is no fault of the record, so do not report the record as bad
            except Exception as error:
                # The three codec libraries raise various exceptions. Each of them means that the record is
                # bad.
                problem = f"cannot decompress: {type(error).__name__}: {error}"
                bad.append(_bad_record(rows, row, "body", problem))
                good[row] = False
                continue
            if plain and size + len(body) > self.plain_bytes:
                yield rows.pick(slice(first, row)).pick(good[first:row]), plain
                first, size, plain = row, 0, {}
            plain[int(rows.start[row])] = body
            size += len(body)
        yield rows.pick(slice(first, None)).pick(good[first:]) if first or not good.all() else rows, plain

    def _batch(self, buffer: pa.Buffer, rows: Rows, plain: dict[int, bytes]) -> pa.RecordBatch:
        properties = None
        if self._needs_properties:
            start = rows.properties_start
            raw = slices(buffer, start, start + rows.properties_length, pa.binary())
            properties = PropertyColumns(raw)
            if len(properties.invalid):
                raise _RowProblems(properties.invalid, "text", "properties are not UTF-8")
        arrays = [
            _bodies(buffer, rows, plain)
            if column == "body"
            else self._column(column, field.type, buffer, rows, properties)
            for column, field in zip(self.columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(
        self,
        column: str,
        kind: pa.DataType,
        buffer: pa.Buffer,
        rows: Rows,
        properties: PropertyColumns | None,
    ) -> pa.Array:
        if column == "topic":
            return _text(
                slices(buffer, rows.topic_start, rows.topic_start + rows.topic_length, pa.binary()), "topic"
            )
        if column == "broker_name":
            return pa.repeat(pa.scalar(self.broker_name, pa.string()), len(rows.start))
        if column == "properties":
            assert properties is not None
            return properties.map(kind)
        if column in self._property_names:
            assert properties is not None
            values = properties.values_of(self._property_names[column])
            if column == "msg_id" and values.null_count:
                values = pc.coalesce(values, _offset_ids(rows))
            return values
        if column == "offset_msg_id":
            return _offset_ids(rows)
        if column in ("born_host", "store_host"):
            return _hosts(rows, column)
        field = rows.field(column)
        if pa.types.is_timestamp(kind):
            return _times(field.astype("i8"), column).view(kind)
        return pa.array(field.astype(_NATIVE[kind]))


class _RowProblems(Exception):
    """Rows are bad, as found while a column is built. The decoder removes them and builds the batch again."""

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
        raise UnknownColumnError(field.name, f"the column has the type {wanted}, not {field.type}")
    return column


def _bodies(buffer: pa.Buffer, rows: Rows, plain: dict[int, bytes]) -> pa.Array:
    """Return the plain bodies of all rows. `plain` maps a record's position to its decompressed body."""
    if not plain:
        return slices(buffer, rows.body_start, rows.body_end, pa.binary())
    at = np.flatnonzero(np.isin(rows.start, np.fromiter(plain, np.int64, len(plain))))
    length = rows.body_length.copy()
    length[at] = 0
    stored = slices(buffer, rows.body_start, rows.body_start + length, pa.binary())
    order = np.arange(len(stored))
    order[at] = len(stored) + np.arange(len(at))
    bodies = pa.array([plain[start] for start in rows.start[at].tolist()], pa.binary())
    return pa.concat_arrays([stored, bodies]).take(pa.array(order))


def _times(ms: Ints, column: str) -> pa.Array:
    """Convert milliseconds to microseconds and reject times that readers cannot represent.

    Most readers (Python's dates, SQL) support only the years 1 to 9999. The limits are one year narrower,
    because a time zone can move a time into the next or the previous year. The limits also prevent an
    overflow of the result.
    """
    wrong = np.flatnonzero((ms < MIN_MS) | (ms > MAX_MS))
    if len(wrong):
        raise _RowProblems(wrong, "time", f"{column} {ms[wrong[0]]} is outside the years 2 to 9998")
    return pa.array(ms * 1000)


def _text(values: pa.Array, what: str) -> pa.Array:
    """Convert a binary array to strings. Rows that are not UTF-8 are reported as bad."""
    text = pa.Array.from_buffers(pa.string(), len(values), values.buffers(), offset=values.offset)
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        wrong = [i for i, value in enumerate(values.to_pylist()) if not is_utf8(value)]
        raise _RowProblems(np.asarray(wrong), "text", f"{what} is not UTF-8") from None
    return text


def _offset_ids(rows: Rows) -> pa.Array:
    """Return the offset ids: host, port and physical offset in hex (32 or 56 digits)."""
    host = rows.place("store_host")
    sixteen = np.empty((len(host), 16), dtype=np.uint8)
    sixteen[:, :8] = items_at(rows.data, host, _HOST).view(np.uint8).reshape(-1, 8)
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
        raw = rows.data[at : at + HOST_V6].tobytes()
        texts[row] = encode_offset_id(raw, int(rows.head["physical_offset"][row]))
    return pa.array(texts, pa.string())


def _hosts(rows: Rows, column: str) -> pa.Array:
    """Return the host of each row as 'address:port'. A host that occurs in several rows is formatted once."""
    start = rows.place(column)
    long = (rows.sys_flag & (BORN_V6 if column == "born_host" else STORE_V6)) != 0
    raw = items_at(rows.data, start, _HOST).view(">u8").astype(np.uint64)
    raw[long] = 0
    distinct, which = np.unique(raw, return_inverse=True)
    names = [unpack_host(value.to_bytes(8, "big")) for value in distinct.tolist()]
    hosts = pa.array(names, pa.string()).take(pa.array(which.reshape(-1)))
    if not long.any():
        return hosts
    texts = hosts.to_pylist()
    for row in np.flatnonzero(long).tolist():
        at = int(start[row])
        texts[row] = unpack_host(rows.data[at : at + HOST_V6].tobytes())
    return pa.array(texts, pa.string())


# -- bad records


def _well_formed(data: Bytes, start: Ints, bad: list[BadRecord]) -> Rows:
    """Return the layout of the records that begin at `start`. Those with inconsistent lengths go to `bad`."""
    fits = (start >= 0) & (start + MIN_SIZE <= len(data))
    for position in start[~fits].tolist():
        raw = data[max(position, 0) :][:MAX_RAW_BYTES].tobytes()
        bad.append(BadRecord(position, "layout", "shorter than any record", None, None, None, raw))
    rows, good = read_rows(data, start[fits])
    return _without(rows, bad, np.flatnonzero(~good), "layout", "lengths do not add up")


def _without(rows: Rows, bad: list[BadRecord], drop: Ints, stage: str, problem: str) -> Rows:
    """Return `rows` without the rows at the indices `drop`. The removed records are added to `bad`."""
    if not len(drop):
        return rows
    bad += [_bad_record(rows, row, stage, problem) for row in drop.tolist()]
    kept = np.ones(len(rows.start), dtype=bool)
    kept[drop] = False
    return rows.pick(kept)


def _bad_record(rows: Rows, row: int, stage: str, problem: str) -> BadRecord:
    head, position = rows.head[row], int(rows.start[row])
    raw = rows.data[position : position + max(0, min(int(head["store_size"]), MAX_RAW_BYTES))].tobytes()
    ids = (int(head["queue_id"]), int(head["queue_offset"]), int(head["physical_offset"]))
    return BadRecord(position, stage, problem, *ids, raw)


def _strangers(rows: Rows, origins: Sequence[Origin]) -> Ints:
    """Return the indices of the rows whose topic or queue id is not that of the queue in `origins`."""
    strange = np.zeros(len(rows.start), dtype=bool)
    edges = np.searchsorted(rows.start, [origin.end for origin in origins])
    for origin, first, stop in zip(origins, [0, *edges[:-1]], edges, strict=True):
        name, part = origin.topic.encode(), slice(first, stop)
        wrong = (rows.head["queue_id"][part] != origin.queue_id) | (rows.topic_length[part] != len(name))
        at = rows.topic_start[part][~wrong] if wrong.any() else rows.topic_start[part]
        topics = items_at(rows.data, at, np.dtype(f"V{len(name)}"))
        if topics.tobytes() != name * len(at):
            wrong[~wrong] = topics != np.void(name)
        strange[part] = wrong
    return np.flatnonzero(strange)

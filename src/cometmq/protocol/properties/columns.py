"""The conversion of many property strings to Arrow: all properties as a map, or single properties.

A property string is `name 0x01 value 0x02 name 0x01 value …` (values.py), with or without a final 0x02. All
separators of a batch are found in one pass. For strings in which the two separators alternate, two `take`
operations extract all names and all values. The other strings (with a separator inside a value, or a piece
without a separator) are decoded one by one with `decode_properties`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.protocol.properties.values import decode_properties

Ints = npt.NDArray[np.int64]

_NAME_END, _VALUE_END = 1, 2
# Names that a record repeats are found by counting or by sorting. Counting is faster as long as the number of
# records, multiplied by the number of different names, is below this limit.
_DENSE_LIMIT = 1 << 22


class PropertyColumns:
    """The properties of a group of records. `raw` holds their property strings as a binary array.

    `invalid` lists the rows whose string is not UTF-8. Remove these rows before calling any other method.
    """

    def __init__(self, raw: pa.Array) -> None:
        self.raw = raw
        self.count = len(raw)
        _, offsets, data = raw.buffers()
        self._offsets = np.zeros(1, np.int64)
        if self.count:
            self._offsets = np.frombuffer(offsets, np.int32)[: self.count + 1].astype(np.int64)
        self._data = data if data is not None else pa.py_buffer(b"")
        self._bytes = np.frombuffer(self._data, np.uint8)[: self._offsets[-1]]
        self.invalid = self._invalid_rows()

    def _invalid_rows(self) -> Ints:
        if not len(self._bytes) or int(self._bytes.max()) < 0x80:
            return np.empty(0, np.int64)
        return np.asarray(
            [row for row, text in enumerate(self.raw.to_pylist()) if not is_utf8(text)], np.int64
        )

    @cached_property
    def _pairs(self) -> tuple[Ints, pa.Array, pa.Array]:
        """Return the record index, the name and the value of each pair, in the order of the records."""
        record, start, end = self._pieces()
        name_ends = np.flatnonzero(self._bytes == _NAME_END)
        if len(name_ends) == len(start) and bool(((name_ends >= start) & (name_ends < end)).all()):
            broken, middle = np.empty(0, np.int64), name_ends
        else:
            which = np.searchsorted(name_ends, start)
            found = np.searchsorted(name_ends, end) - which
            broken, has = record[found != 1], found >= 1
            record, start, middle, end = record[has], start[has], name_ends[which[has]], end[has]
        broken = np.concatenate([broken, record[(middle == start) | (end == middle + 1)]])
        names, values = self._texts(start, middle), self._texts(middle + 1, end)
        first, last = self._once(record, names)
        if len(first) < len(record):
            record, names, values = record[first], names.take(pa.array(first)), values.take(pa.array(last))
        if not len(broken):
            return record, names, values
        return self._replaced(np.unique(broken), record, names, values)

    def _pieces(self) -> tuple[Ints, Ints, Ints]:
        """Return the record index, the start and the end of each piece between two 0x02 separators."""
        begin, end = self._offsets[:-1], self._offsets[1:]
        stops = np.flatnonzero(self._bytes == _VALUE_END)
        open_end = end > begin
        open_end[open_end] = self._bytes[end[open_end] - 1] != _VALUE_END
        # The last value of a record may have no separator after it. It then ends where the record ends. Each
        # such end is inserted at its place in the ascending list `stops`, to get the ends of all values.
        ends = np.insert(stops, np.searchsorted(stops, end[open_end]), end[open_end])
        count = np.diff(np.searchsorted(stops, self._offsets)) + open_end
        record = np.repeat(np.arange(self.count), count)
        starts = np.empty_like(ends)
        starts[1:] = ends[:-1] + 1
        first = np.ones(len(record), bool)
        first[1:] = record[1:] != record[:-1]
        starts[first] = begin[record[first]]
        return record, starts, ends

    def _replaced(
        self, rows: Ints, record: Ints, names: pa.Array, values: pa.Array
    ) -> tuple[Ints, pa.Array, pa.Array]:
        """Return record index, name and value of all pairs, those of `rows` from `decode_properties`."""
        is_slow = np.zeros(self.count, bool)
        is_slow[rows] = True
        fast = ~is_slow[record]
        decoded = {row: decode_properties(self.raw[row].as_py()) for row in rows.tolist()}
        extra = [(row, pair) for row, found in decoded.items() for pair in found.items()]
        record = np.concatenate([record[fast], np.asarray([row for row, _ in extra], np.int64)])
        names = pa.concat_arrays(
            [names.filter(pa.array(fast)), pa.array([p[0] for _, p in extra], pa.string())]
        )
        values = pa.concat_arrays(
            [values.filter(pa.array(fast)), pa.array([p[1] for _, p in extra], pa.string())]
        )
        order = np.argsort(record, kind="stable")
        return record[order], names.take(pa.array(order)), values.take(pa.array(order))

    def _once(self, record: Ints, names: pa.Array) -> tuple[Ints, Ints]:
        """Return the indices of the first and the last pair of each name in each record.

        A name that occurs twice (batch sends repeat WAIT) keeps its first position and its last value.
        """
        every = np.arange(len(record))
        if not len(record):
            return every, every
        codes: Ints = pc.dictionary_encode(names).indices.to_numpy().astype(np.int64)
        cell = record * (int(codes.max()) + 1) + codes
        if int(cell[-1]) < _DENSE_LIMIT:
            again = np.flatnonzero(np.bincount(cell)[cell] > 1)
        else:
            _, which, seen = np.unique(cell, return_inverse=True, return_counts=True)
            again = np.flatnonzero(seen[which] > 1)
        if not len(again):
            return every, every
        again = again[np.argsort(cell[again], kind="stable")]
        new = np.ones(len(again), bool)
        new[1:] = cell[again[1:]] != cell[again[:-1]]
        keep = np.ones(len(record), bool)
        keep[again[~new]] = False
        every[again[new]] = again[np.append(np.flatnonzero(new)[1:], len(again)) - 1]
        return np.flatnonzero(keep), every[keep]

    def _texts(self, starts: Ints, ends: Ints) -> pa.Array:
        return slices(self._data, starts, ends, pa.string())

    def map(self, kind: pa.DataType) -> pa.Array:
        """Return all properties as an array of the map type `kind` (string to string)."""
        record, names, values = self._pairs
        offsets = np.searchsorted(record, np.arange(self.count + 1)).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), names, values, type=kind)

    def values_of(self, name: bytes) -> pa.Array:
        """Return one property of each record; it is null if the record does not have the property."""
        record, names, values = self._pairs
        hits = np.flatnonzero(pc.equal(names, name.decode()).to_numpy(zero_copy_only=False))
        where = np.full(self.count, -1, dtype=np.int64)
        where[record[hits]] = hits
        return values.take(pa.array(where, mask=where < 0))


def slices(buffer: pa.Buffer, starts: Ints, ends: Ints, kind: pa.DataType) -> pa.Array:
    """Return an array of texts or bytes that holds, for each row, the slice `buffer[start:end]`.

    In such an array, each value ends where the next one begins. Therefore an array over the whole buffer is
    created first, without a copy. Its values are, in turn, the slice of a row and the gap before the next
    slice. `take` then copies the slices, and does so in C++.
    """
    offsets = np.empty(2 * len(starts), dtype=np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    if not len(offsets):
        return pa.array([], kind)
    whole = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), buffer])
    return whole.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int32)))


def is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True

"""Reading many records at once with numpy.

`Rows` locates the fields of records. `RecordGroup` holds the fields from which consume queues and the index
are built. Recovery, `verify` and `rebuild` read millions of records, nearly all of them valid. Therefore they
read thousands of records at a time and check their fields as arrays. A group of records ends before the first
record that fails a check; `record_facts` then examines that record alone. arrow.py builds its columns from
`Rows`, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.checksum import crc32
from cometmq.protocol.record.framing import HEAD_KIND, PLAIN, Framing
from cometmq.protocol.record.layout import (
    AT,
    BEHIND_BORN_HOST,
    BEHIND_STORE_HOST,
    BORN_V6,
    FIELDS,
    HEAD_V4,
    LENGTH,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES,
    PREPARED,
    ROLLBACK,
    STORE_V6,
    TRANSACTION_MASK,
    V6_EXTRA,
)
from cometmq.protocol.record.one import Buffer, Facts, record_starts

MIN_GROUP_RECORDS = 24  # Smaller groups are checked faster one record at a time
MAX_BATCH_RECORDS = 4096

_KINDS = {"i": ">i4", "q": ">i8"}
_HEAD = np.dtype([(name, _KINDS.get(kind, f"V{kind[:-1]}")) for name, kind in FIELDS.items()])

_RUN_FIELDS = "physical_offset", "store_size", "queue_id", "queue_offset", "sys_flag", "store_timestamp"

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def items_at(data: Bytes, places: Ints, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return the item of type `kind` at each position, 2 to 6 times as fast as numpy's own operations."""
    width = kind.itemsize
    if len(data) < width:
        return np.empty(0, kind)
    items: NDArray[Any] = np.ndarray((len(data) - width + 1,), f"V{width}", data, strides=(1,))
    return items[places].view(kind)


def _place(start: Ints, sys_flag: NDArray[np.int32], name: str) -> Ints:
    """Return the position of a field in each record."""
    place = start + AT[name]
    if name in BEHIND_BORN_HOST:
        place += np.where(sys_flag & BORN_V6, V6_EXTRA, 0)
    if name in BEHIND_STORE_HOST:
        place += np.where(sys_flag & STORE_V6, V6_EXTRA, 0)
    return place


class Rows(NamedTuple):
    """The fixed fields of the records in `data`, and the positions of the records' variable parts."""

    data: Bytes
    start: Ints
    # The fixed fields, read as if all hosts were IPv4. So the fields after an IPv6 host are wrong here; the
    # method `field` returns their correct values.
    head: NDArray[Any]
    sys_flag: NDArray[np.int32]
    body_start: Ints
    body_length: Ints
    topic_start: Ints
    topic_length: Ints
    properties_start: Ints
    properties_length: Ints

    @property
    def body_end(self) -> Ints:
        return self.body_start + self.body_length

    @property
    def any_v6(self) -> bool:
        return bool((self.sys_flag & (BORN_V6 | STORE_V6)).any())

    def place(self, name: str) -> Ints:
        """Return the position of a fixed field in each record."""
        return _place(self.start, self.sys_flag, name)

    def field(self, name: str) -> NDArray[Any]:
        """Return the values of a numeric fixed field of all records."""
        if name in BEHIND_BORN_HOST and self.any_v6:
            return items_at(self.data, self.place(name), _HEAD[name])
        values: NDArray[Any] = self.head[name]
        return values

    def pick(self, keep: NDArray[Any] | slice) -> Rows:
        columns: tuple[Any, ...] = self[1:]
        return Rows(self.data, *(column[keep] for column in columns))


def read_rows(data: Bytes, start: Ints) -> tuple[Rows, NDArray[np.bool_]]:
    """Return the records that begin at the positions `start`, and which of them have consistent lengths.

    `data` must have at least MIN_SIZE bytes after each start. If the lengths of a record are inconsistent,
    the positions of its parts are meaningless.
    """
    head = items_at(data, start, _HEAD)
    sys_flag = head["sys_flag"].astype(np.int32)
    end = start + head["store_size"]
    last = len(data) - LENGTH.size
    if (sys_flag & (BORN_V6 | STORE_V6)).any():
        length_at = _place(start, sys_flag, "body_length")
        kind = _HEAD["body_length"]
        body_length = items_at(data, np.minimum(length_at, len(data) - kind.itemsize), kind).astype(np.int64)
        body_start = length_at + kind.itemsize
    else:
        body_length = head["body_length"].astype(np.int64)
        body_start = start + HEAD_V4.size
    long_topic = head["magic"] == MAGIC_V2
    topic_at = body_start + body_length
    good = ((head["magic"] == MAGIC_V1) | long_topic) & (body_length >= 0)
    good &= (end <= len(data)) & (topic_at < end)
    at = np.clip(topic_at, 0, last)
    topic_length = data[at].astype(np.int64)
    topic_start = topic_at + 1
    if long_topic.any():
        topic_length = np.where(long_topic, topic_length << 8 | data[at + 1], topic_length)
        topic_start += long_topic
    properties_start = topic_start + topic_length + LENGTH.size
    good &= properties_start <= end
    at = np.clip(properties_start - LENGTH.size, 0, last)
    properties_length = data[at].astype(np.int64) << 8 | data[at + 1]
    good &= (properties_start + properties_length == end) & (properties_length <= MAX_PROPERTIES)
    rows = Rows(
        data, start, head, sys_flag, body_start, body_length, topic_start, topic_length, properties_start,
        properties_length,
    )  # fmt: skip
    return rows, good


def bodies_match(buffer: Buffer, rows: Rows) -> NDArray[np.bool_]:
    """Return for each record whether its body has the stored CRC-32."""
    places = map(slice, rows.body_start.tolist(), rows.body_end.tolist())
    found = np.fromiter(map(crc32, map(memoryview(buffer).__getitem__, places)), np.int64, len(rows.start))
    matches: NDArray[np.bool_] = found & 0x7FFFFFFF == rows.head["body_crc"]
    return matches


@final
class RecordGroup(NamedTuple):
    """Consecutive valid records, with one array or list per field of `Facts`. A group is never empty.

    `names` are the topics of the group; `topic` holds the index in `names` of each record's topic.
    """

    position: Ints
    size: Ints
    queue_id: Ints
    queue_offset: Ints
    sys_flag: Ints
    store_ms: Ints
    topic: Ints
    names: list[str]
    properties: list[bytes]
    heads: NDArray[Any] | None = None
    """The headers of the raft log's entries, or None for a plain log (framing.py)."""

    @classmethod
    def of(cls, records: Sequence[Facts]) -> RecordGroup:
        *numbers, topics, properties = zip(*records, strict=True)
        names = list(dict.fromkeys(topics))
        columns = np.array([*numbers, [names.index(topic) for topic in topics]], np.int64)
        position, size, queue_id, queue_offset, sys_flag, store_ms, topic = columns
        return cls(position, size, queue_id, queue_offset, sys_flag, store_ms, topic, names, list(properties))

    def last_ones(self, count: int) -> RecordGroup:
        return self._part(slice(len(self.properties) - count, None))

    def first_ones(self, count: int) -> RecordGroup:
        return self._part(slice(count))

    def _part(self, part: slice) -> RecordGroup:
        columns: list[Any] = [column[part] for column in self[:7]]
        columns += (self.names, self.properties[part], None if self.heads is None else self.heads[part])
        return RecordGroup(*columns)

    @property
    def end(self) -> int:
        """The log position after the last record."""
        return int(self.position[-1] + self.size[-1])

    @property
    def rolled_back(self) -> NDArray[np.bool_]:
        """For each record, whether it rolls back a transaction."""
        rolled_back: NDArray[np.bool_] = self.sys_flag & TRANSACTION_MASK == ROLLBACK
        return rolled_back

    @property
    def queued(self) -> NDArray[np.bool_]:
        """For each record, whether it gets a consume-queue entry, unlike half messages and rollbacks."""
        queued: NDArray[np.bool_] = ~self.rolled_back & (self.sys_flag & TRANSACTION_MASK != PREPARED)
        return queued

    def facts(self, rows: Ints | None = None) -> Iterator[Facts]:
        """Yield the records with the given indices, or all records, one at a time."""
        columns = self[:6] if rows is None else [column[rows] for column in self[:6]]
        numbers = self.topic if rows is None else self.topic[rows]
        texts: Sequence[bytes] = self.properties
        if rows is not None:
            texts = [texts[row] for row in rows.tolist()]
        topics = map(self.names.__getitem__, numbers.tolist())
        return map(Facts, *[column.tolist() for column in columns], topics, texts)


def valid_group(
    data: bytes, at: int, position: int, most: int, *, check_crc: bool = True, framing: Framing = PLAIN
) -> RecordGroup | None:
    """Return the consecutive valid records from data[at:] on, the first of which has a log position.

    The group ends after `most` records, at the end of the data, or before an invalid record. The result is
    None if the first record is invalid, or if there are too few records to check as arrays.
    """
    starts, _ = record_starts(data, at, most=most, gap=framing.gap)
    if len(starts) < MIN_GROUP_RECORDS:
        return None
    rows, good = read_rows(np.frombuffer(data, np.uint8), np.array(starts, np.int64))
    good &= rows.head["physical_offset"] == rows.start + (position - at)
    heads = None
    if framing.gap:
        heads = items_at(rows.data, rows.start - framing.gap, HEAD_KIND)
        good &= framing.heads_match(heads, rows.start + (position - at), rows.head["store_size"])
    rows = rows.pick(slice(_leading(good)))
    if check_crc:
        rows = rows.pick(slice(_leading(bodies_match(data, rows) | (rows.body_length == 0))))
    topics, names = _topics(data, rows)
    properties = _properties(data, rows.pick(slice(len(topics))))
    count = len(properties)
    if not count:
        return None
    rows = rows.pick(slice(count))
    columns: list[Any] = [rows.field(name).astype(np.int64) for name in _RUN_FIELDS]
    columns += (np.array(topics[:count], np.int64), names, properties)
    columns.append(None if heads is None else heads[:count])
    return RecordGroup(*columns)


def _leading(good: NDArray[np.bool_]) -> int:
    wrong = np.flatnonzero(~good)
    return int(wrong[0]) if len(wrong) else len(good)


def _topics(data: bytes, rows: Rows) -> tuple[list[int], list[str]]:
    """Return two lists: the topic of each record, as an index into the second list, and the distinct topics.

    The first record with an invalid topic, and all records after it, are ignored.
    """
    known: dict[bytes, int] = {}
    numbers: list[int] = []
    names: list[str] = []
    ends = (rows.topic_start + rows.topic_length).tolist()
    for start, end in zip(rows.topic_start.tolist(), ends, strict=True):
        name = data[start:end]
        number = known.get(name)
        if number is None:
            try:
                topic = str(name, "utf-8")
            except UnicodeDecodeError:
                break
            if "\0" in topic:
                break
            number = known[name] = len(names)
            names.append(topic)
        numbers.append(number)
    return numbers, names


def _properties(data: bytes, rows: Rows) -> list[bytes]:
    """Return the property strings up to the first with NUL bytes, which `record_facts` must examine."""
    ends = (rows.properties_start + rows.properties_length).tolist()
    texts = [data[start:end] for start, end in zip(rows.properties_start.tolist(), ends, strict=True)]
    if b"\0" in b"".join(texts):
        del texts[next(number for number, text in enumerate(texts) if b"\0" in text) :]
    return texts

"""Many records at once: what `record_facts` says of one, for a run of them, by numpy.

The walks of recovery, `verify` and `rebuild` see millions of records, nearly all of them valid. So records
are taken by the thousand and their fields checked as arrays; a run ends in front of the first record that any
check doubts, and that one is looked at by `record_facts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.checksum import crc32
from cometmq.protocol.record.one import BORN_V6, HEAD_V4, MAGIC_V1, MAGIC_V2, MIN_SIZE, STORE_V6

SHORTEST_RUN = 24  # records; fewer are cheaper one by one
LONGEST_RUN = 4096
_SIZE = Struct(">i").unpack_from
_V6_EXTRA = 12  # bytes by which an IPv6 host is longer
_HEAD = np.dtype(
    {
        "names": ["size", "magic", "crc", "queue_id", "queue_offset", "own", "sys_flag"],
        "formats": [">i4", ">i4", ">i4", ">i4", ">i8", ">i8", ">i4"],
        "offsets": [0, 4, 8, 12, 20, 28, 36],
        "itemsize": 40,
    }
)
_INT, _LONG = np.dtype(">i4"), np.dtype(">i8")
_STORE_TIME = 56  # its place in a record whose born host is IPv4

IntArray = NDArray[np.int64]


class Facts(NamedTuple):
    """What dispatch needs to know of one valid record."""

    position: int
    size: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_ms: int
    topic: str
    properties: bytes


class Run(NamedTuple):
    """The same of several records that follow each other, by columns; never empty.

    `names` are the topics that occur, `topic` the number of each record's one among them.
    """

    position: IntArray
    size: IntArray
    queue_id: IntArray
    queue_offset: IntArray
    sys_flag: IntArray
    store_ms: IntArray
    topic: IntArray
    names: list[str]
    properties: list[bytes]

    @classmethod
    def of(cls, records: Sequence[Facts]) -> Run:
        """A run of these records, which follow each other."""
        *numbers, topics, properties = zip(*records, strict=True)
        names = list(dict.fromkeys(topics))
        columns = np.array([*numbers, [names.index(topic) for topic in topics]], np.int64)
        position, size, queue_id, queue_offset, sys_flag, store_ms, topic = columns
        return cls(position, size, queue_id, queue_offset, sys_flag, store_ms, topic, names, list(properties))

    @property
    def end(self) -> int:
        """The position behind its last record."""
        return int(self.position[-1] + self.size[-1])

    def facts(self, rows: IntArray | None = None) -> Iterator[Facts]:
        """The records one by one: those with these numbers, or all."""
        columns = self[:6] if rows is None else [column[rows] for column in self[:6]]
        numbers = self.topic if rows is None else self.topic[rows]
        texts: Sequence[bytes] = self.properties
        if rows is not None:
            texts = [texts[row] for row in rows.tolist()]
        topics = map(self.names.__getitem__, numbers.tolist())
        return map(Facts, *[column.tolist() for column in columns], topics, texts)


def valid_run(data: bytes, at: int, position: int, most: int, *, check_crc: bool = True) -> Run | None:
    """The valid records that follow each other from data[at:], which is log position `position`: up to
    `most`, fewer at the end of the data or in front of a doubtful one. None if there is none, and where so
    few begin that they are better looked at one by one."""
    starts = _starts(data, at, most)
    if len(starts) < SHORTEST_RUN:
        return None
    units = np.frombuffer(data, np.uint8)
    begin = np.array(starts, np.int64)
    head = _gather(units, begin, _HEAD)
    own, size = head["own"].astype(np.int64), head["size"].astype(np.int64)
    sys_flag = head["sys_flag"].astype(np.int64)
    good = own == begin + (position - at)
    good, tail, topic_at, topic_end = _parts(units, begin, begin + size, head["magic"], sys_flag, good)
    count = _leading(good)
    if check_crc:
        body = _body(begin[:count], sys_flag[:count])
        count = _with_good_bodies(data, body, tail[:count], head["crc"][:count])
    numbers, names = _topics(data, topic_at[:count].tolist(), topic_end[:count].tolist())
    properties = _properties(
        data, (topic_end[: len(numbers)] + 2).tolist(), (begin + size)[: len(numbers)].tolist()
    )
    count = len(properties)
    if not count:
        return None
    store_at = begin[:count] + _STORE_TIME + np.where(sys_flag[:count] & BORN_V6, _V6_EXTRA, 0)
    return Run(
        own[:count], size[:count], head["queue_id"][:count].astype(np.int64),
        head["queue_offset"][:count].astype(np.int64), sys_flag[:count],
        _gather(units, store_at, _LONG).astype(np.int64), np.array(numbers[:count], np.int64), names,
        properties,
    )  # fmt: skip


def _starts(data: bytes, at: int, most: int) -> list[int]:
    """Where the records begin that follow each other by their sizes and lie wholly in the data."""
    starts: list[int] = []
    stop = len(data)
    while len(starts) < most and at + MIN_SIZE <= stop:
        size = _SIZE(data, at)[0]
        if not MIN_SIZE <= size <= stop - at:
            break
        starts.append(at)
        at += size
    return starts


def _body(begin: IntArray, sys_flag: IntArray) -> IntArray:
    """Where the bodies begin."""
    hosts = np.where(sys_flag & BORN_V6, _V6_EXTRA, 0) + np.where(sys_flag & STORE_V6, _V6_EXTRA, 0)
    body: IntArray = begin + HEAD_V4.size + hosts
    return body


def _parts(
    units: NDArray[np.uint8],
    begin: IntArray,
    end: IntArray,
    magic: NDArray[Any],
    sys_flag: IntArray,
    good: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], IntArray, IntArray, IntArray]:
    """(whether the lengths in each record add up, ends of bodies, starts of topics, ends of topics). Places
    of records that are not good are somewhere inside them."""
    long_topic = magic == MAGIC_V2
    body = _body(begin, sys_flag)
    good = good & (long_topic | (magic == MAGIC_V1)) & (body + 3 <= end)
    body = np.where(good, body, begin + HEAD_V4.size)
    tail = body + _gather(units, body - 4, _INT)
    width = 1 + long_topic
    good &= (tail >= body) & (tail + width + 2 <= end)
    tail = np.where(good, tail, begin)
    topic_at = tail + width
    topic_end = topic_at + np.where(long_topic, _short(units, tail), units[tail])
    good &= topic_end + 2 <= end
    topic_end = np.where(good, topic_end, begin)
    good &= topic_end + 2 + _short(units, topic_end) == end
    return good, tail, topic_at, topic_end


def _gather(units: NDArray[np.uint8], places: IntArray, kind: np.dtype[Any]) -> NDArray[Any]:
    """The item at each place, which lies wholly in the data."""
    width = kind.itemsize
    items: NDArray[Any] = np.ndarray((len(units) - width + 1,), f"V{width}", units, strides=(1,))
    return items[places].view(kind)


def _short(units: NDArray[np.uint8], places: IntArray) -> IntArray:
    """The unsigned short at each place."""
    return units[places].astype(np.int64) << 8 | units[places + 1]


def _leading(good: NDArray[np.bool_]) -> int:
    wrong = np.flatnonzero(~good)
    return int(wrong[0]) if len(wrong) else len(good)


def _with_good_bodies(data: bytes, starts: IntArray, ends: IntArray, crcs: NDArray[Any]) -> int:
    """How many of the first records have the body that their CRC says."""
    view = memoryview(data)
    found = [crc32(view[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return _leading((np.array(found, np.int64) & 0x7FFFFFFF == crcs) | (starts == ends))


def _topics(data: bytes, starts: list[int], ends: list[int]) -> tuple[list[int], list[str]]:
    """(number of each record's topic, topics) of the first records, up to one whose topic cannot be."""
    known: dict[bytes, int] = {}
    numbers: list[int] = []
    names: list[str] = []
    for start, end in zip(starts, ends, strict=True):
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


def _properties(data: bytes, starts: list[int], ends: list[int]) -> list[bytes]:
    """Properties of the first records, up to some with a NUL in them, which want a closer look."""
    texts = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    if b"\0" in b"".join(texts):
        del texts[next(number for number, text in enumerate(texts) if b"\0" in text) :]
    return texts

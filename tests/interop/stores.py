"""Read a store directory, and list the unexpected differences of two stores.

It is independent of ``cometmq.store`` and based on RocketMQ's documented layout. Two stores of the same input
may differ in times, host addresses and the order of properties (a hash map's in Java).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD_MAGIC = 0xDAA320A7
BLANK_MAGIC = 0xCBD43194
INDEX_HEADER = struct.Struct(">qqqqii")
INDEX_ENTRY = struct.Struct(">iqii")
UNIT = struct.Struct(">qiq")


@dataclass(frozen=True)
class Record:
    """A commit-log record of ``size`` bytes at ``position`` of the whole log."""

    position: int
    size: int
    crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born: int
    stored: int
    reconsumed: int
    prepared: int
    body: bytes
    topic: str
    properties: tuple[str, ...]

    def fixed(self) -> tuple[object, ...]:
        """The values that the input determines, without times and the order of properties."""
        return (
            self.position,
            self.size,
            self.crc,
            self.queue_id,
            self.flag,
            self.queue_offset,
            self.physical_offset,
            self.sys_flag,
            self.born,
            self.reconsumed,
            self.prepared,
            self.body,
            self.topic,
            tuple(sorted(_without_address(each) for each in self.properties)),
        )


def _without_address(prop: str) -> str:
    """Mask the address and port in the first 16 hex digits of an offset id."""
    name, _, value = prop.partition("\x01")
    return f"{name}\x01{value[16:]}" if name == "ORIGIN_MESSAGE_ID" else prop


@dataclass(frozen=True)
class Index:
    """An index file; :meth:`fixed` does not contain ``stored`` times."""

    begin: int
    end: int
    begin_offset: int
    end_offset: int
    slots_used: int
    count: int
    slots: tuple[int, ...]
    entries: tuple[tuple[int, int, int, int], ...]

    def fixed(self) -> tuple[object, ...]:
        links = tuple((key, offset, previous) for key, offset, _, previous in self.entries)
        return (self.begin_offset, self.end_offset, self.slots_used, self.count, self.slots, links)


@dataclass(frozen=True)
class Store:
    """The comparable content of a whole store."""

    records: tuple[Record, ...]
    queues: dict[str, tuple[tuple[int, int, int], ...]]
    indexes: tuple[Index, ...]
    checkpoint: tuple[int, int, int]
    lengths: dict[str, int]
    tables: dict[str, Any]

    def stored_at(self, time: int) -> tuple[Record, ...]:
        return tuple(each for each in self.records if each.stored == time)

    def of_queue(self, name: str) -> list[Record]:
        """Return the records that a queue (``topic/id``) points to."""
        by_position = {each.position: each for each in self.records}
        return [by_position[position] for position, _, _ in self.queues.get(name, ())]


def read_store(root: Path, *, slots: int = 50_000) -> Store:
    """Read the store directory of a stopped broker."""
    records = tuple(read_log(root / "commitlog"))
    queues = {}
    base = root / "consumequeue"
    for directory in sorted(base.glob("*/*")):
        units = tuple(units_of(directory))
        if units:
            queues[str(directory.relative_to(base))] = units
    indexes = tuple(_index(path, slots) for path in sorted((root / "index").glob("*")))
    path = root / "checkpoint"
    raw = path.read_bytes() if path.exists() else bytes(24)  # a new store may have none yet: all zeros
    lengths = {
        _masked(path.relative_to(root)): path.stat().st_size
        for path in sorted(root.glob("**/*"))
        if path.is_file() and "config" not in path.parts and path.name not in ("abort", "lock")
    }
    tables = {path.name: loads(path.read_text()) for path in sorted((root / "config").glob("*.json"))}
    return Store(records, queues, indexes, struct.unpack_from(">qqq", raw), lengths, tables)


def _masked(path: Path) -> str:
    """Mask the names of index files, which are creation times."""
    return re.sub(r"index/\d{17}$", "index/TIME", str(path))


def read_log(directory: Path) -> Iterator[Record]:
    for path in sorted(directory.glob("*")):
        base, data, at = int(path.name), path.read_bytes(), 0
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">II", data, at)
            if magic != RECORD_MAGIC:
                break  # the rest is a blank record or unwritten space
            yield _record(data, at, base + at, size)
            at += size


def records_in(body: bytes) -> Iterator[Record]:
    """Yield the records in the response of a pull or query."""
    at = 0
    while at < len(body):
        (size,) = struct.unpack_from(">i", body, at)
        (position,) = struct.unpack_from(">q", body, at + 28)
        yield _record(body, at, position, size)
        at += size


def _record(data: bytes, at: int, position: int, size: int) -> Record:
    (crc, queue_id, flag, queue_offset, physical, sys_flag, born) = struct.unpack_from(
        ">iiiqqiq", data, at + 8
    )
    at += 48
    at += 20 if sys_flag & 0x10 else 8
    (stored,) = struct.unpack_from(">q", data, at)
    at += 8 + (20 if sys_flag & 0x20 else 8)
    reconsumed, prepared, length = struct.unpack_from(">iqi", data, at)
    at += 16
    body = data[at : at + length]
    at += length
    topic = data[at + 1 : at + 1 + data[at]].decode()
    at += 1 + data[at]
    (length,) = struct.unpack_from(">H", data, at)
    properties = data[at + 2 : at + 2 + length].decode()
    assert crc == zlib.crc32(body) & 0x7FFFFFFF, f"body at {position} does not match its CRC"
    pairs = tuple(properties.split("\x02"))
    return Record(
        position,
        size,
        crc,
        queue_id,
        flag,
        queue_offset,
        physical,
        sys_flag,
        born,
        stored,
        reconsumed,
        prepared,
        body,
        topic,
        pairs,
    )


def units_of(directory: Path) -> Iterator[tuple[int, int, int]]:
    """Yield the units of a consume queue, up to its end."""
    for path in sorted(directory.glob("*")):
        for unit in UNIT.iter_unpack(path.read_bytes()):
            if unit[1] == 0:
                return
            yield unit


def _index(path: Path, slots: int) -> Index:
    data = path.read_bytes()
    begin, end, begin_offset, end_offset, used, count = INDEX_HEADER.unpack_from(data)
    heads = struct.unpack_from(f">{slots}i", data, INDEX_HEADER.size)
    first = INDEX_HEADER.size + 4 * slots
    entries = tuple(INDEX_ENTRY.unpack_from(data, first + 20 * number) for number in range(1, count))
    return Index(begin, end, begin_offset, end_offset, used, count, heads, entries)


def loads(text: str) -> Any:
    """Parse JSON as fastjson writes it: with unquoted integer keys."""
    return json.loads(re.sub(r"([{,]\s*)(-?\d+)(\s*:)", r'\1"\2"\3', text))


def differences(one: Store, other: Store) -> list[str]:
    """Return the differences of two stores other than times, addresses and the order of properties."""
    found = []
    for left, right in zip(one.records, other.records, strict=False):
        if left.fixed() != right.fixed():
            found.append(f"record at {left.position}:\n  {left}\n  {right}")
            break
    if len(one.records) != len(other.records):
        found.append(f"{len(one.records)} records, {len(other.records)} records")
    found += [
        f"queue {name}:\n  {one.queues.get(name)}\n  {other.queues.get(name)}"
        for name in sorted(one.queues.keys() | other.queues.keys())
        if not _same_units(name, one.queues.get(name, ()), other.queues.get(name, ()))
    ]
    if [each.fixed() for each in one.indexes] != [each.fixed() for each in other.indexes]:
        found.append(f"index:\n  {_brief(one)}\n  {_brief(other)}")
    for store in (one, other):
        physic, logic, index = store.checkpoint
        if physic and not store.stored_at(physic):  # the last complete flush depends on timing
            found.append(f"checkpoint's log time {physic} belongs to no record")
        if store.stored_at(logic)[-1:] != store.records[-1:] or not index:
            found.append(f"checkpoint's queue time {logic} or index time {index} is not the end's")
    if one.lengths != other.lengths:
        found.append(f"files and lengths: {sorted(one.lengths.items() ^ other.lengths.items())}")
    return found


def _same_units(
    name: str, one: tuple[tuple[int, int, int], ...], other: tuple[tuple[int, int, int], ...]
) -> bool:
    if name.startswith("SCHEDULE_TOPIC_XXXX/"):  # the tags code is the delivery time there
        return [unit[:2] for unit in one] == [unit[:2] for unit in other]
    return one == other


def _brief(store: Store) -> str:
    return str(
        [
            (each.begin_offset, each.end_offset, each.slots_used, each.count, each.entries[:3])
            for each in store.indexes
        ]
    )

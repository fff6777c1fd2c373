"""A model of a store's content after a power failure, and the check of a recovered store against it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import by_key

from cometmq.protocol.properties.values import index_hash
from cometmq.protocol.record.one import decode_record
from cometmq.store import JsonTable, MessageStore, StoreConfig
from cometmq.store.base.config import CONSUME_QUEUE_UNIT
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_STRUCT
from cometmq.store.derived.index_file import ENTRY_DTYPE, HEADER

ROOT = "/store"
TABLE = f"{ROOT}/config/table.json"


def config(sync: bool, slave: bool = False) -> StoreConfig:
    """Return a configuration with files so small that each workload fills several of each kind."""
    return StoreConfig(
        store_path_root_dir=ROOT,
        mapped_file_size_commit_log=8192,
        mapped_file_size_consume_queue=8 * CONSUME_QUEUE_UNIT,
        max_hash_slot_num=11,
        max_index_num=24,
        flush_disk_type="SYNC_FLUSH" if sync else "ASYNC_FLUSH",
        broker_role="SLAVE" if slave else "ASYNC_MASTER",
    )


class Wrong(AssertionError):
    """A broken guarantee of a recovered store."""


class Entry(NamedTuple):
    """A record in the log. `at`: number of disk operations when its write began."""

    at: int
    position: int
    data: bytes
    topic: str
    queue_id: int
    queue_offset: int
    tags_code: int
    keys: tuple[str, ...]


@dataclass
class Ledger:
    """The actions of a workload and its guarantees, each with the number of disk operations at that time."""

    appended: list[Entry] = field(default_factory=list)
    promised: list[tuple[int, int]] = field(default_factory=list)  # (when, position of a durable record)
    deletions: list[tuple[int, int, str, int]] = field(default_factory=list)  # (begin, end, topic, log end)
    retiring: list[tuple[int, int]] = field(default_factory=list)  # (begin, end of deletable part)
    retired: list[tuple[int, int]] = field(default_factory=list)  # (when, durable begin of log)
    hidden: list[tuple[int, int, str, dict[int, int], int]] = field(default_factory=list)
    """Purges and retention of topics: (begin, end, topic, first remaining offsets, log end)."""
    tables: list[tuple[int, int, int]] = field(default_factory=list)  # (begin, end, version)

    def at(self, moment: int) -> Expected:
        """Return the expectations after a power failure that follows `moment` operations.

        Actions that have begun but not ended may have had an effect or not.
        """
        expected = Expected()
        promised = {position for when, position in self.promised if when <= moment}
        low = max((position for when, position in self.retiring if when < moment), default=0)
        lowest = max((position for when, position in self.retired if when <= moment), default=0)
        for entry in self.appended:
            if entry.at >= moment:
                continue
            expected.may[entry.position] = entry
            gone = entry.position < lowest
            begun = entry.position < low
            for start, done, topic, end in self.deletions:
                if entry.topic == topic and entry.position < end:
                    begun |= start < moment
                    gone |= done <= moment
            for start, done, topic, floors, end in self.hidden:
                floor = floors.get(entry.queue_id, 0) if entry.topic == topic and entry.position < end else 0
                if entry.queue_offset < floor:
                    begun |= start < moment
                    gone |= done <= moment
            if gone:
                expected.gone.add(entry.position)
            elif begun:
                expected.optional.add(entry.position)
            elif entry.position in promised:
                expected.must.add(entry.position)
        for entry in self.appended:
            if entry.position in promised and not any(
                entry.topic == topic and entry.position < end and start < moment
                for start, _, topic, end in self.deletions
            ):
                place = entry.topic, entry.queue_id
                expected.ends[place] = max(expected.ends.get(place, 0), entry.queue_offset + 1)
        done_versions = [version for _, done, version in self.tables if done <= moment]
        begun_versions = [version for start, _, version in self.tables if start < moment]
        newest = max(done_versions, default=0)
        expected.tables = {newest} | {version for version in begun_versions if version >= newest}
        return expected


@dataclass
class Expected:
    """Records by position: allowed, required, optional although in the log, and forbidden."""

    may: dict[int, Entry] = field(default_factory=dict)
    must: set[int] = field(default_factory=set)
    optional: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)
    unindexed: set[int] = field(default_factory=set)
    """Records of segments that retention was deleting: their index entries may be deleted first."""
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    """The offset that each queue must have reached, so that no offset is assigned twice."""


class Found(NamedTuple):
    """The content that a store serves, for comparison with its content after the next recovery."""

    begin: int
    end: int
    queues: tuple[tuple[str, int, int, int], ...]
    served: tuple[int, ...]
    indexed: tuple[tuple[int, int], ...]


def examine(store: MessageStore, expected: Expected) -> Found:
    """Check everything that a store serves. Raises Wrong."""
    in_log = {
        position
        for position, entry in expected.may.items()
        if store.log.read(position, len(entry.data)) == entry.data
    }
    served: list[int] = []
    for queue in sorted(store.queues, key=lambda queue: (queue.topic, queue.queue_id)):
        served += _queue(store, queue.topic, queue.queue_id, expected)
    for place, end in expected.ends.items():
        reached = store.queues.find_queue(*place)
        if reached is None or reached.next_offset < end:
            raise Wrong(f"{place} would give out offset {end - 1} again")
    there = set(served)
    if len(served) != len(there):
        raise Wrong("a record is served twice")
    if lost := expected.must - there:
        raise Wrong(f"promised records are not served: {_places(expected, lost)}")
    if alive := expected.gone & there:
        raise Wrong(f"deleted records are served: {_places(expected, alive)}")
    low = store.log.min_position
    silent = {p for p in in_log - there - expected.optional - expected.gone if p >= low}
    if silent:
        raise Wrong(f"records of the log are in no queue: {_places(expected, silent)}")
    indexed = _index(store, expected, there)
    _nothing_behind_the_end(store)
    version = JsonTable(TABLE, store.disk).load().get("version", 0)
    if expected.tables and version not in expected.tables:
        raise Wrong(f"table holds version {version}, not one of {sorted(expected.tables)}")
    queues = sorted(
        (queue.topic, queue.queue_id, queue.min_offset, queue.max_offset)
        for queue in store.queues
        if queue.max_offset
    )
    return Found(low, store.log.end, tuple(queues), tuple(served), indexed)


def _places(expected: Expected, positions: Iterable[int]) -> str:
    return ", ".join(
        f"{e.topic}/{e.queue_id}@{e.queue_offset} at {e.position}"
        for e in (expected.may[position] for position in sorted(positions)[:5])
    )


def _queue(store: MessageStore, topic: str, queue_id: int, expected: Expected) -> list[int]:
    """Return the positions of the records that a queue serves, each compared with the appended record."""
    queue = store.queues.find_queue(topic, queue_id)
    assert queue is not None
    place = f"{topic}/{queue_id}"
    if queue.next_offset != queue.max_offset:
        raise Wrong(f"{place} would go on at {queue.next_offset}, its end is {queue.max_offset}")
    units = {}
    for offset, position, size, tags in queue.units(queue.min_offset, queue.max_offset):
        if size == FILLER_SIZE:
            continue
        entry = expected.may.get(position)
        if entry is None:
            raise Wrong(f"{place}@{offset} points to {position}, where nothing was appended")
        if (entry.topic, entry.queue_id, entry.queue_offset) != (topic, queue_id, offset):
            raise Wrong(f"{place}@{offset} points to {entry[3:6]}")
        if (len(entry.data), entry.tags_code) != (size, tags):
            raise Wrong(f"unit of {place}@{offset} is {size}, {tags}: not its record's")
        units[offset] = position
    served: list[int] = []
    offset = queue.min_offset
    while offset < queue.max_offset:
        got = store.reader.get(queue, offset, 32)
        data = b"".join(got.buffers)  # type: ignore[union-attr]
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            position = int.from_bytes(data[at + 28 : at + 36], "big")
            entry = expected.may.get(position)
            if entry is None or entry.data != data[at : at + size]:
                raise Wrong(f"{place} serves a record at {position} that was never appended")
            served.append(position)
            at += size
        if got.next_begin_offset <= offset:  # type: ignore[union-attr]
            raise Wrong(f"{place}: a reader would stay at {offset}")
        offset = got.next_begin_offset  # type: ignore[union-attr]
    # Their segment may already be deleted while their unit still exists.
    absent = (expected.optional | expected.gone) - set(served)
    if served != [position for position in units.values() if position not in absent]:
        raise Wrong(f"{place} has units of {list(units.values())} and serves {served}")
    return served


def _index(store: MessageStore, expected: Expected, served: set[int]) -> tuple[tuple[int, int], ...]:
    """Check that the index has every key of each served record, and no entry without a record."""
    store.index.index_waiting_keys()
    for position in served - expected.optional - expected.unindexed:
        entry = expected.may[position]
        for key in entry.keys:
            if entry.data not in by_key(store, entry.topic, key, 64):
                raise Wrong(f"key {key} of {entry.topic} at {position} is not in the index")
    store.index.write(slots=True)
    entries: list[tuple[int, int]] = []
    for file in store.index.files:
        fd = store.disk.open(file.path, write=False)
        data = store.disk.pread(fd, 1 << 20, 0)
        store.disk.close(fd)
        count = HEADER.unpack_from(data)[5]
        start = HEADER.size + 4 * file.slot_count
        rows = np.frombuffer(data, ENTRY_DTYPE, offset=start)[1 : max(1, count)]
        entries += [(int(row["position"]), int(row["hash"])) for row in rows]
    for position, key_hash in entries:
        if position < store.log.min_position:
            continue
        known = expected.may.get(position)
        if known is None or key_hash not in [index_hash(f"{known.topic}#{key}") for key in known.keys]:
            raise Wrong(f"the index has an entry for {position}, where no such record was appended")
        if position not in served and position not in expected.optional | expected.gone:
            raise Wrong(f"the index has an entry for {position}, which is not served")
    return tuple(sorted({entry for entry in entries if entry[0] in served}))


def _nothing_behind_the_end(store: MessageStore) -> None:
    """Check that the space after the ends of log and queues is zero, so that no old data can reappear."""
    disk = store.disk
    assert isinstance(disk, RecordingDisk)
    for path, inode in disk.names.items():
        content = disk.files[inode]
        if content is None:
            continue
        directory, name = os.path.split(path)
        if directory == f"{ROOT}/commitlog":
            rest = content[max(0, store.log.end - int(name)) :]
        elif directory.startswith(f"{ROOT}/consumequeue/"):
            topic, queue_id = directory.split("/")[-2:]
            queue = store.queues.find_queue(topic, int(queue_id))
            if queue is None:
                continue
            rest = content[max(0, queue.max_offset * UNIT_STRUCT.size - int(name)) :]
        else:
            continue
        if rest.count(0) != len(rest):
            raise Wrong(f"{path} holds something behind the end")


def entry_of(
    store: MessageStore, at: int, position: int, size: int, keys: tuple[str, ...], tags: int
) -> Entry:
    """Return the record that was just committed at `position`."""
    data = bytes(store.log.read(position, size))  # type: ignore[arg-type]
    message = decode_record(data, check_crc=True)
    return Entry(at, position, data, message.topic, message.queue_id, message.queue_offset, tags, keys)

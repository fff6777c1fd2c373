"""A rebuild in parts, which several processes make for the log of one store at the same time.

    look           what the old queues know better than the log does, if there are any
    take_segment   the records of one segment, as the units and keys that they ask for
    make_queues    some of the queues, from the units of all segments
    make_index     the index, from the keys of all segments

Each part reads what those before it left in a scratch directory. A part that is done again leaves the same.
The queues and the index equal those of `rebuild`, byte for byte.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from cometmq.errors import StoreError
from cometmq.protocol.properties.key_hashes import Keys, key_prefix
from cometmq.protocol.properties.template import codes_and_keys
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.protocol.record.many import Run
from cometmq.protocol.record.one import Facts
from cometmq.store.background.derived_writer import sync_paths
from cometmq.store.base.clock import Clock, SystemClock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, OsDisk, opened, read_file, replace_file
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.guards import lock_held
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService, hashed_keys
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.findings import Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk
from cometmq.store.inspect.queue_check import Evidence
from cometmq.store.inspect.rebuild import (
    PARTS,
    SCRATCH,
    check_queues,
    files_below,
    look_at_old_queues,
    remove_tree,
)
from cometmq.store.recovery.queue_order import SPARE, QueueOrder
from cometmq.store.recovery.replay import WAITING_TOPICS, tags_code_of
from cometmq.store.recovery.store_layout import StoreLayout, read_layout
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics

_CHUNK = 1 << 20  # units or keys in one file of the scratch directory
_COPIED = ("checkpoint", "abort", "broker.conf")  # with the tables: what `verify` and a broker look at
_IN_USE = "a broker is using this store; stop it first"
_UNITS = np.dtype([("queue", "i4"), ("size", "i4"), ("position", "i8"), ("tags", "i8"), ("offset", "i8")])
_KEYS = np.dtype([("hash", "i8"), ("position", "i8"), ("ms", "i8")])


class Segment(msgspec.Struct):
    """What was taken of a segment. queues: topic and id by the numbers in its units; chunks: for each file of
    units, where those of each part begin, and where the last ones end."""

    base: int
    log_min: int
    records: int
    hidden: int
    indexed: int
    queues: list[tuple[str, int]]
    chunks: list[list[int]]
    key_chunks: int
    findings: list[Finding]


class QueuesMade(msgspec.Struct):
    """Some of the queues. spare: units without room in the log that the order of these queues has used."""

    queues: int
    units: int
    not_served: int
    spare: int


class IndexMade(msgspec.Struct):
    """The index."""

    files: int
    entries: int


class _Known(msgspec.Struct):
    """Evidence, as it is kept in the scratch directory."""

    places: dict[int, tuple[str, int, int]] = {}
    tags: dict[int, int] = {}
    superseded: list[int] = []


@dataclass(frozen=True)
class RebuildParts:
    """The parts of one rebuild, made by `plan_rebuild`. `segments`: where they begin in the log; `parts`:
    into how many the queues are divided."""

    root: str
    output: str
    config: StoreConfig
    commit_log_dir: str
    clean: bool
    segments: tuple[int, ...]
    parts: int

    def look(self) -> None:
        """Keep what the old queues know better. The whole log is walked if there are any. What a killed
        rebuild has left is removed first. Raises OSError."""
        disk, layout = OsDisk(), self._layout()
        remove_tree(disk, self._at(""))
        disk.makedirs(self._at(""))
        known = _Known()
        if layout.queues:
            found = look_at_old_queues(disk, layout, DeletedTopics(disk, self.root), lambda _done: None)
            known = _Known(found.places, found.tags, found.superseded.tolist())
        replace_file(disk, self._at("evidence.json"), msgspec.json.encode(known))

    def take_segment(self, base: int) -> Segment:
        """Keep the units and keys of the segment that begins at `base`; its numbers and findings. After
        `look`. Raises OSError."""
        layout = self._layout()
        taken = _Taken(self, layout, base)
        findings = Findings()
        walk = LogWalk(taken.disk, layout, findings)
        # The first records of the next segment tell whether this one was closed.
        with closing(walk.runs(base)) as runs:
            for run in runs:
                if run.position[0] >= base + layout.config.mapped_file_size_commit_log:
                    break
                taken.add(run)
        taken.write()
        segment = taken.segment
        segment.log_min, segment.findings = layout.log_min, findings.kept
        replace_file(taken.disk, self._at(f"segment-{base:020d}.json"), msgspec.json.encode(segment))
        return msgspec.structs.replace(segment, queues=[], chunks=[])

    def make_queues(self, part: int) -> QueuesMade:
        """Make the queues of a part. After all segments. Raises OSError."""
        disk = OsDisk()
        files = StoreFiles(disk)
        try:
            making = _Queues(self, files, part)
            for segment in self._segments(disk):
                making.add(segment)
            return making.finish()
        finally:
            files.descriptors.close()

    def make_index(self, clock: Clock | None = None) -> IndexMade:
        """Make the index. After all segments. Raises OSError."""
        disk = OsDisk()
        files = StoreFiles(disk)
        directory = self._at("index")
        remove_tree(disk, directory)  # of a process that was killed
        disk.makedirs(directory)
        index = IndexService(files, clock or SystemClock(), self._new_config())
        try:
            for segment in self._segments(disk):
                for number in range(segment.key_chunks):
                    data = _content(disk, self.chunk("keys", segment.base, number))
                    keys = np.frombuffer(data, _KEYS)
                    index.add_hashed(keys["hash"].copy(), keys["position"].copy(), keys["ms"].copy())
                    index.write()
            index.write(slots=True)
        finally:
            files.descriptors.close()
        _sync(disk, directory)
        return IndexMade(len(index.files), sum(file.count - 1 for file in index.files))

    def part_of(self, topic: str, queue_id: int) -> int:
        """The part that makes this queue."""
        return zlib.crc32(f"{topic}/{queue_id}".encode("utf-8", "replace")) % self.parts

    def chunk(self, kind: str, base: int, number: int) -> str:
        """Path of a file with units or keys of a segment."""
        return self._at(f"{kind}-{base:020d}-{number:06d}")

    def evidence(self, disk: Disk) -> Evidence:
        known = msgspec.json.decode(_content(disk, self._at("evidence.json")), type=_Known)
        evidence = Evidence()
        evidence.places, evidence.tags = known.places, known.tags
        evidence.supersede(known.superseded)
        return evidence

    def _segments(self, disk: Disk) -> Iterator[Segment]:
        for name in disk.listdir(os.path.join(self.output, SCRATCH)):
            if name.startswith("segment-"):
                yield msgspec.json.decode(_content(disk, self._at(name)), type=Segment)

    def _new_config(self) -> StoreConfig:
        return self.config.replace(store_path_root_dir=os.path.join(self.output, SCRATCH))

    def new_queues(self, files: StoreFiles) -> QueueTable:
        return QueueTable(files, self._new_config())

    def _layout(self) -> StoreLayout:
        found = read_layout(OsDisk(), self.root, config=self.config, commit_log_dir=self.commit_log_dir)
        return found._replace(live=False, clean=self.clean)

    def _at(self, name: str) -> str:
        return os.path.join(self.output, SCRATCH, name)

    def put_in_place(self, made: Sequence[QueuesMade]) -> None:
        """Give the output what was made, in place of what an earlier rebuild made, and copies of the store's
        tables. After all parts. Raises StoreError if a broker uses the store now, OSError."""
        disk = OsDisk()
        if lock_held(disk, self.root):
            raise StoreError(_IN_USE, self.root)
        if sum(each.spare for each in made) > SPARE:
            problem = "a log with such gaps that the order of its queues matters; use `cometmq store rebuild`"
            raise StoreError(problem, self.root)
        for part in PARTS:
            place = os.path.join(self.output, part)
            remove_tree(disk, place)
            disk.makedirs(self._at(part))
            disk.rename(self._at(part), place)
        for name in (*_COPIED, *(f"config/{each}" for each in disk.listdir(f"{self.root}/config"))):
            source, target = os.path.join(self.root, name), os.path.join(self.output, name)
            facts = disk.facts(source)
            if facts is not None and facts.regular:
                disk.makedirs(os.path.dirname(target))
                replace_file(disk, target, read_file(disk, source))
            elif disk.facts(target) is not None:
                disk.unlink(target)
        disk.fsync_dir(self.output)
        remove_tree(disk, os.path.join(self.output, SCRATCH))


def plan_rebuild(
    root: str, output: str, parts: int, *, config: StoreConfig | None = None, commit_log_dir: str = ""
) -> RebuildParts:
    """The parts of a rebuild of the store in `root` into the directory `output`; nothing is written yet.

    config, commit_log_dir: as for `rebuild`. Raises StoreError if a broker holds the store, if it has light
    queues, or if the output is the store, OSError."""
    disk = OsDisk()
    layout = read_layout(disk, root, config=config, commit_log_dir=commit_log_dir)
    output = os.path.realpath(output)
    if layout.live:
        raise StoreError(_IN_USE, layout.root)
    check_queues(layout)
    if f"{output}/".startswith(f"{layout.root}/"):
        raise StoreError("the new queues and index go to another directory, outside of the store", output)
    return RebuildParts(
        layout.root, output, layout.config, ",".join(layout.config.commit_log_dirs), layout.clean,
        tuple(file.base for file in layout.segments), parts,
    )  # fmt: skip


class _Taken:
    """Units and keys of a segment on their way into files."""

    def __init__(self, parts: RebuildParts, layout: StoreLayout, base: int) -> None:
        self.disk = OsDisk()
        self.segment = Segment(base, 0, 0, 0, 0, [], [], 0, [])
        self._parts = parts
        self._deleted = DeletedTopics(self.disk, parts.root)
        self._evidence = parts.evidence(self.disk)
        self._superseded = self._evidence.superseded
        self._delays = layout.config.delay_levels_ms
        self._indexes = layout.config.message_index_enable
        self._numbers: dict[tuple[str, int], int] = {}
        self._part_of: list[int] = []
        self._units: list[NDArray[np.void]] = []
        self._keys: list[NDArray[np.void]] = []

    def add(self, run: Run) -> None:
        """Take the next records."""
        segment = self.segment
        segment.records += len(run.properties)
        served = ~np.isin(run.position, self._superseded)
        if self._deleted:
            hidden = self._deleted.hidden(run)
            segment.hidden += int(hidden.sum())
            rows = np.flatnonzero(~hidden)
            if not len(rows):
                return
            run, served = Run.of(list(run.facts(rows))), served[rows]
        if self._evidence.places:
            moved = [int(position) in self._evidence.places for position in run.position]
            if any(moved):
                run, served = Run.of(list(map(self._in_place, run.facts()))), served | moved
        codes, keys = codes_and_keys(run.properties)
        if self._indexes:
            self._add_keys(run, keys)
        self._add_units(run, codes, np.flatnonzero(served & run.queued))
        if sum(map(len, self._units)) >= _CHUNK or sum(map(len, self._keys)) >= _CHUNK:
            self.write()

    def _in_place(self, facts: Facts) -> Facts:
        place = self._evidence.places.get(facts.position)
        if place is None:
            return facts
        topic, queue_id, offset = place
        flag = facts.sys_flag & ~TRANSACTION_MASK
        return facts._replace(topic=topic, queue_id=queue_id, queue_offset=offset, sys_flag=flag)

    def _add_keys(self, run: Run, keys: list[bytes] | None) -> None:
        self.segment.indexed += len(run.properties)
        given: list[Keys] = [None] * len(run.properties) if keys is None else [*keys]
        for row in np.flatnonzero(run.rolled_back).tolist():
            given[row] = ()
        prefixes = [key_prefix(name) for name in run.names]
        numbers = [prefixes[number] for number in run.topic.tolist()]
        columns = numbers, run.position.tolist(), run.store_ms.tolist(), run.properties, given
        for hashes, positions, times in hashed_keys(*columns):
            made = np.empty(len(hashes), _KEYS)
            made["hash"], made["position"], made["ms"] = hashes, positions, times
            self._keys.append(made)

    def _add_units(self, run: Run, codes: list[int], rows: NDArray[np.int64]) -> None:
        units = np.empty(len(rows), _UNITS)
        units["position"], units["size"] = run.position[rows], run.size[rows]
        units["offset"] = run.queue_offset[rows]
        tags = np.array(codes, np.int64)
        for topic in WAITING_TOPICS.intersection(run.names):
            waiting = np.flatnonzero(run.topic == run.names.index(topic))
            tags[waiting] = [tags_code_of(each, self._delays) for each in run.facts(waiting)]
        units["tags"] = tags[rows]
        if self._evidence.tags:
            known = self._evidence.tags
            pairs = zip(units["position"].tolist(), units["tags"].tolist(), strict=True)
            units["tags"] = [known.get(position, code) for position, code in pairs]
        queue = run.topic[rows] << 32 | run.queue_id[rows] & 0xFFFFFFFF
        _, firsts, which = np.unique(queue, return_index=True, return_inverse=True)
        found = rows[firsts]
        topics = [run.names[number] for number in run.topic[found].tolist()]
        numbers = list(map(self._number, topics, run.queue_id[found].tolist()))
        units["queue"] = np.array(numbers, np.int32)[which]
        self._units.append(units)

    def _number(self, topic: str, queue_id: int) -> int:
        number = self._numbers.setdefault((topic, queue_id), len(self._numbers))
        if number == len(self.segment.queues):
            self.segment.queues.append((topic, queue_id))
            self._part_of.append(self._parts.part_of(topic, queue_id))
        return number

    def write(self) -> None:
        """Write what waits: units in the order of their parts, in each part in that of the log."""
        segment = self.segment
        if self._units:
            units = np.concatenate(self._units)
            part = np.array(self._part_of, np.int64)[units["queue"]]
            order = np.argsort(part, kind="stable")
            begins = np.searchsorted(part[order], np.arange(self._parts.parts + 1)).tolist()
            path = self._parts.chunk("units", segment.base, len(segment.chunks))
            replace_file(self.disk, path, units[order].tobytes())
            segment.chunks.append(begins)
        if self._keys or (segment.indexed and not segment.key_chunks):
            keys = np.concatenate([*self._keys, np.empty(0, _KEYS)])
            path = self._parts.chunk("keys", segment.base, segment.key_chunks)
            replace_file(self.disk, path, keys.tobytes())
            segment.key_chunks += 1
        self._units, self._keys = [], []


class _Queues:
    """The queues of a part in the making."""

    def __init__(self, parts: RebuildParts, files: StoreFiles, part: int) -> None:
        self._parts, self._part, self._disk = parts, part, files.disk
        self._queues = parts.new_queues(files)
        self._order = QueueOrder(CleanEnds(self._disk, parts.root).ends, self._push, self._leave_out)
        self._own: dict[tuple[str, int], ConsumeQueue | None] = {}
        self._codes: dict[int, int] = {}  # of records that may wait, by log position
        self._not_served = 0
        self._log_min = 0

    def add(self, segment: Segment) -> None:
        """Take the units of the next segment."""
        self._log_min = segment.log_min
        for each in segment.queues:
            if each not in self._own:
                self._own[each] = self._queue(*each)
        table = [self._own[each] for each in segment.queues]
        for number, begins in enumerate(segment.chunks):
            begin, end = begins[self._part : self._part + 2]
            path = self._parts.chunk("units", segment.base, number)
            size = _UNITS.itemsize
            with opened(self._disk, path, write=False) as fd:
                data = self._disk.pread(fd, (end - begin) * size, begin * size)
            self._add_units(np.frombuffer(data, _UNITS), table)
            self._queues.write_dirty()

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, if it is one of this part's and may be one."""
        if self._parts.part_of(topic, queue_id) != self._part:
            return None
        try:
            queue = self._queues.of_record(topic, queue_id)
        except QueueRefused:
            return None
        remove_tree(self._disk, queue.path)  # of a process that was killed
        return queue

    def _add_units(self, units: NDArray[np.void], table: list[ConsumeQueue | None]) -> None:
        waiting = self._order.waiting
        columns = [units[name].tolist() for name in ("queue", "position", "size", "tags", "offset")]
        for number, position, size, code, offset in zip(*columns, strict=True):
            queue = table[number]
            if queue is None:
                self._not_served += 1
            elif offset == queue.max_offset and queue not in waiting:
                queue.push(position, size, code, offset)
                if not queue.dirty:
                    self._queues.add_dirty(queue)
            else:
                self._codes[position] = code
                facts = Facts(position, size, queue.queue_id, offset, 0, 0, queue.topic, b"")
                self._order.add(queue, facts)

    def _push(self, queue: ConsumeQueue, facts: Facts) -> None:
        queue.push(facts.position, facts.size, self._codes.pop(facts.position), facts.queue_offset)
        if not queue.dirty:
            self._queues.add_dirty(queue)

    def _leave_out(self, facts: Facts, _end: int, _following: Facts | None) -> None:
        self._not_served += 1
        self._codes.pop(facts.position)

    def finish(self) -> QueuesMade:
        """Write what waits, and bring the files onto the device."""
        self._order.finish()
        self._queues.write_dirty()
        units = 0
        for queue in self._queues:
            queue.correct_min(self._log_min)
            units += queue.max_offset - queue.min_offset
            _sync(self._disk, queue.path)
        return QueuesMade(len(self._queues), units, self._not_served, self._order.spare_used)


def _sync(disk: Disk, directory: str) -> None:
    paths = list(files_below(disk, directory)) if disk.is_dir(directory) else []
    sync_paths(disk, paths, [directory, os.path.dirname(directory)])


def _content(disk: Disk, path: str) -> bytes:
    facts = disk.facts(path)
    return read_file(disk, path, facts.size) if facts is not None else b""

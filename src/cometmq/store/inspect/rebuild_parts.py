"""A rebuild in parts, which several processes execute for the log of one store at the same time.

    collect_evidence  compares the old queues, if there are any, with the log
    read_segment      computes the queue units and index keys of the records of one segment
    make_queues       creates some of the queues, from the units of all segments
    make_index        creates the index, from the keys of all segments

Each part reads the results of earlier parts from a scratch directory. A part that is repeated gives the same
result. The queues and the index equal those of `rebuild`, byte for byte.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Unpack

import msgspec
import numpy as np

from cometmq.errors import StoreError
from cometmq.store.background.derived_writer import sync_paths
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import ABORT, CHECKPOINT, LOCATIONS, StoreConfig
from cometmq.store.base.disk import Disk, opened, read_file, replace_file
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.guards import lock_held
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.findings import Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk
from cometmq.store.inspect.queue_check import Evidence
from cometmq.store.inspect.rebuild import (
    KEYS,
    PARTS,
    SCRATCH,
    UNITS,
    DerivedData,
    QueueBuilder,
    add_keys,
    collect_evidence,
    files_below,
    light_queues,
    refuse_tiered,
    remove_tree,
)
from cometmq.store.recovery.store_layout import IN_USE, Look, StoreLayout, read_layout
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.queue_order import SPARE

_CHUNK = 1 << 20  # Maximum number of queue units or index keys per file in the scratch directory


class SegmentData(msgspec.Struct):
    """The result of `read_segment` for one segment of the log.

    Attributes:
        queues: As in `DerivedData`.
        chunks: For each scratch file of units, which are sorted by group of queues: the index of the first
            unit of each group, and at the end the number of units.
    """

    base: int
    log_min: int
    records: int
    hidden: int
    indexed: int
    queues: list[tuple[str, int]]
    chunks: list[list[int]]
    findings: list[Finding]


class QueuesMade(msgspec.Struct):
    """The result of `make_queues` for one group of queues.

    `spare` is the number of filler units that count against the limit SPARE (see queue_order.py).
    """

    queues: int
    units: int
    not_served: int
    spare: int
    findings: list[Finding]


class IndexMade(msgspec.Struct):
    """The result of `make_index`."""

    files: int
    entries: int


_EvidenceFile = tuple[dict[int, tuple[str, int, int]], dict[int, int], list[int]]
"""The fields of Evidence (queue offsets, tags, superseded) as stored in the scratch directory."""


@dataclass(frozen=True)
class RebuildParts:
    """The parts of one rebuild, created by `plan_rebuild`. All methods raise OSError.

    Attributes:
        output: The directory of the result.
        commit_log_dir: The directory of the log, or several separated by commas.
        clean: Whether the last stop of the store was clean.
        segments: The log positions at which the segments begin.
        parts: The number of groups into which the queues are divided, one for each call of `make_queues`.
    """

    root: str
    output: str
    config: StoreConfig
    commit_log_dir: str
    clean: bool
    segments: tuple[int, ...]
    parts: int

    def collect_evidence(self) -> None:
        """Remove the files of an interrupted rebuild, and store the `Evidence` of the old queues."""
        disk, layout = Disk(), self._layout()
        remove_tree(disk, self._at(""))
        disk.makedirs(self._at(""))
        found = collect_evidence(disk, layout, DeletedTopics(disk, self.root), lambda _done: None)
        known: _EvidenceFile = found.queue_offsets, found.tags, found.superseded.tolist()
        replace_file(disk, self._at("evidence.json"), msgspec.json.encode(known))

    def read_segment(self, base: int) -> SegmentData:
        """Write the queue units and index keys of the segment at `base` to the scratch directory.

        Returns a summary. `collect_evidence` must have finished.
        """
        disk, layout = Disk(), self._layout()
        deleted = DeletedTopics(disk, self.root)
        data = DerivedData(self.config, self._evidence(disk), deleted, light_queues(layout))
        chunks: list[list[int]] = []

        def write() -> None:
            units, keys = data.take()
            # Within a group of queues, the units keep the order of the log.
            own = np.array([self.part_of(*each) for each in data.queues], np.int64)
            part = own[units["queue"]] if len(own) else np.empty(0, np.int64)
            order = np.argsort(part, kind="stable")
            begins = np.searchsorted(part[order], np.arange(self.parts + 1)).tolist()
            number = len(chunks)
            chunks.append(begins)
            replace_file(disk, self._chunk("units", base, number), units[order].tobytes())
            replace_file(disk, self._chunk("keys", base, number), keys.tobytes())

        findings = Findings()
        walk = LogWalk(disk, layout, findings)
        # The scan continues into the next segment, because the first records there show whether the segment
        # at `base` was closed.
        with closing(walk.groups(base)) as groups:
            for group in groups:
                if group.position[0] >= base + layout.config.mapped_file_size_commit_log:
                    break
                data.add(group)
                if data.waiting >= _CHUNK:
                    write()
        write()
        segment = SegmentData(
            base, layout.log_min, data.records, data.hidden, data.indexed, data.queues, chunks, findings.kept
        )
        replace_file(disk, self._at(f"segment-{base:020d}.json"), msgspec.json.encode(segment))
        return msgspec.structs.replace(segment, queues=[], chunks=[])

    def make_queues(self, part: int) -> QueuesMade:
        """Create the queues of one group (see `part_of`), after `read_segment` for all segments."""
        disk = Disk()
        files = StoreFiles(disk)
        queues, findings = QueueTable(files, self._new_config()), Findings()
        builder = QueueBuilder(queues, CleanEnds(disk, self.root).ends, findings, self.root)
        own: dict[tuple[str, int], ConsumeQueue | None] = {}
        log_min = 0
        try:
            for segment in self._segments(disk):
                log_min = segment.log_min
                for each in segment.queues:
                    if each not in own and self.part_of(*each) == part:
                        queue = own[each] = builder.queue(*each)
                        if queue is not None:
                            remove_tree(disk, queue.path)  # Files of an interrupted rebuild may exist
                table = [own.get(each) for each in segment.queues]
                for number, begins in enumerate(segment.chunks):
                    begin, end = begins[part : part + 2]
                    with opened(disk, self._chunk("units", segment.base, number), write=False) as fd:
                        size = UNITS.itemsize
                        data = disk.pread(fd, (end - begin) * size, begin * size)
                    builder.add(np.frombuffer(data, UNITS), segment.queues, table)
            units = builder.finish(log_min)
            for queue in queues:
                _sync(disk, queue.path)
        finally:
            files.close()
        return QueuesMade(len(queues), units, builder.not_served, builder.order.spare_used, findings.kept)

    def make_index(self, clock: Clock | None = None) -> IndexMade:
        """Create the index, after `read_segment` for all segments."""
        disk = Disk()
        files = StoreFiles(disk)
        directory = self._at("index")
        remove_tree(disk, directory)  # Files of an interrupted rebuild may exist
        disk.makedirs(directory)
        index = IndexService(files, clock or Clock(), self._new_config())
        try:
            for segment in self._segments(disk):
                for number in range(len(segment.chunks) if segment.indexed else 0):
                    path = self._chunk("keys", segment.base, number)
                    add_keys(index, np.frombuffer(_content(disk, path), KEYS))
            index.write(slots=True)
        finally:
            files.close()
        _sync(disk, directory)
        return IndexMade(len(index.files), sum(file.count - 1 for file in index.files))

    def part_of(self, topic: str, queue_id: int) -> int:
        """Return the number of the group to which a queue belongs, from 0 to `parts` - 1, by its hash."""
        return zlib.crc32(f"{topic}/{queue_id}".encode("utf-8", "replace")) % self.parts

    def _chunk(self, kind: str, base: int, number: int) -> str:
        return self._at(f"{kind}-{base:020d}-{number:06d}")

    def _evidence(self, disk: Disk) -> Evidence:
        evidence = Evidence()
        known = msgspec.json.decode(_content(disk, self._at("evidence.json")), type=_EvidenceFile)
        evidence.queue_offsets, evidence.tags, superseded = known
        evidence.supersede(superseded)
        return evidence

    def _segments(self, disk: Disk) -> Iterator[SegmentData]:
        for name in disk.listdir(os.path.join(self.output, SCRATCH)):
            if name.startswith("segment-"):
                yield msgspec.json.decode(_content(disk, self._at(name)), type=SegmentData)

    def _new_config(self) -> StoreConfig:
        return self.config.at_root().replace(store_path_root_dir=os.path.join(self.output, SCRATCH))

    def _layout(self) -> StoreLayout:
        found = read_layout(Disk(), self.root, config=self.config, commit_log_dir=self.commit_log_dir)
        return found._replace(live=False, clean=self.clean)

    def _at(self, name: str) -> str:
        return os.path.join(self.output, SCRATCH, name)

    def put_in_place(self, made: Sequence[QueuesMade]) -> None:
        """Move the results of all parts to the output directory, with copies of the store's tables.

        The results of an earlier rebuild are replaced. Raises StoreError if a broker is using the store.
        """
        disk = Disk()
        if lock_held(disk, self.root):
            raise StoreError(IN_USE, self.root)
        if sum(each.spare for each in made) > SPARE:
            problem = "a log with such gaps that the order of its queues matters; use `cometmq store rebuild`"
            raise StoreError(problem, self.root)
        for part in PARTS:
            place = os.path.join(self.output, part)
            remove_tree(disk, place)
            disk.makedirs(self._at(part))
            disk.rename(self._at(part), place)
        # Copy the store's tables, and the other files that `verify` and a broker read, to the output.
        names = ["broker.conf", *(f"config/{each}" for each in disk.listdir(f"{self.root}/config"))]
        copied = {name: os.path.join(self.root, name) for name in names}
        copied |= {LOCATIONS[key]: self.config.location(key) for key in (CHECKPOINT, ABORT)}
        for name, source in copied.items():
            target = os.path.join(self.output, name)
            facts = disk.facts(source)
            if facts is not None and facts.regular:
                disk.makedirs(os.path.dirname(target))
                replace_file(disk, target, read_file(disk, source))
            elif disk.facts(target) is not None:
                disk.unlink(target)
        disk.fsync_dir(self.output)
        remove_tree(disk, os.path.join(self.output, SCRATCH))


def plan_rebuild(root: str, output: str, parts: int, **look: Unpack[Look]) -> RebuildParts:
    """Plan a rebuild of the store in `root` into the directory `output`. Nothing is written yet.

    For `parts` see `RebuildParts`, for the other arguments `read_layout`. Raises StoreError if the store is
    in use, if its queues also refer to segments in an object store, or if the output is inside it; and
    OSError.
    """
    disk = Disk()
    layout = read_layout(disk, root, **look)
    output = os.path.realpath(output)
    if layout.live:
        raise StoreError(IN_USE, layout.root)
    refuse_tiered(layout, disk)
    if f"{output}/".startswith(f"{layout.root}/"):
        raise StoreError("choose a directory outside of the store for the new queues and index", output)
    return RebuildParts(
        layout.root, output, layout.config, ",".join(layout.config.commit_log_dirs), layout.clean,
        tuple(file.base for file in layout.segments), parts,
    )  # fmt: skip


def _sync(disk: Disk, directory: str) -> None:
    paths = list(files_below(disk, directory)) if disk.is_dir(directory) else []
    sync_paths(disk, paths, [directory, os.path.dirname(directory)])


def _content(disk: Disk, path: str) -> bytes:
    facts = disk.facts(path)
    return read_file(disk, path, facts.size) if facts is not None else b""

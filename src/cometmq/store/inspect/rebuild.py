"""`rebuild` computes consume queues and index from the log again, for a store that no broker uses.

The log is scanned twice, and the new directories are created beside the old ones (docs/store.md, rebuild). A
record is added to a queue under the same conditions as in recovery, except where the old queue files prove
that the broker added the record, or did not (see `Evidence`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from cometmq.errors import StoreError
from cometmq.protocol.lite import DISPATCH, QUEUE_OFFSET
from cometmq.protocol.properties.template import codes_and_keys
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import Facts
from cometmq.store.background.derived_writer import sync_paths
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import CONSUME_QUEUES, FIELD_OF_KEY, INDEX, LOCATIONS, StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.files import ReadOnlyFiles, StoreFiles
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService, hashed_keys
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.findings import NOTHING, WARNING, Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk, no_pause
from cometmq.store.inspect.queue_check import LIGHT, Evidence, QueueCheck
from cometmq.store.inspect.verify import Progress, no_progress
from cometmq.store.recovery.store_layout import Look, StoreLayout, locked_layout
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import TIERED, TieredSegmentTable
from cometmq.store.writing.queue_order import QueueOrder
from cometmq.store.writing.record_dispatch import key_columns, set_delivery_times

SCRATCH = "rebuild.tmp"
_WRITE_EVERY = 4096  # Minimum number of computed queue units or index keys that are written together
PARTS = {LOCATIONS[key]: key for key in (CONSUME_QUEUES, INDEX)}
"""For each directory that is rebuilt: its usual name, and the setting that can move it."""
_MAX_MISPLACED = 64

UNITS = np.dtype([("queue", "i4"), ("size", "i4"), ("position", "i8"), ("tags", "i8"), ("offset", "i8")])
"""The type of a queue unit that is not in its queue yet. `queue` is an index in `DerivedData.queues`."""
KEYS = np.dtype([("hash", "i8"), ("position", "i8"), ("ms", "i8")])

Array = NDArray[np.void]


class RebuildReport(msgspec.Struct):
    """The result of a rebuild: `not_served` counts records that fit into no queue, `hidden` deleted ones."""

    root: str
    records: int
    queues: int
    units: int
    index_files: int
    index_entries: int
    not_served: int
    hidden: int
    findings: list[Finding]


def rebuild(
    root: str,
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
    progress: Progress = no_progress,
    **look: Unpack[Look],
) -> RebuildReport:
    """Compute consume queues and index of the store in `root` from its log, whose bytes are processed twice.

    Raises StoreError if there is no store, if it is in use, or if its queues also refer to segments in an
    object store; and OSError. The old directories then stay.
    """
    disk = disk or Disk()
    with locked_layout(disk, root, **look) as layout:
        refuse_tiered(layout, disk)
        return _in_place(layout, disk, clock or Clock(), progress)


def refuse_tiered(layout: StoreLayout, disk: Disk) -> None:
    """Raise StoreError if messages in an object store could no longer be found after a rebuild."""
    path = os.path.join(layout.root, "config", TIERED)
    tiered = TieredSegmentTable.from_plain(JsonTable(path, disk).load_or_empty()).segments
    gone = sum(base < layout.log_min for base in tiered)
    if gone:
        why = f"{gone} segments are in the object store only; to give up their messages, move this file away"
        raise StoreError(why, path)


def _in_place(layout: StoreLayout, disk: Disk, clock: Clock, progress: Progress) -> RebuildReport:
    places = {part: layout.config.location(key) for part, key in PARTS.items()}
    # A rename must stay within a file system, so each scratch directory is beside the directory that it will
    # replace. Outside the root, the name of a scratch directory must differ from the names that other stores
    # use there.
    scratch = {
        part: f"{places[part]}.{SCRATCH}" if layout.config.moves(key) else os.path.join(layout.root, SCRATCH)
        for part, key in PARTS.items()
    }
    for path in (*scratch.values(), *places.values()):
        if disk.is_link(path):
            raise StoreError("the path is a symbolic link; a rebuild replaces only directories", path)
    for path in {*scratch.values()}:
        remove_tree(disk, path)  # An interrupted rebuild may have left its scratch directory
        disk.makedirs(path)
    files = StoreFiles(disk)
    try:
        report = _make(layout, files, scratch, clock, progress)
    except BaseException:
        for path in {*scratch.values()}:
            remove_tree(disk, path)
        raise
    finally:
        files.close()
    for part, place in places.items():
        if disk.is_dir(place):
            disk.rename(place, os.path.join(scratch[part], f"{part}.old"))
        disk.rename(os.path.join(scratch[part], part), place)
    for path in {*scratch.values()}:
        disk.fsync_dir(path)
        disk.fsync_dir(os.path.dirname(path))
        remove_tree(disk, path)
    return report


def light_queues(layout: StoreLayout) -> frozenset[str]:
    """Return the names of the store's light message queues (LMQ), which only Apache's broker creates."""
    return frozenset(queue.topic for queue in layout.queues if queue.topic.startswith(LIGHT))


def _make(
    layout: StoreLayout, files: StoreFiles, scratch: dict[str, str], clock: Clock, progress: Progress
) -> RebuildReport:
    """Create queues and index in their `scratch` directories, and sync them."""
    disk, root = files.disk, layout.root
    made = {part: os.path.join(scratch[part], part) for part in PARTS}
    for path in made.values():
        disk.makedirs(path)
    total = 2 * len(layout.segments) * layout.config.mapped_file_size_commit_log
    deleted, findings = DeletedTopics(disk, root), Findings()
    evidence = collect_evidence(disk, layout, deleted, lambda done: progress(done, total))
    config = layout.config.replace(
        store_path_commit_log=",".join(layout.config.commit_log_dirs),
        **{FIELD_OF_KEY[key]: made[part] for part, key in PARTS.items()},
    )
    queues, index = QueueTable(files, config), IndexService(files, clock, config)
    data = DerivedData(config, evidence, deleted, light_queues(layout))
    builder = QueueBuilder(queues, CleanEnds(disk, root).ends, findings, root)
    table: list[ConsumeQueue | None] = []

    def write() -> None:
        units, keys = data.take()
        table.extend(builder.queue(*each) for each in data.queues[len(table) :])
        builder.add(units, data.queues, table)
        if data.indexed:
            add_keys(index, keys)

    walk = LogWalk(disk, layout, findings)
    for group in walk.groups():
        data.add(group)
        if data.waiting >= _WRITE_EVERY:
            write()
            progress(total // 2 + walk.end - walk.log_min, total)
    write()
    index.write(slots=True)
    units = builder.finish(walk.log_min)
    paths = list(files_below(disk, queues.directory)) + [file.path for file in index.files]
    sync_paths(disk, paths)
    for directory in sorted({os.path.dirname(path) for path in paths}):
        disk.fsync_dir(directory)
    progress(total, total)
    entries = sum(file.count - 1 for file in index.files)
    return RebuildReport(
        root, data.records, len(queues), units, len(index.files), entries, builder.not_served, data.hidden,
        findings.kept,
    )  # fmt: skip


def collect_evidence(
    disk: Disk, layout: StoreLayout, deleted: DeletedTopics, progress: Callable[[int], None]
) -> Evidence:
    """Compare the old queues, if there are any, with the log, and return what they show.

    `progress` receives the number of bytes of the log processed so far.
    """
    if not layout.queues:
        return Evidence()
    findings = Findings()  # The findings of QueueCheck are dropped: `verify` reports them, a rebuild does not
    with ReadOnlyFiles(disk) as files:
        check = QueueCheck(layout, files, findings, no_pause, None, deleted)
        walk = LogWalk(disk, layout, findings)
        for group in walk.groups():
            check.check_records(group)
            progress(walk.end - walk.log_min)
        check.finish(walk)
    # If a queue contradicts many records, the queue itself is damaged, so its evidence is dropped.
    queue_offsets = check.evidence.queue_offsets
    in_queue = Counter(place[:2] for place in queue_offsets.values())
    check.evidence.queue_offsets = {
        at: place for at, place in queue_offsets.items() if in_queue[place[:2]] <= _MAX_MISPLACED
    }
    return check.evidence


def files_below(disk: Disk, directory: str) -> Iterator[str]:
    for name in disk.listdir(directory):
        path = os.path.join(directory, name)
        if disk.is_dir(path):
            yield from files_below(disk, path)
        else:
            yield path


def remove_tree(disk: Disk, directory: str) -> None:
    """Delete a directory with its content, without following links. A missing directory is ignored."""
    if not disk.is_dir(directory):
        return
    for name in disk.listdir(directory):
        path = os.path.join(directory, name)
        if disk.is_dir(path) and not disk.is_link(path):
            remove_tree(disk, path)
        else:
            disk.unlink(path)
    disk.rmdir(directory)


class DerivedData:
    """The queue units and index keys of records, in the order of the log.

    `light` contains the light message queues (LMQ) for which units are computed. Only Apache's broker has
    such queues, and their records belong to other queues, too.

    Attributes:
        queues: Topic and queue id of each queue. A queue unit refers to its queue by the index in this list.
        hidden: The number of records of deleted topics.
        indexed: The number of records passed to the index, including those without keys.
    """

    def __init__(
        self, config: StoreConfig, evidence: Evidence, deleted: DeletedTopics, light: Container[str] = ()
    ) -> None:
        self.queues: list[tuple[str, int]] = []
        self.records = self.hidden = self.indexed = 0
        self._evidence = evidence
        self._superseded = evidence.superseded
        self._deleted = deleted
        self._light = light
        self._delays = config.delay_levels_ms
        self._indexes = config.message_index_enable
        self._numbers: dict[tuple[str, int], int] = {}
        self._units: list[Array] = []
        self._keys: list[Array] = []

    def add(self, group: RecordGroup) -> None:
        """Compute the queue units and index keys of `group`, which contains the next records of the log."""
        self.records += len(group.properties)
        served = ~np.isin(group.position, self._superseded)
        if self._deleted:
            hidden = self._deleted.hidden(group)
            self.hidden += int(hidden.sum())
            rows = np.flatnonzero(~hidden)
            if not len(rows):
                return
            group, served = RecordGroup.of(list(group.facts(rows))), served[rows]
        if self._evidence.queue_offsets:
            moved = [position in self._evidence.queue_offsets for position in group.position.tolist()]
            if any(moved):
                group, served = RecordGroup.of(list(map(self._in_place, group.facts()))), served | moved
        codes, keys = codes_and_keys(group.properties)
        if self._indexes:
            self._add_keys(group, keys)
        self._add_units(group, codes, np.flatnonzero(served & group.queued))

    @property
    def waiting(self) -> int:
        """The number of queue units that `take` would return, or of index keys if that is larger."""
        return max(sum(map(len, self._units)), sum(map(len, self._keys)))

    def take(self) -> tuple[Array, Array]:
        """Remove and return the UNITS and KEYS that have been computed since the last call."""
        units = np.concatenate([*self._units, np.empty(0, UNITS)])
        keys = np.concatenate([*self._keys, np.empty(0, KEYS)])
        self._units, self._keys = [], []
        return units, keys

    def _in_place(self, facts: Facts) -> Facts:
        place = self._evidence.queue_offsets.get(facts.position)
        if place is None:
            return facts
        topic, queue_id, offset = place
        flag = facts.sys_flag & ~TRANSACTION_MASK
        return facts._replace(topic=topic, queue_id=queue_id, queue_offset=offset, sys_flag=flag)

    def _add_keys(self, group: RecordGroup, keys: list[bytes] | None) -> None:
        self.indexed += len(group.properties)
        for hashes, positions, times in hashed_keys(*key_columns(group, keys)):
            made = np.empty(len(hashes), KEYS)
            made["hash"], made["position"], made["ms"] = hashes, positions, times
            self._keys.append(made)

    def _add_units(self, group: RecordGroup, codes: list[int], rows: NDArray[np.int64]) -> None:
        units = np.empty(len(rows), UNITS)
        units["position"], units["size"] = group.position[rows], group.size[rows]
        units["offset"] = group.queue_offset[rows]
        units["tags"] = np.array(codes, np.int64)[rows]
        set_delivery_times(units["tags"], group, rows, self._delays)
        if self._evidence.tags:
            known = self._evidence.tags
            pairs = zip(units["position"].tolist(), units["tags"].tolist(), strict=True)
            units["tags"] = [known.get(position, code) for position, code in pairs]
        queue = group.topic[rows] << 32 | group.queue_id[rows] & 0xFFFFFFFF
        _, firsts, which = np.unique(queue, return_index=True, return_inverse=True)
        found = rows[firsts]
        topics = [group.names[number] for number in group.topic[found].tolist()]
        numbers = list(map(self._number, topics, group.queue_id[found].tolist()))
        units["queue"] = np.array(numbers, np.int32)[which]
        self._units.append(units)
        if self._light:
            self._add_light_units(group, units, rows)

    def _add_light_units(self, group: RecordGroup, units: Array, rows: NDArray[np.int64]) -> None:
        made = []
        for row, (_, size, position, tags, _) in zip(rows.tolist(), units.tolist(), strict=True):
            properties = group.properties[row]
            names = value_of(properties, DISPATCH).decode(errors="replace").split(",")
            for name, offset in zip(names, value_of(properties, QUEUE_OFFSET).split(b","), strict=False):
                # A producer can write anything into the property.
                if name in self._light and offset.isdigit() and len(offset) <= 18:
                    made.append((self._number(name, 0), size, position, tags, int(offset)))
        self._units.append(np.array(made, UNITS))

    def _number(self, topic: str, queue_id: int) -> int:
        number = self._numbers.setdefault((topic, queue_id), len(self._numbers))
        if number == len(self.queues):
            self.queues.append((topic, queue_id))
        return number


class QueueBuilder:
    """Builds consume queues from queue units.

    `former_ends` contains the end of each queue before the rebuild, by topic and queue id (see QueueOrder).
    `findings` receives the records that do not fit into their queue.
    """

    def __init__(
        self, queues: QueueTable, former_ends: Mapping[str, Mapping[int, int]], findings: Findings, root: str
    ) -> None:
        self.not_served = 0
        self.order = QueueOrder(former_ends, self._push, self._out_of_order)
        self._queues = queues
        self._findings = findings
        self._root = root
        self._codes: dict[int, int] = {}  # Tags codes of the records passed to `order`, by log position

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the queue of records with the given topic and queue id; None if the pair is invalid."""
        try:
            return self._queues.of_record(topic, queue_id)
        except QueueRefused:
            return None

    def add(self, units: Array, numbered: list[tuple[str, int]], table: list[ConsumeQueue | None]) -> None:
        """Add queue units to their queues, in the order of the log.

        For the number of a queue, `numbered` has its topic and queue id, and `table` the queue, or None for
        an invalid topic or queue id.
        """
        waiting = self.order.waiting
        columns = [units[name].tolist() for name in ("queue", "position", "size", "tags", "offset")]
        for number, position, size, code, offset in zip(*columns, strict=True):
            queue = table[number]
            if queue is None:
                topic, queue_id = numbered[number]
                self._leave_out(position, topic, queue_id, "an invalid topic or queue id")
            elif offset == queue.max_offset and queue not in waiting:
                queue.push(position, size, code, offset)
                if not queue.dirty:
                    self._queues.add_dirty(queue)
            else:
                self._codes[position] = code
                facts = Facts(position, size, queue.queue_id, offset, 0, 0, queue.topic, b"")
                self.order.add(queue, facts)
        self._queues.write_dirty()

    def finish(self, log_min: int) -> int:
        """Complete and write the queues. Return the number of units with records at or after `log_min`."""
        self.order.finish()
        self._queues.write_dirty()
        for queue in self._queues:
            queue.correct_min(log_min)
        return sum(queue.max_offset - queue.min_offset for queue in self._queues)

    def _push(self, queue: ConsumeQueue, facts: Facts) -> None:
        queue.push(facts.position, facts.size, self._codes.pop(facts.position), facts.queue_offset)
        if not queue.dirty:
            self._queues.add_dirty(queue)

    def _out_of_order(self, facts: Facts, end: int, following: Facts | None) -> None:
        self._codes.pop(facts.position)
        why = (
            f" where {end} was expected" if following is None else f", and {following.queue_offset} behind it"
        )
        self._leave_out(
            facts.position, facts.topic, facts.queue_id, f"queue offset {facts.queue_offset}{why}"
        )

    def _leave_out(self, position: int, topic: str, queue_id: int, why: str) -> None:
        self.not_served += 1
        problem = f"the record at {position}, of {topic}/{queue_id}, has {why}: not served"
        self._findings.add(WARNING, "not-served", self._root, -1, problem, NOTHING)


def add_keys(index: IndexService, keys: Array) -> None:
    """Add keys of the type KEYS to the index, and write its newest file. Raises OSError."""
    index.add_hashed(keys["hash"].copy(), keys["position"].copy(), keys["ms"].copy())
    index.write()

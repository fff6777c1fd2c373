"""Restores a store directory from the object store of tiered storage, after the loss of a broker's disk.

The restored directory contains queues, index and the newest log segment. The older segments stay in the
object store, so the restore needs little disk space.

The segments are processed one by one. Each is copied to the directory and compared with its CRCs. Then the
store is opened and closed: its recovery computes the segment's queue units and index entries, and makes them
durable. The table of segments contains the progress, so the restore can be interrupted at any step and
repeated. No broker may open the directory before the restore is complete: its log would use the positions of
the other segments, and its uploads would replace them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

import msgspec

from cometmq.errors import StoreError, StoreInUse
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import ABORT, StoreConfig
from cometmq.store.base.disk import NO_DIRECTORY_LOCKS, Disk, is_numbered, make_directory, opened, write_all
from cometmq.store.base.guards import AbortFile
from cometmq.store.log.directories import LogDirectories
from cometmq.store.message_store import MessageStore
from cometmq.store.recovery.store_layout import check_paths
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import DELETED, TIERED, TieredSegment
from cometmq.store.tables.tiered_segments import TieredSegments
from cometmq.store.tiered.layout import (
    BLOCK,
    CRCS,
    DATA,
    MANIFEST,
    Damaged,
    Manifest,
    ObjectStore,
    base_of,
    blocks_length,
    checked_blocks,
    checked_crcs,
    manifest_at,
    object_name,
)

_BLOCKS_PER_REQUEST = 8  # 4 MiB
_PARTIAL = ".restore"
_KEPT = ("broker.conf", "lost+found")
"""File names that the directory may contain before the restore."""
_MAX_POSITION = 1 << 62
_MAX_NAMED = 8


class LostRange(msgspec.Struct):
    """A range of log positions, from `start` to `stop`, that the object store lacks."""

    start: int
    stop: int


class RestoreReport(msgspec.Struct):
    """The result of a restore of the log from `start` to `end`. `done` is False after a dry run.

    Attributes:
        store_id: The prefix of the segments' names in the object store.
        bytes: The total size of the restored segments.
        gaps: The lost ranges between `start` and `end`. Messages after `end` are also lost.
        newest_ms: The time of the last write to the newest restored segment. Later messages are lost.
        messages: The number of messages in the queues.
        not_served: The number of records of this run whose queue offsets do not fit their queues.
    """

    root: str
    store_id: str
    start: int
    end: int
    segments: int
    bytes: int
    gaps: list[LostRange]
    newest_ms: int
    queues: int = 0
    messages: int = 0
    not_served: int = 0
    done: bool = False


def restore_store(
    config: StoreConfig,
    objects: ObjectStore,
    *,
    store_id: str = "",
    dry_run: bool = False,
    disk: Disk | None = None,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> RestoreReport:
    """Restore the directory of a store from the segments in its object store. A dry run only reports.

    Args:
        config: The settings of the lost broker, including its file lengths.
        store_id: The prefix of the segments' names in the object store. Default: the only prefix.
        progress: Called with the number of restored bytes and the total number of bytes.

    Raises:
        StoreError: There is nothing to restore, an object is not valid, or the directory is not empty.
        OSError: A read or write failed, in the object store (ObjectStoreFailed) or on the disk. A repeated
            restore continues.
    """
    disk = disk or Disk()
    if config.enable_d_leger_commit_log:
        raise StoreError("a raft member gets its log from its group, not from the object store", config.root)
    check_paths(config)
    _check_empty(disk, config)
    store_id, manifests = _find_segments(objects, store_id, config.mapped_file_size_commit_log)
    bases = sorted(manifests)
    size, end = config.mapped_file_size_commit_log, bases[-1] + config.mapped_file_size_commit_log
    gaps = [
        LostRange(base + size, following) for base, following in pairwise(bases) if following != base + size
    ]
    newest_ms = manifests[bases[-1]].modified_ms
    report = RestoreReport(
        config.root, store_id, bases[0], end, len(bases), len(bases) * size, gaps, newest_ms
    )
    if not dry_run:
        with _locked(disk, config):
            _Restore(config, objects, disk, clock or Clock(), report).run(manifests, progress)
    return report


def _check_empty(disk: Disk, config: StoreConfig) -> None:
    """Raise StoreError unless the directories of the store are empty or contain an interrupted restore."""
    if TieredSegments.is_restoring(disk, config.root):
        return
    for paths in config.directories.values():
        for path in paths:
            for name in disk.listdir(path) if disk.is_dir(path) else ():
                begun = name == "config" and set(disk.listdir(f"{path}/config")) <= {f"{TIERED}.tmp"}
                if name not in _KEPT and not begun:
                    problem = f"the directory is not empty (it contains {name}); a restore needs an empty one"
                    raise StoreError(problem, path)


@contextmanager
def _locked(disk: Disk, config: StoreConfig) -> Iterator[None]:
    """Lock the directory against another restore."""
    make_directory(disk, config.root)
    try:
        fd = disk.lock_directory(config.root)
    except OSError as failure:
        if failure.errno not in NO_DIRECTORY_LOCKS:
            raise
        yield
        return
    if fd is None:
        raise StoreInUse("another restore is using this directory", config.root)
    try:
        yield
    finally:
        disk.close(fd)


def _find_segments(objects: ObjectStore, store_id: str, size: int) -> tuple[str, dict[int, Manifest]]:
    """Return the id of the store in the object store, and the manifests of its segments by first position.

    Raises StoreError if there is no such store, if there are several, or if one of its objects is not valid.
    """
    found: dict[str, set[tuple[int, str]]] = {}
    for name in objects.names(""):
        owner, slash, _ = name.partition("/")
        place = base_of(name)
        if slash and place is not None and name == object_name(owner, *place):
            found.setdefault(owner, set()).add(place)
    stores = {
        owner: bases
        for owner, places in found.items()
        if (bases := sorted(base for base, ending in places if ending == MANIFEST))
    }
    if store_id not in stores and (store_id or len(stores) != 1):
        known = [f"{owner} ({len(b)} segments, from {b[0]})" for owner, b in sorted(stores.items())]
        names = ", ".join(known[:_MAX_NAMED]) or "none"
        raise StoreError(f"the stores in the object store are: {names}; --id selects one", store_id)
    store_id = store_id or next(iter(stores))
    manifests = {}
    for base in stores[store_id]:
        for ending in (DATA, CRCS):
            if (base, ending) not in found[store_id]:
                raise _invalid(store_id, base, f"its object {ending} does not exist")
        each = manifest_at(objects, store_id, base, size)
        if each is None or base % size or base > _MAX_POSITION:
            raise _invalid(store_id, base, f"it describes no segment of mappedFileSizeCommitLog={size}")
        manifests[base] = each
    return store_id, manifests


def _invalid(store_id: str, base: int, problem: str) -> StoreError:
    remedy = "without this manifest, the segment is left out"
    return StoreError(f"{problem}; {remedy}", object_name(store_id, base, MANIFEST))


class _Restore:
    """One run of a restore. It completes the report."""

    def __init__(
        self, config: StoreConfig, objects: ObjectStore, disk: Disk, clock: Clock, report: RestoreReport
    ) -> None:
        self._config, self._objects, self._disk, self._clock = config, objects, disk, clock
        self._report = report
        self._directories = LogDirectories(disk, config)
        self._deleted_path = os.path.join(config.root, "config", DELETED)
        self._table = TieredSegments(disk, config.root, restoring=report.store_id)

    def run(self, manifests: Mapping[int, Manifest], progress: Callable[[int, int], None]) -> None:
        table, report, size = self._table, self._report, self._config.mapped_file_size_commit_log
        for directory in self._directories.all:
            make_directory(self._disk, directory)
        newest = max(manifests)
        deleted: dict[str, int] = {}
        for each in manifests.values():
            for topic, end in each.deleted_topics.items():
                deleted[topic] = max(end, deleted.get(topic, 0))
        for number, base in enumerate(sorted(manifests), 1):
            segment = manifests[base].segment
            if base not in table.by_base or base == newest:
                if self._disk.facts(self._directories.path_of(base)) is None:
                    self._copy(base, segment)
                self._keep_only(base)
                if deleted:  # Recovery lowers the positions to the end of the present segment
                    JsonTable(self._deleted_path, self._disk).save({"deletedTopics": deleted})
                self._open()
                if base not in table.by_base:
                    table.add(base, segment)
            progress(number * size, report.bytes)
        # Tables that are copied to the directory may be newer than the log. The first start handles them as
        # after a kill: it lowers consumer offsets that are beyond the ends of their queues.
        AbortFile(self._disk, self._config.location(ABORT)).set()
        table.finish_restore()
        report.done = True

    def _copy(self, base: int, segment: TieredSegment) -> None:
        """Copy a segment to its path in the log. The file appears when it is complete and synced."""
        disk, path = self._disk, self._directories.path_of(base)
        place = self._objects, self._report.store_id, base, segment
        crcs = checked_crcs(*place)
        with opened(disk, path + _PARTIAL, create=True) as fd:
            disk.reserve(fd, segment.size)
            count = -(-segment.size // BLOCK)
            for first in range(0, count, _BLOCKS_PER_REQUEST):
                most = min(_BLOCKS_PER_REQUEST, count - first)
                data = checked_blocks(*place, crcs, first, most)
                if len(data) != blocks_length(segment, first, most):
                    raise Damaged(object_name(self._report.store_id, base, DATA))
                write_all(disk, fd, data, first * BLOCK)
            disk.fdatasync(fd)
        disk.rename(path + _PARTIAL, path)
        disk.fsync_dir(os.path.dirname(path))

    def _keep_only(self, base: int) -> None:
        """Delete the other segments, whose queue units and index entries are durable."""
        name = f"{base:020d}"
        for directory, other in self._directories.files():
            if other != name and is_numbered(other.removesuffix(_PARTIAL), len(name)):
                self._disk.unlink(os.path.join(directory, other))
                self._disk.fsync_dir(directory)

    def _open(self) -> None:
        """Open and close the store, whose recovery computes queues and index of the only segment."""
        store = MessageStore.open(self._config, self._disk, self._clock)
        report = self._report
        report.not_served += store.recovered.not_served
        report.queues = len(store.queues)
        report.messages = sum(queue.max_offset - queue.begin for queue in store.queues)
        store.close()
        if AbortFile(self._disk, self._config.location(ABORT)).exists():
            raise StoreError("queues and index could not be written (see the log)", self._config.root)

"""`rebuild` computes consume queues and index from the log again, for a store that no broker uses.

The log is scanned twice. The first scan compares it with the old queues, to find the records whose queue
units are more reliable than the records themselves (see Evidence). The second scan creates the new queues and
the index.

The new directories are created beside the old ones and replace them once they are complete and synced to
disk. The old directories are removed last. After an interruption, the next start finds the old or the new
directories, or computes their content again. The log is not changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from cometmq.errors import StoreError
from cometmq.store.background.derived_writer import sync_paths
from cometmq.store.base.clock import Clock, SystemClock
from cometmq.store.base.config import CONSUME_QUEUES, FIELD_OF_KEY, INDEX, LOCATIONS, StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.derived_data import DerivedData, QueueBuilder, add_keys
from cometmq.store.inspect.findings import Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk, no_pause
from cometmq.store.inspect.queue_check import LIGHT, Evidence, QueueCheck
from cometmq.store.inspect.verify import Progress
from cometmq.store.recovery.store_layout import StoreLayout, locked_layout
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics

SCRATCH = "rebuild.tmp"
_WRITE_EVERY = 4096  # Minimum number of computed queue units or index keys that are written together
PARTS = {LOCATIONS[key]: key for key in (CONSUME_QUEUES, INDEX)}
"""For each directory that is rebuilt: its usual name, and the setting that can move it."""
_MAX_MISPLACED = 64


class RebuildReport(msgspec.Struct):
    """The result of a rebuild.

    `not_served` is the number of records that fit into no queue. `hidden` is the number of records of deleted
    topics.
    """

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
    config: StoreConfig | None = None,
    commit_log_dir: str = "",
    progress: Progress | None = None,
) -> RebuildReport:
    """Compute consume queues and index of the store in `root` from its log.

    Args:
        config, commit_log_dir: See `read_layout`.
        progress: Receives the number of bytes processed so far, and the number of all. The log is read twice,
            so all its bytes count twice.

    Raises:
        StoreError: There is no store, or it is in use. The old directories stay.
        OSError: A read or write failed. The old directories stay.
    """
    disk = disk or OsDisk()
    with locked_layout(disk, root, config=config, commit_log_dir=commit_log_dir) as layout:
        return _in_place(layout, disk, clock or SystemClock(), progress)


def _in_place(layout: StoreLayout, disk: Disk, clock: Clock, progress: Progress | None) -> RebuildReport:
    """Rebuild queues and index in new directories, which then replace the old ones."""
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
        report = _make(layout, files, scratch, clock, progress or (lambda _done, _total: None))
    except BaseException:
        for path in {*scratch.values()}:
            remove_tree(disk, path)
        raise
    finally:
        files.descriptors.close()
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
    """Create queues and index in their `scratch` directories, and sync them.

    The log is scanned twice: first to compare it with the old queues, then to create the new files.
    """
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
    """Compare the old queues with the log. Return what they show about damaged and superseded records.

    The result is empty if there are no queues. `progress` receives the number of bytes of the log processed
    so far.
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
    """Yield the paths of all files in a directory and its subdirectories."""
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

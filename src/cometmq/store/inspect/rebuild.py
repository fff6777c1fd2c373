"""`rebuild`: consume queues and index made anew from the log, for a store that no broker is using.

The log is walked twice: first beside the old queues, to learn which records they know better than the log
does (see Evidence), then to make the new ones.

The new directories grow beside the old ones and take their places when they are complete and on the device;
the old ones are removed last. Whatever happens in between, the next start finds the old ones, the new ones,
or none, and then makes them itself. The log is not touched.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from cometmq.errors import StoreError
from cometmq.store.background.derived_writer import sync_paths
from cometmq.store.base.clock import Clock, SystemClock
from cometmq.store.base.config import ABORT, CONSUME_QUEUES, FIELD_OF_KEY, INDEX, LOCATIONS, StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.guards import AbortFile, StoreLock
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.asked import Asked, QueueMaker, add_keys
from cometmq.store.inspect.findings import Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk, no_pause
from cometmq.store.inspect.queue_check import LIGHT, Evidence, QueueCheck
from cometmq.store.inspect.verify import Progress
from cometmq.store.recovery.store_layout import StoreLayout, read_layout
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics

SCRATCH = "rebuild.tmp"
_WRITE_EVERY = 4096  # units or keys between two writes
PARTS = {LOCATIONS[key]: key for key in (CONSUME_QUEUES, INDEX)}
"""Name -> setting that puts it elsewhere."""
_MAX_MISPLACED = 64


class RebuildReport(msgspec.Struct):
    """What was made. `not_served`: records that fit no queue; `hidden`: records of deleted topics."""

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
    """Make consume queues and index of the store in `root` anew from its log.

    Raises StoreError when there is no store or somebody holds it, OSError; the old directories stay then."""
    disk = disk or OsDisk()
    look = partial(read_layout, disk, root, config=config, commit_log_dir=commit_log_dir)
    found = look()
    try:
        lock = StoreLock(disk, found.config)
    except StoreError as held:
        raise StoreError("a broker is using this store; stop it first", held.path or found.root) from None
    try:
        # The lock that is seen there is this one.
        layout = look()
        clean = not AbortFile(disk, layout.config.location(ABORT)).exists()
        layout = layout._replace(live=False, clean=clean)
        return _in_place(layout, disk, clock or SystemClock(), progress)
    finally:
        lock.release()


def _in_place(layout: StoreLayout, disk: Disk, clock: Clock, progress: Progress | None) -> RebuildReport:
    """Make the new directories and put them in the places of the old ones."""
    check_queues(layout)
    places = {part: layout.config.location(key) for part, key in PARTS.items()}
    # Beside the directory that it replaces, since a rename stays within a file system. Outside of the root
    # its name is not that of another store's.
    scratch = {
        part: f"{places[part]}.{SCRATCH}" if layout.config.moves(key) else os.path.join(layout.root, SCRATCH)
        for part, key in PARTS.items()
    }
    for path in (*scratch.values(), *places.values()):
        if disk.is_link(path):
            raise StoreError("a link; a rebuild replaces the directory itself, and follows no link", path)
    for path in {*scratch.values()}:
        remove_tree(disk, path)  # of a run that was killed
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


def check_queues(layout: StoreLayout) -> None:
    """Raise StoreError for a store with queues that the log does not tell."""
    if any(queue.topic.startswith(LIGHT) for queue in layout.queues):
        raise StoreError(f"{LIGHT} queues do not follow from the log and would be lost", layout.root)


def _make(
    layout: StoreLayout, files: StoreFiles, scratch: dict[str, str], clock: Clock, progress: Progress
) -> RebuildReport:
    """Walk the log twice, make queues and index in their `scratch`, and bring them onto the device."""
    disk, root = files.disk, layout.root
    made = {part: os.path.join(scratch[part], part) for part in PARTS}
    for path in made.values():
        disk.makedirs(path)
    total = 2 * len(layout.segments) * layout.config.mapped_file_size_commit_log
    deleted, findings = DeletedTopics(disk, root), Findings()
    evidence = look_at_old_queues(disk, layout, deleted, lambda done: progress(done, total))
    config = layout.config.replace(
        store_path_commit_log=",".join(layout.config.commit_log_dirs),
        **{FIELD_OF_KEY[key]: made[part] for part, key in PARTS.items()},
    )
    queues, index = QueueTable(files, config), IndexService(files, clock, config)
    asked = Asked(config, evidence, deleted)
    maker = QueueMaker(queues, CleanEnds(disk, root).ends, findings, root)
    table: list[ConsumeQueue | None] = []

    def write() -> None:
        units, keys = asked.take()
        table.extend(maker.queue(*each) for each in asked.queues[len(table) :])
        maker.add(units, asked.queues, table)
        if asked.indexed:
            add_keys(index, keys)

    walk = LogWalk(disk, layout, findings)
    for run in walk.runs():
        asked.add(run)
        if asked.waiting >= _WRITE_EVERY:
            write()
            progress(total // 2 + walk.end - walk.log_min, total)
    write()
    index.write(slots=True)
    units = maker.finish(walk.log_min)
    paths = list(files_below(disk, queues.directory)) + [file.path for file in index.files]
    sync_paths(disk, paths)
    for directory in sorted({os.path.dirname(path) for path in paths}):
        disk.fsync_dir(directory)
    progress(total, total)
    entries = sum(file.count - 1 for file in index.files)
    return RebuildReport(
        root, asked.records, len(queues), units, len(index.files), entries, maker.not_served, asked.hidden,
        findings.kept,
    )  # fmt: skip


def look_at_old_queues(
    disk: Disk, layout: StoreLayout, deleted: DeletedTopics, progress: Callable[[int], None]
) -> Evidence:
    """What the queues know better than the log, by a walk over both. progress: takes bytes of the log."""
    if not layout.queues:
        return Evidence()
    findings = Findings()  # those of `verify`, which nobody has asked for here
    with ReadOnlyFiles(disk) as files:
        check = QueueCheck(layout, files, findings, no_pause, None, deleted)
        walk = LogWalk(disk, layout, findings)
        for run in walk.runs():
            check.check(run)
            progress(walk.end - walk.log_min)
        check.finish(walk)
    # A queue that contradicts this many records is itself the one that is wrong.
    places = check.evidence.places
    in_queue = Counter(place[:2] for place in places.values())
    check.evidence.places = {
        at: place for at, place in places.items() if in_queue[place[:2]] <= _MAX_MISPLACED
    }
    return check.evidence


def files_below(disk: Disk, directory: str) -> Iterator[str]:
    """Paths of all files in a directory and those in it."""
    for name in disk.listdir(directory):
        path = os.path.join(directory, name)
        if disk.is_dir(path):
            yield from files_below(disk, path)
        else:
            yield path


def remove_tree(disk: Disk, directory: str) -> None:
    """Delete a directory with all that is in it, links as such; an absent one is fine."""
    if not disk.is_dir(directory):
        return
    for name in disk.listdir(directory):
        path = os.path.join(directory, name)
        if disk.is_dir(path) and not disk.is_link(path):
            remove_tree(disk, path)
        else:
            disk.unlink(path)
    disk.rmdir(directory)

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
from cometmq.protocol.properties.key_hashes import key_prefix
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.protocol.record.one import Facts
from cometmq.store.background.derived_writer import sync_paths
from cometmq.store.base.clock import Clock, SystemClock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.guards import AbortFile, StoreLock
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.findings import NOTHING, WARNING, Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk, no_pause
from cometmq.store.inspect.queue_check import LIGHT, Evidence, QueueCheck
from cometmq.store.inspect.verify import Progress
from cometmq.store.recovery.queue_order import QueueOrder
from cometmq.store.recovery.replay import tags_code_of
from cometmq.store.recovery.store_layout import StoreLayout, read_layout
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics

SCRATCH = "rebuild.tmp"
_WRITE_EVERY = 4096  # records between two writes
PARTS = ("consumequeue", "index")
_MOST_MISPLACED = 64


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
    root = look().root
    try:
        lock = StoreLock(disk, root)
    except StoreError:
        raise StoreError("a broker is using this store; stop it first", root) from None
    try:
        # The lock that is seen there is this one.
        layout = look()._replace(live=False, clean=not AbortFile(disk, root).exists())
        return _in_place(layout, disk, clock or SystemClock(), progress)
    finally:
        lock.release()


def _in_place(layout: StoreLayout, disk: Disk, clock: Clock, progress: Progress | None) -> RebuildReport:
    """Make the new directories and put them in the places of the old ones."""
    root = layout.root
    check_queues(layout)
    scratch = os.path.join(root, SCRATCH)
    for path in (scratch, *(os.path.join(root, part) for part in PARTS)):
        if disk.is_link(path):
            raise StoreError("a link; a rebuild replaces the directory itself, and follows no link", path)
    remove_tree(disk, scratch)  # of a run that was killed
    disk.makedirs(scratch)
    files = StoreFiles(disk)
    try:
        report = Rebuild(layout, files, scratch, clock, progress).run()
    except BaseException:
        remove_tree(disk, scratch)
        raise
    finally:
        files.descriptors.close()
    for part in PARTS:
        place, old = os.path.join(root, part), os.path.join(scratch, f"{part}.old")
        if disk.is_dir(place):
            disk.rename(place, old)
        disk.rename(os.path.join(scratch, part), place)
    disk.fsync_dir(scratch)
    disk.fsync_dir(root)
    remove_tree(disk, scratch)
    return report


def check_queues(layout: StoreLayout) -> None:
    """Raise StoreError for a store with queues that the log does not tell."""
    if any(queue.topic.startswith(LIGHT) for queue in layout.queues):
        raise StoreError(f"{LIGHT} queues do not follow from the log and would be lost", layout.root)


class Rebuild:
    """New queues and a new index of one store, in another directory."""

    def __init__(
        self, layout: StoreLayout, files: StoreFiles, directory: str, clock: Clock, progress: Progress | None
    ) -> None:
        disk, root = files.disk, layout.root
        self._layout = layout
        self._disk = disk
        self._progress = progress or (lambda _done, _total: None)
        self._total = len(layout.segments) * layout.config.mapped_file_size_commit_log
        for part in PARTS:
            disk.makedirs(os.path.join(directory, part))
        config = layout.config.replace(
            store_path_root_dir=directory, store_path_commit_log=",".join(layout.config.commit_log_dirs)
        )
        self._queues = QueueTable(files, config)
        self._index = IndexService(files, clock, config)
        self._deleted = DeletedTopics(disk, root)
        self._order = QueueOrder(CleanEnds(disk, root).ends, self._push, self._out_of_order)
        self._delays = layout.config.delay_levels_ms
        self._findings = Findings()
        self._not_served = self._hidden = self._records = 0

    def run(self) -> RebuildReport:
        """Walk the log twice, and bring what is made of it onto the device."""
        self._evidence = look_at_old_queues(
            self._disk, self._layout, self._deleted, lambda done: self._progress(done, 2 * self._total)
        )
        self._fill()
        queues, index = self._queues, self._index
        paths = list(files_below(self._disk, queues.directory)) + [file.path for file in index.files]
        sync_paths(self._disk, paths)
        for directory in sorted({os.path.dirname(path) for path in paths}):
            self._disk.fsync_dir(directory)
        self._progress(2 * self._total, 2 * self._total)
        return RebuildReport(
            self._layout.root, self._records, len(queues),
            sum(queue.max_offset - queue.min_offset for queue in queues), len(index.files),
            sum(file.count - 1 for file in index.files), self._not_served, self._hidden, self._findings.kept,
        )  # fmt: skip

    def _fill(self) -> None:
        queues, index = self._queues, self._index
        walk = LogWalk(self._disk, self._layout, self._findings)
        superseded = iter(self._evidence.superseded.tolist())
        next_superseded = next(superseded, -1)
        for facts in walk.records():
            self._records += 1
            served = facts.position != next_superseded
            if not served:
                next_superseded = next(superseded, -1)
            self._dispatch(facts, served=served)
            if self._records % _WRITE_EVERY == 0:
                queues.write_dirty()
                index.write()
                self._progress(self._total + walk.end - walk.log_min, 2 * self._total)
        self._order.finish()
        queues.write_dirty()
        index.write(slots=True)
        for queue in queues:
            queue.correct_min(walk.log_min)

    def _dispatch(self, facts: Facts, *, served: bool) -> None:
        """The rules of recovery, and what the old queues know better."""
        if self._deleted and self._deleted.hides(facts.topic, facts.position):
            self._hidden += 1
            return
        place = self._evidence.places.get(facts.position)
        if place is not None:
            served = True
            topic, queue_id, offset = place
            flag = facts.sys_flag & ~TRANSACTION_MASK
            facts = facts._replace(topic=topic, queue_id=queue_id, queue_offset=offset, sys_flag=flag)
        if self._index.enabled:
            keys = () if facts.rolled_back else None
            self._index.add(
                (key_prefix(facts.topic),), (facts.position,), (facts.store_ms,), (facts.properties,), (keys,)
            )
        if not served or not facts.queued:
            return
        try:
            queue = self._queues.of_record(facts.topic, facts.queue_id)
        except QueueRefused:
            self._leave_out(facts, "a topic that can name no directory, or a queue that can be none")
        else:
            self._order.add(queue, facts)

    def _push(self, queue: ConsumeQueue, facts: Facts) -> None:
        code = self._evidence.tags.get(facts.position)
        code = tags_code_of(facts, self._delays) if code is None else code
        queue.push(facts.position, facts.size, code, facts.queue_offset)
        if not queue.dirty:
            self._queues.add_dirty(queue)

    def _out_of_order(self, facts: Facts, end: int, following: Facts | None) -> None:
        why = f"queue offset {facts.queue_offset}"
        if following is not None:
            self._leave_out(facts, f"{why}, and {following.queue_offset} behind it")
        else:
            self._leave_out(facts, f"{why} where {end} was expected")

    def _leave_out(self, facts: Facts, why: str) -> None:
        self._not_served += 1
        problem = f"the record at {facts.position}, of {facts.topic}/{facts.queue_id}, has {why}: not served"
        self._findings.add(WARNING, "not-served", self._layout.root, -1, problem, NOTHING)


def look_at_old_queues(
    disk: Disk, layout: StoreLayout, deleted: DeletedTopics, progress: Callable[[int], None]
) -> Evidence:
    """What the queues know better than the log, by a walk over both. progress: takes bytes of the log."""
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
        at: place for at, place in places.items() if in_queue[place[:2]] <= _MOST_MISPLACED
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

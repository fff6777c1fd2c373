"""`rebuild`: consume queues and index made anew from the log, for a store that no broker is using.

The log is walked twice: first beside the old queues, to learn which records they know better than the log
does (see evidence.py), then to make the new ones.

The new directories grow beside the old ones and take their places when they are complete and on the device;
the old ones are removed last. Whatever happens in between, the next start finds the old ones, the new ones,
or none, and then makes them itself. The log is not touched.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import msgspec

from cometmq.errors import StoreError
from cometmq.protocol.properties.keys import key_prefix
from cometmq.protocol.record.one import Facts
from cometmq.store.background.upkeep import sync_paths
from cometmq.store.base.clock import Clock, SystemClock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.guards import AbortMark, StoreLock
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.gaps import Gaps
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.inspect.evidence import Evidence
from cometmq.store.inspect.findings import NOTHING, WARNING, Finding, Findings
from cometmq.store.inspect.log_walk import LogWalk
from cometmq.store.inspect.queue_check import LIGHT, QueueCheck
from cometmq.store.inspect.verify import Progress
from cometmq.store.recovery.recovery import tags_code_of
from cometmq.store.recovery.store_layout import Shape, read_shape
from cometmq.store.tables.clean_stop import QueueEnds
from cometmq.store.tables.deleted_topics import DeletedTopics

SCRATCH = "rebuild.tmp"
_TRANSACTION_MASK, _PREPARED, _ROLLBACK = 0xC, 0x4, 0xC
_SETTLE = 4096  # records between two writes
_PARTS = ("consumequeue", "index")
_MOST_MISPLACED = 64


class RebuildReport(msgspec.Struct):
    """What was made. `not_served`: records whose queue offset did not fit, as recovery leaves them out."""

    root: str
    records: int
    queues: int
    units: int
    index_files: int
    index_entries: int
    not_served: int
    hidden: int
    findings: list[Finding]


class Rebuild:
    """One rebuild of one directory. `run` does it."""

    def __init__(
        self,
        root: str,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        config: StoreConfig | None = None,
        commit_log_dir: str = "",
        progress: Progress | None = None,
    ) -> None:
        self._disk = disk or OsDisk()
        self._clock = clock or SystemClock()
        self._given = config
        self._commit_log_dir = commit_log_dir
        self._progress = progress
        self._root = os.path.realpath(os.path.expanduser(root))
        self._findings = Findings()
        self._not_served = self._hidden = self._records = 0
        self._ahead: dict[ConsumeQueue, Facts] = {}  # as in recovery: the next record tells who is right
        self._gaps = Gaps({})
        self._evidence = Evidence()
        self._superseded: Iterator[int] = iter(())
        self._next_superseded = -1

    def run(self) -> RebuildReport:
        """Raises StoreError when there is no store or somebody holds it, OSError; then the old directories
        are in their places."""
        read_shape(self._disk, self._root, config=self._given, commit_log_dir=self._commit_log_dir)
        try:
            lock = StoreLock(self._disk, self._root)
        except StoreError:
            raise StoreError("a broker is using this store; stop it first", self._root) from None
        try:
            shape = read_shape(
                self._disk, self._root, config=self._given, commit_log_dir=self._commit_log_dir
            )
            # The lock that was seen there is this one.
            return self._run(shape._replace(live=False, clean=not AbortMark(self._disk, self._root).exists()))
        finally:
            lock.release()

    def _run(self, shape: Shape) -> RebuildReport:
        if any(queue.topic.startswith(LIGHT) for queue in shape.queues):
            raise StoreError(f"{LIGHT} queues do not follow from the log and would be lost", self._root)
        disk, scratch = self._disk, os.path.join(self._root, SCRATCH)
        for path in (scratch, *(os.path.join(self._root, part) for part in _PARTS)):
            if disk.is_link(path):
                raise StoreError("a link; a rebuild replaces the directory itself, and follows no link", path)
        remove_tree(disk, scratch)  # of a run that was killed
        disk.makedirs(scratch)
        config = shape.config.replace(
            store_path_root_dir=scratch, store_path_commit_log=",".join(shape.config.commit_log_dirs)
        )
        files = StoreFiles(disk)
        try:
            for part in _PARTS:
                disk.makedirs(os.path.join(scratch, part))
            queues, index = QueueTable(files, config), IndexService(files, self._clock, config)
            self._fill(shape, queues, index)
            report = RebuildReport(
                self._root, self._records, len(queues),
                sum(queue.max_offset - queue.min_offset for queue in queues), len(index.files),
                sum(file.count - 1 for file in index.files), self._not_served, self._hidden,
                self._findings.kept,
            )  # fmt: skip
        except BaseException:
            files.descriptors.close()
            remove_tree(disk, scratch)
            raise
        files.descriptors.close()
        self._swap(scratch)
        return report

    def _look_at_old_queues(self, shape: Shape, deleted: DeletedTopics, total: int) -> None:
        findings = Findings()  # those of `verify`, which nobody has asked for here
        with ReadOnlyFiles(self._disk) as files:
            check = QueueCheck(shape, files, findings, _no_pause, None, deleted.hides if deleted else None)
            walk = LogWalk(self._disk, shape, findings, _no_pause)
            for run in walk.runs():
                check.take(run)
                if self._progress is not None:
                    self._progress(walk.end - walk.log_min, 2 * total)
            check.finish(walk)
        self._evidence = check.evidence
        # A queue that contradicts this many records is itself the one that is wrong.
        in_queue = Counter(place[:2] for place in check.evidence.places.values())
        places = check.evidence.places.items()
        self._evidence.places = {at: place for at, place in places if in_queue[place[:2]] <= _MOST_MISPLACED}
        self._superseded = iter(check.evidence.superseded.tolist())
        self._next_superseded = next(self._superseded, -1)

    def _fill(self, shape: Shape, queues: QueueTable, index: IndexService) -> None:
        deleted = DeletedTopics(self._disk, self._root)
        self._gaps = Gaps(QueueEnds(self._disk, self._root).ends)
        delays = shape.config.delay_levels_ms
        total = len(shape.segments) * shape.config.mapped_file_size_commit_log
        self._look_at_old_queues(shape, deleted, total)
        walk = LogWalk(self._disk, shape, self._findings, _no_pause)
        for facts in walk.records():
            self._records += 1
            if deleted and deleted.hides(facts.topic, facts.position):
                self._hidden += 1
                continue
            self._dispatch(facts, queues, index, delays)
            if self._records % _SETTLE == 0:
                queues.write_dirty()
                index.write()
                if self._progress is not None:
                    self._progress(total + walk.end - walk.log_min, 2 * total)
        for queue, last in self._ahead.items():
            self._push(queues, queue, last, delays)
        queues.write_dirty()
        index.write(slots=True)
        for queue in queues:
            queue.correct_min(walk.log_min)
        paths = list(_files_below(self._disk, queues.directory)) + [file.path for file in index.files]
        sync_paths(self._disk, paths)
        for directory in sorted({os.path.dirname(path) for path in paths}):
            self._disk.fsync_dir(directory)
        if self._progress is not None:
            self._progress(2 * total, 2 * total)

    def _dispatch(
        self, facts: Facts, queues: QueueTable, index: IndexService, delays: dict[int, int]
    ) -> None:
        """The rules of recovery, and what the old queues know better."""
        position = facts.position
        superseded = position == self._next_superseded
        if superseded:
            self._next_superseded = next(self._superseded, -1)
        place = self._evidence.places.get(position)
        if place is not None:
            superseded = False
            flag = facts.sys_flag & ~_TRANSACTION_MASK
            topic, queue_id, offset = place
            facts = facts._replace(topic=topic, queue_id=queue_id, queue_offset=offset, sys_flag=flag)
        kind = facts.sys_flag & _TRANSACTION_MASK
        if index.enabled:
            index.take(
                (key_prefix(facts.topic),), (facts.position,), (facts.store_ms,), (facts.properties,),
                (None if kind != _ROLLBACK else (),),
            )  # fmt: skip
        if superseded or kind in (_PREPARED, _ROLLBACK):
            return
        try:
            queue = queues.of_record(facts.topic, facts.queue_id)
        except QueueRefused:
            self._leave_out(facts, "a topic that can name no directory, or a queue that can be none")
            return
        ahead = self._ahead.pop(queue, None)
        if ahead is not None:
            if facts.queue_offset > ahead.queue_offset:
                self._push(queues, queue, ahead, delays)
            else:
                self._leave_out(
                    ahead, f"queue offset {ahead.queue_offset}, and {facts.queue_offset} behind it"
                )
        offset, known = facts.queue_offset, queue.max_offset
        if not self._gaps.bridge(queue, offset, position):
            self._leave_out(facts, f"queue offset {offset} where {known} was expected")
        elif offset == known:
            self._push(queues, queue, facts, delays)
        else:
            self._ahead[queue] = facts

    def _leave_out(self, facts: Facts, why: str) -> None:
        self._not_served += 1
        problem = f"the record at {facts.position}, of {facts.topic}/{facts.queue_id}, has {why}: not served"
        self._findings.add(WARNING, "not-served", self._root, -1, problem, NOTHING)

    def _push(self, queues: QueueTable, queue: ConsumeQueue, facts: Facts, delays: dict[int, int]) -> None:
        code = self._evidence.tags.get(facts.position)
        code = tags_code_of(facts, delays) if code is None else code
        queue.push(facts.position, facts.size, code, facts.queue_offset)
        if not queue.dirty:
            queues.mark(queue)

    def _swap(self, scratch: str) -> None:
        disk = self._disk
        for part in _PARTS:
            place, old = os.path.join(self._root, part), os.path.join(scratch, f"{part}.old")
            if disk.is_dir(place):
                disk.rename(place, old)
            disk.rename(os.path.join(scratch, part), place)
        disk.fsync_dir(scratch)
        disk.fsync_dir(self._root)
        remove_tree(disk, scratch)


def rebuild(
    root: str,
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
    config: StoreConfig | None = None,
    commit_log_dir: str = "",
    progress: Progress | None = None,
) -> RebuildReport:
    """Make consume queues and index of the store in `root` anew from its log. Raises StoreError, OSError."""
    return Rebuild(
        root, disk=disk, clock=clock, config=config, commit_log_dir=commit_log_dir, progress=progress
    ).run()


def _no_pause(_seconds: float) -> None:
    """Nobody writes here meanwhile."""


def _files_below(disk: Disk, directory: str) -> Iterator[str]:
    for name in disk.listdir(directory):
        path = os.path.join(directory, name)
        if disk.is_dir(path):
            yield from _files_below(disk, path)
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

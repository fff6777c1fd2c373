"""Writes consume queues and index, makes them durable, and moves the checkpoint forward.

A write cycle in the background blocks the event loop only for short times: each loop iteration writes at most
a few hundred queues, and a thread waits for the syncs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial
from typing import NamedTuple

from cometmq import logs
from cometmq.store.background.tasks import BackgroundTasks
from cometmq.store.base.checkpoint import Checkpoint, CheckpointPosition
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, opened
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.refusal import Flag, RunningFlags
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.recovery.recovery_scan import Recovered
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.min_offsets import MinOffsets

log = logs.logger(__name__)

_MIN_RECORDS_PER_SEARCH = 4096
# Above this number of unsynced files, one sync of the whole file system is cheaper than a sync of each file.
_MANY_FILES = 256
# A write cycle writes queues in this number of loop iterations; only a thorough cycle continues until all
# queues are written. By default, a cycle begins every second. So up to 512 queues are written per second, and
# ten thousand in 20 s.
_SLICES_PER_CYCLE = 2
_SLICE = 256  # Number of queues written per iteration of the event loop
_CYCLE = "writing queues and index"
# The maximum number of records between the checkpoint and the end of the log. Recovery scans this many
# records in one to two seconds.
_MAX_RECORDS_BEHIND = 300_000
_MAX_BYTES_BEHIND = 384 << 20


class Covered(NamedTuple):
    """The records dispatched up to one moment: end position, position and store time of the last one.

    Attributes:
        queue_ends: The sum of the queues' maximum offsets, as in a `CheckpointPosition`.
        behind: The number of these records that the checkpoint does not cover yet.
        step_backs: How often the clock had been set back until that moment.
    """

    position: int
    last: int
    stored_ms: int
    queue_ends: int
    behind: int
    step_backs: int


def sync_paths(disk: Disk, paths: Sequence[str], directories: Sequence[str] = ()) -> None:
    """Sync files and directories, if they still exist. Blocks until that is done. Raises OSError."""
    if len(paths) > _MANY_FILES and _synced_at_once(disk, paths):
        return
    for directory in directories:
        if disk.is_dir(directory):
            with suppress(FileNotFoundError):  # A concurrent deletion of the topic can remove the directory
                disk.fsync_dir(directory)
    for path in paths:
        with suppress(FileNotFoundError), opened(disk, path) as fd:
            disk.fdatasync(fd)


def _synced_at_once(disk: Disk, paths: Sequence[str]) -> bool:
    """Sync the whole file system that holds `paths`. Return False if the system has no call for that."""
    for path in paths:
        with suppress(FileNotFoundError):  # A concurrent deletion of the topic can remove the file
            return disk.sync_filesystem(os.path.dirname(path))
    return False


@dataclass(eq=False, kw_only=True)
class DerivedWriter:
    """Writes queues and index of one store, and moves its checkpoint. For the loop thread only.

    When settings change, `config` is replaced.
    """

    disk: Disk
    clock: Clock
    config: StoreConfig
    flags: RunningFlags
    executor: StoreExecutor
    tasks: BackgroundTasks
    commit_log: CommitLog
    flusher: LogFlusher
    queues: QueueTable
    index: IndexService
    min_offsets: MinOffsets
    checkpoint: Checkpoint
    deleted: DeletedTopics
    recovered: InitVar[Recovered]

    def __post_init__(self, recovered: Recovered) -> None:
        known = self.checkpoint.saved
        self._last = recovered.last_position if recovered.records else known.last if known else -1
        self._position = self._tried = recovered.visible
        self._behind = 0  # Number of records dispatched since the checkpoint was last moved
        self._changed = recovered.rebuilt  # Whether the store has changed and needs a new checkpoint position
        self._step_backs = 0
        self.stored_ms = self.flusher.written_ms  # Store time of the last dispatched record
        self._thorough_at = self.clock.monotonic()
        self._unwritten = 0  # Number of records since the last search for queues with many unwritten units
        self._search_at = _MIN_RECORDS_PER_SEARCH  # Queues are searched once `_unwritten` reaches this value
        self._lost: OSError | None = None  # Error of a failed sync, after which the checkpoint never moves
        self._unsynced_files: set[str] = set()  # Changed files of queues and index that are not synced yet
        # Directories in which files were created or deleted and which are not synced yet.
        self._unsynced_names: set[str] = set()
        self._durable_until = 0  # Queues and index are synced for all records before this log position

    # -- writing ----------------------------------------------------------------------------------

    def dispatched(self, count: int, last: int, end: int, stored_ms: int) -> None:
        """Record that `count` records became visible, the last one at log positions `last` to `end`.

        Queue units and index keys are written when enough have collected: once every few thousand records,
        the queues with many unwritten units are searched for and written. A failed write is logged, and a
        flag is raised that makes the store refuse messages.
        """
        self._behind += count
        self._changed = True
        self._last, self._position, self.stored_ms = last, end, stored_ms
        self._unwritten += count
        index = self.index
        if self._unwritten < self._search_at and not index.has_batch_waiting():
            return
        part = Flag.WRITE_INDEX_ERROR
        try:
            if index.has_batch_waiting():
                index.index_waiting_keys()
            part = Flag.WRITE_LOGICS_ERROR
            if self._unwritten >= self._search_at:
                self._unwritten = 0
                self.queues.write_eager()
                self._search_at = max(_MIN_RECORDS_PER_SEARCH, 8 * self.queues.waiting)
        except OSError as failure:
            self._failed(part, failure)

    def begin_cycle(self) -> None:
        """Start `write_cycle` in the background. The store calls this every flushIntervalConsumeQueue ms."""
        self.tasks.begin(_CYCLE, self.write_cycle)

    async def write_cycle(self, *, thorough: bool = False) -> None:
        """Write some of the queues, and the index. A thorough cycle writes all queues and syncs everything.

        A cycle is thorough if the caller requests it, if flushConsumeQueueThoroughInterval has passed since
        the last thorough cycle, or if the checkpoint is too far behind the log.
        """
        now = self.clock.monotonic()
        interval_s = self.config.flush_consume_queue_thorough_interval / 1000
        thorough = thorough or now - self._thorough_at >= interval_s or self.far_behind
        covered = self.covered() if thorough else None
        part = Flag.WRITE_LOGICS_ERROR
        try:
            self.queues.write_eager()
            for _ in range(len(self.queues) // _SLICE + 1 if thorough else _SLICES_PER_CYCLE):
                if self.queues.write_dirty(_SLICE):
                    break
                await asyncio.sleep(0)  # The event loop does other work before more queues are written
            part = Flag.WRITE_INDEX_ERROR
            self.index.write()
            if thorough:
                for _ in self.index.write_slots():
                    await asyncio.sleep(0)
                self.index.write()
        except OSError as failure:
            self._failed(part, failure)
            return
        self._healed()
        if covered is not None:
            self._thorough_at = now
            await self._make_durable(covered)

    def _failed(self, part: Flag, failure: OSError) -> None:
        what = "the index" if part is Flag.WRITE_INDEX_ERROR else "consume queues"
        reason = f"{what} could not be written: {failure.strerror or failure}"
        if self.flags.reasons.get(part) != reason:  # Log a reason only once, as each write cycle retries
            log.error("%s could not be written, trying again: %s", what, failure)
        self.flags.raise_flag(part, reason)

    def _healed(self) -> None:
        if self.flags.reasons.keys() & {Flag.WRITE_LOGICS_ERROR, Flag.WRITE_INDEX_ERROR}:
            log.warning("consume queues and index can be written again")
            self.flags.clear(Flag.WRITE_LOGICS_ERROR)
            self.flags.clear(Flag.WRITE_INDEX_ERROR)

    # -- the checkpoint ---------------------------------------------------------------------------

    @property
    def far_behind(self) -> bool:
        """Whether a recovery would have to scan so much of the log that the checkpoint must be moved now."""
        return self._behind >= _MAX_RECORDS_BEHIND or self._position - self._tried >= _MAX_BYTES_BEHIND

    def covered(self) -> Covered:
        """Return the records that a write of all queues and the index includes if it begins now."""
        # While topics are being deleted, `queue_ends` is 0 (unknown). Otherwise, after a crash, recovery
        # would compute a smaller sum of maximum offsets, because it drops the queues of deleted topics. It
        # could not attribute the difference to the deletion, which is recorded with a log position before the
        # checkpoint position.
        ends = 0 if self.deleted.under_way else self.queues.offset_sum
        return Covered(self._position, self._last, self.stored_ms, ends, self._behind, self._step_backs)

    def _position_of(self, covered: Covered) -> tuple[CheckpointPosition | None, int]:
        """Return the checkpoint position, and the end time (ms) of the newest full index file.

        Call this method after queues and index have been written, and before they are synced. The checkpoint
        position is None if there was none at the start and the store has not changed since then.
        """
        self._behind -= covered.behind
        self._tried = covered.position
        saved = None
        if self.checkpoint.saved is not None or self._changed:
            saved = self.index.checkpoint_position(covered.position, covered.last, covered.queue_ends)
        return saved, self.index.full_until_ms

    def clock_stepped_back(self, now_ms: int) -> None:
        """Lower the checkpoint, or recovery would treat the next records, with lower times, as durable."""
        checkpoint = self.checkpoint
        self._step_backs += 1
        self.flusher.flushed_ms = min(self.flusher.flushed_ms, now_ms)
        if max(checkpoint.physic_ms, checkpoint.logics_ms) <= now_ms:
            return
        log.warning("the clock and the times of the checkpoint were set back to %d (ms since 1970)", now_ms)
        checkpoint.physic_ms = min(checkpoint.physic_ms, now_ms)
        checkpoint.logics_ms = min(checkpoint.logics_ms, now_ms)
        try:
            checkpoint.flush()
        except OSError as failure:
            log.error("the checkpoint could not be lowered: %s", failure)

    # -- making durable ---------------------------------------------------------------------------

    async def _make_durable(self, covered: Covered) -> None:
        """Sync the log, queues and index without blocking the loop, then move the checkpoint to `covered`."""
        saved, full_ms = self._position_of(covered)
        if self.executor.ending or self._lost is not None or self.flusher.failure is not None:
            return
        work = self._to_sync()
        flushed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.flusher.wait_for(
            self.commit_log.end, lambda ok: None if flushed.done() else flushed.set_result(ok)
        )
        if not await flushed:
            # The log was not synced. If the wait timed out, the next thorough cycle tries again. If a sync of
            # the log failed, no later cycle tries.
            return
        try:
            await self.executor.run(sync_paths, self.disk, *work)
        except OSError as failure:
            self._sync_failed(failure)
            return
        self._synced(covered, saved, full_ms)
        await self.executor.run(self.checkpoint.flush)

    def make_durable(self, *, slots: bool = True) -> bool:
        """Write and sync all queues and the index, which blocks the event loop. Return success."""
        self.flusher.flush_now()
        if self.flusher.failure is not None:
            return False
        part = Flag.WRITE_LOGICS_ERROR
        try:
            self.queues.write_dirty()
            self.min_offsets.save()
            part = Flag.WRITE_INDEX_ERROR
            self.index.write(slots=slots)
        except OSError as failure:
            self._failed(part, failure)
            return False
        self._healed()
        if self._lost is not None:
            return False
        covered = self.covered()
        saved, full_ms = self._position_of(covered)
        try:
            sync_paths(self.disk, *self._to_sync())
        except OSError as failure:
            self._sync_failed(failure)
            return False
        self._synced(covered, saved, full_ms)
        try:
            self.checkpoint.flush()
        except OSError as failure:
            log.error("the checkpoint could not be written: %s", failure)
            return False
        return True

    async def make_durable_before(self, position: int) -> bool:
        """Make queues and index durable for all records before `position`. Return whether that succeeded."""
        if self._durable_until < position and not self.executor.ending:
            if self.tasks.attached:
                await self.tasks.run_again(_CYCLE, partial(self.write_cycle, thorough=True))
            else:
                self.make_durable(slots=False)
        return self._durable_until >= position

    def make_recovery_durable(self, found: Recovered) -> None:
        """Make the result of recovery durable before new records depend on it. Raises OSError."""
        if not found.rebuilt:
            self._durable_until = found.visible
            return
        size = self.commit_log.segment_size
        paths = [
            self.commit_log.path_of(base) for base in self.commit_log.segments if base + size > found.start
        ]
        sync_paths(self.disk, paths, self.commit_log.directories.all)
        self.flusher.flushed_ms = found.last_store_ms
        if not self.make_durable(slots=False):
            raise OSError("the recovered store could not be written")

    def _to_sync(self) -> tuple[list[str], list[str]]:
        """Return the files of queues and index, and their directories, that must be synced."""
        for paths, directories in (self.queues.collect_unsynced(), self.index.collect_unsynced()):
            self._unsynced_files.update(paths)
            self._unsynced_names.update(directories)
        return sorted(self._unsynced_files), sorted(self._unsynced_names)

    def _synced(self, covered: Covered, saved: CheckpointPosition | None, full_ms: int) -> None:
        """Move the checkpoint to `covered`, which is now synced in log, queues and index, in memory only."""
        self._unsynced_files.clear()
        self._unsynced_names.clear()
        self._durable_until = covered.position
        checkpoint = self.checkpoint
        if covered.step_backs == self._step_backs:
            checkpoint.physic_ms = max(checkpoint.physic_ms, self.flusher.flushed_ms)
            checkpoint.logics_ms = max(checkpoint.logics_ms, covered.stored_ms)
            checkpoint.index_ms = max(checkpoint.index_ms, full_ms)
        checkpoint.saved = saved

    def _sync_failed(self, failure: OSError) -> None:
        """Never move the checkpoint again, because it is unknown what the disk stored in the failed sync."""
        if self._lost is None:
            log.error(
                "consume queues or index could not be synced, so the checkpoint is not advanced: %s", failure
            )
        self._lost = failure

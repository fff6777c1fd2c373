"""Retention: deletion of old files by age, by disk usage, and on request.

The age of a segment is the time since its file was last modified. It is measured by `SteadyTime`, so a wall
clock that is ahead for a while does not cause deletions. Deletion begins with the oldest segment, pauses
after each one, and never deletes the last one. Segments that a slave still needs are kept until the disk is
full. The files of queues, queue extensions (queue_ext.py) and index are deleted after all records that they
refer to. The minimum offset of each queue moves to its first record that still exists.

The order of deletions and syncs leaves no gaps after a power failure (docs/store.md, Deletion and power
failures).

Before a segment is deleted, messages in it that are still needed are moved to the end of the log. This gains
no space if the log contains almost nothing else. So while the disk is full, each segment is processed only
once. After that, deletion begins again only when new messages have filled a whole segment (`_gains_nothing`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cometmq import logs
from cometmq.store.background.fullness import Fullness
from cometmq.store.background.tasks import BackgroundTasks
from cometmq.store.base.clock import Clock, SteadyTime
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, unlink_any
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.refusal import Flag, RunningFlags
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_ext import ExtFiles
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog

if TYPE_CHECKING:
    from cometmq.store.tiered.uploads import TieredUploads

log = logs.logger(__name__)

_MANUAL_PASSES = 20
_QUEUES_PER_STEP = 16  # Number of queues processed per loop iteration
_NOWHERE = 1 << 62
_LOG_CYCLE, _DERIVED_CYCLE = "retention (log)", "retention (queues)"


@dataclass(eq=False, kw_only=True)
class Retention:
    """Deletes the expired files of one store. For the loop thread only.

    Two background tasks, called cycles, do the work: one for the log, one for queues and index. Each runs at
    most once at a time.

    Attributes:
        make_durable_before: Makes queues and index durable up to a log position. Returns whether that
            succeeded.
        on_space_freed: Called after segments were deleted.
        before_delete: Called before the log is deleted up to a position, to move the messages that are still
            needed. Returns whether that succeeded.
        first_needed_position: Returns the first log position that a connected slave still needs.
        tiered: The copies of segments in an object store; None without tiered storage.
    """

    disk: Disk
    clock: Clock
    steady: SteadyTime
    config: StoreConfig
    flags: RunningFlags
    executor: StoreExecutor
    tasks: BackgroundTasks
    fullness: Fullness
    commit_log: CommitLog
    queues: QueueTable
    index: IndexService
    ext: ExtFiles
    make_durable_before: Callable[[int], Awaitable[bool]]
    on_space_freed: Callable[[], None]
    before_delete: Callable[[int], Awaitable[bool]] | None = None
    first_needed_position: Callable[[], int] = lambda: _NOWHERE
    tiered: TieredUploads | None = None

    def __post_init__(self) -> None:
        self._manual = 0
        self._correcting = asyncio.Lock()
        # The beginning of the log when minimum offsets were last raised to it.
        self._corrected_min = self.commit_log.readable_min
        self._derived_min = -1
        self._sweep_end = -1  # End of the log when a deletion of unexpired segments last began; else -1
        self._swept = 0  # Bytes after `_sweep_end` that consist of messages moved out of deleted segments
        self._logged_full = False
        # End of the last segment whose deferred deletion was logged: a slave still needs the segment.
        self._logged_needed = -1
        self.synced_min = -1
        """The position at which the log would begin after a power failure."""

    # -- requests ---------------------------------------------------------------------------------

    def delete_now(self) -> None:
        """Let the next runs of retention delete expired segments at any hour, as an operator requested."""
        self._manual = _MANUAL_PASSES

    def recheck_everything(self) -> None:
        """Let the next run of retention examine all queue and index files, as an operator requested.

        Otherwise a run examines them only if the log begins at a later position than in the previous run.
        """
        self._corrected_min = self._derived_min = -1

    def begin(self) -> None:
        """Start to delete files in the background. The store calls this every cleanResourceInterval ms."""
        self.tasks.begin(_LOG_CYCLE, self._log_cycle_first)
        self.tasks.begin(_DERIVED_CYCLE, self.derived_cycle)

    async def run_now(self, *, log_too: bool) -> None:
        """Raise minimum offsets, also after deleting segments if `log_too`, and begin a derived cycle."""
        if log_too:
            await self.tasks.run_again(_LOG_CYCLE, self._log_cycle_first)
        else:
            await self.correct_minimums()
            self.tasks.begin(_DERIVED_CYCLE, self.derived_cycle)

    async def _log_cycle_first(self) -> None:
        if await self.log_cycle():
            self.on_space_freed()
        self.tasks.begin(_DERIVED_CYCLE, self.derived_cycle)

    # -- the log ----------------------------------------------------------------------------------

    async def log_cycle(self) -> list[str]:
        """Measure the disks, delete segments that are due, and raise minimum offsets. Return the paths."""
        now_ms = self.steady.now_ms()
        await self.fullness.measure()
        await self._check_last_segment()
        due = self._due()
        deleted = await self._delete_segments(now_ms, due=due) if due or self.tiered is not None else []
        await self.correct_minimums()
        return deleted

    async def _check_last_segment(self) -> None:
        """Accept no more messages, which would be lost, if another program has deleted the last segment."""
        path = self.commit_log.path_of(self.commit_log.segments[-1]) if self.commit_log.segments else ""
        if path and await self.executor.run(self.disk.facts, path) is None:
            if Flag.NOT_WRITEABLE not in self.flags.reasons:
                log.error("%s has been deleted: the store accepts no messages until its next start", path)
            self.flags.raise_flag(Flag.NOT_WRITEABLE, f"{path} has been deleted")

    def _due(self) -> bool:
        hour = time.localtime(self.clock.time_ms() / 1000).tm_hour
        hours = [part.strip() for part in self.config.delete_when.split(";")]
        if any(part.isdigit() and int(part) == hour for part in hours) or self.fullness.deletes_at_any_hour:
            return True
        if self._manual > 0:
            self._manual -= 1
            return True
        return False

    async def _delete_segments(self, now_ms: int, *, due: bool) -> list[str]:
        """Delete expired segments, or, on a full disk, of any age, except the last. Return their paths.

        If none is `due`, delete only segments that may be deleted early, as the object store has them.
        """
        commit_log, config, tiered = self.commit_log, self.config, self.tiered
        forced = due and self.fullness.deletes_any_age
        if not forced and tiered is None:
            self._sweep_end = -1
        deleted: list[str] = []
        while len(commit_log.segments) > 1 and len(deleted) < config.delete_file_batch_max:
            path = commit_log.path_of(commit_log.segments[0])
            facts = await self.executor.run(self.disk.facts, path)
            modified_ms = 0 if facts is None else facts.modified_ms
            expired = due and modified_ms + config.file_reserved_time * 3_600_000 < now_ms
            early = False
            if not expired and (not forced or self._gains_nothing()):
                early = tiered is not None and tiered.may_go(commit_log.segments[0], modified_ms, now_ms)
                # Messages that were moved out of deleted segments must not be moved again and again.
                if not early or self._gains_nothing():
                    break
            behind = commit_log.segments[0] + commit_log.segment_size
            if self._is_needed(path, behind, forced):
                break
            if deleted:
                await self.executor.pause(self.config.delete_commit_log_files_interval)
            if not await self._prepare_delete(behind):
                log.error("%s is not deleted, because its waiting messages could not be moved", path)
                break
            if not await self.make_durable_before(behind):
                log.error("%s is not deleted, because consume queues or index could not be synced", path)
                break
            if tiered is not None and facts is not None:
                copied = await tiered.confirm(commit_log.segments[0], early=early)
                if early and not copied:
                    break
                if not copied and not self.executor.ending:
                    tiered.report_lost(commit_log.segments[0])
            if self.executor.ending or not await self._delete(path, log_segment=True):
                break
            deleted.append(path)
            why = "expired" if expired else "in the object store" if early else "disk is full"
            log.info("deleted %s (%s)", path, why)
        return deleted

    def _is_needed(self, path: str, behind: int, forced: bool) -> bool:
        """Return whether the first segment, which ends at `behind`, must stay because a slave needs it."""
        wanted = self.first_needed_position()
        if wanted >= behind:
            return False
        if forced:
            text = "%s is deleted because the disk is full: a slave with the log up to %d must copy it again"
            log.error(text, path, wanted)
        elif self._logged_needed != behind:
            text = "%s is not deleted while the disk has space, because a slave has the log only up to %d"
            log.warning(text, path, wanted)
        self._logged_needed = behind
        return not forced

    async def _prepare_delete(self, behind: int) -> bool:
        """Move the messages that are still needed out of the first segment. Return whether that succeeded."""
        if self.before_delete is None:
            return True
        end = self.commit_log.end
        moved = await self.before_delete(behind)
        self._swept += self.commit_log.end - end
        return moved

    def _gains_nothing(self) -> bool:
        """Return whether deleting the first segment would gain no space.

        This is so if every segment that existed when deletions of unexpired segments began, for instance
        because the disk became full, has been processed, and less than one segment of new messages has been
        stored since then. Messages that retention itself has moved do not count as new.
        """
        commit_log = self.commit_log
        if commit_log.segments[0] < self._sweep_end:
            self._logged_full = False
            return False
        if self._sweep_end < 0 or commit_log.end - self._sweep_end - self._swept >= commit_log.segment_size:
            self._sweep_end, self._swept = commit_log.end, 0
            return False
        if not self._logged_full and self.fullness.deletes_any_age:
            log.error(
                "deleting segments frees no space, because almost all messages in the log are still needed"
            )
            self._logged_full = True
        return True

    async def _delete(self, path: str, *, log_segment: bool = False) -> bool:
        """Delete a file and sync its directory. Return whether both succeeded; the next cycle tries again."""
        try:
            await self.executor.run(unlink_any, self.disk, path)
        except OSError as failure:
            log.error("%s could not be deleted, trying again: %s", path, failure)
            return False
        if log_segment:
            fd = self.commit_log.forget_first()
            if fd >= 0:
                await self.executor.run(self.disk.close, fd)
        return await self._sync(os.path.dirname(path), self.commit_log.min_position if log_segment else -1)

    async def _sync(self, directory: str, log_min: int = -1) -> bool:
        """Make deletions in a directory durable, after which the log begins at `log_min`. Return success."""
        try:
            await self.executor.run(self.disk.fsync_dir, directory)
        except FileNotFoundError:
            pass  # A concurrent deletion of the topic can remove the directory of the queue
        except OSError as failure:
            log.error("the deletion of files in %s could not be synced to disk: %s", directory, failure)
            return False
        self.synced_min = max(self.synced_min, log_min)
        return True

    async def correct_minimums(self) -> None:
        """Raise the minimum offsets of the queues after the beginning of the log has moved."""
        # Each call holds a list of all queues in memory, so calls run one after the other.
        async with self._correcting:
            log_min = self.commit_log.readable_min
            if log_min <= self._corrected_min:
                return
            for number, queue in enumerate(list(self.queues)):
                if number % _QUEUES_PER_STEP == _QUEUES_PER_STEP - 1:
                    await self.executor.pause(0)
                await self.executor.query(partial(queue.correct_min, log_min))
            self._corrected_min = log_min

    # -- queues and index -------------------------------------------------------------------------

    async def derived_cycle(self) -> list[str]:
        """Delete the queue and index files that refer only to deleted records. Return their paths."""
        log_min = self.commit_log.readable_min
        if log_min <= self._derived_min:
            return []
        if self.synced_min < log_min:
            for directory in self.config.commit_log_dirs:
                if not await self._sync(directory):
                    return []
            self.synced_min = log_min
        deleted: list[str] = []
        if await self._delete_derived(log_min, deleted):
            self._derived_min = log_min
        return deleted

    async def _delete_derived(self, log_min: int, deleted: list[str]) -> bool:
        """Delete the index, queue and ext files that refer only to records before `log_min`.

        As in the methods below, the deleted paths are added to `deleted`, and the result is False if a
        deletion failed or the store is stopping.
        """
        executor = self.executor
        while not executor.ending and (path := self.index.forget_expired(log_min)) is not None:
            if not await self._delete(path):
                return False
            deleted.append(path)
            await self.executor.pause(self.config.delete_consume_queue_files_interval)
        for number, queue in enumerate(list(self.queues)):
            if number % _QUEUES_PER_STEP == _QUEUES_PER_STEP - 1:
                await executor.pause(0)
            if executor.ending or not await self._shorten(queue, log_min, deleted):
                return False
        try:
            return await self._shorten_ext(deleted)
        except OSError as failure:
            log.error("files of consumequeue_ext could not be deleted, trying again: %s", failure)
            return False

    async def _shorten(self, queue: ConsumeQueue, log_min: int, deleted: list[str]) -> bool:
        """Delete the expired files of one queue."""
        for path in await self.executor.query(partial(queue.expired_files, log_min)):
            if self.executor.ending:
                return False
            if queue.deleted:
                break
            try:
                # This deletion runs on the event loop, not in a thread. A thread could be late: if the topic
                # were deleted and created again meanwhile, it would remove a file of the new topic.
                queue.delete_file(path)
            except OSError as failure:
                log.error("%s could not be deleted, trying again: %s", path, failure)
                return False
            deleted.append(path)
            if not await self._sync(queue.path):
                return False
            await self.executor.pause(self.config.delete_consume_queue_files_interval)
        return True

    async def _shorten_ext(self, deleted: list[str]) -> bool:
        """Delete ext files of expired units and of deleted queues. Raises OSError."""
        executor, ext = self.executor, self.ext
        for topic, queue_id in await executor.run(ext.queues):
            queue = self.queues.find_queue(topic, queue_id)
            if queue is None or not queue.max_offset:
                paths = await executor.run(ext.paths, topic, queue_id)
            else:
                first = None
                if queue.min_offset < queue.max_offset:
                    first = await executor.query(partial(queue.unit, queue.min_offset))
                paths = await executor.run(ext.paths_before, topic, queue_id, first[2] if first else 0)
            for path in paths:
                if executor.ending or not await self._delete(path):
                    return False
                deleted.append(path)
                await self.executor.pause(self.config.delete_consume_queue_files_interval)
            await executor.run(ext.drop_empty, topic, queue_id)
        return True

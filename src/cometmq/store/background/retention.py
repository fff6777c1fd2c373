"""Deleting what is old: by age at the hour, by fullness of the disk, on request.

The age of a segment is its file's modification time, as in Apache's broker, held against `SteadyTime`: a
clock that is ahead for a while deletes nothing. Deletion is paced, oldest first, never the last segment. What
a slave is still to be sent stays as long as the disk has room.
Files of queues, their extension (queue_ext.py) and index go when all their records are gone, and each queue's
minimum offset moves to the first record that still exists.

A power failure must not tear holes. So a segment goes only when the queue units of its records are on the
device: from then on they alone know which offsets were given out. Each deletion is on the device before the
next one in that directory. Deletions of queues and index wait for the log's: a record that comes back after a
failure still has its queue.

What is still needed of a segment is moved to the log's end before it goes. A log that holds hardly anything
else gains nothing by that. So while the disk is full all of the log is gone through once, and again only when
a segment's worth of other messages has come (`_gains_nothing`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from cometmq import logs
from cometmq.store.background.fullness import Fullness
from cometmq.store.background.passes import Passes
from cometmq.store.base.clock import Clock, SteadyTime
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, unlink_any
from cometmq.store.base.flags import Flag, RunningFlags
from cometmq.store.base.off_loop import OffLoop, in_place
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_ext import ExtFiles
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog

log = logs.logger(__name__)

_MANUAL_PASSES = 20
_QUEUES_PER_STEP = 16  # queues looked at per turn of the loop
_NOWHERE = 1 << 62
_LOG_PASS, _DERIVED_PASS = "retention (log)", "retention (queues)"


@dataclass(eq=False, kw_only=True)
class Retention:
    """Deletion of one store's expired files. Its methods belong to the loop's thread; at most one
    `log_pass` and one `derived_pass` run at a time.

    config: replaced when settings change. make_durable_before: brings queues and index onto the device up to
    a log position; False if that failed. on_room: called after segments were deleted. move_on: before a
    segment goes, takes along what is still needed of the log before a position; False if that failed.
    wanted_from: from where on slaves that are connected still want the log.
    """

    disk: Disk
    clock: Clock
    steady: SteadyTime
    config: StoreConfig
    flags: RunningFlags
    off_loop: OffLoop
    passes: Passes
    fullness: Fullness
    commit_log: CommitLog
    queues: QueueTable
    index: IndexService
    ext: ExtFiles
    make_durable_before: Callable[[int], Awaitable[bool]]
    on_room: Callable[[], None]
    move_on: Callable[[int], Awaitable[bool]] | None = None
    wanted_from: Callable[[], int] = lambda: _NOWHERE

    def __post_init__(self) -> None:
        self._manual = 0
        self._correcting = asyncio.Lock()
        self._corrected_min = self.commit_log.min_position  # recovery has seen to the queues up to here
        self._derived_min = -1
        self._sweep_end = -1  # where the log ended when deletions whatever the age began at its beginning
        self._swept = 0  # bytes that moves have added to it since
        self._said_full = False
        self._said_wanted = -1  # the segment that slaves want, of which a line was written
        self.synced_min = -1
        """Where the log begins, as far as a power failure cannot take that back."""

    # -- asking -----------------------------------------------------------------------------------

    def delete_now(self) -> None:
        """The operator's request: the next passes delete expired files whatever the hour."""
        self._manual = _MANUAL_PASSES

    def look_at_everything(self) -> None:
        """The operator's request: the next pass looks at every queue and index file, needed or not."""
        self._corrected_min = self._derived_min = -1

    def begin(self) -> None:
        """Every cleanResourceInterval: begin both passes in the background."""
        self.passes.begin(_LOG_PASS, self._log_pass_first)
        self.passes.begin(_DERIVED_PASS, self.derived_pass)

    async def run_now(self, *, log_too: bool) -> None:
        """Do what is due. Returns when the log is done; queues and index follow in the background."""
        if log_too:
            await self.passes.begin_anew(_LOG_PASS, self._log_pass_first)
        else:
            await self.correct_minimums()
            self.passes.begin(_DERIVED_PASS, self.derived_pass)

    async def _log_pass_first(self) -> None:
        if await self.log_pass():
            self.on_room()
        self.passes.begin(_DERIVED_PASS, self.derived_pass)

    def round(self) -> list[str]:
        """Both passes, in place: for a store without a loop. Returns deleted paths."""
        return in_place(self.log_pass()) + in_place(self.derived_pass())

    # -- the log ----------------------------------------------------------------------------------

    async def log_pass(self) -> list[str]:
        """Measure the disk, delete segments that are due, raise minimum offsets. Returns deleted paths."""
        now_ms = self.steady.now_ms()
        await self.fullness.measure()
        await self._miss()
        deleted = await self._delete_segments(now_ms) if self._due() else []
        await self.correct_minimums()
        return deleted

    async def _miss(self) -> None:
        """Take no messages once somebody has deleted the segment that is written to: they would be lost."""
        path = self.commit_log.path_of(self.commit_log.segments[-1]) if self.commit_log.segments else ""
        if path and await self.off_loop.run(self.disk.facts, path) is None:
            if Flag.NOT_WRITEABLE not in self.flags.reasons:
                log.error("%s has been deleted, the store takes no messages until it is started again", path)
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

    async def _delete_segments(self, now_ms: int) -> list[str]:
        """Delete expired segments; any but the last when the disk is dangerously full."""
        commit_log, config = self.commit_log, self.config
        forced = self.fullness.deletes_any_age
        if not forced:
            self._sweep_end = -1
        deleted: list[str] = []
        while len(commit_log.segments) > 1 and len(deleted) < config.delete_file_batch_max:
            path = commit_log.path_of(commit_log.segments[0])
            facts = await self.off_loop.run(self.disk.facts, path)
            expired = facts is None or facts.modified_ms + config.file_reserved_time * 3_600_000 < now_ms
            if not expired and (not forced or self._gains_nothing()):
                break
            behind = commit_log.segments[0] + commit_log.segment_size
            if self._is_wanted(path, behind, forced):
                break
            if deleted:
                await self.off_loop.pause(self.config.delete_commit_log_files_interval)
            if not await self._moved_on(behind):
                log.error("%s stays: messages that wait in it cannot be moved on", path)
                break
            if not await self.make_durable_before(behind):
                log.error("%s stays: queues or index cannot be brought onto the device", path)
                break
            if self.off_loop.ending or not await self._delete(path, log_segment=True):
                break
            deleted.append(path)
            log.info("deleted %s (%s)", path, "expired" if expired else "disk is full")
        return deleted

    def _is_wanted(self, path: str, behind: int, forced: bool) -> bool:
        """Whether the first segment, which ends at `behind`, stays for a slave."""
        wanted = self.wanted_from()
        if wanted >= behind:
            return False
        if forced:
            text = "%s goes, because the disk is full: a slave that has the log up to %d only must begin anew"
            log.error(text, path, wanted)
        elif self._said_wanted != behind:
            log.warning("%s stays as long as the disk has room: a slave has the log up to %d", path, wanted)
        self._said_wanted = behind
        return not forced

    async def _moved_on(self, behind: int) -> bool:
        """Take along what is still needed of the first segment; False if that failed."""
        if self.move_on is None:
            return True
        end = self.commit_log.end
        moved = await self.move_on(behind)
        self._swept += self.commit_log.end - end
        return moved

    def _gains_nothing(self) -> bool:
        """Whether the first segment would go only to be stored again: the whole log has been moved on since
        the disk became full, and not a segment's worth has come otherwise."""
        commit_log = self.commit_log
        if commit_log.segments[0] < self._sweep_end:
            self._said_full = False
            return False
        if self._sweep_end < 0 or commit_log.end - self._sweep_end - self._swept >= commit_log.segment_size:
            self._sweep_end, self._swept = commit_log.end, 0
            return False
        if not self._said_full:
            log.error("the log holds hardly anything but messages that wait: deleting segments gives no room")
        self._said_full = True
        return True

    async def _delete(self, path: str, *, log_segment: bool = False) -> bool:
        """Unlink one file and make that last. False when something went wrong; the next pass goes on."""
        try:
            await self.off_loop.run(unlink_any, self.disk, path)
        except OSError as failure:
            log.error("%s could not be deleted, trying again: %s", path, failure)
            return False
        if log_segment:
            fd = self.commit_log.forget_first()
            if fd >= 0:
                await self.off_loop.run(self.disk.close, fd)
        return await self._sync(os.path.dirname(path), self.commit_log.min_position if log_segment else -1)

    async def _sync(self, directory: str, log_min: int = -1) -> bool:
        """Make deletions in a directory last. log_min: where the log begins by them."""
        try:
            await self.off_loop.run(self.disk.fsync_dir, directory)
        except FileNotFoundError:
            pass  # the queue's topic has just been deleted
        except OSError as failure:
            log.error("deletions in %s may come back after a power failure: %s", directory, failure)
            return False
        self.synced_min = max(self.synced_min, log_min)
        return True

    async def correct_minimums(self) -> None:
        """After the log's beginning has moved: move the queues' minimum offsets."""
        async with self._correcting:  # of many requests that wait, each would hold a list of all queues
            log_min = self.commit_log.min_position
            if log_min <= self._corrected_min:
                return
            for number, queue in enumerate(list(self.queues)):
                if number % _QUEUES_PER_STEP == _QUEUES_PER_STEP - 1:
                    await self.off_loop.pause(0)
                await self.off_loop.ask(partial(queue.correct_min, log_min))
            self._corrected_min = log_min

    # -- queues and index -------------------------------------------------------------------------

    async def derived_pass(self) -> list[str]:
        """Delete queue and index files before the log's new beginning. Returns deleted paths."""
        log_min = self.commit_log.min_position
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
        """False when something went wrong or the store stops."""
        off_loop = self.off_loop
        while not off_loop.ending and (path := self.index.forget_expired(log_min)) is not None:
            if not await self._delete(path):
                return False
            deleted.append(path)
            await self.off_loop.pause(self.config.delete_consume_queue_files_interval)
        for number, queue in enumerate(list(self.queues)):
            if number % _QUEUES_PER_STEP == _QUEUES_PER_STEP - 1:
                await off_loop.pause(0)
            if off_loop.ending or not await self._shorten(queue, log_min, deleted):
                return False
        try:
            return await self._shorten_ext(deleted)
        except OSError as failure:
            log.error("files of consumequeue_ext could not be deleted, trying again: %s", failure)
            return False

    async def _shorten(self, queue: ConsumeQueue, log_min: int, deleted: list[str]) -> bool:
        """Delete the expired files of one queue. False when something went wrong or the store stops."""
        for path in await self.off_loop.ask(partial(queue.expired_files, log_min)):
            if self.off_loop.ending:
                return False
            if queue.deleted:
                break
            try:
                # Not in the thread: by then a new topic of this name could have a new file of this name.
                queue.delete_file(path)
            except OSError as failure:
                log.error("%s could not be deleted, trying again: %s", path, failure)
                return False
            deleted.append(path)
            if not await self._sync(queue.path):
                return False
            await self.off_loop.pause(self.config.delete_consume_queue_files_interval)
        return True

    async def _shorten_ext(self, deleted: list[str]) -> bool:
        """Delete the ext files before the first unit of their queue, and those of queues that are gone. False
        when something went wrong or the store stops. Raises OSError."""
        off_loop, ext = self.off_loop, self.ext
        for topic, queue_id in await off_loop.run(ext.queues):
            queue = self.queues.find(topic, queue_id)
            if queue is None or not queue.max_offset:
                paths = await off_loop.run(ext.paths, topic, queue_id)
            else:
                first = None
                if queue.min_offset < queue.max_offset:
                    first = await off_loop.ask(partial(queue.unit, queue.min_offset))
                paths = await off_loop.run(ext.paths_before, topic, queue_id, first[2] if first else 0)
            for path in paths:
                if off_loop.ending or not await self._delete(path):
                    return False
                deleted.append(path)
                await self.off_loop.pause(self.config.delete_consume_queue_files_interval)
            await off_loop.run(ext.drop_empty, topic, queue_id)
        return True

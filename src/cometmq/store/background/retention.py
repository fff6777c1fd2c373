"""Deleting what is old: by age at the hour, by fullness of the disk, on request.

The age of a segment is its file's modification time, as in Apache's broker, held against `SteadyTime`: a
clock that is ahead for a while deletes nothing. Deletion is paced, oldest first, never the last segment.
Queues and index follow the log: their files go when all their records are gone, and the minimum offset of
each queue moves to the first record that still exists. What Apache's broker has kept beside the queues
(queue_ext.py) goes with them.

The order is what keeps a power failure from tearing holes. A segment goes when the queue units of its
records are on the device: from then on they alone know which offsets have been given out. Each deletion is
on the device (its directory synced) before the next one of that directory, so what is left of log or queue
has no gap; and those of queues and index wait for the log's, so every record that comes back after a
failure has its queue still.
"""

from __future__ import annotations

import math
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from cometmq import logs
from cometmq.store.base.files import Reads
from cometmq.store.base.flags import Flag
from cometmq.store.base.off_loop import in_place
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.queue_ext import ExtFiles

if TYPE_CHECKING:
    from cometmq.store.message_store import MessageStore

log = logs.logger(__name__)

_MANUAL_PASSES = 20
_SLICE = 16  # queues looked at per turn of the loop


class Retention:
    """Deletion of one store's expired files. Its methods belong to the loop's thread; at most one
    `log_pass` and one `derived_pass` run at a time."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._ext = ExtFiles(store.disk, store.config.root)
        self._manual = 0
        self._corrected_min = store.log.min_position  # recovery has seen to the queues up to here
        self._derived_min = -1
        self._synced_min = -1
        self._stage = 0
        self.disk_ratio = 0.0
        self.log_ratios: dict[str, float] = {}
        self.queue_ratio = 0.0
        self.index_ratio = 0.0

    def delete_now(self) -> None:
        """The operator's request: the next passes delete expired files whatever the hour."""
        self._manual = _MANUAL_PASSES

    def look_at_everything(self) -> None:
        """The operator's request: the next pass looks at every queue and index file, whether or not the log's
        beginning has moved."""
        self._corrected_min = self._derived_min = -1

    def round(self) -> list[str]:
        """Both passes, in place: for a store without a loop. Returns deleted paths."""
        return in_place(self.log_pass()) + in_place(self.derived_pass())

    # -- fullness ---------------------------------------------------------------------------------

    def _used(self, path: str) -> float:
        """Used share of a partition, its percentage rounded up; -1 if it cannot be read. Any thread."""
        try:
            usage = self._store.disk.usage(path)
        except OSError:
            return -1.0
        whole = usage.used + usage.usable
        return math.ceil(100 * usage.used / whole) / 100 if whole else -1.0

    async def look(self) -> None:
        """Read the fullness of log, queues and index; each may have a disk of its own."""
        store, config = self._store, self._store.config
        used = {path: await store.off_loop.run(self._used, path) for path in config.commit_log_dirs}
        self.log_ratios = used
        self.disk_ratio = min(used.values())  # of several directories the emptiest counts, as in Apache's
        store.log.places.full = {path for path, ratio in used.items() if ratio > self._forced_above}
        self.queue_ratio = await store.off_loop.run(self._used, os.path.join(config.root, "consumequeue"))
        index = os.path.join(config.root, "index")
        self.index_ratio = await store.off_loop.run(
            self._used, index if store.disk.is_dir(index) else config.root
        )

    async def measure(self) -> None:
        """Read the fullness of the disk, and stop or resume writing by it."""
        store, config = self._store, self._store.config
        await self.look()
        fullest = max(self.disk_ratio, self.queue_ratio)
        self._warn(fullest)
        limit = min(max(config.disk_space_warning_level_ratio, 35), 90) / 100
        if fullest > limit:
            if Flag.DISK_FULL not in store.flags.reasons:
                log.error("disk is %d %% full, the store takes no messages", round(fullest * 100))
            store.flags.raise_flag(
                Flag.DISK_FULL, f"the disk is full, CL: {self.disk_ratio:5.2f} CQ: {self.queue_ratio:5.2f} "
                f"INDEX: {self.index_ratio:5.2f}"
            )  # fmt: skip
        elif Flag.DISK_FULL in store.flags.reasons:
            log.warning("disk is %d %% full, the store takes messages again", round(fullest * 100))
            store.flags.clear(Flag.DISK_FULL)

    def _warn(self, fullest: float) -> None:
        """Say once what the fullness of the disk leads to, before sends are refused."""
        stage = (fullest > self._due_above) + (self._forced and fullest > self._forced_above)
        if stage > self._stage:
            log.warning(
                "disk is %d %% full: %s", round(fullest * 100),
                "segments are deleted whatever their age" if stage == 2
                else "expired segments are deleted at any hour",
            )  # fmt: skip
        self._stage = stage

    @property
    def _due_above(self) -> float:
        return min(max(self._store.config.disk_max_used_space_ratio, 10), 95) / 100

    @property
    def _forced_above(self) -> float:
        return min(max(self._store.config.disk_space_clean_forcibly_ratio, 30), 85) / 100

    @property
    def _forced(self) -> bool:
        return self._store.config.clean_file_forcibly_enable

    async def _miss(self) -> None:
        """Notice that somebody has deleted the segment that is written to: what is in it, and what would
        still be written, is gone with the end of this process."""
        store = self._store
        path = store.log.path_of(store.log.segments[-1]) if store.log.segments else ""
        if path and await store.off_loop.run(store.disk.facts, path) is None:
            if Flag.NOT_WRITEABLE not in store.flags.reasons:
                log.error("%s has been deleted, the store takes no messages until it is started again", path)
            store.flags.raise_flag(Flag.NOT_WRITEABLE, f"{path} has been deleted")

    def _due(self) -> bool:
        config = self._store.config
        hour = time.localtime(self._store.clock.time_ms() / 1000).tm_hour
        if any(part.strip().isdigit() and int(part) == hour for part in config.delete_when.split(";")):
            return True
        if any(ratio < 0 or ratio > self._due_above for ratio in (self.disk_ratio, self.queue_ratio)):
            return True
        if self._manual > 0:
            self._manual -= 1
            return True
        return False

    # -- the log ----------------------------------------------------------------------------------

    async def log_pass(self) -> list[str]:
        """Measure the disk, delete the segments that are due, let the queues begin behind them. Returns
        deleted paths."""
        now_ms = self._store.steady.now_ms()
        await self.measure()
        await self._miss()
        deleted = await self._delete_segments(now_ms) if self._due() else []
        await self.correct_minimums()
        return deleted

    async def _delete_segments(self, now_ms: int) -> list[str]:
        """Delete expired segments; any but the last when the disk is dangerously full."""
        store, off_loop = self._store, self._store.off_loop
        config = store.config
        forced = self._forced and max(self.disk_ratio, self.queue_ratio) > self._forced_above
        deleted: list[str] = []
        while len(store.log.segments) > 1 and len(deleted) < config.delete_file_batch_max:
            path = store.log.path_of(store.log.segments[0])
            facts = await off_loop.run(store.disk.facts, path)
            expired = facts is None or facts.modified_ms + config.file_reserved_time * 3_600_000 < now_ms
            if not (expired or forced):
                break
            if deleted:
                await off_loop.pause(store.config.delete_commit_log_files_interval)
            behind = store.log.segments[0] + store.log.segment_size
            if not await store.upkeep.settle_before(behind):
                log.error("%s stays: queues or index cannot be brought onto the device", path)
                break
            if off_loop.ending or not await self._delete(path, log_segment=True):
                break
            deleted.append(path)
            log.info("deleted %s (%s)", path, "expired" if expired else "disk is full")
        return deleted

    async def _delete(self, path: str, *, log_segment: bool = False) -> bool:
        """Unlink one file and make that last. False when something went wrong; the next pass goes on."""
        store = self._store
        try:
            await store.off_loop.run(self._unlink, path)
        except OSError as failure:
            log.error("%s could not be deleted, trying again: %s", path, failure)
            return False
        if log_segment:
            fd = store.log.forget_first()
            if fd >= 0:
                await store.off_loop.run(store.disk.close, fd)
        return await self._sync(os.path.dirname(path), store.log.min_position if log_segment else -1)

    def _unlink(self, path: str) -> None:
        try:
            self._store.disk.unlink(path)
        except FileNotFoundError:
            pass

    async def _sync(self, directory: str, log_min: int = -1) -> bool:
        """Make deletions in a directory last. log_min: where the log begins by them."""
        try:
            await self._store.off_loop.run(self._store.disk.fsync_dir, directory)
        except FileNotFoundError:
            pass  # the queue's topic has just been deleted
        except OSError as failure:
            log.error("deletions in %s may come back after a power failure: %s", directory, failure)
            return False
        self._synced_min = max(self._synced_min, log_min)
        return True

    async def correct_minimums(self) -> None:
        """After the log's beginning has moved: move the queues' minimum offsets."""
        store = self._store
        log_min = store.log.min_position
        if log_min <= self._corrected_min:
            return
        for number, queue in enumerate(list(store.queues)):
            if number % _SLICE == _SLICE - 1:
                await store.off_loop.pause(0)
            await store.off_loop.ask(partial(queue.correct_min, log_min))
        self._corrected_min = log_min

    # -- queues and index -------------------------------------------------------------------------

    async def derived_pass(self) -> list[str]:
        """Delete queue and index files whose records are gone, if the log's beginning has moved since this
        was last done. Returns deleted paths."""
        store = self._store
        log_min = store.log.min_position
        if log_min <= self._derived_min:
            return []
        if self._synced_min < log_min:
            for directory in store.config.commit_log_dirs:
                if not await self._sync(directory):
                    return []
            self._synced_min = log_min
        deleted: list[str] = []
        while not store.off_loop.ending and (path := store.index.forget_expired(log_min)) is not None:
            if not await self._delete(path):
                return deleted
            deleted.append(path)
            await self._pause()
        for number, queue in enumerate(list(store.queues)):
            if number % _SLICE == _SLICE - 1:
                await store.off_loop.pause(0)
            if store.off_loop.ending or not await self._shorten(queue, log_min, deleted):
                return deleted
        if not await self._shorten_ext(deleted):
            return deleted
        self._derived_min = log_min
        return deleted

    async def _pause(self) -> None:
        await self._store.off_loop.pause(self._store.config.delete_consume_queue_files_interval)

    async def _shorten(self, queue: ConsumeQueue, log_min: int, deleted: list[str]) -> bool:
        """Delete the expired files of one queue. False when something went wrong or the store stops."""
        off_loop = self._store.off_loop
        for path in await off_loop.ask(partial(queue.expired_files, log_min)):
            if off_loop.ending:
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
            await self._pause()
        return True

    async def _shorten_ext(self, deleted: list[str]) -> bool:
        """Delete the ext files before the first unit of their queue, and those of queues that are gone. False
        when something went wrong or the store stops."""
        try:
            return await self._shorten_ext_of_all(deleted)
        except OSError as failure:
            log.error("files of consumequeue_ext could not be deleted, trying again: %s", failure)
            return False

    async def _shorten_ext_of_all(self, deleted: list[str]) -> bool:
        queues, off_loop, ext = self._store.queues, self._store.off_loop, self._ext
        for topic, queue_id in await off_loop.run(ext.queues):
            queue = queues.find(topic, queue_id)
            if queue is None or not queue.max_offset:
                paths = await off_loop.run(ext.paths, topic, queue_id)
            else:
                first = await off_loop.ask(partial(_first_unit, queue))
                paths = await off_loop.run(ext.paths_before, topic, queue_id, first[2] if first else 0)
            for path in paths:
                if off_loop.ending or not await self._delete(path):
                    return False
                deleted.append(path)
                await self._pause()
            await off_loop.run(ext.drop_empty, topic, queue_id)
        return True


def _first_unit(queue: ConsumeQueue, reads: Reads) -> tuple[int, int, int] | None:
    return queue.unit(queue.min_offset, reads) if queue.min_offset < queue.max_offset else None

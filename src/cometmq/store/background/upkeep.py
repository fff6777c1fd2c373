"""What a store does beside answering: timed flushes, writing of queues and index, checkpoint, reservations,
retention.

Time on the loop is bounded: queues are written a few hundred at a time, everything that waits for the
device runs in one of two threads (one for the log's syncs, one for the rest).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from cometmq import logs
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.flags import Flag
from cometmq.store.log.syncer import ChildSyncer, ThreadSyncer
from cometmq.store.log.zero_ahead import ZeroAhead

if TYPE_CHECKING:
    from cometmq.store.message_store import MessageStore

log = logs.logger(__name__)

_EAGER_LOOK = 4096
_MANY_FILES = 256  # from here on one call for the whole file system is cheaper than one a file
_SLICES_A_ROUND = 2  # so ten thousand busy queues are written every 20 s, a few hundred every second
_MOST_BEHIND = 300_000  # records; walked in a second or two
_MOST_BYTES_BEHIND = 384 << 20
_SLICE = 256  # queues written per turn of the loop
_RESERVE_AGAIN_S = 10.0  # after a failed reservation, unless retention has made room


def sync_paths(disk: Disk, paths: Sequence[str], directories: Sequence[str] = ()) -> None:
    """Bring files, and names in directories, onto the device; what is gone is fine. Raises OSError. For a
    thread."""
    if len(paths) > _MANY_FILES and _synced_at_once(disk, paths):
        return
    for directory in directories:
        if disk.is_dir(directory):
            try:
                disk.fsync_dir(directory)
            except FileNotFoundError:
                continue  # its topic was deleted just now
    for path in paths:
        try:
            fd = disk.open(path)
        except FileNotFoundError:
            continue
        try:
            disk.fdatasync(fd)
        finally:
            disk.close(fd)


def _synced_at_once(disk: Disk, paths: Sequence[str]) -> bool:
    """Sync the whole file system of these files, by a directory of theirs that is still there."""
    for path in paths:
        try:
            return disk.sync_filesystem(os.path.dirname(path))
        except FileNotFoundError:
            continue  # its topic was deleted
    return False


class _Covered(NamedTuple):
    """What a round of writing brings into the files of queues and index: all records before a log position,
    the last of them at a position and of a time; where the queues end with them, as in a `Mark`; and how
    often the clock had stepped back then."""

    position: int
    last: int
    queue_ends: int
    stored_ms: int
    step_backs: int


class Upkeep:
    """Background work of one store. Methods belong to the loop's thread."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sync_pool: ThreadPoolExecutor | None = None
        self._syncer: ThreadSyncer | None = None
        self._child: ChildSyncer | None = None
        self._zeros: ZeroAhead | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._job: asyncio.Task[None] | None = None
        self._passes: dict[str, asyncio.Task[object]] = {}
        self._thorough_at = store.clock.monotonic()
        self._unwritten = 0  # records since queues were last looked over for large windows
        self._look_at = _EAGER_LOOK  # so many of them are due for the next look
        self._behind = 0  # records dispatched since the checkpoint was last moved
        self._dispatched = store.log.end  # log position behind the last of them
        known = store.checkpoint.mark
        self._last = store.recovered.last_position if store.recovered.records else known.last if known else -1
        self._marked = store.log.end  # position of the last mark, or of the last attempt
        self._step_backs = 0
        self._reserve_again_at = 0.0  # monotonic time; after a failure
        self._short_of = -1  # the segment whose successor could not be reserved, as the log says
        self._lost: OSError | None = None  # why the checkpoint stays where it is
        self._unsynced_files: set[str] = set()  # of queues and index, taken for a sync that has not succeeded
        self._unsynced_names: set[str] = set()  # likewise directories
        self._derived_until = 0  # queues and index are on the device for all records before this position

    # -- starting, stopping -----------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        store = self._store
        self._loop = loop
        self._sync_pool = ThreadPoolExecutor(1, "cometmq-flush")
        self._pool = ThreadPoolExecutor(1, "cometmq-store")
        self._syncer = ThreadSyncer(store.disk, loop, self._sync_pool)
        self.configure()
        self._every(lambda config: config.flush_interval_commit_log, store.flusher.timed)
        self._every(lambda config: config.flush_interval_consume_queue, self._derived_round)
        self._every(lambda config: config.clean_resource_interval, self._retention_round)
        store.off_loop.attach(loop, self._pool)
        self._begin("fullness", store.retention.look)

    def configure(self) -> None:
        """Take over the flush mode of the store's settings: under SYNC_FLUSH, where each send waits for a
        sync, a process makes them."""
        store = self._store
        if self._loop is None or self._syncer is None:
            return
        if store.config.sync_flush and self._child is None and store.disk.lends_descriptors:
            self._child = ChildSyncer(store.disk, self._loop, self._syncer)
            assert self._sync_pool is not None
            self._zeros = ZeroAhead(store.log, store.disk, self._sync_pool)
            store.log.before_write = self._zeros.let_pass
        store.flusher.attach(self._loop, self._child or self._syncer)

    def _every(self, interval: Callable[[StoreConfig], int], work: object) -> None:
        """Run `work()` every so many ms of the settings in force, the first time after one interval. A
        failure is logged, not final."""
        loop = self._loop
        assert loop is not None
        assert callable(work)
        slot = len(self._timers)

        def turn() -> None:
            try:
                work()
            except Exception:
                log.exception("upkeep of the store failed, trying again in %d ms", self._wait_ms(interval))
            if self._loop is not None:
                self._timers[slot] = loop.call_later(self._wait_ms(interval) / 1000, turn)

        self._timers.append(loop.call_later(self._wait_ms(interval) / 1000, turn))

    def _wait_ms(self, interval: Callable[[StoreConfig], int]) -> int:
        return max(1, interval(self._store.config))

    def _retention_round(self) -> None:
        store = self._store
        self._begin("log", self._retire)
        self._begin("queues", store.retention.derived_pass)
        self._begin("topics", store.topic_retention.topic_pass)

    async def _retire(self) -> None:
        if await self._store.retention.log_pass():
            self._reserve_again_at = 0.0
        self._begin("queues", self._store.retention.derived_pass)

    async def retire_now(self, *, log_too: bool) -> None:
        """Do what retention has to do at once, and come back when the log is done; files of queues and index
        go in the background, at their own pace."""
        retention = self._store.retention
        if not log_too:
            await retention.correct_minimums()
            self._begin("queues", retention.derived_pass)
            return
        running = self._passes.get("log")
        if running is not None:
            await asyncio.wait([running])
        self._begin("log", self._retire)
        if "log" in self._passes:
            await asyncio.wait([self._passes["log"]])

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start a pass of retention, unless the one before is still at work."""
        if self._loop is not None and name not in self._passes:
            task = self._passes[name] = self._loop.create_task(work())
            task.add_done_callback(lambda task: self._pass_done(name, task))

    def _pass_done(self, name: str, task: asyncio.Task[object]) -> None:
        self._passes.pop(name, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("retention (%s) failed, trying again", name, exc_info=task.exception())

    async def stop(self) -> None:
        """End the background work, leaving everything to `settle_all`."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._loop = None
        self._store.off_loop.end()
        jobs = [*self._passes.values()] + ([self._job] if self._job is not None else [])
        if jobs:
            await asyncio.gather(*jobs, return_exceptions=True)
        self._store.off_loop.detach()
        await self._store.flusher.detach()
        self._shut_pools()

    def abandon(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._loop = None
        for job in [*self._passes.values()] + ([self._job] if self._job is not None else []):
            job.cancel()
        self._store.off_loop.detach()
        self._store.flusher.abandon()
        self._shut_pools()

    def _shut_pools(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
        for pool in (self._sync_pool, self._pool):
            if pool is not None:
                pool.shutdown(wait=True)
        self._sync_pool = self._pool = None
        self._zeros = self._store.log.before_write = None

    # -- after a commit ---------------------------------------------------------------------------

    def reserve_ahead(self) -> None:
        """Have the next segment reserved when the present one is half full."""
        commit_log = self._store.log
        failure = commit_log.reservation_done()
        if failure is not None:
            if self._short_of != commit_log.segment_base:
                self._short_of = commit_log.segment_base
                log.warning("next segment could not be reserved, trying again: %s", failure)
            self._reserve_again_at = self._store.clock.monotonic() + _RESERVE_AGAIN_S
        if self._pool is None:
            return
        base = commit_log.wants_reservation()
        if base is None:
            return
        if not self._reserve_again_at or self._store.clock.monotonic() >= self._reserve_again_at:
            future: Future[int] = self._pool.submit(commit_log.reserve_file, base)
            commit_log.reservation_started(base, future)

    def after_dispatch(self, count: int, last: int, end: int) -> None:
        """`count` records became visible, the last of them at log positions `last` to `end`: keep windows and
        waiting keys small, however long the write interval is."""
        store = self._store
        self._unwritten += count
        self._behind += count
        self._last = last
        self._dispatched = end
        if self._zeros is not None and store.config.sync_flush:
            self._zeros.look()
        if self._unwritten < self._look_at and not store.index.has_batch_waiting():
            return
        part = Flag.WRITE_INDEX_ERROR
        try:
            if store.index.has_batch_waiting():
                store.index.index_waiting_keys()
            part = Flag.WRITE_LOGICS_ERROR
            if self._unwritten >= self._look_at:
                self._unwritten = 0
                store.queues.write_eager()
                self._look_at = max(_EAGER_LOOK, 8 * store.queues.waiting)
        except OSError as failure:
            self._derived_failed(part, failure)

    # -- queues, index, checkpoint ----------------------------------------------------------------

    def _derived_round(self) -> None:
        """Every flushIntervalConsumeQueue: write what is in memory, and every thorough interval make it
        durable."""
        if self._job is None and self._loop is not None:
            self._job = self._loop.create_task(self._write_derived())
            self._job.add_done_callback(self._job_done)

    def _job_done(self, job: asyncio.Task[None]) -> None:
        self._job = None
        if not job.cancelled() and job.exception() is not None:
            log.error("writing queues and index failed", exc_info=job.exception())

    async def _write_derived(self) -> None:
        store = self._store
        now = store.clock.monotonic()
        interval = store.config.flush_consume_queue_thorough_interval
        # A busy store moves its checkpoint more often: what lies behind it is what a recovery must walk.
        thorough = (
            (now - self._thorough_at) * 1000 >= interval
            or self._behind >= _MOST_BEHIND
            or self._dispatched - self._marked >= _MOST_BYTES_BEHIND
        )
        covered = _Covered(
            self._dispatched,
            self._last,
            self._queue_ends() if thorough else 0,
            store.dispatched_ms,
            self._step_backs,
        )
        behind = self._behind
        part = Flag.WRITE_LOGICS_ERROR
        try:
            store.queues.write_eager()
            for _ in range(len(store.queues) // _SLICE + 1 if thorough else _SLICES_A_ROUND):
                if store.queues.write_dirty(_SLICE):
                    break
                await asyncio.sleep(0)  # other work of the loop between two slices
            part = Flag.WRITE_INDEX_ERROR
            store.index.write()
        except OSError as failure:
            self._derived_failed(part, failure)
            return
        self._derived_healed()
        if thorough:
            self._thorough_at = now
            self._behind -= behind
            self._marked = covered.position
            await self._make_durable(covered)

    def _queue_ends(self) -> int:
        """For a `Mark`. Unknown during a deletion, which is noted for the log as it was before: a recovery
        would miss queues that it does not know to be deleted since."""
        return 0 if self._store.deleted.under_way else self._store.queues.offset_sum

    def _derived_failed(self, part: Flag, failure: OSError) -> None:
        what = "the index" if part is Flag.WRITE_INDEX_ERROR else "consume queues"
        log.error("%s could not be written, trying again: %s", what, failure)
        self._store.flags.raise_flag(part, f"{what} could not be written: {failure.strerror or failure}")

    def _derived_healed(self) -> None:
        flags = self._store.flags
        if flags.reasons.keys() & {Flag.WRITE_LOGICS_ERROR, Flag.WRITE_INDEX_ERROR}:
            log.warning("queues and index can be written again")
            flags.clear(Flag.WRITE_LOGICS_ERROR)
            flags.clear(Flag.WRITE_INDEX_ERROR)

    async def _make_durable(self, covered: _Covered) -> None:
        """Sync log, queues and index in the thread, then move the checkpoint behind what they cover."""
        store, loop, pool = self._store, self._loop, self._pool
        if loop is None or pool is None or self._lost is not None or store.flusher.failure is not None:
            return
        done: asyncio.Future[bool] = loop.create_future()
        try:
            for _ in store.index.write_slots():
                await asyncio.sleep(0)
            store.index.write()
        except OSError as failure:
            self._derived_failed(Flag.WRITE_INDEX_ERROR, failure)
            return
        mark = store.index.mark(covered.position, covered.last, covered.queue_ends)
        full_ms = store.index.full_until_ms
        work = self._take_unsynced()
        store.flusher.wait_for(store.log.end, lambda ok: None if done.done() else done.set_result(ok))
        if not await done:
            return  # too slow: `work` is left to the next round; or failed: the checkpoint never moves again
        try:
            await loop.run_in_executor(pool, sync_paths, store.disk, *work)
        except OSError as failure:
            self._sync_failed(failure)
            return
        self._all_synced()
        self._derived_until = covered.position
        if covered.step_backs == self._step_backs:
            self._raise_checkpoint(covered.stored_ms, full_ms)
        store.checkpoint.mark = mark
        await loop.run_in_executor(pool, store.checkpoint.flush)

    async def settle_before(self, position: int) -> bool:
        """Bring queues and index onto the device for all records before a position of the log, if they are
        not there yet. False if that cannot be done."""
        if self._derived_until < position and not self._store.off_loop.ending:
            if self._loop is None:
                self.settle_all(slots=False)
            else:
                if self._job is not None:
                    await asyncio.wait([self._job])
                self._behind = _MOST_BEHIND
                self._derived_round()
                if self._job is not None:
                    await asyncio.wait([self._job])
        return self._derived_until >= position

    def _take_unsynced(self) -> tuple[list[str], list[str]]:
        """(files, directories) of queues and index that the next sync must bring onto the device; they stay
        so until `_all_synced`."""
        for paths, directories in (self._store.queues.take_unsynced(), self._store.index.take_unsynced()):
            self._unsynced_files.update(paths)
            self._unsynced_names.update(directories)
        return sorted(self._unsynced_files), sorted(self._unsynced_names)

    def _all_synced(self) -> None:
        """What was taken last is on the device."""
        self._unsynced_files.clear()
        self._unsynced_names.clear()

    def _sync_failed(self, failure: OSError) -> None:
        """What a failed sync leaves is unknown, so the checkpoint stays where it is: the next start will
        compute queues and index anew from there."""
        if self._lost is None:
            log.error("queues or index could not be synced, the checkpoint stays where it is: %s", failure)
        self._lost = failure

    def clock_stepped_back(self, now_ms: int) -> None:
        """New records are stamped with times that the checkpoint already covers: lower it before a
        recovery takes them for durable."""
        store, checkpoint = self._store, self._store.checkpoint
        self._step_backs += 1
        store.flusher.flushed_ms = min(store.flusher.flushed_ms, now_ms)
        if max(checkpoint.physic_ms, checkpoint.logics_ms) <= now_ms:
            return
        log.warning("the clock stepped back to %d ms, the checkpoint follows", now_ms)
        checkpoint.physic_ms = min(checkpoint.physic_ms, now_ms)
        checkpoint.logics_ms = min(checkpoint.logics_ms, now_ms)
        try:
            checkpoint.flush()
        except OSError as failure:
            log.error("the checkpoint could not be lowered: %s", failure)

    def _raise_checkpoint(self, dispatched_ms: int, full_ms: int) -> None:
        checkpoint = self._store.checkpoint
        checkpoint.physic_ms = max(checkpoint.physic_ms, self._store.flusher.flushed_ms)
        checkpoint.logics_ms = max(checkpoint.logics_ms, dispatched_ms)
        checkpoint.index_ms = max(checkpoint.index_ms, full_ms)

    def settle_all(self, *, slots: bool = True) -> bool:
        """Write and sync everything in place, checkpoint last. False if something could not be written."""
        store = self._store
        store.flusher.flush_now()
        if store.flusher.failure is not None:
            return False
        part = Flag.WRITE_LOGICS_ERROR
        try:
            store.queues.write_dirty()
            store.floors.save()
            part = Flag.WRITE_INDEX_ERROR
            store.index.write(slots=slots)
        except OSError as failure:
            self._derived_failed(part, failure)
            return False
        self._derived_healed()
        if self._lost is None:
            try:
                sync_paths(store.disk, *self._take_unsynced())
                self._all_synced()
            except OSError as failure:
                self._sync_failed(failure)
        if self._lost is not None:
            return False
        self._derived_until = self._dispatched
        try:
            self._raise_checkpoint(store.dispatched_ms, store.index.full_until_ms)
            if store.checkpoint.mark is not None or self._behind or store.recovered.rebuilt:
                store.checkpoint.mark = store.index.mark(store.log.end, self._last, self._queue_ends())
            store.checkpoint.flush()
            self._marked = store.log.end
        except OSError as failure:
            log.error("the checkpoint could not be written: %s", failure)
            return False
        return True

    def settle_recovery(self) -> None:
        """After an unclean stop: make what recovery found durable before anything is built on it. Raises
        OSError."""
        store = self._store
        found = store.recovered
        if not found.rebuilt:
            self._derived_until = store.log.end
            return
        size = store.log.segment_size
        paths = [store.log.path_of(base) for base in store.log.segments if base + size > found.start]
        sync_paths(store.disk, paths, store.config.commit_log_dirs)
        store.flusher.flushed_ms = found.last_store_ms
        if not self.settle_all(slots=False):
            raise OSError("the recovered store could not be written")

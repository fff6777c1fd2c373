"""Starts and stops the background work of a store: timers, threads, and the process for SYNC_FLUSH."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cometmq.periodic import Periodic
from cometmq.store.background.derived_writer import DerivedWriter
from cometmq.store.background.fullness import Fullness
from cometmq.store.background.retention import Retention
from cometmq.store.background.space_ahead import SpaceAhead, ZeroAhead
from cometmq.store.background.tasks import BackgroundTasks, Work
from cometmq.store.background.topic_retention import TopicRetention
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.log.syncer import ChildSyncer, ThreadSyncer

if TYPE_CHECKING:
    from cometmq.store.tiered.uploads import TieredUploads

_SAVE_RAFT_LOG_INTERVAL_MS = 3000  # Interval for saving the state of the raft log, as in DLedger


@dataclass(eq=False, kw_only=True)
class Upkeep:
    """The background work of one store. For the loop thread only.

    One thread syncs the log. Another thread does all other work that waits for a disk.
    """

    disk: Disk
    config: StoreConfig
    executor: StoreExecutor
    tasks: BackgroundTasks
    commit_log: CommitLog
    flusher: LogFlusher
    space: SpaceAhead
    writer: DerivedWriter
    fullness: Fullness
    retention: Retention
    topic_retention: TopicRetention
    save_raft_log: Work | None = None
    """A function that saves the state of the raft log; None unless in raft mode."""
    tiered: TieredUploads | None = None

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pools: list[ThreadPoolExecutor] = []
        self._syncer: ThreadSyncer | None = None
        self._timers: list[Periodic] = []
        self.sync_process: ChildSyncer | None = None
        """The process that syncs the log if sends wait for syncs (SYNC_FLUSH); otherwise None."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, use `loop` and threads for flushes, reservations and deletions."""
        self._loop = loop
        self._pools = [ThreadPoolExecutor(1, "cometmq-flush"), ThreadPoolExecutor(1, "cometmq-store")]
        sync_pool, pool = self._pools
        self._syncer = ThreadSyncer(self.disk, loop, sync_pool)
        self.configure(self.config)
        self.tasks.attach(loop)
        self.space.attach(pool)
        self.executor.attach(loop, pool)
        if self.tiered is not None:
            self.tiered.attach(loop)
        self._every(lambda: self.config.flush_interval_commit_log, self.flusher.timed)
        self._every(lambda: self.config.flush_interval_consume_queue, self.writer.begin_cycle)
        self._every(lambda: self.config.clean_resource_interval, self._begin_retention)
        if self.save_raft_log is not None:
            name, save = "saving the end of the raft log", self.save_raft_log
            self._every(lambda: _SAVE_RAFT_LOG_INTERVAL_MS, lambda: self.tasks.begin(name, save))
        self.tasks.begin("measuring the disks", self.fullness.read_usage)

    def _every(self, interval_ms: Callable[[], int], work: Callable[[], object]) -> None:
        assert self._loop is not None
        timer = Periodic(self._loop, lambda: interval_ms() / 1000, work, name="maintenance of the store")
        timer.start()
        self._timers.append(timer)

    def _begin_retention(self) -> None:
        self.retention.begin()
        self.topic_retention.begin()
        if self.tiered is not None:
            self.tasks.begin("tiered storage", self.tiered.cycle)

    def configure(self, config: StoreConfig) -> None:
        """Apply the settings of the store: those of its start, and later each changed version of them."""
        self.config = config
        if self._loop is None or self._syncer is None:
            return
        if config.sync_flush and self.sync_process is None and self.disk.lends_descriptors:
            self.sync_process = ChildSyncer(self.disk, self._loop, self._syncer)
            self.space.add_zeros(ZeroAhead(self.commit_log, self.disk, self._pools[0]))
        self.flusher.attach(self._loop, self.sync_process or self._syncer)

    async def stop(self) -> None:
        """Stop tasks, executor, flusher and threads, in this order. The caller then calls `make_durable`."""
        self._cancel_timers()
        self.executor.end()
        if self.tiered is not None:
            self.tiered.end()
        await self.tasks.stop()
        self.executor.detach()
        await self.flusher.detach()
        self._shut_pools()

    def abandon(self) -> None:
        """Stop the background work immediately, without writing anything."""
        self._cancel_timers()
        self.tasks.cancel()
        self.executor.detach()
        self.flusher.abandon()
        self._shut_pools()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._loop = None

    def _shut_pools(self) -> None:
        if self.tiered is not None:
            self.tiered.close()
        if self.sync_process is not None:
            self.sync_process.close()
            self.sync_process = None
        for pool in self._pools:
            pool.shutdown(wait=True)
        self._pools.clear()
        self.space.detach()

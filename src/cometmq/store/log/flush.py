"""The flush of the commit log: group commit for SYNC_FLUSH, a timed flush for ASYNC_FLUSH.

One sync runs at a time, in the background (see syncer.py). Senders that arrive during a sync share the next
one, which begins after the loop has handled the requests that have already arrived. Waiters are notified in
order. A failed sync is final: the kernel may have dropped the pages, so a later success would prove nothing.
Nothing is acknowledged after a failure, and the store is read-only until it is started again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cometmq import logs
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.syncer import ChildSyncer, ThreadSyncer, Unsynced

log = logs.logger(__name__)

Syncer = ThreadSyncer | ChildSyncer
Waiter = Callable[[bool], None]
_PAGE = 4096
# The maximum number of loop iterations for which a sync waits for more senders. The first iteration without a
# new sender ends the wait. Waiting saves up to 8 % of CPU time.
_TURNS = 4


@dataclass(eq=False)
class LogFlusher:
    """Flushes one commit log. All methods must be called on the loop.

    When settings change, `config` is replaced.
    """

    commit_log: CommitLog
    disk: Disk
    clock: Clock
    config: StoreConfig

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._syncer: Syncer | None = None
        self._waiters: deque[tuple[int, Waiter, float]] = deque()
        self._syncing = False
        self._sync_began: float | None = None  # Start time of the sync in progress; None if there is none
        self._wanted = False
        self._sync_ended: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._thorough_at = self.clock.monotonic()
        self.flushed = self.commit_log.end  # Log position up to which everything is synced to disk
        self.flushed_ms = 0  # Store time, in ms, of the last record before the log position `flushed`
        self.written_ms = 0  # Store time, in ms, of the last written record
        self.failure: OSError | None = None
        self.syncs = 0  # Number of syncs finished since the start; `synced_s` is their total duration
        self.synced_s = 0.0
        self.on_flushed: list[Callable[[int], object]] = []
        """Functions called in order after each sync, with the end of the durable data."""
        self.on_failure: Callable[[OSError], None] = lambda _failure: None

    def attach(self, loop: asyncio.AbstractEventLoop, syncer: Syncer) -> None:
        """Let `syncer` sync in the background, until `detach`. Without it, each sync blocks the loop."""
        self._loop = loop
        self._syncer = syncer

    async def detach(self) -> None:
        """Wait for the sync in progress, and stop syncing in the background: later syncs block the loop."""
        if self._syncing and self._loop is not None:
            if self._sync_ended is None:
                self._sync_ended = self._loop.create_future()
            # `shield`: other coroutines may wait for the same future, so a cancellation must not reach it.
            await asyncio.shield(self._sync_ended)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop = self._syncer = None

    async def idle(self) -> None:
        """Wait until no sync is in progress or scheduled."""
        while self._syncing and self._loop is not None:
            if self._idle is None:
                self._idle = self._loop.create_future()
            await asyncio.shield(self._idle)

    def _end_sync(self) -> None:
        self._syncing = False
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def abandon(self) -> None:
        """Simulate a crash: forget the callbacks that wait for a sync, without calling them."""
        self._waiters.clear()
        self._wanted = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- requests --------------------------------------------------------------------------------

    def wait_for(self, position: int, waiter: Waiter) -> None:
        """Call `waiter` with True once the log is durable up to `position`, or with False after a failure."""
        if self.failure is not None:
            waiter(False)
        elif position <= self.flushed:
            waiter(True)
        else:
            deadline = self.clock.monotonic() + self.config.sync_flush_timeout / 1000
            self._waiters.append((position, waiter, deadline))
            self.request()
            if self._timer is None and self._loop is not None:
                self._timer = self._loop.call_later(self.config.sync_flush_timeout / 1000, self._expire)

    def request(self) -> None:
        """Sync everything that has been written, either immediately or after the sync in progress."""
        if self.failure is not None:
            return
        if self._syncer is None:
            self.flush_now()
        elif self._syncing:
            self._wanted = True
        elif self.flushed < self.commit_log.end:
            self._start(self._syncer)

    def timed(self) -> None:
        """Sync if many pages are dirty, a segment is full, or flushCommitLogThoroughInterval has elapsed."""
        dirty = self.commit_log.end - self.flushed
        if not dirty:
            return
        now = self.clock.monotonic()
        thorough = (now - self._thorough_at) * 1000 >= self.config.flush_commit_log_thorough_interval
        full = self.flushed < self.commit_log.segment_base
        if thorough or full or dirty >= self.config.flush_commit_log_least_pages * _PAGE:
            self._thorough_at = now
            self.request()

    # -- lag of the device -----------------------------------------------------------------------

    @property
    def syncing_s(self) -> float:
        """The duration, in seconds, of the sync in progress; 0.0 if none is."""
        return 0.0 if self._sync_began is None else self.clock.monotonic() - self._sync_began

    @property
    def unflushed(self) -> int:
        """The number of bytes of the log that are not synced to disk; 0 after a failure (see `failure`)."""
        return 0 if self.failure is not None else self.commit_log.end - self.flushed

    # -- execution -------------------------------------------------------------------------------

    def flush_now(self) -> None:
        """Sync on the calling thread. A failure is not raised, but recorded as after a background sync."""
        if self.failure is not None or self.flushed >= self.commit_log.end:
            return
        end, end_ms = self.commit_log.end, self.written_ms
        segments = self.commit_log.segments_to_sync()
        try:
            for segment in segments:
                self.disk.fdatasync(segment.fd)
        except OSError as failure:
            self._fail(failure)
            return
        self._succeed(end, end_ms, segments)

    def _start(self, syncer: Syncer) -> None:
        self._syncing = True
        self._sync_began = self.clock.monotonic()
        self._wanted = False
        end, end_ms = self.commit_log.end, self.written_ms
        segments = self.commit_log.segments_to_sync()
        syncer.sync(segments, lambda failure: self._finished(end, end_ms, segments, failure))

    def _finished(self, end: int, end_ms: int, segments: list[Unsynced], failure: OSError | None) -> None:
        self._end_sync()
        self.syncs += 1
        self.synced_s += self.syncing_s
        self._sync_began = None
        if self._sync_ended is not None:
            self._sync_ended.set_result(None)
            self._sync_ended = self._loop = self._syncer = None
        if failure is not None:
            self._fail(failure)
            return
        self._succeed(end, end_ms, segments)
        if (self._wanted or self._waiters) and self.flushed < self.commit_log.end:
            self._follow()

    def _follow(self) -> None:
        """Begin the next sync after a few loop iterations, so that more senders can share it."""
        if self._loop is None:
            self.flush_now()
        else:
            self._syncing = True
            self._loop.call_soon(self._wait_for_more, self.commit_log.end, _TURNS)

    def _wait_for_more(self, end: int, left: int) -> None:
        if self._syncer is None or not (self._wanted or self._waiters or self._sync_ended):
            self._end_sync()
        elif left and (left == _TURNS or self.commit_log.end != end):
            assert self._loop is not None
            self._loop.call_soon(self._wait_for_more, self.commit_log.end, left - 1)
        else:
            self._start(self._syncer)

    def _succeed(self, end: int, end_ms: int, segments: list[Unsynced]) -> None:
        self.flushed = max(self.flushed, end)
        self.flushed_ms = max(self.flushed_ms, end_ms)
        self.commit_log.synced(segments, end)
        waiters = self._waiters
        while waiters and waiters[0][0] <= end:
            _answer(waiters.popleft()[1], True)
        for callback in self.on_flushed:
            callback(end)

    def _fail(self, failure: OSError) -> None:
        self.failure = failure
        log.critical("commit log could not be flushed, the store is read-only from now on: %s", failure)
        self.on_failure(failure)
        waiters, self._waiters = self._waiters, deque()
        for _, waiter, _ in waiters:
            _answer(waiter, False)

    def _expire(self) -> None:
        self._timer = None
        now = self.clock.monotonic()
        waiters = self._waiters
        while waiters and waiters[0][2] <= now:
            _answer(waiters.popleft()[1], False)
        if waiters and self._loop is not None:
            self._timer = self._loop.call_later(max(0.001, waiters[0][2] - now), self._expire)


def _answer(waiter: Waiter, ok: bool) -> None:
    try:
        waiter(ok)
    except Exception:
        # An exception in one callback must not prevent the others
        log.exception("a callback after a flush failed")

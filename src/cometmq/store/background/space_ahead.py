"""Prepares space in the commit log before records need it: it reserves segments and writes zeros.

Under SYNC_FLUSH, a thread writes zeros to a segment well before the records, so that the sync of the records
need not change the state of reserved space in the file system's journal, which takes twice the time
(docs/store.md, Threads and processes that sync). Reserved space reads as zeros anyway.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from cometmq import logs
from cometmq.store.base.clock import Clock
from cometmq.store.base.disk import Disk, opened, write_all
from cometmq.store.log.commit_log import CommitLog

log = logs.logger(__name__)

# Pause after a failed reservation of a segment, in seconds. It ends early if retention frees space.
_RESERVE_RETRY_INTERVAL_S = 10.0
# Bytes of zeros per write. The number is small, because the next sync of the log must write these bytes, too.
PART = 512 << 10
# The minimum distance, in bytes, from the end of the log to the range to which zeros are written next. It is
# large, so that the log seldom reaches that range before the zeros are written.
MARGIN = 16 << 20
AHEAD = 32 << 20  # Maximum distance, in bytes, between the end of the log and the zeros written ahead
_PAGE = 4096


class ZeroAhead:
    """Writes zeros to a log's newest segment, beyond the end of the log. For the loop thread only."""

    def __init__(self, commit_log: CommitLog, disk: Disk, pool: ThreadPoolExecutor) -> None:
        self._log = commit_log
        self._disk = disk
        self._pool = pool
        self._zeros = bytes(PART)
        self._start = self._stop = 0  # Begin and end, in the log, of the current or last write of zeros
        self._task: Future[None] | None = None

    def write_next(self) -> None:
        """Start to write the next PART bytes of zeros, unless a write is running or there is no room."""
        commit_log = self._log
        if self._task is not None:
            if not self._task.done():
                return
            failure = self._task.exception()
            self._task = None
            if failure is not None:
                # A warning suffices: syncs are slower in a segment without zeros, but work. Since `_stop` is
                # now the end of the segment, no more zeros are written to this segment.
                log.warning("the next part of the log could not be allocated: %s", failure)
                self._stop = commit_log.limit
        start = max(self._stop, commit_log.next + MARGIN)
        start += -start % _PAGE
        if commit_log.segment_base < 0 or start + PART > commit_log.limit or start - commit_log.next > AHEAD:
            return
        self._start, self._stop = start, start + PART
        path = commit_log.path_of(commit_log.segment_base)
        self._task = self._pool.submit(self._write, path, start - commit_log.segment_base)

    def _write(self, path: str, offset: int) -> None:
        with opened(self._disk, path) as fd:
            write_all(self._disk, fd, self._zeros, offset)

    def wait_for_zeros(self, stop: int) -> None:
        """Wait for a running write of zeros if the log's next write, up to `stop`, reaches its range."""
        if self._task is not None and stop > self._start:
            self._task.exception()  # Waits until the task ends; `write_next` logs a failure


@dataclass(eq=False)
class SpaceAhead:
    """Reserves log segments, and has zeros written to them, in the threads of an executor.

    For the loop thread only. Until `attach` is called, nothing is reserved.
    """

    commit_log: CommitLog
    clock: Clock

    def __post_init__(self) -> None:
        self._pool: Executor | None = None
        self._zeros: ZeroAhead | None = None
        self._retry_at = 0.0  # Earliest time (monotonic clock) of the next reservation after a failed one
        # Log position at which the newest segment began when a failed reservation was last logged. Only one
        # failure is logged per segment.
        self._unreserved_segment = -1

    def attach(self, pool: Executor) -> None:
        self._pool = pool

    def add_zeros(self, zeros: ZeroAhead) -> None:
        """From now on, write zeros ahead, and let the log wait where it reaches a range being written."""
        self._zeros = zeros
        self.commit_log.before_write = zeros.wait_for_zeros

    def detach(self) -> None:
        self._pool = self._zeros = self.commit_log.before_write = None

    def reserve(self) -> None:
        """Reserve the next segment in the executor once the current one is half full."""
        failure = self.commit_log.reservation_done()
        if failure is not None:
            if self._unreserved_segment != self.commit_log.segment_base:
                self._unreserved_segment = self.commit_log.segment_base
                log.warning("the next segment could not be allocated, trying again: %s", failure)
            self._retry_at = self.clock.monotonic() + _RESERVE_RETRY_INTERVAL_S
        if self._pool is None:
            return
        base = self.commit_log.segment_to_reserve()
        if base is not None and (not self._retry_at or self.clock.monotonic() >= self._retry_at):
            self.commit_log.reservation_started(base, self._pool.submit(self.commit_log.reserve_file, base))

    def retry_reservation(self) -> None:
        """Allow a failed reservation to be repeated immediately, because deleted files have freed space."""
        self._retry_at = 0.0

    def write_zeros(self) -> None:
        """Start to write zeros beyond the end of the log, if `add_zeros` was called (SYNC_FLUSH only)."""
        if self._zeros is not None:
            self._zeros.write_next()

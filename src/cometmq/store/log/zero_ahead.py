"""Zeros ahead of the log under SYNC_FLUSH, so that a sync finds its place on the device prepared.

The file system knows a reserved segment as never written. The first write to each part changes that, and its
sync carries the change through the journal: three more writes and twice the time. So a thread writes zeros
well before records get there. That space reads as zeros already: nothing changes for readers, recovery, power
loss.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from cometmq import logs
from cometmq.store.base.disk import Disk, opened, write_all
from cometmq.store.log.commit_log import CommitLog

log = logs.logger(__name__)

PART = 512 << 10  # written at once; the next sync of the log takes it along
# Where zeros begin, behind the end of the log: so far that the log does not get there while they are written.
MARGIN = 16 << 20
AHEAD = 32 << 20  # and how far they go
_PAGE = 4096


class ZeroAhead:
    """Methods belong to the loop's thread. Positions are those of the log, in bytes."""

    __slots__ = ("_disk", "_log", "_pool", "_start", "_stop", "_task", "_zeros")

    def __init__(self, commit_log: CommitLog, disk: Disk, pool: ThreadPoolExecutor) -> None:
        self._log = commit_log
        self._disk = disk
        self._pool = pool
        self._zeros = bytes(PART)
        self._start = self._stop = 0  # what is being written, or was last
        self._task: Future[None] | None = None

    def look(self) -> None:
        """Have the next part written, unless one is under way or there are enough."""
        commit_log = self._log
        if self._task is not None:
            if not self._task.done():
                return
            failure = self._task.exception()
            self._task = None
            if failure is not None:  # no reason to stop: syncs take longer, and tell of what is wrong
                log.warning("the space ahead of the log could not be prepared: %s", failure)
                self._stop = commit_log.limit  # not in this segment any more
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

    def let_pass(self, stop: int) -> None:
        """The log is about to be written up to `stop`: wait as long as zeros may still be written there."""
        if self._task is not None and stop > self._start:
            self._task.exception()  # waits; `look` says what went wrong

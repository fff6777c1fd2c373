"""Space of the commit log that is prepared before records need it: the next segment, and zeros."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from cometmq import logs
from cometmq.store.base.clock import Clock
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.zero_ahead import ZeroAhead

log = logs.logger(__name__)

_RESERVE_RETRY_INTERVAL_S = 10.0  # seconds after a failed reservation, unless retention has freed space


@dataclass(eq=False)
class SpaceAhead:
    """The reservation of the next segment in the executor. Loop thread only; does nothing before `attach`."""

    commit_log: CommitLog
    clock: Clock

    def __post_init__(self) -> None:
        self._pool: Executor | None = None
        self._zeros: ZeroAhead | None = None
        self._again_at = 0.0  # monotonic time of the next try after a failure
        self._short_of = -1  # the segment whose successor could not be reserved

    def attach(self, pool: Executor) -> None:
        self._pool = pool

    def add_zeros(self, zeros: ZeroAhead) -> None:
        """Write the space of reserved segments from now on, before records are written there."""
        self._zeros = zeros
        self.commit_log.before_write = zeros.let_pass

    def detach(self) -> None:
        self._pool = self._zeros = self.commit_log.before_write = None

    def reserve(self) -> None:
        """Reserve the next segment in the executor if the present one is half full."""
        failure = self.commit_log.reservation_done()
        if failure is not None:
            if self._short_of != self.commit_log.segment_base:
                self._short_of = self.commit_log.segment_base
                log.warning("next segment could not be reserved, trying again: %s", failure)
            self._again_at = self.clock.monotonic() + _RESERVE_RETRY_INTERVAL_S
        if self._pool is None:
            return
        base = self.commit_log.wants_reservation()
        if base is not None and (not self._again_at or self.clock.monotonic() >= self._again_at):
            self.commit_log.reservation_started(base, self._pool.submit(self.commit_log.reserve_file, base))

    def room_was_made(self) -> None:
        """Allow a failed reservation to be tried again immediately: files were deleted."""
        self._again_at = 0.0

    def write_zeros(self) -> None:
        """Write the next part of the segment's space under SYNC_FLUSH."""
        if self._zeros is not None:
            self._zeros.look()

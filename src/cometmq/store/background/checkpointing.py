"""Moves the checkpoint forward over dispatched records whose queue units and index keys are durable."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import NamedTuple

from cometmq import logs
from cometmq.store.base.checkpoint import Checkpoint, CheckpointPosition
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.flush import LogFlusher
from cometmq.store.recovery.recovery_scan import Recovered
from cometmq.store.tables.deleted_topics import DeletedTopics

log = logs.logger(__name__)

# The maximum number of records between the checkpoint and the end of the log. Recovery scans this many
# records in one to two seconds.
_MAX_RECORDS_BEHIND = 300_000
_MAX_BYTES_BEHIND = 384 << 20


class Covered(NamedTuple):
    """The records that were dispatched up to one moment.

    Attributes:
        position: The log position after the last of these records.
        last: The position at which the last of these records begins.
        stored_ms: The store time of the last of these records, in epoch ms.
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


@dataclass(eq=False, kw_only=True)
class Checkpointing:
    """Maintains the checkpoint of one store. Loop thread only."""

    checkpoint: Checkpoint
    flusher: LogFlusher
    queues: QueueTable
    index: IndexService
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

    def dispatched(self, count: int, last: int, end: int, stored_ms: int) -> None:
        """Record that `count` records became visible.

        The last of these records begins at log position `last` and ends at `end`.
        """
        self._behind += count
        self._changed = True
        self._last, self._position, self.stored_ms = last, end, stored_ms

    @property
    def far_behind(self) -> bool:
        """Whether a recovery would have to scan so much of the log that the checkpoint must be moved now."""
        return self._behind >= _MAX_RECORDS_BEHIND or self._position - self._tried >= _MAX_BYTES_BEHIND

    def covered(self) -> Covered:
        """Return what is known of the records dispatched so far.

        A write of all queues and the index that begins now includes all these records.
        """
        # While topics are being deleted, `queue_ends` is 0 (unknown). Otherwise, after a crash, recovery
        # would compute a smaller sum of maximum offsets, because it drops the queues of deleted topics. It
        # could not attribute the difference to the deletion, which is recorded with a log position before the
        # checkpoint position.
        ends = 0 if self.deleted.under_way else self.queues.offset_sum
        return Covered(self._position, self._last, self.stored_ms, ends, self._behind, self._step_backs)

    def written(self, covered: Covered) -> tuple[CheckpointPosition | None, int]:
        """Return the checkpoint position, and the end time (ms) of the newest full index file.

        Call this method after queues and index have been written, and before they are synced. After the sync,
        pass both results to `move`. The checkpoint position is None if there was none at the start and the
        store has not changed since then.
        """
        self._behind -= covered.behind
        self._tried = covered.position
        saved = None
        if self.checkpoint.saved is not None or self._changed:
            saved = self.index.checkpoint_position(covered.position, covered.last, covered.queue_ends)
        return saved, self.index.full_until_ms

    def move(self, covered: Covered, saved: CheckpointPosition | None, full_ms: int) -> None:
        """Move the checkpoint to `covered`, because its records are now synced in log, queues and index.

        The checkpoint moves in memory only; the caller writes the checkpoint file. `saved` and `full_ms` are
        the results of `written`.
        """
        checkpoint = self.checkpoint
        if covered.step_backs == self._step_backs:
            checkpoint.physic_ms = max(checkpoint.physic_ms, self.flusher.flushed_ms)
            checkpoint.logics_ms = max(checkpoint.logics_ms, covered.stored_ms)
            checkpoint.index_ms = max(checkpoint.index_ms, full_ms)
        checkpoint.saved = saved

    def clock_stepped_back(self, now_ms: int) -> None:
        """Lower the checkpoint, because the clock was set back to `now_ms`.

        Otherwise recovery would treat the next records as durable, because their store times are lower than
        the time in the checkpoint.
        """
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

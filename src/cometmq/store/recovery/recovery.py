"""Recovery: makes log, queues and index agree when a store is opened.

After a clean stop, recovery trusts every queue unit. It scans the log only from the newest record that has a
queue unit.

After an unclean stop, the scan begins at the checkpoint position, so that its cost depends only on the amount
of data written after the checkpoint. The checkpoint position is missing if Apache's broker wrote last, or if
the checkpoint is damaged. The scan then begins at the newest segment whose first record was stored at or
before the times in the checkpoint. For the scanned records, recovery computes queue units and index entries
again and overwrites the existing ones. If a queue lacks units of records before the scan, or the index is
damaged or missing, the scan begins earlier.

A torn tail (invalid data that no valid record follows) is removed and its space overwritten with zeros, so
that no old record can reappear. Damage before valid records is skipped and reported, and all later records
are kept and served. Only a slave truncates its log at such damage, if a power failure may be the cause: its
master has the missing records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cometmq import logs
from cometmq.errors import StoreCorrupt
from cometmq.protocol.record.layout import BLANK_SIZE
from cometmq.store.base.checkpoint import Checkpoint, CheckpointPosition
from cometmq.store.base.config import SLAVE, StoreConfig
from cometmq.store.base.disk import Disk, is_numbered, opened, zero_out
from cometmq.store.base.files import ReadOnlyFiles, part_facts
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.directories import LogDirectories
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.recovery_scan import Recovered, RecoveryScan
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.queue_order import MAX_GAP_UNITS
from cometmq.store.writing.record_dispatch import MAX_REPORTED_REJECTIONS, StartEarlier

log = logs.logger(__name__)

_MIN_SEGMENT_BYTES = 16 << 20  # Length, in bytes, below which a segment is scanned completely
_NOWHERE = 1 << 62  # A log position that is greater than the end of every log


class EntriesLost(StoreCorrupt):
    """Raised if a raft log lacks entries that other members of the group may rely on."""


class RaftLogEnds(Protocol):
    """Two ends of a raft log: `visible` ends the entries that consumers can read, `end` all entries."""

    @property
    def visible(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(eq=False, kw_only=True)
class Recovery:
    """Recovers the log, queues and index of one store when the store is opened."""

    disk: Disk
    config: StoreConfig
    commit_log: CommitLog
    queues: QueueTable
    index: IndexService
    checkpoint: Checkpoint
    deleted: DeletedTopics
    ends: CleanEnds
    raft_log: RaftLogEnds | None = None

    def __post_init__(self) -> None:
        self._files = ReadOnlyFiles(self.disk)
        self._log_reader = LogReader(self._files, self.config)
        self._segments: list[int] = []
        self._index_until = _NOWHERE  # Log position of the last record that the scan adds to the index
        self._whole_from = _NOWHERE  # The first gap at or after this log position ends the log
        self._visible = _NOWHERE if self.raft_log is None else self.raft_log.visible

    def run(self, *, clean: bool) -> Recovered:
        """Recover log, queues and index, and make them accept appends. Raises StoreError, OSError."""
        with self._files:
            return self._run(clean=clean)

    def _run(self, *, clean: bool) -> Recovered:
        stopped_cleanly = clean
        self._segments, notes = list_segments(
            self.disk, self.commit_log.directories, self.commit_log.segment_size
        )
        result = Recovered(clean, notes=notes)
        if clean:
            self._load_queues(_NOWHERE, result)
            if not self._clean_end_holds() or self.queues.max_physical > self._visible:
                result.notes.append("queues and log do not fit although the last stop was clean")
                result.clean = clean = False
        if any(queue.damaged for queue in self.queues):
            result.clean = clean = False
        saved = None if stopped_cleanly else self._saved_position()
        if not stopped_cleanly:
            self._whole_from = self._gaps_end_from(saved)
        index_notes, index_lost = self.index.load(
            clean=clean, checkpoint_ms=self.checkpoint.index_ms, saved=saved
        )
        result.notes += index_notes
        if not self.index.enabled:
            self._index_until = self.index.end_position if self.index.files else -1
        result.rebuilt = index_lost or not clean
        if index_lost and self._segments:
            self.checkpoint.reset()
            saved = None
        start = max(self.queues.max_physical, self._first) if clean else self._checked_start(saved)
        start = min(start, max(self._visible, self._first))
        if not clean:
            known = start if saved is None else saved.position
            self._reload(known, result)
            loss = self._queue_loss(start, saved)
            if loss:
                result.notes.append(f"{loss}: all are rebuilt from the log")
            elif known != start:
                self._reload(start, result)
            if loss or any(queue.damaged for queue in self.queues):
                self.checkpoint.reset()
                start = self._first
                self._reload(start, result)
        # After a clean stop, the index already contains the keys of all records up to its end position, so
        # only later records are indexed. The scan may begin before that position: it begins at the newest
        # record that has a queue unit.
        index_from = max(start, self.index.end_position + 1) if clean else start
        if index_lost and self.index.enabled:
            index_from = min(start, max(0, self.index.end_position - self.commit_log.framing.gap))
        if not clean and (saved is None or index_from < saved.position):
            self.checkpoint.reset_index()
        self.index.resume(clean=clean, cut_at=None if clean and not index_lost else index_from)
        replay = self._scan_log(start, index_from, result)
        self._finish(replay, result)
        return result

    @property
    def _first(self) -> int:
        return self._segments[0] if self._segments else 0

    # -- the start of the scan --------------------------------------------------------------------

    def _clean_end_holds(self) -> bool:
        """Return whether the newest unit of all queues points to its record, as after every clean stop."""
        last = max(self.queues, key=lambda queue: queue.max_physical, default=None)
        if last is None or last.max_physical == 0:
            return True
        found = last.unit(last.max_offset - 1)
        if found is None:
            return False
        position, size, _ = found
        if position < self._first:
            return True  # Retention has deleted the record, so it cannot be checked
        facts = self._log_reader.facts(position)
        wanted = size, last.topic, last.queue_id, last.max_offset - 1
        return facts is not None and wanted == (
            facts.size, facts.topic, facts.queue_id, facts.queue_offset
        )  # fmt: skip

    def _saved_position(self) -> CheckpointPosition | None:
        """Return the checkpoint position, or None if it is missing or contradicts the log."""
        saved, size = self.checkpoint.saved, self.commit_log.segment_size
        valid = saved is not None and is_position_valid(self._log_reader, self._segments, size, saved)
        return saved if valid else None

    def _checked_start(self, saved: CheckpointPosition | None) -> int:
        """Return the log position at which the scan begins.

        The checkpoint position `saved` determines it. If that is unknown, the scan begins at the newest
        segment whose first record was stored at or before the times in the checkpoint. If there is no such
        segment, the scan begins at the beginning of the log.
        """
        if saved is not None:
            return max(scan_start(saved, self.commit_log.segment_size), self._first)
        trusted = self.checkpoint.min_timestamp
        if self.config.message_index_safe and self.config.message_index_enable:
            trusted = min(trusted, self.checkpoint.index_ms)
        found = trusted_segment(self._log_reader, self._segments, trusted)
        return self._first if found is None else found

    def _gaps_end_from(self, saved: CheckpointPosition | None) -> int:
        """Return the position from which on a gap ends the log, if its master sends the rest again."""
        if self.config.broker_role != SLAVE:
            return _NOWHERE
        return self._checked_start(None) if saved is None else saved.position

    def _queue_loss(self, start: int, saved: CheckpointPosition | None) -> str:
        """Describe the loss of queue units that existed at the checkpoint, or return "" if none is lost."""
        ends = self.queues.offset_sum
        if start > self._first and not ends:
            return "no consume queue is left"
        if saved is not None and ends < saved.queue_ends and not self.deleted.any_since(saved.position):
            return f"consume queues have lost {saved.queue_ends - ends} units"
        return ""

    def _reload(self, start: int, result: Recovered) -> None:
        self.queues.clear()
        self._load_queues(start, result)

    def _load_queues(self, log_end: int, result: Recovered) -> None:
        result.notes += [note for note in self.queues.load(log_end) if note not in result.notes]
        for topic in self.deleted.ends:
            firsts = {queue.queue_id: queue.first_position() for queue in self.queues.of_topic(topic)}
            kept = {queue_id for queue_id, first in firsts.items() if not self.deleted.hides(topic, first)}
            if any(first >= 0 for queue_id, first in firsts.items() if queue_id not in kept):
                result.notes.append(f"{topic}: its deletion is finished")
                self.queues.delete_topic(topic, kept)

    # -- the scan ---------------------------------------------------------------------------------

    def _scan_once(self, start: int, index_from: int, result: Recovered) -> RecoveryScan:
        replay = RecoveryScan(
            disk=self.disk, config=self.config, commit_log=self.commit_log, segments=self._segments,
            queues=self.queues, index=self.index, deleted=self.deleted, former_ends=self.ends.ends,
            index_until=self._index_until, start=start, whole_from=self._whole_from, result=result,
            until=self._visible,
        )  # fmt: skip
        replay.run(index_from)
        return replay

    def _scan_log(self, start: int, index_from: int, result: Recovered) -> RecoveryScan:
        """Scan the log and compute queues and index.

        All queues are dropped, and the log is scanned again from its beginning, in two cases: a queue lacks
        units of records before `start`, or is shorter after the scan than at the last clean stop.
        """
        try:
            replay = self._scan_once(start, index_from, result)
            shorter = self._shorter(result)
            if shorter and (result.clean or start > self._first):
                raise StartEarlier("consume queue {}/{} does not reach its former end {}".format(*shorter[0]))
        except StartEarlier as reason:
            log.warning("%s: rebuilding all queues from the log", reason)
            result.notes.append(f"{reason}: all queues were rebuilt from the log")
            self.checkpoint.reset()
            result.clean, result.rebuilt = False, True
            start = self._first
            self._reload(start, result)
            self.index.forget_waiting()
            self.index.resume(clean=False, cut_at=start)
            replay = self._scan_once(start, start, result)
        if self.config.broker_role == SLAVE or self.raft_log is not None:
            # Queues are not extended to their former ends, because the records from the master or from the
            # raft group already contain their queue offsets.
            return replay
        for topic, queue_id, end in self._shorter(result):
            # The last messages of the queue are lost, or retention has deleted them and the queue's files.
            # The queue continues at its former end, because no offset may be assigned twice.
            try:
                queue = self.queues.of_record(topic, queue_id)
            except QueueRefused:
                continue
            if end - queue.max_offset <= MAX_GAP_UNITS or not queue.max_offset:
                queue.skip_to(end)
                queue.write()
                if not queue.positions:
                    queue.make_last_file()
        return replay

    def _shorter(self, result: Recovered) -> list[tuple[str, int, int]]:
        """Return `CleanEnds.shorter`; nothing if another broker has stopped cleanly since then."""
        if result.clean and result.end != self.ends.log_end:
            return []
        return self.ends.shorter(self.queues, self.deleted)

    # -- the end ----------------------------------------------------------------------------------

    def _finish(self, replay: RecoveryScan, result: Recovered) -> None:
        size = self.commit_log.segment_size
        result.visible = result.end
        if self.raft_log is not None:
            if result.damage:
                damage = result.damage[0]
                problem = f"entries at positions {damage.start} to {damage.stop} are damaged"
                raise EntriesLost(f"{problem}, although they were committed", damage.path)
            result.end, replay.torn = self.raft_log.end, False
        keep = [base for base in self._segments if base < result.end or base <= replay.last_used]
        # The first segment is kept even if the log is empty, because its name shows where the log begins.
        if self._segments and not keep:
            keep, replay.torn, replay.last_used = self._segments[:1], True, self._segments[0]
        for base in self._segments[len(keep) :]:
            self.disk.unlink(self.commit_log.path_of(base))
        if not self._segments:
            held = sum(queue.max_offset - queue.begin for queue in self.queues)
            if held:
                text = "the commit log in %s is empty: the queues lose %d messages (is its disk mounted?)"
                log.error(text, ", ".join(self.config.commit_log_dirs), held)
            for topic in self.queues.topics():
                self.queues.delete_topic(topic)
        if replay.torn and replay.last_used >= 0 and result.end < replay.last_used + size:
            self._zero_tail(replay.last_used, result)
        older = self.commit_log.older
        tiered_begin = _NOWHERE if older is None else older.begin
        for queue in self.queues:
            if not result.clean:
                queue.cut()
            queue.next_offset = queue.max_offset
            queue.correct_min(min(keep[0], tiered_begin) if keep else 0)
        self.deleted.lower(result.end)
        self.commit_log.resume(keep, result.end)
        for damage in result.damage:
            log.error("damage in %s: skipped positions %d to %d, which contain no valid record", *damage)
        if result.not_served > MAX_REPORTED_REJECTIONS:
            result.notes.append(f"{result.not_served} records in all are not served")
        for note in result.notes:
            log.warning("%s", note)

    def _zero_tail(self, base: int, result: Recovered) -> None:
        """Overwrite the segment after the last valid record with zeros."""
        path = self.commit_log.path_of(base)
        result.notes.append(f"{path}: torn tail cut and zeroed from position {result.end} on")
        with opened(self.disk, path) as fd:
            zero_out(self.disk, fd, result.end - base, self.commit_log.segment_size)


def list_segments(disk: Disk, directories: LogDirectories, segment_size: int) -> tuple[list[int], list[str]]:
    """Return the first positions of the segments, and notes about other files.

    A segment that is too short is filled up with zeros. One that is too long raises StoreError, because
    opening it would damage the log.
    """
    bases: list[int] = []
    notes: list[str] = []
    short: list[tuple[str, int]] = []
    for directory, name in directories.files():
        path = f"{directory}/{name}"
        if not is_numbered(name, 20):
            if not disk.is_dir(path):
                notes.append(f"{path}: not a segment, left alone")
            continue
        facts = part_facts(disk, path, segment_size, "mappedFileSizeCommitLog")
        if facts is None:
            continue
        if facts.size < segment_size:
            short.append((path, facts.size))
        bases.append(int(name))
    directories.check_unique(bases)
    for path, size in short:
        notes.append(f"{path}: {size} bytes instead of {segment_size}, filled up with zeros")
        with opened(disk, path) as fd:
            disk.truncate(fd, segment_size)
    return bases, notes


def is_position_valid(
    log: LogReader, segments: list[int], segment_size: int, saved: CheckpointPosition
) -> bool:
    """Return whether the checkpoint position `saved` fits the log.

    The record `saved.last`, which lies before the checkpoint position, must exist. If `saved.last` is
    unknown, a record or zeros must begin at the checkpoint position.
    """
    position = saved.position
    if saved.last >= 0:
        facts = log.facts(saved.last)
        return facts is not None and saved.last + facts.size <= position
    base = position - position % segment_size
    if base not in segments:
        return position == (segments[-1] + segment_size if segments else 0)
    if log.facts_after(position) is not None:
        return True
    head = log.bytes_at(position, BLANK_SIZE)
    return head is not None and (
        head == bytes(len(head)) or log.framing.is_blank(head, base + segment_size - position)
    )


def scan_start(saved: CheckpointPosition, segment_size: int) -> int:
    """Return where the scan begins. A small segment is scanned completely: that is cheap and repairs more."""
    if segment_size >= _MIN_SEGMENT_BYTES:
        return saved.position
    last = max(0, saved.position - 1)
    return last - last % segment_size


def trusted_segment(log: LogReader, segments: list[int], trusted_ms: int) -> int | None:
    """Return the position of the newest segment whose first record was stored at or before `trusted_ms`."""
    for base in reversed(segments):
        facts = log.facts_after(base)
        if facts is not None and 0 < facts.store_ms <= trusted_ms:
            return base
    return None

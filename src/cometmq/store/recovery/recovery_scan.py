"""A scan of the log, in which recovery computes queue units and index keys again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import InitVar, dataclass

import msgspec
import numpy as np

from cometmq.protocol.record.many import RecordGroup
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.scan import Damage, SegmentScan
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.record_dispatch import ALL, MAX_REPORTED_REJECTIONS, RecordDispatch

_WRITE_UNITS = 4096


class Recovered(msgspec.Struct):
    """The result of recovery. Positions are log positions in bytes, times are in epoch ms."""

    clean: bool
    start: int = 0
    end: int = 0
    visible: int = 0  # Position after the last visible record; in a raft log, uncommitted entries may follow
    last_store_ms: int = 0
    # Latest store time of all records. If the clock was set back, the last record has an earlier store time.
    newest_ms: int = 0
    last_position: int = -1  # Log position of the last scanned record; -1 if none was scanned
    records: int = 0
    rebuilt: bool = False  # whether queues or index have changed and must be synced
    not_served: int = 0  # Number of records not added to their queues; `notes` describes some
    notes: list[str] = msgspec.field(default_factory=list)
    damage: list[Damage] = msgspec.field(default_factory=list)

    def record_not_served(self, note: str) -> None:
        """Count a record that could not be added to its queue. `note` names the record and the reason."""
        self.not_served += 1
        if self.not_served <= MAX_REPORTED_REJECTIONS:
            self.notes.append(f"{note}, not served")


@dataclass(eq=False, kw_only=True)
class RecoveryScan:
    """A scan of the log from position `start` on. Its results are added to `result`.

    Attributes:
        former_ends: The end that each queue had at the last clean stop, by topic and queue id.
        whole_from: The first gap at or after this position ends the log. Damage before it is skipped.
        index_until: The position of the last record that is indexed.
        until: Records from this position on are not dispatched.
        last_used: The segment in which the log ends; -1 for none.
        torn: Whether invalid data follows the last record in that segment.
    """

    disk: Disk
    config: StoreConfig
    commit_log: CommitLog
    segments: Sequence[int]
    queues: QueueTable
    index: IndexService
    deleted: DeletedTopics
    former_ends: InitVar[Mapping[str, Mapping[int, int]]]
    index_until: int
    start: int
    whole_from: int
    result: Recovered
    until: int = ALL.stop

    def __post_init__(self, former_ends: Mapping[str, Mapping[int, int]]) -> None:
        self._dispatch = RecordDispatch(
            self.queues, self.index, self.deleted, self.config, former_ends, self.result.record_not_served
        )
        self._touched: set[ConsumeQueue] = set()
        self.last_used = -1
        self.torn = False

    def run(self, index_from: int) -> None:
        """Scan to the end of the log, and index from `index_from` on. Raises StartEarlier, OSError."""
        result, start = self.result, self.start
        result.start = start
        result.records = result.not_served = 0
        result.damage.clear()
        end = start
        queued, indexed = range(start, ALL.stop), range(index_from, self.index_until + 1)
        may_wait = not self.segments or start <= self.segments[0]
        for whole in self._groups(min(start, index_from)):
            group = whole
            if group.end > self.until:
                count = int(np.count_nonzero(group.position < self.until))
                if not count:
                    break
                group = group.first_ones(count)
            end = group.end
            result.last_store_ms = int(group.store_ms[-1])
            result.newest_ms = max(result.newest_ms, int(group.store_ms.max()))
            result.last_position = int(group.position[-1])
            result.records += len(group.properties)
            touched = self._dispatch.add(group, queued=queued, indexed=indexed, may_wait=may_wait)
            if self.index.has_batch_waiting():
                self.index.index_waiting_keys()
            for queue in touched:
                if queue.max_offset - queue.written > _WRITE_UNITS:
                    queue.write()
            self._touched |= touched
        self._touched |= self._dispatch.finish()
        for queue in self._touched:
            # After a crash, the names of new files may be missing on the disk. So the next sync must include
            # the directories.
            queue.new_names = True
            queue.write()
        result.end = min(max(end, result.end), self.until)

    def _groups(self, start: int) -> Iterator[RecordGroup]:
        result, size = self.result, self.commit_log.segment_size
        result.end = reached = max([start, *self.segments[:1]])
        previous = None
        empty: list[Damage] = []
        for base in self.segments:
            if base + size <= start:
                continue
            if previous is not None and base != previous + size:
                result.damage.append(Damage(self.commit_log.path_of(previous + size), previous + size, base))
            previous = base
            path, check_crc = self.commit_log.path_of(base), self.config.check_crc_on_recover
            framing = self.commit_log.framing
            scan = SegmentScan(self.disk, path, base, size, check_crc=check_crc, framing=framing)
            with closing(scan.groups(max(start, base))) as groups:
                for group in groups:
                    if group.position[0] - framing.gap != reached >= self.whole_from:
                        self._end_at(reached)
                        return
                    reached = group.end
                    yield group
            if scan.end > max(start, base) or base <= start:
                # A segment without records is damaged if a later segment has records.
                result.damage += empty
                empty.clear()
                result.damage += scan.damage
                if self.torn:
                    result.damage.append(
                        Damage(self.commit_log.path_of(self.last_used), result.end, self.last_used + size)
                    )
                result.end = reached = scan.end
                self.last_used = base
                self.torn = scan.dirty
            else:
                empty.append(Damage(self.commit_log.path_of(base), base, base + size))

    def _end_at(self, end: int) -> None:
        self.result.notes.append(f"the log has a gap at {end} and is cut there: its master has the rest")
        self.result.end = end
        base = end - end % self.commit_log.segment_size
        self.torn = base in self.segments
        if self.torn:
            self.last_used = base

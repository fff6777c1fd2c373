"""One walk over the log, which computes queue units and index keys anew.

What follows on its queue's end goes in runs of many records; every other record is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from cometmq.protocol.codes import SCHEDULE_TOPIC, TIMER_TOPIC
from cometmq.protocol.properties.key_hashes import Keys, key_prefix
from cometmq.protocol.properties.template import codes_and_keys
from cometmq.protocol.properties.values import stored_tags_code, value_of
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.protocol.record.many import Run
from cometmq.protocol.record.one import Facts
from cometmq.protocol.timers import timer_tags_code
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.scan import Damage, SegmentScan
from cometmq.store.recovery.queue_order import QueueOrder
from cometmq.store.tables.deleted_topics import DeletedTopics

_WRITE_UNITS = 4096
MOST_NAMED = 200  # of the records that are not served; a stranger may have sent any number


@dataclass
class Recovered:
    """What recovery found. Positions are bytes in the log, times epoch ms."""

    clean: bool
    start: int = 0
    end: int = 0
    last_store_ms: int = 0
    last_position: int = -1  # of the last record walked over
    records: int = 0
    rebuilt: bool = False  # queues or index were built anew, and are not durable yet
    not_served: int = 0  # records of the walk that fit no queue; the first of them are among the notes
    notes: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)

    def note_not_served(self, note: str) -> None:
        """A record of the walk fits no queue."""
        self.not_served += 1
        if self.not_served <= MOST_NAMED:
            self.notes.append(f"{note}, not served")


WAITING_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
"""Topics whose units carry times in place of hashes of tags."""


class StartEarlier(Exception):
    """A queue lacks units from before the start of the walk."""


def tags_code_of(facts: Facts, delays_ms: dict[int, int]) -> int:
    """Tags code of a record's queue unit: hash of TAGS, or for a message that waits its time."""
    if facts.topic == TIMER_TOPIC:
        return timer_tags_code(facts.properties)
    if facts.topic == SCHEDULE_TOPIC:
        level = value_of(facts.properties, b"DELAY")
        if level.isdigit() and int(level) > 0:
            number = min(int(level), max(delays_ms, default=0))
            return facts.store_ms + delays_ms.get(number, 1000)
    return stored_tags_code(facts.properties)


@dataclass(eq=False, kw_only=True)
class Replay:
    """A walk from log position `start` on; what it finds goes to `result`.

    former_ends: topic -> queue id -> where the queue ended once. index_until: position of the last record
    that goes to the index. `last_used`: the segment in which the log ends, -1 for none. `torn`: whether
    something that is no record follows the last one there.
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
    result: Recovered

    def __post_init__(self, former_ends: Mapping[str, Mapping[int, int]]) -> None:
        self._delays = self.config.delay_levels_ms
        self._order = QueueOrder(former_ends, self._push, self._leave_out)
        self._touched: set[ConsumeQueue] = set()
        self.last_used = -1
        self.torn = False

    def run(self, index_from: int) -> None:
        """Walk to the end of the log, indexing from `index_from` on. Raises StartEarlier, OSError."""
        result, start = self.result, self.start
        result.start = start
        result.records = result.not_served = 0
        result.damage.clear()
        end = start
        for run in self._runs(min(start, index_from)):
            end = run.end
            result.last_store_ms = int(run.store_ms[-1])
            result.last_position = int(run.position[-1])
            result.records += len(run.properties)
            codes, keys = codes_and_keys(run.properties)
            self._index_run(run, keys, index_from)
            self._queue_run(run, codes)
        self._order.finish()
        for queue in self._touched:
            queue.new_names = True  # a file made just before the process died may have no lasting name yet
            queue.write()
        result.end = max(end, result.end)

    def _runs(self, start: int) -> Iterator[Run]:
        result, size = self.result, self.commit_log.segment_size
        result.end = start
        previous = None
        empty: list[Damage] = []
        for base in self.segments:
            if base + size <= start:
                continue
            if previous is not None and base != previous + size:
                result.damage.append(Damage(self.commit_log.path_of(previous + size), previous + size, base))
            previous = base
            path, check_crc = self.commit_log.path_of(base), self.config.check_crc_on_recover
            scan = SegmentScan(self.disk, path, base, size, check_crc=check_crc)
            yield from scan.runs(max(start, base))
            if scan.end > max(start, base) or base <= start:
                result.damage += empty  # no valid record in them, but in this one
                empty.clear()
                result.damage += scan.damage
                if self.torn:
                    result.damage.append(
                        Damage(self.commit_log.path_of(self.last_used), result.end, self.last_used + size)
                    )
                result.end = scan.end
                self.last_used = base
                self.torn = scan.dirt
            else:
                empty.append(Damage(self.commit_log.path_of(base), base, base + size))

    def _index_run(self, run: Run, keys: list[bytes] | None, index_from: int) -> None:
        """Dispatch records to the index; `keys` as in `codes_and_keys`."""
        positions = run.position
        wanted = (index_from <= positions) & (positions <= self.index_until)
        if self.deleted:
            wanted &= ~self.deleted.hidden(run)
        given: list[Keys] = [None] * len(positions) if keys is None else [*keys]
        for row in np.flatnonzero(run.rolled_back).tolist():
            given[row] = ()
        prefixes = [key_prefix(name) for name in run.names]
        columns: list[Sequence[Any]] = [
            [prefixes[number] for number in run.topic.tolist()], positions.tolist(), run.store_ms.tolist(),
            run.properties, given,
        ]  # fmt: skip
        if not wanted.all():
            columns = [list(compress(column, wanted.tolist())) for column in columns]
        self.index.add(*columns)
        if self.index.has_batch_waiting():
            self.index.index_waiting_keys()

    def _push(self, queue: ConsumeQueue, facts: Facts) -> None:
        queue.push(facts.position, facts.size, tags_code_of(facts, self._delays), facts.queue_offset)
        self._touched.add(queue)
        if facts.queue_offset - queue.written >= _WRITE_UNITS:
            queue.write()

    def _leave_out(self, facts: Facts, end: int, _following: Facts | None) -> None:
        place = f"queue offset {facts.queue_offset} of {facts.topic}/{facts.queue_id}"
        self.result.note_not_served(f"record at {facts.position}: {place} where {end} was expected")

    def _queue_run(self, run: Run, codes: list[int]) -> None:
        """Dispatch records to their queues."""
        by_key, waiting = self.queues.by_key, self._order.waiting
        names, properties = run.names, run.properties
        start, touched = self.start, self._touched
        careful = bool(self.deleted)
        columns = [column.tolist() for column in run[:7]]
        for row, (position, size, queue_id, offset, sys_flag, store_ms, number) in enumerate(
            zip(*columns, strict=True)
        ):
            topic = names[number]
            queue = by_key.get((topic, queue_id))
            if (
                queue is None
                or offset != queue.max_offset
                or position < start
                or sys_flag & TRANSACTION_MASK
                or topic in WAITING_TOPICS
                or waiting
                or careful
            ):
                if position >= start:
                    facts = Facts(
                        position, size, queue_id, offset, sys_flag, store_ms, topic, properties[row]
                    )
                    self._queue_one(facts)
                continue
            queue.push(position, size, codes[row], offset)
            touched.add(queue)
            if offset - queue.written >= _WRITE_UNITS:
                queue.write()

    def _queue_one(self, facts: Facts) -> None:
        """One record that may not follow on its queue's end."""
        topic, queue_id = facts.topic, facts.queue_id
        if not facts.queued or (self.deleted and self.deleted.hides(topic, facts.position)):
            return
        try:
            queue = self.queues.of_record(topic, queue_id)
        except QueueRefused as refusal:
            self.result.note_not_served(f"record at {facts.position}: {refusal.remark}")
            return
        if not self._order.add(queue, facts, may_wait=self.start <= self.segments[0]):
            raise StartEarlier(
                f"consume queue {topic}/{queue_id} ends at {queue.max_offset}, not at {facts.queue_offset}"
            )

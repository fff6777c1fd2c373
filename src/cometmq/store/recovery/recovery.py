"""Opening a store: what is on disk becomes a log, queues and an index that agree.

After a clean stop everything that has a queue entry is trusted; the log is walked only from the last one on.
After an unclean stop the walk begins where the checkpoint says (see start_point.py), so a start costs what
came after it, whatever the store holds. From there on nothing but the log counts: queue and index entries of
that part are computed anew and written over whatever is there. A queue that turns out to lack entries from
before that point, or an index that is damaged or gone, moves the start of the walk back.

A torn tail (nothing valid behind it) is cut and its space zeroed, so that no stale record can come back to
life. Damage with valid records behind it is skipped and named; everything behind it is kept and served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from cometmq import logs
from cometmq.errors import StoreError
from cometmq.protocol.codes import SCHEDULE_TOPIC
from cometmq.protocol.properties.keys import (
    Keys,
    codes_and_keys,
    key_prefix,
    property_value,
    stored_tags_code,
)
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.protocol.record.many import Run
from cometmq.protocol.record.one import Facts
from cometmq.store.base.checkpoint import Checkpoint, Mark
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import NO_FILE, Disk, is_numbered, zero_out
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import FILLER_SIZE, ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.log_reader import LogReader
from cometmq.store.log.places import LogPlaces
from cometmq.store.log.scan import Damage, SegmentScan
from cometmq.store.recovery.queue_order import QueueOrder
from cometmq.store.recovery.start_point import mark_holds, trusted_segment, walk_from
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics

log = logs.logger(__name__)

_WIDEST_GAP = 1_000_000  # units; as in Gaps
_WRITE_UNITS = 4096
_MOST_NAMED = 200  # of the records that are not served; a stranger may have sent any number


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


class _StartEarlier(Exception):
    """A queue lacks units from before the start of the walk."""


def tags_code_of(facts: Facts, delays_ms: dict[int, int]) -> int:
    """Tags code of a record's queue unit: hash of TAGS, or for a delayed message the time of its delivery."""
    if facts.topic == SCHEDULE_TOPIC:
        level = property_value(facts.properties, b"DELAY\x01")
        if level.isdigit() and int(level) > 0:
            number = min(int(level), max(delays_ms, default=0))
            return facts.store_ms + delays_ms.get(number, 1000)
    return stored_tags_code(facts.properties)


def list_segments(disk: Disk, places: LogPlaces, segment_size: int) -> tuple[list[int], list[str]]:
    """First positions of the segments, and notes; files of a wrong but possible length are set right.

    Raises StoreError for files that belong to another segment size: going on would tear the log apart.
    """
    bases: list[int] = []
    notes: list[str] = []
    short: list[tuple[str, int]] = []
    for directory, name in places.files():
        path = f"{directory}/{name}"
        if not is_numbered(name, 20):
            if not disk.is_dir(path):
                notes.append(f"{path}: not a segment, left alone")
            continue
        facts = disk.facts(path)
        if facts is None:
            continue
        if not facts.regular:
            raise StoreError(NO_FILE, path)
        base = int(name)
        if base % segment_size or facts.size > segment_size:
            raise StoreError(
                f"{facts.size} bytes from {base} on do not fit mappedFileSizeCommitLog={segment_size}", path
            )
        if facts.size < segment_size:
            short.append((path, facts.size))
        bases.append(base)
    places.check(bases)
    for path, size in short:
        notes.append(f"{path}: {size} bytes instead of {segment_size}, filled up with zeros")
        fd = disk.open(path)
        try:
            disk.truncate(fd, segment_size)
        finally:
            disk.close(fd)
    return bases, notes


def _not_served(result: Recovered, note: str) -> None:
    result.not_served += 1
    if result.not_served <= _MOST_NAMED:
        result.notes.append(note)


class Recovery:
    """One run of recovery over the parts of a store."""

    def __init__(
        self,
        disk: Disk,
        config: StoreConfig,
        commit_log: CommitLog,
        queues: QueueTable,
        index: IndexService,
        checkpoint: Checkpoint,
        deleted: DeletedTopics,
        ends: CleanEnds,
    ) -> None:
        self._deleted = deleted
        self._ends = ends
        self._disk = disk
        self._config = config
        self._log = commit_log
        self._files = ReadOnlyFiles(disk)
        self._log_reader = LogReader(self._files, config)
        self._queues = queues
        self._index = index
        self._checkpoint = checkpoint
        self._segments: list[int] = []
        self._index_until = 1 << 62  # records up to here are dispatched to the index
        self._delays = config.delay_levels_ms

    def run(self, *, clean: bool) -> Recovered:
        """Recover everything and leave log, queues and index ready for appends. Raises StoreError,
        OSError."""
        with self._files:
            return self._run(clean=clean)

    def _run(self, *, clean: bool) -> Recovered:
        stopped_cleanly = clean
        self._segments, notes = list_segments(self._disk, self._log.places, self._log.segment_size)
        result = Recovered(clean, notes=notes)
        if clean:
            self._load_queues(1 << 62, result)
            if not self._clean_end_holds():
                result.notes.append("queues and log do not fit although the last stop was clean")
                result.clean = clean = False
        if any(queue.damaged for queue in self._queues):
            result.clean = clean = False
        mark = None if stopped_cleanly else self._mark()
        index_notes, index_lost = self._index.load(
            clean=clean, checkpoint_ms=self._checkpoint.index_ms, mark=mark
        )
        result.notes += index_notes
        if not self._index.enabled:
            self._index_until = self._index.end_position if self._index.files else -1
        result.rebuilt = index_lost or not clean
        if index_lost and self._segments:
            self._checkpoint.distrust()
            mark = None
        start = max(self._queues.max_physical, self._first) if clean else self._checked_start(mark)
        if not clean:
            known = start if mark is None else mark.position
            self._reload(known, result)
            loss = self._queue_loss(start, mark)
            if loss:
                result.notes.append(f"{loss}: all are built anew from the log")
            elif known != start:
                self._reload(start, result)
            if loss or any(queue.damaged for queue in self._queues):
                self._checkpoint.distrust()
                start = self._first
                self._reload(start, result)
        index_from = start
        if index_lost and self._index.enabled:
            index_from = min(start, self._index.end_position)
        if not clean and (mark is None or index_from < mark.position):
            self._checkpoint.distrust_index()
        self._index.resume(clean=clean, cut_at=None if clean and not index_lost else index_from)
        self._walk_all(start, index_from, result)
        self._finish(result)
        return result

    @property
    def _first(self) -> int:
        return self._segments[0] if self._segments else 0

    # -- where to begin ---------------------------------------------------------------------------

    def _clean_end_holds(self) -> bool:
        """Whether the record that the queues name as the last one is there."""
        last = max(self._queues, key=lambda queue: queue.max_physical, default=None)
        if last is None or last.max_physical == 0:
            return True
        found = last.unit(last.max_offset - 1)
        if found is None:
            return False
        position, size, _ = found
        if position < self._first:
            return True  # retention took the segment since
        facts = self._log_reader.facts(position)
        return (
            facts is not None
            and facts.size == size
            and (facts.topic, facts.queue_id, facts.queue_offset)
            == (last.topic, last.queue_id, last.max_offset - 1)
        )

    def _mark(self) -> Mark | None:
        """The checkpoint's mark, if the log bears it out."""
        mark = self._checkpoint.mark
        if mark is None or mark_holds(self._log_reader, self._segments, self._log.segment_size, mark):
            return mark
        return None

    def _checked_start(self, mark: Mark | None) -> int:
        """Where the checkpoint lets the walk begin: at its mark, or at the newest segment whose first record
        is not younger than it."""
        if mark is not None:
            return max(walk_from(mark, self._log.segment_size), self._first)
        trusted = self._checkpoint.min_timestamp
        if self._config.message_index_safe and self._config.message_index_enable:
            trusted = min(trusted, self._checkpoint.index_ms)
        found = trusted_segment(self._log_reader, self._segments, trusted)
        if found is not None:
            return found
        return self._first

    def _queue_loss(self, start: int, mark: Mark | None) -> str:
        """What tells that queues, loaded up to the mark, have lost units; empty if nothing does. The records
        behind the mark need not tell: a queue may have none among them."""
        ends = self._queues.ends
        if start > self._first and not ends:
            return "no consume queue is left"
        if mark is not None and ends < mark.queue_ends and not self._deleted.any_since(mark.position):
            return f"consume queues have lost {mark.queue_ends - ends} units"
        return ""

    def _reload(self, start: int, result: Recovered) -> None:
        self._queues.clear()
        self._load_queues(start, result)

    def _load_queues(self, log_end: int, result: Recovered) -> None:
        result.notes += [note for note in self._queues.load(log_end) if note not in result.notes]
        for topic in self._deleted.topics():
            for queue in self._queues.of_topic(topic):
                units = queue.units(queue.min_offset, queue.max_offset, 64)
                first = next((unit for unit in units if unit[2] != FILLER_SIZE), None)
                if first is not None and self._deleted.hides(topic, first[1]):
                    result.notes.append(f"{topic}: its deletion is finished")
                    self._queues.delete_topic(topic)
                    break

    # -- the walk ---------------------------------------------------------------------------------

    def _walk_all(self, start: int, index_from: int, result: Recovered) -> None:
        """Walk the log; when a queue turns out to be short, once more from the beginning."""
        try:
            self._walk(start, index_from, result)
            shorter = self._shorter(result)
            if shorter and (result.clean or start > self._first):
                raise _StartEarlier(
                    "consume queue {}/{} does not reach its former end {}".format(*shorter[0])
                )
        except _StartEarlier as reason:
            log.warning("%s: all queues are built anew from the log", reason)
            result.notes.append(f"{reason}: all queues were built anew from the log")
            self._checkpoint.distrust()
            result.clean, result.rebuilt = False, True
            start = self._first
            self._reload(start, result)
            self._index.forget_waiting()
            self._index.resume(clean=False, cut_at=start)
            self._walk(start, start, result)
        for topic, queue_id, end in self._shorter(result):
            # Its last messages are lost, or have expired with its files: no offset is given out twice.
            try:
                queue = self._queues.of_record(topic, queue_id)
            except QueueRefused:
                continue
            if end - queue.max_offset <= _WIDEST_GAP or not queue.max_offset:
                queue.skip_to(end)
                queue.write()
                if not queue.positions:
                    queue.make_last_file()

    def _shorter(self, result: Recovered) -> list[tuple[str, int, int]]:
        """Queues that end before where they did at the last clean stop. After a clean stop that was
        another broker's the table is too old to say anything."""
        if result.clean and result.end != self._ends.log_end:
            return []
        return self._ends.shorter(self._queues, self._deleted)

    def _walk(self, start: int, index_from: int, result: Recovered) -> None:
        result.start = start
        result.records = result.not_served = 0
        result.damage.clear()
        end = start
        touched: set[ConsumeQueue] = set()
        order = self._order(touched, result)
        for run in self._runs(min(start, index_from), result):
            end = run.end
            result.last_store_ms = int(run.store_ms[-1])
            result.last_position = int(run.position[-1])
            result.records += len(run.properties)
            codes, keys = codes_and_keys(run.properties)
            self._index_run(run, keys, index_from)
            self._queue_run(run, codes, start, touched, order, result)
        order.finish()
        for queue in touched:
            queue.new_names = True  # a file made just before the process died may have no lasting name yet
            queue.write()
        result.end = max(end, result.end)

    def _runs(self, start: int, result: Recovered) -> Iterator[Run]:
        size = self._log.segment_size
        result.end = start
        self._last_used = -1
        self._dirt = False
        previous = None
        empty: list[Damage] = []
        for base in self._segments:
            if base + size <= start:
                continue
            if previous is not None and base != previous + size:
                result.damage.append(Damage(self._log.path_of(previous + size), previous + size, base))
            previous = base
            scan = SegmentScan(
                self._disk,
                self._log.path_of(base),
                base,
                size,
                check_crc=self._config.check_crc_on_recover,
            )
            yield from scan.runs(max(start, base))
            if scan.end > max(start, base) or base <= start:
                result.damage += empty  # no valid record in them, but in this one
                empty.clear()
                result.damage += scan.damage
                if self._dirt:
                    result.damage.append(
                        Damage(self._log.path_of(self._last_used), result.end, self._last_used + size)
                    )
                result.end = scan.end
                self._last_used = base
                self._dirt = scan.dirt
            else:
                empty.append(Damage(self._log.path_of(base), base, base + size))

    def _index_run(self, run: Run, keys: list[bytes] | None, index_from: int) -> None:
        """Dispatch records to the index; `keys` as in `codes_and_keys`."""
        positions = run.position
        wanted = (index_from <= positions) & (positions <= self._index_until)
        if self._deleted:
            hides, names = self._deleted.hides, run.names
            places = zip(run.topic.tolist(), positions.tolist(), strict=True)
            wanted &= [not hides(names[number], position) for number, position in places]
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
        self._index.take(*columns)
        if self._index.wants_settling():
            self._index.settle()

    def _order(self, touched: set[ConsumeQueue], result: Recovered) -> QueueOrder:
        def push(queue: ConsumeQueue, facts: Facts) -> None:
            queue.push(facts.position, facts.size, tags_code_of(facts, self._delays), facts.queue_offset)
            touched.add(queue)
            if facts.queue_offset - queue.written >= _WRITE_UNITS:
                queue.write()

        def leave_out(facts: Facts, end: int, _following: Facts | None) -> None:
            place = f"queue offset {facts.queue_offset} of {facts.topic}/{facts.queue_id}"
            _not_served(result, f"record at {facts.position}: {place} where {end} was expected, not served")

        return QueueOrder(self._ends.ends, push, leave_out)

    def _queue_run(
        self,
        run: Run,
        codes: list[int],
        start: int,
        touched: set[ConsumeQueue],
        order: QueueOrder,
        result: Recovered,
    ) -> None:
        """Dispatch records to their queues, from log position `start` on."""
        by_key, waiting, names, properties = self._queues.by_key, order.waiting, run.names, run.properties
        careful = bool(self._deleted)
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
                or topic == SCHEDULE_TOPIC
                or waiting
                or careful
            ):
                if position >= start:
                    facts = Facts(
                        position, size, queue_id, offset, sys_flag, store_ms, topic, properties[row]
                    )
                    self._queue_one(facts, start, order, result)
                continue
            queue.push(position, size, codes[row], offset)
            touched.add(queue)
            if offset - queue.written >= _WRITE_UNITS:
                queue.write()

    def _queue_one(self, facts: Facts, start: int, order: QueueOrder, result: Recovered) -> None:
        """One record that may not follow on its queue's end."""
        topic, queue_id = facts.topic, facts.queue_id
        if not facts.queued or (self._deleted and self._deleted.hides(topic, facts.position)):
            return
        try:
            queue = self._queues.of_record(topic, queue_id)
        except QueueRefused as refusal:
            _not_served(result, f"record at {facts.position}: {refusal.remark}, not served")
            return
        if not order.add(queue, facts, may_wait=start <= self._first):
            raise _StartEarlier(
                f"consume queue {topic}/{queue_id} ends at {queue.max_offset}, not at {facts.queue_offset}"
            )

    # -- afterwards -------------------------------------------------------------------------------

    def _finish(self, result: Recovered) -> None:
        size = self._log.segment_size
        keep = [base for base in self._segments if base < result.end or base <= self._last_used]
        for base in self._segments[len(keep) :]:
            self._disk.unlink(self._log.path_of(base))
        if not self._segments:
            held = sum(queue.max_offset - queue.min_offset for queue in self._queues)
            if held:
                log.error(
                    "the commit log in %s is empty: the queues forget %d messages (is its disk mounted?)",
                    ", ".join(self._config.commit_log_dirs),
                    held,
                )
            for topic in self._queues.topics():
                self._queues.delete_topic(topic)
        if self._dirt and self._last_used >= 0 and result.end < self._last_used + size:
            self._zero_tail(self._last_used, result)
        for queue in self._queues:
            if not result.clean:
                queue.cut()
            queue.next_offset = queue.max_offset
            queue.correct_min(keep[0] if keep else 0)
        self._log.resume(keep, result.end)
        for damage in result.damage:
            log.error("damage in %s: no valid record in positions %d to %d, skipped", *damage)
        if result.not_served > _MOST_NAMED:
            result.notes.append(f"{result.not_served} records in all are not served")
        for note in result.notes:
            log.warning("%s", note)

    def _zero_tail(self, base: int, result: Recovered) -> None:
        """Cut the segment behind the last valid record: what follows becomes zeros."""
        path = self._log.path_of(base)
        result.notes.append(f"{path}: torn tail cut and zeroed from position {result.end} on")
        fd = self._disk.open(path)
        try:
            zero_out(self._disk, fd, result.end - base, self._log.segment_size)
        finally:
            self._disk.close(fd)

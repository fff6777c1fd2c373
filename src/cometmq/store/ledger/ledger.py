"""The raft log of a member: the store's commit log, seen as entries with an index and a term.

A leader's entries come through the appender and `MessageStore.commit`, a follower's as bytes through
`append` and the same commit. Readers see nothing that `commit_to` has not been told to be committed. Indexes
count from 0; all methods belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from cometmq import logs
from cometmq.errors import StoreError, Terminal
from cometmq.protocol.record.framing import ENTRY_SIZE, EntryHead
from cometmq.protocol.record.layout import BLANK_SIZE, ROLLBACK
from cometmq.protocol.record.many import Run
from cometmq.protocol.record.one import encode_record
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Buffer, Disk
from cometmq.store.base.files import WAITING, Reads
from cometmq.store.base.flags import Flag, RunningFlags
from cometmq.store.base.off_loop import OffLoop
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.ledger.entry_index import EntryPlace, sync_all
from cometmq.store.ledger.log_ends import LogEnds
from cometmq.store.ledger.member_files import RaftLogCheckpoint, write_forgotten, write_mark
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.entry_runs import entry_runs
from cometmq.store.log.flush import LogFlusher
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.appender import Appender
from cometmq.store.writing.dispatch import Dispatcher
from cometmq.store.writing.log_cut import cut_segments

log = logs.logger(__name__)

RAFT_TOPIC = "rmq_sys_raft"
"""Topic of the entries that are no message. They are rolled-back records: no queue has a unit of them."""
FOLLOWING = "messages go to the leader of the raft group, this is a follower"
MAX_FRAME_BYTES = 1 << 20
"""Bytes; one entry may have more."""
_MAX_ENTRIES_PER_LOOKUP = 4096  # entries looked up at once


class RaftLogMismatch(StoreError, Terminal):
    """Entries that do not go on where this log ends. expected, got: index of the entry."""

    def __init__(self, expected: int, got: int, problem: str) -> None:
        super().__init__(f"entry {got}, where {expected} was expected: {problem}")
        self.args = (expected, got, problem)
        self.expected = expected
        self.got = got


class EntryRange(NamedTuple):
    """Entries up to `stop` (exclusive): bytes of the log from `position` on, all of one segment."""

    position: int
    length: int
    stop: int


class RaftLog:
    """See above. committed: index of the last entry that is known to be committed, -1 for none."""

    def __init__(
        self,
        *,
        disk: Disk,
        config: StoreConfig,
        clock: Clock,
        flags: RunningFlags,
        commit_log: CommitLog,
        queues: QueueTable,
        flusher: LogFlusher,
        appender: Appender,
        dispatcher: Dispatcher,
        deleted: DeletedTopics,
        ends: LogEnds,
    ) -> None:
        self._disk = disk
        self.directory = config.ledger_dir
        self._clock = clock
        self._flags = flags
        self._log = commit_log
        self._index = ends.index
        self._queues = queues
        self._flusher = flusher
        self._appender = appender
        self._dispatcher = dispatcher
        self._deleted = deleted
        self._tail = appender.entries
        self._tail.first = ends.last + 1
        self._tail.term = ends.term
        self._first = ends.first
        self._first_base = commit_log.min_position
        self._written = self._tail.next  # index behind the last entry that was written
        self._received: list[Run] = []
        self._changing = asyncio.Lock()  # what the device knows of the log
        self.committed = ends.committed
        self.synced = ends.last
        """Index of the last entry that is on the device."""
        self.on_synced: Callable[[int], None] = lambda _index: None
        self.propose: Callable[[int], object] = lambda _count: None
        """Called before so many entries of the appender are written; raises RaftRefused if they may not."""
        self.on_failure: Callable[[OSError], None] = lambda _failure: None
        """Called when a tick, or the index of its entries, could not be written."""
        appender.shut = FOLLOWING
        for run in ends.waiting:
            dispatcher.dispatch_flushed(run.end, [run])
        ends.waiting = []

    # -- looking ----------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """Index of the first entry; of the first one to come, if there is none."""
        base = self._log.min_position
        if base != self._first_base and self._log.segments:
            data = self._log.read(base, ENTRY_SIZE)
            if data is not None:
                self._first, self._first_base = EntryHead.read(bytes(data)).index, base
                self._index.forget_before(self._first)
        return self._first

    @property
    def last(self) -> int:
        """Index of the last entry that was written; `first` - 1 if there is none."""
        return self._written - 1

    @property
    def shown(self) -> int:
        """Log position behind the last committed entry: readers see nothing beyond."""
        there = self.first <= self.committed <= self.last
        return self.place_of(self.committed).end if there else self._log.min_position

    @property
    def persisted(self) -> int:
        """Index of the last entry that is as durable as the flush mode promises."""
        return self.synced if self._flusher.config.sync_flush else self.last

    def term_of(self, index: int) -> int:
        """Raises StoreError for an entry that is not there, OSError."""
        return self.place_of(index).term

    def place_of(self, index: int) -> EntryPlace:
        """Raises StoreError for an entry that is not there, OSError."""
        found = self._places(index, 1)
        if not found:
            raise StoreError(f"entry {index} is not there, the log has {self.first} to {self.last}")
        return found[0]

    def _places(self, index: int, count: int) -> list[EntryPlace]:
        """Of up to `count` entries from `index` on, as many as can be looked up at once."""
        if not self.first <= index <= self.last:
            return []
        count = min(count, self.last + 1 - index)
        tail = self._tail
        if index < tail.first:
            return self._index.places(index, min(count, tail.first - index))
        part = slice(index - tail.first, index - tail.first + count)
        columns = tail.positions[part], tail.sizes[part], tail.terms[part]
        return [EntryPlace(*each) for each in zip(*columns, strict=True)]

    def fit(self, first: int, stop: int) -> int:
        """The end (exclusive) of the entries from `first` on, before `stop`, that a frame may carry."""
        return self.range(first, stop, MAX_FRAME_BYTES).stop

    def range(self, first: int, stop: int, most: int) -> EntryRange:
        """Entries from `first` on, at least one, before `stop`, within `most` bytes, of one segment and one
        term. Raises StoreError if `first` is not there, OSError."""
        start = self.place_of(first)
        places = self._places(first, min(stop - first, _MAX_ENTRIES_PER_LOOKUP)) or [start]
        count = 1
        for before, place in pairwise(places):
            if place.position != before.end or place.term != start.term or place.end - start.position > most:
                break
            count += 1
        return EntryRange(start.position, places[count - 1].end - start.position, first + count)

    def read(self, entries: EntryRange, reads: Reads = WAITING) -> Buffer:
        """Their bytes, from memory or the page cache, or waiting for the device. Raises OSError, StoreError
        when retention has taken them."""
        data = self._log.read(entries.position, entries.length, reads)
        if data is None:
            raise StoreError(f"the log has nothing at {entries.position} any more")
        return data

    # -- appending --------------------------------------------------------------------------------

    def lead(self, term: int) -> None:
        """From now on entries of this term are made here: by `append_own`, after `take_messages` by the
        appender."""
        self._tail.term = term

    def take_messages(self) -> None:
        """Open the appender. All entries must be committed: else queue offsets would be given out twice."""
        if self.committed != self.last or self._dispatcher.waits:
            raise StoreError(f"entries up to {self.last} are not all committed, {self.committed} is")
        for queue in self._queues:
            queue.next_offset = queue.max_offset
        self._appender.shut = ""

    def follow(self) -> None:
        """Make no entries any more. What is in this tick is still written."""
        self._appender.encode_pending()
        self._appender.shut = FOLLOWING

    def append_own(self, body: bytes) -> int:
        """Take an entry that is no message into this tick. Returns its index. Raises OSError."""
        self._appender.encode_pending()
        record = encode_record(RAFT_TOPIC, body, sys_flag=ROLLBACK)
        self._log.claim(ENTRY_SIZE + len(record))
        position = self._log.next
        record = encode_record(
            RAFT_TOPIC, body, sys_flag=ROLLBACK, physical_offset=position + ENTRY_SIZE,
            store_timestamp_ms=self._clock.time_ms(), store_host=self._appender.store_host,
        )  # fmt: skip
        index = self._tail.next
        data = self._tail.head(position, len(record)) + record
        self._log.put(data)
        self._received += entry_runs(data, position)
        return index

    def append(self, data: bytes) -> int:
        """Add whole entries of one segment of the leader's log to this tick, and return the last index.

        Raises:
            RaftLogMismatch: The entries are invalid or do not follow the end of this log.
            StoreError: The store accepts no entries.
            OSError: A read or write failed.
        """
        tail, expected = self._tail, self._tail.next
        if self._appender.waiting():
            raise StoreError("entries of this member's own wait for the commit of the tick")
        head = EntryHead.read(data) if len(data) >= ENTRY_SIZE else None
        if head is None:
            raise RaftLogMismatch(expected, -1, "no entry begins there")
        if self._log.end == self._log.next == self._log.min_position and self.last < self.first:
            self._begin_at(head)
            expected = head.index
        runs = list(entry_runs(data, head.position))
        if not runs or runs[-1].end != head.position + len(data):
            raise RaftLogMismatch(expected, head.index, "it or one behind it is damaged")
        heads = [run.heads for run in runs]
        index: list[int] = [number for each in heads if each is not None for number in each["index"].tolist()]
        terms: list[int] = [number for each in heads if each is not None for number in each["term"].tolist()]
        before = tail.terms[-1] if tail.terms else self._term_before(expected)
        if index != list(range(expected, expected + len(index))) or terms != sorted(terms):
            raise RaftLogMismatch(expected, index[0], "indexes and terms do not follow each other")
        if terms[0] < before:
            raise RaftLogMismatch(expected, index[0], f"its term is {terms[0]}, behind {before}")
        if self._flags.reasons.keys() - {Flag.DISK_FULL}:  # a full disk says so itself
            raise StoreError(f"the store takes no entries: {self._flags.why()}")
        self._claim(head, len(data))
        self._log.put(data)
        for each in heads:
            assert each is not None
            tail.positions += each["position"].tolist()
            tail.sizes += each["size"].tolist()
            tail.terms += each["term"].tolist()
        self._received += runs
        return index[-1]

    def _term_before(self, index: int) -> int:
        return self.term_of(index - 1) if self.first <= index - 1 else -1

    def _begin_at(self, head: EntryHead) -> None:
        """The first entry of an empty log says where it begins."""
        if head.position % self._log.segment_size or head.index < 0:
            raise RaftLogMismatch(self._tail.next, head.index, "a log begins with a segment")
        if head.position != self._log.end:
            self._log.begin_at(head.position)
        self._tail.first = self._written = self._first = head.index
        self._first_base = head.position
        for queue in self._queues:  # of a log that was reset
            queue.correct_min(head.position)
            if queue.min_offset == queue.max_offset:
                queue.forget_all()  # it may be far to its next message

    def _claim(self, head: EntryHead, length: int) -> None:
        log = self._log
        if head.position == log.next and (
            log.segment_base < 0 or log.next + length + BLANK_SIZE <= log.limit
        ):
            log.claim(length)
        elif head.position == log.limit and length + BLANK_SIZE <= log.segment_size:
            log.roll()
            log.claim(length)
        else:
            raise RaftLogMismatch(
                self._tail.next,
                head.index,
                f"it lies at {head.position}, this log goes on at {log.next}: are segments of one size?",
            )

    # -- the tick ---------------------------------------------------------------------------------

    def take_received(self) -> Sequence[Run]:
        """The entries of this tick that the appender has not made, for its commit."""
        received, self._received = self._received, []
        return received

    def take_back(self) -> None:
        """The entries of this tick do not exist."""
        self._tail.take_back(self._tail.next - self._written)

    def not_written(self, failure: OSError) -> None:
        """The tick could not be written."""
        self.take_back()
        self.on_failure(failure)

    def written(self) -> None:
        """The tick was written."""
        self._written = self._tail.next

    def flushed(self, end: int) -> None:
        """Write the index of the entries before position `end` of the log, which are on the device.

        What cannot be written is written by a later call.
        """
        tail = self._tail
        count = min(self._written - tail.first, len(tail.positions))
        while count and tail.positions[count - 1] + tail.sizes[count - 1] > end:
            count -= 1
        if not count:
            return
        try:
            self._index.write(tail.first, tail.positions[:count], tail.sizes[:count], tail.terms[:count])
        except OSError as failure:
            log.critical("the index of entries could not be written: %s", failure)
            self.on_failure(failure)
            return
        tail.forget(count)
        self.synced = tail.first - 1
        self.on_synced(self.synced)

    def commit_to(self, index: int) -> None:
        """Entries up to `index` are committed: readers may see them. Raises StoreError, OSError."""
        if index > self.committed:
            self._dispatcher.committed(self.place_of(index).end)
            self.committed = index

    # -- cutting ----------------------------------------------------------------------------------

    async def truncate(self, index: int) -> None:
        """Drop the entries from `index` on, durably. Nothing may be appended meanwhile. Raises StoreError
        when one of them is committed, OSError."""
        async with self._changing:
            await self._flusher.idle()
            self.cut(index)

    def cut(self, index: int) -> None:
        """What `truncate` does, while no sync is under way.

        Each step leaves a log that the next start takes for one with a torn tail, if it is the last one done.
        """
        if index <= self.committed:
            raise StoreError(f"entry {self.committed} is committed, so {index} cannot be dropped")
        if self._log.next != self._log.end or self._received:
            raise StoreError("the tick must be committed first")
        if index > self.last:
            return
        # A blank in front of it goes, too: another leader may put another entry there.
        position = self.place_of(index - 1).end if index > self.first else self.place_of(index).position
        self._deleted.lower(position)
        self.synced = min(self.synced, index - 1)
        self._save(index - 1)
        self._tail.take_back(max(0, self._tail.next - max(index, self._tail.first)))
        if index < self._tail.first:
            self._index.cut(index)
            self._tail.first = index
        self._written = index
        for segment in self._log.segments_to_sync():  # of which the log will know nothing any more
            if segment.base < position:
                self._disk.fdatasync(segment.fd)
        segments = self._log.let_go()
        cut_segments(self._disk, self._log.places, self._log.segment_size, position)
        self._log.resume([base for base in segments if base < position] or segments[:1], position)
        self._flusher.flushed = min(self._flusher.flushed, position)
        self._dispatcher.forget_waiting()
        following = self.committed + 1
        while following < index:
            entries = self.range(following, index, MAX_FRAME_BYTES)
            following = entries.stop
            for run in entry_runs(bytes(self.read(entries)), entries.position, check_crc=False):
                self._dispatcher.dispatch_flushed(run.end, [run])

    async def reset(self, first: int) -> None:
        """Drop the whole log, durably: entry `first` comes next, and says where it begins. What was committed
        is still so, its leader has only deleted it. Nothing may be appended meanwhile. Raises OSError."""
        async with self._changing:
            await self._flusher.idle()
            self._reset(first)

    def _reset(self, first: int) -> None:
        end = self._log.end
        self.synced = self.committed = first - 1
        write_mark(self._disk, self.directory, RaftLogCheckpoint(-1, -1, -1))
        self._index.cut(0)
        places = self._log.places
        for base in reversed(self._log.let_go()):
            self._disk.unlink(places.path_of(base))
            places.forget(base)
        for directory in places.all:
            self._disk.fsync_dir(directory)
        self._log.resume([], end)
        self._tail.take_back(len(self._tail.positions))
        self._tail.first = self._written = self._first = first
        self._dispatcher.forget_waiting()

    # -- keeping ----------------------------------------------------------------------------------

    def distrust(self, why: str) -> None:
        """Note that log, term and vote may be lost that others of the group count on. Raises OSError."""
        write_forgotten(self._disk, self.directory, why)

    def save(self) -> None:
        """Note how far the log is, on the device when this returns. Raises OSError."""
        self._save(self.last)

    def _save(self, last: int) -> None:
        self._index.sync()
        write_mark(self._disk, self.directory, self._mark(last))

    def _mark(self, last: int) -> RaftLogCheckpoint:
        """What it says of entries must be true of this log: one that has begun anew is empty at first."""
        known = (each if each >= self._first else -1 for each in (last, self.committed, self.synced))
        return RaftLogCheckpoint(*known)

    async def save_in_thread(self, off_loop: OffLoop) -> None:
        """The same while the loop does other work. Raises OSError."""
        async with self._changing:
            mark, paths = self._mark(self.last), self._index.take_unsynced()
            try:
                await off_loop.run(_save, self._disk, self.directory, mark, paths)
            except OSError:
                self._index.give_back(paths)
                raise


def _save(disk: Disk, directory: str, mark: RaftLogCheckpoint, paths: list[str]) -> None:
    sync_all(disk, paths)
    write_mark(disk, directory, mark)

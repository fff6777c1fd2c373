"""The raft log of a member: the store's commit log as entries with an index and a term.

A leader's entries come from the appender, a follower's as bytes from `append`. Both are written by
`MessageStore.commit`. Readers see only the entries that `commit_to` has committed. Indexes count from 0. All
methods belong to the thread of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cometmq import logs
from cometmq.errors import StoreError, Terminal
from cometmq.protocol.record.framing import ENTRIES, ENTRY_SIZE, HEAD_KIND, EntryHead, follows
from cometmq.protocol.record.layout import BLANK_SIZE, ROLLBACK
from cometmq.protocol.record.many import MAX_BATCH_RECORDS, MIN_GROUP_RECORDS, RecordGroup, valid_group
from cometmq.protocol.record.one import Facts, encode_record, record_facts
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Buffer, Disk
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.files import WAITING, Reads
from cometmq.store.base.refusal import Flag, RunningFlags
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.raft_log.entry_index import EntryLocation, sync_all
from cometmq.store.raft_log.log_ends import LogEnds
from cometmq.store.raft_log.member_files import RaftLogCheckpoint, write_checkpoint, write_forgotten
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.appender import Appender
from cometmq.store.writing.dispatch import Dispatcher
from cometmq.store.writing.log_cut import cut_segments

log = logs.logger(__name__)

RAFT_TOPIC = "rmq_sys_raft"
"""The topic of entries that are no messages. They are marked as rolled back, so they get no queue units."""
FOLLOWING = "this broker is a follower, send to the leader of its raft group"
MAX_FRAME_BYTES = 1 << 20
"""Maximum total size, in bytes, of the entries in one frame. A single entry may be larger."""
_MAX_ENTRIES_PER_LOOKUP = 4096  # maximum number of entries that one call locates


class RaftLogMismatch(StoreError, Terminal):
    """Received entries do not continue the raft log. `expected` and `got` are indexes of entries."""

    def __init__(self, expected: int, got: int, problem: str) -> None:
        super().__init__(f"entry {got}, where {expected} was expected: {problem}")
        self.args = (expected, got, problem)
        self.expected = expected
        self.got = got


class EntryRange(NamedTuple):
    """Consecutive entries in one segment: log position, length in bytes, and index after the last entry."""

    position: int
    length: int
    stop: int


@dataclass(eq=False, kw_only=True)
class RaftLog:
    """The raft log of one member. `committed` is the index of the last committed entry, or -1."""

    disk: Disk
    config: InitVar[StoreConfig]
    clock: Clock
    flags: RunningFlags
    commit_log: CommitLog
    queues: QueueTable
    flusher: LogFlusher
    appender: Appender
    dispatcher: Dispatcher
    deleted: DeletedTopics
    ends: InitVar[LogEnds]

    def __post_init__(self, config: StoreConfig, ends: LogEnds) -> None:
        self.directory = config.raft_log_dir
        self._index = ends.index
        self._tail = self.appender.entries
        self._tail.first = ends.last + 1
        self._tail.term = ends.term
        self._first = ends.first
        self._first_base = self.commit_log.min_position
        self._written = self._tail.next  # Index after the last written entry
        self._received: list[RecordGroup] = []
        self._changing = asyncio.Lock()  # Held while the log is truncated, or while its checkpoint is written
        self.committed = ends.committed
        self.synced = ends.last
        """The index of the last entry that has been synced to disk."""
        self.on_synced: Callable[[int], None] = lambda _index: None
        self.propose: Callable[[int], object] = lambda _count: None
        """Called before entries of the appender are written, with their count. May raise RaftRefused."""
        self.on_failure: Callable[[OSError], None] = lambda _failure: None
        """Called if entries, or their index, could not be written."""
        self.appender.why_closed = FOLLOWING
        for group in ends.waiting:
            self.dispatcher.dispatch_flushed(group.end, [group])
        ends.waiting = []

    # -- reading ----------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The index of the first entry. In an empty log, the index of the next entry."""
        base = self.commit_log.min_position
        if base != self._first_base and self.commit_log.segments:
            data = self.commit_log.read(base, ENTRY_SIZE)
            if data is not None:
                self._first, self._first_base = EntryHead.read(bytes(data)).index, base
                self._index.forget_before(self._first)
        return self._first

    @property
    def last(self) -> int:
        """The index of the last written entry; `first` - 1 if there is none."""
        return self._written - 1

    @property
    def shown(self) -> int:
        """The log position after the last committed entry. Readers see nothing after it."""
        there = self.first <= self.committed <= self.last
        return self.location_of(self.committed).end if there else self.commit_log.min_position

    @property
    def persisted(self) -> int:
        """The index of the last entry that counts as stored: synced (SYNC_FLUSH) or written (ASYNC_FLUSH)."""
        return self.synced if self.flusher.config.sync_flush else self.last

    def term_of(self, index: int) -> int:
        """Return the term of an entry. Raises OSError, and StoreError if the entry does not exist."""
        return self.location_of(index).term

    def location_of(self, index: int) -> EntryLocation:
        """Return the location of an entry. Raises OSError, and StoreError if the entry does not exist."""
        found = self._locations(index, 1)
        if not found:
            raise StoreError(f"entry {index} does not exist, the log has {self.first} to {self.last}")
        return found[0]

    def _locations(self, index: int, count: int) -> list[EntryLocation]:
        """Return the locations of at most `count` entries from `index` on, all in one file or in memory."""
        if not self.first <= index <= self.last:
            return []
        count = min(count, self.last + 1 - index)
        tail = self._tail
        if index < tail.first:
            return self._index.locations(index, min(count, tail.first - index))
        part = slice(index - tail.first, index - tail.first + count)
        columns = tail.positions[part], tail.sizes[part], tail.terms[part]
        return [EntryLocation(*each) for each in zip(*columns, strict=True)]

    def fit(self, first: int, stop: int) -> int:
        """Return the index, at most `stop`, after the last entry of a frame that begins with `first`."""
        return self.range(first, stop, MAX_FRAME_BYTES).stop

    def range(self, first: int, stop: int, most: int) -> EntryRange:
        """Return the range of the entries from `first` to before `stop` that fit into `most` bytes.

        All entries of the range are in one segment and have the same term. The range always contains the
        entry `first`, even if it is larger than `most`. Raises OSError, and StoreError if that entry does not
        exist.
        """
        start = self.location_of(first)
        locations = self._locations(first, min(stop - first, _MAX_ENTRIES_PER_LOOKUP)) or [start]
        count = 1
        for before, location in pairwise(locations):
            if (
                location.position != before.end
                or location.term != start.term
                or location.end - start.position > most
            ):
                break
            count += 1
        return EntryRange(start.position, locations[count - 1].end - start.position, first + count)

    def read(self, entries: EntryRange, reads: Reads = WAITING) -> Buffer:
        """Return the bytes of entries.

        Raises:
            NotInMemory: The bytes are on disk, and `reads` does not allow the read to wait.
            StoreError: Retention has deleted the entries.
            OSError: A read failed.
        """
        data = self.commit_log.read(entries.position, entries.length, reads)
        if data is None:
            raise StoreError(f"the log no longer contains the data at position {entries.position}")
        return data

    # -- appending --------------------------------------------------------------------------------

    def lead(self, term: int) -> None:
        """Set the term of new entries: from `append_own` and, after `take_messages`, from the appender."""
        self._tail.term = term

    def take_messages(self) -> None:
        """Open the appender for messages. Raises StoreError unless all entries are committed.

        If the appender were opened earlier, queue offsets of uncommitted messages could be assigned twice.
        """
        if self.committed != self.last or self.dispatcher.waits:
            raise StoreError(f"entries are committed up to {self.committed} only, not up to {self.last}")
        for queue in self.queues:
            queue.next_offset = queue.max_offset
        self.appender.why_closed = ""

    def follow(self) -> None:
        """Close the appender for new messages. The messages that it has accepted are still written."""
        self.appender.encode_pending()
        self.appender.why_closed = FOLLOWING

    def append_own(self, body: bytes) -> int:
        """Append an entry without a message, to be written by the next commit, and return its index."""
        self.appender.encode_pending()
        record = encode_record(RAFT_TOPIC, body, sys_flag=ROLLBACK)
        self.commit_log.claim(ENTRY_SIZE + len(record))
        position = self.commit_log.next
        record = encode_record(
            RAFT_TOPIC, body, sys_flag=ROLLBACK, physical_offset=position + ENTRY_SIZE,
            store_timestamp_ms=self.clock.time_ms(), store_host=self.appender.store_host,
        )  # fmt: skip
        index = self._tail.next
        data = self._tail.head(position, len(record)) + record
        self.commit_log.put(data)
        self._received += entry_groups(data, position)
        return index

    def append(self, data: bytes) -> int:
        """Append entries of the leader's log, and return the index of the last entry.

        `data` consists of complete entries of one segment. They are written at the end of the loop iteration.

        Raises:
            RaftLogMismatch: The entries are invalid or do not follow the end of this log.
            StoreError: The store accepts no entries.
            OSError: A read or write failed.
        """
        tail, expected = self._tail, self._tail.next
        if self.appender.waiting():
            raise StoreError("the member's own entries have not been written yet")
        head = EntryHead.read(data) if len(data) >= ENTRY_SIZE else None
        if head is None:
            raise RaftLogMismatch(expected, -1, "no entry begins there")
        if (
            self.commit_log.end == self.commit_log.next == self.commit_log.min_position
            and self.last < self.first
        ):
            self._begin_at(head)
            expected = head.index
        groups = list(entry_groups(data, head.position))
        if not groups or groups[-1].end != head.position + len(data):
            raise RaftLogMismatch(expected, head.index, "the entry or a later one is damaged")
        heads = [group.heads for group in groups]
        index: list[int] = [number for each in heads if each is not None for number in each["index"].tolist()]
        terms: list[int] = [number for each in heads if each is not None for number in each["term"].tolist()]
        before = tail.terms[-1] if tail.terms else self._term_before(expected)
        if index != list(range(expected, expected + len(index))) or terms != sorted(terms):
            raise RaftLogMismatch(expected, index[0], "indexes or terms are not consecutive")
        if terms[0] < before:
            raise RaftLogMismatch(expected, index[0], f"its term is {terms[0]}, behind {before}")
        # A full disk is no reason to refuse entries before the write, as the write itself raises an error.
        if self.flags.reasons.keys() - {Flag.DISK_FULL}:
            raise StoreError(f"the store accepts no entries: {self.flags.why()}")
        self._claim(head, len(data))
        self.commit_log.put(data)
        for each in heads:
            assert each is not None
            tail.positions += each["position"].tolist()
            tail.sizes += each["size"].tolist()
            tail.terms += each["term"].tolist()
        self._received += groups
        return index[-1]

    def _term_before(self, index: int) -> int:
        return self.term_of(index - 1) if self.first <= index - 1 else -1

    def _begin_at(self, head: EntryHead) -> None:
        """Let an empty log begin with the entry whose header is `head`."""
        if head.position % self.commit_log.segment_size or head.index < 0:
            raise RaftLogMismatch(self._tail.next, head.index, "a log begins with a segment")
        if head.position != self.commit_log.end:
            self.commit_log.begin_at(head.position)
        self._tail.first = self._written = self._first = head.index
        self._first_base = head.position
        for queue in self.queues:  # Queues of an empty log remain from the time before a `reset`
            queue.correct_min(head.position)
            if queue.min_offset == queue.max_offset:
                # The next record of an empty queue may have any offset. No filler units are added before it.
                queue.forget_all()

    def _claim(self, head: EntryHead, length: int) -> None:
        log = self.commit_log
        if head.position == log.next and (
            log.segment_base < 0 or log.next + length + BLANK_SIZE <= log.limit
        ):
            log.claim(length)
        elif head.position == log.limit and length + BLANK_SIZE <= log.segment_size:
            log.roll()
            log.claim(length)
        else:
            why = f"it lies at {head.position}, this log continues at {log.next}: are segments of one size?"
            raise RaftLogMismatch(self._tail.next, head.index, why)

    # -- the tick ---------------------------------------------------------------------------------

    def take_received(self) -> Sequence[RecordGroup]:
        received, self._received = self._received, []
        return received

    def discard_tick(self) -> None:
        self._tail.remove_last(self._tail.next - self._written)

    def not_written(self, failure: OSError) -> None:
        """Remove all unwritten entries, and report `failure`, the reason why they were not written."""
        self.discard_tick()
        self.on_failure(failure)

    def written(self) -> None:
        self._written = self._tail.next

    def flushed(self, end: int) -> None:
        """Add the entries before log position `end`, which have been synced to disk, to the index.

        If the index cannot be written, a later call adds the entries.
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
        """Make the entries up to `index`, which are committed, visible. Raises StoreError, OSError."""
        if index > self.committed:
            self.dispatcher.committed(self.location_of(index).end)
            self.committed = index

    # -- cutting ----------------------------------------------------------------------------------

    async def truncate(self, index: int) -> None:
        """Remove the entry `index` and all later ones, durably.

        The caller must not append entries during the call. Raises OSError, and StoreError if a removed entry
        is committed.
        """
        async with self._changing:
            await self.flusher.idle()
            self.cut(index)

    def cut(self, index: int) -> None:
        """Remove the entry `index` and all later ones. No sync may be in progress.

        If the removal is interrupted at any step, the next start finds and removes a torn tail.
        """
        if index <= self.committed:
            raise StoreError(f"entry {self.committed} is committed, so {index} cannot be dropped")
        if self.commit_log.next != self.commit_log.end or self._received:
            raise StoreError("entries cannot be removed while appended entries have not been written")
        if index > self.last:
            return
        # The new end of the log is the end of the entry before `index`. If a blank record lies between that
        # entry and the entry `index`, the blank record is removed, too, because another leader may write an
        # entry at its position.
        position = self.location_of(index - 1).end if index > self.first else self.location_of(index).position
        self.deleted.lower(position)
        self.synced = min(self.synced, index - 1)
        self._save(index - 1)
        self._tail.remove_last(max(0, self._tail.next - max(index, self._tail.first)))
        if index < self._tail.first:
            self._index.cut(index)
            self._tail.first = index
        self._written = index
        for segment in self.commit_log.segments_to_sync():  # `close_segments`, called below, closes the files
            if segment.base < position:
                self.disk.fdatasync(segment.fd)
        segments = self.commit_log.close_segments()
        cut_segments(self.disk, self.commit_log.directories, self.commit_log.segment_size, position)
        self.commit_log.resume([base for base in segments if base < position] or segments[:1], position)
        self.flusher.flushed = min(self.flusher.flushed, position)
        self.dispatcher.forget_waiting()
        following = self.committed + 1
        while following < index:
            entries = self.range(following, index, MAX_FRAME_BYTES)
            following = entries.stop
            for group in entry_groups(bytes(self.read(entries)), entries.position, check_crc=False):
                self.dispatcher.dispatch_flushed(group.end, [group])

    async def reset(self, first: int) -> None:
        """Remove the whole log, durably. Raises OSError.

        It is called if this member is so far behind that the leader has already deleted the entries that
        follow this log. The log can then continue only with the entry `first`, at the log position of that
        entry. The entries before `first` count as committed. The caller must not append entries during the
        call.
        """
        async with self._changing:
            await self.flusher.idle()
            self._reset(first)

    def _reset(self, first: int) -> None:
        end = self.commit_log.end
        self.synced = self.committed = first - 1
        write_checkpoint(self.disk, self.directory, RaftLogCheckpoint(-1, -1, -1))
        self._index.cut(0)
        directories = self.commit_log.directories
        for base in reversed(self.commit_log.close_segments()):
            self.disk.unlink(directories.path_of(base))
            directories.forget(base)
        for directory in directories.all:
            self.disk.fsync_dir(directory)
        self.commit_log.resume([], end)
        self._tail.remove_last(len(self._tail.positions))
        self._tail.first = self._written = self._first = first
        self.dispatcher.forget_waiting()

    # -- the member's files -----------------------------------------------------------------------

    def record_loss(self, why: str) -> None:
        """Record durably that the member may have lost its log, term and vote. Raises OSError."""
        write_forgotten(self.disk, self.directory, why)

    def save(self) -> None:
        """Write the checkpoint and sync it to disk. Raises OSError."""
        self._save(self.last)

    def _save(self, last: int) -> None:
        self._index.sync()
        write_checkpoint(self.disk, self.directory, self._checkpoint(last))

    def _checkpoint(self, last: int) -> RaftLogCheckpoint:
        """Return the state of the log for its checkpoint file. An index before the first entry becomes -1."""
        known = (each if each >= self._first else -1 for each in (last, self.committed, self.synced))
        return RaftLogCheckpoint(*known)

    async def save_in_thread(self, executor: StoreExecutor) -> None:
        """Write the checkpoint in a thread. Raises OSError."""
        async with self._changing:
            checkpoint, paths = self._checkpoint(self.last), self._index.take_unsynced()
            try:
                await executor.run(_save, self.disk, self.directory, checkpoint, paths)
            except OSError:
                self._index.restore_unsynced(paths)
                raise


def _save(disk: Disk, directory: str, checkpoint: RaftLogCheckpoint, paths: list[str]) -> None:
    sync_all(disk, paths)
    write_checkpoint(disk, directory, checkpoint)


def entry_groups(data: bytes, position: int, *, check_crc: bool = True) -> Iterator[RecordGroup]:
    """Yield the consecutive valid entries in `data`, which begins at log position `position`.

    The iteration ends before the first bytes that are not a valid entry.
    """
    at = 0
    while at < len(data):
        group = valid_group(data, at, position + at, MAX_BATCH_RECORDS, check_crc=check_crc, framing=ENTRIES)
        if group is None:
            group = _few(data, at, position, check_crc)
            if group is None:
                return
        yield group
        at = group.end - position


def _few(data: bytes, at: int, position: int, check_crc: bool) -> RecordGroup | None:
    found: list[Facts] = []
    heads = b""
    while at + ENTRY_SIZE < len(data) and len(found) < MIN_GROUP_RECORDS:
        facts = record_facts(data, at + ENTRY_SIZE, position + at + ENTRY_SIZE, check_crc=check_crc)
        head = data[at : at + ENTRY_SIZE]
        if facts is None or not follows(head, heads[-ENTRY_SIZE:], position + at, facts.size):
            break
        found.append(facts)
        heads += head
        at += facts.size + ENTRY_SIZE
    return RecordGroup.of(found)._replace(heads=np.frombuffer(heads, HEAD_KIND)) if found else None

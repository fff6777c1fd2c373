"""The store as one object, with the operations that involve several of its parts.

The appender encodes a message into the log's write buffer and assigns its offsets. `commit`, called at the
end of each loop iteration, writes the buffer with one system call and dispatches its records: it creates
their queue units and index keys, and reports their arrival. With SYNC_FLUSH the dispatch waits for the flush,
so readers see no message that a power failure could remove.

Budget per 1 KiB message, with 32 per loop iteration: 1.3 µs for append and 1.0 µs for commit. A lone message
takes 3.6 µs and 7.3 µs. Under the load of Apache's client, a commit takes 2.5 µs (docs/performance.md). All
methods belong to the thread of the loop unless stated otherwise.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cometmq import logs
from cometmq.errors import RaftRefused
from cometmq.protocol.codes import ResponseCode
from cometmq.store.background.derived_writer import DerivedWriter
from cometmq.store.background.fullness import Fullness
from cometmq.store.background.retention import Retention
from cometmq.store.background.space_ahead import SpaceAhead
from cometmq.store.background.tasks import BackgroundTasks
from cometmq.store.background.topic_deletion import TopicDeletion
from cometmq.store.background.topic_retention import TopicRetention
from cometmq.store.background.upkeep import Upkeep
from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.clock import Clock, SteadyTime
from cometmq.store.base.config import ABORT, CHECKPOINT, CONSUME_QUEUES, INDEX, SLAVE, StoreConfig
from cometmq.store.base.disk import Disk, make_directory
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.files import CACHED, Reads, StoreFiles
from cometmq.store.base.guards import AbortFile, StoreLock
from cometmq.store.base.refusal import Flag, RunningFlags, StoreRefused
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_ext import ExtFiles
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.directories import LogDirectories
from cometmq.store.log.flush import LogFlusher
from cometmq.store.reading.lookup import Lookup
from cometmq.store.reading.queue_reader import (
    QueueReader,
    ReadResult,
    RecordFilter,
    TagFilter,
    physical_memory,
)
from cometmq.store.recovery.recovery import EntriesLost, Recovery
from cometmq.store.recovery.recovery_scan import Recovered
from cometmq.store.recovery.store_layout import check_lengths, check_locations
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.min_offsets import MinOffsets
from cometmq.store.writing.appender import Appender, Refused, TickMessage
from cometmq.store.writing.dispatch import Dispatcher, WrittenGroup, count_of, last_of
from cometmq.store.writing.log_cut import LogCutFile, finish_cut
from cometmq.store.writing.record_dispatch import Arrivals
from cometmq.store.writing.replica import ReplicaLog

if TYPE_CHECKING:
    from cometmq.store.raft_log.log_ends import LogEnds
    from cometmq.store.raft_log.raft_log import RaftLog
    from cometmq.store.tiered.layout import ObjectStore
    from cometmq.store.tiered.reads import TieredReads
    from cometmq.store.tiered.uploads import TieredUploads

log = logs.logger(__name__)

_STEP_BACK_MS = 1000


class Commit(msgspec.Struct, gc=False):
    """The outcome of one `commit`, for all messages since the previous one.

    A message becomes visible when consumers can read it: at once, or after its flush or its raft commit.

    Attributes:
        placed: The messages that were encoded. They are stored unless `error` is set.
        refused: The messages that were refused.
        error: Why none of the `placed` messages is stored, or None.
        end_offset: The end of the log.
        visible: The number of messages that became visible during this `commit`.
        arrivals: Those of the `visible` messages whose queues are in `Dispatcher.watched`.
    """

    placed: list[TickMessage]
    refused: list[Refused]
    error: StoreRefused | None
    end_offset: int
    visible: int = 0
    arrivals: Arrivals = []


class MessageStore:
    """An open store, created by `open`.

    `start` moves background work to a loop; without it, all work is done on the calling thread.

    An operation of a single part is a method of that part: `appender`, `replica`, `queues`, `lookups`,
    `index`, `log`, `flusher`, `flags`, `fullness`, `retention`, `topic_retention`, `deletion`, and `executor`
    for queries that may wait for the disk. The methods of the store involve several parts.
    """

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        clock: Clock,
        lock: StoreLock,
        abort: AbortFile,
        objects: ObjectStore | None = None,
    ) -> None:
        """Create the parts of the store. Use `MessageStore.open` instead."""
        self.config = config
        self.disk = disk
        self._lock = lock
        self._abort = abort
        self.flags = RunningFlags()
        self.files = StoreFiles(disk)
        self.executor = StoreExecutor(disk)
        self.slave = config.broker_role == SLAVE  # Not updated: a changed role takes effect at the next start
        self._closed = False
        self._load_files(clock)
        reads = None
        if objects is not None:
            # Imported here, because the start of a broker without tiered storage is faster without it.
            from cometmq.store.tables.tiered_segments import TieredSegments
            from cometmq.store.tiered.reads import TieredReads

            reads = self.log.older = TieredReads(
                objects, TieredSegments(disk, config.root), self.log.segment_size
            )
        ends = self._recover_log()
        self._make_write_path(clock, ends)
        self._make_background(clock, reads)

    def _load_files(self, clock: Clock) -> None:
        """Create the objects for log, queues, index, checkpoint and tables. Some of them load their files."""
        disk, config = self.disk, self.config
        self.log = CommitLog(self.files, LogDirectories(disk, config), config)
        self.queues = QueueTable(self.files, config)
        self.index = IndexService(self.files, clock, config)
        self.checkpoint = Checkpoint(disk, config.location(CHECKPOINT))
        self.deleted = DeletedTopics(disk, config.root)
        self._clean_ends = CleanEnds(disk, config.root)

    def _recover_log(self) -> LogEnds | None:
        """Recover log, queues and index. Return the LogEnds of a raft log that recovery used."""
        try:
            ends = self._find_raft_log_ends() if self.config.enable_d_leger_commit_log else None
            self.recovered = self._recover(ends)
        except EntriesLost:
            self.files.close()
            raise
        self.min_offsets = MinOffsets(self.disk, self.config.root)
        self.min_offsets.apply(self.queues)
        return ends

    def _find_raft_log_ends(self) -> LogEnds:
        # Imported here, because the start of a broker outside a raft group is faster without it.
        from cometmq.store.raft_log.log_ends import find_log_ends

        saved = self.checkpoint.saved
        shown = 0 if saved is None else saved.position
        ends = find_log_ends(self.files, self.config, self.log.directories, shown)
        # If the raft log has lost entries, queues and tables may refer to the lost entries. So recovery must
        # not trust queues and tables.
        if ends.suspect:
            self._abort.set()
            self.checkpoint.reset()
            self._clean_ends.forget()
            LogCutFile(self.disk, self.config.root).forget_timers()
        return ends

    def _recover(self, ends: LogEnds | None) -> Recovered:
        check_lengths(self.disk, self.config, self._clean_ends)
        finish_cut(
            self.disk, LogCutFile(self.disk, self.config.root), self.log.directories, self.log.segment_size,
            self._abort, self.checkpoint, self._clean_ends, self.deleted,
        )  # fmt: skip
        clean = not self._abort.exists()
        self._abort.set()
        recovery = Recovery(
            disk=self.disk, config=self.config, commit_log=self.log, queues=self.queues, index=self.index,
            checkpoint=self.checkpoint, deleted=self.deleted, ends=self._clean_ends,
            raft_log=ends,
        )  # fmt: skip
        return recovery.run(clean=clean)

    def _make_write_path(self, clock: Clock, ends: LogEnds | None) -> None:
        """Create the parts of the store that write and read messages."""
        config, log, queues = self.config, self.log, self.queues
        self.flusher = flusher = LogFlusher(log, self.disk, clock, config)
        flusher.written_ms = self.recovered.last_store_ms or self.checkpoint.physic_ms
        flusher.on_failure = self._flush_failed
        self.newest_ms = max(self.recovered.newest_ms, flusher.written_ms)
        """The latest known store time of a record, in ms, by the clock of this machine or of a leader."""
        self.dispatcher = Dispatcher(queues, self.index, self.deleted, config, self._dispatched)
        self.reader = QueueReader(log, config, physical_memory())
        self.lookups = Lookup(log, queues, self.index, self.executor, config)
        self.appender = Appender(log, queues, clock, config, self.flags)
        self.replica = ReplicaLog(log, flusher, self.flags, self._written)
        self.raft_log = None if ends is None else self._make_raft_log(clock, ends)
        """The raft log, which reads and writes the commit log as entries; None unless in raft mode."""
        flusher.on_flushed.append(self.dispatcher.flushed if self.raft_log is None else self.raft_log.flushed)

    def _make_raft_log(self, clock: Clock, ends: LogEnds) -> RaftLog:
        from cometmq.store.raft_log.raft_log import RaftLog

        return RaftLog(
            disk=self.disk, config=self.config, clock=clock, flags=self.flags, commit_log=self.log,
            queues=self.queues, flusher=self.flusher, appender=self.appender, dispatcher=self.dispatcher,
            deleted=self.deleted, ends=ends,
        )  # fmt: skip

    def _make_background(self, clock: Clock, reads: TieredReads | None) -> None:
        """Create the parts of the store that work in the background."""
        disk, config, queues, flusher = self.disk, self.config, self.queues, self.flusher
        executor, deleted, index = self.executor, self.deleted, self.index
        self.tasks = tasks = BackgroundTasks()
        self.space = SpaceAhead(self.log, clock)
        self.writer = DerivedWriter(
            disk=disk, clock=clock, config=config, flags=self.flags, executor=executor, tasks=tasks,
            commit_log=self.log, flusher=flusher, queues=queues, index=index, min_offsets=self.min_offsets,
            checkpoint=self.checkpoint, deleted=deleted, recovered=self.recovered,
        )  # fmt: skip
        ext = ExtFiles(disk, config.root)
        steady = SteadyTime(clock, flusher.written_ms)
        self.tiered = None if reads is None else self._make_tiered(reads, steady)
        """The copies of the log's segments in an object store; None without tiered storage."""
        self.fullness = Fullness(
            disk=disk, config=config, flags=self.flags, executor=executor, directories=self.log.directories
        )
        self.retention = Retention(
            disk=disk, clock=clock, steady=steady, config=config, flags=self.flags, executor=executor,
            tasks=tasks, fullness=self.fullness, commit_log=self.log, queues=queues, index=index, ext=ext,
            make_durable_before=self.writer.make_durable_before, on_space_freed=self.space.retry_reservation,
            tiered=self.tiered,
        )  # fmt: skip
        self.topic_retention = TopicRetention(
            steady=steady, executor=executor, tasks=tasks, queues=queues, lookups=self.lookups,
            min_offsets=self.min_offsets,
        )  # fmt: skip
        self.deletion = TopicDeletion(
            disk=disk, executor=executor, tasks=tasks, commit_log=self.log, appender=self.appender,
            queues=queues, ext=ext, deleted=deleted, min_offsets=self.min_offsets,
        )  # fmt: skip
        self.dispatcher.received.on_restart = self.deletion.on_restart
        raft_log = self.raft_log
        self.upkeep = Upkeep(
            disk=disk, config=config, executor=executor, tasks=tasks, commit_log=self.log, flusher=flusher,
            space=self.space, writer=self.writer, fullness=self.fullness, retention=self.retention,
            topic_retention=self.topic_retention,
            save_raft_log=None if raft_log is None else partial(raft_log.save_in_thread, executor),
            tiered=self.tiered,
        )  # fmt: skip

    def _make_tiered(self, reads: TieredReads, steady: SteadyTime) -> TieredUploads:
        from cometmq.store.tiered.uploads import TieredUploads

        def sealed_end() -> int:
            shown = self.visible_end if self.raft_log is None else self.raft_log.shown
            return min(self.flusher.flushed, shown)

        return TieredUploads(
            disk=self.disk, config=self.config, executor=self.executor, steady=steady, commit_log=self.log,
            reads=reads, deleted=self.deleted, sealed_end=sealed_end,
        )  # fmt: skip

    # -- opening, closing -------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        disk: Disk | None = None,
        clock: Clock | None = None,
        objects: ObjectStore | None = None,
    ) -> MessageStore:
        """Lock the directory of a store, load the store and recover it.

        Segments of the log are copied to `objects`, and read from there (tiered storage).

        If this raises StoreError or OSError, nothing stays locked.
        """
        disk = disk or Disk()
        own: tuple[str, ...] = ()
        if config.enable_d_leger_commit_log:
            own = (config.raft_log_dir, os.path.join(config.raft_log_dir, "index"))
        check_locations(disk, config)
        if config.moves(INDEX):
            # StoreLock locks only existing directories, so the directory of the index is created first.
            own = (*own, config.location(INDEX))
        parents = (config.parent_of(key) for key in (INDEX, CHECKPOINT, ABORT))
        for path in (config.root, *own, *config.commit_log_dirs, config.location(CONSUME_QUEUES), *parents):
            make_directory(disk, path)
        lock = StoreLock(disk, config)
        try:
            abort = AbortFile(disk, config.location(ABORT))
            make = partial(cls, config, disk, clock or Clock(), lock, abort, objects)
            try:
                store = make()
            except EntriesLost as lost:
                if not config.has_peers:
                    raise
                from cometmq.store.raft_log.member_files import write_suspect

                log.error("%s: this member does not vote until it has restored its log from the group", lost)
                write_suspect(disk, config.raft_log_dir, str(lost))
                store = make()
            store.writer.make_recovery_durable(store.recovered)
        except BaseException:
            lock.release()
            raise
        return store

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the background work in `loop`, by default the running one."""
        self.upkeep.start(loop or asyncio.get_running_loop())

    async def stop(self) -> None:
        """Commit, write and sync all data of the store, record the clean stop, and unlock the directory."""
        if not self._closed:
            await self.upkeep.stop()
            self.close()

    def close(self) -> None:
        """Stop on the calling thread. The stop counts as clean only if all data of the store was written."""
        if self._closed:
            return
        self.appender.encode_pending()
        self._closed, self.appender.why_closed = True, "the store is closed"
        try:
            durable = self.commit().error is None and self.writer.make_durable() and self.flags.writeable
            if durable and (self.raft_log is None or self.raft_log.synced == self.raft_log.last):
                if self.raft_log is not None:
                    self.raft_log.save()
                self._clean_ends.save(self.queues, self.writer.covered().position, self.config)
                self._abort.clear()
            else:
                log.warning("the store stops with data that could not be written; the next start recovers it")
        finally:
            self.crash()

    def crash(self) -> None:
        """Release the directory of the store without writing anything, as if the process had been killed."""
        self._closed, self.appender.why_closed = True, "the store is closed"
        self.upkeep.abandon()
        self.log.close(keep_spares=self._abort.exists())
        self.files.close()
        self._lock.release()

    def configure(self, config: StoreConfig) -> None:
        """Apply new settings. Those that are FIXED (file sizes, paths, the role) change at the next start."""
        self.config = config = config.with_fixed_of(self.config)
        for part in (self.flusher, self.writer, self.fullness, self.retention, self.lookups):
            part.config = config
        if self.tiered is not None:
            self.tiered.config = config
        self.upkeep.configure(config)
        self.reader.configure(config)
        self.index.enabled = config.message_index_enable
        self.appender.set_max_message_size(config.max_message_size)

    # -- writing ----------------------------------------------------------------------------------

    def commit(self) -> Commit:
        """Write the messages appended since the last call. After an error none of the messages is stored."""
        encoded, placed, refused = self.appender.end_tick()
        groups: Sequence[WrittenGroup] = encoded
        raft_log = self.raft_log
        if raft_log is not None:
            groups = [*encoded, *raft_log.take_received()]
        if not groups:
            return Commit(placed, refused, None, self.log.end)
        if raft_log is not None and encoded:
            try:
                raft_log.propose(sum(map(count_of, encoded)))
            except RaftRefused as refusal:
                self.log.discard_tick()
                self.appender.roll_back(encoded)
                raft_log.discard_tick()
                why = f"no messages are accepted: {refusal}"
                error = StoreRefused(ResponseCode.SERVICE_NOT_AVAILABLE, why)
                return Commit(placed, refused, error, self.log.end)
        try:
            self.log.write_tick()
        except OSError as failure:
            self.appender.roll_back(encoded)
            if raft_log is not None:
                raft_log.not_written(failure)
            log.error("the commit log could not be written: %s", failure)
            why = f"the commit log could not be written: {failure.strerror}"
            error = StoreRefused(ResponseCode.SYSTEM_ERROR, why)
            return Commit(placed, refused, error, self.log.end)
        return Commit(placed, refused, None, self.log.end, *self._written(groups))

    def _written(self, groups: Sequence[WrittenGroup]) -> tuple[int, Arrivals]:
        """Make written records visible now, or later, after their flush or raft commit.

        Return the number of records that became visible now, and the messages among them whose queues are
        in `Dispatcher.watched`.
        """
        if groups:
            _, _, now_ms = last_of(groups)
            if now_ms + _STEP_BACK_MS < self.flusher.written_ms:
                self.writer.clock_stepped_back(now_ms)
            self.flusher.written_ms = now_ms
            self.newest_ms = max(self.newest_ms, now_ms)
        self.space.reserve()
        if self.raft_log is not None:
            self.raft_log.written()
            # In raft mode, the records become visible only once the raft group has committed them.
            self.dispatcher.dispatch_flushed(self.log.end, groups)
            if self.config.sync_flush:
                self.flusher.request()
            elif not self.config.flush_commit_log_timed:
                self.flusher.timed()
            return 0, []
        # Records become visible in the order of the log. So after a change from SYNC_FLUSH to ASYNC_FLUSH,
        # new records wait for a flush as long as earlier records still wait for one.
        if self.config.sync_flush or self.dispatcher.waits:
            if groups:
                self.dispatcher.dispatch_flushed(self.log.end, groups)
            self.flusher.request()
            return 0, []
        if not self.config.flush_commit_log_timed:
            self.flusher.timed()
        return self.dispatcher.dispatch(groups) if groups else (0, [])

    def _dispatched(self, count: int, last: int, end: int, stored_ms: int) -> None:
        if self.config.sync_flush:
            self.space.write_zeros()
        self.writer.dispatched(count, last, end, stored_ms)

    def _flush_failed(self, failure: OSError) -> None:
        self.flags.raise_flag(Flag.NOT_WRITEABLE, f"the commit log could not be flushed: {failure.strerror}")

    # -- reading ----------------------------------------------------------------------------------

    def get_messages(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        *,
        filter: TagFilter = None,  # noqa: A002 - the contract's word
        record_filter: RecordFilter = None,
        max_bytes: int | None = None,
        bulk: bool = False,
        reads: Reads = CACHED,
    ) -> ReadResult:
        """Read messages of a queue. The arguments are those of `QueueReader.get`.

        Raises OSError, and NotInMemory if the data must be read through `executor.query`.
        """
        return self.reader.get(
            self.queues.find_queue(topic, queue_id), offset, max_count, tags=filter, records=record_filter,
            max_bytes=max_bytes, bulk=bulk, correct=self.corrects_offsets, reads=reads,
        )  # fmt: skip

    @property
    def corrects_offsets(self) -> bool:
        """Whether a read at an offset outside the queue returns a valid offset, or, on a slave, the same."""
        return not self.slave or self.config.offset_check_in_slave

    @property
    def visible_end(self) -> int:
        """The log position before which all records are visible."""
        done = self.writer.covered().position
        return done if self.dispatcher.waits else max(done, self.replica.end)

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the first readable offset of a queue; 0 if the queue does not exist."""
        queue = self.queues.find_queue(topic, queue_id)
        return 0 if queue is None else queue.min_offset

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset after the last visible message; 0 if the queue does not exist."""
        queue = self.queues.find_queue(topic, queue_id)
        return 0 if queue is None else queue.max_offset

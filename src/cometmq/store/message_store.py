"""The store in one object, made of its parts: opened, committed once a tick, read, closed.

The appender encodes a message into the tick's buffer and gives it its offsets. `commit`, once per loop tick,
writes the buffer with one system call and dispatches (queue units, index keys, arrivals). With SYNC_FLUSH
dispatch waits for the flush: nobody sees a message that a power failure could take away.

Budget on the path of a 1 KiB send with many sends per tick: append 1.5 µs, commit 1 µs per message in
batches of 32. All methods belong to one thread (the loop's) unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from cometmq import logs
from cometmq.errors import RaftRefused
from cometmq.protocol.codes import ResponseCode
from cometmq.store.background.checkpointing import Checkpointing
from cometmq.store.background.derived_writer import DerivedWriter
from cometmq.store.background.fullness import Fullness
from cometmq.store.background.passes import Passes
from cometmq.store.background.purge import Purge
from cometmq.store.background.retention import Retention
from cometmq.store.background.space_ahead import SpaceAhead
from cometmq.store.background.topic_deletion import TopicDeletion
from cometmq.store.background.topic_retention import TopicRetention
from cometmq.store.background.upkeep import Upkeep
from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.clock import Clock, SteadyTime, SystemClock
from cometmq.store.base.config import (
    ABORT,
    CHECKPOINT,
    CONSUME_QUEUES,
    FIELD_OF_KEY,
    INDEX,
    LOCATIONS,
    RAFT_FIELDS,
    SLAVE,
    SMALL_FILES,
    StoreConfig,
)
from cometmq.store.base.disk import Disk, OsDisk, make_directory
from cometmq.store.base.files import CACHED, Reads, StoreFiles
from cometmq.store.base.flags import Flag, RunningFlags
from cometmq.store.base.guards import AbortFile, StoreLock
from cometmq.store.base.off_loop import OffLoop
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_ext import ExtFiles
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.ledger.ledger import RaftLog
from cometmq.store.ledger.log_ends import LogEnds, find_log_ends
from cometmq.store.ledger.member_files import write_suspect
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.log.places import LogPlaces
from cometmq.store.reading.lookup import Lookup
from cometmq.store.reading.queue_reader import Got, QueueReader, RecordFilter, TagFilter, physical_memory
from cometmq.store.recovery.lengths import check_lengths
from cometmq.store.recovery.recovery import EntriesLost, Recovery
from cometmq.store.recovery.recovery_scan import Recovered
from cometmq.store.recovery.store_layout import check_locations
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.min_offsets import MinOffsets
from cometmq.store.writing.appender import Appender, Refused, TickMessage
from cometmq.store.writing.dispatch import Dispatcher, WrittenRun, count_of, last_of
from cometmq.store.writing.log_cut import CutNote, finish_cut
from cometmq.store.writing.record_dispatch import Arrivals
from cometmq.store.writing.replica import ReplicaLog

log = logs.logger(__name__)

_STEP_BACK_MS = 1000


class Commit(msgspec.Struct, gc=False):
    """Outcome of one tick. `error`: nothing that was placed is stored. `visible`: how many messages became
    so; `arrivals`: those in `watched` queues."""

    placed: list[TickMessage]
    refused: list[Refused]
    error: StoreRefused | None
    end_offset: int
    visible: int = 0
    arrivals: Arrivals = []


class MessageStore:
    """One store, made by `open`. `start` gives it a loop for its background work; without one everything runs
    in place.

    What concerns one part is asked of that part: `appender`, `replica`, `queues`, `lookups`, `index`, `log`,
    `flusher`, `flags`, `fullness`, `retention`, `topic_retention`, `deletion`, `purge`, and `off_loop` for
    questions that may have to wait for the device. Methods of the store are what takes several of them.
    """

    def __init__(
        self, config: StoreConfig, disk: Disk, clock: Clock, lock: StoreLock, abort: AbortFile
    ) -> None:
        """Use `MessageStore.open`."""
        self.config = config
        self.disk = disk
        self._lock = lock
        self._abort = abort
        self.flags = flags = RunningFlags()
        self.files = StoreFiles(disk)
        self.off_loop = off_loop = OffLoop(disk)
        self.log = CommitLog(self.files, LogPlaces(disk, config), config)
        self.queues = queues = QueueTable(self.files, config)
        self.index = index = IndexService(self.files, clock, config)
        self.checkpoint = Checkpoint(disk, config.location(CHECKPOINT))
        self.deleted = deleted = DeletedTopics(disk, config.root)
        self._clean_ends = CleanEnds(disk, config.root)
        ends, self.recovered = self._found()
        self.min_offsets = MinOffsets(disk, config.root)
        self.min_offsets.apply(queues)
        self.flusher = flusher = LogFlusher(self.log, disk, clock, config)
        flusher.written_ms = self.recovered.last_store_ms or self.checkpoint.physic_ms
        self.newest_ms = max(self.recovered.newest_ms, flusher.written_ms)
        """The latest store time of a record that is known: the clock was there once, perhaps a leader's."""
        self.dispatcher = Dispatcher(queues, index, deleted, config, self._dispatched)
        flusher.on_flushed = self.dispatcher.flushed
        flusher.on_failure = self._flush_failed
        self.reader = QueueReader(self.log, config, physical_memory())
        self.lookups = Lookup(self.log, queues, index, off_loop, config)
        self.appender = Appender(self.log, queues, clock, config, flags)
        self.replica = ReplicaLog(self.log, flusher, flags, self._written)
        self.ledger = None if ends is None else self._make_raft_log(ends, clock)
        """The log as a raft member's, in that mode."""
        self.passes = passes = Passes()
        self.space = SpaceAhead(self.log, clock)
        self.checkpointing = Checkpointing(
            checkpoint=self.checkpoint, flusher=flusher, queues=queues, index=index, deleted=deleted,
            recovered=self.recovered,
        )  # fmt: skip
        self.writer = DerivedWriter(
            disk=disk, clock=clock, config=config, flags=flags, off_loop=off_loop, passes=passes,
            commit_log=self.log, flusher=flusher, queues=queues, index=index, min_offsets=self.min_offsets,
            checkpoint=self.checkpoint, checkpointing=self.checkpointing,
        )  # fmt: skip
        ext = ExtFiles(disk, config.root)
        steady = SteadyTime(clock, flusher.written_ms)
        self.fullness = Fullness(
            disk=disk, config=config, flags=flags, off_loop=off_loop, places=self.log.places
        )
        self.retention = Retention(
            disk=disk, clock=clock, steady=steady, config=config, flags=flags, off_loop=off_loop,
            passes=passes, fullness=self.fullness, commit_log=self.log, queues=queues, index=index, ext=ext,
            make_durable_before=self.writer.make_durable_before, on_room=self.space.room_was_made,
        )  # fmt: skip
        self.topic_retention = TopicRetention(
            steady=steady, off_loop=off_loop, passes=passes, queues=queues, lookups=self.lookups,
            min_offsets=self.min_offsets,
        )  # fmt: skip
        self.deletion = TopicDeletion(
            disk=disk, off_loop=off_loop, passes=passes, commit_log=self.log, appender=self.appender,
            queues=queues, ext=ext, deleted=deleted, min_offsets=self.min_offsets,
        )  # fmt: skip
        self.dispatcher.received.begun_anew = self.deletion.begun_anew
        self.purge = Purge(
            off_loop=off_loop, queues=queues, lookups=self.lookups, min_offsets=self.min_offsets
        )
        self.upkeep = self._make_upkeep()
        self.slave = config.broker_role == SLAVE  # for good: what a role needs is made at the start
        self._closed = False

    def _found(self) -> tuple[LogEnds | None, Recovered]:
        """What is on the disk; the ends of a raft log."""
        try:
            ends = self._ledger_ends() if self.config.enable_d_leger_commit_log else None
            return ends, self._recover(ends)
        except EntriesLost:
            self.files.descriptors.close()
            raise

    def _ledger_ends(self) -> LogEnds:
        mark = self.checkpoint.mark
        shown = 0 if mark is None else mark.position
        ends = find_log_ends(self.files, self.config, self.log.places, shown)
        if ends.suspect:  # what follows from the log may go further than the log does now
            self._abort.set()
            self.checkpoint.distrust()
            self._clean_ends.forget()
            CutNote(self.disk, self.config.root).forget_timers()
        return ends

    def _make_upkeep(self) -> Upkeep:
        ledger = self.ledger
        return Upkeep(
            disk=self.disk, config=self.config, off_loop=self.off_loop, passes=self.passes,
            commit_log=self.log, flusher=self.flusher, space=self.space, writer=self.writer,
            fullness=self.fullness, retention=self.retention, topic_retention=self.topic_retention,
            save_raft_log=None if ledger is None else partial(ledger.save_in_thread, self.off_loop),
        )  # fmt: skip

    def _make_raft_log(self, ends: LogEnds, clock: Clock) -> RaftLog:
        ledger = RaftLog(
            disk=self.disk, config=self.config, clock=clock, flags=self.flags, commit_log=self.log,
            queues=self.queues, flusher=self.flusher, appender=self.appender, dispatcher=self.dispatcher,
            deleted=self.deleted, ends=ends,
        )  # fmt: skip
        self.flusher.on_flushed = ledger.flushed
        return ledger

    def _recover(self, ends: LogEnds | None) -> Recovered:
        check_lengths(self.disk, self.config, self._clean_ends)
        finish_cut(
            self.disk, CutNote(self.disk, self.config.root), self.log.places, self.log.segment_size,
            self._abort, self.checkpoint, self._clean_ends, self.deleted,
        )  # fmt: skip
        clean = not self._abort.exists()
        self._abort.set()
        recovery = Recovery(
            disk=self.disk, config=self.config, commit_log=self.log, queues=self.queues, index=self.index,
            checkpoint=self.checkpoint, deleted=self.deleted, ends=self._clean_ends,
            ledger=ends,
        )  # fmt: skip
        return recovery.run(clean=clean)

    # -- opening, closing -------------------------------------------------------------------------

    @classmethod
    def open(cls, config: StoreConfig, disk: Disk | None = None, clock: Clock | None = None) -> MessageStore:
        """Lock the directory, load and recover it. Raises StoreError, OSError; then nothing stays locked."""
        disk = disk or OsDisk()
        own: tuple[str, ...] = ()
        if config.enable_d_leger_commit_log:
            own = (config.ledger_dir, os.path.join(config.ledger_dir, "index"))
        check_locations(disk, config)
        if config.moves(INDEX):
            own = (*own, config.location(INDEX))  # exists before it is locked
        parents = (config.parent_of(key) for key in (INDEX, CHECKPOINT, ABORT))
        for path in (config.root, *own, *config.commit_log_dirs, config.location(CONSUME_QUEUES), *parents):
            make_directory(disk, path)
        lock = StoreLock(disk, config)
        try:
            abort = AbortFile(disk, config.location(ABORT))
            make = partial(cls, config, disk, clock or SystemClock(), lock, abort)
            try:
                store = make()
            except EntriesLost as lost:
                if not config.has_peers:
                    raise
                log.error("%s: this member has no vote until the group has given it again what is lost", lost)
                write_suspect(disk, config.ledger_dir, str(lost))
                store = make()
            store.writer.make_recovery_durable(store.recovered)
        except BaseException:
            lock.release()
            raise
        return store

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Work in the background of `loop`, by default the running one."""
        self.upkeep.start(loop or asyncio.get_running_loop())

    async def stop(self) -> None:
        """Commit, write and sync everything, mark the stop as clean, unlock."""
        if not self._closed:
            await self.upkeep.stop()
            self.close()

    def close(self) -> None:
        """What `stop` does, in place. The stop counts as clean only if everything could be written."""
        if self._closed:
            return
        self.appender.encode_pending()
        self._closed, self.appender.shut = True, "the store is closed"
        try:
            durable = self.commit().error is None and self.writer.make_durable() and self.flags.writeable
            if durable and (self.ledger is None or self.ledger.synced == self.ledger.last):
                self._save_ledger()
                self._clean_ends.save(self.queues, self.checkpointing.covered().position, self.config)
                self._abort.clear()
            else:
                log.warning("the store stops with unwritten state; the next start will recover it")
        finally:
            self.crash()

    def _save_ledger(self) -> None:
        if self.ledger is not None:
            self.ledger.save()

    def crash(self) -> None:
        """Let go of the directory as a killed process would: nothing more is written."""
        self._closed, self.appender.shut = True, "the store is closed"
        self.upkeep.abandon()
        self.log.close(keep_spares=self._abort.exists())
        self.files.descriptors.close()
        self._lock.release()

    def configure(self, config: StoreConfig) -> None:
        """Go on with other settings. File sizes, paths and the role change only with a new start."""
        paths = ("store_path_root_dir", "store_path_commit_log", "read_only_commit_log_store_paths")
        locations = (FIELD_OF_KEY[key] for key in LOCATIONS)
        fixed = (*paths, *locations, "broker_role", *SMALL_FILES, *RAFT_FIELDS)
        config = replace(config, **{name: getattr(self.config, name) for name in fixed})
        self.config = config
        for part in (self.flusher, self.writer, self.fullness, self.retention, self.lookups):
            part.config = config
        self.upkeep.configure(config)
        self.reader.configure(config)
        self.index.enabled = config.message_index_enable
        self.appender.set_largest(config.max_message_size)

    # -- writing ----------------------------------------------------------------------------------

    def commit(self) -> Commit:
        """Write what was appended since the last call. On an error everything appended is taken back."""
        encoded, placed, refused = self.appender.end_tick()
        runs: Sequence[WrittenRun] = encoded
        ledger = self.ledger
        if ledger is not None:
            runs = [*encoded, *ledger.take_received()]
        if not runs:
            return Commit(placed, refused, None, self.log.end)
        if ledger is not None and encoded:
            try:
                ledger.propose(sum(map(count_of, encoded)))
            except RaftRefused as refusal:
                self.log.take_back_tick()
                self.appender.roll_back(encoded)
                ledger.take_back()
                error = StoreRefused(ResponseCode.SERVICE_NOT_AVAILABLE, f"no messages are taken: {refusal}")
                return Commit(placed, refused, error, self.log.end)
        try:
            self.log.write_tick()
        except OSError as failure:
            self.appender.roll_back(encoded)
            if ledger is not None:
                ledger.not_written(failure)
            log.error("commit log could not be written: %s", failure)
            error = StoreRefused(
                ResponseCode.SYSTEM_ERROR, f"the commit log could not be written: {failure.strerror}"
            )
            return Commit(placed, refused, error, self.log.end)
        return Commit(placed, refused, None, self.log.end, *self._written(runs))

    def _written(self, runs: Sequence[WrittenRun]) -> tuple[int, Arrivals]:
        """Records were written: they become visible now, or with their flush. Returns how many did, and the
        arrivals in watched queues."""
        if runs:
            _, _, now_ms = last_of(runs)
            if now_ms + _STEP_BACK_MS < self.flusher.written_ms:
                self.checkpointing.clock_stepped_back(now_ms)
            self.flusher.written_ms = now_ms
            self.newest_ms = max(self.newest_ms, now_ms)
        self.space.reserve()
        if self.ledger is not None:
            self.ledger.written()
            self.dispatcher.dispatch_flushed(self.log.end, runs)  # once they are committed
            if self.config.sync_flush:
                self.flusher.request()
            elif not self.config.flush_commit_log_timed:
                self.flusher.timed()
            return 0, []
        # Visible in order, also when the flush mode has just changed.
        if self.config.sync_flush or self.dispatcher.waits:
            if runs:
                self.dispatcher.dispatch_flushed(self.log.end, runs)
            self.flusher.request()
            return 0, []
        if not self.config.flush_commit_log_timed:
            self.flusher.timed()
        return self.dispatcher.dispatch(runs) if runs else (0, [])

    def _dispatched(self, count: int, last: int, end: int, stored_ms: int) -> None:
        self.checkpointing.dispatched(count, last, end, stored_ms)
        if self.config.sync_flush:
            self.space.write_zeros()
        self.writer.dispatched(count)

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
    ) -> Got:
        """Read messages of a queue. Raises OSError, and NotInMemory: `off_loop.ask` then has the answer."""
        return self.reader.get(
            self.queues.find(topic, queue_id), offset, max_count, tags=filter, records=record_filter,
            max_bytes=max_bytes, bulk=bulk, correct=self.corrects_offsets, reads=reads,
        )  # fmt: skip

    @property
    def corrects_offsets(self) -> bool:
        """Whether readers outside a queue are sent into it: not on a slave without offsetCheckInSlave."""
        return not self.slave or self.config.offset_check_in_slave

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First offset of the queue that can be read; 0 for a queue that does not exist."""
        queue = self.queues.find(topic, queue_id)
        return 0 if queue is None else queue.min_offset

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Offset behind the last visible message; 0 for a queue that does not exist."""
        queue = self.queues.find(topic, queue_id)
        return 0 if queue is None else queue.max_offset

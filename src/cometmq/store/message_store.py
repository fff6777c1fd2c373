"""The store in one object: append, commit, read.

The way of a message: `append` encodes it into the tick's buffer and gives it its offsets, or the appender
does that with all messages of the tick; `commit`, once per loop tick, writes the buffer with
one system call and dispatches (queue units, index keys, arrivals). With SYNC_FLUSH dispatch waits for the
flush, so that nobody sees a message that a power failure could still take away.

Budget on the path of a 1 KiB send with many sends per tick: append 1.5 µs, commit 1 µs per message in
batches of 32. All methods belong to one thread (the loop's) unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from cometmq import logs
from cometmq.protocol.codes import MAX_FRAME_LENGTH, ResponseCode
from cometmq.store.background.retention import Retention
from cometmq.store.background.topic_deletion import TopicDeletion
from cometmq.store.background.topic_retention import TopicRetention
from cometmq.store.background.upkeep import Upkeep
from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.clock import Clock, SteadyTime, SystemClock
from cometmq.store.base.config import SLAVE, SMALL_FILES, StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.files import CACHED, WAITING, NotInMemory, Reads, StoreFiles
from cometmq.store.base.flags import Flag, RunningFlags
from cometmq.store.base.guards import AbortFile, StoreLock
from cometmq.store.base.off_loop import OffLoop, in_place
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.log.places import LogPlaces
from cometmq.store.reading.lookup import Lookup
from cometmq.store.reading.queue_reader import Got, QueueReader, RecordFilter, TagFilter
from cometmq.store.recovery.lengths import check_lengths
from cometmq.store.recovery.recovery import Recovered, Recovery
from cometmq.store.tables.clean_stop import QueueEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.min_offsets import QueueFloors
from cometmq.store.writing.appender import Appender, BatchRecords, EncodedRun, Refused, TickMessage, Traits
from cometmq.store.writing.batch_appender import BatchAppender
from cometmq.store.writing.dispatch import Arrivals, Watched, batch_visible, last_of, plain_visible

log = logs.logger(__name__)

T = TypeVar("T")

_STEP_BACK_MS = 1000


class Commit(msgspec.Struct, gc=False):
    """Outcome of one tick: what became of messages with a sender, `error` if nothing that was placed is
    stored, the log's end, how many messages became visible, and those of them that are in `watched`
    queues."""

    placed: list[TickMessage]
    refused: list[Refused]
    error: StoreRefused | None
    end_offset: int
    visible: int = 0
    arrivals: Arrivals = []


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class MessageStore:
    """Made by `open`. `start` gives it a loop for its background work; without one everything runs in
    place."""

    def __init__(
        self, config: StoreConfig, disk: Disk, clock: Clock, lock: StoreLock, abort: AbortFile
    ) -> None:
        """Use `MessageStore.open`."""
        self.config = config
        self.disk = disk
        self.clock = clock
        self._lock = lock
        self._abort = abort
        self.flags = RunningFlags()
        self.files = StoreFiles(disk)
        self.off_loop = OffLoop(disk)
        self.log = CommitLog(self.files, LogPlaces(disk, config), config.mapped_file_size_commit_log)
        self.queues = QueueTable(self.files, config)
        self.index = IndexService(self.files, clock, config)
        self.checkpoint = Checkpoint(disk, os.path.join(config.root, "checkpoint"))
        self.deleted = DeletedTopics(disk, config.root)
        self.ends = QueueEnds(disk, config.root)
        check_lengths(disk, config, self.ends)
        clean = not abort.exists()
        abort.set()
        self.recovered: Recovered = Recovery(
            disk, config, self.log, self.queues, self.index, self.checkpoint, self.deleted, self.ends
        ).run(clean=clean)
        self.floors = QueueFloors(disk, config.root)
        self.floors.apply(self.queues)
        self.flusher = LogFlusher(self.log, disk, clock, config)
        self.flusher.written_ms = self.recovered.last_store_ms or self.checkpoint.physic_ms
        self.steady = SteadyTime(clock, self.flusher.written_ms)
        self.flusher.on_flushed = self._flushed
        self.flusher.on_failure = self._flush_failed
        self.reader = QueueReader(self.log, config, physical_memory())
        self.appender = Appender(self.log, self.queues, clock, config, self.flags)
        self._batches = BatchAppender(self.appender, self.log, self.queues, clock)
        self.lookups = Lookup(self.log, self.queues, self.index, self.off_loop, config)
        self.retention = Retention(self)
        self.topic_retention = TopicRetention(self)
        self.deletion = TopicDeletion(self)
        self.upkeep = Upkeep(self)
        self.watched: Watched = None
        self.on_visible: Callable[[int, Arrivals], None] = lambda _count, _arrivals: None
        self._unflushed: deque[tuple[int, list[EncodedRun]]] = deque()
        self._sync = config.sync_flush
        self.slave = config.broker_role == SLAVE  # for good: what a role needs is made at the start
        self.dispatched_ms = self.flusher.written_ms
        self.closed = False

    # -- opening, closing -------------------------------------------------------------------------

    @classmethod
    def open(cls, config: StoreConfig, disk: Disk | None = None, clock: Clock | None = None) -> MessageStore:
        """Lock the directory, load and recover it. Raises StoreError, OSError; then nothing stays locked."""
        disk = disk or OsDisk()
        for path in (config.root, *config.commit_log_dirs, os.path.join(config.root, "consumequeue")):
            if not disk.is_dir(path):
                disk.makedirs(path)
                disk.fsync_dir(os.path.dirname(path))
        lock = StoreLock(disk, config.root)
        try:
            store = cls(config, disk, clock or SystemClock(), lock, AbortFile(disk, config.root))
            store.upkeep.settle_recovery()
        except BaseException:
            lock.release()
            raise
        return store

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Move flushes, reservations and deletions to the background of `loop` (the running one by
        default)."""
        self.upkeep.start(loop or asyncio.get_running_loop())

    async def stop(self) -> None:
        """Commit, write and sync everything, mark the stop as clean, unlock."""
        if not self.closed:
            await self.upkeep.stop()
            self.close()

    def close(self) -> None:
        """What `stop` does, in place. The stop counts as clean only if everything could be written."""
        if self.closed:
            return
        self.appender.encode_pending()
        self.closed, self.appender.shut = True, "the store is closed"
        try:
            if self.commit().error is None and self.upkeep.settle_all() and self.flags.writeable:
                self.ends.save(self.queues, self.log.end, self.config)
                self._abort.clear()
            else:
                log.warning("the store stops with unwritten state; the next start will recover it")
        finally:
            self.crash()

    def crash(self) -> None:
        """Let go of the directory as a killed process would: nothing more is written. For tests and for
        `close`."""
        self.closed, self.appender.shut = True, "the store is closed"
        self.upkeep.abandon()
        self.log.close(keep_spares=self._abort.exists())
        self.files.descriptors.close()
        self._lock.release()

    def configure(self, config: StoreConfig) -> None:
        """Go on with other settings. Sizes of files, paths and the role stay what they were until the next
        start."""
        paths = ("store_path_root_dir", "store_path_commit_log", "read_only_commit_log_store_paths")
        fixed = (*paths, "broker_role", *SMALL_FILES)
        config = replace(config, **{name: getattr(self.config, name) for name in fixed})
        self.config = config
        self._sync = config.sync_flush
        self.flusher.configure(config)
        self.upkeep.configure()
        self.reader.configure(config)
        self.lookups.configure(config)
        self.index.enabled = config.message_index_enable
        self.appender.set_largest(config.max_message_size)

    # -- writing ----------------------------------------------------------------------------------

    def set_store_host(self, host: bytes) -> None:
        """Address and port that records of this broker carry: 4 or 16 bytes and an i4."""
        self.appender.store_host = host

    def append(
        self,
        topic: str,
        queue_id: int,
        body: bytes | bytearray | memoryview,
        properties: bytes,
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        tags_code: int = 0,
        index_keys: Sequence[str] | None = None,
        store_host: bytes | None = None,
        delay_ms: int | None = None,
        stored_before: bool = False,
    ) -> TickMessage:
        """Take one message into this tick. `body` is copied at once.

        index_keys: keys to index (None: taken from the properties). delay_ms: the queue unit gets store
        time plus this as its tags code (messages that wait for their delivery). stored_before: the
        message moves on within the store, so maxMessageSize, which may have been lowered since, does not
        count. Raises StoreRefused; nothing has changed then.
        """
        traits = Traits(
            flag, sys_flag, reconsume_times, prepared_transaction_offset, tags_code, store_host, delay_ms
        )
        queue = self.appender.queue_of(topic, queue_id)
        message = TickMessage(None, queue, body, properties, born_timestamp_ms, born_host, index_keys, traits)
        self.appender.append(message, stored_before=stored_before)
        return message

    def append_batch(
        self,
        topic: str,
        queue_id: int,
        body: bytes | bytearray | memoryview,
        properties: bytes,
        *,
        sys_flag: int = 0,
        born_timestamp_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        store_host: bytes | None = None,
    ) -> BatchRecords:
        """Take a batch body (items of the batch send) into this tick, all of it into one segment or nothing.

        `properties` of the request are added to those of every item, as 4.9 does. Raises StoreRefused.
        """
        return self._batches.append(
            topic,
            queue_id,
            body,
            properties,
            sys_flag,
            born_timestamp_ms,
            born_host,
            reconsume_times,
            store_host,
        )

    def commit(self) -> Commit:
        """Write what was appended since the last call. On an error everything appended is taken back."""
        runs, placed, refused = self.appender.end_tick()
        if not runs:
            return Commit(placed, refused, None, self.log.end)
        try:
            self.log.write_tick()
        except OSError as failure:
            self.appender.roll_back(runs)
            log.error("commit log could not be written: %s", failure)
            error = StoreRefused(
                ResponseCode.SYSTEM_ERROR, f"the commit log could not be written: {failure.strerror}"
            )
            return Commit(placed, refused, error, self.log.end)
        _, _, now_ms = last_of(runs)
        if now_ms + _STEP_BACK_MS < self.flusher.written_ms:
            self.upkeep.clock_stepped_back(now_ms)
        self.flusher.written_ms = now_ms
        self.upkeep.reserve_ahead()
        if self._sync or self._unflushed:  # visible in order, also when the flush mode has just changed
            self._unflushed.append((self.log.end, runs))
            self.flusher.request()
            return Commit(placed, refused, None, self.log.end)
        if not self.config.flush_commit_log_timed:
            self.flusher.timed()
        return Commit(placed, refused, None, self.log.end, *self._dispatch(runs))

    def when_flushed(self, end_offset: int, callback: Callable[[bool], None]) -> None:
        """Call back with True once the log is on the device up to `end_offset`; with False when the flush
        failed (see `flush_failure`) or took longer than syncFlushTimeout."""
        self.flusher.wait_for(end_offset, callback)

    @property
    def flush_failure(self) -> OSError | None:
        """Why no flush will succeed any more; None in health."""
        return self.flusher.failure

    def _dispatch(self, runs: list[EncodedRun]) -> tuple[int, Arrivals]:
        """Make written records visible: queue units, index keys. Returns `visible` and `arrivals` of a
        Commit."""
        arrivals: Arrivals = []
        index = self.index if self.index.enabled else None
        count = 0
        for run in runs:
            if type(run) is BatchRecords:
                count += batch_visible(run, self.queues, index, self.watched, arrivals)
            else:
                count += plain_visible(run, self.queues, index, self.watched, arrivals)
        last, end, self.dispatched_ms = last_of(runs)
        self.upkeep.after_dispatch(count, last, end)
        return count, arrivals

    def _flushed(self, end: int) -> None:
        waiting = self._unflushed
        runs: list[EncodedRun] = []
        while waiting and waiting[0][0] <= end:
            runs += waiting.popleft()[1]
        if runs:
            self.on_visible(*self._dispatch(runs))

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
        reads: Reads = CACHED,
    ) -> Got:
        """Read messages of a queue. Raises OSError, and NotInMemory where that would wait for a device: `ask`
        then has the answer."""
        return self.reader.get(
            self.queues.find(topic, queue_id), offset, max_count, tags=filter, records=record_filter,
            max_bytes=max_bytes, correct=self.corrects_offsets, reads=reads,
        )  # fmt: skip

    @property
    def corrects_offsets(self) -> bool:
        """Whether readers outside a queue are sent into it: always but on a slave without
        offsetCheckInSlave."""
        return not self.slave or self.config.offset_check_in_slave

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First offset of the queue that can be read; 0 for a queue that does not exist."""
        queue = self.queues.find(topic, queue_id)
        return 0 if queue is None else queue.min_offset

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Offset behind the last visible message; 0 for a queue that does not exist."""
        queue = self.queues.find(topic, queue_id)
        return 0 if queue is None else queue.max_offset

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, mode: str | None = None) -> int:
        """Offset that belongs to a store time. mode None: the nearest, as 4.9 answers; "LOWER" or "UPPER"
        boundary as 5.x. Waits for the device."""
        return in_place(self.lookups.offset_by_time(self.queues.find(topic, queue_id), timestamp_ms, mode))

    def store_time_of(self, topic: str, queue_id: int, offset: int, reads: Reads = WAITING) -> int:
        """Store time (ms) of the message at a queue offset; -1 if there is none."""
        return self.lookups.store_time_of(self.queues.find(topic, queue_id), offset, reads)

    def lookup(self, physical_offset: int, reads: Reads = WAITING) -> bytes | None:
        """The whole record at a log position; None if none begins there."""
        return self.lookups.record_at(physical_offset, reads)

    def query_by_key(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[bytes]:
        """Records that may have this key (equal hashes are not told apart), oldest first. Waits for the
        device."""
        return in_place(self.lookups.by_key(topic, key, max_count, begin_ms, end_ms, MAX_FRAME_LENGTH))

    @property
    def commit_log_min(self) -> int:
        return self.log.min_position

    @property
    def commit_log_max(self) -> int:
        return self.log.end

    def topics(self) -> list[str]:
        """Topics that have a queue here."""
        return self.queues.topics()

    # -- deleting ---------------------------------------------------------------------------------

    def delete_topic(self, topic: str) -> int:
        """`delete_topics` of one, in place: for a store without a loop."""
        return in_place(self.delete_topics([topic]))

    async def delete_topics(self, topics: Sequence[str]) -> int:
        """Destroy the queues of topics, those of this tick's messages included; their records go with their
        segments. Returns the number of queues. Raises OSError; then what is left of the topics goes on."""
        return await self.deletion.delete(topics)

    async def keep_topics(self, known: Container[str]) -> list[str]:
        """Destroy the queues of every topic that is not in `known`; returns those topics. Raises OSError."""
        gone = [topic for topic in self.topics() if topic not in known]
        await self.delete_topics(gone)
        return gone

    async def purge_plan(
        self, topic: str, queue_id: int | None = None, before_ms: int | None = None
    ) -> list[tuple[int, int, int, int]]:
        """(queue id, minimum offset, what a purge would make of it, maximum offset) of the topic's queues:
        of one with `queue_id`, up to the first message stored at or after `before_ms` (default: all)."""
        plan = []
        for queue in self.queues.of_topic(topic):
            if queue_id in (None, queue.queue_id):
                end = target = queue.max_offset
                if before_ms is not None:
                    target = await self.lookups.first_since(queue, before_ms)
                plan.append((queue.queue_id, queue.min_offset, max(target, queue.min_offset), end))
                await self.off_loop.pause(0)
        return plan

    async def raise_min_offsets(self, topic: str, floors: Mapping[int, int]) -> None:
        """Hide the messages below these offsets, queue by queue, for good. Raises OSError; then readers see
        what they saw."""
        found = {self.queues.find(topic, queue_id): floor for queue_id, floor in floors.items()}
        before = self.floors.floors.get(topic, {})
        self.floors.note(topic, floors)
        try:
            await self.off_loop.run(self.floors.save)
        except OSError:
            self.floors.take_back(topic, floors, before)
            raise
        for queue, floor in found.items():
            if queue is not None:
                queue.raise_min(floor)

    async def ask(self, question: Callable[[Reads], T], miss: NotInMemory | None = None) -> T:
        """The answer to a question that may wait for the device, without keeping the loop waiting: what is
        not in memory is read by a thread (see `OffLoop.ask`)."""
        return await self.off_loop.ask(question, miss)

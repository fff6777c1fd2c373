"""Workloads on a recording disk, with a ledger of their guarantees."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar
from unittest import mock

from tests.faults.crash_model import TABLE, Ledger, config, entry_of
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import HOST, committed, in_place, put

from cometmq.protocol.batch import encode_batch
from cometmq.protocol.properties.values import java_hash
from cometmq.store import JsonTable, ManualClock, MessageStore
from cometmq.store.background import space_ahead
from cometmq.store.background.space_ahead import ZeroAhead
from cometmq.store.background.topic_retention import TopicLimit
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.log.syncer import ThreadSyncer

T = TypeVar("T")

TOPICS = ("T", "Other", "%RETRY%g")


class LaterFuture(Future[object]):
    """A future whose work runs when its result is awaited, or at a time that the workload chooses."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        if not self.done():
            try:
                self.set_result(self._work())
            except OSError as failure:
                self.set_exception(failure)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(0)


class LaterPool:
    """A replacement for the store's threads: submitted work runs when the workload decides."""

    def __init__(self) -> None:
        self.jobs: deque[LaterFuture] = deque()

    def submit(self, work: Callable[..., object], *given: object) -> LaterFuture:
        job = LaterFuture(lambda: work(*given))
        self.jobs.append(job)
        return job

    def shutdown(self, wait: bool = True) -> None:
        while self.jobs:
            self.jobs.popleft().run()


class LaterLoop:
    """A replacement for the event loop: the workload runs callbacks from threads; timers never run."""

    class Timer:
        def cancel(self) -> None: ...

    def __init__(self) -> None:
        self.callbacks: deque[Callable[[], object]] = deque()

    def call_soon(self, callback: Callable[..., object], *given: object) -> None:
        self.callbacks.append(lambda: callback(*given))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., object]) -> Timer:
        return self.Timer()


class StepByStep(StoreExecutor):
    """An executor whose work the workload runs step by step, with other actions in between."""

    async def run(self, work: Callable[..., Any], *given: Any) -> Any:
        await _turn()
        return work(*given)

    async def pause(self, ms: int) -> None:
        await _turn()


@types.coroutine
def _turn() -> Generator[None, None, None]:
    yield


class Worker:
    """A store on a disk, driven by a seed. With `threads`, syncs and reservations happen later."""

    slave = False

    def __init__(
        self, seed: str, *, sync: bool, threads: bool = False, disk: RecordingDisk | None = None
    ) -> None:
        self.chance = random.Random(seed)
        self.clock = ManualClock()
        self.disk = disk or RecordingDisk(now_ms=self.clock.time_ms)
        self.ledger = Ledger()
        self.sync = sync
        self.threads = threads
        self.number = 0
        self.version = 0
        self.pending: list[tuple[int, int, tuple[str, ...], int]] = []
        self.open()

    @property
    def now(self) -> int:
        return len(self.disk.history)

    def open(self) -> None:
        self.store = MessageStore.open(config(self.sync, self.slave), self.disk, self.clock)
        self.pool, self.loop = LaterPool(), LaterLoop()
        self.store.executor.__class__ = StepByStep
        self.retirement: Coroutine[Any, Any, object] | None = None
        if self.threads:
            self.store.flusher.attach(self.loop, ThreadSyncer(self.disk, self.loop, self.pool))  # type: ignore[arg-type]
            self.store.space.attach(self.pool)  # type: ignore[arg-type]
            self.store.space.add_zeros(ZeroAhead(self.store.log, self.disk, self.pool))  # type: ignore[arg-type]
        self.note_flushed()

    @property
    def source(self) -> MessageStore:
        """The store that creates the records of messages."""
        return self.store

    # -- steps ------------------------------------------------------------------------------------

    def send_once(self) -> None:
        """Send the only message of a queue: once its segment is deleted, no log record names the queue."""
        self.append(f"Once{self.number}")
        self.commit()

    def append(self, topic: str = "") -> None:
        topic, queue_id = topic or self.chance.choice(TOPICS), self.chance.randrange(2)
        self.number += 1
        size = self.chance.choice((0, 7, 100, 300, 430, 900, 2500))
        keys = (f"k{self.number % 9}",) if self.chance.random() < 0.8 else ()
        tag = f"tag{self.number % 3}"
        properties = b"TAGS\x01" + tag.encode() + b"".join(b"\x02KEYS\x01" + key.encode() for key in keys)
        given = {"born_timestamp_ms": self.clock.now_ms, "tags_code": java_hash(tag)}
        appended = put(self.source, self._body(size), topic, queue_id, properties, **given)
        self.pending.append((appended.physical_offset, appended.size, keys, java_hash(tag)))

    def batch(self) -> None:
        items = []
        for _ in range(self.chance.randint(1, 6)):
            self.number += 1
            items.append((0, self._body(self.chance.randint(1, 300)), b"KEYS\x01k%d" % (self.number % 9)))
        appended = self.source.appender.append_batch(
            self.chance.choice(TOPICS), self.chance.randrange(2), encode_batch(items), b"",
            born_timestamp_ms=self.clock.now_ms, born_host=HOST,
        )  # fmt: skip
        for (_, _, properties), position, size in zip(
            items, appended.physical_offsets, appended.sizes, strict=True
        ):
            self.pending.append((position, size, (properties[5:].decode(),), 0))

    def _body(self, size: int) -> bytes:
        return (b"%d:" % self.number + self.chance.randbytes(size))[: max(size, 8)]

    def commit(self) -> None:
        before = self.now
        commit = committed(self.store.commit())
        for position, size, keys, tags in self.pending:
            self.ledger.appended.append(entry_of(self.store, before, position, size, keys, tags))
        positions = [each[0] for each in self.pending]
        self.pending = []
        self.clock.advance(self.chance.choice((0.0, 0.01, 0.7, 2.0, 9.0)))
        if self.sync and positions:

            def acknowledge(ok: bool) -> None:
                if ok:
                    self.ledger.promised += [(self.now, position) for position in positions]

            self.store.flusher.wait_for(commit.end_offset, acknowledge)

    def send(self) -> None:
        for _ in range(self.chance.choice((1, 1, 1, 2, 4))):
            self.append() if self.chance.random() < 0.8 else self.batch()
        self.commit()

    def write_derived(self) -> None:
        self.store.queues.write_dirty(self.chance.choice((1, 2, None)))
        self.store.index.write()

    def flush(self) -> None:
        self.store.flusher.request()
        if not self.threads:
            self.note_flushed()

    def settle(self) -> None:
        self._finish_threads()
        assert self.store.writer.make_durable(slots=False)
        self.note_flushed()

    def note_flushed(self) -> None:
        """Record everything that the store reports as flushed as guaranteed."""
        flushed = self.store.flusher.flushed
        known = {position for _, position in self.ledger.promised}
        self.ledger.promised += [
            (self.now, entry.position)
            for entry in self.ledger.appended
            if entry.position not in known and entry.position + len(entry.data) <= flushed
        ]

    def run_job(self) -> None:
        if self.pool.jobs:
            self.pool.jobs.popleft().run()

    def run_callback(self) -> None:
        if self.loop.callbacks:
            self.loop.callbacks.popleft()()

    def _finish_threads(self) -> None:
        while self.pool.jobs or self.loop.callbacks:
            self.run_job()
            self.run_callback()

    def stop_and_start(self) -> None:
        self.detach()
        self.store.executor.end()
        self.finish_retirement()
        self.store.close()
        self.note_flushed()
        self.open()
        assert self.store.recovered.clean

    def die_and_start(self) -> None:
        self.detach()
        if self.retirement is not None:
            self.retirement.close()
        self.store.crash()
        self.open()
        assert not self.store.recovered.damage

    def detach(self) -> None:
        self._finish_threads()
        in_place(self.store.flusher.detach())

    def retire(self) -> None:
        """Let all segments but the last expire; delete them with their queue and index files."""
        self.settle()
        self.begin_retirement()
        self.finish_retirement()

    def begin_retirement(self) -> None:
        """Let all segments but the last expire; `step_retirement` deletes them with queue and index files."""
        self.clock.advance(100 * 3600)
        if len(self.store.log.segments) > 1:
            self.ledger.retiring.append((self.now, self.store.log.segments[-1]))  # for a running pass, too
            if self.retirement is None:
                self.store.retention.delete_now()
                self.retirement = self._retire()

    async def _retire(self) -> None:
        await self.store.retention.log_cycle()
        await self.store.retention.derived_cycle()

    def step_retirement(self) -> None:
        """Run the deletion up to its next wait."""
        if self.retirement is not None:
            try:
                self.retirement.send(None)
            except StopIteration:
                self.retirement = None
        self.ledger.retired.append((self.now, self.store.retention.synced_min))

    def finish_retirement(self) -> None:
        while self.retirement is not None:
            self.step_retirement()

    def purge(self) -> None:
        """Purge a topic, or the older half of its messages."""
        topic, keep = self.chance.choice(TOPICS), self.chance.choice((1, 2))
        plan = self._now_done(self.store.topic_retention.plan_purge(topic))
        floors = {queue: low + (end - low) // keep for queue, low, _, end in plan}
        begun, end = self.now, self.store.log.end
        self._now_done(self.store.topic_retention.raise_min_offsets(topic, floors))
        self.ledger.hidden.append((begun, self.now, topic, floors, end))

    def limit_topic(self) -> None:
        """Give one topic a shorter retention than the store."""
        topic = self.chance.choice(TOPICS)
        limit = TopicLimit(bytes_per_queue=self.chance.choice((1, 3000)))
        self.store.topic_retention.set_limits({topic: limit})
        begun, end = self.now, self.store.log.end
        self._now_done(self.store.topic_retention.topic_cycle())
        floors = dict(self.store.min_offsets.by_topic.get(topic, {}))
        self.ledger.hidden.append((begun, self.now, topic, floors, end))

    @staticmethod
    def _now_done(work: Coroutine[Any, Any, T]) -> T:
        try:
            while True:
                work.send(None)
        except StopIteration as end:
            outcome: T = end.value
            return outcome

    def delete_topic(self) -> None:
        begun, topic, end = self.now, self.chance.choice(TOPICS), self.store.log.end
        self._now_done(self.store.deletion.delete([topic]))
        self.ledger.deletions.append((begun, self.now, topic, end))

    def save_table(self) -> None:
        self.version += 1
        begun = self.now
        padding = "x" * self.chance.randrange(900)
        JsonTable(TABLE, self.disk).save({"version": self.version, "padding": padding})
        self.ledger.tables.append((begun, self.now, self.version))


class Slave(Worker):
    """A slave of a master whose own disk never fails.

    It starts with the master's newest segment. The data is cut at any position, and each tick brings a part.
    """

    slave = True

    def __init__(self, seed: str, *, sync: bool, threads: bool = False) -> None:
        super().__init__(seed, sync=sync, threads=threads)
        self.master = MessageStore.open(config(sync=False), RecordingDisk(), self.clock)
        for _ in range(self.chance.choice((0, 30))):
            self.append()
            committed(self.master.commit())
        self.first = self.master.log.segments[-1] if self.master.log.segments else 0
        self.pending = [each for each in self.pending if each[0] >= self.first]

    @property
    def source(self) -> MessageStore:
        return self.master

    def commit(self) -> None:
        committed(self.master.commit())
        self.clock.advance(self.chance.choice((0.0, 0.01, 0.7, 2.0, 9.0)))
        if self.chance.random() < 0.9:
            self.receive()

    def receive(self) -> None:
        """Run a tick of the slave."""
        log, replica = self.master.log, self.store.replica
        position = replica.next or self.first
        for _ in range(self.chance.randint(1, 8)):
            room = log.segment_size - position % log.segment_size
            data = log.read(position, min(self.chance.choice((1, 90, 700, 3000)), room, log.end - position))
            if not data:
                break
            replica.append(position, data)
            position = replica.next
        before = self.now
        done = replica.commit()
        assert done.error is None
        come = [each for each in self.pending if each[0] + each[1] <= done.end]
        del self.pending[: len(come)]
        for position, size, keys, tags in come:
            self.ledger.appended.append(entry_of(self.store, before, position, size, keys, tags))
        if self.sync and come:
            self.store.flusher.wait_for(done.end, lambda ok: self.note_flushed() if ok else None)


def steps(
    count: int, *, sync: bool, threads: bool = False, kind: type[Worker] = Worker, **weights: int
) -> Callable[[str], Worker]:
    """Return a workload of `count` steps, which are methods of Worker with weights."""

    def run(seed: str) -> Worker:
        worker = kind(seed, sync=sync, threads=threads)
        for _ in range(count):
            getattr(worker, worker.chance.choices(list(weights), list(weights.values()))[0])()
        return worker

    return run


def short(seed: str) -> Worker:
    """Write a few messages and a checkpoint; every state of every moment can be tried."""
    worker = Worker(seed, sync=seed.endswith(("0", "2", "4", "6", "8")))
    worker.append()
    worker.commit()
    worker.write_derived()
    worker.append()
    worker.append()
    worker.commit()
    worker.settle()
    worker.append()
    worker.commit()
    worker.detach()
    worker.store.close()
    worker.note_flushed()
    return worker


def short_deletions(seed: str) -> Worker:
    """Delete segments and derived data step by step, on a store that was stopped before.

    Topics are purged, shortened and deleted. Every state of every moment can be tried.
    """
    before = Worker(seed, sync=True)
    while len(before.store.log.segments) < 3:
        before.send()
    before.detach()
    before.store.close()
    worker = Worker(seed, sync=True, disk=RecordingDisk(before.disk.image(), before.clock.time_ms))
    worker.clock.now_ms = before.clock.now_ms
    worker.number = before.number
    worker.ledger.appended = [entry._replace(at=-1) for entry in before.ledger.appended]
    worker.ledger.promised = [(-1, entry.position) for entry in before.ledger.appended]
    order = [worker.begin_retirement, worker.purge, worker.limit_topic, worker.delete_topic, worker.send]
    worker.chance.shuffle(order)
    for step in order:
        step()
        worker.finish_retirement()
    return worker


SMALL_ZEROS = {"PART": 1024, "MARGIN": 1024, "AHEAD": 4096, "_PAGE": 512}  # for segments of 8 KiB
SHORT = ("short", "short_deletions")
"""Workloads with every state of every moment."""
WORKLOADS: dict[str, Callable[[str], Worker]] = {
    # Flushes, queue writes and checkpoints happen at times.
    "asynchronous": steps(60, sync=False, send=10, write_derived=3, flush=2, settle=1, save_table=1),
    # Every tick is flushed immediately.
    "synchronous": steps(60, sync=True, send=10, write_derived=3, settle=1),
    # Syncs, reservations and zeros ahead of the log run in threads, so data is written during a sync.
    "threaded": steps(140, sync=True, threads=True, send=6, run_job=4, run_callback=4, write_derived=2),
    # Clean stops, kills and checkpoints happen in between.
    "restarts": steps(45, sync=True, send=10, write_derived=2, settle=1, stop_and_start=2, die_and_start=2),
    # Topics are deleted, segments expire, tables are saved, and the store is stopped.
    "deletions": steps(
        50, sync=False, send=12, write_derived=2, settle=1, stop_and_start=1, die_and_start=1, retire=1,
        delete_topic=2, save_table=2, purge=1,
    ),
    # Segments, queue and index files are deleted step by step among new messages; topics are purged and
    # shortened.
    "retention": steps(
        110, sync=True, send=14, send_once=4, write_derived=2, settle=1, stop_and_start=1, die_and_start=1,
        begin_retirement=2, step_retirement=18, purge=1, limit_topic=1, delete_topic=1,
    ),
    # A slave receives the data that its master has written.
    "slave": steps(
        60, kind=Slave, sync=False, send=10, receive=3, write_derived=3, flush=2, settle=1, stop_and_start=1,
        die_and_start=2,
    ),
    "slave_synchronous": steps(
        110, kind=Slave, sync=True, threads=True, send=6, receive=2, run_job=4, run_callback=4,
        write_derived=2,
    ),
    "short": short,
    "short_deletions": short_deletions,
}  # fmt: skip


def work(workload: str, seed: str) -> Worker:
    """Run a workload and close its store; work pending in threads never runs."""
    with mock.patch.multiple(space_ahead, **SMALL_ZEROS):
        worker = WORKLOADS[workload](seed)
    worker.pool.jobs.clear()
    if worker.retirement is not None:
        worker.retirement.close()
    worker.store.crash()
    return worker

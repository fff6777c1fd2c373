"""Flushes: the senders and readers that wait for a sync, and the effects of a failed sync."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until
from tests.store.kit import committed, everything, finds, flushed, open_store, put, send, started, waiter

from cometmq.store import Clock, GetStatus, ManualClock, MessageStore, StoreRefused
from cometmq.store.log.flush import LogFlusher


class GatedDisk(FaultyDisk):
    """A disk whose syncs of the commit log wait at a gate; `at_gate` is set when a sync reaches the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.gated = True
        self.syncs = 0

    def fdatasync(self, fd: int) -> None:
        if "commitlog" in self._paths[fd] and self.gated:
            self.syncs += 1
            self.arrived.release()
            assert self.gate.acquire(timeout=20)
        super().fdatasync(fd)

    async def sync_arrives(self) -> None:
        assert await asyncio.to_thread(self.arrived.acquire, timeout=20)

    def open_gate(self) -> None:
        self.gated = False
        self.gate.release(100)


Gated = tuple[MessageStore, GatedDisk]


def gated(root: Path) -> Gated:
    disk = GatedDisk()
    return started(root, disk, flush_disk_type="SYNC_FLUSH"), disk


@pytest.fixture
async def sync_store(tmp_path: Path) -> AsyncIterator[Gated]:
    store, disk = gated(tmp_path)
    yield store, disk
    disk.open_gate()
    await store.stop()


async def test_messages_become_visible_with_their_flush_and_not_before(sync_store: Gated) -> None:
    store, disk = sync_store
    events: list[object] = []
    store.dispatcher.on_visible = lambda _count, arrivals: events.extend(arrival[2] for arrival in arrivals)
    put(store, b"a")
    assert committed(store.commit()).arrivals == []
    done = waiter(store)
    done.add_done_callback(lambda _: events.append("acknowledged"))
    store.flusher.wait_for(store.log.end, lambda ok: events.append(ok))
    await disk.sync_arrives()
    assert store.get_messages("T", 0, 0, 32).status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert events == []
    disk.gate.release()
    assert await asyncio.wait_for(done, 90)
    assert everything(store) == [b"a"]
    assert events[:2] == [True, 1]  # the acknowledgement comes before the readers


async def test_waiters_share_syncs_and_are_answered_in_order(sync_store: Gated) -> None:
    store, disk = sync_store
    order: list[int] = []
    send(store)
    store.flusher.wait_for(store.log.end, lambda ok: order.append(0))
    await disk.sync_arrives()  # all later sends share the second sync
    for number in range(1, 101):
        send(store)
        store.flusher.wait_for(store.log.end, lambda ok, number=number: order.append(number))
    last = waiter(store)
    disk.gate.release()
    await disk.sync_arrives()
    assert order == [0]
    disk.gate.release()
    assert await asyncio.wait_for(last, 90)
    assert order == list(range(101))
    assert disk.syncs == 2


async def test_who_comes_just_as_a_sync_ends_shares_the_next(sync_store: Gated) -> None:
    store, disk = sync_store
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def come() -> None:
        send(store, b"just now")
        store.flusher.wait_for(store.log.end, done.set_result)

    send(store)
    store.flusher.wait_for(store.log.end, lambda ok: loop.call_soon(come))  # a confirmed sender sends again
    await disk.sync_arrives()
    send(store, b"meanwhile")
    disk.gate.release()
    await disk.sync_arrives()
    disk.gate.release(9)
    assert await asyncio.wait_for(done, 90)
    assert disk.syncs == 2


async def test_a_store_let_go_between_two_syncs_asks_for_none(tmp_path: Path) -> None:
    store, disk = gated(tmp_path)
    loop = asyncio.get_running_loop()
    crashed: asyncio.Future[None] = loop.create_future()
    answers: list[bool] = []

    def crash() -> None:
        store.crash()
        loop.call_later(0.05, crashed.set_result, None)

    send(store)
    store.flusher.wait_for(store.log.end, lambda ok: loop.call_soon(crash))
    await disk.sync_arrives()
    send(store)
    store.flusher.wait_for(store.log.end, answers.append)
    disk.gate.release()
    await asyncio.wait_for(crashed, 90)
    assert answers == []
    assert disk.syncs == 1


async def test_a_waiter_that_fails_does_not_harm_the_ones_behind_it(
    sync_store: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    store, disk = sync_store
    send(store)

    def broken(_ok: bool) -> None:
        raise RuntimeError("no")

    store.flusher.wait_for(store.log.end, broken)
    done = waiter(store)
    disk.open_gate()
    assert await asyncio.wait_for(done, 90)
    assert "a callback after a flush failed" in caplog.text


async def test_a_slow_flush_times_out_but_the_message_is_stored(tmp_path: Path) -> None:
    disk = GatedDisk()
    store = started(tmp_path, disk, Clock(), flush_disk_type="SYNC_FLUSH", sync_flush_timeout=20)
    send(store, b"slow")
    assert await flushed(store) is False
    assert store.flusher.failure is None
    disk.open_gate()
    await store.stop()
    store = open_store(tmp_path)
    assert everything(store) == [b"slow"]


async def test_nothing_is_acknowledged_after_a_failed_sync(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    store = started(tmp_path, disk, flush_disk_type="SYNC_FLUSH")
    send(store, b"before")
    assert await flushed(store)
    disk.fail("fdatasync", error=errno.EIO, match="commitlog")  # a later success would prove nothing
    send(store, b"lost")
    assert await flushed(store) is False
    assert isinstance(store.flusher.failure, OSError)
    assert await flushed(store) is False
    with pytest.raises(StoreRefused, match="could not be flushed") as refused:
        put(store)
    assert refused.value.response_code == 14
    assert everything(store) == [b"before"]
    assert "read-only" in caplog.text
    await store.stop()
    assert (tmp_path / "abort").exists()


async def test_asynchronous_flush_follows_pages_and_the_thorough_interval(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(), ManualClock()
    store = open_store(tmp_path, disk, clock)
    send(store, bytes(100))
    store.flusher.timed()
    assert store.flusher.flushed == 0  # less than four pages were written
    clock.advance(10)
    store.flusher.timed()
    assert store.flusher.flushed == store.log.end
    send(store, bytes(16_384))
    store.flusher.timed()
    assert store.flusher.flushed == store.log.end
    syncs = disk.calls["fdatasync"]
    store.flusher.timed()
    assert disk.calls["fdatasync"] == syncs


async def test_a_full_segment_is_flushed_whatever_the_pages(tmp_path: Path) -> None:
    store = open_store(tmp_path, FaultyDisk(), ManualClock(), flush_commit_log_least_pages=100)
    send(store, bytes(60_000))
    store.flusher.timed()
    assert store.flusher.flushed == 0
    send(store, bytes(10_000))  # is stored in the next segment
    store.flusher.timed()
    assert store.flusher.flushed == store.log.end


async def test_without_the_timer_alone_each_commit_looks_whether_to_flush(tmp_path: Path) -> None:
    store = open_store(
        tmp_path, FaultyDisk(), ManualClock(), flush_commit_log_timed=False, flush_commit_log_least_pages=1
    )
    send(store, bytes(3000))
    assert store.flusher.flushed == 0
    send(store, bytes(3000))
    assert store.flusher.flushed == store.log.end


async def test_the_background_makes_everything_durable_and_moves_the_checkpoint(tmp_path: Path) -> None:
    store = open_store(
        tmp_path,
        clock=Clock(),
        flush_interval_commit_log=5,
        flush_interval_consume_queue=5,
        flush_consume_queue_thorough_interval=5,
    )
    store.start()
    for number in range(300):
        put(store, bytes(100), queue_id=number % 7, properties=b"KEYS\x01k%d" % number)
    committed(store.commit())
    last_ms = store.writer.stored_ms
    deadline = asyncio.get_running_loop().time() + 20
    while store.checkpoint.logics_ms < last_ms:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert store.checkpoint.physic_ms >= last_ms
    assert all(queue.written == queue.max_offset for queue in store.queues)
    assert store.index.files[-1].written == store.index.files[-1].count == 301


async def test_the_background_keeps_to_the_intervals_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    due: list[tuple[float, Callable[[], None]]] = []

    def note(seconds: float, work: Callable[..., None], *given: object) -> asyncio.TimerHandle:
        if work.__qualname__.startswith("Periodic."):
            due.append((seconds, work))
        return call_later(seconds, work, *given)

    monkeypatch.setattr(loop, "call_later", note)
    store = started(tmp_path)
    store.configure(
        store.config.replace(
            flush_interval_commit_log=70_000,
            flush_interval_consume_queue=80_000,
            clean_resource_interval=90_000,
        )
    )
    for _, turn in due[:3]:
        turn()
    while len(due) < 6:
        await asyncio.sleep(0)
    assert [seconds for seconds, _ in due] == [0.5, 1, 10, 70, 80, 90]


async def test_the_checkpoint_waits_for_the_thorough_interval(tmp_path: Path) -> None:
    clock = ManualClock()
    store = started(tmp_path, FaultyDisk(), clock)
    send(store)
    for seconds, moved in ((0, False), (59.9, False), (60, True)):
        clock.now_s = 1000 + seconds
        await store.writer.write_cycle()
        assert (store.checkpoint.logics_ms == store.writer.stored_ms) is moved


@pytest.mark.parametrize("part", ["consumequeue", "index"])
def test_a_failed_sync_of_queues_or_index_leaves_the_checkpoint_where_it_is(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed sync the device's content is unknown, and a later success would prove nothing."""
    disk = FaultyDisk()
    store = open_store(tmp_path, disk)
    send(store, b"0", properties=b"KEYS\x01k0")
    assert store.writer.make_durable()
    kept = (tmp_path / "checkpoint").read_bytes()
    disk.fail("fdatasync", error=errno.EIO, match=f"/{part}/")
    for number in (1, 2):
        send(store, b"%d" % number, properties=b"KEYS\x01k%d" % number)  # the store still accepts messages
        assert not store.writer.make_durable()
        assert (tmp_path / "checkpoint").read_bytes() == kept
    assert caplog.text.count("could not be synced, so the checkpoint is not advanced") == 1
    store.close()
    assert (tmp_path / "abort").exists()
    store = open_store(tmp_path)
    assert (store.recovered.clean, store.recovered.records > 0) == (False, True)
    assert everything(store) == [b"0", b"1", b"2"]
    finds(store, range(3))
    store.close()
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("in_background", [True, False])
async def test_what_a_round_that_timed_out_did_not_sync_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """The data is not written again between the two rounds, and the checkpoint then covers all of it."""
    disk = FaultyDisk()
    store = started(tmp_path, disk)
    send(store, properties=b"KEYS\x01k")
    vouched = store.checkpoint.saved
    with monkeypatch.context() as slow:
        slow.setattr(LogFlusher, "wait_for", lambda _self, _position, waiter: waiter(False))
        await store.writer.write_cycle(thorough=True)
    assert store.checkpoint.saved == vouched
    synced: list[str] = []
    disk.before = lambda call, path: synced.append(path) if call in ("fdatasync", "fsync_dir") else None
    if in_background:
        await store.writer.write_cycle(thorough=True)
        assert store.checkpoint.saved != vouched
    else:
        assert store.writer.make_durable()
    (index_file,) = (tmp_path / "index").iterdir()
    queue = tmp_path / "consumequeue/T/0"
    assert {str(queue), str(queue / f"{0:020d}"), str(index_file.parent), str(index_file)} <= set(synced)
    synced.clear()
    assert store.writer.make_durable()
    assert not [path for path in synced if "consumequeue" in path]


async def test_the_next_segment_is_reserved_ahead(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = started(tmp_path, disk)
    send(store, bytes(40_000))
    await until(lambda: disk.calls["reserve"] >= 2)
    disk.fail("reserve", error=errno.ENOSPC, times=99)
    assert send(store, bytes(30_000)).physical_offset == 65536
    assert disk.calls["reserve"] == 2
    await store.stop()
    names = sorted(path.name for path in (tmp_path / "commitlog").iterdir())
    assert names == [f"{0:020d}", f"{65536:020d}"]


async def test_a_reserved_segment_that_was_not_needed_is_deleted_at_the_stop(tmp_path: Path) -> None:
    store = started(tmp_path)
    send(store, bytes(40_000))
    await store.stop()
    assert [path.name for path in (tmp_path / "commitlog").iterdir()] == [f"{0:020d}"]


async def test_two_stops_at_once_both_come_back(tmp_path: Path) -> None:
    store, disk = gated(tmp_path)
    send(store)
    await disk.sync_arrives()
    stops = [asyncio.create_task(store.stop()) for _ in range(2)]
    await asyncio.sleep(0.05)
    disk.gated = False
    disk.gate.release()
    await asyncio.wait_for(asyncio.gather(*stops), 90)
    assert open_store(tmp_path).recovered.clean

"""Tests of the worker tasks that call the listener: concurrency, failures, and draining at a stop."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import ConsumeFromWhere, PushConsumer, PushOptions
from cometmq.client.cluster import workers
from cometmq.client.consumer.consuming import Consuming
from cometmq.client.consumer.listener import BoundListener, ConsumeContext, ConsumeStatus, bind_listener
from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.properties.values import decode_properties

QUEUE = MessageQueue("T", "a", 0)
OK = ConsumeStatus.SUCCESS


def batches(count: int) -> list[Batch]:
    queue = ProcessQueue(QUEUE, 0, 0.0)
    return queue.put([MessageExt("T", b"x", queue_offset=offset) for offset in range(count)], 1)


Listener = BoundListener[ConsumeContext, ConsumeStatus]


class Desk:
    """A consume mode that records the acknowledged batches."""

    later = ConsumeStatus.RECONSUME_LATER
    handled = (OK,)

    def __init__(self, expected: int) -> None:
        self.acknowledged: list[tuple[int, ConsumeStatus]] = []
        self.complete = asyncio.Event()
        self._expected = expected

    def begin(self, batch: Batch) -> ConsumeContext | None:
        return None if batch.queue.dropped else ConsumeContext(batch.queue.message_queue)

    def acknowledge_soon(self, _batch: Batch, _status: ConsumeStatus, _context: ConsumeContext) -> bool:
        return False

    async def acknowledge(self, batch: Batch, status: ConsumeStatus, context: ConsumeContext) -> None:
        self.acknowledged.append((batch.first_offset, status))
        if len(self.acknowledged) == self._expected:
            self.complete.set()


async def consumed(listener: Listener, count: int, concurrency: int) -> list[tuple[int, ConsumeStatus]]:
    desk = Desk(count)
    consuming = Consuming(listener, concurrency, desk)
    consuming.start()
    await asyncio.sleep(0)  # lets all workers start waiting
    consuming.submit(batches(count))
    async with asyncio.timeout(60):
        await desk.complete.wait()
    assert await consuming.stop(5) == 0
    return desk.acknowledged


async def test_every_batch_is_consumed_once() -> None:
    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        return OK

    assert sorted(await consumed(listener, 500, 7)) == [(offset, OK) for offset in range(500)]


async def test_the_number_of_calls_at_once_changes_while_they_run() -> None:
    running, changed = 0, asyncio.Condition()

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        nonlocal running
        async with changed:
            running += 1
            await changed.wait()
            running -= 1
        return OK

    async def next_calls(expected: int) -> None:
        """End the running calls, and check that `expected` new ones start."""
        async with changed:
            changed.notify_all()
        for _ in range(20):
            await asyncio.sleep(0)
        assert running == consuming.running == expected

    consuming = Consuming(listener, 2, Desk(1000))
    consuming.start()
    consuming.submit(batches(1000))
    await next_calls(2)
    consuming.set_concurrency(5)
    await next_calls(5)
    consuming.set_concurrency(1)
    await next_calls(1)
    await next_calls(1)
    consuming.set_concurrency(4)
    await next_calls(4)
    assert await consuming.stop(0) == 4


async def test_idle_workers_that_are_too_many_end_and_leave_work_to_others() -> None:
    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        return OK

    desk = Desk(20)
    consuming = Consuming(listener, 20, desk)
    consuming.start()
    await asyncio.sleep(0)
    consuming.submit(batches(1))
    consuming.set_concurrency(3)
    consuming.submit(batches(19))
    async with asyncio.timeout(60):
        await desk.complete.wait()
    assert await consuming.stop(5) == 0


async def test_calls_run_side_by_side_up_to_the_limit() -> None:
    running, most, full = 0, 0, asyncio.Event()

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            full.set()
        await full.wait()
        running -= 1
        return OK

    await consumed(listener, 20, 4)
    assert most == 4


@pytest.mark.parametrize("failure", [RuntimeError("boom"), asyncio.CancelledError()])
async def test_an_exception_means_later_and_the_worker_goes_on(failure: BaseException) -> None:
    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        if messages[0].queue_offset == 1:
            raise failure
        return OK

    assert await consumed(bind_listener(listener, None, ConsumeStatus), 3, 1) == [
        (0, OK),
        (1, ConsumeStatus.RECONSUME_LATER),
        (2, OK),
    ]


async def test_batches_of_a_dropped_queue_are_not_given_out() -> None:
    seen: list[int] = []
    gate = asyncio.Event()

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        seen.append(messages[0].queue_offset)
        await gate.wait()
        return OK

    desk = Desk(1)
    consuming = Consuming(listener, 1, desk)
    consuming.start()
    held = batches(3)
    consuming.submit(held)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    held[0].queue.dropped = True
    gate.set()
    async with asyncio.timeout(60):
        await desk.complete.wait()
    await consuming.stop(5)
    assert seen == [0]


async def test_a_stop_waits_for_running_calls_and_starts_no_new_ones() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()
    seen: list[int] = []

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        seen.append(messages[0].queue_offset)
        begun.set()
        await gate.wait()
        return OK

    desk = Desk(2)
    consuming = Consuming(listener, 1, desk)
    consuming.start()
    consuming.submit(batches(2))
    await begun.wait()
    stopping = asyncio.create_task(consuming.stop(5))
    await asyncio.sleep(0)
    gate.set()
    assert await stopping == 0
    assert seen == [0]
    assert desk.acknowledged == [(0, OK)]


async def test_a_stop_gives_up_on_a_listener_that_hangs() -> None:
    begun = asyncio.Event()

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    desk = Desk(1)
    consuming = Consuming(listener, 2, desk)
    consuming.start()
    consuming.submit(batches(1))
    await begun.wait()
    assert await consuming.stop(0.01) == 1
    assert desk.acknowledged == []


@pytest.mark.parametrize("ignored", [1, 2])
async def test_a_stop_ends_although_a_listener_ignores_being_cancelled(
    ignored: int, caplog: pytest.LogCaptureFixture
) -> None:
    begun, let_go = asyncio.Event(), asyncio.Event()

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        begun.set()
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        raise ValueError("too late")

    desk = Desk(1)
    consuming = Consuming(listener, 2, desk)
    consuming.start()
    consuming.submit(batches(ignored))
    await begun.wait()
    async with asyncio.timeout(60):
        assert await consuming.stop(0.01) == ignored
    assert f"listeners: {ignored} task" in caplog.text
    let_go.set()


@pytest.mark.parametrize("error", [SystemExit("no"), KeyboardInterrupt(), BaseException("own")])
async def test_whatever_a_call_in_a_thread_raises_ends_the_call_only(error: BaseException) -> None:
    def listener(messages: list[MessageExt]) -> None:
        raise error

    with ThreadPoolExecutor(1) as threads:
        desk = Desk(2)
        consuming = Consuming(bind_listener(listener, threads, ConsumeStatus), 1, desk)
        consuming.start()
        consuming.submit(batches(2))
        async with asyncio.timeout(60):
            await desk.complete.wait()
        assert consuming.failed == 2
        assert await consuming.stop(1) == 0


async def test_a_listener_that_cancels_itself_fails_and_the_next_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_AGAIN_S", 0.01)

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        task = asyncio.current_task()
        assert task is not None
        if messages[0].queue_offset < 4:
            task.cancel()
        await asyncio.sleep(0)
        return OK

    acknowledged = sorted(await consumed(listener, 6, 2))
    assert acknowledged == [(offset, Desk.later if offset < 4 else OK) for offset in range(6)]


async def test_a_listener_that_never_waits_leaves_the_loop_its_turn() -> None:
    turns = 0

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        return OK

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await consumed(listener, 1000, 1)
    task.cancel()
    assert turns >= 1000 // 32


async def test_properties_are_parsed_when_the_listener_reads_them(
    namesrv: FakeNamesrv, broker: FakeBroker, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []

    def parse(properties: bytes) -> dict[str, str]:
        parsed.append(properties)
        return decode_properties(properties)

    monkeypatch.setattr("cometmq.protocol.record.one.decode_properties", parse)
    for n in range(3):
        broker.store("T", 0, b"x", b"TAGS\x01TagA\x02n\x01%d" % n)
    first = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer("g", box, {"T": "TagA"}, namesrv=namesrv.addr, options=first):
        await box.has(3)
    assert not parsed
    for _ in range(2):
        assert [each.user_properties for each in box.messages] == [{"n": str(n)} for n in range(3)]
    assert len(parsed) == 3

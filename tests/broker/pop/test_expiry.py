"""The expiry of many leases at once, with a clock that stands still except while leases are copied."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.waiting import until

from cometmq.broker.pop import expiry as module
from cometmq.broker.pop.expiry import LeaseExpiry
from cometmq.broker.pop.leases import Leases, Pop
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.store import ManualClock

COPY_S = 0.0001
COUNT = 5_000
INVISIBLE_MS = 60_000


class Copies:
    """Stores copies of messages. Each takes COPY_S of the clock's time, and is stored an iteration later."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.made: list[int] = []
        self.waiting: list[Callable[[bool], None]] | None = None
        self.succeed = True

    def copy(self, overdue: Any, done: Callable[[bool], None]) -> None:
        self.clock.advance(COPY_S)
        self.made.append(overdue.offset)
        if self.waiting is not None:
            self.waiting.append(done)
        else:
            self.loop.call_soon(done, self.succeed)


@pytest.fixture
async def copies() -> Copies:
    return Copies(ManualClock())


@pytest.fixture
async def expiry(copies: Copies) -> LeaseExpiry:
    """Return the expiry of leases whose client has vanished."""
    clock, offsets = copies.clock, ConsumerOffsets()
    offsets.commit("G", "Orders", 0, 0)
    leases = Leases(offsets, 1_000_000)
    queue = leases.enter(("G", "Orders", 0), 0)
    now_ms = int(clock.boottime() * 1000)
    assert leases.lease(queue, range(COUNT), COUNT, Pop(1_000_000, 0, INVISIBLE_MS), now_ms)
    made = LeaseExpiry(clock=clock, leases=leases, retries=copies, freed=lambda _: None)  # type: ignore[arg-type]
    clock.advance(INVISIBLE_MS / 1000)
    return made


async def test_all_expire_at_once_in_short_turns(copies: Copies, expiry: LeaseExpiry) -> None:
    began_s = copies.clock.monotonic()
    expiry.start()
    turns, before = [], 0
    while len(copies.made) < COUNT:
        await asyncio.sleep(0)
        turns.append(len(copies.made) - before)
        before = len(copies.made)
    most = module.MAX_TURN_S / COPY_S + module.PER_STEP
    assert max(turns) <= most
    assert copies.clock.monotonic() - began_s == pytest.approx(COUNT * COPY_S)
    assert copies.made == list(range(COUNT))
    await until(lambda: expiry.leases.next_deadline_ms() is None)
    # One turn follows the other: a fixed interval between them would let the loop run empty very often.
    assert len(turns) < 20 * COUNT / most
    expiry.stop()


async def test_the_number_of_copies_under_way_is_limited(copies: Copies, expiry: LeaseExpiry) -> None:
    copies.waiting = []
    expiry.start()
    await until(lambda: len(copies.made) == module.MAX_COPIES)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(copies.made) == module.MAX_COPIES
    waiting, copies.waiting = copies.waiting, None
    for done in waiting:
        done(True)
    await until(lambda: len(copies.made) == COUNT)
    expiry.stop()


async def test_refused_copies_are_tried_again_in_small_numbers(copies: Copies, expiry: LeaseExpiry) -> None:
    copies.succeed = False
    expiry.start()
    began_s, before = copies.loop.time(), 0
    while len(copies.made) < 4 * module.REFUSED_PER_TURN:
        await asyncio.sleep(0)
        assert len(copies.made) - before <= module.REFUSED_PER_TURN
        before = len(copies.made)
    assert copies.loop.time() - began_s > 2 * module.MIN_INTERVAL_MS / 1000
    copies.succeed = True
    copies.clock.advance(module.POSTPONED_MS / 1000)
    await until(lambda: len(set(copies.made)) == COUNT)
    expiry.stop()

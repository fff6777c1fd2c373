"""The bound on concurrent sends: never passed, never lost, whoever gives up."""

from __future__ import annotations

import asyncio
import random

from cometmq.client.producer.slots import Slots


async def test_the_limit_holds_and_everybody_gets_through() -> None:
    slots, most, done = Slots(3), 0, 0

    async def work(cancelled: bool) -> None:
        nonlocal most, done
        if slots.full:
            await slots.room()
        slots.take()
        try:
            most = max(most, slots.taken)
            await asyncio.sleep(random.random() / 1000)
            done += not cancelled
        finally:
            slots.give_back()

    tasks = [asyncio.create_task(work(number % 4 == 0)) for number in range(200)]
    await asyncio.sleep(0.002)
    for task in tasks[::4]:
        task.cancel()
    async with asyncio.timeout(20):
        await slots.drained()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3
    assert done == 150
    assert slots.taken == 0


async def test_a_waiter_that_is_cancelled_when_it_is_woken_passes_its_slot_on() -> None:
    slots = Slots(1)
    slots.take()
    first, second = asyncio.create_task(slots.room()), asyncio.create_task(slots.room())
    await asyncio.sleep(0)
    slots.give_back()
    first.cancel()
    async with asyncio.timeout(5):
        await second
    assert first.cancelled() or first.exception() is None


async def test_drained_returns_at_once_when_nothing_is_under_way() -> None:
    async with asyncio.timeout(5):
        await Slots(1).drained()

"""The timer for many deadlines."""

from __future__ import annotations

import asyncio

from cometmq.broker.base.deadlines import DeadlineTimer


async def test_the_earliest_deadline_counts_and_the_function_names_the_next():
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    deadlines: list[int] = []

    def expire(now_ms: int) -> int | None:
        while deadlines and deadlines[0] <= now_ms:
            deadlines.pop(0)
        if not deadlines:
            ended.set()
        return deadlines[0] if deadlines else None

    timer = DeadlineTimer(loop, expire)
    now_ms = timer.now_ms()
    deadlines += [now_ms + 5, now_ms + 10, now_ms + 20]
    for deadline in (now_ms + 600_000, now_ms + 5, now_ms + 300_000):
        timer.arm(deadline)
    await asyncio.wait_for(ended.wait(), 60)
    assert not deadlines


async def test_a_cancelled_timer_does_not_run_but_can_be_armed_again():
    loop, ran, passed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    timer = DeadlineTimer(loop, lambda _: ran.set())
    timer.arm(timer.now_ms() + 5)
    timer.cancel()
    DeadlineTimer(loop, lambda _: passed.set()).arm(timer.now_ms() + 10)
    await asyncio.wait_for(passed.wait(), 60)
    assert not ran.is_set()
    timer.arm(timer.now_ms())
    await asyncio.wait_for(ran.wait(), 60)

"""Replication of bursts: one flush, one frame and one wake-up per tick, and no task per message."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.broker.replication.raft_group import RaftGroup

from cometmq.broker.replication import raft_wire
from cometmq.broker.replication.waits import Waits

BURST = 400
FEW = BURST // 20
"""Upper bound of the socket reads, each of which is a tick, in which a burst reaches the broker."""


@contextmanager
def brokers_tasks() -> Iterator[Counter[str]]:
    """Count the tasks that brokers start, by coroutine name."""
    begun: Counter[str] = Counter()
    loop = asyncio.get_running_loop()

    def begin(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **more: Any
    ) -> asyncio.Task[Any]:
        code = getattr(coro, "cr_code", None)
        if code is not None and "cometmq/broker" in code.co_filename.replace("\\", "/"):
            begun[code.co_qualname] += 1
        return asyncio.Task(coro, loop=loop, **more)

    loop.set_task_factory(begin)
    try:
        yield begun
    finally:
        loop.set_task_factory(None)


async def burst(peer: Any) -> None:
    answers = await asyncio.gather(*(peer.send(body=b"%d" % number) for number in range(BURST)))
    assert {answer.code for answer in answers} == {0}


def syncs(raft_group: RaftGroup) -> int:
    return sum(broker.parts.store.flusher.syncs for broker in raft_group.brokers.values())


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_master_waits_for_slaves_with_one_entry_a_tick_and_no_task(group, flush, monkeypatch):
    await group.master(flushDiskType=flush)
    await group.slave(flushDiskType=flush)
    await group.known()
    await burst(group.peers["master"])
    added: list[int] = []
    add = Waits.add

    def count(self: Any, slaves: int, position: int, timeout_s: float, waiter: Any) -> None:
        added.append(position)
        add(self, slaves, position, timeout_s, waiter)

    monkeypatch.setattr(Waits, "add", count)
    with brokers_tasks() as begun:
        await burst(group.peers["master"])
    assert 0 < len(added) <= FEW
    assert added == sorted(set(added))
    assert sum(begun.values()) <= FEW, begun


async def test_a_raft_leader_flushes_and_frames_once_a_tick(tmp_path, monkeypatch):
    frames: list[int] = []
    frame = raft_wire.frame

    def count(messages: Any) -> bytes:
        messages = list(messages)
        frames.append(sum(getattr(each, "count", 0) for each in messages))
        return frame(messages)

    async with RaftGroup(tmp_path, flushDiskType="SYNC_FLUSH") as raft_group:
        leader = await raft_group.leader()
        await burst(raft_group.peers[leader])
        await raft_group.equal()
        monkeypatch.setattr(raft_wire, "frame", count)
        flushed = syncs(raft_group)
        with brokers_tasks() as begun:
            await burst(raft_group.peers[leader])
        await raft_group.equal()
        flushed = syncs(raft_group) - flushed
    with_entries = [entries for entries in frames if entries]
    # Each of the two followers gets each entry once.
    assert sum(with_entries) == 2 * BURST
    assert len(with_entries) <= 2 * FEW
    # Each of the three members flushes once per tick.
    assert 0 < flushed <= 3 * FEW
    assert sum(begun.values()) <= FEW, begun

"""Writes that wait for other brokers: which copies and which times end them."""

from __future__ import annotations

import pytest
from tests.kit.waiting import until

from cometmq.broker.replication.waits import Waits
from cometmq.protocol.codes import ResponseCode
from cometmq.store import Clock

LATE = int(ResponseCode.FLUSH_SLAVE_TIMEOUT)


class World:
    def __init__(self) -> None:
        self.waits = Waits(Clock(), LATE)
        self.ended: list[tuple[int, int]] = []

    def add(self, brokers: int, position: int, timeout_s: float = 60.0) -> None:
        self.waits.add(brokers, position, timeout_s, lambda code: self.ended.append((position, code)))

    def reached(self, copies) -> list[int]:
        self.ended.clear()
        self.waits.reached(copies)
        assert all(code == ResponseCode.SUCCESS for _, code in self.ended)
        return [position for position, _ in self.ended]


@pytest.fixture
async def world():
    made = World()
    yield made
    made.waits.end_all(LATE)


async def test_waits_end_in_order_with_the_copies(world):
    for position in (100, 200, 300):
        world.add(1, position)
    assert world.reached(lambda position: int(position <= 200)) == [100, 200]
    assert world.reached(lambda position: int(position <= 200)) == []
    assert len(world.waits) == 1


async def test_waits_for_more_slaves_hold_up_nobody(world):
    world.add(2, 100)
    world.add(1, 200)
    assert world.reached(lambda _position: 1) == [200]
    assert world.reached(lambda _position: 2) == [100]


async def test_waits_end_with_their_time(world):
    world.add(1, 100, 0.01)
    world.add(2, 150, 0.02)
    world.add(1, 200)
    await until(lambda: len(world.ended) == 2)
    assert world.ended == [(100, LATE), (150, LATE)]
    assert len(world.waits) == 1
    world.waits.end_all(LATE)
    assert world.ended[2:] == [(200, LATE)]

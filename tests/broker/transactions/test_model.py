"""Anything may happen in any order, and a kill in between: every transaction ends once, as it should.

COMETMQ_TRANSACTION_RUNS sets how many runs there are (30), COMETMQ_TRANSACTION_SEED which come first.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.broker.transactions.world import Place, World, step

from cometmq.broker.transactions import checks
from cometmq.testing.recording_disk import RecordingDisk

RUNS = int(os.environ.get("COMETMQ_TRANSACTION_RUNS", "30"))
FIRST = int(os.environ.get("COMETMQ_TRANSACTION_SEED", "1"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
async def test_every_transaction_ends_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PAUSE_S", 0)
    chance = random.Random(seed)
    world = World(RecordingDisk())
    await world.open()
    known: list[Place] = []
    written: set[str] = set()
    for _ in range(120):
        await step(world, chance, known, kill=True)
        written |= {message.msg_id for message in world.messages("RMQ_SYS_TRANS_HALF_TOPIC")}
    await world.turn()
    written |= {message.msg_id for message in world.messages("RMQ_SYS_TRANS_HALF_TOPIC")}
    await world.settle()
    world.check(certain=written)
    await world.kill()
    await world.open()
    await world.settle()
    world.check(certain=written)
    await world.kill()

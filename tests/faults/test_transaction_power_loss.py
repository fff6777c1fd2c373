"""Power failures during transactions.

Whatever part of the records is stored, every transaction whose half message was on the device ends exactly
once, as its producer decided. COMETMQ_CRASH_IMAGES=20000 tries that many images (300 by default),
COMETMQ_CRASH_SEED=n tries different ones.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable

import pytest
from tests.broker.transactions.world import Place, World, step
from tests.faults.power_loss import try_images
from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import Image, RecordingDisk

from cometmq.broker.transactions import checks
from cometmq.broker.transactions.inherited import Inherited
from cometmq.broker.transactions.ledger import Ledger
from cometmq.broker.transactions.records import TransactionRecords

IMAGES = int(os.environ.get("COMETMQ_CRASH_IMAGES", "3000")) // 10
PER_RUN = 30  # images of one run, before the next seed


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PAUSE_S", 0)


async def work(seed: int) -> World:
    """Run transactions on a recording disk."""
    chance = random.Random(seed)
    world = World(RecordingDisk(), sync=seed % 3 == 0)
    await world.open()
    known: list[Place] = []
    for _ in range(70):
        await step(world, chance, known, kill=True)
    await world.turn()
    await world.kill()
    return world


@contextlib.asynccontextmanager
async def recovered(image: Image, before: World) -> AsyncIterator[World]:
    """Start a broker on an image, with the producers of the previous run."""
    world = World(RecordingDisk(image), sync=before.sync)
    world.ends = before.ends
    await world.open()
    try:
        yield world
    finally:
        await world.kill()


async def try_image(before: World, at: int, image: Image, chance: random.Random) -> None:
    """Let power fail after `at` operations, and sometimes again during the recovery."""
    certain = {key for when, key in before.promised if when <= at}
    if chance.random() < 0.5:
        async with recovered(image, before) as world:
            for _ in range(chance.randrange(4)):
                world.prepare(8, b"new", f"after{at}-")
            await world.turn()
            await world.round()
            await world.answer(chance)
        again = CrashPoint(world.disk, chance.randint(0, len(world.disk.history)))
        _, image = again.sampled_image(chance.choice((0, 1, 4, 5, 6)), str(chance.random()))
    async with recovered(image, before) as world:
        await world.settle()
        world.check(certain)


@pytest.mark.slow("a start from each image of the disk")
@pytest.mark.representative
@pytest.mark.timeout(0)
async def test_every_transaction_ends_once_whatever_arrived() -> None:
    await try_images(IMAGES, PER_RUN, work, try_image)


# -- planted bugs ----------------------------------------------------------------------------------


def forget_what_no_op_says(patch: pytest.MonkeyPatch) -> None:
    async def wrong(self: Inherited, half: object) -> bool:
        del half
        return False

    patch.setattr(Inherited, "is_settled", wrong)


def believe_ops_without_their_twins(patch: pytest.MonkeyPatch) -> None:
    right = TransactionRecords.ops
    patch.setattr(
        TransactionRecords, "ops", lambda self, closed: right(self, [(offset, 0) for offset, _ in closed])
    )


def use_offsets_of_lost_messages_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inherited, "fill", lambda self, records: None)


def end_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "standing_for", lambda self, first, offset: offset)


@pytest.mark.thorough("a check of the test itself")
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "plant",
    [
        forget_what_no_op_says,
        believe_ops_without_their_twins,
        use_offsets_of_lost_messages_again,
        end_what_has_ended,
    ],
    ids=lambda plant: plant.__name__,
)
async def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await try_images(2000, PER_RUN, work, try_image)

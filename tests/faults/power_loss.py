"""Power failures during runs of a part of the broker: possible images of its disk are tried one by one."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import Image, RecordingDisk

FIRST_SEED = int(os.environ.get("COMETMQ_CRASH_SEED", "1"))


class Recorded(Protocol):
    """The part of the broker that ran, with its recording disk."""

    disk: RecordingDisk


W = TypeVar("W", bound=Recorded)
TryImage = Callable[[W, int, Image, random.Random], Awaitable[None]]


async def try_images(
    count: int, per_run: int, work: Callable[[int], Awaitable[W]], try_image: TryImage[W]
) -> None:
    """Try `count` images, `per_run` of each run.

    Args:
        work: Creates the run of a seed.
        try_image: Gets a run, the number of operations before the power failure, the image, and random
            numbers.
    """
    tried, seed = 0, FIRST_SEED
    while tried < count:
        before = await work(seed)
        chance = random.Random(seed)
        for _ in range(min(per_run, count - tried)):
            number = chance.choice((0, 1, *range(4, 14)))
            at = chance.randint(0, len(before.disk.history))
            label, image = CrashPoint(before.disk, at).sampled_image(number, str(seed))
            try:
                await try_image(before, at, image, random.Random(f"{seed}:{at}:{number}"))
            except Exception as failure:
                failure.add_note(f"seed {seed}, image {label}")
                raise
            tried += 1
        seed += 1

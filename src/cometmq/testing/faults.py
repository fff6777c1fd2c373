"""What a `FaultProxy` does to connections: values, and scripts that make them from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from cometmq.errors import ConfigError


class Direction(Enum):
    """Of bytes on a connection through a proxy."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


BOTH = (Direction.TO_SERVER, Direction.TO_CLIENT)


class Kind(Enum):
    """What may happen to a connection.

    CUT: both ends get a reset. HALF_CLOSE: the receiver of the direction gets its end, later bytes are lost.
    STALL: nothing passes for `seconds`. DELAY: from now on each piece that is read waits so long.
    SPLIT: from now on the bytes pass in pieces of at most `size`, each on its own.
    """

    CUT = "cut"
    HALF_CLOSE = "half-close"
    STALL = "stall"
    DELAY = "delay"
    SPLIT = "split"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a connection. after: so many bytes of the direction pass first, counted from the start of
    the connection. Raises ConfigError for values that mean nothing."""

    kind: Kind
    directions: tuple[Direction, ...] = BOTH
    after: int = 0
    seconds: float = 0.0
    """Of STALL (infinite: until `heal`, or the connection ends) and DELAY."""
    size: int = 1
    """Of SPLIT, in bytes."""

    def __post_init__(self) -> None:
        for field, wrong, expected in (
            ("directions", not self.directions, "one or both"),
            ("after", self.after < 0, "0 or more bytes"),
            ("seconds", not self.seconds >= 0, "0 or more"),
            ("seconds", self.kind is Kind.STALL and not self.seconds, "how long, math.inf for ever"),
            ("size", self.size < 1, "1 byte or more"),
        ):
            if wrong:
                raise ConfigError(f"Fault.{field}", str(getattr(self, field)), expected)


Script = Callable[[int], Sequence[Fault]]
"""The faults of the n-th connection of a proxy, counted from 0."""


def no_faults(number: int) -> Sequence[Fault]:  # noqa: ARG001 (a Script)
    """The script of a proxy that only passes on."""
    return ()


def random_faults(seed: int, *, share: float = 0.5, within: int = 16 * 1024, seconds: float = 0.2) -> Script:
    """A script: the same faults for the same seed and number of a connection.

    share: of connections that have faults, one to three each. within: they happen in the first so many bytes
    of a direction. seconds: the longest stall; delays are at most a tenth of it.
    """

    def script(number: int) -> Sequence[Fault]:
        dice = random.Random(f"{seed} {number}")
        if dice.random() >= share:
            return ()
        return [_random_fault(dice, within, seconds) for _ in range(dice.randint(1, 3))]

    return script


def _random_fault(dice: random.Random, within: int, seconds: float) -> Fault:
    kind = dice.choice(list(Kind))
    return Fault(
        kind=kind,
        directions=BOTH if kind is Kind.CUT else dice.choice([BOTH, *((each,) for each in Direction)]),
        # Evenly by size: faults within the first frames are as likely as late ones.
        after=int(within ** dice.random()) - 1,
        seconds=max(dice.uniform(0, seconds if kind is Kind.STALL else seconds / 10), 1e-6),
        size=int(256 ** dice.random()),
    )

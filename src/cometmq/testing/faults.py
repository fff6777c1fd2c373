"""Faults that a `FaultProxy` injects into connections, and scripts that generate faults from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from cometmq.errors import ConfigError


class Direction(Enum):
    """Direction of bytes on a connection through a proxy."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


BOTH = (Direction.TO_SERVER, Direction.TO_CLIENT)


class Kind(Enum):
    """Kind of a fault.

    Attributes:
        CUT: Both ends of the connection receive a reset.
        HALF_CLOSE: The receiver of the direction sees the end of the stream. Bytes sent later are dropped.
        STALL: No bytes pass for `seconds`.
        DELAY: From now on each piece of the stream is held for `seconds` before it passes.
        SPLIT: From now on bytes pass in separate pieces of at most `size` bytes.
    """

    CUT = "cut"
    HALF_CLOSE = "half-close"
    STALL = "stall"
    DELAY = "delay"
    SPLIT = "split"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a connection.

    Attributes:
        kind: Kind of the fault.
        directions: Directions of the connection that the fault affects. Default: both.
        after: Number of bytes that pass in the direction before the fault happens. A script counts them from
            the start of the connection, `inflict` from the call.
        seconds: Duration of a STALL (`math.inf`: until `heal` or the end of the connection), or how long a
            DELAY holds each piece.
        size: Maximum size in bytes of a piece of a SPLIT.

    Raises:
        ConfigError: A value is out of its range.
    """

    kind: Kind
    directions: tuple[Direction, ...] = BOTH
    after: int = 0
    seconds: float = 0.0
    size: int = 1

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
"""A function that returns the faults of a proxy's n-th connection, counted from 0."""


def no_faults(number: int) -> Sequence[Fault]:  # noqa: ARG001 (a Script)
    """Return an empty list of faults, for a proxy that only forwards."""
    return ()


def random_faults(seed: int, *, share: float = 0.5, within: int = 16 * 1024, seconds: float = 0.2) -> Script:
    """Return a script of random faults. The same seed and connection number give the same faults.

    Args:
        seed: Seed of the random faults.
        share: Fraction of connections that have faults. Such a connection has one to three faults.
        within: Each fault happens after at most this number of bytes have passed in its direction.
        seconds: Maximum duration of a STALL. A DELAY holds each piece of the stream for at most a tenth of
            this time.
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
        # The logarithm of `after` is distributed uniformly. Therefore many faults affect the few frames at
        # the beginning of a connection.
        after=int(within ** dice.random()) - 1,
        seconds=max(dice.uniform(0, seconds if kind is Kind.STALL else seconds / 10), 1e-6),
        size=int(256 ** dice.random()),
    )

"""Range checks of options, run when the options are created."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from cometmq.errors import ConfigError

__all__ = ["SOME_TIME", "check_choice", "check_range", "check_ranges"]

SOME_TIME = (0.001, math.inf)
"""Seconds of an interval or a timeout. With zero, a program would never pause, or never succeed."""

Range = tuple[float, float]


def check_range(key: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless the value is a number in the range, a whole number if `low` is an int."""
    kind = int if isinstance(low, int) else int | float
    if not isinstance(value, kind) or not low <= value <= high:
        bounds = f"{low} or more" if high == math.inf else f"{low} to {high}"
        raise ConfigError(key, repr(value), bounds if kind is not int else f"{bounds}, a whole number")


def check_ranges(options: object, ranges: Mapping[str, Range]) -> None:
    """Check each of these fields with check_range unless it is None."""
    for key, (low, high) in ranges.items():
        value = getattr(options, key)
        if value is not None:
            check_range(key, value, low, high)


def check_choice(key: str, value: object, choices: type[Enum]) -> None:
    """Raise ConfigError unless the value is a member of the enum.

    A member's name or value is refused, too.
    """
    if not isinstance(value, choices):
        names = ", ".join(f"{choices.__name__}.{each.name}" for each in choices)
        raise ConfigError(key, repr(value), names)

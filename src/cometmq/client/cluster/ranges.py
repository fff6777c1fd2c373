"""Ranges of options, checked when the options are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from cometmq.errors import ConfigError

__all__ = ["SOME_TIME", "check_choice", "check_range", "check_ranges"]

SOME_TIME = (0.001, math.inf)
"""Seconds of an interval or a limit: with none, a program would never rest, or get nothing done."""

Range = tuple[float, float]


def check_range(key: str, value: object, low: float, high: float = math.inf) -> None:
    """Raises ConfigError for what is no number from `low` to `high`; a whole one where `low` is an int."""
    kind = int if isinstance(low, int) else int | float
    if not isinstance(value, kind) or not low <= value <= high:
        bounds = f"{low} or more" if high == math.inf else f"{low} to {high}"
        raise ConfigError(key, repr(value), bounds if kind is not int else f"{bounds}, a whole number")


def check_ranges(options: object, ranges: Mapping[str, Range]) -> None:
    """check_range for each of these fields that is not None."""
    for key, (low, high) in ranges.items():
        value = getattr(options, key)
        if value is not None:
            check_range(key, value, low, high)


def check_choice(key: str, value: object, choices: type[Enum]) -> None:
    """Raises ConfigError for what is none of the choices, their names and values for example."""
    if not isinstance(value, choices):
        names = ", ".join(f"{choices.__name__}.{each.name}" for each in choices)
        raise ConfigError(key, repr(value), names)

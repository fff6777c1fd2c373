"""Measuring turn by turn (A B A B …), and tables of what was found."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What the command line says. short: little work, to show that all of it works."""

    data: Path
    turns: int
    seconds: int
    rows: Sequence[str] = ()
    short: bool = False


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def in_turns(
    what: str, names: Iterable[str], turns: int, measure: Callable[[str, int], Figures]
) -> dict[str, list[Figures]]:
    """Figures of `turns` turns of each name. Turn 0, in which programs warm up, is dropped."""
    kept: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(turns + 1):
        for name, found in kept.items():
            figures = measure(name, number)
            shown = [
                f"{key} {value:,.2f}" for key, value in figures.items() if isinstance(value, int | float)
            ]
            say(f"{what}, turn {number}, {name}: {', '.join(shown)}")
            if number:
                found.append(figures)
    return kept


def median(turns: Sequence[Figures], figure: str) -> float:
    return float(statistics.median(turn[figure] for turn in turns))


def ratio(base: Sequence[Figures], other: Sequence[Figures], figure: str) -> str:
    """Median and range of other to base, turn by turn."""
    ratios = [b[figure] / a[figure] for a, b in zip(base, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown, all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

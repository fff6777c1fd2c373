"""Measurements in turns (A B A B …), and tables of their results."""

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
    """Options of the command line. `short`: run little work, only to check that everything works."""

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
    """Return the figures of `turns` turns of each name. Turn 0, in which programs warm up, is dropped."""
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
    """Return median and range of the ratio of other to base, turn by turn."""
    ratios = [b[figure] / a[figure] for a, b in zip(base, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with all columns but the first right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

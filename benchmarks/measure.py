"""Running a row turn by turn (A B A B …) and keeping every turn's figures."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.interop.driver import Driver

from benchmarks.brokers import APACHE, COMET, Running
from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.rows import Row

_groups = itertools.count(1)
Turn = dict[str, Any]
FILL_BATCH = 32
WRITTEN_A_SECOND = 160 << 20  # bytes, at most, by any row


@dataclass(frozen=True)
class Result:
    """All counted turns of a row by system (the first turn, in which JVMs warm up, is not among them)."""

    row: Row
    turns: dict[str, list[Turn]]

    def median(self, system: str, figure: str) -> float | None:
        values = [turn[figure] for turn in self.turns[system] if figure in turn]
        return statistics.median(values) if values else None

    def ratios(self, figure: str) -> list[float]:
        """Ours to Apache's, turn by turn."""
        pairs = zip(self.turns[APACHE], self.turns[COMET], strict=True)
        return [ours[figure] / apache[figure] for apache, ours in pairs if apache.get(figure)]

    def ratio(self, figure: str) -> float | None:
        ratios = self.ratios(figure)
        return statistics.median(ratios) if ratios else None


def run_row(
    row: Row,
    systems: dict[str, Running],
    java: Driver,
    *,
    turns: int,
    seconds: int,
    say: Callable[[str], None],
) -> Result:
    """``turns`` turns on each system, plus the first one that is dropped."""
    kept: dict[str, list[Turn]] = {name: [] for name in systems}
    if row.drain:
        for system in systems.values():
            _fill(row, system, java)
    for number in range(turns + 1):
        for name, system in systems.items():
            back_memory(system.broker.directory, seconds * WRITTEN_A_SECOND)
            turn = _drain(row, system, java) if row.drain else _load(row, system, java, seconds)
            say(
                f"{row.title}, turn {number}, {name}: {turn['rate']:,.0f}/s"
                + (" (dropped)" if number == 0 else "")
            )
            if number:
                kept[name].append(turn)
    return Result(row, kept)


def _load(row: Row, system: Running, java: Driver, seconds: int) -> Turn:
    before = cpu_seconds(system.broker.pid)
    loads = [
        java.start("load", namesrv=system.namesrv, topic=f"{_topic(row)}{place}", seconds=seconds, **load)
        for place, load in (("", row.load), ("-beside", row.beside))
        if load
    ]
    turn, *beside = [each.result(seconds + 120) for each in loads]
    return _with_cpu(turn, before, system, sum(each["messages"] for each in beside))


def _drain(row: Row, system: Running, java: Driver) -> Turn:
    before = cpu_seconds(system.broker.pid)
    turn: Turn = java.call(
        "drain",
        answer_within_s=200,
        namesrv=system.namesrv,
        topic=_topic(row),
        group=f"drain-{next(_groups)}",
        count=row.drain,
    )
    if not turn["complete"]:
        raise RuntimeError(f"{system.system}: {turn['messages']} of {row.drain} messages came")
    return _with_cpu(turn, before, system)


def _with_cpu(turn: Turn, before: float, system: Running, beside: int = 0) -> Turn:
    if turn.get("errors"):
        raise RuntimeError(f"{system.system}: {turn['errors']} requests failed, first: {turn['firstError']}")
    turn["cpu_us"] = (cpu_seconds(system.broker.pid) - before) * 1e6 / (turn["messages"] + beside)
    return turn


def _fill(row: Row, system: Running, java: Driver) -> None:
    # The generator sends one message more, before its clock starts: the backlog is never short.
    java.call(
        "load",
        answer_within_s=300,
        namesrv=system.namesrv,
        topic=_topic(row),
        **backlog(row.drain),
    )


def backlog(count: int) -> dict[str, Any]:
    """The load that leaves `count` messages for a drain."""
    return {"mode": "batch", "threads": 4, "batch": FILL_BATCH, "size": 128, "count": count}


def _topic(row: Row) -> str:
    return f"Bench-{row.name}"

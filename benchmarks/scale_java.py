"""What Apache's Java client gets of 10,000 queues of 1,000 topics, and of 8 queues of one topic: a broker of
either kind for each, all in turns."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tests.interop.driver import Driver

from benchmarks.brokers import APACHE, COMET, SYSTEMS, Running
from benchmarks.measure import WRITTEN_A_SECOND
from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.scale_queues import SHAPES
from benchmarks.scale_run import say, write_topics

LOAD = {"mode": "sync", "threads": 64, "size": 1024}
CLIENT = "4.9.8"
_DROPPED = 2  # turns in which Java compiles what it runs
Turn = dict[str, Any]


def run(data: Path, turns: int, seconds: float) -> dict[str, Any]:
    """system -> shape -> turns."""
    systems: dict[tuple[str, str], Running] = {}
    found: dict[str, dict[str, list[Turn]]] = {name: {which: [] for which in SHAPES} for name in SYSTEMS}
    java = Driver(CLIENT, data / "java", jvm=["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"])
    try:
        for name in SYSTEMS:
            for which, (topics, queues) in SHAPES.items():
                directory = data / f"{name.split()[0]}-{which}"
                write_topics(directory / "store", topics, queues)
                systems[name, which] = Running(name, directory)
        for number in range(turns + _DROPPED):
            for (name, which), system in systems.items():
                back_memory(system.broker.directory, int(seconds * WRITTEN_A_SECOND))
                turn = _turn(java, system, which, round(seconds))
                say(f"turn {number}, {name}, {which}: {turn['rate']:,.0f}/s, {turn['cpu_us']:.1f} µs")
                if number >= _DROPPED:
                    found[name][which].append(turn)
    finally:
        java.stop()
        for system in systems.values():
            system.stop()
    return found


def _turn(java: Driver, system: Running, which: str, seconds: int) -> Turn:
    topics, _ = SHAPES[which]
    many = {"topic": "Scale", "topics": len(topics)} if len(topics) > 1 else {"topic": topics[0]}
    before = cpu_seconds(system.broker.pid)
    turn: Turn = java.call(
        "load", answer_within_s=seconds + 120, namesrv=system.namesrv, seconds=seconds, **many, **LOAD
    )
    if turn["errors"]:
        raise RuntimeError(f"{system.system}: {turn['errors']} sends failed, first: {turn['firstError']}")
    turn["cpu_us"] = (cpu_seconds(system.broker.pid) - before) * 1e6 / turn["messages"]
    return turn


def table(found: dict[str, Any]) -> str:
    lines = [
        "| broker | 8 queues | 10,000 queues | ratio (range) | broker CPU µs/msg |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, shapes in found.items():
        few, many = shapes["few"], shapes["many"]
        rates = [statistics.median(turn["rate"] for turn in each) for each in (few, many)]
        costs = [statistics.median(turn["cpu_us"] for turn in each) for each in (few, many)]
        lines.append(
            f"| {name} | {rates[0]:,.0f}/s | {rates[1]:,.0f}/s | {_ratios(few, many)} "
            f"| {costs[0]:.1f} / {costs[1]:.1f} |"
        )
    beside = [_ratios(found[APACHE][which], found[COMET][which]) for which in SHAPES]
    lines.append(f"| ours to Apache's | {beside[0]} | {beside[1]} | | |")
    return "\n".join(lines) + "\n"


def _ratios(base: list[Turn], other: list[Turn]) -> str:
    """Median and range of the rates' ratios, turn by turn."""
    ratios = [b["rate"] / a["rate"] for a, b in zip(base, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

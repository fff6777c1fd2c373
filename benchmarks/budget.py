"""What a message costs either broker under a lean load: ``python -m benchmarks.budget [--turns N]``.

The load of the other benchmarks, Apache's Java client, takes most of two cores, and what a broker then needs
for a message depends on how often it loses its core and its caches. Here the same requests come over plain
sockets from one process (scale_load.py), so what is counted is what the broker itself does for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.brokers import APACHE, COMET, SYSTEMS, Running
from benchmarks.measure import WRITTEN_A_SECOND
from benchmarks.processes import back_memory
from benchmarks.scale_load import Load
from benchmarks.scale_run import run_load, say

BACKLOG = 640_000
WARM_UP_S = 10  # the turn that is dropped


def _load(mode: str, **more: Any) -> Load:
    return Load(mode, port=0, topics=[], queues=4, **more)


# Name, budget in µs, load.
ROWS = [
    ("1 KiB, 64 in flight on one connection", 12, _load("send")),
    ("1 KiB, one in flight on each of 64 connections", 20, _load("send", window=1, connections=64)),
    ("member of a batch of 32 x 128 B, 4 in flight", 4, _load("send", size=128, batch=32, window=4)),
    ("message pulled, 32 x 128 B at once, 4 in flight", 2, _load("pull", window=4)),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cometmq-budget-") as scratch:
        systems = {name: Running(name, Path(scratch, name.split()[0])) for name in SYSTEMS}
        try:
            found = [_row(number, systems, options.turns, options.seconds) for number in range(len(ROWS))]
        finally:
            for each in systems.values():
                each.stop()
    _print(found)
    return 0


def _row(
    number: int, systems: dict[str, Running], turns: int, seconds: int
) -> dict[str, list[dict[str, Any]]]:
    title, _, load = ROWS[number]
    kept: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for turn in range(turns + 1):
        for name, system in systems.items():
            load = dataclasses.replace(load, port=system.broker.port, topics=[f"Budget{number}"])
            if load.mode == "pull":
                load = dataclasses.replace(load, topics=["Backlog"], group=f"group-{turn}")
                if turn == 0:
                    fill = dataclasses.replace(load, mode="send", size=128, batch=32, count=BACKLOG)
                    run_load(fill, system.broker.pid)
            else:
                load = dataclasses.replace(load, seconds=seconds if turn else WARM_UP_S)
                back_memory(system.broker.directory, seconds * WRITTEN_A_SECOND)
            result = run_load(load, system.broker.pid)
            say(f"{title}, turn {turn}, {name}: {result['rate']:,.0f}/s, {result['cpu_us']:.2f} µs")
            if turn:
                kept[name].append(result)
    return kept


def _print(found: list[dict[str, list[dict[str, Any]]]]) -> None:
    out = sys.stdout.write
    out("| broker CPU of one | budget µs | Apache µs | ours µs (range) | of Apache's | rate of Apache's |\n")
    out("| --- | ---: | ---: | ---: | ---: | ---: |\n")
    for (title, budget, _), turns in zip(ROWS, found, strict=True):
        cpu = {name: [turn["cpu_us"] for turn in turns[name]] for name in turns}
        rates = [a["rate"] / b["rate"] for a, b in zip(turns[COMET], turns[APACHE], strict=True)]
        shares = [a / b for a, b in zip(cpu[COMET], cpu[APACHE], strict=True)]
        ours = cpu[COMET]
        out(
            f"| {title} | {budget} | {statistics.median(cpu[APACHE]):.1f} | {statistics.median(ours):.1f} "
            f"({min(ours):.1f}-{max(ours):.1f}) | {statistics.median(shares):.2f} | "
            f"{statistics.median(rates):.2f} |\n"
        )


if __name__ == "__main__":
    sys.exit(main())

"""CPU per message of both brokers under a lean load, compared with a budget.

The Java client of `apache` uses most of two cores, so a broker's CPU per message depends on how often it
loses its core and its caches. Here the same requests come over plain sockets from one process (load.py), so
that the broker's own work is measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.load import Load, run_load
from benchmarks.processes import back_memory
from benchmarks.servers import APACHE, COMET, SYSTEMS, Running
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table

BACKLOG = 640_000
WARM_UP_S = 10  # duration of the dropped turn


def _load(mode: str, **more: Any) -> Load:
    return Load(mode, port=0, topics=[], queues=4, **more)


# Name, budget in µs, load.
ROWS = [
    ("1 KiB, 64 in flight on one connection", 12, _load("send")),
    ("1 KiB, one in flight on each of 64 connections", 20, _load("send", window=1, connections=64)),
    ("half message of 1 KiB and its commit, 64 in flight", 36, _load("transaction")),
    ("member of a batch of 32 x 128 B, 4 in flight", 3, _load("send", size=128, batch=32, window=4)),
    ("message pulled, 32 x 128 B at once, 4 in flight", 1.5, _load("pull", window=4)),
]


def run(options: Options) -> str:
    systems = {name: Running(name, options.data / name.split()[0]) for name in SYSTEMS}
    lines = []
    try:
        for title, budget, load in ROWS:
            found = in_turns(
                title,
                systems,
                options.turns,
                lambda name, number, load=load: _turn(load, systems[name], number, options),
            )
            apache, ours = found[APACHE], found[COMET]
            cpu = [turn["cpu_us"] for turn in ours]
            own = f"{median(ours, 'cpu_us'):.1f} ({min(cpu):.1f}-{max(cpu):.1f})"
            shares = (ratio(apache, ours, figure) for figure in ("cpu_us", "rate"))
            lines.append([title, str(budget), f"{median(apache, 'cpu_us'):.1f}", own, *shares])
    finally:
        for system in systems.values():
            system.stop()
    heads = "broker CPU of one, budget µs, Apache µs, ours µs (range), of Apache's, rate of Apache's"
    return table(heads.split(", "), lines)


def _turn(load: Load, system: Running, number: int, options: Options) -> Figures:
    load = dataclasses.replace(load, port=system.broker.port, topics=[load.mode])
    if load.mode == "pull":
        if number == 0:
            fill = Load("send", load.port, load.topics, load.queues, size=128, batch=32, count=BACKLOG)
            run_load(fill, system.pid)
        return run_load(dataclasses.replace(load, group=f"group-{number}"), system.pid)
    back_memory(system.directory, options.seconds)
    seconds = options.seconds if number or options.short else WARM_UP_S
    return run_load(dataclasses.replace(load, seconds=seconds), system.pid)

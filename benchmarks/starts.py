"""Starts of our broker on stores of 1, 4 and 16 GiB and with 10,000 queues.

After a clean stop and after kill -9 under load, seconds and CPU do not grow with the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.load import Load, begin_load
from benchmarks.processes import drop_cached, wait_quiet
from benchmarks.servers import COMET, FEW, MANY, SETTINGS, Running, write_topics
from benchmarks.turns import Figures, Options, in_turns, median, table

STORES: dict[str, tuple[tuple[list[str], int], int]] = {
    "1 GiB": (FEW, 1),
    "4 GiB": (FEW, 4),
    "16 GiB": (FEW, 16),
    "10,000 queues": (MANY, 1),
}
KINDS = ("clean", "killed under load", "killed under load, cold")


def fill(root: Path, topics: list[str], queues: int, also: str = "", **wanted: Any) -> None:
    """Create a store with fill.py unless it exists; `also` is a topic without messages."""
    if not (root / "commitlog").is_dir():
        write_topics(root, [*topics, also] if also else topics, queues)
        arguments = {"root": str(root), "settings": SETTINGS, "topics": topics, "queues": queues, **wanted}
        command = [sys.executable, "-m", "benchmarks.fill", json.dumps(arguments)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(options: Options) -> str:
    """Return seconds until the broker listens, and its CPU seconds, by store and kind of start."""
    stores = list(STORES)[:1] if options.short else list(STORES)
    brokers = {}
    try:
        for name in stores:
            (topics, queues), gib = STORES[name]
            fill(options.data / name / "store", topics, queues, size=1024, until_bytes=gib << 30)
            brokers[name] = Running(COMET, options.data / name)
            wait_quiet(brokers[name].pid)
            brokers[name].broker.stop()
        found = in_turns("start", stores, options.turns, lambda name, _: _turn(name, brokers[name], options))
    finally:
        for each in brokers.values():
            each.stop()
    return table(["", *stores], [[kind, *(_cell(found[name], kind) for name in stores)] for kind in KINDS])


def _turn(name: str, system: Running, options: Options) -> Figures:
    """Run: clean start, load, kill -9 under load, start, kill, start without the page cache, stop."""
    topics, queues = STORES[name][0]
    found: Figures = {}
    for kind in KINDS:
        if kind.endswith("cold"):
            drop_cached(system.directory / "store")
        figures = system.start_broker()
        found |= {f"{kind}: {what}": figure for what, figure in figures.items()}
        if kind == KINDS[-1]:
            system.broker.stop()
            return found
        load = begin_load(
            Load("send", system.broker.port, topics, queues, seconds=options.seconds + 60), quiet=True
        )
        try:
            time.sleep(options.seconds)
            if load.poll() is not None:
                raise RuntimeError("the load did not last, see above")
            system.broker.kill()
        finally:
            load.kill()
            load.communicate()
    return found


def _cell(turns: list[Figures], kind: str) -> str:
    seconds, cpu = (median(turns, f"{kind}: {what}") for what in ("seconds", "cpu_s"))
    worst = max(turn[f"{kind}: seconds"] for turn in turns)
    return f"{seconds:.2f} s (at most {worst:.2f}; CPU {cpu:.2f})"

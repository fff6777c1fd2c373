"""CPU time of our broker by function under one row of `apache` (the first of --rows)."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

from tests.interop.driver import Driver

from benchmarks.apache import CLIENT, LOAD_JVM, ROWS, fill
from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.servers import COMET, Running
from benchmarks.turns import Figures, Options, table

LAUNCHER = Path(__file__).parent / "sampled.py"
SHOWN = 25


def run(options: Options) -> str:
    """Return the functions with the most CPU time of their own, from a sampling profiler in the broker."""
    row = ROWS[options.rows[0] if options.rows else "sync-64-1k"]
    counts = options.data / "samples.jsonl"
    broker = Running(
        COMET, options.data / "where", sync_flush=row.sync_flush, launcher=[str(LAUNCHER), str(counts)]
    )
    java = Driver(CLIENT, options.data / "java", jvm=LOAD_JVM)
    try:
        place: Figures = {"namesrv": broker.namesrv, "topic": "Where", "answer_within_s": 300}
        load: Figures = {"seconds": options.seconds, **row.load}
        if row.drain:
            fill(java, broker.namesrv, "Where", row.drain, row.one_in)
            load = {"group": "where", **row.draining(row.drain)}
        else:
            java.call("load", **place, **load)  # warms the JVM up
        back_memory(options.data, options.seconds)
        os.kill(broker.pid, signal.SIGUSR1)
        before = cpu_seconds(broker.pid)
        turn = java.call("drain" if row.drain else "load", **place, **load)
        spent = (cpu_seconds(broker.pid) - before) * 1e6 / (turn["messages"] * row.one_in)
    finally:
        java.stop()
        broker.stop()
    return _table(counts, spent, turn)


def _table(path: Path, spent: float, turn: Figures) -> str:
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        count, stack = json.loads(line)
        own[stack[0]] += count
        for name in set(stack):
            within[name] += count
    each = spent / own.total()
    lines = [
        [f"`{name}`", f"{count * each:.2f}", f"{within[name] * each:.2f}"]
        for name, count in own.most_common(SHOWN)
    ]
    rate = f"{turn['rate']:,.0f} messages/s, {spent:.1f} µs of broker CPU a message (sampling included)\n\n"
    return rate + table(["function", "own µs", "with callees µs"], lines)

"""Where our broker's microseconds go under one load: ``python -m benchmarks.where [row] [--seconds N]``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver

from benchmarks.brokers import SETTINGS
from benchmarks.measure import WRITTEN_A_SECOND, backlog
from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.rows import ROWS

LAUNCHER = Path(__file__).parent / "sampled.py"
SHOWN = 25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.where", description=__doc__)
    parser.add_argument("row", nargs="?", default="sync-64-1k", choices=[row.name for row in ROWS])
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args()
    row = next(row for row in ROWS if row.name == options.row)
    with tempfile.TemporaryDirectory(prefix="cometmq-where-") as scratch:
        directory, counts = Path(scratch), Path(scratch, "samples.jsonl")
        names = CometNamesrv(directory)
        settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if row.sync_flush else "ASYNC_FLUSH"}
        broker = CometBroker(
            directory, f"127.0.0.1:{names.port}", settings=settings, launcher=[str(LAUNCHER), str(counts)]
        )
        java = Driver("4.9.8", directory / "java", jvm=["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"])
        place = {"namesrv": f"127.0.0.1:{names.port}", "topic": "Where"}
        load = {"seconds": options.seconds, **row.load}
        if row.drain:
            java.call("load", answer_within_s=300, **place, **backlog(row.drain))
            load = {"group": "where", "count": row.drain}
        else:
            java.call("load", answer_within_s=300, **place, **load)  # warms the JVM up
        back_memory(directory, options.seconds * WRITTEN_A_SECOND)
        os.kill(broker.pid, signal.SIGUSR1)
        before = cpu_seconds(broker.pid)
        turn = java.call("drain" if row.drain else "load", answer_within_s=300, **place, **load)
        spent = (cpu_seconds(broker.pid) - before) * 1e6 / turn["messages"]
        java.stop()
        broker.stop()
        names.stop()
        _print(counts, spent, turn)
    return 0


def _print(path: Path, spent: float, turn: dict[str, float]) -> None:
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    total = 0
    for line in path.read_text().splitlines():
        count, stack = json.loads(line)
        total += count
        own[stack[0]] += count
        for name in set(stack):
            within[name] += count
    out = sys.stdout.write
    out(f"{turn['rate']:,.0f} messages/s, {spent:.1f} µs of broker CPU a message (sampling included)\n\n")
    out("| own µs | with callees µs | function |\n| ---: | ---: | --- |\n")
    for name, count in own.most_common(SHOWN):
        out(f"| {count * spent / total:.2f} | {within[name] * spent / total:.2f} | `{name}` |\n")


if __name__ == "__main__":
    sys.exit(main())

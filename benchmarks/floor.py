"""What sockets alone cost beside our broker: ``python -m benchmarks.floor [row] [--turns N] [--seconds N]``.

Two of our brokers take turns under the same load: one as it is, one that answers each send at once without
reading or storing it (bare.py). The second is the floor of anything that is done within this event loop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver

from benchmarks.brokers import SETTINGS
from benchmarks.processes import TICKS_PER_SECOND
from benchmarks.rows import ROWS

BARE = str(Path(__file__).parent / "bare.py")
KINDS: dict[str, list[str] | None] = {"our broker": None, "answers alone": [BARE]}
WARM_UP_S = 8
Cost = tuple[float, float, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    rows = {row.name: row for row in ROWS if row.load.get("mode") == "sync" and not row.sync_flush}
    parser.add_argument("row", nargs="?", default="sync-64x64-1k", choices=list(rows))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    load = rows[options.row].load
    with tempfile.TemporaryDirectory(prefix="cometmq-floor-") as scratch:
        servers = {kind: _start(Path(scratch, str(number)), kind) for number, kind in enumerate(KINDS)}
        java = Driver("4.9.8", Path(scratch, "java"), jvm=["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"])
        costs: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
        for turn in range(options.turns + 1):
            for kind, (names, broker) in servers.items():
                seconds = options.seconds if turn else WARM_UP_S
                cost = _turn(java, names.port, broker.pid, {**load, "seconds": seconds})
                if turn:
                    costs[kind].append(cost)
        java.stop()
        for names, broker in servers.values():
            broker.stop()
            names.stop()
    _print(costs)
    return 0


def _start(directory: Path, kind: str) -> tuple[CometNamesrv, CometBroker]:
    names = CometNamesrv(directory)
    broker = CometBroker(directory, f"127.0.0.1:{names.port}", settings={**SETTINGS}, launcher=KINDS[kind])
    return names, broker


def _turn(java: Driver, port: int, pid: int, load: dict[str, Any]) -> Cost:
    """µs of user and of system time of the broker a message, and the rate."""
    before = _times(pid)
    turn = java.call("load", answer_within_s=300, namesrv=f"127.0.0.1:{port}", topic="Floor", **load)
    if turn["errors"]:
        raise RuntimeError(f"{turn['errors']} requests failed, first: {turn['firstError']}")
    user, system = ((b - a) * 1e6 / turn["messages"] for a, b in zip(before, _times(pid), strict=True))
    return user, system, turn["rate"]


def _times(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS_PER_SECOND, int(fields[12]) / TICKS_PER_SECOND


def _print(costs: dict[str, list[Cost]]) -> None:
    out = sys.stdout.write
    out(f"load average {os.getloadavg()[0]:.1f}; medians of the turns, µs of the broker's CPU a message\n\n")
    out("| | all | user | system | msg/s |\n| --- | ---: | ---: | ---: | ---: |\n")
    for kind, turns in costs.items():
        median = [statistics.median(figure) for figure in zip(*turns, strict=True)]
        whole = statistics.median(user + system for user, system, _ in turns)
        out(f"| {kind} | {whole:.1f} | {median[0]:.1f} | {median[1]:.1f} | {median[2]:,.0f} |\n")


if __name__ == "__main__":
    sys.exit(main())

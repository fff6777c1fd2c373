"""Measures our broker beside Apache's, in one run, with Apache's Java client as the load of both."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.interop.driver import Driver

from benchmarks.brokers import SYSTEMS, Running
from benchmarks.measure import Result, run_row
from benchmarks.processes import memory_bytes
from benchmarks.report import machine, write
from benchmarks.rows import ROWS, Row

CLIENT = "4.9.8"
LOAD_JVM = ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"]


def main() -> int:
    options = _options()
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    if options.short:
        options.turns, options.seconds, options.starts, options.warmup = 1, 1, 1, 0
        rows = [replace(row, drain=min(row.drain, 20_000)) for row in rows]
    with (
        tempfile.TemporaryDirectory(prefix="cometmq-bench-", dir=options.data) as scratch,
        ExitStack() as stack,
    ):
        directory = Path(scratch)
        starts = _starts(directory / "starts", options.starts)
        java = Driver(CLIENT, directory / "java", jvm=LOAD_JVM)
        stack.callback(java.stop)
        results: list[Result] = []
        memory: dict[str, dict[str, Any]] = {}
        for sync_flush in (False, True):
            wanted = [row for row in rows if row.sync_flush == sync_flush]
            if wanted:
                results += _run(wanted, directory, java, memory, sync_flush, options)
        facts = machine(options.turns, options.seconds)
        sys.stdout.write(write(Path(options.out), results, starts, memory, facts))
    return 0


def _run(
    rows: list[Row],
    directory: Path,
    java: Driver,
    memory: dict[str, dict[str, Any]],
    sync_flush: bool,
    options: argparse.Namespace,
) -> list[Result]:
    with ExitStack() as stack:
        systems = {}
        for name in SYSTEMS:
            place = directory / f"{name.split()[0].lower()}-{'sync' if sync_flush else 'async'}"
            systems[name] = Running(name, place, sync_flush=sync_flush)
            stack.callback(systems[name].stop)
        if not sync_flush:
            memory.update({name: {"idle": memory_bytes(each.broker.pid)} for name, each in systems.items()})
        for each in systems.values():
            _warm_up(java, each, options.warmup)
        results = [
            run_row(row, systems, java, turns=options.turns, seconds=options.seconds, say=_say)
            for row in rows
        ]
        if not sync_flush:
            for name, each in systems.items():
                memory[name]["after load"] = memory_bytes(each.broker.pid)
        return results


def _warm_up(java: Driver, system: Running, seconds: int) -> None:
    """Both JVMs compile what they run often; a fair turn begins after that."""
    if seconds:
        _say(f"warm-up, {system.system}: {seconds} s")
        load = {"mode": "sync", "threads": 64, "size": 1024, "topic": "WarmUp", "seconds": seconds}
        java.call("load", answer_within_s=seconds + 120, namesrv=system.namesrv, **load)


def _starts(directory: Path, times: int) -> dict[str, list[float]]:
    """Seconds until both servers of a system listen, each on an empty directory; the first is dropped."""
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for number in range(times + 1 if times else 0):
        for name in SYSTEMS:
            running = Running(name, directory / f"{name.split()[0]}-{number}")
            running.stop()
            _say(
                f"start {number}, {name}: {running.ready_after:.2f} s" + (" (dropped)" if number == 0 else "")
            )
            if number:
                found[name].append(running.ready_after)
    return found if times else {}


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--turns", type=int, default=5, help="counted turns of each row (default 5; one more is dropped)"
    )
    parser.add_argument("--seconds", type=int, default=6, help="length of a turn (default 6)")
    parser.add_argument(
        "--warmup", type=int, default=20, help="seconds of load before the first row (default 20)"
    )
    parser.add_argument(
        "--starts", type=int, default=5, help="counted starts of both systems (default 5; 0 for none)"
    )
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="only these rows")
    parser.add_argument(
        "--short", action="store_true", help="one turn of one second each: shows that all of it works"
    )
    parser.add_argument("--out", default="build/benchmarks", help="directory of results.md and results.json")
    parser.add_argument(
        "--data", help="directory for the stores while it runs (default: the system's temporary one)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

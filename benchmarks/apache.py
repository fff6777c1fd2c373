"""Our broker beside Apache's in one run, with Apache's Java client as the load of both."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.interop.driver import Driver

from benchmarks.processes import back_memory, cpu_seconds, memory_bytes
from benchmarks.servers import APACHE, COMET, MANY, SYSTEMS, Running, write_topics
from benchmarks.turns import Figures, Options, in_turns, median, ratio, say, table

CLIENT = "4.9.8"
LOAD_JVM = ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC"]
WARM_UP_S = 20
MIB = 1 << 20
_groups = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        load: Arguments of the load generator (java/driver/Load.java).
        drain: Number of messages of a backlog that a push consumer reads instead.
        one_in: One message in `one_in` passes the consumer's SQL92 filter; rate and CPU are per message read.
        sync_flush: Whether the brokers run with SYNC_FLUSH.
        topics: Topics of the store, with 10 queues each.
        beside: A concurrent load on the same broker; its messages count for CPU, but not for rate and
            latency.
    """

    title: str
    load: Figures = field(default_factory=dict)
    drain: int = 0
    one_in: int = 1
    sync_flush: bool = False
    topics: int = 0
    beside: Figures = field(default_factory=dict)

    def draining(self, count: int) -> Figures:
        """Return the arguments of a consumer (java/driver/Drain.java) that drains `count` messages."""
        sql = {"sql": True, "expression": "n = 0"} if self.one_in > 1 else {}
        return {"count": count // self.one_in, **sql}


SYNC: Figures = {"mode": "sync", "threads": 64, "size": 1024}
ROWS = {
    "sync-64-1k": Row("64 threads, 1 KiB", SYNC),
    "sync-64-128": Row("64 threads, 128 B", SYNC | {"size": 128}),
    "sync-1-1k": Row("1 thread, 1 KiB", SYNC | {"threads": 1}),
    "sync-64x64-1k": Row("64 threads on 64 connections, 1 KiB", SYNC | {"clients": 64}),
    "batch-32": Row(
        "batches of 32 x 128 B, 4 threads", {"mode": "batch", "threads": 4, "batch": 32, "size": 128}
    ),
    "async": Row(
        "async, 2 x 256 in flight, 1 KiB", {"mode": "async", "threads": 2, "inflight": 256, "size": 1024}
    ),
    "transactions": Row("transactions (half, commit), 64 threads, 1 KiB", SYNC | {"mode": "transaction"}),
    "drain": Row("drain of a backlog, 128 B", drain=500_000),
    "drain-sql": Row("the same, an SQL92 filter passes one in 10", drain=500_000, one_in=10),
    "many-64-1k": Row("64 threads, 1 KiB, to 10,000 queues", SYNC, topics=len(MANY[0])),
    "flush-64-1k": Row("SYNC_FLUSH, 64 threads, 1 KiB", SYNC, sync_flush=True),
    "flush-1-1k": Row("SYNC_FLUSH, 1 thread, 1 KiB", SYNC | {"threads": 1}, sync_flush=True),
    "flush-64-busy": Row(
        "SYNC_FLUSH, 64 threads, 1 KiB, beside 256 async sends of 128 B in flight",
        SYNC,
        sync_flush=True,
        beside={"mode": "async", "threads": 1, "inflight": 256, "size": 128},
    ),
}


def run(options: Options) -> str:
    """Return rates, latencies and CPU of the rows; starts on empty directories; memory."""
    rows = [(name, row) for name, row in ROWS.items() if not options.rows or name in options.rows]
    found: list[list[str]] = []
    memory: dict[str, dict[str, dict[str, int]]] = {}
    java = Driver(CLIENT, options.data / "java", jvm=LOAD_JVM)
    try:
        for number, (setup, group) in enumerate(
            itertools.groupby(rows, key=lambda item: (item[1].sync_flush, item[1].topics))
        ):
            with ExitStack() as stack:
                systems = {
                    name: _started(name, options.data / f"{name.split()[0]}-{number}", *setup)
                    for name in SYSTEMS
                }
                for system in systems.values():
                    stack.callback(system.stop)
                found += _measure(dict(group), systems, java, options, memory)
    finally:
        java.stop()
    starts = in_turns(
        "start", SYSTEMS, options.turns, lambda name, number: _start(name, options.data / f"start-{number}")
    )
    return _facts(options) + _tables(found, starts, memory)


def _started(name: str, directory: Path, sync_flush: bool, topics: int) -> Running:
    if topics:
        write_topics(directory / "store", *MANY)
    return Running(name, directory, sync_flush=sync_flush)


def _start(name: str, directory: Path) -> Figures:
    running = Running(name, directory / name.split()[0])
    running.stop()
    return {"seconds": running.ready_after}


def _measure(
    rows: dict[str, Row], systems: dict[str, Running], java: Driver, options: Options, memory: dict[str, Any]
) -> list[list[str]]:
    first = not memory
    if first:
        memory["idle"] = {name: memory_bytes(system.pid) for name, system in systems.items()}
    for system in () if options.short else systems.values():
        say(f"warm-up, {system.system}: {WARM_UP_S} s")  # JVMs compile code that runs often
        java.call(
            "load", answer_within_s=300, namesrv=system.namesrv, topic="WarmUp", seconds=WARM_UP_S, **SYNC
        )
    lines = []
    for name, row in rows.items():
        if row.drain:
            for system in systems.values():
                fill(java, system.namesrv, name, _count(row, options), numbered=row.one_in)
        turns = in_turns(
            row.title, systems, options.turns, lambda each, _, n=name: _turn(n, systems[each], java, options)
        )
        lines.append(_line(row, turns[APACHE], turns[COMET]))
    if first:
        memory["after load"] = {name: memory_bytes(system.pid) for name, system in systems.items()}
    return lines


def _count(row: Row, options: Options) -> int:
    return min(row.drain, 20_000) if options.short else row.drain


def fill(java: Driver, namesrv: str, topic: str, count: int, numbered: int) -> None:
    """Store a backlog for a drain. The generator sends one message more, before its clock starts."""
    load = {"mode": "batch", "threads": 4, "batch": 32, "size": 128, "count": count}
    if numbered > 1:
        load["numbered"] = numbered
    java.call("load", answer_within_s=300, namesrv=namesrv, topic=topic, **load)


def _turn(name: str, system: Running, java: Driver, options: Options) -> Figures:
    row = ROWS[name]
    back_memory(system.directory, options.seconds)
    before = cpu_seconds(system.pid)
    place: Figures = {"namesrv": system.namesrv, "topic": name}
    if row.drain:
        group = f"drain-{next(_groups)}"
        count = _count(row, options)
        turn = java.call("drain", answer_within_s=200, group=group, **place, **row.draining(count))
        if not turn["complete"]:
            raise RuntimeError(f"{system.system}: {turn['messages']} of {count // row.one_in} messages came")
        turn |= {figure: turn[figure] * row.one_in for figure in ("messages", "rate")}
        beside = 0
    else:
        if row.topics:
            place |= {"topic": "Many", "topics": row.topics}
        loads = [java.start("load", seconds=options.seconds, **place, **row.load)]
        if row.beside:
            place["topic"] += "-beside"
            loads.append(java.start("load", seconds=options.seconds, **place, **row.beside))
        turn, *others = [load.result(options.seconds + 120) for load in loads]
        beside = sum(other["messages"] for other in others)
    if turn.get("errors"):
        raise RuntimeError(f"{system.system}: {turn['errors']} requests failed, first: {turn['firstError']}")
    turn["cpu_us"] = (cpu_seconds(system.pid) - before) * 1e6 / (turn["messages"] + beside)
    return turn


def _line(row: Row, apache: list[Figures], ours: list[Figures]) -> list[str]:
    def pair(figure: str, form: str) -> str:
        return " / ".join(
            format(median(turns, figure), form) if figure in turns[0] else "-" for turns in (apache, ours)
        )

    rates = (f"{median(turns, 'rate'):,.0f}" for turns in (apache, ours))
    latencies = (pair(figure, ".2f") for figure in ("p50", "p99", "p999"))
    return [row.title, *rates, ratio(apache, ours, "rate"), *latencies, pair("cpu_us", ".1f")]


def _facts(options: Options) -> str:
    processor = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :")
    machine = f"{len(os.sched_getaffinity(0))} CPUs ({processor}), {platform.system()} {platform.release()}"
    return (
        f"{machine}, Python {sys.version.split()[0]}; {options.turns} turns of {options.seconds} s each.\n\n"
    )


def _tables(found: list[list[str]], starts: dict[str, list[Figures]], memory: dict[str, Any]) -> str:
    heads = "Load, Apache msg/s, ours, ratio (range), p50 ms, p99 ms, p99.9 ms, broker CPU µs/msg"
    servers = [["both listen after", *(f"{median(starts[name], 'seconds'):.2f} s" for name in SYSTEMS)]]
    servers += [
        [f"broker's {kind} memory, {when}", *(f"{of[name][kind] / MIB:,.0f} MiB" for name in SYSTEMS)]
        for when, of in memory.items()
        for kind in ("anonymous", "resident")
    ]
    return (
        table(heads.split(", "), found)
        + "\nLatencies and CPU are Apache / ours, medians of the turns.\n\n"
        + table(["Servers", "Apache", "ours"], servers)
    )

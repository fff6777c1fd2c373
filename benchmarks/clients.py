"""Our client beside the C++ core of PyPI's `rocketmq` and Apache's Java client, on one broker of ours."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.interop.driver import Driver

from benchmarks.apache import CLIENT, LOAD_JVM, fill
from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.servers import COMET, Running
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table

CPP = "rocketmq==0.4.4"
SYNC, ASYNC, DRAIN = (
    {"work": work, "size": size} for work, size in (("sync", 1024), ("async", 1024), ("drain", 128))
)
ROWS: dict[str, tuple[str, Figures]] = {
    "sync-16": ("synchronous sends of 1 KiB, 16 callers", SYNC | {"callers": 16}),
    "async-256": ("asynchronous sends of 1 KiB, 256 in flight", ASYNC | {"callers": 256}),
    "drain-1": ("backlog of 128 B, a message a listener call", DRAIN | {"batch": 1}),
    "drain-32": ("backlog of 128 B, up to 32 messages a call", DRAIN | {"batch": 32}),
}
JAVA, OURS, BLOCKING, NATIVE = "Java 4.9.8", "ours", "ours, from threads", "C++"
PROGRAMS = {OURS: "ours", BLOCKING: "blocking", NATIVE: "cpp"}
BACKLOG = 200_000
_groups = itertools.count(1)


def run(options: Options) -> str:
    """Return rates of each client, the ratios of ours to the other two, and the cost of a message."""
    native = install(options.data / "native")
    java = Driver(CLIENT, options.data / "java", jvm=LOAD_JVM)
    system = Running(COMET, options.data / "broker")
    lines, costs = [], []
    try:
        for name, (title, given) in ROWS.items():
            if options.rows and name not in options.rows:
                continue
            given = {**given, "topic": name, "namesrv": system.namesrv, "seconds": options.seconds}
            if given["work"] == "drain":
                given["count"] = 20_000 if options.short else BACKLOG
                fill(java, system.namesrv, name, given["count"], numbered=1)
            clients = [JAVA, NATIVE, OURS, *([BLOCKING] if given["work"] == "sync" else [])]
            turn = partial(_turn, system=system, java=java, native=native, given=given)
            found = in_turns(title, clients, options.turns, lambda client, _, turn=turn: turn(client))
            rates = (f"{median(found[each], 'rate'):,.0f}" if each in found else "-" for each in clients_of())
            ratios = (ratio(found[other], found[OURS], "rate") for other in (NATIVE, JAVA))
            lines.append([title, *rates, *ratios])
            costs.append([title, *(_cost(found[each]) if each in found else "-" for each in clients_of())])
    finally:
        system.stop()
        java.stop()
    rates_table = table([CPP, *clients_of(), "ours by C++", "ours by Java"], lines)
    return f"{rates_table}\n{table(['CPU µs a message: client + broker', *clients_of()], costs)}"


def _cost(turns: list[Figures]) -> str:
    return f"{median(turns, 'cpu_us'):.1f} + {median(turns, 'broker_us'):.1f}"


def clients_of() -> list[str]:
    return [JAVA, NATIVE, OURS, BLOCKING]


def install(place: Path) -> Path:
    """Install the C++ client in a separate directory, because its package is for old Pythons."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), CPP]
    subprocess.run(command, check=True)
    return place


def _turn(client: str, *, system: Running, java: Driver, native: Path, given: dict[str, Any]) -> Figures:
    back_memory(system.directory, given["seconds"])
    broker_s, java_s = cpu_seconds(system.pid), cpu_seconds(java.process.popen.pid)
    turn = _run(client, java=java, native=native, given=given)
    turn["broker_us"] = (cpu_seconds(system.pid) - broker_s) * 1e6 / turn["messages"]
    turn.setdefault("cpu_us", (cpu_seconds(java.process.popen.pid) - java_s) * 1e6 / turn["messages"])
    return turn


def _run(client: str, *, java: Driver, native: Path, given: dict[str, Any]) -> Figures:
    given = {**given, "group": f"clients-{next(_groups)}"}
    if client != JAVA:
        words = [sys.executable, "-m", "benchmarks.client_program", PROGRAMS[client], given["work"]]
        path = os.pathsep.join([str(native), *sys.path])  # the tests install another package of this name
        done = subprocess.run(
            [*words, json.dumps(given)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        if not done.stdout.startswith("{"):
            raise RuntimeError(f"{client}: {done.stderr or done.stdout}")
        return dict(json.loads(done.stdout.splitlines()[0]))
    place = {key: given[key] for key in ("namesrv", "topic")}
    if given["work"] == "drain":
        drain = {"group": given["group"], "count": given["count"], "consumeBatch": given["batch"]}
        return java.call("drain", answer_within_s=200, **place, **drain)
    load = {"mode": given["work"], "size": given["size"], "seconds": given["seconds"]}
    callers = given["callers"]
    load |= {"threads": callers} if given["work"] == "sync" else {"threads": 1, "inflight": callers}
    return java.call("load", answer_within_s=given["seconds"] + 120, **place, **load)

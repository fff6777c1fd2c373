"""The table, for people (markdown) and for programs (JSON)."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.interop.jars import java_tool

from benchmarks.brokers import APACHE, APACHE_JVM, COMET, SYSTEMS
from benchmarks.measure import Result

MIB = 1 << 20


def markdown(
    results: list[Result],
    starts: dict[str, list[float]],
    memory: dict[str, dict[str, Any]],
    facts: dict[str, Any],
) -> str:
    lines = [
        f"{facts['cpus']} CPUs ({facts['processor']}), {facts['system']}, Python {facts['python']}, "
        f"{facts['java']}; "
        f"{facts['turns']} turns of {facts['seconds']} s each after one that was dropped; {facts['date']}.",
        "",
        "| Load | Apache msg/s | ours | ratio (range) | p50 ms | p99 ms | p99.9 ms | broker CPU µs/msg |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_line(each) for each in results]
    lines += [
        "",
        "Latencies and CPU are Apache / ours, medians of the turns.",
        "",
        "| Servers | Apache | ours |",
        "| --- | ---: | ---: |",
    ]
    if starts:
        apache, ours = (statistics.median(starts[name]) for name in SYSTEMS)
        lines.append(f"| both listen after | {apache:.2f} s | {ours:.2f} s |")
    for when in ("idle", "after load"):
        for kind in ("anonymous", "resident"):
            if all(when in memory.get(name, {}) for name in SYSTEMS):
                cells = [f"{memory[name][when][kind] / MIB:,.0f} MiB" for name in SYSTEMS]
                lines.append(f"| broker's {kind} memory, {when} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _line(result: Result) -> str:
    ratios = result.ratios("rate")
    cells = [
        result.row.title,
        f"{result.median(APACHE, 'rate'):,.0f}",
        f"{result.median(COMET, 'rate'):,.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        *(_pair(result, figure, "{:.2f}") for figure in ("p50", "p99", "p999")),
        _pair(result, "cpu_us", "{:.1f}"),
    ]
    return "| " + " | ".join(cells) + " |"


def _pair(result: Result, figure: str, form: str) -> str:
    values = [result.median(name, figure) for name in SYSTEMS]
    return " / ".join("-" if value is None else form.format(value) for value in values)


def machine(turns: int, seconds: int) -> dict[str, Any]:
    """What a reader must know of the machine and the run to judge the figures."""
    version = subprocess.run(
        [java_tool("java"), "-version"], capture_output=True, text=True, check=True
    ).stderr
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": model[0] if model else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "java": "Java " + version.split('"')[1],
        "apache_jvm": APACHE_JVM,
        "turns": turns,
        "seconds": seconds,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write(
    directory: Path,
    results: list[Result],
    starts: dict[str, list[float]],
    memory: dict[str, dict[str, Any]],
    facts: dict[str, Any],
) -> str:
    """Write results.md and results.json; returns the markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(results, starts, memory, facts)
    (directory / "results.md").write_text(text)
    data = {
        "facts": facts,
        "rows": [
            {"name": each.row.name, "title": each.row.title, "turns": each.turns, "ratio": each.ratio("rate")}
            for each in results
        ],
        "starts": starts,
        "memory": memory,
    }
    (directory / "results.json").write_text(json.dumps(data, indent=1))
    return text

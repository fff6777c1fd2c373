"""Starts of one broker on stores of 1, 4 and 16 GiB, after a clean stop and after kill -9 under load."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.brokers import SETTINGS
from benchmarks.scale_load import Load
from benchmarks.scale_run import begin_load, drop_cached, name_server, say, start_timed, write_topics

SIZES_GIB = (1, 4, 16)
TOPIC = "Scale"
LIVE = "Live"
QUEUES = 8


def fill(root: Path, **wanted: Any) -> None:
    """A store made by `scale_fill`, unless it is there."""
    if not (root / "commitlog").is_dir():
        say(f"filling {root}")
        write_topics(root, [*wanted["topics"], LIVE], QUEUES)
        arguments = {"root": str(root), "settings": SETTINGS, "queues": QUEUES, **wanted}
        subprocess.run(
            [sys.executable, "-m", "benchmarks.scale_fill", json.dumps(arguments)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip


def run(data: Path, turns: int, seconds: float) -> dict[str, Any]:
    """Seconds until the broker listens, and its CPU seconds, by GiB and kind of start."""
    found: dict[str, Any] = {}
    for size in SIZES_GIB:
        fill(data / f"start-{size}" / "store", topics=[TOPIC], size=1024, until_bytes=size << 30)
    with name_server(data / "namesrv") as names:
        for number in range(turns + 1):
            for size in SIZES_GIB:
                for kind, figures in _round(data / f"start-{size}", names, seconds).items():
                    say(f"turn {number}, {size} GiB, {kind}: {figures[0]:.2f} s, {figures[1]:.2f} s of CPU")
                    if number:
                        found.setdefault(kind, {}).setdefault(str(size), []).append(figures)
    return found


def _round(directory: Path, names: str, seconds: float) -> dict[str, list[float]]:
    """Clean start, load, kill -9 in the middle of it, start, kill, start without the page cache, stop."""
    found: dict[str, list[float]] = {}
    broker, *found["clean"] = start_timed(directory, names, "start")
    for kind in ("killed under load", "killed under load, cold"):
        load = begin_load(Load("send", broker.port, [TOPIC], QUEUES, seconds=seconds + 60), quiet=True)
        try:
            time.sleep(seconds)
            if load.poll() is not None:
                raise RuntimeError("the load did not last, see above")
            broker.kill()
        finally:
            load.kill()
            load.communicate()
        if kind.endswith("cold"):
            drop_cached(directory / "store")
        broker, *found[kind] = start_timed(directory, names, "start")
    broker.stop()
    return found


def table(found: dict[str, Any]) -> str:
    lines = ["| | " + " | ".join(f"{size} GiB" for size in SIZES_GIB) + " |", "| --- " + "| ---: " * 3 + "|"]
    for kind, by_size in found.items():
        cells = []
        for size in SIZES_GIB:
            seconds, cpu = (statistics.median(column) for column in zip(*by_size[str(size)], strict=True))
            worst = max(figure[0] for figure in by_size[str(size)])
            cells.append(f"{seconds:.2f} s (at most {worst:.2f}; CPU {cpu:.2f})")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"

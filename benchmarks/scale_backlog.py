"""Live sends alone, and beside consumers that drain a cold backlog of 10 million small messages."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import TICKS_PER_SECOND, cpu_seconds
from benchmarks.scale_load import Load
from benchmarks.scale_run import (
    begin_load,
    broker,
    cached_share,
    device_reads,
    drop_cached,
    end_load,
    name_server,
    say,
)
from benchmarks.scale_start import LIVE, QUEUES, fill
from cometmq.store.message_store import physical_memory

MESSAGES = 10_000_000
SIZE = 128  # bytes of a body, of the backlog and of the live sends: larger ones would measure the device
COLDEST = 0.02
IN_MEMORY = 0.4  # of the machine's memory; what lies farther back gets smaller answers (RocketMQ's rule)
NOTHING = {"rate": 0.0, "messages": 0, "generator_cpu_us": 0.0}


def run(data: Path, turns: int, seconds: float) -> dict[str, Any]:
    """Turns of `seconds`, alternately; before each cold one the page cache is dropped, which is checked."""
    directory = data / "backlog"
    fill(directory / "store", topics=["Backlog"], size=SIZE, until_messages=MESSAGES)
    found: dict[str, list[dict[str, Any]]] = {"alone": [], "beside cold reads": []}
    with name_server(data / "namesrv") as names:
        ours = broker(directory, names, "backlog")
        try:
            log = sorted((directory / "store" / "commitlog").iterdir())
            if sum(path.stat().st_size for path in log) > IN_MEMORY * physical_memory():
                raise RuntimeError(f"live sends have made {directory} too long: pulls would get 8 messages")
            old = log[:2]
            for number in range(turns + 1):
                for kind in found:
                    turn = _turn(directory, ours.port, ours.pid, kind != "alone", seconds, old)
                    say(f"turn {number}, {kind}: " + ", ".join(f"{k} {v:,.2f}" for k, v in turn.items()))
                    if number:
                        found[kind].append(turn)
        finally:
            ours.stop()
    return found


def _turn(
    directory: Path, port: int, pid: int, cold: bool, seconds: float, old: list[Path]
) -> dict[str, float]:
    live = Load("send", port, [LIVE], QUEUES, size=SIZE, seconds=seconds)
    drop_cached(directory / "store")
    cached = cached_share(old)
    if cached > COLDEST:
        raise RuntimeError(f"{cached:.0%} of the backlog is still in the page cache")
    before, read = cpu_seconds(pid), device_reads(pid)
    began, busy = time.perf_counter(), busy_seconds()
    pulls = None
    if cold:
        pulls = begin_load(Load("pull", port, ["Backlog"], QUEUES, seconds=seconds, window=8))
    sent = end_load(begin_load(live))
    pulled = end_load(pulls) if pulls is not None else NOTHING
    used = cpu_seconds(pid) - before
    ours = used + sum(load["messages"] * load["generator_cpu_us"] / 1e6 for load in (sent, pulled))
    return {
        "sends": sent["rate"],
        "pulled": pulled["rate"],
        "device_mib": (device_reads(pid) - read) / (1 << 20),
        "cpu_us": used * 1e6 / sent["messages"],
        "other_cores": (busy_seconds() - busy - ours) / (time.perf_counter() - began),
    }


def busy_seconds() -> float:
    """CPU time that the whole machine has used, waits for devices left out."""
    user, nice, system, _idle, _wait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND


def table(found: dict[str, Any]) -> str:
    """Rates, and what does not hang so much on other work: the part of the broker's CPU that sends keep."""
    alone, beside = found["alone"], found["beside cold reads"]
    ratios = [b["sends"] / a["sends"] for a, b in zip(alone, beside, strict=True)]

    def median(turns: list[dict[str, float]], figure: str) -> float:
        return statistics.median(turn[figure] for turn in turns)

    parts = [a["cpu_us"] / b["cpu_us"] for a, b in zip(alone, beside, strict=True)]
    return (
        "| other work | live sends alone | beside cold reads | ratio (range) "
        "| part of the broker's CPU (range) | pulled meanwhile | read from the device |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        f"| {median(alone + beside, 'other_cores'):.1f} cores | {median(alone, 'sends'):,.0f}/s "
        f"| {median(beside, 'sends'):,.0f}/s "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {statistics.median(parts):.2f} ({min(parts):.2f}-{max(parts):.2f}) "
        f"| {median(beside, 'pulled'):,.0f}/s | {median(beside, 'device_mib'):,.0f} MiB |\n"
    )

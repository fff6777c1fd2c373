"""Live sends alone, and beside consumers that drain a cold backlog of 10 million small messages."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.load import Load, begin_load, end_load
from benchmarks.processes import TICKS_PER_SECOND, cached_share, cpu_seconds, device_reads, drop_cached
from benchmarks.servers import COMET, Running
from benchmarks.starts import fill
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table
from cometmq.store.reading.queue_reader import physical_memory

MESSAGES = 10_000_000
QUEUES = 8
SIZE = 128  # bytes per body of backlog and live sends: with larger ones the device would be the limit
COLDEST = 0.02
IN_MEMORY = 0.4  # share of the machine's memory; older messages get smaller responses (RocketMQ's rule)
KINDS = ("alone", "beside cold reads")
NOTHING = {"rate": 0.0, "messages": 0, "generator_cpu_us": 0.0}


def run(options: Options) -> str:
    """Return rates, and the sends' share of the broker's CPU, which depends less on other processes."""
    directory = options.data / "backlog"
    messages = 100_000 if options.short else MESSAGES
    fill(directory / "store", ["Backlog"], QUEUES, also="Live", size=SIZE, until_messages=messages)
    system = Running(COMET, directory)
    try:
        log = sorted((directory / "store" / "commitlog").iterdir())
        if sum(path.stat().st_size for path in log) > IN_MEMORY * physical_memory():
            raise RuntimeError(f"live sends have made {directory} too long: pulls would get 8 messages")
        old = [] if options.short else log[:2]  # a short log is still being written
        found = in_turns(
            "backlog", KINDS, options.turns, lambda kind, _: _turn(system, kind, options.seconds, old)
        )
    finally:
        system.stop()
    alone, beside = found.values()
    heads = (
        "other work; live sends alone; beside cold reads; ratio (range); part of the broker's CPU (range); "
        "pulled meanwhile; read from the device"
    )
    line = [
        f"{median(alone + beside, 'other_cores'):.1f} cores",
        f"{median(alone, 'sends'):,.0f}/s",
        f"{median(beside, 'sends'):,.0f}/s",
        ratio(alone, beside, "sends"),
        ratio(beside, alone, "cpu_us"),
        f"{median(beside, 'pulled'):,.0f}/s",
        f"{median(beside, 'device_mib'):,.0f} MiB",
    ]
    return table(heads.split("; "), [line])


def _turn(system: Running, kind: str, seconds: float, old: list[Path]) -> Figures:
    """Run a turn with an empty page cache, and check that the cache is empty."""
    port, pid = system.broker.port, system.pid
    live = Load("send", port, ["Live"], QUEUES, size=SIZE, seconds=seconds)
    drop_cached(system.directory / "store")
    cached = cached_share(old) if old else 0.0
    if cached > COLDEST:
        raise RuntimeError(f"{cached:.0%} of the backlog is still in the page cache")
    before, read = cpu_seconds(pid), device_reads(pid)
    began, busy = time.perf_counter(), busy_seconds()
    pulls = None
    if kind != "alone":
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
    """Return the CPU time used by the whole machine, without waits for devices."""
    user, nice, system, _idle, _wait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND

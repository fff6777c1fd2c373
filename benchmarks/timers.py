"""Sends to a broker of ours with 1,000,000 waiting timer messages, beside one without."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.load import Load, run_load
from benchmarks.processes import back_memory, memory_bytes
from benchmarks.servers import COMET, FEW, Running, write_topics
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table

MIB = 1 << 20
NAMES = ("none wait", "a million wait")
ROWS = {
    "send, 1 KiB, 64 in flight": False,
    "send with a delivery time, 1 KiB, 64 in flight": True,
}


def run(options: Options) -> str:
    """Return rates and CPU of both, and memory before and after the timer messages are stored."""
    topics, queues = FEW
    brokers: dict[str, Running] = {}
    found: dict[str, dict[str, list[Figures]]] = {}

    def load(name: str, **more: Any) -> Figures:
        given = {"mode": "send", "topics": topics, "queues": queues, **more}
        return run_load(Load(port=brokers[name].broker.port, **given), brokers[name].pid)

    def send(timed: bool, name: str, _: int) -> Figures:
        back_memory(brokers[name].directory, options.seconds)
        return load(name, seconds=options.seconds, timed=timed)

    def memory() -> list[float]:
        return [memory_bytes(each.pid)["anonymous"] / MIB for each in brokers.values()]

    try:
        for name in NAMES:
            write_topics(options.data / name / "store", topics, queues)
            brokers[name] = Running(COMET, options.data / name)
            load(name, seconds=1)  # the memory that any load needs is not part of the difference
        before = memory()
        load(NAMES[1], size=128, window=256, timed=True, count=20_000 if options.short else 1_000_000)
        after = memory()
        for title, timed in ROWS.items():
            found[title] = in_turns(title, NAMES, options.turns, partial(send, timed))
    finally:
        for each in brokers.values():
            each.stop()
    lines = []
    for title, turns in found.items():
        none, many = turns.values()
        rates = (f"{median(each, 'rate'):,.0f}" for each in (none, many))
        cpu = f"{median(none, 'cpu_us'):.2f} / {median(many, 'cpu_us'):.2f}"
        lines.append([title, *rates, ratio(none, many, "rate"), cpu, ratio(many, none, "cpu_us")])
    for title, sizes in (("before they are sent", before), ("after that", after)):
        lines.append([f"anonymous memory {title}", *(f"{size:.0f} MiB" for size in sizes), "", "", ""])
    return table(["", *NAMES, "ratio (range)", "broker CPU µs/msg", "ratio"], lines)

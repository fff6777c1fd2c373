"""10,000 queues of 1,000 topics on one broker of ours beside 8 queues of one topic on another."""

from __future__ import annotations

from typing import Any

from benchmarks.load import Load, run_load
from benchmarks.processes import back_memory, memory_bytes
from benchmarks.servers import COMET, FEW, MANY, Running, write_topics
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table

MIB = 1 << 20
BACKLOG = 640_000
QUEUES = {"8 queues": FEW, "10,000 queues": MANY}


def run(options: Options) -> str:
    """Return rates and CPU of pulls (small messages, sent singly and in batches) and of sends; memory."""
    brokers: dict[str, Running] = {}
    found: dict[str, dict[str, list[Figures]]] = {}

    def load(name: str, **more: Any) -> Figures:
        topics, queues = QUEUES[name]
        given = {"mode": "send", "topics": topics, "queues": queues, **more}
        return run_load(Load(port=brokers[name].broker.port, **given), brokers[name].pid)

    def pull(name: str, number: int) -> Figures:
        topics, queues = QUEUES[name]
        begin = len(found) * BACKLOG // (len(topics) * queues)  # begins after the backlog of the previous row
        return load(name, mode="pull", window=8, group=f"group-{len(found)}-{number}", begin=begin)

    def send(name: str, _: int) -> Figures:
        back_memory(brokers[name].directory, options.seconds)
        return load(name, seconds=options.seconds)

    try:
        for name, (topics, queues) in QUEUES.items():
            write_topics(options.data / name / "store", topics, queues)
            brokers[name] = Running(COMET, options.data / name)
        for title, how in (
            ("pull, sent one by one", {"window": 256}),
            ("pull, sent in batches of 32", {"batch": 32}),
        ):
            for name in QUEUES:
                load(name, size=128, count=BACKLOG, **how)
            found[title] = in_turns(title, QUEUES, options.turns, pull)
        title = "send, 1 KiB, 64 in flight"
        found[title] = in_turns(title, QUEUES, options.turns, send)
        memory = [f"{memory_bytes(each.pid)['anonymous'] / MIB:.0f} MiB" for each in brokers.values()]
    finally:
        for each in brokers.values():
            each.stop()
    lines = []
    for title, turns in found.items():
        few, many = turns.values()
        rates = (f"{median(each, 'rate'):,.0f}" for each in (few, many))
        cpu = f"{median(few, 'cpu_us'):.2f} / {median(many, 'cpu_us'):.2f}"
        lines.append([title, *rates, ratio(few, many, "rate"), cpu, ratio(many, few, "cpu_us")])
    lines.append(["anonymous memory after it", *memory, "", "", ""])
    return table(["", *QUEUES, "ratio (range)", "broker CPU µs/msg", "ratio"], lines)

"""The cost of metrics for sends: a broker of ours that Prometheus reads, beside one without metrics.

The event loop counts nothing in addition for metrics. Their cost is that of the reads, which grows with
topics and queues.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.ports import free_port

from benchmarks.load import Load, run_load
from benchmarks.processes import back_memory
from benchmarks.servers import COMET, FEW, MANY, Running, write_topics
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table

WITHOUT, WITH = NAMES = ("without metrics", "with metrics")
# Name, topics with their queues, seconds between reads; the second interval is Prometheus' default.
ROWS = (("8 queues, a look a second", FEW, 1.0), ("10,000 queues, a look in 15 s", MANY, 15.0))


@contextmanager
def looked_at(port: int, every_s: float) -> Iterator[None]:
    """Read the metrics immediately and then every `every_s` seconds until the block ends."""
    done = threading.Event()

    def look() -> None:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                answer.read()
            if done.wait(every_s):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run(options: Options) -> str:
    """Return rate and CPU of sends with 1 KiB bodies and 64 in flight."""
    heads = ["", *NAMES, "ratio (range)", "broker CPU µs/msg", "ratio"]
    return table(heads, [_row(options, number, *row) for number, row in enumerate(ROWS)])


def _row(
    options: Options, number: int, title: str, place: tuple[list[str], int], every_s: float
) -> list[str]:
    topics, queues = place
    seconds = options.seconds if options.short else max(options.seconds, int(every_s))
    port = free_port()
    prometheus = {"metricsExporterType": "PROM", "metricsPromExporterPort": str(port)}
    brokers: dict[str, Running] = {}

    def send(name: str, _: int) -> Figures:
        broker = brokers[name]
        load = Load("send", broker.broker.port, topics, queues, seconds=seconds)
        back_memory(broker.directory, seconds)
        if name == WITHOUT:
            return run_load(load, broker.pid)
        with looked_at(port, every_s):
            return run_load(load, broker.pid)

    try:
        for name in NAMES:
            directory = options.data / f"{number}-{name.replace(' ', '-')}"
            write_topics(directory / "store", topics, queues)
            more = prometheus if name == WITH else {}
            brokers[name] = Running(COMET, directory, settings=more)
        without, with_ = in_turns(title, NAMES, options.turns, send).values()
    finally:
        for each in brokers.values():
            each.stop()
    rates = (f"{median(each, 'rate'):,.0f}" for each in (without, with_))
    cpu = f"{median(without, 'cpu_us'):.2f} / {median(with_, 'cpu_us'):.2f}"
    return [title, *rates, ratio(without, with_, "rate"), cpu, ratio(with_, without, "cpu_us")]

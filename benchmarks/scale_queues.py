"""10,000 queues of 1,000 topics on one broker beside 8 queues of one topic on another, turn by turn."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from tests.interop.comet import CometBroker

from benchmarks.measure import WRITTEN_A_SECOND
from benchmarks.processes import back_memory, memory_bytes
from benchmarks.scale_load import Load
from benchmarks.scale_run import broker, name_server, run_load, say, start_timed, wait_quiet, write_topics

MIB = 1 << 20
BACKLOG = 640_000
ROUNDS = {"few": BACKLOG // 8, "many": BACKLOG // 10_000}  # messages in each queue after one backlog
SHAPES = {"few": (["Scale-few"], 8), "many": ([f"Scale-{number:04d}" for number in range(1000)], 10)}
Turns = dict[str, list[dict[str, Any]]]


def run(data: Path, turns: int, seconds: float) -> dict[str, Any]:
    """All figures; the first turn of each row is dropped."""
    found: dict[str, Any] = {}
    with name_server(data / "namesrv") as names:
        brokers: dict[str, CometBroker] = {}
        try:
            for which, (topics, queues) in SHAPES.items():
                write_topics(data / which / "store", topics, queues)
                brokers[which] = broker(data / which, names, which)
            for which in SHAPES:  # files are made here, not in a turn
                run_load(_load(which, brokers, size=128, count=BACKLOG, window=256), brokers[which].pid)
            found["pull, sent one by one"] = _pulls(brokers, turns, 0)
            for which in SHAPES:
                fill = _load(which, brokers, size=128, count=BACKLOG, batch=32)
                run_load(fill, brokers[which].pid)
            found["pull, sent in batches of 32"] = _pulls(brokers, turns, 1)
            found["send, 1 KiB, 64 in flight"] = _turns(
                brokers,
                turns,
                lambda which, _: _load(which, brokers, seconds=seconds),
                written=int(seconds * WRITTEN_A_SECOND),
            )
            found["memory"] = {which: memory_bytes(each.pid) for which, each in brokers.items()}
            found["starts"] = _starts(data, names, brokers, turns)
        finally:
            for each in brokers.values():
                each.kill()
    return found


def _load(which: str, brokers: dict[str, CometBroker], **more: Any) -> Load:
    topics, queues = SHAPES[which]
    return Load(**{"mode": "send", "port": brokers[which].port, "topics": topics, "queues": queues, **more})


def _pulls(brokers: dict[str, CometBroker], turns: int, backlog: int) -> Turns:
    def pull(which: str, number: int) -> Load:
        load = _load(which, brokers, mode="pull", window=8, group=f"group-{backlog}-{number}")
        return dataclasses.replace(load, begin=backlog * ROUNDS[which])

    return _turns(brokers, turns, pull)


def _turns(brokers: dict[str, CometBroker], turns: int, load_of: Any, written: int = 0) -> Turns:
    """written: about so many bytes of page cache does a turn fill."""
    found: Turns = {which: [] for which in brokers}
    for number in range(turns + 1):
        for which, each in brokers.items():
            if written:
                back_memory(each.directory, written)
            turn = run_load(load_of(which, number), each.pid)
            if turn.get("complete") is False:
                raise RuntimeError(f"{which}: only {turn['messages']} messages were pulled")
            say(f"turn {number}, {which}: {turn['rate']:,.0f}/s, {turn['cpu_us']:.2f} µs")
            if number:
                found[which].append(turn)
    return found


def _starts(data: Path, names: str, brokers: dict[str, CometBroker], turns: int) -> dict[str, Any]:
    """Clean and unclean starts with 10,000 queues: seconds until the broker listens, records in the tail."""
    clean, unclean = [], []
    for number in range(turns + 1):
        brokers["many"].stop()
        brokers["many"], *figures = start_timed(data / "many", names, "many")
        say(f"clean start {number}: {figures[0]:.2f} s, {figures[1]:.2f} s of CPU")
        clean.append(figures)
        run_load(_load("many", brokers, seconds=5), brokers["many"].pid)
        last = _load("many", brokers, count=100_000)
        run_load(dataclasses.replace(last, window=64), brokers["many"].pid)
        brokers["many"].kill()
        brokers["many"], *figures = start_timed(data / "many", names, "many")
        say(f"unclean start {number}: {figures[0]:.2f} s, {figures[1]:.2f} s of CPU")
        unclean.append(figures)
        wait_quiet(brokers["many"].pid)
    return {"clean": clean[1:], "unclean": unclean[1:]}


def table(found: dict[str, Any]) -> str:
    lines = [
        "| | 8 queues | 10,000 queues | ratio (range) | broker CPU µs/msg | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for title, turns in found.items():
        if title in ("memory", "starts"):
            continue
        few, many = (statistics.median(turn["rate"] for turn in turns[which]) for which in SHAPES)
        pairs = list(zip(turns["few"], turns["many"], strict=True))
        rates = [b["rate"] / a["rate"] for a, b in pairs]
        costs = [a["cpu_us"] / b["cpu_us"] for a, b in pairs]
        cpu = [statistics.median(turn["cpu_us"] for turn in turns[which]) for which in SHAPES]
        lines.append(
            f"| {title} | {few:,.0f} | {many:,.0f} | {statistics.median(rates):.2f} "
            f"({min(rates):.2f}-{max(rates):.2f}) | {cpu[0]:.2f} / {cpu[1]:.2f} "
            f"| {statistics.median(costs):.2f} |"
        )
    memory = [f"{found['memory'][which]['anonymous'] / MIB:.0f} MiB" for which in SHAPES]
    lines.append(f"| anonymous memory after it | {memory[0]} | {memory[1]} | | | |")
    for kind, figures in found["starts"].items():
        seconds, cpu_s = (statistics.median(column) for column in zip(*figures, strict=True))
        worst = max(figure[0] for figure in figures)
        lines.append(
            f"| {kind} start until it listens | | {seconds:.2f} s (at most {worst:.2f}) | | {cpu_s:.2f} s | |"
        )
    return "\n".join(lines) + "\n"

"""A broker with 1,000,000 lite topics: its start, and its memory when idle.

It stands beside an empty broker, and beside one that has the same messages in an ordinary topic.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import memory_bytes
from benchmarks.turns import Figures, Options, in_turns, ratio, table
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.protocol.bodies import TopicConfig

TOPICS = 1_000_000
PARENT = "Sessions"
PER_TICK = 256
IDLE_S = 3
EMPTY, PLAIN, FULL = "empty", "ordinary topic", "lite topics"
FIGURES = {"seconds": "start", "cpu_ms": "CPU of the start", "anonymous": "memory", "resident": "resident"}


def settings_of(root: Path) -> dict[str, str]:
    local = {"brokerIP1": "127.0.0.1", "bindAddress": "127.0.0.1"}
    return {"listenPort": "0", **local, "namesrvAddr": "", "storePathRootDir": str(root)}


async def fill(root: Path, count: int, attributes: dict[str, str] | None) -> None:
    """Send messages to a topic. If its attributes make it a parent, send one to each of many lite topics."""
    broker = Broker(BrokerConfig.from_properties(settings_of(root)))
    await broker.start()
    parts = broker.parts
    parts.tables.topics.put(TopicConfig(PARENT, 4, 4, 6, attributes=attributes))
    await asyncio.sleep(0.1)  # The broker follows the topic from the next iteration of the event loop on
    for start in range(0, count, PER_TICK):
        for number in range(start, min(start + PER_TICK, count)):
            properties = b"__LITE_TOPIC\x01session-%d" % number
            if attributes:
                properties = parts.lite.sent_properties(PARENT, properties)
            parts.store.appender.append(
                PARENT, number & 3, b"hello", properties, born_timestamp_ms=1, born_host=bytes(8)
            )
        parts.writer.appended()
        await asyncio.sleep(0)
    await asyncio.sleep(1)
    assert parts.lite.queues.count == (count if attributes else 0), parts.lite.queues.count
    await broker.stop()


def run(options: Options) -> str:
    """Return the figures of both brokers, and the ratios."""
    count = 10_000 if options.short else TOPICS
    roots = {name: options.data / name.split()[0] for name in (EMPTY, PLAIN, FULL)}
    for name, attributes in ((PLAIN, None), (FULL, {"message.type": "LITE"})):
        if not roots[name].is_dir():
            asyncio.run(fill(roots[name], count, attributes))

    def measure(name: str, _turn: int) -> Figures:
        return _start(options.data / f"{roots[name].name}.conf", roots[name])

    found = in_turns("lite topics", roots, options.turns, measure)
    rows = [
        [title, *(ratio(found[base], found[FULL], key) for base in (EMPTY, PLAIN))]
        for key, title in FIGURES.items()
    ]
    return table([f"{count:,} lite topics", "to an empty broker", "to an ordinary topic"], rows)


def _start(path: Path, root: Path) -> Figures:
    path.write_text("".join(f"{key}={value}\n" for key, value in settings_of(root).items()))
    command = [sys.executable, "-m", "cometmq", "mqbroker", "-c", str(path)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert "success" in process.stdout.readline()
        figures: Figures = {"seconds": time.monotonic() - began, "cpu_ms": _cpu_ms(process.pid)}
        time.sleep(IDLE_S)
        return figures | memory_bytes(process.pid)
    finally:
        process.terminate()
        process.communicate()


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")

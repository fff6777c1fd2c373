"""Our producer with and without message traces, on our broker.

The client's CPU is that of this process, which only waits for its sends; the broker's is that of a separate
process.
"""

from __future__ import annotations

import asyncio
import time
from itertools import repeat, takewhile

from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.servers import COMET, Running
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table
from cometmq import ClientOptions, Message, Producer, TraceOptions

WAYS = {"without": None, "all traced": TraceOptions(), "one in ten": TraceOptions(sampling=0.1)}
BODY = bytes(1024)
IN_FLIGHT = 64


def run(options: Options) -> str:
    system = Running(COMET, options.data / "traces")
    try:
        found = in_turns(
            "sends", WAYS, options.turns, lambda name, _: asyncio.run(_turn(system, WAYS[name], options))
        )
    finally:
        system.stop()
    plain, *others = found.values()
    figures = ("rate", "client_us", "broker_us")
    lines = [["without", *(f"{median(plain, figure):,.1f}" for figure in figures)]]
    for name, turns in zip(list(WAYS)[1:], others, strict=True):
        lines.append([name, *(ratio(plain, turns, figure) for figure in figures)])
    return table(["1 KiB, 64 in flight", "sends/s", "client CPU µs", "broker CPU µs"], lines)


async def _turn(system: Running, trace: TraceOptions | None, options: Options) -> Figures:
    back_memory(system.directory, options.seconds)
    client_options = ClientOptions(trace=trace)
    async with Producer("bench", namesrv=system.namesrv, client_options=client_options) as producer:
        await producer.send(Message("Bench", BODY))
        client_s, broker_s = time.process_time(), cpu_seconds(system.pid)
        begun = time.monotonic()
        messages = takewhile(
            lambda _: time.monotonic() - begun < options.seconds, map(Message, repeat("Bench"), repeat(BODY))
        )
        sent = len(await producer.send_many(messages, concurrency=IN_FLIGHT))
        took = time.monotonic() - begun
        traces = producer.client.traces
    # The stop has sent the waiting traces: CPU includes their cost, and the rate is that of the sends alone.
    return {
        "rate": sent / took,
        "client_us": (time.process_time() - client_s) / sent * 1e6,
        "broker_us": (cpu_seconds(system.pid) - broker_s) / sent * 1e6,
        "dropped": traces.dropped if traces is not None else 0,
    }

"""kill -9 of a consumer between an effect and its key, and between the key and the acknowledgement.

The test runs with each kind of key store. The next process handles the message, and the number of effects is
as documented (docs/client.md, Idempotent listeners).
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from redis import Redis
from tests.databases import postgres_server, redis_server

from cometmq import Message, Producer
from cometmq.testing import local_broker

# Number of effects, by whether the first process is killed before or after it stores the key.
EFFECTS = {
    "before": {"memory": 2, "lease": 2, "sqlite": 1, "postgres": 1, "redis": 1},
    "after": {"memory": 2, "lease": 1, "sqlite": 1, "postgres": 1, "redis": 1},
}
KINDS = {"memory", "sqlite", "postgres", "redis", "lease"}
PATIENCE_S = 60
CHILD = Path(__file__).with_name("idempotency_child.py")


async def seen(child: asyncio.subprocess.Process, what: str) -> None:
    """Wait until a process has printed `what` for each kind."""
    missing = {f"{kind} {what}" for kind in KINDS}
    assert child.stdout is not None
    heard = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while missing:
                line = await child.stdout.readline()
                assert line, f"the process ended before {missing}"
                heard.append(line)
                missing.discard(line.decode().strip())
    except TimeoutError:
        pytest.fail(f"not within {PATIENCE_S} s: {missing}; heard: {heard}")


async def kill_around(stop: str, start: Callable[..., Awaitable[asyncio.subprocess.Process]]) -> None:
    """Kill a process where it stops, and let another one handle the message."""
    for where, what in ((stop, "stopped"), ("never", "handled")):
        child = await start(f"kill-{stop}", where)
        try:
            await seen(child, what)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


@pytest.mark.slow("kills member processes")
@pytest.mark.representative
async def test_a_kill_around_the_mark_repeats_only_what_the_marks_cannot_know(tmp_path: Path) -> None:
    quick = {"messageDelayLevel": " ".join(["1s"] * 18)}
    with (
        local_broker(tmp_path / "broker", quick) as broker,
        redis_server(tmp_path) as redis_port,
        postgres_server() as postgres,
        Redis(port=redis_port) as redis,
    ):

        async def start(topic: str, where: str) -> asyncio.subprocess.Process:
            place = tmp_path / topic
            place.mkdir(exist_ok=True)
            arguments = [broker.namesrv, topic, str(place), postgres, str(redis_port), where]
            return await asyncio.create_subprocess_exec(
                sys.executable, str(CHILD), *arguments, stdout=asyncio.subprocess.PIPE
            )

        async with Producer("p", namesrv=broker.namesrv) as producer:
            for stop in EFFECTS:
                await producer.send(Message(f"kill-{stop}", b"paid"))
        async with asyncio.TaskGroup() as both:
            for stop in EFFECTS:
                both.create_task(kill_around(stop, start))
        for stop, effects in EFFECTS.items():
            topic = f"kill-{stop}"
            counts = {kind: len((tmp_path / topic / kind).read_text()) for kind in ("memory", "lease")}
            counts["redis"] = redis.llen(f"effects-{topic}")
            with psycopg.connect(postgres) as database:
                counts["postgres"] = len(
                    database.execute("SELECT 1 FROM effects WHERE topic = %s", [topic]).fetchall()
                )
            with closing(sqlite3.connect(tmp_path / topic / "marks.db")) as file:
                counts["sqlite"] = len(file.execute("SELECT 1 FROM effects").fetchall())
            assert counts == effects, f"killed {stop} the mark"

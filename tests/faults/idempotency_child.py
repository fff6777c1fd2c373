"""A process that handles one message with each kind of key store, and may stop forever in between.

Arguments: name server, topic, a directory, a connection string of PostgreSQL, a port of Redis, and where each
handler stops: `before` its key, `after` it, or `never`. Prints "KIND stopped" or "KIND handled" for each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
from redis.asyncio import Redis

from cometmq import (
    ConsumeFromWhere,
    DatabaseMarks,
    MemoryMarks,
    MessageExt,
    PushConsumer,
    PushOptions,
    RedisMarks,
    SqliteMarks,
    idempotent,
)

OPTIONS = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
EFFECTS = "CREATE TABLE IF NOT EXISTS effects (topic VARCHAR(50))"


def say(kind: str, what: str) -> None:
    os.write(1, f"{kind} {what}\n".encode())  # one write: print() mixes lines of several threads


async def main(  # noqa: C901 - a handler and a listener for each kind
    namesrv: str, topic: str, place: str, postgres: str, redis_port: str, stop: str
) -> None:
    directory = Path(place)
    redis = Redis(port=int(redis_port))

    def in_file(kind: str) -> None:
        with (directory / kind).open("a") as file:
            file.write("x")

    def in_database(kind: str) -> Any:
        def handler(message: MessageExt, cursor: Any) -> None:
            cursor.execute(f"INSERT INTO effects VALUES ('{topic}')")
            stop_here(kind)

        return handler

    def stop_here(kind: str) -> None:
        if stop == "before":
            say(kind, "stopped")
            threading.Event().wait()

    async def in_redis(message: MessageExt, pipeline: Any) -> None:
        pipeline.rpush(f"effects-{topic}", "x")
        await stop_on_loop("redis")

    async def beside_redis(message: MessageExt) -> None:
        in_file("lease")
        await stop_on_loop("lease")

    async def stop_on_loop(kind: str) -> None:
        if stop == "before":
            say(kind, "stopped")
            await asyncio.Event().wait()

    def in_memory(message: MessageExt) -> None:
        in_file("memory")
        stop_here("memory")

    sqlite = SqliteMarks(str(directory / "marks.db"))
    sqlite.once("setup", "effects", lambda cursor: cursor.execute(EFFECTS))
    database = DatabaseMarks(lambda: psycopg.connect(postgres), paramstyle=psycopg.paramstyle)
    database.create_table()
    database.once("setup", "effects", lambda cursor: cursor.execute(EFFECTS))
    marks = RedisMarks(redis, lease_s=1.0)
    listeners: dict[str, Any] = {
        "memory": idempotent(f"{topic}-memory", in_memory, MemoryMarks()),
        "sqlite": idempotent(f"{topic}-sqlite", in_database("sqlite"), sqlite),
        "postgres": idempotent(f"{topic}-postgres", in_database("postgres"), database),
        "redis": idempotent(f"{topic}-redis", in_redis, marks),
        "lease": idempotent(f"{topic}-lease", beside_redis, marks),
    }

    def plain(kind: str, messages: list[MessageExt]) -> None:
        listeners[kind](messages)
        say(kind, "handled" if stop == "never" else "stopped")
        if stop == "after":
            threading.Event().wait()

    async def on_loop(kind: str, messages: list[MessageExt]) -> None:
        await listeners[kind](messages)
        say(kind, "handled" if stop == "never" else "stopped")
        if stop == "after":
            await asyncio.Event().wait()

    def consumer(kind: str) -> PushConsumer:
        async def listen(messages: list[MessageExt]) -> None:
            await on_loop(kind, messages)

        def listen_in_thread(messages: list[MessageExt]) -> None:
            plain(kind, messages)

        listener = listen if kind in ("redis", "lease") else listen_in_thread
        return PushConsumer(f"{topic}-{kind}", listener, topic, namesrv=namesrv, options=OPTIONS)

    await asyncio.gather(*(consumer(kind).start() for kind in listeners))
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))

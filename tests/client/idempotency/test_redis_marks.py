"""Idempotency keys in a real Redis: in one script with the effect, or as a lease for an effect elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from tests.kit.waiting import until

from cometmq import BeingHandled, ConfigError, RedisMarks
from cometmq.testing import Direction, Fault, FaultProxy, Kind

_scopes = map(str, itertools.count())


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
async def redis(request: pytest.FixtureRequest, redis_port: int) -> AsyncIterator[Redis]:
    async with Redis(port=redis_port, decode_responses=request.param) as client:
        yield client


async def test_effect_and_mark_are_done_together_and_once(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def effect(pipeline: Any) -> None:
        pipeline.incr(f"paid-{scope}")

    assert [await marks.once_async(scope, "a", effect) for _ in range(3)] == [True, False, False]
    assert int(await redis.get(f"paid-{scope}") or 0) == 1
    assert 6 * 86400 < await redis.ttl(f"cometmq:once:{len(scope)}:{scope}:a") <= 7 * 86400


async def test_scopes_do_not_meet_in_their_keys(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def nothing(_: object) -> None: ...

    assert await marks.once_async(f"s{scope}", "eu:7", nothing)
    assert await marks.once_async(f"s{scope}:eu", "7", nothing)


async def test_a_failure_leaves_neither_effect_nor_mark(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def fail(pipeline: Any) -> None:
        pipeline.incr(f"paid-{scope}")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await marks.once_async(scope, "a", fail)
    assert await redis.exists(f"paid-{scope}", f"cometmq:once:{len(scope)}:{scope}:a") == 0


async def test_a_command_that_fails_marks_nothing(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)
    await redis.set(f"paid-{scope}", "no list")

    async def fail(pipeline: Any) -> None:
        pipeline.rpush(f"paid-{scope}", "x")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await marks.once_async(scope, "a", fail)
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == 0


async def test_nothing_is_done_behind_a_command_that_fails(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)
    await redis.set(f"paid-{scope}", "no list")

    async def fail(pipeline: Any) -> None:
        pipeline.incr(f"before-{scope}")
        pipeline.rpush(f"paid-{scope}", "x")
        pipeline.incr(f"behind-{scope}")

    for _ in range(2):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await marks.once_async(scope, "a", fail)
    assert int(await redis.get(f"before-{scope}") or 0) == 2
    assert await redis.exists(f"behind-{scope}") == 0


async def test_a_kill_right_behind_a_command_that_failed_leaves_no_mark(
    redis: Redis, redis_port: int
) -> None:
    """Redis has run the commands, but the process is killed before it learns that one of them failed."""
    scope = next(_scopes)
    await redis.set(f"paid-{scope}", "no list")
    async with FaultProxy(f"127.0.0.1:{redis_port}") as proxy:
        port = int(proxy.addr.rpartition(":")[2])
        async with Redis(port=port, retry=Retry(NoBackoff(), 0)) as killed:

            async def fail(pipeline: Any) -> None:
                pipeline.incr(f"before-{scope}")
                pipeline.rpush(f"paid-{scope}", "x")
                proxy.script = lambda _: [Fault(kind=Kind.CUT)]
                proxy.inflict(Fault(kind=Kind.STALL, directions=(Direction.TO_CLIENT,), seconds=math.inf))

            call = asyncio.create_task(RedisMarks(killed).once_async(scope, "a", fail))
            await until(lambda: redis.exists(f"before-{scope}"))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
    assert "done" not in str(await redis.get(f"cometmq:once:{len(scope)}:{scope}:a"))


async def test_commands_of_any_form_are_done(redis: Redis) -> None:
    marks, scope = RedisMarks(redis, prefix="f:"), next(_scopes)

    async def effect(pipeline: Any) -> None:
        pipeline.xgroup_create(f"stream-{scope}", "readers", mkstream=True)
        pipeline.hset(f"hash-{scope}", mapping={"a b": b"\x00\xff", "n": 1.5})
        await pipeline.execute_command("SET", f"text-{scope}", "")

    assert await marks.once_async(scope, "a", effect)
    assert len(await redis.xinfo_groups(f"stream-{scope}")) == 1
    assert await redis.hlen(f"hash-{scope}") == 2
    assert await redis.exists(f"text-{scope}") == 1


async def test_a_script_within_the_script_is_refused_by_redis(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def script(pipeline: Any) -> None:
        pipeline.eval("return 1", 0)

    with pytest.raises(ResponseError, match="not allowed from script"):
        await marks.once_async(scope, "a", script)
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == 0


async def test_a_key_that_is_being_handled_is_refused(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)
    begun, end = asyncio.Event(), asyncio.Event()

    async def slow(_: object) -> None:
        begun.set()
        await end.wait()

    async with asyncio.timeout(60):
        task = asyncio.create_task(marks.once_async(scope, "a", slow))
        await begun.wait()
        with pytest.raises(BeingHandled):
            await marks.once_async(scope, "a", slow)
        end.set()
        assert await task
    assert await marks.once_async(scope, "a", slow) is False


@pytest.mark.parametrize("in_redis", [True, False])
async def test_a_call_that_outlasts_its_lease(redis: Redis, in_redis: bool) -> None:
    """Commands in its pipeline are not run, because another process may have run them in the meantime.

    An effect outside Redis has happened, so the key is stored.
    """
    marks, scope = RedisMarks(redis, lease_s=0.02), next(_scopes)

    async def slow(pipeline: Any) -> None:
        if in_redis:
            pipeline.incr(f"paid-{scope}")
        while await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a"):
            await asyncio.sleep(0.005)

    if in_redis:
        with pytest.raises(BeingHandled):
            await marks.once_async(scope, "a", slow)
    else:
        assert await marks.once_async(scope, "a", slow)
    assert await redis.exists(f"paid-{scope}") == 0
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == (0 if in_redis else 1)


async def test_a_lease_that_ran_out_is_not_taken_from_its_new_holder(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def overtaken(_: object) -> None:
        await redis.set(f"cometmq:once:{len(scope)}:{scope}:a", "doing:other")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await marks.once_async(scope, "a", overtaken)
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == 1


async def test_without_redis_the_message_is_not_handled() -> None:
    handled = []

    async def handler(_: object) -> None:
        handled.append(1)

    async with Redis(port=1, retry=Retry(NoBackoff(), 0)) as nowhere:
        with pytest.raises(RedisConnectionError):
            await RedisMarks(nowhere).once_async("g", "a", handler)
    assert handled == []


@pytest.mark.parametrize("setting", ["lease_s", "expiry_s"])
def test_times_below_a_millisecond_are_refused(setting: str) -> None:
    wrong: Any = {setting: 0.0001}
    with pytest.raises(ConfigError, match=setting):
        RedisMarks(Redis(), **wrong)
